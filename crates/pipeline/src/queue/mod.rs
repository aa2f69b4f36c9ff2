//! The contract between a pipeline and a queue. Each sentence in the documentation of [`Queue`] has a test in
//! `crate::testing`; every backend passes that suite unchanged. Backends: [`memory`], and `sqlite`, `sqs` and `rabbitmq`
//! behind the features of these names. The contract imports no backend.

pub mod memory;
#[cfg(feature = "rabbitmq")]
pub mod rabbitmq;
#[cfg(any(feature = "rabbitmq", feature = "sqs"))]
mod server_away;
#[cfg(feature = "sqlite")]
pub mod sqlite;
#[cfg(feature = "sqs")]
pub mod sqs;

use std::time::Duration;

use async_trait::async_trait;

use crate::message::{DeadLetter, Message, MessageId, Outgoing, Receipt};

/// A queue with at-least-once delivery, leases and a dead-letter queue.
///
/// Methods take slices, so each backend batches as it can, and return one result for each entry in the order given: a
/// batch may succeed in part.
#[async_trait]
pub trait Queue: Send + Sync + 'static {
    /// The name, for logs and metrics.
    fn name(&self) -> &str;

    /// What this backend promises beyond the common contract, and its limits.
    fn capabilities(&self) -> Capabilities;

    /// Stores messages. An `Ok` entry is durable (where [`Capabilities::durable`]) before this returns and will be
    /// delivered at least once. An entry with [`QueueError::Unavailable`] was not stored; one with
    /// [`QueueError::OutcomeUnknown`] may have been. A delayed message is not delivered before its delay has passed.
    async fn send(&self, messages: &[Outgoing]) -> Vec<Result<MessageId, QueueError>>;

    /// Takes up to `max` messages that are due, and leases each to the caller for [`Queue::lease`]. If none is due, it
    /// waits up to `wait` and returns as soon as there is one. Messages that became due together arrive in the order sent
    /// where [`Capabilities::ordered`]. While a lease runs, no other receive returns the message; when it ends unsettled
    /// the message is due again, with `receives` one higher. Cancelling this future hides messages for at most one lease.
    async fn receive(&self, max: usize, wait: Duration) -> Result<Vec<Message>, QueueError>;

    /// Removes finished messages permanently. If the lease was lost, the answer is [`QueueError::LeaseLost`] where
    /// [`Capabilities::fenced`], and the message stays with its new holder. RabbitMQ does not confirm acknowledgements:
    /// there, `Ok` is returned before the frame is sent, and if it is lost in transit the message is delivered again.
    async fn ack(&self, receipts: &[Receipt]) -> Vec<Result<(), QueueError>>;

    /// Ends leases early: each message is due again after its delay (zero: immediately), keeping its receive count.
    async fn retry_after(&self, entries: &[(Receipt, Duration)]) -> Vec<Result<(), QueueError>>;

    /// Moves messages to the dead-letter queue, each with a reason.
    async fn bury(&self, entries: &[(Receipt, String)]) -> Vec<Result<(), QueueError>>;

    /// Moves the end of leases to `duration` from now, which may be earlier than before.
    async fn extend(&self, receipts: &[Receipt], duration: Duration) -> Vec<Result<(), QueueError>>;

    /// How long a delivery is leased.
    fn lease(&self) -> Duration;

    /// Message counts, and the age of the oldest message that is due.
    async fn depth(&self) -> Result<Depth, QueueError>;

    /// Lists up to `max` dead letters, oldest burial first, after the letter `after` (`None`: from the start). Listing
    /// changes nothing.
    async fn dead_letters(&self, after: Option<&MessageId>, max: usize) -> Result<Vec<DeadLetter>, QueueError>;

    /// Moves dead letters back into the queue: same id, body and attributes, receive count zero, due after `delay`. An
    /// unknown id answers [`QueueError::NotFound`], so a repeated replay delivers once.
    async fn replay(&self, ids: &[MessageId], delay: Duration) -> Vec<Result<(), QueueError>>;

    /// Removes dead letters permanently. An unknown id answers [`QueueError::NotFound`].
    async fn discard(&self, ids: &[MessageId]) -> Vec<Result<(), QueueError>>;

    /// Closes the queue in order: every acknowledgement reaches the server before this returns. Dropping a queue without
    /// it may lose acknowledgements in transit; their messages are then delivered again.
    async fn close(&self) {}
}

/// What a backend promises beyond the common contract, and its limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// A sent message survives kill -9 and power loss once `send` has answered.
    pub durable: bool,
    /// Messages that became due together arrive in the order sent.
    pub ordered: bool,
    /// A receipt whose lease was lost settles nothing.
    pub fenced: bool,
    /// Several processes may use the queue.
    pub shared: bool,
    /// A cancelled receive has taken nothing. Otherwise the server may complete it and lease messages to no receiver
    /// until their lease ends.
    pub cancel_safe: bool,
    /// Messages in one request at about the cost of a single one. 1: every message costs the same.
    pub messages_per_request: usize,
    /// Dead letters that one [`Queue::dead_letters`] reads, however few it returns: smaller pages cost as much. 1: a page
    /// costs what it returns.
    pub dead_letters_per_read: usize,
    /// The longest body accepted, in bytes.
    pub body_bytes_max: usize,
    /// The longest delay accepted in one `retry_after`.
    pub delay_max: Duration,
}

/// Message counts of a queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Depth {
    /// Messages that a receive would return now.
    pub ready: u64,
    /// Messages under a lease.
    pub in_flight: u64,
    /// Messages whose delay has not passed.
    pub delayed: u64,
    /// Messages in the dead-letter queue.
    pub dead: u64,
    /// Time since the oldest due message was sent; `None` when none is due.
    pub oldest_age: Option<Duration>,
}

/// The settings that every backend has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueOptions {
    /// How long a delivery is leased (visibility timeout). 60 seconds by default.
    pub lease: Duration,
    /// How long a message is kept after it was sent, and a dead letter after its burial. 4 days by default.
    pub retention: Duration,
    /// The queue buries a message after this many unsettled or retried deliveries. `None`, the default: never.
    pub receives_max: Option<u32>,
    /// The longest body accepted, in bytes. 1 MiB by default.
    pub body_bytes_max: usize,
}

impl Default for QueueOptions {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(60),
            retention: Duration::from_secs(4 * 24 * 3600),
            receives_max: None,
            body_bytes_max: 1024 * 1024,
        }
    }
}

/// Why a queue operation failed. Each variant asks for a different reaction.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The backend could not be reached or refused the request; the entry had no effect.
    #[error("the queue is unavailable")]
    Unavailable(#[source] BoxError),
    /// The backend did not answer: the entry may or may not have taken effect.
    #[error("the queue did not answer; the outcome is unknown")]
    OutcomeUnknown(#[source] BoxError),
    /// The delivery's lease ended; another receiver may hold the message now.
    #[error("the lease on this message was lost")]
    LeaseLost,
    /// There is no dead letter with this id.
    #[error("no such message")]
    NotFound,
    /// The body is larger than the backend accepts.
    #[error("the body has {size} bytes; the queue accepts {max}")]
    TooLarge {
        /// Bytes to be sent; attributes may count where they share the backend's limit.
        size: usize,
        /// Bytes that the backend accepts.
        max: usize,
    },
    /// A stored message cannot be read back.
    #[error("a stored message is corrupt: {0}")]
    Corrupt(String),
}

/// An error of any backend, kept as the source of a [`QueueError`].
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl QueueError {
    /// Whether the same call may succeed later.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::OutcomeUnknown(_))
    }
}

/// Stored when a message is buried with an empty reason.
const NO_REASON: &str = "no reason given";
/// Stored when the queue buries a message that is older than [`QueueOptions::retention`].
const RETENTION_ENDED: &str = "retention period ended";

/// The queue's own reason to bury a message instead of delivering it; `None` if it can be delivered.
fn burial_reason(expired: bool, receives: u32, receives_max: Option<u32>) -> Option<String> {
    if expired {
        Some(RETENTION_ENDED.to_owned())
    } else if receives_max.is_some_and(|max| receives >= max) {
        Some(format!("received {receives} times without being settled"))
    } else {
        None
    }
}

fn check_size(size: usize, max: usize) -> Result<(), QueueError> {
    if size > max { Err(QueueError::TooLarge { size, max }) } else { Ok(()) }
}
