//! Decides which relayer takes the next transaction and which are skipped: loads, breakers, jams and rates (pure; time is
//! an argument).
//!
//! Load = the larger of the pending count that the relayer reports and its open rows in the store, plus what this process has
//! sent since, so that traffic spreads evenly between two readings, whether or not the relayer answers.
//! [`crate::relay::relayer::pool`] feeds this and acts on it.

use std::fmt;
use std::time::{Duration, Instant};

use super::jam::JamCause;
use super::network::{Fit, WrongNetwork};
use super::relayer_state::{Breaker, Bucket, Health, Relayer};
use crate::config::RoutingSettings;
use crate::relay::state::transaction::RelayerUrl;

/// All relayers as this process sees them.
#[derive(Debug)]
pub struct Router {
    pub(super) settings: RoutingSettings,
    pub(super) relayers: Vec<Relayer>,
    /// The budget of status lookups, which ask every relayer.
    lookups: Bucket,
    /// Where the next selection starts, so that ties rotate.
    turn: usize,
    /// The chain id that relayers must have.
    pub(super) expected_chain_id: Option<u64>,
    /// Whether the chain's counts decide about jams.
    pub(super) with_chain: bool,
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
    /// It makes no progress: see [`JamCause`].
    Jammed,
    /// It is on another network than the others.
    WrongNetwork,
    /// A chain id is expected, and the relayer's is not known yet.
    NetworkUnchecked,
    /// It signs with the same key as another configured relayer.
    SharedKey,
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
            Self::WrongNetwork => "wrong network",
            Self::NetworkUnchecked => "network unchecked",
            Self::SharedKey => "shared key",
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

/// A relayer that gets no work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped {
    /// The configured URL.
    pub url: RelayerUrl,
    /// The kind of reason.
    pub reason: Reason,
    /// What to look at, for people, where the reason alone does not say it.
    pub detail: Option<String>,
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.url, self.reason.name())?;
        self.detail.as_ref().map_or(Ok(()), |detail| write!(f, " ({detail})"))
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
    Unavailable(Vec<Skipped>),
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

/// One relayer, as shown in health and metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelayerView {
    /// The configured URL.
    pub url: RelayerUrl,
    /// Reported or counted transactions, plus those sent since.
    pub load: u64,
    /// The load at which it is full.
    pub cap: u64,
    /// Requests in flight from this process.
    pub open_requests: u32,
    /// `closed`, `open` or `half-open`.
    pub breaker: &'static str,
    /// Why it is skipped; none if it takes work.
    pub skipped: Option<Reason>,
    /// Whether its health is known.
    pub known: bool,
    /// Why its health check failed, if the last one did.
    pub trouble: Option<String>,
    /// Why it is jammed.
    pub jam: Option<JamCause>,
    /// Its network, if that is the wrong one.
    pub wrong_network: Option<WrongNetwork>,
    /// The relayer that signs with the same key, if this one gets no work for it.
    pub shares_key_with: Option<RelayerUrl>,
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
        let relayers = urls.into_iter().map(|url| Relayer::new(url, burst, now)).collect();
        let lookups = Bucket { tokens: f64::from(settings.lookups_per_second()) * 2.0, filled_at: now };
        Self { settings, relayers, lookups, turn: 0, expected_chain_id: None, with_chain: false }
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
                reasons.push((index, reason));
                continue;
            }
            // A relayer of known health comes before one of unknown health, whatever the loads.
            let candidate = (!relayer.is_known(), relayer.load(), index);
            if best.is_none_or(|best| (candidate.0, candidate.1) < (best.0, best.1)) {
                best = Some(candidate);
            }
        }
        match best {
            Some((unknown, load, index)) => {
                self.turn = (index + 1) % count;
                self.count_send(index, now);
                let known = if unknown { ", no health is known" } else { "" };
                let because = format!("least busy of {} able, {load} in flight{known}", count - reasons.len());
                Ok(Choice { index, because })
            }
            None if reasons.iter().any(|(_, reason)| reason.is_brief()) => Err(NoChoice::Wait(BRIEF_WAIT)),
            None => Err(NoChoice::Unavailable(self.explain(&reasons))),
        }
    }

    /// Whether any relayer can take work now or within milliseconds; if not, the reason of each.
    pub fn availability(&self, now: Instant) -> Result<(), Vec<Skipped>> {
        let mut reasons = Vec::new();
        for index in 0..self.relayers.len() {
            match self.skipped(index, &[], now) {
                None => return Ok(()),
                Some(reason) if reason.is_brief() => return Ok(()),
                Some(reason) => reasons.push((index, reason)),
            }
        }
        Err(self.explain(&reasons))
    }

    fn explain(&self, reasons: &[(usize, Reason)]) -> Vec<Skipped> {
        let skipped = |(index, reason): &(usize, Reason)| {
            let relayer = &self.relayers[*index];
            let detail = match reason {
                Reason::Unreachable => relayer.trouble.clone(),
                Reason::Jammed => relayer.jam().map(|cause| cause.to_string()),
                Reason::WrongNetwork => relayer.fit.wrong().map(ToString::to_string),
                Reason::SharedKey => self.shares_key_with(*index).map(|other| format!("with {other}")),
                _ => None,
            };
            Skipped { url: relayer.url.clone(), reason: *reason, detail }
        };
        reasons.iter().map(skipped).collect()
    }

    fn skipped(&self, index: usize, tried: &[RelayerUrl], now: Instant) -> Option<Reason> {
        let relayer = &self.relayers[index];
        if tried.contains(&relayer.url) {
            return Some(Reason::Tried);
        }
        if matches!(relayer.fit, Fit::Wrong(_)) {
            return Some(Reason::WrongNetwork);
        }
        if self.shares_key_with(index).is_some() {
            return Some(Reason::SharedKey);
        }
        if let Health::Down(reason) = relayer.health {
            return Some(reason);
        }
        if relayer.fit == Fit::Unchecked {
            return Some(Reason::NetworkUnchecked);
        }
        if relayer.figures.as_ref().is_some_and(|figures| figures.out_of_funds) {
            return Some(Reason::OutOfFunds);
        }
        if relayer.jam().is_some() {
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
        if self.is_full(index) {
            return Some(Reason::Full);
        }
        if let Some(rate) = self.settings.rate_per_second
            && relayer.bucket.level(rate, self.settings.burst(), now) < 1.0
        {
            return Some(Reason::RateLimited);
        }
        None
    }

    /// The relayer, configured earlier, that signs with the same key as this one. Both would use the same nonces, and the
    /// chain could not tell whose transaction it shows.
    fn shares_key_with(&self, index: usize) -> Option<&RelayerUrl> {
        let account = self.relayers[index].account.filter(|_| self.with_chain)?;
        let shares = |other: &&Relayer| other.account == Some(account) && !matches!(other.fit, Fit::Wrong(_));
        self.relayers[..index].iter().find(shares).map(|other| &other.url)
    }

    /// Whether any relayer has as much as it may hold.
    pub fn any_full(&self) -> bool {
        (0..self.relayers.len()).any(|index| self.is_full(index))
    }

    fn is_full(&self, index: usize) -> bool {
        let relayer = &self.relayers[index];
        match self.settings.in_flight_max {
            Some(max) => relayer.load() >= max,
            None => relayer.held() >= relayer.cap.value(),
        }
    }

    fn cap(&self, index: usize) -> u64 {
        self.settings.in_flight_max.unwrap_or_else(|| self.relayers[index].cap.value())
    }

    fn count_send(&mut self, index: usize, now: Instant) {
        let (rate, burst) = (self.settings.rate_per_second, self.settings.burst());
        let relayer = &mut self.relayers[index];
        relayer.sent += 1;
        relayer.unclaimed += 1;
        relayer.open_requests += 1;
        if let Breaker::Open { lasted, .. } = relayer.breaker {
            relayer.breaker = Breaker::Probing { lasted };
        }
        relayer.bucket.spend(rate, burst, now);
    }

    /// Learns that the claim of a selected send is stored, or never will be: the store's counts now show it if it exists.
    pub fn claimed(&mut self, index: usize) {
        let relayer = &mut self.relayers[index];
        relayer.unclaimed = relayer.unclaimed.saturating_sub(1);
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

    /// Counts a request other than a submission towards the rate limit.
    pub fn asked(&mut self, index: usize, now: Instant) {
        let (rate, burst) = (self.settings.rate_per_second, self.settings.burst());
        self.relayers[index].bucket.spend(rate, burst, now);
    }

    /// Takes a status lookup from the budget that all lookups share, and counts one question to every relayer. `false`:
    /// the budget is used up, and no relayer may be asked. Clients choose how often they look up ids that do not exist, so
    /// lookups must leave the larger part of every relayer's rate to submissions.
    pub fn look_up(&mut self, now: Instant) -> bool {
        let rate = self.settings.lookups_per_second();
        let burst = f64::from(rate) * 2.0;
        if self.lookups.level(rate, burst, now) < 1.0 {
            return false;
        }
        self.lookups.spend(Some(rate), burst, now);
        for index in 0..self.relayers.len() {
            self.asked(index, now);
        }
        true
    }

    /// All relayers, for health and metrics.
    pub fn view(&self, now: Instant) -> Vec<RelayerView> {
        let view = |index: usize| {
            let relayer = &self.relayers[index];
            RelayerView {
                url: relayer.url.clone(),
                load: relayer.load(),
                cap: self.cap(index),
                open_requests: relayer.open_requests,
                breaker: match relayer.breaker {
                    Breaker::Closed { .. } => "closed",
                    Breaker::Open { until, .. } if now < until => "open",
                    Breaker::Open { .. } | Breaker::Probing { .. } => "half-open",
                },
                skipped: self.skipped(index, &[], now),
                known: relayer.is_known(),
                trouble: relayer.trouble.clone(),
                jam: relayer.jam(),
                wrong_network: relayer.fit.wrong().cloned(),
                shares_key_with: self.shares_key_with(index).cloned(),
            }
        };
        (0..self.relayers.len()).map(view).collect()
    }
}

/// Pause before the next selection when every able relayer is full or rate limited.
const BRIEF_WAIT: Duration = Duration::from_millis(20);

/// Status lookups per second where the relayers' rate is not limited.
const LOOKUPS_PER_SECOND: u32 = 10;

impl RoutingSettings {
    /// Burst of two seconds; the real relayer allows three.
    fn burst(&self) -> f64 {
        f64::from(self.rate_per_second.unwrap_or(0)) * 2.0
    }

    /// Status lookups per second: a tenth of the rate of one relayer.
    fn lookups_per_second(&self) -> u32 {
        self.rate_per_second.map_or(LOOKUPS_PER_SECOND, |rate| (rate / 10).max(1))
    }
}

#[cfg(test)]
mod tests;
