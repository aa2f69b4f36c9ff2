//! What the consumer gave up: dead letters are inserted again, at a pause that grows while the database has trouble, so
//! that an outage of any length ends with every row in place and nobody called. What can never be a user is quarantined in
//! a table with its error and its bytes, and said so in the log.
//!
//! A letter leaves the queue only after its row, or its place in that table, is on disk. If the process dies between the
//! two, the next look finds the letter again, and nothing happens twice.

use std::sync::Arc;
use std::time::Duration;

use metrics::counter;
use pipeline::{DeadLetter, MessageId, Queue, QueueError, RetryPolicy};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::quarantine::Quarantined;
use super::store::{Fate, StoreError, UserStore};
use super::user::User;
use crate::errors::chain;
use crate::timestamp::Timestamp;

/// How many dead letters are read at once.
const LETTERS_MAX: usize = 5000;

/// Tries dead letters again.
pub struct DeadLetters {
    /// Where users go.
    pub store: Arc<dyn UserStore>,
    /// Where dead letters are.
    pub queue: Arc<dyn Queue>,
    /// How many rows are inserted at once.
    pub batch_size: usize,
    /// How often to look when there is nothing to do.
    pub interval: Duration,
    /// The longest pause while there is trouble.
    pub pause_max: Duration,
}

/// Why a look at the dead letters ended early.
#[derive(Debug, thiserror::Error)]
pub enum LookError {
    /// The queue.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// The database.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl DeadLetters {
    /// Looks again and again until shutdown.
    pub async fn run(&self, shutdown: CancellationToken) {
        let mut failures = 0;
        loop {
            let pause = match shutdown.run_until_cancelled(self.look()).await {
                None => return,
                // There was something, so there may be more.
                Some(Ok(handled)) => {
                    failures = 0;
                    if handled == LETTERS_MAX { Duration::ZERO } else { self.interval }
                }
                Some(Err(failure)) => {
                    failures += 1;
                    let pause = self.pauses().delay(failures, rand::random());
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

    fn pauses(&self) -> RetryPolicy {
        let (first_delay, delay_max) = (self.interval.min(self.pause_max), self.pause_max);
        RetryPolicy { attempts_max: u32::MAX, first_delay, factor: 2.0, delay_max }
    }

    /// Inserts, or quarantines, what there is; returns how many that was.
    pub async fn look(&self) -> Result<usize, LookError> {
        if self.queue.depth().await?.dead == 0 {
            return Ok(0);
        }
        // Asking the database first leaves the letters where they are while it is away.
        self.store.ping().await?;
        let letters = self.queue.dead_letters(None, LETTERS_MAX).await?;
        let mut done = Vec::with_capacity(letters.len());
        let kept = self.keep(&letters, &mut done).await;
        // What was kept before the trouble began leaves the queue all the same.
        for answer in self.queue.discard(&done).await {
            match answer {
                // One that is gone was taken care of by somebody else.
                Ok(()) | Err(QueueError::NotFound) => {}
                Err(failure) => return Err(failure.into()),
            }
        }
        kept?;
        Ok(letters.len())
    }

    /// Makes a row of each letter, or quarantines it; `done` are those that may leave the queue.
    async fn keep(&self, letters: &[DeadLetter], done: &mut Vec<MessageId>) -> Result<(), StoreError> {
        let (mut users, mut hopeless) = (Vec::new(), Vec::new());
        for letter in letters {
            match User::from_message(&letter.body) {
                Ok(user) => users.push((letter, user)),
                Err(invalid) => hopeless.push(Quarantined::new(letter, invalid.to_string())),
            }
        }
        for batch in users.chunks(self.batch_size.max(1)) {
            let rows: Vec<_> = batch.iter().map(|(_, user)| user.clone()).collect();
            let inserted = self.store.insert(&rows).await?;
            let before = done.len();
            for ((letter, _), fate) in batch.iter().zip(inserted.fates) {
                match fate {
                    Fate::Stored => done.push(letter.id.clone()),
                    Fate::Refused(reason) => {
                        hopeless.push(Quarantined::new(letter, format!("refused by the database: {reason}")));
                    }
                }
            }
            let rows = done.len() - before;
            counter!("baton_users_dead_letters_total", "result" => "inserted").increment(rows as u64);
            info!(action = "dead_letters_inserted", rows, "dead letters are rows now");
        }
        for batch in hopeless.chunks(self.batch_size.max(1)) {
            self.store.quarantine(batch).await?;
            for letter in batch {
                error!(action = "dead_letter_quarantined", messageId = letter.message_id, "{}", letter.error);
                done.push(MessageId(letter.message_id.clone()));
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

    use super::super::store::{Enrolled, Inserted, Trouble};
    use super::super::user::UserId;
    use super::*;

    /// A database that is away.
    #[derive(Default)]
    struct Away(AtomicUsize);

    fn away<T>() -> Result<T, StoreError> {
        Err(StoreError::new(Trouble::Down, "connection refused"))
    }

    #[async_trait]
    impl UserStore for Away {
        async fn insert(&self, _: &[User]) -> Result<Inserted, StoreError> {
            away()
        }
        async fn get(&self, _: UserId) -> Result<Option<Enrolled>, StoreError> {
            away()
        }
        async fn quarantine(&self, _: &[Quarantined]) -> Result<(), StoreError> {
            away()
        }
        async fn list_quarantined(&self, _: Option<&str>, _: usize) -> Result<Vec<Quarantined>, StoreError> {
            away()
        }
        async fn remove_quarantined(&self, _: &str) -> Result<bool, StoreError> {
            away()
        }
        async fn count_quarantined(&self) -> Result<u64, StoreError> {
            away()
        }
        async fn ping(&self) -> Result<(), StoreError> {
            self.0.fetch_add(1, Ordering::Relaxed);
            away()
        }
    }

    #[tokio::test]
    async fn letters_stay_where_they_are_while_the_database_is_away_and_the_pause_grows() {
        let queue = Arc::new(MemoryQueue::new("users", QueueOptions::default()));
        queue.send(&[Outgoing::new("{}")]).await;
        let message = queue.receive(1, Duration::ZERO).await.unwrap().remove(0);
        queue.bury(&[(message.receipt, "db_error".into())]).await;
        let store = Arc::new(Away::default());
        let (interval, pause_max) = (Duration::from_secs(5), Duration::from_secs(60));
        let letters = DeadLetters { store: store.clone(), queue: queue.clone(), batch_size: 10, interval, pause_max };
        assert!(matches!(letters.look().await, Err(LookError::Store(_))));
        assert_eq!(store.0.load(Ordering::Relaxed), 1, "it was asked before any letter was touched");
        assert_eq!(queue.dead_letters(None, 10).await.unwrap().len(), 1);
        let pauses: Vec<_> = (1..=6).map(|failures| letters.pauses().delay(failures, 1.0).as_secs()).collect();
        assert_eq!(pauses, [5, 10, 20, 40, 60, 60]);
    }
}
