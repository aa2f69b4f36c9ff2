//! All the relayers: hands out the next one to use. Choosing never waits on the network; it only waits for room when every
//! relayer that takes work is full. What it goes by is learned in the background: see [`super::watch`].

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use metrics::gauge;
use tokio::sync::Notify;
use tracing::{info, warn};

use super::client::RelayerClient;
use crate::clock::Clock;
use crate::config::RoutingSettings;
use crate::relay::relayer::routing::{ChainId, NoChoice, RelayerView, Router, Sent, Skipped};
use crate::relay::state::transaction::RelayerUrl;
use crate::relay::store::TransactionStore;

/// The configured relayers and what this process knows of them.
pub struct Pool {
    pub(super) clients: Vec<Arc<RelayerClient>>,
    router: Mutex<Router>,
    pub(super) settings: PoolSettings,
    pub(super) store: Arc<dyn TransactionStore>,
    pub(super) clock: Clock,
    /// Whether every relayer has been looked at once, its network included.
    pub(super) looked: AtomicBool,
    /// A transaction waits because every relayer is full: the store may show that they are not any more.
    pub(super) full: Notify,
    /// What the log has said of each relayer.
    pub(super) announced: Mutex<Vec<Announced>>,
}

/// How a pool chooses and watches its relayers.
#[derive(Debug, Clone)]
pub struct PoolSettings {
    /// How relayers are chosen, paused and skipped.
    pub routing: RoutingSettings,
    /// Pause between two health checks of a relayer.
    pub health_interval: Duration,
    /// Time limit of a health check.
    pub health_timeout: Duration,
    /// The chain id that relayers must have, if it is configured.
    pub chain_id: Option<u64>,
    /// Whether there is a chain to ask.
    pub has_chain: bool,
}

/// What the log has said of one relayer.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Announced {
    pub(super) jammed: bool,
    pub(super) wrong_network: bool,
    pub(super) shared_key: bool,
}

/// The relayer to use next. Report the result with [`Chosen::answered`]; dropped without that, the result counts as
/// unknown.
pub struct Chosen {
    pool: Arc<Pool>,
    index: usize,
    claimed: bool,
    answered: bool,
    /// Its client.
    pub client: Arc<RelayerClient>,
    /// Why this one, for the timeline.
    pub because: String,
}

/// No relayer can take work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unavailable(pub Vec<Skipped>);

impl std::fmt::Display for Unavailable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("no relayer can take work (")?;
        for (position, skipped) in self.0.iter().enumerate() {
            let comma = if position == 0 { "" } else { ", " };
            write!(f, "{comma}{skipped}")?;
        }
        f.write_str(")")
    }
}

/// Pause between two looks while no relayer takes work.
const READY_CHECK: Duration = Duration::from_millis(100);
/// The same while the relayers are looked at for the first time.
const LOOK_CHECK: Duration = Duration::from_millis(5);

impl Pool {
    /// A pool over these clients. Their load is counted in `store`.
    pub fn new(
        clients: Vec<RelayerClient>,
        settings: PoolSettings,
        store: Arc<dyn TransactionStore>,
        clock: Clock,
    ) -> Arc<Self> {
        let urls = clients.iter().map(|client| client.url().clone()).collect();
        let mut router = Router::new(urls, settings.routing.clone(), clock.instant());
        if let Some(id) = settings.chain_id {
            router.expect_chain_id(id);
        }
        if settings.has_chain {
            router.use_chain();
        }
        Arc::new(Self {
            announced: Mutex::new(vec![Announced::default(); clients.len()]),
            clients: clients.into_iter().map(Arc::new).collect(),
            router: Mutex::new(router),
            settings,
            store,
            clock,
            looked: AtomicBool::new(false),
            full: Notify::new(),
        })
    }

    /// The relayer of that name, for a question, which counts towards its rate limit; `None` if it is not configured.
    pub fn ask_one(&self, url: &RelayerUrl) -> Option<Arc<RelayerClient>> {
        let index = self.clients.iter().position(|client| client.url() == url)?;
        self.router().asked(index, self.clock.instant());
        Some(Arc::clone(&self.clients[index]))
    }

    /// What this relayer has told of the chain that it sends to; `None` if it is not configured.
    pub fn chain_id_of(&self, url: &RelayerUrl) -> Option<ChainId> {
        let index = self.clients.iter().position(|client| client.url() == url)?;
        Some(self.router().chain_id(index))
    }

    /// Takes this for its answer; for those that do not [`watch`](Self::watch) it.
    pub fn learn_chain_id(&self, url: &RelayerUrl, answer: ChainId) {
        let index = self.clients.iter().position(|client| client.url() == url).expect("it is configured");
        self.router().learn_chain_id(index, answer);
    }

    /// Every relayer, for one status lookup; `None` if the budget of lookups is used up.
    pub fn look_up(&self) -> Option<&[Arc<RelayerClient>]> {
        let within = self.router().look_up(self.clock.instant());
        within.then_some(self.clients.as_slice())
    }

    /// Every relayer.
    pub fn clients(&self) -> &[Arc<RelayerClient>] {
        &self.clients
    }

    /// The least busy relayer that takes work and is not in `tried`. Waits while all of those are full or rate limited.
    pub async fn choose(self: &Arc<Self>, tried: &[RelayerUrl]) -> Result<Chosen, Unavailable> {
        loop {
            match self.try_choose(tried) {
                Ok(chosen) => return Ok(chosen),
                Err(NoChoice::Wait(pause)) => self.clock.sleep(pause).await,
                Err(NoChoice::Unavailable(reasons)) => return Err(Unavailable(reasons)),
            }
        }
    }

    /// The same without waiting.
    pub fn try_choose(self: &Arc<Self>, tried: &[RelayerUrl]) -> Result<Chosen, NoChoice> {
        let selected = self.router().select(tried, self.clock.instant());
        match selected {
            Ok(choice) => Ok(Chosen {
                pool: Arc::clone(self),
                index: choice.index,
                claimed: false,
                answered: false,
                client: Arc::clone(&self.clients[choice.index]),
                because: choice.because,
            }),
            Err(none) => {
                if matches!(none, NoChoice::Wait(_)) && self.router().any_full() {
                    self.full.notify_one();
                }
                Err(none)
            }
        }
    }

    /// Returns once some relayer takes work; logs if it has to wait. Nothing is submitted before the first look at every
    /// relayer: one may be on another network.
    pub async fn able(&self) {
        while !self.looked.load(Ordering::Acquire) {
            self.clock.sleep(LOOK_CHECK).await;
        }
        let mut waited = false;
        loop {
            let reasons = match self.router().availability(self.clock.instant()) {
                Ok(()) => break,
                Err(reasons) => reasons,
            };
            if !waited {
                warn!(action = "receiving_stopped", "{}; the consumer stops receiving", Unavailable(reasons));
                gauge!("baton_consumer_receiving").set(0.0);
                waited = true;
            }
            self.clock.sleep(READY_CHECK).await;
        }
        if waited {
            info!(action = "receiving_resumed", "a relayer can take work again; the consumer receives");
        }
        gauge!("baton_consumer_receiving").set(1.0);
    }

    /// All relayers, for the health page and the metrics.
    pub fn view(&self) -> Vec<RelayerView> {
        self.router().view(self.clock.instant())
    }

    pub(super) fn router(&self) -> MutexGuard<'_, Router> {
        // The router's methods do not panic half-way: a poisoned lock still holds a usable router.
        self.router.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Chosen {
    /// The claim is stored: from now on the store counts the transaction.
    pub fn claimed(&mut self) {
        if !std::mem::replace(&mut self.claimed, true) {
            self.pool.router().claimed(self.index);
        }
    }

    /// Reports the result of the request.
    pub fn answered(mut self, sent: Sent) {
        self.answer(sent);
    }

    fn answer(&mut self, sent: Sent) {
        self.claimed();
        self.answered = true;
        self.pool.router().answered(self.index, sent, self.pool.clock.instant());
    }
}

impl Drop for Chosen {
    fn drop(&mut self) {
        if !self.answered {
            self.answer(Sent::Unknown);
        }
    }
}
