//! One run: its chain, its relayers, its processes, and the time from the first request to the last settled row.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use alloy_primitives::{Address, Bytes, hex};
use harness::chain::{Chain, PrivateKeySigner, TransactionRequest, key_text};
use harness::proxy::Proxy;
use harness::relayer::{ChainLink, ChainOptions, Relayer, Timing};
use harness::servers::{Server, Servers};
use harness::wait::eventually_ok;
use tokio::task::JoinHandle;

use crate::load::{Load, Sent};
use crate::relay_fixture::{RelayFixture, RelaySetup, SOON};
use crate::rpc_proxy::RpcProxy;
use crate::verdict::Verdict;
use crate::weather::{Storm, calm};

const RELAYERS: usize = 3;
/// Time between two blocks.
const BLOCK: Duration = Duration::from_millis(250);
/// Rows that do not move for this long are waiting for good. A row without news is looked at every minute or less often.
const QUIET: Duration = Duration::from_secs(150);
/// The same without a chain, where some wait in any case; for every 50 transactions one second more.
const QUIET_WITHOUT_CHAIN: Duration = Duration::from_secs(20);
/// Baton's own node goes on failing for this long after the last request, which is when absences that no list proves begin to count.
const NODE_FAILS: Duration = Duration::from_secs(30);
/// Deadline of the wait for the end, over all.
const END: Duration = Duration::from_secs(600);
/// A relayer that has lost a signature gives the record up as unsigned after this long, counted from its last restart. By
/// then the call is mined: every gap before it is given up within 3 s, filled 4 s later, and mined unless the chain is frozen,
/// for 3 s at most. Baton cannot know of a call that still waits behind a gap (ADR 10).
const LOST_GIVEN_UP: Duration = Duration::from_secs(14);
/// Creates a contract that takes every call, and reverts those whose data begin with 0xff.
const TARGET: [u8; 30] = hex!("601380600b6000396000f3" "60003560001a60ff14600d57005b60006000fd");

/// The settings of one run.
#[derive(Clone, Debug)]
pub struct Run {
    pub name: &'static str,
    pub seed: u64,
    pub transactions: usize,
    /// Baton has `RPC_URL`.
    pub rpc: bool,
    /// Relayers behave and none is killed.
    pub calm: bool,
    /// One relayer executes some POSTs twice.
    pub sent_twice: bool,
    /// Accepted transactions a second, on average.
    pub per_second: u64,
}

impl Run {
    pub fn from_env(name: &'static str) -> Self {
        let number = |name: &str, default: u64| match std::env::var(name) {
            Ok(text) => text.parse().unwrap_or_else(|_| panic!("{name} is a whole number")),
            Err(_) => default,
        };
        let (seed, transactions) = (number("MISLED_SEED", 20_261_118), number("MISLED_TRANSACTIONS", 100) as usize);
        let (rpc, per_second) = (number("MISLED_RPC", 1) == 1, number("MISLED_PER_SECOND", 10));
        Self { name, seed, transactions, rpc, calm: false, sent_twice: false, per_second }
    }
}

/// Everything that runs. Dropping it stops it.
pub struct World {
    pub run: Run,
    pub chain: Chain,
    pub rpc: RpcProxy,
    /// Between Baton and `rpc`.
    pub rpc_link: Proxy,
    pub relay: RelayFixture,
    pub accounts: Vec<Address>,
    pub links: Vec<Arc<ChainLink>>,
    pub target: Address,
    miner: Miner,
    _servers: Servers,
}

impl World {
    pub async fn start(run: Run) -> Self {
        println!(
            "misled, {}: seed {}, {} transactions (repeat: MISLED_SEED={} MISLED_TRANSACTIONS={} cargo test -p baton --test misled)",
            run.name, run.seed, run.transactions, run.seed, run.transactions
        );
        let servers = Servers::running(&[Server::Chain]).await;
        let chain = Chain::of(&servers);
        chain.set_automine(false).await;
        let miner = Miner::start(&chain);
        let mut keys = Vec::new();
        for _ in 0..RELAYERS {
            keys.push(chain.funded_key().await);
        }
        let target = deploy(&chain).await;
        let rpc = RpcProxy::start(&chain).await;
        let rpc_link = Proxy::start(rpc.url().trim_start_matches("http://")).await;
        let mut relay = set_up(&run, &keys, &rpc_link).start().await;
        relay.add_consumer().await;
        let mut links = Vec::new();
        for (relayer, key) in relay.relayers.iter().zip(&keys) {
            let rpc = chain.url().parse().unwrap();
            let key = key_text(key).parse().unwrap();
            links.push(relayer.join_chain(ChainOptions { rpc, key, well_known: false }).await.unwrap());
        }
        let accounts = keys.iter().map(PrivateKeySigner::address).collect();
        Self { run, chain, rpc, rpc_link, relay, accounts, links, target, miner, _servers: servers }
    }

    /// Sends everything under faults and kills, lets it come to rest, and reads the chain.
    pub async fn run(mut self) -> Verdict {
        let started = Instant::now();
        let load = Load::new(&self);
        let storm = Storm::new(&self.run, &self.relay.relayers);
        let over = AtomicBool::new(false);
        let sending = async {
            let sent = load.send_all().await;
            over.store(true, Ordering::Relaxed);
            sent
        };
        let (sent, (), (), (), ()) = tokio::join!(
            sending,
            storm.over_relayers(&over),
            storm.over_consumers(&mut self.relay.consumers, &over),
            storm.over_chain(&self.miner.frozen, &over),
            storm.over_node(&self.rpc_link, &self.rpc, || !over.load(Ordering::Relaxed))
        );
        let sent_for = started.elapsed();
        for (index, relayer) in self.relay.relayers.iter().enumerate() {
            relayer.set_faults(calm(&self.run, index));
        }
        self.rest_while_the_node_fails(&sent, &storm).await;
        self.webhooks_delivered(storm.sent_twice()).await;
        Verdict::read(self, sent, &storm, sent_for, started.elapsed()).await
    }

    /// [`Self::rest`], while Baton's own node goes on failing for some time.
    async fn rest_while_the_node_fails(&self, sent: &[Sent], storm: &Storm) {
        let ended = Instant::now();
        let failing = storm.over_node(&self.rpc_link, &self.rpc, || ended.elapsed() < NODE_FAILS);
        let mut resting = pin!(self.rest(sent));
        tokio::select! {
            () = &mut resting => {}
            () = failing => resting.await,
        }
    }

    /// Waits until every row is final, or no row has moved for a while. Gaps are filled meanwhile, as they are from outside
    /// when a relayer does not do it.
    async fn rest(&self, sent: &[Sent]) {
        let (started, mut moved) = (Instant::now(), Instant::now());
        let slow = Duration::from_secs(self.run.transactions as u64 / 50);
        let quiet = if self.run.rpc { QUIET } else { QUIET_WITHOUT_CHAIN + slow };
        let mut before = sent.len() + 1;
        while started.elapsed() < END && moved.elapsed() < quiet {
            for relayer in &self.relay.relayers {
                relayer.fill_gaps();
            }
            let (_, health) = self.relay.get("/health").await;
            let open = &health["parts"]["store"]["open"];
            let open = ["pending", "submitted"].iter().map(|status| open[*status].as_u64().unwrap() as usize).sum();
            if open == 0 {
                return;
            }
            if open != before {
                (before, moved) = (open, Instant::now());
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    }
}

impl World {
    /// Waits for the second transactions of the POSTs that relayers send twice, and for the webhooks about them.
    async fn webhooks_delivered(&self, sent_twice: usize) {
        eventually_ok(SOON, "every second transaction to be sent and reported", || async {
            let relayers = &self.relay.relayers;
            let sent =
                relayers.iter().flat_map(|relayer| relayer.accepted()).filter(|post| post.broadcasts > 1).count();
            let waiting = |relayer: &Relayer| relayer.deliveries().iter().filter(|one| !one.delivered).count();
            match (sent, relayers.iter().map(waiting).sum::<usize>()) {
                _ if sent_twice == 0 => Ok(()),
                (sent, 0) if sent == sent_twice => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
    }
}

fn set_up(run: &Run, keys: &[PrivateKeySigner], rpc: &Proxy) -> RelaySetup {
    let mut setup = RelaySetup::relayers(RELAYERS)
        .split()
        .env("CHAIN_FINALITY_BLOCKS", "3")
        .env("RECONCILE_SUBMITTED_MS", "1000")
        // Longer than a relayer here leaves a record unsigned, as the default is for a real one.
        .env("RECONCILE_UNPROVEN_MS", "20000")
        // The default: the clocks of two relayers are further off.
        .env("RELAYER_CLOCK_SKEW_MS", "30000")
        .env("RELAYER_JAM_AFTER_MS", "5000")
        // Each health check costs a call to the chain, which the figures would show.
        .env("RELAYER_HEALTH_INTERVAL_MS", "1000")
        // Four blocks a second instead of one in twelve seconds: what is shared for a block is shared for a shorter time.
        .env("RPC_RATE_PER_SECOND", "400")
        .env("RELAYER_MAX_IN_FLIGHT", (run.per_second * 20).to_string());
    if run.rpc {
        setup = setup.env("RPC_URL", rpc.url());
    }
    for (index, key) in keys.iter().enumerate() {
        let (address, seed) = (key.address().to_string().to_lowercase(), run.seed + index as u64);
        setup = setup.relayer(index, |options| {
            options.address = Some(address);
            options.seed = seed;
            options.timing = Timing {
                sent: Duration::from_millis(100),
                submitted: Duration::from_millis(250),
                mined: None,
                confirmed: Duration::from_millis(900),
                given_up: Duration::from_millis(1500),
                lost_given_up: LOST_GIVEN_UP,
                jitter_percent: 100,
            };
        });
    }
    setup
}

async fn deploy(chain: &Chain) -> Address {
    let code = TransactionRequest::default().with_deploy_code(Bytes::from_static(&TARGET)).with_gas_limit(200_000);
    let receipt = chain.send(&chain.funded_key().await, code).await;
    receipt.contract_address.expect("it was created")
}

/// Mines a block every [`BLOCK`] until it is dropped, except while the chain is frozen.
struct Miner {
    frozen: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl Miner {
    fn start(chain: &Chain) -> Self {
        let (chain, frozen) = (chain.clone(), Arc::new(AtomicBool::new(false)));
        let is_frozen = Arc::clone(&frozen);
        let task = tokio::spawn(async move {
            loop {
                if !is_frozen.load(Ordering::Relaxed) {
                    chain.mine().await;
                }
                tokio::time::sleep(BLOCK).await;
            }
        });
        Self { frozen, task }
    }
}

impl Drop for Miner {
    fn drop(&mut self) {
        self.task.abort();
    }
}
