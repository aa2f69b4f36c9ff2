//! The store for several machines: MySQL 8, or MariaDB 10.6 and later. The same functions in the same order as in
//! [`super::sqlite`], and the same contract.
//!
//! SQLite has one writer; here a lock or a unique key enforces each rule that spans statements: a save locks its row
//! until the commit, so its steps have one order, and a unique key gives a record to one row. `outcome.rs` alone decides
//! what a failure means.

mod accept;
mod attempt_record;
mod clock;
mod columns;
mod counts;
mod early_webhooks;
mod forget;
mod get;
mod idempotency_keys;
mod lease;
mod list;
mod migrate;
mod nonces;
mod notifications;
mod outbox;
mod outcome;
mod pool;
mod relayer_evidence;
mod relayer_rows;
mod requeue;
mod save;
mod values;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::TryStreamExt;
use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, MySqlConnection, Row};
use time::PrimitiveDateTime;

use self::columns::{columns, datetime, id, milliseconds, parse_id, read_row, size_bytes};
use self::outcome::{End, is_duplicate, work};
use self::pool::Pool;
use self::values::{Value, bind_all};
use super::row::{PAGE_BYTES_MAX, timeline_max};
use super::{
    Accepted, BoundRecord, Due, Filter, ForgottenRecord, KeyOwner, NewTransaction, RELAYER_TX_ID_UNIQUE, RecentSince,
    RelayerRows, Saved, StoreError, TimelineEntry, TransactionCounts, TransactionStore,
};
use crate::relay::request::forward::Signer;
use crate::relay::state::transaction::{ConsumerId, Moved, RelayerTxId, RelayerUrl, Step, Transaction, TransactionId};
use crate::relay::store::coalescer::{Coalescer, Grouping};
use crate::relay::store::notifications::OrphanedEventScan;
use crate::timestamp::Timestamp;

pub use self::pool::MySqlOptions;

/// The store for several machines.
#[derive(Clone)]
pub struct MySqlStore {
    pool: Arc<Pool>,
    /// Concurrent saves share a commit.
    saves: Coalescer<Moved, Saved>,
    /// Concurrent reads share a statement.
    gets: Coalescer<TransactionId, Option<Transaction>>,
    forgotten: OrphanedEventScan,
}

/// Maximum number of relayer transactions in one query.
const ASKED_MAX: usize = 500;

impl MySqlStore {
    /// A store on this server. Its schema must be up to date: see [`MySqlStore::migrate`].
    pub async fn open(options: &MySqlOptions) -> Result<Self, StoreError> {
        let pool = pool::open(options)?;
        pool.read(work!(connection => migrate::check(connection).await)).await??;
        let pool = Arc::new(pool);
        let saving = Arc::clone(&pool);
        let saves = Coalescer::new(save::GROUPING, move |moves: Vec<Moved>| {
            let pool = Arc::clone(&saving);
            async move { save::save_many(&pool, &moves).await }
        });
        let getting = Arc::clone(&pool);
        let gets = Coalescer::new(Grouping::READS, move |ids: Vec<TransactionId>| {
            let pool = Arc::clone(&getting);
            async move { get::get_many(&pool, &ids).await }
        });
        Ok(Self { pool, saves, gets, forgotten: OrphanedEventScan::default() })
    }

    /// Brings the schema up to date, one process at a time; returns how many steps were taken.
    pub async fn migrate(options: &MySqlOptions) -> Result<usize, StoreError> {
        migrate::migrate(options).await
    }

    /// All readable rows of a query.
    async fn rows(&self, sql: &str, values: &[Value]) -> Result<Vec<Transaction>, StoreError> {
        let read = self
            .pool
            .read(work!(connection => {
                let rows = bind_all(sqlx::query(AssertSqlSafe(sql)), values).fetch_all(connection).await?;
                rows.iter().map(read_row).collect::<Result<Vec<_>, _>>()
            }))
            .await?;
        Ok(readable(read))
    }

    /// The same, up to [`PAGE_BYTES_MAX`].
    async fn page(&self, sql: &str, values: &[Value]) -> Result<Vec<Transaction>, StoreError> {
        let read = self.pool.read(work!(connection => {
            let mut rows = bind_all(sqlx::query(AssertSqlSafe(sql)), values).fetch(connection);
            let (mut page, mut size) = (Vec::new(), 0);
            while let Some(row) = rows.try_next().await? {
                size += size_bytes(&row)?;
                page.push(read_row(&row)?);
                if size > PAGE_BYTES_MAX {
                    break;
                }
            }
            Ok(page)
        }));
        Ok(readable(read.await?))
    }

    async fn one(&self, sql: &'static str, values: &[Value]) -> Result<Option<Transaction>, StoreError> {
        let read = self.pool.read(work!(connection => {
            let row = bind_all(sqlx::query(sql), values).fetch_optional(connection).await?;
            row.as_ref().map(read_row).transpose()
        }));
        read.await?.transpose()
    }
}

/// The rows that can be read: one that cannot must not hide the others from a sweep or a list.
fn readable(rows: Vec<Result<Transaction, StoreError>>) -> Vec<Transaction> {
    let read = rows.into_iter().filter_map(|row| match row {
        Ok(row) => Some(row),
        Err(failure) => {
            tracing::error!(action = "row_unreadable", "{failure}");
            None
        }
    });
    read.collect()
}

/// What a row of that kind waits for, as the database has it.
fn waits_for(kind: Due) -> &'static str {
    match kind {
        Due::Claimed => "claimed",
        Due::Bound => "bound",
        Due::Waiting => "waiting",
    }
}

#[async_trait]
impl TransactionStore for MySqlStore {
    async fn accept(&self, rows: &[NewTransaction]) -> Vec<Result<Accepted, StoreError>> {
        accept::accept_many(&self.pool, rows).await
    }

    async fn key_owner(&self, api_key: &str, key: &str) -> Result<Option<KeyOwner>, StoreError> {
        const SQL: &str =
            "SELECT body_sha256, transaction_id FROM idempotency_keys WHERE api_key = ? AND idempotency_key = ?";
        let read = self.pool.read(work!(connection => {
            let row = sqlx::query(SQL).bind(api_key.as_bytes()).bind(key.as_bytes()).fetch_optional(connection).await?;
            row.map(|row| Ok::<_, sqlx::Error>((row.try_get::<Vec<u8>, _>(0)?, row.try_get::<String, _>(1)?))).transpose()
        }));
        let Some((body, owner)) = read.await? else { return Ok(None) };
        let corrupt = |column| StoreError::Corrupt { table: "idempotency_keys", column, id: owner.clone() };
        Ok(Some(KeyOwner {
            id: parse_id(&owner).ok_or_else(|| corrupt("transaction_id"))?,
            body_sha256: body.try_into().map_err(|_| corrupt("body_sha256"))?,
        }))
    }

    async fn release_key(&self, api_key: &str, key: &str, id: TransactionId) -> Result<(), StoreError> {
        const SQL: &str =
            "DELETE FROM idempotency_keys WHERE api_key = ? AND idempotency_key = ? AND transaction_id = ?";
        self.pool
            .transact(work!(connection => {
                let delete = sqlx::query(SQL).bind(api_key.as_bytes()).bind(key.as_bytes()).bind(id.to_string());
                delete.execute(connection).await?;
                Ok(End::Keep(()))
            }))
            .await
    }

    async fn nonce_holder(&self, signer: Signer, nonce: u64) -> Result<Option<Transaction>, StoreError> {
        const SQL: &str = concat!(
            "SELECT ",
            columns!(),
            " FROM transactions WHERE id = (SELECT transaction_id FROM gasless_nonces WHERE signer = ? AND nonce = ?)"
        );
        self.one(SQL, &[Value::Text(signer.to_string()), Value::Count(nonce)]).await
    }

    async fn last_nonce(&self, signer: Signer) -> Result<Option<u64>, StoreError> {
        const SQL: &str = "SELECT taken.nonce FROM gasless_nonces AS taken JOIN transactions ON id = taken.transaction_id \
             WHERE taken.signer = ? AND status <> 'failed' ORDER BY taken.nonce DESC LIMIT 1";
        let read = self.pool.read(work!(connection => {
            let row = sqlx::query(SQL).bind(signer.to_string()).fetch_optional(connection).await?;
            row.map(|row| row.try_get(0)).transpose()
        }));
        read.await
    }

    async fn withdrawn_nonce(&self, signer: Signer, from: u64) -> Result<Option<u64>, StoreError> {
        const SQL: &str = "SELECT taken.nonce FROM gasless_nonces AS taken JOIN transactions ON id = taken.transaction_id \
             WHERE taken.signer = ? AND taken.nonce >= ? AND status = 'failed' AND failed_by = 'intake' \
             ORDER BY taken.nonce LIMIT 1";
        let read = self.pool.read(work!(connection => {
            let row = sqlx::query(SQL).bind(signer.to_string()).bind(from).fetch_optional(connection).await?;
            row.map(|row| row.try_get(0)).transpose()
        }));
        read.await
    }

    async fn record_failed_forward(&self, digest: [u8; 32], now: Timestamp) -> Result<(), StoreError> {
        nonces::record_failed_forward(&self.pool, digest, now).await
    }

    async fn is_failed_forward(&self, digest: [u8; 32]) -> Result<bool, StoreError> {
        nonces::is_failed_forward(&self.pool, digest).await
    }

    async fn insert(&self, rows: &[Transaction]) -> Result<(), StoreError> {
        self.pool
            .transact(work!(connection => {
                let indexed: Vec<_> = rows.iter().enumerate().collect();
                let records = save::take_records(connection, &indexed).await;
                match records {
                    Ok(records) if records.values().any(|record| matches!(record, save::RecordOwner::OtherRow)) => {
                        return Ok(End::Undo(Err(StoreError::Conflict { constraint: RELAYER_TX_ID_UNIQUE })));
                    }
                    Ok(_) => {}
                    // Another connection took a record since it was looked up, and has committed.
                    Err(error) if is_duplicate(&error) => return Ok(End::Again(error)),
                    Err(error) => return Err(error),
                }
                match accept::insert_rows(connection, rows.iter()).await {
                    Ok(()) => Ok(End::Keep(())),
                    Err(error) if is_duplicate(&error) => {
                        Ok(End::Undo(Err(StoreError::Conflict { constraint: "transactions_pkey" })))
                    }
                    Err(error) => Err(error),
                }
            }))
            .await
    }

    async fn get(&self, id: TransactionId) -> Result<Option<Transaction>, StoreError> {
        self.gets.put(id).await
    }

    async fn find_bound(&self, tx_id: &RelayerTxId) -> Result<Option<Transaction>, StoreError> {
        const SQL: &str = concat!(
            "SELECT ",
            columns!(),
            " FROM transactions WHERE id = (SELECT transaction_id FROM relayer_transactions WHERE relayer_tx_id = ?)"
        );
        self.one(SQL, &[Value::Text(tx_id.0.clone())]).await
    }

    async fn bound_among(&self, tx_ids: &[RelayerTxId]) -> Result<Vec<RelayerTxId>, StoreError> {
        let mut bound = Vec::new();
        for some in tx_ids.chunks(ASKED_MAX) {
            let places = vec!["?"; some.len()].join(", ");
            let sql = format!("SELECT relayer_tx_id FROM relayer_transactions WHERE relayer_tx_id IN ({places})");
            let sql = sql.as_str();
            let found = self
                .pool
                .read(work!(connection => {
                    let mut statement = sqlx::query(AssertSqlSafe(sql)).persistent(false);
                    for tx_id in some {
                        statement = statement.bind(&tx_id.0);
                    }
                    let rows = statement.fetch_all(connection).await?;
                    rows.iter().map(|row| row.try_get::<Vec<u8>, _>(0)).collect::<Result<Vec<_>, _>>()
                }))
                .await?;
            bound.extend(some.iter().filter(|tx_id| found.iter().any(|known| known == tx_id.0.as_bytes())).cloned());
        }
        Ok(bound)
    }

    async fn take_record(&self, tx_id: &RelayerTxId, transaction: TransactionId) -> Result<bool, StoreError> {
        let taken = self.pool.transact(work!(connection => {
            sqlx::query("INSERT IGNORE INTO relayer_transactions (transaction_id, relayer_tx_id) VALUES (?, ?)")
                .bind(id(transaction))
                .bind(&tx_id.0)
                .execute(&mut *connection)
                .await?;
            let owner: String = sqlx::query("SELECT transaction_id FROM relayer_transactions WHERE relayer_tx_id = ?")
                .bind(&tx_id.0)
                .fetch_one(connection)
                .await?
                .try_get(0)?;
            Ok(End::Keep(parse_id(&owner) == Some(transaction)))
        }));
        taken.await
    }

    async fn save(&self, moved: &Moved) -> Result<Saved, StoreError> {
        self.saves.put(moved.clone()).await
    }

    async fn note(&self, transaction: TransactionId, step: &Step, now: Timestamp) -> Result<(), StoreError> {
        self.pool
            .transact(work!(connection => {
                // Steps are numbered under the row's lock.
                sqlx::query("SELECT 1 FROM transactions WHERE id = ? FOR UPDATE")
                    .bind(id(transaction))
                    .fetch_all(&mut *connection)
                    .await?;
                match add_step(connection, transaction, step, now).await {
                    Ok(()) => Ok(End::Keep(())),
                    // There is no row to lock, and another connection took the number.
                    Err(error) if is_duplicate(&error) => Ok(End::Again(error)),
                    Err(error) => Err(error),
                }
            }))
            .await
    }

    async fn timeline(&self, transaction: TransactionId) -> Result<Vec<TimelineEntry>, StoreError> {
        let read = self.pool.read(work!(connection => {
            let rows = sqlx::query("SELECT seq, at, action, detail FROM timeline WHERE transaction_id = ? ORDER BY seq")
                .bind(id(transaction))
                .fetch_all(connection)
                .await?;
            let entries = rows.iter().map(|row| {
                Ok(TimelineEntry {
                    seq: u64::from(row.try_get::<u32, _>(0)?),
                    at: moment(row, 1)?,
                    action: row.try_get(2)?,
                    detail: row.try_get(3)?,
                })
            });
            entries.collect::<Result<Vec<_>, sqlx::Error>>()
        }));
        read.await
    }

    async fn list(
        &self,
        filter: &Filter,
        before: Option<TransactionId>,
        max: usize,
    ) -> Result<Vec<Transaction>, StoreError> {
        self.list_page(filter, before, max).await
    }

    async fn due(&self, kind: Due, now: Timestamp, max: usize) -> Result<Vec<Transaction>, StoreError> {
        const SQL: &str = concat!(
            "SELECT ",
            columns!(),
            " FROM transactions WHERE waits_for = ? AND check_at <= ? ORDER BY check_at LIMIT ?"
        );
        self.page(SQL, &[Value::Text(waits_for(kind).to_owned()), Value::from(now), Value::from(max)]).await
    }

    async fn lease_due(
        &self,
        kind: Due,
        now: Timestamp,
        until: Timestamp,
        max: usize,
    ) -> Result<Vec<Transaction>, StoreError> {
        lease::lease_due(&self.pool, kind, now, until, max).await
    }

    async fn lease_sweep(
        &self,
        sweep: &'static str,
        held: Option<Timestamp>,
        now: Timestamp,
        until: Timestamp,
    ) -> Result<bool, StoreError> {
        lease::lease_sweep(&self.pool, sweep, held, now, until).await
    }

    async fn claimed(&self, max: usize) -> Result<Vec<Transaction>, StoreError> {
        const SQL: &str =
            concat!("SELECT ", columns!(), " FROM transactions WHERE waits_for = 'claimed' ORDER BY id DESC LIMIT ?");
        self.rows(SQL, &[Value::from(max)]).await
    }

    async fn last_bound(
        &self,
        relayer: &RelayerUrl,
        before: Timestamp,
        max: usize,
    ) -> Result<Vec<BoundRecord>, StoreError> {
        self.records_bound_before(relayer, before, max).await
    }

    async fn open_at(&self, relayer: &RelayerUrl, max: usize) -> Result<Vec<Transaction>, StoreError> {
        self.rows_open_at(relayer, max).await
    }

    async fn forgotten_at(
        &self,
        relayer: &RelayerUrl,
        since: Timestamp,
        kept: Duration,
        max: usize,
    ) -> Result<Vec<ForgottenRecord>, StoreError> {
        self.records_forgotten_at(relayer, since, kept, max).await
    }

    async fn nonce_owners(
        &self,
        relayer: &RelayerUrl,
        nonces: &[u64],
    ) -> Result<Vec<(u64, TransactionId)>, StoreError> {
        self.owners_of_nonces(relayer, nonces).await
    }

    async fn keep_early_webhook(&self, tx_id: &RelayerTxId, record: &str, now: Timestamp) -> Result<(), StoreError> {
        self.store_early_webhook(tx_id, record, now).await
    }

    async fn take_early_webhooks(&self, tx_id: &RelayerTxId) -> Result<Vec<String>, StoreError> {
        self.remove_early_webhooks(tx_id).await
    }

    async fn forget(&self, before: Timestamp) -> Result<u64, StoreError> {
        self.pool.transact(work!(connection => {
            let webhooks = sqlx::query("DELETE FROM early_webhooks WHERE received_at < ?")
                .bind(datetime(before))
                .execute(&mut *connection)
                .await?;
            sqlx::query("DELETE FROM consumers WHERE seen_at < ?").bind(datetime(before)).execute(connection).await?;
            Ok(End::Keep(webhooks.rows_affected()))
        })).await
    }

    async fn heartbeat(&self, consumer: &ConsumerId, now: Timestamp) -> Result<(), StoreError> {
        self.pool
            .transact(work!(connection => {
                sqlx::query("INSERT INTO consumers (id, seen_at) VALUES (?, ?) ON DUPLICATE KEY UPDATE seen_at = ?")
                    .bind(&consumer.0)
                    .bind(datetime(now))
                    .bind(datetime(now))
                    .execute(connection)
                    .await?;
                Ok(End::Keep(()))
            }))
            .await
    }

    async fn last_heartbeat(&self, consumer: &ConsumerId) -> Result<Option<Timestamp>, StoreError> {
        let read = self.pool.read(work!(connection => {
            let row = sqlx::query("SELECT seen_at FROM consumers WHERE id = ?")
                .bind(&consumer.0)
                .fetch_optional(connection)
                .await?;
            row.as_ref().map(|row| moment(row, 0)).transpose()
        }));
        read.await
    }

    async fn counts(&self) -> Result<TransactionCounts, StoreError> {
        self.count_rows().await
    }

    async fn ping(&self) -> Result<(), StoreError> {
        let read = self.pool.read(work!(connection => {
            sqlx::query("SELECT 1").fetch_all(connection).await
        }));
        read.await.map(drop)
    }

    async fn relayer_rows(
        &self,
        relayers: &[RelayerUrl],
        recent_since: RecentSince,
    ) -> Result<Vec<RelayerRows>, StoreError> {
        let mut all = Vec::with_capacity(relayers.len());
        for relayer in relayers {
            let read =
                self.pool.read(work!(connection => relayer_rows::of(connection, &relayer.0, recent_since).await));
            all.push(read.await?);
        }
        Ok(all)
    }
}

async fn add_step(
    connection: &mut MySqlConnection,
    transaction: TransactionId,
    step: &Step,
    at: Timestamp,
) -> Result<(), sqlx::Error> {
    sqlx::query(
        "INSERT INTO timeline (transaction_id, seq, at, action, detail) \
         SELECT ?, next.seq, ?, ?, ? \
         FROM (SELECT COALESCE(MAX(seq), 0) + 1 AS seq FROM timeline WHERE transaction_id = ?) AS next WHERE next.seq <= ?",
    )
    .bind(id(transaction))
    .bind(datetime(at))
    .bind(step.action)
    .bind(&step.detail)
    .bind(id(transaction))
    .bind(timeline_max(step))
    .execute(connection)
    .await?;
    Ok(())
}

fn moment(row: &MySqlRow, index: usize) -> Result<Timestamp, sqlx::Error> {
    row.try_get::<PrimitiveDateTime, _>(index).map(|at| Timestamp(milliseconds(at)))
}
