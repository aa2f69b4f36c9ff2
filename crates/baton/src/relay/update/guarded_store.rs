//! The store with everything that goes with a change of a row: decide, save, decide again if another writer was quicker,
//! refresh the cache, count. Intake, consumer, webhooks and reconciler all write through here.

use std::sync::Arc;
use std::time::Duration;

use metrics::counter;
use pipeline::{Outgoing, Queue};
use tracing::{error, info, warn};

use crate::clock::Clock;
use crate::config::{RelayMode, Timings};
use crate::mutations::Mutation;
use crate::randomness::Randomness;
use crate::relay::state::apply_report::{Report, ReportedStatus, Source, Verdict};
use crate::relay::state::event::EventMark;
use crate::relay::state::message::TransactionMessage;
use crate::relay::state::transaction::{MoveRefused, Moved, NextStep, RelayerTxId, Step, Transaction, TransactionId};
use crate::relay::store::{Saved, StoreError, TransactionStore};
use crate::relay::update::cache::Cache;
use crate::relay::update::view;
use crate::timestamp::Timestamp;

/// The transactions of this process's store, changed only by guarded saves.
pub struct GuardedStore {
    /// The rows.
    pub store: Arc<dyn TransactionStore>,
    /// Carries the messages that point to rows.
    pub queue: Arc<dyn Queue>,
    /// Finished transactions, as clients see them.
    pub cache: Cache,
    /// Whether a success ends by webhook or by following it.
    pub mode: RelayMode,
    /// When the reconciler looks at a row again.
    pub timings: Timings,
    /// The store's clock.
    pub clock: Clock,
    /// Ids, claim tokens and jitter.
    pub random: Randomness,
    /// Whether a relayer's final word counts only after the chain has confirmed it.
    pub chain_decides: bool,
}

/// Result of [`GuardedStore::update`].
#[derive(Debug)]
pub enum Updated {
    /// Saved; the row as stored.
    Moved(Box<Transaction>),
    /// The rules do not allow it; the row as read.
    Refused(MoveRefused, Box<Transaction>),
    /// There is no such row.
    Missing,
}

/// Effect of a report on its row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    /// It moved the row.
    Moved,
    /// It was old news or none.
    Ignored,
}

/// What came of an alarm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Alarm {
    Raised,
    /// It was raised before.
    Known,
    /// The row has moved; nothing was stored.
    Stale,
}

/// How a report reached us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// The relayer sent it.
    Webhook,
    /// The relayer sent it before its transaction was bound.
    EarlyWebhook,
    /// The reconciler asked for it.
    Reconciler,
    /// Confirm mode, or the nonce order, asked for it.
    Follow,
    /// The chain says so.
    Chain,
}

impl Origin {
    fn name(self) -> &'static str {
        match self {
            Self::Webhook => "webhook",
            Self::EarlyWebhook => "early-webhook",
            Self::Reconciler => "reconciler",
            Self::Follow => "follow",
            Self::Chain => "chain",
        }
    }

    fn source(self) -> Source {
        match self {
            Self::Webhook | Self::EarlyWebhook => Source::Webhook,
            Self::Reconciler | Self::Follow | Self::Chain => Source::Asked,
        }
    }
}

/// Longest time a save that must not be lost is retried while the database is unavailable.
const PERSIST_FOR: Duration = Duration::from_secs(60);
/// Longest time that waking the signer's next transaction may delay the caller.
const WAKE_TIMEOUT: Duration = Duration::from_millis(500);

impl GuardedStore {
    /// Reads a row, decides, saves; starts over if another writer saved in between.
    pub async fn update(
        &self,
        id: TransactionId,
        decide: impl Fn(&Transaction) -> Result<Moved, MoveRefused> + Send + Sync,
    ) -> Result<Updated, StoreError> {
        match self.store.get(id).await? {
            Some(row) => self.update_from(row, decide).await,
            None => Ok(Updated::Missing),
        }
    }

    /// [`GuardedStore::update`] from a row already at hand: it is read again only if it has moved since.
    pub async fn update_from(
        &self,
        mut row: Transaction,
        decide: impl Fn(&Transaction) -> Result<Moved, MoveRefused> + Send + Sync,
    ) -> Result<Updated, StoreError> {
        loop {
            match decide(&row) {
                Err(refused) => return Ok(Updated::Refused(refused, Box::new(row))),
                Ok(moved) => {
                    if self.save(&row, &moved).await? != Saved::Stale {
                        return Ok(Updated::Moved(Box::new(moved.transaction)));
                    }
                }
            }
            match self.store.get(row.id).await? {
                Some(newer) => row = newer,
                None => return Ok(Updated::Missing),
            }
        }
    }

    /// [`GuardedStore::update_from`] for a relayer's answer, which would otherwise be lost: retries for up to a minute
    /// while the database is unavailable.
    pub async fn persist(
        &self,
        row: &Transaction,
        decide: impl Fn(&Transaction) -> Result<Moved, MoveRefused> + Send + Sync,
    ) -> Result<Updated, StoreError> {
        self.retried(row.id, || self.update_from(row.clone(), &decide)).await
    }

    /// [`GuardedStore::persist`] that reads the row first.
    pub async fn persist_current(
        &self,
        id: TransactionId,
        decide: impl Fn(&Transaction) -> Result<Moved, MoveRefused> + Send + Sync,
    ) -> Result<Updated, StoreError> {
        self.retried(id, || self.update(id, &decide)).await
    }

    async fn retried<Fut>(&self, id: TransactionId, update: impl Fn() -> Fut + Send) -> Result<Updated, StoreError>
    where
        Fut: Future<Output = Result<Updated, StoreError>> + Send,
    {
        let deadline = self.clock.instant() + PERSIST_FOR;
        let mut pause = Duration::from_millis(50);
        loop {
            match update().await {
                Err(failure) if failure.is_transient() && self.clock.instant() < deadline => {
                    warn!(transactionId = %id, action = "save_retried", "the database is unavailable; the save is tried again: {failure}");
                    self.clock.sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_secs(2));
                }
                other => return other,
            }
        }
    }

    /// Saves one decision about a row that was just read. If it binds the row, its early webhooks are applied.
    pub async fn save(&self, before: &Transaction, moved: &Moved) -> Result<Saved, StoreError> {
        let mut events = moved.transaction.events_since(before);
        events.extend(self.unknown_event(&moved.transaction));
        let saved = if events.is_empty() {
            self.store.save(moved).await?
        } else {
            self.store.save(&Moved { events, ..moved.clone() }).await?
        };
        if saved != Saved::Stale {
            let after = &moved.transaction;
            if let Some(entry) = view::entry(after) {
                self.cache.put(entry);
            }
            if after.status != before.status {
                counter!("baton_transactions_total", "status" => after.status.name()).increment(1);
                info!(
                    transactionId = %after.id,
                    action = "status",
                    from = before.status.name(),
                    to = after.status.name(),
                    age_ms = after.updated_at.since(after.created_at).as_millis() as u64,
                    "the transaction is now {}", after.status
                );
            }
        }
        if let (Saved::Yes { early: true }, Some(binding)) = (saved, &moved.transaction.binding) {
            // Boxed, since applying a webhook saves the row again.
            Box::pin(self.apply_early(moved.transaction.id, &binding.tx_id)).await?;
        }
        if saved != Saved::Stale && moved.transaction.unblocks_next_nonce(before) {
            // The caller may hold up an answer, so this is short; unwoken, the next transaction looks again by itself.
            if self.clock.timeout(WAKE_TIMEOUT, self.wake_next(&moved.transaction)).await.is_err() {
                tracing::debug!(
                    transactionId = %moved.transaction.id, action = "successor_not_queued",
                    "cannot queue the signer's next transaction: no answer in time"
                );
            }
        }
        Ok(saved)
    }

    /// The event of a row whose outcome has been unknown for so long that an operator has to look.
    fn unknown_event(&self, row: &Transaction) -> Option<EventMark> {
        let long = self.clock.passed_since(row.unknown_since()?) >= self.timings.operator_after;
        long.then(|| row.unknown_event(self.clock.now())).flatten()
    }

    /// Queues the signer's next transaction, which may be waiting for this one. Best effort: its own message comes back.
    async fn wake_next(&self, row: &Transaction) {
        let Some(forward) = &row.forward else { return };
        match self.store.nonce_holder(forward.signer(), forward.nonce() + 1).await {
            Ok(Some(next)) if next.next_step() == NextStep::Submit => {
                self.publish_again(&next, Duration::ZERO).await;
            }
            Ok(_) => {}
            Err(failure) => {
                warn!(
                    transactionId = %row.id, action = "successor_not_queued",
                    "cannot queue the signer's next transaction: {failure}"
                );
            }
        }
    }

    /// Applies a relayer's report about a bound row.
    pub async fn apply(&self, id: TransactionId, report: &Report, origin: Origin) -> Result<Applied, StoreError> {
        let source = origin.name();
        loop {
            let Some(row) = self.store.get(id).await? else { return Ok(Applied::Ignored) };
            let now = self.clock.now();
            let believed = match report.status {
                ReportedStatus::Confirmed => Mutation::BelievesConfirmed.is_on(),
                _ => Mutation::BelievesFailed.is_on(),
            };
            let needs_chain = self.chain_decides && row.needs_chain(report, now, &self.timings);
            if needs_chain && origin != Origin::Chain && !believed {
                // The second one may have ended, too, before the chain has shown the first.
                if let Some(step) = row.second_send_before_end(report).filter(|_| report.status.is_over())
                    && self.raise_double_send(&row, step, now).await? != Alarm::Known
                {
                    continue;
                }
                match row.ask_chain(report, now) {
                    Ok(moved) if self.save(&row, &moved).await? == Saved::Stale => continue,
                    Ok(_) => return Ok(Applied::Moved),
                    Err(_) => return Ok(Applied::Ignored),
                }
            }
            let (moved, reroute) = match row.report(report, origin.source(), self.mode, now, &self.timings) {
                Verdict::Ignore(why) => {
                    counter!("baton_reports_ignored_total", "source" => source).increment(1);
                    tracing::debug!(transactionId = %id, action = "report_ignored", source, why, "a report brings nothing new");
                    if origin == Origin::Webhook {
                        self.store.note(id, &Step::new("webhook-ignored", why), now).await?;
                    }
                    return Ok(Applied::Ignored);
                }
                Verdict::DoubleSend(step) => match self.raise_double_send(&row, step, now).await? {
                    Alarm::Stale => continue,
                    Alarm::Known => {
                        counter!("baton_reports_ignored_total", "source" => source).increment(1);
                        return Ok(Applied::Ignored);
                    }
                    Alarm::Raised => return Ok(Applied::Ignored),
                },
                Verdict::Contradicted(moved) => {
                    if self.save(&row, &moved).await? == Saved::Stale {
                        continue;
                    }
                    failed_but_executed(&moved.transaction, "relayer");
                    return Ok(Applied::Ignored);
                }
                Verdict::Move(moved) => (moved, None),
                Verdict::Reroute(moved, pause) => (moved, Some(pause)),
            };
            if self.save(&row, &moved).await? == Saved::Stale {
                continue;
            }
            if let Some(pause) = reroute {
                counter!("baton_reroutes_total").increment(1);
                self.publish_again(&moved.transaction, pause).await;
            }
            return Ok(Applied::Moved);
        }
    }

    /// Raises the alarm, once for each second hash: a relayer repeats its webhooks, and a recorded one can be replayed.
    async fn raise_double_send(&self, row: &Transaction, step: Step, now: Timestamp) -> Result<Alarm, StoreError> {
        let known = self.store.timeline(row.id).await?;
        if known.iter().any(|entry| entry.action == step.action && entry.detail == step.detail) {
            return Ok(Alarm::Known);
        }
        // Saved with the row's version, so that of two that arrive together one starts over and finds it.
        let detail = step.detail.clone();
        if self.save(row, &row.noted(step, now)).await? == Saved::Stale {
            return Ok(Alarm::Stale);
        }
        counter!("baton_double_sends_total").increment(1);
        error!(transactionId = %row.id, action = "double_send", "{detail}");
        Ok(Alarm::Raised)
    }

    /// Applies the webhooks that arrived before the bind.
    pub async fn apply_early(&self, id: TransactionId, tx_id: &RelayerTxId) -> Result<(), StoreError> {
        for record in self.store.take_early_webhooks(tx_id).await? {
            let report = serde_json::from_str(&record).ok().as_ref().and_then(crate::relay::relayer::wire::read_record);
            if let Some(report) = report {
                self.apply(id, &report, Origin::EarlyWebhook).await?;
            }
        }
        Ok(())
    }

    /// A new message about a row.
    pub fn message(&self, row: &Transaction) -> Outgoing {
        TransactionMessage::of(row, self.random.uuid_v7(), self.clock.now()).outgoing()
    }

    /// Queues a new message about a row; returns whether the queue has it. If not, the reconciler finds the row when it is
    /// due.
    pub async fn publish_again(&self, row: &Transaction, delay: Duration) -> bool {
        let message = self.message(row).delayed(delay);
        let sent = self.queue.send(std::slice::from_ref(&message)).await;
        let failure = sent.into_iter().find_map(Result::err);
        if let Some(failure) = &failure {
            warn!(
                transactionId = %row.id, action = "publish_failed",
                "cannot queue the message; the reconciler will retry: {failure}"
            );
        }
        failure.is_none()
    }
}

/// Raises the alarm about a row that is shown as failed and was executed. `source` says so.
pub fn failed_but_executed(row: &Transaction, source: &'static str) {
    counter!("baton_failed_but_executed_total", "source" => source).increment(1);
    let hash = row.relayer_says.as_ref().and_then(|says| says["hash"].as_str()).unwrap_or("unknown");
    error!(
        transactionId = %row.id, action = "failed_but_executed", source, hash,
        "it is shown as failed, and the {source} says that it was executed"
    );
}
