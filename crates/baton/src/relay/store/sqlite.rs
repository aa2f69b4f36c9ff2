//! The embedded store: SQLite, in the same file as the embedded queue, so that a row and its message are one commit
//! ([`SqliteStore::accept`]). The single writer and its group commit are [`pipeline::sqlite::Database`]'s.

use async_trait::async_trait;
use pipeline::Outgoing;
use pipeline::queue::sqlite::SqliteQueue;
use pipeline::sqlite::{Database, DatabaseError};
use rusqlite::{Connection, OptionalExtension, Row, ToSql, params, params_from_iter};
use serde_json::Value;
use uuid::Uuid;

use super::row::{RawRow, first_id_at, timeline_max};
use super::{
    Accepted, Census, Due, Filter, IdempotencyKey, KeyOwner, NewTransaction, RELAYER_TX_ID_UNIQUE, Saved, StoreError,
    TimelineEntry, TransactionStore,
};
use crate::relay::forward_request::Signer;
use crate::relay::transaction::{
    ConsumerId, FailedBy, Moved, RelayerTxId, RelayerUrl, Status, Step, Transaction, TransactionId,
};
use crate::timestamp::Timestamp;

/// The embedded store.
#[derive(Clone)]
pub struct SqliteStore {
    database: Database,
}

/// The migrations, in order; the version is the place in this list.
const MIGRATIONS: [&str; 3] = [
    include_str!("../../../migrations/sqlite/0001_init.sql"),
    include_str!("../../../migrations/sqlite/0002_gasless_nonces.sql"),
    include_str!("../../../migrations/sqlite/0003_block_number.sql"),
];

const COLUMNS: &str = "id, kind, status, version, request, imported, api_key, created_at, updated_at, confirmed_at, hash, sender, \
     claim_consumer, claim_token, claim_relayer, claim_at, claim_doubt, claim_open_until, claim_unknown, claim_absent_since, \
     relayer_url, relayer_tx_id, bound_at, relayer_progress, relayer_nonce, forgotten_since, \
     attempts, reroutes, replays, auto_replayed, avoid_relayer, failed_by, error_message, result, check_at, \
     block_number";

const INSERT: &str = "INSERT INTO transactions (id, kind, status, version, request, imported, api_key, created_at, updated_at, \
     confirmed_at, hash, sender, claim_consumer, claim_token, claim_relayer, claim_at, claim_doubt, claim_open_until, \
     claim_unknown, claim_absent_since, relayer_url, relayer_tx_id, bound_at, relayer_progress, relayer_nonce, \
     forgotten_since, attempts, reroutes, replays, auto_replayed, avoid_relayer, failed_by, error_message, result, \
     check_at, block_number) \
     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, \
     ?19, ?20, ?21, ?22, ?23, ?24, ?25, ?26, ?27, ?28, ?29, ?30, ?31, ?32, ?33, ?34, ?35, ?36)";

/// What never changes (kind, request, key, created_at) is not written again.
const UPDATE: &str = "UPDATE transactions SET status = ?3, version = ?4, updated_at = ?9, confirmed_at = ?10, hash = ?11, sender = ?12, \
     claim_consumer = ?13, claim_token = ?14, claim_relayer = ?15, claim_at = ?16, claim_doubt = ?17, \
     claim_open_until = ?18, claim_unknown = ?19, claim_absent_since = ?20, relayer_url = ?21, \
     relayer_tx_id = ?22, bound_at = ?23, relayer_progress = ?24, relayer_nonce = ?25, \
     forgotten_since = ?26, attempts = ?27, reroutes = ?28, replays = ?29, auto_replayed = ?30, \
     avoid_relayer = ?31, failed_by = ?32, error_message = ?33, result = ?34, check_at = ?35, block_number = ?36 \
     WHERE id = ?1 AND version = ?4 - 1";

const ADD_STEP: &str = "INSERT INTO timeline (transaction_id, seq, at, action, detail) \
     SELECT ?1, COALESCE(MAX(seq), 0) + 1, ?2, ?3, ?4 FROM timeline WHERE transaction_id = ?1 \
     HAVING COALESCE(MAX(seq), 0) < ?5";

impl SqliteStore {
    /// A store on this database, migrated.
    pub async fn open(database: &Database) -> Result<Self, StoreError> {
        let store = Self { database: database.clone() };
        store.migrate().await?;
        Ok(store)
    }

    /// Brings the schema up to date; returns how many steps were taken.
    pub async fn migrate(&self) -> Result<usize, StoreError> {
        self.write(|connection| {
            connection.execute_batch(
                "CREATE TABLE IF NOT EXISTS schema_version (version INTEGER NOT NULL, applied_at INTEGER NOT NULL) STRICT",
            )?;
            let done: usize =
                connection.query_row("SELECT COALESCE(MAX(version), 0) FROM schema_version", [], |row| row.get(0))?;
            for (index, sql) in MIGRATIONS.iter().enumerate().skip(done) {
                connection.execute_batch(sql)?;
                connection.execute(
                    "INSERT INTO schema_version (version, applied_at) VALUES (?1, ?2)",
                    params![index + 1, Timestamp::now().0],
                )?;
            }
            Ok(MIGRATIONS.len() - done.min(MIGRATIONS.len()))
        })
        .await
    }

    /// Stores a row and its message in one commit: there is no moment in which one exists without the other. With an
    /// idempotency key that was used before, nothing is stored and the earlier transaction is named.
    pub async fn accept_queued(
        &self,
        row: Box<Transaction>,
        key: Option<IdempotencyKey>,
        message: Outgoing,
        queue: &SqliteQueue,
    ) -> Result<Accepted, StoreError> {
        let queue = queue.clone();
        // New ids and a message: there is nothing here that could fail for this request alone.
        let accepted = self.database.write_without_savepoint(move |connection| {
            let accepted = accept(connection, &row, key.as_ref())?;
            if accepted == Accepted::Now {
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
        // One unreadable row must not hide the others from a sweep or a list.
        let read = raw.into_iter().map(RawRow::read).filter_map(|row| match row {
            Ok(row) => Some(row),
            Err(failure) => {
                tracing::error!(action = "row_unreadable", "{failure}");
                None
            }
        });
        Ok(read.collect())
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
        let sql = format!(
            "SELECT {COLUMNS} FROM transactions \
             WHERE id = (SELECT transaction_id FROM gasless_nonces WHERE signer = ?1 AND nonce = ?2)"
        );
        self.one(sql, vec![Box::new(signer.to_string()), Box::new(nonce)]).await
    }

    async fn last_nonce(&self, signer: Signer) -> Result<Option<u64>, StoreError> {
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

    async fn insert(&self, rows: &[Transaction]) -> Result<(), StoreError> {
        let rows = rows.to_vec();
        let inserted = self.write(move |connection| {
            for row in &rows {
                if owns_its_record(connection, row)? == Record::Others {
                    // Nothing of this is kept: the job fails as a whole.
                    return Err(rusqlite::Error::QueryReturnedNoRows);
                }
                insert(connection, row)?;
            }
            Ok(())
        });
        inserted.await
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

    async fn save(&self, moved: &Moved) -> Result<Saved, StoreError> {
        let Moved { transaction, steps } = moved.clone();
        let saved = self.write(move |connection| {
            let version: Option<u64> = connection
                .prepare_cached("SELECT version FROM transactions WHERE id = ?1")?
                .query_row([transaction.id.0.as_bytes()], |row| row.get(0))
                .optional()?;
            if version != Some(transaction.version - 1) {
                return Ok(Some(Saved::Stale));
            }
            let early = match owns_its_record(connection, &transaction)? {
                Record::Others => return Ok(None),
                Record::None | Record::Known => false,
                Record::New => has_early(connection, &transaction)?,
            };
            execute_with(connection.prepare_cached(UPDATE)?, &transaction)?;
            for step in &steps {
                add_step(connection, transaction.id, step, transaction.updated_at)?;
            }
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
        let mut conditions = vec!["1 = 1"];
        let mut values: Vec<Box<dyn ToSql + Send>> = Vec::new();
        let mut add = |condition: &'static str, value: Box<dyn ToSql + Send>| {
            conditions.push(condition);
            values.push(value);
        };
        if let Some(status) = filter.status {
            add("status = ?", Box::new(status.name()));
        }
        if let Some(kind) = filter.kind {
            add("kind = ?", Box::new(kind.name()));
        }
        if let Some(relayer) = &filter.relayer {
            add("COALESCE(relayer_url, claim_relayer) = ?", Box::new(relayer.0.clone()));
        }
        // Ids begin with the time, so a bound on the time is a bound on the id.
        if let Some(from) = filter.from {
            add("id >= ?", Box::new(first_id_at(from)));
        }
        if let Some(until) = filter.until {
            add("id < ?", Box::new(first_id_at(until)));
        }
        if let Some(before) = before {
            add("id < ?", Box::new(before.0.into_bytes()));
        }
        if filter.in_doubt {
            conditions.push("check_at IS NOT NULL AND (claim_doubt IS NOT NULL OR forgotten_since IS NOT NULL)");
        }
        values.push(Box::new(i64::try_from(max).unwrap_or(i64::MAX)));
        let conditions = conditions.join(" AND ");
        self.rows(format!("SELECT {COLUMNS} FROM transactions WHERE {conditions} ORDER BY id DESC LIMIT ?"), values)
            .await
    }

    async fn due(&self, kind: Due, now: Timestamp, max: usize) -> Result<Vec<Transaction>, StoreError> {
        // Each condition is that of a partial index, which is then already in the right order.
        let condition = match kind {
            Due::Claimed => "claim_consumer IS NOT NULL",
            Due::Bound => "claim_consumer IS NULL AND relayer_tx_id IS NOT NULL AND check_at IS NOT NULL",
            Due::Waiting => "claim_consumer IS NULL AND relayer_tx_id IS NULL AND check_at IS NOT NULL",
        };
        let sql = format!(
            "SELECT {COLUMNS} FROM transactions WHERE {condition} AND check_at <= ?1 ORDER BY check_at LIMIT ?2"
        );
        self.rows(sql, vec![Box::new(now.0), Box::new(i64::try_from(max).unwrap_or(i64::MAX))]).await
    }

    async fn claimed(&self, max: usize) -> Result<Vec<Transaction>, StoreError> {
        let sql =
            format!("SELECT {COLUMNS} FROM transactions WHERE claim_consumer IS NOT NULL ORDER BY id DESC LIMIT ?1");
        self.rows(sql, vec![Box::new(i64::try_from(max).unwrap_or(i64::MAX))]).await
    }

    async fn bound_before(&self, relayer: &RelayerUrl, before: Timestamp) -> Result<Option<Transaction>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM transactions WHERE relayer_url = ?1 AND relayer_tx_id IS NOT NULL AND bound_at < ?2 \
             AND id < ?3 ORDER BY id DESC LIMIT 1"
        );
        self.one(sql, vec![Box::new(relayer.0.clone()), Box::new(before.0), Box::new(first_id_at(before))]).await
    }

    async fn keep_early(&self, tx_id: &RelayerTxId, record: &str, now: Timestamp) -> Result<(), StoreError> {
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

    async fn take_early(&self, tx_id: &RelayerTxId) -> Result<Vec<String>, StoreError> {
        const SELECT: &str = "SELECT record FROM early_webhooks WHERE relayer_tx_id = ?1 ORDER BY seq";
        // Nearly always there is none: look without taking the writer.
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

    async fn forget(&self, before: Timestamp) -> Result<u64, StoreError> {
        self.write(move |connection| {
            let webhooks = connection.execute("DELETE FROM early_webhooks WHERE received_at < ?1", [before.0])?;
            connection.execute("DELETE FROM consumers WHERE seen_at < ?1", [before.0])?;
            Ok(webhooks as u64)
        })
        .await
    }

    async fn pulse(&self, consumer: &ConsumerId, now: Timestamp) -> Result<(), StoreError> {
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

    async fn last_pulse(&self, consumer: &ConsumerId) -> Result<Option<Timestamp>, StoreError> {
        let consumer = consumer.0.clone();
        self.read(move |connection| {
            connection
                .prepare_cached("SELECT seen_at FROM consumers WHERE id = ?1")?
                .query_row([consumer], |row| Ok(Timestamp(row.get(0)?)))
                .optional()
        })
        .await
    }

    async fn census(&self) -> Result<Census, StoreError> {
        self.read(|connection| {
            let count = |sql: &str| connection.prepare_cached(sql)?.query_row([], |row| row.get::<_, u64>(0));
            let by_status = |status: Status| {
                connection
                    .prepare_cached("SELECT COUNT(*) FROM transactions WHERE status = ?1")?
                    .query_row([status.name()], |row| row.get::<_, u64>(0))
            };
            Ok(Census {
                open: vec![
                    (Status::Pending, by_status(Status::Pending)?),
                    (Status::Submitted, by_status(Status::Submitted)?),
                ],
                oldest_pending: connection
                    .prepare_cached("SELECT created_at FROM transactions WHERE status = 'pending' ORDER BY id LIMIT 1")?
                    .query_row([], |row| Ok(Timestamp(row.get(0)?)))
                    .optional()?,
                claims: count("SELECT COUNT(*) FROM transactions WHERE claim_consumer IS NOT NULL")?,
                claims_in_doubt: count(
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

    async fn ping(&self) -> Result<(), StoreError> {
        self.read(|connection| connection.query_row("SELECT 1", [], |_| Ok(()))).await
    }
}

/// Stores a new row with its key and its nonce, unless one of them is taken; then nothing is written.
fn accept(
    connection: &Connection,
    row: &Transaction,
    key: Option<&IdempotencyKey>,
) -> Result<Accepted, rusqlite::Error> {
    if let Some(key) = key
        && let Some(owner) = key_owner(connection, &row.api_key, &key.key)?
    {
        let same = owner.body_sha256 == key.body_sha256;
        return Ok(if same { Accepted::Before(owner.id) } else { Accepted::Other });
    }
    if let Some(holder) = nonce_taken_by(connection, row)? {
        return Ok(Accepted::NonceTaken(holder));
    }
    if let Some(key) = key {
        connection
            .prepare_cached(
                "INSERT INTO idempotency_keys (api_key, key, body_sha256, transaction_id) VALUES (?1, ?2, ?3, ?4)",
            )?
            .execute(params![row.api_key, key.key, key.body_sha256, row.id.0.as_bytes()])?;
    }
    if let Some(forward) = &row.forward {
        connection
            .prepare_cached(
                "INSERT OR REPLACE INTO gasless_nonces (signer, nonce, transaction_id) VALUES (?1, ?2, ?3)",
            )?
            .execute(params![forward.signer().to_string(), forward.nonce(), row.id.0.as_bytes()])?;
    }
    insert(connection, row)?;
    Ok(Accepted::Now)
}

fn key_owner(connection: &Connection, api_key: &str, key: &str) -> Result<Option<KeyOwner>, rusqlite::Error> {
    connection
        .prepare_cached("SELECT body_sha256, transaction_id FROM idempotency_keys WHERE api_key = ?1 AND key = ?2")?
        .query_row([api_key, key], |row| {
            Ok(KeyOwner { id: TransactionId(Uuid::from_bytes(row.get(1)?)), body_sha256: row.get(0)? })
        })
        .optional()
}

/// Who has the nonce that a gasless row wants, and has not failed.
fn nonce_taken_by(connection: &Connection, row: &Transaction) -> Result<Option<TransactionId>, rusqlite::Error> {
    let Some(forward) = &row.forward else { return Ok(None) };
    connection
        .prepare_cached(
            "SELECT id FROM gasless_nonces AS taken JOIN transactions ON id = taken.transaction_id \
             WHERE taken.signer = ?1 AND taken.nonce = ?2 AND status <> 'failed'",
        )?
        .query_row(params![forward.signer().to_string(), forward.nonce()], |row| {
            Ok(TransactionId(Uuid::from_bytes(row.get(0)?)))
        })
        .optional()
}

fn insert(connection: &Connection, row: &Transaction) -> Result<(), rusqlite::Error> {
    execute_with(connection.prepare_cached(INSERT)?, row)?;
    Ok(())
}

/// Whose the relayer transaction is that a row is bound to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Record {
    /// It is bound to none.
    None,
    /// Its own, as of now.
    New,
    /// Its own, as before.
    Known,
    /// Another row's.
    Others,
}

/// Whether the relayer transaction that the row is bound to is its own, making it so if it is nobody's.
fn owns_its_record(connection: &Connection, row: &Transaction) -> Result<Record, rusqlite::Error> {
    let Some(binding) = &row.binding else { return Ok(Record::None) };
    let id = row.id.0.as_bytes();
    let owner: Option<[u8; 16]> = connection
        .prepare_cached("SELECT transaction_id FROM relayer_transactions WHERE relayer_tx_id = ?1")?
        .query_row([&binding.tx_id.0], |row| row.get(0))
        .optional()?;
    match owner {
        Some(owner) if owner == *id => Ok(Record::Known),
        Some(_) => Ok(Record::Others),
        None => {
            connection
                .prepare_cached("INSERT INTO relayer_transactions (relayer_tx_id, transaction_id) VALUES (?1, ?2)")?
                .execute(params![binding.tx_id.0, id])?;
            Ok(Record::New)
        }
    }
}

/// Whether webhooks have come for the relayer transaction that the row is bound to.
fn has_early(connection: &Connection, row: &Transaction) -> Result<bool, rusqlite::Error> {
    let Some(binding) = &row.binding else { return Ok(false) };
    connection.prepare_cached("SELECT 1 FROM early_webhooks WHERE relayer_tx_id = ?1")?.exists([&binding.tx_id.0])
}

fn add_step(connection: &Connection, id: TransactionId, step: &Step, at: Timestamp) -> Result<(), rusqlite::Error> {
    let max = timeline_max(step);
    connection.prepare_cached(ADD_STEP)?.execute(params![id.0.as_bytes(), at.0, step.action, step.detail, max])?;
    Ok(())
}

/// Runs a statement with a row's values, in the order of the columns. Bound one by one: a list of boxed values would
/// cost more than the statement.
fn execute_with(mut statement: rusqlite::CachedStatement<'_>, row: &Transaction) -> Result<usize, rusqlite::Error> {
    let claim = row.claim.as_ref();
    let doubt = claim.and_then(|claim| claim.doubt.as_ref());
    let binding = row.binding.as_ref();
    let at = |moment: Option<Timestamp>| moment.map(|moment| moment.0);
    let mut position = 0;
    let mut bind = |value: &dyn ToSql| {
        position += 1;
        statement.raw_bind_parameter(position, value)
    };
    bind(row.id.0.as_bytes())?;
    bind(&row.kind.name())?;
    bind(&row.status.name())?;
    bind(&row.version)?;
    bind(&&*row.request)?;
    bind(&row.imported)?;
    bind(&row.api_key)?;
    bind(&row.created_at.0)?;
    bind(&row.updated_at.0)?;
    bind(&at(row.confirmed_at))?;
    bind(&row.hash)?;
    bind(&row.from)?;
    bind(&claim.map(|claim| &claim.consumer.0))?;
    bind(&claim.map(|claim| claim.token.into_bytes()))?;
    bind(&claim.map(|claim| &claim.relayer.0))?;
    bind(&claim.map(|claim| claim.at.0))?;
    bind(&doubt.map(|doubt| &doubt.reason))?;
    bind(&doubt.map(|doubt| doubt.open_until.0))?;
    bind(&doubt.map(|doubt| doubt.kind.name()))?;
    bind(&at(doubt.and_then(|doubt| doubt.absent_since)))?;
    bind(&binding.map(|binding| &binding.relayer.0))?;
    bind(&binding.map(|binding| &binding.tx_id.0))?;
    bind(&binding.map(|binding| binding.at.0))?;
    bind(&binding.map(|binding| binding.progress.name()))?;
    bind(&binding.and_then(|binding| binding.nonce))?;
    bind(&at(binding.and_then(|binding| binding.forgotten_since)))?;
    bind(&row.attempts)?;
    bind(&row.reroutes)?;
    bind(&row.replays)?;
    bind(&row.auto_replayed)?;
    bind(&row.avoid.as_ref().map(|relayer| &relayer.0))?;
    bind(&row.failed_by.map(FailedBy::name))?;
    bind(&row.error_message)?;
    bind(&row.result.as_ref().map(Value::to_string))?;
    bind(&at(row.check_at))?;
    bind(&row.block_number)?;
    statement.raw_execute()
}

fn raw_row(row: &Row<'_>) -> Result<RawRow, rusqlite::Error> {
    Ok(RawRow {
        id: row.get(0)?,
        kind: row.get(1)?,
        status: row.get(2)?,
        version: row.get(3)?,
        request: row.get(4)?,
        imported: row.get(5)?,
        api_key: row.get(6)?,
        created_at: row.get(7)?,
        updated_at: row.get(8)?,
        confirmed_at: row.get(9)?,
        hash: row.get(10)?,
        sender: row.get(11)?,
        claim: (row.get(12)?, row.get(13)?, row.get(14)?, row.get(15)?),
        doubt: (row.get(16)?, row.get(17)?, row.get(18)?, row.get(19)?),
        binding: (row.get(20)?, row.get(21)?, row.get(22)?, row.get(23)?, row.get(24)?, row.get(25)?),
        attempts: row.get(26)?,
        reroutes: row.get(27)?,
        replays: row.get(28)?,
        auto_replayed: row.get(29)?,
        avoid: row.get(30)?,
        failed_by: row.get(31)?,
        error_message: row.get(32)?,
        result: row.get(33)?,
        check_at: row.get(34)?,
        block_number: row.get(35)?,
    })
}

fn store_error(error: DatabaseError) -> StoreError {
    match error {
        // Only an insert looks for an owner that it does not find to be itself.
        DatabaseError::Sqlite(rusqlite::Error::QueryReturnedNoRows) => {
            StoreError::Conflict { constraint: RELAYER_TX_ID_UNIQUE }
        }
        DatabaseError::Sqlite(rusqlite::Error::SqliteFailure(code, _))
            if code.code == rusqlite::ErrorCode::ConstraintViolation =>
        {
            StoreError::Conflict { constraint: "transactions_pkey" }
        }
        DatabaseError::OutcomeUnknown(_) => StoreError::OutcomeUnknown(Box::new(error)),
        error => StoreError::Unavailable(Box::new(error)),
    }
}
