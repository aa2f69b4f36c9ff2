//! The first tier of the status: what can never change again, kept in this process. Always optional, never the truth.
//!
//! Several processes may share the data directory, and none of them hears of the others' writes. So only rows that
//! ended well are kept here: everything else is read from the database each time, and no reader is ever shown an
//! old state.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use metrics::counter;

use crate::relay::transaction::{Status, Transaction, TransactionId};

/// How long a row stays.
const LIFETIME: Duration = Duration::from_secs(600);
/// How many rows stay at most.
const ENTRIES_MAX: usize = 10_000;

/// The cache.
#[derive(Default)]
pub struct Cache {
    rows: Mutex<HashMap<TransactionId, (Transaction, Instant)>>,
}

impl Cache {
    /// The row, if it is here.
    pub fn get(&self, id: TransactionId, now: Instant) -> Option<Transaction> {
        let rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let found = rows.get(&id).filter(|(_, until)| now < *until).map(|(row, _)| row.clone());
        counter!("baton_cache_total", "result" => if found.is_some() { "hit" } else { "miss" }).increment(1);
        found
    }

    /// Keeps a row that cannot change any more; any other is ignored.
    pub fn put(&self, row: &Transaction, now: Instant) {
        if !matches!(row.status, Status::Confirmed | Status::Success) {
            return;
        }
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        if rows.len() >= ENTRIES_MAX {
            rows.retain(|_, (_, until)| now < *until);
        }
        if rows.len() >= ENTRIES_MAX {
            rows.clear();
        }
        rows.insert(row.id, (row.clone(), now + LIFETIME));
    }
}
