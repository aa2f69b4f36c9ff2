//! Decides which relayer takes the next transaction and which are skipped: loads, breakers, jams and rates (pure; time is
//! an argument).
//!
//! Load = the pending count of the last report + the transactions that this process has sent since it requested that
//! report, so that traffic spreads evenly between two reports. [`crate::relay::relayer::pool`] feeds this and acts on it.

use std::time::{Duration, Instant};

use alloy_primitives::U256;

use super::relayer_state::{Breaker, Bucket, Health, Jam, Relayer};
use crate::config::RoutingSettings;
use crate::relay::relayer::wire::ListedState;
use crate::relay::state::transaction::RelayerUrl;

/// All relayers as this process sees them.
#[derive(Debug)]
pub struct Router {
    settings: RoutingSettings,
    relayers: Vec<Relayer>,
    /// Where the next selection starts, so that ties rotate.
    turn: usize,
}

/// Why a relayer is skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// An operator paused it.
    Paused,
    /// It disabled itself.
    Disabled,
    /// Its balance is below the minimum.
    OutOfFunds,
    /// Its health check failed.
    Unreachable,
    /// Its breaker is open.
    BreakerOpen,
    /// Its pending count rises and nothing confirms.
    Jammed,
    /// It has the maximum number of transactions in flight.
    Full,
    /// Its rate limit is used up.
    RateLimited,
    /// This transaction was tried there already.
    Tried,
}

impl Reason {
    /// The name in metrics, health and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Paused => "paused",
            Self::Disabled => "disabled",
            Self::OutOfFunds => "out of funds",
            Self::Unreachable => "unreachable",
            Self::BreakerOpen => "breaker open",
            Self::Jammed => "jammed",
            Self::Full => "full",
            Self::RateLimited => "rate limited",
            Self::Tried => "already tried",
        }
    }

    /// Whether it ends within milliseconds, so that waiting is better than returning the message.
    fn is_brief(self) -> bool {
        matches!(self, Self::Full | Self::RateLimited)
    }
}

/// The selected relayer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Position in the pool.
    pub index: usize,
    /// The reason, for the timeline.
    pub because: String,
}

/// Why no relayer was selected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoChoice {
    /// Ask again after this long: every able relayer is full or rate limited.
    Wait(Duration),
    /// No relayer is able; each with its reason.
    Unavailable(Vec<(RelayerUrl, Reason)>),
}

/// What the result of a request says about the relayer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// It accepted the transaction.
    Taken,
    /// It refused the item.
    Refused,
    /// It is paused or disabled.
    Closed,
    /// It asks for a pause.
    Busy(Duration),
    /// It failed and certainly took nothing.
    Failed,
    /// It failed and may have taken the transaction.
    Unknown,
    /// The request was not sent.
    NotSent,
}

/// A health report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthReport {
    /// Whether it takes work.
    pub state: ListedState,
    /// Its pending count, if reported.
    pub pending: Option<u64>,
    /// Its balance in wei, if reported.
    pub balance: Option<U256>,
    /// The time of its last confirmation, if reported.
    pub last_confirmed: Option<String>,
}

/// One relayer, as shown in health and metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelayerView {
    /// The configured URL.
    pub url: RelayerUrl,
    /// Reported pending count plus transactions sent since.
    pub load: u64,
    /// Requests in flight from this process.
    pub open_requests: u32,
    /// `closed`, `open` or `half-open`.
    pub breaker: &'static str,
    /// Why it is skipped; none if it takes work.
    pub skipped: Option<Reason>,
    /// Whether its health is known.
    pub known: bool,
}

impl RelayerView {
    /// Whether it takes work now or within milliseconds.
    pub fn is_able(&self) -> bool {
        self.skipped.is_none_or(Reason::is_brief)
    }
}

impl Router {
    /// A router over relayers of unknown health.
    pub fn new(urls: Vec<RelayerUrl>, settings: RoutingSettings, now: Instant) -> Self {
        let burst = settings.burst();
        let relayers = urls
            .into_iter()
            .map(|url| Relayer {
                url,
                health: Health::Unknown,
                reported: 0,
                sent_at_report: 0,
                sent: 0,
                open_requests: 0,
                breaker: Breaker::Closed { failures: 0 },
                jam: Jam::default(),
                bucket: Bucket { tokens: burst, filled_at: now },
                busy_until: None,
            })
            .collect();
        Self { settings, relayers, turn: 0 }
    }

    /// Chooses the least busy able relayer that is not in `tried`, and counts the send.
    pub fn select(&mut self, tried: &[RelayerUrl], now: Instant) -> Result<Choice, NoChoice> {
        let count = self.relayers.len();
        let mut reasons = Vec::with_capacity(count);
        let mut best: Option<(bool, u64, usize)> = None;
        // Starting at `turn` rotates ties.
        for offset in 0..count {
            let index = (self.turn + offset) % count;
            let relayer = &self.relayers[index];
            if let Some(reason) = self.skipped(index, tried, now) {
                reasons.push((relayer.url.clone(), reason));
                continue;
            }
            // A relayer of known health comes before one of unknown health, whatever the loads; relayers of unknown
            // health take turns.
            let known = matches!(relayer.health, Health::Up(_));
            let candidate = (!known, if known { relayer.load() } else { 0 }, index);
            if best.is_none_or(|best| (candidate.0, candidate.1) < (best.0, best.1)) {
                best = Some(candidate);
            }
        }
        match best {
            Some((unknown, load, index)) => {
                self.turn = (index + 1) % count;
                self.count_send(index, now);
                let because = if unknown {
                    "next in turn, no health is known".to_owned()
                } else {
                    format!("least busy of {} able, {load} in flight", count - reasons.len())
                };
                Ok(Choice { index, because })
            }
            None if reasons.iter().any(|(_, reason)| reason.is_brief()) => Err(NoChoice::Wait(BRIEF_WAIT)),
            None => Err(NoChoice::Unavailable(reasons)),
        }
    }

    /// Whether any relayer can take work now or within milliseconds; if not, the reason of each.
    pub fn availability(&self, now: Instant) -> Result<(), Vec<(RelayerUrl, Reason)>> {
        let mut reasons = Vec::new();
        for index in 0..self.relayers.len() {
            match self.skipped(index, &[], now) {
                None => return Ok(()),
                Some(reason) if reason.is_brief() => return Ok(()),
                Some(reason) => reasons.push((self.relayers[index].url.clone(), reason)),
            }
        }
        Err(reasons)
    }

    fn skipped(&self, index: usize, tried: &[RelayerUrl], now: Instant) -> Option<Reason> {
        let relayer = &self.relayers[index];
        if tried.contains(&relayer.url) {
            return Some(Reason::Tried);
        }
        if let Health::Down(reason) = relayer.health {
            return Some(reason);
        }
        if relayer.jam.jammed {
            return Some(Reason::Jammed);
        }
        match relayer.breaker {
            Breaker::Open { until, .. } if now < until => return Some(Reason::BreakerOpen),
            Breaker::Probing { .. } => return Some(Reason::BreakerOpen),
            _ => {}
        }
        if relayer.busy_until.is_some_and(|until| now < until) {
            return Some(Reason::RateLimited);
        }
        if relayer.load() >= self.settings.in_flight_max {
            return Some(Reason::Full);
        }
        if let Some(rate) = self.settings.rate_per_second
            && relayer.bucket.level(rate, self.settings.burst(), now) < 1.0
        {
            return Some(Reason::RateLimited);
        }
        None
    }

    fn count_send(&mut self, index: usize, now: Instant) {
        let (rate, burst) = (self.settings.rate_per_second, self.settings.burst());
        let relayer = &mut self.relayers[index];
        relayer.sent += 1;
        relayer.open_requests += 1;
        if let Breaker::Open { lasted, .. } = relayer.breaker {
            relayer.breaker = Breaker::Probing { lasted };
        }
        relayer.bucket.spend(rate, burst, now);
    }

    /// Learns from an answer.
    pub fn answered(&mut self, index: usize, sent: Sent, now: Instant) {
        let settings = self.settings.clone();
        let relayer = &mut self.relayers[index];
        relayer.open_requests = relayer.open_requests.saturating_sub(1);
        if !matches!(sent, Sent::Taken | Sent::Unknown) {
            relayer.sent -= 1;
        }
        match sent {
            Sent::Taken | Sent::Refused => relayer.breaker = Breaker::Closed { failures: 0 },
            // Until the next health report.
            Sent::Closed => {
                relayer.health = Health::Down(Reason::Paused);
                relayer.breaker = Breaker::Closed { failures: 0 };
            }
            Sent::Busy(wait) => {
                relayer.busy_until = Some(now + wait);
                relayer.end_probe(now);
            }
            Sent::Failed | Sent::Unknown => relayer.failed(&settings, now),
            Sent::NotSent => relayer.end_probe(now),
        }
    }

    /// Marks the start of a health request; pass the mark to [`Router::reported`].
    pub fn asking(&self, index: usize) -> i64 {
        self.relayers[index].sent
    }

    /// Learns from a health report.
    pub fn reported(&mut self, index: usize, mark: i64, report: &HealthReport, now: Instant) {
        let (balance_min, jam_after) = (self.settings.balance_min, self.settings.jam_after);
        let relayer = &mut self.relayers[index];
        relayer.health = match report.state {
            ListedState::Paused => Health::Down(Reason::Paused),
            ListedState::Disabled => Health::Down(Reason::Disabled),
            ListedState::Active if report.balance.is_some_and(|balance| balance < balance_min) => {
                Health::Down(Reason::OutOfFunds)
            }
            ListedState::Active => Health::Up(now),
        };
        relayer.reported = report.pending.unwrap_or(0);
        relayer.sent_at_report = mark;
        if let Some(pending) = report.pending {
            relayer.jam.watch(pending, report.last_confirmed.as_deref(), jam_after, now);
        }
    }

    /// Learns that a health check failed. After a timeout the health is unknown, not down. Returns whether it changed.
    pub fn not_reported(&mut self, index: usize, only_slow: bool) -> bool {
        let relayer = &mut self.relayers[index];
        let before = relayer.health;
        relayer.health = if only_slow { Health::Unknown } else { Health::Down(Reason::Unreachable) };
        relayer.forget_report();
        relayer.health != before
    }

    /// Counts a request other than a submission towards the rate limit.
    pub fn asked(&mut self, index: usize, now: Instant) {
        let (rate, burst) = (self.settings.rate_per_second, self.settings.burst());
        self.relayers[index].bucket.spend(rate, burst, now);
    }

    /// Drops expired reports.
    pub fn age(&mut self, now: Instant) {
        let lifetime = self.settings.report_lifetime;
        for relayer in &mut self.relayers {
            if let Health::Up(at) = relayer.health
                && now.saturating_duration_since(at) > lifetime
            {
                relayer.health = Health::Unknown;
                relayer.forget_report();
            }
        }
    }

    /// All relayers, for health and metrics.
    pub fn view(&self, now: Instant) -> Vec<RelayerView> {
        let view = |index: usize| {
            let relayer = &self.relayers[index];
            RelayerView {
                url: relayer.url.clone(),
                load: relayer.load(),
                open_requests: relayer.open_requests,
                breaker: match relayer.breaker {
                    Breaker::Closed { .. } => "closed",
                    Breaker::Open { until, .. } if now < until => "open",
                    Breaker::Open { .. } | Breaker::Probing { .. } => "half-open",
                },
                skipped: self.skipped(index, &[], now),
                known: matches!(relayer.health, Health::Up(_)),
            }
        };
        (0..self.relayers.len()).map(view).collect()
    }
}

/// Pause before the next selection when every able relayer is full or rate limited.
const BRIEF_WAIT: Duration = Duration::from_millis(20);

impl RoutingSettings {
    /// Burst of two seconds; the real relayer allows three.
    fn burst(&self) -> f64 {
        f64::from(self.rate_per_second.unwrap_or(0)) * 2.0
    }
}

#[cfg(test)]
mod tests;
