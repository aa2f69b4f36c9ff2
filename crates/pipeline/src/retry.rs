//! Delays between attempts, and their number. Pure: randomness enters as a number.

use std::time::Duration;

/// Exponential backoff over a limited number of attempts.
///
/// ```
/// use pipeline::RetryPolicy;
/// use std::time::Duration;
///
/// let policy = RetryPolicy { first_delay: Duration::from_secs(1), factor: 2.0, ..RetryPolicy::default() };
/// assert_eq!(policy.delay(1, 1.0), Duration::from_secs(1));
/// assert_eq!(policy.delay(3, 1.0), Duration::from_secs(4));
/// assert_eq!(policy.delay(3, 0.0), Duration::from_secs(2), "jitter removes up to half");
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RetryPolicy {
    /// Attempts in total, the first included. 3 by default.
    pub attempts_max: u32,
    /// The delay after the first attempt. 5 seconds by default.
    pub first_delay: Duration,
    /// Growth of the delay from one attempt to the next. 3 by default.
    pub factor: f64,
    /// Upper limit of a delay. 5 minutes by default.
    pub delay_max: Duration,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self { attempts_max: 3, first_delay: Duration::from_secs(5), factor: 3.0, delay_max: Duration::from_secs(300) }
    }
}

impl RetryPolicy {
    /// The delay after attempt number `attempt` (from 1) has failed. `jitter` spreads retries over time: 1 gives the full
    /// delay, 0 gives half of it.
    pub fn delay(&self, attempt: u32, jitter: f64) -> Duration {
        let exponent = i32::try_from(attempt.saturating_sub(1)).unwrap_or(i32::MAX);
        let whole = self.first_delay.as_secs_f64() * self.factor.powi(exponent);
        let capped = whole.min(self.delay_max.as_secs_f64()).max(0.0);
        Duration::try_from_secs_f64(capped * (0.5 + jitter.clamp(0.0, 1.0) / 2.0)).unwrap_or(self.delay_max)
    }

    /// Whether another attempt follows after number `attempt` has failed.
    pub fn allows_another(&self, attempt: u32) -> bool {
        attempt < self.attempts_max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: RetryPolicy = RetryPolicy {
        attempts_max: 3,
        first_delay: Duration::from_millis(100),
        factor: 10.0,
        delay_max: Duration::from_secs(5),
    };

    #[test]
    fn delays_grow_by_the_factor_up_to_the_cap() {
        let delays: Vec<_> = (1..=4).map(|attempt| POLICY.delay(attempt, 1.0).as_millis()).collect();
        assert_eq!(delays, [100, 1_000, 5_000, 5_000]);
    }

    #[test]
    fn a_delay_beyond_the_number_range_is_capped() {
        assert_eq!(POLICY.delay(u32::MAX, 1.0), Duration::from_secs(5));
        assert_eq!(POLICY.delay(0, 1.0), Duration::from_millis(100));
        assert_eq!(POLICY.delay(2, f64::NAN), Duration::from_secs(5), "NaN gives the longest delay");
    }

    #[test]
    fn jitter_removes_up_to_half() {
        assert_eq!(POLICY.delay(1, 0.0), Duration::from_millis(50));
        assert_eq!(POLICY.delay(1, 0.5), Duration::from_millis(75));
        assert_eq!(POLICY.delay(1, 7.0), Duration::from_millis(100));
    }

    #[test]
    fn the_limit_counts_attempts_not_retries() {
        assert!(POLICY.allows_another(2));
        assert!(!POLICY.allows_another(3));
    }
}
