//! Which transactions an account has made, read from the chain: the evidence against which a relayer's word is held.
//!
//! A node has no index by sender. [`AccountReader`] halves a range of blocks as long as the account's transaction count
//! differs between its two ends, so that it reads only blocks that contain one. A node without historical state refuses
//! such counts; then every block of the range is read. Blocks at finality depth never change: what they contain is kept
//! and shared between rows.

mod blocks;
mod kept;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use alloy_primitives::{Address, B256, U256};
use serde_json::{Value, json};
use tokio::sync::Mutex as AsyncMutex;

use self::blocks::Block;
use self::kept::{Account, Tail};
use super::endpoint::NoAnswer;
use super::{Chain, ChainError, bytes, number};
use crate::clock::Clock;
use crate::relay::request::call::Call;
use crate::relay::state::transaction::RelayerTxId;
use crate::timestamp::Timestamp;

/// A mined transaction of an account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AccountTransaction {
    /// Its hash.
    pub hash: B256,
    /// Its nonce.
    pub nonce: u64,
    /// Its block.
    pub block: u64,
    /// The target; none for a contract creation.
    pub to: Option<Address>,
    /// Value in wei.
    pub value: U256,
    /// Call data: lower-case 0x hex.
    pub data: String,
}

impl AccountTransaction {
    /// Whether it makes this call. The gas limit is not compared: relayers may change it.
    pub fn makes(&self, call: &Call) -> bool {
        self.to == Some(call.to) && self.value == call.value && self.data == call.data
    }

    /// The name by which a row owns it.
    pub fn tx_id(&self) -> RelayerTxId {
        RelayerTxId(format!("chain:{}", self.hash))
    }
}

/// What the chain shows of an account since some time.
#[derive(Debug, Clone)]
pub struct AccountHistory {
    /// Its transactions in that time, by nonce.
    pub transactions: Vec<AccountTransaction>,
    /// Its transaction count at the head: every nonce below is used.
    pub count: u64,
    /// Its transaction count at finality depth: every nonce below is used for good.
    pub count_final: u64,
    /// Its count with the transactions that wait in the node's pool.
    pub count_pending: u64,
    /// The newest block that was read.
    pub head: u64,
    /// The newest block that cannot change any more.
    pub final_block: u64,
    /// The time of the newest block.
    pub head_at: Timestamp,
}

impl AccountHistory {
    /// The transaction that used this nonce, if it is in the history.
    pub fn with_nonce(&self, nonce: u64) -> Option<&AccountTransaction> {
        self.transactions.iter().find(|transaction| transaction.nonce == nonce)
    }
}

/// How a mined transaction ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Receipt {
    /// Whether it succeeded; a reverted transaction did not.
    pub succeeded: bool,
    /// Its block.
    pub block: u64,
}

/// Reads accounts, with a bound on the calls per second and a pause after a failure.
pub struct AccountReader {
    chain: Arc<Chain>,
    clock: Clock,
    /// Blocks on top of one that make it final.
    finality: u64,
    accounts: Mutex<HashMap<Address, Arc<AsyncMutex<Account>>>>,
    /// The chain's id, once it was asked for.
    chain_id: OnceLock<u64>,
    /// When known blocks were made. A replaced block's time differs by seconds, which does not matter here.
    block_times: Mutex<BTreeMap<u64, Timestamp>>,
    limits: Mutex<Limits>,
}

struct Limits {
    /// Calls per second; `None`: no limit.
    rate: Option<f64>,
    tokens: f64,
    filled_at: Instant,
    paused_until: Option<Instant>,
}

/// Seconds of calls that may be made in a row.
const BURST_SECONDS: f64 = 2.0;
/// A node that answers for a block this far back keeps historical state.
const HISTORY_PROBE: u64 = 256;
/// Pause after a call without an answer.
const PAUSE: Duration = Duration::from_secs(2);
/// Maximum number of blocks that are read one by one, on a node without historical state.
const BLOCKS_READ_MAX: u64 = 5_000;
/// Maximum number of final transactions that are kept of one account.
const KEPT_MAX: usize = 20_000;
/// Maximum number of transactions in a part of a reading, if they are in more than one block.
const PART_MAX: u64 = 32;
/// Time after which a reading of final blocks ends with the part that is being read, and for which another one waits for it.
const READ_MAX: Duration = Duration::from_secs(10);
const TOO_MANY: ChainError = ChainError::Unreadable("the account has made more transactions since then than are kept");
const STILL_READ: ChainError = ChainError::Unreadable("the account's transactions since then are still being read");

impl AccountReader {
    /// Reads accounts of this chain; a block is final once `finality` blocks are on top of it.
    pub fn new(chain: Arc<Chain>, clock: Clock, finality: u64) -> Self {
        let limits = Limits { rate: None, tokens: 0.0, filled_at: clock.instant(), paused_until: None };
        let (accounts, block_times) = (Mutex::default(), Mutex::default());
        let (chain_id, limits) = (OnceLock::new(), Mutex::new(limits));
        Self { chain, clock, finality, accounts, chain_id, block_times, limits }
    }

    /// Makes at most this many calls per second; `None`: no limit.
    #[must_use]
    pub fn with_rate(self, calls_per_second: Option<u32>) -> Self {
        let rate = calls_per_second.map(f64::from);
        let mut limits = self.limits();
        (limits.rate, limits.tokens) = (rate, rate.unwrap_or(0.0) * BURST_SECONDS);
        drop(limits);
        self
    }

    /// Whether the node gives what is needed to follow an account; and whether it keeps historical state, without which
    /// blocks are read one by one.
    pub async fn probe(&self) -> Result<bool, ChainError> {
        let head = self.block("latest").await?;
        let whole = self.ask("eth_getBlockByNumber", json!([format!("{:#x}", head.number), true])).await?;
        let listed = whole["transactions"].as_array().ok_or(ChainError::Unreadable("a block's transactions"))?;
        if listed.iter().any(|transaction| !transaction.is_object()) {
            return Err(ChainError::Unreadable("blocks come without their transactions"));
        }
        // A refusal here is no lack of history: these counts are needed in any case.
        for block in ["latest", "pending"] {
            self.count_at(Address::ZERO, block).await?;
        }
        match self.count(Address::ZERO, head.number.saturating_sub(HISTORY_PROBE)).await {
            Ok(_) => Ok(true),
            Err(ChainError::Refused { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The account's transactions in the blocks since `since`, up to the head.
    pub async fn history(&self, address: Address, since: Timestamp) -> Result<AccountHistory, ChainError> {
        let account = {
            let mut accounts = self.accounts.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(accounts.entry(address).or_default())
        };
        // One reader per account: the second finds the first one's result.
        let mut account = self.clock.timeout(READ_MAX, account.lock()).await.map_err(|_| STILL_READ)?;
        let head = self.newest_block().await?;
        let final_block = head.number.saturating_sub(self.finality);
        // The chain's clock may be behind ours, or ours have been ahead when `since` was taken.
        let from = self.block_before(since - self.clock.now().since(head.at), &head).await?;
        let tail = match account.tail.take().filter(|tail| tail.head == head.hash) {
            Some(tail) => tail,
            None => self.read_tail(address, &head, final_block).await?,
        };
        let count_pending = self.count_at(address, "pending").await?.max(tail.count);
        self.extend_final(&mut account, address, from, final_block, tail.historical).await?;
        let until_now = account.range.is_some_and(|(_, until)| until == final_block);
        if until_now && account.count.is_some_and(|count| count != tail.count_final) {
            return Err(account.misread());
        }
        if account.range.is_some_and(|(since, _)| since > from && from < final_block) {
            return Err(TOO_MANY);
        }
        let known = account.transactions.values().chain(&tail.transactions);
        let mut transactions: Vec<AccountTransaction> = known.filter(|known| known.block > from).cloned().collect();
        transactions.sort_by_key(|transaction| transaction.nonce);
        transactions.dedup_by_key(|transaction| transaction.nonce);
        let (count, count_final) = (tail.count, tail.count_final);
        account.tail = Some(tail);
        Ok(AccountHistory {
            transactions,
            count,
            count_final,
            count_pending,
            head: head.number,
            final_block,
            head_at: head.at,
        })
    }

    /// The account's transaction counts: of those that are mined, and with those that wait next in the node's pool.
    pub async fn counts(&self, address: Address) -> Result<(u64, u64), ChainError> {
        let latest = self.count_at(address, "latest").await?;
        let pending = self.count_at(address, "pending").await?;
        Ok((latest, pending))
    }

    /// The mined transaction with this hash and its receipt; `None` if the chain does not have it in a block.
    pub async fn mined(&self, hash: B256) -> Result<Option<(AccountTransaction, Address, Receipt)>, ChainError> {
        let found = self.ask("eth_getTransactionByHash", json!([hash.to_string()])).await?;
        let Some((transaction, from)) = read_transaction(&found) else { return Ok(None) };
        Ok(self.receipt(hash).await?.map(|receipt| (transaction, from, receipt)))
    }

    /// The receipt of a transaction; `None` if it is in no block.
    pub async fn receipt(&self, hash: B256) -> Result<Option<Receipt>, ChainError> {
        let receipt = self.ask("eth_getTransactionReceipt", json!([hash.to_string()])).await?;
        let Some(block) = number(&receipt["blockNumber"]) else { return Ok(None) };
        let status = number(&receipt["status"]).ok_or(ChainError::Unreadable("the receipt's status"))?;
        Ok(Some(Receipt { succeeded: status == 1, block }))
    }

    /// Whether a block is final, given the head that was read.
    pub fn is_final(&self, block: u64, head: u64) -> bool {
        block.saturating_add(self.finality) <= head
    }

    /// The newest block's number.
    pub async fn head(&self) -> Result<u64, ChainError> {
        self.newest_block().await.map(|block| block.number)
    }

    /// The chain's id.
    pub async fn chain_id(&self) -> Result<u64, ChainError> {
        if let Some(known) = self.chain_id.get() {
            return Ok(*known);
        }
        let answer = self.ask("eth_chainId", json!([])).await?;
        let id = number(&answer).ok_or(ChainError::Unreadable("the chain's id"))?;
        Ok(*self.chain_id.get_or_init(|| id))
    }

    /// Why a mined transaction reverted: the same call on the state before its block.
    pub async fn revert_reason(&self, from: Address, call: &Call, block: u64) -> Option<String> {
        self.take_token().await.ok()?;
        self.chain.revert_reason(from, call, block).await
    }

    /// The account's transactions after the final blocks.
    async fn read_tail(&self, address: Address, head: &Block, final_block: u64) -> Result<Tail, ChainError> {
        let at_head = self.count(address, head.number).await;
        let historical = !matches!(at_head, Err(ChainError::Refused { .. }));
        let count = match at_head {
            Ok(count) => count,
            Err(ChainError::Refused { .. }) => self.count_now(address, head).await?,
            Err(error) => return Err(error),
        };
        let (transactions, count_final) = self.read(address, final_block, head.number, historical).await?;
        // The newest blocks may be replaced between two calls: a nonce that counts as used must have its transaction here.
        let whole = match count_final {
            Some(before) => before + transactions.len() as u64 == count,
            None => self.count_now(address, head).await? == count,
        };
        if !whole {
            return Err(ChainError::Unreadable("its newest blocks changed while they were read"));
        }
        let count_final = count_final.unwrap_or_else(|| count.saturating_sub(transactions.len() as u64));
        Ok(Tail { head: head.hash, transactions, count, count_final, historical })
    }

    /// Adds the final blocks after `from` that have not been read. They are read in parts, each of which is kept at once: a
    /// reading that fails, or takes too long, goes on from there the next time.
    async fn extend_final(
        &self,
        account: &mut Account,
        address: Address,
        from: u64,
        final_block: u64,
        historical: bool,
    ) -> Result<(), ChainError> {
        let until = self.clock.instant() + READ_MAX;
        // The chain is shorter than what was read: another chain, or a reset one.
        if account.range.is_some_and(|(_, until)| until > final_block) {
            *account = Account::default();
        }
        if from >= final_block {
            return Ok(());
        }
        // Reading it again would cost as much as before, and it would be dropped again.
        if from < account.dropped {
            return Err(TOO_MANY);
        }
        // A gap between the range and `from` has not been read: the range then begins anew.
        if account.range.is_none_or(|(_, until)| from > until) {
            (account.range, account.count) = (Some((from, from)), None);
        }
        self.extend_back(account, address, from, historical, until).await?;
        self.extend_forward(account, address, final_block, historical, until).await
    }

    /// Reads from the beginning of the range back to `from`.
    async fn extend_back(
        &self,
        account: &mut Account,
        address: Address,
        from: u64,
        historical: bool,
        until: Instant,
    ) -> Result<(), ChainError> {
        let Some((since, _)) = account.range.filter(|(since, _)| from < *since) else { return Ok(()) };
        let counts = if historical { self.counts_at(address, from, since).await? } else { None };
        if let Some((before, after)) = counts {
            if after.saturating_sub(before) > (KEPT_MAX - account.transactions.len().min(KEPT_MAX)) as u64 {
                return Err(TOO_MANY);
            }
            let mut end = (since, after);
            while end.0 > from {
                let mut start = (from, before);
                while end.1.saturating_sub(start.1) > PART_MAX && end.0 - start.0 > 1 {
                    let middle = start.0 + (end.0 - start.0) / 2;
                    start = (middle, self.count(address, middle).await?);
                }
                let found = self.bisect(address, start, end).await?;
                account.keep_older(found, start.0);
                end = start;
                self.in_time(until, end.0 > from)?;
            }
            return Ok(());
        }
        self.few_enough(since - from)?;
        for block in (from + 1..=since).rev() {
            let found = self.transactions_in(address, block).await?;
            account.keep_older(found, block - 1);
            if from < account.dropped {
                return Err(TOO_MANY);
            }
            self.in_time(until, block - 1 > from)?;
        }
        Ok(())
    }

    /// Reads from the end of the range on to `final_block`.
    async fn extend_forward(
        &self,
        account: &mut Account,
        address: Address,
        final_block: u64,
        historical: bool,
        until: Instant,
    ) -> Result<(), ChainError> {
        let Some((_, read)) = account.range else { return Ok(()) };
        if read >= final_block {
            let count = if historical { self.count(address, read).await.ok() } else { None };
            return account.expect_count(count);
        }
        let counts = if historical { self.counts_at(address, read, final_block).await? } else { None };
        if let Some((before, after)) = counts {
            account.expect_count(Some(before))?;
            if after.saturating_sub(before) > KEPT_MAX as u64 {
                return Err(TOO_MANY);
            }
            let mut start = (read, before);
            while start.0 < final_block {
                let mut end = (final_block, after);
                while end.1.saturating_sub(start.1) > PART_MAX && end.0 - start.0 > 1 {
                    let middle = start.0 + (end.0 - start.0) / 2;
                    end = (middle, self.count(address, middle).await?);
                }
                let found = self.bisect(address, start, end).await?;
                account.keep_newer(found, end.0, Some(end.1));
                start = end;
                self.in_time(until, end.0 < final_block)?;
            }
            return Ok(());
        }
        self.few_enough(final_block - read)?;
        for block in read + 1..=final_block {
            let found = self.transactions_in(address, block).await?;
            account.keep_newer(found, block, None);
            self.in_time(until, block < final_block)?;
        }
        Ok(())
    }

    /// The account's counts at two blocks; `None` if the node does not keep their state.
    async fn counts_at(&self, address: Address, from: u64, until: u64) -> Result<Option<(u64, u64)>, ChainError> {
        let counts = async { Ok((self.count(address, from).await?, self.count(address, until).await?)) };
        match counts.await {
            Ok(counts) => Ok(Some(counts)),
            Err(ChainError::Refused { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether a reading that is not done may go on.
    fn in_time(&self, until: Instant, goes_on: bool) -> Result<(), ChainError> {
        match goes_on && self.clock.instant() >= until {
            true => Err(STILL_READ),
            false => Ok(()),
        }
    }

    fn few_enough(&self, blocks: u64) -> Result<(), ChainError> {
        match blocks > BLOCKS_READ_MAX {
            true => Err(ChainError::Unreadable("the node keeps no history, and the blocks are too many to read")),
            false => Ok(()),
        }
    }

    /// The account's transactions in the blocks after `from`, up to `until`; and its count at `from`, where the node
    /// keeps history.
    async fn read(
        &self,
        address: Address,
        from: u64,
        until: u64,
        historical: bool,
    ) -> Result<(Vec<AccountTransaction>, Option<u64>), ChainError> {
        if from >= until {
            let count = if historical { self.count(address, from).await.ok() } else { None };
            return Ok((Vec::new(), count));
        }
        if historical {
            let counts = async { Ok((self.count(address, from).await?, self.count(address, until).await?)) };
            match counts.await {
                Ok((before, after)) => {
                    let found = self.bisect(address, (from, before), (until, after)).await;
                    match found {
                        Err(ChainError::Refused { .. }) => {}
                        found => return found.map(|found| (found, Some(before))),
                    }
                }
                Err(ChainError::Refused { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        if until - from > BLOCKS_READ_MAX {
            return Err(ChainError::Unreadable("the node keeps no history, and the blocks are too many to read"));
        }
        let mut found = Vec::new();
        for block in from + 1..=until {
            found.extend(self.transactions_in(address, block).await?);
        }
        Ok((found, None))
    }

    /// Halves the range as long as the counts at its ends differ.
    async fn bisect(
        &self,
        address: Address,
        from: (u64, u64),
        until: (u64, u64),
    ) -> Result<Vec<AccountTransaction>, ChainError> {
        let counted = until.1.saturating_sub(from.1);
        let mut found = Vec::new();
        let mut ranges = vec![(from, until)];
        while let Some((from, until)) = ranges.pop() {
            if from.1 >= until.1 {
                continue;
            }
            if until.0 - from.0 == 1 {
                found.extend(self.transactions_in(address, until.0).await?);
                continue;
            }
            let middle = from.0 + (until.0 - from.0) / 2;
            let middle = (middle, self.count(address, middle).await?);
            ranges.push((from, middle));
            ranges.push((middle, until));
        }
        // Counts and blocks from two nodes, or of two branches of the chain, do not add up: nothing is concluded from them.
        if found.len() as u64 != counted {
            return Err(ChainError::Unreadable("the blocks and the account's transaction count disagree"));
        }
        Ok(found)
    }

    async fn count(&self, address: Address, block: u64) -> Result<u64, ChainError> {
        self.count_at(address, &format!("{block:#x}")).await
    }

    /// The count at the head, from a node that has no older one. It counts only if the head is still the newest block: the
    /// node may be ahead of, or behind, the one that was asked for the head.
    async fn count_now(&self, address: Address, head: &Block) -> Result<u64, ChainError> {
        let count = self.count_at(address, "latest").await?;
        if self.block("latest").await?.hash != head.hash {
            return Err(ChainError::Unreadable("its newest block changed while it was read"));
        }
        Ok(count)
    }

    async fn count_at(&self, address: Address, block: &str) -> Result<u64, ChainError> {
        let count = self.ask("eth_getTransactionCount", json!([address.to_string(), block])).await?;
        number(&count).ok_or(ChainError::Unreadable("a transaction count"))
    }

    async fn ask(&self, method: &str, params: Value) -> Result<Value, ChainError> {
        self.take_token().await?;
        let answer = self.chain.ask(method, params).await;
        if matches!(answer, Err(ChainError::Unreachable(_) | ChainError::Mismatch(_))) {
            self.limits().paused_until = Some(self.clock.instant() + PAUSE);
        }
        answer
    }

    /// Waits for the rate limit; fails during the pause after a failure.
    async fn take_token(&self) -> Result<(), ChainError> {
        loop {
            let wait = {
                let now = self.clock.instant();
                let mut limits = self.limits();
                if limits.paused_until.is_some_and(|until| now < until) {
                    return Err(ChainError::Unreachable(NoAnswer::Paused));
                }
                let Some(rate) = limits.rate else { return Ok(()) };
                let gained = now.saturating_duration_since(limits.filled_at).as_secs_f64() * rate;
                limits.tokens = (limits.tokens + gained).min(rate * BURST_SECONDS);
                limits.filled_at = now;
                if limits.tokens >= 1.0 {
                    limits.tokens -= 1.0;
                    return Ok(());
                }
                Duration::from_secs_f64((1.0 - limits.tokens) / rate)
            };
            self.clock.sleep(wait).await;
        }
    }

    fn limits(&self) -> std::sync::MutexGuard<'_, Limits> {
        self.limits.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A mined transaction and its sender; `None` if it is in no block, or cannot be read.
pub(super) fn read_transaction(value: &Value) -> Option<(AccountTransaction, Address)> {
    let address = |name: &str| value[name].as_str().and_then(|text| text.parse::<Address>().ok());
    let data = bytes(&value["input"]).ok()?;
    let amount = value["value"].as_str().and_then(crate::evm::parse_amount)?;
    let transaction = AccountTransaction {
        hash: value["hash"].as_str()?.parse().ok()?,
        nonce: number(&value["nonce"])?,
        block: number(&value["blockNumber"])?,
        to: address("to"),
        value: amount,
        data: data.to_string(),
    };
    Some((transaction, address("from")?))
}

#[cfg(test)]
mod tests;
