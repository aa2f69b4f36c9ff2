//! Who owns a transaction that the chain shows: tells equal calls of two rows apart, and finds what became of a claim whose
//! outcome is unknown. Part of [`ChainCheck`].

use std::collections::{BTreeSet, HashSet};

use alloy_primitives::Address;

use super::chain_check::{CLOCK_MARGIN, CONTESTED, ChainCheck, ChainCheckError};
use super::chain_proof::{ChainFinding, EqualRows, candidates, judge, open_nonces, unsettled_nonces};
use super::relayer_list::RelayerListing;
use crate::mutations::Mutation;
use crate::relay::chain::account::{AccountHistory, AccountTransaction};
use crate::relay::state::transaction::{Claim, RelayerTxId, RelayerUrl, Transaction};
use crate::relay::store::{BoundRecord, StoreError};

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

/// Maximum number of open nonces whose owners are looked up.
const OPEN_NONCES_MAX: u64 = 1_000;
/// Maximum number of records, bound last at a relayer, whose accounts are compared with the one that it lists.
const RECORDS_COMPARED: usize = 200;
/// Maximum number of open rows of a relayer that are compared.
const OPEN_ROWS_MAX: usize = 5_000;

impl ChainCheck {
    /// Looks for a claimed call among the transactions of its relayer's account since the claim. `listing` is what the
    /// relayer listed; without it, nothing proves that the call was not made.
    pub async fn claim(
        &self,
        row: &Transaction,
        claim: &Claim,
        listing: Option<&RelayerListing>,
    ) -> Result<ClaimOnChain, StoreError> {
        match self.look_for_claim(row, claim, listing).await {
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
        listing: Option<&RelayerListing>,
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
        let Some(listing) = listing else {
            return Ok(ClaimOnChain::Open("the relayer gives no list".to_owned()));
        };
        Ok(match self.ownerless_nonce(row, &claim.relayer, &history, Some(listing)).await? {
            Ok(()) => ClaimOnChain::Clear,
            Err(why) => ClaimOnChain::Open(why),
        })
    }

    /// Whether the relayer signed with another key shortly before the claim or since: what another account did is not in the
    /// history of this one.
    async fn had_another_key(&self, claim: &Claim, address: Address) -> Result<bool, StoreError> {
        let last = self.guarded.store.last_bound(&claim.relayer, self.guarded.clock.now(), RECORDS_COMPARED).await?;
        let since = last.iter().filter(|record| record.at >= claim.at);
        let before = last.iter().find(|record| record.at < claim.at);
        let account =
            |record: &BoundRecord| record.account.as_deref().and_then(|account| account.parse::<Address>().ok());
        Ok(since.chain(before).filter_map(account).any(|account| account != address))
    }

    /// Whether every nonce that the relayer has signed, or may have signed, and that is not mined, belongs to another row
    /// or to a record that the relayer lists; if not, why.
    pub(super) async fn ownerless_nonce(
        &self,
        row: &Transaction,
        relayer: &RelayerUrl,
        history: &AccountHistory,
        listing: Option<&RelayerListing>,
    ) -> Result<Result<(), String>, ChainCheckError> {
        let Some(client) = self.pool.ask_one(relayer) else {
            return Ok(Err("its relayer is no longer configured".to_owned()));
        };
        let counter = client.next_nonce(self.question_timeout).await;
        if counter.is_none() {
            return Ok(Err("the relayer does not say which nonce comes next".to_owned()));
        }
        let mut listed: BTreeSet<u64> = listing.map(|listing| listing.nonces.clone()).unwrap_or_default();
        // The nonce of a record of this very call is owned only if another row says so, below.
        for record in listing.iter().flat_map(|listing| &listing.records).filter(|record| row.call.matches(record)) {
            record.nonce.map(|nonce| listed.remove(&nonce));
        }
        let owned = match self.owned_nonces(row, relayer, listed).await? {
            Ok(owned) => owned,
            Err(why) => return Ok(Err(why)),
        };
        let next = owned.last().map(|last| last + 1).max(counter);
        if let Err(why) = ownerless_open_nonce(&owned, open_nonces(history, next)) {
            return Ok(Err(why));
        }
        // Used by a call that no row has made, in a block that may be replaced: then this call may get the nonce.
        let unsettled: Vec<u64> =
            unsettled_nonces(history).filter(|nonce| !owned.contains(nonce)).take(OPEN_NONCES_MAX as usize).collect();
        let owners = self.guarded.store.nonce_owners(relayer, &unsettled).await?;
        let known: HashSet<u64> = owners.into_iter().map(|(nonce, _)| nonce).collect();
        Ok(match unsettled.into_iter().find(|nonce| !known.contains(nonce)) {
            Some(nonce) => Err(format!("nonce {nonce} of the relayer is not used for good yet")),
            None => Ok(()),
        })
    }

    /// Whether every transaction of the account in the node's pool belongs to another row; if not, why. Unlike
    /// [`Self::ownerless_nonce`] this ends at a nonce gap: what waits behind one is not waited for.
    pub(super) async fn ownerless_in_pool(
        &self,
        row: &Transaction,
        relayer: &RelayerUrl,
        history: &AccountHistory,
    ) -> Result<Result<(), String>, ChainCheckError> {
        let pool = open_nonces(history, None);
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
        let by_chain = store.find_bound(&RelayerTxId(format!("chain:{}", mined.hash))).await?;
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

fn is_equal(a: &Transaction, b: &Transaction) -> bool {
    (a.call.to, a.call.value, &a.call.data) == (b.call.to, b.call.value, &b.call.data)
}
