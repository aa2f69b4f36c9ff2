//! Fetch, handle, settle: the loop that connects a [`Queue`] and a [`Handler`].
//!
//! [`Pipeline::run`] reads top to bottom: [`fetch`] receives messages into free slots, each [`Delivery`] runs its
//! handler, and [`settle`] passes the outcomes to the queue in batches. [`lease`] renews the leases of messages that are
//! still being handled. [`Pipeline::run_batches`] ([`batches`]) collects messages into batches before the handler. Every
//! channel is bounded and every task is joined before `run` returns.

mod batch_buffer;
mod batches;
mod delivery;
mod fetch;
mod lease;
mod meters;
mod options;
#[cfg(test)]
mod race_tests;
mod settle;

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::handler::Handler;
use crate::panic_text::panic_text;
use crate::queue::Queue;
use delivery::Delivery;
use lease::LeaseTable;
use meters::Meters;
use settle::{Disposition, SettlementSender};

pub use meters::Summary;
pub use options::{BatchOptions, PipelineOptions};

/// Settlements of each kind that may wait for the settler. At the limit handlers wait to hand theirs in, which in turn
/// stops the fetching; burials are handed back instead.
const SETTLEMENT_BACKLOG_MAX: usize = 1024;
/// Time limit for the last settlements, after the handlers have finished.
const SETTLE_GRACE: Duration = Duration::from_secs(10);
/// How long an incomplete request waits for more messages where a full one costs no more
/// ([`Capabilities::messages_per_request`]).
///
/// [`Capabilities::messages_per_request`]: crate::queue::Capabilities::messages_per_request
const FILL_WAIT: Duration = Duration::from_millis(10);

/// Runs a handler on the messages of a queue. The crate's front page has an example.
pub struct Pipeline {
    queue: Arc<dyn Queue>,
    options: PipelineOptions,
}

impl Pipeline {
    /// A pipeline that receives from `queue`.
    pub fn new(queue: Arc<dyn Queue>, options: PipelineOptions) -> Self {
        Self { queue, options }
    }

    /// Passes each message to `handler` and settles it by the outcome, until `shutdown` is cancelled.
    ///
    /// On shutdown it stops fetching, returns unstarted messages to the queue, lets running handlers finish for up to
    /// [`PipelineOptions::drain_timeout`], settles them, and returns the totals. A message whose handler has not finished
    /// by then becomes due again when its lease ends.
    pub async fn run(self, handler: Arc<dyn Handler>, shutdown: CancellationToken) -> Summary {
        let concurrency = self.options.concurrency.max(1);
        // A receive reserves a slot for each message that it may bring. Where one request carries many, the receives in
        // flight get slots of their own, or they would occupy most of the handlers' slots.
        let per_request = self.queue.capabilities().messages_per_request;
        let receive_slots = if per_request > 1 { per_request * self.options.concurrent_receives_max } else { 0 };
        let (run, settlements, helpers) = Run::start(self, concurrency + receive_slots);
        let handler_permits = Arc::new(Semaphore::new(concurrency));
        let mut handlers = JoinSet::new();

        let ready = || {
            let handler = handler.clone();
            async move { handler.ready().await }
        };
        let start = |received: Vec<Delivery>| {
            while handlers.try_join_next().is_some() {}
            for delivery in received {
                handlers.spawn(handle_one(handler.clone(), delivery, handler_permits.clone(), shutdown.clone()));
            }
        };
        let unstarted = run.fetch(settlements, ready, &shutdown, start).await;

        for delivery in unstarted {
            delivery.settle(Disposition::HandBack).await;
        }
        run.drain(async { while handlers.join_next().await.is_some() {} }).await;
        drop(handlers);
        run.finish(helpers).await
    }
}

async fn handle_one(
    handler: Arc<dyn Handler>,
    delivery: Delivery,
    handler_permits: Arc<Semaphore>,
    shutdown: CancellationToken,
) {
    let permit = tokio::select! {
        biased;
        permit = handler_permits.acquire() => permit.ok(),
        () = shutdown.cancelled() => None,
    };
    if permit.is_none() {
        return delivery.settle(Disposition::HandBack).await;
    }
    let started = Instant::now();
    let handled = AssertUnwindSafe(handler.handle(&delivery.message)).catch_unwind().await;
    let outcome = handled.unwrap_or_else(|panic| delivery.failed(&panic_reason(&*panic)));
    delivery.run.meters.handled(1, started.elapsed());
    delivery.settle(outcome.into()).await;
}

fn panic_reason(panic: &(dyn std::any::Any + Send)) -> String {
    format!("the handler panicked: {}", panic_text(panic))
}

/// The state that all tasks of one run share.
struct Run {
    queue: Arc<dyn Queue>,
    options: PipelineOptions,
    capacity: usize,
    meters: Arc<Meters>,
    leases: LeaseTable,
}

/// The settler and the lease renewal.
struct HelperTasks {
    tasks: JoinSet<()>,
    settled: CancellationToken,
    stop_leases: CancellationToken,
}

impl Run {
    fn start(pipeline: Pipeline, capacity: usize) -> (Arc<Self>, SettlementSender, HelperTasks) {
        let Pipeline { queue, options } = pipeline;
        let meters = Arc::new(Meters::new(queue.name()));
        let leases = LeaseTable::new(queue.lease());
        let run = Arc::new(Self { queue, options, capacity, meters, leases });
        let (sender, settlements) = settle::channel();
        let (settled, stop_leases) = (CancellationToken::new(), CancellationToken::new());
        let mut tasks = JoinSet::new();
        tasks.spawn(lease::renew_until(run.clone(), stop_leases.clone()));
        let (settling, done) = (run.clone(), settled.clone().drop_guard());
        tasks.spawn(async move {
            let _done = done;
            settle::settle_all(settling, settlements).await;
        });
        (run, sender, HelperTasks { tasks, settled, stop_leases })
    }

    /// Waits for `handlers`, at most for [`PipelineOptions::drain_timeout`].
    async fn drain(&self, handlers: impl Future<Output = ()>) {
        if tokio::time::timeout(self.options.drain_timeout, handlers).await.is_err() {
            tracing::warn!(
                queue = self.queue.name(),
                "drain timeout: handlers are still running; their messages become due again when their leases end"
            );
        }
    }

    /// Waits for the last settlements, stops the helper tasks and returns the totals.
    async fn finish(&self, mut helpers: HelperTasks) -> Summary {
        if tokio::time::timeout(SETTLE_GRACE, helpers.settled.cancelled()).await.is_err() {
            tracing::warn!(
                queue = self.queue.name(),
                "settle timeout: unsettled messages become due again when their leases end"
            );
            helpers.tasks.abort_all();
        }
        helpers.stop_leases.cancel();
        while helpers.tasks.join_next().await.is_some() {}
        self.meters.summary(self.leases.len())
    }
}
