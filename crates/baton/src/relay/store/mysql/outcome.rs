//! Work in a transaction, and what is known when it goes wrong. A caller may say "nothing happened" (503) only if that
//! is certain, so each way to fail is placed here once:
//!
//! | what went wrong | what is known |
//! |---|---|
//! | no connection: refused, too many (1040), wrong password, no answer | nothing was asked: `Unavailable` |
//! | BEGIN or a statement in the transaction failed, in any way: an error of the server (read-only 1290 and 1836, disk full 1021 and 1114, …), the connection lost, no answer in time | COMMIT was never sent, and the server undoes what a closed connection left open: `Unavailable` |
//! | deadlock (1213), lock not had in time (1205) | undone; tried again a few times, then `Unavailable` |
//! | COMMIT was refused with an error that says it did not happen: see [`commit_refused`] | `Unavailable`, or tried again |
//! | COMMIT got any other error, or no answer, or the connection was lost meanwhile | `OutcomeUnknown` |
//!
//! Nothing is written outside a transaction, so the COMMIT is the only moment that can leave a unknown.

use std::time::Duration;

use sqlx::Executor;
use sqlx::mysql::MySqlDatabaseError;
use tokio::time::{Instant, timeout_at};

use super::pool::{Lease, Pool, unavailable};
use crate::relay::store::StoreError;

/// How a transaction is to end.
pub(super) enum End<T> {
    /// With a COMMIT.
    Keep(T),
    /// With a ROLLBACK: this is the answer, and nothing is to change.
    Undo(Result<T, StoreError>),
    /// With a ROLLBACK, and from the start: somebody else was quicker, and has committed.
    Again(sqlx::Error),
}

/// Work on a connection, as [`Pool::transact`] and [`Pool::read`] take it: it owns the lease while it runs and hands it
/// back, so that work that is dropped on the way takes its connection with it.
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

/// How often a transaction is tried that others get in the way of.
const TRIES_MAX: u32 = 8;

impl Pool {
    /// Does `work` in a transaction. It may be run several times; it must do nothing but talk to the connection.
    pub(super) async fn transact<'p, T, F, Fut>(&'p self, work: F) -> Result<T, StoreError>
    where
        F: Fn(Lease<'p>) -> Fut,
        Fut: Future<Output = (Lease<'p>, Result<End<T>, sqlx::Error>)>,
    {
        let deadline = Instant::now() + self.timeout;
        let mut tries = 1;
        loop {
            let lease = self.begin(deadline).await?;
            // Too late: the lease goes with the work, which closes the connection. No COMMIT was sent.
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
                    // A server that is read-only now was the primary once: look for the new one with a new connection.
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
            // A different pause for each, or those who met would meet again.
            let pause = Duration::from_millis(rand::random_range(0..=5 * u64::from(tries)));
            if timeout_at(deadline, tokio::time::sleep(pause)).await.is_err() {
                return Err(unavailable(in_the_way));
            }
            tries += 1;
        }
    }

    /// Does `work`, which only reads. It may be run several times.
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
                    let usable = number(&error).is_some() && !is_farewell(&error);
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

    /// A connection with an open transaction. A server that was restarted leaves dead connections in the pool; nothing
    /// was asked on them yet, so the next one is tried until there is a new one.
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

/// Commits. `Some`: it was undone, and may be tried again.
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

/// Undoes what is open. If that does not work, closing the connection does it.
async fn roll_back(mut lease: Lease<'_>, deadline: Instant) {
    if let Ok(Ok(_)) = timeout_at(deadline, lease.execute("ROLLBACK")).await {
        lease.give_back();
    }
}

/// Errors that say that the commit did not happen: a deadlock (in a cluster, that another node was quicker), a lock
/// not had in time (somebody holds all commits back), the order of a plugin to undo it, and a server gone read-only, which
/// is looked at before anything is written. Every other error is no proof: it may have come after the write.
fn commit_refused(error: &sqlx::Error) -> bool {
    is_contention(error) || is_read_only(error) || number(error) == Some(3101)
}

/// Deadlock, and a lock not had in time.
fn is_contention(error: &sqlx::Error) -> bool {
    matches!(number(error), Some(1205 | 1213))
}

/// `--read-only` and its like, InnoDB read-only, and a transaction that is.
fn is_read_only(error: &sqlx::Error) -> bool {
    matches!(number(error), Some(1290 | 1792 | 1836))
}

/// The server's last words on a connection that it has ended: killed (MariaDB), or idle for too long (MySQL).
fn is_farewell(error: &sqlx::Error) -> bool {
    matches!(number(error), Some(1927 | 4031))
}

/// A key that is there already.
pub(super) fn is_duplicate(error: &sqlx::Error) -> bool {
    number(error) == Some(1062)
}

/// Whether the values are at fault and not the server: they do not fit (class 22), break a rule (class 23) or make the
/// statement too long.
pub(super) fn is_in_the_values(error: &sqlx::Error) -> bool {
    // Not valid JSON, as MySQL and as MariaDB say it.
    const NUMBERS: [u16; 2] = [3140, 4025];
    let class = error.as_database_error().and_then(|error| error.code());
    class.is_some_and(|state| state.starts_with("22") || state.starts_with("23"))
        || number(error).is_some_and(|number| NUMBERS.contains(&number))
}

/// The server's number of an error; none if it is not the server that speaks.
pub(super) fn number(error: &sqlx::Error) -> Option<u16> {
    error.as_database_error()?.try_downcast_ref::<MySqlDatabaseError>().map(MySqlDatabaseError::number)
}
