//! The HTTP calls of the relay lane: accept, status, list, timeline.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, RawQuery, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json, Router, routing};
use serde_json::{Value, json};
use uuid::Uuid;

use super::book::Book;
use super::call::{DirectRequest, FieldProblem, parse_address};
use super::forward_request::GaslessRequest;
use super::gasless::Gasless;
use super::intake::{Intake, IntakeError, Receipt, Request};
use super::status::StatusLookup;
use super::store::{Filter, StoreError};
use super::transaction::{Kind, RelayerUrl, Status, Transaction, TransactionId};
use crate::cache::{Cache, Entry};
use crate::http::auth::Caller;
use crate::http::body::JsonBody;
use crate::http::idempotency::read_idempotency_key;
use crate::http::problem::Problem;
use crate::timestamp::Timestamp;

/// What the routes need.
pub struct ApiState {
    /// Where the 202 is earned.
    pub intake: Intake,
    /// What gasless requests are checked with, if they are taken.
    pub gasless: Option<Gasless>,
    /// The three tiers.
    pub lookup: StatusLookup,
    /// Store and queue.
    pub book: Arc<Book>,
}

/// The routes, to be put behind a key.
pub fn routes(state: ApiState) -> Router {
    Router::new()
        .route("/api/v1/relay/direct", routing::post(direct))
        .route("/api/v1/relay/gasless", routing::post(gasless))
        .route("/api/v1/relay/gasless/nonce/{address}", routing::get(gasless_nonce))
        .route("/api/v1/relay/status/{id}", routing::get(status))
        .route("/api/v1/relay/transactions", routing::get(list))
        .route("/api/v1/relay/transactions/{id}/timeline", routing::get(timeline))
        .with_state(Arc::new(state))
}

async fn direct(
    State(state): State<Arc<ApiState>>,
    Extension(Caller(caller)): Extension<Caller>,
    headers: HeaderMap,
    JsonBody(body): JsonBody,
) -> Result<Response, Problem> {
    let request = DirectRequest::parse(&body).map_err(Problem::invalid)?;
    let key = read_idempotency_key(&headers)?;
    let deadline = state.intake.deadline();
    let accepted = state.intake.accept(Request::Direct(&request), &caller, key, deadline).await;
    accepted.map(answer).map_err(|failure| refusal(&failure))
}

async fn gasless(
    State(state): State<Arc<ApiState>>,
    Extension(Caller(caller)): Extension<Caller>,
    headers: HeaderMap,
    JsonBody(body): JsonBody,
) -> Result<Response, Problem> {
    let gasless = state.gasless.as_ref().ok_or_else(Problem::gasless_off)?;
    let request = GaslessRequest::parse(&body).map_err(Problem::invalid)?;
    let key = read_idempotency_key(&headers)?;
    let deadline = state.intake.deadline();
    let forward = Arc::new(gasless.signed(request, deadline).await?);
    let request = Request::Gasless(&forward);
    // One that came before is answered before what may have changed since is looked at.
    if let Some(key) = key {
        let repeated = state.intake.repeated(request, &caller, key, deadline).await;
        if let Some(receipt) = repeated.map_err(|failure| refusal(&failure))? {
            return Ok(answer(receipt));
        }
    }
    if let Err(refused) = gasless.is_next(&forward, deadline).await {
        // Its twin may have been accepted while the chain was asked: then the nonce is gone because it is its own.
        if let Some(key) = key
            && let Ok(Some(receipt)) = state.intake.repeated(request, &caller, key, deadline).await
        {
            return Ok(answer(receipt));
        }
        return Err(refused);
    }
    let accepted = state.intake.accept(request, &caller, key, deadline).await;
    accepted.map(answer).map_err(|failure| match failure {
        IntakeError::NonceTaken(holder) => gasless.nonce_taken(&forward, holder),
        failure => refusal(&failure),
    })
}

fn answer(receipt: Receipt) -> Response {
    let location = format!("/api/v1/relay/status/{}", receipt.id);
    let answer = json!({
        "transactionId": receipt.id.to_string(),
        "status": receipt.status.name(),
        "createdAt": receipt.created_at,
    });
    (StatusCode::ACCEPTED, [(header::LOCATION, location)], Json(answer)).into_response()
}

fn refusal(failure: &IntakeError) -> Problem {
    const NEVER: &str = "the transaction was not accepted and will not happen; send it again later";
    match failure {
        IntakeError::KeyReused => Problem::key_reused(),
        IntakeError::Unavailable(cause) => Problem::unavailable(NEVER, cause),
        IntakeError::NotQueued(cause) => Problem::unavailable(NEVER, cause),
        IntakeError::NonceTaken(_) => Problem::unavailable(NEVER, failure),
        IntakeError::OutcomeUnknown(id) => Problem::outcome_unknown(&id.to_string()),
    }
}

async fn gasless_nonce(
    State(state): State<Arc<ApiState>>,
    address: Result<Path<String>, PathRejection>,
    RawQuery(query): RawQuery,
) -> Result<Json<Value>, Problem> {
    let gasless = state.gasless.as_ref().ok_or_else(Problem::gasless_off)?;
    let invalid =
        |field: &str, message: String| Problem::invalid(vec![FieldProblem { field: field.to_owned(), message }]);
    let text = address.map(|Path(text)| text).unwrap_or_default();
    let address = parse_address(&text).map_err(|rule| invalid("address", rule))?;
    let with_pending = match query.as_deref() {
        None | Some("" | "pending=false") => false,
        Some("pending=true") => true,
        Some(_) => return Err(invalid("pending", "is the only parameter, and must be true or false".to_owned())),
    };
    let nonce = gasless.nonce(address, with_pending, state.intake.deadline()).await?;
    Ok(Json(json!({ "nonce": nonce.to_string() })))
}

async fn status(State(state): State<Arc<ApiState>>, id: PathId) -> Result<Json<Value>, Problem> {
    let id = read_id(id)?;
    match state.lookup.find(id).await.map_err(store_problem)? {
        Some(shown) => Ok(Json(shown)),
        None => Err(Problem::not_found(format!("there is no transaction {id}"))),
    }
}

async fn timeline(State(state): State<Arc<ApiState>>, id: PathId) -> Result<Json<Value>, Problem> {
    let id = read_id(id)?;
    let Some(row) = state.book.store.get(id).await.map_err(store_problem)? else {
        return Err(Problem::not_found(format!("there is no transaction {id}")));
    };
    let mut steps =
        vec![json!({ "seq": 0, "at": row.created_at, "action": "accepted", "detail": "stored and queued" })];
    for entry in state.book.store.timeline(id).await.map_err(store_problem)? {
        steps.push(json!(entry));
    }
    Ok(Json(json!({ "transactionId": id.to_string(), "status": row.status.name(), "steps": steps })))
}

const LIST_MAX: usize = 200;
const LIST_DEFAULT: usize = 50;

async fn list(State(state): State<Arc<ApiState>>, RawQuery(query): RawQuery) -> Result<Json<Value>, Problem> {
    let ListQuery { filter, before, limit } = ListQuery::parse(query.as_deref().unwrap_or_default())?;
    let mut rows = state.book.store.list(&filter, before, limit + 1).await.map_err(store_problem)?;
    let more = rows.len() > limit;
    rows.truncate(limit);
    let next = rows.last().filter(|_| more).map(|row| row.id.to_string());
    Ok(Json(json!({ "transactions": rows.iter().map(show).collect::<Vec<_>>(), "nextCursor": next })))
}

#[derive(Debug)]
struct ListQuery {
    filter: Filter,
    before: Option<TransactionId>,
    limit: usize,
}

impl ListQuery {
    /// Reads the query; an unknown or malformed parameter is named.
    fn parse(query: &str) -> Result<Self, Problem> {
        let mut read = Self { filter: Filter::default(), before: None, limit: LIST_DEFAULT };
        let mut problems = Vec::new();
        let pairs = reqwest::Url::parse(&format!("http://query/?{query}"))
            .map(|url| url.query_pairs().into_owned().collect::<Vec<_>>())
            .unwrap_or_default();
        for (name, value) in pairs {
            let rule = read.set(&name, &value);
            if let Err(message) = rule {
                problems.push(FieldProblem { field: name, message });
            }
        }
        if problems.is_empty() { Ok(read) } else { Err(Problem::invalid(problems)) }
    }

    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let time = || Timestamp::parse(value).ok_or_else(|| "must be an RFC 3339 time".to_owned());
        match name {
            "status" => {
                let names: Vec<_> = Status::ALL.iter().map(|status| status.name()).collect();
                let status = Status::parse(value).ok_or_else(|| format!("must be one of {}", names.join(", ")))?;
                self.filter.status = Some(status);
            }
            "type" => {
                self.filter.kind = Some(Kind::parse(value).ok_or_else(|| "must be direct or gasless".to_owned())?);
            }
            "relayer" => self.filter.relayer = Some(RelayerUrl(value.trim_end_matches('/').to_owned())),
            "from" => self.filter.from = Some(time()?),
            "until" => self.filter.until = Some(time()?),
            "outcomeUnknown" => {
                self.filter.in_doubt = value.parse().map_err(|_| "must be true or false".to_owned())?;
            }
            "cursor" => {
                let id = Uuid::parse_str(value).map_err(|_| "must be a nextCursor of this list".to_owned())?;
                self.before = Some(TransactionId(id));
            }
            "limit" => {
                let limit = value.parse().ok().filter(|limit| (1..=LIST_MAX).contains(limit));
                self.limit = limit.ok_or_else(|| format!("must be a number from 1 to {LIST_MAX}"))?;
            }
            _ => {
                return Err(
                    "is not known; known are status, type, relayer, from, until, outcomeUnknown, cursor, limit"
                        .to_owned(),
                );
            }
        }
        Ok(())
    }
}

/// A transaction for the cache, if it may be kept.
pub fn entry(row: &Transaction) -> Option<Entry> {
    Cache::keeps(row.status).then(|| Entry { id: row.id, version: row.version, shown: show(row) })
}

/// A transaction as clients see it.
pub fn show(row: &Transaction) -> Value {
    let binding = row.binding.as_ref();
    let claim = row.claim.as_ref();
    json!({
        "transactionId": row.id.to_string(),
        "status": row.status.name(),
        "hash": row.hash,
        "transactionHash": row.hash,
        "block_number": row.block_number,
        "createdAt": row.created_at,
        "updatedAt": row.updated_at,
        "confirmedAt": row.confirmed_at,
        "from": row.from,
        "to": row.call.to.to_checksum(None),
        "value": row.call.value.to_string(),
        "type": row.kind.name(),
        "ozRelayerTxId": binding.map(|binding| binding.tx_id.0.as_str()),
        "ozRelayerUrl": binding.map(|binding| &binding.relayer).or(claim.map(|claim| &claim.relayer)).map(|url| url.0.as_str()),
        "outcomeUnknown": row.is_in_doubt(),
        "result": row.result,
        "error_message": row.error_message,
    })
}

/// An id in the path; one that is not even text is refused like any other that is no UUID.
type PathId = Result<Path<String>, PathRejection>;

fn read_id(id: PathId) -> Result<TransactionId, Problem> {
    let parsed = id.ok().and_then(|Path(text)| Uuid::parse_str(&text).ok());
    parsed.map(TransactionId).ok_or_else(|| {
        Problem::invalid(vec![FieldProblem {
            field: "transactionId".to_owned(),
            message: "must be a UUID, as it was given in the 202".to_owned(),
        }])
    })
}

fn store_problem(failure: StoreError) -> Problem {
    Problem::unavailable("the store is unavailable; ask again", &failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_query_is_read_or_named() {
        let read = ListQuery::parse("status=failed&limit=10&from=2026-01-01T00:00:00Z&outcomeUnknown=true").unwrap();
        assert_eq!((read.filter.status, read.limit, read.filter.in_doubt), (Some(Status::Failed), 10, true));
        let problem = ListQuery::parse("status=done&limit=0&colour=red&cursor=x&from=now").unwrap_err();
        let fields: Vec<_> = problem.errors.iter().map(|found| found.field.as_str()).collect();
        assert_eq!(fields, ["status", "limit", "colour", "cursor", "from"]);
    }
}
