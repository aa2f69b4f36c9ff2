//! `/live` (the process runs), `/ready` (it can do its work), `/health` (each part by name) and `/metrics`. Every
//! service has them, without an API key: they carry no client data. All are on a listener of their own (`ADMIN_PORT`),
//! which clients of the service cannot block, and on the service's own port, where a flood of them makes one answer at a time.
//!
//! A lane supplies its own [`HealthCheck`] (`relay/health.rs`, `users/health.rs`); this file asks all of them at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router, routing};
use bytes::Bytes;
use futures::future::join_all;
use metrics_exporter_prometheus::PrometheusHandle;
use pipeline::sqlite::{Database, DatabaseError};
use pipeline::{Depth, Queue};
use serde_json::{Map, Value, json};

use crate::errors;

/// What a lane reports about itself. Each answer must come within [`PART_TIMEOUT`]: see [`in_time`].
#[async_trait]
pub trait HealthCheck: Send + Sync + 'static {
    /// Whether the lane can do the work of this service: `/ready`.
    async fn is_ready(&self) -> bool;

    /// The lane's parts and whether all of them are healthy: `/health`.
    async fn check(&self) -> LaneHealth;
}

/// The answer of one lane to `/health`.
#[derive(Debug, Clone)]
pub struct LaneHealth {
    /// Whether every part that the lane needs works; one unhealthy lane makes the answer 503.
    pub healthy: bool,
    /// The JSON of each part, by the name it has under `parts`. Names are unique across lanes.
    pub parts: Map<String, Value>,
}

/// An answer that concurrent requests share: each gets one whose making began after it arrived. However many ask, one
/// answer is made at a time, and its bytes are in memory once.
#[derive(Clone, Default)]
pub struct SharedAnswer(Arc<(AtomicU64, tokio::sync::Mutex<MadeAnswer>)>);

/// The number of an answer, its status and its body.
#[derive(Clone, Default)]
struct MadeAnswer(u64, StatusCode, Bytes);

impl SharedAnswer {
    async fn get(&self, make: impl Future<Output = (StatusCode, Bytes)>) -> (StatusCode, Bytes) {
        let (begun, last) = &*self.0;
        let arrived = begun.load(Ordering::SeqCst);
        let mut last = last.lock().await;
        if last.0 <= arrived {
            let number = begun.fetch_add(1, Ordering::SeqCst) + 1;
            let (status, body) = make.await;
            *last = MadeAnswer(number, status, body);
        }
        (last.1, last.2.clone())
    }
}

/// What the routes need.
#[derive(Clone)]
pub struct HealthState {
    /// The name of this service, as its subcommand.
    pub service: &'static str,
    /// The lanes of this service, in the order of the answer.
    pub lanes: Vec<Arc<dyn HealthCheck>>,
    /// The metrics of this process.
    pub metrics: PrometheusHandle,
    /// The answers of `/ready`, `/health` and `/metrics`.
    pub shared: [SharedAnswer; 3],
}

/// Longest wait for one part. A part that hangs counts as unhealthy.
pub const PART_TIMEOUT: Duration = Duration::from_secs(2);

/// The routes of the service's own port. Clients of the existing service ask below `/api/v1`.
pub fn routes(state: HealthState) -> Router {
    admin_routes(state.clone()).merge(Router::new().route("/api/v1/health", routing::get(health)).with_state(state))
}

/// The routes of the listener of its own (`ADMIN_PORT`).
pub fn admin_routes(state: HealthState) -> Router {
    Router::new()
        .route("/metrics", routing::get(metrics))
        .route("/live", routing::get(|| async { Json(json!({ "status": "ok" })) }))
        .route("/ready", routing::get(ready))
        .route("/health", routing::get(health))
        .with_state(state)
}

/// The answer of a part; `None` if it fails or takes longer than [`PART_TIMEOUT`].
pub async fn in_time<T, E>(answer: impl Future<Output = Result<T, E>>) -> Option<T> {
    tokio::time::timeout(PART_TIMEOUT, answer).await.ok()?.ok()
}

/// A lane's queue, as `/ready` and `/health` ask about it.
#[derive(Clone)]
pub struct QueueCheck {
    /// The queue.
    pub queue: Arc<dyn Queue>,
    /// Its file, if it is embedded. On a full disk the queue still answers what it holds, and takes nothing.
    pub file: Option<Database>,
}

impl QueueCheck {
    /// Whether the queue's file can be written; true of a queue without one, which is not asked.
    pub async fn is_writable(&self) -> bool {
        in_time(self.check_file()).await.is_some()
    }

    /// Whether the queue answers and its file can be written.
    pub async fn is_healthy(&self) -> bool {
        let (depth, writable) = tokio::join!(in_time(self.queue.depth()), self.is_writable());
        depth.is_some() && writable
    }

    /// The same, and the queue's part of `/health`.
    pub async fn check(&self) -> (bool, Value) {
        let file = tokio::time::timeout(PART_TIMEOUT, self.check_file());
        let (depth, file) = tokio::join!(in_time(self.queue.depth()), file);
        let reason = match file {
            Ok(Ok(())) => None,
            Ok(Err(failure)) => Some(errors::public_reason(&failure)),
            Err(_) => Some("no answer in time"),
        };
        (depth.is_some() && reason.is_none(), queue_part(depth.as_ref(), reason))
    }

    async fn check_file(&self) -> Result<(), DatabaseError> {
        match &self.file {
            Some(file) => file.check_writable().await,
            None => Ok(()),
        }
    }
}

/// The JSON of a queue that has this depth, or did not answer, and that takes messages unless there is a reason.
fn queue_part(depth: Option<&Depth>, reason: Option<&str>) -> Value {
    let status = if depth.is_some() && reason.is_none() { "ok" } else { "unavailable" };
    let mut part = json!({ "status": status });
    if let Some(reason) = reason {
        part["reason"] = json!(reason);
    }
    if let Some(depth) = depth {
        part["ready"] = json!(depth.ready);
        part["inFlight"] = json!(depth.in_flight);
        part["delayed"] = json!(depth.delayed);
        part["dead"] = json!(depth.dead);
        part["oldestAgeSeconds"] = json!(depth.oldest_age.map(|age| age.as_secs_f64()));
    }
    part
}

async fn ready(State(state): State<HealthState>) -> Response {
    let make = async {
        let answers = join_all(state.lanes.iter().map(|lane| lane.is_ready())).await;
        let (status, shown) = if answers.into_iter().all(|ready| ready) {
            (StatusCode::OK, "ready")
        } else {
            (StatusCode::SERVICE_UNAVAILABLE, "not ready")
        };
        (status, json!({ "status": shown }).to_string().into())
    };
    json_answer(state.shared[0].get(make).await)
}

async fn health(State(state): State<HealthState>) -> Response {
    json_answer(state.shared[1].get(make_health(&state)).await)
}

fn json_answer((status, body): (StatusCode, Bytes)) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

async fn make_health(state: &HealthState) -> (StatusCode, Bytes) {
    let answers = join_all(state.lanes.iter().map(|lane| lane.check())).await;
    let healthy = answers.iter().all(|lane| lane.healthy);
    let parts: Map<String, Value> = answers.into_iter().flat_map(|lane| lane.parts).collect();
    let body = json!({
        "status": if healthy { "ok" } else { "degraded" },
        "service": state.service,
        "version": env!("CARGO_PKG_VERSION"),
        "parts": parts,
    });
    let status = if healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, body.to_string().into())
}

async fn metrics(State(state): State<HealthState>) -> Response {
    let (_, text) = state.shared[2].get(async { (StatusCode::OK, state.metrics.render().into()) }).await;
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;

    use super::*;

    /// A lane with one part of this name.
    struct Lane(&'static str, bool);

    #[async_trait]
    impl HealthCheck for Lane {
        async fn is_ready(&self) -> bool {
            self.1
        }
        async fn check(&self) -> LaneHealth {
            LaneHealth { healthy: self.1, parts: Map::from_iter([(self.0.to_owned(), json!({}))]) }
        }
    }

    fn state(lanes: [Lane; 2]) -> State<HealthState> {
        let metrics = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder().handle();
        let lanes = lanes.into_iter().map(|lane| Arc::new(lane) as Arc<dyn HealthCheck>).collect();
        State(HealthState { service: "serve", lanes, metrics, shared: Default::default() })
    }

    #[tokio::test]
    async fn the_answer_has_the_parts_of_every_lane() {
        let answer = health(state([Lane("store", true), Lane("users", true)])).await;
        assert_eq!(answer.status(), StatusCode::OK);
        let body = to_bytes(answer.into_body(), usize::MAX).await.unwrap();
        let body: Value = serde_json::from_slice(&body).unwrap();
        let names: Vec<_> = body["parts"].as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!((body["status"].as_str(), names), (Some("ok"), vec!["store", "users"]));
    }

    #[tokio::test]
    async fn concurrent_requests_share_an_answer_that_began_after_they_arrived() {
        let (answer, made) = (SharedAnswer::default(), std::sync::atomic::AtomicUsize::new(0));
        let ask = || {
            answer.get(async {
                let number = made.fetch_add(1, Ordering::SeqCst);
                tokio::task::yield_now().await;
                (StatusCode::OK, number.to_string().into())
            })
        };
        let all = join_all((0..100).map(|_| ask())).await;
        assert!(made.load(Ordering::SeqCst) <= 2, "{} were made", made.load(Ordering::SeqCst));
        let before = made.load(Ordering::SeqCst);
        assert_eq!(ask().await.1, before.to_string(), "a later request gets a new one");
        assert_eq!(all.len(), 100);
    }

    #[tokio::test]
    async fn one_lane_that_fails_makes_the_service_degraded_and_not_ready() {
        let lanes = || state([Lane("store", true), Lane("users", false)]);
        assert_eq!(health(lanes()).await.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(ready(lanes()).await.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(ready(state([Lane("store", true), Lane("users", true)])).await.status(), StatusCode::OK);
    }
}
