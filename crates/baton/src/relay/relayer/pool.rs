//! All the relayers: watches their health in the background and hands out the next one to use. Choosing never waits
//! on the network; it only waits for room when every relayer that takes work is full.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use metrics::{counter, gauge};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::client::{RelayerClient, describe};
use super::wire::ListedState;
use crate::clock::Clock;
use crate::config::RoutingSettings;
use crate::relay::relayer::routing::{HealthReport, NoChoice, Reason, RelayerView, Router, Sent};
use crate::relay::state::transaction::RelayerUrl;

/// The configured relayers and what this process knows of them.
pub struct Pool {
    clients: Vec<Arc<RelayerClient>>,
    router: Mutex<Router>,
    /// Pause between two health checks of a relayer.
    interval: Duration,
    /// Time limit of a health check.
    timeout: Duration,
    clock: Clock,
}

/// The relayer to use next. Report the result with [`Chosen::answered`]; dropped without that, the result counts as
/// unknown.
pub struct Chosen {
    pool: Arc<Pool>,
    index: usize,
    answered: bool,
    /// Its client.
    pub client: Arc<RelayerClient>,
    /// Why this one, for the timeline.
    pub because: String,
}

/// No relayer can take work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unavailable(pub Vec<(RelayerUrl, Reason)>);

impl std::fmt::Display for Unavailable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("no relayer can take work (")?;
        for (position, (url, reason)) in self.0.iter().enumerate() {
            let comma = if position == 0 { "" } else { ", " };
            write!(f, "{comma}{url}: {}", reason.name())?;
        }
        f.write_str(")")
    }
}

/// Pause between two looks while no relayer takes work.
const READY_CHECK: Duration = Duration::from_millis(100);

impl Pool {
    /// A pool over these clients.
    pub fn new(
        clients: Vec<RelayerClient>,
        settings: RoutingSettings,
        interval: Duration,
        timeout: Duration,
        clock: Clock,
    ) -> Arc<Self> {
        let urls = clients.iter().map(|client| client.url().clone()).collect();
        let router = Mutex::new(Router::new(urls, settings, clock.instant()));
        Arc::new(Self { clients: clients.into_iter().map(Arc::new).collect(), router, interval, timeout, clock })
    }

    /// The relayer of that name, for a question, which counts towards its rate limit; `None` if it is not configured.
    pub fn ask_one(&self, url: &RelayerUrl) -> Option<Arc<RelayerClient>> {
        let index = self.clients.iter().position(|client| client.url() == url)?;
        self.router().asked(index, self.clock.instant());
        Some(Arc::clone(&self.clients[index]))
    }

    /// Every relayer.
    pub fn clients(&self) -> &[Arc<RelayerClient>] {
        &self.clients
    }

    /// The least busy relayer that takes work and is not in `tried`. Waits while all of those are full or rate limited.
    pub async fn choose(self: &Arc<Self>, tried: &[RelayerUrl]) -> Result<Chosen, Unavailable> {
        loop {
            let selected = self.router().select(tried, self.clock.instant());
            match selected {
                Ok(choice) => {
                    return Ok(Chosen {
                        pool: Arc::clone(self),
                        index: choice.index,
                        answered: false,
                        client: Arc::clone(&self.clients[choice.index]),
                        because: choice.because,
                    });
                }
                Err(NoChoice::Wait(pause)) => self.clock.sleep(pause).await,
                Err(NoChoice::Unavailable(reasons)) => return Err(Unavailable(reasons)),
            }
        }
    }

    /// Returns once some relayer takes work; logs if it has to wait.
    pub async fn able(&self) {
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

    /// Checks the health of every relayer at each interval until shutdown.
    pub async fn watch(&self, shutdown: CancellationToken) {
        loop {
            let asked = futures::future::join_all((0..self.clients.len()).map(|index| self.ask(index)));
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                _ = asked => {}
            }
            self.router().age(self.clock.instant());
            self.measure();
            tokio::select! {
                biased;
                () = shutdown.cancelled() => return,
                () = self.clock.sleep(self.interval) => {}
            }
        }
    }

    async fn ask(&self, index: usize) {
        let client = &self.clients[index];
        let mark = self.router().asking(index);
        let answer = async {
            let listed = client.look(self.timeout).await?;
            let status = client.status(&listed, self.timeout).await?;
            Ok::<_, super::client::RelayerError>(HealthReport {
                state: if listed.state == status.state { status.state } else { worse(listed.state, status.state) },
                pending: status.pending,
                balance: status.balance,
                last_confirmed: status.last_confirmed,
            })
        };
        match answer.await {
            Ok(report) => self.router().reported(index, mark, &report, self.clock.instant()),
            Err(error) => {
                counter!("baton_relayer_health_failures_total", "relayer" => client.url().0.clone()).increment(1);
                if self.router().not_reported(index, error.is_only_slow()) {
                    warn!(action = "relayer_unwell", relayer = %client.url(), "its health check fails: {}", describe(&error));
                }
            }
        }
    }

    fn measure(&self) {
        for view in self.view() {
            let relayer = view.url.0;
            gauge!("baton_relayer_load", "relayer" => relayer.clone()).set(view.load as f64);
            gauge!("baton_relayer_able", "relayer" => relayer.clone()).set(if view.skipped.is_none() {
                1.0
            } else {
                0.0
            });
            for state in ["closed", "open", "half-open"] {
                gauge!("baton_relayer_breaker", "relayer" => relayer.clone(), "state" => state)
                    .set(if view.breaker == state { 1.0 } else { 0.0 });
            }
            let jammed = view.skipped == Some(Reason::Jammed);
            gauge!("baton_relayer_jammed", "relayer" => relayer).set(if jammed { 1.0 } else { 0.0 });
        }
    }

    fn router(&self) -> MutexGuard<'_, Router> {
        // The router's methods do not panic half-way: a poisoned lock still holds a usable router.
        self.router.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// List and status are two calls; the one that reports that the relayer takes no work is believed.
fn worse(a: ListedState, b: ListedState) -> ListedState {
    match (a, b) {
        (ListedState::Disabled, _) | (_, ListedState::Disabled) => ListedState::Disabled,
        (ListedState::Paused, _) | (_, ListedState::Paused) => ListedState::Paused,
        _ => ListedState::Active,
    }
}

impl Chosen {
    /// Reports the result of the request.
    pub fn answered(mut self, sent: Sent) {
        self.answered = true;
        self.pool.router().answered(self.index, sent, self.pool.clock.instant());
    }
}

impl Drop for Chosen {
    fn drop(&mut self) {
        if !self.answered {
            self.pool.router().answered(self.index, Sent::Unknown, self.pool.clock.instant());
        }
    }
}
