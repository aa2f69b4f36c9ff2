//! What this process knows and SQS does not tell: the messages it holds, whole, because a burial is a copy and SQS
//! hands out a message's content only with a delivery; the retries it has put off, which SQS counts as in flight; and
//! how old the head of the queue is. All of it may be lost with the process: the queue itself is the truth.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::wire::{Content, whole_seconds};

/// SQS hides a message for so long at most, counted from the delivery, however often it is changed.
const HIDDEN_MAX: Duration = Duration::from_secs(12 * 3600);
/// From so many leases on, ended ones are cleared out whenever their number has doubled.
const CLEAR_FROM: usize = 64;

/// A message that was delivered to this process.
#[derive(Clone)]
pub(super) struct Lease {
    pub(super) content: Arc<Content>,
    pub(super) receives: u32,
    pub(super) sent_at: SystemTime,
    pub(super) received_at: Instant,
    pub(super) ends_at: Instant,
    /// Its dead letter is stored; only the deletion is missing.
    pub(super) buried: bool,
}

/// The notes of one queue.
#[derive(Default)]
pub(super) struct Leases {
    notes: Mutex<Notes>,
}

#[derive(Default)]
struct Notes {
    /// By receipt handle.
    held: HashMap<String, Lease>,
    clear_at: usize,
    /// When retries of this process come back.
    retries: BinaryHeap<Reverse<Instant>>,
    head: Head,
}

/// How old the head of the queue is, as far as deliveries show.
#[derive(Default)]
struct Head {
    /// When the newest of the latest deliveries had been sent: what is left has been sent since, more or less.
    sent_at: Option<SystemTime>,
    /// When nothing was due.
    empty_at: Option<SystemTime>,
}

impl Leases {
    fn notes(&self) -> MutexGuard<'_, Notes> {
        self.notes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, handle: String, lease: Lease, now: Instant) {
        let mut notes = self.notes();
        if notes.held.len() >= notes.clear_at.max(CLEAR_FROM) {
            notes.held.retain(|_, lease| lease.ends_at > now);
            notes.clear_at = notes.held.len() * 2;
        }
        notes.held.insert(handle, lease);
    }

    /// What is known of a receipt; `None` if it was settled, or is another process's.
    pub(super) fn get(&self, handle: &str) -> Option<Lease> {
        self.notes().held.get(handle).cloned()
    }

    pub(super) fn change(&self, handle: &str, change: impl FnOnce(&mut Lease)) {
        if let Some(lease) = self.notes().held.get_mut(handle) {
            change(lease);
        }
    }

    pub(super) fn remove(&self, handle: &str) {
        self.notes().held.remove(handle);
    }

    pub(super) fn put_off(&self, until: Instant, now: Instant) {
        let mut notes = self.notes();
        notes.forget_past(now);
        notes.retries.push(Reverse(until));
    }

    /// How many retries of this process are still put off.
    pub(super) fn put_off_count(&self, now: Instant) -> u64 {
        let mut notes = self.notes();
        notes.forget_past(now);
        notes.retries.len() as u64
    }

    /// Notes what a look at the queue has shown.
    pub(super) fn saw(&self, newest_sent_at: Option<SystemTime>, now: SystemTime) {
        let head = &mut self.notes().head;
        match newest_sent_at {
            Some(sent_at) => head.sent_at = Some(sent_at),
            None => head.empty_at = Some(now),
        }
    }

    /// An estimate of how long the oldest due message has waited; `None` before the first delivery to this process.
    pub(super) fn oldest_age(&self, now: SystemTime) -> Option<Duration> {
        let notes = self.notes();
        let since = notes.head.empty_at.max(notes.head.sent_at);
        notes.head.sent_at.and(since).map(|since| now.duration_since(since).unwrap_or_default())
    }
}

impl Notes {
    fn forget_past(&mut self, now: Instant) {
        while self.retries.peek().is_some_and(|Reverse(until)| *until <= now) {
            self.retries.pop();
        }
    }
}

impl Lease {
    pub(super) fn is_lost(&self, now: Instant) -> bool {
        self.ends_at <= now
    }

    /// How many whole seconds SQS can still hide this delivery.
    pub(super) fn hideable_s(&self, now: Instant) -> i32 {
        let left = HIDDEN_MAX.saturating_sub(now.saturating_duration_since(self.received_at));
        // A second to spare: SQS's count began before ours.
        whole_seconds(left.saturating_sub(Duration::from_secs(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::MessageId;

    const SECOND: Duration = Duration::from_secs(1);

    fn lease(now: Instant, ends_in: Duration) -> Lease {
        let content = Content { id: MessageId("m".into()), body: Vec::new(), attributes: Default::default() };
        let (content, sent_at) = (Arc::new(content), SystemTime::now());
        Lease { content, receives: 1, sent_at, received_at: now, ends_at: now + ends_in, buried: false }
    }

    #[test]
    fn ended_leases_do_not_pile_up() {
        let (leases, start) = (Leases::default(), Instant::now());
        for number in 0..10_000_u32 {
            let now = start + SECOND * number;
            leases.add(number.to_string(), lease(now, SECOND * 10), now);
            assert!(leases.notes().held.len() <= CLEAR_FROM + 1);
        }
        assert!(leases.get("9999").is_some() && leases.get("0").is_none());
    }

    #[test]
    fn twelve_hours_are_the_end() {
        let now = Instant::now();
        let held = lease(now, SECOND);
        assert_eq!(held.hideable_s(now), 43_199);
        assert_eq!(held.hideable_s(now + SECOND * 40_000), 3_199);
        assert_eq!(held.hideable_s(now + SECOND * 50_000), 0);
        assert!(!held.is_lost(now) && held.is_lost(now + SECOND));
    }

    #[test]
    fn retries_are_counted_until_they_come_back() {
        let (leases, now) = (Leases::default(), Instant::now());
        leases.put_off(now + SECOND * 5, now);
        leases.put_off(now + SECOND * 2, now);
        assert_eq!(leases.put_off_count(now), 2);
        assert_eq!(leases.put_off_count(now + SECOND * 3), 1);
        assert_eq!(leases.put_off_count(now + SECOND * 5), 0);
    }

    #[test]
    fn the_head_is_as_old_as_deliveries_show() {
        let (leases, now) = (Leases::default(), SystemTime::now());
        assert_eq!(leases.oldest_age(now), None);
        leases.saw(None, now);
        assert_eq!(leases.oldest_age(now), None, "nothing has been delivered here: anything may be waiting");
        leases.saw(Some(now - SECOND * 30), now);
        assert_eq!(leases.oldest_age(now), Some(Duration::ZERO), "it was empty a moment ago");
        leases.saw(Some(now + SECOND * 60), now + SECOND * 70);
        assert_eq!(leases.oldest_age(now + SECOND * 100), Some(SECOND * 40));
    }
}
