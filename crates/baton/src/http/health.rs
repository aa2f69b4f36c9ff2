//! Whether we are well: `/live` (the process runs), `/ready` (it can do its work), `/health` (each part by name) and
//! `/metrics`. Every service has them, without a key: they carry no data of clients.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router, routing};
use metrics_exporter_prometheus::PrometheusHandle;
use serde_json::{Value, json};

use crate::relay::book::Book;
use crate::relay::relayer::pool::Pool;

/// What is looked at.
#[derive(Clone)]
pub struct HealthState {
    /// The name of this service.
    pub service: &'static str,
    /// Store and queue.
    pub book: Arc<Book>,
    /// The relayers, as this process sees them.
    pub pool: Arc<Pool>,
    /// The metrics of this process.
    pub metrics: PrometheusHandle,
}

/// The routes.
pub fn routes(state: HealthState) -> Router {
    Router::new()
        .route("/live", routing::get(|| async { Json(json!({ "status": "ok" })) }))
        .route("/ready", routing::get(ready))
        .route("/health", routing::get(health))
        .route("/metrics", routing::get(metrics))
        .with_state(state)
}

async fn ready(State(state): State<HealthState>) -> Response {
    match state.book.store.ping().await {
        Ok(()) => Json(json!({ "status": "ready" })).into_response(),
        Err(_) => (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "status": "not ready" }))).into_response(),
    }
}

async fn health(State(state): State<HealthState>) -> Response {
    let census = state.book.store.census().await;
    let depth = state.book.queue.depth().await;
    let cache = state.book.cache.ping().await;
    let relayers = state.pool.view();
    let able = relayers.iter().filter(|relayer| relayer.is_able()).count();
    let well = census.is_ok() && depth.is_ok() && able > 0;
    let body = json!({
        "status": if well { "ok" } else { "degraded" },
        "service": state.service,
        "version": env!("CARGO_PKG_VERSION"),
        "parts": {
            "store": match &census {
                Ok(census) => json!({
                    "status": "ok",
                    "open": census.open.iter().map(|(status, count)| (status.name().to_owned(), json!(count)))
                        .collect::<serde_json::Map<_, _>>(),
                    "claims": census.claims,
                    "outcomeUnknown": census.claims_in_doubt,
                    "forgottenByRelayer": census.forgotten,
                }),
                Err(_) => json!({ "status": "unavailable" }),
            },
            "queue": match &depth {
                Ok(depth) => json!({
                    "status": "ok",
                    "ready": depth.ready,
                    "inFlight": depth.in_flight,
                    "delayed": depth.delayed,
                    "dead": depth.dead,
                    "oldestAgeSeconds": depth.oldest_age.map(|age| age.as_secs_f64()),
                }),
                Err(_) => json!({ "status": "unavailable" }),
            },
            // Never the reason for being unwell: without it the database answers.
            "cache": { "status": match cache {
                None => "in process",
                Some(true) => "ok",
                Some(false) => "unavailable",
            } },
            "relayers": {
                "status": if able > 0 { "ok" } else { "unavailable" },
                "able": able,
                "each": relayers.iter().map(|relayer| json!({
                    "url": relayer.url.0,
                    "status": relayer.passed_over.map_or("ok", |reason| reason.name()),
                    "healthKnown": relayer.known,
                    "breaker": relayer.breaker,
                    "inFlight": relayer.load,
                })).collect::<Value>(),
            },
        },
    });
    let status = if well { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(body)).into_response()
}

async fn metrics(State(state): State<HealthState>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], state.metrics.render()).into_response()
}
