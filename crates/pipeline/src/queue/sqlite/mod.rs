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

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, Row, named_params, params};
use tokio::time::Instant;
use uuid::Uuid;

use super::{Capabilities, Depth, Queue, QueueError, QueueOptions};
use crate::message::{Attributes, DeadLetter, Message, MessageId, Outgoing, Receipt};
use crate::sqlite::{Database, DatabaseError, Signal};

/// Between two looks for messages whose retention is over.
const SWEEP_EVERY: Duration = Duration::from_secs(60);
/// How many of them one look removes; when there are more, the next look comes at once.
const SWEEP_MAX: usize = 500;
/// How many messages one take may bury on its way to those that it delivers.
const BURIED_PER_TAKE_MAX: usize = 100;
/// A wait longer than this is this long.
const WAIT_MAX: Duration = Duration::from_secs(24 * 3600);

const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS queue_names (
    id         INTEGER PRIMARY KEY,
    name       TEXT NOT NULL UNIQUE
) STRICT;

CREATE TABLE IF NOT EXISTS queue_messages (
    id         INTEGER PRIMARY KEY,  -- grows in the order sent
    queue      INTEGER NOT NULL,
    visible_at INTEGER NOT NULL,     -- milliseconds since 1970, as are all times here
    token      INTEGER,              -- of the latest lease; NULL when nobody holds one
    receives   INTEGER NOT NULL,
    sent_at    INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    message_id TEXT NOT NULL,
    attributes TEXT,                 -- a JSON object; NULL when empty
    body       BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS queue_messages_due ON queue_messages (queue, visible_at, id, token);

CREATE TABLE IF NOT EXISTS queue_dead_messages (
    id         INTEGER PRIMARY KEY,  -- grows in the order buried
    queue      INTEGER NOT NULL,
    receives   INTEGER NOT NULL,
    sent_at    INTEGER NOT NULL,
    buried_at  INTEGER NOT NULL,
    message_id TEXT NOT NULL,
    reason     TEXT NOT NULL,
    by_queue   INTEGER NOT NULL,     -- 1: buried by the queue itself
    attributes TEXT,
    body       BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS queue_dead_messages_order ON queue_dead_messages (queue, id);
CREATE UNIQUE INDEX IF NOT EXISTS queue_dead_messages_by_id ON queue_dead_messages (queue, message_id);
";

const INSERT: &str = "
INSERT INTO queue_messages (queue, visible_at, token, receives, sent_at, expires_at, message_id, attributes, body)
VALUES (:queue, :visible_at, NULL, 0, :sent_at, :expires_at, :message_id, :attributes, :body)";

const NEXT_VISIBLE: &str = "SELECT visible_at FROM queue_messages WHERE queue = ?1 ORDER BY visible_at, id LIMIT 1";

const DUE: &str = "
SELECT id, message_id, body, attributes, receives, sent_at, expires_at FROM queue_messages
WHERE queue = :queue AND visible_at <= :now ORDER BY visible_at, id LIMIT :max";

const LEASE: &str = "
UPDATE queue_messages SET visible_at = :visible_at, token = :token, receives = receives + 1 WHERE id = :id";

const ACK: &str = "DELETE FROM queue_messages WHERE id = ?1 AND token = ?2";

const RELEASE: &str = "UPDATE queue_messages SET visible_at = ?3, token = NULL WHERE id = ?1 AND token = ?2";

const UNTAKE: &str = "
UPDATE queue_messages SET visible_at = ?3, token = NULL, receives = receives - 1 WHERE id = ?1 AND token = ?2";

const EXTEND: &str = "UPDATE queue_messages SET visible_at = ?3 WHERE id = ?1 AND token = ?2";

const HELD: &str = "SELECT id FROM queue_messages WHERE id = ?1 AND token = ?2";

const COPY_TO_DEAD: &str = "
INSERT INTO queue_dead_messages (queue, receives, sent_at, buried_at, message_id, reason, by_queue, attributes, body)
SELECT queue, receives, sent_at, ?2, message_id, ?3, ?4, attributes, body FROM queue_messages WHERE id = ?1";

const DELETE: &str = "DELETE FROM queue_messages WHERE id = ?1";

const EXPIRED: &str = "
SELECT id FROM queue_messages
WHERE queue = :queue AND visible_at <= :before AND expires_at <= :now ORDER BY visible_at, id LIMIT :max";

const DEAD_EXPIRED: &str = "
SELECT id FROM queue_dead_messages WHERE queue = :queue AND buried_at <= :before ORDER BY id LIMIT :max";

const DEAD_OLDEST: &str = "SELECT buried_at FROM queue_dead_messages WHERE queue = ?1 ORDER BY id LIMIT 1";

const DEAD_DELETE: &str = "DELETE FROM queue_dead_messages WHERE id = ?1";

const DEAD_PLACE: &str = "SELECT id FROM queue_dead_messages WHERE queue = ?1 AND message_id = ?2";

const DEAD_LIST: &str = "
SELECT message_id, body, attributes, reason, receives, sent_at, buried_at, by_queue FROM queue_dead_messages
WHERE queue = :queue AND id > :after ORDER BY id LIMIT :max";

const COPY_FROM_DEAD: &str = "
INSERT INTO queue_messages (queue, visible_at, token, receives, sent_at, expires_at, message_id, attributes, body)
SELECT queue, ?2, NULL, 0, sent_at, ?3, message_id, attributes, body FROM queue_dead_messages WHERE id = ?1";

const DEPTH_DUE: &str = "SELECT COUNT(*), MIN(id) FROM queue_messages WHERE queue = ?1 AND visible_at <= ?2";

const DEPTH_HIDDEN: &str = "
SELECT COUNT(token), COUNT(*) - COUNT(token) FROM queue_messages WHERE queue = ?1 AND visible_at > ?2";

const DEPTH_DEAD: &str = "SELECT COUNT(*) FROM queue_dead_messages WHERE queue = ?1";

const SENT_AT: &str = "SELECT sent_at FROM queue_messages WHERE id = ?1";

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

struct Shared {
    name: String,
    key: i64,
    options: QueueOptions,
    signal: Arc<Signal>,
    clock: Clock,
    /// Held by the one receiver that looks; the others of this process stand in line for it.
    turn: tokio::sync::Mutex<()>,
    /// The last take got all it asked for: the next may take without looking first.
    more: AtomicBool,
    sweep_at: AtomicI64,
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

impl Shared {
    fn now_ms(&self) -> i64 {
        (self.clock)()
    }

    fn check_size(&self, message: &Outgoing) -> Result<(), QueueError> {
        let (size, max) = (message.body.len(), self.options.body_bytes_max);
        if size > max { Err(QueueError::TooLarge { size, max }) } else { Ok(()) }
    }

    /// Leases what is due, and buries what has been delivered too often, is too old or cannot be read.
    fn take(&self, conn: &Connection, max: usize) -> rusqlite::Result<Vec<Message>> {
        let now = self.now_ms();
        let lease_end = after(now, self.options.lease);
        let mut messages = Vec::new();
        let mut buried = 0;
        while messages.len() < max && buried < BURIED_PER_TAKE_MAX {
            let left = max - messages.len();
            let wanted = named_params! { ":queue": self.key, ":now": now, ":max": limit(left) };
            let due: Vec<Due> =
                conn.prepare_cached(DUE)?.query_map(wanted, read_due)?.collect::<rusqlite::Result<_>>()?;
            let last = due.len() < left;
            for row in due {
                match self.undeliverable(&row, now) {
                    Some(reason) => {
                        self.bury(conn, row.id, &reason, true)?;
                        buried += 1;
                    }
                    None => messages.push(self.lease(conn, row, lease_end)?),
                }
            }
            if last {
                break;
            }
        }
        Ok(messages)
    }

    fn undeliverable(&self, row: &Due, now: i64) -> Option<String> {
        if row.expires_at <= now {
            return Some("retention over".into());
        }
        if self.options.receives_max.is_some_and(|max| row.receives >= max) {
            return Some(format!("received {} times without being settled", row.receives));
        }
        row.attributes.as_ref().err().map(|error| format!("the stored attributes cannot be read: {error}"))
    }

    fn lease(&self, conn: &Connection, row: Due, lease_end: i64) -> rusqlite::Result<Message> {
        // Row ids are used again after the newest row is deleted; a random token is not.
        let token: i64 = rand::random();
        let changes = named_params! { ":id": row.id, ":token": token, ":visible_at": lease_end };
        conn.prepare_cached(LEASE)?.execute(changes)?;
        Ok(Message {
            id: MessageId(row.message_id),
            body: row.body,
            attributes: row.attributes.unwrap_or_default(),
            receives: row.receives + 1,
            sent_at: time_from_ms(row.sent_at),
            receipt: Receipt(format!("{}.{token}", row.id)),
        })
    }

    fn bury(&self, conn: &Connection, id: i64, reason: &str, by_queue: bool) -> rusqlite::Result<()> {
        conn.prepare_cached(COPY_TO_DEAD)?.execute(params![id, self.now_ms(), reason, by_queue])?;
        conn.prepare_cached(DELETE)?.execute([id])?;
        Ok(())
    }

    fn needs_sweep(&self, conn: &Connection) -> rusqlite::Result<bool> {
        let now = self.now_ms();
        let before = now - millis(self.options.retention);
        let dead = conn.prepare_cached(DEAD_OLDEST)?.query_row([self.key], |row| row.get::<_, i64>(0)).optional()?;
        if dead.is_some_and(|buried_at| buried_at <= before) {
            return Ok(true);
        }
        let wanted = named_params! { ":queue": self.key, ":before": before, ":now": now, ":max": 1 };
        conn.prepare_cached(EXPIRED)?.exists(wanted)
    }

    fn sweep(&self, conn: &Connection) -> rusqlite::Result<usize> {
        let now = self.now_ms();
        let before = now - millis(self.options.retention);
        let id = |row: &Row<'_>| row.get::<_, i64>(0);
        let wanted = named_params! { ":queue": self.key, ":before": before, ":now": now, ":max": limit(SWEEP_MAX) };
        let live: Vec<i64> = conn.prepare_cached(EXPIRED)?.query_map(wanted, id)?.collect::<rusqlite::Result<_>>()?;
        for id in &live {
            self.bury(conn, *id, "retention over", true)?;
        }
        let wanted = named_params! { ":queue": self.key, ":before": before, ":max": limit(SWEEP_MAX) };
        let dead: Vec<i64> =
            conn.prepare_cached(DEAD_EXPIRED)?.query_map(wanted, id)?.collect::<rusqlite::Result<_>>()?;
        for id in &dead {
            conn.prepare_cached(DEAD_DELETE)?.execute([id])?;
        }
        Ok(live.len().max(dead.len()))
    }

    fn depth(&self, conn: &Connection) -> rusqlite::Result<Depth> {
        let now = self.now_ms();
        let (ready, oldest) = conn
            .prepare_cached(DEPTH_DUE)?
            .query_row([self.key, now], |row| Ok((count(row, 0)?, row.get::<_, Option<i64>>(1)?)))?;
        let (in_flight, delayed) = conn
            .prepare_cached(DEPTH_HIDDEN)?
            .query_row([self.key, now], |row| Ok((count(row, 0)?, count(row, 1)?)))?;
        let dead = conn.prepare_cached(DEPTH_DEAD)?.query_row([self.key], |row| count(row, 0))?;
        // Ids grow in the order sent, and the index has them; only the oldest row itself is read.
        let oldest_age = match oldest {
            None => None,
            Some(id) => {
                let sent_at = conn.prepare_cached(SENT_AT)?.query_row([id], |row| row.get(0))?;
                Some(until_ms(sent_at, now))
            }
        };
        Ok(Depth { ready, in_flight, delayed, dead, oldest_age })
    }

    fn dead_place(&self, conn: &Connection, id: &MessageId) -> rusqlite::Result<Option<i64>> {
        conn.prepare_cached(DEAD_PLACE)?.query_row(params![self.key, id.0], |row| row.get(0)).optional()
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

struct Due {
    id: i64,
    message_id: String,
    body: Vec<u8>,
    attributes: Result<Attributes, serde_json::Error>,
    receives: u32,
    sent_at: i64,
    expires_at: i64,
}

fn read_due(row: &Row<'_>) -> rusqlite::Result<Due> {
    Ok(Due {
        id: row.get(0)?,
        message_id: row.get(1)?,
        body: row.get(2)?,
        attributes: read_attributes(row.get_ref(3)?.as_str_or_null()?),
        receives: row.get(4)?,
        sent_at: row.get(5)?,
        expires_at: row.get(6)?,
    })
}

fn read_dead_letter(row: &Row<'_>) -> rusqlite::Result<DeadLetter> {
    let stored = row.get_ref(2)?.as_str_or_null()?;
    // The operator should see such a letter too, with what is there.
    let unreadable = |_| Attributes::from([("unreadable".to_owned(), stored.unwrap_or_default().to_owned())]);
    Ok(DeadLetter {
        id: MessageId(row.get(0)?),
        body: row.get(1)?,
        attributes: read_attributes(stored).unwrap_or_else(unreadable),
        reason: row.get(3)?,
        receives: row.get(4)?,
        sent_at: time_from_ms(row.get(5)?),
        buried_at: time_from_ms(row.get(6)?),
        by_queue: row.get(7)?,
    })
}

fn read_attributes(stored: Option<&str>) -> Result<Attributes, serde_json::Error> {
    stored.map_or_else(|| Ok(Attributes::new()), serde_json::from_str)
}

fn write_attributes(attributes: &Attributes) -> Option<String> {
    if attributes.is_empty() {
        return None;
    }
    Some(serde_json::to_string(attributes).expect("a map of strings is always JSON"))
}

/// The row and the token of its lease.
fn read_receipt(receipt: &Receipt) -> Option<(i64, i64)> {
    let (id, token) = receipt.0.split_once('.')?;
    Some((id.parse().ok()?, token.parse().ok()?))
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

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// Rounded up: a delay may end late, not early.
fn after(now: i64, delay: Duration) -> i64 {
    now.saturating_add(millis(delay.saturating_add(Duration::from_nanos(999_999))))
}

fn until_ms(now: i64, then: i64) -> Duration {
    Duration::from_millis(u64::try_from(then.saturating_sub(now)).unwrap_or(0))
}

fn time_from_ms(ms: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(u64::try_from(ms).unwrap_or(0))
}

fn limit(max: usize) -> i64 {
    i64::try_from(max).unwrap_or(i64::MAX)
}

fn count(row: &Row<'_>, column: usize) -> rusqlite::Result<u64> {
    row.get::<_, i64>(column).map(|count| u64::try_from(count).unwrap_or(0))
}

#[cfg(test)]
mod tests;
