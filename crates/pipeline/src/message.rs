//! What travels through a queue: [`Outgoing`] on the way in, [`Message`] on the way out, [`Receipt`] to settle it with.
//!
//! The body is bytes. This crate never looks inside; what a message means is its handler's affair.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, SystemTime};

/// Small text beside the body: a trace context, a reason, a content type.
pub type Attributes = BTreeMap<String, String>;

/// A message to be sent.
///
/// ```
/// use pipeline::Outgoing;
/// use std::time::Duration;
///
/// let message = Outgoing::new("hello").delayed(Duration::from_secs(5)).attribute("lang", "en");
/// assert_eq!(message.body, b"hello");
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Outgoing {
    /// The payload.
    pub body: Vec<u8>,
    /// Text that travels with it.
    pub attributes: Attributes,
    /// How long it stays hidden before it can be received. Zero by default.
    pub delay: Duration,
}

impl Outgoing {
    /// A message that can be received at once.
    pub fn new(body: impl Into<Vec<u8>>) -> Self {
        Self { body: body.into(), ..Self::default() }
    }

    /// The same, hidden for `delay`.
    #[must_use]
    pub fn delayed(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// The same, with one more attribute.
    #[must_use]
    pub fn attribute(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.attributes.insert(name.into(), value.into());
        self
    }
}

/// A queue's own name for a message; it stays the same over redeliveries, burial and replay.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MessageId(pub String);

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The right to settle one delivery of one message. A later delivery of the same message has another receipt.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Receipt(pub String);

/// A delivery: the message, and the receipt to settle it with before its lease ends.
#[derive(Debug, Clone)]
pub struct Message {
    /// The queue's id.
    pub id: MessageId,
    /// The payload, as sent.
    pub body: Vec<u8>,
    /// The attributes, as sent.
    pub attributes: Attributes,
    /// How many times it has been received, this time included; at least 1.
    pub receives: u32,
    /// When it was sent.
    pub sent_at: SystemTime,
    /// What settles this delivery.
    pub receipt: Receipt,
}

/// A message in the dead-letter queue.
#[derive(Debug, Clone)]
pub struct DeadLetter {
    /// The id it had in the queue.
    pub id: MessageId,
    /// The payload, as sent.
    pub body: Vec<u8>,
    /// The attributes, as sent.
    pub attributes: Attributes,
    /// Why it is here. Never empty: a queue that moves a message by itself says that it did.
    pub reason: String,
    /// Whether the queue moved it by itself (too many deliveries, too old); otherwise a handler's verdict did.
    pub by_queue: bool,
    /// How many times it had been received.
    pub receives: u32,
    /// When it was sent.
    pub sent_at: SystemTime,
    /// When it was buried.
    pub buried_at: SystemTime,
}
