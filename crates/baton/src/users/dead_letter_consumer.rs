//! Retries dead letters: each is inserted again, with a pause that grows while the database fails, so that after an
//! outage of any length every row is in place without an operator. A message that can never become a user is moved to the
//! [quarantine](super::quarantined_message) and logged as an error.
//!
//! A dead letter leaves the queue only after its row, or its place in the quarantine, is on disk. If the process dies
//! between the two, the next pass finds the dead letter again, and the repeated insert changes nothing.

use std::sync::Arc;
use std::time::Duration;

use metrics::counter;
use pipeline::{DeadLetter, MessageId, Queue, RetryPolicy};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::quarantined_message::Quarantined;
use super::store::{InsertOutcome, UserStore};
use super::user::User;
use crate::dead_letters::{DeadLetterError, require_moved};
use crate::errors::chain;

/// Maximum number of dead letters in one pass.
const PASS_MAX: usize = 5000;

/// Retries dead letters until shutdown.
pub struct DeadLetterConsumer {
    /// Takes the rows and the quarantined messages.
    pub store: Arc<dyn UserStore>,
    /// The lane's queue, with its dead letters.
    pub queue: Arc<dyn Queue>,
    /// Rows in one insert.
    pub batch_size: usize,
    /// Time between two passes while there is nothing to do.
    pub interval: Duration,
    /// Longest pause after repeated failures.
    pub pause_max: Duration,
}

impl DeadLetterConsumer {
    /// Makes one pass after the other until shutdown.
    pub async fn run(&self, shutdown: CancellationToken) {
        let mut failures = 0;
        loop {
            let pause = match shutdown.run_until_cancelled(self.pass()).await {
                None => return,
                Some(Ok(handled)) => {
                    failures = 0;
                    // A full pass may have left some.
                    if handled == PASS_MAX { Duration::ZERO } else { self.interval }
                }
                Some(Err(failure)) => {
                    failures += 1;
                    let pause = self.backoff().delay(failures, rand::random());
                    counter!("baton_users_dead_letter_failures_total").increment(1);
                    let after_ms = pause.as_millis();
                    warn!(action = "dead_letters_wait", after_ms, "dead letters wait: {}", chain(&failure));
                    pause
                }
            };
            if shutdown.run_until_cancelled(tokio::time::sleep(pause)).await.is_none() {
                return;
            }
        }
    }

    fn backoff(&self) -> RetryPolicy {
        let (first_delay, delay_max) = (self.interval.min(self.pause_max), self.pause_max);
        RetryPolicy { attempts_max: u32::MAX, first_delay, factor: 2.0, delay_max }
    }

    /// Inserts or quarantines the dead letters in the queue; returns their number.
    pub async fn pass(&self) -> Result<usize, DeadLetterError> {
        if self.queue.depth().await?.dead == 0 {
            return Ok(0);
        }
        // Asked first, so that dead letters stay untouched while the database is away.
        self.store.ping().await.map_err(DeadLetterError::store)?;
        let letters = self.queue.dead_letters(None, PASS_MAX).await?;
        let mut kept = Vec::with_capacity(letters.len());
        let result = self.keep(&letters, &mut kept).await;
        // Those kept before a failure leave the queue all the same.
        require_moved(self.queue.discard(&kept).await)?;
        result?;
        Ok(letters.len())
    }

    /// Makes a row of each dead letter, or quarantines it. Adds the ids that may leave the queue to `kept`.
    async fn keep(&self, letters: &[DeadLetter], kept: &mut Vec<MessageId>) -> Result<(), DeadLetterError> {
        let (mut users, mut hopeless) = (Vec::new(), Vec::new());
        for letter in letters {
            match User::from_message(&letter.body) {
                Ok(user) => users.push((letter, user)),
                Err(invalid) => hopeless.push(Quarantined::new(letter, invalid.to_string())),
            }
        }
        for batch in users.chunks(self.batch_size.max(1)) {
            let rows: Vec<_> = batch.iter().map(|(_, user)| user.clone()).collect();
            let inserted = self.store.insert(&rows).await.map_err(DeadLetterError::store)?;
            let before = kept.len();
            for ((letter, _), outcome) in batch.iter().zip(inserted.outcomes) {
                match outcome {
                    InsertOutcome::Stored => kept.push(letter.id.clone()),
                    InsertOutcome::Refused(reason) => {
                        hopeless.push(Quarantined::new(letter, format!("refused by the database: {reason}")));
                    }
                }
            }
            let rows = kept.len() - before;
            counter!("baton_users_dead_letters_total", "result" => "inserted").increment(rows as u64);
            info!(action = "dead_letters_inserted", rows, "inserted {rows} dead letters as users");
        }
        for batch in hopeless.chunks(self.batch_size.max(1)) {
            self.store.quarantine(batch).await.map_err(DeadLetterError::store)?;
            for message in batch {
                let (id, reason) = (&message.message_id, &message.error);
                error!(action = "dead_letter_quarantined", messageId = id, "a message was quarantined: {reason}");
                kept.push(MessageId(message.message_id.clone()));
            }
            counter!("baton_users_dead_letters_total", "result" => "quarantined").increment(batch.len() as u64);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use async_trait::async_trait;
    use pipeline::queue::memory::MemoryQueue;
    use pipeline::{Outgoing, QueueOptions};

    use super::super::store::{Enrolled, Inserted, UserStoreError, UserStoreErrorKind};
    use super::super::user::UserId;
    use super::*;

    /// A database that is away.
    #[derive(Default)]
    struct Away(AtomicUsize);

    fn away<T>() -> Result<T, UserStoreError> {
        Err(UserStoreError::new(UserStoreErrorKind::Down, "connection refused"))
    }

    #[async_trait]
    impl UserStore for Away {
        async fn insert(&self, _: &[User]) -> Result<Inserted, UserStoreError> {
            away()
        }
        async fn get(&self, _: UserId) -> Result<Option<Enrolled>, UserStoreError> {
            away()
        }
        async fn quarantine(&self, _: &[Quarantined]) -> Result<(), UserStoreError> {
            away()
        }
        async fn list_quarantined(&self, _: Option<&str>, _: usize) -> Result<Vec<Quarantined>, UserStoreError> {
            away()
        }
        async fn remove_quarantined(&self, _: &str) -> Result<bool, UserStoreError> {
            away()
        }
        async fn count_quarantined(&self) -> Result<u64, UserStoreError> {
            away()
        }
        async fn ping(&self) -> Result<(), UserStoreError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            away()
        }
    }

    #[tokio::test]
    async fn dead_letters_stay_in_the_queue_while_the_database_is_away_and_the_pause_grows() {
        let queue = Arc::new(MemoryQueue::new("users", QueueOptions::default()));
        queue.send(&[Outgoing::new("{}")]).await;
        let message = queue.receive(1, Duration::ZERO).await.unwrap().remove(0);
        queue.bury(&[(message.receipt, "db_error".into())]).await;
        let store = Arc::new(Away::default());
        let (interval, pause_max) = (Duration::from_secs(5), Duration::from_secs(60));
        let consumer =
            DeadLetterConsumer { store: store.clone(), queue: queue.clone(), batch_size: 10, interval, pause_max };
        assert!(matches!(consumer.pass().await, Err(DeadLetterError::Store(_))));
        assert_eq!(store.0.load(Ordering::Relaxed), 1, "it was asked before any dead letter was touched");
        assert_eq!(queue.dead_letters(None, 10).await.unwrap().len(), 1);
        let pauses: Vec<_> = (1..=6).map(|failures| consumer.backoff().delay(failures, 1.0).as_secs()).collect();
        assert_eq!(pauses, [5, 10, 20, 40, 60, 60]);
    }
}
