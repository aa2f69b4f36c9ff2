//! Claims whose outcome nobody knows, and how they are settled: by the relayer's own list of transactions. Found →
//! bound. Certainly absent → sent again. Anything less than certain → looked at again later, and shown to an operator.
//!
//! A relayer takes no idempotency key, so this search is all there is between a lost answer and a double payment.
//! What counts as proof is in [`super::search`].

use std::collections::{BTreeMap, HashMap, HashSet};
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
use super::search::{self, Case, Judgement, Memory, Rivals, Search};
use super::store::{Saved, StoreError};
use super::transaction::{Claim, Clocks, ConsumerId, Doubt, Refused, RelayerTxId, RelayerUrl, Transaction};
use crate::timestamp::Timestamp;

/// Settles doubts.
pub struct Doubts {
    book: Arc<Book>,
    pool: Arc<Pool>,
    me: ConsumerId,
    settings: ReconcilerSettings,
}

/// A claim in doubt that is ours to settle.
struct Doubtful {
    row: Transaction,
    claim: Claim,
    doubt: Doubt,
}

impl Doubtful {
    fn case(&self, search: &Search, clocks: &Clocks) -> Case<'_> {
        let Self { row, claim, doubt } = self;
        let over = doubt.is_over(search.read_at, clocks);
        Case { call: &row.call, claim, doubt, slip: claim.at.slip(), over }
    }
}

/// More claims than this at once, and every record is taken to be wanted by another.
const CLAIMS_COMPARED_MAX: usize = 5000;
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
        let mut by_relayer: BTreeMap<RelayerUrl, Vec<Doubtful>> = BTreeMap::new();
        for case in futures::future::join_all(rows.into_iter().map(|row| self.take_over(row))).await {
            if let Some(case) = case? {
                by_relayer.entry(case.claim.relayer.clone()).or_default().push(case);
            }
        }
        let settled = by_relayer.into_iter().map(|(relayer, cases)| self.settle_at(relayer, cases));
        futures::future::join_all(settled).await.into_iter().collect()
    }

    /// Takes over one claim if it is in doubt or its owner is gone; otherwise feels its pulse again later.
    async fn take_over(&self, row: Transaction) -> Result<Option<Doubtful>, StoreError> {
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
        Ok(parts.map(|(claim, doubt)| Doubtful { row, claim, doubt }))
    }

    /// All doubts at one relayer, against one reading of its list.
    async fn settle_at(&self, relayer: RelayerUrl, cases: Vec<Doubtful>) -> Result<(), StoreError> {
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
        match read_list(&client, &cases, &self.settings).await {
            Err(failure) => self.postpone(&cases, &describe(&failure)).await,
            Ok(search) => {
                // Read after the list: what is claimed later cannot be on it.
                let claims = self.book.store.claimed(CLAIMS_COMPARED_MAX).await?;
                let mut memories = HashMap::new();
                for case in &cases {
                    self.settle_one(case, &client, &search, &claims, &mut memories).await?;
                }
                Ok(())
            }
        }
    }

    async fn settle_one(
        &self,
        doubtful: &Doubtful,
        client: &RelayerClient,
        search: &Search,
        claims: &[Transaction],
        memories: &mut HashMap<RelayerTxId, Memory>,
    ) -> Result<(), StoreError> {
        let calls = search::rivals(&doubtful.row, claims);
        let rivals = if claims.len() < CLAIMS_COMPARED_MAX { Rivals::Calls(&calls) } else { Rivals::TooMany };
        let ids: Vec<RelayerTxId> = search.records.iter().map(|record| record.tx_id.clone()).collect();
        let case = doubtful.case(search, &self.book.clocks);
        let mut memory = None;
        let judgement = loop {
            let bound = self.book.store.bound_among(&ids).await?.into_iter().collect();
            match search.judge(case, &bound, rivals, memory) {
                // Bound, or another row was quicker: then the judgement is made anew.
                Judgement::Bind(record) => {
                    if self.bind(doubtful, record).await? {
                        return Ok(());
                    }
                }
                Judgement::AskMemory => memory = Some(self.memory(doubtful, client, memories).await?),
                other => break other,
            }
        };
        if let Judgement::Unproven(why) = judgement {
            counter!("baton_reconciler_total", "finding" => "absence-unproven").increment(1);
            return self.postpone(std::slice::from_ref(doubtful), why).await;
        }
        let (now, token) = (Timestamp::now(), doubtful.claim.token);
        let absent =
            self.book.update(doubtful.row.id, |row| row.absent(token, search.read_at, now, &self.book.clocks)).await?;
        if let Updated::Moved(row) = absent
            && row.claim.is_none()
        {
            counter!("baton_reconciler_total", "finding" => "absent").increment(1);
            info!(transactionId = %row.id, action = "resend", relayer = %doubtful.claim.relayer, "the relayer does not have it; queued again");
            self.book.publish_again(&row, Duration::ZERO).await;
        }
        Ok(())
    }

    /// Binds the row to a record of the list; `false` if another row was quicker.
    async fn bind(&self, case: &Doubtful, record: &Report) -> Result<bool, StoreError> {
        let now = Timestamp::now();
        let from = record.from.as_deref();
        let token = case.claim.token;
        let bind =
            |row: &Transaction| row.bind(token, &record.tx_id, from, "found in its list", now, &self.book.clocks);
        match self.book.update(case.row.id, bind).await {
            Ok(Updated::Moved(row)) => {
                counter!("baton_reconciler_total", "finding" => "found").increment(1);
                info!(transactionId = %row.id, action = "found", ozRelayerTxId = %record.tx_id, "found in the relayer's list");
                self.book.apply(row.id, record, Origin::Reconciler).await?;
                Ok(true)
            }
            // Not ours any more: nothing left to do here.
            Ok(Updated::Refused(..) | Updated::Missing) => Ok(true),
            Err(StoreError::Conflict { .. }) => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    /// Whether the relayer still knows the last transaction that it took before the claim. One that has lost its
    /// memory lists nothing, and that proves nothing.
    async fn memory(
        &self,
        doubtful: &Doubtful,
        client: &RelayerClient,
        memories: &mut HashMap<RelayerTxId, Memory>,
    ) -> Result<Memory, StoreError> {
        let now = Timestamp::now();
        let witness = self.book.store.bound_before(&doubtful.claim.relayer, doubtful.claim.at).await?;
        let witness = witness
            .and_then(|witness| witness.binding)
            .filter(|binding| now.since(binding.at) + self.settings.clock_skew < self.settings.relayer_retention);
        let Some(binding) = witness else { return Ok(Memory::Untestable) };
        if let Some(known) = memories.get(&binding.tx_id) {
            return Ok(*known);
        }
        let memory = match client.transaction(&binding.tx_id, self.settings.question_timeout).await {
            Ok(Some(_)) => Memory::Kept,
            Ok(None) => {
                error!(
                    transactionId = %doubtful.row.id, action = "relayer_forgot", relayer = %doubtful.claim.relayer,
                    "the relayer has forgotten {}; what is in doubt there waits for an operator", binding.tx_id
                );
                Memory::Lost
            }
            Err(_) => Memory::Unasked,
        };
        memories.insert(binding.tx_id, memory);
        Ok(memory)
    }

    /// Nothing learned about these claims: later, and less and less often.
    async fn postpone(&self, cases: &[Doubtful], why: &str) -> Result<(), StoreError> {
        for Doubtful { row, claim, .. } in cases {
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

/// Reads the list, newest first, until it is past the oldest claim; keeps only what may matter.
async fn read_list(
    client: &RelayerClient,
    doubts: &[Doubtful],
    settings: &ReconcilerSettings,
) -> Result<Search, RelayerError> {
    let earliest =
        doubts.iter().map(|doubtful| doubtful.claim.at - doubtful.claim.at.slip()).min().unwrap_or(Timestamp(0));
    let read_at = Timestamp::now();
    let mut search = Search { records: Vec::new(), oldest: None, complete: false, skew: settings.clock_skew, read_at };
    // New records push others onto the next page while we read: the same one may come twice, none is missed.
    let mut seen = HashSet::new();
    for page in 1..=PAGES_MAX {
        let (page, clock) = client.transactions(page, settings.question_timeout).await?;
        if let Some(clock) = clock {
            let now = Timestamp::now();
            search.skew = search.skew.max(settings.clock_skew + clock.since(now).max(now.since(clock)));
        }
        search.oldest = page.records.iter().filter_map(|record| record.created_at).chain(search.oldest).min();
        search.records.extend(page.records.into_iter().filter(|record| {
            Search::matters(record, doubts.iter().map(|doubtful| &doubtful.row.call))
                && seen.insert(record.tx_id.clone())
        }));
        if page.last || search.oldest.is_some_and(|oldest| oldest < earliest - search.skew) {
            search.complete = true;
            break;
        }
    }
    search.records.reverse();
    Ok(search)
}
