//! The embedded queue: rows in a SQLite file that several processes may share ([`crate::sqlite`]).
//!
//! A message is due once its `visible_at` has passed. Taking it moves `visible_at` to the end of the lease and writes a
//! new random token; only the receipt with this token settles it. The index `queue_messages_due` on (queue, visible_at,
//! id) keeps due messages at its front in delivery order, so taking ten messages reads ten entries however many follow.
//! Its last column lets [`Queue::depth`] count without reading rows.
//!
//! An idle receiver writes nothing: it reads, then sleeps until a commit, the next `visible_at` or the end of its wait.
//! Receivers of one process queue for `receive_lock`, so that a message wakes one of them and not all; the next receiver
//! looks as soon as the one before it has taken something.
//!
//! `statements` holds the SQL, `table` the work inside a database job, `rows` the conversion of rows.

mod rows;
mod statements;
mod table;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, named_params};
use tokio::time::Instant;
use uuid::Uuid;

use super::{Capabilities, Depth, NO_REASON, Queue, QueueError, QueueOptions, check_size};
use crate::message::{DeadLetter, Message, MessageId, Outgoing, Receipt};
use crate::sqlite::{Database, DatabaseError};
use rows::{after, limit, read_dead_letter, read_receipt, until_ms, write_attributes};
use statements::{
    ACK, COPY_FROM_DEAD, DEAD_DELETE, DEAD_LIST, EXTEND, HELD, INSERT, NEXT_VISIBLE, RELEASE, SCHEMA, UNDO_LEASE,
};
use table::SqliteQueueState;

/// Interval between two sweeps for messages past their retention.
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// Messages that one sweep removes; when it reaches this limit, the next sweep follows immediately.
const SWEEP_MAX: usize = 500;
/// Undeliverable messages that one take may bury before it returns.
const BURIED_PER_TAKE_MAX: usize = 100;
/// Upper limit of a receive's wait; longer ones are shortened to it.
const WAIT_MAX: Duration = Duration::from_secs(24 * 3600);
/// Returns the time in milliseconds since 1970. Tests set their own.
type NowMs = Arc<dyn Fn() -> i64 + Send + Sync>;

/// A queue in a SQLite file. Clones share the same queue.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let dir = tempfile::tempdir().unwrap();
/// use pipeline::queue::sqlite::SqliteQueue;
/// use pipeline::sqlite::Database;
/// use pipeline::{Outgoing, Queue, QueueOptions};
/// use std::time::Duration;
///
/// let db = Database::open(&dir.path().join("baton.db"))?;
/// let queue = SqliteQueue::open(&db, "greetings", QueueOptions::default()).await?;
/// queue.send(&[Outgoing::new("hello")]).await;
/// let message = queue.receive(10, Duration::from_secs(1)).await?.remove(0);
/// assert_eq!(message.body, b"hello");
/// queue.ack(&[message.receipt]).await;
/// # Ok::<(), Box<dyn std::error::Error>>(()) }).unwrap();
/// ```
#[derive(Clone)]
pub struct SqliteQueue {
    db: Database,
    state: Arc<SqliteQueueState>,
}

impl SqliteQueue {
    /// Opens the queue with this name, or creates it. All queues of a file share its tables.
    pub async fn open(db: &Database, name: &str, options: QueueOptions) -> Result<SqliteQueue, QueueError> {
        let clock = db.clock();
        Self::open_with_clock(db, name, options, Arc::new(move || clock.now_ms())).await
    }

    async fn open_with_clock(
        db: &Database,
        name: &str,
        options: QueueOptions,
        clock: NowMs,
    ) -> Result<SqliteQueue, QueueError> {
        let wanted = name.to_owned();
        let create = move |conn: &Connection| {
            conn.execute_batch(SCHEMA)?;
            conn.execute("INSERT INTO queue_names (name) VALUES (?1) ON CONFLICT (name) DO NOTHING", [&wanted])?;
            conn.query_row("SELECT id FROM queue_names WHERE name = ?1", [&wanted], |row| row.get(0))
        };
        let key = db.write(create).await?;
        let state = SqliteQueueState {
            name: name.to_owned(),
            key,
            options,
            signal: db.signal(&format!("queue {name}")),
            sweep_at: AtomicI64::new(clock()),
            clock,
            receive_lock: tokio::sync::Mutex::new(()),
            maybe_more: AtomicBool::new(false),
        };
        Ok(SqliteQueue { db: db.clone(), state: Arc::new(state) })
    }

    /// Adds messages inside the caller's write job, so that the caller's rows and the messages are one commit. Receivers
    /// wake after that commit. A body that is too large fails the job.
    ///
    /// ```
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let dir = tempfile::tempdir().unwrap();
    /// # use pipeline::{queue::sqlite::SqliteQueue, sqlite::Database, Outgoing, QueueOptions};
    /// # let db = Database::open(&dir.path().join("baton.db"))?;
    /// # let queue = SqliteQueue::open(&db, "orders", QueueOptions::default()).await?;
    /// # db.write(|conn| conn.execute_batch("CREATE TABLE orders (id INTEGER PRIMARY KEY) STRICT")).await?;
    /// db.write(move |conn| {
    ///     conn.execute("INSERT INTO orders (id) VALUES (7)", [])?;
    ///     queue.enqueue(conn, &[Outgoing::new("7")])
    /// })
    /// .await?;
    /// # Ok::<(), Box<dyn std::error::Error>>(()) }).unwrap();
    /// ```
    pub fn enqueue(&self, conn: &Connection, messages: &[Outgoing]) -> rusqlite::Result<Vec<MessageId>> {
        let state = &self.state;
        let now = state.now_ms();
        let mut insert = conn.prepare_cached(INSERT)?;
        let mut ids = Vec::with_capacity(messages.len());
        for message in messages {
            check_size(message.body.len(), state.options.body_bytes_max)
                .map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))?;
            let id = Uuid::now_v7().to_string();
            let visible_at = after(now, message.delay);
            insert.execute(named_params! {
                ":queue": state.key,
                ":visible_at": visible_at,
                ":sent_at": now,
                ":expires_at": after(visible_at, state.options.retention),
                ":message_id": id,
                ":attributes": write_attributes(&message.attributes),
                ":body": message.body,
            })?;
            ids.push(MessageId(id));
        }
        state.signal.mark();
        Ok(ids)
    }

    async fn take(&self, max: usize) -> Result<Vec<Message>, QueueError> {
        let queue = self.clone();
        let taken = self.db.write(move |conn| {
            let messages = queue.state.take(conn, max)?;
            Ok(LeasedMessages { queue, messages })
        });
        Ok(taken.await?.accept())
    }

    /// Applies `change` to each receipt, all in one job. `change` returns the number of rows that it changed.
    async fn settle<E, F>(&self, entries: Vec<(Receipt, E)>, change: F) -> Vec<Result<(), QueueError>>
    where
        E: Send + 'static,
        F: Fn(&SqliteQueueState, &Connection, (i64, i64), &E) -> rusqlite::Result<usize> + Send + 'static,
    {
        if entries.is_empty() {
            return Vec::new();
        }
        let count = entries.len();
        let state = self.state.clone();
        let job = move |conn: &Connection| {
            let settle_one = |(receipt, extra): &(Receipt, E)| match read_receipt(receipt) {
                Some(lease) => Ok(change(&state, conn, lease, extra)? > 0),
                None => Ok(false),
            };
            entries.iter().map(settle_one).collect::<rusqlite::Result<Vec<bool>>>()
        };
        answer_each(count, self.db.write(job).await, || QueueError::LeaseLost)
    }

    /// Applies `change` to each dead letter that exists and deletes it, all in one job.
    async fn change_dead<F>(&self, ids: &[MessageId], change: F) -> Vec<Result<(), QueueError>>
    where
        F: Fn(&SqliteQueueState, &Connection, i64) -> rusqlite::Result<()> + Send + 'static,
    {
        if ids.is_empty() {
            return Vec::new();
        }
        let state = self.state.clone();
        let wanted = ids.to_vec();
        let job = move |conn: &Connection| {
            let change_one = |id: &MessageId| match state.dead_row_id(conn, id)? {
                Some(row_id) => {
                    change(&state, conn, row_id)?;
                    conn.prepare_cached(DEAD_DELETE)?.execute([row_id])?;
                    Ok(true)
                }
                None => Ok(false),
            };
            wanted.iter().map(change_one).collect::<rusqlite::Result<Vec<bool>>>()
        };
        answer_each(ids.len(), self.db.write(job).await, || QueueError::NotFound)
    }

    /// Every [`SWEEP_EVERY`], buries up to [`SWEEP_MAX`] messages past their retention and deletes old dead letters.
    async fn sweep_if_due(&self) -> Result<(), QueueError> {
        let now = self.state.now_ms();
        let due = self.state.sweep_at.load(Ordering::Relaxed);
        let next = after(now, SWEEP_EVERY);
        if now < due || self.state.sweep_at.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return Ok(());
        }
        let state = self.state.clone();
        if !self.db.read(move |conn| state.needs_sweep(conn)).await? {
            return Ok(());
        }
        let state = self.state.clone();
        let swept = self.db.write(move |conn| state.sweep(conn)).await?;
        if swept >= SWEEP_MAX {
            self.state.sweep_at.store(now, Ordering::Relaxed);
        }
        Ok(())
    }
}

#[async_trait]
impl Queue for SqliteQueue {
    fn name(&self) -> &str {
        &self.state.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            durable: true,
            ordered: true,
            fenced: true,
            shared: true,
            cancel_safe: true,
            messages_per_request: 1,
            dead_letters_per_read: 1,
            body_bytes_max: self.state.options.body_bytes_max,
            delay_max: Duration::from_secs(365 * 24 * 3600),
        }
    }

    async fn send(&self, messages: &[Outgoing]) -> Vec<Result<MessageId, QueueError>> {
        let max = self.state.options.body_bytes_max;
        let checks: Vec<_> = messages.iter().map(|message| check_size(message.body.len(), max)).collect();
        let fitting: Vec<Outgoing> = messages
            .iter()
            .zip(&checks)
            .filter(|(_, check)| check.is_ok())
            .map(|(message, _)| message.clone())
            .collect();
        if fitting.is_empty() {
            return checks.into_iter().map(|check| check.map(|()| MessageId(String::new()))).collect();
        }
        let queue = self.clone();
        let mut stored = self.db.write(move |conn| queue.enqueue(conn, &fitting)).await.map(Vec::into_iter);
        let answer = |check: Result<(), QueueError>| {
            check?;
            match &mut stored {
                Ok(ids) => ids.next().ok_or_else(|| QueueError::Corrupt("fewer ids than messages".into())),
                Err(error) => Err(queue_error(error)),
            }
        };
        checks.into_iter().map(answer).collect()
    }

    async fn receive(&self, max: usize, wait: Duration) -> Result<Vec<Message>, QueueError> {
        if max == 0 {
            return Ok(Vec::new());
        }
        self.sweep_if_due().await?;
        let deadline = Instant::now() + wait.min(WAIT_MAX);
        // A receiver that does not get the lock in time still looks once.
        let _lock = tokio::time::timeout_at(deadline, self.state.receive_lock.lock()).await.ok();
        loop {
            // Subscribe before reading, or a commit between the two would be missed.
            let mut commits = self.state.signal.subscribe();
            let next = if self.state.maybe_more.swap(false, Ordering::Relaxed) {
                Some(i64::MIN)
            } else {
                let key = self.state.key;
                let look = move |conn: &Connection| {
                    conn.prepare_cached(NEXT_VISIBLE)?.query_row([key], |row| row.get::<_, i64>(0)).optional()
                };
                self.db.read(look).await?
            };
            let now = self.state.now_ms();
            if next.is_some_and(|visible_at| visible_at <= now) {
                let messages = self.take(max).await?;
                if !messages.is_empty() {
                    self.state.maybe_more.store(messages.len() == max, Ordering::Relaxed);
                    return Ok(messages);
                }
            }
            if Instant::now() >= deadline {
                return Ok(Vec::new());
            }
            let until = match next {
                Some(visible_at) => deadline.min(Instant::now() + until_ms(now, visible_at)),
                None => deadline,
            };
            tokio::select! {
                () = commits.changed() => {}
                () = tokio::time::sleep_until(until) => {}
            }
        }
    }

    async fn ack(&self, receipts: &[Receipt]) -> Vec<Result<(), QueueError>> {
        let entries = receipts.iter().map(|receipt| (receipt.clone(), ())).collect();
        self.settle(entries, |_, conn, (id, token), ()| conn.prepare_cached(ACK)?.execute([id, token])).await
    }

    async fn retry_after(&self, entries: &[(Receipt, Duration)]) -> Vec<Result<(), QueueError>> {
        let change = |state: &SqliteQueueState, conn: &Connection, (id, token), delay: &Duration| {
            state.signal.mark();
            conn.prepare_cached(RELEASE)?.execute([id, token, after(state.now_ms(), *delay)])
        };
        self.settle(entries.to_vec(), change).await
    }

    async fn bury(&self, entries: &[(Receipt, String)]) -> Vec<Result<(), QueueError>> {
        let change = |state: &SqliteQueueState, conn: &Connection, (id, token), reason: &String| {
            let held = conn.prepare_cached(HELD)?.exists([id, token])?;
            if held {
                state.bury(conn, id, if reason.is_empty() { NO_REASON } else { reason }, false)?;
            }
            Ok(usize::from(held))
        };
        self.settle(entries.to_vec(), change).await
    }

    async fn extend(&self, receipts: &[Receipt], duration: Duration) -> Vec<Result<(), QueueError>> {
        let entries = receipts.iter().map(|receipt| (receipt.clone(), duration)).collect();
        let change = |state: &SqliteQueueState, conn: &Connection, (id, token), duration: &Duration| {
            // The lease may end earlier than before; sleeping receivers must recompute their wait.
            state.signal.mark();
            conn.prepare_cached(EXTEND)?.execute([id, token, after(state.now_ms(), *duration)])
        };
        self.settle(entries, change).await
    }

    fn lease(&self) -> Duration {
        self.state.options.lease
    }

    async fn depth(&self) -> Result<Depth, QueueError> {
        let state = self.state.clone();
        Ok(self.db.read(move |conn| state.depth(conn)).await?)
    }

    async fn dead_letters(&self, after: Option<&MessageId>, max: usize) -> Result<Vec<DeadLetter>, QueueError> {
        let state = self.state.clone();
        let after = after.cloned();
        let list = self.db.read(move |conn| {
            let row_id = match &after {
                None => 0,
                Some(id) => match state.dead_row_id(conn, id)? {
                    Some(row_id) => row_id,
                    None => return Ok(None),
                },
            };
            let mut list = conn.prepare_cached(DEAD_LIST)?;
            let wanted = named_params! { ":queue": state.key, ":after": row_id, ":max": limit(max) };
            list.query_map(wanted, read_dead_letter)?.collect::<rusqlite::Result<Vec<_>>>().map(Some)
        });
        list.await?.ok_or(QueueError::NotFound)
    }

    async fn replay(&self, ids: &[MessageId], delay: Duration) -> Vec<Result<(), QueueError>> {
        let change = move |state: &SqliteQueueState, conn: &Connection, row_id| {
            let visible_at = after(state.now_ms(), delay);
            let expires_at = after(visible_at, state.options.retention);
            conn.prepare_cached(COPY_FROM_DEAD)?.execute([row_id, visible_at, expires_at])?;
            state.signal.mark();
            Ok(())
        };
        self.change_dead(ids, change).await
    }

    async fn discard(&self, ids: &[MessageId]) -> Vec<Result<(), QueueError>> {
        self.change_dead(ids, |_, _, _| Ok(())).await
    }
}

/// Messages leased by a take and not yet returned to the receiver. If the receive was cancelled meanwhile, dropping this
/// makes them due immediately, with their earlier receive count, instead of after the lease.
struct LeasedMessages {
    queue: SqliteQueue,
    messages: Vec<Message>,
}

impl LeasedMessages {
    fn accept(mut self) -> Vec<Message> {
        std::mem::take(&mut self.messages)
    }
}

impl Drop for LeasedMessages {
    fn drop(&mut self) {
        if self.messages.is_empty() {
            return;
        }
        let receipts: Vec<Receipt> = self.messages.drain(..).map(|message| message.receipt).collect();
        let state = self.queue.state.clone();
        // If the backlog is full, the messages become due when the lease ends.
        self.queue.db.write_detached(move |conn| {
            for (id, token) in receipts.iter().filter_map(read_receipt) {
                conn.prepare_cached(UNDO_LEASE)?.execute([id, token, state.now_ms()])?;
            }
            state.signal.mark();
            Ok(())
        });
    }
}

/// Spreads one job's result over its entries: `missed` where no row was changed.
fn answer_each(
    count: usize,
    changed: Result<Vec<bool>, DatabaseError>,
    missed: impl Fn() -> QueueError,
) -> Vec<Result<(), QueueError>> {
    match changed {
        Ok(changed) => changed.into_iter().map(|hit| if hit { Ok(()) } else { Err(missed()) }).collect(),
        Err(error) => (0..count).map(|_| Err(queue_error(&error))).collect(),
    }
}

/// Converts a database error once for each entry of a batch; the error itself is not `Clone`.
fn queue_error(error: &DatabaseError) -> QueueError {
    let text = match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    };
    match error {
        DatabaseError::OutcomeUnknown(_) => QueueError::OutcomeUnknown(text.into()),
        _ => QueueError::Unavailable(text.into()),
    }
}

impl From<DatabaseError> for QueueError {
    fn from(error: DatabaseError) -> Self {
        match error {
            DatabaseError::OutcomeUnknown(_) => Self::OutcomeUnknown(error.into()),
            _ => Self::Unavailable(error.into()),
        }
    }
}
#[cfg(test)]
mod tests;
