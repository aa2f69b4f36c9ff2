//! The HTTP server: the layers around every route (request id, limits, panics, timing) and its orderly end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{DefaultBodyLimit, MatchedPath, Request};
use axum::http::{HeaderName, HeaderValue, Method};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use metrics::{counter, histogram};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower_http::catch_panic::CatchPanicLayer;
use tracing::{debug, error, warn};
use uuid::Uuid;

use super::problem::Problem;

/// How large a body may be and how long it may take to come.
#[derive(Debug, Clone, Copy)]
pub struct BodyLimits {
    /// In bytes.
    pub bytes_max: usize,
    /// From the head to the last byte.
    pub timeout: Duration,
}

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Puts the common layers around the routes.
pub fn with_layers(routes: Router, body_bytes_max: usize, timeout: Duration) -> Router {
    routes
        .fallback(|| async { Problem::not_found("there is nothing at this path") })
        .method_not_allowed_fallback(|| async { Problem::method_not_allowed() })
        .layer(DefaultBodyLimit::max(body_bytes_max))
        .layer(axum::Extension(BodyLimits { bytes_max: body_bytes_max, timeout: timeout / 2 }))
        .layer(middleware::from_fn(move |request, next| in_time(timeout, request, next)))
        .layer(CatchPanicLayer::custom(|panic: Box<dyn std::any::Any + Send>| {
            let said =
                panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
            error!(action = "panic", "a request handler panicked: {}", said.unwrap_or_default());
            Problem::internal().into_response()
        }))
        .layer(middleware::from_fn(identify))
        .layer(middleware::from_fn(measure))
}

/// The last resort against a request that never ends. A body has half of this time to come and an accept the other
/// half, and each says what its silence means; what is left for this one is a read that hangs.
async fn in_time(timeout: Duration, request: Request, next: Next) -> Response {
    match tokio::time::timeout(timeout, next.run(request)).await {
        Ok(response) => response,
        Err(_) => Problem::no_answer().into_response(),
    }
}

/// Gives every request an id, the caller's if it sent a sensible one, and every problem that id.
async fn identify(request: Request, next: Next) -> Response {
    const LENGTH_MAX: usize = 128;
    let given = request.headers().get(REQUEST_ID).and_then(|value| value.to_str().ok());
    let sensible = given.filter(|id| !id.is_empty() && id.len() <= LENGTH_MAX);
    let id = sensible.map_or_else(|| Uuid::now_v7().to_string(), str::to_owned);
    let mut response = next.run(request).await;
    if let Some(problem) = response.extensions_mut().remove::<Problem>() {
        if problem.status >= 500 {
            error!(
                action = "request_failed",
                request_id = id,
                status = problem.status,
                code = problem.code,
                "{}",
                problem.title
            );
        }
        response = problem.respond(Some(&id));
    }
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

/// Clients may invent methods; each would be a series of its own.
fn known_method(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::HEAD => "HEAD",
        _ => "other",
    }
}

async fn measure(request: Request, next: Next) -> Response {
    let started = Instant::now();
    let route =
        request.extensions().get::<MatchedPath>().map_or_else(|| "none".to_owned(), |path| path.as_str().to_owned());
    let method = known_method(request.method());
    let response = next.run(request).await;
    let status = response.status().as_u16().to_string();
    counter!("baton_http_requests_total", "method" => method, "route" => route.clone(), "status" => status)
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

/// Connections open at once; more wait to be accepted.
const CONNECTIONS_MAX: usize = 4096;
/// How long a client may take to send a request's head, or to send nothing on an open connection.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the last answers may take to be read when the server stops.
const LAST_ANSWERS: Duration = Duration::from_secs(35);
/// Between two tries to accept when the system has no more files to give.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves until shutdown, then lets the requests under way finish.
pub async fn serve(listener: TcpListener, routes: Router, shutdown: CancellationToken) {
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let connections = TaskTracker::new();
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_TIMEOUT);
    loop {
        let accepted = async {
            let place = Arc::clone(&room).acquire_owned().await.expect("the semaphore is never closed");
            (listener.accept().await, place)
        };
        let (accepted, place) = tokio::select! {
            () = shutdown.cancelled() => break,
            accepted = accepted => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(failure) => {
                warn!(action = "accept_failed", "a connection could not be accepted: {failure}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // Answers are small and complete: waiting to fill a packet only delays them.
        stream.set_nodelay(true).ok();
        let connection = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(routes.clone()));
        let shutdown = shutdown.clone();
        connections.spawn(async move {
            let _place = place;
            let mut connection = std::pin::pin!(connection);
            let served = tokio::select! {
                served = connection.as_mut() => served,
                () = shutdown.cancelled() => {
                    connection.as_mut().graceful_shutdown();
                    connection.await
                }
            };
            if let Err(failure) = served {
                debug!(action = "connection_ended", "a connection ended early: {failure}");
            }
        });
    }
    drop(listener);
    connections.close();
    if tokio::time::timeout(LAST_ANSWERS, connections.wait()).await.is_err() {
        warn!(action = "connections_left", "{} clients did not read their answers in time", connections.len());
    }
}
