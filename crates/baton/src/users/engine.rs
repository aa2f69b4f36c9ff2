//! Opens the lane's store and queue as the configuration says: each embedded unless its URL is set. The embedded ones share
//! one file, apart from the relay lane's, so that neither lane waits for the other's commits.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use pipeline::queue::rabbitmq::{Delays, QueueType, RabbitMqOptions, RabbitMqQueue, Topology};
use pipeline::queue::sqlite::SqliteQueue;
use pipeline::sqlite::Database;
use pipeline::{Queue, QueueOptions};

use super::consumer::RETRIES;
use super::store::UserStore;
use super::store::postgres::{PostgresOptions, PostgresStore};
use super::store::sqlite::SqliteUserStore;
use crate::config::{Config, QueueEngine, UsersConfig};
use crate::queues::{Opening, open_file, open_sqs};

/// The queue's name on the embedded engine, and in the metrics of every engine.
pub const QUEUE: &str = "raffle_queue";

/// Ten years, in effect no limit: an accepted message stays until it is a row. SQS shortens it to its own maximum.
const RETENTION: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
/// Messages held by a process that died are delivered again after this time. A batch takes a few seconds at most.
const LEASE: Duration = Duration::from_secs(60);

/// The lane's store and queue, open.
pub struct UsersEngine {
    /// The users' store.
    pub store: Arc<dyn UserStore>,
    /// The lane's queue.
    pub queue: Arc<dyn Queue>,
    /// The store's location, for operators: a path, or the variable that names it.
    pub described: String,
    /// The queue's file, if the queue is embedded.
    pub queue_file: Option<Database>,
    /// The file, if store or queue is embedded.
    database: Option<Database>,
}

impl UsersEngine {
    /// Opens store and queue, and brings the schema up to date.
    pub async fn open(config: &Config) -> anyhow::Result<Self> {
        Self::open_as(config, Opening::Prepare).await
    }

    /// Opens store and queue if they are there and of this version; creates and migrates nothing.
    pub async fn open_existing(config: &Config) -> anyhow::Result<Self> {
        Self::open_as(config, Opening::Existing).await
    }

    /// Closes the file, if there is one: its log is written back, so that it can be copied alone.
    pub async fn close(&self) {
        if let Some(database) = &self.database {
            database.close().await;
        }
    }

    async fn open_as(config: &Config, opening: Opening) -> anyhow::Result<Self> {
        let users = &config.users;
        let options = QueueOptions { lease: LEASE, retention: RETENTION, ..QueueOptions::default() };
        let embedded = users.database_url.is_none() || matches!(users.queue, QueueEngine::Embedded);
        let path = config.data_dir.join("users.db");
        let database = match embedded {
            true => Some(open_file(&config.data_dir, &path, opening)?),
            false => None,
        };
        let (store, described): (Arc<dyn UserStore>, _) = match (&users.database_url, &database) {
            (Some(url), _) => {
                let store = open_postgres(url.expose(), users, opening).await?;
                (Arc::new(store), "the database at USERS_DATABASE_URL".to_owned())
            }
            (None, Some(database)) => {
                let store = match opening {
                    Opening::Prepare => SqliteUserStore::open(database).await,
                    Opening::Existing => SqliteUserStore::open_existing(database).await,
                };
                (Arc::new(store.context("cannot prepare the users' store")?), path.display().to_string())
            }
            (None, None) => anyhow::bail!("there is no store"),
        };
        let queue: Arc<dyn Queue> = match (&users.queue, &database) {
            (QueueEngine::Embedded, Some(database)) => {
                let queue = SqliteQueue::open(database, QUEUE, options).await;
                Arc::new(queue.context("cannot prepare the users' queue")?)
            }
            (QueueEngine::Embedded, None) => anyhow::bail!("there is no queue"),
            (QueueEngine::Sqs(sqs), _) => {
                let variables = "USERS_SQS_QUEUE_URL, USERS_SQS_DLQ_URL";
                let auto_create = opening.may_create(config.engine.queue_auto_create);
                open_sqs(sqs, auto_create, variables, options).await?
            }
            (QueueEngine::RabbitMq { url, queue }, _) => {
                Arc::new(open_rabbitmq(url.expose(), queue, users, opening, options).await?)
            }
        };
        let queue_file = database.clone().filter(|_| matches!(users.queue, QueueEngine::Embedded));
        Ok(Self { store, queue, described, queue_file, database })
    }
}

async fn open_postgres(url: &str, users: &UsersConfig, opening: Opening) -> anyhow::Result<PostgresStore> {
    let options = PostgresOptions {
        connections_max: users.database_connections,
        timeout: users.database_timeout,
        ..PostgresOptions::new(url)
    };
    match opening {
        Opening::Prepare => {
            PostgresStore::migrate(&options).await.context("USERS_DATABASE_URL: cannot bring the schema up to date")?;
        }
        Opening::Existing => PostgresStore::check_schema(&options).await.context("USERS_DATABASE_URL")?,
    }
    PostgresStore::open(&options).context("USERS_DATABASE_URL: cannot prepare the users' store")
}

async fn open_rabbitmq(
    url: &str,
    name: &str,
    users: &UsersConfig,
    opening: Opening,
    options: QueueOptions,
) -> anyhow::Result<RabbitMqQueue> {
    let topology = Topology { create: opening.may_create(true), ..topology(name, users.retry_ttl) };
    let mut options = RabbitMqOptions::new(url, topology, options);
    options.numbers = vec![RETRIES.to_owned()];
    RabbitMqQueue::connect(options).await.context(
        "RABBITMQ_URL: cannot prepare the users' queues (if they exist, RETRY_TTL_MS must be what they were made with)",
    )
}

/// The exchanges and queues of the existing service, which may run on the same broker: see `docs/queues.md`.
pub fn topology(name: &str, retry_ttl: Duration) -> Topology {
    Topology {
        exchange: format!("{name}_exchange"),
        queue: format!("{name}_queue"),
        dead_exchange: format!("{name}_dlx"),
        dead_queue: format!("{name}_dlq"),
        delays: Delays::Fixed {
            exchange: format!("{name}_retry_exchange"),
            // The existing service knows the queue by this name, whatever its time to live is.
            queue: format!("{name}_retry_10s"),
            ttl: retry_ttl,
        },
        queue_type: QueueType::Classic,
        create: true,
    }
}
