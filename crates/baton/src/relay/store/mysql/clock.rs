//! The store's clock: the server's time, and the record that all processes share. What follows from them is decided in
//! [`crate::clock::server_clock`].

use sqlx::Row;

use super::MySqlStore;
use super::outcome::{End, work};
use crate::clock::server_clock::ClockRecord;
use crate::relay::store::StoreError;
use crate::timestamp::Timestamp;

/// Created outside the numbered migrations, as on the embedded engine. One row; it keeps advancing when the server's
/// clock is set.
pub(super) const TABLE: &str = "CREATE TABLE IF NOT EXISTS store_clock (id TINYINT UNSIGNED NOT NULL, \
     time_ms BIGINT NOT NULL, server_ms BIGINT NOT NULL, wall_ms BIGINT NOT NULL, steady_since_ms BIGINT NOT NULL, \
     slip_ms BIGINT NOT NULL, CONSTRAINT store_clock_pkey PRIMARY KEY (id)) \
     ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin";
const READ: &str = "SELECT CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS SIGNED), time_ms, server_ms, wall_ms, steady_since_ms, \
     slip_ms FROM (SELECT 1 AS one) AS always LEFT JOIN store_clock ON id = one";
const INSERT: &str = "INSERT IGNORE INTO store_clock (id, time_ms, server_ms, wall_ms, steady_since_ms, slip_ms) \
     VALUES (1, ?, ?, ?, ?, ?)";
const UPDATE: &str = "UPDATE store_clock SET time_ms = ?, server_ms = ?, wall_ms = ?, steady_since_ms = ?, slip_ms = ? \
     WHERE id = 1 AND time_ms = ? AND server_ms = ?";

impl MySqlStore {
    /// The server's time, and the record of the store's clock.
    pub async fn read_clock(&self) -> Result<(Timestamp, Option<ClockRecord>), StoreError> {
        let read = self.pool.read(work!(connection => {
            let row = sqlx::query(READ).fetch_one(connection).await?;
            let time = |index: usize| row.try_get::<i64, _>(index).map(Timestamp);
            let record = match row.try_get::<Option<i64>, _>(1)? {
                None => None,
                Some(known) => Some(ClockRecord {
                    time: Timestamp(known),
                    server: time(2)?,
                    wall: time(3)?,
                    steady_since: time(4)?,
                    slip: std::time::Duration::from_millis(u64::try_from(time(5)?.0).unwrap_or(0)),
                }),
            };
            Ok((time(0)?, record))
        }));
        read.await
    }

    /// Replaces the record that was read; `false` if another process has replaced it since.
    pub async fn record_clock(&self, old: Option<&ClockRecord>, new: &ClockRecord) -> Result<bool, StoreError> {
        let slip_ms = i64::try_from(new.slip.as_millis()).unwrap_or(i64::MAX);
        let values = [new.time.0, new.server.0, new.wall.0, new.steady_since.0, slip_ms];
        let replaced = old.map(|old| [old.time.0, old.server.0]);
        self.pool
            .transact(work!(connection => {
                let mut query = sqlx::query(if replaced.is_some() { UPDATE } else { INSERT });
                for value in values.into_iter().chain(replaced.into_iter().flatten()) {
                    query = query.bind(value);
                }
                let done = query.execute(connection).await?;
                Ok(End::Keep(done.rows_affected() > 0))
            }))
            .await
    }
}
