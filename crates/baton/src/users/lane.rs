//! The users lane put together from the configuration: opened once per process, then its parts are run as the service
//! needs them (the API, the consumer, or both).

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use metrics::gauge;
use pipeline::{BatchOptions, Pipeline, PipelineOptions, Queue, Summary};
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::api;
use super::consumer::Consumer;
use super::dead_letter_consumer::DeadLetterConsumer;
use super::engine::{Engine, QUEUE};
use super::intake::Intake;
use super::store::UserStore;
use crate::config::{Config, UsersConfig};
use crate::telemetry;

/// The lane.
pub struct Lane {
    /// Where users go.
    pub store: Arc<dyn UserStore>,
    /// Where messages go.
    pub queue: Arc<dyn Queue>,
    config: UsersConfig,
    request_timeout: Duration,
}

/// How often the gauges are refreshed.
const MEASURE_EVERY: Duration = Duration::from_secs(5);
/// How many messages one receive asks for.
const RECEIVE_MAX: usize = 1000;

impl Lane {
    /// Opens the lane's store and queue; nothing runs yet.
    pub async fn open(config: &Config) -> anyhow::Result<Self> {
        let Engine { store, queue, .. } = Engine::open(config).await?;
        Ok(Self { store, queue, config: config.users.clone(), request_timeout: config.http.request_timeout })
    }

    /// The routes that need a key.
    pub fn api_routes(&self) -> Router {
        // The other half is the body's: together they end before the request's own limit.
        let timeout = (self.request_timeout / 2).min(Duration::from_secs(10));
        api::routes(Intake { queue: Arc::clone(&self.queue), store: Arc::clone(&self.store), timeout })
    }

    /// Consumes until shutdown, dead letters included if so configured, then drains.
    pub async fn consume(&self, shutdown: CancellationToken) -> Summary {
        let UsersConfig { retry_ttl, retries_max, batch_size, .. } = self.config;
        let consumer =
            Consumer { store: Arc::clone(&self.store), queue: Arc::clone(&self.queue), retry_ttl, retries_max };
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
        let trying_again = async {
            if self.config.dlq_consumer {
                dead_letters.run(shutdown.clone()).await;
            }
        };
        let pipeline = Pipeline::new(Arc::clone(&self.queue), options);
        let consuming = pipeline.run_batches(Arc::new(consumer), batching, shutdown.clone());
        let (summary, ()) = tokio::join!(consuming, trying_again);
        info!(action = "users_consumer_stopped", "stopped: {summary:?}");
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
