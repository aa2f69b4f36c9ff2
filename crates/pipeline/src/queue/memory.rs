//! A queue in memory, for tests and examples: the rules of the durable backends behind one mutex. Its messages end with
//! the process.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tokio::sync::Notify;
use tokio::time::Instant;
use uuid::Uuid;

use super::{Capabilities, Depth, NO_REASON, Queue, QueueError, QueueOptions, burial_reason, check_size};
use crate::lock::lock;
use crate::message::{Attributes, DeadLetter, Message, MessageId, Outgoing, Receipt};

/// Upper limit of waits and delays; longer ones are shortened to it.
const WAIT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// A queue in memory. Clones share the same queue.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// use pipeline::queue::memory::MemoryQueue;
/// use pipeline::{Outgoing, Queue, QueueOptions};
/// use std::time::Duration;
///
/// let queue = MemoryQueue::new("greetings", QueueOptions::default());
/// queue.send(&[Outgoing::new("hello")]).await;
/// assert_eq!(queue.receive(1, Duration::ZERO).await.unwrap()[0].body, b"hello");
/// # });
/// ```
#[derive(Clone)]
pub struct MemoryQueue {
    state: Arc<MemoryQueueState>,
}

struct MemoryQueueState {
    name: String,
    options: QueueOptions,
    table: Mutex<MessageTable>,
    changed: Notify,
}

#[derive(Default)]
struct MessageTable {
    /// Grows with each message and each burial, so it orders both.
    last_number: u64,
    last_token: u64,
    live: HashMap<u64, LiveMessage>,
    /// Live messages in delivery order: by due time, then by age.
    due: BTreeSet<(Instant, u64)>,
    dead: BTreeMap<u64, DeadMessage>,
}

struct LiveMessage {
    id: MessageId,
    body: Vec<u8>,
    attributes: Attributes,
    receives: u32,
    sent_at: SystemTime,
    expires_at: Instant,
    visible_at: Instant,
    token: Option<u64>,
}

struct DeadMessage {
    letter: DeadLetter,
    expires_at: Instant,
}

impl MemoryQueue {
    /// An empty queue.
    pub fn new(name: impl Into<String>, options: QueueOptions) -> Self {
        let state = MemoryQueueState { name: name.into(), options, table: Mutex::default(), changed: Notify::new() };
        Self { state: Arc::new(state) }
    }

    fn table(&self) -> MutexGuard<'_, MessageTable> {
        lock(&self.state.table)
    }

    /// Leases the messages that are due. `Err` if none is: when the next one becomes due, if there is any.
    fn take(&self, max: usize) -> Result<Vec<Message>, Option<Instant>> {
        let now = Instant::now();
        let options = &self.state.options;
        let mut table = self.table();
        table.dead.retain(|_, dead| dead.expires_at > now);
        let mut messages = Vec::new();
        while messages.len() < max {
            let Some(&(visible_at, number)) = table.due.first() else { break };
            if visible_at > now {
                break;
            }
            let Some(live) = table.live.get(&number) else { break };
            if let Some(reason) = burial_reason(live.expires_at <= now, live.receives, options.receives_max) {
                table.bury(number, reason, true, options.retention);
            } else {
                table.last_token += 1;
                let token = table.last_token;
                messages.extend(table.lease(number, token, now + options.lease));
            }
        }
        if messages.is_empty() { Err(table.due.first().map(|(visible_at, _)| *visible_at)) } else { Ok(messages) }
    }

    /// Applies `change` to each message whose current lease has this receipt.
    fn settle<'a, E: 'a>(
        &self,
        entries: impl Iterator<Item = (&'a Receipt, E)>,
        change: impl Fn(&mut MessageTable, u64, E),
    ) -> Vec<Result<(), QueueError>> {
        let mut table = self.table();
        let settle_one = |(receipt, extra): (&Receipt, E)| {
            let number = table.leased_number(receipt).ok_or(QueueError::LeaseLost)?;
            change(&mut table, number, extra);
            Ok(())
        };
        let answers = entries.map(settle_one).collect();
        drop(table);
        self.state.changed.notify_waiters();
        answers
    }

    fn change_dead(
        &self,
        ids: &[MessageId],
        change: impl Fn(&mut MessageTable, DeadMessage),
    ) -> Vec<Result<(), QueueError>> {
        let mut table = self.table();
        let change_one = |id: &MessageId| {
            let number = table.dead_number(id).ok_or(QueueError::NotFound)?;
            let dead = table.dead.remove(&number).ok_or(QueueError::NotFound)?;
            change(&mut table, dead);
            Ok(())
        };
        let answers = ids.iter().map(change_one).collect();
        drop(table);
        self.state.changed.notify_waiters();
        answers
    }
}

#[async_trait]
impl Queue for MemoryQueue {
    fn name(&self) -> &str {
        &self.state.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            durable: false,
            ordered: true,
            fenced: true,
            shared: false,
            cancel_safe: true,
            messages_per_request: 1,
            dead_letters_per_read: 1,
            body_bytes_max: self.state.options.body_bytes_max,
            delay_max: WAIT_MAX,
        }
    }

    async fn send(&self, messages: &[Outgoing]) -> Vec<Result<MessageId, QueueError>> {
        let now = Instant::now();
        let options = &self.state.options;
        let mut table = self.table();
        let send_one = |message: &Outgoing| {
            check_size(message.body.len(), options.body_bytes_max)?;
            let id = MessageId(Uuid::now_v7().to_string());
            let visible_at = now + message.delay.min(WAIT_MAX);
            table.insert(LiveMessage {
                id: id.clone(),
                body: message.body.clone(),
                attributes: message.attributes.clone(),
                receives: 0,
                sent_at: SystemTime::now(),
                expires_at: visible_at + options.retention.min(WAIT_MAX),
                visible_at,
                token: None,
            });
            Ok(id)
        };
        let answers = messages.iter().map(send_one).collect();
        drop(table);
        self.state.changed.notify_waiters();
        answers
    }

    async fn receive(&self, max: usize, wait: Duration) -> Result<Vec<Message>, QueueError> {
        let deadline = Instant::now() + wait.min(WAIT_MAX);
        loop {
            // Subscribe before looking, or a message sent between the two would be missed.
            let changed = self.state.changed.notified();
            let next = match self.take(max) {
                Ok(messages) => return Ok(messages),
                Err(next) => next,
            };
            if max == 0 || Instant::now() >= deadline {
                return Ok(Vec::new());
            }
            tokio::select! {
                () = changed => {}
                () = tokio::time::sleep_until(next.map_or(deadline, |next| next.min(deadline))) => {}
            }
        }
    }

    async fn ack(&self, receipts: &[Receipt]) -> Vec<Result<(), QueueError>> {
        self.settle(receipts.iter().map(|receipt| (receipt, ())), |table, number, ()| drop(table.remove(number)))
    }

    async fn retry_after(&self, entries: &[(Receipt, Duration)]) -> Vec<Result<(), QueueError>> {
        let now = Instant::now();
        self.settle(entries.iter().map(|(receipt, delay)| (receipt, *delay)), |table, number, delay| {
            table.move_to(number, now + delay.min(WAIT_MAX), None);
        })
    }

    async fn bury(&self, entries: &[(Receipt, String)]) -> Vec<Result<(), QueueError>> {
        let retention = self.state.options.retention;
        self.settle(entries.iter().map(|(receipt, reason)| (receipt, reason)), |table, number, reason| {
            let reason = if reason.is_empty() { NO_REASON } else { reason };
            table.bury(number, reason.to_owned(), false, retention);
        })
    }

    async fn extend(&self, receipts: &[Receipt], duration: Duration) -> Vec<Result<(), QueueError>> {
        let until = Instant::now() + duration.min(WAIT_MAX);
        self.settle(receipts.iter().map(|receipt| (receipt, ())), |table, number, ()| {
            let token = table.live.get(&number).and_then(|live| live.token);
            table.move_to(number, until, token);
        })
    }

    fn lease(&self) -> Duration {
        self.state.options.lease
    }

    async fn depth(&self) -> Result<Depth, QueueError> {
        let now = Instant::now();
        let table = self.table();
        let count =
            |wanted: &dyn Fn(&LiveMessage) -> bool| table.live.values().filter(|live| wanted(live)).count() as u64;
        let oldest = table.live.values().filter(|live| live.visible_at <= now).map(|live| live.sent_at).min();
        Ok(Depth {
            ready: count(&|live| live.visible_at <= now),
            in_flight: count(&|live| live.visible_at > now && live.token.is_some()),
            delayed: count(&|live| live.visible_at > now && live.token.is_none()),
            dead: table.dead.len() as u64,
            oldest_age: oldest.map(|sent_at| sent_at.elapsed().unwrap_or_default()),
        })
    }

    async fn dead_letters(&self, after: Option<&MessageId>, max: usize) -> Result<Vec<DeadLetter>, QueueError> {
        let table = self.table();
        let place = match after {
            None => 0,
            Some(id) => table.dead_number(id).ok_or(QueueError::NotFound)?,
        };
        Ok(table.dead.range(place + 1..).take(max).map(|(_, dead)| dead.letter.clone()).collect())
    }

    async fn replay(&self, ids: &[MessageId], delay: Duration) -> Vec<Result<(), QueueError>> {
        let visible_at = Instant::now() + delay.min(WAIT_MAX);
        let expires_at = visible_at + self.state.options.retention.min(WAIT_MAX);
        self.change_dead(ids, |table, dead| {
            let DeadLetter { id, body, attributes, sent_at, .. } = dead.letter;
            table.insert(LiveMessage {
                id,
                body,
                attributes,
                receives: 0,
                sent_at,
                expires_at,
                visible_at,
                token: None,
            });
        })
    }

    async fn discard(&self, ids: &[MessageId]) -> Vec<Result<(), QueueError>> {
        self.change_dead(ids, |_, _| ())
    }
}

impl MessageTable {
    fn insert(&mut self, live: LiveMessage) {
        self.last_number += 1;
        self.due.insert((live.visible_at, self.last_number));
        self.live.insert(self.last_number, live);
    }

    fn remove(&mut self, number: u64) -> Option<LiveMessage> {
        let live = self.live.remove(&number)?;
        self.due.remove(&(live.visible_at, number));
        Some(live)
    }

    fn move_to(&mut self, number: u64, visible_at: Instant, token: Option<u64>) {
        if let Some(live) = self.live.get_mut(&number) {
            self.due.remove(&(live.visible_at, number));
            self.due.insert((visible_at, number));
            live.visible_at = visible_at;
            live.token = token;
        }
    }

    fn lease(&mut self, number: u64, token: u64, until: Instant) -> Option<Message> {
        self.move_to(number, until, Some(token));
        let live = self.live.get_mut(&number)?;
        live.receives += 1;
        Some(Message {
            id: live.id.clone(),
            body: live.body.clone(),
            attributes: live.attributes.clone(),
            receives: live.receives,
            sent_at: live.sent_at,
            receipt: Receipt(format!("{number}.{token}")),
        })
    }

    fn bury(&mut self, number: u64, reason: String, by_queue: bool, retention: Duration) {
        if let Some(LiveMessage { id, body, attributes, receives, sent_at, .. }) = self.remove(number) {
            let buried_at = SystemTime::now();
            let letter = DeadLetter { id, body, attributes, reason, by_queue, receives, sent_at, buried_at };
            self.last_number += 1;
            let expires_at = Instant::now() + retention.min(WAIT_MAX);
            self.dead.insert(self.last_number, DeadMessage { letter, expires_at });
        }
    }

    /// The leased message's number; `None` if it was settled or received again since.
    fn leased_number(&self, receipt: &Receipt) -> Option<u64> {
        let (number, token) = receipt.0.split_once('.')?;
        let (number, token) = (number.parse().ok()?, token.parse().ok()?);
        let live = self.live.get(&number)?;
        (live.token == Some(token)).then_some(number)
    }

    fn dead_number(&self, id: &MessageId) -> Option<u64> {
        self.dead.iter().find(|(_, dead)| dead.letter.id == *id).map(|(number, _)| *number)
    }
}
