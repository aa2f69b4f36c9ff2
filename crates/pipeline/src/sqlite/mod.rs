//! One SQLite file that the embedded queue shares with the application's own tables.
//!
//! Writes go through one thread that commits them in groups (`writer`): a commit costs one fsync whether it carries one
//! job or a thousand, so jobs that arrive during an fsync share the next commit. Reads run concurrently on a few threads
//! (`reader`); the write-ahead log shows them the last commit without waiting for the next. A [`Signal`] wakes tasks that
//! wait for a commit. Several processes may share the file.

mod clock;
mod files;
mod read_stop;
mod reader;
mod signal;
mod writer;

use std::error::Error;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, OpenFlags};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use crate::lock::lock;
use crate::panic_text::panic_text;

pub use clock::Clock;
pub use signal::{Signal, SignalListener};
use writer::{Job, Reply, RollbackScope, WriteJob, Writer, WriterCounts};

/// Write jobs that may wait for the writer; at the limit callers wait to submit theirs.
const JOBS_WAITING_MAX: usize = 4096;
/// Concurrent reads.
const READERS_MAX: usize = 4;
/// How long to wait for a lock that another process holds before answering [`DatabaseError::Busy`].
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between two attempts to get such a lock. SQLite's own handler backs off to 100 ms, which starves a process next
/// to a busy one: the lock is free for a fraction of a millisecond between two group commits.
const BUSY_PAUSE: Duration = Duration::from_millis(1);
/// Prepared statements that each connection caches.
const STATEMENTS_CACHED_MAX: usize = 128;
/// The write-ahead log is copied into the main file each time it has grown by this many pages (16 MiB).
const WAL_CHECKPOINT_PAGES: u32 = 4096;
/// A longer log is truncated to this size when it restarts.
const WAL_BYTES_KEPT_MAX: u32 = 64 * 1024 * 1024;
/// Page cache of the writer's connection, in KiB.
const WRITER_CACHE_KIB: i64 = 16 * 1024;

/// A SQLite file with one writer and several readers. Clones share them.
///
/// When the last clone is dropped, the writer finishes the waiting jobs and stops.
///
/// ```
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// # let dir = tempfile::tempdir().unwrap();
/// use pipeline::sqlite::Database;
///
/// let db = Database::open(&dir.path().join("baton.db"))?;
/// db.write(|conn| conn.execute_batch("CREATE TABLE pets (name TEXT) STRICT")).await?;
/// db.write(|conn| conn.prepare_cached("INSERT INTO pets (name) VALUES (?1)")?.execute(["Rex"])).await?;
/// let name: String = db.read(|conn| conn.query_row("SELECT name FROM pets", [], |row| row.get(0))).await?;
/// assert_eq!(name, "Rex");
/// # Ok::<(), pipeline::sqlite::DatabaseError>(()) }).unwrap();
/// ```
#[derive(Clone)]
pub struct Database {
    state: Arc<DatabaseState>,
}

struct DatabaseState {
    path: PathBuf,
    files: Arc<files::OpenFiles>,
    clock: Clock,
    jobs: mpsc::Sender<Box<dyn Job>>,
    readers: Arc<Semaphore>,
    idle_readers: Mutex<Vec<reader::Reader>>,
    signals: Arc<signal::Signals>,
    counts: Arc<WriterCounts>,
    /// The writer stops after the jobs that wait.
    closing: Arc<AtomicBool>,
    /// Its sender is dropped with the writer's connection.
    writer_stops: watch::Receiver<()>,
}

impl Database {
    /// Opens the file, creating it and its directory when missing, both for the owner alone.
    pub fn open(path: &Path) -> Result<Database, DatabaseError> {
        files::prepare(path)?;
        Self::open_file(path)
    }

    /// Opens the file if it is there; creates neither it nor its directory.
    pub fn open_existing(path: &Path) -> Result<Database, DatabaseError> {
        files::find(path)?;
        Self::open_file(path)
    }

    fn open_file(path: &Path) -> Result<Database, DatabaseError> {
        let connection = connect(path, ConnectionRole::Writer)?;
        let clock = set_clock(&connection)?;
        let files = Arc::new(files::OpenFiles::of(path)?);
        let (jobs, waiting_jobs) = mpsc::channel(JOBS_WAITING_MAX);
        let signals = signal::Signals::new(path.to_owned());
        let counts = Arc::new(WriterCounts::default());
        let closing = Arc::new(AtomicBool::new(false));
        let (stopped, writer_stops) = watch::channel(());
        let writer = Writer {
            path: path.to_owned(),
            files: files.clone(),
            connection,
            jobs: waiting_jobs,
            signals: signals.clone(),
            counts: counts.clone(),
            clock,
            recorded_ms: 0,
            closing: closing.clone(),
            _stopped: stopped,
        };
        std::thread::Builder::new()
            .name("sqlite-writer".into())
            .spawn(move || writer.run())
            .map_err(|source| DatabaseError::Io { path: path.to_owned(), source })?;
        Ok(Database {
            state: Arc::new(DatabaseState {
                path: path.to_owned(),
                files,
                clock,
                jobs,
                readers: Arc::new(Semaphore::new(READERS_MAX)),
                idle_readers: Mutex::new(Vec::new()),
                signals,
                counts,
                closing,
                writer_stops,
            }),
        })
    }

    /// Runs `job` inside the next group commit and returns after the commit is on disk.
    ///
    /// A job that fails or panics is rolled back alone. A job must not begin or end transactions. Dropping this future does
    /// not cancel the job.
    pub async fn write<T, F>(&self, job: F) -> Result<T, DatabaseError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, rusqlite::Error> + Send + 'static,
    {
        self.write_in(RollbackScope::Job, job).await
    }

    /// [`Database::write`] without a savepoint, for a job that fails only for reasons that fail every job (no space, no
    /// disk). If it fails, its whole group is rolled back and every job of the group gets the error.
    pub async fn write_without_savepoint<T, F>(&self, job: F) -> Result<T, DatabaseError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, rusqlite::Error> + Send + 'static,
    {
        self.write_in(RollbackScope::Group, job).await
    }

    async fn write_in<T, F>(&self, scope: RollbackScope, job: F) -> Result<T, DatabaseError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, rusqlite::Error> + Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let work = WriteJob::new(scope, job, Reply::Async(reply));
        self.state.jobs.send(Box::new(work)).await.map_err(|_| DatabaseError::Closed)?;
        answer.await.unwrap_or_else(|_| Err(writer_stopped()))
    }

    /// [`Database::write`] for code that is not async, such as migrations before the runtime starts. It blocks the
    /// calling thread.
    pub fn write_blocking<T, F>(&self, job: F) -> Result<T, DatabaseError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, rusqlite::Error> + Send + 'static,
    {
        let (reply, answer) = std::sync::mpsc::sync_channel(1);
        let mut work: Box<dyn Job> = Box::new(WriteJob::new(RollbackScope::Job, job, Reply::Blocking(reply)));
        // Not `blocking_send`: it panics on a runtime's thread, where this loop is only slow.
        while let Err(refused) = self.state.jobs.try_send(work) {
            match refused {
                mpsc::error::TrySendError::Full(back) => work = back,
                mpsc::error::TrySendError::Closed(_) => return Err(DatabaseError::Closed),
            }
            std::thread::sleep(BUSY_PAUSE);
        }
        answer.recv().unwrap_or_else(|_| Err(writer_stopped()))
    }

    /// Submits `job` for a later group commit without waiting; `false` if the backlog is full.
    pub(crate) fn write_detached<F>(&self, job: F) -> bool
    where
        F: FnOnce(&Connection) -> Result<(), rusqlite::Error> + Send + 'static,
    {
        self.state.jobs.try_send(Box::new(WriteJob::new(RollbackScope::Job, job, Reply::Discard))).is_ok()
    }

    /// Runs `job` on a read connection, off the async threads, in one snapshot. Dropping this future stops the job: its
    /// statement is interrupted, and its place is free for the next read.
    pub async fn read<T, F>(&self, job: F) -> Result<T, DatabaseError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, rusqlite::Error> + Send + 'static,
    {
        let permit = self.state.readers.clone().acquire_owned().await.map_err(|_| DatabaseError::Closed)?;
        let idle = lock(&self.state.idle_readers).pop();
        let mut reader = match idle {
            Some(reader) => reader,
            None => {
                reader::Reader::start().map_err(|source| DatabaseError::Io { path: self.state.path.clone(), source })?
            }
        };
        let thread = reader.thread();
        let state = self.state.clone();
        let (read, _stop) = read_stop::pair();
        let (reply, answer) = oneshot::channel();
        thread.run(move || {
            let value = catch_unwind(AssertUnwindSafe(|| reader.read(&state, &read, job)));
            // From here on the connection is another read's. One whose job failed keeps no snapshot: it was dropped.
            read.finished();
            lock(&state.idle_readers).push(reader);
            drop(permit);
            reply.send(value.unwrap_or_else(|panic| Err(DatabaseError::Panicked(panic_text(&*panic))))).ok();
        });
        answer.await.unwrap_or(Err(DatabaseError::Closed))
    }

    /// Finishes the reads and writes in hand and closes the file for all clones; later jobs get [`DatabaseError::Closed`].
    ///
    /// If no other process has the file open, its write-ahead log is copied into it and removed, so that it can be copied
    /// alone. Dropping the handles does the same some time later, if the process lives on.
    pub async fn close(&self) {
        let state = &self.state;
        if state.readers.acquire_many(READERS_MAX as u32).await.is_ok() {
            state.readers.close();
        }
        lock(&state.idle_readers).clear();
        let signals = state.signals.clone();
        // Ends early only with the runtime.
        tokio::task::spawn_blocking(move || signals.stop_and_wait()).await.ok();
        state.closing.store(true, Ordering::Release);
        // Wakes the writer. If it has stopped, there is nothing to wake.
        let wake = WriteJob::new(RollbackScope::Job, |_: &Connection| Ok(()), Reply::Discard);
        state.jobs.send(Box::new(wake)).await.ok();
        let mut stops = state.writer_stops.clone();
        while stops.changed().await.is_ok() {}
    }

    /// Succeeds if the file can be written now: it is in its place, no other process locks it, and its disk has room.
    pub async fn check_writable(&self) -> Result<(), DatabaseError> {
        self.write(|_| Ok(())).await?;
        files::check_space(&self.state.path)
    }

    /// Jobs that wait for the writer.
    pub fn waiting(&self) -> usize {
        self.state.jobs.max_capacity() - self.state.jobs.capacity()
    }

    /// The clock for all times stored in this file.
    pub fn clock(&self) -> Clock {
        self.state.clock
    }

    /// The database file, as given to [`Database::open`].
    pub fn path(&self) -> &Path {
        &self.state.path
    }

    /// The signal with this name; all callers on this handle and its clones share it.
    pub fn signal(&self, name: &str) -> Arc<Signal> {
        self.state.signals.get(name)
    }

    /// Group commits made by this handle and its clones.
    pub fn commits(&self) -> u64 {
        self.state.counts.commits.load(Ordering::Relaxed)
    }

    /// Jobs in those commits, failed ones included. Jobs per commit show how well writes are grouped.
    pub fn jobs(&self) -> u64 {
        self.state.counts.jobs.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Database").field("path", &self.state.path).finish_non_exhaustive()
    }
}

impl Drop for DatabaseState {
    fn drop(&mut self) {
        self.signals.stop();
    }
}

/// Why a database job failed. Unless a variant says otherwise, the job was rolled back.
#[derive(Debug, thiserror::Error)]
pub enum DatabaseError {
    /// No space left on the disk, or the file has reached its size limit.
    #[error("the disk is full")]
    Full,
    /// Another process held the file's lock for longer than 5 seconds.
    #[error("the database is locked by another process")]
    Busy,
    /// The writer has stopped.
    #[error("the database is closed")]
    Closed,
    /// The file or its directory cannot be opened or written.
    #[error("cannot use the database file {}", path.display())]
    Io {
        /// The database file.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: std::io::Error,
    },
    /// The file was deleted, moved or replaced while it was open. What is written to it ends with the process.
    #[error("the database file {} was deleted or replaced; restart on a good data directory", path.display())]
    Gone {
        /// The database file.
        path: PathBuf,
    },
    /// The commit failed in a way that may have left it on disk: after a crash it may or may not be there.
    #[error("the commit failed half-way; its outcome is unknown")]
    OutcomeUnknown(#[source] Box<dyn Error + Send + Sync>),
    /// The job panicked, with this message.
    #[error("a database job panicked: {0}")]
    Panicked(String),
    /// Any other error, usually the job's own, such as a violated constraint.
    #[error("the database refused the job")]
    Sqlite(#[source] rusqlite::Error),
}

impl DatabaseError {
    /// Whether the same job may succeed later.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Full | Self::Busy | Self::Io { .. } | Self::Gone { .. } | Self::OutcomeUnknown(_) => true,
            Self::Closed | Self::Panicked(_) => false,
            Self::Sqlite(error) => matches!(
                error.sqlite_error_code(),
                Some(ErrorCode::SystemIoFailure | ErrorCode::OutOfMemory | ErrorCode::CannotOpen)
            ),
        }
    }
}

impl From<rusqlite::Error> for DatabaseError {
    fn from(error: rusqlite::Error) -> Self {
        match error.sqlite_error_code() {
            Some(ErrorCode::DiskFull) => Self::Full,
            Some(ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked) => Self::Busy,
            _ => Self::Sqlite(error),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ConnectionRole {
    Writer,
    Reader,
}

fn connect(path: &Path, role: ConnectionRole) -> Result<Connection, DatabaseError> {
    // The file is there; creating another in its place would hide that it was deleted.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_URI | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(path, flags)?;
    connection.busy_handler(Some(|tries| {
        std::thread::sleep(BUSY_PAUSE);
        u128::from(tries.unsigned_abs()) * BUSY_PAUSE.as_millis() < BUSY_TIMEOUT.as_millis()
    }))?;
    connection.set_prepared_statement_cache_capacity(STATEMENTS_CACHED_MAX);
    if role == ConnectionRole::Writer {
        write_ahead(&connection)?;
        connection.pragma_update(None, "wal_autocheckpoint", WAL_CHECKPOINT_PAGES)?;
        connection.pragma_update(None, "journal_size_limit", WAL_BYTES_KEPT_MAX)?;
        connection.pragma_update(None, "cache_size", -WRITER_CACHE_KIB)?;
    }
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "foreign_keys", true)?;
    connection.pragma_update(None, "temp_store", "MEMORY")?;
    if role == ConnectionRole::Reader {
        connection.pragma_update(None, "query_only", true)?;
    }
    Ok(connection)
}

/// Sets or reads the file's clock under the write lock, so that processes that start together agree on one.
fn set_clock(connection: &Connection) -> Result<Clock, DatabaseError> {
    connection.execute_batch("BEGIN IMMEDIATE")?;
    let clock = Clock::of(connection);
    connection.execute_batch(if clock.is_ok() { "COMMIT" } else { "ROLLBACK" })?;
    Ok(clock?)
}

/// Switches to the write-ahead log. When two processes create the file together one of them finds it locked, and SQLite
/// does not call the busy handler for this pragma.
fn write_ahead(connection: &Connection) -> Result<(), DatabaseError> {
    let tries_max = BUSY_TIMEOUT.as_millis() / BUSY_PAUSE.as_millis();
    for _ in 0..tries_max {
        match connection.pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get::<_, String>(0)) {
            Ok(mode) if mode == "wal" => return Ok(()),
            Ok(_) => break,
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) => std::thread::sleep(BUSY_PAUSE),
            Err(error) => return Err(error.into()),
        }
    }
    Err(DatabaseError::Busy)
}

fn writer_stopped() -> DatabaseError {
    DatabaseError::OutcomeUnknown("the writer stopped before it answered".into())
}
