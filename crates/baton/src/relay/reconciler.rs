//! The sweeps: every row that is not final has a time at which it is looked at, and here it is. Rows that nobody
//! claimed are queued again, claims whose owner is gone are taken over, unknown outcomes are looked up in the
//! relayer's own list, submitted rows with no news are asked for, and dead letters that should not be are put back.
//!
//! Each finding is counted: a healthy system has none.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use metrics::{counter, gauge};
use pipeline::MessageId;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};
use uuid::Uuid;

use super::book::{Book, Updated};
use super::message::Envelope;
use super::relayer::client::{RelayerClient, RelayerError, describe};
use super::relayer::pool::Pool;
use super::report::Report;
use super::store::{EARLY_WEBHOOK_LIFETIME, StoreError};
use super::transaction::{Claim, ConsumerId, RelayerTxId, RelayerUrl, Transaction};
use crate::timestamp::Timestamp;

/// Sweeps.
pub struct Reconciler {
    book: Arc<Book>,
    pool: Arc<Pool>,
    me: ConsumerId,
    settings: ReconcilerSettings,
}

/// What the reconciler can be told.
#[derive(Debug, Clone)]
pub struct ReconcilerSettings {
    /// How often it sweeps.
    pub interval: Duration,
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
/// Pages of a relayer's list read in one search.
const PAGES_MAX: usize = 200;
/// Between two looks at something that may stay as it is for hours.
const SLOW_CHECK: Duration = Duration::from_secs(30);
/// Between two looks at the dead letters.
const DEAD_LETTER_SWEEP: Duration = Duration::from_secs(5);
/// Between two clean-ups.
const FORGET_EVERY: Duration = Duration::from_secs(60);

impl Reconciler {
    /// A reconciler that works under this consumer's name.
    pub fn new(book: Arc<Book>, pool: Arc<Pool>, me: ConsumerId, settings: ReconcilerSettings) -> Self {
        Self { book, pool, me, settings }
    }

    /// Sweeps until shutdown. The pulse beats on its own: a sweep that waits for a slow relayer must not look like
    /// the death of this consumer.
    pub async fn run(&self, shutdown: CancellationToken) {
        tokio::join!(self.pulse(shutdown.clone()), self.sweep_on(shutdown));
    }

    async fn pulse(&self, shutdown: CancellationToken) {
        loop {
            if let Err(failure) = self.book.store.pulse(&self.me, Timestamp::now()).await {
                warn!(action = "pulse_failed", "this consumer cannot show that it is alive: {failure}");
            }
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(self.settings.consumer_dead_after / 4) => {}
            }
        }
    }

    async fn sweep_on(&self, shutdown: CancellationToken) {
        let mut dead_letters_at = Instant::now() + DEAD_LETTER_SWEEP;
        let mut forget_at = Instant::now() + FORGET_EVERY;
        let mut away = false;
        loop {
            let swept = async {
                self.sweep().await?;
                if Instant::now() >= dead_letters_at {
                    let read = self.sweep_dead_letters().await?;
                    // The more there are, the less often they are all read again.
                    let thousands = u32::try_from(read / 1000).unwrap_or(u32::MAX);
                    dead_letters_at = Instant::now() + DEAD_LETTER_SWEEP * thousands.saturating_add(1);
                }
                if Instant::now() >= forget_at {
                    forget_at = Instant::now() + FORGET_EVERY;
                    self.book.store.forget(Timestamp::now() - EARLY_WEBHOOK_LIFETIME).await?;
                }
                Ok::<_, StoreError>(())
            };
            match swept.await {
                Ok(()) => away = false,
                Err(failure) if !away => {
                    warn!(action = "sweep_failed", "the reconciler waits for the store: {failure}");
                    away = true;
                }
                Err(_) => {}
            }
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(self.settings.interval) => {}
            }
        }
    }

    /// One sweep over the rows that are due.
    pub async fn sweep(&self) -> Result<(), StoreError> {
        let rows = self.book.store.due(Timestamp::now(), SWEEP_MAX).await?;
        gauge!("baton_reconciler_due").set(rows.len() as f64);
        let mut claims: BTreeMap<RelayerUrl, Vec<Transaction>> = BTreeMap::new();
        let mut submitted = Vec::new();
        let mut waiting = Vec::new();
        for row in rows {
            match (&row.claim, &row.binding) {
                (Some(claim), _) => claims.entry(claim.relayer.clone()).or_default().push(row),
                (None, Some(_)) => submitted.push(row),
                (None, None) => waiting.push(row),
            }
        }
        self.queue_again(waiting).await?;
        let settle = claims.into_iter().map(|(relayer, rows)| self.settle_claims(relayer, rows));
        for settled in futures::future::join_all(settle).await {
            settled?;
        }
        for rows in submitted.chunks(QUESTIONS_MAX) {
            for asked in futures::future::join_all(rows.iter().map(|row| self.ask(row))).await {
                asked?;
            }
        }
        Ok(())
    }

    /// Rows that nobody has claimed for long: never queued, or their message was lost. A queue that is simply
    /// behind explains it too, and then a second message would only add to it.
    async fn queue_again(&self, rows: Vec<Transaction>) -> Result<(), StoreError> {
        if rows.is_empty() {
            return Ok(());
        }
        let depth = self.book.queue.depth().await.ok();
        let backlog = depth.and_then(|depth| depth.oldest_age).unwrap_or_default();
        for row in rows {
            let now = Timestamp::now();
            let again_at = now + self.book.clocks.pending_check;
            let behind = backlog >= self.book.clocks.pending_check / 2;
            let looked = self.book.update(row.id, |row| row.look_again(again_at, now)).await?;
            if let Updated::Moved(row) = looked
                && !behind
                && row.claim.is_none()
                && row.binding.is_none()
            {
                counter!("baton_reconciler_total", "finding" => "unclaimed").increment(1);
                info!(transactionId = %row.id, action = "queued_again", "nobody has claimed it; queued again");
                self.book.publish_again(&row, Duration::ZERO).await;
            }
        }
        Ok(())
    }

    /// Claims at one relayer: takes over those that nobody works on, then looks all of them up in one listing.
    async fn settle_claims(&self, relayer: RelayerUrl, rows: Vec<Transaction>) -> Result<(), StoreError> {
        let mut ours = Vec::new();
        for row in rows {
            if let Some(taken) = self.take_over(row).await? {
                ours.push(taken);
            }
        }
        if ours.is_empty() {
            return Ok(());
        }
        let Some(client) = self.pool.client(&relayer) else {
            counter!("baton_reconciler_total", "finding" => "relayer-gone").increment(ours.len() as u64);
            return self.postpone(ours, "its relayer is no longer configured").await;
        };
        let earliest = ours.iter().filter_map(|(row, _)| row.claim.as_ref()).map(|claim| claim.at).min();
        let since = earliest.unwrap_or(Timestamp(0)) - self.settings.clock_skew;
        let listing = match self.listing(&client, since).await {
            Ok(listing) => listing,
            Err(failure) => return self.postpone(ours, &describe(&failure)).await,
        };
        let mut remembers = None;
        for (row, token) in ours {
            self.settle(row, token, &client, &listing, &mut remembers).await?;
        }
        Ok(())
    }

    /// Takes over one claim if it is in doubt or its owner is gone; otherwise feels its pulse again later.
    async fn take_over(&self, row: Transaction) -> Result<Option<(Transaction, Uuid)>, StoreError> {
        let Some(claim) = &row.claim else { return Ok(None) };
        let (now, token) = (Timestamp::now(), Uuid::new_v4());
        let owner_gone = match self.book.store.last_pulse(&claim.consumer).await? {
            Some(seen) => now.since(seen) > self.settings.consumer_dead_after,
            None => true,
        };
        // Decided about the very row that was due: if it has moved since, it is looked at when it is due again.
        let decided = match row.take_over(&self.me, token, owner_gone, now, &self.book.clocks) {
            Ok(moved) => moved,
            Err(_) => row.look_again(now + self.book.clocks.claim_check, now).expect("a claimed row is not final"),
        };
        let took = decided.transaction.claim.as_ref().is_some_and(|claim| claim.token == token);
        let saved = self.book.save(&row, &decided).await?;
        if !took || saved == super::store::Saved::Stale {
            return Ok(None);
        }
        if claim.doubt.is_none() {
            counter!("baton_reconciler_total", "finding" => "claim-orphaned").increment(1);
            warn!(transactionId = %row.id, action = "taken_over", consumer = %claim.consumer, "its consumer is gone");
        }
        Ok(Some((decided.transaction, token)))
    }

    /// The relayer's transactions since `since`, newest first.
    async fn listing(&self, client: &RelayerClient, since: Timestamp) -> Result<Vec<Report>, RelayerError> {
        let mut found = Vec::new();
        for page in 1..=PAGES_MAX {
            let (records, last) = client.transactions(page, self.settings.question_timeout).await?;
            let past = records.iter().any(|record| record.created_at.is_some_and(|created| created < since));
            found.extend(records);
            if last || past {
                return Ok(found);
            }
        }
        Err(RelayerError::Unreadable("its list is too long to search"))
    }

    /// One claim in doubt, against the listing: found → bound; certainly absent → sent again; neither → later.
    async fn settle(
        &self,
        row: Transaction,
        token: Uuid,
        client: &RelayerClient,
        listing: &[Report],
        remembers: &mut Option<bool>,
    ) -> Result<(), StoreError> {
        let Some(claim) = row.claim.clone() else { return Ok(()) };
        let mut candidates: Vec<&Report> =
            listing.iter().filter(|record| self.is_since(record, &claim) && row.call.matches(record)).collect();
        candidates.reverse();
        let ids: Vec<RelayerTxId> = candidates.iter().map(|record| record.tx_id.clone()).collect();
        let bound: HashSet<RelayerTxId> = self.book.store.bound_among(&ids).await?.into_iter().collect();
        for record in candidates.into_iter().filter(|record| !bound.contains(&record.tx_id)) {
            if self.bind(&row, token, record).await? {
                return Ok(());
            }
        }
        if let Some(why) = self.absence_unproven(&row, &claim, client, listing, remembers).await? {
            counter!("baton_reconciler_total", "finding" => "absence-unproven").increment(1);
            return self.postpone(vec![(row, token)], why).await;
        }
        let now = Timestamp::now();
        let absent = self.book.update(row.id, |row| row.absent(token, now, &self.book.clocks)).await?;
        if let Updated::Moved(row) = absent
            && row.claim.is_none()
        {
            counter!("baton_reconciler_total", "finding" => "absent").increment(1);
            info!(transactionId = %row.id, action = "resend", relayer = %claim.relayer, "the relayer does not have it; queued again");
            self.book.publish_again(&row, Duration::ZERO).await;
        }
        Ok(())
    }

    async fn bind(&self, row: &Transaction, token: Uuid, record: &Report) -> Result<bool, StoreError> {
        let now = Timestamp::now();
        let from = record.from.as_deref();
        let bind =
            |row: &Transaction| row.bind(token, &record.tx_id, from, "found in its list", now, &self.book.clocks);
        match self.book.update(row.id, bind).await {
            Ok(Updated::Moved(row)) => {
                counter!("baton_reconciler_total", "finding" => "found").increment(1);
                info!(transactionId = %row.id, action = "found", ozRelayerTxId = %record.tx_id, "found in the relayer's list");
                self.book.apply_early(row.id, &record.tx_id).await?;
                self.book.apply(row.id, record, "reconciler").await?;
                Ok(true)
            }
            // Not ours any more: nothing left to do here.
            Ok(_) => Ok(true),
            Err(StoreError::Conflict { .. }) => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    fn is_since(&self, record: &Report, claim: &Claim) -> bool {
        record.created_at.is_none_or(|created| created >= claim.at - self.settings.clock_skew)
    }

    /// Why a listing without the submission does not prove that it never happened.
    async fn absence_unproven(
        &self,
        row: &Transaction,
        claim: &Claim,
        client: &RelayerClient,
        listing: &[Report],
        remembers: &mut Option<bool>,
    ) -> Result<Option<&'static str>, StoreError> {
        let now = Timestamp::now();
        if now.since(claim.at) + self.settings.clock_skew >= self.settings.relayer_retention {
            return Ok(Some("the claim is older than the relayer's memory"));
        }
        let no_ops: Vec<RelayerTxId> = listing
            .iter()
            .filter(|record| self.is_since(record, claim) && record.is_no_op())
            .filter(|record| !record.reason.as_deref().unwrap_or_default().starts_with("Gap-filling"))
            .map(|record| record.tx_id.clone())
            .collect();
        if !no_ops.is_empty() && self.book.store.bound_among(&no_ops).await?.len() < no_ops.len() {
            return Ok(Some("the relayer has a no-op that may stand where it was"));
        }
        let known = match *remembers {
            Some(known) => known,
            None => {
                let known = self.relayer_remembers(row, claim, client, now).await?;
                *remembers = Some(known);
                known
            }
        };
        Ok((!known).then_some("the relayer has forgotten transactions that it had before"))
    }

    /// Whether the relayer still knows the last transaction that it took before the claim. One that has lost its
    /// memory lists nothing, and that proves nothing.
    async fn relayer_remembers(
        &self,
        row: &Transaction,
        claim: &Claim,
        client: &RelayerClient,
        now: Timestamp,
    ) -> Result<bool, StoreError> {
        let witness = self.book.store.bound_before(&claim.relayer, claim.at).await?;
        let Some(binding) = witness.and_then(|witness| witness.binding) else { return Ok(true) };
        if now.since(binding.at) + self.settings.clock_skew >= self.settings.relayer_retention {
            return Ok(true);
        }
        match client.transaction(&binding.tx_id, self.settings.question_timeout).await {
            Ok(found) => {
                if found.is_none() {
                    error!(
                        transactionId = %row.id, action = "relayer_forgot", relayer = %claim.relayer,
                        "the relayer has forgotten {}; what is in doubt there waits for an operator", binding.tx_id
                    );
                }
                Ok(found.is_some())
            }
            Err(_) => Ok(false),
        }
    }

    /// Nothing learned about these claims: later, and less and less often.
    async fn postpone(&self, rows: Vec<(Transaction, Uuid)>, why: &str) -> Result<(), StoreError> {
        for (row, token) in rows {
            let now = Timestamp::now();
            let age = row.claim.as_ref().map(|claim| now.since(claim.at)).unwrap_or_default();
            let pause = (age / 4).clamp(self.book.clocks.doubt_check, SLOW_CHECK.max(self.book.clocks.doubt_check));
            info!(transactionId = %row.id, action = "still_unknown", "its outcome stays unknown: {why}");
            self.book
                .update(row.id, |row| match &row.claim {
                    Some(claim) if claim.token == token => row.look_again(now + pause, now),
                    _ => Err(super::transaction::Refused::NotOurClaim),
                })
                .await?;
        }
        Ok(())
    }

    /// A submitted row with no news: asks its relayer.
    async fn ask(&self, row: &Transaction) -> Result<(), StoreError> {
        let Some(binding) = &row.binding else { return Ok(()) };
        let now = Timestamp::now();
        let age = now.since(binding.at);
        let pause = age.clamp(self.book.clocks.submitted_check, self.book.clocks.submitted_check_max);
        let Some(client) = self.pool.client(&binding.relayer) else {
            counter!("baton_reconciler_total", "finding" => "relayer-gone").increment(1);
            self.book.update(row.id, |row| row.look_again(now + pause, now)).await?;
            return Ok(());
        };
        match client.transaction(&binding.tx_id, self.settings.question_timeout).await {
            Ok(Some(report)) => {
                let applied = self.book.apply(row.id, &report, "reconciler").await?;
                if applied == super::book::Applied::Moved {
                    counter!("baton_reconciler_total", "finding" => "news-missed").increment(1);
                }
                self.look_again_if_due(row, now + pause, now).await
            }
            Ok(None) => {
                counter!("baton_reconciler_total", "finding" => "forgotten").increment(1);
                if binding.forgotten_since.is_none() {
                    error!(transactionId = %row.id, action = "forgotten", relayer = %binding.relayer, "the relayer no longer knows {}", binding.tx_id);
                }
                self.book.update(row.id, |row| row.forgotten(now + pause, now)).await?;
                Ok(())
            }
            Err(failure) => {
                info!(transactionId = %row.id, action = "no_news", relayer = %binding.relayer, "{}", describe(&failure));
                self.look_again_if_due(row, now + pause, now).await
            }
        }
    }

    async fn look_again_if_due(&self, row: &Transaction, at: Timestamp, now: Timestamp) -> Result<(), StoreError> {
        let due = row.check_at;
        self.book
            .update(row.id, |row| {
                if row.check_at == due {
                    row.look_again(at, now)
                } else {
                    Err(super::transaction::Refused::NotPossible("it has moved"))
                }
            })
            .await?;
        Ok(())
    }

    /// Dead letters whose row still has attempts left are put back if the queue buried them: its count is only a
    /// backstop. If a handler did, the row is marked as it should have been. Those whose row ended well, or is with a relayer, have nothing left to say. Returns how many were read.
    pub async fn sweep_dead_letters(&self) -> Result<usize, StoreError> {
        let mut after: Option<MessageId> = None;
        let mut read = 0;
        loop {
            let Ok(letters) = self.book.queue.dead_letters(after.as_ref(), SWEEP_MAX).await else { return Ok(read) };
            read += letters.len();
            for letter in &letters {
                let Ok(envelope) = Envelope::parse(&letter.body) else { continue };
                let Some(row) = self.book.store.get(envelope.transaction_id()).await? else { continue };
                let ids = std::slice::from_ref(&letter.id);
                if row.status == super::transaction::Status::Failed {
                    continue;
                }
                let open = row.binding.is_none() && !row.status.is_final();
                if open && !letter.by_queue && row.claim.is_none() {
                    // A handler gave it up and the row was never marked.
                    counter!("baton_reconciler_total", "finding" => "dead-letter-unmarked").increment(1);
                    let now = Timestamp::now();
                    self.book.update(row.id, |row| row.abandon(&letter.reason, now)).await?;
                } else if open {
                    counter!("baton_reconciler_total", "finding" => "dead-letter-put-back").increment(1);
                    warn!(transactionId = %row.id, action = "put_back", "its message was buried ({}), but it has attempts left", letter.reason);
                    self.book.queue.replay(ids, Duration::ZERO).await;
                } else {
                    self.book.queue.discard(ids).await;
                }
            }
            match letters.last() {
                Some(last) if letters.len() == SWEEP_MAX => after = Some(last.id.clone()),
                _ => return Ok(read),
            }
        }
    }
}
