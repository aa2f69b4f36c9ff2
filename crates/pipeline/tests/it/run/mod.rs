//! Tests of the pipeline itself, on the memory queue and on a queue with injected faults.

mod batches;
mod faulty_queue;
mod handling;
mod outages;
mod shutdown;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use pipeline::queue::memory::MemoryQueue;
use pipeline::{
    CancellationToken, Handler, Message, MessageId, Outcome, Outgoing, Pipeline, PipelineOptions, Queue, QueueOptions,
    Summary,
};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::Instant;

const PATIENCE: Duration = Duration::from_secs(30);
const LONG: Duration = Duration::from_secs(300);

/// A handler that calls a closure.
struct FnHandler<F>(F);

#[async_trait::async_trait]
impl<F, R> Handler for FnHandler<F>
where
    F: Fn(Message) -> R + Send + Sync + 'static,
    R: Future<Output = Outcome> + Send,
{
    async fn handle(&self, message: &Message) -> Outcome {
        (self.0)(message.clone()).await
    }
}

struct Running {
    shutdown: CancellationToken,
    task: JoinHandle<Summary>,
}

impl Running {
    fn start(queue: impl Queue, options: PipelineOptions, handler: impl Handler) -> Self {
        Self::start_with(queue, options, handler, CancellationToken::new())
    }

    fn start_with(
        queue: impl Queue,
        options: PipelineOptions,
        handler: impl Handler,
        shutdown: CancellationToken,
    ) -> Self {
        let task = tokio::spawn(Pipeline::new(Arc::new(queue), options).run(Arc::new(handler), shutdown.clone()));
        Self { shutdown, task }
    }

    async fn stop(self) -> Summary {
        self.shutdown.cancel();
        tokio::time::timeout(PATIENCE, self.task).await.expect("the pipeline does not stop").unwrap()
    }
}

fn memory(lease: Duration) -> MemoryQueue {
    MemoryQueue::new("test", QueueOptions { lease, ..QueueOptions::default() })
}

async fn send(queue: &impl Queue, count: usize) -> Vec<MessageId> {
    let messages: Vec<_> = (0..count).map(|number| Outgoing::new(number.to_string())).collect();
    queue.send(&messages).await.into_iter().map(Result::unwrap).collect()
}

/// Waits for a condition with a deadline.
async fn until<R: Future<Output = bool>>(what: &str, condition: impl Fn() -> R) {
    let deadline = Instant::now() + PATIENCE;
    while !condition().await {
        assert!(Instant::now() < deadline, "timed out waiting until {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn until_empty(queue: &impl Queue) {
    until("the queue is empty", || async {
        let depth = queue.depth().await.unwrap();
        depth.ready + depth.in_flight + depth.delayed == 0
    })
    .await;
}

fn with_concurrency(concurrency: usize) -> PipelineOptions {
    PipelineOptions { concurrency, ..PipelineOptions::default() }
}

/// A semaphore without permits that blocks handlers, and a counter of the handlers that have started.
fn gate() -> (Arc<Semaphore>, Arc<AtomicUsize>) {
    (Arc::new(Semaphore::new(0)), Arc::new(AtomicUsize::new(0)))
}

/// Waits for the gate, and panics if more than three handlers run at the same time.
fn at_most_three(gate: &Arc<Semaphore>, inside: &Arc<AtomicUsize>) -> impl Handler {
    let (gate, inside) = (gate.clone(), inside.clone());
    FnHandler(move |_| {
        let (gate, inside) = (gate.clone(), inside.clone());
        async move {
            assert!(inside.fetch_add(1, Ordering::SeqCst) < 3, "more than three at once");
            gate.acquire().await.unwrap().forget();
            inside.fetch_sub(1, Ordering::SeqCst);
            Outcome::Done
        }
    })
}
