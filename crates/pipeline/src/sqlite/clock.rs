//! A monotonic clock that every process on the same file shares.
//!
//! Leases and delays must not end an hour early or late because the system clock was stepped. So the time is the time
//! since boot plus an offset, which the first process after each boot takes from the system clock and stores in the file.
//! A forward step of the system clock takes effect at the next boot. A backward step does not: the file records the latest
//! time, and its clock never runs behind that.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, OptionalExtension, params};

/// How often a commit also records the time.
pub(super) const RECORD_EVERY_MS: i64 = 1000;

/// The clock of a [`Database`](super::Database). Copies show the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clock {
    /// Boot time in milliseconds since 1970: the time is this plus the time since boot.
    offset_ms: i64,
    /// When this clock was set, in its own time.
    since_ms: i64,
    /// Total change of the offset between this clock and the system clock, over all boots.
    slip_ms: i64,
}

impl Clock {
    /// Milliseconds since 1970.
    pub fn now_ms(self) -> i64 {
        since_start_ms() + self.offset_ms
    }

    /// The current time as a [`SystemTime`].
    pub fn now(self) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(u64::try_from(self.now_ms()).unwrap_or(0))
    }

    /// When this clock was set after the last boot, in milliseconds since 1970. The time from an earlier stored time to now
    /// includes a restart of the machine, across which the clock may have jumped ahead.
    pub fn since_ms(self) -> i64 {
        self.since_ms
    }

    /// Additional error of a stored time against an external clock, compared to a current time. Zero, unless the system
    /// clock was found stepped at a boot after `at_ms`.
    pub fn slip_since(self, at_ms: i64) -> Duration {
        Duration::from_millis(if at_ms < self.since_ms { self.slip_ms.unsigned_abs() } else { 0 })
    }

    /// Reads this boot's clock from the file, or sets it if this process is the first since boot.
    pub(super) fn of(connection: &Connection) -> rusqlite::Result<Self> {
        connection.execute_batch(
            "CREATE TABLE IF NOT EXISTS machine_clock (start TEXT NOT NULL PRIMARY KEY, offset_ms INTEGER NOT NULL, \
             since_ms INTEGER NOT NULL, slip_ms INTEGER NOT NULL, latest_ms INTEGER NOT NULL, latest_wall_ms INTEGER NOT NULL) \
             STRICT",
        )?;
        let start = machine_start();
        let known = connection
            .query_row("SELECT offset_ms, since_ms, slip_ms FROM machine_clock WHERE start = ?1", [&start], |row| {
                Ok(Self { offset_ms: row.get(0)?, since_ms: row.get(1)?, slip_ms: row.get(2)? })
            })
            .optional()?;
        match known {
            Some(clock) => Ok(clock),
            None => Self::set(connection, &start),
        }
    }

    fn set(connection: &Connection, start: &str) -> rusqlite::Result<Self> {
        let before: Option<(i64, i64, i64)> = connection
            .query_row(
                "SELECT latest_ms, latest_wall_ms, slip_ms FROM machine_clock ORDER BY latest_ms DESC LIMIT 1",
                [],
                |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
            )
            .optional()?;
        let wall_ms = wall_ms();
        let (latest_ms, latest_wall_ms, old_slip_ms) = before.unwrap_or((wall_ms, wall_ms, 0));
        // Later than any stored time: up to one recording interval before a crash is not recorded.
        let since_ms = if before.is_some() { wall_ms.max(latest_ms + 2 * RECORD_EVERY_MS) } else { wall_ms };
        let slip_ms = ((since_ms - wall_ms) - (latest_ms - latest_wall_ms)).abs() + old_slip_ms;
        let clock = Self { offset_ms: since_ms - since_start_ms(), since_ms, slip_ms };
        connection.execute("DELETE FROM machine_clock", [])?;
        connection.execute(
            "INSERT INTO machine_clock (start, offset_ms, since_ms, slip_ms, latest_ms, latest_wall_ms) \
             VALUES (?1, ?2, ?3, ?4, ?3, ?5)",
            params![start, clock.offset_ms, since_ms, slip_ms, wall_ms],
        )?;
        Ok(clock)
    }

    /// Records the current time for the next boot.
    pub(super) fn record_latest(self, connection: &Connection) -> rusqlite::Result<()> {
        connection
            .prepare_cached("UPDATE machine_clock SET latest_ms = ?1, latest_wall_ms = ?2 WHERE latest_ms < ?1")?
            .execute([self.now_ms(), wall_ms()])?;
        Ok(())
    }
}

#[cfg(target_os = "linux")]
fn since_start_ms() -> i64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    time.tv_sec.saturating_mul(1000).saturating_add(time.tv_nsec / 1_000_000)
}

/// An id of the current boot.
#[cfg(target_os = "linux")]
fn machine_start() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// Other systems use the system clock, with its steps.
#[cfg(not(target_os = "linux"))]
fn since_start_ms() -> i64 {
    wall_ms()
}

#[cfg(not(target_os = "linux"))]
fn machine_start() -> String {
    "unknown".to_owned()
}

fn wall_ms() -> i64 {
    // A clock before 1970 or after the year 292 million is wrong in any case.
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}
