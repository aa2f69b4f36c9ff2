//! A queue in memory, for tests and examples: the same rules as the durable ones in one mutex. It forgets everything
//! with the process.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tokio::sync::Notify;
use tokio::time::Instant;
use uuid::Uuid;

use super::{Capabilities, Depth, Queue, QueueError, QueueOptions};
use crate::message::{Attributes, DeadLetter, Message, MessageId, Outgoing, Receipt};

/// A wait or delay longer than this is this long.
const WAIT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// A queue in memory. Cloning it is cheap and gives the same one.
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
    inner: Arc<Inner>,
}

struct Inner {
    name: String,
    options: QueueOptions,
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Default)]
struct State {
    /// Grows with each message, so that it orders them by age.
    last_number: u64,
    last_token: u64,
    live: HashMap<u64, Live>,
    /// The live messages by when they are due, then by age: the front is what to deliver next.
    due: BTreeSet<(Instant, u64)>,
    dead: BTreeMap<u64, Dead>,
}

struct Live {
    id: MessageId,
    body: Vec<u8>,
    attributes: Attributes,
    receives: u32,
    sent_at: SystemTime,
    expires_at: Instant,
    visible_at: Instant,
    token: Option<u64>,
}

struct Dead {
    letter: DeadLetter,
    expires_at: Instant,
}

impl MemoryQueue {
    /// An empty queue.
    pub fn new(name: impl Into<String>, options: QueueOptions) -> Self {
        let inner = Inner { name: name.into(), options, state: Mutex::default(), changed: Notify::new() };
        Self { inner: Arc::new(inner) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is due now, leased; or else when to look again.
    fn take(&self, max: usize) -> Result<Vec<Message>, Option<Instant>> {
        let now = Instant::now();
        let options = &self.inner.options;
        let mut state = self.state();
        state.dead.retain(|_, dead| dead.expires_at > now);
        let mut messages = Vec::new();
        while messages.len() < max {
            let Some(&(visible_at, number)) = state.due.first() else { break };
            if visible_at > now {
                break;
            }
            let Some(live) = state.live.get(&number) else { break };
            let receives = live.receives;
            if live.expires_at <= now {
                state.bury(number, "retention over".into(), true, options.retention);
            } else if options.receives_max.is_some_and(|max| receives >= max) {
                let reason = format!("received {receives} times without being settled");
                state.bury(number, reason, true, options.retention);
            } else {
                state.last_token += 1;
                let token = state.last_token;
                messages.extend(state.lease(number, token, now + options.lease));
            }
        }
        if messages.is_empty() { Err(state.due.first().map(|(visible_at, _)| *visible_at)) } else { Ok(messages) }
    }

    /// Applies `change` to each message whose lease the receipt still names.
    fn settle<'a, E: 'a>(
        &self,
        entries: impl Iterator<Item = (&'a Receipt, E)>,
        change: impl Fn(&mut State, u64, E),
    ) -> Vec<Result<(), QueueError>> {
        let mut state = self.state();
        let settle_one = |(receipt, extra): (&Receipt, E)| {
            let number = state.holder(receipt).ok_or(QueueError::LeaseLost)?;
            change(&mut state, number, extra);
            Ok(())
        };
        let answers = entries.map(settle_one).collect();
        drop(state);
        self.inner.changed.notify_waiters();
        answers
    }

    fn change_dead(&self, ids: &[MessageId], change: impl Fn(&mut State, Dead)) -> Vec<Result<(), QueueError>> {
        let mut state = self.state();
        let change_one = |id: &MessageId| {
            let number = state.dead_number(id).ok_or(QueueError::NotFound)?;
            let dead = state.dead.remove(&number).ok_or(QueueError::NotFound)?;
            change(&mut state, dead);
            Ok(())
        };
        let answers = ids.iter().map(change_one).collect();
        drop(state);
        self.inner.changed.notify_waiters();
        answers
    }
}

#[async_trait]
impl Queue for MemoryQueue {
    fn name(&self) -> &str {
        &self.inner.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            durable: false,
            ordered: true,
            fenced: true,
            shared: false,
            cancel_safe: true,
            request_carries: 1,
            body_bytes_max: self.inner.options.body_bytes_max,
            delay_max: WAIT_MAX,
        }
    }

    async fn send(&self, messages: &[Outgoing]) -> Vec<Result<MessageId, QueueError>> {
        let now = Instant::now();
        let options = &self.inner.options;
        let mut state = self.state();
        let send_one = |message: &Outgoing| {
            let (size, max) = (message.body.len(), options.body_bytes_max);
            if size > max {
                return Err(QueueError::TooLarge { size, max });
            }
            let id = MessageId(Uuid::now_v7().to_string());
            let visible_at = now + message.delay.min(WAIT_MAX);
            state.insert(Live {
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
        drop(state);
        self.inner.changed.notify_waiters();
        answers
    }

    async fn receive(&self, max: usize, wait: Duration) -> Result<Vec<Message>, QueueError> {
        let deadline = Instant::now() + wait.min(WAIT_MAX);
        loop {
            // Listening starts before looking, or a message sent between the two would be missed.
            let changed = self.inner.changed.notified();
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
        self.settle(receipts.iter().map(|receipt| (receipt, ())), |state, number, ()| drop(state.remove(number)))
    }

    async fn retry_after(&self, entries: &[(Receipt, Duration)]) -> Vec<Result<(), QueueError>> {
        let now = Instant::now();
        self.settle(entries.iter().map(|(receipt, delay)| (receipt, *delay)), |state, number, delay| {
            state.move_to(number, now + delay.min(WAIT_MAX), None);
        })
    }

    async fn bury(&self, entries: &[(Receipt, String)]) -> Vec<Result<(), QueueError>> {
        let retention = self.inner.options.retention;
        self.settle(entries.iter().map(|(receipt, reason)| (receipt, reason)), |state, number, reason| {
            let reason = if reason.is_empty() { "no reason given" } else { reason };
            state.bury(number, reason.to_owned(), false, retention);
        })
    }

    async fn extend(&self, receipts: &[Receipt], for_: Duration) -> Vec<Result<(), QueueError>> {
        let until = Instant::now() + for_.min(WAIT_MAX);
        self.settle(receipts.iter().map(|receipt| (receipt, ())), |state, number, ()| {
            let token = state.live.get(&number).and_then(|live| live.token);
            state.move_to(number, until, token);
        })
    }

    fn lease(&self) -> Duration {
        self.inner.options.lease
    }

    async fn depth(&self) -> Result<Depth, QueueError> {
        let now = Instant::now();
        let state = self.state();
        let count = |wanted: &dyn Fn(&Live) -> bool| state.live.values().filter(|live| wanted(live)).count() as u64;
        let oldest = state.live.values().filter(|live| live.visible_at <= now).map(|live| live.sent_at).min();
        Ok(Depth {
            ready: count(&|live| live.visible_at <= now),
            in_flight: count(&|live| live.visible_at > now && live.token.is_some()),
            delayed: count(&|live| live.visible_at > now && live.token.is_none()),
            dead: state.dead.len() as u64,
            oldest_age: oldest.map(|sent_at| sent_at.elapsed().unwrap_or_default()),
        })
    }

    async fn dead_letters(&self, after: Option<&MessageId>, max: usize) -> Result<Vec<DeadLetter>, QueueError> {
        let state = self.state();
        let place = match after {
            None => 0,
            Some(id) => state.dead_number(id).ok_or(QueueError::NotFound)?,
        };
        Ok(state.dead.range(place + 1..).take(max).map(|(_, dead)| dead.letter.clone()).collect())
    }

    async fn replay(&self, ids: &[MessageId], delay: Duration) -> Vec<Result<(), QueueError>> {
        let visible_at = Instant::now() + delay.min(WAIT_MAX);
        let expires_at = visible_at + self.inner.options.retention.min(WAIT_MAX);
        self.change_dead(ids, |state, dead| {
            let DeadLetter { id, body, attributes, sent_at, .. } = dead.letter;
            state.insert(Live { id, body, attributes, receives: 0, sent_at, expires_at, visible_at, token: None });
        })
    }

    async fn discard(&self, ids: &[MessageId]) -> Vec<Result<(), QueueError>> {
        self.change_dead(ids, |_, _| ())
    }
}

impl State {
    fn insert(&mut self, live: Live) {
        self.last_number += 1;
        self.due.insert((live.visible_at, self.last_number));
        self.live.insert(self.last_number, live);
    }

    fn remove(&mut self, number: u64) -> Option<Live> {
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
        if let Some(Live { id, body, attributes, receives, sent_at, .. }) = self.remove(number) {
            let buried_at = SystemTime::now();
            let letter = DeadLetter { id, body, attributes, reason, by_queue, receives, sent_at, buried_at };
            self.last_number += 1;
            let expires_at = Instant::now() + retention.min(WAIT_MAX);
            self.dead.insert(self.last_number, Dead { letter, expires_at });
        }
    }

    /// The message that the receipt's lease is on, unless it was settled or taken again since.
    fn holder(&self, receipt: &Receipt) -> Option<u64> {
        let (number, token) = receipt.0.split_once('.')?;
        let (number, token) = (number.parse().ok()?, token.parse().ok()?);
        let live = self.live.get(&number)?;
        (live.token == Some(token)).then_some(number)
    }

    fn dead_number(&self, id: &MessageId) -> Option<u64> {
        self.dead.iter().find(|(_, dead)| dead.letter.id == *id).map(|(number, _)| *number)
    }
}
