//! The store on PostgreSQL. `postgres/pool.rs` opens connections and classifies errors, `postgres/insert_batch.rs` writes a batch
//! and finds the rows that are refused, `postgres/migrate.rs` brings the schema up to date.

mod insert_batch;
mod migrate;
mod pool;

use std::sync::Arc;

use async_trait::async_trait;
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::{Enrolled, Inserted, UserStore, UserStoreError};
use crate::store_pool::work;
use crate::timestamp::Timestamp;
use crate::users::quarantined_message::Quarantined;
use crate::users::user::{User, UserId};
use pool::Pool;

pub use pool::PostgresOptions;

/// The store on PostgreSQL. A clone shares its connections.
#[derive(Clone)]
pub struct PostgresStore {
    pool: Arc<Pool>,
}

const GET: &str =
    "SELECT name, email, (EXTRACT(EPOCH FROM created_at) * 1000)::bigint AS created_at FROM users WHERE id = $1";

const QUARANTINE: &str = "INSERT INTO users_set_aside (message_id, error, body, set_aside_at) \
     SELECT message_id, error, body, to_timestamp(at / 1000.0) \
     FROM UNNEST($1::text[], $2::text[], $3::bytea[], $4::bigint[]) AS messages (message_id, error, body, at) \
     ON CONFLICT (message_id) DO NOTHING";

const LIST_QUARANTINED: &str = "SELECT message_id, error, body, (EXTRACT(EPOCH FROM set_aside_at) * 1000)::bigint AS at \
     FROM users_set_aside WHERE message_id > $1 ORDER BY message_id LIMIT $2";

impl PostgresStore {
    /// Brings the schema up to date; returns the number of migrations applied.
    pub async fn migrate(options: &PostgresOptions) -> Result<usize, UserStoreError> {
        migrate::migrate(options).await
    }

    /// Fails unless the schema is that of this program; changes nothing.
    pub async fn check_schema(options: &PostgresOptions) -> Result<(), UserStoreError> {
        migrate::check(options).await
    }

    /// A store on this server. The first call connects.
    pub fn open(options: &PostgresOptions) -> Result<Self, UserStoreError> {
        Ok(Self { pool: Arc::new(pool::open(options)?) })
    }
}

#[async_trait]
impl UserStore for PostgresStore {
    async fn insert(&self, users: &[User]) -> Result<Inserted, UserStoreError> {
        insert_batch::insert(&self.pool, users).await
    }

    async fn get(&self, id: UserId) -> Result<Option<Enrolled>, UserStoreError> {
        let read = |row: PgRow| {
            let user = User { id, name: row.try_get("name")?, email: row.try_get("email")? };
            Ok(Enrolled { user, created_at: Timestamp(row.try_get("created_at")?) })
        };
        self.pool
            .call(work!(connection => {
                let row = sqlx::query(GET).bind(id.0).fetch_optional(connection).await?;
                row.map(read).transpose()
            }))
            .await
    }

    async fn quarantine(&self, messages: &[Quarantined]) -> Result<(), UserStoreError> {
        // PostgreSQL text cannot hold NUL. The body is bytea and is stored unchanged.
        let text = |text: &String| text.replace('\0', "\u{fffd}");
        let ids: Vec<_> = messages.iter().map(|message| text(&message.message_id)).collect();
        let errors: Vec<_> = messages.iter().map(|message| text(&message.error)).collect();
        let bodies: Vec<_> = messages.iter().map(|message| message.body.as_slice()).collect();
        let times: Vec<_> = messages.iter().map(|message| message.at.0).collect();
        let (ids, errors, bodies, times) = (&ids, &errors, &bodies, &times);
        self.pool
            .call(work!(connection => {
                let insert = sqlx::query(QUARANTINE).bind(ids).bind(errors).bind(bodies).bind(times);
                insert.execute(connection).await.map(drop)
            }))
            .await
    }

    async fn list_quarantined(&self, after: Option<&str>, max: usize) -> Result<Vec<Quarantined>, UserStoreError> {
        let read = |row: PgRow| {
            Ok(Quarantined {
                message_id: row.try_get("message_id")?,
                error: row.try_get("error")?,
                body: row.try_get("body")?,
                at: Timestamp(row.try_get("at")?),
            })
        };
        let max = i64::try_from(max).unwrap_or(i64::MAX);
        self.pool
            .call(work!(connection => {
                let list = sqlx::query(LIST_QUARANTINED).bind(after.unwrap_or_default()).bind(max);
                list.fetch_all(connection).await?.into_iter().map(read).collect()
            }))
            .await
    }

    async fn remove_quarantined(&self, message_id: &str) -> Result<bool, UserStoreError> {
        self.pool
            .call(work!(connection => {
                let delete = sqlx::query("DELETE FROM users_set_aside WHERE message_id = $1").bind(message_id);
                Ok(delete.execute(connection).await?.rows_affected() > 0)
            }))
            .await
    }

    async fn count_quarantined(&self) -> Result<u64, UserStoreError> {
        let count: i64 = self
            .pool
            .call(work!(connection => {
                sqlx::query_scalar("SELECT COUNT(*) FROM users_set_aside").fetch_one(connection).await
            }))
            .await?;
        Ok(count.unsigned_abs())
    }

    async fn ping(&self) -> Result<(), UserStoreError> {
        let read_only: bool = self
            .pool
            .call(work!(connection => {
                sqlx::query_scalar("SELECT current_setting('transaction_read_only')::boolean").fetch_one(connection).await
            }))
            .await?;
        if read_only {
            Err(UserStoreError::new(super::UserStoreErrorKind::ReadOnly, "the server refuses writes"))
        } else {
            Ok(())
        }
    }
}
