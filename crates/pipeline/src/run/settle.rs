//! Passes each message's outcome to the queue: `ack`, `retry_after` or `bury`.
//!
//! Each of the three has a loop of its own, so that an acknowledgement never waits for a dead-letter queue that refuses.
//! Settlements that accumulate while a call is in flight share the next call. An idle settler sends one immediately;
//! where a request carries many messages at the cost of one, it waits up to [`FILL_WAIT`] for others. A settlement that
//! fails for a transient reason is retried while its lease lasts; a burial is retried [`BURIAL_TRIES_MAX`] times, and then
//! the message is handed back to the queue.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tokio::time::Instant;

use super::{FILL_WAIT, Run, SETTLEMENT_BACKLOG_MAX};
use crate::error_chain::ErrorChain;
use crate::handler::Outcome;
use crate::message::{Message, MessageId, Receipt};
use crate::queue::QueueError;
use crate::retry::RetryPolicy;

/// Settlements in one round.
const GROUP_MAX: usize = 1000;
/// Pauses after a round with failures. The lease limits the attempts.
const BACKOFF: RetryPolicy = RetryPolicy {
    attempts_max: u32::MAX,
    first_delay: Duration::from_millis(50),
    factor: 2.0,
    delay_max: Duration::from_secs(2),
};

/// Attempts to bury a message before it is handed back.
const BURIAL_TRIES_MAX: u32 = 3;
/// Pause before a message that could not be buried is delivered again.
const UNBURIED_DELAY: Duration = Duration::from_secs(10);

/// What the queue has to do with one delivery.
pub(super) struct Settlement {
    lease_key: u64,
    id: MessageId,
    receipt: Receipt,
    receives: u32,
    disposition: Disposition,
    /// An earlier attempt had no answer and may have taken effect.
    outcome_unknown: bool,
    /// Failed attempts.
    failures: u32,
    /// Why the last attempt failed.
    error: Option<String>,
}

pub(super) enum Disposition {
    Handled(Outcome),
    /// The dead-letter queue does not take it: delivered again later.
    Unburied,
    /// Not started: returned to the queue at shutdown.
    HandBack,
}

impl From<Outcome> for Disposition {
    fn from(outcome: Outcome) -> Self {
        Self::Handled(outcome)
    }
}

impl Settlement {
    pub(super) fn new(lease_key: u64, message: &Message, disposition: Disposition) -> Self {
        let (id, receipt, receives) = (message.id.clone(), message.receipt.clone(), message.receives);
        Self { lease_key, id, receipt, receives, disposition, outcome_unknown: false, failures: 0, error: None }
    }

    fn unburied(self) -> Self {
        Self { disposition: Disposition::Unburied, failures: 0, ..self }
    }
}

/// Where deliveries hand in their settlements.
#[derive(Clone)]
pub(super) struct SettlementSender {
    acks: mpsc::Sender<Settlement>,
    retries: mpsc::Sender<Settlement>,
    burials: mpsc::Sender<Settlement>,
}

/// The settlements that have been handed in.
pub(super) struct Settlements {
    acks: mpsc::Receiver<Settlement>,
    retries: mpsc::Receiver<Settlement>,
    burials: mpsc::Receiver<Settlement>,
    /// Where burials go that fail too often.
    hand_back: mpsc::Sender<Settlement>,
}

pub(super) fn channel() -> (SettlementSender, Settlements) {
    let (acks, acks_in) = mpsc::channel(SETTLEMENT_BACKLOG_MAX);
    let (retries, retries_in) = mpsc::channel(SETTLEMENT_BACKLOG_MAX);
    let (burials, burials_in) = mpsc::channel(SETTLEMENT_BACKLOG_MAX);
    let hand_back = retries.clone();
    let settlements = Settlements { acks: acks_in, retries: retries_in, burials: burials_in, hand_back };
    (SettlementSender { acks, retries, burials }, settlements)
}

impl SettlementSender {
    /// Hands in one settlement, and waits while too many of its kind are waiting. `false`: the settler was stopped.
    pub(super) async fn send(&self, settlement: Settlement) -> bool {
        let sent = match &settlement.disposition {
            Disposition::Handled(Outcome::Done) => self.acks.send(settlement).await,
            Disposition::Handled(Outcome::Retry { .. }) | Disposition::HandBack | Disposition::Unburied => {
                self.retries.send(settlement).await
            }
            // A dead-letter queue that does not answer must not occupy the handlers.
            Disposition::Handled(Outcome::Dead { .. }) => match self.burials.try_send(settlement) {
                Ok(()) => Ok(()),
                Err(TrySendError::Full(settlement)) => self.retries.send(settlement.unburied()).await,
                Err(TrySendError::Closed(_)) => return false,
            },
        };
        sent.is_ok()
    }
}

/// Settles until every sender is dropped and nothing is left to retry.
pub(super) async fn settle_all(run: Arc<Run>, settlements: Settlements) {
    let Settlements { acks, retries, burials, hand_back } = settlements;
    // The end of the burials drops the last sender of retries.
    tokio::join!(settle(&run, acks, None), settle(&run, retries, None), settle(&run, burials, Some(hand_back)));
}

/// Settles one kind of outcome. With `hand_back`, what fails too often is handed back to the queue.
async fn settle(run: &Run, mut settlements: mpsc::Receiver<Settlement>, hand_back: Option<mpsc::Sender<Settlement>>) {
    let mut to_retry: Vec<Settlement> = Vec::new();
    let mut failures = 0;
    loop {
        let mut group = std::mem::take(&mut to_retry);
        if group.is_empty() {
            let Some(first) = settlements.recv().await else { return };
            group.push(first);
        } else {
            tokio::time::sleep(BACKOFF.delay(failures, rand::random())).await;
        }
        while group.len() < GROUP_MAX
            && let Ok(settlement) = settlements.try_recv()
        {
            group.push(settlement);
        }
        fill_requests(run, &mut group, &mut settlements).await;
        let tried = group.len();
        to_retry = settle_group(run, group).await;
        run.meters.settle_retried(to_retry.len());
        failures = if to_retry.is_empty() { 0 } else { failures + 1 };
        if failures == 1 {
            let error = to_retry.first().and_then(|settlement| settlement.error.as_deref()).unwrap_or_default();
            tracing::warn!(queue = run.queue.name(), failed = to_retry.len(), tried, error, "cannot settle; retrying");
        }
        if let Some(hand_back) = &hand_back {
            for settlement in to_retry.extract_if(.., |settlement| settlement.failures >= BURIAL_TRIES_MAX) {
                // Closed only if the settler was stopped; then the message is due again when its lease ends.
                drop(hand_back.send(settlement.unburied()).await);
            }
        }
    }
}

/// Waits up to [`FILL_WAIT`] until the group fills its last request, where a full request costs no more, and only while
/// other messages are in flight.
async fn fill_requests(run: &Run, group: &mut Vec<Settlement>, settlements: &mut mpsc::Receiver<Settlement>) {
    let per_request = run.queue.capabilities().messages_per_request.max(1);
    let until = Instant::now() + FILL_WAIT;
    while !group.len().is_multiple_of(per_request) && group.len() < run.leases.len() {
        match tokio::time::timeout_at(until, settlements.recv()).await {
            Ok(Some(settlement)) => group.push(settlement),
            Ok(None) | Err(_) => return,
        }
    }
}

/// Runs one round and returns the settlements to retry.
pub(super) async fn settle_group(run: &Run, group: Vec<Settlement>) -> Vec<Settlement> {
    run.leases.start_settling(group.iter().map(|settlement| settlement.lease_key));
    let queue = &*run.queue;
    let delay_max = queue.capabilities().delay_max;
    let (mut acks, mut retries, mut burials) = (Vec::new(), Vec::new(), Vec::new());
    for settlement in &group {
        let receipt = settlement.receipt.clone();
        match &settlement.disposition {
            Disposition::Handled(Outcome::Done) => acks.push(receipt),
            Disposition::Handled(Outcome::Retry { after, .. }) => retries.push((receipt, (*after).min(delay_max))),
            Disposition::Handled(Outcome::Dead { reason }) => burials.push((receipt, reason.clone())),
            Disposition::HandBack => retries.push((receipt, Duration::ZERO)),
            Disposition::Unburied => retries.push((receipt, UNBURIED_DELAY.min(delay_max))),
        }
    }
    let (acked, retried, buried) = tokio::join!(
        async { if acks.is_empty() { Vec::new() } else { queue.ack(&acks).await } },
        async { if retries.is_empty() { Vec::new() } else { queue.retry_after(&retries).await } },
        async { if burials.is_empty() { Vec::new() } else { queue.bury(&burials).await } },
    );
    let (mut acked, mut retried, mut buried) = (acked.into_iter(), retried.into_iter(), buried.into_iter());
    let mut to_retry = Vec::new();
    for settlement in group {
        let answer = match &settlement.disposition {
            Disposition::Handled(Outcome::Done) => acked.next(),
            Disposition::Handled(Outcome::Retry { .. }) | Disposition::HandBack | Disposition::Unburied => {
                retried.next()
            }
            Disposition::Handled(Outcome::Dead { .. }) => buried.next(),
        };
        let answer = answer.unwrap_or_else(|| Err(QueueError::OutcomeUnknown("no answer for this entry".into())));
        to_retry.extend(apply_answer(run, settlement, answer));
    }
    to_retry
}

/// Counts and logs one answer. Returns the settlement if it is to be retried.
fn apply_answer(run: &Run, mut settlement: Settlement, answer: Result<(), QueueError>) -> Option<Settlement> {
    let (queue, id, lease_key) = (run.queue.name(), settlement.id.clone(), settlement.lease_key);
    let is_burial = matches!(settlement.disposition, Disposition::Handled(Outcome::Dead { .. }));
    match answer {
        Err(error) if error.is_transient() && run.leases.is_valid(lease_key, Instant::now()) => {
            settlement.outcome_unknown |= matches!(error, QueueError::OutcomeUnknown(_));
            settlement.failures = settlement.failures.saturating_add(1);
            settlement.error = Some(ErrorChain(&error).to_string());
            run.leases.retry_settling(lease_key, settlement.outcome_unknown);
            return Some(settlement);
        }
        Err(error) if error.is_transient() => {
            remove_lost(run, lease_key);
            run.meters.settle_failed();
            let error = ErrorChain(&error);
            tracing::warn!(queue, messageId = %id, %error, "lease ended before settlement; the message becomes due again");
        }
        // An earlier attempt without an answer took effect: the message was settled, not lost.
        Err(QueueError::LeaseLost) if settlement.outcome_unknown => record_settled(run, &settlement),
        Err(QueueError::LeaseLost) => {
            remove_lost(run, lease_key);
            tracing::warn!(queue, messageId = %id, "lease lost before settlement; the message becomes due again");
        }
        // Another attempt would fail in the same way: handed back at once.
        Err(error) if is_burial => {
            tracing::error!(queue, messageId = %id, error = %ErrorChain(&error), "the queue rejected the burial");
            settlement.failures = BURIAL_TRIES_MAX;
            settlement.error = Some(ErrorChain(&error).to_string());
            run.leases.retry_settling(lease_key, settlement.outcome_unknown);
            return Some(settlement);
        }
        Err(error) => {
            run.leases.remove(lease_key);
            run.meters.settle_failed();
            tracing::error!(queue, messageId = %id, error = %ErrorChain(&error), "the queue rejected the settlement");
        }
        Ok(()) => record_settled(run, &settlement),
    }
    None
}

/// Removes the lease and counts it as lost, unless the renewal has counted it.
fn remove_lost(run: &Run, lease_key: u64) {
    if !run.leases.remove(lease_key) {
        run.meters.lease_lost();
    }
}

fn record_settled(run: &Run, settlement: &Settlement) {
    run.leases.remove(settlement.lease_key);
    let (queue, id, attempt) = (run.queue.name(), &settlement.id, settlement.receives);
    match &settlement.disposition {
        Disposition::Handled(Outcome::Done) => run.meters.done(),
        Disposition::Handled(Outcome::Retry { after, reason }) => {
            run.meters.retried();
            let after_ms = after.as_millis();
            tracing::info!(queue, messageId = %id, attempt, after_ms, reason, "message scheduled for retry");
        }
        Disposition::Handled(Outcome::Dead { reason }) => {
            run.meters.dead();
            tracing::warn!(queue, messageId = %id, attempt, reason, "message moved to the dead-letter queue");
        }
        Disposition::HandBack => run.meters.handed_back(),
        Disposition::Unburied => {
            run.meters.unburied();
            let reason = settlement.error.as_deref().unwrap_or("too many burials wait");
            tracing::warn!(queue, messageId = %id, attempt, reason, "message not buried; it is delivered again later");
        }
    }
}
