//! What the router knows of one relayer: health, load, circuit breaker and rate limit (pure). Whether the relayer is skipped
//! is decided in [`super::selection`].

use std::time::{Duration, Instant};

use alloy_primitives::Address;

use super::cap::Cap;
use super::jam::{JamCause, NonceWatch, PendingWatch};
use super::network::{Fit, Network};
use super::selection::Reason;
use crate::config::RoutingSettings;
use crate::relay::state::transaction::RelayerUrl;
use crate::relay::store::RelayerRows;

/// One relayer, as this process sees it.
#[derive(Debug)]
pub(super) struct Relayer {
    pub(super) url: RelayerUrl,
    /// By its list of relayers.
    pub(super) health: Health,
    /// Why its list was not read at the last look.
    pub(super) trouble: Option<String>,
    /// From its status, while they are fresh.
    pub(super) figures: Option<Figures>,
    /// Its status answers with errors: it is used after those whose status answers.
    pub(super) figures_fail: bool,
    /// From the store, while they are fresh.
    pub(super) rows: Option<CountedRows>,
    /// Sends of this process, without those that the relayer certainly did not take.
    pub(super) sent: i64,
    /// [`Relayer::sent`] when it was last known how many transactions the relayer has, or when that was forgotten.
    pub(super) sent_at_forget: i64,
    /// Sends whose claim is not stored yet.
    pub(super) unclaimed: u32,
    /// Requests in flight from this process.
    pub(super) open_requests: u32,
    pub(super) breaker: Breaker,
    pub(super) pending_watch: PendingWatch,
    pub(super) nonce_watch: NonceWatch,
    pub(super) cap: Cap,
    /// Its id and address, as last listed.
    pub(super) identity: Option<String>,
    /// The account that it signs with, as last listed.
    pub(super) account: Option<Address>,
    pub(super) network: Network,
    pub(super) fit: Fit,
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

/// What a relayer's status said.
#[derive(Debug)]
pub(super) struct Figures {
    pub(super) at: Instant,
    pub(super) pending: Option<u64>,
    /// [`Relayer::sent`] when the status was requested, without the requests that were open then.
    pub(super) sent_before: i64,
    pub(super) out_of_funds: bool,
    /// The nonce that it takes next.
    pub(super) nonce_next: Option<u64>,
}

/// A reading of the store.
#[derive(Debug)]
pub(super) struct CountedRows {
    pub(super) at: Instant,
    pub(super) rows: RelayerRows,
    /// [`Relayer::sent`] when the reading began, without the sends whose claim was not stored then.
    pub(super) sent_before: i64,
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

/// A token bucket that holds the tokens of two seconds.
#[derive(Debug)]
pub(super) struct Bucket {
    pub(super) tokens: f64,
    pub(super) filled_at: Instant,
}

impl Relayer {
    /// A relayer of unknown health.
    pub(super) fn new(url: RelayerUrl, burst: f64, now: Instant) -> Self {
        Self {
            url,
            health: Health::Unknown,
            trouble: None,
            figures: None,
            figures_fail: false,
            rows: None,
            sent: 0,
            sent_at_forget: 0,
            unclaimed: 0,
            open_requests: 0,
            breaker: Breaker::Closed { failures: 0 },
            pending_watch: PendingWatch::default(),
            nonce_watch: NonceWatch::default(),
            cap: Cap::default(),
            identity: None,
            account: None,
            network: Network::default(),
            fit: Fit::default(),
            bucket: Bucket { tokens: burst, filled_at: now },
            busy_until: None,
        }
    }

    /// The transactions that it has: the larger of what it reports and what the store counts, each plus what this process
    /// has sent since.
    pub(super) fn load(&self) -> u64 {
        let since = |before: i64| u64::try_from(self.sent - before).unwrap_or(0);
        let figures = self.figures.as_ref();
        let reported = figures.and_then(|figures| Some(figures.pending?.saturating_add(since(figures.sent_before))));
        let counted = self.rows.as_ref().map(|counted| counted.rows.open().saturating_add(since(counted.sent_before)));
        reported.max(counted).unwrap_or_else(|| since(self.sent_at_forget))
    }

    /// What counts towards a cap that adapts: rows that it may still have to sign, plus what this process has sent since.
    pub(super) fn held(&self) -> u64 {
        match &self.rows {
            Some(counted) => {
                let since = u64::try_from(self.sent - counted.sent_before).unwrap_or(0);
                counted.rows.recent_unsigned.saturating_add(since)
            }
            None => self.load(),
        }
    }

    /// While no count is known, what was sent long ago does not count: a load that is never renewed only grows, until the
    /// relayer looks full forever.
    pub(super) fn forget_sent(&mut self) {
        let known = self.rows.is_some() || self.figures.as_ref().is_some_and(|figures| figures.pending.is_some());
        if !known {
            self.sent_at_forget = self.sent - i64::from(self.open_requests);
        }
    }

    /// Whether its health is known in full.
    pub(super) fn is_known(&self) -> bool {
        matches!(self.health, Health::Up(_)) && !self.figures_fail
    }

    pub(super) fn jam(&self) -> Option<JamCause> {
        // Where the chain shows how far its transactions are, its own count adds nothing.
        let by_count = self.pending_watch.jammed && !self.nonce_watch.knows_chain();
        self.nonce_watch.cause.or(by_count.then_some(JamCause::PendingRises))
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

impl Bucket {
    /// Takes a token, possibly going into debt. The debt never exceeds the burst, so that it is paid back within two
    /// seconds after the last question.
    pub(super) fn spend(&mut self, rate: Option<u32>, burst: f64, now: Instant) {
        if let Some(rate) = rate {
            self.tokens = (self.level(rate, burst, now) - 1.0).max(-burst);
            self.filled_at = now;
        }
    }

    /// Tokens available now.
    pub(super) fn level(&self, rate: u32, burst: f64, now: Instant) -> f64 {
        let gained = now.saturating_duration_since(self.filled_at).as_secs_f64() * f64::from(rate);
        (self.tokens + gained).min(burst)
    }
}
