//! What this process remembers because SQS does not report it: the content of the messages it holds (a burial sends a
//! copy, and SQS returns content only with a delivery), its delayed retries (SQS counts them as in flight), and the age of
//! the queue's head. Losing it with the process is harmless: the queue is the source of truth.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::wire::{MessageContent, whole_seconds};
use crate::lock::lock;

/// SQS's limit for hiding a message, counted from its delivery and not extended by changes.
const HIDDEN_MAX: Duration = Duration::from_secs(12 * 3600);
/// From this number on, ended leases are removed each time the number of leases has doubled.
const PRUNE_FROM: usize = 64;

/// A message that this process has received.
#[derive(Clone)]
pub(super) struct SqsLease {
    pub(super) content: Arc<MessageContent>,
    pub(super) receives: u32,
    pub(super) sent_at: SystemTime,
    pub(super) received_at: Instant,
    pub(super) ends_at: Instant,
    /// The dead letter is stored; only the deletion is pending.
    pub(super) buried: bool,
}

/// The leases and observations of one queue.
#[derive(Default)]
pub(super) struct SqsLeases {
    state: Mutex<LeaseState>,
}

#[derive(Default)]
struct LeaseState {
    /// By receipt handle.
    held: HashMap<String, SqsLease>,
    prune_at: usize,
    /// When each delayed retry of this process becomes due.
    retries: BinaryHeap<Reverse<Instant>>,
    head: QueueHead,
}

/// The age of the queue's head, as far as deliveries show.
#[derive(Default)]
struct QueueHead {
    /// When the newest message of the last receive was sent. The remaining messages were sent around that time or later.
    sent_at: Option<SystemTime>,
    /// When a receive or a count last found no due message.
    empty_at: Option<SystemTime>,
}

impl SqsLeases {
    fn state(&self) -> MutexGuard<'_, LeaseState> {
        lock(&self.state)
    }

    pub(super) fn add(&self, handle: String, lease: SqsLease, now: Instant) {
        let mut state = self.state();
        if state.held.len() >= state.prune_at.max(PRUNE_FROM) {
            state.held.retain(|_, lease| lease.ends_at > now);
            state.prune_at = state.held.len() * 2;
        }
        state.held.insert(handle, lease);
    }

    /// The lease of a receipt handle; `None` if it was settled or belongs to another process.
    pub(super) fn get(&self, handle: &str) -> Option<SqsLease> {
        self.state().held.get(handle).cloned()
    }

    pub(super) fn change(&self, handle: &str, change: impl FnOnce(&mut SqsLease)) {
        if let Some(lease) = self.state().held.get_mut(handle) {
            change(lease);
        }
    }

    pub(super) fn remove(&self, handle: &str) {
        self.state().held.remove(handle);
    }

    pub(super) fn add_delayed_retry(&self, until: Instant, now: Instant) {
        let mut state = self.state();
        state.drop_past_retries(now);
        state.retries.push(Reverse(until));
    }

    /// Retries of this process whose delay has not passed.
    pub(super) fn delayed_retry_count(&self, now: Instant) -> u64 {
        let mut state = self.state();
        state.drop_past_retries(now);
        state.retries.len() as u64
    }

    /// Records the result of a receive or a count; `None`: nothing was due.
    pub(super) fn observe(&self, newest_sent_at: Option<SystemTime>, now: SystemTime) {
        let head = &mut self.state().head;
        match newest_sent_at {
            Some(sent_at) => head.sent_at = Some(sent_at),
            None => head.empty_at = Some(now),
        }
    }

    /// Estimated age of the oldest due message; `None` before the first delivery to this process.
    pub(super) fn oldest_age(&self, now: SystemTime) -> Option<Duration> {
        let state = self.state();
        let since = state.head.empty_at.max(state.head.sent_at);
        state.head.sent_at.and(since).map(|since| now.duration_since(since).unwrap_or_default())
    }
}

impl LeaseState {
    fn drop_past_retries(&mut self, now: Instant) {
        while self.retries.peek().is_some_and(|Reverse(until)| *until <= now) {
            self.retries.pop();
        }
    }
}

impl SqsLease {
    pub(super) fn is_lost(&self, now: Instant) -> bool {
        self.ends_at <= now
    }

    /// Whole seconds for which SQS can still hide this delivery.
    pub(super) fn hide_max_s(&self, now: Instant) -> i32 {
        let left = HIDDEN_MAX.saturating_sub(now.saturating_duration_since(self.received_at));
        // One second less, because SQS started counting before this process did.
        whole_seconds(left.saturating_sub(Duration::from_secs(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::MessageId;

    const SECOND: Duration = Duration::from_secs(1);

    fn lease(now: Instant, ends_in: Duration) -> SqsLease {
        let content = MessageContent { id: MessageId("m".into()), body: Vec::new(), attributes: Default::default() };
        let (content, sent_at) = (Arc::new(content), SystemTime::now());
        SqsLease { content, receives: 1, sent_at, received_at: now, ends_at: now + ends_in, buried: false }
    }

    #[test]
    fn ended_leases_are_removed() {
        let (leases, start) = (SqsLeases::default(), Instant::now());
        for number in 0..10_000_u32 {
            let now = start + SECOND * number;
            leases.add(number.to_string(), lease(now, SECOND * 10), now);
            assert!(leases.state().held.len() <= PRUNE_FROM + 1);
        }
        assert!(leases.get("9999").is_some() && leases.get("0").is_none());
    }

    #[test]
    fn a_message_is_hidden_for_at_most_twelve_hours() {
        let now = Instant::now();
        let held = lease(now, SECOND);
        assert_eq!(held.hide_max_s(now), 43_199);
        assert_eq!(held.hide_max_s(now + SECOND * 40_000), 3_199);
        assert_eq!(held.hide_max_s(now + SECOND * 50_000), 0);
        assert!(!held.is_lost(now) && held.is_lost(now + SECOND));
    }

    #[test]
    fn retries_are_counted_until_they_are_due() {
        let (leases, now) = (SqsLeases::default(), Instant::now());
        leases.add_delayed_retry(now + SECOND * 5, now);
        leases.add_delayed_retry(now + SECOND * 2, now);
        assert_eq!(leases.delayed_retry_count(now), 2);
        assert_eq!(leases.delayed_retry_count(now + SECOND * 3), 1);
        assert_eq!(leases.delayed_retry_count(now + SECOND * 5), 0);
    }

    #[test]
    fn the_age_of_the_head_is_estimated_from_deliveries() {
        let (leases, now) = (SqsLeases::default(), SystemTime::now());
        assert_eq!(leases.oldest_age(now), None);
        leases.observe(None, now);
        assert_eq!(leases.oldest_age(now), None, "no delivery yet: the age is unknown");
        leases.observe(Some(now - SECOND * 30), now);
        assert_eq!(leases.oldest_age(now), Some(Duration::ZERO), "the queue was empty at `now`");
        leases.observe(Some(now + SECOND * 60), now + SECOND * 70);
        assert_eq!(leases.oldest_age(now + SECOND * 100), Some(SECOND * 40));
    }
}
