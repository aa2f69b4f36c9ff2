//! Which relayer takes the next transaction: loads, breakers, jams and rates (pure; time comes in as a value).
//!
//! Load = what the relayer last reported as pending + what this process has sent there since that report was asked
//! for, so that traffic spreads evenly between two reports. [`super::relayer::pool`] feeds this and acts on it.

use std::time::{Duration, Instant};

use alloy_primitives::U256;

use super::relayer::wire::ListedState;
use super::transaction::RelayerUrl;
pub use crate::config::RoutingSettings;

/// All relayers as this process sees them.
#[derive(Debug)]
pub struct Router {
    settings: RoutingSettings,
    relayers: Vec<Relayer>,
    /// Where the next tie is broken.
    turn: usize,
}

#[derive(Debug)]
struct Relayer {
    url: RelayerUrl,
    health: Health,
    /// What it reported as pending, and our own count of sends when that was asked for.
    reported: u64,
    sent_at_report: i64,
    sent: i64,
    /// Requests under way from this process.
    open_requests: u32,
    breaker: Breaker,
    jam: Jam,
    bucket: Bucket,
    busy_until: Option<Instant>,
}

/// What is known of a relayer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Health {
    /// Nothing, or nothing recent.
    Unknown,
    /// It answered, at that time.
    Up(Instant),
    /// It answered that it takes no work, or badly, or not at all.
    Down(Reason),
}

/// Why a relayer is passed over.
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
    /// It has as much in flight as it may.
    Full,
    /// It has had as many requests as it may for now.
    RateLimited,
    /// This transaction was already there.
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

    /// Whether it passes by itself within moments, so that waiting beats giving the message back.
    fn is_brief(self) -> bool {
        matches!(self, Self::Full | Self::RateLimited)
    }
}

/// The circuit breaker of one relayer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Breaker {
    Closed {
        failures: u32,
    },
    Open {
        until: Instant,
        lasted: Duration,
    },
    /// One transaction is let through to see.
    Probing {
        lasted: Duration,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Jam {
    watch: Option<JamWatch>,
    last_pending: u64,
    last_confirmed: Option<String>,
    jammed: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct JamWatch {
    since: Instant,
    pending: u64,
}

/// A token bucket that holds two seconds' worth.
#[derive(Debug)]
struct Bucket {
    tokens: f64,
    filled_at: Instant,
}

/// The choice made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Which one.
    pub index: usize,
    /// For the timeline.
    pub because: String,
}

/// No choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoChoice {
    /// Ask again after this long: every able relayer is full or rate limited.
    Wait(Duration),
    /// No relayer is able; each with its reason.
    Unavailable(Vec<(RelayerUrl, Reason)>),
}

/// What became of a request, as far as the relayer's own health goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sent {
    /// It answered sensibly and has the transaction.
    Taken,
    /// It answered sensibly and refused the item.
    Refused,
    /// It is paused or disabled.
    Closed,
    /// It asks for a pause.
    Busy(Duration),
    /// It failed; nothing was taken.
    Failed,
    /// It failed; it may have been taken.
    Unknown,
    /// We did not send it after all.
    NotSent,
}

/// A health report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthReport {
    /// Whether it takes work.
    pub state: ListedState,
    /// Its pending count, if it says.
    pub pending: Option<u64>,
    /// Its balance, if it says.
    pub balance: Option<U256>,
    /// The last time it confirmed anything, if it says.
    pub last_confirmed: Option<String>,
}

/// One relayer, for people and metrics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelayerView {
    /// Which one.
    pub url: RelayerUrl,
    /// Reported pending plus what we sent since.
    pub load: u64,
    /// Requests under way from this process.
    pub open_requests: u32,
    /// `closed`, `open` or `half-open`.
    pub breaker: &'static str,
    /// Why it gets no work; none: it does.
    pub passed_over: Option<Reason>,
    /// Whether its health is known.
    pub known: bool,
}

impl RelayerView {
    /// Whether it takes work, now or within moments.
    pub fn is_able(&self) -> bool {
        self.passed_over.is_none_or(Reason::is_brief)
    }
}

impl Router {
    /// A router over these relayers, of which nothing is known yet.
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
        // Going round from the turn makes the first of equals a different one each time.
        for offset in 0..count {
            let index = (self.turn + offset) % count;
            let relayer = &self.relayers[index];
            if let Some(reason) = self.passed_over(index, tried, now) {
                reasons.push((relayer.url.clone(), reason));
                continue;
            }
            // A relayer of known health comes before one of unknown health, whatever the loads; among the unknown
            // it is simply the next in turn.
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

    /// Whether any relayer could take work now or within moments; if not, why each cannot.
    pub fn availability(&self, now: Instant) -> Result<(), Vec<(RelayerUrl, Reason)>> {
        let mut reasons = Vec::new();
        for index in 0..self.relayers.len() {
            match self.passed_over(index, &[], now) {
                None => return Ok(()),
                Some(reason) if reason.is_brief() => return Ok(()),
                Some(reason) => reasons.push((self.relayers[index].url.clone(), reason)),
            }
        }
        Err(reasons)
    }

    fn passed_over(&self, index: usize, tried: &[RelayerUrl], now: Instant) -> Option<Reason> {
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
            // Believed until the next health report says otherwise.
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

    /// To be called when a health report is asked for; the mark goes to [`Router::reported`].
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

    /// Learns that a health check failed. A slow answer says nothing: the relayer becomes unknown, not down.
    /// Says whether that is news.
    pub fn not_reported(&mut self, index: usize, only_slow: bool) -> bool {
        let relayer = &mut self.relayers[index];
        let before = relayer.health;
        relayer.health = if only_slow { Health::Unknown } else { Health::Down(Reason::Unreachable) };
        relayer.forget_report();
        relayer.health != before
    }

    /// Counts a question that is not a submission towards what the relayer allows.
    pub fn asked(&mut self, index: usize, now: Instant) {
        let (rate, burst) = (self.settings.rate_per_second, self.settings.burst());
        self.relayers[index].bucket.spend(rate, burst, now);
    }

    /// Forgets reports that are too old to be believed.
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

    /// All relayers, for people and metrics.
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
                passed_over: self.passed_over(index, &[], now),
                known: matches!(relayer.health, Health::Up(_)),
            }
        };
        (0..self.relayers.len()).map(view).collect()
    }
}

/// How soon to ask again when every able relayer is full or rate limited.
const BRIEF_WAIT: Duration = Duration::from_millis(20);

impl RoutingSettings {
    /// Two seconds' worth of requests may go out at once after a quiet time; the real relayer allows three.
    fn burst(&self) -> f64 {
        f64::from(self.rate_per_second.unwrap_or(0)) * 2.0
    }
}

impl Relayer {
    fn load(&self) -> u64 {
        self.reported.saturating_add(u64::try_from(self.sent - self.sent_at_report).unwrap_or(0))
    }

    /// A count that is not renewed would only ever grow, until the relayer looked full for good.
    fn forget_report(&mut self) {
        self.reported = 0;
        self.sent_at_report = self.sent;
        self.jam = Jam::default();
    }

    fn failed(&mut self, settings: &RoutingSettings, now: Instant) {
        let lasted = match self.breaker {
            Breaker::Closed { failures } if failures + 1 < settings.breaker_failures => {
                self.breaker = Breaker::Closed { failures: failures + 1 };
                return;
            }
            Breaker::Closed { .. } => settings.breaker_open,
            Breaker::Probing { lasted } => (lasted * 2).min(settings.breaker_open_max),
            // Requests that were under way when it opened prove nothing new.
            Breaker::Open { .. } => return,
        };
        self.breaker = Breaker::Open { until: now + lasted, lasted };
    }

    /// A probe that proved nothing: the next one may go at once.
    fn end_probe(&mut self, now: Instant) {
        if let Breaker::Probing { lasted } = self.breaker {
            self.breaker = Breaker::Open { until: now, lasted };
        }
    }
}

impl Jam {
    fn watch(&mut self, pending: u64, confirmed: Option<&str>, jam_after: Duration, now: Instant) {
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
    fn spend(&mut self, rate: Option<u32>, burst: f64, now: Instant) {
        if let Some(rate) = rate {
            self.tokens = self.level(rate, burst, now) - 1.0;
            self.filled_at = now;
        }
    }

    fn level(&self, rate: u32, burst: f64, now: Instant) -> f64 {
        let gained = now.saturating_duration_since(self.filled_at).as_secs_f64() * f64::from(rate);
        (self.tokens + gained).min(burst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> RoutingSettings {
        RoutingSettings {
            in_flight_max: 1000,
            rate_per_second: None,
            balance_min: U256::from(1),
            breaker_failures: 3,
            breaker_open: Duration::from_secs(5),
            breaker_open_max: Duration::from_secs(60),
            jam_after: Duration::from_secs(120),
            report_lifetime: Duration::from_secs(30),
        }
    }

    fn router(count: usize, settings: RoutingSettings) -> (Router, Instant) {
        let now = Instant::now();
        let urls = (0..count).map(|index| RelayerUrl(format!("http://r{index}"))).collect();
        (Router::new(urls, settings, now), now)
    }

    fn report(pending: u64) -> HealthReport {
        let balance = Some(U256::from(1000));
        HealthReport { state: ListedState::Active, pending: Some(pending), balance, last_confirmed: None }
    }

    fn all_up(router: &mut Router, pending: &[u64], now: Instant) {
        for (index, pending) in pending.iter().enumerate() {
            router.reported(index, router.asking(index), &report(*pending), now);
        }
    }

    fn counts(router: &mut Router, sends: usize, now: Instant) -> Vec<usize> {
        let mut counts = vec![0; router.relayers.len()];
        for _ in 0..sends {
            let index = router.select(&[], now).unwrap().index;
            router.answered(index, Sent::Taken, now);
            counts[index] += 1;
        }
        counts
    }

    #[test]
    fn equal_relayers_share_equally_between_two_reports() {
        let (mut router, now) = router(3, RoutingSettings { in_flight_max: 10_000, ..settings() });
        all_up(&mut router, &[0, 0, 0], now);
        assert_eq!(counts(&mut router, 3000, now), [1000, 1000, 1000]);
    }

    #[test]
    fn the_least_busy_is_filled_up_first() {
        let (mut router, now) = router(3, settings());
        all_up(&mut router, &[10, 5, 10], now);
        assert_eq!(counts(&mut router, 5, now), [0, 5, 0]);
        assert_eq!(counts(&mut router, 3, now), [1, 1, 1]);
    }

    #[test]
    fn without_any_health_it_goes_round() {
        let (mut router, now) = router(3, settings());
        assert_eq!(counts(&mut router, 9, now), [3, 3, 3]);
    }

    #[test]
    fn known_health_comes_before_unknown() {
        let (mut router, now) = router(3, settings());
        router.reported(1, 0, &report(900), now);
        assert_eq!(counts(&mut router, 5, now), [0, 5, 0]);
        router.age(now + Duration::from_secs(31));
        let now = now + Duration::from_secs(31);
        assert_eq!(counts(&mut router, 3, now), [1, 1, 1]);
    }

    #[test]
    fn sends_during_a_report_are_not_lost_from_the_count() {
        let (mut router, now) = router(1, settings());
        let mark = router.asking(0);
        counts(&mut router, 4, now);
        router.reported(0, mark, &report(2), now);
        assert_eq!(router.view(now)[0].load, 6);
    }

    #[test]
    fn paused_disabled_and_poor_relayers_get_nothing() {
        let (mut router, now) = router(4, settings());
        all_up(&mut router, &[500, 0, 0, 0], now);
        router.reported(1, 0, &HealthReport { state: ListedState::Paused, ..report(0) }, now);
        router.reported(2, 0, &HealthReport { state: ListedState::Disabled, ..report(0) }, now);
        router.reported(3, 0, &HealthReport { balance: Some(U256::ZERO), ..report(0) }, now);
        assert_eq!(counts(&mut router, 10, now), [10, 0, 0, 0]);
        router.reported(0, 0, &HealthReport { state: ListedState::Paused, ..report(0) }, now);
        let Err(NoChoice::Unavailable(reasons)) = router.select(&[], now) else { panic!() };
        assert_eq!(reasons.len(), 4);
        assert!(router.availability(now).is_err());
        all_up(&mut router, &[0, 0, 0, 0], now);
        assert_eq!(counts(&mut router, 4, now), [1, 1, 1, 1]);
    }

    #[test]
    fn an_answer_that_it_is_paused_counts_at_once() {
        let (mut router, now) = router(2, settings());
        all_up(&mut router, &[0, 5], now);
        let index = router.select(&[], now).unwrap().index;
        router.answered(index, Sent::Closed, now);
        assert_eq!(counts(&mut router, 4, now), [0, 4]);
    }

    #[test]
    fn what_was_tried_is_not_tried_again() {
        let (mut router, now) = router(2, settings());
        all_up(&mut router, &[0, 0], now);
        let first = RelayerUrl("http://r0".into());
        assert_eq!(router.select(std::slice::from_ref(&first), now).unwrap().index, 1);
        let both = [first, RelayerUrl("http://r1".into())];
        assert!(matches!(router.select(&both, now), Err(NoChoice::Unavailable(_))));
    }

    #[test]
    fn the_breaker_opens_probes_and_closes() {
        let (mut router, now) = router(1, settings());
        all_up(&mut router, &[0], now);
        for _ in 0..3 {
            router.select(&[], now).unwrap();
            router.answered(0, Sent::Unknown, now);
        }
        assert_eq!(router.view(now)[0].breaker, "open");
        assert!(matches!(router.select(&[], now), Err(NoChoice::Unavailable(_))));
        let later = now + Duration::from_secs(5);
        router.select(&[], later).unwrap();
        assert!(router.select(&[], later).is_err(), "one probe at a time");
        router.answered(0, Sent::Failed, later);
        assert!(router.select(&[], later + Duration::from_secs(9)).is_err(), "twice as long after a failed probe");
        let probe = later + Duration::from_secs(10);
        router.select(&[], probe).unwrap();
        router.answered(0, Sent::Taken, probe);
        assert_eq!(router.view(probe)[0].breaker, "closed");
    }

    #[test]
    fn a_success_in_between_keeps_the_breaker_closed() {
        let (mut router, now) = router(1, settings());
        for _ in 0..10 {
            for sent in [Sent::Failed, Sent::Failed, Sent::Taken] {
                router.select(&[], now).unwrap();
                router.answered(0, sent, now);
            }
        }
        assert_eq!(router.view(now)[0].breaker, "closed");
    }

    #[test]
    fn a_full_relayer_is_waited_for() {
        let (mut router, now) = router(1, RoutingSettings { in_flight_max: 2, ..settings() });
        all_up(&mut router, &[0], now);
        counts(&mut router, 2, now);
        assert_eq!(router.select(&[], now), Err(NoChoice::Wait(BRIEF_WAIT)));
        assert!(router.availability(now).is_ok());
        all_up(&mut router, &[0], now);
        assert!(router.select(&[], now).is_ok());
    }

    #[test]
    fn a_relayer_whose_status_is_slow_does_not_fill_up_for_good() {
        let (mut router, now) = router(1, RoutingSettings { in_flight_max: 2, ..settings() });
        for _ in 0..10 {
            counts(&mut router, 2, now);
            assert!(router.select(&[], now).is_err());
            router.not_reported(0, true);
        }
        let uncounted = HealthReport { pending: None, ..report(0) };
        for _ in 0..10 {
            router.reported(0, router.asking(0), &uncounted, now);
            counts(&mut router, 2, now);
        }
    }

    #[test]
    fn no_more_than_the_rate_goes_out() {
        let (mut router, now) = router(1, RoutingSettings { rate_per_second: Some(100), ..settings() });
        all_up(&mut router, &[0], now);
        assert_eq!(counts(&mut router, 200, now), [200]);
        assert!(matches!(router.select(&[], now), Err(NoChoice::Wait(_))));
        assert_eq!(counts(&mut router, 50, now + Duration::from_millis(505)), [50]);
        assert!(router.select(&[], now + Duration::from_millis(505)).is_err());
    }

    #[test]
    fn a_429_pauses_one_relayer_and_is_no_failure() {
        let (mut router, now) = router(2, settings());
        all_up(&mut router, &[0, 1], now);
        assert_eq!(router.select(&[], now).unwrap().index, 0);
        router.answered(0, Sent::Busy(Duration::from_secs(1)), now);
        assert_eq!(counts(&mut router, 2, now), [0, 2]);
        assert_eq!(router.view(now)[0].breaker, "closed");
        assert_eq!(router.select(&[], now + Duration::from_secs(1)).unwrap().index, 0);
    }

    #[test]
    fn a_jammed_relayer_is_ejected_and_readmitted() {
        let (mut router, start) = router(2, settings());
        let at = |seconds| start + Duration::from_secs(seconds);
        for (seconds, pending) in [(0, 5), (60, 20), (130, 40)] {
            router.reported(0, router.asking(0), &report(pending), at(seconds));
            router.reported(1, router.asking(1), &report(900), at(seconds));
        }
        assert_eq!(router.view(at(130))[0].passed_over, Some(Reason::Jammed));
        assert_eq!(counts(&mut router, 3, at(130)), [0, 3]);
        router.reported(0, router.asking(0), &report(40), at(140));
        assert_eq!(router.view(at(140))[0].passed_over, Some(Reason::Jammed), "still nothing confirmed");
        router.reported(0, router.asking(0), &report(39), at(150));
        assert_eq!(router.view(at(150))[0].passed_over, None);
    }

    #[test]
    fn a_busy_relayer_that_confirms_is_not_jammed() {
        let (mut router, start) = router(1, settings());
        for minute in 0..10u64 {
            let mut news = report(10 + minute);
            news.last_confirmed = Some(format!("t{minute}"));
            router.reported(0, router.asking(0), &news, start + Duration::from_secs(60 * minute));
        }
        assert_eq!(router.view(start + Duration::from_secs(601))[0].passed_over, None);
    }
}
