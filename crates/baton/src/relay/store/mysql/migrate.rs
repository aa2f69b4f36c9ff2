//! Bringing the schema up to date, by one process at a time.

use std::cmp::Ordering;
use std::time::Duration;

use sqlx::MySqlConnection;
use tokio::time::timeout;

use super::columns::datetime;
use super::outcome::number;
use super::pool::{MySqlOptions, connect, unavailable};
use crate::relay::store::StoreError;
use crate::timestamp::Timestamp;

/// The migrations, in order; the version is the place in this list.
const MIGRATIONS: [&str; 12] = [
    include_str!("../../../../migrations/mysql/0001_init.sql"),
    include_str!("../../../../migrations/mysql/0002_gasless_nonces.sql"),
    include_str!("../../../../migrations/mysql/0003_block_number.sql"),
    include_str!("../../../../migrations/mysql/0004_relayer_nonces.sql"),
    include_str!("../../../../migrations/mysql/0005_relayer_rows.sql"),
    include_str!("../../../../migrations/mysql/0006_chain_evidence.sql"),
    include_str!("../../../../migrations/mysql/0007_lists_and_failed_forwards.sql"),
    include_str!("../../../../migrations/mysql/0008_sweep_leases.sql"),
    include_str!("../../../../migrations/mysql/0009_list_by_creation.sql"),
    include_str!("../../../../migrations/mysql/0010_client_webhooks.sql"),
    include_str!("../../../../migrations/mysql/0011_list_by_status_and_type.sql"),
    include_str!("../../../../migrations/mysql/0012_claim_account.sql"),
];

/// A large table takes its time to change.
const TIMEOUT: Duration = Duration::from_secs(3600);

/// How long to wait for another process that is migrating.
const LOCK_WAIT_S: u32 = 600;

const SETUP: &str = "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', lock_wait_timeout = 600";

/// Brings the schema up to date; returns how many steps were taken. One that was cut off is repeated.
pub(super) async fn migrate(options: &MySqlOptions) -> Result<usize, StoreError> {
    let parsed = options.parsed()?;
    let mut connection: MySqlConnection =
        timeout(options.timeout, connect(&parsed, SETUP)).await.map_err(unavailable)?.map_err(unavailable)?;
    // Dropped, the connection closes, and that gives the lock up.
    timeout(TIMEOUT, locked(&mut connection)).await.map_err(unavailable)?
}

async fn locked(connection: &mut MySqlConnection) -> Result<usize, StoreError> {
    // The names of locks are the server's, not the database's, and short.
    let held: Option<i64> = sqlx::query_scalar("SELECT GET_LOCK(CONCAT('baton_migrate_', MD5(DATABASE())), ?)")
        .bind(LOCK_WAIT_S)
        .fetch_one(&mut *connection)
        .await
        .map_err(unavailable)?;
    if held != Some(1) {
        let waited = "another process has been migrating this database for ten minutes";
        return Err(StoreError::Unavailable(waited.into()));
    }
    let found = run(connection).await.map_err(unavailable);
    sqlx::query("DO RELEASE_LOCK(CONCAT('baton_migrate_', MD5(DATABASE())))")
        .execute(connection)
        .await
        .map_err(unavailable)?;
    let (found, known) = (found?, MIGRATIONS.len());
    known.checked_sub(found).ok_or(StoreError::TooNew { found, known })
}

/// Takes the missing steps; returns the version before them.
async fn run(connection: &mut MySqlConnection) -> Result<usize, sqlx::Error> {
    sqlx::query(
        "CREATE TABLE IF NOT EXISTS schema_version (version INT UNSIGNED NOT NULL, applied_at DATETIME(3) NOT NULL, \
         CONSTRAINT schema_version_pkey PRIMARY KEY (version)) ENGINE = InnoDB",
    )
    .execute(&mut *connection)
    .await?;
    sqlx::query(super::clock::TABLE).execute(&mut *connection).await?;
    let done = version(connection).await?;
    for (index, sql) in MIGRATIONS.iter().enumerate().skip(done) {
        sqlx::raw_sql(*sql).execute(&mut *connection).await?;
        sqlx::query("INSERT INTO schema_version (version, applied_at) VALUES (?, ?)")
            .bind(u64::try_from(index).unwrap_or(u64::MAX) + 1)
            .bind(datetime(Timestamp::from(std::time::SystemTime::now())))
            .execute(&mut *connection)
            .await?;
    }
    Ok(done)
}

/// Whether the schema is that of this program. Asked at the start only: a process that runs goes on while another brings the
/// schema up to date.
pub(super) async fn check(connection: &mut MySqlConnection) -> Result<Result<(), StoreError>, sqlx::Error> {
    const NO_SUCH_TABLE: u16 = 1146;
    let found = match version(connection).await {
        Err(error) if number(&error) == Some(NO_SUCH_TABLE) => 0,
        version => version?,
    };
    let known = MIGRATIONS.len();
    Ok(match found.cmp(&known) {
        Ordering::Less => Err(StoreError::NotMigrated { found, needed: known }),
        Ordering::Equal => Ok(()),
        Ordering::Greater => Err(StoreError::TooNew { found, known }),
    })
}

async fn version(connection: &mut MySqlConnection) -> Result<usize, sqlx::Error> {
    let version: i64 = sqlx::query_scalar("SELECT CAST(COALESCE(MAX(version), 0) AS SIGNED) FROM schema_version")
        .fetch_one(connection)
        .await?;
    Ok(usize::try_from(version).unwrap_or(0))
}
