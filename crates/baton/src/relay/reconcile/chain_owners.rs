//! Who owns a transaction that the chain shows: tells equal calls of two rows apart, and finds what became of a claim whose
//! outcome is unknown. Part of [`ChainCheck`].

use std::collections::{BTreeSet, HashSet};
use std::sync::PoisonError;

use alloy_primitives::Address;

use super::chain_check::{CLOCK_MARGIN, CONTESTED, ChainCheck, ChainCheckError, UNASKED};
use super::chain_proof::{ChainFinding, EqualRows, candidates, judge, open_nonces, unsettled_nonces};
use super::relayer_list::{RelayerListing, SignedRecord};
use crate::mutations::Mutation;
use crate::relay::chain::account::{AccountHistory, AccountTransaction};
use crate::relay::state::transaction::{Claim, RelayerTxId, RelayerUrl, Transaction};
use crate::relay::store::{BoundRecord, RecentSince, StoreError};
use crate::timestamp::Timestamp;

/// What the chain shows of a claim whose outcome is unknown.
pub enum ClaimOnChain {
    /// This transaction made the call.
    Executed(AccountTransaction, Address),
    /// A transaction made the call, and it is not settled yet whether it is this claim's; or the chain gives no answer.
    Undecided(String),
    /// Every nonce since the claim is accounted for by another call.
    Clear,
    /// No transaction made the call, and it may still be mined.
    Open(String),
}

/// What a relayer showed of a claim.
#[derive(Debug, Clone, Copy)]
pub struct Shown<'a> {
    /// What it listed.
    pub listing: &'a RelayerListing,
    /// The nonce that it signs next: see [`ChainCheck::next_nonce`].
    pub next_nonce: Option<u64>,
}

/// Which nonces need an owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Nonces {
    /// All that are signed and not mined.
    All,
    /// Those that are in the node's pool.
    Pool,
}

/// Maximum number of rows whose highest possible nonce is remembered.
const CEILINGS_MAX: usize = 10_000;
/// Maximum number of open nonces whose owners are looked up.
const OPEN_NONCES_MAX: u64 = 1_000;
/// Maximum number of records, bound last at a relayer, whose accounts are compared with the one that it lists.
const RECORDS_COMPARED: usize = 200;
/// Maximum number of open rows of a relayer that are compared.
const OPEN_ROWS_MAX: usize = 5_000;

impl ChainCheck {
    /// Looks for a claimed call among the transactions of its relayer's account since the claim. `shown` is what the
    /// relayer showed of it; without that, nothing proves that the call was not made.
    pub async fn claim(
        &self,
        row: &Transaction,
        claim: &Claim,
        shown: Option<Shown<'_>>,
    ) -> Result<ClaimOnChain, StoreError> {
        match self.look_for_claim(row, claim, shown).await {
            Ok(found) => Ok(found),
            Err(ChainCheckError::Store(failure)) => Err(failure),
            Err(ChainCheckError::Chain(failure)) => {
                Ok(ClaimOnChain::Undecided(format!("the chain gives no answer: {failure}")))
            }
        }
    }

    async fn look_for_claim(
        &self,
        row: &Transaction,
        claim: &Claim,
        shown: Option<Shown<'_>>,
    ) -> Result<ClaimOnChain, ChainCheckError> {
        let Some(address) = self.address(row, &claim.relayer).await else {
            return Ok(ClaimOnChain::Undecided("the relayer's address is not known".to_owned()));
        };
        if self.had_another_key(claim, address).await? {
            return Ok(ClaimOnChain::Undecided("the relayer's key was changed, before the claim or since".to_owned()));
        }
        let slip = self.guarded.clock.slip(claim.at);
        let history = self.reader.history(address, claim.at - CLOCK_MARGIN - slip).await?;
        let equal = self.equal_rows(row, &claim.relayer, &history).await?;
        if let Some(why) = self.is_elsewhere(&claim.relayer).await? {
            return Ok(ClaimOnChain::Undecided(why));
        }
        match judge(&row.call, None, &history, &equal) {
            ChainFinding::Executed(mined) if self.reader.is_final(mined.block, history.head) => {
                return Ok(ClaimOnChain::Executed(mined.clone(), address));
            }
            ChainFinding::Executed(_) => {
                return Ok(ClaimOnChain::Undecided("the call is in a block that is not final yet".to_owned()));
            }
            ChainFinding::Contested => return Ok(ClaimOnChain::Undecided(CONTESTED.to_owned())),
            ChainFinding::NonceLost(_) | ChainFinding::Open | ChainFinding::Unproven(_) => {}
        }
        if self.is_unasked(&claim.relayer) {
            return Ok(ClaimOnChain::Undecided(UNASKED.to_owned()));
        }
        let Some(shown) = shown else {
            return Ok(ClaimOnChain::Open("the relayer gives no list".to_owned()));
        };
        Ok(match self.ownerless_nonce(row, &claim.relayer, &history, Some((claim, shown))).await? {
            Ok(()) => ClaimOnChain::Clear,
            Err(why) => ClaimOnChain::Open(why),
        })
    }

    /// Whether the relayer had another key when the claim was made, shortly before or since: what another account did is not
    /// in the history of this one.
    async fn had_another_key(&self, claim: &Claim, address: Address) -> Result<bool, StoreError> {
        if claim.account.is_some_and(|account| account != address) {
            return Ok(true);
        }
        let store = &self.guarded.store;
        // Asked for by itself: however many were bound since, it is among what is compared.
        let before = store.last_bound(&claim.relayer, claim.at, 1).await?;
        let last = store.last_bound(&claim.relayer, self.guarded.clock.now(), RECORDS_COMPARED).await?;
        let since = last.iter().filter(|record| record.at >= claim.at);
        let account =
            |record: &BoundRecord| record.account.as_deref().and_then(|account| account.parse::<Address>().ok());
        Ok(since.chain(&before).filter_map(account).any(|account| account != address))
    }

    /// The nonce that the relayer signs next, as far as its own counter, the node's pool and our rows show; `None` if the
    /// relayer or the chain does not tell.
    pub async fn next_nonce(&self, relayer: &RelayerUrl) -> Result<Option<u64>, StoreError> {
        let Some(client) = self.pool.ask_one(relayer) else { return Ok(None) };
        let (counter, address) =
            (client.next_nonce(self.question_timeout).await, client.address(self.question_timeout).await);
        let (Some(counter), Some(address)) = (counter, address) else { return Ok(None) };
        let Ok((_, pool)) = self.reader.counts(address).await else { return Ok(None) };
        let now = self.guarded.clock.now();
        let none_recent = RecentSince { open_since: now, ended_since: now, ended_max: 0 };
        let rows = self.guarded.store.relayer_rows(std::slice::from_ref(relayer), none_recent).await?;
        let of_rows = rows.first().and_then(|rows| rows.nonce_max).map_or(0, |last| last + 1);
        Ok(Some(counter.max(pool).max(of_rows)))
    }

    /// Whether every nonce that the relayer has signed, or may have signed, and that is not mined, belongs to another row
    /// or to a record that the relayer lists; if not, why. `lost` is a claim, and what the relayer showed of it.
    pub(super) async fn ownerless_nonce(
        &self,
        row: &Transaction,
        relayer: &RelayerUrl,
        history: &AccountHistory,
        lost: Option<(&Claim, Shown<'_>)>,
    ) -> Result<Result<(), String>, ChainCheckError> {
        let remembered = self.remembered(row, Nonces::All);
        // For a claim it was read before the newest part of the list: what the relayer has signed since is not on that.
        let counter = match (remembered, lost) {
            (Some(_), _) => remembered,
            (None, Some((_, shown))) => shown.next_nonce,
            (None, None) => match self.pool.ask_one(relayer) {
                Some(client) => client.next_nonce(self.question_timeout).await,
                None => return Ok(Err("its relayer is no longer configured".to_owned())),
            },
        };
        let Some(counter) = counter else {
            return Ok(Err("the relayer does not say which nonce comes next".to_owned()));
        };
        let listed = match lost {
            Some((claim, shown)) => self.listed_owners(row, claim, shown.listing, history).await?,
            None => BTreeSet::new(),
        };
        let owned = match self.owned_nonces(row, relayer, listed).await? {
            Ok(owned) => owned,
            Err(why) => return Ok(Err(why)),
        };
        let next = match (remembered, lost) {
            (Some(next), _) => next,
            (None, Some((_, shown))) => {
                let listed = shown.listing.signed.iter().map(|record| record.nonce + 1).max();
                counter.max(listed.unwrap_or(0))
            }
            (None, None) => open_nonces(history, owned.last().map(|last| last + 1).max(Some(counter))).end,
        };
        self.remember(row, Nonces::All, next);
        if let Err(why) = ownerless_open_nonce(&owned, history.count..next) {
            return Ok(Err(why));
        }
        // Used by a call that no row has made, in a block that may be replaced: then this call may get the nonce.
        let unsettled = unsettled_nonces(history).filter(|nonce| *nonce < next && !owned.contains(nonce));
        let unsettled: Vec<u64> = unsettled.take(OPEN_NONCES_MAX as usize).collect();
        let owners = self.guarded.store.nonce_owners(relayer, &unsettled).await?;
        let known: HashSet<u64> = owners.into_iter().map(|(nonce, _)| nonce).collect();
        Ok(match unsettled.into_iter().find(|nonce| !known.contains(nonce)) {
            Some(nonce) => Err(format!("nonce {nonce} of the relayer is not used for good yet")),
            None => Ok(()),
        })
    }

    /// The nonce above all that this row's submission can have, if it is known. It is what the relayer signed next when
    /// nothing of the submission could be signed any more: of the nonces that a busy relayer takes from then on, none is
    /// asked for its owner, so that those below it get settled one after the other.
    fn remembered(&self, row: &Transaction, which: Nonces) -> Option<u64> {
        let submitted_at = self.over_for_long(row)?;
        let ceilings = self.ceilings.lock().unwrap_or_else(PoisonError::into_inner);
        ceilings.get(&(row.id, which)).filter(|known| known.0 == submitted_at).map(|known| known.1)
    }

    fn remember(&self, row: &Transaction, which: Nonces, next: u64) {
        let Some(submitted_at) = self.over_for_long(row) else { return };
        let mut ceilings = self.ceilings.lock().unwrap_or_else(PoisonError::into_inner);
        if ceilings.len() >= CEILINGS_MAX {
            ceilings.clear();
        }
        ceilings.insert((row.id, which), (submitted_at, next));
    }

    /// When the row was claimed or forgotten, if its relayer, which no longer works on it, has had the time to give it up.
    fn over_for_long(&self, row: &Transaction) -> Option<Timestamp> {
        match (&row.claim, &row.binding) {
            (Some(claim), _) => {
                let open_until = claim.unknown.as_ref()?.open_until;
                let passed = self.guarded.clock.passed_since(claim.at.max(open_until));
                (passed >= self.guarded.timings.unproven_wait).then_some(claim.at)
            }
            // A relayer that knows it again may sign it, and then forget it again: each forgetting counts by itself.
            (None, Some(binding)) => binding.forgotten_since.filter(|_| self.is_long_forgotten(row)),
            (None, None) => None,
        }
    }

    /// The nonces of listed records that are certainly not this claim's submission: those stored before the claim or after
    /// the submission was over, and those that a row is bound to. Any other may be what became of it, whatever call it is
    /// now: it was canceled or replaced at the relayer, and the original may still be mined under its nonce.
    async fn listed_owners(
        &self,
        row: &Transaction,
        claim: &Claim,
        listing: &RelayerListing,
        history: &AccountHistory,
    ) -> Result<BTreeSet<u64>, StoreError> {
        let (slip, timings) = (self.guarded.clock.slip(claim.at), &self.guarded.timings);
        let calls = listing.records.iter().filter(|record| row.call.matches(record));
        let calls: HashSet<&RelayerTxId> = calls.map(|record| &record.tx_id).collect();
        // The nonce of a record of this very call is owned only if another row says so.
        let others = listing.signed.iter().filter(|record| !calls.contains(&record.tx_id));
        let (may_be_ours, foreign): (Vec<&SignedRecord>, Vec<&SignedRecord>) =
            others.partition(|record| listing.may_have_become(record.created_at, claim, slip, timings));
        let mut owned: BTreeSet<u64> = foreign.into_iter().map(|record| record.nonce).collect();
        let open = may_be_ours.into_iter().filter(|record| record.nonce >= history.count_final);
        let open: Vec<&SignedRecord> = open.take(OPEN_NONCES_MAX as usize).collect();
        let ids: Vec<RelayerTxId> = open.iter().map(|record| record.tx_id.clone()).collect();
        let bound: HashSet<RelayerTxId> = self.guarded.store.bound_among(&ids).await?.into_iter().collect();
        owned.extend(open.into_iter().filter(|record| bound.contains(&record.tx_id)).map(|record| record.nonce));
        Ok(owned)
    }

    /// Whether every transaction of the account in the node's pool belongs to another row; if not, why. Unlike
    /// [`Self::ownerless_nonce`] this ends at a nonce gap: what waits behind one is not waited for.
    pub(super) async fn ownerless_in_pool(
        &self,
        row: &Transaction,
        relayer: &RelayerUrl,
        history: &AccountHistory,
    ) -> Result<Result<(), String>, ChainCheckError> {
        let next = self.remembered(row, Nonces::Pool).unwrap_or(history.count_pending);
        self.remember(row, Nonces::Pool, next);
        let pool = history.count..next.min(history.count_pending);
        if pool.is_empty() || Mutation::IgnoresPool.is_on() {
            return Ok(Ok(()));
        }
        let owned = self.owned_nonces(row, relayer, BTreeSet::new()).await?;
        Ok(owned.and_then(|owned| ownerless_open_nonce(&owned, pool)))
    }

    /// `listed`, and the nonces that other open rows of the relayer have; the reason if there are too many rows.
    async fn owned_nonces(
        &self,
        row: &Transaction,
        relayer: &RelayerUrl,
        listed: BTreeSet<u64>,
    ) -> Result<Result<BTreeSet<u64>, String>, StoreError> {
        let open_rows = self.guarded.store.open_at(relayer, OPEN_ROWS_MAX).await?;
        if open_rows.len() >= OPEN_ROWS_MAX {
            return Ok(Err("the relayer has too many transactions under way".to_owned()));
        }
        let others = open_rows.iter().filter(|other| other.id != row.id);
        let mut owned = listed;
        owned.extend(others.filter_map(|other| other.binding.as_ref()?.nonce));
        Ok(Ok(owned))
    }

    /// The other rows that make this call through this relayer, as far as the account's transactions concern them.
    pub(super) async fn equal_rows(
        &self,
        row: &Transaction,
        relayer: &RelayerUrl,
        history: &AccountHistory,
    ) -> Result<EqualRows, ChainCheckError> {
        let (mut taken, mut made) = (HashSet::new(), HashSet::new());
        for candidate in candidates(&row.call, history) {
            made.insert(candidate.nonce);
            if self.is_taken(row, relayer, candidate).await? {
                taken.insert(candidate.nonce);
            }
        }
        if made.is_empty() {
            return Ok(EqualRows::default());
        }
        let open = self.guarded.store.open_at(relayer, OPEN_ROWS_MAX).await?;
        // A claim's own submission may be on its way, so it also leaves alone what a row signed twice may have made.
        let may_have_made = |nonce: u64| row.claim.is_some() && !made.contains(&nonce);
        let rival = |other: &&Transaction| {
            let nonce = other.binding.as_ref().map(|binding| binding.nonce);
            other.id != row.id && is_equal(other, row) && nonce.is_some_and(|nonce| nonce.is_none_or(may_have_made))
        };
        let mut rivals: Vec<&Transaction> = open.iter().filter(rival).collect();
        let mut too_many = open.len() >= OPEN_ROWS_MAX;
        // For a claim the caller has compared the other claims: see `UnknownOutcomes::chain_allows_resend`.
        let claims = if row.claim.is_some() { Vec::new() } else { self.guarded.store.claimed(OPEN_ROWS_MAX).await? };
        too_many |= claims.len() >= OPEN_ROWS_MAX;
        let there = |other: &Transaction| other.claim.as_ref().is_some_and(|claim| claim.relayer == *relayer);
        rivals.extend(claims.iter().filter(|other| there(other) && is_equal(other, row)));
        let contend = match rivals.is_empty() {
            true => too_many,
            // Once nothing of any of them can reach the chain any more, it does not matter which of them has which
            // transaction: the store gives each transaction to one row.
            false => {
                let over = !too_many && self.is_past(row) && rivals.iter().all(|other| self.is_past(other));
                !over || self.ownerless_nonce(row, relayer, history, None).await?.is_err()
            }
        };
        Ok(EqualRows { taken, contend })
    }

    /// Whether a relayer that no longer works on it has had the time to give it up: a claim, or a record that the relayer has
    /// forgotten, from before [`crate::config::Timings::unproven_wait`].
    fn is_past(&self, row: &Transaction) -> bool {
        let long_ago = |at| self.guarded.clock.passed_since(at) >= self.guarded.timings.unproven_wait;
        match (&row.claim, &row.binding) {
            (Some(claim), _) => claim.unknown.is_some() && long_ago(claim.at),
            (None, Some(binding)) => match binding.nonce {
                None => self.is_long_forgotten(row),
                Some(_) => long_ago(binding.at),
            },
            (None, None) => false,
        }
    }

    /// Whether a transaction of the chain, which makes this row's call, belongs to another row that makes it too.
    pub(super) async fn is_taken(
        &self,
        row: &Transaction,
        relayer: &RelayerUrl,
        mined: &AccountTransaction,
    ) -> Result<bool, StoreError> {
        let store = &self.guarded.store;
        let by_chain = store.find_bound(&mined.tx_id()).await?;
        if by_chain.is_some_and(|owner| owner.id != row.id) {
            return Ok(true);
        }
        for (_, owner) in store.nonce_owners(relayer, &[mined.nonce]).await? {
            if owner != row.id && store.get(owner).await?.is_some_and(|owner| is_equal(&owner, row)) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Whether all of these nonces, which are not mined, have an owner; if not, why.
fn ownerless_open_nonce(owned: &BTreeSet<u64>, open: std::ops::Range<u64>) -> Result<(), String> {
    if open.end.saturating_sub(open.start) > OPEN_NONCES_MAX {
        return Err("too many transactions of the relayer wait to be mined".to_owned());
    }
    match open.into_iter().find(|nonce| !owned.contains(nonce)) {
        Some(nonce) => Err(format!("nonce {nonce} of the relayer is signed and not mined")),
        None => Ok(()),
    }
}

pub(super) fn is_equal(a: &Transaction, b: &Transaction) -> bool {
    (a.call.to, a.call.value, &a.call.data) == (b.call.to, b.call.value, &b.call.data)
}
