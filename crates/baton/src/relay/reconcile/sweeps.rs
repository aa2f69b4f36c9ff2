//! The sweeps: every row that is not final has a time at which it is looked at, and here it is. Rows that nobody
//! claimed are queued again, submitted rows with no news are asked for, and dead letters that should not be are put
//! back. Claims whose outcome nobody knows are settled in [`crate::relay::reconcile::unknown_outcomes`].
//!
//! Each kind has a loop of its own, so that a relayer that does not answer holds up only its own questions. Stopped in
//! the middle, a sweep leaves nothing behind: each row is moved by one guarded save. Each finding is counted: a
//! healthy system has none.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metrics::counter;
use pipeline::MessageId;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::relay::reconcile::unknown_outcomes::UnknownOutcomes;
use crate::relay::relayer::client::describe;
use crate::relay::relayer::pool::Pool;
use crate::relay::state::message::TransactionMessage;
use crate::relay::state::transaction::{ConsumerId, Refused, RelayerUrl, Status, Transaction};
use crate::relay::store::{Due, EARLY_WEBHOOK_LIFETIME, StoreError};
use crate::relay::update::guarded_store::{Applied, GuardedStore, Origin, Updated};
use crate::timestamp::Timestamp;

/// Sweeps.
pub struct Reconciler {
    guarded: Arc<GuardedStore>,
    pool: Arc<Pool>,
    me: ConsumerId,
    settings: ReconcilerSettings,
    doubts: UnknownOutcomes,
}

/// What the reconciler can be told.
#[derive(Debug, Clone)]
pub struct ReconcilerSettings {
    /// How often it sweeps.
    pub interval: Duration,
    /// How often it looks at the dead letters.
    pub dead_letters_every: Duration,
    /// A consumer not heard of for so long is gone.
    pub consumer_dead_after: Duration,
    /// How far a relayer's clock may differ from ours.
    pub clock_skew: Duration,
    /// How long relayers remember a finished transaction.
    pub relayer_retention: Duration,
    /// How long a question to a relayer may take.
    pub question_timeout: Duration,
}

/// Rows looked at in one sweep.
const SWEEP_MAX: usize = 500;
/// Questions to relayers under way at once.
const QUESTIONS_MAX: usize = 16;
/// Between two clean-ups.
const FORGET_EVERY: Duration = Duration::from_secs(60);

impl Reconciler {
    /// A reconciler that works under this consumer's name.
    pub fn new(guarded: Arc<GuardedStore>, pool: Arc<Pool>, me: ConsumerId, settings: ReconcilerSettings) -> Self {
        let doubts = UnknownOutcomes::new(Arc::clone(&guarded), Arc::clone(&pool), me.clone(), settings.clone());
        Self { guarded, pool, me, settings, doubts }
    }

    /// Sweeps until shutdown. The heartbeat beats on its own: a sweep that waits for a slow relayer must not look like
    /// the death of this consumer.
    pub async fn run(&self, shutdown: CancellationToken) {
        let every = self.settings.interval;
        let sweeps = async {
            tokio::join!(
                again_and_again("heartbeat", self.settings.consumer_dead_after / 4, || self.heartbeat()),
                again_and_again("claims", every, || self.sweep_claims()),
                again_and_again("submitted", every, || self.sweep_submitted()),
                again_and_again("waiting", every, || self.sweep_waiting()),
                again_and_again("dead letters", self.settings.dead_letters_every, || self.sweep_dead_letters()),
                again_and_again("clean-up", FORGET_EVERY, || self.forget()),
            )
        };
        tokio::select! {
            () = shutdown.cancelled() => {}
            _ = sweeps => {}
        }
    }

    async fn heartbeat(&self) -> Result<(), StoreError> {
        self.guarded.store.heartbeat(&self.me, Timestamp::now()).await
    }

    async fn forget(&self) -> Result<(), StoreError> {
        self.guarded.store.forget(Timestamp::now() - EARLY_WEBHOOK_LIFETIME).await.map(|_| ())
    }

    async fn sweep_claims(&self) -> Result<(), StoreError> {
        let rows = self.guarded.store.due(Due::Claimed, Timestamp::now(), SWEEP_MAX).await?;
        self.doubts.settle(rows).await
    }

    /// Rows that nobody has claimed for long: never queued, or their message was lost. A queue that is simply
    /// behind explains it too, and then a second message would only add to it.
    async fn sweep_waiting(&self) -> Result<(), StoreError> {
        let rows = self.guarded.store.due(Due::Waiting, Timestamp::now(), SWEEP_MAX).await?;
        if rows.is_empty() {
            return Ok(());
        }
        let depth = self.guarded.queue.depth().await.ok();
        let backlog = depth.and_then(|depth| depth.oldest_age).unwrap_or_default();
        let behind = backlog >= self.guarded.timings.pending_check / 2;
        let looks = rows.iter().map(|row| self.queue_again(row, behind));
        futures::future::join_all(looks).await.into_iter().collect()
    }

    async fn queue_again(&self, row: &Transaction, behind: bool) -> Result<(), StoreError> {
        let again_at = Timestamp::now() + self.guarded.timings.pending_check;
        let Some(row) = self.look_again_if_due(row, again_at).await? else { return Ok(()) };
        if !behind {
            counter!("baton_reconciler_total", "finding" => "unclaimed").increment(1);
            info!(transactionId = %row.id, action = "queued_again", "nobody has claimed it; queued again");
            self.guarded.publish_again(&row, Duration::ZERO).await;
        }
        Ok(())
    }

    /// Submitted rows with no news: asks their relayers. One that does not answer is not asked again in this sweep.
    async fn sweep_submitted(&self) -> Result<(), StoreError> {
        let rows = self.guarded.store.due(Due::Bound, Timestamp::now(), SWEEP_MAX).await?;
        let mut silent: HashSet<RelayerUrl> = HashSet::new();
        for rows in rows.chunks(QUESTIONS_MAX) {
            let asked = rows.iter().map(|row| {
                let skip = row.binding.as_ref().is_some_and(|binding| silent.contains(&binding.relayer));
                self.ask(row, skip)
            });
            for asked in futures::future::join_all(asked).await {
                silent.extend(asked?);
            }
        }
        Ok(())
    }

    /// Asks for one row; names its relayer if that did not answer.
    async fn ask(&self, row: &Transaction, skip: bool) -> Result<Option<RelayerUrl>, StoreError> {
        let Some(binding) = &row.binding else { return Ok(None) };
        let now = Timestamp::now();
        let pause =
            now.since(binding.at).clamp(self.guarded.timings.submitted_check, self.guarded.timings.submitted_check_max);
        let Some(client) = self.pool.ask_one(&binding.relayer) else {
            // Nobody can be asked any more: shown like a relayer that forgot, for an operator to settle.
            counter!("baton_reconciler_total", "finding" => "relayer-gone").increment(1);
            self.forgotten(row, now + pause).await?;
            return Ok(None);
        };
        if skip {
            self.look_again_if_due(row, now + pause).await?;
            return Ok(None);
        }
        match client.transaction(&binding.tx_id, self.settings.question_timeout).await {
            Ok(Some(report)) => {
                if self.guarded.apply(row.id, &report, Origin::Reconciler).await? == Applied::Moved {
                    counter!("baton_reconciler_total", "finding" => "news-missed").increment(1);
                }
                self.look_again_if_due(row, now + pause).await?;
                Ok(None)
            }
            Ok(None) => {
                counter!("baton_reconciler_total", "finding" => "forgotten").increment(1);
                self.forgotten(row, now + pause).await?;
                Ok(None)
            }
            Err(failure) => {
                info!(transactionId = %row.id, action = "no_news", relayer = %binding.relayer, "{}", describe(&failure));
                self.look_again_if_due(row, now + pause).await?;
                Ok(Some(binding.relayer.clone()))
            }
        }
    }

    async fn forgotten(&self, row: &Transaction, again_at: Timestamp) -> Result<(), StoreError> {
        let Some(asked) = &row.binding else { return Ok(()) };
        if asked.forgotten_since.is_none() {
            let (relayer, tx_id) = (&asked.relayer, &asked.tx_id);
            error!(transactionId = %row.id, action = "forgotten", relayer = %relayer, "the relayer no longer knows {tx_id}");
        }
        let now = Timestamp::now();
        let decide = |row: &Transaction| match &row.binding {
            Some(binding) if binding.tx_id == asked.tx_id => row.forgotten(again_at, now),
            _ => Err(MOVED),
        };
        self.guarded.update(row.id, decide).await.map(|_| ())
    }

    /// Puts the next look off, unless the row has moved since it was found to be due.
    async fn look_again_if_due(&self, row: &Transaction, at: Timestamp) -> Result<Option<Transaction>, StoreError> {
        let now = Timestamp::now();
        let decide = |now_row: &Transaction| {
            if now_row.version == row.version { now_row.check_later(at, now) } else { Err(MOVED) }
        };
        match self.guarded.update(row.id, decide).await? {
            Updated::Moved(row) => Ok(Some(*row)),
            Updated::Refused(..) | Updated::Missing => Ok(None),
        }
    }

    /// Dead letters whose row still has attempts left are put back if the queue buried them: its count is only a
    /// backstop. If a handler did, the row is marked as it should have been. Those whose row ended well, or is with a
    /// relayer, have nothing left to say.
    async fn sweep_dead_letters(&self) -> Result<(), StoreError> {
        let mut after: Option<MessageId> = None;
        loop {
            let Ok(letters) = self.guarded.queue.dead_letters(after.as_ref(), SWEEP_MAX).await else { return Ok(()) };
            let mut back = Vec::new();
            let mut over = Vec::new();
            for letter in &letters {
                let Ok(envelope) = TransactionMessage::parse(&letter.body) else { continue };
                let row = match self.guarded.store.get(envelope.transaction_id()).await {
                    Ok(Some(row)) => row,
                    Err(failure) if failure.is_transient() => return Err(failure),
                    // No row, or one that cannot be read: for an operator to look at.
                    Ok(None) | Err(_) => continue,
                };
                if row.status == Status::Failed {
                    continue;
                }
                if row.needs_no_message() {
                    over.push(letter.id.clone());
                    continue;
                }
                // A row that has moved since was reopened by an operator, whose replay was cut short.
                let buried_at = Timestamp::from(letter.buried_at);
                if letter.by_queue || row.claim.is_some() || row.updated_at > buried_at {
                    warn!(transactionId = %row.id, action = "put_back", "its message was buried ({}), but it has attempts left", letter.reason);
                    back.push(letter.id.clone());
                } else {
                    counter!("baton_reconciler_total", "finding" => "dead-letter-unmarked").increment(1);
                    let now = Timestamp::now();
                    self.guarded.update(row.id, |row| row.abandon(&letter.reason, now)).await?;
                }
            }
            let last = letters.last().map(|letter| letter.id.clone()).filter(|_| letters.len() == SWEEP_MAX);
            // The place to go on from must still be there: what is moved or dropped is passed over.
            let moved = |id: &MessageId| back.contains(id) || over.contains(id);
            after = letters.iter().rev().map(|letter| &letter.id).find(|id| !moved(id)).cloned().or(after);
            counter!("baton_reconciler_total", "finding" => "dead-letter-put-back").increment(back.len() as u64);
            self.guarded.queue.replay(&back, Duration::ZERO).await;
            self.guarded.queue.discard(&over).await;
            if last.is_none() {
                return Ok(());
            }
        }
    }
}

const MOVED: Refused = Refused::NotPossible("it has moved meanwhile");

/// Does something, pauses, does it again. A failure is said once per outage.
async fn again_and_again<F, Fut>(what: &str, pause: Duration, job: F)
where
    F: Fn() -> Fut,
    Fut: Future<Output = Result<(), StoreError>>,
{
    let mut away = false;
    loop {
        let started = Instant::now();
        match job().await {
            Ok(()) => away = false,
            Err(failure) if !away => {
                warn!(action = "sweep_failed", sweep = what, "the reconciler waits for the store: {failure}");
                away = true;
            }
            Err(_) => {}
        }
        // A job that takes long is done less often, so that it never takes more than half of the time.
        tokio::time::sleep(pause.max(started.elapsed())).await;
    }
}
