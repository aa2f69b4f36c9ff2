//! What the router knows of one relayer: health, load, circuit breaker, jam detection and rate limit (pure). Whether the
//! relayer is skipped is decided in [`super::selection`].

use std::time::{Duration, Instant};

use super::selection::Reason;
use crate::config::RoutingSettings;
use crate::relay::state::transaction::RelayerUrl;

/// One relayer, as this process sees it.
#[derive(Debug)]
pub(super) struct Relayer {
    pub(super) url: RelayerUrl,
    pub(super) health: Health,
    /// Its last reported pending count, and our count of sends when that report was requested.
    pub(super) reported: u64,
    pub(super) sent_at_report: i64,
    pub(super) sent: i64,
    /// Requests in flight from this process.
    pub(super) open_requests: u32,
    pub(super) breaker: Breaker,
    pub(super) jam: Jam,
    pub(super) bucket: Bucket,
    pub(super) busy_until: Option<Instant>,
}

/// Health of a relayer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Health {
    /// No recent report.
    Unknown,
    /// It answered and takes work, at that time.
    Up(Instant),
    /// It takes no work, for this reason.
    Down(Reason),
}

/// The circuit breaker of one relayer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Breaker {
    Closed {
        failures: u32,
    },
    Open {
        until: Instant,
        lasted: Duration,
    },
    /// Half-open: one transaction is let through as a probe.
    Probing {
        lasted: Duration,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Jam {
    pub(super) watch: Option<JamWatch>,
    pub(super) last_pending: u64,
    pub(super) last_confirmed: Option<String>,
    pub(super) jammed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct JamWatch {
    since: Instant,
    pending: u64,
}

/// A token bucket that holds the tokens of two seconds.
#[derive(Debug)]
pub(super) struct Bucket {
    pub(super) tokens: f64,
    pub(super) filled_at: Instant,
}

impl Relayer {
    /// Reported pending transactions plus those sent since that report was requested.
    pub(super) fn load(&self) -> u64 {
        self.reported.saturating_add(u64::try_from(self.sent - self.sent_at_report).unwrap_or(0))
    }

    /// Drops an old report: a count that is never renewed only grows, until the relayer looks full forever.
    pub(super) fn forget_report(&mut self) {
        self.reported = 0;
        self.sent_at_report = self.sent;
        self.jam = Jam::default();
    }

    pub(super) fn failed(&mut self, settings: &RoutingSettings, now: Instant) {
        let lasted = match self.breaker {
            Breaker::Closed { failures } if failures + 1 < settings.breaker_failures => {
                self.breaker = Breaker::Closed { failures: failures + 1 };
                return;
            }
            Breaker::Closed { .. } => settings.breaker_open,
            Breaker::Probing { lasted } => (lasted * 2).min(settings.breaker_open_max),
            // These requests were in flight when the breaker opened.
            Breaker::Open { .. } => return,
        };
        self.breaker = Breaker::Open { until: now + lasted, lasted };
    }

    /// Ends a probe without a result; the next one may go at once.
    pub(super) fn end_probe(&mut self, now: Instant) {
        if let Breaker::Probing { lasted } = self.breaker {
            self.breaker = Breaker::Open { until: now, lasted };
        }
    }
}

impl Jam {
    /// Learns a pending count: jammed if it rises for `jam_after` while nothing confirms.
    pub(super) fn watch(&mut self, pending: u64, confirmed: Option<&str>, jam_after: Duration, now: Instant) {
        let moves = pending == 0 || pending < self.last_pending || confirmed != self.last_confirmed.as_deref();
        self.last_pending = pending;
        self.last_confirmed = confirmed.map(str::to_owned);
        if moves {
            self.watch = (pending > 0).then_some(JamWatch { since: now, pending });
            self.jammed = false;
            return;
        }
        let watch = *self.watch.get_or_insert(JamWatch { since: now, pending });
        if pending > watch.pending && now.saturating_duration_since(watch.since) >= jam_after {
            self.jammed = true;
        }
    }
}

impl Bucket {
    /// Takes a token, possibly going into debt.
    pub(super) fn spend(&mut self, rate: Option<u32>, burst: f64, now: Instant) {
        if let Some(rate) = rate {
            self.tokens = self.level(rate, burst, now) - 1.0;
            self.filled_at = now;
        }
    }

    /// Tokens available now.
    pub(super) fn level(&self, rate: u32, burst: f64, now: Instant) -> f64 {
        let gained = now.saturating_duration_since(self.filled_at).as_secs_f64() * f64::from(rate);
        (self.tokens + gained).min(burst)
    }
}
