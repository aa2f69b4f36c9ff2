//! The product, put together as a service does it, over the simulated store, queue, network, clock and randomness.

use std::sync::Arc;
use std::time::Duration;

use alloy_primitives::U256;
use baton::clock::Clock;
use baton::config::{ChainConfig, GaslessPolicy, RoutingSettings, Secret};
use baton::randomness::Randomness;
use baton::relay::accept::intake::{AcceptMode, TransactionIntake};
use baton::relay::chain::Chain;
use baton::relay::chain::account::AccountReader;
use baton::relay::observe::status::StatusLookup;
use baton::relay::reconcile::chain_check::ChainCheck;
use baton::relay::reconcile::sweeps::{Reconciler, ReconcilerSettings};
use baton::relay::relayer::client::RelayerClient;
use baton::relay::relayer::pool::{Pool, PoolSettings};
use baton::relay::relayer::routing::ChainId;
use baton::relay::state::transaction::ConsumerId;
use baton::relay::store::TransactionStore;
use baton::relay::submit::consumer::{Consumer, ConsumerSettings};
use baton::relay::submit::nonce_order::NonceOrder;
use baton::relay::update::cache::Cache;
use baton::relay::update::guarded_store::GuardedStore;
use pipeline::{CancellationToken, RetryPolicy};

use super::chain::{CHAIN_ID, FINALITY, RPC_URL, SimChain};
use super::network::{SimTransport, url};
use super::queue::SimQueue;
use super::setup::Mutation;
use super::store::SimStore;
use super::world::{CLOCK_SKEW, CONSUMER_DEAD_AFTER, RETENTION, Sim};

const QUESTION_TIMEOUT: Duration = Duration::from_secs(5);
const HEALTH_TIMEOUT: Duration = Duration::from_millis(500);
const HEALTH_INTERVAL: Duration = Duration::from_secs(10);
const INTAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// A consumer process.
#[derive(Clone)]
pub struct ConsumerProcess {
    pub pool: Arc<Pool>,
    pub consumer: Arc<Consumer>,
    pub reconciler: Arc<Reconciler>,
}

/// The API process, and operators.
#[derive(Clone)]
pub struct ApiProcess {
    pub guarded: Arc<GuardedStore>,
    pub intake: Arc<TransactionIntake>,
    pub lookup: Arc<StatusLookup>,
}

fn open(sim: &Sim, consumer: Option<ConsumerId>) -> (Arc<GuardedStore>, Arc<Pool>) {
    let (mode, timings, nodes, chain_decides) = {
        let world = sim.w();
        (world.mode, world.mutation.timings(), world.nodes.len(), world.evm.is_some())
    };
    let clock = Clock::new(sim.clone());
    let guarded = Arc::new(GuardedStore {
        store: Arc::new(SimStore { sim: sim.clone(), consumer }),
        queue: Arc::new(SimQueue { sim: sim.clone() }),
        cache: Cache::default(),
        mode,
        timings,
        clock: clock.clone(),
        random: Randomness::new(sim.clone()),
        chain_decides,
    });
    let transport = Arc::new(SimTransport { sim: sim.clone() });
    let client = |node| RelayerClient::over(Arc::<SimTransport>::clone(&transport), &url(node).parse().unwrap());
    let routing = RoutingSettings {
        in_flight_max: Some(100),
        rate_per_second: None,
        balance_min: U256::ZERO,
        breaker_failures: 5,
        breaker_open: Duration::from_secs(5),
        breaker_open_max: Duration::from_secs(60),
        jam_after: Duration::from_secs(100_000),
        report_lifetime: Duration::from_secs(30),
    };
    let settings = PoolSettings {
        routing,
        health_interval: HEALTH_INTERVAL,
        health_timeout: HEALTH_TIMEOUT,
        chain_id: None,
        has_chain: chain_decides,
    };
    let pool = Pool::new((0..nodes).map(client).collect(), settings, Arc::clone(&guarded.store), clock);
    for client in pool.clients() {
        pool.learn_chain_id(client.url(), ChainId::NotTold);
    }
    (guarded, pool)
}

impl ConsumerProcess {
    pub fn start(sim: &Sim, me: &ConsumerId) -> Self {
        let (guarded, pool) = open(sim, Some(me.clone()));
        let (preflight, decides, mutation) = {
            let world = sim.w();
            (world.preflight, world.evm.is_some(), world.mutation)
        };
        let finality_blocks = if mutation == Mutation::NoFinality { 0 } else { FINALITY };
        let chain = ChainConfig {
            rpc_url: Secret::new(RPC_URL),
            rpc_timeout: Duration::from_secs(5),
            chain_id: decides.then_some(CHAIN_ID),
            preflight,
            gasless: GaslessPolicy { allow_value: true, gas_max: u64::MAX, preflight },
            forwarder: None,
            decides,
            finality_blocks,
            calls_per_second: None,
        };
        let chain =
            Arc::new(Chain::over(Arc::new(SimChain { sim: sim.clone() }), &chain, guarded.clock.clone()).unwrap());
        let check = decides.then(|| {
            let reader = AccountReader::new(Arc::clone(&chain), guarded.clock.clone(), finality_blocks);
            Arc::new(ChainCheck::new(Arc::new(reader), Arc::clone(&guarded), Arc::clone(&pool), QUESTION_TIMEOUT))
        });
        let settings = ReconcilerSettings {
            interval: Duration::from_secs(1),
            dead_letters_every: Duration::from_secs(5),
            dead_letters_reread_after: None,
            consumer_dead_after: CONSUMER_DEAD_AFTER,
            clock_skew: CLOCK_SKEW,
            relayer_retention: RETENTION,
            question_timeout: QUESTION_TIMEOUT,
        };
        let reconciler = Reconciler::new(Arc::clone(&guarded), Arc::clone(&pool), me.clone(), settings, check);
        let attempts = RetryPolicy {
            attempts_max: 3,
            first_delay: Duration::from_secs(2),
            factor: 2.0,
            delay_max: Duration::from_secs(60),
        };
        let consumer = Consumer {
            order: NonceOrder::new(Arc::clone(&guarded), Arc::clone(&pool), Some(Arc::clone(&chain)), QUESTION_TIMEOUT),
            gasless_preflight: preflight.then(|| Arc::clone(&chain)),
            preflight: preflight.then_some(chain),
            guarded,
            pool: Arc::clone(&pool),
            me: me.clone(),
            settings: ConsumerSettings {
                attempts,
                auto_replay_delay: Duration::from_secs(30),
                question_timeout: QUESTION_TIMEOUT,
            },
            shutdown: CancellationToken::new(),
        };
        Self { pool, consumer: Arc::new(consumer), reconciler: Arc::new(reconciler) }
    }
}

impl ApiProcess {
    pub fn start(sim: &Sim) -> Self {
        let (guarded, pool) = open(sim, None);
        let store: Arc<dyn TransactionStore> = Arc::clone(&guarded.store);
        // Rows are stored one by one: grouping them is the engine's affair.
        let mode = AcceptMode::RowThenMessage(Box::new(move |row| {
            let store = Arc::clone(&store);
            Box::pin(async move { store.accept(&[row]).await.remove(0) })
        }));
        let intake = TransactionIntake::new(mode, Arc::clone(&guarded), INTAKE_TIMEOUT);
        let lookup = StatusLookup::new(Arc::clone(&guarded), pool, None, HEALTH_TIMEOUT);
        Self { guarded, intake: Arc::new(intake), lookup: Arc::new(lookup) }
    }
}
