//! Batches: full or due, one outcome for each message, flushed at shutdown.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use pipeline::queue::memory::MemoryQueue;
use pipeline::{
    BatchHandler, BatchOptions, CancellationToken, Message, Outcome, Pipeline, PipelineOptions, Queue, RetryPolicy,
    Summary,
};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use super::{LONG, PATIENCE, memory, send, until, until_empty};

/// Parses bodies as numbers and handles each batch with `outcomes`.
struct NumberHandler {
    batches: Mutex<Vec<Vec<u32>>>,
    outcomes: fn(&[u32]) -> Vec<Outcome>,
    preparing: AtomicUsize,
    prepare_gate: Option<Semaphore>,
    handling: AtomicUsize,
    handle_gate: Option<Semaphore>,
}

impl NumberHandler {
    fn new(outcomes: fn(&[u32]) -> Vec<Outcome>) -> Self {
        Self {
            batches: Mutex::default(),
            outcomes,
            preparing: AtomicUsize::new(0),
            prepare_gate: None,
            handling: AtomicUsize::new(0),
            handle_gate: None,
        }
    }

    fn sizes(&self) -> Vec<usize> {
        self.batches.lock().unwrap().iter().map(Vec::len).collect()
    }
}

#[async_trait::async_trait]
impl BatchHandler for NumberHandler {
    type Item = u32;

    async fn prepare(&self, message: &Message) -> Result<u32, Outcome> {
        self.preparing.fetch_add(1, Ordering::SeqCst);
        if let Some(gate) = &self.prepare_gate {
            gate.acquire().await.unwrap().forget();
        }
        let text = String::from_utf8_lossy(&message.body);
        text.parse().map_err(|error| Outcome::Dead { reason: format!("not a number: {error}") })
    }

    async fn handle(&self, batch: &[u32], messages: &[&Message]) -> Vec<Outcome> {
        let bodies: Vec<_> = messages.iter().map(|message| String::from_utf8_lossy(&message.body)).collect();
        assert_eq!(bodies, batch.iter().map(u32::to_string).collect::<Vec<_>>());
        self.batches.lock().unwrap().push(batch.to_vec());
        self.handling.fetch_add(1, Ordering::SeqCst);
        if let Some(gate) = &self.handle_gate {
            gate.acquire().await.unwrap().forget();
        }
        self.handling.fetch_sub(1, Ordering::SeqCst);
        (self.outcomes)(batch)
    }
}

fn all_done(batch: &[u32]) -> Vec<Outcome> {
    vec![Outcome::Done; batch.len()]
}

struct Running {
    handler: Arc<NumberHandler>,
    shutdown: CancellationToken,
    task: JoinHandle<Summary>,
}

fn start(queue: &MemoryQueue, batching: BatchOptions, handler: NumberHandler) -> Running {
    let (handler, shutdown) = (Arc::new(handler), CancellationToken::new());
    let panic_retry = RetryPolicy { attempts_max: 2, first_delay: Duration::from_millis(1), ..RetryPolicy::default() };
    let options = PipelineOptions { panic_retry, ..PipelineOptions::default() };
    let pipeline = Pipeline::new(Arc::new(queue.clone()), options);
    let task = tokio::spawn(pipeline.run_batches(handler.clone(), batching, shutdown.clone()));
    Running { handler, shutdown, task }
}

impl Running {
    async fn stop(self) -> Summary {
        self.shutdown.cancel();
        tokio::time::timeout(PATIENCE, self.task).await.expect("the pipeline does not stop").unwrap()
    }
}

fn by_size(size: usize) -> BatchOptions {
    BatchOptions { size, timeout: LONG, ..BatchOptions::default() }
}

#[tokio::test]
async fn a_full_batch_is_handled_immediately() {
    let queue = memory(LONG);
    send(&queue, 10).await;
    let running = start(&queue, by_size(5), NumberHandler::new(all_done));
    until_empty(&queue).await;
    assert_eq!(running.handler.sizes(), [5, 5]);
    assert_eq!(running.stop().await.done, 10);
}

#[tokio::test]
async fn a_due_batch_is_handled_before_it_is_full() {
    let queue = memory(LONG);
    send(&queue, 3).await;
    let batching = BatchOptions { timeout: Duration::from_millis(50), ..BatchOptions::default() };
    let running = start(&queue, batching, NumberHandler::new(all_done));
    until_empty(&queue).await;
    let summary = running.stop().await;
    assert_eq!((summary.done, summary.handled), (3, 3));
}

#[tokio::test]
async fn each_message_of_a_batch_is_settled_by_its_own_outcome() {
    let queue = memory(LONG);
    send(&queue, 4).await;
    let outcomes = |batch: &[u32]| {
        let outcome = |number: &u32| match number {
            1 => Outcome::Dead { reason: "one".into() },
            2 => Outcome::Retry { after: LONG, reason: "two".into() },
            _ => Outcome::Done,
        };
        batch.iter().map(outcome).collect()
    };
    let running = start(&queue, by_size(4), NumberHandler::new(outcomes));
    until("the batch is settled", || async {
        let depth = queue.depth().await.unwrap();
        (depth.ready, depth.in_flight, depth.delayed, depth.dead) == (0, 0, 1, 1)
    })
    .await;
    let letter = queue.dead_letters(None, 1).await.unwrap().remove(0);
    assert_eq!((letter.body.as_slice(), letter.reason.as_str()), (b"1".as_slice(), "one"));
    let summary = running.stop().await;
    assert_eq!((summary.done, summary.dead, summary.retried), (2, 1, 1));
}

#[tokio::test]
async fn a_message_that_cannot_be_prepared_joins_no_batch() {
    let queue = memory(LONG);
    queue.send(&[pipeline::Outgoing::new("seven")]).await.remove(0).unwrap();
    send(&queue, 2).await;
    let running = start(&queue, by_size(2), NumberHandler::new(all_done));
    until_empty(&queue).await;
    assert_eq!(running.handler.sizes(), [2]);
    let summary = running.stop().await;
    assert_eq!((summary.done, summary.dead, summary.handled), (2, 1, 3));
    let letter = queue.dead_letters(None, 1).await.unwrap().remove(0);
    assert!(letter.reason.starts_with("not a number"), "{}", letter.reason);
}

#[tokio::test]
async fn a_panic_or_a_wrong_number_of_outcomes_fails_the_whole_batch() {
    for (outcomes, reason) in [
        ((|_| panic!("on purpose")) as fn(&[u32]) -> Vec<Outcome>, "the handler panicked: on purpose"),
        (|batch| vec![Outcome::Done; batch.len() - 1], "the handler gave 2 outcomes for 3 messages"),
    ] {
        let queue = memory(LONG);
        send(&queue, 3).await;
        let running = start(&queue, by_size(3), NumberHandler::new(outcomes));
        until_empty(&queue).await;
        let summary = running.stop().await;
        assert_eq!((summary.done, summary.retried, summary.dead), (0, 3, 3));
        for letter in queue.dead_letters(None, 10).await.unwrap() {
            assert_eq!(letter.reason, format!("{reason} (attempt 2 of 2)"));
        }
    }
}

#[tokio::test]
async fn shutdown_handles_the_collected_messages() {
    let queue = memory(LONG);
    send(&queue, 3).await;
    let running = start(&queue, by_size(100), NumberHandler::new(all_done));
    until("all are prepared", || async { running.handler.preparing.load(Ordering::SeqCst) == 3 }).await;
    let handler = running.handler.clone();
    let summary = running.stop().await;
    assert_eq!((summary.done, summary.handed_back), (3, 0));
    assert_eq!(handler.sizes(), [3]);
}

#[tokio::test]
async fn shutdown_returns_messages_that_were_not_prepared() {
    let queue = memory(LONG);
    send(&queue, 5).await;
    let handler = NumberHandler { prepare_gate: Some(Semaphore::new(0)), ..NumberHandler::new(all_done) };
    let running = start(&queue, BatchOptions { processors: 1, ..by_size(100) }, handler);
    until("one is being prepared", || async { running.handler.preparing.load(Ordering::SeqCst) == 1 }).await;
    running.shutdown.cancel();
    until("the others are returned", || async { queue.depth().await.unwrap().ready == 4 }).await;
    running.handler.prepare_gate.as_ref().unwrap().add_permits(10);
    let summary = running.stop().await;
    assert_eq!((summary.done, summary.handed_back, summary.received), (1, 4, 5));
}

#[tokio::test]
async fn concurrent_batches_and_messages_in_flight_are_limited() {
    let queue = memory(LONG);
    send(&queue, 100).await;
    let handler = NumberHandler { handle_gate: Some(Semaphore::new(0)), ..NumberHandler::new(all_done) };
    let batching = BatchOptions { batchers: 2, processors: 3, ..by_size(5) };
    let running = start(&queue, batching, handler);
    until("two batches are being handled", || async { running.handler.handling.load(Ordering::SeqCst) == 2 }).await;
    until("all slots are in use", || async { queue.depth().await.unwrap().in_flight == 5 * 3 + 3 }).await;
    assert_eq!(running.handler.handling.load(Ordering::SeqCst), 2);
    running.handler.handle_gate.as_ref().unwrap().add_permits(100);
    until("the full batches are handled", || async { running.handler.sizes().len() >= 19 }).await;
    let summary = running.stop().await;
    assert_eq!(summary.done, 100);
}
