//! The HTTP calls that accept: `POST /relay/direct`, `POST /relay/gasless`, and the nonce a gasless client signs next.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, RawQuery, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json, Router, routing};
use serde_json::{Value, json};

use crate::evm::parse_address;
use crate::http::auth::Caller;
use crate::http::body::JsonBody;
use crate::http::idempotency_header::read_idempotency_key;
use crate::http::problem::{FieldProblem, Problem};
use crate::relay::accept::gasless::Gasless;
use crate::relay::accept::intake::{AcceptReceipt, AcceptRequest, TransactionIntake, TransactionIntakeError};
use crate::relay::request::call::DirectRequest;
use crate::relay::request::forward::GaslessRequest;

/// State of the accepting calls.
pub struct AcceptApi {
    /// Stores requests and queues their messages.
    pub intake: TransactionIntake,
    /// Checks gasless requests; `None`: they are not accepted.
    pub gasless: Option<Gasless>,
}

/// The routes; they need an API key in front.
pub fn routes(state: AcceptApi) -> Router {
    Router::new()
        .route("/api/v1/relay/direct", routing::post(direct))
        .route("/api/v1/relay/gasless", routing::post(gasless))
        .route("/api/v1/relay/gasless/nonce/{address}", routing::get(gasless_nonce))
        .with_state(Arc::new(state))
}

async fn direct(
    State(state): State<Arc<AcceptApi>>,
    Extension(Caller(caller)): Extension<Caller>,
    headers: HeaderMap,
    JsonBody(body, _memory): JsonBody,
) -> Result<Response, Problem> {
    let request = DirectRequest::parse(&body).map_err(Problem::invalid)?;
    drop(body);
    let key = read_idempotency_key(&headers)?;
    let deadline = state.intake.deadline();
    let accepted = state.intake.accept(AcceptRequest::Direct(&request), &caller, key, deadline).await;
    accepted.map(answer).map_err(|failure| refusal(&failure))
}

async fn gasless(
    State(state): State<Arc<AcceptApi>>,
    Extension(Caller(caller)): Extension<Caller>,
    headers: HeaderMap,
    JsonBody(body, _memory): JsonBody,
) -> Result<Response, Problem> {
    let gasless = state.gasless.as_ref().ok_or_else(Problem::gasless_off)?;
    let request = GaslessRequest::parse(&body).map_err(Problem::invalid)?;
    gasless.within_policy(&request)?;
    drop(body);
    let key = read_idempotency_key(&headers)?;
    let deadline = state.intake.deadline();
    let forward = Arc::new(gasless.signed(request, deadline).await?);
    let request = AcceptRequest::Gasless(&forward);
    // A repeated request is answered before the checks, whose results may have changed since the first.
    if let Some(key) = key {
        let repeated = state.intake.repeated(request, &caller, key, deadline).await;
        if let Some(receipt) = repeated.map_err(|failure| refusal(&failure))? {
            return Ok(answer(receipt));
        }
    }
    if let Err(refused) = gasless.is_next(&forward, deadline).await {
        // A duplicate request may have been accepted while the chain was asked: then the nonce taken is its own.
        if let Some(key) = key
            && let Ok(Some(receipt)) = state.intake.repeated(request, &caller, key, deadline).await
        {
            return Ok(answer(receipt));
        }
        return Err(refused);
    }
    gasless.never_failed_on_chain(&forward, deadline).await?;
    let accepted = state.intake.accept(request, &caller, key, deadline).await;
    accepted.map(answer).map_err(|failure| match failure {
        TransactionIntakeError::NonceTaken(holder) => gasless.nonce_taken(&forward, holder),
        failure => refusal(&failure),
    })
}

fn answer(receipt: AcceptReceipt) -> Response {
    let location = format!("/api/v1/relay/status/{}", receipt.id);
    let answer = json!({
        "transactionId": receipt.id.to_string(),
        "status": receipt.status.name(),
        "createdAt": receipt.created_at,
    });
    (StatusCode::ACCEPTED, [(header::LOCATION, location)], Json(answer)).into_response()
}

fn refusal(failure: &TransactionIntakeError) -> Problem {
    const NEVER: &str = "the transaction was not accepted and will not happen; send it again later";
    match failure {
        TransactionIntakeError::KeyReused => Problem::key_reused(),
        TransactionIntakeError::Unavailable(cause) => Problem::unavailable(NEVER, cause),
        TransactionIntakeError::NotQueued(cause) => Problem::unavailable(NEVER, cause),
        TransactionIntakeError::NonceTaken(_) => Problem::unavailable(NEVER, failure),
        TransactionIntakeError::TooLarge { size, max } => Problem::too_large_for_queue(*size, *max),
        TransactionIntakeError::OutcomeUnknown(id) => Problem::outcome_unknown(&id.to_string()),
    }
}

async fn gasless_nonce(
    State(state): State<Arc<AcceptApi>>,
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
