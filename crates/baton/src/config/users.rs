//! The users lane's settings.

use std::time::Duration;

use super::queue::QueueVariables;
use super::reader::Vars;
use super::{QueueEngine, Secret};

/// The users lane.
#[derive(Debug, Clone)]
pub struct UsersConfig {
    /// `USERS_DATABASE_URL`: the store on PostgreSQL; `None`: embedded.
    pub database_url: Option<Secret>,
    /// Maximum connections of this process to it: `USERS_BATCH_CONCURRENCY` and two more.
    pub database_connections: usize,
    /// `USERS_DATABASE_TIMEOUT_MS`: timeout of one call to it.
    pub database_timeout: Duration,
    /// `USERS_QUEUE`, or `rabbitmq` if `RABBITMQ_URL` is set.
    pub queue: QueueEngine,
    /// `RETRY_TTL_MS`: delay before a message is retried after a database error.
    pub retry_ttl: Duration,
    /// `MAX_RETRIES`: retries of a message before the dead-letter queue.
    pub retries_max: u32,
    /// `USERS_BATCH_SIZE`: maximum rows in one insert.
    pub batch_size: usize,
    /// `USERS_BATCH_TIMEOUT_MS`: longest wait for a batch to fill.
    pub batch_timeout: Duration,
    /// `USERS_PROC_CONCURRENCY`: messages validated concurrently.
    pub processors: usize,
    /// `USERS_BATCH_CONCURRENCY`: batches inserted concurrently.
    pub batchers: usize,
    /// `USERS_DLQ_CONSUMER`: insert dead letters again automatically.
    pub dlq_consumer: bool,
    /// `USERS_DLQ_INTERVAL_MS`: interval between two checks of the dead letters.
    pub dlq_interval: Duration,
    /// Longest pause between two checks while the database fails.
    pub dlq_pause_max: Duration,
    /// `CONSUMER_DRAIN_TIMEOUT_MS`: maximum time for a stopping consumer to finish messages in progress.
    pub drain_timeout: Duration,
}

/// Connections beside one per concurrent batch: for reads by the API and for the dead letters.
const DATABASE_CONNECTIONS_SPARE: usize = 2;

/// The pause between two checks of the dead letters grows to this many intervals while the database fails: 1 minute.
const DLQ_PAUSE_INTERVALS: u32 = 12;

impl Vars<'_> {
    pub(super) fn users(&mut self) -> UsersConfig {
        let batchers = self.count("USERS_BATCH_CONCURRENCY");
        let dlq_interval = self.millis("USERS_DLQ_INTERVAL_MS");
        UsersConfig {
            database_url: self.url("USERS_DATABASE_URL").map(Secret::from),
            database_connections: batchers + DATABASE_CONNECTIONS_SPARE,
            database_timeout: self.millis("USERS_DATABASE_TIMEOUT_MS"),
            queue: self.queue(&QueueVariables {
                choice: "USERS_QUEUE",
                implied_by: ("RABBITMQ_URL", "rabbitmq"),
                sqs_url: "USERS_SQS_QUEUE_URL",
                sqs_dlq_url: "USERS_SQS_DLQ_URL",
                name: "USERS_QUEUE_NAME",
            }),
            retry_ttl: self.millis("RETRY_TTL_MS"),
            retries_max: self.parsed("MAX_RETRIES"),
            batch_size: self.count("USERS_BATCH_SIZE"),
            batch_timeout: self.millis("USERS_BATCH_TIMEOUT_MS"),
            processors: self.count("USERS_PROC_CONCURRENCY"),
            batchers,
            dlq_consumer: self.parsed("USERS_DLQ_CONSUMER"),
            dlq_interval,
            dlq_pause_max: dlq_interval * DLQ_PAUSE_INTERVALS,
            drain_timeout: self.millis("CONSUMER_DRAIN_TIMEOUT_MS"),
        }
    }
}
