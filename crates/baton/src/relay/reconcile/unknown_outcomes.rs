//! Settles claims of unknown outcome by the relayer's own list of transactions. Found → bound. Certainly absent → sent
//! again. Neither → looked at again later, and shown to an operator.
//!
//! A relayer takes no idempotency key, so this search is the only protection against a double payment after a lost answer.
//! [`crate::relay::reconcile::absence_proof`] defines what counts as proof.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use alloy_primitives::Address;
use metrics::counter;
use tracing::{error, info, warn};

use crate::clock::Clock;
use crate::config::Timings;
use crate::relay::chain::account::AccountTransaction;
use crate::relay::reconcile::absence_proof::{self, EqualClaims, Finding, LostSubmission, Memory, RelayerListing};
use crate::relay::reconcile::chain_check::{ChainCheck, ClaimOnChain};
use crate::relay::reconcile::sweeps::ReconcilerSettings;
use crate::relay::relayer::client::{RelayerClient, RelayerError, describe};
use crate::relay::relayer::pool::Pool;
use crate::relay::state::apply_report::Report;
use crate::relay::state::transaction::{
    Claim, ConsumerId, Refused, RelayerTxId, RelayerUrl, Transaction, UnknownOutcome,
};
use crate::relay::store::{Saved, StoreError};
use crate::relay::update::guarded_store::{GuardedStore, Origin, Updated};
use crate::timestamp::Timestamp;

/// Settles claims of unknown outcome.
pub struct UnknownOutcomes {
    guarded: Arc<GuardedStore>,
    pool: Arc<Pool>,
    me: ConsumerId,
    settings: ReconcilerSettings,
    chain: Option<Arc<ChainCheck>>,
}

/// A claim of unknown outcome that this consumer has taken over.
struct UnresolvedClaim {
    row: Transaction,
    claim: Claim,
    unknown: UnknownOutcome,
}

impl UnresolvedClaim {
    fn case<'a>(&'a self, listing: &RelayerListing, clock: &Clock, timings: &'a Timings) -> LostSubmission<'a> {
        let Self { row, claim, unknown } = self;
        let over = unknown.is_over(listing.read_at, timings) && !self.may_run(listing.read_at, clock, timings);
        LostSubmission { call: &row.call, claim, unknown, slip: clock.slip(claim.at), over, timings }
    }

    /// Whether the submission may still have been running at `read_at`, because the clock jumped since the claim. Then a
    /// list read at that time proves no absence.
    fn may_run(&self, read_at: Timestamp, clock: &Clock, timings: &Timings) -> bool {
        clock.jump_hides(self.claim.at, read_at, timings.longest_submission())
    }
}

/// With more claims than this, every record is treated as wanted by another row.
const CLAIMS_COMPARED_MAX: usize = 5000;
/// Maximum number of pages read of a relayer's list.
const PAGES_MAX: usize = 200;
/// Longest pause between two looks at a claim that may stay unsettled for hours.
const SLOW_CHECK: Duration = Duration::from_secs(30);

impl UnknownOutcomes {
    /// Takes claims over in the name of this consumer.
    pub fn new(
        guarded: Arc<GuardedStore>,
        pool: Arc<Pool>,
        me: ConsumerId,
        settings: ReconcilerSettings,
        chain: Option<Arc<ChainCheck>>,
    ) -> Self {
        Self { guarded, pool, me, settings, chain }
    }

    /// Settles these claimed rows as far as possible now.
    pub async fn settle(&self, rows: Vec<Transaction>) -> Result<(), StoreError> {
        let mut by_relayer: BTreeMap<RelayerUrl, Vec<UnresolvedClaim>> = BTreeMap::new();
        for case in futures::future::join_all(rows.into_iter().map(|row| self.take_over(row))).await {
            if let Some(case) = case? {
                by_relayer.entry(case.claim.relayer.clone()).or_default().push(case);
            }
        }
        let settled = by_relayer.into_iter().map(|(relayer, cases)| self.settle_at(relayer, cases));
        futures::future::join_all(settled).await.into_iter().collect()
    }

    /// Takes over one claim if its outcome is unknown or its owner is gone; otherwise checks the owner's heartbeat later.
    async fn take_over(&self, row: Transaction) -> Result<Option<UnresolvedClaim>, StoreError> {
        let Some(claim) = &row.claim else { return Ok(None) };
        let (now, token) = (self.guarded.clock.now(), self.guarded.random.uuid_v4());
        let owner_gone = match self.guarded.store.last_heartbeat(&claim.consumer).await? {
            Some(seen) => self.passed_since(seen) > self.settings.consumer_dead_after,
            None => true,
        };
        // Decided about the row as it was due: if it has moved since, it is looked at when it is due again.
        let Ok(moved) = row.take_over(&self.me, token, owner_gone, now, &self.guarded.timings) else {
            if let Ok(later) = row.check_later(now + self.guarded.timings.claim_check, now) {
                self.guarded.save(&row, &later).await?;
            }
            return Ok(None);
        };
        if self.guarded.save(&row, &moved).await? == Saved::Stale {
            return Ok(None);
        }
        if claim.unknown.is_none() {
            counter!("baton_reconciler_total", "finding" => "claim-orphaned").increment(1);
            warn!(transactionId = %row.id, action = "taken_over", consumer = %claim.consumer, "the consumer that held its claim is gone");
        }
        let row = moved.transaction;
        let parts = row.claim.clone().and_then(|claim| claim.unknown.clone().map(|unknown| (claim, unknown)));
        Ok(parts.map(|(claim, unknown)| UnresolvedClaim { row, claim, unknown }))
    }

    /// Settles all claims at one relayer against one reading of its list.
    async fn settle_at(&self, relayer: RelayerUrl, cases: Vec<UnresolvedClaim>) -> Result<(), StoreError> {
        let now = self.guarded.clock.now();
        let Some(client) = self.pool.ask_one(&relayer) else {
            counter!("baton_reconciler_total", "finding" => "relayer-gone").increment(cases.len() as u64);
            return self.postpone(&cases, "its relayer is no longer configured").await;
        };
        // The list does not reach back beyond the relayer's retention, and would be read to its end in vain.
        let (cases, too_old): (Vec<_>, Vec<_>) = cases
            .into_iter()
            .partition(|case| now.since(case.claim.at) + self.settings.clock_skew < self.settings.relayer_retention);
        self.postpone(&too_old, "the claim is older than the relayer's retention").await?;
        if cases.is_empty() {
            return Ok(());
        }
        match read_list(&client, &cases, &self.settings, &self.guarded.clock).await {
            Err(failure) => self.postpone(&cases, &describe(&failure)).await,
            Ok(listing) => {
                // Read after the list: a submission claimed later cannot be on it.
                let claims = self.guarded.store.claimed(CLAIMS_COMPARED_MAX).await?;
                let mut memories = HashMap::new();
                for case in &cases {
                    self.settle_one(case, &client, &listing, &claims, &mut memories).await?;
                }
                Ok(())
            }
        }
    }

    async fn settle_one(
        &self,
        unresolved: &UnresolvedClaim,
        client: &RelayerClient,
        listing: &RelayerListing,
        claims: &[Transaction],
        memories: &mut HashMap<RelayerTxId, Memory>,
    ) -> Result<(), StoreError> {
        let calls = absence_proof::rivals(&unresolved.row, claims);
        let rivals = if claims.len() < CLAIMS_COMPARED_MAX { EqualClaims::Calls(&calls) } else { EqualClaims::TooMany };
        let ids: Vec<RelayerTxId> = listing.records.iter().map(|record| record.tx_id.clone()).collect();
        let case = unresolved.case(listing, &self.guarded.clock, &self.guarded.timings);
        let mut memory = None;
        let finding = loop {
            let bound = self.guarded.store.bound_among(&ids).await?.into_iter().collect();
            match listing.judge(case, &bound, rivals, memory) {
                // If another row was bound to the record first, judge again.
                Finding::Bind(record) => {
                    if self.bind(unresolved, record).await? {
                        return Ok(());
                    }
                }
                Finding::AskMemory => memory = Some(self.memory(unresolved, client, memories).await?),
                other => break other,
            }
        };
        let unproven = if let Finding::Unproven(why) = finding { Some(why) } else { None };
        if unproven.is_some() {
            counter!("baton_reconciler_total", "finding" => "absence-unproven").increment(1);
        }
        if unresolved.may_run(listing.read_at, &self.guarded.clock, &self.guarded.timings) {
            return self.postpone(std::slice::from_ref(unresolved), "the clock jumped since the claim").await;
        }
        if !self.chain_allows_resend(unresolved, unproven).await? {
            return Ok(());
        }
        let (now, token) = (self.guarded.clock.now(), unresolved.claim.token);
        let absent = self
            .guarded
            .update(unresolved.row.id, |row| row.absent(token, listing.read_at, now, &self.guarded.timings))
            .await?;
        if let Updated::Moved(row) = absent
            && row.claim.is_none()
        {
            counter!("baton_reconciler_total", "finding" => "absent").increment(1);
            info!(transactionId = %row.id, action = "resend", relayer = %unresolved.claim.relayer, "the relayer does not have it; queued again");
            self.guarded.publish_again(&row, Duration::ZERO).await;
        }
        Ok(())
    }

    /// Whether the chain, if there is one, shows that the call was not made. Without a chain a proven absence is enough, and
    /// an unproven one waits for an operator.
    ///
    /// A list that does not prove itself may hide a record that is not signed yet. A relayer gives such a record up after
    /// two minutes, so an unproven absence counts only long after that.
    async fn chain_allows_resend(
        &self,
        unresolved: &UnresolvedClaim,
        unproven: Option<&'static str>,
    ) -> Result<bool, StoreError> {
        let UnresolvedClaim { row, claim, .. } = unresolved;
        let one = std::slice::from_ref(unresolved);
        let Some(chain) = &self.chain else {
            if let Some(why) = unproven {
                self.postpone(one, why).await?;
            }
            return Ok(unproven.is_none());
        };
        match chain.claim(row, claim).await? {
            ClaimOnChain::Executed(mined, from) => {
                self.bind_mined(unresolved, chain, &mined, from).await?;
                Ok(false)
            }
            ClaimOnChain::Open(why) => {
                self.postpone(one, &why).await?;
                Ok(false)
            }
            ClaimOnChain::Clear => match unproven {
                Some(why) if self.passed_since(claim.at) < self.guarded.timings.unproven_wait => {
                    self.postpone(one, why).await?;
                    Ok(false)
                }
                _ => Ok(true),
            },
        }
    }

    /// Time that has certainly passed since `at`.
    fn passed_since(&self, at: Timestamp) -> Duration {
        self.guarded.clock.now().since(at.max(self.guarded.clock.steady_since()))
    }

    /// The chain has the call, under a record that the relayer does not show. The row is bound to the chain's transaction,
    /// which no other row can then be bound to.
    async fn bind_mined(
        &self,
        unresolved: &UnresolvedClaim,
        chain: &ChainCheck,
        mined: &AccountTransaction,
        from: Address,
    ) -> Result<(), StoreError> {
        let Some(receipt) = chain.receipt(mined).await else { return Ok(()) };
        let (now, token) = (self.guarded.clock.now(), unresolved.claim.token);
        let tx_id = RelayerTxId(format!("chain:{}", mined.hash));
        let sender = from.to_checksum(None);
        let bind = |row: &Transaction| {
            row.bind(token, &tx_id, Some(&sender), "found on the chain", now, &self.guarded.timings)
        };
        match self.guarded.update(unresolved.row.id, bind).await {
            Ok(Updated::Moved(row)) => {
                counter!("baton_reconciler_total", "finding" => "found-on-chain").increment(1);
                info!(transactionId = %row.id, action = "found_on_chain", hash = %mined.hash, "the chain has the call");
                let report = chain.report(&row, &tx_id, mined, from, receipt).await;
                self.guarded.apply(row.id, &report, Origin::Chain).await.map(|_| ())
            }
            // Another row has it, or another consumer settles this claim: looked at again when due.
            Ok(Updated::Refused(..) | Updated::Missing) | Err(StoreError::Conflict { .. }) => Ok(()),
            Err(failure) => Err(failure),
        }
    }

    /// Binds the row to a record of the list; `false` if another row was bound to the record first.
    async fn bind(&self, case: &UnresolvedClaim, record: &Report) -> Result<bool, StoreError> {
        let now = self.guarded.clock.now();
        let from = record.from.as_deref();
        let token = case.claim.token;
        let bind =
            |row: &Transaction| row.bind(token, &record.tx_id, from, "found in its list", now, &self.guarded.timings);
        match self.guarded.update(case.row.id, bind).await {
            Ok(Updated::Moved(row)) => {
                counter!("baton_reconciler_total", "finding" => "found").increment(1);
                info!(transactionId = %row.id, action = "found", ozRelayerTxId = %record.tx_id, "found in the relayer's list");
                self.guarded.apply(row.id, record, Origin::Reconciler).await?;
                Ok(true)
            }
            // The claim was taken over by another consumer, which settles it.
            Ok(Updated::Refused(..) | Updated::Missing) => Ok(true),
            Err(StoreError::Conflict { .. }) => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    /// Whether the relayer still knows the last transaction that it took before the claim. A relayer that has lost its
    /// memory lists nothing, and that proves nothing.
    async fn memory(
        &self,
        unresolved: &UnresolvedClaim,
        client: &RelayerClient,
        memories: &mut HashMap<RelayerTxId, Memory>,
    ) -> Result<Memory, StoreError> {
        let now = self.guarded.clock.now();
        let witness = self.guarded.store.bound_before(&unresolved.claim.relayer, unresolved.claim.at).await?;
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
                    transactionId = %unresolved.row.id, action = "relayer_forgot", relayer = %unresolved.claim.relayer,
                    "the relayer has forgotten {}; its claims of unknown outcome wait for an operator", binding.tx_id
                );
                Memory::Lost
            }
            Err(_) => Memory::Unasked,
        };
        memories.insert(binding.tx_id, memory);
        Ok(memory)
    }

    /// Looks at these claims again later; the older the claim, the longer the pause.
    async fn postpone(&self, cases: &[UnresolvedClaim], why: &str) -> Result<(), StoreError> {
        for UnresolvedClaim { row, claim, .. } in cases {
            let now = self.guarded.clock.now();
            let quick = self.guarded.timings.unknown_check;
            let pause = (self.passed_since(claim.at) / 4).clamp(quick, SLOW_CHECK.max(quick));
            info!(transactionId = %row.id, action = "still_unknown", "its outcome stays unknown: {why}");
            let decide = |row: &Transaction| match &row.claim {
                Some(held) if held.token == claim.token => row.check_later(now + pause, now),
                _ => Err(Refused::NotOurClaim),
            };
            self.guarded.update(row.id, decide).await?;
        }
        Ok(())
    }
}

/// Reads the list, newest first, until it is past the oldest claim; keeps only records that may be one of `unresolved`.
async fn read_list(
    client: &RelayerClient,
    unresolved: &[UnresolvedClaim],
    settings: &ReconcilerSettings,
    clock: &Clock,
) -> Result<RelayerListing, RelayerError> {
    let earliest =
        unresolved.iter().map(|case| case.claim.at - clock.slip(case.claim.at)).min().unwrap_or(Timestamp(0));
    let read_at = clock.now();
    let mut listing =
        RelayerListing { records: Vec::new(), oldest: None, complete: false, skew: settings.clock_skew, read_at };
    // New records push others onto the next page while we read: a record may be read twice, but none is missed.
    let mut seen = HashSet::new();
    for page in 1..=PAGES_MAX {
        let (page, date) = client.transactions(page, settings.question_timeout).await?;
        if let Some(date) = date {
            let now = clock.now();
            listing.skew = listing.skew.max(settings.clock_skew + date.since(now).max(now.since(date)));
        }
        listing.oldest = page.records.iter().filter_map(|record| record.created_at).chain(listing.oldest).min();
        listing.records.extend(page.records.into_iter().filter(|record| {
            RelayerListing::matters(record, unresolved.iter().map(|case| &case.row.call))
                && seen.insert(record.tx_id.clone())
        }));
        if page.last || listing.oldest.is_some_and(|oldest| oldest < earliest - listing.skew) {
            listing.complete = true;
            break;
        }
    }
    listing.records.reverse();
    Ok(listing)
}
