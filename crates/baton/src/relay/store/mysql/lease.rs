//! Takes work for one consumer: rows whose check is due, which moves into the future before the consumer looks, and whole
//! sweeps.

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

/// Whether the lease of this sweep was taken.
pub(super) async fn lease_sweep(
    pool: &Pool,
    sweep: &'static str,
    held: Option<Timestamp>,
    now: Timestamp,
    until: Timestamp,
) -> Result<bool, StoreError> {
    const ADD: &str = "INSERT IGNORE INTO sweep_leases (sweep, until) VALUES (?, '2000-01-01')";
    const TAKE: &str = "UPDATE sweep_leases SET until = ? WHERE sweep = ? AND (until <= ? OR until = ?)";
    pool.transact(work!(connection => {
        let take = || {
            let taken = sqlx::query(TAKE).bind(datetime(until)).bind(sweep).bind(datetime(now));
            taken.bind(held.map(datetime))
        };
        let mut taken = take().execute(&mut *connection).await?.rows_affected();
        if taken == 0 && sqlx::query(ADD).bind(sweep).execute(&mut *connection).await?.rows_affected() > 0 {
            taken = take().execute(connection).await?.rows_affected();
        }
        Ok(End::Keep(taken > 0))
    }))
    .await
}
