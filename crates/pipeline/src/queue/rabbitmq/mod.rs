//! A queue on RabbitMQ (3.10 and later), over AMQP 0-9-1.
//!
//! RabbitMQ delivers and takes acknowledgements; leases, receive counts, delays and dead letters with reasons are ours:
//!
//! - a **lease** is a timer in this process. When it ends, the message is published again with one more receive and then
//!   the old delivery is acknowledged; its receipt is lost from that moment. When the process dies or freezes the broker
//!   gives the message out again, because the connection ends (heartbeats).
//! - a **receipt** belongs to one connection. After a reconnect the old ones are lost leases: nothing is ever
//!   acknowledged on another connection than it came from.
//! - **moving** a message (retry, bury, replay, an ended lease) is always: publish, wait for the confirm, acknowledge.
//!   A crash between makes it twice, never none.
//! - **receives** are counted in a header, plus what the broker counts for processes that died. A classic queue only
//!   says that there was some earlier delivery. What a process held unread when it stopped counts as received.
//! - a **delay** is a queue whose messages leave after that time (`delay`).
//!
//! What cannot be had from the broker over AMQP: [`Depth::in_flight`] is this process's own, [`Depth::delayed`] covers
//! the delays that this process has used, and [`Depth::oldest_age`] is estimated from what this process has seen (to
//! look at a message is to receive it). An `ack` that was answered may be undone by a connection that breaks at the same
//! moment: the broker does not confirm them.
//!
//! `session` keeps a connection, `intake` consumes and acknowledges, `publisher` publishes, `inbox` is what is
//! held meanwhile, `dead` reads dead letters.

mod ack_frames;
mod consume;
mod dead_letters;
mod delay_queue;
mod inbox;
mod options;

mod publisher;
mod send;
mod session;
mod topology;
mod wire;

use std::collections::BTreeSet;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use lapin::ErrorKind;
use lapin::options::QueueDeleteOptions;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::{BoxError, Capabilities, Depth, Queue, QueueError, QueueOptions};
use crate::message::{DeadLetter, Message, MessageId, Outgoing, Receipt};
use dead_letters::DeadChange;
use inbox::{Asking, Inbox, lease_end};
use send::Destination;
use session::Session;
use wire::{Burial, Envelope};

pub use dead_letters::{DEAD_LETTERS_READ_BYTES_MAX, DEAD_LETTERS_READ_MAX};
pub use options::RabbitMqOptions;
pub use topology::{Delays, QueueType, Topology};

/// A wait, lease or delay longer than this is this long.
const WAIT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);
/// A receive looks for at least this long: whether anything is due is known after a trip to the broker.
const LOOK_MIN: Duration = Duration::from_millis(100);

/// A queue on RabbitMQ. Cloning it is cheap and gives the same one; the last one dropped ends the connection.
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
    shared: Arc<Shared>,
    _stop: Arc<DropGuard>,
}

/// Whether there is a connection.
enum Connected {
    NotYet,
    Failed(String),
    Up(Arc<Session>),
}

struct Shared {
    options: RabbitMqOptions,
    inbox: Mutex<Inbox>,
    /// Tells receivers to look again.
    arrived: Notify,
    /// Tells the intake to look again.
    changed: Notify,
    connected: watch::Sender<Connected>,
    /// The delay queues that this process has used.
    delay_queues: Mutex<BTreeSet<String>>,
    /// One reader of dead letters at a time, or each would see a part.
    reading: tokio::sync::Mutex<()>,
    /// The clock at the start and the time since: no setting of the clock changes it.
    started: (SystemTime, Instant),
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl RabbitMqQueue {
    /// Connects, and makes or checks the queues. Afterwards it reconnects by itself.
    pub async fn connect(options: RabbitMqOptions) -> Result<Self, QueueError> {
        let stop = CancellationToken::new();
        let instance = Uuid::now_v7().as_u64_pair().1;
        let shared = Arc::new(Shared {
            inbox: Mutex::new(Inbox::new(instance)),
            arrived: Notify::new(),
            changed: Notify::new(),
            connected: watch::Sender::new(Connected::NotYet),
            delay_queues: Mutex::default(),
            reading: tokio::sync::Mutex::default(),
            started: (SystemTime::now(), Instant::now()),
            tasks: TaskTracker::new(),
            stop: stop.clone(),
            options,
        });
        let this = Self { _stop: Arc::new(stop.drop_guard()), shared };
        let mut connected = this.shared.connected.subscribe();
        this.shared.tasks.spawn(session::keep(Arc::clone(&this.shared)));
        let first = connected.wait_for(|connected| !matches!(connected, Connected::NotYet)).await;
        match &*first.map_err(|error| QueueError::Unavailable(error.into()))? {
            Connected::Failed(error) => Err(QueueError::Unavailable(error.as_str().into())),
            _ => Ok(this),
        }
    }

    /// Ends the connection in order. What is leased or held unread is given out again by the broker.
    pub async fn close(&self) {
        self.shared.stop.cancel();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
    }

    /// Deletes the queues with everything in them, and the delay queues that this process has used.
    pub async fn delete(&self) -> Result<(), QueueError> {
        let session = self.shared.session()?;
        let topology = &self.shared.options.topology;
        let mut names: Vec<_> = lock(&self.shared.delay_queues).iter().cloned().collect();
        if let Delays::Fixed { queue, .. } = &topology.delays {
            names.push(queue.clone());
        }
        // The main queue last but one: what still waits in a delay queue would go there, and dead letters come from it.
        names.extend([topology.queue.clone(), topology.dead_queue.clone()]);
        for name in names {
            let deleted = self.shared.in_time(async {
                let channel = session.channel().await?;
                channel.queue_delete(name.into(), QueueDeleteOptions::default()).await?;
                channel.close(200, "done".into()).await
            });
            deleted.await?;
        }
        Ok(())
    }

    /// Takes the receipts' deliveries and moves each: what `change` makes of it is published, then it is acknowledged.
    async fn move_leased<E: Send + 'static>(
        &self,
        entries: Vec<(Receipt, E)>,
        change: fn(&mut Envelope, &E) -> Destination,
    ) -> Vec<Result<(), QueueError>> {
        let now = Instant::now();
        let taken: Vec<_> = {
            let mut inbox = lock(&self.shared.inbox);
            entries.into_iter().map(|(receipt, extra)| (inbox.take_lease(&receipt, now), extra)).collect()
        };
        let moves = taken.into_iter().map(|(taken, extra)| async move {
            let taken = taken.ok_or(QueueError::LeaseLost)?;
            let mut envelope = Envelope::clone(&taken.held.envelope);
            envelope.receives = taken.held.receives.saturating_add(1);
            let destination = change(&mut envelope, &extra);
            let shared = Arc::clone(&self.shared);
            // A task, because the delivery is out of the inbox: if our caller gives up, this must still come to an end.
            let moving = self.shared.tasks.spawn(async move { shared.move_taken(taken, &envelope, destination).await });
            moving.await.unwrap_or_else(|error| Err(QueueError::OutcomeUnknown(error.into())))
        });
        futures::future::join_all(moves).await
    }

    /// Finds dead letters by id and applies `change` to each before it is removed.
    async fn change_dead(&self, ids: &[MessageId], change: DeadChange) -> Vec<Result<(), QueueError>> {
        if ids.is_empty() {
            return Vec::new();
        }
        match self.shared.change_dead(ids, change).await {
            Ok(answers) => answers,
            Err(error) => {
                // Some may have been moved: the same error for all, in words that allow for both.
                let error = Arc::new(error);
                ids.iter().map(|_| Err(QueueError::OutcomeUnknown(Box::new(Arc::clone(&error))))).collect()
            }
        }
    }
}

#[async_trait]
impl Queue for RabbitMqQueue {
    fn name(&self) -> &str {
        self.shared.name()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            durable: true,
            // A quorum queue may put what a process gave back unread behind what was sent later.
            ordered: self.shared.options.topology.queue_type == QueueType::Classic,
            fenced: true,
            shared: true,
            cancel_safe: true,
            request_carries: 1,
            body_bytes_max: self.shared.options.queue.body_bytes_max,
            delay_max: WAIT_MAX,
        }
    }

    async fn send(&self, messages: &[Outgoing]) -> Vec<Result<MessageId, QueueError>> {
        let deadline = self.shared.deadline();
        let mut started: Vec<Result<_, QueueError>> = Vec::with_capacity(messages.len());
        for message in messages {
            // One after the other, so that they are in the queue in this order; their confirms come as they come.
            let start = async {
                let (envelope, delay) = self.shared.envelope(message)?;
                let publishing = self.shared.start(&envelope, delay, deadline).await?;
                Ok((envelope.id, publishing))
            };
            started.push(start.await);
        }
        let confirms = started.into_iter().map(|started| async {
            let (id, publishing) = started?;
            self.shared.confirmed(publishing).await.map(|()| id)
        });
        futures::future::join_all(confirms).await
    }

    async fn receive(&self, max: usize, wait: Duration) -> Result<Vec<Message>, QueueError> {
        if max == 0 {
            return Ok(Vec::new());
        }
        let shared = &*self.shared;
        let deadline = Instant::now() + wait.clamp(LOOK_MIN, WAIT_MAX);
        // While there is no connection the broker has its time to come back, but no more than any call has.
        let give_up_at = deadline.min(Instant::now() + shared.options.timeout);
        let mut asking = None;
        loop {
            // Listening starts before looking, or what arrives between the two would be missed.
            let mut arrived = std::pin::pin!(shared.arrived.notified());
            arrived.as_mut().enable();
            let now = Instant::now();
            let (connected, gathers_until) = {
                let mut inbox = lock(&shared.inbox);
                let gathers_until = inbox.gathers_until(max, now).filter(|until| *until < deadline);
                if gathers_until.is_none() {
                    let messages = inbox.take(max, now, shared.options.queue.lease);
                    if !messages.is_empty() {
                        drop(inbox);
                        shared.changed.notify_one();
                        return Ok(messages);
                    }
                }
                (inbox.connected(), gathers_until)
            };
            if !connected && now >= give_up_at {
                return Err(not_connected());
            }
            if now >= deadline {
                return Ok(Vec::new());
            }
            asking.get_or_insert_with(|| Asking::new(shared, max));
            let look_again = gathers_until.unwrap_or(if connected { deadline } else { give_up_at });
            tokio::select! {
                () = arrived => {}
                () = tokio::time::sleep_until(look_again) => {}
            }
        }
    }

    async fn ack(&self, receipts: &[Receipt]) -> Vec<Result<(), QueueError>> {
        let now = Instant::now();
        let mut inbox = lock(&self.shared.inbox);
        // The broker does not answer acknowledgements: there is nothing to wait for.
        let settle = |receipt| inbox.take_lease(receipt, now).is_some_and(|taken| inbox.settle(&taken));
        let settled: Vec<bool> = receipts.iter().map(settle).collect();
        drop(inbox);
        self.shared.changed.notify_one();
        settled.into_iter().map(|held| if held { Ok(()) } else { Err(QueueError::LeaseLost) }).collect()
    }

    async fn retry_after(&self, entries: &[(Receipt, Duration)]) -> Vec<Result<(), QueueError>> {
        self.move_leased(entries.to_vec(), |_, delay| Destination::Queue((*delay).min(WAIT_MAX))).await
    }

    async fn bury(&self, entries: &[(Receipt, String)]) -> Vec<Result<(), QueueError>> {
        self.move_leased(entries.to_vec(), |envelope, reason| {
            envelope.burial = Some(Burial { reason: reason.clone(), by_queue: false, at: SystemTime::now() });
            Destination::DeadLetters
        })
        .await
    }

    async fn extend(&self, receipts: &[Receipt], for_: Duration) -> Vec<Result<(), QueueError>> {
        let now = Instant::now();
        let mut inbox = lock(&self.shared.inbox);
        let extend =
            |receipt| inbox.extend(receipt, lease_end(now, for_), now).then_some(()).ok_or(QueueError::LeaseLost);
        let answers = receipts.iter().map(extend).collect();
        drop(inbox);
        self.shared.changed.notify_one();
        answers
    }

    fn lease(&self) -> Duration {
        self.shared.options.queue.lease
    }

    async fn depth(&self) -> Result<Depth, QueueError> {
        self.shared.depth().await
    }

    async fn dead_letters(&self, after: Option<&MessageId>, max: usize) -> Result<Vec<DeadLetter>, QueueError> {
        self.shared.dead_letters(after, max).await
    }

    async fn replay(&self, ids: &[MessageId], delay: Duration) -> Vec<Result<(), QueueError>> {
        self.change_dead(ids, DeadChange::Replay(delay.min(WAIT_MAX))).await
    }

    async fn discard(&self, ids: &[MessageId]) -> Vec<Result<(), QueueError>> {
        self.change_dead(ids, DeadChange::Discard).await
    }

    async fn close(&self) {
        RabbitMqQueue::close(self).await;
    }
}

impl Shared {
    fn name(&self) -> &str {
        &self.options.topology.queue
    }

    fn session(&self) -> Result<Arc<Session>, QueueError> {
        match &*self.connected.borrow() {
            Connected::Up(session) => Ok(Arc::clone(session)),
            Connected::NotYet => Err(not_connected()),
            Connected::Failed(error) => Err(QueueError::Unavailable(error.as_str().into())),
        }
    }

    /// The call's result, if the broker answers in time.
    async fn in_time<T>(&self, call: impl Future<Output = lapin::Result<T>>) -> Result<T, QueueError> {
        match tokio::time::timeout(self.options.timeout, call).await {
            Ok(result) => result.map_err(|error| QueueError::Unavailable(error.into())),
            Err(late) => Err(QueueError::Unavailable(late.into())),
        }
    }

    async fn depth(&self) -> Result<Depth, QueueError> {
        let session = self.session()?;
        let topology = &self.options.topology;
        let [ready, dead] = [&topology.queue, &topology.dead_queue].map(|queue| self.in_time(count(&session, queue)));
        let (ready, dead) = (ready.await?.unwrap_or(0), dead.await?.unwrap_or(0));
        let mut delayed = 0;
        let mut queues: Vec<_> = lock(&self.delay_queues).iter().cloned().collect();
        if let Delays::Fixed { queue, .. } = &topology.delays {
            queues.push(queue.clone());
        }
        for queue in queues {
            match self.in_time(count(&session, &queue)).await? {
                Some(waiting) => delayed += waiting,
                None => drop(lock(&self.delay_queues).remove(&queue)),
            }
        }
        let mut inbox = lock(&self.inbox);
        let (buffered, in_flight) = inbox.counts();
        let ready = ready + buffered;
        let now = SystemTime::now();
        if ready == 0 {
            inbox.saw_empty(now);
        }
        let oldest_age = (ready > 0).then(|| now.duration_since(inbox.oldest_sent_at(now)).unwrap_or_default());
        let [ready, in_flight, delayed, dead] = [ready, in_flight, delayed, dead].map(|count| count as u64);
        Ok(Depth { ready, in_flight, delayed, dead, oldest_age })
    }
}

/// How many messages are due in the queue; `None`: there is no such queue (any more).
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
