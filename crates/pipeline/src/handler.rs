//! All that a user of the library writes: a [`Handler`] (one message) or a [`BatchHandler`] (many), and the
//! [`Outcome`] that each returns. A verdict is a value, not an error: the pipeline acts on it.

use std::time::Duration;

use async_trait::async_trait;

use crate::message::Message;

/// What is to become of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Finished: remove it.
    Done,
    /// Not now: deliver it again after a while.
    Retry {
        /// How long to hide it.
        after: Duration,
        /// For the log.
        reason: String,
    },
    /// Never: move it to the dead-letter queue.
    Dead {
        /// Kept with the dead letter.
        reason: String,
    },
}

/// Handles one message at a time, many at once.
///
/// Delivery is at least once: the same message may come again, even while an earlier delivery of it is still
/// being handled (its lease was lost). Whatever must happen once is the handler's to guard.
#[async_trait]
pub trait Handler: Send + Sync + 'static {
    /// Decides about one message. A panic counts as a failed attempt.
    async fn handle(&self, message: &Message) -> Outcome;

    /// Awaited before each receive. Stay in here while there is no point in taking work.
    async fn ready(&self) {}
}

/// Handles messages in groups: each is prepared on its own, then handled with its batch.
#[async_trait]
pub trait BatchHandler: Send + Sync + 'static {
    /// What `prepare` makes of a message.
    type Item: Send + 'static;

    /// Checks and parses one message; an `Err` settles it without joining a batch.
    async fn prepare(&self, message: &Message) -> Result<Self::Item, Outcome>;

    /// Handles a batch: one outcome for each item, in order. `messages` are those that the items were made of. A panic,
    /// or a list of another length, is a failed attempt of every message in it.
    async fn handle(&self, batch: &[Self::Item], messages: &[&Message]) -> Vec<Outcome>;

    /// Awaited before each receive. Stay in here while there is no point in taking work.
    async fn ready(&self) {}
}
