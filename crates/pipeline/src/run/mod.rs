//! Fetch, handle, settle: the loop that turns a [`Queue`] and a [`Handler`] into finished work.
//!
//! [`Pipeline::run`] reads top to bottom. Around it work two helpers: one keeps the leases of what is being handled
//! ([`lease`]), one tells the queue what became of it ([`settle`]). [`Pipeline::run_batches`] puts a gathering stage
//! between the messages and the handler. Nothing here is unbounded and every task is joined before `run` returns.

mod batch_buffer;
mod lease;
mod meters;
mod settle;

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt, stream};
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::handler::{BatchHandler, Handler, Outcome};
use crate::message::Message;
use crate::queue::{Queue, QueueError};
use crate::retry::RetryPolicy;
use batch_buffer::Batch;
use lease::Leases;
use meters::Meters;
pub use meters::Summary;
use settle::{Kind, Verdict};

/// How many verdicts may wait to be settled; a handler that is done then waits, which stops the fetching in the end.
const VERDICTS_WAITING_MAX: usize = 1024;
/// How long the last verdicts may take after the handlers have finished.
const SETTLE_GRACE: Duration = Duration::from_secs(10);
/// How long a receive may go on after the shutdown signal where the server may have taken messages for it already. If
/// there are any they come at once; a receive that still waits then is one for which there is nothing.
const RECEIVE_GRACE: Duration = Duration::from_secs(1);
/// How long a request waits to be full, where a full one costs no more ([`Capabilities::request_carries`]).
///
/// [`Capabilities::request_carries`]: crate::queue::Capabilities::request_carries
const GATHER_TIME: Duration = Duration::from_millis(10);

/// How a pipeline runs. Every field has a default.
#[derive(Debug, Clone)]
pub struct PipelineOptions {
    /// How many messages are handled at once. 64 by default.
    pub concurrency: usize,
    /// How many messages one receive asks for, if as many slots are free. 64 by default, and 10 on SQS, which gives no
    /// more at once: a full answer can then be told from a queue that is running dry.
    pub receive_max: usize,
    /// How many receives run side by side while the queue has more than one can carry. 4 by default.
    pub receives_max: usize,
    /// How long a receive waits for a message. 20 seconds by default.
    pub receive_wait: Duration,
    /// How long handlers may go on after the shutdown signal. 120 seconds by default.
    pub drain_timeout: Duration,
    /// What follows a handler's panic, by the message's receive count: 3 attempts, from 5 seconds, by default.
    pub panic_retry: RetryPolicy,
    /// Pauses after failed receives. The attempts are not limited. From 0.1 to 5 seconds by default.
    pub receive_backoff: RetryPolicy,
}

impl Default for PipelineOptions {
    fn default() -> Self {
        Self {
            concurrency: 64,
            receive_max: 64,
            receives_max: 4,
            receive_wait: Duration::from_secs(20),
            drain_timeout: Duration::from_secs(120),
            panic_retry: RetryPolicy::default(),
            receive_backoff: RetryPolicy {
                attempts_max: u32::MAX,
                first_delay: Duration::from_millis(100),
                factor: 2.0,
                delay_max: Duration::from_secs(5),
            },
        }
    }
}

/// How messages are gathered for a [`BatchHandler`].
#[derive(Debug, Clone)]
pub struct BatchOptions {
    /// A batch of this many is handled at once. 1000 by default.
    pub size: usize,
    /// A batch is handled this long after its first message came, full or not. 1 second by default.
    pub timeout: Duration,
    /// How many batches are handled side by side. 2 by default.
    pub batchers: usize,
    /// How many messages are prepared side by side. 8 by default.
    pub processors: usize,
}

impl Default for BatchOptions {
    fn default() -> Self {
        Self { size: 1000, timeout: Duration::from_secs(1), batchers: 2, processors: 8 }
    }
}

impl BatchOptions {
    /// Enough to fill one batch while the others are being handled.
    fn in_flight_max(&self) -> usize {
        self.size.max(1) * (self.batchers.max(1) + 1) + self.processors.max(1)
    }
}

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

    /// Prepares each message, gathers them into batches, hands each batch to `handler` and settles every message in
    /// it by its own verdict, until `shutdown` is cancelled. Then it does as [`Pipeline::run`]; batches that are not
    /// full are handled as they are.
    ///
    /// In flight are at most `size × (batchers + 1) + processors` messages; [`PipelineOptions::concurrency`] does not
    /// apply.
    pub async fn run_batches<H: BatchHandler>(
        self,
        handler: Arc<H>,
        batching: BatchOptions,
        shutdown: CancellationToken,
    ) -> Summary {
        let (engine, desk, helpers) = Engine::start(self, batching.in_flight_max());
        let shares = batching.processors.max(1);
        let processors = Arc::new(Semaphore::new(shares));
        // Every share holds a slot until it is gathered, so there is room for all of them.
        let (in_order, gathering) = mpsc::channel(batching.in_flight_max());
        let mut gatherer = JoinSet::new();
        gatherer.spawn(gather(handler.clone(), batching, gathering));
        let mut preparing = JoinSet::new();

        let ready = || {
            let handler = handler.clone();
            async move { handler.ready().await }
        };
        let start = |mut received: Vec<Delivery>| {
            while preparing.try_join_next().is_some() {}
            let share = received.len().div_ceil(shares);
            while !received.is_empty() {
                let rest = received.split_off(share.min(received.len()));
                let (done, share) = oneshot::channel();
                // Closed only if the gatherer has panicked; then each share's messages come back when their leases end.
                drop(in_order.try_send(share));
                let (handler, processors) = (handler.clone(), processors.clone());
                preparing.spawn(prepare_some(handler, processors, received, done, shutdown.clone()));
                received = rest;
            }
        };
        let unstarted = engine.fetch(desk, ready, &shutdown, start).await;

        for delivery in unstarted {
            delivery.settle(Kind::HandBack).await;
        }
        // The last sender gone tells the gatherer to flush.
        drop(in_order);
        let drained = async {
            while preparing.join_next().await.is_some() {}
            while gatherer.join_next().await.is_some() {}
        };
        engine.drain(drained).await;
        drop((preparing, gatherer));
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

/// Messages, each with what was made of it.
type Prepared<I> = Vec<(Delivery, I)>;

/// What one processor has prepared.
struct Share<I> {
    prepared: Prepared<I>,
    /// Of a message that joins no batch: a share holds a slot even if it is empty.
    _slot: Option<OwnedSemaphorePermit>,
}

/// Prepares one processor's share of what came together, one after the other: a task for each message would cost more
/// than most preparing does, and they would not stay in order.
async fn prepare_some<H: BatchHandler>(
    handler: Arc<H>,
    processors: Arc<Semaphore>,
    deliveries: Vec<Delivery>,
    done: oneshot::Sender<Share<H::Item>>,
    shutdown: CancellationToken,
) {
    let turn = tokio::select! {
        biased;
        () = shutdown.cancelled() => None,
        turn = processors.acquire() => turn.ok(),
    };
    let mut prepared = Vec::with_capacity(deliveries.len());
    let mut slot = None;
    let mut rest = deliveries.into_iter();
    while let Some(mut delivery) = rest.next() {
        if turn.is_none() || shutdown.is_cancelled() {
            delivery.settle(Kind::HandBack).await;
            continue;
        }
        let checked = {
            let mut checking = std::pin::pin!(AssertUnwindSafe(handler.prepare(&delivery.message)).catch_unwind());
            tokio::select! {
                biased;
                checked = &mut checking => checked,
                // The others do not wait for this one to be given back.
                () = shutdown.cancelled() => {
                    for other in rest.by_ref() {
                        other.settle(Kind::HandBack).await;
                    }
                    checking.await
                }
            }
        };
        match checked.unwrap_or_else(|panic| Err(delivery.failed(&panic_reason(&*panic)))) {
            Ok(item) => prepared.push((delivery, item)),
            Err(outcome) => {
                slot = delivery.slot.take();
                delivery.engine.meters.handled_alone();
                delivery.settle(outcome.into()).await;
            }
        }
    }
    // If the gatherer is gone the drain is over, and deliveries count as abandoned when they are dropped.
    drop(done.send(Share { prepared, _slot: slot }));
}

/// Makes batches of the shares in the order in which they came, not in which they are prepared: a queue may need far
/// fewer words for messages settled in its own order. A share that takes long keeps those after it waiting.
async fn gather<H: BatchHandler>(
    handler: Arc<H>,
    options: BatchOptions,
    mut in_order: mpsc::Receiver<oneshot::Receiver<Share<H::Item>>>,
) {
    let mut shares = std::pin::pin!(stream::poll_fn(|cx| in_order.poll_recv(cx)).then(|share| share));
    let batchers = Arc::new(Semaphore::new(options.batchers.max(1)));
    let mut handling = JoinSet::new();
    let mut batch = Batch::new(options.size, options.timeout);
    let mut open = true;
    while open {
        let due = batch.due();
        let mut full = Vec::new();
        tokio::select! {
            next = shares.next() => match next {
                Some(Ok(share)) => {
                    let now = Instant::now();
                    full.extend(share.prepared.into_iter().filter_map(|entry| batch.push(entry, now)));
                }
                // Its task was aborted at the end of the drain.
                Some(Err(_)) => {}
                None => {
                    open = false;
                    full.extend(batch.flush());
                }
            },
            () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                full.extend(batch.flush());
            }
        }
        for entries in full {
            // Waiting here stops the gathering, then the preparing, then the fetching.
            let turn = batchers.clone().acquire_owned().await.ok();
            while handling.try_join_next().is_some() {}
            handling.spawn(handle_batch(handler.clone(), entries, turn));
        }
    }
    while handling.join_next().await.is_some() {}
}

async fn handle_batch<H: BatchHandler>(
    handler: Arc<H>,
    entries: Prepared<H::Item>,
    _turn: Option<OwnedSemaphorePermit>,
) {
    let started = Instant::now();
    let (deliveries, items): (Vec<Delivery>, Vec<H::Item>) = entries.into_iter().unzip();
    let Some(meters) = deliveries.first().map(|delivery| delivery.engine.meters.clone()) else { return };
    let messages: Vec<&Message> = deliveries.iter().map(|delivery| &delivery.message).collect();
    let failure = match AssertUnwindSafe(handler.handle(&items, &messages)).catch_unwind().await {
        Ok(outcomes) if outcomes.len() == deliveries.len() => Err(outcomes),
        Ok(outcomes) => Ok(format!("the handler gave {} outcomes for {} messages", outcomes.len(), items.len())),
        Err(panic) => Ok(panic_reason(&*panic)),
    };
    let outcomes = match failure {
        Err(outcomes) => outcomes,
        Ok(reason) => deliveries.iter().map(|delivery| delivery.failed(&reason)).collect(),
    };
    meters.handled(deliveries.len() as u64, started.elapsed());
    for (delivery, outcome) in deliveries.into_iter().zip(outcomes) {
        delivery.settle(outcome.into()).await;
    }
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

/// One message with all it needs on its way: its slot, its lease and the desk that settles it.
struct Delivery {
    message: Message,
    key: u64,
    engine: Arc<Engine>,
    desk: Desk,
    handed_in: bool,
    /// Freed when the delivery is dropped.
    slot: Option<OwnedSemaphorePermit>,
}

impl Delivery {
    async fn settle(mut self, kind: Kind) {
        let verdict = Verdict::new(self.key, &self.message, kind);
        // The desk closes after the last delivery is gone; if it is closed all the same, nobody can settle this.
        self.handed_in = self.desk.send(verdict).await.is_ok();
    }

    /// What becomes of a message whose handler did not come to a verdict.
    fn failed(&self, reason: &str) -> Outcome {
        let Message { id, receives, .. } = &self.message;
        let policy = &self.engine.options.panic_retry;
        self.engine.meters.panicked();
        let queue = self.engine.queue.name();
        tracing::error!(queue, messageId = %id, attempt = receives, reason, "a handler failed");
        if policy.allows_another(*receives) {
            Outcome::Retry { after: policy.delay(*receives, rand::random()), reason: reason.to_owned() }
        } else {
            Outcome::Dead { reason: format!("{reason} (attempt {receives} of {})", policy.attempts_max) }
        }
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        self.engine.meters.left(!self.handed_in);
        if !self.handed_in {
            self.engine.leases.forget(self.key);
        }
    }
}

/// So many slots, or after a moment the first that comes free.
async fn reserve(slots: &Arc<Semaphore>, wanted: usize) -> Result<OwnedSemaphorePermit, AcquireError> {
    let all = slots.clone().acquire_many_owned(u32::try_from(wanted).unwrap_or(1));
    match tokio::time::timeout(GATHER_TIME, all).await {
        Ok(all) => all,
        Err(_) => slots.clone().acquire_owned().await,
    }
}

/// What came of one receive.
struct Received {
    result: Result<Vec<Message>, QueueError>,
    slots: OwnedSemaphorePermit,
}

/// How the receiving goes.
#[derive(Default)]
struct Flow {
    /// The last receive brought all it could carry: there is probably more.
    full: bool,
    failures: u32,
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

    /// Takes messages while there are free slots and gives what came together to `start`; returns on shutdown, with what it had
    /// taken but not started.
    async fn fetch<R: Future<Output = ()> + Send>(
        self: &Arc<Self>,
        desk: Desk,
        ready: impl Fn() -> R,
        shutdown: &CancellationToken,
        mut start: impl FnMut(Vec<Delivery>),
    ) -> Vec<Delivery> {
        let slots = Arc::new(Semaphore::new(self.capacity));
        let carries = self.queue.capabilities().request_carries.min(self.capacity);
        let batch_max = self.options.receive_max.clamp(1, if carries > 1 { carries } else { self.capacity });
        let mut receives = FuturesUnordered::new();
        let mut flow = Flow::default();
        loop {
            // One receive waits for messages. Others join it only while they come back full, and ask without waiting.
            let another =
                flow.full && receives.len() < self.options.receives_max && slots.available_permits() >= batch_max;
            // With more to come, a receive that costs the same for many waits a moment for slots to put them in.
            let wanted = if flow.full { carries.clamp(1, batch_max) } else { 1 };
            let mut reserved = tokio::select! {
                biased;
                () = shutdown.cancelled() => break,
                Some(received) = receives.next(), if !receives.is_empty() => {
                    start(self.sort(received, &mut flow, &desk).collect());
                    continue;
                }
                Ok(slots) = reserve(&slots, wanted), if receives.is_empty() || another => slots,
            };
            let more = slots.available_permits().min(batch_max.saturating_sub(reserved.num_permits()));
            if let Ok(others) = slots.clone().try_acquire_many_owned(u32::try_from(more).unwrap_or(0)) {
                reserved.merge(others);
            }
            let wait = if receives.is_empty() { self.options.receive_wait } else { Duration::ZERO };
            receives.push(self.receive(flow.pause(&self.options), ready(), reserved, wait, shutdown));
        }
        // A receive that has already taken its messages is finished; one that still waits is dropped.
        let mut unstarted = Vec::new();
        // Unconstrained: the runtime makes a task that has done much wait, even for what is there.
        while let Some(Some(received)) = tokio::task::unconstrained(receives.next()).now_or_never() {
            unstarted.extend(self.sort(received, &mut flow, &desk));
        }
        if !self.queue.capabilities().cancel_safe {
            let until = Instant::now() + RECEIVE_GRACE;
            while let Ok(Some(received)) = tokio::time::timeout_at(until, receives.next()).await {
                unstarted.extend(self.sort(received, &mut flow, &desk));
            }
        }
        unstarted
    }

    async fn receive(
        &self,
        pause: Duration,
        ready: impl Future<Output = ()> + Send,
        slots: OwnedSemaphorePermit,
        wait: Duration,
        shutdown: &CancellationToken,
    ) -> Received {
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        if let Err(panic) = AssertUnwindSafe(ready).catch_unwind().await {
            tracing::error!(queue = self.queue.name(), reason = panic_reason(&*panic), "`ready` of the handler failed");
        }
        let result = match shutdown.is_cancelled() {
            true => Ok(Vec::new()),
            false => self.queue.receive(slots.num_permits(), wait).await,
        };
        Received { result, slots }
    }

    /// Makes deliveries of what was received, and keeps track of how the receiving goes.
    fn sort(self: &Arc<Self>, received: Received, flow: &mut Flow, desk: &Desk) -> impl Iterator<Item = Delivery> {
        let Received { result, mut slots } = received;
        let queue = self.queue.name();
        let messages = match result {
            Ok(messages) => {
                if flow.failures > 0 {
                    tracing::info!(queue, failures = flow.failures, "receiving again");
                }
                *flow = Flow { full: messages.len() >= slots.num_permits(), failures: 0 };
                messages
            }
            Err(error) => {
                if flow.failures == 0 {
                    tracing::warn!(queue, error = %Causes(&error), "cannot receive; trying again until it works");
                }
                *flow = Flow { full: false, failures: flow.failures.saturating_add(1) };
                self.meters.receive_failed();
                Vec::new()
            }
        };
        let (engine, desk) = (self.clone(), desk.clone());
        messages.into_iter().map(move |message| {
            engine.meters.received();
            let key = engine.leases.hold(&message);
            let slot = slots.split(1);
            Delivery { message, key, engine: engine.clone(), desk: desk.clone(), handed_in: false, slot }
        })
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

impl Flow {
    fn pause(&self, options: &PipelineOptions) -> Duration {
        match self.failures {
            0 => Duration::ZERO,
            failures => options.receive_backoff.delay(failures, rand::random()),
        }
    }
}

fn panic_reason(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("the handler panicked: {}", text.unwrap_or("no text"))
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
