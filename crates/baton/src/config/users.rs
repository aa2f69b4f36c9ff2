//! The users lane's variables.

use std::time::Duration;

use super::vars::Vars;
use super::{QueueEngine, Secret, Variable, var};

/// The users lane.
#[derive(Debug, Clone)]
pub struct UsersConfig {
    /// `USERS_DATABASE_URL`: the store on PostgreSQL; embedded without it.
    pub database_url: Option<Secret>,
    /// `USERS_DATABASE_CONNECTIONS`: how many connections to it at most.
    pub database_connections: usize,
    /// `USERS_DATABASE_TIMEOUT_MS`: how long one call to it may take.
    pub database_timeout: Duration,
    /// `USERS_QUEUE`, or what the URLs suggest: where the lane's messages go.
    pub queue: QueueEngine,
    /// `RETRY_TTL_MS`: how long a message waits for another round after database trouble.
    pub retry_ttl: Duration,
    /// `MAX_RETRIES`: how many rounds there are before the dead-letter queue.
    pub retries_max: u32,
    /// `USERS_BATCH_SIZE`: how many rows go into one insert.
    pub batch_size: usize,
    /// `USERS_BATCH_TIMEOUT_MS`: how long a batch waits to be full.
    pub batch_timeout: Duration,
    /// `USERS_PROC_CONCURRENCY`: how many messages are checked side by side.
    pub processors: usize,
    /// `USERS_BATCH_CONCURRENCY`: how many batches are inserted side by side.
    pub batchers: usize,
    /// `USERS_DLQ_CONSUMER`: whether dead letters are tried again by themselves.
    pub dlq_consumer: bool,
    /// `USERS_DLQ_INTERVAL_MS`: how often they are looked for.
    pub dlq_interval: Duration,
    /// `USERS_DLQ_PAUSE_MAX_MS`: the longest pause while the database has trouble.
    pub dlq_pause_max: Duration,
    /// `CONSUMER_DRAIN_TIMEOUT_MS`: how long a stopping consumer finishes what it has begun.
    pub drain_timeout: Duration,
}

/// The variables, in the order of the documentation.
pub(super) const VARIABLES: &[Variable] = &[
    var("USERS_DATABASE_URL", "", "postgres://user:password@host:port/database: the users' store; unset: embedded"),
    var("USERS_DATABASE_CONNECTIONS", "4", "connections to it, at most"),
    var("USERS_DATABASE_TIMEOUT_MS", "10000", "how long one call to it may take"),
    var("USERS_QUEUE", "", "`embedded`, `sqs` or `rabbitmq`; unset: RabbitMQ if its URL is set, else embedded"),
    var("USERS_QUEUE_NAME", "raffle", "what the names on RabbitMQ begin with: NAME_exchange, NAME_queue, NAME_dlq, …"),
    var("USERS_SQS_QUEUE_URL", "", "the lane's queue, if USERS_QUEUE is `sqs`"),
    var("USERS_SQS_DLQ_URL", "", "its dead-letter queue"),
    var("RETRY_TTL_MS", "10000", "how long a message waits for another round after database trouble"),
    var("MAX_RETRIES", "3", "rounds before the dead-letter queue"),
    var("USERS_BATCH_SIZE", "1000", "rows in one insert"),
    var("USERS_BATCH_TIMEOUT_MS", "1000", "how long a batch waits to be full"),
    var("USERS_PROC_CONCURRENCY", "8", "messages checked side by side"),
    var("USERS_BATCH_CONCURRENCY", "2", "batches inserted side by side"),
    var(
        "USERS_DLQ_CONSUMER",
        "true",
        "insert dead letters again by itself, and set aside those that can never be a user",
    ),
    var("USERS_DLQ_INTERVAL_MS", "5000", "how often to look for dead letters"),
    var("USERS_DLQ_PAUSE_MAX_MS", "60000", "the longest pause between two tries while the database has trouble"),
];

impl Vars<'_> {
    pub(super) fn users(&mut self) -> UsersConfig {
        let config = UsersConfig {
            database_url: self
                .url("USERS_DATABASE_URL", &["postgres", "postgresql"])
                .map(|url| Secret::new(url.to_string())),
            database_connections: self.count("USERS_DATABASE_CONNECTIONS"),
            database_timeout: self.millis("USERS_DATABASE_TIMEOUT_MS"),
            queue: self.users_queue(),
            retry_ttl: self.millis("RETRY_TTL_MS"),
            retries_max: self.parsed("MAX_RETRIES", 3, "a whole number; 0 means no retries"),
            batch_size: self.count("USERS_BATCH_SIZE"),
            batch_timeout: self.millis("USERS_BATCH_TIMEOUT_MS"),
            processors: self.count("USERS_PROC_CONCURRENCY"),
            batchers: self.count("USERS_BATCH_CONCURRENCY"),
            dlq_consumer: self.parsed("USERS_DLQ_CONSUMER", true, "true or false"),
            dlq_interval: self.millis("USERS_DLQ_INTERVAL_MS"),
            dlq_pause_max: self.millis("USERS_DLQ_PAUSE_MAX_MS"),
            drain_timeout: self.millis("CONSUMER_DRAIN_TIMEOUT_MS"),
        };
        if config.dlq_interval > config.dlq_pause_max {
            self.problem("USERS_DLQ_PAUSE_MAX_MS", "is less than USERS_DLQ_INTERVAL_MS");
        }
        config
    }

    fn users_queue(&mut self) -> QueueEngine {
        let asked = self.text("USERS_QUEUE");
        let inferred = if self.text("RABBITMQ_URL").is_some() { "rabbitmq" } else { "embedded" };
        match asked.as_deref().unwrap_or(inferred) {
            "embedded" => QueueEngine::Embedded,
            "sqs" => {
                let sqs = self.sqs("USERS_SQS_QUEUE_URL", "USERS_SQS_DLQ_URL", "USERS_QUEUE is sqs");
                sqs.map_or(QueueEngine::Embedded, |sqs| QueueEngine::Sqs(Box::new(sqs)))
            }
            "rabbitmq" => match self.required_url("RABBITMQ_URL", &["amqp", "amqps"], "USERS_QUEUE is rabbitmq") {
                Some(url) => QueueEngine::RabbitMq {
                    url: Secret::new(url.to_string()),
                    queue: self.text("USERS_QUEUE_NAME").unwrap_or_else(|| "raffle".to_owned()),
                },
                None => QueueEngine::Embedded,
            },
            _ => {
                self.problem("USERS_QUEUE", "must be embedded, sqs or rabbitmq");
                QueueEngine::Embedded
            }
        }
    }
}
