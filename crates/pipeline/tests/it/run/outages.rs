//! Queue outages: refused calls and lost answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pipeline::queue::memory::MemoryQueue;
use pipeline::{Message, Outcome, PipelineOptions, Queue};
use tokio::sync::Semaphore;

use super::faulty_queue::{BuryFault, Fault, FaultyQueue};
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

/// Messages below this number are dead, the others are done.
async fn handled_with(fault: BuryFault, dead: usize, good: usize) -> (MemoryQueue, Running) {
    let inner = memory(LONG);
    let queue = FaultyQueue::new(inner.clone());
    *queue.bury_fault.lock().unwrap() = Some(fault);
    send(&inner, dead + good).await;
    let handler = FnHandler(move |message: Message| async move {
        let number: usize = String::from_utf8(message.body).unwrap().parse().unwrap();
        if number < dead { Outcome::Dead { reason: "broken".to_owned() } } else { Outcome::Done }
    });
    (inner, Running::start(queue, with_concurrency(8), handler))
}

#[tokio::test]
async fn a_dead_letter_queue_that_refuses_does_not_stop_the_others() {
    let (inner, running) = handled_with(BuryFault::Refuse, 1000, 20_000).await;
    until("every good message is gone and the dead ones are handed back", || async {
        let depth = inner.depth().await.unwrap();
        depth.ready + depth.in_flight + depth.delayed == 1000 && depth.delayed > 0
    })
    .await;
    let summary = running.stop().await;
    assert_eq!((summary.done, summary.dead, summary.unsettled), (20_000, 0, 0), "{summary:?}");
    assert!(summary.unburied > 0, "{summary:?}");
    // One that came back and was received again while the run stopped is leased until its lease ends.
    let depth = inner.depth().await.unwrap();
    assert_eq!((depth.ready + depth.delayed + depth.in_flight, depth.dead), (1000, 0), "nothing is lost");
}

#[tokio::test]
async fn a_dead_letter_queue_that_does_not_answer_does_not_stop_the_others() {
    // More burials than may wait for an answer: the rest is handed back.
    let (inner, running) = handled_with(BuryFault::Hang, 5000, 500).await;
    until("every good message is gone", || async {
        let depth = inner.depth().await.unwrap();
        depth.ready == 0 && depth.in_flight + depth.delayed == 5000 && depth.delayed > 0
    })
    .await;
    running.task.abort();
}

#[tokio::test]
async fn a_message_that_can_never_be_buried_is_handed_back() {
    let (inner, running) = handled_with(BuryFault::TooLarge, 1, 0).await;
    until("it is handed back", || async { inner.depth().await.unwrap().delayed == 1 }).await;
    let summary = running.stop().await;
    assert_eq!((summary.unburied, summary.unsettled, summary.lease_lost), (1, 0, 0));
}

#[tokio::test]
async fn a_burial_that_is_refused_for_a_moment_is_retried() {
    let inner = memory(LONG);
    let queue = FaultyQueue::new(inner.clone());
    *queue.bury_fault.lock().unwrap() = Some(BuryFault::RefuseOnce);
    send(&inner, 1).await;
    let dead = FnHandler(|_| async { Outcome::Dead { reason: "broken".to_owned() } });
    let running = Running::start(queue, PipelineOptions::default(), dead);
    until_empty(&inner).await;
    let summary = running.stop().await;
    assert_eq!((summary.dead, summary.unburied), (1, 0));
}
