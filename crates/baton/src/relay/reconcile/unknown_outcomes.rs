//! Settles claims of unknown outcome by the relayer's own list of transactions. Found → bound. Certainly absent → sent
//! again. Neither → looked at again later, and shown to an operator.
//!
//! A relayer takes no idempotency key, so this search is the only protection against a double payment after a lost answer.
//! [`crate::relay::reconcile::absence_proof`] defines what counts as proof.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use alloy_primitives::Address;
use metrics::counter;
use tracing::{info, warn};

use crate::clock::Clock;
use crate::config::Timings;
use crate::relay::chain::account::AccountTransaction;
use crate::relay::reconcile::absence_proof::{self, EqualClaims, Finding, LostSubmission};
use crate::relay::reconcile::chain_check::{CONTESTED, ChainCheck};
use crate::relay::reconcile::chain_owners::{ClaimOnChain, Shown, is_equal};
use crate::relay::reconcile::relayer_list::{self, Coverage, RelayerListing};
use crate::relay::reconcile::sweeps::ReconcilerSettings;
use crate::relay::relayer::client::{RelayerClient, RelayerError, describe};
use crate::relay::relayer::pool::Pool;
use crate::relay::request::call::Call;
use crate::relay::state::apply_report::Report;
use crate::relay::state::transaction::{
    Claim, ConsumerId, MoveRefused, RelayerTxId, RelayerUrl, Transaction, UnknownOutcome,
};
use crate::relay::store::{BoundRecord, ForgottenRecord, Saved, StoreError};
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

/// What is known of a claim that its relayer's list does not settle.
struct Evidence<'a> {
    shown: Shown<'a>,
    /// Whether an equal claim exists at the same relayer.
    rivals: bool,
    /// A listed record of this call that belongs to no row, but may be an equal claim's.
    contested: Option<&'a Report>,
    /// Why the list proves no absence.
    unproven: Option<&'static str>,
}

/// With more claims than this, every record is treated as wanted by another row.
const CLAIMS_COMPARED_MAX: usize = 5000;
/// Records of ours that the list must show: bound last before the oldest claim, and bound last of all.
const WITNESSES_BEFORE: usize = 5;
const WITNESSES_SINCE: usize = 200;
/// With more records that count as forgotten than this, a list proves no absence.
const FORGOTTEN_COMPARED_MAX: usize = 1000;
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
        let Some(client) = self.pool.ask_one(&relayer) else {
            counter!("baton_reconciler_total", "finding" => "relayer-gone").increment(cases.len() as u64);
            return self.postpone(&cases, "its relayer is no longer configured").await;
        };
        // The list does not reach back beyond the relayer's retention, and would be read to its end in vain.
        let cases = self.within_retention(cases).await?;
        if cases.is_empty() {
            return Ok(());
        }
        match self.read_list(&relayer, &client, &cases).await? {
            Err(failure) => {
                let why = describe(&failure);
                for case in &cases {
                    self.found_on_chain_or_postponed(case, &why).await?;
                }
                Ok(())
            }
            Ok(mut listing) => {
                let mut next_nonce = None;
                if let Some(chain) = &self.chain {
                    next_nonce = chain.next_nonce(&relayer).await?;
                    // What the relayer has signed since the list was read is not on it.
                    let calls: Vec<&Call> = cases.iter().map(|case| &case.row.call).collect();
                    relayer_list::add_newest(&mut listing, &client, &calls, self.settings.question_timeout).await;
                }
                // Again: this process may have stood still while it read, and the relayer have deleted records meanwhile.
                let cases = self.within_retention(cases).await?;
                // Read after the list: a submission claimed later cannot be on it.
                let claims = self.guarded.store.claimed(CLAIMS_COMPARED_MAX).await?;
                for case in &cases {
                    self.settle_one(case, Shown { listing: &listing, next_nonce }, &claims).await?;
                }
                Ok(())
            }
        }
    }

    /// Those whose record the relayer would still have; the others wait.
    async fn within_retention(&self, cases: Vec<UnresolvedClaim>) -> Result<Vec<UnresolvedClaim>, StoreError> {
        let now = self.guarded.clock.now();
        let kept = |case: &UnresolvedClaim| {
            now.since(case.claim.at) + self.settings.clock_skew < self.settings.relayer_retention
        };
        let (kept, too_old): (Vec<_>, Vec<_>) = cases.into_iter().partition(kept);
        for case in &too_old {
            self.found_on_chain_or_postponed(case, "the claim is older than the relayer's retention").await?;
        }
        Ok(kept)
    }

    /// Reads the relayer's list back to before the oldest of these claims, and to the last record that Baton bound there
    /// before it.
    async fn read_list(
        &self,
        relayer: &RelayerUrl,
        client: &RelayerClient,
        cases: &[UnresolvedClaim],
    ) -> Result<Result<RelayerListing, RelayerError>, StoreError> {
        let (store, clock) = (&self.guarded.store, &self.guarded.clock);
        let now = clock.now();
        let earliest = cases.iter().map(|case| case.claim.at).min().unwrap_or(now);
        let kept =
            |record: &BoundRecord| now.since(record.at) + self.settings.clock_skew < self.settings.relayer_retention;
        let before: Vec<_> =
            store.last_bound(relayer, earliest, WITNESSES_BEFORE).await?.into_iter().filter(kept).collect();
        let mut reach = earliest - clock.slip(earliest);
        if let Some(witness) = before.first() {
            reach = reach.min(witness.at - self.guarded.timings.longest_submission());
        }
        let last = store.last_bound(relayer, now, WITNESSES_SINCE).await?;
        let mut witnesses: Vec<BoundRecord> = last.into_iter().filter(kept).collect();
        let older: Vec<_> = before.into_iter().filter(|record| !witnesses.contains(record)).collect();
        witnesses.extend(older);
        let retained = self.settings.relayer_retention.saturating_sub(self.settings.clock_skew);
        let forgotten = async || store.forgotten_at(relayer, earliest, retained, FORGOTTEN_COMPARED_MAX).await;
        // A record that the relayer only gave no answer about is forgotten or not: the relayer answers now.
        let is_silent = |record: &ForgottenRecord| {
            let recent = now.since(record.at) < retained && !record.tx_id.0.starts_with("chain:");
            record.only_silent && recent && !witnesses.iter().any(|witness| witness.tx_id == record.tx_id)
        };
        let silent = forgotten().await?;
        let too_many = silent.len() >= FORGOTTEN_COMPARED_MAX;
        let silent = silent.into_iter().filter(is_silent).map(|record| record.tx_id);
        let silent: Vec<RelayerTxId> = silent.collect();
        let calls: Vec<&Call> = cases.iter().map(|case| &case.row.call).collect();
        let coverage = Coverage {
            calls: &calls,
            reach,
            witnesses: &witnesses,
            silent: &silent,
            skew: self.settings.clock_skew,
            timeout: self.settings.question_timeout,
        };
        let mut listing = match relayer_list::read(client, &coverage, clock).await {
            Ok(listing) => listing,
            Err(failure) => return Ok(Err(failure)),
        };
        if listing.unproven.is_none() {
            let forgotten = forgotten().await?;
            if forgotten.iter().any(|record| !record.only_silent) {
                listing.unproven = Some("the relayer has forgotten transactions since then");
            } else if too_many
                || forgotten.len() >= FORGOTTEN_COMPARED_MAX
                || forgotten.iter().filter(|record| is_silent(record)).any(|record| !silent.contains(&record.tx_id))
            {
                listing.unproven = Some("the relayer has given no answer about too many transactions since then");
            }
        }
        if let Some(why) = listing.unproven {
            warn!(action = "list_unproven", relayer = %relayer, "its list proves no absence: {why}");
        }
        Ok(Ok(listing))
    }

    async fn settle_one(
        &self,
        unresolved: &UnresolvedClaim,
        shown: Shown<'_>,
        claims: &[Transaction],
    ) -> Result<(), StoreError> {
        let listing = shown.listing;
        let calls = absence_proof::rivals(&unresolved.row, claims);
        let rivals = if claims.len() < CLAIMS_COMPARED_MAX { EqualClaims::Calls(&calls) } else { EqualClaims::TooMany };
        let case = unresolved.case(listing, &self.guarded.clock, &self.guarded.timings);
        let (finding, owned) = loop {
            let owned = self.owned_records(unresolved, listing).await?;
            match listing.judge(case, &owned, rivals) {
                // If another row was bound to the record first, judge again.
                Finding::Bind(record) => {
                    if self.bind(unresolved, record).await? {
                        return Ok(());
                    }
                }
                other => break (other, owned),
            }
        };
        let mut unproven = if let Finding::Unproven(why) = finding { Some(why) } else { None };
        if self.is_misbound(unresolved, listing).await? {
            unproven = Some("the relayer has a record of this call, but another transaction is bound to it");
        }
        if unproven.is_some() {
            counter!("baton_reconciler_total", "finding" => "absence-unproven").increment(1);
        }
        if unresolved.may_run(listing.read_at, &self.guarded.clock, &self.guarded.timings) {
            return self.postpone(std::slice::from_ref(unresolved), "the clock jumped since the claim").await;
        }
        let contested = listing.first_free(case, &owned);
        let evidence = Evidence { shown, rivals: rivals.any(), contested, unproven };
        if !self.chain_allows_resend(unresolved, case, &evidence).await? {
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

    /// Whether the list shows this call under a record to which a row with another call is bound: the relayer's answer to
    /// that row named the wrong record.
    async fn is_misbound(&self, unresolved: &UnresolvedClaim, listing: &RelayerListing) -> Result<bool, StoreError> {
        let call = &unresolved.row.call;
        for record in listing.records.iter().filter(|record| call.matches(record)) {
            let owner = self.guarded.store.find_bound(&record.tx_id).await?;
            if owner.is_some_and(|owner| owner.id != unresolved.row.id && !owner.call.is_still(record)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The listed records that belong to a row, by the relayer's id or, if a row was bound to the chain's transaction, by
    /// their nonce.
    async fn owned_records(
        &self,
        unresolved: &UnresolvedClaim,
        listing: &RelayerListing,
    ) -> Result<HashSet<RelayerTxId>, StoreError> {
        let store = &self.guarded.store;
        let ids: Vec<RelayerTxId> = listing.records.iter().map(|record| record.tx_id.clone()).collect();
        let mut owned: HashSet<RelayerTxId> = store.bound_among(&ids).await?.into_iter().collect();
        let free = listing.records.iter().filter(|record| !owned.contains(&record.tx_id));
        let signed: Vec<(u64, &RelayerTxId)> = free.filter_map(|record| Some((record.nonce?, &record.tx_id))).collect();
        let nonces: Vec<u64> = signed.iter().map(|(nonce, _)| *nonce).collect();
        if self.chain.is_some() && !nonces.is_empty() {
            let owners = store.nonce_owners(&unresolved.claim.relayer, &nonces).await?;
            let taken = |nonce: u64| owners.iter().any(|(known, _)| *known == nonce);
            let by_nonce: Vec<RelayerTxId> =
                signed.into_iter().filter(|(nonce, _)| taken(*nonce)).map(|(_, tx_id)| tx_id.clone()).collect();
            owned.extend(by_nonce);
        }
        Ok(owned)
    }

    /// The relayer gives no list that reaches back to the claim. A call that the chain shows is settled all the same;
    /// everything else waits.
    async fn found_on_chain_or_postponed(&self, unresolved: &UnresolvedClaim, why: &str) -> Result<(), StoreError> {
        let one = std::slice::from_ref(unresolved);
        let Some(chain) = &self.chain else { return self.postpone(one, why).await };
        match chain.claim(&unresolved.row, &unresolved.claim, None).await? {
            ClaimOnChain::Executed(mined, from) => self.bind_mined(unresolved, chain, &mined, from, None).await,
            ClaimOnChain::Undecided(_) | ClaimOnChain::Open(_) | ClaimOnChain::Clear => self.postpone(one, why).await,
        }
    }

    /// Whether the chain, if there is one, shows that the call was not made. Without a chain a proven absence is enough, and
    /// an unproven one waits for an operator.
    ///
    /// A list that does not prove itself may hide a record that is not signed yet. A relayer gives such a record up after
    /// two minutes, so an unproven absence counts only long after that.
    async fn chain_allows_resend(
        &self,
        unresolved: &UnresolvedClaim,
        case: LostSubmission<'_>,
        evidence: &Evidence<'_>,
    ) -> Result<bool, StoreError> {
        let Evidence { shown, rivals, contested, unproven } = *evidence;
        let listing = shown.listing;
        let UnresolvedClaim { row, claim, .. } = unresolved;
        let one = std::slice::from_ref(unresolved);
        let Some(chain) = &self.chain else {
            if let Some(why) = unproven {
                self.postpone(one, why).await?;
            }
            return Ok(unproven.is_none());
        };
        let young = self.is_young(unresolved);
        // A transaction on the chain, or a record that equal claims contend for, may be another claim's. Taken while our own
        // submission can still arrive, it would make that claim look absent, and both calls would be made again.
        if young && (contested.is_some() || (rivals && !case.over)) {
            if let Some(why) = unproven {
                self.postpone(one, why).await?;
            }
            return Ok(unproven.is_none());
        }
        match (chain.claim(row, claim, Some(shown)).await?, contested) {
            // Of a transaction on the chain and a listed record the row takes the older one: an equal row that was claimed
            // later can only have the newer one.
            (ClaimOnChain::Executed(mined, from), record)
                if record.and_then(|record| record.nonce).is_none_or(|nonce| mined.nonce <= nonce) =>
            {
                self.bind_mined(unresolved, chain, &mined, from, Some(listing)).await?;
                Ok(false)
            }
            (ClaimOnChain::Undecided(why), _) | (ClaimOnChain::Open(why), None) => {
                self.postpone(one, &why).await?;
                Ok(false)
            }
            // Listed and free: there is nothing to send again, whatever else the list does not prove.
            (_, Some(record)) => {
                self.bind(unresolved, record).await?;
                Ok(false)
            }
            (_, None) => {
                // A list without anything from before the claim may be empty by mistake.
                let why = unproven.or_else(|| (!listing.shows_memory(case)).then_some("its list shows nothing older"));
                if let Some(why) = why.filter(|_| young) {
                    self.postpone(one, why).await?;
                    return Ok(false);
                }
                Ok(true)
            }
        }
    }

    /// Whether what the relayer has of its submission may still be unsigned: a relayer gives such a record up after two
    /// minutes.
    fn is_young(&self, unresolved: &UnresolvedClaim) -> bool {
        self.passed_since(unresolved.claim.at) < self.guarded.timings.unproven_wait
    }

    /// Time that has certainly passed since `at`.
    fn passed_since(&self, at: Timestamp) -> Duration {
        self.guarded.clock.passed_since(at)
    }

    /// The chain has the call. If the relayer lists a record with that nonce, the row is bound to the record; if not, to the
    /// chain's transaction. Either way no other row can then be bound to it: the nonce is stored with the binding.
    async fn bind_mined(
        &self,
        unresolved: &UnresolvedClaim,
        chain: &ChainCheck,
        mined: &AccountTransaction,
        from: Address,
        listing: Option<&RelayerListing>,
    ) -> Result<(), StoreError> {
        let same = |record: &&Report| record.nonce == Some(mined.nonce) && unresolved.row.call.is_still(record);
        if let Some(record) = listing.and_then(|listing| listing.records.iter().find(same)) {
            if self.bind(unresolved, record).await? {
                return Ok(());
            }
            // If the record belongs to an equal row, so may the transaction. A row of another call got it by an exchanged
            // answer, and the transaction is not its own. An equal row that has left the record has been sent to another
            // relayer since, and does not come back for it: this row may have what the record made.
            let owner = self.guarded.store.find_bound(&record.tx_id).await?;
            let has_left = |owner: &Transaction| {
                owner.binding.as_ref().is_none_or(|binding| binding.tx_id != record.tx_id) && !self.is_young(unresolved)
            };
            if owner.is_some_and(|owner| is_equal(&owner, &unresolved.row) && !has_left(&owner)) {
                return self.postpone(std::slice::from_ref(unresolved), CONTESTED).await;
            }
        }
        let Some(receipt) = chain.receipt(mined).await else { return Ok(()) };
        let (now, token) = (self.guarded.clock.now(), unresolved.claim.token);
        let tx_id = mined.tx_id();
        let sender = from.to_checksum(None);
        let bind = |row: &Transaction| {
            let mut moved = row.bind(token, &tx_id, Some(&sender), "found on the chain", now, &self.guarded.timings)?;
            if let Some(binding) = &mut moved.transaction.binding {
                binding.nonce = Some(mined.nonce);
            }
            Ok(moved)
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

    /// Looks at these claims again later; the older the claim, the longer the pause.
    async fn postpone(&self, cases: &[UnresolvedClaim], why: &str) -> Result<(), StoreError> {
        for UnresolvedClaim { row, claim, .. } in cases {
            let now = self.guarded.clock.now();
            let quick = self.guarded.timings.unknown_check;
            let pause = (self.passed_since(claim.at) / 4).clamp(quick, SLOW_CHECK.max(quick));
            info!(transactionId = %row.id, action = "still_unknown", "its outcome stays unknown: {why}");
            let decide = |row: &Transaction| match &row.claim {
                Some(held) if held.token == claim.token => row.check_later(now + pause, now),
                _ => Err(MoveRefused::NotOurClaim),
            };
            self.guarded.update(row.id, decide).await?;
        }
        Ok(())
    }
}
