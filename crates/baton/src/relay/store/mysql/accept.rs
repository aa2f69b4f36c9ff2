//! Stores the intake's coalesced requests, many in one commit: idempotency keys, gasless nonces, then the rows.

use std::sync::Arc;

use sqlx::{AssertSqlSafe, MySqlConnection};

use super::columns::{bind_accepted, bind_row, insert, insert_accepted, is_as_accepted};
use super::idempotency_keys::take_keys;
use super::nonces::take_nonces;
use super::outcome::{End, is_duplicate, is_invalid_value, work};
use super::pool::{Pool, unavailable};
use crate::relay::state::transaction::Transaction;
use crate::relay::store::coalescer::same_failure;
use crate::relay::store::{Accepted, NewTransaction, StoreError};

/// Maximum rows and request bytes of one statement. A server accepts statements of 16 MiB.
pub(super) const ROWS_MAX: usize = 256;
const BYTES_MAX: usize = 4 << 20;

/// Stores new rows with their keys in one commit, with one answer for each row.
pub(super) async fn accept_many(pool: &Pool, rows: &[NewTransaction]) -> Vec<Result<Accepted, StoreError>> {
    if rows.is_empty() {
        return Vec::new();
    }
    match accept(pool, rows).await {
        Ok(Batch::Stored(accepted)) => accepted.into_iter().map(Ok).collect(),
        Ok(Batch::InvalidValue(error)) if rows.len() == 1 => vec![Err(invalid_value(error))],
        Ok(Batch::InvalidValue(_)) => accept_each(pool, rows).await,
        Err(failure) => {
            // The whole commit failed: every caller gets the same error.
            let failure = Arc::new(failure);
            rows.iter().map(|_| Err(same_failure(&failure))).collect()
        }
    }
}

/// Stores each row in its own commit, to isolate the one with an invalid value. Stops at the first failure of the server.
async fn accept_each(pool: &Pool, rows: &[NewTransaction]) -> Vec<Result<Accepted, StoreError>> {
    let mut answers = Vec::with_capacity(rows.len());
    for row in rows {
        let answer = match accept(pool, std::slice::from_ref(row)).await {
            Ok(Batch::Stored(accepted)) => accepted.first().copied().ok_or_else(unanswered),
            Ok(Batch::InvalidValue(error)) => Err(invalid_value(error)),
            Err(failure) => {
                answers.push(Err(failure));
                break;
            }
        };
        answers.push(answer);
    }
    answers
        .resize_with(rows.len(), || Err(StoreError::Unavailable("the database failed before this row's turn".into())));
    answers
}

enum Batch {
    Stored(Vec<Accepted>),
    /// The server rejects a value of one of the rows; nothing was stored.
    InvalidValue(sqlx::Error),
}

async fn accept(pool: &Pool, rows: &[NewTransaction]) -> Result<Batch, StoreError> {
    pool.transact(work!(connection => match store(connection, rows).await {
        Ok(accepted) => Ok(End::Keep(Batch::Stored(accepted))),
        Err(error) if is_invalid_value(&error) => Ok(End::Undo(Ok(Batch::InvalidValue(error)))),
        Err(error) => Err(error),
    }))
    .await
}

async fn store(connection: &mut MySqlConnection, rows: &[NewTransaction]) -> Result<Vec<Accepted>, sqlx::Error> {
    let mut accepted = take_keys(connection, rows).await?;
    take_nonces(connection, rows, &mut accepted).await?;
    let new =
        rows.iter().zip(&accepted).filter(|(_, accepted)| **accepted == Accepted::Stored).map(|((row, _), _)| row);
    insert_rows(connection, new).await?;
    Ok(accepted)
}

/// Inserts rows, many in one statement.
pub(super) async fn insert_rows(
    connection: &mut MySqlConnection,
    rows: impl Iterator<Item = &Transaction>,
) -> Result<(), sqlx::Error> {
    let rows: Vec<_> = rows.collect();
    let as_accepted = rows.iter().all(|row| is_as_accepted(row));
    for some in chunks(&rows).flat_map(|some| some.chunks(rows_within(some))) {
        let sql = if as_accepted { insert_accepted(some.len()) } else { insert(some.len()) };
        let mut statement = sqlx::query(AssertSqlSafe(sql));
        for row in some {
            statement = if as_accepted { bind_accepted(statement, row) } else { bind_row(statement, row) };
        }
        statement.execute(&mut *connection).await?;
    }
    Ok(())
}

/// Splits into the few sizes that statements have; two or three pieces cover most counts.
pub(super) fn chunks<T>(mut rest: &[T]) -> impl Iterator<Item = &[T]> {
    std::iter::from_fn(move || {
        let count = rest.len().min(ROWS_MAX);
        let power = 1 << count.checked_ilog2()?;
        let (some, left) = rest.split_at(if count >= half_way(power) { half_way(power) } else { power });
        rest = left;
        Some(some)
    })
}

/// The smallest statement size that holds `count` rows: a power of two, or half-way between two of them. Few sizes,
/// because each is prepared once per connection.
pub(super) fn statement_size(count: usize) -> usize {
    let power = count.next_power_of_two();
    if count <= half_way(power / 2) { half_way(power / 2) } else { power }
}

fn half_way(power: usize) -> usize {
    power + power / 2
}

/// Rows per statement: all of them, or one if they exceed the maximum size.
fn rows_within(rows: &[&Transaction]) -> usize {
    let bytes: usize = rows.iter().map(|row| row.request.len()).sum();
    if bytes > BYTES_MAX { 1 } else { rows.len() }
}

fn invalid_value(error: sqlx::Error) -> StoreError {
    if is_duplicate(&error) { StoreError::Conflict { constraint: "transactions_pkey" } } else { unavailable(error) }
}

fn unanswered() -> StoreError {
    StoreError::OutcomeUnknown("a row was stored without an answer".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_have_few_sizes_and_cover_every_row() {
        let rows: Vec<u32> = (0..1000).collect();
        for size in [0, 1, 2, 3, 100, 255, 256, 257, 1000] {
            let pieces: Vec<_> = chunks(&rows[..size]).collect();
            assert_eq!(pieces.concat(), rows[..size]);
            assert!(pieces.iter().all(|piece| piece.len() <= ROWS_MAX));
        }
        let sizes = |count: usize| chunks(&rows[..count]).map(<[_]>::len).collect::<Vec<_>>();
        assert_eq!(sizes(100), [96, 4]);
        assert_eq!(sizes(13), [12, 1]);
        assert_eq!(sizes(300), [256, 32, 12]);
        let all: std::collections::HashSet<usize> = (0..=1000).flat_map(sizes).collect();
        assert_eq!(all.len(), 16, "statements of each kind on a connection");
        for count in 1..=ROWS_MAX {
            let size = statement_size(count);
            assert!(size >= count && all.contains(&size), "{size} for {count}");
        }
    }
}
