//! What the lane runs on, by configuration alone: store, queue and cache, each embedded unless its URL is set.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use pipeline::queue::rabbitmq::{RabbitMqOptions, RabbitMqQueue, Topology};
use pipeline::queue::sqlite::SqliteQueue;
use pipeline::sqlite::Database;
use pipeline::{Queue, QueueOptions};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::coalescer::{Coalescer, Grouping};
use super::intake::Way;
use super::lane::QUEUE;
use super::store::mysql::{MySqlOptions, MySqlStore};
use super::store::sqlite::SqliteStore;
use super::store::{NewTransaction, TransactionStore};
use crate::cache::Cache;
use crate::config::{Config, QueueEngine};
use crate::queues::open_sqs;
use crate::timestamp;

/// Store and queue.
pub struct Engine {
    store: Store,
    queue: Messages,
}

enum Store {
    Embedded(SqliteStore, PathBuf),
    MySql(MySqlStore),
}

enum Messages {
    Embedded(SqliteQueue),
    Elsewhere(Arc<dyn Queue>),
}

/// How often the database server is asked for its time.
const CLOCK_EVERY: Duration = Duration::from_secs(30);
/// How long its answer may be on the way to count.
const CLOCK_ANSWER_MAX: Duration = Duration::from_millis(200);

impl Engine {
    /// Opens what the configuration names, and brings the schema up to date.
    pub async fn open(config: &Config) -> anyhow::Result<Self> {
        let relay = &config.relay;
        let options = QueueOptions {
            lease: relay.queue_lease,
            retention: relay.queue_retention,
            receives_max: Some(relay.queue_receives_max),
            ..QueueOptions::default()
        };
        let embedded_queue = matches!(config.engine.relay_queue, QueueEngine::Embedded);
        let database = match (&config.engine.database_url, embedded_queue) {
            (Some(_), false) => None,
            _ => Some(open_database(&config.data_dir)?),
        };
        let store = match (&config.engine.database_url, &database) {
            (None, Some(database)) => {
                timestamp::go_by(database.clock());
                let store = SqliteStore::open(database).await.context("cannot prepare the transaction store")?;
                Store::Embedded(store, database_path(&config.data_dir))
            }
            (Some(url), _) => Store::MySql(open_mysql(url.expose(), config.engine.database_connections).await?),
            (None, None) => anyhow::bail!("there is no store"),
        };
        let queue = match (&config.engine.relay_queue, &database) {
            (QueueEngine::Embedded, Some(database)) => Messages::Embedded(
                SqliteQueue::open(database, QUEUE, options).await.context("cannot prepare the queue")?,
            ),
            (QueueEngine::Embedded, None) => anyhow::bail!("there is no queue"),
            (QueueEngine::Sqs(sqs), _) => {
                let auto_create = config.engine.queue_auto_create;
                Messages::Elsewhere(open_sqs(sqs, auto_create, "SQS_QUEUE_URL, SQS_DLQ_URL", options).await?)
            }
            (QueueEngine::RabbitMq { url, queue }, _) => {
                Messages::Elsewhere(open_rabbitmq(url.expose(), queue, config, options).await?)
            }
        };
        Ok(Self { store, queue })
    }

    /// Where transactions are kept.
    pub fn store(&self) -> Arc<dyn TransactionStore> {
        match &self.store {
            Store::Embedded(store, _) => Arc::new(store.clone()),
            Store::MySql(store) => Arc::new(store.clone()),
        }
    }

    /// Where messages go.
    pub fn queue(&self) -> Arc<dyn Queue> {
        match &self.queue {
            Messages::Embedded(queue) => Arc::new(queue.clone()),
            Messages::Elsewhere(queue) => Arc::clone(queue),
        }
    }

    /// What is kept of finished transactions.
    pub fn cache(&self, config: &Config) -> anyhow::Result<Cache> {
        match &config.engine.redis_url {
            Some(url) => Cache::with_redis(url.expose()).context("REDIS_URL cannot be used"),
            None => Ok(Cache::default()),
        }
    }

    /// How a transaction and its message are stored: in one commit where both are in one file.
    pub fn way(&self) -> Way {
        match (&self.store, &self.queue) {
            (Store::Embedded(store, _), Messages::Embedded(queue)) => Way::OneCommit(store.clone(), queue.clone()),
            _ => {
                let store = self.store();
                Way::RowThenMessage(Coalescer::new(Grouping::default(), move |rows: Vec<NewTransaction>| {
                    let store = Arc::clone(&store);
                    async move { store.accept(&rows).await }
                }))
            }
        }
    }

    /// For people.
    pub fn describe_store(&self) -> String {
        match &self.store {
            Store::Embedded(_, path) => path.display().to_string(),
            Store::MySql(_) => "the database at DATABASE_URL".to_owned(),
        }
    }

    /// Keeps this process's clock with the store's until shutdown.
    pub async fn watch(&self, shutdown: CancellationToken) {
        let Store::MySql(store) = &self.store else { return shutdown.cancelled().await };
        loop {
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(CLOCK_EVERY) => {}
            }
            let asked = Instant::now();
            match store.now().await {
                // An answer that was long on its way says little: the steady clock of this machine is better.
                Ok(_) if asked.elapsed() > CLOCK_ANSWER_MAX => {}
                Ok(now) => timestamp::go_by_server(now + asked.elapsed() / 2),
                Err(failure) => warn!(action = "clock_unknown", "the database was not asked for its time: {failure}"),
            }
        }
    }
}

async fn open_mysql(url: &str, connections: usize) -> anyhow::Result<MySqlStore> {
    let options = MySqlOptions { connections_max: connections, ..MySqlOptions::new(url) };
    MySqlStore::migrate(&options).await.context("DATABASE_URL: cannot bring the schema up to date")?;
    let store = MySqlStore::open(&options).await.context("DATABASE_URL: cannot prepare the transaction store")?;
    let now = store.now().await.context("DATABASE_URL: the database does not say what time it is")?;
    timestamp::go_by_server(now);
    Ok(store)
}

async fn open_rabbitmq(
    url: &str,
    queue: &str,
    config: &Config,
    options: QueueOptions,
) -> anyhow::Result<Arc<dyn Queue>> {
    let topology = Topology { create: config.engine.queue_auto_create, ..Topology::named(queue) };
    let options = RabbitMqOptions::new(url, topology, options);
    let queue = RabbitMqQueue::connect(options).await.context("RABBITMQ_URL: cannot prepare the queue")?;
    Ok(Arc::new(queue))
}

/// The database file of the embedded engine.
fn database_path(data_dir: &Path) -> PathBuf {
    data_dir.join("baton.db")
}

fn open_database(data_dir: &Path) -> anyhow::Result<Database> {
    Database::open(&database_path(data_dir)).with_context(|| {
        format!("cannot use the data directory {}; make it writable or set BATON_DATA_DIR", data_dir.display())
    })
}
