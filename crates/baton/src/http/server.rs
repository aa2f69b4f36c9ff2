//! The layer around every route: request id, limits, panics, timing. Next: [`super::connections`] serves the routes.

use std::panic::AssertUnwindSafe;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{MatchedPath, Request};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use futures::FutureExt;
use metrics::{Counter, Histogram, counter, histogram};
use tracing::error;
use uuid::Uuid;

use super::body::BodyLimits;
use super::problem::Problem;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Wraps the routes with what all of them share: limits, request id, timing, and an answer even after a panic. This is one
/// layer, since each layer costs every request a clone and an allocation.
pub fn with_layers(routes: Router, body_bytes_max: usize, timeout: Duration) -> Router {
    // The body has half of the request's time to arrive, and accepting the request the other half.
    let limits = Arc::new(BodyLimits::new(body_bytes_max, timeout / 2));
    let meters = Arc::new(Meters::default());
    routes
        .fallback(|| async { Problem::not_found("there is nothing at this path") })
        .method_not_allowed_fallback(|| async { Problem::method_not_allowed() })
        .layer(middleware::from_fn(move |request, next| {
            around(Arc::clone(&limits), timeout, Arc::clone(&meters), request, next)
        }))
}

async fn around(
    limits: Arc<BodyLimits>,
    timeout: Duration,
    meters: Arc<Meters>,
    mut request: Request,
    next: Next,
) -> Response {
    let started = Instant::now();
    let id = request_id(&request);
    let route = request.extensions().get::<MatchedPath>().cloned();
    let method = request.method().clone();
    request.extensions_mut().insert(limits);
    let mut response = answered(timeout, &method, request, next).await;
    if let Some(problem) = response.extensions_mut().remove::<Problem>() {
        // Refusals under load are counted where they are made: a log line for each would add to the load.
        if problem.status >= 500 && problem.code != Problem::OVERLOADED {
            let Problem { status, code, title, .. } = &problem;
            error!(action = "request_failed", request_id = %id, status, code, "{title}");
        }
        response = problem.respond(Some(&id));
    }
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    meters.count(&method, route.as_ref(), response.status(), started.elapsed());
    response
}

/// The answer, or a problem instead if the handler panics or a read takes too long. POST requests have time limits of their
/// own, which know whether the outcome is unknown.
async fn answered(timeout: Duration, method: &Method, request: Request, next: Next) -> Response {
    let answer = AssertUnwindSafe(next.run(request)).catch_unwind();
    let answer = if *method == Method::POST {
        answer.await
    } else {
        match tokio::time::timeout(timeout, answer).await {
            Ok(answer) => answer,
            Err(_) => return Problem::no_answer().into_response(),
        }
    };
    answer.unwrap_or_else(|panic| {
        let message =
            panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        error!(action = "panic", "a request handler panicked: {}", message.unwrap_or_default());
        Problem::internal().into_response()
    })
}

/// The caller's own id if it sent one of 1 to 128 characters, else a new one.
fn request_id(request: &Request) -> String {
    const LENGTH_MAX: usize = 128;
    let given = request.headers().get(REQUEST_ID).and_then(|value| value.to_str().ok());
    let usable = given.filter(|id| !id.is_empty() && id.len() <= LENGTH_MAX);
    usable.map_or_else(|| Uuid::now_v7().to_string(), str::to_owned)
}

/// The meters of each method, route and status, looked up once and kept: a lookup by labels costs more than counting. There
/// are at most a few dozen, so a list is enough.
#[derive(Default)]
struct Meters(RwLock<Vec<Meter>>);

struct Meter {
    method: &'static str,
    route: String,
    status: u16,
    requests: Counter,
    seconds: Histogram,
}

impl Meters {
    fn count(&self, method: &Method, route: Option<&MatchedPath>, status: StatusCode, took: Duration) {
        let (method, route, status) =
            (known_method(method), route.map_or("none", MatchedPath::as_str), status.as_u16());
        let matches = |meter: &&Meter| meter.status == status && meter.method == method && meter.route == route;
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(meter) = known.iter().find(matches) {
            meter.count(took);
            return;
        }
        drop(known);
        let (path, code) = (route.to_owned(), status.to_string());
        let requests =
            counter!("baton_http_requests_total", "method" => method, "route" => path.clone(), "status" => code);
        let seconds = histogram!("baton_http_request_seconds", "method" => method, "route" => path.clone());
        let meter = Meter { method, route: path, status, requests, seconds };
        meter.count(took);
        self.0.write().unwrap_or_else(PoisonError::into_inner).push(meter);
    }
}

impl Meter {
    fn count(&self, took: Duration) {
        self.requests.increment(1);
        self.seconds.record(took.as_secs_f64());
    }
}

/// Folds unknown methods into one label value, since a client could create a time series with each.
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
