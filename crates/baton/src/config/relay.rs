//! The relay lane's settings.

use std::time::Duration;

use alloy_primitives::U256;
use reqwest::Url;

use super::vars::Vars;
use super::{ChainConfig, QueueEngine, RoutingSettings, Secret, Service, Timings};
use crate::evm::parse_amount;

/// The relay lane.
#[derive(Debug, Clone)]
pub struct RelayConfig {
    /// `OZ_RELAYER_URLS` with `OZ_RELAYER_API_KEY`: the relayers.
    pub relayers: Vec<(Url, Secret)>,
    /// `WEBHOOK_SIGNING_KEY`: what relayers sign webhooks with.
    pub webhook_key: Option<Secret>,
    /// `RELAY_MODE`: `fire-and-forget` or `confirm`.
    pub mode: RelayMode,
    /// `CONSUMER_CONCURRENCY`: how many messages are handled at once.
    pub concurrency: usize,
    /// `CONSUMER_DRAIN_TIMEOUT_MS`: how long a stopping consumer finishes what it has begun.
    pub drain_timeout: Duration,
    /// `CONSUMER_DEAD_AFTER_MS`: a consumer not heard of for so long has lost its claims.
    pub consumer_dead_after: Duration,
    /// `MAX_ATTEMPTS`: failures of an item before it is a dead letter.
    pub attempts_max: u32,
    /// `RETRY_FIRST_DELAY_MS`: the pause after the first failed attempt; doubles.
    pub retry_first_delay: Duration,
    /// `RETRY_DELAY_MAX_MS`: the longest such pause.
    pub retry_delay_max: Duration,
    /// `AUTO_REPLAY_DELAY_MS`: the pause before the one automatic replay that `retryOnFailure` asks for.
    pub auto_replay_delay: Duration,
    /// `QUEUE_LEASE_MS`: how long the queue leases a message; extended while it is handled.
    pub queue_lease: Duration,
    /// `QUEUE_RETENTION_MS`: how long the queue keeps a message.
    pub queue_retention: Duration,
    /// `QUEUE_MAX_RECEIVES`: deliveries after which the queue itself buries a message.
    pub queue_receives_max: u32,
    /// `RELAYER_HEALTH_INTERVAL_MS`: how often each relayer is asked about itself.
    pub health_interval: Duration,
    /// `RELAYER_HEALTH_TIMEOUT_MS`: how long it may take to answer that.
    pub health_timeout: Duration,
    /// `RELAYER_CLOCK_SKEW_MS`: how far a relayer's clock may differ from ours.
    pub relayer_clock_skew: Duration,
    /// `RELAYER_RETENTION_MS`: how long relayers remember a finished transaction.
    pub relayer_retention: Duration,
    /// `RECONCILE_INTERVAL_MS`: how often the reconciler sweeps.
    pub reconcile_interval: Duration,
    /// `RECONCILE_DEAD_LETTERS_MS`: how often it looks at the dead letters.
    pub dead_letters_every: Duration,
    /// The ages at which the reconciler looks at a row (`RECONCILE_*`, `RELAYER_SUBMIT_TIMEOUT_MS`).
    pub clocks: Timings,
    /// `RELAYER_*` and `BREAKER_*`: routing.
    pub routing: RoutingSettings,
    /// `RPC_*`, `CHAIN_ID`, `FORWARDER_*` and `RELAY_PREFLIGHT`: the chain, if it is asked anything.
    pub chain: Option<ChainConfig>,
}

/// How the lane ends a success: by webhook (`confirmed`) or by polling the relayer (`success`, with the result).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RelayMode {
    /// Submit and forget: webhooks report the final status.
    FireAndForget,
    /// Submit and poll the relayer until the status is final.
    Confirm,
}

/// The longest URL of a relayer that every store can keep with a transaction.
const RELAYER_URL_LENGTH_MAX: usize = 512;

impl Vars<'_> {
    pub(super) fn relay(&mut self, service: Service, queue: &QueueEngine) -> RelayConfig {
        let vars = self;
        let relayers = vars.relayers(service.has_relay());
        let webhook_key = vars.webhook_key(service.has_api() && service.has_relay());
        let submit_timeout = vars.millis("RELAYER_SUBMIT_TIMEOUT_MS");
        // What existing queues of the other engines are set to.
        let queue_lease = match (vars.text("QUEUE_LEASE_MS"), queue) {
            (None, QueueEngine::Sqs(_) | QueueEngine::RabbitMq { .. }) => Duration::from_secs(60),
            _ => vars.millis("QUEUE_LEASE_MS"),
        };
        // There, whoever reads them hides them from all others meanwhile.
        let dead_letters_every = match (vars.text("RECONCILE_DEAD_LETTERS_MS"), queue) {
            (None, QueueEngine::Sqs(_)) => Duration::from_secs(60),
            _ => vars.millis("RECONCILE_DEAD_LETTERS_MS"),
        };
        let health_interval = vars.millis("RELAYER_HEALTH_INTERVAL_MS");
        let config = RelayConfig {
            relayers,
            webhook_key,
            mode: vars.mode(),
            concurrency: vars.count("CONSUMER_CONCURRENCY"),
            drain_timeout: vars.millis("CONSUMER_DRAIN_TIMEOUT_MS"),
            consumer_dead_after: vars.millis("CONSUMER_DEAD_AFTER_MS"),
            attempts_max: vars.count("MAX_ATTEMPTS"),
            retry_first_delay: vars.millis("RETRY_FIRST_DELAY_MS"),
            retry_delay_max: vars.millis("RETRY_DELAY_MAX_MS"),
            auto_replay_delay: vars.millis("AUTO_REPLAY_DELAY_MS"),
            queue_lease,
            queue_retention: vars.millis("QUEUE_RETENTION_MS"),
            queue_receives_max: vars.count("QUEUE_MAX_RECEIVES"),
            health_interval,
            health_timeout: vars.millis("RELAYER_HEALTH_TIMEOUT_MS"),
            relayer_clock_skew: vars.millis("RELAYER_CLOCK_SKEW_MS"),
            relayer_retention: vars.millis("RELAYER_RETENTION_MS"),
            reconcile_interval: vars.millis("RECONCILE_INTERVAL_MS"),
            dead_letters_every,
            clocks: Timings {
                pending_check: vars.millis("RECONCILE_PENDING_MS"),
                claim_check: vars.millis("CONSUMER_DEAD_AFTER_MS"),
                submit_timeout,
                // Late enough for a slow store, early enough to leave the answer its time.
                send_window: (submit_timeout / 2).min(Duration::from_secs(5)),
                relayer_timeout: vars.millis("RELAYER_HANDLER_TIMEOUT_MS"),
                doubt_check: vars.millis("RECONCILE_UNKNOWN_MS"),
                absence_confirm: vars.millis("RECONCILE_ABSENT_MS"),
                submitted_check: vars.millis("RECONCILE_SUBMITTED_MS"),
                submitted_check_max: vars.millis("RECONCILE_SUBMITTED_MAX_MS"),
            },
            routing: RoutingSettings {
                in_flight_max: vars.count("RELAYER_MAX_IN_FLIGHT"),
                rate_per_second: Some(vars.rate()).filter(|rate| *rate > 0),
                balance_min: vars.balance_min(),
                breaker_failures: vars.count("BREAKER_FAILURES"),
                breaker_open: vars.millis("BREAKER_OPEN_MS"),
                breaker_open_max: vars.millis("BREAKER_OPEN_MAX_MS"),
                jam_after: vars.millis("RELAYER_JAM_AFTER_MS"),
                report_lifetime: health_interval * 3,
            },
            chain: vars.chain(),
        };
        if config.routing.breaker_open > config.routing.breaker_open_max {
            vars.problem("BREAKER_OPEN_MAX_MS", "is less than BREAKER_OPEN_MS");
        }
        if config.retry_first_delay > config.retry_delay_max {
            vars.problem("RETRY_DELAY_MAX_MS", "is less than RETRY_FIRST_DELAY_MS");
        }
        config
    }

    fn rate(&mut self) -> u32 {
        self.parsed("RELAYER_RATE_PER_SECOND", 100, "a whole number; 0 means no limit")
    }

    fn balance_min(&mut self) -> U256 {
        let name = "RELAYER_MIN_BALANCE_WEI";
        match self.text(name).map(|text| parse_amount(&text)) {
            None => U256::from(1),
            Some(Some(amount)) => amount,
            Some(None) => {
                self.problem(name, "must be a whole number of wei");
                U256::ZERO
            }
        }
    }

    fn mode(&mut self) -> RelayMode {
        match self.text("RELAY_MODE").as_deref() {
            None | Some("fire-and-forget") => RelayMode::FireAndForget,
            Some("confirm") => RelayMode::Confirm,
            Some(_) => {
                self.problem("RELAY_MODE", "must be fire-and-forget or confirm");
                RelayMode::FireAndForget
            }
        }
    }

    fn relayers(&mut self, required: bool) -> Vec<(Url, Secret)> {
        let urls = self.list("OZ_RELAYER_URLS");
        let keys = self.list("OZ_RELAYER_API_KEY");
        if urls.is_empty() && required {
            self.problem("OZ_RELAYER_URLS", "is not set: give at least one relayer (`baton dev` brings its own)");
        }
        if keys.is_empty() && (required || !urls.is_empty()) {
            self.problem("OZ_RELAYER_API_KEY", "is not set: the relayers ask for a key");
        } else if keys.len() > 1 && keys.len() != urls.len() {
            let counts = format!("has {} keys for {} URLs; give one for all or one for each", keys.len(), urls.len());
            self.problem("OZ_RELAYER_API_KEY", &counts);
        }
        let mut relayers: Vec<(Url, Secret)> = Vec::new();
        for (index, text) in urls.iter().enumerate() {
            let url = Url::parse(text).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
            let Some(url) = url else {
                self.problem("OZ_RELAYER_URLS", &format!("has {text:?}, which is no http or https URL"));
                continue;
            };
            if !url.username().is_empty() || url.password().is_some() {
                // The URL is shown on the health page and in every status; it is no place for a secret.
                self.problem("OZ_RELAYER_URLS", "has a URL with a user or password; keys go into OZ_RELAYER_API_KEY");
                continue;
            }
            if url.as_str().chars().count() > RELAYER_URL_LENGTH_MAX {
                let longest =
                    format!("has a URL of more than {RELAYER_URL_LENGTH_MAX} characters, which no store could keep");
                self.problem("OZ_RELAYER_URLS", &longest);
                continue;
            }
            if relayers.iter().any(|(known, _)| *known == url) {
                self.problem("OZ_RELAYER_URLS", &format!("has {text:?} twice"));
            }
            let key = keys.get(if keys.len() == 1 { 0 } else { index }).cloned().unwrap_or_default();
            relayers.push((url, Secret::new(key)));
        }
        relayers
    }

    fn webhook_key(&mut self, required: bool) -> Option<Secret> {
        const LENGTH_MIN: usize = 32;
        match self.text("WEBHOOK_SIGNING_KEY") {
            Some(key) if key.len() >= LENGTH_MIN => Some(Secret::new(key)),
            Some(_) => {
                self.problem("WEBHOOK_SIGNING_KEY", "is too short: relayers ask for at least 32 characters");
                None
            }
            None => {
                if required {
                    let message = "is not set: without it anybody could report a transaction as confirmed";
                    self.problem("WEBHOOK_SIGNING_KEY", message);
                }
                None
            }
        }
    }
}
