//! Concurrency, outcomes, panics and leases of a pipeline that handles one message at a time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pipeline::queue::sqlite::SqliteQueue;
use pipeline::sqlite::Database;
use pipeline::{Handler, Message, Outcome, PipelineOptions, Queue, QueueOptions, RetryPolicy};
use tokio::sync::Semaphore;

use super::faulty_queue::FaultyQueue;
use super::{FnHandler, LONG, Running, at_most_three, gate, memory, send, until, until_empty, with_concurrency};

#[tokio::test]
async fn a_pipeline_handles_up_to_its_concurrency_and_receives_no_more() {
    let queue = memory(LONG);
    send(&queue, 10).await;
    let (gate, inside) = gate();
    let running = Running::start(queue.clone(), with_concurrency(3), at_most_three(&gate, &inside));
    until("three are inside", || async { inside.load(Ordering::SeqCst) == 3 }).await;
    let depth = queue.depth().await.unwrap();
    assert_eq!((depth.in_flight, depth.ready), (3, 7), "it received messages without a free slot");
    gate.add_permits(10);
    until_empty(&queue).await;
    let summary = running.stop().await;
    assert_eq!((summary.done, summary.panics), (10, 0));
}

#[tokio::test]
async fn each_message_is_settled_by_its_outcome() {
    let queue = memory(LONG);
    send(&queue, 3).await;
    let running = Running::start(
        queue.clone(),
        with_concurrency(8),
        FnHandler(|message: Message| async move {
            match message.body.as_slice() {
                b"1" if message.receives == 1 => Outcome::Retry { after: Duration::ZERO, reason: "not yet".into() },
                b"2" => Outcome::Dead { reason: "never".into() },
                _ => Outcome::Done,
            }
        }),
    );
    until_empty(&queue).await;
    let summary = running.stop().await;
    assert_eq!((summary.done, summary.retried, summary.dead), (2, 1, 1));
    assert_eq!((summary.received, summary.handled), (4, 4));
    let letters = queue.dead_letters(None, 10).await.unwrap();
    assert_eq!((letters[0].body.as_slice(), letters[0].reason.as_str()), (b"2".as_slice(), "never"));
}

#[tokio::test]
async fn a_panic_is_a_failed_attempt_and_the_last_attempt_buries() {
    let queue = memory(LONG);
    send(&queue, 1).await;
    let panic_retry = RetryPolicy { attempts_max: 3, first_delay: Duration::from_millis(1), ..RetryPolicy::default() };
    let options = PipelineOptions { panic_retry, ..PipelineOptions::default() };
    let running = Running::start(
        queue.clone(),
        options,
        FnHandler(|message: Message| async move {
            if message.body == b"0" {
                panic!("on purpose");
            }
            Outcome::Done
        }),
    );
    until_empty(&queue).await;
    send(&queue, 2).await;
    until_empty(&queue).await;
    let summary = running.stop().await;
    assert_eq!((summary.panics, summary.retried, summary.dead, summary.done), (6, 4, 2, 1));
    let letter = queue.dead_letters(None, 1).await.unwrap().remove(0);
    assert_eq!(letter.receives, 3);
    assert_eq!(letter.reason, "the handler panicked: on purpose (attempt 3 of 3)");
}

#[tokio::test]
async fn a_lease_is_renewed_while_the_handler_works() {
    let lease = Duration::from_millis(150);
    let queue = memory(lease);
    send(&queue, 3).await;
    let running = Running::start(
        queue.clone(),
        with_concurrency(8),
        FnHandler(move |message: Message| async move {
            assert_eq!(message.receives, 1, "delivered twice");
            tokio::time::sleep(lease * 5).await;
            Outcome::Done
        }),
    );
    until_empty(&queue).await;
    let summary = running.stop().await;
    assert_eq!((summary.received, summary.done, summary.lease_lost, summary.panics), (3, 3, 0, 0));
}

#[tokio::test]
async fn a_lost_lease_is_counted_and_the_handler_continues() {
    let queue = memory(LONG);
    send(&queue, 1).await;
    let second = Arc::new(Semaphore::new(0));
    let finished = Arc::new(AtomicUsize::new(0));
    let (stolen_from, come_again, ended) = (queue.clone(), second.clone(), finished.clone());
    let running = Running::start(
        queue.clone(),
        with_concurrency(8),
        FnHandler(move |message: Message| {
            let (queue, second, finished) = (stolen_from.clone(), come_again.clone(), ended.clone());
            async move {
                if message.receives == 1 {
                    queue.extend(&[message.receipt], Duration::ZERO).await.remove(0).unwrap();
                    second.acquire().await.unwrap().forget();
                } else {
                    second.add_permits(1);
                }
                finished.fetch_add(1, Ordering::SeqCst);
                Outcome::Done
            }
        }),
    );
    until("both have finished", || async { finished.load(Ordering::SeqCst) == 2 }).await;
    until_empty(&queue).await;
    let summary = running.stop().await;
    assert_eq!((summary.handled, summary.done, summary.lease_lost), (2, 1, 1));
}

#[tokio::test]
async fn small_receives_run_concurrently_while_they_come_back_full() {
    let inner = memory(LONG);
    send(&inner, 200).await;
    let queue = FaultyQueue { receive_pause: Duration::from_millis(5), ..FaultyQueue::new(inner.clone()) };
    let most = queue.receives_most.clone();
    let options =
        PipelineOptions { concurrency: 64, receive_max: 10, concurrent_receives_max: 3, ..PipelineOptions::default() };
    let running = Running::start(queue, options, FnHandler(|_| async { Outcome::Done }));
    until_empty(&inner).await;
    assert_eq!(running.stop().await.done, 200);
    assert_eq!(most.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn nothing_is_received_while_the_handler_is_not_ready() {
    struct Gated(Arc<Semaphore>);
    #[async_trait::async_trait]
    impl Handler for Gated {
        async fn handle(&self, _: &Message) -> Outcome {
            Outcome::Done
        }
        async fn ready(&self) {
            drop(self.0.acquire().await.unwrap());
        }
    }
    let queue = memory(LONG);
    send(&queue, 3).await;
    let gate = Arc::new(Semaphore::new(0));
    let running = Running::start(queue.clone(), PipelineOptions::default(), Gated(gate.clone()));
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(queue.depth().await.unwrap().ready, 3);
    gate.add_permits(1);
    until_empty(&queue).await;
    assert_eq!(running.stop().await.done, 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_pipelines_on_one_file_handle_each_message_once() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("test.db");
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (mut queues, mut pipelines) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        let db = Database::open(&file).unwrap();
        let queue = SqliteQueue::open(&db, "test", QueueOptions::default()).await.unwrap();
        let seen = seen.clone();
        pipelines.push(Running::start(
            queue.clone(),
            with_concurrency(16),
            FnHandler(move |message: Message| {
                seen.lock().unwrap().push(message.id);
                async { Outcome::Done }
            }),
        ));
        queues.push(queue);
    }
    let mut sent = Vec::new();
    for _ in 0..20 {
        sent.extend(send(&queues[0], 50).await);
    }
    until_empty(&queues[1]).await;
    let mut done = 0;
    for running in pipelines {
        done += running.stop().await.done;
    }
    let mut seen = seen.lock().unwrap().clone();
    seen.sort();
    sent.sort();
    assert_eq!(seen, sent);
    assert_eq!(done, 1000);
}
