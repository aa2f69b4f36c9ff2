//! The queue's work inside a database job: it takes, buries, sweeps and counts rows.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64};

use rusqlite::{Connection, OptionalExtension, Row, named_params, params};

use super::rows::{DueRow, after, count, limit, millis, read_due, time_from_ms, until_ms};
use super::statements::{
    COPY_TO_DEAD, DEAD_DELETE, DEAD_EXPIRED, DEAD_OLDEST, DEAD_ROW_ID, DELETE, DEPTH_DEAD, DEPTH_DUE, DEPTH_HIDDEN,
    DUE, EXPIRED, LEASE, SENT_AT,
};
use super::{BURIED_PER_TAKE_MAX, NowMs, SWEEP_MAX};
use crate::message::{Message, MessageId, Receipt};
use crate::queue::{Depth, QueueOptions, RETENTION_ENDED, burial_reason};
use crate::sqlite::Signal;

pub(super) struct SqliteQueueState {
    pub(super) name: String,
    pub(super) key: i64,
    pub(super) options: QueueOptions,
    pub(super) signal: Arc<Signal>,
    pub(super) clock: NowMs,
    /// Held by the one receiver of this process that looks for messages; the others wait for it.
    pub(super) receive_lock: tokio::sync::Mutex<()>,
    /// The last take was full: the next one takes without reading first.
    pub(super) maybe_more: AtomicBool,
    pub(super) sweep_at: AtomicI64,
}

impl SqliteQueueState {
    pub(super) fn now_ms(&self) -> i64 {
        (self.clock)()
    }

    /// Leases up to `max` due messages, and buries those delivered too often, past their retention or unreadable.
    pub(super) fn take(&self, conn: &Connection, max: usize) -> rusqlite::Result<Vec<Message>> {
        let now = self.now_ms();
        let lease_end = after(now, self.options.lease);
        let mut messages = Vec::new();
        let mut buried = 0;
        while messages.len() < max && buried < BURIED_PER_TAKE_MAX {
            let left = max - messages.len();
            let wanted = named_params! { ":queue": self.key, ":now": now, ":max": limit(left) };
            let due: Vec<DueRow> =
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

    /// Why a row is buried instead of delivered, if it is.
    fn undeliverable(&self, row: &DueRow, now: i64) -> Option<String> {
        let unreadable = || {
            let error = row.attributes.as_ref().err()?;
            Some(format!("the stored attributes cannot be read: {error}"))
        };
        burial_reason(row.expires_at <= now, row.receives, self.options.receives_max).or_else(unreadable)
    }

    fn lease(&self, conn: &Connection, row: DueRow, lease_end: i64) -> rusqlite::Result<Message> {
        // SQLite reuses the row id of a deleted newest row, so only a random token identifies a lease.
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

    pub(super) fn bury(&self, conn: &Connection, id: i64, reason: &str, by_queue: bool) -> rusqlite::Result<()> {
        conn.prepare_cached(COPY_TO_DEAD)?.execute(params![id, self.now_ms(), reason, by_queue])?;
        conn.prepare_cached(DELETE)?.execute([id])?;
        Ok(())
    }

    pub(super) fn needs_sweep(&self, conn: &Connection) -> rusqlite::Result<bool> {
        let now = self.now_ms();
        let before = now - millis(self.options.retention);
        let dead = conn.prepare_cached(DEAD_OLDEST)?.query_row([self.key], |row| row.get::<_, i64>(0)).optional()?;
        if dead.is_some_and(|buried_at| buried_at <= before) {
            return Ok(true);
        }
        let wanted = named_params! { ":queue": self.key, ":before": before, ":now": now, ":max": 1 };
        conn.prepare_cached(EXPIRED)?.exists(wanted)
    }

    pub(super) fn sweep(&self, conn: &Connection) -> rusqlite::Result<usize> {
        let now = self.now_ms();
        let before = now - millis(self.options.retention);
        let id = |row: &Row<'_>| row.get::<_, i64>(0);
        let wanted = named_params! { ":queue": self.key, ":before": before, ":now": now, ":max": limit(SWEEP_MAX) };
        let live: Vec<i64> = conn.prepare_cached(EXPIRED)?.query_map(wanted, id)?.collect::<rusqlite::Result<_>>()?;
        for id in &live {
            self.bury(conn, *id, RETENTION_ENDED, true)?;
        }
        let wanted = named_params! { ":queue": self.key, ":before": before, ":max": limit(SWEEP_MAX) };
        let dead: Vec<i64> =
            conn.prepare_cached(DEAD_EXPIRED)?.query_map(wanted, id)?.collect::<rusqlite::Result<_>>()?;
        for id in &dead {
            conn.prepare_cached(DEAD_DELETE)?.execute([id])?;
        }
        Ok(live.len().max(dead.len()))
    }

    pub(super) fn depth(&self, conn: &Connection) -> rusqlite::Result<Depth> {
        let now = self.now_ms();
        let (ready, oldest) = conn
            .prepare_cached(DEPTH_DUE)?
            .query_row([self.key, now], |row| Ok((count(row, 0)?, row.get::<_, Option<i64>>(1)?)))?;
        let (in_flight, delayed) = conn
            .prepare_cached(DEPTH_HIDDEN)?
            .query_row([self.key, now], |row| Ok((count(row, 0)?, count(row, 1)?)))?;
        let dead = conn.prepare_cached(DEPTH_DEAD)?.query_row([self.key], |row| count(row, 0))?;
        // Ids grow in the order sent and are in the index, so only the oldest row is read.
        let oldest_age = match oldest {
            None => None,
            Some(id) => {
                let sent_at = conn.prepare_cached(SENT_AT)?.query_row([id], |row| row.get(0))?;
                Some(until_ms(sent_at, now))
            }
        };
        Ok(Depth { ready, in_flight, delayed, dead, oldest_age })
    }

    pub(super) fn dead_row_id(&self, conn: &Connection, id: &MessageId) -> rusqlite::Result<Option<i64>> {
        conn.prepare_cached(DEAD_ROW_ID)?.query_row(params![self.key, id.0], |row| row.get(0)).optional()
    }
}
