//! A clock that does not jump, the same for every process that shares the file.
//!
//! Leases, delays and whatever else is due at a time must not come due an hour early, or an hour late, because somebody
//! set the system's clock. So the time is that since the machine's start, plus an offset that the first process after
//! each start takes from the system's clock and writes into the file for the others. A step of the system's clock
//! takes effect at the next start of the machine.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, OptionalExtension, params};

/// The clock of a [`super::Database`]. Copies show the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clock {
    /// Milliseconds from the machine's start to 1970, the other way round.
    offset_ms: i64,
}

impl Clock {
    /// Milliseconds since 1970.
    pub fn now_ms(self) -> i64 {
        since_start_ms() + self.offset_ms
    }

    /// The same as a [`SystemTime`].
    pub fn now(self) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(u64::try_from(self.now_ms()).unwrap_or(0))
    }

    /// The clock of this file since this start of the machine, set now if nobody has yet.
    pub(super) fn of(connection: &Connection) -> rusqlite::Result<Self> {
        connection.execute_batch(
            "CREATE TABLE IF NOT EXISTS machine_clock (start TEXT NOT NULL PRIMARY KEY, offset_ms INTEGER NOT NULL) STRICT",
        )?;
        let start = machine_start();
        let known = connection
            .query_row("SELECT offset_ms FROM machine_clock WHERE start = ?1", [&start], |row| row.get(0))
            .optional()?;
        if let Some(offset_ms) = known {
            return Ok(Self { offset_ms });
        }
        let offset_ms = wall_ms() - since_start_ms();
        connection.execute("DELETE FROM machine_clock", [])?;
        connection
            .execute("INSERT INTO machine_clock (start, offset_ms) VALUES (?1, ?2)", params![start, offset_ms])?;
        Ok(Self { offset_ms })
    }
}

#[cfg(target_os = "linux")]
fn since_start_ms() -> i64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    time.tv_sec.saturating_mul(1000).saturating_add(time.tv_nsec / 1_000_000)
}

/// Names this start of the machine.
#[cfg(target_os = "linux")]
fn machine_start() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// Elsewhere the system's own clock has to do, jumps and all.
#[cfg(not(target_os = "linux"))]
fn since_start_ms() -> i64 {
    wall_ms()
}

#[cfg(not(target_os = "linux"))]
fn machine_start() -> String {
    "unknown".to_owned()
}

fn wall_ms() -> i64 {
    // Before 1970 or after the year 292 million the clock is wrong anyway.
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}
