//! The reference for `accept`: the product's HTTP server with the same layers, key check and body, without work.

use std::sync::Arc;

use axum::http::StatusCode;
use axum::{Json, Router, middleware, routing};
use baton::config::{Config, Service};
use baton::http::body::RawBody;
use baton::http::{auth, connections, server};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use crate::accept::PATH;

/// Answers 202 until the process is killed.
pub async fn serve() -> anyhow::Result<()> {
    let config = Config::from_env(Service::RelayApi)?;
    let _metrics = baton::telemetry::start_metrics()?;
    let listener = connections::bind(config.http.listen, "PORT")?;
    let keys = Arc::new(config.http.api_keys.clone());
    let answer =
        |_: RawBody| async { (StatusCode::ACCEPTED, Json(json!({ "transactionId": "none", "status": "pending" }))) };
    let routes =
        Router::new().route(PATH, routing::post(answer)).layer(middleware::from_fn_with_state(keys, auth::require_key));
    let routes = server::with_layers(routes, config.http.body_bytes_max, config.http.request_timeout);
    connections::serve(listener, routes, config.http.connections, CancellationToken::new()).await;
    Ok(())
}
