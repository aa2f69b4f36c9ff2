//! Every environment variable, read once. The only reader of the environment, and the only place their names appear.
//!
//! [`Config::from_vars`] takes a lookup function, so tests pass a map; it reports every bad variable at once. What is
//! not set is embedded, under `BATON_DATA_DIR`.

mod chain;
mod http;
mod queue;
mod relay;
mod routing;
mod secret;
mod service;
#[cfg(test)]
mod tests;
mod timings;
mod users;
mod vars;

use std::path::PathBuf;

pub use chain::{ChainConfig, ForwarderConfig};
pub use http::{ApiKey, HttpConfig};
pub use queue::{EngineConfig, QueueEngine, SqsConfig, SqsEndpoint};
pub use relay::{RelayConfig, RelayMode};
pub use routing::RoutingSettings;
pub use secret::Secret;
pub use service::Service;
pub use timings::Timings;
pub use users::UsersConfig;
use vars::Vars;

/// Everything that can be set.
#[derive(Debug, Clone)]
pub struct Config {
    /// `BATON_DATA_DIR`: where the embedded engine keeps its files.
    pub data_dir: PathBuf,
    /// The HTTP server.
    pub http: HttpConfig,
    /// What the lanes run on.
    pub engine: EngineConfig,
    /// The relay lane.
    pub relay: RelayConfig,
    /// The users lane.
    pub users: UsersConfig,
    /// Logs.
    pub log: LogConfig,
}

/// Logs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogConfig {
    /// `LOG_FORMAT`: JSON or text.
    pub json: bool,
    /// `LOG_LEVEL`: a level, or per-module directives.
    pub level: String,
}

/// Everything that is wrong with the environment.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(|found| format!("{found}\n")).collect::<String>())]
pub struct ConfigError(pub Vec<String>);

/// One variable, for the documentation and its test.
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// Its default, as text; empty: none.
    pub default: &'static str,
    /// What it does.
    pub about: &'static str,
}

/// Every variable: those below, then the chain's and the users lane's.
pub fn variables() -> impl Iterator<Item = &'static Variable> {
    VARIABLES.iter().chain(chain::VARIABLES).chain(users::VARIABLES)
}

/// In the order of the documentation.
const VARIABLES: &[Variable] = &[
    var("BATON_DATA_DIR", "./.baton", "where the embedded engine keeps its files"),
    var("DATABASE_URL", "", "mysql://user:password@host:port/database: the relay store; unset: embedded"),
    var("DATABASE_CONNECTIONS", "16", "connections to it, at most"),
    var("REDIS_URL", "", "redis://…: the cache of finished transactions for all processes; unset: each its own"),
    var("RELAY_QUEUE", "", "`embedded`, `sqs` or `rabbitmq`; unset: SQS if its URL is set, else embedded"),
    var("RELAY_QUEUE_NAME", "relay-transactions", "the queue's name on RabbitMQ; its dead letters are in NAME-dlq"),
    var(
        "QUEUE_AUTO_CREATE",
        "false",
        "create the queues if they are missing, at start or later; otherwise they are checked at start",
    ),
    var("SQS_QUEUE_URL", "", "the queue `relay-transactions`, as AWS shows its URL"),
    var("SQS_DLQ_URL", "", "its dead-letter queue"),
    var("SQS_ENDPOINT_URL", "", "an endpoint other than AWS's own; needs the two keys below"),
    var("AWS_ACCESS_KEY_ID", "", "only with SQS_ENDPOINT_URL; otherwise the default credential chain (instance role)"),
    var("AWS_SECRET_ACCESS_KEY", "", "the same"),
    var("AWS_REGION", "ap-northeast-2", "the region of the queues"),
    var("RABBITMQ_URL", "", "amqp://user:password@host:port/vhost"),
    var("HOST", "127.0.0.1", "address to listen on; 0.0.0.0 in a container"),
    var("PORT", "3000", "port to listen on (queue-consumer: 3001, users-api: 3002, users-consumer: 3003)"),
    var("RELAY_API_KEY", "", "one API key, named `default`; required by the API unless RELAY_API_KEYS is set"),
    var("RELAY_API_KEYS", "", "several API keys as name:sha256hex pairs, separated by commas"),
    var("BODY_BYTES_MAX", "262144", "the largest request body, in bytes"),
    var("REQUEST_TIMEOUT_MS", "30000", "how long one request may take"),
    var("OZ_RELAYER_URLS", "", "relayers, separated by commas: a base URL each, or …/api/v1/relayers/{id}"),
    var("OZ_RELAYER_API_KEY", "", "the relayers' API key: one for all, or one for each URL, separated by commas"),
    var("WEBHOOK_SIGNING_KEY", "", "what relayers sign their webhooks with; at least 32 characters"),
    var("RELAY_MODE", "fire-and-forget", "`fire-and-forget` (webhooks bring the end) or `confirm` (poll until final)"),
    var("CONSUMER_CONCURRENCY", "64", "how many messages a consumer handles at once"),
    var("CONSUMER_DRAIN_TIMEOUT_MS", "120000", "how long a stopping consumer finishes what it has begun"),
    var("CONSUMER_DEAD_AFTER_MS", "10000", "a consumer not heard of for so long has lost its claims"),
    var("MAX_ATTEMPTS", "3", "failures of an item itself before it becomes a dead letter"),
    var("RETRY_FIRST_DELAY_MS", "2000", "the pause after the first failed attempt; doubles with each"),
    var("RETRY_DELAY_MAX_MS", "60000", "the longest pause between two attempts"),
    var("AUTO_REPLAY_DELAY_MS", "60000", "the pause before the one replay that `retryOnFailure` asks for"),
    var("QUEUE_LEASE_MS", "20000", "how long a message is leased, extended while it is handled (SQS, RabbitMQ: 60000)"),
    var("QUEUE_RETENTION_MS", "345600000", "how long the queue keeps a message (4 days)"),
    var("QUEUE_MAX_RECEIVES", "3", "deliveries after which the queue itself buries a message (a backstop)"),
    var("RELAYER_SUBMIT_TIMEOUT_MS", "30000", "how long one submission to a relayer may take"),
    var("RELAYER_HANDLER_TIMEOUT_MS", "30000", "how long a relayer may go on with a request it has not answered"),
    var("RELAYER_HEALTH_INTERVAL_MS", "10000", "how often each relayer is asked about itself"),
    var("RELAYER_HEALTH_TIMEOUT_MS", "500", "how long it may take to answer that"),
    var("RELAYER_MAX_IN_FLIGHT", "1000", "how many transactions may be in flight at one relayer"),
    var("RELAYER_RATE_PER_SECOND", "100", "submissions a second to one relayer; 0: no limit"),
    var("RELAYER_MIN_BALANCE_WEI", "1", "a relayer with less is out of funds and passed over"),
    var("RELAYER_JAM_AFTER_MS", "120000", "pending rising for so long with nothing confirmed: the relayer is jammed"),
    var("RELAYER_CLOCK_SKEW_MS", "30000", "how far a relayer's clock may differ from ours"),
    var("RELAYER_RETENTION_MS", "14400000", "how long relayers remember a finished transaction (4 hours)"),
    var("BREAKER_FAILURES", "5", "failures in a row that open a relayer's breaker"),
    var("BREAKER_OPEN_MS", "5000", "how long a breaker stays open the first time; doubles"),
    var("BREAKER_OPEN_MAX_MS", "60000", "the longest a breaker stays open"),
    var("RECONCILE_INTERVAL_MS", "1000", "how often the reconciler looks for rows that are due"),
    var("RECONCILE_DEAD_LETTERS_MS", "5000", "how often it looks for dead letters that should not be (SQS: 60000)"),
    var("RECONCILE_PENDING_MS", "600000", "a pending row that nobody claims is looked at after so long"),
    var("RECONCILE_SUBMITTED_MS", "30000", "a submitted row with no news is asked for after so long; doubles"),
    var("RECONCILE_SUBMITTED_MAX_MS", "300000", "the longest pause between two such questions"),
    var("RECONCILE_UNKNOWN_MS", "1000", "an unknown outcome: how soon and how often the relayer is asked"),
    var(
        "RECONCILE_ABSENT_MS",
        "5000",
        "how long a relayer must go on not listing a submission before it is sent again",
    ),
    var("LOG_FORMAT", "json", "`json` or `text` (`dev`: text)"),
    var("LOG_LEVEL", "info", "error, warn, info, debug, trace, or per-module directives"),
];

const fn var(name: &'static str, default: &'static str, about: &'static str) -> Variable {
    Variable { name, default, about }
}

impl Config {
    /// Reads the process environment.
    pub fn from_env(service: Service) -> Result<Self, ConfigError> {
        Self::from_vars(service, |name| std::env::var(name).ok())
    }

    /// Reads the process environment between what is fixed and what stands in for unset variables.
    pub fn from_env_between(
        service: Service,
        fixed: &[(&str, String)],
        defaults: &[(&str, &str)],
    ) -> Result<Self, ConfigError> {
        Self::from_vars(service, |name| {
            let set = fixed.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
            set.or_else(|| std::env::var(name).ok().filter(|value| !value.trim().is_empty()))
                .or_else(|| defaults.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
        })
    }

    /// Reads variables through `lookup`; says everything that is wrong at once.
    pub fn from_vars(service: Service, lookup: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        let mut vars = Vars { lookup: &lookup, problems: Vec::new() };
        let engine = vars.engine();
        let config = Self {
            data_dir: vars.text("BATON_DATA_DIR").unwrap_or_else(|| "./.baton".to_owned()).into(),
            http: vars.http(service),
            relay: vars.relay(service, &engine.relay_queue),
            engine,
            users: vars.users(),
            log: LogConfig {
                json: vars.log_json(),
                level: vars.text("LOG_LEVEL").unwrap_or_else(|| "info".to_owned()),
            },
        };
        if vars.problems.is_empty() { Ok(config) } else { Err(ConfigError(vars.problems)) }
    }
}

impl Vars<'_> {
    fn log_json(&mut self) -> bool {
        match self.text("LOG_FORMAT").as_deref() {
            None | Some("json") => true,
            Some("text") => false,
            Some(_) => {
                self.problem("LOG_FORMAT", "must be json or text");
                true
            }
        }
    }
}
