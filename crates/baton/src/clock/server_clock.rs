//! The clock of a store on a database server: the server's clock, except that it never runs back, and that a jump ahead is
//! known to every process.
//!
//! An administrator or a time server may set the server's clock at any time. Rows carry times from before; a wait that a
//! jump ahead cuts short, or a claim that a jump back puts into the future, would let a transaction be sent twice. So the
//! time is recorded in the database beside the server's own, about once a second, and each process carries it on between
//! two readings by its machine's time since boot:
//!
//! * The server's clock is set back: the record keeps the distance, and the store's clock goes on as if nothing had
//!   happened. It stays ahead of the server's.
//! * The server's clock jumps ahead: so does the store's, and the record says from when on it is steady again
//!   ([`ServerClock::steady_since`](crate::clock::TimeSource::steady_since)). A wait that began before starts over there.
//! * No process was running, so none can tell how much time has passed: the same as a jump ahead.
//!
//! Times stay comparable, because the record never goes back. The decision is pure ([`ServerClock::plan`]); the caller
//! reads and writes the record (`relay/engine.rs`).

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use super::{TimeSource, since_boot};
use crate::timestamp::Timestamp;

/// The record is renewed when it is this old.
pub const RECORD_EVERY: Duration = Duration::from_secs(1);
/// A larger difference between the server's clock and the time that has passed is a step of that clock.
const STEP_MIN: Duration = Duration::from_secs(1);
/// A record that is older than this when a process starts: no process was running.
const GAP_MIN: Duration = Duration::from_secs(3);
/// Jumps within this time add up; no claim that is settled by itself is older.
const SLIP_MEMORY: Duration = Duration::from_secs(24 * 3600);

/// The store's clock as the database keeps it, for all processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockRecord {
    /// The store's time.
    pub time: Timestamp,
    /// The server's own time then.
    pub server: Timestamp,
    /// The wall clock of the machine that wrote the record then.
    pub wall: Timestamp,
    /// The store's clock has not jumped ahead since.
    pub steady_since: Timestamp,
    /// How far times from before `steady_since` may be off from another machine's clock, beyond what a current time is.
    pub slip: Duration,
}

/// One reading of the server.
#[derive(Debug, Clone, Copy)]
pub struct ServerReading {
    /// The server's own time, at `since_boot`.
    pub server: Timestamp,
    /// The record.
    pub record: Option<ClockRecord>,
    /// This machine's time since boot when it was read.
    pub since_boot: Duration,
    /// This machine's wall clock when it was read.
    pub wall: Timestamp,
}

/// What follows from a reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// The store's clock at the reading.
    pub record: ClockRecord,
    /// Whether the record must be written before this process uses it.
    pub write: bool,
    /// What happened to the server's clock.
    pub event: ClockEvent,
    since_boot: Duration,
}

/// What a reading shows about the server's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClockEvent {
    /// It runs as expected.
    Steady,
    /// It was set back by this much; the store's clock goes on.
    SetBack(Duration),
    /// It jumped ahead by this much, and the store's clock with it.
    JumpedAhead(Duration),
    /// No process was running, or none had recorded the time.
    Unobserved,
}

/// A database server's clock, followed as described above.
#[derive(Debug)]
pub struct ServerClock {
    state: Mutex<State>,
    /// The latest time that was given out.
    latest_ms: AtomicI64,
}

#[derive(Debug, Clone, Copy)]
struct State {
    record: ClockRecord,
    since_boot: Duration,
}

impl State {
    fn at(&self, since_boot: Duration) -> Timestamp {
        self.record.time + since_boot.saturating_sub(self.since_boot)
    }
}

impl ServerClock {
    /// The clock of a process that has just started, by [`ServerClock::first_plan`].
    pub fn new(plan: &Plan) -> Arc<Self> {
        let state = State { record: plan.record, since_boot: plan.since_boot };
        Arc::new(Self { state: Mutex::new(state), latest_ms: AtomicI64::new(i64::MIN) })
    }

    /// The first reading of a process.
    pub fn first_plan(reading: &ServerReading) -> Plan {
        let since_boot = reading.since_boot;
        let Some(record) = reading.record else {
            let record = ClockRecord {
                time: reading.server,
                server: reading.server,
                wall: reading.wall,
                steady_since: reading.server,
                slip: Duration::ZERO,
            };
            return Plan { record, write: true, event: ClockEvent::Unobserved, since_boot };
        };
        let age = reading.server.since(record.server);
        if age <= GAP_MIN && record.server.since(reading.server) <= STEP_MIN {
            return Plan {
                record: ClockRecord { time: by_record(&record, reading).max(record.time), ..renewed(&record, reading) },
                write: age >= RECORD_EVERY,
                event: ClockEvent::Steady,
                since_boot,
            };
        }
        // Later than any stored time: what was stored after the last record is not in it. Where the clock need not go back
        // for it, it is put right.
        let time = reading.server.max(record.time + 2 * RECORD_EVERY);
        let (before, after) = (record.time.0 - record.wall.0, time.0 - reading.wall.0);
        let slip = Duration::from_millis(before.abs_diff(after));
        let record = jumped(&ClockRecord { time, ..renewed(&record, reading) }, &record, slip);
        Plan { record, write: true, event: ClockEvent::Unobserved, since_boot }
    }

    /// What a later reading means for a process that has gone by its own steady clock since the last one.
    pub fn plan(&self, reading: &ServerReading) -> Plan {
        let Some(record) = reading.record else { return Self::first_plan(reading) };
        let since_boot = reading.since_boot;
        let (carried, by_record) = (self.state().at(since_boot), by_record(&record, reading));
        let next = ClockRecord { time: by_record, ..renewed(&record, reading) };
        let old = reading.server.since(record.server) >= RECORD_EVERY;
        if by_record > carried + STEP_MIN {
            // Another process has recorded the jump before, or this is the first to see it.
            let known = record.steady_since > carried;
            let jump = by_record.since(carried);
            let record = if known { next } else { jumped(&next, &record, jump) };
            return Plan { record, write: !known || old, event: ClockEvent::JumpedAhead(jump), since_boot };
        }
        if by_record + STEP_MIN < carried {
            let event = ClockEvent::SetBack(carried.since(by_record));
            return Plan { record: ClockRecord { time: carried, ..next }, write: true, event, since_boot };
        }
        Plan { record: next, write: old, event: ClockEvent::Steady, since_boot }
    }

    /// Goes by a plan, once its record is written.
    pub fn follow(&self, plan: &Plan) {
        let state = State { record: plan.record, since_boot: plan.since_boot };
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    fn state(&self) -> State {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn at(&self, since_boot: Duration) -> Timestamp {
        let now = self.state().at(since_boot).0;
        Timestamp(self.latest_ms.fetch_max(now, Ordering::Relaxed).max(now))
    }
}

impl TimeSource for ServerClock {
    fn now(&self) -> Timestamp {
        self.at(since_boot())
    }

    fn slip(&self, at: Timestamp) -> Duration {
        let record = self.state().record;
        if at < record.steady_since { record.slip } else { Duration::ZERO }
    }

    fn steady_since(&self) -> Timestamp {
        self.state().record.steady_since
    }
}

impl ServerReading {
    /// A reading that was asked for at `asked` (time since boot) and has just been answered.
    pub fn answered(server: Timestamp, record: Option<ClockRecord>, asked: Duration) -> Self {
        let since_boot = since_boot();
        // The server read its clock somewhere between the question and the answer.
        let server = server + since_boot.saturating_sub(asked) / 2;
        Self { server, record, since_boot, wall: Timestamp::from(SystemTime::now()) }
    }
}

/// The store's time by the record, and by how much the server's clock has moved since.
fn by_record(record: &ClockRecord, reading: &ServerReading) -> Timestamp {
    Timestamp(record.time.0.saturating_add(reading.server.0.saturating_sub(record.server.0)))
}

/// The record with the clocks of this reading.
fn renewed(record: &ClockRecord, reading: &ServerReading) -> ClockRecord {
    ClockRecord { server: reading.server, wall: reading.wall, ..*record }
}

/// The record of a clock that is steady only from now on.
fn jumped(next: &ClockRecord, before: &ClockRecord, slip: Duration) -> ClockRecord {
    let earlier = if next.time.since(before.steady_since) < SLIP_MEMORY { before.slip } else { Duration::ZERO };
    ClockRecord { steady_since: next.time, slip: earlier + slip, ..*next }
}

#[cfg(test)]
mod tests;
