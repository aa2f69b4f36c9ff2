//! Queue outages: refused calls and lost answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pipeline::{Outcome, PipelineOptions};
use tokio::sync::Semaphore;

use super::faulty_queue::{Fault, FaultyQueue};
use super::{FnHandler, LONG, Running, memory, send, until, until_empty, with_concurrency};

#[tokio::test]
async fn receiving_resumes_after_an_outage() {
    let inner = memory(LONG);
    let queue = FaultyQueue::new(inner.clone());
    for _ in 0..3 {
        queue.fail_receive(Fault::Refuse);
    }
    send(&inner, 2).await;
    let running = Running::start(queue, PipelineOptions::default(), FnHandler(|_| async { Outcome::Done }));
    until_empty(&inner).await;
    assert_eq!(running.stop().await.done, 2);
}

#[tokio::test]
async fn a_refused_settlement_is_retried_until_it_succeeds() {
    let inner = memory(LONG);
    let queue = FaultyQueue::new(inner.clone());
    for _ in 0..3 {
        queue.fail_ack(Fault::Refuse);
    }
    send(&inner, 1).await;
    let running = Running::start(queue, PipelineOptions::default(), FnHandler(|_| async { Outcome::Done }));
    until_empty(&inner).await;
    let summary = running.stop().await;
    assert_eq!((summary.received, summary.done, summary.unsettled, summary.lease_lost), (1, 1, 0, 0));
}

#[tokio::test]
async fn a_settlement_whose_answer_was_lost_is_not_a_lost_lease() {
    let inner = memory(LONG);
    let queue = FaultyQueue::new(inner.clone());
    queue.fail_ack(Fault::DropAnswer);
    send(&inner, 1).await;
    let running = Running::start(queue, PipelineOptions::default(), FnHandler(|_| async { Outcome::Done }));
    until_empty(&inner).await;
    let summary = running.stop().await;
    assert_eq!((summary.done, summary.lease_lost, summary.unsettled), (1, 0, 0));
}

#[tokio::test]
async fn accumulated_settlements_share_one_call() {
    let inner = memory(LONG);
    send(&inner, 50).await;
    let queue = FaultyQueue { ack_gate: Some(Arc::new(Semaphore::new(0))), ..FaultyQueue::new(inner.clone()) };
    let (gate, calls) = (queue.ack_gate.clone().unwrap(), queue.ack_calls.clone());
    let handled = Arc::new(AtomicUsize::new(0));
    let count = handled.clone();
    let running = Running::start(
        queue,
        with_concurrency(50),
        FnHandler(move |_| {
            count.fetch_add(1, Ordering::SeqCst);
            async { Outcome::Done }
        }),
    );
    until("all are handled", || async { handled.load(Ordering::SeqCst) == 50 }).await;
    gate.add_permits(100);
    until_empty(&inner).await;
    assert_eq!(running.stop().await.done, 50);
    assert!(calls.load(Ordering::SeqCst) <= 3, "{} calls for 50 messages", calls.load(Ordering::SeqCst));
}
