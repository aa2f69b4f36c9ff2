//! Receives messages while slots are free and turns them into deliveries.
//!
//! One receive waits for messages. While receives come back full, others run beside it and do not wait. After a failure
//! the next receive pauses ([`PipelineOptions::receive_backoff`]).

use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::delivery::Delivery;
use super::options::PipelineOptions;
use super::settle::SettlementSender;
use super::{FILL_WAIT, Run, panic_reason};
use crate::error_chain::ErrorChain;
use crate::message::Message;
use crate::queue::QueueError;

/// How long receives in flight may continue after the shutdown signal, on queues that are not
/// [`cancel_safe`](crate::Capabilities::cancel_safe): the server may already have leased messages to them. Such messages
/// arrive within this time; a receive that is still waiting after it has none.
const RECEIVE_GRACE: Duration = Duration::from_secs(1);

/// One receive's answer, and the slots that were reserved for it.
struct ReceiveAnswer {
    result: Result<Vec<Message>, QueueError>,
    slots: OwnedSemaphorePermit,
}

/// What the previous receives say about the next one.
#[derive(Default)]
struct ReceiveState {
    /// The last receive brought as many messages as it had slots: the queue probably holds more.
    full: bool,
    /// Failures since the last success.
    failures: u32,
}

impl Run {
    /// Receives into free slots and passes each answer's deliveries to `start`. Returns on shutdown, with the deliveries
    /// that were received and not started.
    pub(super) async fn fetch<R: Future<Output = ()> + Send>(
        self: &Arc<Self>,
        settlements: SettlementSender,
        ready: impl Fn() -> R,
        shutdown: &CancellationToken,
        mut start: impl FnMut(Vec<Delivery>),
    ) -> Vec<Delivery> {
        let slots = Arc::new(Semaphore::new(self.capacity));
        let per_request = self.queue.capabilities().messages_per_request.min(self.capacity);
        let batch_max = self.options.receive_max.clamp(1, if per_request > 1 { per_request } else { self.capacity });
        let mut receives = FuturesUnordered::new();
        let mut state = ReceiveState::default();
        loop {
            let another = state.full
                && receives.len() < self.options.concurrent_receives_max
                && slots.available_permits() >= batch_max;
            // While the queue holds more, wait up to `FILL_WAIT` for the slots of a whole request.
            let wanted = if state.full { per_request.clamp(1, batch_max) } else { 1 };
            let mut reserved = tokio::select! {
                biased;
                () = shutdown.cancelled() => break,
                Some(answer) = receives.next(), if !receives.is_empty() => {
                    start(self.deliveries(answer, &mut state, &settlements).collect());
                    continue;
                }
                Ok(slots) = reserve(&slots, wanted), if receives.is_empty() || another => slots,
            };
            let more = slots.available_permits().min(batch_max.saturating_sub(reserved.num_permits()));
            if let Ok(others) = slots.clone().try_acquire_many_owned(u32::try_from(more).unwrap_or(0)) {
                reserved.merge(others);
            }
            let wait = if receives.is_empty() { self.options.receive_wait } else { Duration::ZERO };
            receives.push(self.receive(state.pause(&self.options), ready(), reserved, wait, shutdown));
        }
        // Keep the answers that have arrived; a receive that still waits is cancelled when `receives` is dropped.
        let mut unstarted = Vec::new();
        // Bypass Tokio's coop budget, or a finished receive may look pending.
        while let Some(Some(answer)) = tokio::task::unconstrained(receives.next()).now_or_never() {
            unstarted.extend(self.deliveries(answer, &mut state, &settlements));
        }
        if !self.queue.capabilities().cancel_safe {
            let until = Instant::now() + RECEIVE_GRACE;
            while let Ok(Some(answer)) = tokio::time::timeout_at(until, receives.next()).await {
                unstarted.extend(self.deliveries(answer, &mut state, &settlements));
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
    ) -> ReceiveAnswer {
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        if let Err(panic) = AssertUnwindSafe(ready).catch_unwind().await {
            let reason = panic_reason(&*panic);
            tracing::error!(queue = self.queue.name(), reason, "the handler's `ready` failed; receiving anyway");
        }
        let result = match shutdown.is_cancelled() {
            true => Ok(Vec::new()),
            false => self.queue.receive(slots.num_permits(), wait).await,
        };
        ReceiveAnswer { result, slots }
    }

    /// Turns an answer into deliveries, and updates `state`. A failed receive has none.
    fn deliveries(
        self: &Arc<Self>,
        answer: ReceiveAnswer,
        state: &mut ReceiveState,
        settlements: &SettlementSender,
    ) -> impl Iterator<Item = Delivery> {
        let ReceiveAnswer { result, mut slots } = answer;
        let queue = self.queue.name();
        let messages = match result {
            Ok(messages) => {
                if state.failures > 0 {
                    tracing::info!(queue, failures = state.failures, "receiving again");
                }
                *state = ReceiveState { full: messages.len() >= slots.num_permits(), failures: 0 };
                messages
            }
            Err(error) => {
                if state.failures == 0 {
                    tracing::warn!(queue, error = %ErrorChain(&error), "cannot receive; retrying until it succeeds");
                }
                *state = ReceiveState { full: false, failures: state.failures.saturating_add(1) };
                self.meters.receive_failed();
                Vec::new()
            }
        };
        let (run, settlements) = (self.clone(), settlements.clone());
        messages.into_iter().map(move |message| {
            run.meters.received();
            let (lease_key, slot) = (run.leases.add(&message, Instant::now()), slots.split(1));
            let (run, settlements) = (run.clone(), settlements.clone());
            Delivery { message, lease_key, run, settlements, handed_in: false, slot }
        })
    }
}

impl ReceiveState {
    fn pause(&self, options: &PipelineOptions) -> Duration {
        match self.failures {
            0 => Duration::ZERO,
            failures => options.receive_backoff.delay(failures, rand::random()),
        }
    }
}

/// Reserves `wanted` slots; after [`FILL_WAIT`] the first slot that is free.
async fn reserve(slots: &Arc<Semaphore>, wanted: usize) -> Result<OwnedSemaphorePermit, AcquireError> {
    let all = slots.clone().acquire_many_owned(u32::try_from(wanted).unwrap_or(1));
    match tokio::time::timeout(FILL_WAIT, all).await {
        Ok(all) => all,
        Err(_) => slots.clone().acquire_owned().await,
    }
}
