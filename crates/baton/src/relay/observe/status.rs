//! The status in three tiers: the cache, the database, the relayers. A record that only a relayer knows is stored,
//! unless a submission of unknown outcome may be looking for it. With a chain to ask, the block of a finished transaction
//! is added ([`block`]).

use std::sync::Arc;
use std::time::Duration;

use metrics::counter;
use serde_json::Value;
use tracing::debug;

use crate::relay::observe::block::{self, Blocks};
use crate::relay::observe::recent_misses::RecentMisses;
use crate::relay::relayer::client::{RelayerClient, describe};
use crate::relay::relayer::pool::Pool;
use crate::relay::request::call::{Call, DirectRequest, Speed};
use crate::relay::state::apply_report::{Report, Source, Verdict};
use crate::relay::state::transaction::{
    Binding, Progress, RelayerTxId, RelayerUrl, Status, Transaction, TransactionId,
};
use crate::relay::store::StoreError;
use crate::relay::update::guarded_store::GuardedStore;
use crate::relay::update::view;
use crate::timestamp::Timestamp;

/// Looks transactions up.
pub struct StatusLookup {
    guarded: Arc<GuardedStore>,
    pool: Arc<Pool>,
    timeout: Duration,
    /// Ids that no tier knew: polling a wrong id does not make us ask every relayer each time.
    unknown: RecentMisses,
    blocks: Option<Blocks>,
}

/// What a lookup found.
#[derive(Debug)]
pub enum Found<T> {
    /// The transaction.
    Known(T),
    /// No tier knows the id.
    Unknown,
    /// The store does not know the id, and the budget for asking the relayers is used up.
    NotAsked,
}

const UNKNOWN_FOR: Duration = Duration::from_secs(30);
/// With more claims than this, nothing is stored from the third tier.
const CLAIMS_COMPARED_MAX: usize = 1000;

impl StatusLookup {
    /// A lookup over these tiers; `timeout` limits each question to a relayer.
    pub fn new(guarded: Arc<GuardedStore>, pool: Arc<Pool>, blocks: Option<Blocks>, timeout: Duration) -> Self {
        Self { guarded, pool, timeout, unknown: RecentMisses::new(UNKNOWN_FOR), blocks }
    }

    /// The transaction as clients see it, from the first tier that has all of it.
    pub async fn find(&self, id: TransactionId) -> Result<Found<Value>, StoreError> {
        // Cached before its block was known: the database may have it by now.
        let all = |shown: &Value| self.blocks.is_none() || !block::may_lack_block(shown);
        if let Some(shown) = self.guarded.cache.get(id).await.filter(all) {
            counter!("baton_status_total", "tier" => "cache").increment(1);
            return Ok(Found::Known(shown));
        }
        let row = match self.find_row(id).await? {
            Found::Known(row) => row,
            Found::Unknown => return Ok(Found::Unknown),
            Found::NotAsked => return Ok(Found::NotAsked),
        };
        let row = match &self.blocks {
            Some(blocks) => blocks.complete(row).await,
            None => row,
        };
        Ok(Found::Known(view::show(&row)))
    }

    async fn find_row(&self, id: TransactionId) -> Result<Found<Transaction>, StoreError> {
        if let Some(row) = self.guarded.store.get(id).await? {
            self.keep(&row);
            counter!("baton_status_total", "tier" => "database").increment(1);
            return Ok(Found::Known(row));
        }
        // Clients of the old synchronous service hold relayers' ids; those are UUIDs too.
        let tx_id = RelayerTxId(id.to_string());
        if let Some(row) = self.guarded.store.find_bound(&tx_id).await? {
            counter!("baton_status_total", "tier" => "database").increment(1);
            return Ok(Found::Known(row));
        }
        if self.unknown.has(id, self.guarded.clock.instant()) {
            counter!("baton_status_total", "tier" => "none").increment(1);
            return Ok(Found::Unknown);
        }
        let Some(relayers) = self.pool.look_up() else {
            counter!("baton_status_total", "tier" => "not-asked").increment(1);
            return Ok(Found::NotAsked);
        };
        match self.ask_relayers(relayers, id, &tx_id).await? {
            Some(row) => {
                counter!("baton_status_total", "tier" => "relayer").increment(1);
                Ok(Found::Known(row))
            }
            None => {
                counter!("baton_status_total", "tier" => "none").increment(1);
                self.unknown.add(id, self.guarded.clock.instant());
                Ok(Found::Unknown)
            }
        }
    }

    async fn ask_relayers(
        &self,
        relayers: &[Arc<RelayerClient>],
        id: TransactionId,
        tx_id: &RelayerTxId,
    ) -> Result<Option<Transaction>, StoreError> {
        let asked = relayers.iter().map(|client| async move {
            match client.transaction(tx_id, self.timeout).await {
                Ok(found) => found.map(|report| (client.url().clone(), report)),
                Err(failure) => {
                    debug!(relayer = %client.url(), "asking the relayer for a status failed: {}", describe(&failure));
                    None
                }
            }
        });
        let Some((relayer, report)) = futures::future::join_all(asked).await.into_iter().flatten().next() else {
            return Ok(None);
        };
        let Some(row) = imported(id, &relayer, &report, &self.guarded) else { return Ok(None) };
        let claims = self.guarded.store.claimed(CLAIMS_COMPARED_MAX).await?;
        let wanted = claims.iter().any(|claim| claim.call.matches(&report)) || claims.len() >= CLAIMS_COMPARED_MAX;
        if !wanted {
            match self.guarded.store.insert(std::slice::from_ref(&row)).await {
                Ok(()) => self.keep(&row),
                // Another reader stored it first.
                Err(StoreError::Conflict { .. }) => {}
                Err(failure) => return Err(failure),
            }
        }
        Ok(Some(row))
    }

    /// Caches a finished transaction; with a chain to ask, only once its block is known.
    fn keep(&self, row: &Transaction) {
        let complete = self.blocks.is_none() || block::hash_without_block(row).is_none();
        if complete && let Some(entry) = view::entry(row) {
            self.guarded.cache.put(entry);
        }
    }
}

/// A row for a transaction that only a relayer knows.
fn imported(id: TransactionId, relayer: &RelayerUrl, report: &Report, guarded: &GuardedStore) -> Option<Transaction> {
    let now = guarded.clock.now();
    let call = Call {
        to: report.to.as_deref()?.parse().ok()?,
        value: report.value?,
        data: report.data.clone().unwrap_or_else(|| "0x".to_owned()).to_ascii_lowercase(),
        gas_limit: report.gas_limit,
        speed: Speed::Average,
    };
    // A relayer accepts malformed call data. Such a record cannot be stored as a row.
    let request = DirectRequest { call, retry_on_failure: false };
    let readable = serde_json::from_str(&request.to_json()).ok()?;
    if DirectRequest::parse(&readable).ok()? != request {
        return None;
    }
    let created_at = creation(report.created_at, now);
    let mut row = Transaction::accepted(id, &request, "imported".to_owned(), created_at, &guarded.timings);
    row.imported = true;
    row.status = Status::Submitted;
    row.check_at = Some(now + guarded.timings.submitted_check);
    row.binding = Some(Binding {
        relayer: relayer.clone(),
        tx_id: report.tx_id.clone(),
        at: now,
        progress: Progress::Pending,
        nonce: None,
        forgotten_since: None,
    });
    // What a relayer says of an old transaction needs the chain's confirmation as much as of a new one.
    if guarded.chain_decides && row.needs_chain(report, now, &guarded.timings) {
        return Some(row.ask_chain(report, now).map_or(row, |moved| moved.transaction));
    }
    match row.report(report, Source::Asked, guarded.mode, now, &guarded.timings) {
        Verdict::Move(moved) => Some(moved.transaction),
        _ => Some(row),
    }
}

/// When an imported transaction was created, by its relayer's clock. One that is ahead does not put it before Baton's newest.
fn creation(said: Option<Timestamp>, now: Timestamp) -> Timestamp {
    said.map_or(now, |at| at.clamp(Timestamp(0), now))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_imported_transaction_is_not_created_in_the_future() {
        let now = Timestamp(1_000_000);
        for (said, expected) in [(None, 1_000_000), (Some(999), 999), (Some(1_000_001), 1_000_000), (Some(-5), 0)] {
            assert_eq!(creation(said.map(Timestamp), now), Timestamp(expected), "{said:?}");
        }
    }
}
