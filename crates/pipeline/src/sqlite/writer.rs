//! The one thread that writes. It takes the first job that waits, opens a transaction, runs that job and whatever else
//! has come in meanwhile, each in its own savepoint, commits, and answers them all. When idle a job is committed at
//! once; nothing is ever held back to make a group larger.
//!
//! If the commit fails nobody's work is kept and everybody is told. The thread itself goes on: the next group may
//! find space on the disk, or the lock free.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rusqlite::{Connection, ErrorCode};
use tokio::sync::{mpsc, oneshot};

use super::clock::{Clock, NOTE_EVERY_MS};
use super::signal::Signals;
use super::{DatabaseError, Role, connect, panic_text};

/// How many jobs share one commit at most, so that the first does not wait for ever.
const GROUP_JOBS_MAX: usize = 1024;
/// How often, in commits, the length of the log is looked at.
const WAL_CHECK_COMMITS: u64 = 1024;
/// From here the writer waits for readers to leave the log so that it can start over. The automatic checkpoints never
/// wait, and under unbroken reads could be put off without end.
const WAL_BYTES_MAX: u64 = 256 * 1024 * 1024;

/// A closure with its answer, the type of which the writer does not know.
pub(super) trait Job: Send {
    /// Runs, in a savepoint of its own unless it is [`Guard::Group`]; a failure is kept for the answer.
    fn run(&mut self, connection: &Connection);
    /// What a failure undoes.
    fn guard(&self) -> Guard;
    /// Why it failed, if it did.
    fn failure(&self) -> Option<&DatabaseError>;
    /// Tells the caller: its own result, unless the whole group failed.
    fn answer(self: Box<Self>, group: Result<(), &DatabaseError>);
}

pub(super) enum Reply<T> {
    Async(oneshot::Sender<Result<T, DatabaseError>>),
    Blocking(std::sync::mpsc::SyncSender<Result<T, DatabaseError>>),
    Nobody,
}

/// What is undone when a job fails.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Guard {
    /// The job alone: it runs in a savepoint.
    Job,
    /// The whole group. For jobs that fail only as all others would: a savepoint costs about as much as two inserts.
    Group,
}

pub(super) struct Work<T, F> {
    guard: Guard,
    job: Option<F>,
    result: Option<Result<T, DatabaseError>>,
    reply: Reply<T>,
}

impl<T, F> Work<T, F> {
    pub(super) fn new(guard: Guard, job: F, reply: Reply<T>) -> Self {
        Self { guard, job: Some(job), result: None, reply }
    }
}

impl<T, F> Job for Work<T, F>
where
    T: Send,
    F: FnOnce(&Connection) -> Result<T, rusqlite::Error> + Send,
{
    fn run(&mut self, connection: &Connection) {
        if let Some(job) = self.job.take() {
            self.result = Some(match self.guard {
                Guard::Job => in_savepoint(connection, job),
                Guard::Group => caught(connection, job),
            });
        }
    }

    fn guard(&self) -> Guard {
        self.guard
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
        // A caller that has gone away does not mind.
        match self.reply {
            Reply::Async(reply) => drop(reply.send(result)),
            Reply::Blocking(reply) => drop(reply.send(result)),
            Reply::Nobody => {}
        }
    }
}

fn in_savepoint<T>(
    connection: &Connection,
    job: impl FnOnce(&Connection) -> Result<T, rusqlite::Error>,
) -> Result<T, DatabaseError> {
    connection.prepare_cached("SAVEPOINT job")?.execute([])?;
    let result = caught(connection, job);
    // Some errors, a full disk among them, end the whole transaction; then there is no savepoint left.
    if !connection.is_autocommit() {
        if result.is_err() {
            connection.prepare_cached("ROLLBACK TO job")?.execute([])?;
        }
        connection.prepare_cached("RELEASE job")?.execute([])?;
    }
    result
}

fn caught<T>(
    connection: &Connection,
    job: impl FnOnce(&Connection) -> Result<T, rusqlite::Error>,
) -> Result<T, DatabaseError> {
    match catch_unwind(AssertUnwindSafe(|| job(connection))) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(error.into()),
        Err(panic) => Err(DatabaseError::Panicked(panic_text(&*panic))),
    }
}

/// What the writer has done.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) commits: AtomicU64,
    pub(super) jobs: AtomicU64,
}

pub(super) struct Writer {
    path: PathBuf,
    connection: Connection,
    jobs: mpsc::Receiver<Box<dyn Job>>,
    signals: Arc<Signals>,
    counts: Arc<Counts>,
    clock: Clock,
    /// When the time was last written down.
    noted_ms: i64,
}

impl Writer {
    pub(super) fn new(
        path: PathBuf,
        connection: Connection,
        jobs: mpsc::Receiver<Box<dyn Job>>,
        signals: Arc<Signals>,
        counts: Arc<Counts>,
        clock: Clock,
    ) -> Self {
        Self { path, connection, jobs, signals, counts, clock, noted_ms: 0 }
    }

    /// Works until every [`super::Database`] handle is gone and every job is answered.
    pub(super) fn run(mut self) {
        while let Some(first) = self.jobs.blocking_recv() {
            let (group, outcome) = self.commit_group(first);
            if let Err(error) = &outcome {
                tracing::warn!(%error, jobs = group.len(), path = %self.path.display(), "a group commit failed");
            }
            self.signals.fire_marked();
            for job in group {
                job.answer(outcome.as_ref().map(|_| ()));
            }
            if outcome.is_err() {
                self.recover();
            }
            self.bound_log();
        }
    }

    fn commit_group(&mut self, first: Box<dyn Job>) -> (Vec<Box<dyn Job>>, Result<(), DatabaseError>) {
        let mut group = Vec::new();
        if let Err(error) = execute(&self.connection, "BEGIN IMMEDIATE") {
            // The lock has been waited for already. Those behind would wait as long again, one after the other.
            group.push(first);
            while group.len() < GROUP_JOBS_MAX
                && let Ok(job) = self.jobs.try_recv()
            {
                group.push(job);
            }
            return (group, Err(error.into()));
        }
        let mut next = Some(first);
        while let Some(mut job) = next {
            job.run(&self.connection);
            let spoiled = job.guard() == Guard::Group && job.failure().is_some();
            if spoiled || self.connection.is_autocommit() {
                // What is left of the transaction is rolled back by `recover`.
                let cause = job.failure().map_or_else(ended_by_job, copy);
                group.push(job);
                return (group, Err(cause));
            }
            group.push(job);
            next = if group.len() < GROUP_JOBS_MAX { self.jobs.try_recv().ok() } else { None };
        }
        let now_ms = self.clock.now_ms();
        if now_ms - self.noted_ms >= NOTE_EVERY_MS {
            self.noted_ms = now_ms;
            if let Err(error) = self.clock.note(&self.connection) {
                return (group, Err(error.into()));
            }
        }
        let outcome = execute(&self.connection, "COMMIT").map_err(commit_failed);
        if outcome.is_ok() {
            self.counts.commits.fetch_add(1, Ordering::Relaxed);
            self.counts.jobs.fetch_add(group.len() as u64, Ordering::Relaxed);
        }
        (group, outcome)
    }

    /// After a failed group: leaves no transaction open, and replaces a connection that cannot even roll back.
    fn recover(&mut self) {
        if self.connection.is_autocommit() || execute(&self.connection, "ROLLBACK").is_ok() {
            return;
        }
        match connect(&self.path, Role::Writer) {
            Ok(connection) => self.connection = connection,
            Err(error) => tracing::warn!(error = %error, path = %self.path.display(), "cannot reopen the database"),
        }
    }

    fn bound_log(&self) {
        if !self.counts.commits.load(Ordering::Relaxed).is_multiple_of(WAL_CHECK_COMMITS) {
            return;
        }
        let mut log = self.path.clone().into_os_string();
        log.push("-wal");
        if std::fs::metadata(log).is_ok_and(|file| file.len() > WAL_BYTES_MAX) {
            // It answers whether it managed to; if not, the next look tries again.
            let tried = self.connection.query_row("PRAGMA wal_checkpoint(RESTART)", [], |_| Ok(()));
            if let Err(error) = tried {
                tracing::warn!(error = %error, "the write-ahead log is long and cannot be emptied");
            }
        }
    }
}

fn execute(connection: &Connection, sql: &str) -> Result<(), rusqlite::Error> {
    connection.prepare_cached(sql)?.execute([]).map(|_| ())
}

/// A full disk refuses a page before the commit record is whole, and a lock refuses everything: both are certain.
/// After any other failure (an fsync, say) the record may be in the log and be found there after a crash, if nothing
/// overwrites it first.
fn commit_failed(error: rusqlite::Error) -> DatabaseError {
    match error.sqlite_error_code() {
        Some(ErrorCode::DiskFull | ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => error.into(),
        _ => DatabaseError::OutcomeUnknown(Box::new(error)),
    }
}

fn ended_by_job() -> DatabaseError {
    DatabaseError::OutcomeUnknown("a job ended the transaction that it shared".into())
}

/// One failure is told to a whole group, and SQLite's errors cannot be cloned.
fn copy(error: &DatabaseError) -> DatabaseError {
    match error {
        DatabaseError::Full => DatabaseError::Full,
        DatabaseError::Busy => DatabaseError::Busy,
        DatabaseError::Closed => DatabaseError::Closed,
        DatabaseError::Io { path, source } => {
            DatabaseError::Io { path: path.clone(), source: std::io::Error::new(source.kind(), source.to_string()) }
        }
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
