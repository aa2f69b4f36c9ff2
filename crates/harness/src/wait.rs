//! Waiting for a condition with a deadline, never for a time.

use std::{
    fmt::Display,
    future::Future,
    panic::Location,
    time::{Duration, Instant},
};

/// How long to wait between two looks. Short: a look costs little, and a test should not be slower than its subject.
const PAUSE: Duration = Duration::from_millis(10);

/// Asks `probe` again and again until it answers `Some`.
///
/// # Panics
/// After `deadline`, saying what was waited for, from where, and how often was looked.
#[track_caller]
pub fn eventually<T, F, Fut>(deadline: Duration, what: impl Display, mut probe: F) -> impl Future<Output = T>
where
    F: FnMut() -> Fut,
    Fut: Future<Output = Option<T>>,
{
    eventually_ok(deadline, what, move || {
        let look = probe();
        async move { look.await.ok_or("not yet") }
    })
}

/// Like [`eventually`], for a probe that can say what is still missing: its last answer is in the failure message.
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
        let mut last = String::from("no look was finished");
        for looks in 1_u32.. {
            let left = deadline.saturating_sub(start.elapsed());
            match tokio::time::timeout(left, probe()).await {
                Ok(Ok(found)) => return found,
                Ok(Err(missing)) => last = missing.to_string(),
                Err(_) => {}
            }
            if start.elapsed() + PAUSE >= deadline {
                panic!(
                    "waited {deadline:?} for: {what}\n  asked at {caller}\n  looks: {looks}, the last one said: {last}"
                );
            }
            tokio::time::sleep(PAUSE).await;
        }
        unreachable!("the loop ends in a return or a panic")
    }
}
