//! `serve`, `relay-api`, `queue-consumer`, `users-api`, `users-consumer` and `notifier`: the same parts in one process or several.
//!
//! A service binds its port, opens its lanes ([`super::lanes`]), and runs API, consumers and background checks until
//! shutdown.

use std::process::ExitCode;
use std::sync::{Arc, PoisonError, RwLock};

use axum::Router;
use axum::extract::Request;
use axum::middleware;
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tower_service::Service as _;
use tracing::{info, warn};

use super::lanes::Lanes;
use crate::config::{Config, HttpConfig, Service};
use crate::http::health::HealthState;
use crate::http::{auth, connections, descriptors, health, host, server};
use crate::telemetry;

/// Runs a service until a signal stops it.
pub async fn run(config: Config, service: Service) -> anyhow::Result<ExitCode> {
    telemetry::start_logs(&config.log)?;
    for warning in &config.warnings {
        warn!(action = "variable_ignored", "{warning}");
    }
    let metrics = telemetry::start_metrics()?;
    let shutdown = super::shutdown_on_signal()?;
    let lanes = Lanes::closed(service);
    tokio::select! {
        opened = lanes.try_open(&config) => opened?,
        () = shutdown.cancelled() => {}
    }
    let listeners = Listeners::bind(&config.http)?;
    let address = listeners.service.local_addr()?;
    let admin = listeners.admin.as_ref().and_then(|admin| admin.local_addr().ok()).map(|admin| admin.to_string());
    info!(action = "started", service = service.name(), %address, admin, "{} is listening", service.name());
    run_parts(&config, service, &lanes, listeners, metrics, shutdown).await
}

/// The sockets of a service.
pub struct Listeners {
    /// Clients and relayers.
    pub service: TcpListener,
    /// Probes and metrics; `None` if the port is in use and was not asked for.
    pub admin: Option<TcpListener>,
}

impl Listeners {
    /// Binds both; an error names the address.
    pub fn bind(config: &HttpConfig) -> anyhow::Result<Self> {
        let service = connections::bind(config.listen, "PORT (or --port)")?;
        let admin = match connections::bind(config.admin_listen, "ADMIN_PORT") {
            Err(failure) if !config.admin_port_set => {
                warn!(action = "no_admin_listener", "probes and metrics are on PORT only: {failure:#}");
                None
            }
            admin => Some(admin?),
        };
        Ok(Self { service, admin })
    }
}

/// Runs a service on bound listeners until shutdown, then drains in order. Lanes that are not open are opened, each as soon
/// as its servers answer.
pub async fn run_parts(
    config: &Config,
    service: Service,
    lanes: &Lanes,
    listeners: Listeners,
    metrics: PrometheusHandle,
    shutdown: CancellationToken,
) -> anyhow::Result<ExitCode> {
    let upkeep = telemetry::keep_up(metrics.clone(), shutdown.clone());
    let layered = |routes| server::with_layers(routes, config.http.body_bytes_max, config.http.request_timeout);
    let build = || {
        let health = lanes.health(service, metrics.clone());
        let admin = layered(for_own_hosts(config, health::admin_routes(health.clone())));
        Routes { service: layered(routes(config, service, lanes, health)), admin }
    };
    let current = Arc::new(RwLock::new(build()));
    let opening = async {
        let changed = || *current.write().unwrap_or_else(PoisonError::into_inner) = build();
        let opened = lanes.keep_opening(config, &shutdown, changed).await;
        if opened.is_err() {
            shutdown.cancel();
        }
        opened
    };
    let limits = descriptors::fit(config.http.connections);
    // In a process with API and consumer, the API and the checks stop after the drain: health stays readable meanwhile.
    let drained = CancellationToken::new();
    let consuming = async {
        lanes.consume(config, service, &shutdown).await;
        drained.cancel();
    };
    let routes = dispatch(&current, |routes| routes.service.clone());
    let admin_routes = dispatch(&current, |routes| routes.admin.clone());
    let serving_admin = async {
        if let Some(admin) = listeners.admin {
            connections::serve(admin, admin_routes, connections::ADMIN_LIMITS, drained.clone()).await;
        }
    };
    let ((), (), (), (), (), opened) = tokio::join!(
        connections::serve(listeners.service, routes, limits, drained.clone()),
        serving_admin,
        consuming,
        lanes.watch(&drained),
        upkeep,
        opening
    );
    lanes.close().await;
    opened?;
    info!(action = "stopped", service = service.name(), "{} stopped", service.name());
    Ok(ExitCode::SUCCESS)
}

/// The routes of the moment.
struct Routes {
    service: Router,
    admin: Router,
}

/// Passes each request to the routes of the moment: a lane that opens later adds its own.
fn dispatch(current: &Arc<RwLock<Routes>>, chosen: fn(&Routes) -> Router) -> Router {
    let current = Arc::clone(current);
    Router::new().fallback(move |request: Request| {
        let mut routes = chosen(&current.read().unwrap_or_else(PoisonError::into_inner));
        async move { routes.call(request).await }
    })
}

fn routes(config: &Config, service: Service, lanes: &Lanes, health: HealthState) -> Router {
    let mut routes = health::routes(health);
    if service.has_api() {
        let keys = Arc::new(config.http.api_keys.clone());
        let (keyed, open) = lanes.api_routes(config);
        routes = routes.merge(keyed.layer(middleware::from_fn_with_state(keys, auth::require_key))).merge(open);
    }
    for_own_hosts(config, routes)
}

/// Refuses requests for other hosts, if the configuration has names.
fn for_own_hosts(config: &Config, routes: Router) -> Router {
    if config.http.hosts.is_empty() {
        return routes;
    }
    let hosts: Arc<[String]> = config.http.hosts.clone().into();
    routes.layer(middleware::from_fn_with_state(hosts, host::require_host))
}
