//! The HTTP calls that manage a client's endpoints: register, list, change, delete, rotate, test, recover, read attempts.
//!
//! A key sees and changes only the endpoints that it registered; any other one is 404, as if it did not exist. Bodies and
//! queries are read by [`super::endpoint_request`]; answers are made by [`super::endpoint_view`]. Next: the store keeps
//! the endpoint, and [`super::delivery`] calls it.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, RawQuery, Request, State};
use axum::http::{HeaderName, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json, Router, routing};
use serde_json::{Value, json};
use tracing::info;
use uuid::Uuid;

use super::address_guard::{AddressGuard, UrlRefused};
use super::endpoint_change::{Changed, change_endpoint, disable, enable, move_to};
use super::endpoint_request::{
    AttemptsQuery, EndpointChange, EndpointRequestError, EndpointUrl, NewEndpoint, read_event_id, read_overlap,
    read_since,
};
use super::endpoint_view::{show_attempt, show_endpoint};
use super::signature;
use crate::clock::Clock;
use crate::http::auth::Caller;
use crate::http::body::{JsonBody, OptionalJsonBody};
use crate::http::problem::{FieldProblem, Problem};
use crate::randomness::Randomness;
use crate::relay::state::event::{Event, EventId, EventType};
use crate::relay::state::transaction::TransactionId;
use crate::relay::store::StoreError;
use crate::relay::store::notifications::{Endpoint, EndpointId, NotificationStore, Requeue, Requeued};

/// State of the calls.
pub struct WebhookApi {
    /// Keeps the endpoints.
    pub store: Arc<dyn NotificationStore>,
    /// Decides which addresses may be registered.
    pub guard: AddressGuard,
    /// The store's clock.
    pub clock: Clock,
    /// Makes ids.
    pub random: Randomness,
    /// Maximum endpoints of one API key.
    pub endpoints_max: usize,
    /// How long ended deliveries are kept.
    pub retention: Duration,
    /// Keys that recover events at this moment.
    pub recovering: Recovering,
}

/// The API keys whose events are being recovered: one call at a time for each, because it may look at many events.
#[derive(Debug, Default)]
pub struct Recovering(Arc<Mutex<HashSet<String>>>);

/// Ends the call's turn when dropped.
struct RecoveryTurn {
    recovering: Arc<Mutex<HashSet<String>>>,
    key: String,
}

impl Recovering {
    /// `None` while another call of this key runs.
    fn begin(&self, key: &str) -> Option<RecoveryTurn> {
        let is_free = self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(key.to_owned());
        is_free.then(|| RecoveryTurn { recovering: Arc::clone(&self.0), key: key.to_owned() })
    }
}

impl Drop for RecoveryTurn {
    fn drop(&mut self) {
        self.recovering.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.key);
    }
}

/// Longest duration of a POST. The server limits the other methods, which may be repeated.
const POST_TIMEOUT: Duration = Duration::from_secs(30);
/// A secret is in no cache.
const NO_STORE: (HeaderName, &str) = (header::CACHE_CONTROL, "no-store");
/// Test events that wait for one endpoint.
const TESTS_WAITING_MAX: usize = 10;
/// The reason that an owner's own disabling is shown with.
const DISABLED_BY_OWNER: &str = "disabled by its owner";

/// The routes; they need an API key in front.
pub fn routes(state: WebhookApi) -> Router {
    let state = Arc::new(state);
    let one = "/api/v1/webhooks/endpoints/{id}";
    Router::new()
        .route("/api/v1/webhooks/register", routing::post(register))
        .route("/api/v1/webhooks/endpoints", routing::get(list))
        .route(one, routing::get(show).patch(change).delete(delete))
        .route(&format!("{one}/rotate"), routing::post(rotate))
        .route(&format!("{one}/test"), routing::post(test))
        .route(&format!("{one}/recover"), routing::post(recover))
        .route(&format!("{one}/events/{{event}}/redeliver"), routing::post(redeliver))
        .route(&format!("{one}/attempts"), routing::get(attempts))
        .route_layer(middleware::from_fn_with_state(Arc::clone(&state), limit_post))
        .with_state(state)
}

/// Ends a POST that takes too long: its change may still be saved.
async fn limit_post(State(state): State<Arc<WebhookApi>>, request: Request, next: Next) -> Response {
    if request.method() != Method::POST {
        return next.run(request).await;
    }
    let answer = state.clock.timeout(POST_TIMEOUT, next.run(request)).await;
    answer.unwrap_or_else(|late| Problem::endpoint_outcome_unknown(&late).into_response())
}

async fn register(
    State(state): State<Arc<WebhookApi>>,
    Extension(Caller(caller)): Extension<Caller>,
    JsonBody(body, _memory): JsonBody,
) -> Result<Response, Problem> {
    let NewEndpoint { url, events, description } = NewEndpoint::parse(&body, &state.guard).map_err(refusal)?;
    state.check_resolves(&caller, &url).await?;
    let now = state.clock.now();
    let endpoint = Endpoint {
        id: EndpointId(state.random.uuid_v7()),
        owner: caller,
        url: url.text,
        events,
        description,
        secret: signature::generate_secret(),
        previous_secret: None,
        version: 1,
        created_at: now,
        updated_at: now,
        disabled: None,
        failing_since: None,
        failures: 0,
        paused_until: None,
    };
    if !state.store.put_endpoint(&endpoint, state.endpoints_max).await.map_err(unsaved)? {
        return Err(Problem::too_many_endpoints(state.endpoints_max));
    }
    let Endpoint { id, owner, .. } = &endpoint;
    // Only the host: the rest of a URL may be a secret of its receiver.
    let host = url.parsed.host_str().unwrap_or_default();
    info!(action = "endpoint_registered", endpointId = %id, key = owner, host, "{owner} registered an endpoint at {host}");
    let location = format!("/api/v1/webhooks/endpoints/{id}");
    let mut answer = show_endpoint(&endpoint, now);
    answer["secret"] = json!(endpoint.secret.expose());
    Ok((StatusCode::CREATED, [(header::LOCATION, location.as_str()), NO_STORE], Json(answer)).into_response())
}

async fn list(
    State(state): State<Arc<WebhookApi>>,
    Extension(Caller(caller)): Extension<Caller>,
) -> Result<Json<Value>, Problem> {
    let endpoints = state.store.endpoints(Some(&caller)).await.map_err(unread)?;
    let now = state.clock.now();
    let shown: Vec<_> = endpoints.iter().map(|endpoint| show_endpoint(endpoint, now)).collect();
    Ok(Json(json!({ "endpoints": shown })))
}

async fn show(
    State(state): State<Arc<WebhookApi>>,
    Extension(Caller(caller)): Extension<Caller>,
    id: PathId,
) -> Result<Json<Value>, Problem> {
    let endpoint = state.own(&caller, read_id(id)?).await?;
    let counts = state.store.endpoint_counts(endpoint.id).await.map_err(unread)?;
    let mut shown = show_endpoint(&endpoint, state.clock.now());
    shown["waiting"] = json!(counts.waiting);
    shown["givenUp"] = json!(counts.given_up);
    Ok(Json(shown))
}

async fn change(
    State(state): State<Arc<WebhookApi>>,
    Extension(Caller(caller)): Extension<Caller>,
    id: PathId,
    JsonBody(body, _memory): JsonBody,
) -> Result<Json<Value>, Problem> {
    let id = read_id(id)?;
    let change = EndpointChange::parse(&body, &state.guard).map_err(refusal)?;
    if let Some(url) = &change.url {
        state.check_resolves(&caller, url).await?;
    }
    let now = state.clock.now();
    let alter = |endpoint: &mut Endpoint| {
        if let Some(url) = &change.url {
            move_to(endpoint, &url.text);
        }
        if let Some(events) = &change.events {
            endpoint.events.clone_from(events);
        }
        if let Some(description) = &change.description {
            endpoint.description.clone_from(description);
        }
        match change.enabled {
            Some(true) => enable(endpoint),
            Some(false) => disable(endpoint, DISABLED_BY_OWNER, now),
            None => {}
        }
    };
    let endpoint = state.change(&caller, id, alter).await?;
    info!(action = "endpoint_changed", endpointId = %id, key = caller, "{caller} changed an endpoint");
    Ok(Json(show_endpoint(&endpoint, now)))
}

async fn delete(
    State(state): State<Arc<WebhookApi>>,
    Extension(Caller(caller)): Extension<Caller>,
    id: PathId,
) -> Result<StatusCode, Problem> {
    let Endpoint { id, .. } = state.own(&caller, read_id(id)?).await?;
    if !state.store.delete_endpoint(id).await.map_err(unsaved)? {
        return Err(no_endpoint(id));
    }
    info!(action = "endpoint_deleted", endpointId = %id, key = caller, "{caller} deleted an endpoint");
    Ok(StatusCode::NO_CONTENT)
}

async fn rotate(
    State(state): State<Arc<WebhookApi>>,
    Extension(Caller(caller)): Extension<Caller>,
    id: PathId,
    OptionalJsonBody(body, _memory): OptionalJsonBody,
) -> Result<Response, Problem> {
    let id = read_id(id)?;
    let overlap = read_overlap(body.as_ref()).map_err(refusal)?;
    let secret = signature::generate_secret();
    let until = (!overlap.is_zero()).then(|| state.clock.now() + overlap);
    let alter = |endpoint: &mut Endpoint| {
        let previous = std::mem::replace(&mut endpoint.secret, secret.clone());
        endpoint.previous_secret = until.map(|until| (previous, until));
    };
    state.change(&caller, id, alter).await?;
    info!(action = "endpoint_secret_rotated", endpointId = %id, key = caller, "{caller} rotated an endpoint's secret");
    let answer = json!({ "id": id.to_string(), "secret": secret.expose(), "previousSecretValidUntil": until });
    Ok(([NO_STORE], Json(answer)).into_response())
}

async fn test(
    State(state): State<Arc<WebhookApi>>,
    Extension(Caller(caller)): Extension<Caller>,
    id: PathId,
) -> Result<(StatusCode, Json<Value>), Problem> {
    let endpoint = state.own(&caller, read_id(id)?).await?;
    if endpoint.disabled.is_some() {
        return Err(Problem::no_test_event("the endpoint is disabled; enable it first"));
    }
    let event = state.test_event(&endpoint);
    if !state.store.put_test(endpoint.id, &event, TESTS_WAITING_MAX).await.map_err(unsaved)? {
        return Err(Problem::no_test_event("earlier test events still wait for this endpoint; read its attempts"));
    }
    Ok((StatusCode::ACCEPTED, Json(json!({ "eventId": event.id.0 }))))
}

async fn recover(
    State(state): State<Arc<WebhookApi>>,
    Extension(Caller(caller)): Extension<Caller>,
    id: PathId,
    RawQuery(query): RawQuery,
) -> Result<(StatusCode, Json<Value>), Problem> {
    let id = read_id(id)?;
    let since = read_since(query.as_deref().unwrap_or_default()).map_err(refusal)?;
    let endpoint = state.own(&caller, id).await?;
    let _turn = state.recovering.begin(&caller).ok_or_else(Problem::already_recovering)?;
    // What was delivered before is known for this long only.
    let since = since.max(state.clock.now() - state.retention);
    let Requeued { queued, next_since } = state.requeue(&endpoint, &Requeue::Since(since)).await?;
    Ok((StatusCode::ACCEPTED, Json(json!({ "queued": queued, "nextSince": next_since }))))
}

async fn redeliver(
    State(state): State<Arc<WebhookApi>>,
    Extension(Caller(caller)): Extension<Caller>,
    path: Result<Path<(String, String)>, PathRejection>,
) -> Result<(StatusCode, Json<Value>), Problem> {
    let (id, event) = match path {
        Ok(Path((id, event))) => (Ok(Path(id)), event),
        Err(rejection) => (Err(rejection), String::new()),
    };
    let endpoint = state.own(&caller, read_id(id)?).await?;
    let missing = || Problem::not_found("this endpoint has no such event");
    let event = read_event_id(&event).ok_or_else(missing)?;
    match state.requeue(&endpoint, &Requeue::Event(event)).await?.queued {
        0 => Err(missing()),
        queued => Ok((StatusCode::ACCEPTED, Json(json!({ "queued": queued })))),
    }
}

async fn attempts(
    State(state): State<Arc<WebhookApi>>,
    Extension(Caller(caller)): Extension<Caller>,
    id: PathId,
    RawQuery(query): RawQuery,
) -> Result<Json<Value>, Problem> {
    let id = read_id(id)?;
    let AttemptsQuery { before, limit } =
        AttemptsQuery::parse(query.as_deref().unwrap_or_default()).map_err(refusal)?;
    let endpoint = state.own(&caller, id).await?;
    let mut attempts = state.store.attempts(endpoint.id, before, limit + 1).await.map_err(unread)?;
    let more = attempts.len() > limit;
    attempts.truncate(limit);
    let next = attempts.last().filter(|_| more).map(|attempt| attempt.id.to_string());
    let shown: Vec<_> = attempts.iter().map(show_attempt).collect();
    Ok(Json(json!({ "attempts": shown, "nextCursor": next })))
}

impl WebhookApi {
    /// The caller's endpoint with that id.
    async fn own(&self, caller: &str, id: EndpointId) -> Result<Endpoint, Problem> {
        let found = self.store.endpoint(id).await.map_err(unread)?;
        found.filter(|endpoint| endpoint.owner == caller).ok_or_else(|| no_endpoint(id))
    }

    async fn change(
        &self,
        caller: &str,
        id: EndpointId,
        alter: impl Fn(&mut Endpoint) + Send,
    ) -> Result<Endpoint, Problem> {
        let changed = change_endpoint(self.store.as_ref(), id, Some(caller), self.clock.now(), alter).await;
        match changed.map_err(unsaved)? {
            Changed::Saved(endpoint) => Ok(*endpoint),
            Changed::Missing => Err(no_endpoint(id)),
            Changed::Outrun => Err(Problem::changed_meanwhile()),
        }
    }

    /// Refuses a name that leads to a forbidden address. The sender checks again: the name may lead elsewhere by then.
    async fn check_resolves(&self, caller: &str, url: &EndpointUrl) -> Result<(), Problem> {
        self.guard.check_resolves(caller, &url.parsed).await.map_err(|refused| match refused {
            UrlRefused::Malformed(rule) => invalid("url", rule),
            UrlRefused::Forbidden(why) => Problem::forbidden_url(why),
            UrlRefused::Unchecked(why) => Problem::unchecked_url(why),
        })
    }

    async fn requeue(&self, endpoint: &Endpoint, what: &Requeue) -> Result<Requeued, Problem> {
        let requeued = self.store.requeue(endpoint.id, what, self.clock.now()).await.map_err(unsaved)?;
        let queued = requeued.queued;
        info!(action = "events_requeued", endpointId = %endpoint.id, key = endpoint.owner, queued, "events are due again");
        Ok(requeued)
    }

    /// An event that belongs to no transaction.
    fn test_event(&self, endpoint: &Endpoint) -> Event {
        let (now, kind) = (self.clock.now(), EventType::Test);
        let id = EventId(format!("evt_{}", self.random.uuid_v4().simple()));
        let payload = json!({
            "event": kind.name(), "eventId": id.0, "endpointId": endpoint.id.to_string(), "timestamp": now,
        });
        Event {
            id,
            kind,
            transaction: TransactionId(Uuid::nil()),
            api_key: endpoint.owner.clone(),
            position: 0,
            at: now,
            payload: payload.to_string(),
        }
    }
}

/// An id in the path; invalid UTF-8 is refused like any other text that is no UUID.
type PathId = Result<Path<String>, PathRejection>;

fn read_id(id: PathId) -> Result<EndpointId, Problem> {
    let parsed = id.ok().and_then(|Path(text)| Uuid::parse_str(&text).ok());
    parsed.map(EndpointId).ok_or_else(|| invalid("id", "must be a UUID, as it was given in the 201"))
}

fn no_endpoint(id: EndpointId) -> Problem {
    Problem::not_found(format!("this API key has no endpoint {id}"))
}

fn invalid(field: &str, message: impl Into<String>) -> Problem {
    Problem::invalid(vec![FieldProblem { field: field.to_owned(), message: message.into() }])
}

fn refusal(refused: EndpointRequestError) -> Problem {
    match refused {
        EndpointRequestError::Invalid(problems) => Problem::invalid(problems),
        EndpointRequestError::ForbiddenUrl(why) => Problem::forbidden_url(why),
    }
}

fn unread(failure: StoreError) -> Problem {
    Problem::unavailable("the store is unavailable; ask again", &failure)
}

fn unsaved(failure: StoreError) -> Problem {
    match failure {
        StoreError::OutcomeUnknown(_) => Problem::endpoint_outcome_unknown(&failure),
        _ => Problem::unavailable("the store is unavailable; nothing was changed, send it again", &failure),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_recovers_with_one_call_at_a_time() {
        let recovering = Recovering::default();
        let turn = recovering.begin("a");
        assert!(turn.is_some() && recovering.begin("a").is_none(), "the second call of this key");
        assert!(recovering.begin("b").is_some(), "another key");
        drop(turn);
        assert!(recovering.begin("a").is_some(), "the next call");
    }
}
