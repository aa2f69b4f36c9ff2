//! What the rows prove about a relayer: the records bound to it, its open rows, what it forgot, and who owns its nonces.

use std::time::Duration;

use rusqlite::params;

use super::SqliteStore;
use super::columns::COLUMNS;
use crate::relay::state::transaction::{RelayerTxId, RelayerUrl, Transaction, TransactionId};
use crate::relay::store::row::is_only_silent;
use crate::relay::store::{BoundRecord, ForgottenRecord, StoreError};
use crate::timestamp::Timestamp;

impl SqliteStore {
    pub(super) async fn records_bound_before(
        &self,
        relayer: &RelayerUrl,
        before: Timestamp,
        max: usize,
    ) -> Result<Vec<BoundRecord>, StoreError> {
        let (relayer, max) = (relayer.0.clone(), i64::try_from(max).unwrap_or(i64::MAX));
        self.read(move |connection| {
            let mut statement = connection.prepare_cached(
                "SELECT relayer_tx_id, bound_at, sender FROM transactions \
                 WHERE relayer_url = ?1 AND bound_at < ?2 AND relayer_tx_id IS NOT NULL AND imported = 0 \
                 AND relayer_tx_id NOT LIKE 'chain:%' ORDER BY bound_at DESC LIMIT ?3",
            )?;
            let records = statement.query_map(params![relayer, before.0, max], |row| {
                Ok(BoundRecord { tx_id: RelayerTxId(row.get(0)?), at: Timestamp(row.get(1)?), account: row.get(2)? })
            })?;
            records.collect()
        })
        .await
    }

    pub(super) async fn rows_open_at(&self, relayer: &RelayerUrl, max: usize) -> Result<Vec<Transaction>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM transactions INDEXED BY transactions_due_bound WHERE claim_consumer IS NULL \
             AND relayer_tx_id IS NOT NULL AND check_at IS NOT NULL AND relayer_url = ?1 LIMIT ?2"
        );
        self.rows(sql, vec![Box::new(relayer.0.clone()), Box::new(i64::try_from(max).unwrap_or(i64::MAX))]).await
    }

    pub(super) async fn records_forgotten_at(
        &self,
        relayer: &RelayerUrl,
        since: Timestamp,
        kept: Duration,
        max: usize,
    ) -> Result<Vec<ForgottenRecord>, StoreError> {
        let (relayer, max) = (relayer.0.clone(), i64::try_from(max).unwrap_or(i64::MAX));
        let kept = i64::try_from(kept.as_millis()).unwrap_or(i64::MAX);
        self.read(move |connection| {
            let mut statement = connection.prepare_cached(
                "SELECT relayer_tx_id, bound_at, forgotten_since, relayer_says \
                 FROM transactions INDEXED BY transactions_forgotten \
                 WHERE status = 'submitted' AND forgotten_since IS NOT NULL AND forgotten_since >= ?2 \
                 AND relayer_url = ?1 AND forgotten_since - bound_at < ?3 LIMIT ?4",
            )?;
            let records = statement.query_map(params![relayer, since.0, kept, max], |row| {
                let (forgotten, says): (i64, Option<String>) = (row.get(2)?, row.get(3)?);
                Ok(ForgottenRecord {
                    tx_id: RelayerTxId(row.get(0)?),
                    at: Timestamp(row.get(1)?),
                    only_silent: is_only_silent(says.as_deref(), Timestamp(forgotten)),
                })
            })?;
            records.collect()
        })
        .await
    }

    pub(super) async fn owners_of_nonces(
        &self,
        relayer: &RelayerUrl,
        nonces: &[u64],
    ) -> Result<Vec<(u64, TransactionId)>, StoreError> {
        let (relayer, nonces) = (relayer.0.clone(), nonces.to_vec());
        self.read(move |connection| {
            let mut statement = connection.prepare_cached(
                "SELECT id FROM transactions WHERE relayer_url = ?1 AND relayer_nonce = ?2 AND relayer_nonce IS NOT NULL",
            )?;
            let mut owners = Vec::new();
            for nonce in nonces {
                for id in statement.query_map(params![relayer, nonce], |row| row.get::<_, [u8; 16]>(0))? {
                    owners.push((nonce, TransactionId(uuid::Uuid::from_bytes(id?))));
                }
            }
            Ok(owners)
        })
        .await
    }
}
