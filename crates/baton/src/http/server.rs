//! The HTTP server: the layers around every route (request id, limits, panics, timing) and its orderly end.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{DefaultBodyLimit, MatchedPath, Request};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use metrics::{counter, histogram};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tower_http::catch_panic::CatchPanicLayer;
use tracing::error;
use uuid::Uuid;

use super::problem::Problem;

/// The largest body, for those who have to name it.
#[derive(Debug, Clone, Copy)]
pub struct BodyLimit(pub usize);

/// The id of a request, in the log and in every error.
#[derive(Debug, Clone)]
pub struct RequestId(pub String);

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Puts the common layers around the routes.
pub fn with_layers(routes: Router, body_bytes_max: usize, timeout: Duration) -> Router {
    routes
        .fallback(|| async { Problem::not_found("there is nothing at this path") })
        .method_not_allowed_fallback(|| async { Problem::method_not_allowed() })
        .layer(DefaultBodyLimit::max(body_bytes_max))
        .layer(axum::Extension(BodyLimit(body_bytes_max)))
        .layer(middleware::from_fn(move |request, next| in_time(timeout, request, next)))
        .layer(CatchPanicLayer::custom(|panic: Box<dyn std::any::Any + Send>| {
            let said = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
            error!(action = "panic", "a request handler panicked: {}", said.unwrap_or_default());
            Problem::internal().into_response()
        }))
        .layer(middleware::from_fn(identify))
        .layer(middleware::from_fn(measure))
}

/// The last resort against a request that never ends. Handlers that store something have shorter limits of their own
/// and say what their silence means; what is left for this one is a body that does not come.
async fn in_time(timeout: Duration, request: Request, next: Next) -> Response {
    match tokio::time::timeout(timeout, next.run(request)).await {
        Ok(response) => response,
        Err(_) => Problem::too_slow().into_response(),
    }
}

/// Gives every request an id, the caller's if it sent a sensible one, and every problem that id.
async fn identify(mut request: Request, next: Next) -> Response {
    const LENGTH_MAX: usize = 128;
    let given = request.headers().get(REQUEST_ID).and_then(|value| value.to_str().ok());
    let sensible = given.filter(|id| !id.is_empty() && id.len() <= LENGTH_MAX);
    let id = sensible.map_or_else(|| Uuid::now_v7().to_string(), str::to_owned);
    request.extensions_mut().insert(RequestId(id.clone()));
    let mut response = next.run(request).await;
    if let Some(problem) = response.extensions_mut().remove::<Problem>() {
        response = problem.respond(Some(&id));
    }
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

async fn measure(request: Request, next: Next) -> Response {
    let started = Instant::now();
    let route =
        request.extensions().get::<MatchedPath>().map_or_else(|| "none".to_owned(), |path| path.as_str().to_owned());
    let method = request.method().as_str().to_owned();
    let response = next.run(request).await;
    let status = response.status().as_u16().to_string();
    counter!("baton_http_requests_total", "method" => method.clone(), "route" => route.clone(), "status" => status)
        .increment(1);
    histogram!("baton_http_request_seconds", "method" => method, "route" => route)
        .record(started.elapsed().as_secs_f64());
    response
}

/// Binds the address, with an error that names it.
pub async fn bind(listen: SocketAddr) -> anyhow::Result<TcpListener> {
    use anyhow::Context;
    TcpListener::bind(listen).await.with_context(|| {
        format!("cannot listen on {listen}; is another process there? Set PORT (or --port) to another")
    })
}

/// Serves until shutdown, then lets the requests under way finish.
pub async fn serve(listener: TcpListener, routes: Router, shutdown: CancellationToken) -> std::io::Result<()> {
    axum::serve(listener, routes).with_graceful_shutdown(shutdown.cancelled_owned()).await
}
