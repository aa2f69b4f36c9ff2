//! The embedded queue: rows in a SQLite file that several processes may share ([`crate::sqlite`]).
//!
//! A message is due when its `visible_at` has come. Taking it moves `visible_at` to the end of the lease and writes a
//! new random token, and only the receipt that carries this token settles it. The index `queue_messages_due` on
//! (queue, visible_at, id) keeps due messages at its front in delivery order, so taking ten reads ten entries
//! whether a thousand or a million wait behind them; its last column lets [`Queue::depth`] count without the rows.
//!
//! An idle receiver writes nothing: it looks with a read, then sleeps until a commit, the next `visible_at` or the end
//! of its wait. Receivers of one process stand in line (`Shared::turn`) so that a message wakes one of them, not all;
//! the next in line looks for itself as soon as the one before has taken something.

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

use super::{Capabilities, Depth, Queue, QueueError, QueueOptions};
use crate::message::{DeadLetter, Message, MessageId, Outgoing, Receipt};
use crate::sqlite::{Database, DatabaseError};
use rows::{after, limit, read_dead_letter, read_receipt, until_ms, write_attributes};
use statements::{
    ACK, COPY_FROM_DEAD, DEAD_DELETE, DEAD_LIST, EXTEND, HELD, INSERT, NEXT_VISIBLE, RELEASE, SCHEMA, UNTAKE,
};
use table::Shared;

/// Between two looks for messages whose retention is over.
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// How many of them one look removes; when there are more, the next look comes at once.
const SWEEP_MAX: usize = 500;
/// How many messages one take may bury on its way to those that it delivers.
const BURIED_PER_TAKE_MAX: usize = 100;
/// A wait longer than this is this long.
const WAIT_MAX: Duration = Duration::from_secs(24 * 3600);
/// Milliseconds since 1970.
type Clock = Arc<dyn Fn() -> i64 + Send + Sync>;

/// A queue in a SQLite file. Cloning it is cheap and gives the same one.
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
    shared: Arc<Shared>,
}

impl SqliteQueue {
    /// Opens the queue of that name, creating it when missing. All queues of a file share its tables.
    pub async fn open(db: &Database, name: &str, options: QueueOptions) -> Result<SqliteQueue, QueueError> {
        let clock = db.clock();
        Self::open_with_clock(db, name, options, Arc::new(move || clock.now_ms())).await
    }

    async fn open_with_clock(
        db: &Database,
        name: &str,
        options: QueueOptions,
        clock: Clock,
    ) -> Result<SqliteQueue, QueueError> {
        let wanted = name.to_owned();
        let create = move |conn: &Connection| {
            conn.execute_batch(SCHEMA)?;
            conn.execute("INSERT INTO queue_names (name) VALUES (?1) ON CONFLICT (name) DO NOTHING", [&wanted])?;
            conn.query_row("SELECT id FROM queue_names WHERE name = ?1", [&wanted], |row| row.get(0))
        };
        let key = db.write(create).await?;
        let shared = Shared {
            name: name.to_owned(),
            key,
            options,
            signal: db.signal(&format!("queue {name}")),
            sweep_at: AtomicI64::new(clock()),
            clock,
            turn: tokio::sync::Mutex::new(()),
            more: AtomicBool::new(false),
        };
        Ok(SqliteQueue { db: db.clone(), shared: Arc::new(shared) })
    }

    /// Adds messages inside a write job of the caller's, so that the caller's row and its message are one commit.
    /// Receivers wake after that commit. A body that is too large fails the job.
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
        let shared = &self.shared;
        let now = shared.now_ms();
        let mut insert = conn.prepare_cached(INSERT)?;
        let mut ids = Vec::with_capacity(messages.len());
        for message in messages {
            shared.check_size(message).map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))?;
            let id = Uuid::now_v7().to_string();
            let visible_at = after(now, message.delay);
            insert.execute(named_params! {
                ":queue": shared.key,
                ":visible_at": visible_at,
                ":sent_at": now,
                ":expires_at": after(visible_at, shared.options.retention),
                ":message_id": id,
                ":attributes": write_attributes(&message.attributes),
                ":body": message.body,
            })?;
            ids.push(MessageId(id));
        }
        shared.signal.mark();
        Ok(ids)
    }

    async fn take(&self, max: usize) -> Result<Vec<Message>, QueueError> {
        let queue = self.clone();
        let taken = self.db.write(move |conn| {
            let messages = queue.shared.take(conn, max)?;
            Ok(Taken { queue, messages })
        });
        Ok(taken.await?.accept())
    }

    /// Applies `change` to each receipt, all in one job; it answers how many rows it changed.
    async fn settle<E, F>(&self, entries: Vec<(Receipt, E)>, change: F) -> Vec<Result<(), QueueError>>
    where
        E: Send + 'static,
        F: Fn(&Shared, &Connection, (i64, i64), &E) -> rusqlite::Result<usize> + Send + 'static,
    {
        if entries.is_empty() {
            return Vec::new();
        }
        let count = entries.len();
        let shared = self.shared.clone();
        let job = move |conn: &Connection| {
            let settle_one = |(receipt, extra): &(Receipt, E)| match read_receipt(receipt) {
                Some(lease) => Ok(change(&shared, conn, lease, extra)? > 0),
                None => Ok(false),
            };
            entries.iter().map(settle_one).collect::<rusqlite::Result<Vec<bool>>>()
        };
        answer_each(count, self.db.write(job).await, || QueueError::LeaseLost)
    }

    /// Applies `change` to each dead letter that exists, all in one job.
    async fn change_dead<F>(&self, ids: &[MessageId], change: F) -> Vec<Result<(), QueueError>>
    where
        F: Fn(&Shared, &Connection, i64) -> rusqlite::Result<()> + Send + 'static,
    {
        if ids.is_empty() {
            return Vec::new();
        }
        let shared = self.shared.clone();
        let wanted = ids.to_vec();
        let job = move |conn: &Connection| {
            let change_one = |id: &MessageId| match shared.dead_place(conn, id)? {
                Some(place) => {
                    change(&shared, conn, place)?;
                    conn.prepare_cached(DEAD_DELETE)?.execute([place])?;
                    Ok(true)
                }
                None => Ok(false),
            };
            wanted.iter().map(change_one).collect::<rusqlite::Result<Vec<bool>>>()
        };
        answer_each(ids.len(), self.db.write(job).await, || QueueError::NotFound)
    }

    /// Buries what is past its retention and drops old dead letters, now and then and a few at a time.
    async fn sweep_if_due(&self) -> Result<(), QueueError> {
        let now = self.shared.now_ms();
        let due = self.shared.sweep_at.load(Ordering::Relaxed);
        let next = after(now, SWEEP_EVERY);
        if now < due || self.shared.sweep_at.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_err()
        {
            return Ok(());
        }
        let shared = self.shared.clone();
        if !self.db.read(move |conn| shared.needs_sweep(conn)).await? {
            return Ok(());
        }
        let shared = self.shared.clone();
        let swept = self.db.write(move |conn| shared.sweep(conn)).await?;
        if swept >= SWEEP_MAX {
            self.shared.sweep_at.store(now, Ordering::Relaxed);
        }
        Ok(())
    }
}

#[async_trait]
impl Queue for SqliteQueue {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            durable: true,
            ordered: true,
            fenced: true,
            shared: true,
            cancel_safe: true,
            request_carries: 1,
            body_bytes_max: self.shared.options.body_bytes_max,
            delay_max: Duration::from_secs(365 * 24 * 3600),
        }
    }

    async fn send(&self, messages: &[Outgoing]) -> Vec<Result<MessageId, QueueError>> {
        let checks: Vec<_> = messages.iter().map(|message| self.shared.check_size(message)).collect();
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
                Err(error) => Err(repeat(error)),
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
        // Whoever is still in line when its time is up looks once all the same.
        let _turn = tokio::time::timeout_at(deadline, self.shared.turn.lock()).await.ok();
        loop {
            // Listening starts before looking, or a commit between the two would be missed.
            let mut waiting = self.shared.signal.waiting();
            let next = if self.shared.more.swap(false, Ordering::Relaxed) {
                Some(i64::MIN)
            } else {
                let key = self.shared.key;
                let look = move |conn: &Connection| {
                    conn.prepare_cached(NEXT_VISIBLE)?.query_row([key], |row| row.get::<_, i64>(0)).optional()
                };
                self.db.read(look).await?
            };
            let now = self.shared.now_ms();
            if next.is_some_and(|visible_at| visible_at <= now) {
                let messages = self.take(max).await?;
                if !messages.is_empty() {
                    self.shared.more.store(messages.len() == max, Ordering::Relaxed);
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
                () = waiting.changed() => {}
                () = tokio::time::sleep_until(until) => {}
            }
        }
    }

    async fn ack(&self, receipts: &[Receipt]) -> Vec<Result<(), QueueError>> {
        let entries = receipts.iter().map(|receipt| (receipt.clone(), ())).collect();
        self.settle(entries, |_, conn, (id, token), ()| conn.prepare_cached(ACK)?.execute([id, token])).await
    }

    async fn retry_after(&self, entries: &[(Receipt, Duration)]) -> Vec<Result<(), QueueError>> {
        let change = |shared: &Shared, conn: &Connection, (id, token), delay: &Duration| {
            shared.signal.mark();
            conn.prepare_cached(RELEASE)?.execute([id, token, after(shared.now_ms(), *delay)])
        };
        self.settle(entries.to_vec(), change).await
    }

    async fn bury(&self, entries: &[(Receipt, String)]) -> Vec<Result<(), QueueError>> {
        let change = |shared: &Shared, conn: &Connection, (id, token), reason: &String| {
            let held = conn.prepare_cached(HELD)?.exists([id, token])?;
            if held {
                shared.bury(conn, id, if reason.is_empty() { "no reason given" } else { reason }, false)?;
            }
            Ok(usize::from(held))
        };
        self.settle(entries.to_vec(), change).await
    }

    async fn extend(&self, receipts: &[Receipt], for_: Duration) -> Vec<Result<(), QueueError>> {
        let entries = receipts.iter().map(|receipt| (receipt.clone(), for_)).collect();
        let change = |shared: &Shared, conn: &Connection, (id, token), for_: &Duration| {
            // It may end sooner than before, and those who sleep until then must know.
            shared.signal.mark();
            conn.prepare_cached(EXTEND)?.execute([id, token, after(shared.now_ms(), *for_)])
        };
        self.settle(entries, change).await
    }

    fn lease(&self) -> Duration {
        self.shared.options.lease
    }

    async fn depth(&self) -> Result<Depth, QueueError> {
        let shared = self.shared.clone();
        Ok(self.db.read(move |conn| shared.depth(conn)).await?)
    }

    async fn dead_letters(&self, after: Option<&MessageId>, max: usize) -> Result<Vec<DeadLetter>, QueueError> {
        let shared = self.shared.clone();
        let after = after.cloned();
        let list = self.db.read(move |conn| {
            let place = match &after {
                None => 0,
                Some(id) => match shared.dead_place(conn, id)? {
                    Some(place) => place,
                    None => return Ok(None),
                },
            };
            let mut list = conn.prepare_cached(DEAD_LIST)?;
            let wanted = named_params! { ":queue": shared.key, ":after": place, ":max": limit(max) };
            list.query_map(wanted, read_dead_letter)?.collect::<rusqlite::Result<Vec<_>>>().map(Some)
        });
        list.await?.ok_or(QueueError::NotFound)
    }

    async fn replay(&self, ids: &[MessageId], delay: Duration) -> Vec<Result<(), QueueError>> {
        let change = move |shared: &Shared, conn: &Connection, place| {
            let visible_at = after(shared.now_ms(), delay);
            let expires_at = after(visible_at, shared.options.retention);
            conn.prepare_cached(COPY_FROM_DEAD)?.execute([place, visible_at, expires_at])?;
            shared.signal.mark();
            Ok(())
        };
        self.change_dead(ids, change).await
    }

    async fn discard(&self, ids: &[MessageId]) -> Vec<Result<(), QueueError>> {
        self.change_dead(ids, |_, _, _| Ok(())).await
    }
}

/// What a take has leased, until the receiver has it in hand. If the receiver went away meanwhile, the messages are
/// due again at once, as if never taken, instead of after a lease.
struct Taken {
    queue: SqliteQueue,
    messages: Vec<Message>,
}

impl Taken {
    fn accept(mut self) -> Vec<Message> {
        std::mem::take(&mut self.messages)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        if self.messages.is_empty() {
            return;
        }
        let receipts: Vec<Receipt> = self.messages.drain(..).map(|message| message.receipt).collect();
        let shared = self.queue.shared.clone();
        // Without room for the job the lease ends by itself.
        self.queue.db.write_later(move |conn| {
            for (id, token) in receipts.iter().filter_map(read_receipt) {
                conn.prepare_cached(UNTAKE)?.execute([id, token, shared.now_ms()])?;
            }
            shared.signal.mark();
            Ok(())
        });
    }
}

/// One job's result for each entry: `missed` where there was nothing to change.
fn answer_each(
    count: usize,
    changed: Result<Vec<bool>, DatabaseError>,
    missed: impl Fn() -> QueueError,
) -> Vec<Result<(), QueueError>> {
    match changed {
        Ok(changed) => changed.into_iter().map(|hit| if hit { Ok(()) } else { Err(missed()) }).collect(),
        Err(error) => (0..count).map(|_| Err(repeat(&error))).collect(),
    }
}

/// One failure of the database, told to each entry of a batch.
fn repeat(error: &DatabaseError) -> QueueError {
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
