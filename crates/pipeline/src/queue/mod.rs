//! The contract between a pipeline and a queue. Each sentence in the documentation of [`Queue`] is a test in
//! [`crate::testing`]; every backend passes that suite unchanged. Backends: [`memory`], `sqlite`, `sqs` and `rabbitmq`, each behind the
//! feature of its name.

pub mod memory;
#[cfg(feature = "rabbitmq")]
pub mod rabbitmq;
#[cfg(feature = "sqlite")]
pub mod sqlite;
#[cfg(feature = "sqs")]
pub mod sqs;

use std::time::Duration;

use async_trait::async_trait;

use crate::message::{DeadLetter, Message, MessageId, Outgoing, Receipt};

/// A durable, leased, at-least-once queue with a dead-letter side.
///
/// Methods take slices, so that batching is the backend's own affair, and answer with one result for each entry,
/// in the order given: a batch may succeed in part.
#[async_trait]
pub trait Queue: Send + Sync + 'static {
    /// The name, for logs and metrics.
    fn name(&self) -> &str;

    /// What this backend can and cannot do.
    fn capabilities(&self) -> Capabilities;

    /// Stores messages. An `Ok` entry is durable (where [`Capabilities::durable`]) before this returns and will be
    /// delivered at least once; an error of kind [`QueueError::Unavailable`] was not stored; one of kind
    /// [`QueueError::OutcomeUnknown`] may have been. A delayed message is not delivered before its delay is over.
    async fn send(&self, messages: &[Outgoing]) -> Vec<Result<MessageId, QueueError>>;

    /// Takes up to `max` messages that are due, and leases each to the caller for [`Queue::lease`]. With none due it
    /// waits up to `wait` for one and returns as soon as there is any. Messages of equal age come in the order
    /// sent where [`Capabilities::ordered`]. While a lease runs nobody else receives the message; when it ends
    /// unsettled the message is due again, with `receives` one higher. Cancelling this future loses nothing for
    /// longer than one lease.
    async fn receive(&self, max: usize, wait: Duration) -> Result<Vec<Message>, QueueError>;

    /// Removes finished messages for good. RabbitMQ does not answer acknowledgements: there, `Ok` is given before they are
    /// sent, and one that is lost on its way means that the message comes again. With a lease that has been lost the answer is
    /// [`QueueError::LeaseLost`] where [`Capabilities::fenced`], and the message stays with its new owner.
    async fn ack(&self, receipts: &[Receipt]) -> Vec<Result<(), QueueError>>;

    /// Ends leases early: each message is due again after its delay (zero: at once), keeping its receive count.
    async fn retry_after(&self, entries: &[(Receipt, Duration)]) -> Vec<Result<(), QueueError>>;

    /// Moves messages to the dead-letter queue, each with a reason.
    async fn bury(&self, entries: &[(Receipt, String)]) -> Vec<Result<(), QueueError>>;

    /// Makes leases end `for_` from now instead.
    async fn extend(&self, receipts: &[Receipt], for_: Duration) -> Vec<Result<(), QueueError>>;

    /// How long a delivery is leased.
    fn lease(&self) -> Duration;

    /// Counts, and the age of the oldest message that is due.
    async fn depth(&self) -> Result<Depth, QueueError>;

    /// Dead letters, oldest burial first, up to `max`, after the one named by `after` (`None`: from the start).
    /// Reading changes nothing.
    async fn dead_letters(&self, after: Option<&MessageId>, max: usize) -> Result<Vec<DeadLetter>, QueueError>;

    /// Moves dead letters back into the queue: same id, body and attributes, receive count zero, due after
    /// `delay`. An id that is not there answers [`QueueError::NotFound`]; repeating is harmless.
    async fn replay(&self, ids: &[MessageId], delay: Duration) -> Vec<Result<(), QueueError>>;

    /// Removes dead letters for good. An id that is not there answers [`QueueError::NotFound`].
    async fn discard(&self, ids: &[MessageId]) -> Vec<Result<(), QueueError>>;

    /// Ends in order, when nothing more will be asked: what was answered is known at the other end too. Whoever merely
    /// drops a queue may find some of its acknowledgements lost on the way, and the messages there again.
    async fn close(&self) {}
}

/// What a backend promises beyond the common contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Survives kill -9 and power loss once `send` has answered.
    pub durable: bool,
    /// Equal-age messages come in the order sent.
    pub ordered: bool,
    /// A receipt whose lease was lost settles nothing.
    pub fenced: bool,
    /// Shared between processes.
    pub shared: bool,
    /// A receive that is cancelled has taken nothing. Otherwise the server may go on with it and lease messages to
    /// nobody, until their lease ends.
    pub cancel_safe: bool,
    /// A request costs about the same with so many messages as with one. 1: each message has its own price.
    pub request_carries: usize,
    /// The longest body accepted, in bytes.
    pub body_bytes_max: usize,
    /// The longest delay accepted in one step.
    pub delay_max: Duration,
}

/// How full a queue is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Depth {
    /// Due now.
    pub ready: u64,
    /// Leased to somebody.
    pub in_flight: u64,
    /// Waiting for their delay to end.
    pub delayed: u64,
    /// In the dead-letter queue.
    pub dead: u64,
    /// How long the oldest due message has been in the queue since it was sent.
    pub oldest_age: Option<Duration>,
}

/// How every queue is set up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueOptions {
    /// How long a delivery is leased (visibility timeout).
    pub lease: Duration,
    /// How long a message, dead or alive, is kept since it was sent or buried.
    pub retention: Duration,
    /// After this many unsettled or retried deliveries the queue itself buries a message; `None`: never.
    pub receives_max: Option<u32>,
    /// The longest body accepted, in bytes.
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

/// What can go wrong at the seam.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// The backend could not be reached or refused; the entry had no effect.
    #[error("the queue is unavailable")]
    Unavailable(#[source] BoxError),
    /// No answer: the entry may or may not have had its effect.
    #[error("the queue did not answer; the outcome is unknown")]
    OutcomeUnknown(#[source] BoxError),
    /// The delivery's lease ended and the message may be somebody else's now.
    #[error("the lease on this message was lost")]
    LeaseLost,
    /// No such dead letter.
    #[error("no such message")]
    NotFound,
    /// The body is larger than the backend takes.
    #[error("the body has {size} bytes, the queue takes {max}")]
    TooLarge {
        /// The body's size.
        size: usize,
        /// The limit.
        max: usize,
    },
    /// What is stored cannot be read back.
    #[error("a stored message is corrupt: {0}")]
    Corrupt(String),
}

/// Any backend's own error.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl QueueError {
    /// Whether the same call may succeed later.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::OutcomeUnknown(_))
    }
}
