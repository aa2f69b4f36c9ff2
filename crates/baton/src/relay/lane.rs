//! The relay lane put together from the configuration: opened once per process, then its parts are run as the service
//! needs them (the API, the consumer, or both).

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use metrics::gauge;
use pipeline::{Pipeline, PipelineOptions, RetryPolicy, Summary};
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::api::{self, ApiState};
use super::book::Book;
use super::chain::Chain;
use super::consumer::{Consumer, ConsumerSettings};
use super::engine::Engine;
use super::gasless::Gasless;
use super::intake::Intake;
use super::order::Order;
use super::reconciler::{Reconciler, ReconcilerSettings};
use super::relayer::client::RelayerClient;
use super::relayer::pool::Pool;
use super::status::StatusLookup;
use super::status::block::Blocks;
use super::transaction::ConsumerId;
use super::webhook::{self, WebhookState};
use crate::config::{Config, RelayConfig};
use crate::telemetry;
use crate::timestamp::Timestamp;

/// The name of the queue.
pub const QUEUE: &str = "relay-transactions";

/// The lane.
pub struct Lane {
    /// Store, queue and cache.
    pub book: Arc<Book>,
    /// The relayers.
    pub pool: Arc<Pool>,
    /// The chain, if it may be asked.
    chain: Option<Arc<Chain>>,
    engine: Engine,
    config: RelayConfig,
    request_timeout: Duration,
}

/// How long a question to a relayer may take.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the gauges are refreshed.
const MEASURE_EVERY: Duration = Duration::from_secs(5);

impl Lane {
    /// Opens the lane's store and queue; nothing runs yet.
    pub async fn open(config: &Config) -> anyhow::Result<Self> {
        let relay = config.relay.clone();
        let engine = Engine::open(config).await?;
        let book = Arc::new(Book {
            store: engine.store(),
            queue: engine.queue(),
            cache: engine.cache(config)?,
            mode: relay.mode,
            clocks: relay.clocks,
        });
        let clients = relay
            .relayers
            .iter()
            .map(|(url, key)| {
                RelayerClient::new(url, key).map_err(|why| anyhow::anyhow!("OZ_RELAYER_URLS {url}: {why}"))
            })
            .collect::<anyhow::Result<Vec<_>>>()?;
        let pool = Pool::new(clients, relay.routing.clone(), relay.health_interval, relay.health_timeout);
        let chain = relay.chain.as_ref().map(Chain::new).transpose().map_err(|why| anyhow::anyhow!(why))?.map(Arc::new);
        Ok(Self { book, pool, chain, engine, config: relay, request_timeout: config.http.request_timeout })
    }

    /// The routes that need a key.
    pub fn api_routes(&self) -> Router {
        // The other half is the body's: together they end before the request's own limit, so that a slow store is told
        // apart from a slow client.
        let timeout = (self.request_timeout / 2).min(Duration::from_secs(10))
            - Duration::from_millis(10).min(self.request_timeout / 4);
        let intake = Intake::new(self.engine.way(), Arc::clone(&self.book), timeout);
        let (book, pool) = (Arc::clone(&self.book), Arc::clone(&self.pool));
        let blocks = self.chain.clone().map(|chain| Blocks::new(chain, Arc::clone(&book), self.request_timeout));
        let lookup = StatusLookup::new(book, pool, blocks, self.config.health_timeout);
        let forwarder = self.config.chain.as_ref().and_then(|chain| chain.forwarder.clone());
        let gasless = self.chain.as_ref().zip(forwarder);
        let gasless =
            gasless.map(|(chain, forwarder)| Gasless::new(Arc::clone(chain), forwarder, Arc::clone(&self.book)));
        api::routes(ApiState { intake, gasless, lookup, book: Arc::clone(&self.book) })
    }

    /// The routes that relayers call.
    pub fn webhook_routes(&self) -> Option<Router> {
        let key = self.config.webhook_key.clone()?;
        Some(webhook::routes(WebhookState { book: Arc::clone(&self.book), key: Arc::new(key) }))
    }

    /// Consumes and reconciles until shutdown, then drains.
    pub async fn consume(&self, shutdown: CancellationToken) -> Summary {
        let me = ConsumerId::generate();
        let reconciler = Reconciler::new(
            Arc::clone(&self.book),
            Arc::clone(&self.pool),
            me.clone(),
            ReconcilerSettings {
                interval: self.config.reconcile_interval,
                dead_letters_every: self.config.dead_letters_every,
                consumer_dead_after: self.config.consumer_dead_after,
                clock_skew: self.config.relayer_clock_skew,
                relayer_retention: self.config.relayer_retention,
                question_timeout: QUESTION_TIMEOUT,
            },
        );
        let attempts = RetryPolicy {
            attempts_max: self.config.attempts_max,
            first_delay: self.config.retry_first_delay,
            factor: 2.0,
            delay_max: self.config.retry_delay_max,
        };
        let preflight = self.config.chain.as_ref().is_some_and(|chain| chain.preflight);
        let settings = ConsumerSettings {
            attempts,
            auto_replay_delay: self.config.auto_replay_delay,
            question_timeout: QUESTION_TIMEOUT,
        };
        let consumer = Consumer {
            book: Arc::clone(&self.book),
            pool: Arc::clone(&self.pool),
            order: Order::new(Arc::clone(&self.book), Arc::clone(&self.pool), self.chain.clone(), QUESTION_TIMEOUT),
            preflight: self.chain.clone().filter(|_| preflight),
            me: me.clone(),
            settings,
            shutdown: shutdown.clone(),
        };
        let options = PipelineOptions {
            concurrency: self.config.concurrency,
            drain_timeout: self.config.drain_timeout,
            panic_retry: attempts,
            ..PipelineOptions::default()
        };
        info!(action = "consumer_started", consumer = %me, "consuming {QUEUE}");
        // The pulse goes on while the last handlers finish: their claims are still alive.
        let drained = CancellationToken::new();
        let stop_sweeping = drained.clone().drop_guard();
        let pipeline = Pipeline::new(Arc::clone(&self.book.queue), options);
        let consuming = async {
            let summary = pipeline.run(Arc::new(consumer), shutdown).await;
            drop(stop_sweeping);
            summary
        };
        let (summary, ()) = tokio::join!(consuming, reconciler.run(drained));
        info!(action = "consumer_stopped", consumer = %me, "stopped: {summary:?}");
        summary
    }

    /// Keeps watch over the relayers and refreshes the gauges until shutdown.
    pub async fn watch(&self, shutdown: CancellationToken) {
        tokio::join!(self.pool.watch(shutdown.clone()), self.engine.watch(shutdown.clone()), self.measure(shutdown));
    }

    async fn measure(&self, shutdown: CancellationToken) {
        loop {
            if let Ok(depth) = self.book.queue.depth().await {
                telemetry::measure_queue(QUEUE, &depth);
            }
            if let Ok(census) = self.book.store.census().await {
                for (status, count) in census.open {
                    gauge!("baton_transactions_open", "status" => status.name()).set(count as f64);
                }
                let age = census.oldest_pending.map(|since| Timestamp::now().since(since)).unwrap_or_default();
                gauge!("baton_transactions_oldest_pending_seconds").set(age.as_secs_f64());
                gauge!("baton_claims").set(census.claims as f64);
                gauge!("baton_claims_outcome_unknown").set(census.claims_in_doubt as f64);
                gauge!("baton_transactions_forgotten").set(census.forgotten as f64);
            }
            tokio::select! {
                () = shutdown.cancelled() => return,
                () = tokio::time::sleep(MEASURE_EVERY) => {}
            }
        }
    }
}
