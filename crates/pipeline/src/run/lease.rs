//! Renews the leases of messages that are being handled: one task renews all of them in batches, instead of a timer for
//! each.
//!
//! A lease is renewed when a third of it has passed, so two renewals may fail before it is lost. A lost lease is counted
//! and logged; its handler continues, because stopping it halfway would leave the work half done.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Run;
use crate::error_chain::ErrorChain;
use crate::lock::lock;
use crate::message::{Message, MessageId, Receipt};
use crate::queue::QueueError;

/// The leases that a run holds, by a key that is unique to each delivery.
pub(super) struct LeaseTable {
    lease: Duration,
    entries: Mutex<Entries>,
}

#[derive(Default)]
struct Entries {
    last_key: u64,
    by_key: HashMap<u64, Entry>,
}

struct Entry {
    id: MessageId,
    receipt: Receipt,
    until: Instant,
    /// A settlement is in flight: renewing the lease would race with it.
    settling: bool,
    /// A settlement had no answer and may have ended the lease: a failed renewal does not mean that it was lost.
    outcome_unknown: bool,
    lost: bool,
}

impl LeaseTable {
    pub(super) fn new(lease: Duration) -> Self {
        Self { lease, entries: Mutex::default() }
    }

    /// Adds a message that was received at `now`, and returns its key.
    pub(super) fn add(&self, message: &Message, now: Instant) -> u64 {
        let until = now + self.lease;
        let (id, receipt) = (message.id.clone(), message.receipt.clone());
        let mut entries = lock(&self.entries);
        entries.last_key += 1;
        let key = entries.last_key;
        entries.by_key.insert(key, Entry { id, receipt, until, settling: false, outcome_unknown: false, lost: false });
        key
    }

    /// Marks the settlements of these messages as in flight.
    pub(super) fn start_settling(&self, keys: impl Iterator<Item = u64>) {
        let mut entries = lock(&self.entries);
        for key in keys {
            if let Some(entry) = entries.by_key.get_mut(&key) {
                entry.settling = true;
            }
        }
    }

    /// Marks a settlement as failed and to be retried; its outcome may be unknown.
    pub(super) fn retry_settling(&self, key: u64, outcome_unknown: bool) {
        if let Some(entry) = lock(&self.entries).by_key.get_mut(&key) {
            entry.settling = false;
            entry.outcome_unknown = outcome_unknown;
        }
    }

    /// Removes a message that is settled or given up. Returns whether its lease was known to be lost.
    pub(super) fn remove(&self, key: u64) -> bool {
        lock(&self.entries).by_key.remove(&key).is_some_and(|entry| entry.lost)
    }

    /// Whether the lease still runs, so that a settlement may be retried.
    pub(super) fn is_valid(&self, key: u64, now: Instant) -> bool {
        lock(&self.entries).by_key.get(&key).is_some_and(|entry| !entry.lost && entry.until > now)
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.entries).by_key.len()
    }

    /// The leases of which a third has passed.
    pub(super) fn due_for_renewal(&self, now: Instant) -> Vec<(u64, Receipt)> {
        let limit = now + self.lease * 2 / 3;
        let entries = lock(&self.entries);
        let due = entries.by_key.iter().filter(|(_, entry)| !entry.settling && !entry.lost && entry.until <= limit);
        due.map(|(key, entry)| (*key, entry.receipt.clone())).collect()
    }

    fn set_until(&self, key: u64, until: Instant) {
        if let Some(entry) = lock(&self.entries).by_key.get_mut(&key) {
            entry.until = until;
        }
    }

    /// Marks a lease as lost. Returns the message's id if this was not known, and `None` if a settlement is in flight or
    /// had no answer, because a settlement ends the lease too.
    fn mark_lost(&self, key: u64) -> Option<MessageId> {
        let mut entries = lock(&self.entries);
        let is_news = |entry: &&mut Entry| !entry.settling && !entry.outcome_unknown && !entry.lost;
        let entry = entries.by_key.get_mut(&key).filter(is_news)?;
        entry.lost = true;
        Some(entry.id.clone())
    }
}

/// Renews leases until `stop` is cancelled.
pub(super) async fn renew_until(run: Arc<Run>, stop: CancellationToken) {
    let lease = run.queue.lease();
    let interval = (lease / 6).max(Duration::from_millis(1));
    let mut failing = false;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(interval) => {}
        }
        let (keys, receipts): (Vec<u64>, Vec<Receipt>) = run.leases.due_for_renewal(Instant::now()).into_iter().unzip();
        if receipts.is_empty() {
            continue;
        }
        let until = Instant::now() + lease;
        let extending = tokio::time::timeout(lease / 3, run.queue.extend(&receipts, lease));
        let answers = tokio::select! {
            () = stop.cancelled() => return,
            answers = extending => answers.unwrap_or_else(|_| no_answer(receipts.len())),
        };
        let failure = record_renewals(&run, &keys, until, answers);
        if let Some(error) = failure.as_ref().filter(|_| !failing) {
            tracing::warn!(queue = run.queue.name(), error = %ErrorChain(error), "cannot extend leases; retrying");
        }
        failing = failure.is_some();
    }
}

/// Records the answers of one renewal. Returns the last error other than a lost lease.
pub(super) fn record_renewals(
    run: &Run,
    keys: &[u64],
    until: Instant,
    answers: Vec<Result<(), QueueError>>,
) -> Option<QueueError> {
    let mut failure = None;
    for (key, answer) in keys.iter().zip(answers) {
        match answer {
            Ok(()) => {
                run.leases.set_until(*key, until);
                run.meters.extended();
            }
            Err(QueueError::LeaseLost) => {
                if let Some(id) = run.leases.mark_lost(*key) {
                    run.meters.lease_lost();
                    let queue = run.queue.name();
                    tracing::warn!(queue, messageId = %id, "lease lost during handling; the handler continues");
                }
            }
            Err(error) => {
                run.meters.extend_failed();
                failure = Some(error);
            }
        }
    }
    failure
}

fn no_answer(count: usize) -> Vec<Result<(), QueueError>> {
    (0..count).map(|_| Err(QueueError::OutcomeUnknown("no answer within a third of the lease".into()))).collect()
}
