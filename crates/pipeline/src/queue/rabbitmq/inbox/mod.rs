//! What this process holds of the queue: deliveries that nobody has asked for yet, leases and their ends, and
//! acknowledgements to be sent. One mutex around it, no waiting inside; [`super::consume`] moves the frames.
//!
//! Everything here belongs to one connection. When that ends, [`Inbox::reset`] forgets it all: the broker gives the
//! messages out again, and a receipt that is not found here is a lost lease.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::ack_frames::{self, Frame};
use super::wire::Envelope;
use crate::message::{Message, MessageId, Receipt};

/// How many ids of messages given back unread are remembered.
const RETURNS_MAX: usize = 10_000;
/// How long acknowledgements wait for those before them while nothing gets on, so that one frame can stand for all of
/// them. One that is lost meanwhile is as one lost on the way to the broker: the message comes again.
const ACK_WAIT: Duration = Duration::from_millis(100);
/// And how long while it does get on.
const ACK_WAIT_MAX: Duration = Duration::from_secs(1);

/// How long messages wait for others after some were taken, unless there are as many as are asked for: to take a few at
/// a time costs several times as much. The first after a pause do not wait.
const TAKE_PAUSE: Duration = Duration::from_millis(2);

/// A delivery that is not settled yet.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub(super) tag: u64,
    pub(super) envelope: Arc<Envelope>,
    /// How many times it was received before.
    pub(super) receives: u32,
}

/// A delivery taken out of the inbox to be moved elsewhere, and the connection it belongs to.
#[derive(Debug, Clone)]
pub(super) struct Taken {
    pub(super) held: Held,
    generation: u64,
    token: u64,
    until: Instant,
}

#[derive(Default)]
pub(super) struct Inbox {
    /// Told apart from those of other processes and earlier lives.
    instance: u64,
    /// Which connection this is; zero before the first.
    generation: u64,
    connected: bool,
    last_token: u64,
    /// Delivered, not asked for.
    buffer: BTreeMap<u64, Held>,
    /// When some were taken last.
    taken_at: Option<Instant>,
    leases: HashMap<u64, (Instant, Held)>,
    ends: BTreeSet<(Instant, u64)>,
    /// Every delivery that was not acknowledged yet, with the consumer it came to.
    outstanding: BTreeMap<u64, u32>,
    to_ack: BTreeSet<u64>,
    to_return: BTreeSet<u64>,
    /// Since when something in `to_ack` has waited for those before it, and when it no longer does.
    acks_since: Option<Instant>,
    acks_due: Option<Instant>,
    /// How much the waiting receivers ask for together.
    demand: usize,
    receivers: usize,
    idle_since: Option<Instant>,
    /// Messages given back unread: the broker counts that as a delivery, we do not.
    returns: HashMap<MessageId, u32>,
    /// No message that is due was sent before this, as far as we know.
    oldest: Option<SystemTime>,
}

/// What there is to send.
#[derive(Debug, Default)]
pub(super) struct Frames {
    pub(super) acks: Vec<Frame>,
    pub(super) returns: Vec<u64>,
    /// The consumers whose deliveries these were, one entry for each.
    pub(super) consumers: Vec<u32>,
}

impl Inbox {
    pub(super) fn new(instance: u64) -> Self {
        Self { instance, ..Self::default() }
    }

    /// Starts over with a new connection, or with none.
    pub(super) fn reset(&mut self, connected: bool, now: Instant) {
        for held in std::mem::take(&mut self.buffer).into_values() {
            self.note_return(&held);
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

    // Arriving.

    /// Notes that the broker has delivered `tag`.
    pub(super) fn delivered(&mut self, tag: u64, consumer: u32) {
        self.outstanding.insert(tag, consumer);
    }

    /// How many deliveries count as received, of those that the broker knows of.
    pub(super) fn received(&self, envelope: &Envelope, earlier_deliveries: u32) -> u32 {
        let unread = self.returns.get(&envelope.id).copied().unwrap_or(0);
        envelope.receives.saturating_add(earlier_deliveries.saturating_sub(unread))
    }

    /// Keeps a delivery for the next receiver.
    pub(super) fn keep(&mut self, held: Held) {
        self.buffer.insert(held.tag, held);
    }

    /// A delivery that goes elsewhere without being received.
    pub(super) fn divert(&self, held: Held, now: Instant) -> Taken {
        Taken { held, generation: self.generation, token: 0, until: now }
    }

    // Receiving.

    pub(super) fn ask(&mut self, max: usize) {
        self.demand += max;
        self.receivers += 1;
        self.idle_since = None;
    }

    pub(super) fn stop_asking(&mut self, max: usize, now: Instant) {
        self.demand -= max;
        self.receivers -= 1;
        if self.receivers == 0 {
            self.idle_since = Some(now);
        }
    }

    /// Until when fewer messages than `wanted` wait for others, if they do.
    pub(super) fn gathers_until(&self, wanted: usize, now: Instant) -> Option<Instant> {
        self.taken_at.map(|at| at + TAKE_PAUSE).filter(|until| now < *until && self.buffer.len() < wanted)
    }

    /// Whether those who wait should look again.
    pub(super) fn worth_telling(&self, now: Instant) -> bool {
        !self.buffer.is_empty() && self.gathers_until(self.demand, now).is_none()
    }

    /// Up to `max` messages, oldest first, each leased for so long.
    pub(super) fn take(&mut self, max: usize, now: Instant, lease: Duration) -> Vec<Message> {
        let until = lease_end(now, lease);
        let mut messages = Vec::new();
        if !self.buffer.is_empty() {
            self.taken_at = Some(now);
        }
        while messages.len() < max {
            let Some((_, held)) = self.buffer.pop_first() else { break };
            self.last_token += 1;
            self.oldest = self.oldest.max(Some(held.envelope.sent_at));
            messages.push(Message {
                id: held.envelope.id.clone(),
                body: held.envelope.body.to_vec(),
                attributes: held.envelope.attributes.clone(),
                receives: held.receives.saturating_add(1),
                sent_at: held.envelope.sent_at,
                receipt: Receipt(format!("{:x}.{}", self.instance, self.last_token)),
            });
            self.ends.insert((until, self.last_token));
            self.leases.insert(self.last_token, (until, held));
        }
        messages
    }

    /// How much more the receivers want than is here, while no more than `held_max` are held.
    pub(super) fn wanted(&self, held_max: usize) -> usize {
        let room = held_max.saturating_sub(self.outstanding.len());
        self.demand.saturating_sub(self.buffer.len()).min(room)
    }

    /// Since when nobody has been waiting.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        self.idle_since
    }

    // Settling.

    /// The delivery that the receipt's lease is on, out of the inbox: whoever took it settles it or puts it back.
    pub(super) fn take_lease(&mut self, receipt: &Receipt, now: Instant) -> Option<Taken> {
        let token = self.token(receipt, now)?;
        let (until, held) = self.leases.remove(&token)?;
        self.ends.remove(&(until, token));
        Some(Taken { held, generation: self.generation, token, until })
    }

    /// The same receipt holds again: it could not be moved.
    pub(super) fn put_back(&mut self, taken: Taken) -> bool {
        if taken.generation != self.generation || taken.token == 0 {
            return false;
        }
        self.ends.insert((taken.until, taken.token));
        self.leases.insert(taken.token, (taken.until, taken.held));
        true
    }

    /// Makes the lease end at `until` instead.
    pub(super) fn extend(&mut self, receipt: &Receipt, until: Instant, now: Instant) -> bool {
        let Some(token) = self.token(receipt, now) else { return false };
        let Some((end, _)) = self.leases.get_mut(&token) else { return false };
        self.ends.remove(&(*end, token));
        self.ends.insert((until, token));
        *end = until;
        true
    }

    /// Leases that ended; and if none did, when the next one ends.
    pub(super) fn lapsed(&mut self, now: Instant) -> (Vec<Taken>, Option<Instant>) {
        let mut lapsed = Vec::new();
        while let Some(&(until, token)) = self.ends.first() {
            if until > now {
                return (lapsed, Some(until));
            }
            self.ends.pop_first();
            if let Some((_, held)) = self.leases.remove(&token) {
                lapsed.push(Taken { held, generation: self.generation, token: 0, until });
            }
        }
        (lapsed, None)
    }

    /// To be acknowledged with the next frames. False: its connection has ended, and the broker has it again.
    pub(super) fn settle(&mut self, taken: &Taken) -> bool {
        let current = taken.generation == self.generation;
        if current {
            self.returns.remove(&taken.held.envelope.id);
            self.to_ack.insert(taken.held.tag);
        }
        current
    }

    /// To be given back to the broker with the next frames.
    pub(super) fn give_back(&mut self, taken: &Taken) {
        if taken.generation == self.generation {
            self.to_return.insert(taken.held.tag);
        }
    }

    /// What is in the buffer goes back to the broker, unread.
    pub(super) fn give_back_unread(&mut self) {
        for held in std::mem::take(&mut self.buffer).into_values() {
            self.note_return(&held);
            self.to_return.insert(held.tag);
        }
    }

    /// What to send, in this order, before anything else is taken from here. Acknowledgements that one frame cannot stand
    /// for yet wait, unless this is the `last`.
    pub(super) fn frames(&mut self, now: Instant, last: bool) -> Frames {
        let mut settled = std::mem::take(&mut self.to_ack);
        let in_turn = ack_frames::in_turn(&self.outstanding, &settled);
        if in_turn > 0 {
            // As long as it gets on, the others' turn will come.
            self.acks_due = None;
        }
        match settled.iter().nth(in_turn).copied() {
            Some(first) if !last && now < self.acks_due(now) => self.to_ack = settled.split_off(&first),
            _ => (self.acks_since, self.acks_due) = (None, None),
        }
        let acks = ack_frames::frames(&settled, in_turn);
        let returns: Vec<_> = std::mem::take(&mut self.to_return).into_iter().collect();
        let consumers = settled.iter().chain(&returns).filter_map(|tag| self.outstanding.remove(tag)).collect();
        Frames { acks, returns, consumers }
    }

    /// When acknowledgements stop waiting for those before them.
    pub(super) fn acks_wait_until(&self) -> Option<Instant> {
        self.acks_due
    }

    /// The same for those that wait at `now`.
    fn acks_due(&mut self, now: Instant) -> Instant {
        let end = *self.acks_since.get_or_insert(now) + ACK_WAIT_MAX;
        *self.acks_due.get_or_insert(end.min(now + ACK_WAIT))
    }

    // Counting.

    /// How many are due, and how many are leased or on their way elsewhere, in this process.
    pub(super) fn counts(&self) -> (usize, usize) {
        let leaving = self.to_ack.len() + self.to_return.len();
        let held = self.outstanding.len().saturating_sub(self.buffer.len()).saturating_sub(leaving);
        (self.buffer.len(), held)
    }

    /// The queue was empty just now.
    pub(super) fn saw_empty(&mut self, now: SystemTime) {
        self.oldest = Some(now);
    }

    /// When the oldest due message was sent, as far as can be told without reading it.
    pub(super) fn oldest_sent_at(&mut self, now: SystemTime) -> SystemTime {
        let buffered = self.buffer.values().map(|held| held.envelope.sent_at).min();
        buffered.unwrap_or_else(|| *self.oldest.get_or_insert(now))
    }

    fn token(&self, receipt: &Receipt, now: Instant) -> Option<u64> {
        let (instance, token) = receipt.0.split_once('.')?;
        let (instance, token) = (u64::from_str_radix(instance, 16).ok()?, token.parse().ok()?);
        let (until, _) = self.leases.get(&token)?;
        // A lease that has ended is lost even if nobody has come to take the message back yet.
        (instance == self.instance && *until > now).then_some(token)
    }

    fn note_return(&mut self, held: &Held) {
        if self.returns.len() >= RETURNS_MAX {
            // A receive more than there was is shown for some: the lesser evil.
            self.returns.clear();
        }
        *self.returns.entry(held.envelope.id.clone()).or_default() += 1;
    }
}

/// Asks for messages as long as it lives.
pub(super) struct Asking<'a> {
    shared: &'a super::Shared,
    max: usize,
}

impl<'a> Asking<'a> {
    pub(super) fn new(shared: &'a super::Shared, max: usize) -> Self {
        super::lock(&shared.inbox).ask(max);
        shared.changed.notify_one();
        Self { shared, max }
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        super::lock(&self.shared.inbox).stop_asking(self.max, Instant::now());
        self.shared.changed.notify_one();
    }
}

/// The end of a lease that starts now.
pub(super) fn lease_end(now: Instant, lease: Duration) -> Instant {
    now + lease.min(super::WAIT_MAX)
}

#[cfg(test)]
mod tests;
