//! What is kept of an account between two readings.

use std::collections::BTreeMap;

use alloy_primitives::B256;

use super::{AccountTransaction, KEPT_MAX};
use crate::relay::chain::ChainError;

/// What is known of an account.
#[derive(Default)]
pub(super) struct Account {
    /// The range of final blocks that was read: after `since`, up to and including `until`.
    pub(super) range: Option<(u64, u64)>,
    /// The account's transaction count at the end of the range, where the node keeps history.
    pub(super) count: Option<u64>,
    /// The newest block of which a transaction was dropped, to bound what is kept.
    pub(super) dropped: u64,
    pub(super) transactions: BTreeMap<u64, AccountTransaction>,
    /// The blocks after the final ones, as long as the head is the same.
    pub(super) tail: Option<Tail>,
}

impl Account {
    /// A node that was behind, or on another branch, has left a gap in what is kept: it is read again.
    pub(super) fn misread(&mut self) -> ChainError {
        *self = Self::default();
        ChainError::Unreadable("its final blocks and the account's transaction count disagree")
    }

    /// Compares the count at the end of the range with what a node says now.
    pub(super) fn expect_count(&mut self, count: Option<u64>) -> Result<(), ChainError> {
        if self.count.zip(count).is_some_and(|(known, count)| known != count) {
            return Err(self.misread());
        }
        self.count = count;
        Ok(())
    }

    /// Adds the transactions of the blocks after `since`, up to the beginning of the range.
    pub(super) fn keep_older(&mut self, found: Vec<AccountTransaction>, since: u64) {
        self.range = self.range.map(|(_, until)| (since, until));
        self.keep(found);
    }

    /// Adds the transactions of the blocks after the range, up to `until`, where the account's count is this one.
    pub(super) fn keep_newer(&mut self, found: Vec<AccountTransaction>, until: u64, count: Option<u64>) {
        self.range = self.range.map(|(since, _)| (since, until));
        self.count = count;
        self.keep(found);
    }

    pub(super) fn keep(&mut self, found: Vec<AccountTransaction>) {
        self.transactions.extend(found.into_iter().map(|transaction| (transaction.nonce, transaction)));
        while self.transactions.len() > KEPT_MAX {
            if let Some((_, dropped)) = self.transactions.pop_first() {
                self.range = self.range.map(|(since, until)| (since.max(dropped.block), until));
                self.dropped = dropped.block;
            }
        }
    }
}

/// An account's transactions in the blocks that are not final yet.
pub(super) struct Tail {
    /// Hash of the newest block.
    pub(super) head: B256,
    pub(super) transactions: Vec<AccountTransaction>,
    pub(super) count: u64,
    pub(super) count_final: u64,
    /// Whether the node keeps historical state.
    pub(super) historical: bool,
}
