//! Moves users from the queue into the database: each message is checked on its own, then inserted with others in one
//! statement. A message is acknowledged after the commit that holds its row.
//!
//! Each message has its own outcome. One that is not a valid user, or that the database refuses, becomes a dead letter at
//! once, with its error. When the database itself fails, each message of the batch is queued again with a retry count and
//! the reason, and only then acknowledged. A message that has used up its retries becomes a dead letter, which
//! [`super::dead_letter_consumer`] retries. Every step is safe to repeat: a row that exists already is no error.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use metrics::{counter, histogram};
use pipeline::{BatchHandler, Message, Outcome, Outgoing, Queue};
use tokio::time::Instant;
use tracing::{info, warn};

use super::store::{InsertOutcome, Inserted, UserStore, UserStoreError};
use super::user::User;
use crate::errors::chain;

/// Attribute with the number of retries; a number on the wire, which the existing service reads and writes too.
pub const RETRIES: &str = "x-retries";
/// Attribute with the reason of the last retry.
pub const RETRY_REASON: &str = "x-retry-reason";

/// Longest reason of a retry: it travels in a message header.
const REASON_CHARS_MAX: usize = 200;
/// Pause before the redelivery of a message that the queue did not take for a retry.
const QUEUE_PAUSE: Duration = Duration::from_secs(1);

/// Inserts batches of users.
pub struct UsersConsumer {
    /// Takes the rows.
    pub store: Arc<dyn UserStore>,
    /// The lane's queue, which also takes the retries.
    pub queue: Arc<dyn Queue>,
    /// Delay of a retry.
    pub retry_ttl: Duration,
    /// Retries before a message becomes a dead letter.
    pub retries_max: u32,
}

/// The retries that a message has used.
fn retries(message: &Message) -> u32 {
    message.attributes.get(RETRIES).and_then(|count| count.parse().ok()).unwrap_or(0)
}

/// The same message with one more retry counted.
fn retry_of(message: &Message, reason: &str, delay: Duration) -> Outgoing {
    let mut attributes = message.attributes.clone();
    attributes.insert(RETRIES.to_owned(), retries(message).saturating_add(1).to_string());
    attributes.insert(RETRY_REASON.to_owned(), reason.to_owned());
    Outgoing { body: message.body.clone(), attributes, delay }
}

#[async_trait]
impl BatchHandler for UsersConsumer {
    type Item = User;

    async fn prepare(&self, message: &Message) -> Result<User, Outcome> {
        User::from_message(&message.body).map_err(|invalid| {
            count("invalid", 1);
            Outcome::Dead { reason: invalid.to_string() }
        })
    }

    async fn handle(&self, users: &[User], messages: &[&Message]) -> Vec<Outcome> {
        let started = Instant::now();
        let inserted = self.store.insert(users).await;
        histogram!("baton_users_insert_seconds").record(started.elapsed().as_secs_f64());
        match inserted {
            Ok(inserted) => outcomes_of(messages, inserted),
            Err(failure) => self.retry(messages, &failure).await,
        }
    }
}

fn outcomes_of(batch: &[&Message], Inserted { outcomes, new }: Inserted) -> Vec<Outcome> {
    let (now, latency) = (SystemTime::now(), histogram!("baton_users_latency_seconds"));
    let mut stored = 0;
    let mut outcome = |(message, inserted): (&&Message, InsertOutcome)| match inserted {
        InsertOutcome::Stored => {
            stored += 1;
            latency.record(now.duration_since(message.sent_at).unwrap_or_default().as_secs_f64());
            Outcome::Done
        }
        InsertOutcome::Refused(reason) => Outcome::Dead { reason: format!("refused by the database: {reason}") },
    };
    let outcomes: Vec<_> = batch.iter().zip(outcomes).map(&mut outcome).collect();
    count("inserted", new);
    count("repeated", stored - new.min(stored));
    count("refused", batch.len() - stored);
    outcomes
}

impl UsersConsumer {
    /// Queues each message again, or gives up those without retries left.
    async fn retry(&self, batch: &[&Message], failure: &UserStoreError) -> Vec<Outcome> {
        let kind = failure.kind.name();
        counter!("baton_users_database_errors_total", "type" => kind).increment(1);
        warn!(action = "insert_failed", rows = batch.len(), kind, "a batch was not inserted: {}", chain(failure));
        let reason = retry_reason(failure);
        let delay = self.retry_ttl.min(self.queue.capabilities().delay_max);
        let retriable: Vec<_> = batch.iter().filter(|message| retries(message) < self.retries_max).collect();
        let messages: Vec<_> = retriable.iter().map(|message| retry_of(message, &reason, delay)).collect();
        let mut sent = self.queue.send(&messages).await.into_iter();
        let (mut retried, mut exhausted, mut stuck) = (0, 0, 0);
        let outcomes = batch.iter().map(|message| {
            if retries(message) >= self.retries_max {
                exhausted += 1;
                return Outcome::Dead { reason: format!("{reason} (after {} retries)", retries(message)) };
            }
            match sent.next() {
                Some(Ok(_)) => {
                    retried += 1;
                    Outcome::Done
                }
                // If the queue has it after all, the message exists twice, which does no harm.
                _ => {
                    stuck += 1;
                    Outcome::Retry { after: QUEUE_PAUSE, reason: "the queue did not take it for a retry".to_owned() }
                }
            }
        });
        let outcomes = outcomes.collect();
        info!(action = "batch_retried", retried, exhausted, stuck, "queued a batch again after a database failure");
        for (result, number) in [("retried", retried), ("exhausted", exhausted), ("stuck", stuck)] {
            count(result, number);
        }
        outcomes
    }
}

/// In the existing service's wording, short enough for a header.
fn retry_reason(failure: &UserStoreError) -> String {
    let text = format!("db_error: {}: {}", failure.kind.name(), failure.source);
    text.chars().filter(|char| !char.is_control()).take(REASON_CHARS_MAX).collect()
}

fn count(result: &'static str, number: usize) {
    if number > 0 {
        counter!("baton_users_total", "result" => result).increment(number as u64);
    }
}
