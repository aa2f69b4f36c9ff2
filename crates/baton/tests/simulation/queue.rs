//! The simulated queue: leases, redelivery, receive counts, dead letters; it may lose, repeat and refuse messages.
//!
//! The pipeline's own loop is not part of the simulation: the scheduler receives messages, hands them to the lane's
//! handler and settles them as the pipeline does.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use baton::relay::state::message::TransactionMessage;
use pipeline::{
    Attributes, Capabilities, DeadLetter, Depth, Message, MessageId, Outcome, Outgoing, Queue, QueueError, Receipt,
};

use super::setup::Fault;
use super::world::{Sim, World, note};

const LEASE: i64 = 20_000;
const RECEIVES_MAX: u32 = 3;

/// A message in the queue.
pub struct Queued {
    pub id: u32,
    pub body: Vec<u8>,
    pub receives: u32,
    pub visible_at: i64,
    pub sent_at: i64,
    /// The lease, and the run of the process that holds it.
    pub lease: Option<(u32, u32)>,
}

/// A message in the dead-letter queue.
pub struct Buried {
    pub id: u32,
    pub body: Vec<u8>,
    pub by_queue: bool,
    pub buried_at: i64,
    pub reason: String,
}

/// The right to settle one delivery.
#[derive(Debug, Clone, Copy)]
pub struct Delivery {
    pub message: u32,
    pub lease: u32,
    pub receives: u32,
}

pub struct SimQueue {
    pub sim: Sim,
}

fn time(ms: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(ms as u64)
}

fn id(message: u32) -> MessageId {
    MessageId(format!("m{message}"))
}

#[async_trait]
impl Queue for SimQueue {
    fn name(&self) -> &str {
        "simulated"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            durable: true,
            ordered: false,
            fenced: true,
            shared: true,
            cancel_safe: true,
            messages_per_request: 1,
            dead_letters_per_read: 1,
            body_bytes_max: usize::MAX,
            delay_max: Duration::MAX,
        }
    }

    async fn send(&self, messages: &[Outgoing]) -> Vec<Result<MessageId, QueueError>> {
        self.sim.turn().await;
        let mut world = self.sim.w();
        let fate = if world.queue_away && !world.calm { world.rng.below(4) } else { 3 };
        let send = |message: &Outgoing| {
            let stored = match fate {
                0 => return Err(QueueError::Unavailable("simulated".into())),
                1 => None,
                _ => Some(world.publish(&message.body, message.delay.as_millis() as i64)),
            };
            match (fate, stored) {
                (3, Some(message)) => Ok(id(message)),
                _ => Err(QueueError::OutcomeUnknown("simulated".into())),
            }
        };
        messages.iter().map(send).collect()
    }

    async fn receive(&self, _max: usize, _wait: Duration) -> Result<Vec<Message>, QueueError> {
        Ok(Vec::new())
    }

    async fn ack(&self, receipts: &[Receipt]) -> Vec<Result<(), QueueError>> {
        receipts.iter().map(|_| Err(QueueError::LeaseLost)).collect()
    }

    async fn retry_after(&self, entries: &[(Receipt, Duration)]) -> Vec<Result<(), QueueError>> {
        entries.iter().map(|_| Err(QueueError::LeaseLost)).collect()
    }

    async fn bury(&self, entries: &[(Receipt, String)]) -> Vec<Result<(), QueueError>> {
        entries.iter().map(|_| Err(QueueError::LeaseLost)).collect()
    }

    async fn extend(&self, receipts: &[Receipt], _for: Duration) -> Vec<Result<(), QueueError>> {
        receipts.iter().map(|_| Err(QueueError::LeaseLost)).collect()
    }

    fn lease(&self) -> Duration {
        Duration::from_millis(LEASE as u64)
    }

    async fn depth(&self) -> Result<Depth, QueueError> {
        self.sim.turn().await;
        let world = self.sim.w();
        let now = world.now;
        let due = world.queue.iter().filter(|message| message.visible_at <= now);
        let oldest_age = due.map(|message| Duration::from_millis((now - message.sent_at) as u64)).max();
        Ok(Depth { oldest_age, ..Depth::default() })
    }

    async fn dead_letters(&self, after: Option<&MessageId>, max: usize) -> Result<Vec<DeadLetter>, QueueError> {
        self.sim.turn().await;
        let world = self.sim.w();
        let from = match after {
            None => 0,
            Some(after) => 1 + world.dead.iter().position(|dead| id(dead.id) == *after).ok_or(QueueError::NotFound)?,
        };
        let letter = |dead: &Buried| DeadLetter {
            id: id(dead.id),
            body: dead.body.clone(),
            attributes: Attributes::new(),
            reason: dead.reason.clone(),
            by_queue: dead.by_queue,
            receives: 0,
            sent_at: time(dead.buried_at),
            buried_at: time(dead.buried_at),
        };
        Ok(world.dead[from..].iter().take(max).map(letter).collect())
    }

    async fn replay(&self, ids: &[MessageId], delay: Duration) -> Vec<Result<(), QueueError>> {
        self.sim.turn().await;
        let mut world = self.sim.w();
        let replay = |wanted: &MessageId| {
            let position = world.dead.iter().position(|dead| id(dead.id) == *wanted).ok_or(QueueError::NotFound)?;
            let Buried { id, body, .. } = world.dead.remove(position);
            let now = world.now;
            world.counters.put_back += 1;
            note!(world, "queue: m{id} is put back");
            let visible_at = now + delay.as_millis() as i64;
            world.queue.push(Queued { id, body, receives: 0, visible_at, sent_at: now, lease: None });
            Ok(())
        };
        ids.iter().map(replay).collect()
    }

    async fn discard(&self, ids: &[MessageId]) -> Vec<Result<(), QueueError>> {
        self.sim.turn().await;
        let mut world = self.sim.w();
        let discard = |wanted: &MessageId| {
            let position = world.dead.iter().position(|dead| id(dead.id) == *wanted).ok_or(QueueError::NotFound)?;
            world.dead.remove(position);
            Ok(())
        };
        ids.iter().map(discard).collect()
    }
}

impl World {
    pub fn publish(&mut self, body: &[u8], delay: i64) -> u32 {
        let id = self.new_id();
        let now = self.now;
        note!(self, "queue: m{id} about {}", self.subject(body));
        let message =
            Queued { id, body: body.to_vec(), receives: 0, visible_at: now + delay, sent_at: now, lease: None };
        self.queue.push(message);
        id
    }

    /// The row that a message is about.
    pub fn row_of(&self, body: &[u8]) -> Option<usize> {
        TransactionMessage::parse(body).ok().and_then(|message| self.index_of(message.transaction_id()))
    }

    fn subject(&self, body: &[u8]) -> String {
        self.row_of(body).map_or_else(|| "no row".to_owned(), |index| format!("t{index}"))
    }

    /// Whether a process keeps this lease by extending it.
    pub fn is_kept(&self, message: &Queued) -> bool {
        message.lease.is_some_and(|(_, run)| {
            self.processes.iter().any(|process| process.run == run && process.alive && process.frozen_until <= self.now)
        })
    }

    /// When the next message can be received; `None`: there is none.
    pub fn next_message_at(&self) -> Option<i64> {
        self.queue.iter().filter(|message| !self.is_kept(message)).map(|message| message.visible_at).min()
    }

    /// Takes a message that is due.
    pub fn receive(&mut self, run: u32) -> Option<(Delivery, Message)> {
        let now = self.now;
        let mut position = 0;
        while position < self.queue.len() {
            let message = &self.queue[position];
            if message.visible_at > now {
                position += 1;
                continue;
            }
            if self.is_kept(message) {
                self.queue[position].visible_at = now + LEASE;
                continue;
            }
            if message.receives >= RECEIVES_MAX {
                let Queued { id, body, .. } = self.queue.remove(position);
                note!(self, "queue: m{id} about {} is buried: received too often", self.subject(&body));
                let reason = "received too often".to_owned();
                self.dead.push(Buried { id, body, by_queue: true, buried_at: now, reason });
                continue;
            }
            let lease = self.new_id();
            // An at-least-once queue may deliver a message twice.
            let twice = self.has(Fault::Duplicate) && self.rng.one_in(12);
            let queued = &mut self.queue[position];
            queued.receives += 1;
            queued.lease = Some((lease, if twice { 0 } else { run }));
            queued.visible_at = if twice { now } else { now + LEASE };
            let delivery = Delivery { message: queued.id, lease, receives: queued.receives };
            let message = Message {
                id: id(queued.id),
                body: queued.body.clone(),
                attributes: Attributes::new(),
                receives: queued.receives,
                sent_at: time(queued.sent_at),
                receipt: Receipt(lease.to_string()),
            };
            note!(self, "queue: delivers m{} about {}", delivery.message, self.subject(&message.body));
            return Some((delivery, message));
        }
        None
    }

    pub fn settle(&mut self, delivery: Delivery, outcome: &Outcome) {
        let held = |message: &Queued| {
            message.id == delivery.message && message.lease.is_some_and(|(lease, _)| lease == delivery.lease)
        };
        let Some(position) = self.queue.iter().position(held) else {
            note!(self, "  m{}: the lease was lost", delivery.message);
            return;
        };
        note!(self, "  m{}: {outcome:?}", delivery.message);
        match outcome {
            Outcome::Done => drop(self.queue.remove(position)),
            Outcome::Retry { after, .. } => {
                self.queue[position].visible_at = self.now + after.as_millis() as i64;
                self.queue[position].lease = None;
            }
            Outcome::Dead { reason } => {
                let Queued { id, body, .. } = self.queue.remove(position);
                let reason = reason.clone();
                self.dead.push(Buried { id, body, by_queue: false, buried_at: self.now, reason });
            }
        }
    }
}
