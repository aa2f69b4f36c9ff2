//! Brings the schema up to date, one process at a time. All pending migrations and their version numbers are one
//! transaction.

use std::time::Duration;

use sqlx::PgConnection;
use tokio::time::timeout;

use super::pool::{PostgresOptions, store_error};
use crate::store_pool::connect;
use crate::users::store::{UserStoreError, UserStoreErrorKind, check_version};

/// The migrations, in order; the schema version is the number of those applied.
const MIGRATIONS: [&str; 2] = [
    include_str!("../../../../migrations/postgres/0001_users.sql"),
    include_str!("../../../../migrations/postgres/0002_users_insert.sql"),
];

/// An hour: changing a large table is slow.
const TIMEOUT: Duration = Duration::from_secs(3600);

/// The key is the first bytes of "baton users", to stay clear of other programs' locks.
const LOCK: &str = "SELECT pg_advisory_xact_lock(7089075323386670965)";

/// Brings the schema up to date; returns the number of migrations applied.
pub(super) async fn migrate(options: &PostgresOptions) -> Result<usize, UserStoreError> {
    let late = |error| UserStoreError::new(UserStoreErrorKind::Timeout, error);
    let parsed = options.parsed()?;
    let connected = timeout(options.timeout, connect(&parsed, "SET lock_timeout = 0")).await;
    let mut connection: PgConnection = connected.map_err(late)?.map_err(store_error)?;
    // If this is dropped midway, the connection closes, and the server rolls back and releases the lock.
    let found = timeout(TIMEOUT, run(&mut connection)).await.map_err(late)?.map_err(store_error)?;
    check_version(found.max(MIGRATIONS.len()), MIGRATIONS.len())?;
    Ok(MIGRATIONS.len() - found)
}

/// Fails unless the schema is that of this program; changes nothing.
pub(super) async fn check(options: &PostgresOptions) -> Result<(), UserStoreError> {
    let late = |error| UserStoreError::new(UserStoreErrorKind::Timeout, error);
    let asked = async {
        let mut connection: PgConnection =
            connect(&options.parsed()?, "SET lock_timeout = 0").await.map_err(store_error)?;
        let is_there: bool = sqlx::query_scalar("SELECT to_regclass('users_schema_version') IS NOT NULL")
            .fetch_one(&mut connection)
            .await
            .map_err(store_error)?;
        if is_there { version(&mut connection).await.map_err(store_error) } else { Ok(0) }
    };
    check_version(timeout(options.timeout, asked).await.map_err(late)??, MIGRATIONS.len())
}

async fn version(connection: &mut PgConnection) -> Result<usize, sqlx::Error> {
    let version: i32 =
        sqlx::query_scalar("SELECT COALESCE(MAX(version), 0) FROM users_schema_version").fetch_one(connection).await?;
    Ok(usize::try_from(version).unwrap_or(0))
}

/// Applies the missing migrations; returns the version before them.
async fn run(connection: &mut PgConnection) -> Result<usize, sqlx::Error> {
    sqlx::raw_sql("BEGIN").execute(&mut *connection).await?;
    sqlx::raw_sql(LOCK).execute(&mut *connection).await?;
    sqlx::raw_sql(
        "CREATE TABLE IF NOT EXISTS users_schema_version (version integer NOT NULL CONSTRAINT users_schema_version_pkey \
         PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())",
    )
    .execute(&mut *connection)
    .await?;
    let done = version(connection).await?;
    for (index, sql) in MIGRATIONS.iter().enumerate().skip(done) {
        sqlx::raw_sql(*sql).execute(&mut *connection).await?;
        sqlx::query("INSERT INTO users_schema_version (version) VALUES ($1)")
            .bind(i32::try_from(index).unwrap_or(i32::MAX) + 1)
            .execute(&mut *connection)
            .await?;
    }
    sqlx::raw_sql("COMMIT").execute(&mut *connection).await?;
    Ok(done)
}
