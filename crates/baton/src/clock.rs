//! Time as a value: what the store's clock shows, how much of it has passed, and waiting for it to pass.
//!
//! Every process on the same data goes by one clock, its store's, so that times written by one mean the same to the
//! others. A [`Clock`] is handed to each part that needs the time; pure code takes `now` as an argument. The simulation
//! in `tests/simulation` passes a clock of its own.
//!
//! [`send_fence`] limits the time from a claim to its submission; [`server_clock`] follows a database server.

pub mod send_fence;
pub mod server_clock;

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use futures::future::{BoxFuture, Either, select};
use pipeline::sqlite::Clock as FileTime;

use crate::clock::send_fence::SendFence;
use crate::clock::server_clock::ServerClock;
use crate::timestamp::Timestamp;

/// A source of time.
pub trait TimeSource: Send + Sync + 'static {
    /// The time by the store's clock.
    fn now(&self) -> Timestamp;

    /// How much further `at` may be off from another machine's clock than the current time is: the store's clock may
    /// have been set anew since `at`.
    fn slip(&self, _at: Timestamp) -> Duration {
        Duration::ZERO
    }

    /// The store's clock has not jumped ahead since this time. Of two times on different sides of it, the later one does
    /// not prove how much time has passed since the earlier one.
    fn steady_since(&self) -> Timestamp {
        Timestamp(i64::MIN)
    }

    /// The steady clock of this machine, for durations and time limits. It stops while the machine is suspended.
    fn instant(&self) -> Instant {
        Instant::now()
    }

    /// Time since this machine started, while it was suspended included.
    fn since_boot(&self) -> Duration {
        since_boot()
    }

    /// This machine's wall clock, which may be set at any time.
    fn wall(&self) -> SystemTime {
        SystemTime::now()
    }

    /// Completes after `span` by the steady clock. Bypasses Tokio's coop budget: work that uses up its task's budget on each
    /// poll would otherwise never meet its time limit.
    fn sleep(&self, span: Duration) -> BoxFuture<'static, ()> {
        Box::pin(tokio::task::unconstrained(tokio::time::sleep(span)))
    }
}

/// The clock of this process. Clones show the same time.
#[derive(Clone)]
pub struct Clock(Arc<dyn TimeSource>);

/// A time limit passed before the work was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no answer in time")]
pub struct TimedOut;

impl Clock {
    /// Goes by any source of time.
    pub fn new(source: impl TimeSource) -> Self {
        Self(Arc::new(source))
    }

    /// Goes by this machine's wall clock.
    pub fn system() -> Self {
        Self::new(SystemClock)
    }

    /// Goes by the clock of the embedded engine's file: all processes on the file share it, and it does not jump.
    pub fn of_file(file: FileTime) -> Self {
        Self::new(FileClock(file))
    }

    /// Goes by a database server's clock; the owner of `server` keeps it correct.
    pub fn of_server(server: &Arc<ServerClock>) -> Self {
        Self(Arc::<ServerClock>::clone(server))
    }

    /// The time by the store's clock.
    pub fn now(&self) -> Timestamp {
        self.0.now()
    }

    /// See [`TimeSource::slip`].
    pub fn slip(&self, at: Timestamp) -> Duration {
        self.0.slip(at)
    }

    /// See [`TimeSource::steady_since`].
    pub fn steady_since(&self) -> Timestamp {
        self.0.steady_since()
    }

    /// Whether less than `span` may have passed from `at` to `by`, however far apart they look: the clock jumped ahead in
    /// between, and not `span` ago.
    pub fn jump_hides(&self, at: Timestamp, by: Timestamp, span: Duration) -> bool {
        let steady_since = self.steady_since();
        at < steady_since && by < steady_since + span
    }

    /// A fence that lets a request be sent within `window` from now.
    pub fn send_fence(&self, window: Duration) -> SendFence {
        SendFence::new(self.clone(), window)
    }

    /// See [`TimeSource::since_boot`].
    pub fn since_boot(&self) -> Duration {
        self.0.since_boot()
    }

    /// See [`TimeSource::wall`].
    pub fn wall(&self) -> SystemTime {
        self.0.wall()
    }

    /// Time that has certainly passed since `at`, whatever the clock did meanwhile.
    pub fn passed_since(&self, at: Timestamp) -> Duration {
        self.now().since(at.max(self.steady_since()))
    }

    /// The steady clock of this machine.
    pub fn instant(&self) -> Instant {
        self.0.instant()
    }

    /// Time passed since `earlier` by the steady clock.
    pub fn elapsed(&self, earlier: Instant) -> Duration {
        self.instant().saturating_duration_since(earlier)
    }

    /// Completes after `span`.
    pub async fn sleep(&self, span: Duration) {
        self.0.sleep(span).await;
    }

    /// The result of `work`, if it is there within `limit`. Work that is ready at once is never late.
    pub async fn timeout<T>(&self, limit: Duration, work: impl Future<Output = T>) -> Result<T, TimedOut> {
        match select(pin!(work), self.0.sleep(limit)).await {
            Either::Left((done, _)) => Ok(done),
            Either::Right(((), _)) => Err(TimedOut),
        }
    }

    /// [`Clock::timeout`] with a point in time as the limit.
    pub async fn timeout_at<T>(&self, limit: Instant, work: impl Future<Output = T>) -> Result<T, TimedOut> {
        self.timeout(limit.saturating_duration_since(self.instant()), work).await
    }
}

/// This machine's wall clock.
struct SystemClock;

impl TimeSource for SystemClock {
    fn now(&self) -> Timestamp {
        Timestamp::from(SystemTime::now())
    }
}

/// The clock of the embedded engine's file.
struct FileClock(FileTime);

impl TimeSource for FileClock {
    fn now(&self) -> Timestamp {
        Timestamp(self.0.now_ms())
    }

    fn slip(&self, at: Timestamp) -> Duration {
        self.0.slip_since(at.0)
    }

    fn steady_since(&self) -> Timestamp {
        Timestamp(self.0.since_ms())
    }
}

/// Time since the machine started; the steady clock stops while it is suspended, this one does not.
#[cfg(target_os = "linux")]
pub(crate) fn since_boot() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Other systems: the steady clock, since this process first asked.
#[cfg(not(target_os = "linux"))]
pub(crate) fn since_boot() -> Duration {
    static FIRST: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    FIRST.get_or_init(Instant::now).elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Jumped;

    impl TimeSource for Jumped {
        fn now(&self) -> Timestamp {
            Timestamp(9000)
        }

        fn steady_since(&self) -> Timestamp {
            Timestamp(8000)
        }
    }

    #[test]
    fn a_span_across_a_jump_is_counted_from_the_jump() {
        let (clock, span) = (Clock::new(Jumped), Duration::from_millis(500));
        assert!(clock.jump_hides(Timestamp(1000), Timestamp(8499), span));
        assert!(!clock.jump_hides(Timestamp(1000), Timestamp(8500), span));
        assert!(!clock.jump_hides(Timestamp(8000), Timestamp(8001), span), "both after the jump");
        assert!(!Clock::system().jump_hides(Timestamp(0), Timestamp(1), span), "a clock that never jumps");
    }

    #[tokio::test]
    async fn work_that_is_ready_is_not_late_even_without_time_left() {
        let clock = Clock::system();
        assert_eq!(clock.timeout(Duration::ZERO, std::future::ready(7)).await, Ok(7));
        assert_eq!(clock.timeout(Duration::ZERO, std::future::pending::<()>()).await, Err(TimedOut));
        let past = clock.instant();
        assert_eq!(clock.timeout_at(past, std::future::pending::<()>()).await, Err(TimedOut));
    }
}
