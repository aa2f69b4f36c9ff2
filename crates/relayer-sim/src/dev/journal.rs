//! The records of development relayers on disk: each record, and whether its final webhook is done.
//!
//! A record is written before its POST is answered. One thread writes for all relayers and puts what waits into one
//! commit, so POSTs share its cost. A commit survives the end of the process, but perhaps not a power failure.

use std::{
    path::{Path, PathBuf},
    sync::mpsc,
    time::Duration,
};

use anyhow::Context;
use rusqlite::{Connection, params};
use tokio::sync::oneshot;

use super::stored::StoredRecord;

/// Rows of one relayer lie together: its index above, the record's number in the lower bits.
const NUMBER_BITS: u32 = 44;
/// Writes in one commit.
const COMMIT_MAX: usize = 1024;
/// Time to wait for a lock that another process holds.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS simulated_records (
    key INTEGER PRIMARY KEY,
    told INTEGER NOT NULL,
    record TEXT NOT NULL
) STRICT";

/// A journal file, shared by the development relayers of one process. Clones write to the same file.
#[derive(Clone)]
pub struct Journal {
    path: PathBuf,
    writes: mpsc::Sender<Write>,
}

/// One relayer's part of a [`Journal`].
pub(crate) struct RelayerJournal {
    journal: Journal,
    /// Key of number 0.
    base: i64,
}

/// The journal's content at the start, oldest record first.
#[derive(Default)]
pub(crate) struct Loaded {
    /// With whether the final webhook is done.
    pub(crate) records: Vec<(StoredRecord, bool)>,
}

enum Write {
    Record {
        key: i64,
        text: String,
        done: oneshot::Sender<bool>,
    },
    /// Marks a record, and deletes marked ones from the first key up to the second.
    Told {
        key: i64,
        base: i64,
        oldest_kept: i64,
    },
}

impl Journal {
    /// Opens the file, and makes it and its directory if they are missing.
    ///
    /// # Errors
    /// When the file cannot be opened or written.
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory).with_context(|| format!("create {}", directory.display()))?;
        }
        let connection = connect(path)?;
        connection.execute_batch(SCHEMA).context("create the journal's table")?;
        let (writes, waiting) = mpsc::channel();
        std::thread::Builder::new()
            .name("relayer-journal".to_owned())
            .spawn(move || write_all(&connection, &waiting))?;
        Ok(Self { path: path.to_owned(), writes })
    }

    pub(crate) fn of_relayer(&self, index: usize) -> RelayerJournal {
        let index = i64::try_from(index).unwrap_or(i64::MAX >> NUMBER_BITS).min(i64::MAX >> NUMBER_BITS);
        RelayerJournal { journal: self.clone(), base: index << NUMBER_BITS }
    }
}

impl RelayerJournal {
    /// All records whose final webhook is not done, and the newest `told_max` of the others.
    pub(crate) fn load(&self, told_max: usize) -> anyhow::Result<Loaded> {
        let connection = connect(&self.journal.path)?;
        let mut statement = connection.prepare(
            "SELECT key, told, record FROM simulated_records WHERE key >= ?1 AND key < ?2 ORDER BY key DESC",
        )?;
        let mut rows = statement.query([self.base, self.base + (1 << NUMBER_BITS)])?;
        let mut loaded = Loaded::default();
        let mut told_seen = 0;
        while let Some(row) = rows.next()? {
            let number = u64::try_from(row.get::<_, i64>(0)? - self.base).unwrap_or_default();
            let told: bool = row.get(1)?;
            told_seen += usize::from(told);
            if told && told_seen > told_max {
                continue;
            }
            match serde_json::from_str::<StoredRecord>(row.get_ref(2)?.as_str()?) {
                Ok(mut stored) => {
                    stored.number = number;
                    loaded.records.push((stored, told));
                }
                Err(error) => {
                    tracing::warn!(number, %error, "a development relayer's record cannot be read and is left out");
                }
            }
        }
        loaded.records.reverse();
        Ok(loaded)
    }

    /// Writes a record, or replaces it. The receiver gets `true` when it is on disk.
    pub(crate) fn write(&self, stored: &StoredRecord) -> oneshot::Receiver<bool> {
        let (done, written) = oneshot::channel();
        let text = serde_json::to_string(stored).unwrap_or_default();
        // If the thread has ended, `done` is dropped, and the caller sees that.
        let _ = self.journal.writes.send(Write::Record { key: self.key(stored.number), text, done });
        written
    }

    /// Marks the final webhook of a record as done, and forgets such records below `oldest_kept`.
    pub(crate) fn mark_told(&self, number: u64, oldest_kept: u64) {
        let write = Write::Told { key: self.key(number), base: self.base, oldest_kept: self.key(oldest_kept) };
        // A mark that is lost costs one repeated webhook after the next start.
        let _ = self.journal.writes.send(write);
    }

    fn key(&self, number: u64) -> i64 {
        self.base | i64::try_from(number).unwrap_or_default()
    }
}

fn connect(path: &Path) -> anyhow::Result<Connection> {
    let connection = Connection::open(path).with_context(|| format!("open {}", path.display()))?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    connection.execute_batch("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL")?;
    Ok(connection)
}

/// Runs until the last [`Journal`] is dropped, and writes what waits before it ends.
fn write_all(connection: &Connection, waiting: &mpsc::Receiver<Write>) {
    while let Ok(first) = waiting.recv() {
        let mut done = Vec::new();
        let group = std::iter::once(first).chain(waiting.try_iter().take(COMMIT_MAX - 1));
        let committed = write_group(connection, group, &mut done);
        if let Err(error) = &committed {
            tracing::error!(%error, "the development relayers' journal cannot be written");
            // Without an open transaction there is nothing to undo.
            let _ = connection.execute_batch("ROLLBACK");
        }
        for done in done {
            // An error means that the caller has hung up.
            let _ = done.send(committed.is_ok());
        }
    }
}

fn write_group(
    connection: &Connection,
    group: impl Iterator<Item = Write>,
    finished: &mut Vec<oneshot::Sender<bool>>,
) -> rusqlite::Result<()> {
    connection.execute_batch("BEGIN IMMEDIATE")?;
    let mut delete_below = std::collections::BTreeMap::new();
    for write in group {
        match write {
            Write::Record { key, text, done } => {
                finished.push(done);
                connection
                    .prepare_cached(
                        "INSERT INTO simulated_records (key, told, record) VALUES (?1, 0, ?2)
                         ON CONFLICT (key) DO UPDATE SET record = ?2",
                    )?
                    .execute(params![key, text])?;
            }
            Write::Told { key, base, oldest_kept } => {
                connection.prepare_cached("UPDATE simulated_records SET told = 1 WHERE key = ?1")?.execute([key])?;
                delete_below.insert(base, oldest_kept);
            }
        }
    }
    for (base, oldest_kept) in delete_below {
        connection
            .prepare_cached("DELETE FROM simulated_records WHERE key >= ?1 AND key < ?2 AND told = 1")?
            .execute([base, oldest_kept])?;
    }
    connection.execute_batch("COMMIT")
}
