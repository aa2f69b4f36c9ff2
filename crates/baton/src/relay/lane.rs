//! The relay lane put together from the configuration: opened once per process, then its parts are run as the service
//! needs them (the API, the consumer, or both).

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use metrics::gauge;
use pipeline::{Pipeline, PipelineOptions, RetryPolicy, Summary};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::config::{Config, RelayConfig};
use crate::http::health::QueueCheck;
use crate::randomness::Randomness;
use crate::relay::accept::api::{self, AcceptApi};
use crate::relay::accept::gasless::Gasless;
use crate::relay::accept::intake::TransactionIntake;
use crate::relay::chain::Chain;
use crate::relay::chain::account::AccountReader;
use crate::relay::engine::{QUEUE, RelayEngine};
use crate::relay::health::{ChainLook, RelayHealth};
use crate::relay::observe::api::{self as read_api, ReadApi};
use crate::relay::observe::block::Blocks;
use crate::relay::observe::status::StatusLookup;
use crate::relay::observe::webhook::{self, WebhookState};
use crate::relay::reconcile::chain_check::ChainCheck;
use crate::relay::reconcile::sweeps::{Reconciler, ReconcilerSettings};
use crate::relay::relayer::client::RelayerClient;
use crate::relay::relayer::pool::{Pool, PoolSettings};
use crate::relay::state::transaction::ConsumerId;
use crate::relay::store::notifications::NotificationStore;
use crate::relay::submit::consumer::{Consumer, ConsumerSettings};
use crate::relay::submit::large_messages::LargeMessages;
use crate::relay::submit::nonce_order::NonceOrder;
use crate::relay::update::guarded_store::GuardedStore;
use crate::telemetry;

/// The relay lane of this process.
pub struct RelayLane {
    /// Store, queue, cache and clock.
    pub guarded: Arc<GuardedStore>,
    /// Endpoints of clients, and what is to be delivered to them.
    pub notifications: Arc<dyn NotificationStore>,
    /// The relayers.
    pub pool: Arc<Pool>,
    /// The chain, if `RPC_URL` is set.
    chain: Option<Arc<Chain>>,
    engine: RelayEngine,
    config: RelayConfig,
    request_timeout: Duration,
}

/// Time limit of a question to a relayer.
const QUESTION_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between two probes of a node that does not answer.
const PROBE_PAUSE: Duration = Duration::from_secs(10);
/// Pause between two refreshes of the gauges.
const MEASURE_EVERY: Duration = Duration::from_secs(5);

impl RelayLane {
    /// Opens the lane's store and queue; nothing runs yet.
    pub async fn open(config: &Config) -> anyhow::Result<Self> {
        let lane = Self::on(RelayEngine::open(config).await?, config)?;
        let engines = &config.engine;
        let store = match &engines.database_url {
            Some(url) => format!("MySQL, {}", url.address()),
            None => format!("embedded (SQLite), {}", lane.engine.describe_store()),
        };
        let queue = engines.relay_queue.describe();
        let cache =
            engines.redis_url.as_ref().map_or("in process".to_owned(), |url| format!("Redis, {}", url.address()));
        info!(action = "engines", lane = "relay", store, queue, cache, "the relay lane's engines are open");
        Ok(lane)
    }

    /// [`RelayLane::open`] for a command, which creates and migrates nothing.
    pub async fn open_existing(config: &Config) -> anyhow::Result<Self> {
        Self::on(RelayEngine::open_existing(config).await?, config)
    }

    fn on(engine: RelayEngine, config: &Config) -> anyhow::Result<Self> {
        let relay = config.relay.clone();
        let clock = engine.clock();
        let guarded = Arc::new(GuardedStore {
            store: engine.store(),
            queue: engine.queue(),
            cache: engine.cache(config)?,
            mode: relay.mode,
            timings: relay.timings,
            clock: clock.clone(),
            random: Randomness::system(),
            chain_decides: relay.chain.as_ref().is_some_and(|chain| chain.decides),
        });
        let clients = relay
            .relayers
            .iter()
            .map(|(url, key)| {
                RelayerClient::new(url, key, relay.timings.unacknowledged_max())
                    .map_err(|why| anyhow::anyhow!("OZ_RELAYER_URLS {url}: {why}"))
            })
            .collect::<anyhow::Result<Vec<_>>>()?;
        let settings = PoolSettings {
            routing: relay.routing.clone(),
            health_interval: relay.health_interval,
            health_timeout: relay.health_timeout,
            chain_id: relay.chain_id,
            has_chain: relay.chain.is_some(),
        };
        let pool = Pool::new(clients, settings, Arc::clone(&guarded.store), clock.clone());
        let chain = relay.chain.as_ref().map(|chain| Chain::new(chain, clock)).transpose();
        let chain = chain.map_err(|why| anyhow::anyhow!(why))?.map(Arc::new);
        let notifications = engine.notifications();
        Ok(Self {
            guarded,
            notifications,
            pool,
            chain,
            engine,
            config: relay,
            request_timeout: config.http.request_timeout,
        })
    }

    /// Closes the queue and the file, if there is one. Nothing may run any more.
    pub async fn close(&self) {
        self.guarded.queue.close().await;
        self.engine.close().await;
    }

    /// The lane's part of `/ready` and `/health`.
    pub fn health(&self) -> RelayHealth {
        let queue = QueueCheck { queue: Arc::clone(&self.guarded.queue), file: self.engine.queue_file() };
        // A process without relayers, such as a notifier, never asks the chain.
        let chain = self.chain.clone().filter(|_| !self.config.relayers.is_empty());
        let every = self.config.health_interval;
        let chain = chain.map(|chain| ChainLook::new(chain, self.guarded.clock.clone(), every));
        RelayHealth { guarded: Arc::clone(&self.guarded), queue, pool: Arc::clone(&self.pool), chain }
    }

    /// The routes that need an API key.
    pub fn api_routes(&self) -> Router {
        // The other half is for reading the body: together they end before the request's own limit, so that a slow store
        // can be told from a slow client.
        let timeout = (self.request_timeout / 2).min(Duration::from_secs(10))
            - Duration::from_millis(10).min(self.request_timeout / 4);
        let intake = TransactionIntake::new(self.engine.accept_mode(), Arc::clone(&self.guarded), timeout);
        let (guarded, pool) = (Arc::clone(&self.guarded), Arc::clone(&self.pool));
        let blocks = self.chain.clone().map(|chain| Blocks::new(chain, Arc::clone(&guarded), self.request_timeout));
        let lookup = StatusLookup::new(guarded, pool, blocks, self.config.health_timeout);
        let forwarder = self.config.chain.as_ref().and_then(|chain| chain.forwarder.clone());
        let policy = self.config.chain.as_ref().map(|chain| chain.gasless);
        let gasless = self.chain.as_ref().zip(forwarder).zip(policy);
        let gasless = gasless.map(|((chain, forwarder), policy)| {
            Gasless::new(Arc::clone(chain), forwarder, policy, Arc::clone(&self.guarded))
        });
        let lists = Semaphore::new(read_api::LISTS_MAX);
        let read = ReadApi { lookup, guarded: Arc::clone(&self.guarded), lists };
        api::routes(AcceptApi { intake, gasless }).merge(read_api::routes(read))
    }

    /// The routes that relayers call.
    pub fn webhook_routes(&self) -> Option<Router> {
        let keys: Arc<[_]> = self.config.webhook_keys.clone().into();
        (!keys.is_empty()).then(|| webhook::routes(WebhookState { guarded: Arc::clone(&self.guarded), keys }))
    }

    /// Consumes and reconciles until shutdown, then drains.
    pub async fn consume(&self, shutdown: CancellationToken) -> Summary {
        let me = ConsumerId::generate();
        let decides = self.config.chain.as_ref().filter(|config| config.decides);
        // One for all that ask: the rate and the pause are this consumer's, not theirs.
        let reader = self.chain.as_ref().zip(self.config.chain.as_ref()).map(|(chain, config)| {
            let reader = AccountReader::new(Arc::clone(chain), self.guarded.clock.clone(), config.finality_blocks);
            Arc::new(reader.with_rate(config.calls_per_second))
        });
        let check = reader.clone().zip(decides).map(|(reader, _)| {
            let (guarded, pool) = (Arc::clone(&self.guarded), Arc::clone(&self.pool));
            Arc::new(ChainCheck::new(reader, guarded, pool, QUESTION_TIMEOUT))
        });
        let reconciler = Arc::new(Reconciler::new(
            Arc::clone(&self.guarded),
            Arc::clone(&self.pool),
            me.clone(),
            ReconcilerSettings {
                interval: self.config.reconcile_interval,
                dead_letters_every: self.config.dead_letters_every,
                dead_letters_reread_after: self.config.dead_letters_reread_after,
                consumer_dead_after: self.config.consumer_dead_after,
                clock_skew: self.config.relayer_clock_skew,
                relayer_retention: self.config.relayer_retention,
                question_timeout: QUESTION_TIMEOUT,
            },
            check,
        ));
        let attempts = RetryPolicy {
            attempts_max: self.config.attempts_max,
            first_delay: self.config.retry_first_delay,
            factor: 2.0,
            delay_max: self.config.retry_delay_max,
        };
        let preflight = self.config.chain.as_ref().is_some_and(|chain| chain.preflight);
        let gasless_preflight =
            self.config.chain.as_ref().is_some_and(|chain| chain.preflight || chain.gasless.preflight);
        let settings = ConsumerSettings {
            attempts,
            auto_replay_delay: self.config.auto_replay_delay,
            question_timeout: QUESTION_TIMEOUT,
        };
        let consumer = Consumer {
            guarded: Arc::clone(&self.guarded),
            pool: Arc::clone(&self.pool),
            order: NonceOrder::new(
                Arc::clone(&self.guarded),
                Arc::clone(&self.pool),
                self.chain.clone(),
                QUESTION_TIMEOUT,
            ),
            preflight: self.chain.clone().filter(|_| preflight),
            gasless_preflight: self.chain.clone().filter(|_| gasless_preflight),
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
        // The heartbeat goes on while the last handlers finish: they still hold claims.
        let drained = CancellationToken::new();
        let stop_sweeping = drained.clone().drop_guard();
        let pipeline = Pipeline::new(Arc::clone(&self.guarded.queue), options);
        let consuming = async {
            let summary = pipeline.run(Arc::new(LargeMessages::new(consumer)), shutdown).await;
            drop(stop_sweeping);
            summary
        };
        let (summary, (), ()) =
            tokio::join!(consuming, reconciler.run(drained.clone()), self.watch_nonces(reader, drained.clone()));
        let Summary { received, done, retried, dead, handed_back, .. } = summary;
        info!(
            action = "consumer_stopped", consumer = %me, received, done, retried, dead, handed_back,
            "the consumer has stopped"
        );
        summary
    }

    /// Compares the relayers' open nonces with the chain, if there is one.
    async fn watch_nonces(&self, reader: Option<Arc<AccountReader>>, shutdown: CancellationToken) {
        let Some((reader, config)) = reader.zip(self.config.chain.as_ref()) else {
            return warn!(
                action = "no_chain",
                "RPC_URL is not set: Baton trusts the relayers' final status, so a transaction reported failed after \
                 signing may have been executed. Set RPC_URL (`baton dev`: --rpc) to verify it on the chain"
            );
        };
        if !config.decides {
            warn!(
                action = "no_chain",
                "CHAIN_DECIDES is false: Baton trusts the relayers' final status although RPC_URL is set, so a \
                 transaction reported failed after signing may have been executed"
            );
        }
        self.probe_node(&reader, &shutdown).await;
        self.pool.watch_nonces(&reader, shutdown).await;
    }

    /// Logs once whether the node at `RPC_URL` gives what the chain check needs; waits while it does not answer.
    async fn probe_node(&self, reader: &AccountReader, shutdown: &CancellationToken) {
        let mut warned = false;
        loop {
            match reader.probe().await {
                Ok(true) => {
                    return info!(action = "chain_ready", "the node at RPC_URL supports everything Baton needs");
                }
                Ok(false) => {
                    return info!(
                        action = "chain_ready",
                        "the node at RPC_URL keeps no history: the blocks since a claim are read one by one"
                    );
                }
                Err(error) if !warned => {
                    let why = crate::errors::chain(&error);
                    warn!(
                        action = "chain_incompatible",
                        "the node at RPC_URL does not answer as needed, so no signed transaction becomes final: {why}"
                    );
                    warned = true;
                }
                Err(_) => {}
            }
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                () = self.guarded.clock.sleep(PROBE_PAUSE) => {}
            }
        }
    }

    /// Keeps watch over the relayers and refreshes the gauges until shutdown.
    pub async fn watch(&self, shutdown: CancellationToken) {
        tokio::join!(
            self.pool.watch(self.chain.clone(), shutdown.clone()),
            self.engine.watch(shutdown.clone()),
            self.measure(shutdown)
        );
    }

    async fn measure(&self, shutdown: CancellationToken) {
        loop {
            if let Ok(depth) = self.guarded.queue.depth().await {
                telemetry::measure_queue(QUEUE, &depth);
            }
            if let Ok(counts) = self.guarded.store.counts().await {
                for (status, count) in counts.open {
                    gauge!("baton_transactions_open", "status" => status.name()).set(count as f64);
                }
                let now = self.guarded.clock.now();
                let age = counts.oldest_pending.map(|since| now.since(since)).unwrap_or_default();
                gauge!("baton_transactions_oldest_pending_seconds").set(age.as_secs_f64());
                gauge!("baton_claims").set(counts.claims as f64);
                gauge!("baton_claims_outcome_unknown").set(counts.claims_outcome_unknown as f64);
                gauge!("baton_transactions_forgotten").set(counts.forgotten as f64);
            }
            // Logs an outage, once; without it a process that reads nothing from Redis would not notice.
            self.guarded.cache.ping().await;
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                () = self.guarded.clock.sleep(MEASURE_EVERY) => {}
            }
        }
    }
}
