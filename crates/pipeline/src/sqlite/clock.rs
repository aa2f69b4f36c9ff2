//! A clock that does not jump, the same for every process that shares the file.
//!
//! Leases, delays and whatever else is due at a time must not come due an hour early, or an hour late, because somebody
//! set the system's clock. So the time is that since the machine's start, plus an offset that the first process after
//! each start takes from the system's clock and writes into the file for the others. A step of the system's clock
//! takes effect at the next start of the machine, and a step back not even then: the file remembers how late it was, and
//! its clock never runs behind that.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, OptionalExtension, params};

/// How often the time is written down with a commit.
pub(super) const NOTE_EVERY_MS: i64 = 1000;

/// The clock of a [`super::Database`]. Copies show the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clock {
    /// Milliseconds from the machine's start to 1970, the other way round.
    offset_ms: i64,
    /// When this clock was set, by itself.
    since_ms: i64,
    /// By how much it then went another way against the world's time than the one before it.
    slip_ms: i64,
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

    /// How much further off from somebody else's clock a time of this file may be than a time of now: nothing, unless
    /// the system's clock was found changed at a start of the machine since then.
    pub fn slip_since(self, at_ms: i64) -> Duration {
        Duration::from_millis(if at_ms < self.since_ms { self.slip_ms.unsigned_abs() } else { 0 })
    }

    /// The clock of this file since this start of the machine, set now if nobody has yet.
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
        // Later than any time that was stored: those of the last moments before a crash are not written down.
        let since_ms = if before.is_some() { wall_ms.max(latest_ms + 2 * NOTE_EVERY_MS) } else { wall_ms };
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

    /// Writes down how late it is, for the next start of the machine.
    pub(super) fn note(self, connection: &Connection) -> rusqlite::Result<()> {
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
