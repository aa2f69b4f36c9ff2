//! Whether we are well: `/live` (the process runs), `/ready` (it can do its work), `/health` (each part by name) and
//! `/metrics`. Every service has them, without a key: they carry no data of clients.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router, routing};
use metrics_exporter_prometheus::PrometheusHandle;
use pipeline::{Depth, Queue};
use serde_json::{Value, json};

use crate::relay::relayer::pool::Pool;
use crate::relay::update::guarded_store::GuardedStore;
use crate::users::store::UserStore;

/// What is looked at.
#[derive(Clone)]
pub struct HealthState {
    /// The name of this service.
    pub service: &'static str,
    /// The relay lane, if this service works on it.
    pub relay: Option<RelayHealth>,
    /// The users lane, if this service works on it.
    pub users: Option<UsersHealth>,
    /// The metrics of this process.
    pub metrics: PrometheusHandle,
}

/// The relay lane.
#[derive(Clone)]
pub struct RelayHealth {
    /// Store and queue.
    pub guarded: Arc<GuardedStore>,
    /// The relayers, as this process sees them.
    pub pool: Arc<Pool>,
}

/// The users lane.
#[derive(Clone)]
pub struct UsersHealth {
    /// Where users go.
    pub store: Arc<dyn UserStore>,
    /// Where messages go.
    pub queue: Arc<dyn Queue>,
    /// Whether this service writes rows; one that does not can do its work without the store.
    pub consumes: bool,
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
    let relay = async {
        match &state.relay {
            Some(relay) => in_time(relay.guarded.store.ping()).await.is_some(),
            None => true,
        }
    };
    let users = async {
        let Some(users) = &state.users else { return true };
        let (queue, store) = tokio::join!(in_time(users.queue.depth()), in_time(users.store.ping()));
        queue.is_some() && (store.is_some() || !users.consumes)
    };
    match tokio::join!(relay, users) {
        (true, true) => Json(json!({ "status": "ready" })).into_response(),
        _ => (StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "status": "not ready" }))).into_response(),
    }
}

/// What a part says; none if it hangs, which is as bad as if it says no.
async fn in_time<T, E>(said: impl Future<Output = Result<T, E>>) -> Option<T> {
    tokio::time::timeout(PART_TIMEOUT, said).await.ok()?.ok()
}

async fn health(State(state): State<HealthState>) -> Response {
    let mut parts = serde_json::Map::new();
    let relay = async {
        match &state.relay {
            Some(relay) => relay.look(&mut parts).await,
            None => true,
        }
    };
    let users = async {
        match &state.users {
            Some(users) => Some(users.look().await),
            None => None,
        }
    };
    let (mut well, users) = tokio::join!(relay, users);
    if let Some((is_well, shown)) = users {
        well &= is_well;
        parts.insert("users".to_owned(), shown);
    }
    let body = json!({
        "status": if well { "ok" } else { "degraded" },
        "service": state.service,
        "version": env!("CARGO_PKG_VERSION"),
        "parts": parts,
    });
    let status = if well { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(body)).into_response()
}

impl RelayHealth {
    /// Adds the lane's parts; whether all is well with them.
    async fn look(&self, parts: &mut serde_json::Map<String, Value>) -> bool {
        let (counts, depth, cache) = tokio::join!(
            in_time(self.guarded.store.counts()),
            in_time(self.guarded.queue.depth()),
            self.guarded.cache.ping()
        );
        let relayers = self.pool.view();
        let able = relayers.iter().filter(|relayer| relayer.is_able()).count();
        let store = match &counts {
            Some(counts) => json!({
                "status": "ok",
                "open": counts.open.iter().map(|(status, count)| (status.name().to_owned(), json!(count)))
                    .collect::<serde_json::Map<_, _>>(),
                "claims": counts.claims,
                "outcomeUnknown": counts.claims_outcome_unknown,
                "forgottenByRelayer": counts.forgotten,
            }),
            None => json!({ "status": "unavailable" }),
        };
        parts.insert("store".to_owned(), store);
        parts.insert("queue".to_owned(), show_queue(depth.as_ref()));
        // Never the reason for being unwell: without it the database answers.
        let cache = match cache {
            None => "in process",
            Some(true) => "ok",
            Some(false) => "unavailable",
        };
        parts.insert("cache".to_owned(), json!({ "status": cache }));
        let each = relayers.iter().map(|relayer| {
            json!({
                "url": relayer.url.0,
                "status": relayer.skipped.map_or("ok", |reason| reason.name()),
                "healthKnown": relayer.known,
                "breaker": relayer.breaker,
                "inFlight": relayer.load,
            })
        });
        let status = if able > 0 { "ok" } else { "unavailable" };
        parts.insert("relayers".to_owned(), json!({ "status": status, "able": able, "each": each.collect::<Value>() }));
        counts.is_some() && depth.is_some() && able > 0
    }
}

impl UsersHealth {
    async fn look(&self) -> (bool, Value) {
        let asked = async { tokio::join!(self.store.ping(), self.store.count_set_aside()) };
        let (asked, depth) = tokio::join!(tokio::time::timeout(PART_TIMEOUT, asked), in_time(self.queue.depth()));
        let (store_well, store) = match asked {
            Ok((Ok(()), Ok(count))) => (true, json!({ "status": "ok", "setAside": count })),
            Ok((Err(failure), _) | (_, Err(failure))) => {
                (false, json!({ "status": "unavailable", "trouble": failure.trouble.name() }))
            }
            Err(_) => (false, json!({ "status": "unavailable" })),
        };
        let well = store_well && depth.is_some();
        let status = if well { "ok" } else { "unavailable" };
        (well, json!({ "status": status, "store": store, "queue": show_queue(depth.as_ref()) }))
    }
}

fn show_queue(depth: Option<&Depth>) -> Value {
    match depth {
        Some(depth) => json!({
            "status": "ok",
            "ready": depth.ready,
            "inFlight": depth.in_flight,
            "delayed": depth.delayed,
            "dead": depth.dead,
            "oldestAgeSeconds": depth.oldest_age.map(|age| age.as_secs_f64()),
        }),
        None => json!({ "status": "unavailable" }),
    }
}

async fn metrics(State(state): State<HealthState>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], state.metrics.render()).into_response()
}
