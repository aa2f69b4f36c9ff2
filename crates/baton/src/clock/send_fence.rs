//! The send fence: a submission may be written only within a short time after its claim. A process that was stopped in
//! between must not send under an old claim, which another process may have settled meanwhile.
//!
//! A process can be stopped in three ways. A frozen process finds that the steady clock went on. After a suspend the
//! steady clock did not, but the time since boot did. A paused virtual machine may find neither changed, but a wall clock
//! that its host or a time server has put right.

use std::time::{Duration, SystemTime};

use super::Clock;

/// Longest difference between the time since boot and the wall clock over one send window.
const DISAGREEMENT_MAX: Duration = Duration::from_secs(1);

/// Lets a request be sent until it closes.
#[derive(Clone)]
pub struct SendFence {
    clock: Clock,
    since_boot: Duration,
    wall: SystemTime,
    window: Duration,
}

impl SendFence {
    pub(super) fn new(clock: Clock, window: Duration) -> Self {
        let (since_boot, wall) = (clock.since_boot(), clock.wall());
        Self { clock, since_boot, wall, window }
    }

    /// Why nothing may be sent any more; `None` while the fence is open.
    pub fn closed(&self) -> Option<&'static str> {
        let passed = self.clock.since_boot().saturating_sub(self.since_boot);
        if passed >= self.window {
            return Some("the claim is too old to send");
        }
        let disagreement = match self.clock.wall().duration_since(self.wall) {
            Ok(by_wall) => by_wall.abs_diff(passed),
            Err(back) => back.duration() + passed,
        };
        (disagreement > DISAGREEMENT_MAX)
            .then_some("the machine's clock jumped since the claim: it may have been paused")
    }

    /// When it closes at the latest, as time since boot.
    pub fn ends(&self) -> Duration {
        self.since_boot + self.window
    }
}

impl std::fmt::Debug for SendFence {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("SendFence").field("since_boot", &self.since_boot).field("window", &self.window).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};
    use std::time::UNIX_EPOCH;

    use super::*;
    use crate::clock::TimeSource;
    use crate::timestamp::Timestamp;

    /// A machine whose steady clock stands still: it was frozen, suspended or paused.
    #[derive(Clone)]
    struct Machine(Arc<Mutex<(Duration, SystemTime)>>);

    impl TimeSource for Machine {
        fn now(&self) -> Timestamp {
            Timestamp(0)
        }

        fn since_boot(&self) -> Duration {
            self.0.lock().unwrap().0
        }

        fn wall(&self) -> SystemTime {
            self.0.lock().unwrap().1
        }
    }

    const HOUR: i64 = 3_600_000;

    /// Whether the fence still lets a request through after its machine's clocks moved by this much.
    fn open_after(since_boot_ms: u64, wall_ms: i64) -> bool {
        let start = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        let machine = Machine(Arc::new(Mutex::new((Duration::from_secs(50), start))));
        let fence = Clock::new(machine.clone()).send_fence(Duration::from_secs(5));
        assert_eq!(fence.closed(), None);
        let wall = Duration::from_millis(wall_ms.unsigned_abs());
        let wall = if wall_ms < 0 { start - wall } else { start + wall };
        *machine.0.lock().unwrap() = (Duration::from_millis(50_000 + since_boot_ms), wall);
        fence.closed().is_none()
    }

    #[test]
    fn it_is_open_within_the_window() {
        assert!(open_after(4_999, 4_999));
        assert!(open_after(4_999, 4_000), "a wall clock that is being slewed");
        assert!(!open_after(5_000, 5_000));
    }

    #[test]
    fn nothing_is_sent_after_the_machine_was_suspended() {
        assert!(!open_after(3_600_000, HOUR));
        assert!(!open_after(3_600_000, 0), "even if the wall clock stood still too");
    }

    #[test]
    fn nothing_is_sent_after_a_virtual_machine_was_paused() {
        assert!(!open_after(3, HOUR));
        assert!(!open_after(3, 1_500));
    }

    #[test]
    fn nothing_is_sent_after_the_wall_clock_was_set_back() {
        assert!(!open_after(3, -HOUR));
    }
}
