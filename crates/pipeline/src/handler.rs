//! The traits that a user of the library implements, [`Handler`] (one message) or [`BatchHandler`] (many), and the
//! [`Outcome`] that they return. An outcome is a value, not an error: the pipeline acts on it.

use std::time::Duration;

use async_trait::async_trait;

use crate::message::Message;

/// What the pipeline does with a handled message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Finished: removes the message.
    Done,
    /// Delivers the message again later.
    Retry {
        /// How long the message stays hidden.
        after: Duration,
        /// Written to the log.
        reason: String,
    },
    /// Moves the message to the dead-letter queue.
    Dead {
        /// Stored with the dead letter.
        reason: String,
    },
}

/// Handles one message per call; many calls run at the same time.
///
/// Delivery is at least once: a message may be delivered again, even while an earlier delivery of it is still being
/// handled (after its lease was lost). A handler whose effect must happen once guards it itself.
#[async_trait]
pub trait Handler: Send + Sync + 'static {
    /// Handles one message. A panic counts as a failed attempt.
    async fn handle(&self, message: &Message) -> Outcome;

    /// Awaited before each receive. Return when the handler can do work: until then nothing is received.
    async fn ready(&self) {}
}

/// Handles messages in batches: each is prepared alone, then handled with its batch.
#[async_trait]
pub trait BatchHandler: Send + Sync + 'static {
    /// The parsed form of a message.
    type Item: Send + 'static;

    /// Checks and parses one message. An `Err` settles the message without a batch.
    async fn prepare(&self, message: &Message) -> Result<Self::Item, Outcome>;

    /// Handles a batch and returns one outcome for each item, in order. `messages` holds the message of each item. A
    /// panic, or a list of the wrong length, counts as a failed attempt of every message in the batch.
    async fn handle(&self, batch: &[Self::Item], messages: &[&Message]) -> Vec<Outcome>;

    /// Awaited before each receive. Return when the handler can do work: until then nothing is received.
    async fn ready(&self) {}
}
