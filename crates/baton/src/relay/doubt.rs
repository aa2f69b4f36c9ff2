//! Claims whose outcome nobody knows, and how they are settled: by the relayer's own list of transactions. Found →
//! bound. Certainly absent → sent again. Anything less than certain → looked at again later, and shown to an operator.
//!
//! A relayer takes no idempotency key, so this search is all there is between a lost answer and a double payment.
//! What counts as proof is in [`Search::absence_unproven`]; the reasons are in ADR 4.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use metrics::counter;
use tracing::{error, info, warn};
use uuid::Uuid;

use super::book::{Book, Origin, Updated};
use super::reconciler::ReconcilerSettings;
use super::relayer::client::{RelayerClient, RelayerError, describe};
use super::relayer::pool::Pool;
use super::report::Report;
use super::store::{Saved, StoreError};
use super::transaction::{Claim, ConsumerId, Doubt, Refused, RelayerTxId, RelayerUrl, Transaction};
use crate::timestamp::Timestamp;

/// Settles doubts.
pub struct Doubts {
    book: Arc<Book>,
    pool: Arc<Pool>,
    me: ConsumerId,
    settings: ReconcilerSettings,
}

/// A claim in doubt that is ours to settle.
struct Case {
    row: Transaction,
    claim: Claim,
    doubt: Doubt,
}

/// Pages of a relayer's list read in one search.
const PAGES_MAX: usize = 200;
/// Between two looks at something that may stay as it is for hours.
const SLOW_CHECK: Duration = Duration::from_secs(30);

impl Doubts {
    /// Works under this consumer's name.
    pub fn new(book: Arc<Book>, pool: Arc<Pool>, me: ConsumerId, settings: ReconcilerSettings) -> Self {
        Self { book, pool, me, settings }
    }

    /// Settles what can be settled of these claimed rows.
    pub async fn settle(&self, rows: Vec<Transaction>) -> Result<(), StoreError> {
        let mut by_relayer: BTreeMap<RelayerUrl, Vec<Case>> = BTreeMap::new();
        for case in futures::future::join_all(rows.into_iter().map(|row| self.take_over(row))).await {
            if let Some(case) = case? {
                by_relayer.entry(case.claim.relayer.clone()).or_default().push(case);
            }
        }
        let settled = by_relayer.into_iter().map(|(relayer, cases)| self.settle_at(relayer, cases));
        futures::future::join_all(settled).await.into_iter().collect()
    }

    /// Takes over one claim if it is in doubt or its owner is gone; otherwise feels its pulse again later.
    async fn take_over(&self, row: Transaction) -> Result<Option<Case>, StoreError> {
        let Some(claim) = &row.claim else { return Ok(None) };
        let (now, token) = (Timestamp::now(), Uuid::new_v4());
        let owner_gone = match self.book.store.last_pulse(&claim.consumer).await? {
            Some(seen) => now.since(seen) > self.settings.consumer_dead_after,
            None => true,
        };
        // Decided about the very row that was due: if it has moved since, it is looked at when it is due again.
        let Ok(moved) = row.take_over(&self.me, token, owner_gone, now, &self.book.clocks) else {
            if let Ok(later) = row.look_again(now + self.book.clocks.claim_check, now) {
                self.book.save(&row, &later).await?;
            }
            return Ok(None);
        };
        if self.book.save(&row, &moved).await? == Saved::Stale {
            return Ok(None);
        }
        if claim.doubt.is_none() {
            counter!("baton_reconciler_total", "finding" => "claim-orphaned").increment(1);
            warn!(transactionId = %row.id, action = "taken_over", consumer = %claim.consumer, "its consumer is gone");
        }
        let row = moved.transaction;
        let parts = row.claim.clone().and_then(|claim| claim.doubt.clone().map(|doubt| (claim, doubt)));
        Ok(parts.map(|(claim, doubt)| Case { row, claim, doubt }))
    }

    /// All doubts at one relayer, against one reading of its list.
    async fn settle_at(&self, relayer: RelayerUrl, cases: Vec<Case>) -> Result<(), StoreError> {
        let now = Timestamp::now();
        let Some(client) = self.pool.ask_one(&relayer) else {
            counter!("baton_reconciler_total", "finding" => "relayer-gone").increment(cases.len() as u64);
            return self.postpone(&cases, "its relayer is no longer configured").await;
        };
        // A list cannot speak of what is older than the relayer's memory, and would be read to its end for it.
        let (cases, too_old): (Vec<_>, Vec<_>) = cases
            .into_iter()
            .partition(|case| now.since(case.claim.at) + self.settings.clock_skew < self.settings.relayer_retention);
        self.postpone(&too_old, "the claim is older than the relayer's memory").await?;
        if cases.is_empty() {
            return Ok(());
        }
        match Search::read(&client, &cases, &self.settings).await {
            Err(failure) => self.postpone(&cases, &describe(&failure)).await,
            Ok(search) => {
                for case in &cases {
                    self.settle_one(case, &client, &search).await?;
                }
                Ok(())
            }
        }
    }

    async fn settle_one(&self, case: &Case, client: &RelayerClient, search: &Search) -> Result<(), StoreError> {
        for record in search.candidates(case) {
            if self.is_bound(&record.tx_id).await? {
                continue;
            }
            if self.bind(case, record).await? {
                return Ok(());
            }
        }
        if let Some(why) = self.absence_unproven(case, client, search).await? {
            counter!("baton_reconciler_total", "finding" => "absence-unproven").increment(1);
            return self.postpone(std::slice::from_ref(case), why).await;
        }
        let now = Timestamp::now();
        let absent = self.book.update(case.row.id, |row| row.absent(case.claim.token, now, &self.book.clocks)).await?;
        if let Updated::Moved(row) = absent
            && row.claim.is_none()
        {
            counter!("baton_reconciler_total", "finding" => "absent").increment(1);
            info!(transactionId = %row.id, action = "resend", relayer = %case.claim.relayer, "the relayer does not have it; queued again");
            self.book.publish_again(&row, Duration::ZERO).await;
        }
        Ok(())
    }

    async fn is_bound(&self, tx_id: &RelayerTxId) -> Result<bool, StoreError> {
        Ok(!self.book.store.bound_among(std::slice::from_ref(tx_id)).await?.is_empty())
    }

    /// Binds the row to a record of the list; `false` if another row was quicker.
    async fn bind(&self, case: &Case, record: &Report) -> Result<bool, StoreError> {
        let now = Timestamp::now();
        let from = record.from.as_deref();
        let token = case.claim.token;
        let bind =
            |row: &Transaction| row.bind(token, &record.tx_id, from, "found in its list", now, &self.book.clocks);
        match self.book.update(case.row.id, bind).await {
            Ok(Updated::Moved(row)) => {
                counter!("baton_reconciler_total", "finding" => "found").increment(1);
                info!(transactionId = %row.id, action = "found", ozRelayerTxId = %record.tx_id, "found in the relayer's list");
                self.book.apply_early(row.id, &record.tx_id).await?;
                self.book.apply(row.id, record, Origin::Reconciler).await?;
                Ok(true)
            }
            // Not ours any more: nothing left to do here.
            Ok(Updated::Refused(..) | Updated::Missing) => Ok(true),
            Err(StoreError::Conflict { .. }) => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    /// Why a list without the submission does not prove that it never happened; `None` if it does.
    async fn absence_unproven(
        &self,
        case: &Case,
        client: &RelayerClient,
        search: &Search,
    ) -> Result<Option<&'static str>, StoreError> {
        if !search.complete {
            return Ok(Some("the relayer's list is too long to search"));
        }
        for record in search.may_stand_for(case) {
            if !self.is_bound(&record.tx_id).await? {
                return Ok(Some("the relayer has a record that may be this one, or a no-op in its place"));
            }
        }
        if search.reaches_before(case) {
            return Ok(None);
        }
        self.memory_unproven(case, client).await
    }

    /// The list shows nothing from before the claim. Then a transaction that the relayer took before it must still be
    /// known there: one that has lost its memory lists nothing, and that proves nothing.
    async fn memory_unproven(&self, case: &Case, client: &RelayerClient) -> Result<Option<&'static str>, StoreError> {
        let now = Timestamp::now();
        let witness = self.book.store.bound_before(&case.claim.relayer, case.claim.at).await?;
        let witness = witness
            .and_then(|witness| witness.binding)
            .filter(|binding| now.since(binding.at) + self.settings.clock_skew < self.settings.relayer_retention);
        let Some(binding) = witness else {
            // Nothing to test its memory by. If it answered, or only our own consumer died, there is no reason to
            // suspect it; if it fell silent, it may have died with all it knew.
            return Ok(case.doubt.silent.then_some("the relayer fell silent and shows nothing from before"));
        };
        match client.transaction(&binding.tx_id, self.settings.question_timeout).await {
            Ok(Some(_)) => Ok(None),
            Ok(None) => {
                error!(
                    transactionId = %case.row.id, action = "relayer_forgot", relayer = %case.claim.relayer,
                    "the relayer has forgotten {}; what is in doubt there waits for an operator", binding.tx_id
                );
                Ok(Some("the relayer has forgotten transactions that it had before"))
            }
            Err(_) => Ok(Some("the relayer could not be asked whether it remembers")),
        }
    }

    /// Nothing learned about these claims: later, and less and less often.
    async fn postpone(&self, cases: &[Case], why: &str) -> Result<(), StoreError> {
        for Case { row, claim, .. } in cases {
            let now = Timestamp::now();
            let quick = self.book.clocks.doubt_check;
            let pause = (now.since(claim.at) / 4).clamp(quick, SLOW_CHECK.max(quick));
            info!(transactionId = %row.id, action = "still_unknown", "its outcome stays unknown: {why}");
            let decide = |row: &Transaction| match &row.claim {
                Some(held) if held.token == claim.token => row.look_again(now + pause, now),
                _ => Err(Refused::NotOurClaim),
            };
            self.book.update(row.id, decide).await?;
        }
        Ok(())
    }
}

/// What a relayer's list says about the cases it was read for.
struct Search {
    /// Records that may matter to some case, oldest first.
    records: Vec<Report>,
    /// The oldest record that was seen, matching or not.
    oldest: Option<Timestamp>,
    /// Whether the list was read far enough back for every case.
    complete: bool,
    /// How far the relayer's clock may be from ours: what is allowed, and what was seen.
    skew: Duration,
}

impl Search {
    /// Reads the list, newest first, until it is past the oldest claim; keeps only what may matter.
    async fn read(client: &RelayerClient, cases: &[Case], settings: &ReconcilerSettings) -> Result<Self, RelayerError> {
        let earliest = cases.iter().map(|case| case.claim.at).min().unwrap_or(Timestamp(0));
        let mut search = Self { records: Vec::new(), oldest: None, complete: false, skew: settings.clock_skew };
        let mut seen = HashSet::new();
        for page in 1..=PAGES_MAX {
            let (page, clock) = client.transactions(page, settings.question_timeout).await?;
            if let Some(clock) = clock {
                let now = Timestamp::now();
                search.skew = search.skew.max(settings.clock_skew + clock.since(now).max(now.since(clock)));
            }
            search.oldest = page.records.iter().filter_map(|record| record.created_at).chain(search.oldest).min();
            let matter = |record: &Report| record.is_no_op() || cases.iter().any(|case| case.row.call.is_still(record));
            search
                .records
                .extend(page.records.into_iter().filter(|record| matter(record) && seen.insert(record.tx_id.clone())));
            if page.last || search.oldest.is_some_and(|oldest| oldest < earliest - search.skew) {
                search.complete = true;
                break;
            }
        }
        search.records.reverse();
        Ok(search)
    }

    fn is_since(&self, record: &Report, case: &Case) -> bool {
        record.created_at.is_none_or(|created| created >= case.claim.at - self.skew)
    }

    /// Records that are this submission in everything that was sent.
    fn candidates(&self, case: &Case) -> impl Iterator<Item = &Report> {
        self.records.iter().filter(|record| self.is_since(record, case) && case.row.call.matches(record))
    }

    /// Records that are not certainly something else: some field is missing, or a no-op stands in its place.
    fn may_stand_for(&self, case: &Case) -> impl Iterator<Item = &Report> {
        self.records.iter().filter(|record| {
            let filler = record.reason.as_deref().unwrap_or_default().starts_with("Gap-filling");
            let other_gas =
                matches!((case.row.call.gas_limit, record.gas_limit), (Some(sent), Some(had)) if sent != had);
            let alike = (case.row.call.is_still(record) && !other_gas) || (record.is_no_op() && !filler);
            self.is_since(record, case) && alike
        })
    }

    /// Whether the list shows that the relayer remembers what it had before the claim.
    fn reaches_before(&self, case: &Case) -> bool {
        self.oldest.is_some_and(|oldest| oldest < case.claim.at - self.skew)
    }
}
