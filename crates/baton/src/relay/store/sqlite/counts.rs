//! Row counts for the metrics and `/health`.

use super::SqliteStore;
use crate::relay::state::transaction::Status;
use crate::relay::store::{StoreError, TransactionCounts};
use crate::timestamp::Timestamp;

impl SqliteStore {
    pub(super) async fn count_rows(&self) -> Result<TransactionCounts, StoreError> {
        self.read(|connection| {
            let count = |sql: &str| connection.prepare_cached(sql)?.query_row([], |row| row.get::<_, u64>(0));
            let by_status = |status: Status| {
                connection
                    .prepare_cached(
                        "SELECT COUNT(*) FROM transactions INDEXED BY transactions_status WHERE status = ?1",
                    )?
                    .query_row([status.name()], |row| row.get::<_, u64>(0))
            };
            Ok(TransactionCounts {
                open: vec![
                    (Status::Pending, by_status(Status::Pending)?),
                    (Status::Submitted, by_status(Status::Submitted)?),
                ],
                oldest_pending: connection
                    .prepare_cached(
                        "SELECT MIN(created_at) FROM (SELECT MIN(created_at) AS created_at FROM transactions \
                          INDEXED BY transactions_status WHERE status = 'pending' AND kind = 'direct' UNION ALL \
                          SELECT MIN(created_at) FROM transactions \
                          INDEXED BY transactions_status WHERE status = 'pending' AND kind = 'gasless')",
                    )?
                    .query_row([], |row| Ok(row.get::<_, Option<i64>>(0)?.map(Timestamp)))?,
                claims: count("SELECT COUNT(*) FROM transactions WHERE claim_consumer IS NOT NULL")?,
                claims_outcome_unknown: count(
                    "SELECT COUNT(*) FROM transactions WHERE claim_consumer IS NOT NULL AND claim_doubt IS NOT NULL",
                )?,
                forgotten: count(
                    "SELECT COUNT(*) FROM transactions INDEXED BY transactions_forgotten \
                     WHERE status = 'submitted' AND forgotten_since IS NOT NULL",
                )?,
            })
        })
        .await
    }
}
