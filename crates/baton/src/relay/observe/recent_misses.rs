//! Ids that were looked for in vain a short time ago, so that a client that polls a wrong id costs no further lookups.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::relay::state::transaction::TransactionId;

/// Ids that were asked for in vain, for a moment.
pub struct RecentMisses {
    lasts: Duration,
    since: Mutex<HashMap<TransactionId, Instant>>,
}

impl RecentMisses {
    /// Maximum number of ids in memory.
    const IDS_MAX: usize = 10_000;

    /// Remembers each id for this long.
    pub fn new(lasts: Duration) -> Self {
        Self { lasts, since: Mutex::default() }
    }

    /// Whether the id was added recently.
    pub fn has(&self, id: TransactionId) -> bool {
        let since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        since.get(&id).is_some_and(|at| at.elapsed() < self.lasts)
    }

    /// Remembers an id, unless the memory is full of recent ones.
    pub fn add(&self, id: TransactionId) {
        let mut since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        if since.len() >= Self::IDS_MAX {
            since.retain(|_, at| at.elapsed() < self.lasts);
        }
        if since.len() < Self::IDS_MAX {
            since.insert(id, Instant::now());
        }
    }
}
