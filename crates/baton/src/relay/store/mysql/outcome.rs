//! Runs work in a database transaction and classifies its failures. The API may answer 503 ("nothing happened") only if
//! that is certain, so this table covers each way to fail:
//!
//! | failure | meaning |
//! |---|---|
//! | no connection: refused, too many (1040), wrong password, no answer | no statement was sent: `Unavailable` |
//! | BEGIN or a statement in the transaction failed, in any way: an error of the server (read-only 1290 and 1836, disk full 1021 and 1114, …), the connection lost, no answer in time | COMMIT was never sent, and the server rolls back when the connection closes: `Unavailable` |
//! | deadlock (1213), lock not had in time (1205) | rolled back; retried up to 8 times, then `Unavailable` |
//! | COMMIT was refused with an error that says it did not happen: see [`commit_refused`] | `Unavailable`, or tried again |
//! | COMMIT got any other error, or no answer, or the connection was lost meanwhile | `OutcomeUnknown` |
//!
//! Nothing is written outside a transaction, so only a COMMIT can leave the outcome unknown.

use std::time::Duration;

use sqlx::Executor;
use sqlx::mysql::MySqlDatabaseError;
use tokio::time::{Instant, timeout_at};

use super::pool::{Lease, Pool, unavailable};
use crate::relay::store::StoreError;

/// How a database transaction ends.
pub(super) enum End<T> {
    /// With a COMMIT.
    Keep(T),
    /// With a ROLLBACK and this answer.
    Undo(Result<T, StoreError>),
    /// With a ROLLBACK and a retry from the start: another connection has committed a conflicting change.
    Again(sqlx::Error),
}

/// Work on a connection, as [`Pool::transact`] and [`Pool::read`] take it. The work owns the lease while it runs and
/// returns it, so dropping the work closes the connection.
macro_rules! work {
    ($connection:ident => $body:expr) => {
        |mut lease| async move {
            let done: Result<_, sqlx::Error> = {
                let $connection: &mut sqlx::MySqlConnection = &mut lease;
                async move { $body }.await
            };
            (lease, done)
        }
    };
}
pub(super) use work;

/// Maximum tries of a transaction that meets lock conflicts.
const TRIES_MAX: u32 = 8;

impl Pool {
    /// Runs `work` in a transaction. It may run several times, so it must only use the connection.
    pub(super) async fn transact<'p, T, F, Fut>(&'p self, work: F) -> Result<T, StoreError>
    where
        F: Fn(Lease<'p>) -> Fut,
        Fut: Future<Output = (Lease<'p>, Result<End<T>, sqlx::Error>)>,
    {
        let deadline = Instant::now() + self.timeout;
        let mut tries = 1;
        loop {
            let lease = self.begin(deadline).await?;
            // On timeout the work is dropped with its lease, which closes the connection. No COMMIT was sent.
            let (lease, done) = timeout_at(deadline, work(lease)).await.map_err(unavailable)?;
            let in_the_way = match done {
                Ok(End::Keep(value)) => match commit(lease, deadline).await? {
                    None => return Ok(value),
                    Some(error) => error,
                },
                Ok(End::Undo(answer)) => {
                    roll_back(lease, deadline).await;
                    return answer;
                }
                Ok(End::Again(error)) => {
                    roll_back(lease, deadline).await;
                    error
                }
                Err(error) => {
                    // A read-only server may have been demoted: drop the connection, so that a new one finds the primary.
                    if number(&error).is_some() && !is_read_only(&error) {
                        roll_back(lease, deadline).await;
                    }
                    if !is_contention(&error) {
                        return Err(unavailable(error));
                    }
                    error
                }
            };
            if tries == TRIES_MAX {
                return Err(unavailable(in_the_way));
            }
            tracing::debug!(action = "store_retry", tries, "{in_the_way}");
            // A random pause, or the same transactions collide again.
            let pause = Duration::from_millis(rand::random_range(0..=5 * u64::from(tries)));
            if timeout_at(deadline, tokio::time::sleep(pause)).await.is_err() {
                return Err(unavailable(in_the_way));
            }
            tries += 1;
        }
    }

    /// Runs `work`, which only reads. It may run several times.
    pub(super) async fn read<'p, T, F, Fut>(&'p self, work: F) -> Result<T, StoreError>
    where
        F: Fn(Lease<'p>) -> Fut,
        Fut: Future<Output = (Lease<'p>, Result<T, sqlx::Error>)>,
    {
        let deadline = Instant::now() + self.timeout;
        let mut tries = 0;
        loop {
            let lease = self.lend(deadline).await?;
            let (lease, done) = timeout_at(deadline, work(lease)).await.map_err(unavailable)?;
            match done {
                Ok(value) => {
                    lease.give_back();
                    return Ok(value);
                }
                Err(error) => {
                    let usable = number(&error).is_some() && !is_disconnect(&error);
                    if usable {
                        lease.give_back();
                    }
                    tries += 1;
                    if tries > self.connections_max || (usable && !is_contention(&error)) {
                        return Err(unavailable(error));
                    }
                }
            }
        }
    }

    /// A connection with an open transaction. After a restart of the server the pool holds dead connections; no statement
    /// was sent on them, so the next one is tried until a new one is opened.
    async fn begin(&self, deadline: Instant) -> Result<Lease<'_>, StoreError> {
        let mut tries = 0;
        loop {
            let mut lease = self.lend(deadline).await?;
            match timeout_at(deadline, lease.execute("BEGIN")).await.map_err(unavailable)? {
                Ok(_) => return Ok(lease),
                Err(error) => {
                    tries += 1;
                    if tries > self.connections_max {
                        return Err(unavailable(error));
                    }
                }
            }
        }
    }
}

/// Commits. `Some`: the commit was rolled back and may be retried.
async fn commit(mut lease: Lease<'_>, deadline: Instant) -> Result<Option<sqlx::Error>, StoreError> {
    let unknown = |error| Err(StoreError::OutcomeUnknown(error));
    match timeout_at(deadline, lease.execute("COMMIT")).await {
        Ok(Ok(_)) => {
            lease.give_back();
            Ok(None)
        }
        Ok(Err(error)) if commit_refused(&error) => {
            let again = is_contention(&error);
            if !is_read_only(&error) {
                roll_back(lease, deadline).await;
            }
            if again { Ok(Some(error)) } else { Err(unavailable(error)) }
        }
        Ok(Err(error)) => unknown(Box::new(error)),
        Err(elapsed) => unknown(Box::new(elapsed)),
    }
}

/// Rolls back; if that fails, closing the connection rolls back.
async fn roll_back(mut lease: Lease<'_>, deadline: Instant) {
    if let Ok(Ok(_)) = timeout_at(deadline, lease.execute("ROLLBACK")).await {
        lease.give_back();
    }
}

/// Whether the error proves that the commit did not happen: a deadlock (in a cluster, a conflict with another node), a
/// lock timeout, a rollback ordered by a plugin, or a read-only server, which is checked before anything is written. Any
/// other error may have come after the write.
fn commit_refused(error: &sqlx::Error) -> bool {
    is_contention(error) || is_read_only(error) || number(error) == Some(3101)
}

/// Deadlock or lock timeout.
fn is_contention(error: &sqlx::Error) -> bool {
    matches!(number(error), Some(1205 | 1213))
}

/// `--read-only` and its like, InnoDB read-only, and a transaction that is.
fn is_read_only(error: &sqlx::Error) -> bool {
    matches!(number(error), Some(1290 | 1792 | 1836))
}

/// Whether the server closed the connection: killed (MariaDB), or idle for too long (MySQL).
fn is_disconnect(error: &sqlx::Error) -> bool {
    matches!(number(error), Some(1927 | 4031))
}

/// Whether a unique key already exists.
pub(super) fn is_duplicate(error: &sqlx::Error) -> bool {
    number(error) == Some(1062)
}

/// Whether the server rejects a value: it does not fit (class 22), violates a constraint (class 23) or is not JSON.
pub(super) fn is_invalid_value(error: &sqlx::Error) -> bool {
    // Invalid JSON, on MySQL and on MariaDB.
    const NUMBERS: [u16; 2] = [3140, 4025];
    let class = error.as_database_error().and_then(|error| error.code());
    class.is_some_and(|state| state.starts_with("22") || state.starts_with("23"))
        || number(error).is_some_and(|number| NUMBERS.contains(&number))
}

/// The server's error number; none if the error is not from the server.
pub(super) fn number(error: &sqlx::Error) -> Option<u16> {
    error.as_database_error()?.try_downcast_ref::<MySqlDatabaseError>().map(MySqlDatabaseError::number)
}
