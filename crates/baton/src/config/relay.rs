//! The relay lane's settings.

use std::time::Duration;

use reqwest::Url;

use super::reader::Vars;
use super::{ChainConfig, QueueEngine, RoutingSettings, Secret, Service, Timings};
use crate::evm::parse_amount;

/// The relay lane.
#[derive(Debug, Clone)]
pub struct RelayConfig {
    /// `OZ_RELAYER_URLS`, each with its key from `OZ_RELAYER_API_KEY`; empty for a service that needs no relayers.
    pub relayers: Vec<(Url, Secret)>,
    /// `WEBHOOK_SIGNING_KEY`: each verifies relayers' webhooks; none: there is no webhook endpoint.
    pub webhook_keys: Vec<WebhookKey>,
    /// `RELAY_MODE`: how a success is learned.
    pub mode: RelayMode,
    /// `CONSUMER_CONCURRENCY`: maximum messages handled at once.
    pub concurrency: usize,
    /// `CONSUMER_DRAIN_TIMEOUT_MS`: maximum time for a stopping consumer to finish messages in progress.
    pub drain_timeout: Duration,
    /// `CONSUMER_DEAD_AFTER_MS`: claims of a consumer without a heartbeat for this long are taken over.
    pub consumer_dead_after: Duration,
    /// `MAX_ATTEMPTS`: failed attempts of a transaction before it becomes a dead letter.
    pub attempts_max: u32,
    /// `RETRY_FIRST_DELAY_MS`: delay after the first failed attempt; doubles with each.
    pub retry_first_delay: Duration,
    /// Longest delay between two attempts.
    pub retry_delay_max: Duration,
    /// `AUTO_REPLAY_DELAY_MS`: delay before the automatic replay that `retryOnFailure` requests.
    pub auto_replay_delay: Duration,
    /// `QUEUE_LEASE_MS`: lease of a received message, extended while it is handled.
    pub queue_lease: Duration,
    /// `QUEUE_RETENTION_MS`: how long the queue keeps a message or dead letter.
    pub queue_retention: Duration,
    /// `QUEUE_MAX_RECEIVES`: deliveries after which the queue itself dead-letters a message.
    pub queue_receives_max: u32,
    /// `RELAYER_HEALTH_INTERVAL_MS`: interval between two health checks of a relayer.
    pub health_interval: Duration,
    /// Timeout of one health check.
    pub health_timeout: Duration,
    /// `RELAYER_CLOCK_SKEW_MS`: allowed difference between our clock and a relayer's.
    pub relayer_clock_skew: Duration,
    /// `RELAYER_RETENTION_MS`: how long relayers keep finished transactions.
    pub relayer_retention: Duration,
    /// `RECONCILE_INTERVAL_MS`: interval between two sweeps of the reconciler.
    pub reconcile_interval: Duration,
    /// Interval between two checks of the dead letters.
    pub dead_letters_every: Duration,
    /// Dead letters whose number has not changed are read again after this time; `None`: by every check.
    pub dead_letters_reread_after: Option<Duration>,
    /// When a transaction is checked next (`RECONCILE_*`), and the limits of one submission (`RELAYER_*_TIMEOUT_MS`).
    pub timings: Timings,
    /// How relayers are chosen, paused and skipped (`RELAYER_*`, `BREAKER_*`).
    pub routing: RoutingSettings,
    /// The chain behind `RPC_URL`; `None` if it is unset.
    pub chain: Option<ChainConfig>,
    /// `CHAIN_ID`: the id of the chain that relayers must be on; `None`: that of the chain behind `RPC_URL`, if it is set.
    pub chain_id: Option<u64>,
}

/// A key that relayers sign their webhooks with.
#[derive(Debug, Clone)]
pub struct WebhookKey {
    /// The only relayer whose transactions a webhook with this key may report; `None`: any.
    pub relayer: Option<Url>,
    /// The key.
    pub secret: Secret,
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

/// The shortest signing key that relayers accept.
const WEBHOOK_KEY_LENGTH_MIN: usize = 32;

/// The lease on SQS and RabbitMQ: existing queues there have this visibility or delivery timeout.
const SERVER_QUEUE_LEASE: Duration = Duration::from_secs(60);

/// Longest delay between two attempts. The default of three attempts never reaches it.
const RETRY_DELAY_MAX: Duration = Duration::from_secs(60);

/// Timeout of one health check: the time that the specification gives a relayer. A slower one is not fit for work.
const HEALTH_TIMEOUT: Duration = Duration::from_millis(500);

/// Interval between two checks of the dead letters.
const DEAD_LETTERS_EVERY: Duration = Duration::from_secs(5);

/// On servers, dead letters whose number has not changed are read again after this time: a reading costs requests, and on
/// SQS it hides them from operators for a while.
const DEAD_LETTERS_REREAD_AFTER: Duration = Duration::from_secs(60);

/// Longest pause between two lookups of a submitted transaction: it bounds how late a lost webhook is noticed.
const SUBMITTED_CHECK_MAX: Duration = Duration::from_secs(300);

/// Longest time that a circuit breaker stays open: it bounds how late a recovered relayer is used again.
const BREAKER_OPEN_MAX: Duration = Duration::from_secs(60);

/// Upper bound of the send window: late enough for a slow store, early enough to leave time for the answer.
const SEND_WINDOW_MAX: Duration = Duration::from_secs(5);

/// A relayer's health report counts for this many intervals, so one lost check does not exclude it.
const REPORT_LIFETIME_INTERVALS: u32 = 3;

impl Vars<'_> {
    pub(super) fn relay(&mut self, service: Service, queue: &QueueEngine) -> RelayConfig {
        let queue_lease = match (self.text("QUEUE_LEASE_MS"), queue) {
            (None, QueueEngine::Sqs(_) | QueueEngine::RabbitMq { .. }) => SERVER_QUEUE_LEASE,
            _ => self.millis("QUEUE_LEASE_MS"),
        };
        let dead_letters_reread_after = match queue {
            QueueEngine::Embedded => None,
            QueueEngine::Sqs(_) | QueueEngine::RabbitMq { .. } => Some(DEAD_LETTERS_REREAD_AFTER),
        };
        // The others do not read these variables: an environment without the keys must not keep them from starting.
        let (relayers, webhook_keys) = match service.needs_relayers() {
            true => {
                let relayers = self.relayers();
                let webhook_keys = self.webhook_keys(&relayers, service.has_api());
                (relayers, webhook_keys)
            }
            false => (Vec::new(), Vec::new()),
        };
        RelayConfig {
            relayers,
            webhook_keys,
            mode: match self.choice("RELAY_MODE") {
                Some("confirm") => RelayMode::Confirm,
                _ => RelayMode::FireAndForget,
            },
            concurrency: self.count("CONSUMER_CONCURRENCY"),
            drain_timeout: self.millis("CONSUMER_DRAIN_TIMEOUT_MS"),
            consumer_dead_after: self.millis("CONSUMER_DEAD_AFTER_MS"),
            attempts_max: self.count("MAX_ATTEMPTS"),
            retry_first_delay: self.millis("RETRY_FIRST_DELAY_MS"),
            retry_delay_max: RETRY_DELAY_MAX.max(self.millis("RETRY_FIRST_DELAY_MS")),
            auto_replay_delay: self.millis("AUTO_REPLAY_DELAY_MS"),
            queue_lease,
            queue_retention: self.millis("QUEUE_RETENTION_MS"),
            queue_receives_max: self.count("QUEUE_MAX_RECEIVES"),
            health_interval: self.millis("RELAYER_HEALTH_INTERVAL_MS"),
            health_timeout: HEALTH_TIMEOUT,
            relayer_clock_skew: self.millis("RELAYER_CLOCK_SKEW_MS"),
            relayer_retention: self.millis("RELAYER_RETENTION_MS"),
            reconcile_interval: self.millis("RECONCILE_INTERVAL_MS"),
            dead_letters_every: DEAD_LETTERS_EVERY,
            dead_letters_reread_after,
            timings: self.timings(),
            routing: self.routing(),
            chain: self.chain(),
            chain_id: self.chain_id(),
        }
    }

    fn timings(&mut self) -> Timings {
        let submit_timeout = self.millis("RELAYER_SUBMIT_TIMEOUT_MS");
        let submitted_check = self.millis("RECONCILE_SUBMITTED_MS");
        Timings {
            pending_check: self.millis("RECONCILE_PENDING_MS"),
            claim_check: self.millis("CONSUMER_DEAD_AFTER_MS"),
            submit_timeout,
            send_window: (submit_timeout / 2).min(SEND_WINDOW_MAX),
            relayer_timeout: self.millis("RELAYER_HANDLER_TIMEOUT_MS"),
            unknown_check: self.millis("RECONCILE_UNKNOWN_MS"),
            absence_confirm: self.millis("RECONCILE_ABSENT_MS"),
            submitted_check,
            submitted_check_max: SUBMITTED_CHECK_MAX.max(submitted_check),
            unproven_wait: self.millis("RECONCILE_UNPROVEN_MS"),
            operator_after: self.millis("RECONCILE_OPERATOR_MS"),
        }
    }

    fn routing(&mut self) -> RoutingSettings {
        let breaker_open = self.millis("BREAKER_OPEN_MS");
        RoutingSettings {
            in_flight_max: self.optional_count("RELAYER_MAX_IN_FLIGHT"),
            rate_per_second: Some(self.parsed("RELAYER_RATE_PER_SECOND")).filter(|rate| *rate > 0),
            balance_min: self.read("RELAYER_MIN_BALANCE_WEI", parse_amount),
            breaker_failures: self.count("BREAKER_FAILURES"),
            breaker_open,
            breaker_open_max: BREAKER_OPEN_MAX.max(breaker_open),
            jam_after: self.millis("RELAYER_JAM_AFTER_MS"),
            report_lifetime: self.millis("RELAYER_HEALTH_INTERVAL_MS") * REPORT_LIFETIME_INTERVALS,
        }
    }

    fn relayers(&mut self) -> Vec<(Url, Secret)> {
        let urls = self.list("OZ_RELAYER_URLS");
        let keys = self.list("OZ_RELAYER_API_KEY");
        if urls.is_empty() {
            self.problem("OZ_RELAYER_URLS", "is not set: give at least one relayer (`baton dev` starts its own)");
        }
        if keys.is_empty() {
            self.problem("OZ_RELAYER_API_KEY", "is not set: relayers require a key");
        } else if keys.len() > 1 && keys.len() != urls.len() {
            let counts = format!("has {} keys for {} URLs; give one for all or one per URL", keys.len(), urls.len());
            self.problem("OZ_RELAYER_API_KEY", &counts);
        }
        let mut relayers: Vec<(Url, Secret)> = Vec::new();
        for (index, text) in urls.iter().enumerate() {
            let url = Url::parse(text).ok().filter(|url| matches!(url.scheme(), "http" | "https") && url.has_host());
            let Some(url) = url else {
                // The text may hold a key.
                let rule = format!("is not a list of http or https URLs: number {} is none", index + 1);
                self.problem("OZ_RELAYER_URLS", &rule);
                continue;
            };
            if !url.username().is_empty() || url.password().is_some() {
                // The health page and every status show the URL.
                self.problem("OZ_RELAYER_URLS", "has a URL with a user or password; keys go into OZ_RELAYER_API_KEY");
                continue;
            }
            if url.query().is_some() || url.fragment().is_some() {
                // The same; and no request to a relayer would carry it.
                self.problem("OZ_RELAYER_URLS", "has a URL with a query or fragment; keys go into OZ_RELAYER_API_KEY");
                continue;
            }
            if url.as_str().chars().count() > RELAYER_URL_LENGTH_MAX {
                let rule =
                    format!("has a URL of more than {RELAYER_URL_LENGTH_MAX} characters, the most a store keeps");
                self.problem("OZ_RELAYER_URLS", &rule);
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

    fn webhook_keys(&mut self, relayers: &[(Url, Secret)], required: bool) -> Vec<WebhookKey> {
        let name = "WEBHOOK_SIGNING_KEY";
        let entries = self.list(name);
        if entries.is_empty() && required {
            self.problem(name, "is not set: without it, any caller could report a transaction as confirmed");
        }
        let mut keys = Vec::new();
        for entry in entries {
            // A key may contain `=`, and does not begin like a URL.
            let (url, key) = match entry.split_once('=').filter(|_| entry.starts_with("http")) {
                Some((url, key)) => (Some(url), key),
                None => (None, entry.as_str()),
            };
            let relayer = url.and_then(|url| Url::parse(url).ok());
            let known = relayer.as_ref().is_some_and(|url| relayers.iter().any(|(known, _)| known == url));
            if url.is_some() && !known {
                self.problem(name, "has a key for a URL that OZ_RELAYER_URLS does not have");
            } else if key.len() < WEBHOOK_KEY_LENGTH_MIN {
                let rule = format!("is too short: relayers require {WEBHOOK_KEY_LENGTH_MIN} characters or more");
                self.problem(name, &rule);
            }
            keys.push(WebhookKey { relayer, secret: Secret::new(key) });
        }
        keys
    }
}
