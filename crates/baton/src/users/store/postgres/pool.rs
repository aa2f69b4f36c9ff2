//! The connections to one PostgreSQL server, and what its errors mean. [`crate::store_pool`] lends them.

use std::str::FromStr;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgDatabaseError};
use sqlx::{ConnectOptions, PgConnection};
use tokio::time::{Instant, timeout_at};

use crate::store_pool::{self, PoolError, PoolOptions};
use crate::users::store::{UserStoreError, UserStoreErrorKind};

/// The server, and the limits of calls to it.
#[derive(Clone)]
pub struct PostgresOptions {
    /// `postgres://user:password@host:port/database`. Holds a secret: never print it.
    pub url: String,
    /// Connections open at once.
    pub connections_max: usize,
    /// Time limit of a call, waiting for a connection included.
    pub timeout: Duration,
}

impl PostgresOptions {
    /// 4 connections and 10 seconds a call.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), connections_max: 4, timeout: Duration::from_secs(10) }
    }

    pub(super) fn parsed(&self) -> Result<PgConnectOptions, UserStoreError> {
        let options = PgConnectOptions::from_str(&self.url).map_err(store_error)?;
        Ok(options.application_name("baton").disable_statement_logging())
    }
}

pub(super) type Pool = store_pool::Pool<PgConnection>;
pub(super) type Lease<'p> = store_pool::Lease<'p, PgConnection>;

/// Shorter than the idle timeout of the usual proxies and firewalls between us and the server.
const IDLE_MAX: Duration = Duration::from_secs(240);

pub(super) fn open(options: &PostgresOptions) -> Result<Pool, UserStoreError> {
    Ok(Pool::new(PoolOptions {
        connect: options.parsed()?,
        setup: setup(options.timeout),
        connections_max: options.connections_max,
        idle_max: IDLE_MAX,
        timeout: options.timeout,
    }))
}

impl Pool {
    /// Runs `work` on a connection, and once more on a new one if a reused connection turns out to be lost: so `work`
    /// must be safe to repeat. An error of `work` closes the connection; errors that leave it usable are `work`'s own to
    /// handle.
    pub(super) async fn call<'p, T, F, Fut>(&'p self, work: F) -> Result<T, UserStoreError>
    where
        F: Fn(Lease<'p>) -> Fut,
        Fut: Future<Output = (Lease<'p>, Result<T, sqlx::Error>)>,
    {
        let deadline = Instant::now() + self.timeout;
        let mut lease = self.lend(deadline).await?;
        loop {
            let reused = lease.is_reused();
            let (returned, done) = timeout_at(deadline, work(lease)).await.map_err(late)?;
            match done.map_err(store_error) {
                Ok(value) => {
                    returned.give_back();
                    return Ok(value);
                }
                Err(failure) if reused && failure.kind == UserStoreErrorKind::Down => {
                    lease = returned.reconnect(deadline).await?;
                }
                Err(failure) => return Err(failure),
            }
        }
    }
}

/// What every connection runs first. The server gives up by itself on statements that we no longer wait for.
/// `synchronous_commit` is raised only where the server's own setting would answer a commit before it is on disk.
fn setup(timeout: Duration) -> String {
    let ms = timeout.as_millis().max(1);
    format!(
        "SET statement_timeout = {ms}; SET lock_timeout = {}; SET idle_in_transaction_session_timeout = {ms}; \
         SELECT set_config('synchronous_commit', 'local', false) WHERE current_setting('synchronous_commit') = 'off'",
        (ms / 2).max(1)
    )
}

fn late(error: impl std::error::Error + Send + Sync + 'static) -> UserStoreError {
    UserStoreError::new(UserStoreErrorKind::Timeout, error)
}

impl From<PoolError> for UserStoreError {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::Timeout => late(error),
            PoolError::Connect(error) => store_error(error),
        }
    }
}

/// The kind of an error, by its SQLSTATE. Without one, the connection failed.
pub(super) fn store_error(error: sqlx::Error) -> UserStoreError {
    let state = sql_state(&error).unwrap_or_default();
    let kind = match state.as_str() {
        "40001" | "40P01" => UserStoreErrorKind::Deadlock,
        "25006" => UserStoreErrorKind::ReadOnly,
        // disk_full, and io_error, which a disk quota causes.
        "53100" | "58030" => UserStoreErrorKind::DiskFull,
        "55P03" | "57014" | "25P03" => UserStoreErrorKind::Timeout,
        _ if state.starts_with("08") || state.starts_with("57P") || state.starts_with("53") => UserStoreErrorKind::Down,
        "" => UserStoreErrorKind::Down,
        _ => UserStoreErrorKind::Other,
    };
    UserStoreError::new(kind, error)
}

/// Whether the row is at fault, so that a repeat fails too: a value that does not fit, a broken constraint, an index
/// entry that is too long, or a trigger that refuses.
pub(super) fn is_row_fault(error: &sqlx::Error) -> bool {
    let state = sql_state(error).unwrap_or_default();
    ["22", "23", "44"].iter().any(|class| state.starts_with(class)) || matches!(state.as_str(), "54000" | "P0001")
}

fn sql_state(error: &sqlx::Error) -> Option<String> {
    let error = error.as_database_error()?.try_downcast_ref::<PgDatabaseError>()?;
    Some(error.code().to_owned())
}
