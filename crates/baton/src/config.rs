//! Every environment variable, read once. The only reader of the environment, and the only place their names appear.
//!
//! [`Config::from_vars`] takes a lookup function, so tests pass a map; it reports every bad variable at once. What is
//! not set is embedded, under `BATON_DATA_DIR`.

mod chain;
mod users;

use std::collections::HashSet;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use alloy_primitives::U256;
use reqwest::Url;
use sha2::{Digest, Sha256};

use crate::relay::relayer::routing::RoutingSettings;
use crate::relay::request::call::parse_amount;
use crate::relay::state::report::Mode;
use crate::relay::state::transaction::Timings;
pub use chain::{ChainConfig, ForwarderConfig};
pub use users::UsersConfig;

/// Text that must not be shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text itself; never for a log, an error or a metric.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Which service is starting: they need different things.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// Both lanes, API and consumer, in one process.
    Serve,
    /// The relay API alone.
    RelayApi,
    /// The relay consumer alone.
    QueueConsumer,
    /// The users API alone.
    UsersApi,
    /// The users consumer alone.
    UsersConsumer,
    /// An operator's command on the data: needs no keys.
    Command,
}

impl Service {
    /// Whether clients call it.
    pub fn has_api(self) -> bool {
        matches!(self, Self::Serve | Self::RelayApi | Self::UsersApi)
    }

    /// Whether it works on the relay lane.
    pub fn has_relay(self) -> bool {
        matches!(self, Self::Serve | Self::RelayApi | Self::QueueConsumer)
    }

    /// Whether it works on the users lane.
    pub fn has_users(self) -> bool {
        matches!(self, Self::Serve | Self::UsersApi | Self::UsersConsumer)
    }

    /// Whether it takes messages.
    pub fn consumes(self) -> bool {
        matches!(self, Self::Serve | Self::QueueConsumer | Self::UsersConsumer)
    }

    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Serve => "serve",
            Self::RelayApi => "relay-api",
            Self::QueueConsumer => "queue-consumer",
            Self::UsersApi => "users-api",
            Self::UsersConsumer => "users-consumer",
            Self::Command => "command",
        }
    }

    /// Where it listens unless told otherwise: all of them fit on one machine.
    fn port(self) -> u16 {
        match self {
            Self::QueueConsumer => 3001,
            Self::UsersApi => 3002,
            Self::UsersConsumer => 3003,
            Self::Serve | Self::RelayApi | Self::Command => 3000,
        }
    }
}

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

/// The HTTP server.
#[derive(Debug, Clone)]
pub struct HttpConfig {
    /// `HOST` and `PORT`: where to listen.
    pub listen: SocketAddr,
    /// `RELAY_API_KEY` and `RELAY_API_KEYS`: who may call.
    pub api_keys: Vec<ApiKey>,
    /// `BODY_BYTES_MAX`: the largest request body.
    pub body_bytes_max: usize,
    /// `REQUEST_TIMEOUT_MS`: how long one request may take.
    pub request_timeout: Duration,
}

/// What the lanes run on; what is not set is embedded.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// `DATABASE_URL`: the relay store on MySQL or MariaDB.
    pub database_url: Option<Secret>,
    /// `DATABASE_CONNECTIONS`: how many connections to it at most.
    pub database_connections: usize,
    /// `REDIS_URL`: the cache on Redis.
    pub redis_url: Option<Secret>,
    /// `RELAY_QUEUE`, or what the URLs suggest: where the relay lane's messages go.
    pub relay_queue: QueueEngine,
    /// `QUEUE_AUTO_CREATE`: whether a queue that is missing is created.
    pub queue_auto_create: bool,
}

/// Where messages go.
#[derive(Debug, Clone)]
pub enum QueueEngine {
    /// The data directory.
    Embedded,
    /// AWS SQS.
    Sqs(Box<SqsConfig>),
    /// RabbitMQ.
    RabbitMq {
        /// `RABBITMQ_URL`.
        url: Secret,
        /// `RELAY_QUEUE_NAME` or `USERS_QUEUE_NAME`.
        queue: String,
    },
}

/// AWS SQS.
#[derive(Debug, Clone)]
pub struct SqsConfig {
    /// `SQS_QUEUE_URL` or `USERS_SQS_QUEUE_URL`.
    pub queue_url: Url,
    /// `SQS_DLQ_URL` or `USERS_SQS_DLQ_URL`.
    pub dlq_url: Url,
    /// `SQS_ENDPOINT_URL` with `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`; without it the default credential chain.
    pub endpoint: Option<SqsEndpoint>,
    /// `AWS_REGION`.
    pub region: String,
}

/// An endpoint other than AWS's own.
#[derive(Debug, Clone)]
pub struct SqsEndpoint {
    /// Where.
    pub url: Url,
    /// The key's id.
    pub access_key_id: Secret,
    /// The key.
    pub secret_access_key: Secret,
}

/// One named API key, known by its hash only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiKey {
    /// For logs and rows.
    pub name: String,
    /// SHA-256 of the key.
    pub sha256: [u8; 32],
}

/// The relay lane.
#[derive(Debug, Clone)]
pub struct RelayConfig {
    /// `OZ_RELAYER_URLS` with `OZ_RELAYER_API_KEY`: the relayers.
    pub relayers: Vec<(Url, Secret)>,
    /// `WEBHOOK_SIGNING_KEY`: what relayers sign webhooks with.
    pub webhook_key: Option<Secret>,
    /// `RELAY_MODE`: `fire-and-forget` or `confirm`.
    pub mode: Mode,
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
    pub timings: Timings,
    /// `RELAYER_*` and `BREAKER_*`: routing.
    pub routing: RoutingSettings,
    /// `RPC_*`, `CHAIN_ID`, `FORWARDER_*` and `RELAY_PREFLIGHT`: the chain, if it is asked anything.
    pub chain: Option<ChainConfig>,
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

/// The longest name of an API key and the longest URL of a relayer: what every store can keep with a transaction.
const KEY_NAME_LENGTH_MAX: usize = 255;
const RELAYER_URL_LENGTH_MAX: usize = 512;

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
        let host = vars.parsed("HOST", IpAddr::V4(Ipv4Addr::LOCALHOST), "an IP address");
        let port = vars.parsed("PORT", service.port(), "a port number from 0 to 65535");
        let api_keys = vars.api_keys(service.has_api());
        let relayers = vars.relayers(service.has_relay());
        let webhook_key = vars.webhook_key(service.has_api() && service.has_relay());
        let submit_timeout = vars.millis("RELAYER_SUBMIT_TIMEOUT_MS");
        // What existing queues of the other engines are set to.
        let queue_lease = match (vars.text("QUEUE_LEASE_MS"), &engine.relay_queue) {
            (None, QueueEngine::Sqs(_) | QueueEngine::RabbitMq { .. }) => Duration::from_secs(60),
            _ => vars.millis("QUEUE_LEASE_MS"),
        };
        // There, whoever reads them hides them from all others meanwhile.
        let dead_letters_every = match (vars.text("RECONCILE_DEAD_LETTERS_MS"), &engine.relay_queue) {
            (None, QueueEngine::Sqs(_)) => Duration::from_secs(60),
            _ => vars.millis("RECONCILE_DEAD_LETTERS_MS"),
        };
        let health_interval = vars.millis("RELAYER_HEALTH_INTERVAL_MS");
        let config = Self {
            data_dir: vars.text("BATON_DATA_DIR").unwrap_or_else(|| "./.baton".to_owned()).into(),
            http: HttpConfig {
                listen: SocketAddr::new(host, port),
                api_keys,
                body_bytes_max: vars.count("BODY_BYTES_MAX"),
                request_timeout: vars.millis("REQUEST_TIMEOUT_MS"),
            },
            engine,
            relay: RelayConfig {
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
                timings: Timings {
                    pending_check: vars.millis("RECONCILE_PENDING_MS"),
                    claim_check: vars.millis("CONSUMER_DEAD_AFTER_MS"),
                    submit_timeout,
                    // Late enough for a slow store, early enough to leave the answer its time.
                    send_window: (submit_timeout / 2).min(Duration::from_secs(5)),
                    relayer_timeout: vars.millis("RELAYER_HANDLER_TIMEOUT_MS"),
                    unknown_check: vars.millis("RECONCILE_UNKNOWN_MS"),
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
            },
            users: vars.users(),
            log: LogConfig {
                json: vars.log_json(),
                level: vars.text("LOG_LEVEL").unwrap_or_else(|| "info".to_owned()),
            },
        };
        if config.relay.routing.breaker_open > config.relay.routing.breaker_open_max {
            vars.problem("BREAKER_OPEN_MAX_MS", "is less than BREAKER_OPEN_MS");
        }
        if config.relay.retry_first_delay > config.relay.retry_delay_max {
            vars.problem("RETRY_DELAY_MAX_MS", "is less than RETRY_FIRST_DELAY_MS");
        }
        if vars.problems.is_empty() { Ok(config) } else { Err(ConfigError(vars.problems)) }
    }
}

struct Vars<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
    problems: Vec<String>,
}

impl Vars<'_> {
    /// A variable that is set and not blank.
    fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    fn problem(&mut self, name: &str, message: &str) {
        self.problems.push(format!("{name} {message}"));
    }

    fn parsed<T: std::str::FromStr>(&mut self, name: &str, default: T, what: &str) -> T {
        match self.text(name).map(|text| text.parse()) {
            None => default,
            Some(Ok(value)) => value,
            Some(Err(_)) => {
                self.problem(name, &format!("must be {what}"));
                default
            }
        }
    }

    /// The default that the documentation shows.
    fn default_number(name: &str) -> u64 {
        let variable = variables().find(|variable| variable.name == name);
        variable.and_then(|variable| variable.default.parse().ok()).unwrap_or(0)
    }

    fn count<T: TryFrom<u64>>(&mut self, name: &str) -> T
    where
        T::Error: fmt::Debug,
    {
        let what = "a whole number of at least 1";
        let default = Self::default_number(name);
        let number: u64 = self.parsed(name, default, what);
        match T::try_from(number) {
            Ok(value) if number > 0 => value,
            _ => {
                self.problem(name, &format!("must be {what}"));
                T::try_from(default).expect("defaults fit")
            }
        }
    }

    fn millis(&mut self, name: &str) -> Duration {
        let what = "a whole number of milliseconds, at least 1";
        let default = Self::default_number(name);
        let number: u64 = self.parsed(name, default, what);
        if number == 0 {
            self.problem(name, &format!("must be {what}"));
        }
        Duration::from_millis(number)
    }

    fn engine(&mut self) -> EngineConfig {
        EngineConfig {
            database_url: self.url("DATABASE_URL", &["mysql", "mariadb"]).map(|url| Secret(url.to_string())),
            database_connections: self.count("DATABASE_CONNECTIONS"),
            redis_url: self.url("REDIS_URL", &["redis"]).map(|url| Secret(url.to_string())),
            relay_queue: self.relay_queue(),
            queue_auto_create: self.parsed("QUEUE_AUTO_CREATE", false, "true or false"),
        }
    }

    fn relay_queue(&mut self) -> QueueEngine {
        let asked = self.text("RELAY_QUEUE");
        let inferred = if self.text("SQS_QUEUE_URL").is_some() { "sqs" } else { "embedded" };
        match asked.as_deref().unwrap_or(inferred) {
            "embedded" => QueueEngine::Embedded,
            "sqs" => {
                let sqs = self.sqs("SQS_QUEUE_URL", "SQS_DLQ_URL", "the relay lane's queue is SQS");
                sqs.map_or(QueueEngine::Embedded, |sqs| QueueEngine::Sqs(Box::new(sqs)))
            }
            "rabbitmq" => match self.required_url("RABBITMQ_URL", &["amqp", "amqps"], "RELAY_QUEUE is rabbitmq") {
                Some(url) => QueueEngine::RabbitMq {
                    url: Secret(url.to_string()),
                    queue: self.text("RELAY_QUEUE_NAME").unwrap_or_else(|| "relay-transactions".to_owned()),
                },
                None => QueueEngine::Embedded,
            },
            _ => {
                self.problem("RELAY_QUEUE", "must be embedded, sqs or rabbitmq");
                QueueEngine::Embedded
            }
        }
    }

    fn sqs(&mut self, queue: &str, dlq: &str, why: &str) -> Option<SqsConfig> {
        let queue_url = self.required_url(queue, &["http", "https"], why);
        let dlq_url = self.required_url(dlq, &["http", "https"], why);
        let endpoint = self.url("SQS_ENDPOINT_URL", &["http", "https"]).and_then(|url| {
            let mut key = |name: &str| {
                let value = self.text(name);
                if value.is_none() {
                    self.problem(name, "is not set: SQS_ENDPOINT_URL needs it");
                }
                value.map(Secret)
            };
            let (id, secret) = (key("AWS_ACCESS_KEY_ID"), key("AWS_SECRET_ACCESS_KEY"));
            Some(SqsEndpoint { url, access_key_id: id?, secret_access_key: secret? })
        });
        let region = self.text("AWS_REGION").unwrap_or_else(|| "ap-northeast-2".to_owned());
        Some(SqsConfig { queue_url: queue_url?, dlq_url: dlq_url?, endpoint, region })
    }

    fn required_url(&mut self, name: &str, schemes: &[&str], why: &str) -> Option<Url> {
        if self.text(name).is_none() {
            self.problem(name, &format!("is not set: {why}"));
        }
        self.url(name, schemes)
    }

    /// A URL of one of these schemes. It may hold a password and is not shown.
    fn url(&mut self, name: &str, schemes: &[&str]) -> Option<Url> {
        let text = self.text(name)?;
        let url = Url::parse(&text).ok().filter(|url| schemes.contains(&url.scheme()) && url.has_host());
        if url.is_none() {
            self.problem(name, &format!("must be a URL that begins with {}://", schemes.join(":// or ")));
        }
        url
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

    fn mode(&mut self) -> Mode {
        match self.text("RELAY_MODE").as_deref() {
            None | Some("fire-and-forget") => Mode::FireAndForget,
            Some("confirm") => Mode::Confirm,
            Some(_) => {
                self.problem("RELAY_MODE", "must be fire-and-forget or confirm");
                Mode::FireAndForget
            }
        }
    }

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

    fn api_keys(&mut self, required: bool) -> Vec<ApiKey> {
        let mut keys = Vec::new();
        if let Some(key) = self.text("RELAY_API_KEY") {
            keys.push(ApiKey { name: "default".to_owned(), sha256: Sha256::digest(key.as_bytes()).into() });
        }
        for pair in self.list("RELAY_API_KEYS") {
            let read = pair.split_once(':').and_then(|(name, hash)| {
                let sha256 = hex::decode(hash.trim()).ok()?.try_into().ok()?;
                Some(ApiKey { name: name.trim().to_owned(), sha256 })
                    .filter(|key| (1..=KEY_NAME_LENGTH_MAX).contains(&key.name.chars().count()))
            });
            match read {
                Some(key) => keys.push(key),
                // The pair itself is not shown: somebody may have put the key there instead of its hash.
                None => self.problem(
                    "RELAY_API_KEYS",
                    "must be name:hash pairs separated by commas, each name up to 255 characters long and each hash the \
                     SHA-256 of a key as 64 hex digits",
                ),
            }
        }
        let names: HashSet<_> = keys.iter().map(|key| &key.name).collect();
        if names.len() < keys.len() {
            self.problem("RELAY_API_KEYS", "names a key twice (RELAY_API_KEY is named `default`)");
        }
        if required && keys.is_empty() && self.problems.iter().all(|found| !found.starts_with("RELAY_API_KEYS")) {
            self.problem("RELAY_API_KEY", "is not set: the API needs a key that its clients send as X-API-Key");
        }
        keys
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
            relayers.push((url, Secret(key)));
        }
        relayers
    }

    fn webhook_key(&mut self, required: bool) -> Option<Secret> {
        const LENGTH_MIN: usize = 32;
        match self.text("WEBHOOK_SIGNING_KEY") {
            Some(key) if key.len() >= LENGTH_MIN => Some(Secret(key)),
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

    fn list(&self, name: &str) -> Vec<String> {
        let text = self.text(name).unwrap_or_default();
        text.split(',').map(str::trim).filter(|item| !item.is_empty()).map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(service: Service, vars: &[(&str, &str)]) -> Result<Config, ConfigError> {
        Config::from_vars(service, |name| {
            vars.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    const GOOD: [(&str, &str); 4] = [
        ("RELAY_API_KEY", "key"),
        ("OZ_RELAYER_URLS", "http://a:1, http://b:2"),
        ("OZ_RELAYER_API_KEY", "secret"),
        ("WEBHOOK_SIGNING_KEY", "0123456789abcdef0123456789abcdef"),
    ];

    #[test]
    fn the_least_that_serves() {
        let config = read(Service::Serve, &GOOD).unwrap();
        assert_eq!(config.relay.relayers.len(), 2);
        assert_eq!(config.relay.relayers[1].1.expose(), "secret");
        assert_eq!((config.http.listen.port(), config.relay.concurrency), (3000, 64));
        assert_eq!(config.relay.mode, Mode::FireAndForget);
        assert_eq!(config.relay.timings.submit_timeout, Duration::from_secs(30));
    }

    #[test]
    fn nothing_set_names_everything_that_is_missing() {
        let ConfigError(problems) = read(Service::Serve, &[]).unwrap_err();
        for name in ["RELAY_API_KEY", "OZ_RELAYER_URLS", "OZ_RELAYER_API_KEY", "WEBHOOK_SIGNING_KEY"] {
            assert!(problems.iter().any(|found| found.starts_with(name)), "{name} in {problems:?}");
        }
        assert!(read(Service::Command, &[]).is_ok());
        assert_eq!(read(Service::QueueConsumer, &GOOD[1..3]).unwrap().http.listen.port(), 3001);
    }

    #[test]
    fn every_bad_variable_is_named_at_once() {
        let mut vars = GOOD.to_vec();
        let bad = [
            ("PORT", "70000"),
            ("HOST", "here"),
            ("RELAY_MODE", "sometimes"),
            ("CONSUMER_CONCURRENCY", "0"),
            ("RELAYER_SUBMIT_TIMEOUT_MS", "soon"),
            ("RELAYER_MIN_BALANCE_WEI", "1.5"),
            ("LOG_FORMAT", "xml"),
            ("DATABASE_URL", "postgres://x"),
            ("REDIS_URL", "here"),
            ("RELAY_QUEUE", "carrier-pigeon"),
            ("QUEUE_AUTO_CREATE", "perhaps"),
            ("RELAY_API_KEYS", "nohash"),
            ("BREAKER_OPEN_MAX_MS", "1"),
        ];
        vars.extend(bad);
        let ConfigError(problems) = read(Service::Serve, &vars).unwrap_err();
        for (name, _) in bad {
            assert!(problems.iter().any(|found| found.starts_with(name)), "{name} in {problems:?}");
        }
        assert_eq!(problems.len(), bad.len(), "{problems:?}");
    }

    /// A store would refuse them with every transaction, for ever.
    #[test]
    fn what_no_store_could_keep_is_refused_at_the_start() {
        let long = "a".repeat(1000);
        let (urls, pair) = (format!("http://a/{long}"), format!("{long}:{}", "0".repeat(64)));
        for (name, value) in [("OZ_RELAYER_URLS", urls), ("RELAY_API_KEYS", pair)] {
            let mut vars = vec![(name, value.as_str())];
            vars.extend(GOOD);
            let ConfigError(problems) = read(Service::Serve, &vars).unwrap_err();
            assert!(matches!(&problems[..], [found] if found.starts_with(name)), "{problems:?}");
        }
    }

    #[test]
    fn an_engine_is_chosen_by_its_url_alone_and_needs_the_rest_of_it() {
        let with = |more: &[(&'static str, &'static str)]| {
            let mut vars = GOOD.to_vec();
            vars.extend(more);
            read(Service::Serve, &vars)
        };
        let embedded = with(&[("RABBITMQ_URL", "amqp://h")]).unwrap();
        assert!(matches!(embedded.engine.relay_queue, QueueEngine::Embedded), "the users lane may use it alone");
        assert_eq!(embedded.relay.queue_lease, Duration::from_secs(20));
        let missing = with(&[("SQS_QUEUE_URL", "http://h/0/q"), ("SQS_ENDPOINT_URL", "http://h")]).unwrap_err().0;
        for name in ["SQS_DLQ_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"] {
            assert!(missing.iter().any(|found| found.starts_with(name)), "{name} in {missing:?}");
        }
        let sqs = with(&[("SQS_QUEUE_URL", "https://h/0/q"), ("SQS_DLQ_URL", "https://h/0/d")]).unwrap();
        assert!(matches!(&sqs.engine.relay_queue, QueueEngine::Sqs(sqs) if sqs.endpoint.is_none()), "instance role");
        assert_eq!(sqs.relay.queue_lease, Duration::from_secs(60));
        assert_eq!(sqs.relay.dead_letters_every, Duration::from_secs(60));
        assert_eq!(embedded.relay.dead_letters_every, Duration::from_secs(5));
        let rabbitmq = with(&[("RELAY_QUEUE", "rabbitmq"), ("RABBITMQ_URL", "amqp://u:secret@h")]).unwrap();
        assert!(!format!("{rabbitmq:?}").contains("secret@"), "passwords are not shown");
    }

    #[test]
    fn contradictions_are_refused() {
        let with = |name: &'static str, value: &'static str| {
            let mut vars: Vec<_> = GOOD.iter().copied().filter(|(known, _)| *known != name).collect();
            vars.push((name, value));
            read(Service::Serve, &vars).unwrap_err().0
        };
        assert!(with("OZ_RELAYER_API_KEY", "a,b,c")[0].contains("3 keys for 2 URLs"));
        assert!(with("OZ_RELAYER_URLS", "http://a:1,http://a:1")[0].contains("twice"));
        assert!(with("OZ_RELAYER_URLS", "ftp://a")[0].contains("no http"));
        assert!(with("OZ_RELAYER_URLS", "http://me:secret@a:1")[0].contains("user or password"));
        assert!(with("WEBHOOK_SIGNING_KEY", "short")[0].contains("too short"));
    }

    #[test]
    fn named_keys_are_read_by_hash() {
        let hash = hex::encode(Sha256::digest(b"key-a"));
        let mut vars = GOOD.to_vec();
        let pairs = format!("team-a:{hash}");
        vars.push(("RELAY_API_KEYS", &pairs));
        let keys = read(Service::Serve, &vars).unwrap().http.api_keys;
        assert_eq!(keys.iter().map(|key| key.name.as_str()).collect::<Vec<_>>(), ["default", "team-a"]);
    }

    #[test]
    fn secrets_do_not_print() {
        let config = read(Service::Serve, &GOOD).unwrap();
        let printed = format!("{config:?}");
        assert!(!printed.contains("secret") && !printed.contains("0123456789abcdef"));
    }

    #[test]
    fn the_example_and_the_documentation_list_every_variable() {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
        let example = std::fs::read_to_string(format!("{root}/.env.example")).unwrap();
        let page = std::fs::read_to_string(format!("{root}/docs/operations/configuration.md")).unwrap();
        for variable in variables() {
            let in_example = example.lines().any(|line| {
                line.trim_start_matches("# ").starts_with(&format!("{}={}", variable.name, variable.default))
            });
            assert!(in_example, ".env.example lacks {}={}", variable.name, variable.default);
            let row = format!(
                "| `{}` | {} |",
                variable.name,
                if variable.default.is_empty() { "-" } else { variable.default }
            );
            assert!(page.contains(&row), "configuration.md lacks {row}");
        }
        let known: Vec<_> = variables().map(|variable| variable.name).collect();
        for line in example.lines().filter(|line| line.contains('=')) {
            let name = line.trim_start_matches("# ").split('=').next().unwrap();
            assert!(known.contains(&name), ".env.example has the unknown {name}");
        }
    }
}
