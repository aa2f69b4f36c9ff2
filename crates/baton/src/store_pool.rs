//! A bounded pool of connections to one database server, each lent to one call at a time. Both lanes' stores use it.
//!
//! A connection returns to the pool only from a call that ended cleanly. In every other case (an error, a timeout, a
//! caller that was dropped) it is closed: the server then rolls back what was not committed, and no later call inherits
//! an open transaction or another call's answer. sqlx's own pool takes back connections that are dropped midway, so it
//! cannot be used here.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sqlx::{AssertSqlSafe, Connection, Executor};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout_at};

/// How a pool connects, and its limits.
pub(crate) struct PoolOptions<C: Connection> {
    /// The server and the credentials.
    pub(crate) connect: C::Options,
    /// SQL that every new connection runs first.
    pub(crate) setup: String,
    /// Connections open at once; at least 1.
    pub(crate) connections_max: usize,
    /// A connection that was idle for this long is closed, not lent again.
    pub(crate) idle_max: Duration,
    /// Time limit of a whole call, waiting for a connection included.
    pub(crate) timeout: Duration,
}

/// See the top of this file.
pub(crate) struct Pool<C: Connection> {
    options: PoolOptions<C>,
    permits: Semaphore,
    /// The connection used last is at the end and is lent first.
    idle: Mutex<Vec<Idle<C>>>,
    pub(crate) timeout: Duration,
    pub(crate) connections_max: usize,
}

struct Idle<C> {
    connection: C,
    since: Instant,
}

/// A connection on loan. Dropping it closes the connection; see [`Lease::give_back`].
pub(crate) struct Lease<'p, C: Connection> {
    pool: &'p Pool<C>,
    connection: Option<C>,
    reused: bool,
    permit: SemaphorePermit<'p>,
}

/// No connection was lent. Nothing was asked of the server on behalf of the call.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PoolError {
    #[error("no connection to the database in time")]
    Timeout,
    #[error(transparent)]
    Connect(#[from] sqlx::Error),
}

impl<C> Pool<C>
where
    C: Connection,
    for<'c> &'c mut C: Executor<'c, Database = C::Database>,
{
    /// An empty pool; the first call connects.
    pub(crate) fn new(mut options: PoolOptions<C>) -> Self {
        options.connections_max = options.connections_max.max(1);
        Self {
            permits: Semaphore::new(options.connections_max),
            idle: Mutex::default(),
            timeout: options.timeout,
            connections_max: options.connections_max,
            options,
        }
    }

    /// The connection used last, or a new one if none is idle.
    pub(crate) async fn lend(&self, deadline: Instant) -> Result<Lease<'_, C>, PoolError> {
        let permit = timeout_at(deadline, self.permits.acquire()).await.map_err(|_| PoolError::Timeout)?;
        let permit = permit.expect("the semaphore is never closed");
        let idle = self.take_idle();
        let reused = idle.is_some();
        let connection = match idle {
            Some(connection) => connection,
            None => self.connect(deadline).await?,
        };
        Ok(Lease { pool: self, connection: Some(connection), reused, permit })
    }

    async fn connect(&self, deadline: Instant) -> Result<C, PoolError> {
        let connected = timeout_at(deadline, connect(&self.options.connect, &self.options.setup)).await;
        Ok(connected.map_err(|_| PoolError::Timeout)??)
    }
}

impl<C: Connection> Pool<C> {
    fn take_idle(&self) -> Option<C> {
        let mut idle = self.lock();
        idle.retain(|idle| idle.since.elapsed() < self.options.idle_max);
        idle.pop().map(|idle| idle.connection)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Idle<C>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C: Connection> Lease<'_, C> {
    /// Returns the connection to the pool. Only when nothing is open on it: no transaction, no unread answer.
    pub(crate) fn give_back(mut self) {
        if let Some(connection) = self.connection.take() {
            self.pool.lock().push(Idle { connection, since: Instant::now() });
        }
    }

    /// Whether an earlier call used this connection, so that the server may have closed it since.
    pub(crate) fn is_reused(&self) -> bool {
        self.reused
    }
}

impl<'p, C> Lease<'p, C>
where
    C: Connection,
    for<'c> &'c mut C: Executor<'c, Database = C::Database>,
{
    /// Replaces a reused connection that turned out to be lost by a new one. Idle connections are closed too: a server
    /// that was restarted has dropped all of them.
    pub(crate) async fn reconnect(self, deadline: Instant) -> Result<Self, PoolError> {
        let Self { pool, connection, permit, .. } = self;
        drop(connection);
        pool.lock().clear();
        let connection = Some(pool.connect(deadline).await?);
        Ok(Self { pool, connection, reused: false, permit })
    }
}

impl<C: Connection> Deref for Lease<'_, C> {
    type Target = C;

    fn deref(&self) -> &C {
        self.connection.as_ref().expect("a lease has its connection until it is given back")
    }
}

impl<C: Connection> DerefMut for Lease<'_, C> {
    fn deref_mut(&mut self) -> &mut C {
        self.connection.as_mut().expect("a lease has its connection until it is given back")
    }
}

/// A new connection that has run `setup`.
pub(crate) async fn connect<C>(options: &C::Options, setup: &str) -> Result<C, sqlx::Error>
where
    C: Connection,
    for<'c> &'c mut C: Executor<'c, Database = C::Database>,
{
    let mut connection = C::connect_with(options).await?;
    sqlx::raw_sql(AssertSqlSafe(setup)).execute(&mut connection).await?;
    Ok(connection)
}

/// Work on a leased connection, for a function that takes `Fn(Lease) -> Future<Output = (Lease, Result<_, sqlx::Error>)>`:
/// the work owns the lease while it runs and hands it back, so that work that is dropped midway closes its connection.
macro_rules! work {
    ($connection:ident => $body:expr) => {
        |mut lease| async move {
            let done: Result<_, sqlx::Error> = {
                let $connection = &mut *lease;
                async move { $body }.await
            };
            (lease, done)
        }
    };
}
pub(crate) use work;
