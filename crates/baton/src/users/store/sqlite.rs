//! The embedded store: SQLite, in the same file as the lane's embedded queue. The single writer and its group commit
//! are [`pipeline::sqlite::Database`]'s. A row that breaks a rule fails alone here, so nothing needs to be split.

use async_trait::async_trait;
use pipeline::sqlite::{Database, DatabaseError};
use rusqlite::{Connection, ErrorCode, OptionalExtension, params};

use super::{Enrolled, Fate, Inserted, OTHER_USER, StoreError, Trouble, UserStore};
use crate::timestamp::Timestamp;
use crate::users::quarantine::Quarantined;
use crate::users::user::{User, UserId};

/// The embedded store.
#[derive(Clone)]
pub struct SqliteStore {
    database: Database,
}

/// The migrations, in order; the version is the place in this list.
const MIGRATIONS: [&str; 1] = [include_str!("../../../migrations/sqlite/0001_users.sql")];

const INSERT: &str =
    "INSERT INTO users (id, name, email, created_at) VALUES (?1, ?2, ?3, ?4) ON CONFLICT (id) DO NOTHING";

const SAME: &str = "SELECT 1 FROM users WHERE id = ?1 AND name = ?2 AND email = ?3";

const GET: &str = "SELECT name, email, created_at FROM users WHERE id = ?1";

const QUARANTINE: &str = "INSERT INTO users_set_aside (message_id, error, body, set_aside_at) VALUES (?1, ?2, ?3, ?4) \
     ON CONFLICT (message_id) DO NOTHING";

const LIST_QUARANTINED: &str = "SELECT message_id, error, body, set_aside_at FROM users_set_aside WHERE message_id > ?1 \
     ORDER BY message_id LIMIT ?2";

impl SqliteStore {
    /// A store on this database, migrated.
    pub async fn open(database: &Database) -> Result<Self, StoreError> {
        let store = Self { database: database.clone() };
        store.write(migrate).await?;
        Ok(store)
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
}

#[async_trait]
impl UserStore for SqliteStore {
    async fn insert(&self, users: &[User]) -> Result<Inserted, StoreError> {
        let users = users.to_vec();
        self.write(move |connection| {
            let now = Timestamp::now().0;
            let mut insert = connection.prepare_cached(INSERT)?;
            let mut same = connection.prepare_cached(SAME)?;
            let mut inserted = Inserted { fates: Vec::with_capacity(users.len()), new: 0 };
            for User { id, name, email } in &users {
                let fate = match insert.execute(params![id.0.as_bytes(), name, email, now]) {
                    Ok(0) if same.exists(params![id.0.as_bytes(), name, email])? => Fate::Stored,
                    Ok(0) => Fate::Refused(OTHER_USER.to_owned()),
                    Ok(_) => {
                        inserted.new += 1;
                        Fate::Stored
                    }
                    Err(error) if is_row_fault(&error) => Fate::Refused(error.to_string()),
                    Err(error) => return Err(error),
                };
                inserted.fates.push(fate);
            }
            Ok(inserted)
        })
        .await
    }

    async fn get(&self, id: UserId) -> Result<Option<Enrolled>, StoreError> {
        self.read(move |connection| {
            let read = |row: &rusqlite::Row<'_>| {
                let user = User { id, name: row.get(0)?, email: row.get(1)? };
                Ok(Enrolled { user, created_at: Timestamp(row.get(2)?) })
            };
            connection.prepare_cached(GET)?.query_row([id.0.as_bytes()], read).optional()
        })
        .await
    }

    async fn quarantine(&self, letters: &[Quarantined]) -> Result<(), StoreError> {
        let letters = letters.to_vec();
        self.write(move |connection| {
            let mut insert = connection.prepare_cached(QUARANTINE)?;
            for Quarantined { message_id, error, body, at } in &letters {
                insert.execute(params![message_id, error, body, at.0])?;
            }
            Ok(())
        })
        .await
    }

    async fn list_quarantined(&self, after: Option<&str>, max: usize) -> Result<Vec<Quarantined>, StoreError> {
        let after = after.unwrap_or_default().to_owned();
        self.read(move |connection| {
            let mut statement = connection.prepare_cached(LIST_QUARANTINED)?;
            let rows = statement.query_map(params![after, max], |row| {
                Ok(Quarantined {
                    message_id: row.get(0)?,
                    error: row.get(1)?,
                    body: row.get(2)?,
                    at: Timestamp(row.get(3)?),
                })
            })?;
            rows.collect()
        })
        .await
    }

    async fn remove_quarantined(&self, message_id: &str) -> Result<bool, StoreError> {
        let id = message_id.to_owned();
        self.write(move |connection| {
            let removed = connection.execute("DELETE FROM users_set_aside WHERE message_id = ?1", [id])?;
            Ok(removed > 0)
        })
        .await
    }

    async fn count_quarantined(&self) -> Result<u64, StoreError> {
        self.read(|connection| connection.query_row("SELECT COUNT(*) FROM users_set_aside", [], |row| row.get(0))).await
    }

    async fn ping(&self) -> Result<(), StoreError> {
        self.write(|_| Ok(())).await
    }
}

fn migrate(connection: &Connection) -> Result<(), rusqlite::Error> {
    connection.execute_batch(
        "CREATE TABLE IF NOT EXISTS users_schema_version (version INTEGER NOT NULL, applied_at INTEGER NOT NULL) STRICT",
    )?;
    let done: usize =
        connection.query_row("SELECT COALESCE(MAX(version), 0) FROM users_schema_version", [], |row| row.get(0))?;
    for (index, sql) in MIGRATIONS.iter().enumerate().skip(done) {
        connection.execute_batch(sql)?;
        connection.execute(
            "INSERT INTO users_schema_version (version, applied_at) VALUES (?1, ?2)",
            params![index + 1, Timestamp::now().0],
        )?;
    }
    Ok(())
}

/// Whether it is about this row and would be so at any time.
fn is_row_fault(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::ConstraintViolation | ErrorCode::TooBig | ErrorCode::TypeMismatch)
    )
}

fn store_error(error: DatabaseError) -> StoreError {
    let trouble = match &error {
        DatabaseError::Full => Trouble::DiskFull,
        DatabaseError::Busy => Trouble::Timeout,
        DatabaseError::Closed | DatabaseError::Io { .. } => Trouble::Down,
        DatabaseError::Sqlite(cause) if cause.sqlite_error_code() == Some(ErrorCode::ReadOnly) => Trouble::ReadOnly,
        DatabaseError::OutcomeUnknown(_) | DatabaseError::Panicked(_) | DatabaseError::Sqlite(_) => Trouble::Other,
    };
    StoreError::new(trouble, error)
}
