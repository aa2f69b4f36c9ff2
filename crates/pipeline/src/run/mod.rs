//! Fetch, handle, settle: the loop that turns a [`Queue`] and a [`Handler`] into finished work.
//!
//! [`Pipeline::run`] reads top to bottom. Around it work two helpers: one keeps the leases of what is being handled
//! ([`lease`]), one tells the queue what became of it ([`settle`]). [`Pipeline::run_batches`] puts a gathering stage
//! between the messages and the handler. Nothing here is unbounded and every task is joined before `run` returns.

mod batch_buffer;
mod batches;
mod delivery;
mod fetch;
mod lease;
mod meters;
mod options;
mod settle;

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::handler::Handler;
use crate::queue::{Queue, QueueError};
use delivery::{Delivery, panic_reason};
use lease::Leases;
use meters::Meters;
use settle::{Kind, Verdict};

pub use meters::Summary;
pub use options::{BatchOptions, PipelineOptions};

/// How many verdicts may wait to be settled; a handler that is done then waits, which stops the fetching in the end.
const VERDICTS_WAITING_MAX: usize = 1024;
/// How long the last verdicts may take after the handlers have finished.
const SETTLE_GRACE: Duration = Duration::from_secs(10);
/// How long a request waits to be full, where a full one costs no more ([`Capabilities::request_carries`]).
///
/// [`Capabilities::request_carries`]: crate::queue::Capabilities::request_carries
const GATHER_TIME: Duration = Duration::from_millis(10);

/// A queue about to be worked on. See the crate's front page for an example.
pub struct Pipeline {
    queue: Arc<dyn Queue>,
    options: PipelineOptions,
}

impl Pipeline {
    /// A pipeline that takes from `queue`.
    pub fn new(queue: Arc<dyn Queue>, options: PipelineOptions) -> Self {
        Self { queue, options }
    }

    /// Hands each message to `handler` and settles it by the verdict, until `shutdown` is cancelled.
    ///
    /// Then it stops fetching, hands back what has not been started, lets running handlers finish for up to
    /// [`PipelineOptions::drain_timeout`], settles, and returns the sums. What is not finished by then comes back
    /// to the queue when its lease ends.
    pub async fn run(self, handler: Arc<dyn Handler>, shutdown: CancellationToken) -> Summary {
        let concurrency = self.options.concurrency.max(1);
        // Where a receive carries many, those under way would take up most of the slots: they get slots of their own, and
        // what comes waits for its turn.
        let carries = self.queue.capabilities().request_carries;
        let receiving = if carries > 1 { carries * self.options.receives_max } else { 0 };
        let (engine, desk, helpers) = Engine::start(self, concurrency + receiving);
        let turns = Arc::new(Semaphore::new(concurrency));
        let mut handlers = JoinSet::new();

        let ready = || {
            let handler = handler.clone();
            async move { handler.ready().await }
        };
        let start = |received: Vec<Delivery>| {
            while handlers.try_join_next().is_some() {}
            for delivery in received {
                handlers.spawn(handle_one(handler.clone(), delivery, turns.clone(), shutdown.clone()));
            }
        };
        let unstarted = engine.fetch(desk, ready, &shutdown, start).await;

        for delivery in unstarted {
            delivery.settle(Kind::HandBack).await;
        }
        engine.drain(async { while handlers.join_next().await.is_some() {} }).await;
        drop(handlers);
        engine.finish(helpers).await
    }
}

async fn handle_one(handler: Arc<dyn Handler>, delivery: Delivery, turns: Arc<Semaphore>, shutdown: CancellationToken) {
    let turn = tokio::select! {
        biased;
        turn = turns.acquire() => turn.ok(),
        () = shutdown.cancelled() => None,
    };
    if turn.is_none() {
        return delivery.settle(Kind::HandBack).await;
    }
    let started = Instant::now();
    let handled = AssertUnwindSafe(handler.handle(&delivery.message)).catch_unwind().await;
    let outcome = handled.unwrap_or_else(|panic| delivery.failed(&panic_reason(&*panic)));
    delivery.engine.meters.handled(1, started.elapsed());
    delivery.settle(outcome.into()).await;
}
/// What all parts of one run share.
struct Engine {
    queue: Arc<dyn Queue>,
    options: PipelineOptions,
    capacity: usize,
    meters: Arc<Meters>,
    leases: Leases,
}

/// Where verdicts are handed in.
type Desk = mpsc::Sender<Verdict>;

/// The two tasks beside the loop.
struct Helpers {
    tasks: JoinSet<()>,
    settled: CancellationToken,
    stop_leases: CancellationToken,
}
impl Engine {
    fn start(pipeline: Pipeline, capacity: usize) -> (Arc<Self>, Desk, Helpers) {
        let Pipeline { queue, options } = pipeline;
        let meters = Arc::new(Meters::new(queue.name()));
        let leases = Leases::new(queue.lease());
        let engine = Arc::new(Self { queue, options, capacity, meters, leases });
        let (desk, verdicts) = mpsc::channel(VERDICTS_WAITING_MAX);
        let (settled, stop_leases) = (CancellationToken::new(), CancellationToken::new());
        let mut tasks = JoinSet::new();
        tasks.spawn(lease::keep(engine.clone(), stop_leases.clone()));
        let (settling, done) = (engine.clone(), settled.clone().drop_guard());
        tasks.spawn(async move {
            let _done = done;
            settle::settle(settling, verdicts).await;
        });
        (engine, desk, Helpers { tasks, settled, stop_leases })
    }

    /// Waits for `handlers`, but not longer than a drain may take.
    async fn drain(&self, handlers: impl Future<Output = ()>) {
        if tokio::time::timeout(self.options.drain_timeout, handlers).await.is_err() {
            tracing::warn!(
                queue = self.queue.name(),
                "handlers still run at the end of the drain; their messages come back"
            );
        }
    }

    /// Lets the settler finish what was handed in, stops the helpers and adds up.
    async fn finish(&self, mut helpers: Helpers) -> Summary {
        if tokio::time::timeout(SETTLE_GRACE, helpers.settled.cancelled()).await.is_err() {
            tracing::warn!(queue = self.queue.name(), "not everything could be settled; the rest comes back");
            helpers.tasks.abort_all();
        }
        helpers.stop_leases.cancel();
        while helpers.tasks.join_next().await.is_some() {}
        self.meters.summary(self.leases.held())
    }
}

/// An error with everything that caused it, on one line.
struct Causes<'a>(&'a QueueError);

impl std::fmt::Display for Causes<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut cause = std::error::Error::source(self.0);
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}
