//! The status in three tiers: the cache, the database, the relayers. What the third tier finds is stored,
//! unless it may be the very record that a submission in doubt is looking for.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use metrics::counter;
use serde_json::Value;
use tracing::debug;

use super::api;
use super::book::Book;
use super::call::{Call, DirectRequest, Speed};
use super::relayer::client::describe;
use super::relayer::pool::Pool;
use super::report::{Report, Source};
use super::store::StoreError;
use super::transaction::{Binding, Progress, RelayerTxId, RelayerUrl, Status, Transaction, TransactionId};
use crate::timestamp::Timestamp;

/// Looks transactions up.
pub struct StatusLookup {
    book: Arc<Book>,
    pool: Arc<Pool>,
    timeout: Duration,
    /// Ids that no tier knew, for a moment: a client that polls a wrong id does not make us ask every relayer.
    unknown: Mutex<HashMap<TransactionId, Instant>>,
}

const UNKNOWN_FOR: Duration = Duration::from_secs(5);
const UNKNOWN_MAX: usize = 10_000;
/// More claims than this in doubt at once, and nothing is stored from the third tier.
const CLAIMS_COMPARED_MAX: usize = 1000;

impl StatusLookup {
    /// A lookup over these tiers.
    pub fn new(book: Arc<Book>, pool: Arc<Pool>, timeout: Duration) -> Self {
        Self { book, pool, timeout, unknown: Mutex::new(HashMap::new()) }
    }

    /// The transaction, from the nearest tier that knows it.
    pub async fn find(&self, id: TransactionId) -> Result<Option<Value>, StoreError> {
        if let Some(shown) = self.book.cache.get(id).await {
            counter!("baton_status_total", "tier" => "cache").increment(1);
            return Ok(Some(shown));
        }
        if let Some(row) = self.book.store.get(id).await? {
            self.keep(&row);
            counter!("baton_status_total", "tier" => "database").increment(1);
            return Ok(Some(api::show(&row)));
        }
        if self.is_known_unknown(id) {
            return Ok(None);
        }
        // Clients of the old synchronous service hold relayers' ids; those are UUIDs too.
        let tx_id = RelayerTxId(id.to_string());
        if let Some(row) = self.book.store.find_bound(&tx_id).await? {
            counter!("baton_status_total", "tier" => "database").increment(1);
            return Ok(Some(api::show(&row)));
        }
        let found = self.ask_relayers(id, &tx_id).await?;
        match &found {
            Some(_) => counter!("baton_status_total", "tier" => "relayer").increment(1),
            None => {
                counter!("baton_status_total", "tier" => "none").increment(1);
                self.remember_unknown(id);
            }
        }
        Ok(found.as_ref().map(api::show))
    }

    async fn ask_relayers(&self, id: TransactionId, tx_id: &RelayerTxId) -> Result<Option<Transaction>, StoreError> {
        let asked = self.pool.clients().iter().map(|client| async move {
            self.pool.ask_one(client.url());
            match client.transaction(tx_id, self.timeout).await {
                Ok(found) => found.map(|report| (client.url().clone(), report)),
                Err(failure) => {
                    debug!(relayer = %client.url(), "not asked for a status: {}", describe(&failure));
                    None
                }
            }
        });
        let Some((relayer, report)) = futures::future::join_all(asked).await.into_iter().flatten().next() else {
            return Ok(None);
        };
        let Some(row) = imported(id, &relayer, &report, &self.book) else { return Ok(None) };
        let claims = self.book.store.claimed(CLAIMS_COMPARED_MAX).await?;
        let wanted = claims.iter().any(|claim| claim.call.matches(&report)) || claims.len() >= CLAIMS_COMPARED_MAX;
        if !wanted {
            match self.book.store.insert(std::slice::from_ref(&row)).await {
                Ok(()) => self.keep(&row),
                // Another reader was quicker.
                Err(StoreError::Conflict { .. }) => {}
                Err(failure) => return Err(failure),
            }
        }
        Ok(Some(row))
    }

    fn keep(&self, row: &Transaction) {
        if let Some(entry) = api::entry(row) {
            self.book.cache.put(entry);
        }
    }

    fn is_known_unknown(&self, id: TransactionId) -> bool {
        let unknown = self.unknown.lock().unwrap_or_else(PoisonError::into_inner);
        unknown.get(&id).is_some_and(|at| at.elapsed() < UNKNOWN_FOR)
    }

    fn remember_unknown(&self, id: TransactionId) {
        let mut unknown = self.unknown.lock().unwrap_or_else(PoisonError::into_inner);
        if unknown.len() >= UNKNOWN_MAX {
            unknown.retain(|_, at| at.elapsed() < UNKNOWN_FOR);
        }
        if unknown.len() < UNKNOWN_MAX {
            unknown.insert(id, Instant::now());
        }
    }
}

/// A row for a transaction that only a relayer knows.
fn imported(id: TransactionId, relayer: &RelayerUrl, report: &Report, book: &Book) -> Option<Transaction> {
    let now = Timestamp::now();
    let call = Call {
        to: report.to.as_deref()?.parse().ok()?,
        value: report.value?,
        data: report.data.clone().unwrap_or_else(|| "0x".to_owned()).to_ascii_lowercase(),
        gas_limit: report.gas_limit,
        speed: Speed::Average,
    };
    // A relayer takes call data that is none. Such a record cannot be kept as a row of ours.
    let request = DirectRequest { call, retry_on_failure: false };
    let readable = serde_json::from_str(&request.to_json()).ok()?;
    if DirectRequest::parse(&readable).ok()? != request {
        return None;
    }
    let created = report.created_at.unwrap_or(now);
    let mut row = Transaction::accepted(id, &request, "imported".to_owned(), created, &book.clocks);
    row.imported = true;
    row.status = Status::Submitted;
    row.check_at = Some(now + book.clocks.submitted_check);
    row.binding = Some(Binding {
        relayer: relayer.clone(),
        tx_id: report.tx_id.clone(),
        at: now,
        progress: Progress::Pending,
        nonce: None,
        forgotten_since: None,
    });
    match row.report(report, Source::Asked, book.mode, now, &book.clocks) {
        super::report::Verdict::Move(moved) => Some(moved.transaction),
        _ => Some(row),
    }
}
