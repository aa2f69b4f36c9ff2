//! Hosts that cannot be reached are left alone for a while (pure).
//!
//! A breaker opens after several attempts in a row that got no connection, whichever endpoints of the host they were for: a
//! host that is down then holds one place instead of one for each of its endpoints. After a pause, one attempt at a time
//! shows whether it is back; any connection closes the breaker. An endpoint that hangs says nothing about the others of its
//! host, so it does not count here.
//!
//! Each API key has its own breaker for a host: keys share no connections and no lookups of names.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// What an attempt shows of its host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum HostState {
    /// A connection was made.
    Reached,
    /// There was no connection: its name did not resolve, or TCP or TLS failed.
    Unreachable,
    /// Nothing: Baton did not try, or it is unknown how far the attempt came.
    #[default]
    Unclear,
}

/// Attempts in a row without a connection that open a breaker.
const FAILURES_BEFORE_OPEN: u32 = 5;
/// The first pause; they double.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// Without an attempt for this long, a breaker is forgotten.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// How many attempts a host may have in flight now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Allowed {
    /// As many as its other limits allow.
    All,
    /// One, which shows whether it is back.
    One,
    /// None during a pause.
    None,
}

/// The breakers of this process, by host and API key.
#[derive(Debug, Default)]
pub(super) struct HostBreakers(HashMap<String, Breaker>);

#[derive(Debug)]
struct Breaker {
    failures: u32,
    /// The end of the last pause, or the last failure if there was no pause yet.
    until: Instant,
}

impl HostBreakers {
    /// How many attempts this host may have in flight.
    pub fn allowed(&self, host: &str, now: Instant) -> Allowed {
        match self.0.get(host) {
            Some(breaker) if breaker.is_open() && now < breaker.until => Allowed::None,
            Some(breaker) if breaker.is_open() => Allowed::One,
            _ => Allowed::All,
        }
    }

    /// There was a connection. Returns whether this closed an open breaker.
    pub fn reached(&mut self, host: &str) -> bool {
        self.0.remove(host).is_some_and(|breaker| breaker.is_open())
    }

    /// There was no connection. Returns whether this opened the breaker.
    pub fn failed(&mut self, host: &str, now: Instant) -> bool {
        self.0.retain(|_, breaker| breaker.is_recent(now));
        let breaker = self.0.entry(host.to_owned()).or_insert(Breaker { failures: 0, until: now });
        // Attempts that were under way when it opened tell nothing new.
        if breaker.is_open() && now < breaker.until {
            return false;
        }
        breaker.failures = breaker.failures.saturating_add(1);
        breaker.until = now + breaker.pause();
        breaker.failures == FAILURES_BEFORE_OPEN
    }

    /// The number of open breakers.
    pub fn open_count(&self, now: Instant) -> usize {
        self.0.values().filter(|breaker| breaker.is_open() && breaker.is_recent(now)).count()
    }
}

impl Breaker {
    fn is_open(&self) -> bool {
        self.failures >= FAILURES_BEFORE_OPEN
    }

    fn is_recent(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.until) < FORGOTTEN_AFTER
    }

    fn pause(&self) -> Duration {
        let Some(doublings) = self.failures.checked_sub(FAILURES_BEFORE_OPEN) else { return Duration::ZERO };
        PAUSE_FIRST.saturating_mul(2u32.saturating_pow(doublings)).min(PAUSE_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: &str = "a:443 shop";

    fn after(breakers: &mut HostBreakers, failures: u32, now: Instant) -> Vec<bool> {
        (0..failures).map(|_| breakers.failed(HOST, now)).collect()
    }

    #[test]
    fn it_opens_once_after_failures_in_a_row() {
        let (mut breakers, now) = (HostBreakers::default(), Instant::now());
        assert_eq!(after(&mut breakers, 4, now), [false; 4]);
        assert_eq!(breakers.allowed(HOST, now), Allowed::All);
        assert!(!breakers.reached(HOST), "it was closed");
        assert_eq!(after(&mut breakers, 7, now), [false, false, false, false, true, false, false]);
        assert_eq!(breakers.allowed(HOST, now), Allowed::None);
        assert_eq!(breakers.allowed("a:443 other", now), Allowed::All);
        assert_eq!(breakers.open_count(now), 1);
        assert!(breakers.reached(HOST));
        assert_eq!((breakers.allowed(HOST, now), breakers.open_count(now)), (Allowed::All, 0));
    }

    #[test]
    fn pauses_double_and_end_with_one_attempt_at_a_time() {
        let (mut breakers, mut now) = (HostBreakers::default(), Instant::now());
        after(&mut breakers, 5, now);
        for pause in [1, 2, 4, 8, 16, 30, 30] {
            let end = now + Duration::from_secs(pause);
            assert_eq!(breakers.allowed(HOST, end - Duration::from_millis(1)), Allowed::None);
            assert_eq!(breakers.allowed(HOST, end), Allowed::One);
            now = end;
            assert!(!breakers.failed(HOST, now), "it was open");
        }
    }

    #[test]
    fn what_failed_long_ago_is_forgotten() {
        let (mut breakers, now) = (HostBreakers::default(), Instant::now());
        after(&mut breakers, 4, now);
        let later = now + FORGOTTEN_AFTER;
        assert!(!breakers.failed(HOST, later), "the first of a new row");
        after(&mut breakers, 4, later);
        assert_eq!(breakers.open_count(later), 1);
        let idle = later + FORGOTTEN_AFTER + PAUSE_FIRST;
        assert_eq!(breakers.open_count(idle), 0, "its endpoints may be gone");
        breakers.failed("b:443 shop", idle);
        assert_eq!(breakers.0.len(), 1, "bounded by the hosts of the last attempts");
    }
}
