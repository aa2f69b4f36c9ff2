//! The embedded store: SQLite, in the same file as the lane's embedded queue. [`pipeline::sqlite::Database`] provides the
//! single writer and its group commit. A row that breaks a rule fails alone here, so no batch needs to be split.

use async_trait::async_trait;
use pipeline::sqlite::{Database, DatabaseError};
use rusqlite::{Connection, ErrorCode, OptionalExtension, params};

use super::{
    Enrolled, InsertOutcome, Inserted, OTHER_USER, UserStore, UserStoreError, UserStoreErrorKind, check_version,
};
use crate::timestamp::Timestamp;
use crate::users::quarantined_message::Quarantined;
use crate::users::user::{User, UserId};

/// The embedded store. A clone shares its database.
#[derive(Clone)]
pub struct SqliteUserStore {
    database: Database,
}

/// The migrations, in order; the schema version is the number of those applied.
const MIGRATIONS: [&str; 1] = [include_str!("../../../migrations/sqlite/0001_users.sql")];

const INSERT: &str =
    "INSERT INTO users (id, name, email, created_at) VALUES (?1, ?2, ?3, ?4) ON CONFLICT (id) DO NOTHING";

const SAME: &str = "SELECT 1 FROM users WHERE id = ?1 AND name = ?2 AND email = ?3";

const GET: &str = "SELECT name, email, created_at FROM users WHERE id = ?1";

const QUARANTINE: &str = "INSERT INTO users_set_aside (message_id, error, body, set_aside_at) VALUES (?1, ?2, ?3, ?4) \
     ON CONFLICT (message_id) DO NOTHING";

const LIST_QUARANTINED: &str = "SELECT message_id, error, body, set_aside_at FROM users_set_aside WHERE message_id > ?1 \
     ORDER BY message_id LIMIT ?2";

impl SqliteUserStore {
    /// Opens a store on this database and brings the schema up to date.
    pub async fn open(database: &Database) -> Result<Self, UserStoreError> {
        let store = Self { database: database.clone() };
        let found = store.write(migrate).await?;
        check_version(found.max(MIGRATIONS.len()), MIGRATIONS.len())?;
        Ok(store)
    }

    /// Opens a store on a database whose schema is that of this program.
    pub async fn open_existing(database: &Database) -> Result<Self, UserStoreError> {
        const TABLE: &str = "SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = 'users_schema_version'";
        const VERSION: &str = "SELECT COALESCE(MAX(version), 0) FROM users_schema_version";
        let store = Self { database: database.clone() };
        let found = store.read(|connection| {
            let is_there = connection.prepare(TABLE)?.exists([])?;
            if is_there { connection.query_row(VERSION, [], |row| row.get(0)) } else { Ok(0) }
        });
        check_version(found.await?, MIGRATIONS.len())?;
        Ok(store)
    }

    async fn write<T, F>(&self, job: F) -> Result<T, UserStoreError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, rusqlite::Error> + Send + 'static,
    {
        self.database.write(job).await.map_err(store_error)
    }

    async fn read<T, F>(&self, job: F) -> Result<T, UserStoreError>
    where
        T: Send + 'static,
        F: FnOnce(&Connection) -> Result<T, rusqlite::Error> + Send + 'static,
    {
        self.database.read(job).await.map_err(store_error)
    }
}

#[async_trait]
impl UserStore for SqliteUserStore {
    async fn insert(&self, users: &[User]) -> Result<Inserted, UserStoreError> {
        let (users, clock) = (users.to_vec(), self.database.clock());
        self.write(move |connection| {
            let now = clock.now_ms();
            let mut insert = connection.prepare_cached(INSERT)?;
            let mut same = connection.prepare_cached(SAME)?;
            let mut inserted = Inserted { outcomes: Vec::with_capacity(users.len()), new: 0 };
            for User { id, name, email } in &users {
                let fate = match insert.execute(params![id.0.as_bytes(), name, email, now]) {
                    Ok(0) if same.exists(params![id.0.as_bytes(), name, email])? => InsertOutcome::Stored,
                    Ok(0) => InsertOutcome::Refused(OTHER_USER.to_owned()),
                    Ok(_) => {
                        inserted.new += 1;
                        InsertOutcome::Stored
                    }
                    Err(error) if is_row_fault(&error) => InsertOutcome::Refused(error.to_string()),
                    Err(error) => return Err(error),
                };
                inserted.outcomes.push(fate);
            }
            Ok(inserted)
        })
        .await
    }

    async fn get(&self, id: UserId) -> Result<Option<Enrolled>, UserStoreError> {
        self.read(move |connection| {
            let read = |row: &rusqlite::Row<'_>| {
                let user = User { id, name: row.get(0)?, email: row.get(1)? };
                Ok(Enrolled { user, created_at: Timestamp(row.get(2)?) })
            };
            connection.prepare_cached(GET)?.query_row([id.0.as_bytes()], read).optional()
        })
        .await
    }

    async fn quarantine(&self, messages: &[Quarantined]) -> Result<(), UserStoreError> {
        let messages = messages.to_vec();
        self.write(move |connection| {
            let mut insert = connection.prepare_cached(QUARANTINE)?;
            for Quarantined { message_id, error, body, at } in &messages {
                insert.execute(params![message_id, error, body, at.0])?;
            }
            Ok(())
        })
        .await
    }

    async fn list_quarantined(&self, after: Option<&str>, max: usize) -> Result<Vec<Quarantined>, UserStoreError> {
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

    async fn remove_quarantined(&self, message_id: &str) -> Result<bool, UserStoreError> {
        let id = message_id.to_owned();
        self.write(move |connection| {
            let removed = connection.execute("DELETE FROM users_set_aside WHERE message_id = ?1", [id])?;
            Ok(removed > 0)
        })
        .await
    }

    async fn count_quarantined(&self) -> Result<u64, UserStoreError> {
        self.read(|connection| connection.query_row("SELECT COUNT(*) FROM users_set_aside", [], |row| row.get(0))).await
    }

    async fn ping(&self) -> Result<(), UserStoreError> {
        self.database.check_writable().await.map_err(store_error)
    }
}

/// Takes the missing steps; returns the version before them.
fn migrate(connection: &Connection) -> Result<usize, rusqlite::Error> {
    connection.execute_batch(
        "CREATE TABLE IF NOT EXISTS users_schema_version (version INTEGER NOT NULL, applied_at INTEGER NOT NULL) STRICT",
    )?;
    let done: usize =
        connection.query_row("SELECT COALESCE(MAX(version), 0) FROM users_schema_version", [], |row| row.get(0))?;
    for (index, sql) in MIGRATIONS.iter().enumerate().skip(done) {
        connection.execute_batch(sql)?;
        connection.execute(
            "INSERT INTO users_schema_version (version, applied_at) VALUES (?1, ?2)",
            params![index + 1, Timestamp::from(std::time::SystemTime::now()).0],
        )?;
    }
    Ok(done)
}

/// Whether the row is at fault, so that a repeat fails too.
fn is_row_fault(error: &rusqlite::Error) -> bool {
    matches!(
        error.sqlite_error_code(),
        Some(ErrorCode::ConstraintViolation | ErrorCode::TooBig | ErrorCode::TypeMismatch)
    )
}

fn store_error(error: DatabaseError) -> UserStoreError {
    let kind = match &error {
        DatabaseError::Full => UserStoreErrorKind::DiskFull,
        DatabaseError::Busy => UserStoreErrorKind::Timeout,
        DatabaseError::Closed | DatabaseError::Io { .. } | DatabaseError::Gone { .. } => UserStoreErrorKind::Down,
        DatabaseError::Sqlite(cause) if cause.sqlite_error_code() == Some(ErrorCode::ReadOnly) => {
            UserStoreErrorKind::ReadOnly
        }
        DatabaseError::OutcomeUnknown(_) | DatabaseError::Panicked(_) | DatabaseError::Sqlite(_) => {
            UserStoreErrorKind::Other
        }
    };
    UserStoreError::new(kind, error)
}
