//! Reads blocks: the newest one, the one at a time, and an account's transactions in one. Part of [`AccountReader`].

use std::sync::PoisonError;
use std::time::Duration;

use alloy_primitives::{Address, B256};
use serde_json::json;

use super::{AccountReader, AccountTransaction, read_transaction};
use crate::relay::chain::{ChainError, number};
use crate::timestamp::Timestamp;

/// A block's place in the chain.
pub(super) struct Block {
    pub(super) number: u64,
    pub(super) at: Timestamp,
    pub(super) hash: B256,
}

/// A newest block older than this may be that of an endpoint that has stopped following the chain; others are asked too.
const STALE_AFTER: Duration = Duration::from_secs(60);
/// Maximum number of transactions that are read one by one, of a block that is too long for one answer.
const TRANSACTIONS_READ_MAX: usize = 2_000;
/// Maximum number of block times that are kept.
const BLOCK_TIMES_MAX: usize = 20_000;

impl AccountReader {
    /// The newest block. If it is old, or cannot be read, the other endpoints are asked too, and the one with the newest
    /// is asked from then on.
    pub(super) async fn newest_block(&self) -> Result<Block, ChainError> {
        let mut best = self.block("latest").await;
        let mut best_at = self.chain.endpoint();
        let stale = |block: &Result<Block, ChainError>| match block {
            Ok(block) => self.clock.now().since(block.at) >= STALE_AFTER,
            Err(error) => !matches!(error, ChainError::Unreachable(_)),
        };
        let first = best_at;
        for other in 1..self.chain.endpoint_count() {
            if !stale(&best) {
                break;
            }
            self.chain.turn_to(first + other);
            let block = self.block("latest").await;
            let newer = |block: &Block| best.as_ref().map_or(true, |best| best.number < block.number);
            if block.as_ref().is_ok_and(newer) {
                (best, best_at) = (block, self.chain.endpoint());
            }
        }
        self.chain.turn_to(best_at);
        best
    }

    pub(super) async fn transactions_in(
        &self,
        address: Address,
        block: u64,
    ) -> Result<Vec<AccountTransaction>, ChainError> {
        let answer = match self.ask("eth_getBlockByNumber", json!([format!("{block:#x}"), true])).await {
            Err(ChainError::TooLong) => return self.transactions_one_by_one(address, block).await,
            answer => answer?,
        };
        let listed = answer["transactions"].as_array().ok_or(ChainError::Unreadable("a block"))?;
        let ours = listed.iter().filter_map(read_transaction).filter(|(_, from)| *from == address);
        Ok(ours.map(|(transaction, _)| transaction).collect())
    }

    /// The account's transactions in a block that is too long for one answer.
    async fn transactions_one_by_one(
        &self,
        address: Address,
        block: u64,
    ) -> Result<Vec<AccountTransaction>, ChainError> {
        let answer = self.ask("eth_getBlockByNumber", json!([format!("{block:#x}"), false])).await?;
        let listed = answer["transactions"].as_array().ok_or(ChainError::Unreadable("a block"))?;
        if listed.len() > TRANSACTIONS_READ_MAX {
            return Err(ChainError::Unreadable("a block is too long, and its transactions are too many to read"));
        }
        let mut ours = Vec::new();
        for hash in listed {
            let found = self.ask("eth_getTransactionByHash", json!([hash])).await?;
            if number(&found["blockNumber"]) != Some(block) {
                return Err(ChainError::Unreadable("a block changed while it was read"));
            }
            ours.extend(read_transaction(&found).filter(|(_, from)| *from == address).map(|(found, _)| found));
        }
        Ok(ours)
    }

    /// The newest block older than `at`, searched backwards from the head in growing steps.
    pub(super) async fn block_before(&self, at: Timestamp, head: &Block) -> Result<u64, ChainError> {
        if head.at < at {
            return Ok(head.number);
        }
        let (mut low, mut high) = self.known_around(at, head.number);
        let mut step = 1;
        while low.is_none() && high > 0 {
            let tried = high.saturating_sub(step);
            if self.block_time(tried).await? < at {
                low = Some(tried);
            } else {
                (high, step) = (tried, step * 2);
            }
        }
        let Some(mut low) = low else { return Ok(0) };
        while high - low > 1 {
            let middle = low + (high - low) / 2;
            if self.block_time(middle).await? < at { low = middle } else { high = middle }
        }
        Ok(low)
    }

    /// The newest known block older than `at`, and the oldest known one that is not; the head if none is known.
    fn known_around(&self, at: Timestamp, head: u64) -> (Option<u64>, u64) {
        let mut times = self.block_times.lock().unwrap_or_else(PoisonError::into_inner);
        // The chain is shorter than what is known: another chain, or a reset one.
        if times.last_key_value().is_some_and(|(last, _)| *last > head) || times.len() > BLOCK_TIMES_MAX {
            times.clear();
        }
        let older = times.iter().rev().find(|(_, made)| **made < at).map(|(number, _)| *number);
        let newer = times.iter().find(|(_, made)| **made >= at).map(|(number, _)| *number);
        let newer = newer.filter(|newer| older.is_none_or(|older| older < *newer));
        (older.filter(|older| *older < head), newer.unwrap_or(head))
    }

    async fn block_time(&self, number: u64) -> Result<Timestamp, ChainError> {
        if let Some(known) = self.block_times.lock().unwrap_or_else(PoisonError::into_inner).get(&number) {
            return Ok(*known);
        }
        let made = self.block(&format!("{number:#x}")).await?.at;
        self.block_times.lock().unwrap_or_else(PoisonError::into_inner).insert(number, made);
        Ok(made)
    }

    pub(super) async fn block(&self, which: &str) -> Result<Block, ChainError> {
        let block = self.ask("eth_getBlockByNumber", json!([which, false])).await?;
        let (number, seconds) = (number(&block["number"]), number(&block["timestamp"]));
        let (number, seconds) = number.zip(seconds).ok_or(ChainError::Unreadable("a block"))?;
        let at = Timestamp(i64::try_from(seconds).unwrap_or(i64::MAX).saturating_mul(1000));
        let hash = block["hash"].as_str().and_then(|hash| hash.parse().ok());
        Ok(Block { number, at, hash: hash.ok_or(ChainError::Unreadable("a block's hash"))? })
    }
}
