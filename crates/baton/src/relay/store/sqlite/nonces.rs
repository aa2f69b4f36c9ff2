//! The nonces of gasless transactions.

use rusqlite::{OptionalExtension, params};

use super::SqliteStore;
use super::columns::COLUMNS;
use crate::relay::request::forward::Signer;
use crate::relay::state::transaction::Transaction;
use crate::relay::store::StoreError;

impl SqliteStore {
    pub(super) async fn holder_of_nonce(&self, signer: Signer, nonce: u64) -> Result<Option<Transaction>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM transactions \
             WHERE id = (SELECT transaction_id FROM gasless_nonces WHERE signer = ?1 AND nonce = ?2)"
        );
        self.one(sql, vec![Box::new(signer.to_string()), Box::new(nonce)]).await
    }

    pub(super) async fn last_taken_nonce(&self, signer: Signer) -> Result<Option<u64>, StoreError> {
        self.read(move |connection| {
            connection
                .prepare_cached(
                    "SELECT taken.nonce FROM gasless_nonces AS taken JOIN transactions ON id = taken.transaction_id \
                     WHERE taken.signer = ?1 AND status <> 'failed' ORDER BY taken.nonce DESC LIMIT 1",
                )?
                .query_row([signer.to_string()], |row| row.get(0))
                .optional()
        })
        .await
    }

    pub(super) async fn first_withdrawn_nonce(&self, signer: Signer, from: u64) -> Result<Option<u64>, StoreError> {
        self.read(move |connection| {
            connection
                .prepare_cached(
                    "SELECT taken.nonce FROM gasless_nonces AS taken JOIN transactions ON id = taken.transaction_id \
                     WHERE taken.signer = ?1 AND taken.nonce >= ?2 AND status = 'failed' AND failed_by = 'intake' \
                     ORDER BY taken.nonce LIMIT 1",
                )?
                .query_row(params![signer.to_string(), from], |row| row.get(0))
                .optional()
        })
        .await
    }
}
