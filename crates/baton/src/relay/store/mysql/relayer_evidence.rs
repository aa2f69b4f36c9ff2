//! What the rows prove about a relayer: the records bound to it, its open rows, what it forgot, and who owns its nonces.

use std::time::Duration;

use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, Row};

use super::columns::{columns, milliseconds, parse_id};
use super::outcome::work;
use super::values::{Value, bind_all};
use super::{ASKED_MAX, MySqlStore};
use crate::relay::state::transaction::{RelayerTxId, RelayerUrl, Transaction, TransactionId};
use crate::relay::store::row::is_only_silent;
use crate::relay::store::{BoundRecord, ForgottenRecord, StoreError};
use crate::timestamp::Timestamp;

impl MySqlStore {
    pub(super) async fn records_bound_before(
        &self,
        relayer: &RelayerUrl,
        before: Timestamp,
        max: usize,
    ) -> Result<Vec<BoundRecord>, StoreError> {
        const SQL: &str = "SELECT ozRelayerTxId, bound_at, sender FROM transactions FORCE INDEX (transactions_bound_at) \
             WHERE oz_relayer_url = ? AND bound_at < ? AND ozRelayerTxId IS NOT NULL AND imported = 0 \
             AND ozRelayerTxId NOT LIKE 'chain:%' ORDER BY bound_at DESC LIMIT ?";
        let values = &[Value::Text(relayer.0.clone()), Value::from(before), Value::from(max)];
        self.pool
            .read(work!(connection => {
                let rows = bind_all(sqlx::query(SQL), values).fetch_all(connection).await?;
                let read = |row: &MySqlRow| {
                    let at = Timestamp(milliseconds(row.try_get(1)?));
                    Ok(BoundRecord { tx_id: RelayerTxId(row.try_get(0)?), at, account: row.try_get(2)? })
                };
                rows.iter().map(read).collect::<Result<Vec<_>, sqlx::Error>>()
            }))
            .await
    }

    pub(super) async fn rows_open_at(&self, relayer: &RelayerUrl, max: usize) -> Result<Vec<Transaction>, StoreError> {
        const SQL: &str = concat!(
            "SELECT ",
            columns!(),
            " FROM transactions FORCE INDEX (transactions_due) WHERE waits_for = 'bound' AND oz_relayer_url = ? LIMIT ?"
        );
        self.rows(SQL, &[Value::Text(relayer.0.clone()), Value::from(max)]).await
    }

    pub(super) async fn records_forgotten_at(
        &self,
        relayer: &RelayerUrl,
        since: Timestamp,
        kept: Duration,
        max: usize,
    ) -> Result<Vec<ForgottenRecord>, StoreError> {
        const SQL: &str = "SELECT ozRelayerTxId, bound_at, forgotten_since, relayer_says FROM transactions \
             WHERE in_doubt = 1 AND waits_for = 'bound' AND forgotten_since >= ? AND oz_relayer_url = ? \
             AND TIMESTAMPDIFF(SECOND, bound_at, forgotten_since) < ? LIMIT ?";
        let (relayer, kept) = (Value::Text(relayer.0.clone()), Value::Count(kept.as_secs()));
        let values = &[Value::from(since), relayer, kept, Value::from(max)];
        self.pool
            .read(work!(connection => {
                let rows = bind_all(sqlx::query(SQL), values).fetch_all(connection).await?;
                let read = |row: &MySqlRow| {
                    let moment = |index: usize| row.try_get(index).map(|at| Timestamp(milliseconds(at)));
                    let says: Option<String> = row.try_get_unchecked(3)?;
                    Ok(ForgottenRecord {
                        tx_id: RelayerTxId(row.try_get(0)?),
                        at: moment(1)?,
                        only_silent: is_only_silent(says.as_deref(), moment(2)?),
                    })
                };
                rows.iter().map(read).collect::<Result<Vec<_>, sqlx::Error>>()
            }))
            .await
    }

    pub(super) async fn owners_of_nonces(
        &self,
        relayer: &RelayerUrl,
        nonces: &[u64],
    ) -> Result<Vec<(u64, TransactionId)>, StoreError> {
        let mut owners = Vec::new();
        for some in nonces.chunks(ASKED_MAX) {
            let places = vec!["?"; some.len()].join(", ");
            let sql = format!(
                "SELECT relayer_nonce, id FROM transactions WHERE oz_relayer_url = ? AND relayer_nonce IN ({places})"
            );
            let sql = sql.as_str();
            let found = self
                .pool
                .read(work!(connection => {
                    let mut statement = sqlx::query(AssertSqlSafe(sql)).persistent(false).bind(&relayer.0);
                    for nonce in some {
                        statement = statement.bind(*nonce);
                    }
                    let rows = statement.fetch_all(connection).await?;
                    let read = |row: &MySqlRow| Ok((row.try_get::<u64, _>(0)?, row.try_get::<String, _>(1)?));
                    rows.iter().map(read).collect::<Result<Vec<_>, sqlx::Error>>()
                }))
                .await?;
            owners.extend(found.into_iter().filter_map(|(nonce, id)| Some((nonce, parse_id(&id)?))));
        }
        Ok(owners)
    }
}
