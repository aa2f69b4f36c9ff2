//! The users lane put together from the configuration: opened once per process; each service then runs the parts it needs
//! (the API, the consumer, or both).

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use metrics::gauge;
use pipeline::{BatchOptions, Pipeline, PipelineOptions, Queue, Summary};
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::api;
use super::consumer::UsersConsumer;
use super::dead_letter_consumer::DeadLetterConsumer;
use super::engine::{QUEUE, UsersEngine};
use super::health::UsersHealth;
use super::intake::UserIntake;
use super::store::UserStore;
use crate::config::{Config, UsersConfig};
use crate::http::health::QueueCheck;
use crate::telemetry;

/// The lane's open store and queue, and its settings.
pub struct UsersLane {
    /// The users' store.
    pub store: Arc<dyn UserStore>,
    /// The lane's queue.
    pub queue: Arc<dyn Queue>,
    engine: UsersEngine,
    config: UsersConfig,
    request_timeout: Duration,
}

/// Interval between refreshes of the gauges.
const MEASURE_EVERY: Duration = Duration::from_secs(5);
/// Maximum number of messages in one receive.
const RECEIVE_MAX: usize = 1000;

impl UsersLane {
    /// Opens the lane's store and queue; nothing runs yet.
    pub async fn open(config: &Config) -> anyhow::Result<Self> {
        let lane = Self::on(UsersEngine::open(config).await?, config);
        let users = &config.users;
        let store = match &users.database_url {
            Some(url) => format!("PostgreSQL, {}", url.address()),
            None => format!("embedded (SQLite), {}", lane.engine.described),
        };
        info!(
            action = "engines",
            lane = "users",
            store,
            queue = users.queue.describe(),
            "the users lane's engines are open"
        );
        Ok(lane)
    }

    /// [`UsersLane::open`] for a command, which creates and migrates nothing.
    pub async fn open_existing(config: &Config) -> anyhow::Result<Self> {
        Ok(Self::on(UsersEngine::open_existing(config).await?, config))
    }

    fn on(engine: UsersEngine, config: &Config) -> Self {
        let (store, queue) = (Arc::clone(&engine.store), Arc::clone(&engine.queue));
        Self { store, queue, engine, config: config.users.clone(), request_timeout: config.http.request_timeout }
    }

    /// Closes the queue and the file, if there is one. Nothing may run any more.
    pub async fn close(&self) {
        self.queue.close().await;
        self.engine.close().await;
    }

    /// The lane's part of `/ready` and `/health`, in a service that consumes or does not.
    pub fn health(&self, consumes: bool) -> UsersHealth {
        let queue = QueueCheck { queue: Arc::clone(&self.queue), file: self.engine.queue_file.clone() };
        let needs_store = consumes || self.config.database_url.is_none();
        UsersHealth { store: Arc::clone(&self.store), queue, needs_store }
    }

    /// The routes that need an API key.
    pub fn api_routes(&self) -> Router {
        // The body has the other half of the request's time, so both end before the request's own limit.
        let timeout = (self.request_timeout / 2).min(Duration::from_secs(10));
        api::routes(UserIntake { queue: Arc::clone(&self.queue), store: Arc::clone(&self.store), timeout })
    }

    /// Consumes until shutdown, then drains. Retries dead letters too, if `USERS_DLQ_CONSUMER` is on.
    pub async fn consume(&self, shutdown: CancellationToken) -> Summary {
        let UsersConfig { retry_ttl, retries_max, batch_size, .. } = self.config;
        let consumer =
            UsersConsumer { store: Arc::clone(&self.store), queue: Arc::clone(&self.queue), retry_ttl, retries_max };
        let batching = BatchOptions {
            size: batch_size,
            timeout: self.config.batch_timeout,
            batchers: self.config.batchers,
            processors: self.config.processors,
        };
        let options = PipelineOptions {
            receive_max: batch_size.min(RECEIVE_MAX),
            drain_timeout: self.config.drain_timeout,
            ..PipelineOptions::default()
        };
        let dead_letters = DeadLetterConsumer {
            store: Arc::clone(&self.store),
            queue: Arc::clone(&self.queue),
            batch_size,
            interval: self.config.dlq_interval,
            pause_max: self.config.dlq_pause_max,
        };
        info!(
            action = "users_consumer_started",
            dead_letters = self.config.dlq_consumer,
            "consuming {}",
            self.queue.name()
        );
        let retrying = async {
            if self.config.dlq_consumer {
                dead_letters.run(shutdown.clone()).await;
            }
        };
        let pipeline = Pipeline::new(Arc::clone(&self.queue), options);
        let consuming = pipeline.run_batches(Arc::new(consumer), batching, shutdown.clone());
        let (summary, ()) = tokio::join!(consuming, retrying);
        let Summary { received, done, retried, dead, handed_back, .. } = summary;
        info!(action = "users_consumer_stopped", received, done, retried, dead, handed_back, "stopped consuming");
        summary
    }

    /// Refreshes the gauges until shutdown.
    pub async fn watch(&self, shutdown: CancellationToken) {
        loop {
            if let Ok(depth) = self.queue.depth().await {
                telemetry::measure_queue(QUEUE, &depth);
            }
            if let Ok(count) = self.store.count_quarantined().await {
                gauge!("baton_users_quarantined").set(count as f64);
            }
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(MEASURE_EVERY) => {}
            }
        }
    }
}
