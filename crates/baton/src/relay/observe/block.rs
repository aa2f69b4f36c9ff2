//! The block of a transaction that has ended. The OpenZeppelin Relayer does not report it, so a status request asks the
//! chain, until the block is known.
//!
//! This never delays a status for long: without a quick answer the block is left out, and a chain that gives no answer
//! is not asked for five seconds. A block is shown only once it is stored, so no reader sees it disappear.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use alloy_primitives::B256;
use metrics::counter;
use serde_json::Value;
use tokio::sync::Semaphore;
use tracing::{debug, info, warn};

use crate::relay::chain::{Chain, ChainError};
use crate::relay::observe::recent_misses::RecentMisses;
use crate::relay::state::false_failure::{Included, Proof};
use crate::relay::state::transaction::{Status, Transaction};
use crate::relay::store::StoreError;
use crate::relay::update::guarded_store::{GuardedStore, Updated, failed_but_executed};

/// Longest wait of a status request for its block.
const PATIENCE_MAX: Duration = Duration::from_secs(1);
/// One part in this many of that wait may be spent on waiting for other requests.
const TURN_PART: u32 = 4;
/// One part in this many of a request's time may be spent on the block.
const REQUEST_PART: u32 = 4;
/// Maximum number of concurrent questions.
const ASKING_MAX: usize = 32;
/// Pause after the chain gave no answer.
const PAUSE: Duration = Duration::from_secs(5);
/// Pause before the chain is asked again about a transaction that it does not know: its node may be behind the
/// relayer's.
const UNKNOWN_FOR: Duration = Duration::from_secs(2);

/// Asks the chain for blocks.
pub struct Blocks {
    chain: Arc<Chain>,
    guarded: Arc<GuardedStore>,
    patience: Duration,
    turns: Semaphore,
    pause: Mutex<Pause>,
    unknown: RecentMisses,
}

impl Blocks {
    /// Asks this chain on behalf of requests with this time limit.
    pub fn new(chain: Arc<Chain>, guarded: Arc<GuardedStore>, request_timeout: Duration) -> Self {
        let patience = (request_timeout / REQUEST_PART).min(PATIENCE_MAX);
        let (turns, pause) = (Semaphore::new(ASKING_MAX), Mutex::default());
        Self { chain, guarded, patience, turns, pause, unknown: RecentMisses::new(UNKNOWN_FOR) }
    }

    /// The row, with its block if that was missing and the chain answers in time.
    pub(super) async fn complete(&self, row: Transaction) -> Transaction {
        match hash_without_block(&row) {
            Some(hash) => self.learn(&row, hash).await.unwrap_or(row),
            None => row,
        }
    }

    async fn learn(&self, row: &Transaction, hash: B256) -> Option<Transaction> {
        let clock = &self.guarded.clock;
        let since = clock.instant();
        if self.unknown.has(row.id, since) || self.pause().is_on(since) {
            return None;
        }
        let _turn = clock.timeout_at(since + self.patience / TURN_PART, self.turns.acquire()).await.ok()?.ok()?;
        // Another request may have failed meanwhile.
        if !self.pause().lets_ask(clock.instant()) {
            return None;
        }
        let asked = clock.timeout_at(since + self.patience, self.ask(row, hash)).await;
        match asked.unwrap_or_else(|late| Err(BlockLookupError::Chain(ChainError::Unreachable(late.into())))) {
            Ok(Some(row)) => {
                self.answered("found");
                Some(row)
            }
            // One unreadable answer does not mean that the chain is down.
            Ok(None) | Err(BlockLookupError::Chain(ChainError::Unreadable(_) | ChainError::TooLong)) => {
                self.answered("unknown");
                self.unknown.add(row.id, clock.instant());
                None
            }
            Err(failure) => {
                self.gave_no_answer(&failure);
                None
            }
        }
    }

    /// The row once it has its block, or once it is known that it was executed although it is shown as failed; `None` if
    /// the chain knows no such transaction, or what it knows does not prove that a failed row has failed.
    async fn ask(&self, row: &Transaction, hash: B256) -> Result<Option<Transaction>, BlockLookupError> {
        let Some((block, succeeded)) = self.chain.block_of(hash).await? else { return Ok(None) };
        // A relayer may show the hash of another transaction: that of the no-op in its place, for instance.
        let is_ours = row.status == Status::Failed && self.chain.has_made(&row.call, hash).await?;
        let proof = match succeeded {
            Some(true) if is_ours => Proof::Executed,
            Some(false) if is_ours => Proof::Reverted,
            _ => Proof::None,
        };
        let included = Included { block, proof };
        let (text, now) = (row.hash.as_deref().unwrap_or_default(), self.guarded.clock.now());
        // From the stored row: `row` may have come from a relayer, and another request may have stored the block.
        match self.guarded.update(row.id, |row| row.in_block(text, included, now)).await? {
            Updated::Moved(row) => {
                if row.block_number.is_none() {
                    failed_but_executed(&row, "chain");
                }
                Ok(Some(*row))
            }
            Updated::Refused(_, row) => Ok(row.block_number.is_some().then_some(*row)),
            Updated::Missing => Ok(None),
        }
    }

    fn answered(&self, result: &'static str) {
        counter!("baton_blocks_total", "result" => result).increment(1);
        if self.pause().end() {
            info!(action = "chain_recovered", "the chain answers again");
        }
    }

    fn gave_no_answer(&self, failure: &BlockLookupError) {
        counter!("baton_blocks_total", "result" => "failed").increment(1);
        if self.pause().begin(self.guarded.clock.instant()) {
            warn!(action = "chain_unavailable", "the chain lookup failed; statuses omit the block number: {failure}");
        } else {
            debug!(action = "chain_unavailable", "the chain lookup failed again: {failure}");
        }
    }

    fn pause(&self) -> MutexGuard<'_, Pause> {
        self.pause.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The hash of a transaction that has ended and has no block yet.
pub(super) fn hash_without_block(row: &Transaction) -> Option<B256> {
    row.hash.as_deref().filter(|_| row.lacks_block()).and_then(read_hash)
}

/// Whether the block is missing in a cached view of a transaction that ended well.
pub(super) fn may_lack_block(shown: &Value) -> bool {
    shown["block_number"].is_null() && shown["hash"].as_str().and_then(read_hash).is_some()
}

/// A relayer may report any text; the chain is asked for hashes only.
fn read_hash(text: &str) -> Option<B256> {
    text.parse().ok()
}

/// Why there is no block.
#[derive(Debug, thiserror::Error)]
enum BlockLookupError {
    #[error(transparent)]
    Chain(#[from] ChainError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Whether the chain is not asked for now. After the pause one request probes, and the others wait for its result.
#[derive(Debug, Default)]
struct Pause {
    until: Option<Instant>,
}

impl Pause {
    fn is_on(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// Whether the chain may be asked now; during a probe only the prober may.
    fn lets_ask(&mut self, now: Instant) -> bool {
        if self.is_on(now) {
            return false;
        }
        if self.until.is_some() {
            self.until = Some(now + PAUSE);
        }
        true
    }

    /// Starts the pause; returns whether none was on.
    fn begin(&mut self, now: Instant) -> bool {
        self.until.replace(now + PAUSE).is_none()
    }

    /// Ends the pause; returns whether one was on.
    fn end(&mut self) -> bool {
        self.until.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn after_a_failure_one_request_probes_until_the_chain_answers() {
        let start = Instant::now();
        let mut pause = Pause::default();
        assert!(pause.lets_ask(start) && pause.lets_ask(start), "all is well");
        assert!(pause.begin(start), "that is news");
        let almost = start + PAUSE - Duration::from_millis(1);
        assert!(pause.is_on(almost) && !pause.lets_ask(almost));
        let over = start + PAUSE;
        assert!(!pause.is_on(over) && pause.lets_ask(over));
        assert!(!pause.lets_ask(over), "one is asking");
        assert!(!pause.begin(over), "no news");
        assert!(!pause.lets_ask(over + PAUSE - Duration::from_millis(1)));
        assert!(pause.lets_ask(over + PAUSE), "the prober may be gone");
        assert!(pause.end());
        assert!(pause.lets_ask(over + PAUSE) && pause.lets_ask(over + PAUSE));
        assert!(!pause.end());
    }

    #[test]
    fn a_cached_view_may_lack_a_block() {
        let hash = format!("0x{}", "ab".repeat(32));
        assert!(may_lack_block(&json!({ "hash": hash })), "cached before blocks were stored");
        assert!(may_lack_block(&json!({ "hash": hash, "block_number": null })));
        assert!(!may_lack_block(&json!({ "hash": hash, "block_number": 0 })));
        for nothing_to_ask in [json!(null), json!("0x12"), json!("of the relayer's own making")] {
            assert!(!may_lack_block(&json!({ "hash": nothing_to_ask, "block_number": null })));
        }
    }
}
