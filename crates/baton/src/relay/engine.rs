//! Store, queue, cache and clock of the lane, by configuration alone: each embedded unless its URL is set.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use pipeline::queue::rabbitmq::{RabbitMqOptions, RabbitMqQueue, Topology};
use pipeline::queue::sqlite::SqliteQueue;
use pipeline::sqlite::Database;
use pipeline::{Queue, QueueOptions};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::clock::server_clock::{ClockEvent, Plan, RECORD_EVERY, ServerClock, ServerReading};
use crate::clock::{Clock, since_boot};
use crate::config::{Config, QueueEngine};
use crate::queues::{Opening, open_file, open_sqs};
use crate::relay::accept::intake::AcceptMode;
use crate::relay::store::coalescer::{Coalescer, Grouping};
use crate::relay::store::mysql::{MySqlOptions, MySqlStore};
use crate::relay::store::notifications::NotificationStore;
use crate::relay::store::sqlite::SqliteStore;
use crate::relay::store::{NewTransaction, TransactionStore};
use crate::relay::update::cache::Cache;

/// Name of the queue.
pub const QUEUE: &str = "relay-transactions";

/// Store, queue and clock.
pub struct RelayEngine {
    store: Store,
    queue: Messages,
    clock: Clock,
    /// The file, if store or queue is embedded.
    database: Option<Database>,
}

enum Store {
    Embedded(SqliteStore, PathBuf),
    MySql(MySqlStore, Arc<ServerClock>),
}

enum Messages {
    Embedded(SqliteQueue),
    Elsewhere(Arc<dyn Queue>),
}

/// An answer that took longer says too little about the server's time.
const CLOCK_ANSWER_MAX: Duration = Duration::from_secs(1);

impl RelayEngine {
    /// Opens what the configuration names, and brings the schema up to date.
    pub async fn open(config: &Config) -> anyhow::Result<Self> {
        Self::open_as(config, Opening::Prepare).await
    }

    /// Opens what the configuration names if it is there and of this version; creates and migrates nothing.
    pub async fn open_existing(config: &Config) -> anyhow::Result<Self> {
        Self::open_as(config, Opening::Existing).await
    }

    async fn open_as(config: &Config, opening: Opening) -> anyhow::Result<Self> {
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
            _ => Some(open_file(&config.data_dir, &database_path(&config.data_dir), opening)?),
        };
        let (store, clock) = match (&config.engine.database_url, &database) {
            (None, Some(database)) => {
                let store = match opening {
                    Opening::Prepare => SqliteStore::open(database).await,
                    Opening::Existing => SqliteStore::open_existing(database).await,
                };
                let store = store.context("cannot prepare the transaction store")?;
                (Store::Embedded(store, database_path(&config.data_dir)), Clock::of_file(database.clock()))
            }
            (Some(url), _) => {
                let (store, server) = open_mysql(url.expose(), config.engine.database_connections, opening).await?;
                let clock = Clock::of_server(&server);
                (Store::MySql(store, server), clock)
            }
            (None, None) => anyhow::bail!("there is no store"),
        };
        let queue = match (&config.engine.relay_queue, &database) {
            (QueueEngine::Embedded, Some(database)) => Messages::Embedded(
                SqliteQueue::open(database, QUEUE, options).await.context("cannot prepare the queue")?,
            ),
            (QueueEngine::Embedded, None) => anyhow::bail!("there is no queue"),
            (QueueEngine::Sqs(sqs), _) => {
                let auto_create = opening.may_create(config.engine.queue_auto_create);
                Messages::Elsewhere(open_sqs(sqs, auto_create, "SQS_QUEUE_URL, SQS_DLQ_URL", options).await?)
            }
            (QueueEngine::RabbitMq { url, queue }, _) => Messages::Elsewhere(
                open_rabbitmq(url.expose(), queue, opening.may_create(config.engine.queue_auto_create), options)
                    .await?,
            ),
        };
        Ok(Self { store, queue, clock, database })
    }

    /// Closes the file, if there is one: its log is written back, so that it can be copied alone.
    pub async fn close(&self) {
        if let Some(database) = &self.database {
            database.close().await;
        }
    }

    /// The store of transactions.
    pub fn store(&self) -> Arc<dyn TransactionStore> {
        match &self.store {
            Store::Embedded(store, _) => Arc::new(store.clone()),
            Store::MySql(store, _) => Arc::new(store.clone()),
        }
    }

    /// The store of endpoints and deliveries.
    pub fn notifications(&self) -> Arc<dyn NotificationStore> {
        match &self.store {
            Store::Embedded(store, _) => Arc::new(store.clone()),
            Store::MySql(store, _) => Arc::new(store.clone()),
        }
    }

    /// The queue of messages.
    pub fn queue(&self) -> Arc<dyn Queue> {
        match &self.queue {
            Messages::Embedded(queue) => Arc::new(queue.clone()),
            Messages::Elsewhere(queue) => Arc::clone(queue),
        }
    }

    /// The queue's file, if the queue is embedded.
    pub fn queue_file(&self) -> Option<Database> {
        match &self.queue {
            Messages::Embedded(_) => self.database.clone(),
            Messages::Elsewhere(_) => None,
        }
    }

    /// The clock that all processes on this store share.
    pub fn clock(&self) -> Clock {
        self.clock.clone()
    }

    /// The cache of finished transactions.
    pub fn cache(&self, config: &Config) -> anyhow::Result<Cache> {
        match &config.engine.redis_url {
            Some(url) => Cache::with_redis(url.expose()).context("REDIS_URL cannot be used"),
            None => Ok(Cache::default()),
        }
    }

    /// How a transaction and its message are stored: in one commit if both are in one file.
    pub fn accept_mode(&self) -> AcceptMode {
        match (&self.store, &self.queue) {
            (Store::Embedded(store, _), Messages::Embedded(queue)) => {
                AcceptMode::OneCommit(store.clone(), queue.clone())
            }
            _ => {
                let store = self.store();
                let rows = Coalescer::new(Grouping::default(), move |rows: Vec<NewTransaction>| {
                    let store = Arc::clone(&store);
                    async move { store.accept(&rows).await }
                });
                AcceptMode::RowThenMessage(Box::new(move |row| {
                    let rows = rows.clone();
                    Box::pin(async move { rows.put(row).await })
                }))
            }
        }
    }

    /// Names the store in messages to operators.
    pub fn describe_store(&self) -> String {
        match &self.store {
            Store::Embedded(_, path) => path.display().to_string(),
            Store::MySql(..) => "the database at DATABASE_URL".to_owned(),
        }
    }

    /// Keeps the clock with the database server's, and records it, until shutdown.
    pub async fn watch(&self, shutdown: CancellationToken) {
        let Store::MySql(store, server) = &self.store else { return shutdown.cancelled().await };
        let mut warned = false;
        loop {
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                () = self.clock.sleep(RECORD_EVERY) => {}
            }
            // Without an answer the clock advances by this machine's time since boot.
            match read_and_record(store, CLOCK_ANSWER_MAX, |reading| server.plan(reading)).await {
                Ok(Some(plan)) => {
                    report(plan.event);
                    server.follow(&plan);
                    warned = false;
                }
                Ok(None) => {}
                Err(failure) if !warned => {
                    warn!(action = "clock_unknown", "{failure:#}");
                    warned = true;
                }
                Err(_) => {}
            }
        }
    }
}

/// Reads the server's clock and records what `decide` makes of it. `None` if the answer took longer than `answer_max`, or
/// another process has recorded the clock in between: all processes go by one record.
async fn read_and_record(
    store: &MySqlStore,
    answer_max: Duration,
    decide: impl Fn(&ServerReading) -> Plan,
) -> anyhow::Result<Option<Plan>> {
    let asked = since_boot();
    let (server, record) = store.read_clock().await.context("the database gives no time")?;
    let reading = ServerReading::answered(server, record, asked);
    if reading.since_boot.saturating_sub(asked) > answer_max {
        return Ok(None);
    }
    let plan = decide(&reading);
    let recorded = if plan.write { store.record_clock(record.as_ref(), &plan.record).await } else { Ok(true) };
    Ok(recorded.context("the store's clock cannot be recorded")?.then_some(plan))
}

fn report(event: ClockEvent) {
    match event {
        ClockEvent::Steady => {}
        ClockEvent::SetBack(by) => warn!(
            action = "clock_set_back",
            "the database server's clock was set back by {} ms; Baton's clock stays ahead of it",
            by.as_millis()
        ),
        ClockEvent::JumpedAhead(by) => {
            let ms = by.as_millis();
            warn!(
                action = "clock_jumped",
                "the database server's clock jumped ahead by {ms} ms; running waits restart"
            );
        }
        ClockEvent::Unobserved => info!(action = "clock_unobserved", "no process has recorded the time for a while"),
    }
}

async fn open_mysql(url: &str, connections: usize, opening: Opening) -> anyhow::Result<(MySqlStore, Arc<ServerClock>)> {
    let options = MySqlOptions { connections_max: connections, ..MySqlOptions::new(url) };
    if opening == Opening::Prepare {
        MySqlStore::migrate(&options).await.context("DATABASE_URL: cannot bring the schema up to date")?;
    }
    let store = MySqlStore::open(&options).await.context("DATABASE_URL: cannot prepare the transaction store")?;
    let plan = loop {
        // A late answer makes the first reading less exact; the next ones put it right.
        if let Some(plan) =
            read_and_record(&store, Duration::MAX, ServerClock::first_plan).await.context("DATABASE_URL")?
        {
            break plan;
        }
    };
    report(plan.event);
    Ok((store, ServerClock::new(&plan)))
}

async fn open_rabbitmq(url: &str, queue: &str, create: bool, options: QueueOptions) -> anyhow::Result<Arc<dyn Queue>> {
    let topology = Topology { create, ..Topology::named(queue) };
    let options = RabbitMqOptions::new(url, topology, options);
    let queue = RabbitMqQueue::connect(options).await.context("RABBITMQ_URL: cannot prepare the queue")?;
    Ok(Arc::new(queue))
}

/// The database file of the embedded engine.
fn database_path(data_dir: &Path) -> PathBuf {
    data_dir.join("baton.db")
}
