//! Shutdown: the drain, the hand-back of unstarted messages, and handlers that do not finish.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use pipeline::{CancellationToken, Outcome, PipelineOptions, Queue, Summary};

use super::faulty_queue::FaultyQueue;
use super::{FnHandler, LONG, PATIENCE, Running, at_most_three, gate, memory, send, until, with_concurrency};

#[tokio::test]
async fn shutdown_lets_running_handlers_finish_and_receives_nothing_new() {
    let queue = memory(LONG);
    send(&queue, 5).await;
    let (gate, inside) = gate();
    let (handler_gate, handler_inside) = (gate.clone(), inside.clone());
    let running = Running::start(
        queue.clone(),
        with_concurrency(2),
        FnHandler(move |_| {
            let (gate, inside) = (handler_gate.clone(), handler_inside.clone());
            async move {
                inside.fetch_add(1, Ordering::SeqCst);
                gate.acquire().await.unwrap().forget();
                Outcome::Done
            }
        }),
    );
    until("two are inside", || async { inside.load(Ordering::SeqCst) == 2 }).await;
    running.shutdown.cancel();
    tokio::task::yield_now().await;
    gate.add_permits(5);
    let summary = running.stop().await;
    assert_eq!((summary.received, summary.done, summary.abandoned), (2, 2, 0));
    assert_eq!(queue.depth().await.unwrap().ready, 3);
}

#[tokio::test]
async fn shutdown_cancels_a_waiting_receive() {
    // The receive waits longer than PATIENCE, so the test fails if the pipeline waits for it.
    let options = PipelineOptions { receive_wait: LONG, ..PipelineOptions::default() };
    let running = Running::start(memory(LONG), options, FnHandler(|_| async { Outcome::Done }));
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(running.stop().await, Summary::default());
}

#[tokio::test]
async fn a_handler_that_does_not_finish_is_abandoned_and_its_message_is_due_again() {
    let queue = memory(Duration::from_millis(100));
    let id = send(&queue, 1).await.remove(0);
    let inside = Arc::new(AtomicUsize::new(0));
    let entered = inside.clone();
    let options = PipelineOptions { drain_timeout: Duration::from_millis(300), ..PipelineOptions::default() };
    let running = Running::start(
        queue.clone(),
        options,
        FnHandler(move |_| {
            entered.fetch_add(1, Ordering::SeqCst);
            std::future::pending()
        }),
    );
    until("it is inside", || async { inside.load(Ordering::SeqCst) == 1 }).await;
    let summary = running.stop().await;
    assert_eq!((summary.received, summary.abandoned, summary.handled, summary.unsettled), (1, 1, 0, 0));
    // The lease was renewed during the drain, which lasted three leases, and ended after it.
    assert_eq!(inside.load(Ordering::SeqCst), 1);
    let message = queue.receive(1, PATIENCE).await.unwrap().remove(0);
    assert_eq!((message.id, message.receives), (id, 2));
}

#[tokio::test]
async fn messages_received_during_shutdown_are_returned_immediately() {
    let inner = memory(LONG);
    send(&inner, 4).await;
    let shutdown = CancellationToken::new();
    let queue = FaultyQueue { cancel_in_receive: Some(shutdown.clone()), ..FaultyQueue::new(inner.clone()) };
    let handler = FnHandler(|_| async { panic!("the handler was started") });
    let running = Running::start_with(queue, PipelineOptions::default(), handler, shutdown);
    let summary = tokio::time::timeout(PATIENCE, running.task).await.expect("the pipeline does not stop").unwrap();
    assert_eq!((summary.received, summary.handed_back, summary.handled), (4, 4, 0));
    assert_eq!(inner.depth().await.unwrap().ready, 4, "not due immediately");
}

#[tokio::test]
async fn messages_received_beyond_the_concurrency_are_returned_at_shutdown() {
    let queue = memory(LONG);
    send(&queue, 30).await;
    let (gate, inside) = gate();
    let running = Running::start(
        FaultyQueue { messages_per_request: 10, ..FaultyQueue::new(queue.clone()) },
        PipelineOptions { concurrent_receives_max: 2, ..with_concurrency(3) },
        at_most_three(&gate, &inside),
    );
    let handled_and_in_flight = || async { (inside.load(Ordering::SeqCst), queue.depth().await.unwrap().in_flight) };
    until("three are handled and two receives are full", || async { handled_and_in_flight().await == (3, 23) }).await;
    running.shutdown.cancel();
    until("the unstarted ones are returned", || async { handled_and_in_flight().await == (3, 3) }).await;
    assert_eq!(queue.depth().await.unwrap().ready, 27);
    gate.add_permits(3);
    let summary = running.stop().await;
    assert_eq!((summary.done, summary.handed_back, summary.panics), (3, 20, 0));
}
