//! The sweep of the dead letters. A reading of the dead-letter queue may cost as much as all that is in it, and on SQS it
//! hides the messages from other readers for a while: so consumers take turns, by a lease in the store.

use std::collections::HashSet;
use std::sync::{MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use metrics::counter;
use pipeline::MessageId;
use tracing::warn;

use crate::dead_letters::page_size;
use crate::relay::reconcile::sweeps::{Reconciler, Sweep};
use crate::relay::state::message::TransactionMessage;
use crate::relay::state::transaction::Status;
use crate::relay::store::StoreError;
use crate::relay::update::guarded_store::GuardedStore;
use crate::timestamp::Timestamp;

/// Other consumers leave the dead letters alone for this long while one reads a page of them. If that consumer dies, the
/// next sweep begins this much later at most. A longer reading may meet that of another consumer: each row is moved by a
/// guarded save, so this only costs time.
const SWEEP_LEASE: Duration = Duration::from_secs(30);

/// This consumer's turn at the dead letters.
struct SweepLease<'s> {
    guarded: &'s GuardedStore,
    until: Timestamp,
}

impl<'s> SweepLease<'s> {
    /// `None` while another consumer has its turn, or the pause after it lasts.
    async fn take(guarded: &'s GuardedStore) -> Result<Option<Self>, StoreError> {
        let now = guarded.clock.now();
        let until = now + SWEEP_LEASE;
        let taken = guarded.store.lease_sweep(Sweep::DeadLetters.name(), None, now, until).await?;
        Ok(taken.then_some(Self { guarded, until }))
    }

    /// Holds it for `span` from now; `false` if another consumer has taken it since it ended.
    async fn renew(&mut self, span: Duration) -> Result<bool, StoreError> {
        let now = self.guarded.clock.now();
        let (held, until) = (Some(self.until), now + span);
        let renewed = self.guarded.store.lease_sweep(Sweep::DeadLetters.name(), held, now, until).await?;
        self.until = until;
        Ok(renewed)
    }
}

impl Reconciler {
    /// Sweeps the dead letters if it is this consumer's turn.
    pub(super) async fn share_dead_letter_sweep(&self) -> Result<(), StoreError> {
        let clock = &self.guarded.clock;
        let started = clock.instant();
        let Some(mut lease) = SweepLease::take(&self.guarded).await? else { return Ok(()) };
        if let Some(dead) = self.unread_dead_letters().await {
            // A sweep that failed half-way is repeated.
            if self.sweep_dead_letters(&mut lease).await? {
                *self.dead_letters_read() = Some((dead, started));
            }
        }
        // A little less than the pause after which this consumer comes again, so that a single one never misses its turn.
        // A process that was frozen meanwhile must not stop the others for as long.
        let pause = self.pause(Sweep::DeadLetters).max(clock.elapsed(started).min(SWEEP_LEASE));
        lease.renew(pause * 9 / 10).await.map(drop)
    }

    /// The number of dead letters, if it differs from that at the last reading or that was long ago. On servers the
    /// number costs one or two requests, and a reading at least one for every ten letters.
    async fn unread_dead_letters(&self) -> Option<u64> {
        let Some(reread_after) = self.settings.dead_letters_reread_after else { return Some(0) };
        // If this fails, the next sweep asks again.
        let dead = self.guarded.queue.depth().await.ok()?.dead;
        let clock = &self.guarded.clock;
        let unchanged =
            self.dead_letters_read().is_some_and(|(before, at)| before == dead && clock.elapsed(at) < reread_after);
        (dead > 0 && !unchanged).then_some(dead)
    }

    fn dead_letters_read(&self) -> MutexGuard<'_, Option<(u64, Instant)>> {
        self.dead_letters_read.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A dead letter whose row has attempts left is put back if the queue buried it: the receive count is only a
    /// backstop. If a handler buried it, the row is marked as failed. A dead letter whose row ended well, or is with a
    /// relayer, is discarded. Returns whether all were read.
    async fn sweep_dead_letters(&self, lease: &mut SweepLease<'_>) -> Result<bool, StoreError> {
        let mut after: Option<MessageId> = None;
        let page_size = page_size(&*self.guarded.queue);
        loop {
            let Ok(dead_letters) = self.guarded.queue.dead_letters(after.as_ref(), page_size).await else {
                return Ok(false);
            };
            let (mut back, mut over) = (Vec::new(), Vec::new());
            for dead_letter in &dead_letters {
                let Ok(message) = TransactionMessage::parse(&dead_letter.body) else { continue };
                let row = match self.guarded.store.get(message.transaction_id()).await {
                    Ok(Some(row)) => row,
                    Err(failure) if failure.is_transient() => return Err(failure),
                    // No row, or one that cannot be read: left for an operator.
                    Ok(None) | Err(_) => continue,
                };
                if row.status == Status::Failed {
                    continue;
                }
                if row.needs_no_message() {
                    over.push(dead_letter.id.clone());
                    continue;
                }
                // A row that moved after the burial was reopened by an operator whose replay was interrupted.
                let buried_at = Timestamp::from(dead_letter.buried_at);
                if dead_letter.by_queue || row.claim.is_some() || row.updated_at > buried_at {
                    warn!(transactionId = %row.id, action = "put_back", "its message was buried ({}), but it has attempts left", dead_letter.reason);
                    back.push(dead_letter.id.clone());
                } else {
                    counter!("baton_reconciler_total", "finding" => "dead-letter-unmarked").increment(1);
                    let now = self.guarded.clock.now();
                    self.guarded.update(row.id, |row| row.abandon(&dead_letter.reason, now)).await?;
                }
            }
            let last = dead_letters
                .last()
                .map(|dead_letter| dead_letter.id.clone())
                .filter(|_| dead_letters.len() == page_size);
            // The next page starts after a dead letter that is still there: moved and discarded ones are skipped.
            let moved: HashSet<&MessageId> = back.iter().chain(&over).collect();
            after = dead_letters
                .iter()
                .rev()
                .map(|dead_letter| &dead_letter.id)
                .find(|id| !moved.contains(id))
                .cloned()
                .or(after);
            counter!("baton_reconciler_total", "finding" => "dead-letter-put-back").increment(back.len() as u64);
            self.guarded.queue.replay(&back, Duration::ZERO).await;
            self.guarded.queue.discard(&over).await;
            if last.is_none() {
                return Ok(true);
            }
            if !lease.renew(SWEEP_LEASE).await? {
                return Ok(false);
            }
        }
    }
}
