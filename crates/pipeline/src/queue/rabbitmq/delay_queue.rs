//! Chooses the queue in which a delayed message waits. RabbitMQ has no delays, but it has queues with a message TTL: one
//! queue for each delay, which dead-letters to the main queue. Pure.
//!
//! Delays are rounded up to one of eight steps per doubling, so that few queues serve all delays. No delay ends early, and
//! none ends more than an eighth (or 10 ms) late.
//!
//! Unused delay queues must expire, but an expiring queue loses its messages, and queue types differ in what counts as
//! use. So each queue is used for one period only, which is part of its name, and expires after the last message that can
//! have been published to it.

use std::time::Duration;

/// The longest delay of one queue; a longer delay takes several steps. The broker's timers end at 49 days, and a queue
/// lives for more than twice its delay.
pub(super) const DELAY_MAX: Duration = Duration::from_secs(20 * 24 * 3600);
/// A queue is used for at least this long before the next one replaces it.
const PERIOD_MIN_MS: u64 = 3600 * 1000;
/// Allowance for the clock difference between processes and for the duration of a publish.
const SLACK_MS: u64 = 3600 * 1000;
const STEP_MIN_MS: u64 = 10;

/// A queue with a fixed message TTL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DelayQueue {
    pub(super) name: String,
    pub(super) ttl_ms: u64,
    /// The broker deletes the queue this long after its declaration.
    pub(super) expires_ms: u64,
}

/// The queue for a message of `main` with this delay, and the number of further steps of [`DELAY_MAX`] after it.
pub(super) fn delay_queue(main: &str, delay: Duration, now_ms: u64) -> (DelayQueue, u32) {
    let (first, hops) = split(delay, DELAY_MAX);
    let ttl_ms = rounded_up(first);
    let period_ms = ttl_ms.max(PERIOD_MIN_MS);
    let name = format!("{main}.delay.{ttl_ms}ms.{}", now_ms / period_ms);
    (DelayQueue { name, ttl_ms, expires_ms: ttl_ms + period_ms + SLACK_MS }, hops)
}

/// Splits a delay into a first step of up to `longest` and a number of further steps of `longest`.
pub(super) fn split(delay: Duration, longest: Duration) -> (Duration, u32) {
    let longest_ms = longest.as_millis().max(1);
    let hops = delay.as_millis().div_ceil(longest_ms).saturating_sub(1);
    let hops = u32::try_from(hops).unwrap_or(u32::MAX);
    (delay.saturating_sub(longest.saturating_mul(hops)).min(longest), hops)
}

fn rounded_up(delay: Duration) -> u64 {
    let ms = u64::try_from(delay.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX).max(1);
    let step = (1 << ms.ilog2().saturating_sub(3)).max(STEP_MIN_MS);
    ms.div_ceil(step) * step
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_delay_ends_early_or_more_than_an_eighth_late() {
        let mut delay = Duration::from_micros(1);
        while delay < DELAY_MAX {
            let ttl = Duration::from_millis(rounded_up(delay));
            assert!(ttl >= delay, "{delay:?} ends after {ttl:?}");
            assert!(ttl <= delay + (delay / 8).max(Duration::from_millis(11)), "{delay:?} ends after {ttl:?}");
            delay = delay * 21 / 20 + Duration::from_nanos(77);
        }
    }

    #[test]
    fn few_queues_serve_all_delays() {
        let ttls: std::collections::BTreeSet<_> =
            (1..600_000).map(|ms| rounded_up(Duration::from_millis(ms))).collect();
        assert!(ttls.len() <= 8 * 16, "{}", ttls.len());
    }

    #[test]
    fn a_queue_outlives_the_last_message_published_to_it() {
        for ms in [1, 300, 60_000, 3_600_001, 86_400_000, 1_728_000_000] {
            let delay = Duration::from_millis(ms);
            let (queue, _) = delay_queue("q", delay, 0);
            // Declared as early and used as late as its name allows.
            let mut last_used = 0;
            for step in 0..100 {
                let now = step * (queue.ttl_ms.max(PERIOD_MIN_MS) / 50);
                if delay_queue("q", delay, now).0.name == queue.name {
                    last_used = now;
                }
            }
            assert!(queue.expires_ms >= last_used + queue.ttl_ms + SLACK_MS, "{queue:?}, used at {last_used}");
            assert!(queue.expires_ms <= u64::from(u32::MAX), "{queue:?}");
        }
    }

    #[test]
    fn a_delay_beyond_the_longest_takes_several_steps() {
        let day = Duration::from_secs(24 * 3600);
        let (queue, hops) = delay_queue("q", day * 45, 0);
        assert_eq!(hops, 2);
        assert!(u128::from(queue.ttl_ms) >= (day * 5).as_millis());
        assert_eq!(split(day, day), (day, 0));
        assert_eq!(split(day + Duration::from_millis(1), day).1, 1);
        let (first, hops) = split(Duration::MAX, day);
        assert!(first <= day && hops == u32::MAX);
    }
}
