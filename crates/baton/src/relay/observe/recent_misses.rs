//! Ids that a recent lookup did not find, so that a client that polls a wrong id costs no further lookups.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::relay::state::transaction::TransactionId;

/// Ids without a result, each remembered for `lasts`.
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
    pub fn has(&self, id: TransactionId, now: Instant) -> bool {
        let since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        since.get(&id).is_some_and(|at| now.saturating_duration_since(*at) < self.lasts)
    }

    /// Remembers an id, unless the memory is full of recent ones.
    pub fn add(&self, id: TransactionId, now: Instant) {
        let mut since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        if since.len() >= Self::IDS_MAX {
            since.retain(|_, at| now.saturating_duration_since(*at) < self.lasts);
        }
        if since.len() < Self::IDS_MAX {
            since.insert(id, now);
        }
    }
}
