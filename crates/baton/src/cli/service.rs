//! `serve`, `relay-api`, `queue-consumer`, `users-api` and `users-consumer`: the same parts in one process or several.
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
use crate::config::{Config, Service};
use crate::http::{auth, health, server};
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
    let listener = server::bind(config.http.listen).await?;
    info!(action = "started", service = service.name(), address = %listener.local_addr()?, "{} is listening", service.name());
    run_parts(&config, service, &lanes, listener, metrics, shutdown).await
}

/// Runs a service on a bound listener until shutdown, then drains in order. Lanes that are not open are opened, each as soon
/// as its servers answer.
pub async fn run_parts(
    config: &Config,
    service: Service,
    lanes: &Lanes,
    listener: TcpListener,
    metrics: PrometheusHandle,
    shutdown: CancellationToken,
) -> anyhow::Result<ExitCode> {
    let upkeep = telemetry::keep_up(metrics.clone(), shutdown.clone());
    let current = Arc::new(RwLock::new(routes(config, service, lanes, metrics.clone())));
    let opening = async {
        let changed = || {
            let routes = routes(config, service, lanes, metrics.clone());
            *current.write().unwrap_or_else(PoisonError::into_inner) = routes;
        };
        let opened = lanes.keep_opening(config, &shutdown, changed).await;
        if opened.is_err() {
            shutdown.cancel();
        }
        opened
    };
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
    let serving = server::serve(listener, dispatch(Arc::clone(&current)), drained.clone());
    let ((), (), (), (), opened) = tokio::join!(serving, consuming, lanes.watch(&drained), upkeep, opening);
    lanes.close().await;
    opened?;
    info!(action = "stopped", service = service.name(), "{} stopped", service.name());
    Ok(ExitCode::SUCCESS)
}

/// Passes each request to the routes of the moment: a lane that opens later adds its own.
fn dispatch(current: Arc<RwLock<Router>>) -> Router {
    Router::new().fallback(move |request: Request| {
        let mut routes = current.read().unwrap_or_else(PoisonError::into_inner).clone();
        async move { routes.call(request).await }
    })
}

fn routes(config: &Config, service: Service, lanes: &Lanes, metrics: PrometheusHandle) -> Router {
    let mut routes = health::routes(lanes.health(service, metrics));
    if service.has_api() {
        let keys = Arc::new(config.http.api_keys.clone());
        let (keyed, open) = lanes.api_routes();
        routes = routes.merge(keyed.layer(middleware::from_fn_with_state(keys, auth::require_key))).merge(open);
    }
    server::with_layers(routes, config.http.body_bytes_max, config.http.request_timeout)
}
