//! Row counts for the metrics and `/health`.

use sqlx::{MySqlConnection, Row};

use super::outcome::work;
use super::{MySqlStore, moment};
use crate::relay::state::transaction::Status;
use crate::relay::store::{StoreError, TransactionCounts};

impl MySqlStore {
    pub(super) async fn count_rows(&self) -> Result<TransactionCounts, StoreError> {
        let read = self.pool.read(work!(connection => {
            // Forced, because MariaDB reads the whole table while its statistics are old.
            const BY_STATUS: &str =
                "SELECT COUNT(*) FROM transactions FORCE INDEX (transactions_status) WHERE status = ?";
            let pending = count(connection, BY_STATUS, Some(Status::Pending)).await?;
            let submitted = count(connection, BY_STATUS, Some(Status::Submitted)).await?;
            // The first of each kind: the index has them in the order of their creation.
            let oldest = sqlx::query(
                "(SELECT createdAt AS oldest FROM transactions FORCE INDEX (transactions_status) \
                  WHERE status = 'pending' AND type = 'direct' ORDER BY createdAt LIMIT 1) UNION ALL \
                 (SELECT createdAt AS oldest FROM transactions FORCE INDEX (transactions_status) \
                  WHERE status = 'pending' AND type = 'gasless' ORDER BY createdAt LIMIT 1) ORDER BY oldest LIMIT 1",
            )
            .fetch_optional(&mut *connection)
            .await?;
            Ok(TransactionCounts {
                open: vec![(Status::Pending, pending), (Status::Submitted, submitted)],
                oldest_pending: oldest.as_ref().map(|row| moment(row, 0)).transpose()?,
                claims: count(connection, "SELECT COUNT(*) FROM transactions WHERE waits_for = 'claimed'", None)
                    .await?,
                claims_outcome_unknown: count(
                    connection,
                    "SELECT COUNT(*) FROM transactions \
                     WHERE in_doubt = 1 AND claim_consumer IS NOT NULL AND claim_doubt IS NOT NULL",
                    None,
                )
                .await?,
                forgotten: count(
                    connection,
                    "SELECT COUNT(*) FROM transactions \
                     WHERE in_doubt = 1 AND status = 'submitted' AND forgotten_since IS NOT NULL",
                    None,
                )
                .await?,
            })
        }));
        read.await
    }
}

async fn count(
    connection: &mut MySqlConnection,
    sql: &'static str,
    status: Option<Status>,
) -> Result<u64, sqlx::Error> {
    let mut statement = sqlx::query(sql);
    if let Some(status) = status {
        statement = statement.bind(status.name());
    }
    let counted: i64 = statement.fetch_one(connection).await?.try_get(0)?;
    Ok(u64::try_from(counted).unwrap_or(0))
}
