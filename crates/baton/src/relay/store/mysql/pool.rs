//! The connections to one MySQL or MariaDB server: so many at most, each lent to one call at a time.
//!
//! A connection comes back only from a call that ended cleanly. In every other case (an error on the way, a timeout, a
//! caller that went away) it is closed: the server then undoes what was not committed, and nobody inherits an open
//! transaction or an answer meant for somebody else. This is why the pool is our own; sqlx's takes back what is dropped.

use std::ops::{Deref, DerefMut};
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use sqlx::mysql::MySqlConnectOptions;
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, MySqlConnection};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout_at};

use crate::relay::store::StoreError;

/// Prepared statements of a connection: every size of every kind that moves rows, and room for the others.
const STATEMENTS_MAX: usize = 150;

/// Where the server is and how long we wait for it.
#[derive(Clone)]
pub struct MySqlOptions {
    /// `mysql://user:password@host:port/database`. Holds a secret: not to be printed.
    pub url: String,
    /// How many connections at most.
    pub connections_max: usize,
    /// Within this time every call has its answer, waiting for a connection and repeating included.
    pub timeout: Duration,
}

impl MySqlOptions {
    /// The usual limits.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), connections_max: 16, timeout: Duration::from_secs(5) }
    }

    /// What sqlx needs to know. The strict mode and the rest are set in [`connect`].
    pub(super) fn parsed(&self) -> Result<MySqlConnectOptions, StoreError> {
        let options = MySqlConnectOptions::from_str(&self.url).map_err(unavailable)?;
        Ok(options
            .charset("utf8mb4")
            .timezone(Some("+00:00".to_owned()))
            .pipes_as_concat(false)
            .no_engine_substitution(false)
            .statement_cache_capacity(STATEMENTS_MAX)
            .disable_statement_logging())
    }
}

/// See the top of this file.
pub(super) struct Pool {
    options: MySqlConnectOptions,
    setup: String,
    room: Semaphore,
    idle: Mutex<Vec<Idle>>,
    pub(super) timeout: Duration,
    pub(super) connections_max: usize,
}

struct Idle {
    connection: MySqlConnection,
    since: Instant,
}

/// A connection on loan. Dropped, it is closed; see [`Lease::give_back`].
pub(super) struct Lease<'p> {
    pool: &'p Pool,
    connection: Option<MySqlConnection>,
    _permit: SemaphorePermit<'p>,
}

/// How long the server waits for the next word on a connection before it closes it and undoes what was not committed.
/// A process that is frozen or cut off in the middle of a transaction keeps its locks no longer than this; the server's
/// own default is eight hours.
const SILENCE_MAX: Duration = Duration::from_secs(20);
/// Well before the server closes it.
const IDLE_MAX: Duration = Duration::from_secs(10);

impl Pool {
    pub(super) fn new(options: &MySqlOptions) -> Result<Self, StoreError> {
        let connections_max = options.connections_max.max(1);
        Ok(Self {
            setup: setup(options.timeout),
            options: options.parsed()?,
            room: Semaphore::new(connections_max),
            idle: Mutex::new(Vec::new()),
            timeout: options.timeout,
            connections_max,
        })
    }

    /// A connection, the one used last if there is one. Whatever goes wrong here, nothing was asked of the server yet.
    pub(super) async fn lend(&self, deadline: Instant) -> Result<Lease<'_>, StoreError> {
        let room = timeout_at(deadline, self.room.acquire()).await.map_err(unavailable)?.map_err(unavailable)?;
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let connection = match idle.filter(|idle| idle.since.elapsed() < IDLE_MAX) {
            Some(idle) => idle.connection,
            None => timeout_at(deadline, connect(&self.options, &self.setup))
                .await
                .map_err(unavailable)?
                .map_err(unavailable)?,
        };
        Ok(Lease { pool: self, connection: Some(connection), _permit: room })
    }
}

impl Lease<'_> {
    /// For the next call. Only when nothing is open on it: no transaction, no answer that is still to be read.
    pub(super) fn give_back(mut self) {
        if let Some(connection) = self.connection.take() {
            let mut idle = self.pool.idle.lock().unwrap_or_else(PoisonError::into_inner);
            // The last one used is taken first, so what is not needed grows old at the bottom.
            if idle.first().is_some_and(|oldest| oldest.since.elapsed() >= IDLE_MAX) {
                idle.remove(0);
            }
            idle.push(Idle { connection, since: Instant::now() });
        }
    }
}

impl Deref for Lease<'_> {
    type Target = MySqlConnection;

    fn deref(&self) -> &MySqlConnection {
        self.connection.as_ref().expect("it is there until it is given back")
    }
}

impl DerefMut for Lease<'_> {
    fn deref_mut(&mut self) -> &mut MySqlConnection {
        self.connection.as_mut().expect("it is there until it is given back")
    }
}

/// A new connection, set up.
pub(super) async fn connect(options: &MySqlConnectOptions, setup: &str) -> Result<MySqlConnection, sqlx::Error> {
    let mut connection = MySqlConnection::connect_with(options).await?;
    sqlx::raw_sql(AssertSqlSafe(setup)).execute(&mut connection).await?;
    Ok(connection)
}

/// What every connection of the pool is told first.
///
/// * Strict: a value that does not fit is an error, never shortened.
/// * READ COMMITTED: each statement sees what is committed by then (what a lock was waited for included), and no gaps are
///   locked, which is where most deadlocks come from. Every rule that spans statements holds by a lock or a unique key.
/// * The server gives up by itself on what we no longer wait for, so that a statement nobody listens to does not keep
///   its locks; nor does a process that was stopped between two statements of a transaction. The two servers have different
///   names for that, and each skips the other's comment. MySQL has none for the latter but the end of an idle connection,
///   which must come after our own: see [`SILENCE_MAX`].
fn setup(timeout: Duration) -> String {
    let seconds = timeout.as_secs().max(1);
    let (lock_seconds, milliseconds) = ((seconds / 2).max(1), seconds * 1000);
    let silence_seconds = SILENCE_MAX.as_secs().max(2 * seconds);
    format!(
        "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ZERO_DATE,NO_ZERO_IN_DATE,ERROR_FOR_DIVISION_BY_ZERO,\
         NO_ENGINE_SUBSTITUTION,ONLY_FULL_GROUP_BY', innodb_lock_wait_timeout = {lock_seconds}, \
         lock_wait_timeout = {seconds}, wait_timeout = {silence_seconds} \
         /*M! , max_statement_time = {seconds}, idle_transaction_timeout = {seconds} */ \
         /*!80000 , max_execution_time = {milliseconds} */; \
         SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"
    )
}

pub(super) fn unavailable(error: impl std::error::Error + Send + Sync + 'static) -> StoreError {
    StoreError::Unavailable(Box::new(error))
}
