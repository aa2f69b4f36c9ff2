//! Webhooks that arrive before the bind: kept until a row is bound to their record.

use rusqlite::params;

use super::SqliteStore;
use crate::relay::state::transaction::RelayerTxId;
use crate::relay::store::StoreError;
use crate::timestamp::Timestamp;

impl SqliteStore {
    pub(super) async fn store_early_webhook(
        &self,
        tx_id: &RelayerTxId,
        record: &str,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let (tx_id, record) = (tx_id.0.clone(), record.to_owned());
        self.write(move |connection| {
            connection
                .prepare_cached(
                    "INSERT INTO early_webhooks (relayer_tx_id, seq, received_at, record) \
                     SELECT ?1, COALESCE(MAX(seq), 0) + 1, ?2, ?3 FROM early_webhooks WHERE relayer_tx_id = ?1 \
                     HAVING COALESCE(MAX(seq), 0) < 20",
                )?
                .execute(params![tx_id, now.0, record])?;
            Ok(())
        })
        .await
    }

    pub(super) async fn remove_early_webhooks(&self, tx_id: &RelayerTxId) -> Result<Vec<String>, StoreError> {
        const SELECT: &str = "SELECT record FROM early_webhooks WHERE relayer_tx_id = ?1 ORDER BY seq";
        // Early webhooks are rare: a read first keeps the writer free.
        let tx_id = tx_id.0.clone();
        let look = tx_id.clone();
        if !self.read(move |connection| connection.prepare_cached(SELECT)?.exists([&look])).await? {
            return Ok(Vec::new());
        }
        self.write(move |connection| {
            let mut statement = connection.prepare_cached(SELECT)?;
            let records = statement.query_map([&tx_id], |row| row.get(0))?.collect::<Result<Vec<String>, _>>()?;
            connection.execute("DELETE FROM early_webhooks WHERE relayer_tx_id = ?1", [&tx_id])?;
            Ok(records)
        })
        .await
    }
}
