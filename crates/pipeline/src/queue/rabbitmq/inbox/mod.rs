//! The deliveries that this process holds: buffered ones, leased ones with their ends, and acknowledgements to send. It is
//! pure bookkeeping behind one mutex; [`super::consume`] exchanges the frames with the broker.
//!
//! Everything here belongs to one connection. When it ends, [`Inbox::reset`] clears it: the broker redelivers the messages,
//! and a receipt that is not found here is a lost lease.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::ack_frames::{self, AckFrame};
use super::wire::WireMessage;
use crate::lock::lock;
use crate::message::{Message, MessageId, Receipt};

/// Remembered ids of messages that were returned unread.
const RETURNS_MAX: usize = 10_000;
/// How long acknowledgements wait for earlier deliveries to be settled, so that one frame covers all of them, while no
/// progress is made. If the connection breaks meanwhile, the messages are redelivered, like after any lost acknowledgement.
const ACK_WAIT: Duration = Duration::from_millis(100);
/// The same limit while earlier deliveries are being settled.
const ACK_WAIT_MAX: Duration = Duration::from_secs(1);

/// After a receive, how long fewer messages than demanded wait for more: small receives cost several times as much per
/// message. The first messages after a pause do not wait.
const BATCHING_WINDOW: Duration = Duration::from_millis(2);

/// A delivery that is not settled.
#[derive(Debug, Clone)]
pub(super) struct HeldDelivery {
    pub(super) tag: u64,
    pub(super) message: Arc<WireMessage>,
    /// Receives before this delivery.
    pub(super) receives: u32,
}

/// A delivery that was removed from the inbox to be moved, with the connection that it belongs to.
#[derive(Debug, Clone)]
pub(super) struct DetachedDelivery {
    pub(super) held: HeldDelivery,
    generation: u64,
    token: u64,
    until: Instant,
}

#[derive(Default)]
pub(super) struct Inbox {
    /// Random id of this queue object; part of its receipts.
    instance: u64,
    /// Number of the connection; zero before the first.
    generation: u64,
    connected: bool,
    last_token: u64,
    /// Deliveries that no receive has taken, by tag.
    buffer: BTreeMap<u64, HeldDelivery>,
    /// Whether the buffer has messages that arrived since the receivers were last woken.
    unannounced: bool,
    /// When a receive last took messages.
    taken_at: Option<Instant>,
    leases: HashMap<u64, (Instant, HeldDelivery)>,
    ends: BTreeSet<(Instant, u64)>,
    /// Every unacknowledged delivery, with the number of its consumer.
    outstanding: BTreeMap<u64, u32>,
    to_ack: BTreeSet<u64>,
    to_return: BTreeSet<u64>,
    /// Since when entries of `to_ack` have waited for earlier deliveries, and until when they wait.
    acks_since: Option<Instant>,
    acks_due: Option<Instant>,
    /// Messages that all waiting receivers ask for together.
    demand: usize,
    receivers: usize,
    idle_since: Option<Instant>,
    /// Messages returned unread: the broker counts these deliveries, [`Message::receives`] does not.
    returns: HashMap<MessageId, u32>,
    /// Lower bound for the send time of due messages, as far as known.
    oldest: Option<SystemTime>,
}

/// The frames to send.
#[derive(Debug, Default)]
pub(super) struct Frames {
    pub(super) acks: Vec<AckFrame>,
    pub(super) returns: Vec<u64>,
    /// The consumer of each acknowledged or returned delivery.
    pub(super) consumers: Vec<u32>,
}

/// Whether waiting receivers must learn of buffered messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Announcement {
    /// They know of all of them.
    Nothing,
    Now,
    /// At the end of the batching window.
    Later(Instant),
}

impl Inbox {
    pub(super) fn new(instance: u64) -> Self {
        Self { instance, ..Self::default() }
    }

    /// Clears everything for a new connection, or for none.
    pub(super) fn reset(&mut self, connected: bool, now: Instant) {
        for held in std::mem::take(&mut self.buffer).into_values() {
            self.record_return(&held);
        }
        self.generation += 1;
        self.connected = connected;
        self.leases.clear();
        self.ends.clear();
        self.outstanding.clear();
        self.to_ack.clear();
        self.to_return.clear();
        (self.acks_since, self.acks_due) = (None, None);
        self.idle_since = (self.receivers == 0).then_some(now);
    }

    pub(super) fn connected(&self) -> bool {
        self.connected
    }

    // Deliveries.

    /// Records a delivery with this tag.
    pub(super) fn delivered(&mut self, tag: u64, consumer: u32) {
        self.outstanding.insert(tag, consumer);
    }

    /// Receives before this delivery: the header's count plus the broker's, without deliveries returned unread.
    pub(super) fn received(&self, message: &WireMessage, earlier_deliveries: u32) -> u32 {
        let unread = self.returns.get(&message.id).copied().unwrap_or(0);
        message.receives.saturating_add(earlier_deliveries.saturating_sub(unread))
    }

    /// Buffers a delivery for the next receiver.
    pub(super) fn buffer(&mut self, held: HeldDelivery) {
        self.unannounced = true;
        self.buffer.insert(held.tag, held);
    }

    /// Detaches a delivery that is moved without being received.
    pub(super) fn detach(&self, held: HeldDelivery, now: Instant) -> DetachedDelivery {
        DetachedDelivery { held, generation: self.generation, token: 0, until: now }
    }

    // Receives.

    pub(super) fn add_demand(&mut self, max: usize) {
        self.demand += max;
        self.receivers += 1;
        self.idle_since = None;
    }

    pub(super) fn remove_demand(&mut self, max: usize, now: Instant) {
        self.demand -= max;
        self.receivers -= 1;
        if self.receivers == 0 {
            self.idle_since = Some(now);
        }
    }

    /// Until when fewer messages than `wanted` wait for more; `None` if they do not wait.
    pub(super) fn batching_until(&self, wanted: usize, now: Instant) -> Option<Instant> {
        self.taken_at.map(|at| at + BATCHING_WINDOW).filter(|until| now < *until && self.buffer.len() < wanted)
    }

    /// Whether to wake the waiting receivers now, and if not, when to ask again.
    ///
    /// A receiver that started to wait before the last receive does not know that a batching window began, so it does not
    /// look again at the window's end by itself.
    pub(super) fn announce(&mut self, now: Instant) -> Announcement {
        if !self.unannounced || self.buffer.is_empty() {
            self.unannounced = false;
            return Announcement::Nothing;
        }
        match self.batching_until(self.demand, now) {
            Some(until) => Announcement::Later(until),
            None => {
                self.unannounced = false;
                Announcement::Now
            }
        }
    }

    /// Leases up to `max` buffered messages, oldest first.
    pub(super) fn take(&mut self, max: usize, now: Instant, lease: Duration) -> Vec<Message> {
        let until = lease_end(now, lease);
        let mut messages = Vec::new();
        if !self.buffer.is_empty() {
            self.taken_at = Some(now);
        }
        while messages.len() < max {
            let Some((_, held)) = self.buffer.pop_first() else { break };
            self.last_token += 1;
            self.oldest = self.oldest.max(Some(held.message.sent_at));
            messages.push(Message {
                id: held.message.id.clone(),
                body: held.message.body.to_vec(),
                attributes: held.message.attributes.clone(),
                receives: held.receives.saturating_add(1),
                sent_at: held.message.sent_at,
                receipt: Receipt(format!("{:x}.{}", self.instance, self.last_token)),
            });
            self.ends.insert((until, self.last_token));
            self.leases.insert(self.last_token, (until, held));
        }
        messages
    }

    /// Messages that receivers demand beyond the buffered ones, limited by `held_max`.
    pub(super) fn wanted(&self, held_max: usize) -> usize {
        let room = held_max.saturating_sub(self.outstanding.len());
        self.demand.saturating_sub(self.buffer.len()).min(room)
    }

    /// Since when no receiver has been waiting.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        self.idle_since
    }

    // Settlements.

    /// Removes the leased delivery of a receipt. The caller settles it or puts it back.
    pub(super) fn take_lease(&mut self, receipt: &Receipt, now: Instant) -> Option<DetachedDelivery> {
        let token = self.token(receipt, now)?;
        let (until, held) = self.leases.remove(&token)?;
        self.ends.remove(&(until, token));
        Some(DetachedDelivery { held, generation: self.generation, token, until })
    }

    /// Restores a lease whose move failed; the receipt is valid again. `false` if its connection has ended.
    pub(super) fn put_back(&mut self, taken: DetachedDelivery) -> bool {
        if taken.generation != self.generation || taken.token == 0 {
            return false;
        }
        self.ends.insert((taken.until, taken.token));
        self.leases.insert(taken.token, (taken.until, taken.held));
        true
    }

    /// Moves the end of a lease to `until`.
    pub(super) fn extend(&mut self, receipt: &Receipt, until: Instant, now: Instant) -> bool {
        let Some(token) = self.token(receipt, now) else { return false };
        let Some((end, _)) = self.leases.get_mut(&token) else { return false };
        self.ends.remove(&(*end, token));
        self.ends.insert((until, token));
        *end = until;
        true
    }

    /// Removes the leases that ended. Also returns when the next one ends.
    pub(super) fn expired(&mut self, now: Instant) -> (Vec<DetachedDelivery>, Option<Instant>) {
        let mut expired = Vec::new();
        while let Some(&(until, token)) = self.ends.first() {
            if until > now {
                return (expired, Some(until));
            }
            self.ends.pop_first();
            if let Some((_, held)) = self.leases.remove(&token) {
                expired.push(DetachedDelivery { held, generation: self.generation, token: 0, until });
            }
        }
        (expired, None)
    }

    /// Acknowledges a delivery with the next frames. `false` if its connection has ended: the broker redelivers it.
    pub(super) fn settle(&mut self, taken: &DetachedDelivery) -> bool {
        let current = taken.generation == self.generation;
        if current {
            self.returns.remove(&taken.held.message.id);
            self.to_ack.insert(taken.held.tag);
        }
        current
    }

    /// Returns a delivery to the broker with the next frames.
    pub(super) fn return_delivery(&mut self, taken: &DetachedDelivery) {
        if taken.generation == self.generation {
            self.to_return.insert(taken.held.tag);
        }
    }

    /// Returns all buffered messages to the broker with the next frames.
    pub(super) fn return_unread(&mut self) {
        for held in std::mem::take(&mut self.buffer).into_values() {
            self.record_return(&held);
            self.to_return.insert(held.tag);
        }
    }

    /// The frames to send now, in this order and before the next call. Acknowledgements behind unsettled deliveries wait,
    /// unless this is the `last` call.
    pub(super) fn frames(&mut self, now: Instant, last: bool) -> Frames {
        let mut settled = std::mem::take(&mut self.to_ack);
        let contiguous = ack_frames::contiguous(&self.outstanding, &settled);
        if contiguous > 0 {
            // Progress was made, so the others may soon be covered by one frame.
            self.acks_due = None;
        }
        match settled.iter().nth(contiguous).copied() {
            Some(first) if !last && now < self.acks_due(now) => self.to_ack = settled.split_off(&first),
            _ => (self.acks_since, self.acks_due) = (None, None),
        }
        let acks = ack_frames::frames(&settled, contiguous);
        let returns: Vec<_> = std::mem::take(&mut self.to_return).into_iter().collect();
        let consumers = settled.iter().chain(&returns).filter_map(|tag| self.outstanding.remove(tag)).collect();
        Frames { acks, returns, consumers }
    }

    /// When waiting acknowledgements are sent individually.
    pub(super) fn acks_deadline(&self) -> Option<Instant> {
        self.acks_due
    }

    /// Starts the wait at `now` if none is running, and returns its end.
    fn acks_due(&mut self, now: Instant) -> Instant {
        let end = *self.acks_since.get_or_insert(now) + ACK_WAIT_MAX;
        *self.acks_due.get_or_insert(end.min(now + ACK_WAIT))
    }

    // Counts.

    /// Buffered messages, and messages that are leased or being moved, in this process.
    pub(super) fn counts(&self) -> (usize, usize) {
        let leaving = self.to_ack.len() + self.to_return.len();
        let held = self.outstanding.len().saturating_sub(self.buffer.len()).saturating_sub(leaving);
        (self.buffer.len(), held)
    }

    /// Records that the queue was empty at `now`.
    pub(super) fn observed_empty(&mut self, now: SystemTime) {
        self.oldest = Some(now);
    }

    /// Estimated send time of the oldest due message.
    pub(super) fn oldest_sent_at(&mut self, now: SystemTime) -> SystemTime {
        let buffered = self.buffer.values().map(|held| held.message.sent_at).min();
        buffered.unwrap_or_else(|| *self.oldest.get_or_insert(now))
    }

    fn token(&self, receipt: &Receipt, now: Instant) -> Option<u64> {
        let (instance, token) = receipt.0.split_once('.')?;
        let (instance, token) = (u64::from_str_radix(instance, 16).ok()?, token.parse().ok()?);
        let (until, _) = self.leases.get(&token)?;
        // A lease that has ended is lost even if the message was not requeued yet.
        (instance == self.instance && *until > now).then_some(token)
    }

    fn record_return(&mut self, held: &HeldDelivery) {
        if self.returns.len() >= RETURNS_MAX {
            // Bounded memory: some messages then show one receive too many.
            self.returns.clear();
        }
        *self.returns.entry(held.message.id.clone()).or_default() += 1;
    }
}

/// A receiver's demand for messages; ends when dropped.
pub(super) struct ReceiveDemand<'a> {
    state: &'a super::RabbitMqState,
    max: usize,
}

impl<'a> ReceiveDemand<'a> {
    pub(super) fn new(state: &'a super::RabbitMqState, max: usize) -> Self {
        lock(&state.inbox).add_demand(max);
        state.changed.notify_one();
        Self { state, max }
    }
}

impl Drop for ReceiveDemand<'_> {
    fn drop(&mut self) {
        lock(&self.state.inbox).remove_demand(self.max, Instant::now());
        self.state.changed.notify_one();
    }
}

/// The end of a lease that starts at `now`.
pub(super) fn lease_end(now: Instant, lease: Duration) -> Instant {
    now + lease.min(super::WAIT_MAX)
}

#[cfg(test)]
mod tests;
