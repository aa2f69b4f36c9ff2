//! How many transactions one relayer may hold, when `RELAYER_MAX_IN_FLIGHT` does not fix it (pure).
//!
//! A relayer fails what it has not signed within two minutes. So it may hold what it ends in two minutes, as the store
//! counts it: all consumers read the same counts and come to the same cap. See
//! `docs/adr/0011-the-cap-follows-what-a-relayer-finishes.md`.

use std::time::Duration;

use crate::relay::store::RelayerRows;
use crate::timestamp::Timestamp;

/// The cap before anything is known of the relayer.
const START: u64 = 64;
/// The cap never falls below this: a relayer with nothing to do could not show that it has recovered.
const FLOOR: u64 = 16;
/// The cap never rises above this.
const CEILING: u64 = 5_000;
/// A relayer falls behind when it has not signed a transaction for this long.
const SLOW: Duration = Duration::from_secs(30);

/// Rows that a relayer has had for longer do not count towards the cap: it has given them up, or has long signed them. Else a
/// few records that never end would fill it for good.
pub const OPEN_WITHIN: Duration = Duration::from_secs(600);
/// The time in which ended rows are counted.
pub const ENDED_WITHIN: Duration = Duration::from_secs(60);
/// The number of ended rows at which counting may stop: more do not raise the cap.
pub const ENDED_COUNT_MAX: u64 = CEILING;

/// The cap of one relayer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cap {
    value: u64,
    /// It fell behind and has not ended enough since.
    recovering: bool,
}

impl Default for Cap {
    fn default() -> Self {
        Self { value: START, recovering: false }
    }
}

impl Cap {
    pub(super) fn value(self) -> u64 {
        self.value
    }

    /// Follows a reading of the relayer's rows, in which [`OPEN_WITHIN`] and [`ENDED_WITHIN`] count as lately.
    #[must_use]
    pub(super) fn after(self, rows: &RelayerRows, now: Timestamp) -> Self {
        let slow = rows.oldest_unsigned.is_some_and(|since| now.since(since) > SLOW);
        if slow {
            return Self { value: rows.ended.clamp(FLOOR, CEILING), recovering: true };
        }
        let two_minutes = rows.ended * 2;
        // With little to do it ends little: that alone is no reason to lower the cap. After it fell behind, it has to show
        // that it ends what it gets, else the transactions that it gave up would be followed by as many at once.
        let recovering = self.recovering && two_minutes < START;
        let least = if recovering { FLOOR } else { START };
        Self { value: two_minutes.clamp(least, CEILING), recovering }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Timestamp = Timestamp(1_000_000);

    fn rows(ended: u64, oldest_unsigned_s: Option<u64>) -> RelayerRows {
        let oldest_unsigned = oldest_unsigned_s.map(|age| NOW - Duration::from_secs(age));
        RelayerRows { ended, oldest_unsigned, ..RelayerRows::default() }
    }

    fn cap_after(readings: &[(u64, Option<u64>)]) -> u64 {
        readings.iter().fold(Cap::default(), |cap, (ended, age)| cap.after(&rows(*ended, *age), NOW)).value()
    }

    #[test]
    fn a_relayer_may_hold_what_it_ends_in_two_minutes() {
        assert_eq!(Cap::default().value(), 64);
        assert_eq!(cap_after(&[(100, Some(5))]), 200);
        assert_eq!(cap_after(&[(100, None), (900, Some(30))]), 1_800);
        assert_eq!(cap_after(&[(1_000_000, None)]), 5_000);
    }

    #[test]
    fn little_traffic_does_not_lower_it() {
        assert_eq!(cap_after(&[(0, None)]), 64);
        assert_eq!(cap_after(&[(3, Some(2)), (0, None)]), 64);
    }

    #[test]
    fn a_row_unsigned_for_more_than_thirty_seconds_lowers_it_at_once() {
        assert_eq!(cap_after(&[(400, Some(30)), (400, Some(31))]), 400);
        assert_eq!(cap_after(&[(0, Some(31))]), 16);
    }

    #[test]
    fn a_relayer_that_gave_its_rows_up_starts_again_from_the_floor() {
        assert_eq!(cap_after(&[(0, Some(31)), (0, None)]), 16, "what it gave up is gone, and nothing has ended");
        assert_eq!(cap_after(&[(0, Some(31)), (12, None)]), 24);
        assert_eq!(cap_after(&[(0, Some(31)), (32, None), (0, None)]), 64, "it has recovered");
    }

    /// One that confirms within milliseconds is filled to its cap again at each reading.
    #[test]
    fn a_relayer_that_ends_everything_at_once_reaches_the_ceiling_within_ten_readings() {
        let (mut cap, mut ended, mut readings) = (Cap::default(), 0, 0);
        while cap.value() < CEILING {
            ended += cap.value();
            cap = cap.after(&rows(ended, Some(0)), NOW);
            readings += 1;
        }
        assert!(readings <= 10, "{readings}");
    }
}
