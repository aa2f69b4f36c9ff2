//! The lanes of a process. Each opens on its own: while one waits for its database or queue, the other works, and the
//! process answers `/live`, and `/ready` with 503.

use std::future::Future;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use axum::{Router, routing};
use metrics_exporter_prometheus::PrometheusHandle;
use serde_json::{Map, json};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::config::{Config, Service};
use crate::http::health::{HealthCheck, HealthState, LaneHealth};
use crate::http::problem::Problem;
use crate::notify::address_guard::AddressGuard;
use crate::notify::api::{self, Recovering, WebhookApi};
use crate::notify::notifier::Notifier;
use crate::relay::lane::RelayLane;
use crate::servers::{self, Server};
use crate::users::lane::UsersLane;

/// The lanes that a service works on, open or not yet.
pub struct Lanes {
    relay: Option<Arc<Slot<RelayLane>>>,
    users: Option<Arc<Slot<UsersLane>>>,
}

/// Longest time that the first attempt to open a lane delays the listener.
const FIRST_OPEN_MAX: Duration = Duration::from_secs(60);
/// Pause between two attempts to open a lane whose server is away.
const OPEN_PAUSE: Duration = Duration::from_secs(1);

impl Lanes {
    /// The service's lanes, none of them open.
    pub fn closed(service: Service) -> Self {
        let relay = service.has_relay().then(|| Slot::new("relay", &["/api/v1/relay", "/api/v1/webhooks"]));
        let users = service.has_users().then(|| Slot::new("users", &["/api/v1/users"]));
        Self { relay, users }
    }

    /// Opens the databases and queues of the service's lanes; nothing runs yet.
    pub async fn open(config: &Config, service: Service) -> anyhow::Result<Self> {
        let lanes = Self::closed(service);
        if let Some(slot) = &lanes.relay {
            slot.set(RelayLane::open(config).await?);
        }
        if let Some(slot) = &lanes.users {
            slot.set(UsersLane::open(config).await?);
        }
        Ok(lanes)
    }

    /// Tries once to open each lane, so that a service whose servers are there works from its first connection on. Returns an
    /// error that waiting does not cure.
    pub async fn try_open(&self, config: &Config) -> anyhow::Result<()> {
        let relay = async {
            let Some(slot) = &self.relay else { return Ok(()) };
            slot.try_open(&servers::relay_servers(config), Box::pin(RelayLane::open(config))).await
        };
        let users = async {
            let Some(slot) = &self.users else { return Ok(()) };
            slot.try_open(&servers::users_servers(config), Box::pin(UsersLane::open(config))).await
        };
        tokio::try_join!(relay, users).map(|_| ())
    }

    /// Opens each lane that is not open, waits for servers that are away, and calls `opened` after each. Returns on
    /// shutdown, or with an error that waiting does not cure.
    pub async fn keep_opening(
        &self,
        config: &Config,
        shutdown: &CancellationToken,
        opened: impl Fn(),
    ) -> anyhow::Result<()> {
        let relay = async {
            let Some(slot) = &self.relay else { return Ok(()) };
            slot.keep_opening(&servers::relay_servers(config), || Box::pin(RelayLane::open(config)), shutdown, &opened)
                .await
        };
        let users = async {
            let Some(slot) = &self.users else { return Ok(()) };
            slot.keep_opening(&servers::users_servers(config), || Box::pin(UsersLane::open(config)), shutdown, &opened)
                .await
        };
        tokio::try_join!(relay, users).map(|_| ())
    }

    /// Consumes messages and delivers notifications, as the service does, until shutdown, then drains what is in hand.
    pub async fn consume(&self, config: &Config, service: Service, shutdown: &CancellationToken) {
        let relay = async {
            if service.consumes()
                && let Some(lane) = when_open(self.relay.as_deref(), shutdown).await
            {
                lane.consume(shutdown.clone()).await;
            }
        };
        let users = async {
            if service.consumes()
                && let Some(lane) = when_open(self.users.as_deref(), shutdown).await
            {
                lane.consume(shutdown.clone()).await;
            }
        };
        tokio::join!(relay, users, self.notify(config, service, shutdown), shutdown.cancelled());
    }

    async fn notify(&self, config: &Config, service: Service, shutdown: &CancellationToken) {
        if !config.notify.delivers(service) {
            return;
        }
        let Some(lane) = when_open(self.relay.as_deref(), shutdown).await else { return };
        let (store, clock) = (Arc::clone(&lane.notifications), lane.guarded.clock.clone());
        let notifier = Notifier::new(store, clock, config.notify.clone(), config.relay.drain_timeout);
        if let Err(failure) = notifier.run(shutdown.clone()).await {
            error!(action = "notifier_failed", "{failure:#}");
            // It has nothing else to do.
            if service == Service::Notifier {
                shutdown.cancel();
            }
        }
    }

    /// Runs health checks of relayers and engines, and refreshes gauges, until shutdown.
    pub async fn watch(&self, shutdown: &CancellationToken) {
        let relay = async {
            if let Some(lane) = when_open(self.relay.as_deref(), shutdown).await {
                lane.watch(shutdown.clone()).await;
            }
        };
        let users = async {
            if let Some(lane) = when_open(self.users.as_deref(), shutdown).await {
                lane.watch(shutdown.clone()).await;
            }
        };
        tokio::join!(relay, users);
    }

    /// Closes the queues, so that acknowledgements still in transit are not lost with the connection, and the files.
    pub async fn close(&self) {
        if let Some(lane) = self.relay.as_ref().and_then(|slot| slot.lane.get()) {
            lane.close().await;
        }
        if let Some(lane) = self.users.as_ref().and_then(|slot| slot.lane.get()) {
            lane.close().await;
        }
    }

    /// What `/ready`, `/health` and `/metrics` show.
    pub fn health(&self, service: Service, metrics: PrometheusHandle) -> HealthState {
        let mut lanes: Vec<Arc<dyn HealthCheck>> = Vec::new();
        if let Some(slot) = &self.relay {
            lanes.push(match slot.lane.get() {
                Some(lane) => Arc::new(lane.health()),
                None => Arc::clone(slot) as Arc<dyn HealthCheck>,
            });
        }
        if let Some(slot) = &self.users {
            lanes.push(match slot.lane.get() {
                Some(lane) => Arc::new(lane.health(service.consumes())),
                None => Arc::clone(slot) as Arc<dyn HealthCheck>,
            });
        }
        HealthState { service: service.name(), lanes, metrics, shared: Default::default() }
    }

    /// The routes that need an API key, and those that relayers call. A lane that is not open answers 503.
    pub fn api_routes(&self, config: &Config) -> (Router, Router) {
        let (mut keyed, mut open) = (Router::new(), Router::new());
        if let Some(slot) = &self.relay {
            match slot.lane.get() {
                Some(lane) => {
                    keyed = keyed.merge(lane.api_routes()).merge(webhook_routes(config, lane));
                    open = open.merge(lane.webhook_routes().unwrap_or_default());
                }
                None => open = open.merge(slot.closed_routes()),
            }
        }
        if let Some(slot) = &self.users {
            match slot.lane.get() {
                Some(lane) => keyed = keyed.merge(lane.api_routes()),
                None => open = open.merge(slot.closed_routes()),
            }
        }
        (keyed, open)
    }
}

/// The routes by which clients manage their endpoints.
fn webhook_routes(config: &Config, lane: &RelayLane) -> Router {
    api::routes(WebhookApi {
        store: Arc::clone(&lane.notifications),
        guard: AddressGuard::new((&config.notify).into()),
        clock: lane.guarded.clock.clone(),
        random: lane.guarded.random.clone(),
        endpoints_max: config.notify.endpoints_max,
        retention: config.notify.retention,
        recovering: Recovering::default(),
    })
}

/// The lane, once it is open; `None` if there is none, or on shutdown.
async fn when_open<'s, L>(slot: Option<&'s Slot<L>>, shutdown: &CancellationToken) -> Option<&'s L> {
    let slot = slot?;
    tokio::select! {
        biased;
        () = slot.opened.cancelled() => slot.lane.get(),
        () = shutdown.cancelled() => None,
    }
}

/// A lane that is open, or will be.
struct Slot<L> {
    name: &'static str,
    paths: &'static [&'static str],
    lane: OnceLock<L>,
    /// Cancelled once the lane is there.
    opened: CancellationToken,
    /// The server that it waits for.
    waits_for: Mutex<Option<Server>>,
}

impl<L> Slot<L> {
    fn new(name: &'static str, paths: &'static [&'static str]) -> Arc<Self> {
        let (lane, opened) = (OnceLock::new(), CancellationToken::new());
        Arc::new(Self { name, paths, lane, opened, waits_for: Mutex::default() })
    }

    fn set(&self, lane: L) {
        if self.lane.set(lane).is_ok() {
            self.opened.cancel();
        }
    }

    async fn try_open(&self, servers: &[Server], open: impl Future<Output = anyhow::Result<L>>) -> anyhow::Result<()> {
        match tokio::time::timeout(FIRST_OPEN_MAX, open).await {
            Ok(Ok(lane)) => self.set(lane),
            Ok(Err(error)) if servers::awaited(servers, &error).await.is_none() => return Err(error),
            // Tried again while the service runs.
            Ok(Err(_)) | Err(_) => {}
        }
        Ok(())
    }

    async fn keep_opening<F: Future<Output = anyhow::Result<L>>>(
        &self,
        servers: &[Server],
        open: impl Fn() -> F,
        shutdown: &CancellationToken,
        opened: &impl Fn(),
    ) -> anyhow::Result<()> {
        if self.lane.get().is_some() {
            return Ok(());
        }
        let trying = async {
            loop {
                let error = match open().await {
                    Ok(lane) => return Ok(lane),
                    Err(error) => error,
                };
                let Some(server) = servers::awaited(servers, &error).await else { return Err(error) };
                let news = self.waiting().replace(server.clone()).as_ref() != Some(&server);
                if news {
                    warn!(
                        action = "waiting_for_server",
                        lane = self.name,
                        "the {} lane waits for {server}: {error:#}",
                        self.name
                    );
                }
                tokio::time::sleep(OPEN_PAUSE).await;
            }
        };
        let lane = tokio::select! {
            biased;
            () = shutdown.cancelled() => return Ok(()),
            lane = trying => lane?,
        };
        if let Some(server) = self.waiting().take() {
            info!(action = "server_back", lane = self.name, "{server} answers; the {} lane starts", self.name);
        }
        self.set(lane);
        opened();
        Ok(())
    }

    fn waiting(&self) -> std::sync::MutexGuard<'_, Option<Server>> {
        self.waits_for.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn closed_routes(&self) -> Router {
        let closed = || routing::any(|| async { Problem::starting() });
        let paths = self.paths.iter();
        paths.fold(Router::new(), |routes, path| {
            routes.route(path, closed()).route(&format!("{path}/{{*rest}}"), closed())
        })
    }
}

#[async_trait]
impl<L: Send + Sync + 'static> HealthCheck for Slot<L> {
    async fn is_ready(&self) -> bool {
        false
    }

    async fn check(&self) -> LaneHealth {
        let server = self.waiting().as_ref().map(ToString::to_string);
        let part = json!({ "status": "starting", "waitsFor": server });
        LaneHealth { healthy: false, parts: Map::from_iter([(self.name.to_owned(), part)]) }
    }
}
