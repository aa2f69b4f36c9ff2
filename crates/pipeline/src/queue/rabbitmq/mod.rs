//! A queue on RabbitMQ (3.10 and later), over AMQP 0-9-1.
//!
//! RabbitMQ delivers messages and accepts acknowledgements. This backend adds leases, receive counts, delays and dead
//! letters with reasons:
//!
//! - a **lease** is a timer in this process. When it ends, the receipt is lost; the message is published again with one
//!   more receive, and then the old delivery is acknowledged. If the process dies or freezes, the heartbeat ends its
//!   connection and the broker redelivers the message.
//! - a **receipt** belongs to one connection. After a reconnect, old receipts are lost leases: a delivery is acknowledged
//!   only on its own connection.
//! - **moving** a message (retry, burial, replay, ended lease) always means: publish, wait for the confirm, acknowledge. A
//!   crash in between leaves two copies, never none.
//! - **receives** are counted in a header, plus the broker's count of deliveries to processes that died. A classic queue
//!   only reports that there was an earlier delivery. Messages that a process had buffered when it stopped count as
//!   received.
//! - a **delay** is a queue with a message TTL that dead-letters to the main queue (`delay_queue`).
//!
//! AMQP does not offer everything that [`Depth`] reports: `in_flight` counts this process only, `delayed` covers the delay
//! queues that this process has used, and `oldest_age` is estimated from received messages, because reading a message
//! means receiving it. The broker does not confirm acknowledgements: one that was answered `Ok` is lost if the connection
//! breaks at that time.
//!
//! `session` maintains the connections, `consume` receives and acknowledges, `publisher` publishes with confirms, `send`
//! builds and moves messages, `inbox` holds deliveries and leases, `dead_letters` reads the dead-letter queue.

mod ack_frames;
mod consume;
mod dead_letters;
mod delay_queue;
mod inbox;
mod options;
#[cfg(feature = "testing")]
mod panics;
mod publisher;
mod send;
mod session;
mod topology;
mod wire;

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use lapin::ErrorKind;
use lapin::options::QueueDeleteOptions;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::{BoxError, Capabilities, Depth, Queue, QueueError};
use crate::lock::lock;
use crate::message::{DeadLetter, Message, MessageId, Outgoing, Receipt};
use dead_letters::DeadLetterChange;
use inbox::{Inbox, ReceiveDemand, lease_end};
use send::Destination;
use session::{ConnectFailure, Session};
use wire::{Burial, WireMessage};

pub use dead_letters::{DEAD_LETTERS_READ_BYTES_MAX, DEAD_LETTERS_READ_MAX};
pub use options::RabbitMqOptions;
#[cfg(feature = "testing")]
pub use panics::SessionPart;
pub use topology::{Delays, QueueType, Topology};

/// Upper limit of waits, leases and delays; longer ones are shortened to it.
const WAIT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);
/// Shortest wait of a receive: whether a message is due is known only after a round trip to the broker.
const RECEIVE_WAIT_MIN: Duration = Duration::from_millis(100);

/// A queue on RabbitMQ. Clones share the same connections; dropping the last clone closes them.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use pipeline::queue::rabbitmq::{RabbitMqOptions, RabbitMqQueue, Topology};
/// use pipeline::{Outgoing, Queue, QueueOptions};
///
/// let topology = Topology::named("greetings");
/// let options = RabbitMqOptions::new("amqp://guest:guest@127.0.0.1:5672/%2f", topology, QueueOptions::default());
/// let queue = RabbitMqQueue::connect(options).await?;
/// queue.send(&[Outgoing::new("hello")]).await;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct RabbitMqQueue {
    state: Arc<RabbitMqState>,
    _stop: Arc<DropGuard>,
}

/// The state of the connection to the broker.
enum ConnectionState {
    Connecting,
    Failed(ConnectFailure),
    Up(Arc<Session>),
}

struct RabbitMqState {
    options: RabbitMqOptions,
    inbox: Mutex<Inbox>,
    /// Wakes receivers.
    arrived: Notify,
    /// Wakes the consuming task.
    changed: Notify,
    connected: watch::Sender<ConnectionState>,
    /// The delay queues that this process has used.
    delay_queues: Mutex<BTreeSet<String>>,
    /// Held while dead letters are read: concurrent readers would each see a part.
    reading_lock: tokio::sync::Mutex<()>,
    /// System time and monotonic time at the start, for a clock that does not follow steps of the system clock.
    started: (SystemTime, Instant),
    tasks: TaskTracker,
    stop: CancellationToken,
    #[cfg(feature = "testing")]
    panics: panics::RequestedPanics,
}

impl RabbitMqQueue {
    /// Connects and declares the queues. Reconnects automatically afterwards.
    pub async fn connect(options: RabbitMqOptions) -> Result<Self, QueueError> {
        let stop = CancellationToken::new();
        let instance = Uuid::now_v7().as_u64_pair().1;
        let state = Arc::new(RabbitMqState {
            inbox: Mutex::new(Inbox::new(instance)),
            arrived: Notify::new(),
            changed: Notify::new(),
            connected: watch::Sender::new(ConnectionState::Connecting),
            delay_queues: Mutex::default(),
            reading_lock: tokio::sync::Mutex::default(),
            started: (SystemTime::now(), Instant::now()),
            tasks: TaskTracker::new(),
            stop: stop.clone(),
            #[cfg(feature = "testing")]
            panics: panics::RequestedPanics::default(),
            options,
        });
        let this = Self { _stop: Arc::new(stop.drop_guard()), state };
        let mut connected = this.state.connected.subscribe();
        this.state.tasks.spawn(session::maintain(Arc::clone(&this.state)));
        let first = connected.wait_for(|connected| !matches!(connected, ConnectionState::Connecting)).await;
        match &*first.map_err(|error| QueueError::Unavailable(error.into()))? {
            ConnectionState::Failed(failure) => Err(failure.error()),
            _ => Ok(this),
        }
    }

    /// Closes the connections in order, after pending acknowledgements. The broker redelivers leased and buffered messages.
    pub async fn close(&self) {
        self.state.stop.cancel();
        self.state.tasks.close();
        self.state.tasks.wait().await;
    }

    /// Deletes the queues with their messages, and the delay queues that this process has used.
    pub async fn delete(&self) -> Result<(), QueueError> {
        let session = self.state.session()?;
        let topology = &self.state.options.topology;
        let mut names: Vec<_> = lock(&self.state.delay_queues).iter().cloned().collect();
        if let Delays::Fixed { queue, .. } = &topology.delays {
            names.push(queue.clone());
        }
        // Delay queues first, because they dead-letter to the main queue; then the main queue, which dead-letters to the
        // last one.
        names.extend([topology.queue.clone(), topology.dead_queue.clone()]);
        for name in names {
            let deleted = self.state.with_timeout(async {
                let channel = session.channel().await?;
                channel.queue_delete(name.into(), QueueDeleteOptions::default()).await?;
                channel.close(200, "done".into()).await
            });
            deleted.await?;
        }
        Ok(())
    }

    /// Moves leased messages: publishes each as changed by `change`, then acknowledges the old delivery.
    async fn move_leased<E: Send + 'static>(
        &self,
        entries: Vec<(Receipt, E)>,
        change: fn(&mut WireMessage, &E) -> Destination,
    ) -> Vec<Result<(), QueueError>> {
        let now = Instant::now();
        let taken: Vec<_> = {
            let mut inbox = lock(&self.state.inbox);
            entries.into_iter().map(|(receipt, extra)| (inbox.take_lease(&receipt, now), extra)).collect()
        };
        let moves = taken.into_iter().map(|(taken, extra)| async move {
            let taken = taken.ok_or(QueueError::LeaseLost)?;
            let mut message = WireMessage::clone(&taken.held.message);
            message.receives = taken.held.receives.saturating_add(1);
            message.ensure_own_id();
            let destination = change(&mut message, &extra);
            let state = Arc::clone(&self.state);
            // In a task: the delivery has left the inbox, so the move must complete even if the caller drops its future.
            let moving =
                self.state.tasks.spawn(async move { state.publish_then_ack(taken, &message, destination).await });
            moving.await.unwrap_or_else(|error| Err(QueueError::OutcomeUnknown(error.into())))
        });
        futures::future::join_all(moves).await
    }

    /// Finds dead letters by id and applies `change` to each before it is removed.
    async fn change_dead(&self, ids: &[MessageId], change: DeadLetterChange) -> Vec<Result<(), QueueError>> {
        if ids.is_empty() {
            return Vec::new();
        }
        match self.state.change_dead(ids, change).await {
            Ok(answers) => answers,
            Err(error) => {
                // Some letters may have been changed, so the outcome is unknown for all.
                let error = Arc::new(error);
                ids.iter().map(|_| Err(QueueError::OutcomeUnknown(Box::new(Arc::clone(&error))))).collect()
            }
        }
    }
}

#[async_trait]
impl Queue for RabbitMqQueue {
    fn name(&self) -> &str {
        self.state.name()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            durable: true,
            // A quorum queue may requeue returned messages behind newer ones.
            ordered: self.state.options.topology.queue_type == QueueType::Classic,
            fenced: true,
            shared: true,
            cancel_safe: true,
            messages_per_request: 1,
            dead_letters_per_read: DEAD_LETTERS_READ_MAX,
            body_bytes_max: self.state.options.queue.body_bytes_max,
            delay_max: WAIT_MAX,
        }
    }

    async fn send(&self, messages: &[Outgoing]) -> Vec<Result<MessageId, QueueError>> {
        let deadline = self.state.deadline();
        let mut started: Vec<Result<_, QueueError>> = Vec::with_capacity(messages.len());
        for message in messages {
            // Publish in order; the confirms may arrive in any order.
            let start = async {
                let (message, delay) = self.state.new_message(message)?;
                let pending = self.state.start(&message, delay, deadline).await?;
                Ok((message.id, pending))
            };
            started.push(start.await);
        }
        let confirms = started.into_iter().map(|started| async {
            let (id, pending) = started?;
            self.state.confirmed(pending).await.map(|()| id)
        });
        futures::future::join_all(confirms).await
    }

    async fn receive(&self, max: usize, wait: Duration) -> Result<Vec<Message>, QueueError> {
        if max == 0 {
            return Ok(Vec::new());
        }
        let state = &*self.state;
        let deadline = Instant::now() + wait.clamp(RECEIVE_WAIT_MIN, WAIT_MAX);
        // Without a connection, wait for a reconnect at most as long as any call may take.
        let give_up_at = deadline.min(Instant::now() + state.options.timeout);
        let mut demand = None;
        loop {
            // Subscribe before looking, or an arrival between the two would be missed.
            let mut arrived = std::pin::pin!(state.arrived.notified());
            arrived.as_mut().enable();
            let now = Instant::now();
            let (connected, batching_until) = {
                let mut inbox = lock(&state.inbox);
                let batching_until = inbox.batching_until(max, now).filter(|until| *until < deadline);
                if batching_until.is_none() {
                    let messages = inbox.take(max, now, state.options.queue.lease);
                    if !messages.is_empty() {
                        drop(inbox);
                        state.changed.notify_one();
                        return Ok(messages);
                    }
                }
                (inbox.connected(), batching_until)
            };
            if !connected && now >= give_up_at {
                return Err(not_connected());
            }
            if now >= deadline {
                return Ok(Vec::new());
            }
            demand.get_or_insert_with(|| ReceiveDemand::new(state, max));
            let look_again = batching_until.unwrap_or(if connected { deadline } else { give_up_at });
            tokio::select! {
                () = arrived => {}
                () = tokio::time::sleep_until(look_again) => {}
            }
        }
    }

    async fn ack(&self, receipts: &[Receipt]) -> Vec<Result<(), QueueError>> {
        let now = Instant::now();
        let mut inbox = lock(&self.state.inbox);
        // The broker does not confirm acknowledgements, so there is nothing to wait for.
        let settle = |receipt| inbox.take_lease(receipt, now).is_some_and(|taken| inbox.settle(&taken));
        let settled: Vec<bool> = receipts.iter().map(settle).collect();
        drop(inbox);
        self.state.changed.notify_one();
        settled.into_iter().map(|held| if held { Ok(()) } else { Err(QueueError::LeaseLost) }).collect()
    }

    async fn retry_after(&self, entries: &[(Receipt, Duration)]) -> Vec<Result<(), QueueError>> {
        self.move_leased(entries.to_vec(), |_, delay| Destination::Queue((*delay).min(WAIT_MAX))).await
    }

    async fn bury(&self, entries: &[(Receipt, String)]) -> Vec<Result<(), QueueError>> {
        self.move_leased(entries.to_vec(), |message, reason| {
            message.burial = Some(Burial { reason: reason.clone(), by_queue: false, at: SystemTime::now() });
            Destination::DeadLetters
        })
        .await
    }

    async fn extend(&self, receipts: &[Receipt], duration: Duration) -> Vec<Result<(), QueueError>> {
        let now = Instant::now();
        let mut inbox = lock(&self.state.inbox);
        let extend =
            |receipt| inbox.extend(receipt, lease_end(now, duration), now).then_some(()).ok_or(QueueError::LeaseLost);
        let answers = receipts.iter().map(extend).collect();
        drop(inbox);
        self.state.changed.notify_one();
        answers
    }

    fn lease(&self) -> Duration {
        self.state.options.queue.lease
    }

    async fn depth(&self) -> Result<Depth, QueueError> {
        self.state.depth().await
    }

    async fn dead_letters(&self, after: Option<&MessageId>, max: usize) -> Result<Vec<DeadLetter>, QueueError> {
        self.state.dead_letters(after, max).await
    }

    async fn replay(&self, ids: &[MessageId], delay: Duration) -> Vec<Result<(), QueueError>> {
        self.change_dead(ids, DeadLetterChange::Replay(delay.min(WAIT_MAX))).await
    }

    async fn discard(&self, ids: &[MessageId]) -> Vec<Result<(), QueueError>> {
        self.change_dead(ids, DeadLetterChange::Discard).await
    }

    async fn close(&self) {
        RabbitMqQueue::close(self).await;
    }
}

impl RabbitMqState {
    fn name(&self) -> &str {
        &self.options.topology.queue
    }

    fn session(&self) -> Result<Arc<Session>, QueueError> {
        match &*self.connected.borrow() {
            ConnectionState::Up(session) => Ok(Arc::clone(session)),
            ConnectionState::Connecting => Err(not_connected()),
            ConnectionState::Failed(failure) => Err(failure.error()),
        }
    }

    /// Limits a call to [`RabbitMqOptions::timeout`].
    async fn with_timeout<T>(&self, call: impl Future<Output = lapin::Result<T>>) -> Result<T, QueueError> {
        match tokio::time::timeout(self.options.timeout, call).await {
            Ok(result) => result.map_err(|error| QueueError::Unavailable(error.into())),
            Err(late) => Err(QueueError::Unavailable(late.into())),
        }
    }

    async fn depth(&self) -> Result<Depth, QueueError> {
        let session = self.session()?;
        let topology = &self.options.topology;
        let [ready, dead] =
            [&topology.queue, &topology.dead_queue].map(|queue| self.with_timeout(count(&session, queue)));
        let (ready, dead) = (ready.await?.unwrap_or(0), dead.await?.unwrap_or(0));
        let mut delayed = 0;
        let mut queues: Vec<_> = lock(&self.delay_queues).iter().cloned().collect();
        if let Delays::Fixed { queue, .. } = &topology.delays {
            queues.push(queue.clone());
        }
        for queue in queues {
            match self.with_timeout(count(&session, &queue)).await? {
                Some(waiting) => delayed += waiting,
                None => drop(lock(&self.delay_queues).remove(&queue)),
            }
        }
        let mut inbox = lock(&self.inbox);
        let (buffered, in_flight) = inbox.counts();
        let ready = ready + buffered;
        let now = SystemTime::now();
        if ready == 0 {
            inbox.observed_empty(now);
        }
        let oldest_age = (ready > 0).then(|| now.duration_since(inbox.oldest_sent_at(now)).unwrap_or_default());
        let [ready, in_flight, delayed, dead] = [ready, in_flight, delayed, dead].map(|count| count as u64);
        Ok(Depth { ready, in_flight, delayed, dead, oldest_age })
    }
}

/// Messages that are due in the queue; `None` if the queue does not exist.
async fn count(session: &Session, queue: &str) -> lapin::Result<Option<usize>> {
    let channel = session.channel().await?;
    match dead_letters::message_count(&channel, queue).await {
        Ok(count) => channel.close(200, "done".into()).await.map(|()| Some(count)),
        Err(error) => match error.kind() {
            ErrorKind::ProtocolError(cause) if cause.get_id() == 404 => Ok(None),
            _ => Err(error),
        },
    }
}

fn not_connected() -> QueueError {
    QueueError::Unavailable(BoxError::from("not connected to the broker"))
}
