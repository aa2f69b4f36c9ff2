//! Receives messages while there are free slots and turns them into deliveries.

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::delivery::{Delivery, panic_reason};
use super::options::PipelineOptions;
use super::{Causes, Desk, Engine, GATHER_TIME};
use crate::message::Message;
use crate::queue::QueueError;

/// How long a receive may go on after the shutdown signal where the server may have taken messages for it already. If
/// there are any they come at once; a receive that still waits then is one for which there is nothing.
const RECEIVE_GRACE: Duration = Duration::from_secs(1);

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
    /// Takes messages while there are free slots and gives what came together to `start`; returns on shutdown, with what it had
    /// taken but not started.
    pub(super) async fn fetch<R: Future<Output = ()> + Send>(
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
}

impl Flow {
    fn pause(&self, options: &PipelineOptions) -> Duration {
        match self.failures {
            0 => Duration::ZERO,
            failures => options.receive_backoff.delay(failures, rand::random()),
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
