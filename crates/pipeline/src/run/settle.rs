//! Tells the queue what became of each message. Verdicts pile up while a call is under way and go out together in the
//! next; when idle one goes out at once, and where a request costs the same for many it waits a moment for them. What fails
//! for a passing reason is tried again while its lease lasts.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::{Causes, Engine, GATHER_TIME};
use crate::handler::Outcome;
use crate::message::{Message, MessageId, Receipt};
use crate::queue::QueueError;
use crate::retry::RetryPolicy;

/// How many verdicts go out together at most.
const GROUP_MAX: usize = 1000;
/// Pauses after a round that failed. The lease limits the attempts.
const BACKOFF: RetryPolicy = RetryPolicy {
    attempts_max: u32::MAX,
    first_delay: Duration::from_millis(50),
    factor: 2.0,
    delay_max: Duration::from_secs(2),
};

/// What is to be told about one delivery.
pub(super) struct Verdict {
    key: u64,
    id: MessageId,
    receipt: Receipt,
    receives: u32,
    kind: Kind,
    /// An earlier try may have worked without our hearing of it.
    uncertain: bool,
}

pub(super) enum Kind {
    Done,
    Retry {
        after: Duration,
        reason: String,
    },
    Dead {
        reason: String,
    },
    /// Not started, given back at shutdown.
    HandBack,
}

impl From<Outcome> for Kind {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Done => Self::Done,
            Outcome::Retry { after, reason } => Self::Retry { after, reason },
            Outcome::Dead { reason } => Self::Dead { reason },
        }
    }
}

impl Verdict {
    pub(super) fn new(key: u64, message: &Message, kind: Kind) -> Self {
        let (id, receipt, receives) = (message.id.clone(), message.receipt.clone(), message.receives);
        Self { key, id, receipt, receives, kind, uncertain: false }
    }
}

/// Settles until the desk is closed and nothing is left to try.
pub(super) async fn settle(engine: Arc<Engine>, mut verdicts: mpsc::Receiver<Verdict>) {
    let mut again: Vec<Verdict> = Vec::new();
    let mut failures = 0;
    loop {
        let mut group = std::mem::take(&mut again);
        if group.is_empty() {
            let Some(first) = verdicts.recv().await else { return };
            group.push(first);
        } else {
            tokio::time::sleep(BACKOFF.delay(failures, rand::random())).await;
        }
        while group.len() < GROUP_MAX
            && let Ok(verdict) = verdicts.try_recv()
        {
            group.push(verdict);
        }
        fill_requests(&engine, &mut group, &mut verdicts).await;
        let tried = group.len();
        again = settle_group(&engine, group).await;
        engine.meters.settle_retried(again.len());
        failures = if again.is_empty() { 0 } else { failures + 1 };
        if failures == 1 {
            tracing::warn!(queue = engine.queue.name(), failed = again.len(), tried, "cannot settle; trying again");
        }
    }
}

/// Waits a moment for the last request of a group to be full, where that costs no more, and only while something is
/// under way that could come to it.
async fn fill_requests(engine: &Engine, group: &mut Vec<Verdict>, verdicts: &mut mpsc::Receiver<Verdict>) {
    let carries = engine.queue.capabilities().request_carries.max(1);
    let until = Instant::now() + GATHER_TIME;
    while !group.len().is_multiple_of(carries) && group.len() < engine.leases.held() {
        match tokio::time::timeout_at(until, verdicts.recv()).await {
            Ok(Some(verdict)) => group.push(verdict),
            Ok(None) | Err(_) => return,
        }
    }
}

/// One round; returns what is to be tried again.
async fn settle_group(engine: &Engine, group: Vec<Verdict>) -> Vec<Verdict> {
    engine.leases.settling(group.iter().map(|verdict| verdict.key), true);
    let queue = &*engine.queue;
    let delay_max = queue.capabilities().delay_max;
    let (mut acks, mut retries, mut burials) = (Vec::new(), Vec::new(), Vec::new());
    for verdict in &group {
        let receipt = verdict.receipt.clone();
        match &verdict.kind {
            Kind::Done => acks.push(receipt),
            Kind::Retry { after, .. } => retries.push((receipt, (*after).min(delay_max))),
            Kind::HandBack => retries.push((receipt, Duration::ZERO)),
            Kind::Dead { reason } => burials.push((receipt, reason.clone())),
        }
    }
    let (acked, retried, buried) = tokio::join!(
        async { if acks.is_empty() { Vec::new() } else { queue.ack(&acks).await } },
        async { if retries.is_empty() { Vec::new() } else { queue.retry_after(&retries).await } },
        async { if burials.is_empty() { Vec::new() } else { queue.bury(&burials).await } },
    );
    let (mut acked, mut retried, mut buried) = (acked.into_iter(), retried.into_iter(), buried.into_iter());
    let mut again = Vec::new();
    for verdict in group {
        let answer = match &verdict.kind {
            Kind::Done => acked.next(),
            Kind::Retry { .. } | Kind::HandBack => retried.next(),
            Kind::Dead { .. } => buried.next(),
        };
        let answer = answer.unwrap_or_else(|| Err(QueueError::OutcomeUnknown("no answer for this entry".into())));
        again.extend(conclude(engine, verdict, answer));
    }
    engine.leases.settling(again.iter().map(|verdict| verdict.key), false);
    again
}

/// Counts and logs one answer; gives the verdict back if it is worth another try.
fn conclude(engine: &Engine, mut verdict: Verdict, answer: Result<(), QueueError>) -> Option<Verdict> {
    let (queue, id) = (engine.queue.name(), verdict.id.clone());
    match answer {
        Err(error) if error.is_transient() && engine.leases.is_valid(verdict.key) => {
            verdict.uncertain |= matches!(error, QueueError::OutcomeUnknown(_));
            return Some(verdict);
        }
        Err(error) if error.is_transient() => {
            if !engine.leases.forget(verdict.key) {
                engine.meters.lease_lost();
            }
            engine.meters.settle_failed();
            tracing::warn!(queue, messageId = %id, error = %Causes(&error), "the lease ended before the verdict was told");
        }
        // The try that nobody answered had worked: what it settled is not ours any more.
        Err(QueueError::LeaseLost) if verdict.uncertain => settled(engine, &verdict),
        Err(QueueError::LeaseLost) => {
            if !engine.leases.forget(verdict.key) {
                engine.meters.lease_lost();
            }
            tracing::warn!(queue, messageId = %id, "the lease was lost before the verdict; the message comes again");
        }
        Err(error) => {
            engine.leases.forget(verdict.key);
            engine.meters.settle_failed();
            tracing::error!(queue, messageId = %id, error = %Causes(&error), "the queue refused a verdict");
        }
        Ok(()) => settled(engine, &verdict),
    }
    None
}

fn settled(engine: &Engine, verdict: &Verdict) {
    engine.leases.forget(verdict.key);
    let (queue, id, attempt) = (engine.queue.name(), &verdict.id, verdict.receives);
    match &verdict.kind {
        Kind::Done => engine.meters.done(),
        Kind::HandBack => engine.meters.handed_back(),
        Kind::Retry { after, reason } => {
            engine.meters.retried();
            tracing::info!(queue, messageId = %id, attempt, after_ms = after.as_millis(), reason, "will be retried");
        }
        Kind::Dead { reason } => {
            engine.meters.dead();
            tracing::warn!(queue, messageId = %id, attempt, reason, "moved to the dead-letter queue");
        }
    }
}
