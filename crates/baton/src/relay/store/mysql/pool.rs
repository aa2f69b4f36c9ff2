//! The connections to one MySQL or MariaDB server: where it is, the limits of calls to it, and what every connection is
//! set to. [`crate::store_pool`] lends them.

use std::str::FromStr;
use std::time::Duration;

use sqlx::mysql::MySqlConnectOptions;
use sqlx::{ConnectOptions, MySqlConnection};

use crate::relay::store::StoreError;
use crate::store_pool::{self, PoolError, PoolOptions};

pub(super) use crate::store_pool::connect;

/// Prepared statements kept per connection: every batch size of every statement that saves rows, and room for others.
const STATEMENTS_MAX: usize = 150;

/// The server, and the limits of calls to it.
#[derive(Clone)]
pub struct MySqlOptions {
    /// `mysql://user:password@host:port/database`. Holds a secret: never print it.
    pub url: String,
    /// Connections open at once.
    pub connections_max: usize,
    /// Time limit of a call, waiting for a connection and repeating included.
    pub timeout: Duration,
}

impl MySqlOptions {
    /// 16 connections and 5 seconds a call.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), connections_max: 16, timeout: Duration::from_secs(5) }
    }

    /// The options that sqlx applies itself; [`setup`] sets the rest.
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

pub(super) type Pool = store_pool::Pool<MySqlConnection>;
pub(super) type Lease<'p> = store_pool::Lease<'p, MySqlConnection>;

/// The server closes a connection that is silent for this long, and rolls back what was not committed: a process that is
/// frozen or cut off in the middle of a transaction keeps its locks no longer than this. The server's own default is
/// eight hours.
const SILENCE_MAX: Duration = Duration::from_secs(20);
/// Well below [`SILENCE_MAX`], so that no connection is lent that the server is about to close.
const IDLE_MAX: Duration = Duration::from_secs(10);

pub(super) fn open(options: &MySqlOptions) -> Result<Pool, StoreError> {
    Ok(Pool::new(PoolOptions {
        connect: options.parsed()?,
        setup: setup(options.timeout),
        connections_max: options.connections_max,
        idle_max: IDLE_MAX,
        timeout: options.timeout,
    }))
}

impl From<PoolError> for StoreError {
    fn from(error: PoolError) -> Self {
        Self::Unavailable(Box::new(error))
    }
}

/// What every connection of the pool runs first.
///
/// * Strict mode: a value that does not fit is an error, never shortened.
/// * READ COMMITTED: each statement sees what is committed when it runs (or when the lock it waited for is free), and
///   gaps are not locked, which is where most deadlocks come from. Every rule that spans statements holds by a lock or a
///   unique key.
/// * The server gives up by itself on statements that we no longer wait for, and on transactions of a process that
///   stopped between two statements, so that neither keeps its locks. MySQL and MariaDB name these settings differently,
///   and each skips the other's comment. MySQL has no limit for an idle transaction but the idle connection's:
///   [`SILENCE_MAX`].
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
