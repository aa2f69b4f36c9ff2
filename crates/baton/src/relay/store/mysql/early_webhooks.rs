//! Webhooks that arrive before the bind: kept until a row is bound to their record.

use sqlx::Row;

use super::MySqlStore;
use super::columns::datetime;
use super::outcome::{End, is_duplicate, work};
use crate::relay::state::transaction::RelayerTxId;
use crate::relay::store::StoreError;
use crate::relay::store::row::EARLY_WEBHOOKS_MAX;
use crate::timestamp::Timestamp;

impl MySqlStore {
    pub(super) async fn store_early_webhook(
        &self,
        tx_id: &RelayerTxId,
        record: &str,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        self.pool.transact(work!(connection => {
            let kept = sqlx::query(
                "INSERT INTO early_webhooks (relayer_tx_id, seq, received_at, record) \
                 SELECT ?, next.seq, ?, ? \
                 FROM (SELECT COALESCE(MAX(seq), 0) + 1 AS seq FROM early_webhooks WHERE relayer_tx_id = ?) AS next \
                 WHERE next.seq <= ?",
            )
            .bind(&tx_id.0)
            .bind(datetime(now))
            .bind(record)
            .bind(&tx_id.0)
            .bind(EARLY_WEBHOOKS_MAX)
            .execute(connection)
            .await;
            match kept {
                Ok(_) => Ok(End::Keep(())),
                // Another webhook for the same transaction took the number.
                Err(error) if is_duplicate(&error) => Ok(End::Again(error)),
                Err(error) => Err(error),
            }
        })).await?;
        // A bind that is not committed yet may have looked for early webhooks before this one was stored. It holds a lock
        // on its record: wait for that commit, so that the caller finds the bind afterwards.
        let wait = self.pool.read(work!(connection => {
            sqlx::query("SELECT 1 FROM relayer_transactions WHERE relayer_tx_id = ? LOCK IN SHARE MODE")
                .bind(&tx_id.0)
                .fetch_all(connection)
                .await
        }));
        wait.await.map(drop)
    }

    pub(super) async fn remove_early_webhooks(&self, tx_id: &RelayerTxId) -> Result<Vec<String>, StoreError> {
        // Early webhooks are rare: read without a lock first.
        let some = self.pool.read(work!(connection => {
            sqlx::query("SELECT 1 FROM early_webhooks WHERE relayer_tx_id = ? LIMIT 1")
                .bind(&tx_id.0)
                .fetch_all(connection)
                .await
        }));
        if some.await?.is_empty() {
            return Ok(Vec::new());
        }
        self.pool
            .transact(work!(connection => {
                let rows =
                    sqlx::query("SELECT record FROM early_webhooks WHERE relayer_tx_id = ? ORDER BY seq FOR UPDATE")
                        .bind(&tx_id.0)
                        .fetch_all(&mut *connection)
                        .await?;
                sqlx::query("DELETE FROM early_webhooks WHERE relayer_tx_id = ?")
                    .bind(&tx_id.0)
                    .execute(connection)
                    .await?;
                let records = rows.iter().map(|row| row.try_get(0)).collect::<Result<Vec<String>, _>>()?;
                Ok(End::Keep(records))
            }))
            .await
    }
}
