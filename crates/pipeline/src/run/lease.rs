//! Keeps the leases of messages that are being handled: one task for all of them, in batches, instead of a timer each.
//!
//! A lease is renewed once a third of it is used up, so that two renewals may fail before it is lost. A lease found
//! lost is counted and logged; the handler goes on, since stopping it half-way helps nobody.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Causes, Engine};
use crate::message::{Message, MessageId, Receipt};
use crate::queue::QueueError;

/// The leases of one run, by a number that each delivery gets.
pub(super) struct Leases {
    lease: Duration,
    table: Mutex<Table>,
}

#[derive(Default)]
struct Table {
    last_key: u64,
    held: HashMap<u64, Held>,
}

struct Held {
    id: MessageId,
    receipt: Receipt,
    until: Instant,
    /// The queue is being told the verdict: an extension would race with it.
    settling: bool,
    lost: bool,
}

impl Leases {
    pub(super) fn new(lease: Duration) -> Self {
        Self { lease, table: Mutex::default() }
    }

    /// A message has come in; its lease has just begun.
    pub(super) fn hold(&self, message: &Message) -> u64 {
        let until = Instant::now() + self.lease;
        let (id, receipt) = (message.id.clone(), message.receipt.clone());
        let mut table = self.table();
        table.last_key += 1;
        let key = table.last_key;
        table.held.insert(key, Held { id, receipt, until, settling: false, lost: false });
        key
    }

    /// Its verdict is being told to the queue (`true`), or that failed and will be tried again (`false`).
    pub(super) fn settling(&self, keys: impl Iterator<Item = u64>, settling: bool) {
        let mut table = self.table();
        for key in keys {
            if let Some(held) = table.held.get_mut(&key) {
                held.settling = settling;
            }
        }
    }

    /// It is settled, or given up. Answers whether its loss was known.
    pub(super) fn forget(&self, key: u64) -> bool {
        self.table().held.remove(&key).is_some_and(|held| held.lost)
    }

    /// Whether there is still time to settle it.
    pub(super) fn is_valid(&self, key: u64) -> bool {
        let now = Instant::now();
        self.table().held.get(&key).is_some_and(|held| !held.lost && held.until > now)
    }

    /// How many are held.
    pub(super) fn held(&self) -> usize {
        self.table().held.len()
    }

    fn to_renew(&self) -> Vec<(u64, Receipt)> {
        let limit = Instant::now() + self.lease * 2 / 3;
        let table = self.table();
        let due = table.held.iter().filter(|(_, held)| !held.settling && !held.lost && held.until <= limit);
        due.map(|(key, held)| (*key, held.receipt.clone())).collect()
    }

    fn renewed(&self, key: u64, until: Instant) {
        if let Some(held) = self.table().held.get_mut(&key) {
            held.until = until;
        }
    }

    /// The message, if this is news: not if it is being settled, which ends the lease as well.
    fn lost(&self, key: u64) -> Option<MessageId> {
        let mut table = self.table();
        let held = table.held.get_mut(&key).filter(|held| !held.settling && !held.lost)?;
        held.lost = true;
        Some(held.id.clone())
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Renews leases until `stop`.
pub(super) async fn keep(engine: Arc<Engine>, stop: CancellationToken) {
    let lease = engine.queue.lease();
    let look_every = (lease / 6).max(Duration::from_millis(1));
    let mut failing = false;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(look_every) => {}
        }
        let (keys, receipts): (Vec<u64>, Vec<Receipt>) = engine.leases.to_renew().into_iter().unzip();
        if receipts.is_empty() {
            continue;
        }
        let until = Instant::now() + lease;
        let extending = tokio::time::timeout(lease / 3, engine.queue.extend(&receipts, lease));
        let answers = tokio::select! {
            () = stop.cancelled() => return,
            answers = extending => answers.unwrap_or_else(|_| no_answer(receipts.len())),
        };
        let mut failure = None;
        for (key, answer) in keys.into_iter().zip(answers) {
            match answer {
                Ok(()) => {
                    engine.leases.renewed(key, until);
                    engine.meters.extended();
                }
                Err(QueueError::LeaseLost) => {
                    if let Some(id) = engine.leases.lost(key) {
                        engine.meters.lease_lost();
                        tracing::warn!(queue = engine.queue.name(), messageId = %id, "a lease was lost");
                    }
                }
                Err(error) => {
                    engine.meters.extend_failed();
                    failure = Some(error);
                }
            }
        }
        if let Some(error) = failure.as_ref().filter(|_| !failing) {
            tracing::warn!(queue = engine.queue.name(), error = %Causes(error), "cannot extend leases; trying again");
        }
        failing = failure.is_some();
    }
}

fn no_answer(count: usize) -> Vec<Result<(), QueueError>> {
    (0..count).map(|_| Err(QueueError::OutcomeUnknown("no answer within a third of the lease".into()))).collect()
}
