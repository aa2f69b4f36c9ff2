//! What the chain proves about a transaction that a relayer has, or may have, sent (pure). ADR 10 gives the reason for
//! each rule; [`super::chain_check`] reads the chain and acts on the finding.
//!
//! "Nonce N went to another call" alone proves nothing: a relayer may sign one call under two nonces. So the call must
//! also be missing among the account's other transactions. Equal calls are told apart by their owners: a transaction whose
//! nonce belongs to another row is *taken*.

use std::collections::HashSet;

use crate::mutations::Mutation;
use crate::relay::chain::account::{AccountHistory, AccountTransaction};
use crate::relay::request::call::Call;

/// What an account's history proves about one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChainFinding<'a> {
    /// This transaction made the call.
    Executed(&'a AccountTransaction),
    /// Its nonce is used up for good by this other transaction, and no transaction of the account made the call: it was
    /// certainly not done.
    NonceLost(&'a AccountTransaction),
    /// The call was made, by this row or by an equal one.
    Contested,
    /// It may still be mined.
    Open,
    /// The history does not tell, for this reason.
    Unproven(&'static str),
}

/// The rows that make the same call through the same account.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EqualRows {
    /// The nonces that belong to them.
    pub taken: HashSet<u64>,
    /// Whether one of them is at the relayer, or may be, and its nonce is not known: any transaction may be its own.
    pub contend: bool,
}

/// Judges a call that its relayer signed with `nonce`, if that is known.
pub fn judge<'a>(call: &Call, nonce: Option<u64>, history: &'a AccountHistory, equal: &EqualRows) -> ChainFinding<'a> {
    let own = nonce.and_then(|nonce| history.with_nonce(nonce));
    if let Some(own) = own.filter(|own| own.makes(call) && !equal.taken.contains(&own.nonce)) {
        return ChainFinding::Executed(own);
    }
    if let Some(other) = candidates(call, history).find(|candidate| !equal.taken.contains(&candidate.nonce)) {
        if equal.contend {
            return ChainFinding::Contested;
        }
        return ChainFinding::Executed(other);
    }
    match (nonce, own) {
        (None, _) => ChainFinding::Unproven("its nonce is not known"),
        (Some(nonce), _) if nonce >= history.count_final => ChainFinding::Open,
        (Some(_), Some(other)) => ChainFinding::NonceLost(other),
        (Some(_), None) => ChainFinding::Unproven("its nonce was used before the time that was searched"),
    }
}

/// The account's transactions that make this call, oldest first.
pub fn candidates<'a, 'c>(
    call: &'c Call,
    history: &'a AccountHistory,
) -> impl Iterator<Item = &'a AccountTransaction> + use<'a, 'c> {
    history.transactions.iter().filter(|transaction| transaction.makes(call))
}

/// The nonces that are signed or waiting and not yet mined. A submission may be behind any of them that has no owner.
/// `next` is the nonce that the relayer signs next, as far as its records and its own counter show: the node's pool does
/// not count what waits behind a gap.
pub fn open_nonces(history: &AccountHistory, next: Option<u64>) -> std::ops::Range<u64> {
    history.count..history.count_pending.max(next.unwrap_or(0))
}

/// The nonces that are used in blocks that may still be replaced.
pub fn unsettled_nonces(history: &AccountHistory) -> std::ops::Range<u64> {
    let settled = if Mutation::UsedIsSettled.is_on() { history.count } else { history.count_final };
    settled.min(history.count)..history.count
}

#[cfg(test)]
mod tests {
    use alloy_primitives::{B256, U256};
    use serde_json::json;

    use super::*;
    use crate::relay::request::call::DirectRequest;
    use crate::timestamp::Timestamp;

    fn call(value: &str) -> Call {
        let to = "0x5fbdb2315678afecb367f032d93f642f64180aa3";
        DirectRequest::parse(&json!({ "to": to, "value": value, "data": "0xab" })).unwrap().call
    }

    fn mined(nonce: u64, call: &Call) -> AccountTransaction {
        let (hash, block) = (B256::with_last_byte(nonce as u8), 100 + nonce);
        AccountTransaction { hash, nonce, block, to: Some(call.to), value: call.value, data: call.data.clone() }
    }

    /// Nonces 0 to 4 are mined, 0 to 2 of them for good; nonce 5 waits.
    fn history(transactions: Vec<AccountTransaction>) -> AccountHistory {
        AccountHistory {
            transactions,
            count: 5,
            count_final: 3,
            count_pending: 6,
            head: 104,
            final_block: 102,
            head_at: Timestamp(0),
        }
    }

    #[test]
    fn a_call_under_its_own_nonce_was_executed_whatever_the_relayer_says() {
        let (ours, other) = (call("1"), call("2"));
        let history = history(vec![mined(1, &ours), mined(2, &other)]);
        let found = judge(&ours, Some(1), &history, &EqualRows::default());
        assert!(matches!(found, ChainFinding::Executed(found) if found.nonce == 1));
    }

    #[test]
    fn a_nonce_that_another_call_used_for_good_proves_that_it_was_not_done() {
        let history = history(vec![mined(1, &call("2")), mined(4, &call("3"))]);
        let judged = |nonce| judge(&call("1"), Some(nonce), &history, &EqualRows::default());
        assert!(matches!(judged(1), ChainFinding::NonceLost(other) if other.nonce == 1));
        assert_eq!(judged(4), ChainFinding::Open, "its block may still be replaced");
        assert_eq!(judged(5), ChainFinding::Open, "not mined");
        assert_eq!(judged(9), ChainFinding::Open, "behind a gap");
        assert!(matches!(judged(0), ChainFinding::Unproven(_)), "outside of what was read");
    }

    #[test]
    fn a_call_that_its_relayer_signed_twice_is_found_under_its_other_nonce() {
        let ours = call("1");
        let history = history(vec![mined(1, &call("2")), mined(2, &ours)]);
        let found = judge(&ours, Some(1), &history, &EqualRows::default());
        assert!(matches!(found, ChainFinding::Executed(found) if found.nonce == 2));
        let equal = EqualRows { taken: HashSet::from([2]), contend: false };
        let found = judge(&ours, Some(1), &history, &equal);
        assert!(matches!(found, ChainFinding::NonceLost(_)), "an equal call of another row");
    }

    #[test]
    fn a_transaction_that_may_be_an_equal_rows_own_proves_nothing_yet() {
        let ours = call("1");
        let history = history(vec![mined(1, &ours)]);
        let equal = EqualRows { taken: HashSet::new(), contend: true };
        assert_eq!(judge(&ours, None, &history, &equal), ChainFinding::Contested);
        assert!(matches!(judge(&ours, Some(1), &history, &equal), ChainFinding::Executed(_)), "its own nonce");
        let equal = EqualRows { taken: HashSet::from([1]), contend: false };
        assert!(!matches!(judge(&ours, Some(1), &history, &equal), ChainFinding::Executed(_)), "an equal row has it");
    }

    #[test]
    fn without_a_nonce_absence_is_not_proven_here() {
        let ours = call("1");
        let none = history(vec![mined(1, &call("2"))]);
        assert!(matches!(judge(&ours, None, &none, &EqualRows::default()), ChainFinding::Unproven(_)));
        let found = history(vec![mined(1, &ours)]);
        assert!(matches!(judge(&ours, None, &found, &EqualRows::default()), ChainFinding::Executed(_)));
        assert_eq!(open_nonces(&found, None), 5..6);
        assert_eq!(open_nonces(&found, Some(9)), 5..9, "the pool does not count what waits behind a gap");
    }

    #[test]
    fn target_value_and_data_all_count() {
        let ours = call("1");
        let mut other = mined(1, &ours);
        other.value = U256::from(2);
        assert!(!other.makes(&ours));
        let mut other = mined(1, &ours);
        other.data = "0xac".into();
        assert!(!other.makes(&ours));
        let mut other = mined(1, &ours);
        other.to = None;
        assert!(!other.makes(&ours));
    }
}
