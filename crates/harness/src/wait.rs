//! Waiting for a condition with a deadline, instead of sleeping for a fixed time.

use std::{
    fmt::Display,
    future::Future,
    panic::Location,
    time::{Duration, Instant},
};

/// Pause after the first probe. Most conditions are met soon.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// The longest pause between two probes. A probe may be a request to a busy process.
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// Calls `probe` until it returns `Some`.
///
/// # Panics
/// After `deadline`, with the condition, the caller and the number of probes.
#[track_caller]
pub fn eventually<T, F, Fut>(deadline: Duration, what: impl Display, mut probe: F) -> impl Future<Output = T>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Option<T>>,
{
    eventually_ok(deadline, what, move || {
        let result = probe();
        async move { result.await.ok_or("not yet") }
    })
}

/// Like [`eventually`], for a probe that says what is still missing: its last error is in the failure message.
///
/// # Panics
/// After `deadline`.
#[track_caller]
pub fn eventually_ok<T, E, F, Fut>(deadline: Duration, what: impl Display, mut probe: F) -> impl Future<Output = T>
where
    E: Display,
    F: FnMut() -> Fut,
    Fut: Future<Output = Result<T, E>>,
{
    let caller = Location::caller();
    async move {
        let start = Instant::now();
        let mut last = String::from("no probe finished");
        let mut pause = FIRST_PAUSE;
        for probes in 1_u32.. {
            let left = deadline.saturating_sub(start.elapsed());
            match tokio::time::timeout(left, probe()).await {
                Ok(Ok(found)) => return found,
                Ok(Err(missing)) => last = missing.to_string(),
                Err(_) => {}
            }
            if start.elapsed() + pause >= deadline {
                panic!(
                    "waited {deadline:?} for: {what}\n  asked at {caller}\n  probes: {probes}, the last one: {last}"
                );
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 5 / 4).min(PAUSE_MAX);
        }
        unreachable!("the loop ends in a return or a panic")
    }
}
