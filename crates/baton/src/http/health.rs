//! Whether we are well: `/live` (the process runs), `/ready` (it can do its work), `/health` (each part by name) and
//! `/metrics`. Every service has them, without a key: they carry no data of clients.

use std::sync::Arc;
use std::time::Duration;

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

/// How long a part may take to say how it is. Whoever asks wants to know now, and a part that hangs is not well.
const PART_TIMEOUT: Duration = Duration::from_secs(2);

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
    match tokio::time::timeout(PART_TIMEOUT, state.book.store.ping()).await {
        Ok(Ok(())) => Json(json!({ "status": "ready" })).into_response(),
        Ok(Err(_)) | Err(_) => {
            (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "status": "not ready" }))).into_response()
        }
    }
}

async fn health(State(state): State<HealthState>) -> Response {
    let (census, depth, cache) = tokio::join!(
        tokio::time::timeout(PART_TIMEOUT, state.book.store.census()),
        tokio::time::timeout(PART_TIMEOUT, state.book.queue.depth()),
        state.book.cache.ping(),
    );
    // One that hangs is as unavailable as one that says so.
    let (census, depth) = (census.ok().and_then(Result::ok), depth.ok().and_then(Result::ok));
    let relayers = state.pool.view();
    let able = relayers.iter().filter(|relayer| relayer.is_able()).count();
    let well = census.is_some() && depth.is_some() && able > 0;
    let body = json!({
        "status": if well { "ok" } else { "degraded" },
        "service": state.service,
        "version": env!("CARGO_PKG_VERSION"),
        "parts": {
            "store": match &census {
                Some(census) => json!({
                    "status": "ok",
                    "open": census.open.iter().map(|(status, count)| (status.name().to_owned(), json!(count)))
                        .collect::<serde_json::Map<_, _>>(),
                    "claims": census.claims,
                    "outcomeUnknown": census.claims_in_doubt,
                    "forgottenByRelayer": census.forgotten,
                }),
                None => json!({ "status": "unavailable" }),
            },
            "queue": match &depth {
                Some(depth) => json!({
                    "status": "ok",
                    "ready": depth.ready,
                    "inFlight": depth.in_flight,
                    "delayed": depth.delayed,
                    "dead": depth.dead,
                    "oldestAgeSeconds": depth.oldest_age.map(|age| age.as_secs_f64()),
                }),
                None => json!({ "status": "unavailable" }),
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
