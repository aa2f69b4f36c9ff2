//! The bounds on the calls: the rate, and the pause after a failure.

use std::pin::pin;
use std::sync::atomic::AtomicBool;

use futures::future::join_all;
use futures::poll;

use super::*;

const MS: Duration = Duration::from_millis(1);

#[tokio::test]
async fn no_more_calls_go_out_than_the_rate_allows_and_the_others_follow() {
    let clock = HandClock::new();
    let nodes = Nodes::of(|_: &str, method: &str, params: &Value| Ok((200, STEADY.answer(method, params))));
    let asked = Arc::clone(&nodes.asked);
    let reader = reader_at(Clock::new(clock.clone()), "http://node", nodes).with_rate(Some(3));
    let mut calls = pin!(join_all((0..20).map(|_| reader.head())));
    // Two seconds of calls at once, then three a second. However long none was made, no more than two seconds of calls are
    // saved up.
    for (pass_ms, calls_made) in [(0, 6), (0, 6), (200, 6), (200, 7), (1_000, 10), (60_000, 16), (600, 17)] {
        clock.pass(MS * pass_ms);
        assert!(poll!(calls.as_mut()).is_pending(), "some wait");
        assert_eq!(asked.lock().unwrap().len(), calls_made, "{pass_ms} ms later");
    }
    clock.pass(MS * 1_000);
    assert!(calls.await.iter().all(Result::is_ok), "each is answered in the end");
    assert_eq!(asked.lock().unwrap().len(), 20);
}

#[tokio::test]
async fn after_a_failure_nothing_is_asked_until_the_pause_is_over() {
    let (clock, away) = (HandClock::new(), Arc::new(AtomicBool::new(true)));
    let is_away = Arc::clone(&away);
    let nodes = Nodes::of(move |_: &str, method: &str, params: &Value| match is_away.load(Ordering::Relaxed) {
        true => Err(TransportFailure::NoConnection),
        false => Ok((200, STEADY.answer(method, params))),
    });
    let asked = Arc::clone(&nodes.asked);
    let reader = reader_at(Clock::new(clock.clone()), "http://node", nodes);
    let first = join_all((0..3).map(|_| reader.head())).await;
    assert!(first.iter().all(Result::is_err));
    assert_eq!(asked.lock().unwrap().len(), 1, "those that come after the failure do not go out");

    away.store(false, Ordering::Relaxed);
    for pass in [Duration::ZERO, PAUSE - MS] {
        clock.pass(pass);
        assert!(reader.head().await.is_err() && reader.history(ACCOUNT, SINCE).await.is_err());
        assert_eq!(asked.lock().unwrap().len(), 1);
    }
    clock.pass(MS);
    assert!(reader.head().await.is_ok(), "the pause is over");
    assert_eq!(asked.lock().unwrap().len(), 2);
}
