//! From the queue into the database: each message is checked on its own, gathered with others, and inserted with them in
//! one statement. A message is acknowledged after the commit that holds its row.
//!
//! Each message has its own fate. What is no user, or what the database refuses, is a dead letter at once, with its
//! error. When the database itself has trouble, each message of the batch is queued again with a count and the reason,
//! and only then acknowledged; one that has been round too often is a dead letter, which [`super::dead_letters`] goes on
//! trying. Everything here may happen twice: a row that is there already is no error.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use metrics::{counter, histogram};
use pipeline::{BatchHandler, Message, Outcome, Outgoing, Queue};
use tokio::time::Instant;
use tracing::{info, warn};

use super::store::{Fate, Inserted, StoreError, UserStore};
use super::user::User;
use crate::errors::chain;

/// How often a message has been round; a number on the wire, which the existing service reads and writes as well.
pub const RETRIES: &str = "x-retries";
/// Why it went round the last time.
pub const RETRY_REASON: &str = "x-retry-reason";

/// The longest reason; it travels in a header.
const REASON_CHARS_MAX: usize = 200;
/// When the queue does not take a message for another round, it is the queue that has trouble: a short pause.
const QUEUE_PAUSE: Duration = Duration::from_secs(1);

/// Inserts batches.
pub struct Consumer {
    /// Where users go.
    pub store: Arc<dyn UserStore>,
    /// Where messages wait for another round.
    pub queue: Arc<dyn Queue>,
    /// How long they wait there.
    pub retry_ttl: Duration,
    /// How many rounds there are.
    pub retries_max: u32,
}

/// How many rounds it has been through.
fn retries(message: &Message) -> u32 {
    message.attributes.get(RETRIES).and_then(|count| count.parse().ok()).unwrap_or(0)
}

/// The same message, for another round.
fn again(message: &Message, reason: &str, delay: Duration) -> Outgoing {
    let mut attributes = message.attributes.clone();
    attributes.insert(RETRIES.to_owned(), retries(message).saturating_add(1).to_string());
    attributes.insert(RETRY_REASON.to_owned(), reason.to_owned());
    Outgoing { body: message.body.clone(), attributes, delay }
}

#[async_trait]
impl BatchHandler for Consumer {
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
            Ok(inserted) => settled(messages, inserted),
            Err(failure) => self.another_round(messages, &failure).await,
        }
    }
}

fn settled(batch: &[&Message], Inserted { fates, new }: Inserted) -> Vec<Outcome> {
    let (now, latency) = (SystemTime::now(), histogram!("baton_users_latency_seconds"));
    let mut stored = 0;
    let mut outcome = |(message, fate): (&&Message, Fate)| match fate {
        Fate::Stored => {
            stored += 1;
            latency.record(now.duration_since(message.sent_at).unwrap_or_default().as_secs_f64());
            Outcome::Done
        }
        Fate::Refused(reason) => Outcome::Dead { reason: format!("refused by the database: {reason}") },
    };
    let outcomes: Vec<_> = batch.iter().zip(fates).map(&mut outcome).collect();
    count("inserted", new);
    count("repeated", stored - new.min(stored));
    count("refused", batch.len() - stored);
    outcomes
}

impl Consumer {
    async fn another_round(&self, batch: &[&Message], failure: &StoreError) -> Vec<Outcome> {
        let kind = failure.trouble.name();
        counter!("baton_users_database_errors_total", "type" => kind).increment(1);
        warn!(action = "insert_failed", rows = batch.len(), trouble = kind, "{}", chain(failure));
        let reason = retry_reason(failure);
        let delay = self.retry_ttl.min(self.queue.capabilities().delay_max);
        let may_go: Vec<_> = batch.iter().filter(|message| retries(message) < self.retries_max).collect();
        let messages: Vec<_> = may_go.iter().map(|message| again(message, &reason, delay)).collect();
        let mut sent = self.queue.send(&messages).await.into_iter();
        let (mut again, mut dead, mut stuck) = (0, 0, 0);
        let outcomes = batch.iter().map(|message| {
            if retries(message) >= self.retries_max {
                dead += 1;
                return Outcome::Dead { reason: format!("{reason} (after {} retries)", retries(message)) };
            }
            match sent.next() {
                Some(Ok(_)) => {
                    again += 1;
                    Outcome::Done
                }
                // If it was taken after all, it is there twice, which does no harm.
                _ => {
                    stuck += 1;
                    Outcome::Retry { after: QUEUE_PAUSE, reason: "it could not be queued for another round".to_owned() }
                }
            }
        });
        let outcomes = outcomes.collect();
        info!(action = "another_round", again, dead, stuck, "queued again after database trouble");
        for (result, number) in [("retried", again), ("exhausted", dead), ("stuck", stuck)] {
            count(result, number);
        }
        outcomes
    }
}

/// As the existing service words it, short enough for a header.
fn retry_reason(failure: &StoreError) -> String {
    let text = format!("db_error: {}: {}", failure.trouble.name(), failure.source);
    text.chars().filter(|char| !char.is_control()).take(REASON_CHARS_MAX).collect()
}

fn count(result: &'static str, number: usize) {
    if number > 0 {
        counter!("baton_users_total", "result" => result).increment(number as u64);
    }
}
