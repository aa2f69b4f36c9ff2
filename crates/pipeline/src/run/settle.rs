//! Passes each message's outcome to the queue: `ack`, `retry_after` or `bury`.
//!
//! Settlements that accumulate while a call is in flight share the next call. An idle settler sends one immediately;
//! where a request carries many messages at the cost of one, it waits up to [`FILL_WAIT`] for others. A settlement that
//! fails for a transient reason is retried while its lease lasts.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::{FILL_WAIT, Run};
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

/// What the queue has to do with one delivery.
pub(super) struct Settlement {
    lease_key: u64,
    id: MessageId,
    receipt: Receipt,
    receives: u32,
    disposition: Disposition,
    /// An earlier attempt had no answer and may have taken effect.
    outcome_unknown: bool,
}

pub(super) enum Disposition {
    Handled(Outcome),
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
        Self { lease_key, id, receipt, receives, disposition, outcome_unknown: false }
    }
}

/// Settles until every sender is dropped and nothing is left to retry.
pub(super) async fn settle_all(run: Arc<Run>, mut settlements: mpsc::Receiver<Settlement>) {
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
        fill_requests(&run, &mut group, &mut settlements).await;
        let tried = group.len();
        to_retry = settle_group(&run, group).await;
        run.meters.settle_retried(to_retry.len());
        failures = if to_retry.is_empty() { 0 } else { failures + 1 };
        if failures == 1 {
            tracing::warn!(queue = run.queue.name(), failed = to_retry.len(), tried, "cannot settle; retrying");
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
            Disposition::Handled(Outcome::Retry { .. }) | Disposition::HandBack => retried.next(),
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
    match answer {
        Err(error) if error.is_transient() && run.leases.is_valid(lease_key, Instant::now()) => {
            settlement.outcome_unknown |= matches!(error, QueueError::OutcomeUnknown(_));
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
    }
}
