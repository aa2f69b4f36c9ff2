//! Leases: each due row is looked at by one consumer, and each sweep that they share is made by one.

use rusqlite::params;

use super::columns::{COLUMNS, raw_row};
use super::{SqliteStore, due_condition, readable};
use crate::relay::state::transaction::Transaction;
use crate::relay::store::{Due, StoreError, TransactionStore};
use crate::timestamp::Timestamp;

impl SqliteStore {
    pub(super) async fn lease_due_rows(
        &self,
        kind: Due,
        now: Timestamp,
        until: Timestamp,
        max: usize,
    ) -> Result<Vec<Transaction>, StoreError> {
        // An idle system writes nothing.
        let any = self.due(kind, now, 1).await?;
        if any.is_empty() {
            return Ok(Vec::new());
        }
        let condition = due_condition(kind);
        let sql = format!(
            "UPDATE transactions SET check_at = ?1 WHERE id IN \
             (SELECT id FROM transactions WHERE {condition} AND check_at <= ?2 ORDER BY check_at LIMIT ?3) \
             RETURNING {COLUMNS}"
        );
        let max = i64::try_from(max).unwrap_or(i64::MAX);
        let rows = self.write(move |connection| {
            let mut statement = connection.prepare_cached(&sql)?;
            let rows = statement.query_map(params![until.0, now.0, max], raw_row)?;
            rows.collect::<Result<Vec<_>, _>>()
        });
        Ok(readable(rows.await?))
    }

    pub(super) async fn lease_sweep_turn(
        &self,
        sweep: &'static str,
        held: Option<Timestamp>,
        now: Timestamp,
        until: Timestamp,
    ) -> Result<bool, StoreError> {
        self.write(move |connection| {
            let taken = connection
                .prepare_cached(
                    "INSERT INTO sweep_leases (sweep, until) VALUES (?1, ?2) \
                     ON CONFLICT (sweep) DO UPDATE SET until = ?2 WHERE until <= ?3 OR until = ?4",
                )?
                .execute(params![sweep, until.0, now.0, held.map(|held| held.0)])?;
            Ok(taken > 0)
        })
        .await
    }
}
