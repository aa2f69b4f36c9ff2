//! `serve`, `relay-api` and `queue-consumer`: the same parts, in one process or in two.

use std::process::ExitCode;
use std::sync::Arc;

use axum::Router;
use axum::middleware;
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::config::{Config, Service};
use crate::http::health::HealthState;
use crate::http::{auth, health, server};
use crate::relay::lane::Lane;
use crate::telemetry;

/// Runs a service until it is told to stop.
pub async fn run(config: Config, service: Service) -> anyhow::Result<ExitCode> {
    telemetry::start_logs(&config.log)?;
    let metrics = telemetry::start_metrics()?;
    let shutdown = super::shutdown_on_signal()?;
    let lane = Lane::open(&config).await?;
    let listener = server::bind(config.http.listen).await?;
    info!(action = "started", address = %listener.local_addr()?, "{} listens", name(service));
    run_parts(&config, service, &lane, listener, metrics, shutdown).await
}

/// Runs the parts of a service on an open lane and a bound listener, until shutdown; drains in order.
pub async fn run_parts(
    config: &Config,
    service: Service,
    lane: &Lane,
    listener: TcpListener,
    metrics: PrometheusHandle,
    shutdown: CancellationToken,
) -> anyhow::Result<ExitCode> {
    let upkeep = telemetry::keep_up(metrics.clone(), shutdown.clone());
    let routes = routes(config, service, lane, metrics);
    // The API and the watch outlive the consumer's drain only in a process of both; health stays readable meanwhile.
    let drained = CancellationToken::new();
    let consumes = matches!(service, Service::Serve | Service::QueueConsumer);
    let consuming = async {
        if consumes {
            lane.consume(shutdown.clone()).await;
        } else {
            shutdown.cancelled().await;
        }
        drained.cancel();
    };
    tokio::join!(server::serve(listener, routes, drained.clone()), consuming, lane.watch(drained.clone()), upkeep);
    info!(action = "stopped", "{} stopped", name(service));
    Ok(ExitCode::SUCCESS)
}

fn routes(config: &Config, service: Service, lane: &Lane, metrics: PrometheusHandle) -> Router {
    let state =
        HealthState { service: name(service), book: Arc::clone(&lane.book), pool: Arc::clone(&lane.pool), metrics };
    let mut routes = health::routes(state);
    if service != Service::QueueConsumer {
        let keys = Arc::new(config.http.api_keys.clone());
        let mut api = lane.api_routes().layer(middleware::from_fn_with_state(keys, auth::require_key));
        if let Some(webhooks) = lane.webhook_routes() {
            api = api.merge(webhooks);
        }
        routes = routes.merge(api);
    }
    server::with_layers(routes, config.http.body_bytes_max, config.http.request_timeout)
}

fn name(service: Service) -> &'static str {
    match service {
        Service::Serve => "serve",
        Service::RelayApi => "relay-api",
        Service::QueueConsumer => "queue-consumer",
        Service::Command => "command",
    }
}
