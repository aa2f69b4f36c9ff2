//! Takes rows whose check is due for one consumer: their next check moves into the future before the consumer looks.

use sqlx::{AssertSqlSafe, Row};

use super::columns::{columns, datetime, id, parse_id, read_row};
use super::outcome::{End, work};
use super::pool::Pool;
use super::waits_for;
use crate::relay::state::transaction::{Transaction, TransactionId};
use crate::relay::store::{Due, StoreError};
use crate::timestamp::Timestamp;

/// The rows that were due, with their check moved to `until`. Rows that another consumer takes meanwhile are left out.
pub(super) async fn lease_due(
    pool: &Pool,
    kind: Due,
    now: Timestamp,
    until: Timestamp,
    max: usize,
) -> Result<Vec<Transaction>, StoreError> {
    const DUE: &str = "SELECT id FROM transactions WHERE waits_for = ? AND check_at <= ? ORDER BY check_at LIMIT ?";
    let mut due: Vec<TransactionId> = pool
        .read(work!(connection => {
            let limit = u64::try_from(max).unwrap_or(u64::MAX);
            let found =
                sqlx::query(DUE).bind(waits_for(kind)).bind(datetime(now)).bind(limit).fetch_all(connection).await?;
            let ids = found.iter().map(|row| Ok(parse_id(row.try_get::<&str, _>(0)?)));
            Ok(ids.collect::<Result<Vec<_>, sqlx::Error>>()?.into_iter().flatten().collect())
        }))
        .await?;
    // An idle system writes nothing.
    if due.is_empty() {
        return Ok(Vec::new());
    }
    // By primary key and in its order, as saves lock rows.
    due.sort_unstable();
    let places = vec!["?"; due.len()].join(", ");
    let still_due = format!(
        "SELECT {} FROM transactions FORCE INDEX (PRIMARY) WHERE id IN ({places}) AND waits_for = ? AND check_at <= ? \
         ORDER BY id FOR UPDATE",
        columns!()
    );
    let take =
        format!("UPDATE transactions SET check_at = ? WHERE id IN ({places}) AND waits_for = ? AND check_at <= ?");
    let (due, still_due, take) = (&due, &still_due, &take);
    let rows = pool
        .transact(work!(connection => {
            let mut statement = sqlx::query(AssertSqlSafe(still_due.as_str()));
            for row in due {
                statement = statement.bind(id(*row));
            }
            let rows = statement.bind(waits_for(kind)).bind(datetime(now)).fetch_all(&mut *connection).await?;
            let rows = rows.iter().map(read_row).collect::<Result<Vec<_>, _>>()?;
            let mut statement = sqlx::query(AssertSqlSafe(take.as_str())).bind(datetime(until));
            for row in due {
                statement = statement.bind(id(*row));
            }
            statement.bind(waits_for(kind)).bind(datetime(now)).execute(connection).await?;
            Ok(End::Keep(rows))
        }))
        .await?;
    let leased = super::readable(rows).into_iter().map(|row| Transaction { check_at: Some(until), ..row });
    Ok(leased.collect())
}
