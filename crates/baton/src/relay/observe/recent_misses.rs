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

#[cfg(test)]
mod tests {
    use super::*;

    const LASTS: Duration = Duration::from_secs(30);

    #[test]
    fn an_id_is_remembered_for_its_time_only() {
        let (misses, now, id) = (RecentMisses::new(LASTS), Instant::now(), TransactionId::generate());
        assert!(!misses.has(id, now));
        misses.add(id, now);
        assert!(misses.has(id, now + LASTS - Duration::from_millis(1)));
        assert!(!misses.has(id, now + LASTS), "a relayer may know it by now");
        assert!(!misses.has(TransactionId::generate(), now));
    }

    #[test]
    fn the_memory_is_bounded_and_ids_whose_time_is_over_make_room() {
        let (misses, now) = (RecentMisses::new(LASTS), Instant::now());
        let ids: Vec<_> = (0..=RecentMisses::IDS_MAX).map(|_| TransactionId::generate()).collect();
        for id in &ids {
            misses.add(*id, now);
        }
        let last = ids[RecentMisses::IDS_MAX];
        assert!(misses.has(ids[0], now) && !misses.has(last, now), "recent ids are not replaced");
        assert_eq!(misses.since.lock().unwrap().len(), RecentMisses::IDS_MAX);
        misses.add(last, now + LASTS);
        assert!(misses.has(last, now + LASTS));
        assert_eq!(misses.since.lock().unwrap().len(), 1);
    }
}
