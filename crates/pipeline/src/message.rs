//! The messages of a queue: [`Outgoing`] is sent, [`Message`] is received, [`Receipt`] settles it.
//!
//! The body is bytes that this crate never interprets.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, SystemTime};

/// Short texts that travel with the body, for example a trace context or a content type.
pub type Attributes = BTreeMap<String, String>;

/// A message to send.
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
    /// The payload, at most [`Capabilities::body_bytes_max`](crate::Capabilities::body_bytes_max) bytes.
    pub body: Vec<u8>,
    /// Texts that travel with the body. Empty by default.
    pub attributes: Attributes,
    /// How long the message stays hidden before it can be received. Zero by default.
    pub delay: Duration,
}

impl Outgoing {
    /// A message without attributes that can be received immediately.
    pub fn new(body: impl Into<Vec<u8>>) -> Self {
        Self { body: body.into(), ..Self::default() }
    }

    /// Hides the message for `delay` after it is sent.
    #[must_use]
    pub fn delayed(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Adds an attribute, or replaces the one of that name.
    #[must_use]
    pub fn attribute(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.attributes.insert(name.into(), value.into());
        self
    }
}

/// The id that the queue gave a message. Redelivery, burial and replay keep it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MessageId(pub String);

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Identifies one delivery when it is settled. Each delivery of the same message has another receipt.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Receipt(pub String);

/// A received message, with the receipt that settles this delivery before its lease ends.
#[derive(Debug, Clone)]
pub struct Message {
    /// The id that the queue gave the message.
    pub id: MessageId,
    /// The payload, as sent.
    pub body: Vec<u8>,
    /// The attributes, as sent.
    pub attributes: Attributes,
    /// Deliveries so far, this one included; at least 1.
    pub receives: u32,
    /// When the message was first sent; a retry or replay does not change it.
    pub sent_at: SystemTime,
    /// Settles this delivery.
    pub receipt: Receipt,
}

/// A message in the dead-letter queue.
#[derive(Debug, Clone)]
pub struct DeadLetter {
    /// The id that the message had in the queue.
    pub id: MessageId,
    /// The payload, as sent.
    pub body: Vec<u8>,
    /// The attributes, as sent.
    pub attributes: Attributes,
    /// Why the message was buried. Never empty: a queue that buries a message itself writes its own reason.
    pub reason: String,
    /// Whether the queue buried it itself (too many deliveries, too old) and not a handler's outcome.
    pub by_queue: bool,
    /// Deliveries before the burial.
    pub receives: u32,
    /// When the message was first sent.
    pub sent_at: SystemTime,
    /// When the message was moved to the dead-letter queue.
    pub buried_at: SystemTime,
}
