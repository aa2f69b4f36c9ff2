//! The embedded store: SQLite, in the same file as the embedded queue, so that a row and its message are one commit
//! ([`SqliteStore::accept_queued`]). The single writer and its group commit are [`pipeline::sqlite::Database`]'s.

mod attempt_record;
mod columns;
mod counts;
mod early_webhooks;
mod forget;
mod idempotency_keys;
mod lease;
mod list;
mod nonces;
mod notifications;
mod outbox;
mod relayer_evidence;
mod relayer_rows;
mod requeue;
mod statements;

use std::cmp::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use pipeline::Outgoing;
use pipeline::queue::sqlite::SqliteQueue;
use pipeline::sqlite::{Database, DatabaseError};
use rusqlite::{Connection, OptionalExtension, ToSql, params, params_from_iter};

use self::columns::{COLUMNS, changes, insert, raw_row, update};
use self::idempotency_keys::key_owner;
use self::statements::{RecordOwner, accept, add_step, has_early, own_record, records_are_free, take_record};
use super::row::{PAGE_BYTES_MAX, RawRow};
use super::{
    Accepted, BoundRecord, Due, Filter, ForgottenRecord, IdempotencyKey, KeyOwner, NewTransaction,
    RELAYER_TX_ID_UNIQUE, RecentSince, RelayerRows, Saved, StoreError, TimelineEntry, TransactionCounts,
    TransactionStore,
};
use crate::relay::request::forward::Signer;
use crate::relay::state::transaction::{ConsumerId, Moved, RelayerTxId, RelayerUrl, Step, Transaction, TransactionId};
use crate::relay::store::notifications::OrphanedEventScan;
use crate::timestamp::Timestamp;

/// The embedded store.
#[derive(Clone)]
pub struct SqliteStore {
    database: Database,
    forgotten: OrphanedEventScan,
}

/// The migrations, in order; the schema version is the number of applied ones.
const MIGRATIONS: [&str; 12] = [
    include_str!("../../../../migrations/sqlite/0001_init.sql"),
    include_str!("../../../../migrations/sqlite/0002_gasless_nonces.sql"),
    include_str!("../../../../migrations/sqlite/0003_block_number.sql"),
    include_str!("../../../../migrations/sqlite/0004_relayer_nonces.sql"),
    include_str!("../../../../migrations/sqlite/0005_relayer_rows.sql"),
    include_str!("../../../../migrations/sqlite/0006_chain_evidence.sql"),
    include_str!("../../../../migrations/sqlite/0007_lists_and_failed_forwards.sql"),
    include_str!("../../../../migrations/sqlite/0008_sweep_leases.sql"),
    include_str!("../../../../migrations/sqlite/0009_list_by_creation.sql"),
    include_str!("../../../../migrations/sqlite/0010_client_webhooks.sql"),
    include_str!("../../../../migrations/sqlite/0011_list_by_status_and_type.sql"),
    include_str!("../../../../migrations/sqlite/0012_claim_account.sql"),
];

impl SqliteStore {
    /// A store on this database, migrated.
    pub async fn open(database: &Database) -> Result<Self, StoreError> {
        let store = Self::on(database);
        store.migrate().await?;
        Ok(store)
    }

    /// A store on a database whose schema is that of this program.
    pub async fn open_existing(database: &Database) -> Result<Self, StoreError> {
        const TABLE: &str = "SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = 'schema_version'";
        const VERSION: &str = "SELECT COALESCE(MAX(version), 0) FROM schema_version";
        let store = Self::on(database);
        let found = store.read(|connection| {
            let is_there = connection.prepare(TABLE)?.exists([])?;
            if is_there { connection.query_row(VERSION, [], |row| row.get(0)) } else { Ok(0) }
        });
        let (found, known) = (found.await?, MIGRATIONS.len());
        match found.cmp(&known) {
            Ordering::Less => Err(StoreError::NotMigrated { found, needed: known }),
            Ordering::Equal => Ok(store),
            Ordering::Greater => Err(StoreError::TooNew { found, known }),
        }
    }

    fn on(database: &Database) -> Self {
        Self { database: database.clone(), forgotten: OrphanedEventScan::default() }
    }

    /// Brings the schema up to date; returns how many steps were taken.
    pub async fn migrate(&self) -> Result<usize, StoreError> {
        let done = self.write(|connection| {
            connection.execute_batch(
                "CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL, applied_at INTEGER NOT NULL) STRICT",
            )?;
            let done: usize =
                connection.query_row("SELECT COALESCE(MAX(version), 0) FROM schema_version", [], |row| row.get(0))?;
            for (index, sql) in MIGRATIONS.iter().enumerate().skip(done) {
                connection.execute_batch(sql)?;
                connection.execute(
                    "INSERT INTO schema_version (version, applied_at) VALUES (?1, ?2)",
                    params![index + 1, Timestamp::from(std::time::SystemTime::now()).0],
                )?;
            }
            Ok(done)
        });
        let (found, known) = (done.await?, MIGRATIONS.len());
        known.checked_sub(found).ok_or(StoreError::TooNew { found, known })
    }

    /// Stores a row and its message in one commit, so that neither exists without the other. With an idempotency key
    /// that was used before, stores nothing and names the earlier transaction.
    pub async fn accept_queued(
        &self,
        row: Box<Transaction>,
        key: Option<IdempotencyKey>,
        message: Outgoing,
        queue: &SqliteQueue,
    ) -> Result<Accepted, StoreError> {
        let queue = queue.clone();
        // New ids and a message: nothing in this job can fail for this request alone, so it needs no savepoint.
        let accepted = self.database.write_without_savepoint(move |connection| {
            let accepted = accept(connection, &row, key.as_ref())?;
            if accepted == Accepted::Stored {
                queue.enqueue(connection, std::slice::from_ref(&message))?;
            }
            Ok(accepted)
        });
        accepted.await.map_err(store_error)
    }

    async fn write<T, F>(&self, job: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, rusqlite::Error> + Send + 'static,
    {
        self.database.write(job).await.map_err(store_error)
    }

    async fn read<T, F>(&self, job: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, rusqlite::Error> + Send + 'static,
    {
        self.database.read(job).await.map_err(store_error)
    }

    /// Rows of a query, each read back whole.
    async fn rows(&self, sql: String, values: Vec<Box<dyn ToSql + Send>>) -> Result<Vec<Transaction>, StoreError> {
        let raw = self
            .read(move |connection| {
                let mut statement = connection.prepare_cached(&sql)?;
                let rows = statement.query_map(params_from_iter(values.iter()), raw_row)?;
                rows.collect::<Result<Vec<_>, _>>()
            })
            .await?;
        Ok(readable(raw))
    }

    /// The same, up to [`PAGE_BYTES_MAX`].
    async fn page(&self, sql: String, values: Vec<Box<dyn ToSql + Send>>) -> Result<Vec<Transaction>, StoreError> {
        let raw = self.read(move |connection| {
            let mut statement = connection.prepare_cached(&sql)?;
            let (mut page, mut size) = (Vec::new(), 0);
            for row in statement.query_map(params_from_iter(values.iter()), raw_row)? {
                let row = row?;
                size += row.size_bytes();
                page.push(row);
                if size > PAGE_BYTES_MAX {
                    break;
                }
            }
            Ok(page)
        });
        Ok(readable(raw.await?))
    }

    async fn one(&self, sql: String, values: Vec<Box<dyn ToSql + Send>>) -> Result<Option<Transaction>, StoreError> {
        let raw = self
            .read(move |connection| {
                let mut statement = connection.prepare_cached(&sql)?;
                statement.query_row(params_from_iter(values.iter()), raw_row).optional()
            })
            .await?;
        raw.map(RawRow::read).transpose()
    }
}

/// The rows that can be read: one that cannot must not hide the others from a sweep or a list.
fn readable(raw: Vec<RawRow>) -> Vec<Transaction> {
    let read = raw.into_iter().map(RawRow::read).filter_map(|row| match row {
        Ok(row) => Some(row),
        Err(failure) => {
            tracing::error!(action = "row_unreadable", "{failure}");
            None
        }
    });
    read.collect()
}

/// Which rows may be due. Each condition is that of a partial index, which is then already in the right order.
fn due_condition(kind: Due) -> &'static str {
    match kind {
        Due::Claimed => "claim_consumer IS NOT NULL",
        Due::Bound => "claim_consumer IS NULL AND relayer_tx_id IS NOT NULL AND check_at IS NOT NULL",
        Due::Waiting => "claim_consumer IS NULL AND relayer_tx_id IS NULL AND check_at IS NOT NULL",
    }
}

#[async_trait]
impl TransactionStore for SqliteStore {
    async fn accept(&self, rows: &[NewTransaction]) -> Vec<Result<Accepted, StoreError>> {
        let accepted =
            rows.iter().cloned().map(|(row, key)| self.write(move |connection| accept(connection, &row, key.as_ref())));
        futures::future::join_all(accepted).await
    }

    async fn key_owner(&self, api_key: &str, key: &str) -> Result<Option<KeyOwner>, StoreError> {
        let (api_key, key) = (api_key.to_owned(), key.to_owned());
        self.read(move |connection| key_owner(connection, &api_key, &key)).await
    }

    async fn release_key(&self, api_key: &str, key: &str, id: TransactionId) -> Result<(), StoreError> {
        let (api_key, key) = (api_key.to_owned(), key.to_owned());
        self.write(move |connection| {
            connection
                .prepare_cached("DELETE FROM idempotency_keys WHERE api_key = ?1 AND key = ?2 AND transaction_id = ?3")?
                .execute(params![api_key, key, id.0.as_bytes()])?;
            Ok(())
        })
        .await
    }

    async fn nonce_holder(&self, signer: Signer, nonce: u64) -> Result<Option<Transaction>, StoreError> {
        self.holder_of_nonce(signer, nonce).await
    }

    async fn last_nonce(&self, signer: Signer) -> Result<Option<u64>, StoreError> {
        self.last_taken_nonce(signer).await
    }

    async fn withdrawn_nonce(&self, signer: Signer, from: u64) -> Result<Option<u64>, StoreError> {
        self.first_withdrawn_nonce(signer, from).await
    }

    async fn record_failed_forward(&self, digest: [u8; 32], now: Timestamp) -> Result<(), StoreError> {
        self.write(move |connection| {
            connection
                .prepare_cached("INSERT OR IGNORE INTO failed_forwards (digest, at) VALUES (?1, ?2)")?
                .execute(params![digest, now.0])?;
            Ok(())
        })
        .await
    }

    async fn is_failed_forward(&self, digest: [u8; 32]) -> Result<bool, StoreError> {
        self.read(move |connection| {
            connection.prepare_cached("SELECT 1 FROM failed_forwards WHERE digest = ?1")?.exists(params![digest])
        })
        .await
    }

    async fn insert(&self, rows: &[Transaction]) -> Result<(), StoreError> {
        let rows = rows.to_vec();
        let inserted = self.write(move |connection| {
            if !records_are_free(connection, &rows)? {
                return Ok(false);
            }
            for row in &rows {
                take_record(connection, row)?;
                insert(connection, row)?;
            }
            Ok(true)
        });
        if inserted.await? { Ok(()) } else { Err(StoreError::Conflict { constraint: RELAYER_TX_ID_UNIQUE }) }
    }

    async fn get(&self, id: TransactionId) -> Result<Option<Transaction>, StoreError> {
        self.one(format!("SELECT {COLUMNS} FROM transactions WHERE id = ?1"), vec![Box::new(id.0.into_bytes())]).await
    }

    async fn find_bound(&self, tx_id: &RelayerTxId) -> Result<Option<Transaction>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM transactions \
             WHERE id = (SELECT transaction_id FROM relayer_transactions WHERE relayer_tx_id = ?1)"
        );
        self.one(sql, vec![Box::new(tx_id.0.clone())]).await
    }

    async fn bound_among(&self, tx_ids: &[RelayerTxId]) -> Result<Vec<RelayerTxId>, StoreError> {
        let tx_ids = tx_ids.to_vec();
        self.read(move |connection| {
            let mut statement =
                connection.prepare_cached("SELECT 1 FROM relayer_transactions WHERE relayer_tx_id = ?1")?;
            let mut bound = Vec::new();
            for tx_id in tx_ids {
                if statement.exists([&tx_id.0])? {
                    bound.push(tx_id);
                }
            }
            Ok(bound)
        })
        .await
    }

    async fn take_record(&self, tx_id: &RelayerTxId, id: TransactionId) -> Result<bool, StoreError> {
        let tx_id = tx_id.clone();
        let owner = self.write(move |connection| own_record(connection, &tx_id, id));
        Ok(owner.await? != RecordOwner::OtherRow)
    }

    async fn save(&self, moved: &Moved) -> Result<Saved, StoreError> {
        let Moved { transaction, steps, events } = moved.clone();
        let saved = self.write(move |connection| {
            let Some(changes) = changes(connection, &transaction)? else { return Ok(Some(Saved::Stale)) };
            let early = match take_record(connection, &transaction)? {
                RecordOwner::OtherRow => return Ok(None),
                RecordOwner::None | RecordOwner::Known => false,
                RecordOwner::New => has_early(connection, &transaction)?,
            };
            update(connection, &transaction, changes)?;
            for step in &steps {
                add_step(connection, transaction.id, step, transaction.updated_at)?;
            }
            outbox::write(connection, &transaction, &events)?;
            Ok(Some(Saved::Yes { early }))
        });
        saved.await?.ok_or(StoreError::Conflict { constraint: RELAYER_TX_ID_UNIQUE })
    }

    async fn note(&self, id: TransactionId, step: &Step, now: Timestamp) -> Result<(), StoreError> {
        let step = step.clone();
        self.write(move |connection| add_step(connection, id, &step, now)).await
    }

    async fn timeline(&self, id: TransactionId) -> Result<Vec<TimelineEntry>, StoreError> {
        self.read(move |connection| {
            let mut statement = connection.prepare_cached(
                "SELECT seq, at, action, detail FROM timeline WHERE transaction_id = ?1 ORDER BY seq",
            )?;
            let entries = statement.query_map([id.0.into_bytes()], |row| {
                Ok(TimelineEntry {
                    seq: row.get(0)?,
                    at: Timestamp(row.get(1)?),
                    action: row.get(2)?,
                    detail: row.get(3)?,
                })
            })?;
            entries.collect()
        })
        .await
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
        let condition = due_condition(kind);
        let sql = format!(
            "SELECT {COLUMNS} FROM transactions WHERE {condition} AND check_at <= ?1 ORDER BY check_at LIMIT ?2"
        );
        self.page(sql, vec![Box::new(now.0), Box::new(i64::try_from(max).unwrap_or(i64::MAX))]).await
    }

    async fn lease_due(
        &self,
        kind: Due,
        now: Timestamp,
        until: Timestamp,
        max: usize,
    ) -> Result<Vec<Transaction>, StoreError> {
        self.lease_due_rows(kind, now, until, max).await
    }

    async fn lease_sweep(
        &self,
        sweep: &'static str,
        held: Option<Timestamp>,
        now: Timestamp,
        until: Timestamp,
    ) -> Result<bool, StoreError> {
        self.lease_sweep_turn(sweep, held, now, until).await
    }

    async fn claimed(&self, max: usize) -> Result<Vec<Transaction>, StoreError> {
        let sql =
            format!("SELECT {COLUMNS} FROM transactions WHERE claim_consumer IS NOT NULL ORDER BY id DESC LIMIT ?1");
        self.rows(sql, vec![Box::new(i64::try_from(max).unwrap_or(i64::MAX))]).await
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
        self.write(move |connection| {
            let webhooks = connection.execute("DELETE FROM early_webhooks WHERE received_at < ?1", [before.0])?;
            connection.execute("DELETE FROM consumers WHERE seen_at < ?1", [before.0])?;
            Ok(webhooks as u64)
        })
        .await
    }

    async fn heartbeat(&self, consumer: &ConsumerId, now: Timestamp) -> Result<(), StoreError> {
        let consumer = consumer.0.clone();
        self.write(move |connection| {
            connection
                .prepare_cached(
                    "INSERT INTO consumers (id, seen_at) VALUES (?1, ?2) ON CONFLICT (id) DO UPDATE SET seen_at = ?2",
                )?
                .execute(params![consumer, now.0])?;
            Ok(())
        })
        .await
    }

    async fn last_heartbeat(&self, consumer: &ConsumerId) -> Result<Option<Timestamp>, StoreError> {
        let consumer = consumer.0.clone();
        self.read(move |connection| {
            connection
                .prepare_cached("SELECT seen_at FROM consumers WHERE id = ?1")?
                .query_row([consumer], |row| Ok(Timestamp(row.get(0)?)))
                .optional()
        })
        .await
    }

    async fn counts(&self) -> Result<TransactionCounts, StoreError> {
        self.count_rows().await
    }

    async fn ping(&self) -> Result<(), StoreError> {
        // A full disk can still be read.
        self.database.check_writable().await.map_err(store_error)
    }

    async fn relayer_rows(
        &self,
        relayers: &[RelayerUrl],
        recent_since: RecentSince,
    ) -> Result<Vec<RelayerRows>, StoreError> {
        let relayers = relayers.to_vec();
        self.read(move |connection| {
            relayers.iter().map(|relayer| relayer_rows::of(connection, &relayer.0, recent_since)).collect()
        })
        .await
    }
}

fn store_error(error: DatabaseError) -> StoreError {
    match error {
        DatabaseError::Sqlite(rusqlite::Error::SqliteFailure(code, _))
            if code.code == rusqlite::ErrorCode::ConstraintViolation =>
        {
            StoreError::Conflict { constraint: "transactions_pkey" }
        }
        DatabaseError::OutcomeUnknown(_) => StoreError::OutcomeUnknown(Box::new(error)),
        error => StoreError::Unavailable(Box::new(error)),
    }
}
