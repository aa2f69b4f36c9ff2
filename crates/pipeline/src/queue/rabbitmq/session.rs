//! A connection to the broker, and getting the next one when it ends.
//!
//! It is two connections: a broker short of memory or disk stops reading from those that publish, and an acknowledgement
//! on the same one, which would relieve it, would wait behind. They live and die together, as one generation.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use lapin::options::ConfirmSelectOptions;
use lapin::uri::AMQPUri;
use lapin::{Channel, Connection, ConnectionProperties, Event};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::delay_queue::DelayQueue;
use super::publisher::{self, Publish};
use super::{Connected, Shared, consume, lock};
use crate::queue::BoxError;

/// The first pause before connecting again; it doubles up to the longest.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// A connection that lasted this long was a good one: the pause starts over.
const SETTLED_AFTER: Duration = Duration::from_secs(10);
/// How long a connection that is given up may take to say goodbye.
const GOODBYE: Duration = Duration::from_secs(2);
/// Between two looks at whether the connections still stand, should nobody have told us.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// One generation of connections.
pub(super) struct Session {
    publishing: Connection,
    consuming: Connection,
    pub(super) publishes: mpsc::Sender<Publish>,
    /// The delay queues made on it.
    delay_queues: Mutex<HashSet<String>>,
}

struct Channels {
    publish: Channel,
    consume: Channel,
    requests: mpsc::Receiver<Publish>,
}

/// Keeps a session up until `shared.stop`.
pub(super) async fn keep(shared: Arc<Shared>) {
    let mut pause = PAUSE_MIN;
    while !shared.stop.is_cancelled() {
        let started = Instant::now();
        let connected = tokio::time::timeout(shared.options.timeout, connect(&shared)).await;
        match connected.unwrap_or_else(|late| Err(late.into())) {
            Ok((session, channels)) => run(&shared, session, channels).await,
            Err(error) => {
                warn!(queue = shared.name(), error = &*error, "the broker cannot be reached");
                shared.connected.send_replace(Connected::Failed(error.to_string()));
            }
        }
        if started.elapsed() > SETTLED_AFTER {
            pause = PAUSE_MIN;
        }
        let _ = tokio::time::timeout(pause, shared.stop.cancelled()).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

async fn connect(shared: &Shared) -> Result<(Session, Channels), BoxError> {
    let mut uri: AMQPUri = shared.options.url.parse()?;
    uri.query.heartbeat = Some(u16::try_from(shared.options.heartbeat.as_secs()).unwrap_or(u16::MAX).max(1));
    let properties = ConnectionProperties::default().with_connection_name(shared.name().into());
    let publishing = Connection::connect_uri(uri.clone(), properties.clone()).await?;
    let consuming = Connection::connect_uri(uri, properties).await?;
    let publish = publishing.create_channel().await?;
    publish.confirm_select(ConfirmSelectOptions::default()).await?;
    let consume = consuming.create_channel().await?;
    let (publishes, requests) = mpsc::channel(publisher::WAITING_MAX);
    let session = Session { publishing, consuming, publishes, delay_queues: Mutex::default() };
    session.declare(shared).await?;
    Ok((session, Channels { publish, consume, requests }))
}

async fn run(shared: &Arc<Shared>, session: Session, channels: Channels) {
    let session = Arc::new(session);
    let ended = shared.stop.child_token();
    lock(&shared.inbox).reset(true, Instant::now());
    shared.connected.send_replace(Connected::Up(Arc::clone(&session)));
    shared.arrived.notify_waiters();
    info!(queue = shared.name(), "connected to the broker");
    let publisher = {
        let (publish, ended) = (publisher::run(channels.publish, channels.requests, ended.clone()), ended.clone());
        async move {
            publish.await;
            ended.cancel();
        }
    };
    // A task of its own: publishing and consuming are each worth a core.
    let publisher = shared.tasks.spawn(publisher);
    let intake = async {
        if let Err(error) = consume::run(shared, &channels.consume, &ended).await {
            warn!(queue = shared.name(), error = &error as &dyn std::error::Error, "consuming ended");
        }
        ended.cancel();
    };
    tokio::join!(intake, session.watch(shared, &ended));
    shared.connected.send_replace(Connected::NotYet);
    lock(&shared.inbox).reset(false, Instant::now());
    shared.arrived.notify_waiters();
    let _ = publisher.await;
    session.close().await;
}

impl Session {
    /// Whether the broker takes no messages at the moment (short of memory or disk).
    pub(super) fn blocked(&self) -> bool {
        self.publishing.status().blocked()
    }

    /// Whether its connections stand.
    pub(super) fn is_up(&self) -> bool {
        self.publishing.status().connected() && self.consuming.status().connected()
    }

    /// A channel for one purpose. It is not the one that publishes: the broker closes a channel on any mistake.
    pub(super) async fn channel(&self) -> lapin::Result<Channel> {
        self.consuming.create_channel().await
    }

    /// Makes or checks the queues.
    pub(super) async fn declare(&self, shared: &Shared) -> lapin::Result<()> {
        let channel = self.channel().await?;
        shared.options.topology.declare(&channel).await?;
        channel.close(200, "done".into()).await
    }

    /// Makes the queue for one delay, unless that was done already.
    pub(super) async fn declare_delay(&self, shared: &Shared, queue: &DelayQueue) -> lapin::Result<()> {
        if lock(&self.delay_queues).contains(&queue.name) {
            return Ok(());
        }
        let channel = self.channel().await?;
        shared.options.topology.declare_delay(&channel, queue).await?;
        lock(&self.delay_queues).insert(queue.name.clone());
        lock(&shared.delay_queues).insert(queue.name.clone());
        channel.close(200, "done".into()).await
    }

    /// The queue of that name is gone.
    pub(super) fn forget_delay(&self, name: &str) {
        lock(&self.delay_queues).remove(name);
    }

    /// Returns when one of the connections has ended, or `ended` is cancelled; cancels it.
    async fn watch(&self, shared: &Shared, ended: &CancellationToken) {
        let mut events = futures::stream::select(self.publishing.events_listener(), self.consuming.events_listener());
        let mut look = tokio::time::interval(LOOK_EVERY);
        while self.is_up() {
            tokio::select! {
                event = events.next() => match event {
                    Some(Event::ConnectionBlocked(reason)) => {
                        warn!(queue = shared.name(), reason, "the broker takes no messages");
                    }
                    Some(Event::ConnectionUnblocked) => info!(queue = shared.name(), "the broker takes messages again"),
                    Some(Event::Error(error)) => {
                        warn!(queue = shared.name(), error = &error as &dyn std::error::Error, "the connection has ended");
                        break;
                    }
                    Some(_) => {}
                    None => break,
                },
                _ = look.tick() => {}
                () = ended.cancelled() => break,
            }
        }
        ended.cancel();
    }

    async fn close(&self) {
        let _ = tokio::time::timeout(GOODBYE, async {
            for connection in [&self.publishing, &self.consuming] {
                if connection.status().connected() {
                    let _ = connection.close(200, "done".into()).await;
                }
            }
        })
        .await;
    }
}
