//! The connections to one PostgreSQL server: so many at most, each lent to one call at a time, each call within its time.
//!
//! A connection comes back only from a call that ended cleanly. In every other case (an error on the way, a timeout, a
//! caller that went away) it is closed: the server then undoes what was not committed, and nobody inherits an answer
//! meant for somebody else. This is why the pool is our own; sqlx's takes back what is dropped.

use std::str::FromStr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgDatabaseError};
use sqlx::{AssertSqlSafe, ConnectOptions, Connection, PgConnection};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use crate::users::store::{StoreError, Trouble};

/// Where the server is and how long we wait for it.
#[derive(Clone)]
pub struct PostgresOptions {
    /// `postgres://user:password@host:port/database`. Holds a secret: not to be printed.
    pub url: String,
    /// How many connections at most.
    pub connections_max: usize,
    /// Within this time every call has its answer, waiting for a connection included.
    pub timeout: Duration,
}

impl PostgresOptions {
    /// The usual limits.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), connections_max: 4, timeout: Duration::from_secs(10) }
    }

    pub(super) fn parsed(&self) -> Result<PgConnectOptions, StoreError> {
        let options = PgConnectOptions::from_str(&self.url).map_err(store_error)?;
        Ok(options.application_name("baton").disable_statement_logging())
    }
}

/// Work on a connection, as [`Pool::call`] takes it: it owns the connection while it runs and hands it back, so that
/// work that is dropped on the way takes its connection with it.
macro_rules! work {
    ($connection:ident => $body:expr) => {
        |mut lent: sqlx::PgConnection| async move {
            let done: Result<_, sqlx::Error> = {
                let $connection: &mut sqlx::PgConnection = &mut lent;
                async move { $body }.await
            };
            (lent, done)
        }
    };
}
pub(super) use work;

/// See the top of this file.
pub(super) struct Pool {
    options: PgConnectOptions,
    setup: String,
    room: Semaphore,
    idle: Mutex<Vec<(PgConnection, Instant)>>,
    timeout: Duration,
}

/// Shorter than what the things between keep an idle connection for.
const IDLE_MAX: Duration = Duration::from_secs(240);

impl Pool {
    pub(super) fn new(options: &PostgresOptions) -> Result<Self, StoreError> {
        Ok(Self {
            options: options.parsed()?,
            setup: setup(options.timeout),
            room: Semaphore::new(options.connections_max.max(1)),
            idle: Mutex::default(),
            timeout: options.timeout,
        })
    }

    /// Does `work` on a connection; a second time on a new one if the first was an old one that has meanwhile been lost.
    /// So it must be something that may happen twice. An error that leaves the connection usable is the work's to handle:
    /// what comes out of here as one closes it.
    pub(super) async fn call<T, F, Fut>(&self, work: F) -> Result<T, StoreError>
    where
        F: Fn(PgConnection) -> Fut,
        Fut: Future<Output = (PgConnection, Result<T, sqlx::Error>)>,
    {
        let deadline = Instant::now() + self.timeout;
        let _room = timeout_at(deadline, self.room.acquire()).await.map_err(late)?.map_err(late)?;
        if let Some(connection) = self.idle() {
            let (connection, done) = timeout_at(deadline, work(connection)).await.map_err(late)?;
            match done.map_err(store_error) {
                // The server was restarted, and those beside it are gone as well.
                Err(StoreError { trouble: Trouble::Down, .. }) => self.lock().clear(),
                done => return self.give_back(connection, done),
            }
        }
        let connected = timeout_at(deadline, connect(&self.options, &self.setup)).await;
        let connection = connected.map_err(late)?.map_err(store_error)?;
        let (connection, done) = timeout_at(deadline, work(connection)).await.map_err(late)?;
        self.give_back(connection, done.map_err(store_error))
    }

    fn give_back<T>(&self, connection: PgConnection, done: Result<T, StoreError>) -> Result<T, StoreError> {
        if done.is_ok() {
            self.lock().push((connection, Instant::now()));
        }
        done
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(PgConnection, Instant)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The one used last; those that were not needed for long are closed.
    fn idle(&self) -> Option<PgConnection> {
        let mut idle = self.lock();
        idle.retain(|(_, since)| since.elapsed() < IDLE_MAX);
        idle.pop().map(|(connection, _)| connection)
    }
}

/// A new connection, set up.
pub(super) async fn connect(options: &PgConnectOptions, setup: &str) -> Result<PgConnection, sqlx::Error> {
    let mut connection = PgConnection::connect_with(options).await?;
    sqlx::raw_sql(AssertSqlSafe(setup)).execute(&mut connection).await?;
    Ok(connection)
}

/// What every connection is told first. The server gives up by itself on what we no longer wait for. A commit is on disk
/// when it is answered: only a server set to be less careful than that is told otherwise.
fn setup(timeout: Duration) -> String {
    let ms = timeout.as_millis().max(1);
    format!(
        "SET statement_timeout = {ms}; SET lock_timeout = {}; SET idle_in_transaction_session_timeout = {ms}; \
         SELECT set_config('synchronous_commit', 'local', false) WHERE current_setting('synchronous_commit') = 'off'",
        (ms / 2).max(1)
    )
}

fn late(error: impl std::error::Error + Send + Sync + 'static) -> StoreError {
    StoreError::new(Trouble::Timeout, error)
}

/// What an error says about the database.
pub(super) fn store_error(error: sqlx::Error) -> StoreError {
    let state = sql_state(&error).unwrap_or_default();
    let trouble = match state.as_str() {
        "40001" | "40P01" => Trouble::Deadlock,
        "25006" => Trouble::ReadOnly,
        // A disk that is full, and one that a quota calls so.
        "53100" | "58030" => Trouble::DiskFull,
        "55P03" | "57014" | "25P03" => Trouble::Timeout,
        _ if state.starts_with("08") || state.starts_with("57P") || state.starts_with("53") => Trouble::Down,
        "" => Trouble::Down,
        _ => Trouble::Other,
    };
    StoreError::new(trouble, error)
}

/// Whether the database says that a row is at fault, and would say so at any time: a value that does not fit, a broken
/// constraint, an index entry too long, or a trigger that refuses.
pub(super) fn is_row_fault(error: &sqlx::Error) -> bool {
    let state = sql_state(error).unwrap_or_default();
    ["22", "23", "44"].iter().any(|class| state.starts_with(class)) || matches!(state.as_str(), "54000" | "P0001")
}

fn sql_state(error: &sqlx::Error) -> Option<String> {
    let error = error.as_database_error()?.try_downcast_ref::<PgDatabaseError>()?;
    Some(error.code().to_owned())
}
