//! The writer thread. It takes the first waiting job, opens a transaction, runs that job and all others that have arrived,
//! each in its own savepoint, commits, and answers them all. An idle writer commits a job immediately; no job is delayed to
//! make a group larger.
//!
//! If the commit fails, the whole group is rolled back and every caller gets the error. The thread continues: the next
//! group may find free disk space or a free lock.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rusqlite::{Connection, ErrorCode};
use tokio::sync::{mpsc, oneshot, watch};

use super::clock::{Clock, RECORD_EVERY_MS};
use super::files::{OpenFiles, log_path};
use super::signal::Signals;
use super::{ConnectionRole, DatabaseError, connect, panic_text};

/// Jobs in one commit; it bounds how long the first of them waits.
const GROUP_JOBS_MAX: usize = 1024;
/// The size of the write-ahead log is checked every this many commits.
const WAL_CHECK_COMMITS: u64 = 1024;
/// At this size the writer waits for readers to leave the log so that it can restart. Automatic checkpoints never wait,
/// and continuous reads could postpone them forever.
const WAL_BYTES_MAX: u64 = 256 * 1024 * 1024;

/// A write job whose result type the writer does not know.
pub(super) trait Job: Send {
    /// Runs the job and keeps its result for [`Job::answer`].
    fn run(&mut self, connection: &Connection);
    fn rollback_scope(&self) -> RollbackScope;
    /// The job's own error, if it failed.
    fn failure(&self) -> Option<&DatabaseError>;
    /// Sends the caller the job's result, or the group's error if the whole group failed.
    fn answer(self: Box<Self>, group: Result<(), &DatabaseError>);
}

pub(super) enum Reply<T> {
    Async(oneshot::Sender<Result<T, DatabaseError>>),
    Blocking(std::sync::mpsc::SyncSender<Result<T, DatabaseError>>),
    Discard,
}

/// What is rolled back when a job fails.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum RollbackScope {
    /// Only the job: it runs in a savepoint.
    Job,
    /// The whole group. Saves the savepoint, which costs about as much as two inserts.
    Group,
}

pub(super) struct WriteJob<T, F> {
    rollback_scope: RollbackScope,
    job: Option<F>,
    result: Option<Result<T, DatabaseError>>,
    reply: Reply<T>,
}

impl<T, F> WriteJob<T, F> {
    pub(super) fn new(rollback_scope: RollbackScope, job: F, reply: Reply<T>) -> Self {
        Self { rollback_scope, job: Some(job), result: None, reply }
    }
}

impl<T, F> Job for WriteJob<T, F>
where
    T: Send,
    F: FnOnce(&Connection) -> Result<T, rusqlite::Error> + Send,
{
    fn run(&mut self, connection: &Connection) {
        if let Some(job) = self.job.take() {
            self.result = Some(match self.rollback_scope {
                RollbackScope::Job => in_savepoint(connection, job),
                RollbackScope::Group => catch_panic(connection, job),
            });
        }
    }

    fn rollback_scope(&self) -> RollbackScope {
        self.rollback_scope
    }

    fn failure(&self) -> Option<&DatabaseError> {
        self.result.as_ref().and_then(|result| result.as_ref().err())
    }

    fn answer(self: Box<Self>, group: Result<(), &DatabaseError>) {
        let result = match (self.result, group) {
            (Some(Err(own)), _) => Err(own),
            (_, Err(shared)) => Err(copy(shared)),
            (Some(Ok(value)), Ok(())) => Ok(value),
            (None, Ok(())) => Err(DatabaseError::Closed),
        };
        // The caller may have dropped its future.
        match self.reply {
            Reply::Async(reply) => drop(reply.send(result)),
            Reply::Blocking(reply) => drop(reply.send(result)),
            Reply::Discard => {}
        }
    }
}

fn in_savepoint<T>(
    connection: &Connection,
    job: impl FnOnce(&Connection) -> Result<T, rusqlite::Error>,
) -> Result<T, DatabaseError> {
    connection.prepare_cached("SAVEPOINT job")?.execute([])?;
    let result = catch_panic(connection, job);
    // Some errors, such as a full disk, end the whole transaction and its savepoints.
    if !connection.is_autocommit() {
        if result.is_err() {
            connection.prepare_cached("ROLLBACK TO job")?.execute([])?;
        }
        connection.prepare_cached("RELEASE job")?.execute([])?;
    }
    result
}

fn catch_panic<T>(
    connection: &Connection,
    job: impl FnOnce(&Connection) -> Result<T, rusqlite::Error>,
) -> Result<T, DatabaseError> {
    match catch_unwind(AssertUnwindSafe(|| job(connection))) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(error.into()),
        Err(panic) => Err(DatabaseError::Panicked(panic_text(&*panic))),
    }
}

/// Totals of the writer, for [`Database::commits`](super::Database::commits) and [`Database::jobs`](super::Database::jobs).
#[derive(Default)]
pub(super) struct WriterCounts {
    pub(super) commits: AtomicU64,
    pub(super) jobs: AtomicU64,
}

pub(super) struct Writer {
    pub(super) path: PathBuf,
    pub(super) files: Arc<OpenFiles>,
    pub(super) connection: Connection,
    pub(super) jobs: mpsc::Receiver<Box<dyn Job>>,
    pub(super) signals: Arc<Signals>,
    pub(super) counts: Arc<WriterCounts>,
    pub(super) clock: Clock,
    /// When the clock was last recorded; 0 before the first time.
    pub(super) recorded_ms: i64,
    /// Stop after the jobs that wait.
    pub(super) closing: Arc<AtomicBool>,
    /// Dropped after the connection: tells that the file is closed.
    pub(super) _stopped: watch::Sender<()>,
}

impl Writer {
    /// Runs until [`Database::close`](super::Database::close), or until every handle is dropped, and every job is answered.
    pub(super) fn run(mut self) {
        while let Some(first) = self.jobs.blocking_recv() {
            let (group, outcome) = self.commit_group(first);
            if let Err(error) = &outcome {
                tracing::warn!(%error, jobs = group.len(), path = %self.path.display(), "group commit failed");
            }
            self.signals.fire_marked();
            for job in group {
                job.answer(outcome.as_ref().map(|_| ()));
            }
            if outcome.is_err() {
                self.recover();
            }
            self.limit_wal_size();
            if self.closing.load(Ordering::Acquire) {
                self.jobs.close();
            }
        }
    }

    fn commit_group(&mut self, first: Box<dyn Job>) -> (Vec<Box<dyn Job>>, Result<(), DatabaseError>) {
        let mut group = Vec::new();
        let begun = self.files.check().and_then(|()| Ok(execute(&self.connection, "BEGIN IMMEDIATE")?));
        if let Err(error) = begun {
            // Fail the waiting jobs too: each group would wait for the lock for `BUSY_TIMEOUT` again.
            group.push(first);
            while group.len() < GROUP_JOBS_MAX
                && let Ok(job) = self.jobs.try_recv()
            {
                group.push(job);
            }
            return (group, Err(error));
        }
        let mut next = Some(first);
        while let Some(mut job) = next {
            job.run(&self.connection);
            let group_failed = job.rollback_scope() == RollbackScope::Group && job.failure().is_some();
            if group_failed || self.connection.is_autocommit() {
                // `recover` rolls back the rest of the transaction.
                let cause = job.failure().map_or_else(ended_by_job, copy);
                group.push(job);
                return (group, Err(cause));
            }
            group.push(job);
            next = if group.len() < GROUP_JOBS_MAX { self.jobs.try_recv().ok() } else { None };
        }
        let now_ms = self.clock.now_ms();
        let record = now_ms - self.recorded_ms >= RECORD_EVERY_MS;
        if record && let Err(error) = self.clock.record_latest(&self.connection) {
            return (group, Err(error.into()));
        }
        let outcome = execute(&self.connection, "COMMIT").map_err(commit_failed);
        // Deleted or moved during the commit: the next process may not find what it wrote.
        let outcome =
            outcome.and_then(|()| self.files.check().map_err(|gone| DatabaseError::OutcomeUnknown(gone.into())));
        if outcome.is_ok() {
            // Not before: while the disk is full, each commit tries again, so that a job that writes nothing fails too.
            if record {
                self.recorded_ms = now_ms;
            }
            self.counts.commits.fetch_add(1, Ordering::Relaxed);
            self.counts.jobs.fetch_add(group.len() as u64, Ordering::Relaxed);
        }
        (group, outcome)
    }

    /// Rolls back after a failed group, and replaces a connection that cannot roll back.
    fn recover(&mut self) {
        if self.connection.is_autocommit() || execute(&self.connection, "ROLLBACK").is_ok() {
            return;
        }
        match connect(&self.path, ConnectionRole::Writer) {
            Ok(connection) => self.connection = connection,
            Err(error) => tracing::warn!(%error, path = %self.path.display(), "cannot reopen the database"),
        }
    }

    fn limit_wal_size(&self) {
        if !self.counts.commits.load(Ordering::Relaxed).is_multiple_of(WAL_CHECK_COMMITS) {
            return;
        }
        if std::fs::metadata(log_path(&self.path)).is_ok_and(|file| file.len() > WAL_BYTES_MAX) {
            // The pragma may do nothing while readers are active; the next check tries again.
            let tried = self.connection.query_row("PRAGMA wal_checkpoint(RESTART)", [], |_| Ok(()));
            if let Err(error) = tried {
                tracing::warn!(%error, path = %self.path.display(), "cannot restart the write-ahead log");
            }
        }
    }
}

fn execute(connection: &Connection, sql: &str) -> Result<(), rusqlite::Error> {
    connection.prepare_cached(sql)?.execute([]).map(|_| ())
}

/// Classifies a failed commit. A full disk fails before the commit record is complete, and a lock before anything is
/// written: in both cases nothing is stored. After any other failure (for example of an fsync) the record may be in the
/// log, and recovery after a crash may find it.
fn commit_failed(error: rusqlite::Error) -> DatabaseError {
    match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull | ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => error.into(),
        _ => DatabaseError::OutcomeUnknown(Box::new(error)),
    }
}

fn ended_by_job() -> DatabaseError {
    DatabaseError::OutcomeUnknown("a job ended the shared transaction".into())
}

/// Copies an error for each job of a failed group; SQLite's errors are not `Clone`.
fn copy(error: &DatabaseError) -> DatabaseError {
    match error {
        DatabaseError::Full => DatabaseError::Full,
        DatabaseError::Busy => DatabaseError::Busy,
        DatabaseError::Closed => DatabaseError::Closed,
        DatabaseError::Io { path, source } => {
            DatabaseError::Io { path: path.clone(), source: std::io::Error::new(source.kind(), source.to_string()) }
        }
        DatabaseError::Gone { path } => DatabaseError::Gone { path: path.clone() },
        DatabaseError::OutcomeUnknown(source) => DatabaseError::OutcomeUnknown(source.to_string().into()),
        DatabaseError::Panicked(text) => DatabaseError::Panicked(text.clone()),
        DatabaseError::Sqlite(rusqlite::Error::SqliteFailure(code, text)) => {
            DatabaseError::Sqlite(rusqlite::Error::SqliteFailure(*code, text.clone()))
        }
        DatabaseError::Sqlite(other) => DatabaseError::Sqlite(rusqlite::Error::SqliteFailure(
            rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_ABORT),
            Some(other.to_string()),
        )),
    }
}
