//! `serve`, `relay-api`, `queue-consumer`, `users-api` and `users-consumer`: the same parts in one process or several.
//!
//! A service opens its lanes, binds its port, then runs API, consumers and background checks until shutdown.

use std::process::ExitCode;
use std::sync::Arc;

use axum::Router;
use axum::middleware;
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::config::{Config, Service};
use crate::http::health::{HealthCheck, HealthState};
use crate::http::{auth, health, host, server};
use crate::relay::health::RelayHealth;
use crate::users::health::UsersHealth;
use crate::{relay, telemetry, users};

/// The lanes that a service works on.
pub struct Lanes {
    relay: Option<relay::lane::RelayLane>,
    users: Option<users::lane::UsersLane>,
}

impl Lanes {
    /// Opens the databases and queues of the service's lanes; nothing runs yet.
    pub async fn open(config: &Config, service: Service) -> anyhow::Result<Self> {
        let relay = if service.has_relay() { Some(relay::lane::RelayLane::open(config).await?) } else { None };
        let users = if service.has_users() { Some(users::lane::UsersLane::open(config).await?) } else { None };
        Ok(Self { relay, users })
    }

    /// Consumes until shutdown, then drains the messages in hand.
    async fn consume(&self, shutdown: &CancellationToken) {
        let relay = async {
            if let Some(lane) = &self.relay {
                lane.consume(shutdown.clone()).await;
            }
        };
        let users = async {
            if let Some(lane) = &self.users {
                lane.consume(shutdown.clone()).await;
            }
        };
        tokio::join!(relay, users);
    }

    /// Runs health checks of relayers and engines, and refreshes gauges, until shutdown.
    async fn watch(&self, shutdown: &CancellationToken) {
        let relay = async {
            if let Some(lane) = &self.relay {
                lane.watch(shutdown.clone()).await;
            }
        };
        let users = async {
            if let Some(lane) = &self.users {
                lane.watch(shutdown.clone()).await;
            }
        };
        tokio::join!(relay, users);
    }

    /// Closes the queues, so that acknowledgements still in transit are not lost with the connection, and the files.
    async fn close(&self) {
        if let Some(lane) = &self.relay {
            lane.close().await;
        }
        if let Some(lane) = &self.users {
            lane.close().await;
        }
    }

    fn health(&self, service: Service, metrics: PrometheusHandle) -> HealthState {
        let mut lanes: Vec<Arc<dyn HealthCheck>> = Vec::new();
        if let Some(lane) = &self.relay {
            let (guarded, pool) = (Arc::clone(&lane.guarded), Arc::clone(&lane.pool));
            lanes.push(Arc::new(RelayHealth { guarded, pool }));
        }
        if let Some(lane) = &self.users {
            let (store, queue) = (Arc::clone(&lane.store), Arc::clone(&lane.queue));
            lanes.push(Arc::new(UsersHealth { store, queue, consumes: service.consumes() }));
        }
        HealthState { service: service.name(), lanes, metrics }
    }
}

/// Runs a service until a signal stops it.
pub async fn run(config: Config, service: Service) -> anyhow::Result<ExitCode> {
    telemetry::start_logs(&config.log)?;
    for warning in &config.warnings {
        warn!(action = "variable_ignored", "{warning}");
    }
    let metrics = telemetry::start_metrics()?;
    let shutdown = super::shutdown_on_signal()?;
    let lanes = Lanes::open(&config, service).await?;
    let listener = server::bind(config.http.listen).await?;
    info!(action = "started", service = service.name(), address = %listener.local_addr()?, "{} is listening", service.name());
    run_parts(&config, service, &lanes, listener, metrics, shutdown).await
}

/// Runs a service on open lanes and a bound listener until shutdown, then drains in order.
pub async fn run_parts(
    config: &Config,
    service: Service,
    lanes: &Lanes,
    listener: TcpListener,
    metrics: PrometheusHandle,
    shutdown: CancellationToken,
) -> anyhow::Result<ExitCode> {
    let upkeep = telemetry::keep_up(metrics.clone(), shutdown.clone());
    let routes = routes(config, service, lanes, metrics);
    // In a process with API and consumer, the API and the checks stop after the drain: health stays readable meanwhile.
    let drained = CancellationToken::new();
    let consuming = async {
        if service.consumes() {
            lanes.consume(&shutdown).await;
        } else {
            shutdown.cancelled().await;
        }
        drained.cancel();
    };
    tokio::join!(server::serve(listener, routes, drained.clone()), consuming, lanes.watch(&drained), upkeep);
    lanes.close().await;
    info!(action = "stopped", service = service.name(), "{} stopped", service.name());
    Ok(ExitCode::SUCCESS)
}

fn routes(config: &Config, service: Service, lanes: &Lanes, metrics: PrometheusHandle) -> Router {
    let mut routes = health::routes(lanes.health(service, metrics));
    if service.has_api() {
        let keys = Arc::new(config.http.api_keys.clone());
        let mut api = Router::new();
        if let Some(lane) = &lanes.relay {
            api = api.merge(lane.api_routes());
        }
        if let Some(lane) = &lanes.users {
            api = api.merge(lane.api_routes());
        }
        api = api.layer(middleware::from_fn_with_state(keys, auth::require_key));
        if let Some(webhooks) = lanes.relay.as_ref().and_then(relay::lane::RelayLane::webhook_routes) {
            api = api.merge(webhooks);
        }
        routes = routes.merge(api);
    }
    if !config.http.hosts.is_empty() {
        let hosts: Arc<[String]> = config.http.hosts.clone().into();
        routes = routes.layer(middleware::from_fn_with_state(hosts, host::require_host));
    }
    server::with_layers(routes, config.http.body_bytes_max, config.http.request_timeout)
}
