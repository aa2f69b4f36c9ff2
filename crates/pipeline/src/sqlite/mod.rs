//! One SQLite file, shared by everything embedded: the queue, and the tables of whoever uses this crate.
//!
//! Writes go through one thread that commits them in groups (`sqlite/writer.rs`): a commit costs one fsync whether it
//! carries one job or a thousand, so jobs that pile up while the disk works share the next one. Reads run beside it on
//! a small pool of connections; the write-ahead log lets them see the last commit without waiting for the next.
//! Whoever sleeps until something changes does so on a [`Signal`]. Several processes may share the file.

mod clock;
mod signal;
mod writer;

use std::error::Error;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, ErrorCode};
use tokio::sync::{Semaphore, mpsc, oneshot};

pub use clock::Clock;
pub use signal::{Signal, Waiting};
use writer::{Counts, Guard, Job, Reply, Work, Writer};

/// How many write jobs may wait for the writer; whoever comes next waits to hand over its own.
const JOBS_WAITING_MAX: usize = 4096;
/// How many reads run at once.
const READERS_MAX: usize = 4;
/// How long to wait for a lock that another process holds before answering [`DatabaseError::Busy`].
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two tries for such a lock. SQLite's own handler backs off to 100 ms, which starves a process beside a
/// busy one: the lock is free for a fraction of a millisecond between two group commits.
const BUSY_PAUSE: Duration = Duration::from_millis(1);
/// Statements that a connection keeps prepared.
const STATEMENTS_CACHED_MAX: usize = 128;
/// The log is copied into the main file each time it has grown by this many pages (16 MiB).
const WAL_CHECKPOINT_PAGES: u32 = 4096;
/// A log that was longer is cut back to this when it starts over.
const WAL_BYTES_KEPT_MAX: u32 = 64 * 1024 * 1024;
/// Page cache of the writer, in KiB.
const WRITER_CACHE_KIB: i64 = 16 * 1024;

/// A SQLite file with one writer and a few readers. Cloning it is cheap and gives the same one.
///
/// When the last clone goes, the writer finishes the jobs that wait and stops.
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
    inner: Arc<Inner>,
}

struct Inner {
    path: PathBuf,
    clock: Clock,
    jobs: mpsc::Sender<Box<dyn Job>>,
    readers: Arc<Semaphore>,
    idle_readers: Mutex<Vec<Connection>>,
    signals: Arc<signal::Signals>,
    counts: Arc<Counts>,
}

impl Database {
    /// Opens the file, creating it and its directory when missing.
    pub fn open(path: &Path) -> Result<Database, DatabaseError> {
        check_directory(path)?;
        let connection = connect(path, Role::Writer)?;
        let clock = set_clock(&connection)?;
        let (jobs, waiting) = mpsc::channel(JOBS_WAITING_MAX);
        let signals = signal::Signals::new(path.to_owned());
        let counts = Arc::new(Counts::default());
        let writer = Writer::new(path.to_owned(), connection, waiting, signals.clone(), counts.clone(), clock);
        std::thread::Builder::new()
            .name("sqlite-writer".into())
            .spawn(move || writer.run())
            .map_err(|source| DatabaseError::Io { path: path.to_owned(), source })?;
        Ok(Database {
            inner: Arc::new(Inner {
                path: path.to_owned(),
                clock,
                jobs,
                readers: Arc::new(Semaphore::new(READERS_MAX)),
                idle_readers: Mutex::new(Vec::new()),
                signals,
                counts,
            }),
        })
    }

    /// Runs `job` inside the next group commit; returns after the commit is on disk.
    ///
    /// A job that fails or panics is undone alone. A job must not begin or end transactions itself. Dropping this
    /// future does not take the job back.
    pub async fn write<T, F>(&self, job: F) -> Result<T, DatabaseError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, rusqlite::Error> + Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let work = Work::new(Guard::Job, job, Reply::Async(reply));
        self.inner.jobs.send(Box::new(work)).await.map_err(|_| DatabaseError::Closed)?;
        answer.await.unwrap_or_else(|_| Err(writer_died()))
    }

    /// [`Database::write`] for a job that can fail only as every other would (no space, no disk), never for a reason of
    /// its own: it has no savepoint, and if it fails all of its group fail with it, each told so and nothing kept.
    pub async fn write_sure<T, F>(&self, job: F) -> Result<T, DatabaseError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, rusqlite::Error> + Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let work = Work::new(Guard::Group, job, Reply::Async(reply));
        self.inner.jobs.send(Box::new(work)).await.map_err(|_| DatabaseError::Closed)?;
        answer.await.unwrap_or_else(|_| Err(writer_died()))
    }

    /// [`Database::write`] for code that is not async, such as migrations before the runtime starts. It blocks its
    /// thread.
    pub fn write_blocking<T, F>(&self, job: F) -> Result<T, DatabaseError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, rusqlite::Error> + Send + 'static,
    {
        let (reply, answer) = std::sync::mpsc::sync_channel(1);
        let mut work: Box<dyn Job> = Box::new(Work::new(Guard::Job, job, Reply::Blocking(reply)));
        // `blocking_send` would panic on a runtime's thread, where this is slow but not wrong.
        while let Err(refused) = self.inner.jobs.try_send(work) {
            match refused {
                mpsc::error::TrySendError::Full(back) => work = back,
                mpsc::error::TrySendError::Closed(_) => return Err(DatabaseError::Closed),
            }
            std::thread::sleep(BUSY_PAUSE);
        }
        answer.recv().unwrap_or_else(|_| Err(writer_died()))
    }

    /// Leaves `job` for a later group commit without waiting; `false` if there is no room for it.
    pub(crate) fn write_later<F>(&self, job: F) -> bool
    where
        F: FnOnce(&Connection) -> Result<(), rusqlite::Error> + Send + 'static,
    {
        self.inner.jobs.try_send(Box::new(Work::new(Guard::Job, job, Reply::Nobody))).is_ok()
    }

    /// Runs `job` on a read connection, off the async threads, in one snapshot.
    pub async fn read<T, F>(&self, job: F) -> Result<T, DatabaseError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, rusqlite::Error> + Send + 'static,
    {
        let permit = self.inner.readers.clone().acquire_owned().await.map_err(|_| DatabaseError::Closed)?;
        let inner = self.inner.clone();
        let reading = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            let idle = inner.idle_readers.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let connection = match idle {
                Some(connection) => connection,
                None => connect(&inner.path, Role::Reader)?,
            };
            // A panic in the job drops the connection with its snapshot; the next read opens another.
            let transaction = connection.unchecked_transaction()?;
            let value = job(&transaction)?;
            transaction.commit()?;
            inner.idle_readers.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
            Ok(value)
        });
        reading.await.unwrap_or_else(|error| match error.try_into_panic() {
            Ok(panic) => Err(DatabaseError::Panicked(panic_text(&*panic))),
            Err(_) => Err(DatabaseError::Closed),
        })
    }

    /// How many jobs wait for the writer.
    pub fn waiting(&self) -> usize {
        self.inner.jobs.max_capacity() - self.inner.jobs.capacity()
    }

    /// The clock that everything in this file goes by.
    pub fn clock(&self) -> Clock {
        self.inner.clock
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.inner.path
    }

    /// The signal of that name, the same for every caller in this process.
    pub fn signal(&self, name: &str) -> Arc<Signal> {
        self.inner.signals.get(name)
    }

    /// How many group commits this handle and its clones have made.
    pub fn commits(&self) -> u64 {
        self.inner.counts.commits.load(Ordering::Relaxed)
    }

    /// How many jobs those commits carried, the failed ones included. Jobs by commits shows how well they share.
    pub fn jobs(&self) -> u64 {
        self.inner.counts.jobs.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Database").field("path", &self.inner.path).finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.signals.stop();
    }
}

/// What can go wrong with the file.
#[derive(Debug, thiserror::Error)]
pub enum DatabaseError {
    /// No space left on the disk, or the file has reached its limit. Nothing of the job is kept.
    #[error("the disk is full")]
    Full,
    /// Another process held the file's lock for too long. Nothing of the job is kept.
    #[error("the database is locked by another process")]
    Busy,
    /// The writer has stopped. Nothing of the job is kept.
    #[error("the database is closed")]
    Closed,
    /// The file or its directory cannot be used.
    #[error("cannot use the database file {}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The commit failed in a way that may have left it on disk: it may or may not be there after a crash.
    #[error("the commit failed half-way; its outcome is unknown")]
    OutcomeUnknown(#[source] Box<dyn Error + Send + Sync>),
    /// The job panicked. Nothing of it is kept.
    #[error("a database job panicked: {0}")]
    Panicked(String),
    /// Any other error, usually the job's own, such as a constraint. Nothing of the job is kept.
    #[error("the database refused")]
    Sqlite(#[source] rusqlite::Error),
}

impl DatabaseError {
    /// Whether the same job may succeed later.
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Full | Self::Busy | Self::Io { .. } | Self::OutcomeUnknown(_) => true,
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
enum Role {
    Writer,
    Reader,
}

fn connect(path: &Path, role: Role) -> Result<Connection, DatabaseError> {
    let connection = Connection::open(path)?;
    connection.busy_handler(Some(|tries| {
        std::thread::sleep(BUSY_PAUSE);
        u128::from(tries.unsigned_abs()) * BUSY_PAUSE.as_millis() < BUSY_TIMEOUT.as_millis()
    }))?;
    connection.set_prepared_statement_cache_capacity(STATEMENTS_CACHED_MAX);
    if role == Role::Writer {
        write_ahead(&connection)?;
        connection.pragma_update(None, "wal_autocheckpoint", WAL_CHECKPOINT_PAGES)?;
        connection.pragma_update(None, "journal_size_limit", WAL_BYTES_KEPT_MAX)?;
        connection.pragma_update(None, "cache_size", -WRITER_CACHE_KIB)?;
    }
    connection.pragma_update(None, "synchronous", "FULL")?;
    connection.pragma_update(None, "foreign_keys", true)?;
    connection.pragma_update(None, "temp_store", "MEMORY")?;
    if role == Role::Reader {
        connection.pragma_update(None, "query_only", true)?;
    }
    Ok(connection)
}

/// Two processes that start together agree on the one clock: whoever gets the lock first sets it.
fn set_clock(connection: &Connection) -> Result<Clock, DatabaseError> {
    connection.execute_batch("BEGIN IMMEDIATE")?;
    let clock = Clock::of(connection);
    connection.execute_batch(if clock.is_ok() { "COMMIT" } else { "ROLLBACK" })?;
    Ok(clock?)
}

/// Two processes that create the file together get in each other's way here, and SQLite does not call the busy
/// handler for it.
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

/// SQLite says only "unable to open database file" when it cannot create its log beside the file. This asks the
/// system and passes on its answer.
fn check_directory(path: &Path) -> Result<(), DatabaseError> {
    static PROBES: AtomicU64 = AtomicU64::new(0);
    let fail = |source| DatabaseError::Io { path: path.to_owned(), source };
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    std::fs::create_dir_all(directory).map_err(fail)?;
    let number = PROBES.fetch_add(1, Ordering::Relaxed);
    let probe = directory.join(format!(".writable-{}-{number}", std::process::id()));
    std::fs::write(&probe, b"").and_then(|()| std::fs::remove_file(&probe)).map_err(fail)?;
    std::fs::OpenOptions::new().create(true).append(true).open(path).map_err(fail)?;
    Ok(())
}

fn writer_died() -> DatabaseError {
    DatabaseError::OutcomeUnknown("the writer stopped before it answered".into())
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no text").to_owned()
}
