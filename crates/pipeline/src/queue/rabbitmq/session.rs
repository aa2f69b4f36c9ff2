//! Connects to the broker, and reconnects when a connection ends.
//!
//! A session is two connections: a broker short of memory or disk stops reading from publishing connections, which would
//! also block acknowledgements that relieve it. Both end together, as one generation.

use std::collections::HashSet;
use std::future::Future;
use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::{FutureExt, StreamExt};
use lapin::options::ConfirmSelectOptions;
use lapin::protocol::{AMQPErrorKind, AMQPHardError};
use lapin::uri::AMQPUri;
use lapin::{Channel, Connection, ConnectionProperties, ErrorKind, Event};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::{error, info, warn};

use super::delay_queue::DelayQueue;
#[cfg(feature = "testing")]
use super::panics::{SessionPart, on_request};
use super::publisher::{self, Publish};
use super::{ConnectionState, RabbitMqState, consume};
use crate::lock::lock;
use crate::panic_text::panic_text;
use crate::queue::server_away::ServerAway;
use crate::queue::{BoxError, QueueError};

/// First pause before a reconnect; it doubles up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// A connection that lasted this long resets the pause.
const STABLE_AFTER: Duration = Duration::from_secs(10);
/// Time limit for closing the connections in order.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Interval between two checks of the connections, in case an event was missed.
const CHECK_EVERY: Duration = Duration::from_secs(1);

/// One generation of connections.
pub(super) struct Session {
    publish_connection: Connection,
    consume_connection: Connection,
    pub(super) publishes: mpsc::Sender<Publish>,
    /// The delay queues declared in this session.
    delay_queues: Mutex<HashSet<String>>,
}

struct Channels {
    publish: Channel,
    consume: Channel,
    requests: mpsc::Receiver<Publish>,
}

/// Maintains a session until `state.stop` is cancelled.
pub(super) async fn maintain(state: Arc<RabbitMqState>) {
    let mut pause = PAUSE_MIN;
    while !state.stop.is_cancelled() {
        let started = Instant::now();
        let connected = tokio::time::timeout(state.options.timeout, connect(&state)).await;
        match connected.unwrap_or_else(|late| Err(late.into())) {
            Ok((session, channels)) => {
                if let Err(panic) = AssertUnwindSafe(run(&state, session, channels)).catch_unwind().await {
                    error!(
                        queue = state.name(),
                        reason = panic_text(&*panic),
                        "a connection's task failed; reconnecting"
                    );
                    state.disconnected();
                }
            }
            Err(error) => {
                warn!(queue = state.name(), error = &*error, "cannot connect to the broker; retrying");
                state.connected.send_replace(ConnectionState::Failed(ConnectFailure::new(&*error)));
            }
        }
        if started.elapsed() > STABLE_AFTER {
            pause = PAUSE_MIN;
        }
        let _ = tokio::time::timeout(pause, state.stop.cancelled()).await;
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Why the last attempt to connect failed.
pub(super) struct ConnectFailure {
    text: Arc<str>,
    server_away: bool,
}

impl ConnectFailure {
    fn new(error: &(dyn std::error::Error + 'static)) -> Self {
        Self { text: error.to_string().into(), server_away: is_server_away(error) }
    }

    pub(super) fn error(&self) -> QueueError {
        QueueError::Unavailable(match self.server_away {
            true => ServerAway(Arc::clone(&self.text)).into(),
            false => BoxError::from(&*self.text),
        })
    }
}

/// Whether an attempt to connect failed because the broker is away or about to stop, and not because it refused.
fn is_server_away(error: &(dyn std::error::Error + 'static)) -> bool {
    let Some(error) = error.downcast_ref::<lapin::Error>() else { return error.is::<tokio::time::error::Elapsed>() };
    match error.kind() {
        ErrorKind::IOError(error) => matches!(
            error.kind(),
            io::ErrorKind::BrokenPipe
                | io::ErrorKind::ConnectionAborted
                | io::ErrorKind::ConnectionRefused
                | io::ErrorKind::ConnectionReset
                | io::ErrorKind::HostUnreachable
                | io::ErrorKind::NetworkUnreachable
                | io::ErrorKind::NotConnected
                | io::ErrorKind::TimedOut
                | io::ErrorKind::UnexpectedEof
        ),
        ErrorKind::ProtocolError(error) => *error.kind() == AMQPErrorKind::Hard(AMQPHardError::CONNECTIONFORCED),
        ErrorKind::InvalidConnectionState(_) | ErrorKind::MissingHeartbeatError => true,
        _ => false,
    }
}

async fn connect(state: &RabbitMqState) -> Result<(Session, Channels), BoxError> {
    let mut uri: AMQPUri = state.options.url.parse()?;
    uri.query.heartbeat = Some(u16::try_from(state.options.heartbeat.as_secs()).unwrap_or(u16::MAX).max(1));
    let properties = ConnectionProperties::default().with_connection_name(state.name().into());
    let publish_connection = Connection::connect_uri(uri.clone(), properties.clone()).await?;
    let consume_connection = Connection::connect_uri(uri, properties).await?;
    let publish = publish_connection.create_channel().await?;
    publish.confirm_select(ConfirmSelectOptions::default()).await?;
    let consume = consume_connection.create_channel().await?;
    let (publishes, requests) = mpsc::channel(publisher::WAITING_MAX);
    let session = Session { publish_connection, consume_connection, publishes, delay_queues: Mutex::default() };
    session.declare(state).await?;
    Ok((session, Channels { publish, consume, requests }))
}

async fn run(state: &Arc<RabbitMqState>, session: Session, channels: Channels) {
    let session = Arc::new(session);
    let ended = state.stop.child_token();
    lock(&state.inbox).reset(true, Instant::now());
    state.connected.send_replace(ConnectionState::Up(Arc::clone(&session)));
    state.arrived.notify_waiters();
    info!(queue = state.name(), "connected to the broker");
    // Also if consuming panics: the publisher ends with the session.
    let _ended = ended.clone().drop_guard();
    let publishing = publisher::run(channels.publish, channels.requests, ended.clone());
    let consuming = consume::run(state, &channels.consume, &ended);
    #[cfg(feature = "testing")]
    let (publishing, consuming) = (
        on_request(Arc::clone(state), SessionPart::Publishing, publishing),
        on_request(Arc::clone(state), SessionPart::Consuming, consuming),
    );
    // In its own task, because publishing and consuming can each use a whole core.
    let publisher = spawn_ending(&state.tasks, &ended, publishing);
    let consuming = async {
        if let Err(error) = consuming.await {
            warn!(queue = state.name(), error = &error as &dyn std::error::Error, "consuming failed; reconnecting");
        }
        ended.cancel();
    };
    tokio::join!(consuming, session.watch(state, &ended));
    state.disconnected();
    if let Err(panic) = publisher.await {
        error!(queue = state.name(), error = &panic as &dyn std::error::Error, "publishing failed; reconnecting");
    }
    session.close().await;
}

/// Runs a part of the session in its own task. Its end ends the session, also if it panics: a session without its publisher
/// would refuse every message and look connected.
fn spawn_ending(
    tasks: &TaskTracker,
    ended: &CancellationToken,
    part: impl Future<Output = ()> + Send + 'static,
) -> JoinHandle<()> {
    let ends = ended.clone().drop_guard();
    tasks.spawn(async move {
        let _ends = ends;
        part.await;
    })
}

impl RabbitMqState {
    /// Forgets what the connection held: the broker redelivers it.
    fn disconnected(&self) {
        self.connected.send_replace(ConnectionState::Connecting);
        lock(&self.inbox).reset(false, Instant::now());
        self.arrived.notify_waiters();
    }
}

impl Session {
    /// Whether the broker blocks publishing (short of memory or disk).
    pub(super) fn blocked(&self) -> bool {
        self.publish_connection.status().blocked()
    }

    /// Whether both connections are up.
    pub(super) fn is_up(&self) -> bool {
        self.publish_connection.status().connected() && self.consume_connection.status().connected()
    }

    /// A new channel for one operation. The broker closes a channel on any error, so the publishing channel is not shared.
    pub(super) async fn channel(&self) -> lapin::Result<Channel> {
        self.consume_connection.create_channel().await
    }

    /// Declares or checks the queues of the topology.
    pub(super) async fn declare(&self, state: &RabbitMqState) -> lapin::Result<()> {
        let channel = self.channel().await?;
        state.options.topology.declare(&channel).await?;
        channel.close(200, "done".into()).await
    }

    /// Declares a delay queue, once per session.
    pub(super) async fn declare_delay(&self, state: &RabbitMqState, queue: &DelayQueue) -> lapin::Result<()> {
        if lock(&self.delay_queues).contains(&queue.name) {
            return Ok(());
        }
        let channel = self.channel().await?;
        state.options.topology.declare_delay(&channel, queue).await?;
        lock(&self.delay_queues).insert(queue.name.clone());
        lock(&state.delay_queues).insert(queue.name.clone());
        channel.close(200, "done".into()).await
    }

    /// Forgets a delay queue that no longer exists, so that it is declared again.
    pub(super) fn forget_delay(&self, name: &str) {
        lock(&self.delay_queues).remove(name);
    }

    /// Returns when one of the connections ends or `ended` is cancelled; cancels `ended`.
    async fn watch(&self, state: &RabbitMqState, ended: &CancellationToken) {
        let mut events = futures::stream::select(
            self.publish_connection.events_listener(),
            self.consume_connection.events_listener(),
        );
        let mut check = tokio::time::interval(CHECK_EVERY);
        while self.is_up() {
            tokio::select! {
                event = events.next() => match event {
                    Some(Event::ConnectionBlocked(reason)) => {
                        warn!(queue = state.name(), reason, "the broker blocks publishing");
                    }
                    Some(Event::ConnectionUnblocked) => info!(queue = state.name(), "the broker accepts messages again"),
                    Some(Event::Error(error)) => {
                        warn!(queue = state.name(), error = &error as &dyn std::error::Error, "the connection to the broker ended");
                        break;
                    }
                    Some(_) => {}
                    None => break,
                },
                _ = check.tick() => {}
                () = ended.cancelled() => break,
            }
        }
        ended.cancel();
    }

    async fn close(&self) {
        let _ = tokio::time::timeout(CLOSE_TIMEOUT, async {
            for connection in [&self.publish_connection, &self.consume_connection] {
                if connection.status().connected() {
                    let _ = connection.close(200, "done".into()).await;
                }
            }
        })
        .await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_part_that_panics_ends_the_session() {
        let (tasks, ended) = (TaskTracker::new(), CancellationToken::new());
        let part = spawn_ending(&tasks, &ended, async { panic!("on purpose") });
        assert!(part.await.is_err());
        assert!(ended.is_cancelled(), "the session would go on without its publisher");
    }
}
