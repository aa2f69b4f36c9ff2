//! A development relayer's HTTP side: the calls of the real one that a gateway makes, with its envelopes and errors.

use std::sync::{Arc, atomic::Ordering};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{Path, Query, Request as HttpRequest, State},
    http::{
        HeaderMap, HeaderValue, StatusCode,
        header::{AUTHORIZATION, CONTENT_TYPE},
    },
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde::Serialize;
use serde_json::{Value, json};
use time::OffsetDateTime;
use uuid::Uuid;

use super::{
    record::{Record, Status, now, timestamp},
    relayer::Relayer,
    request::{Refusal, Request},
};

/// More than enough where nothing is ever paid from it.
const BALANCE: &str = "10000000000000000000000";
const PER_PAGE_DEFAULT: usize = 10;

type Pairs = Query<Vec<(String, String)>>;

pub(super) fn router(relayer: Arc<Relayer>) -> Router {
    Router::new()
        .route("/api/v1/relayers", get(list_relayers))
        .route("/api/v1/relayers/{id}", get(get_relayer))
        .route("/api/v1/relayers/{id}/status", get(get_status))
        .route("/api/v1/relayers/{id}/transactions", post(send).get(list_transactions))
        .route("/api/v1/relayers/{id}/transactions/{transaction}", get(get_transaction))
        .layer(middleware::from_fn_with_state(Arc::clone(&relayer), authorize))
        // Public at the real one too, so outside the layer above.
        .route("/api/v1/health", get(|| async { "OK" }))
        .with_state(relayer)
}

async fn authorize(State(relayer): State<Arc<Relayer>>, request: HttpRequest, next: Next) -> Response {
    let request_id = request.headers().get("x-request-id").cloned();
    let given = request.headers().get(AUTHORIZATION).map(HeaderValue::as_bytes);
    let expected = |given: &[u8]| given.strip_prefix(b"Bearer ").is_some_and(|key| key == relayer.api_key.as_bytes());
    let mut answer = match given {
        Some(given) if expected(given) => next.run(request).await,
        Some(_) => {
            // The real one sends this without a content type.
            let body = r#"{"success":false,"code":401,"error":"Unauthorized","message":"Unauthorized"}"#;
            let mut answer = Response::new(Body::from(body));
            *answer.status_mut() = StatusCode::UNAUTHORIZED;
            answer
        }
        None => {
            let body = r#"{"success": false, "code": 401, "error": "Unauthorized", "message": "Unauthorized"}"#;
            (StatusCode::UNAUTHORIZED, [(CONTENT_TYPE, "application/json")], body).into_response()
        }
    };
    if let Some(request_id) = request_id {
        answer.headers_mut().insert("x-request-id", request_id);
    }
    answer
}

#[derive(Serialize)]
struct Envelope<T: Serialize> {
    success: bool,
    data: T,
    error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pagination: Option<Pagination>,
}

#[derive(Serialize)]
struct Pagination {
    current_page: usize,
    per_page: usize,
    total_items: usize,
}

fn success(data: impl Serialize) -> Response {
    Json(Envelope { success: true, data, error: None, pagination: None }).into_response()
}

fn failure(status: StatusCode, message: String) -> Response {
    let envelope = Envelope { success: false, data: Value::Null, error: Some(message), pagination: None };
    (status, Json(envelope)).into_response()
}

/// Some errors of the real one are plain text.
fn text(message: String) -> Response {
    (StatusCode::BAD_REQUEST, message).into_response()
}

async fn list_relayers(State(relayer): State<Arc<Relayer>>, Query(query): Pairs) -> Response {
    match Page::parse(&query) {
        Ok(page) => {
            let shown = if page.number == 1 && page.size > 0 { vec![relayer.to_json()] } else { Vec::new() };
            page.answer(&shown, 1)
        }
        Err(message) => text(message),
    }
}

async fn get_relayer(State(relayer): State<Arc<Relayer>>, Path(id): Path<String>) -> Response {
    relayer.unknown(&id).unwrap_or_else(|| success(relayer.to_json()))
}

async fn get_status(State(relayer): State<Arc<Relayer>>, Path(id): Path<String>) -> Response {
    if let Some(answer) = relayer.unknown(&id) {
        return answer;
    }
    let (balance, nonce) = match &relayer.signer {
        None => (BALANCE.to_owned(), relayer.next_number.load(Ordering::Relaxed)),
        // The real one asks the chain each time, too, and has no answer without it.
        Some(signer) => match signer.node.balance(signer.address).await {
            Ok(balance) => (balance.to_string(), signer.next_nonce.load(Ordering::Relaxed)),
            Err(error) => return failure(StatusCode::INTERNAL_SERVER_ERROR, format!("Provider error: {error}")),
        },
    };
    let book = relayer.book();
    success(json!({
        "network_type": "evm",
        "balance": balance,
        "pending_transactions_count": book.pending,
        "last_confirmed_transaction_timestamp": book.last_confirmed.map(timestamp),
        "system_disabled": relayer.is_disabled(),
        "paused": false,
        "nonce": nonce.to_string(),
    }))
}

async fn send(
    State(relayer): State<Arc<Relayer>>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    if !headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"application/json")) {
        return text("Content type error".to_owned());
    }
    if let Some(answer) = relayer.unknown(&id) {
        return answer;
    }
    if relayer.is_disabled() {
        return failure(StatusCode::FORBIDDEN, "Relayer disabled".to_owned());
    }
    let request = match Request::parse(&body, OffsetDateTime::now_utc()) {
        Ok(request) => request,
        Err(Refusal::NotJson(message)) => return text(message),
        Err(Refusal::Invalid(message)) => return failure(StatusCode::BAD_REQUEST, message),
    };
    match relayer.accept(request).await {
        Ok(record) => success(record.view(&relayer.identity, Status::Pending)),
        Err(error) => {
            tracing::error!(relayer = relayer.identity.id, %error, "a development relayer could not store a record");
            failure(StatusCode::INTERNAL_SERVER_ERROR, "Internal Server Error".to_owned())
        }
    }
}

async fn list_transactions(
    State(relayer): State<Arc<Relayer>>,
    Path(id): Path<String>,
    Query(query): Pairs,
) -> Response {
    if let Some(answer) = relayer.unknown(&id) {
        return answer;
    }
    let wanted = match find(&query, "status").map(|text| Status::parse(text).ok_or(text)) {
        None => None,
        Some(Ok(status)) => Some(status),
        Some(Err(other)) => return text(format!("Query deserialize error: unknown variant `{other}`")),
    };
    let page = match Page::parse(&query) {
        Ok(page) => page,
        Err(message) => return text(message),
    };
    let now = now();
    let (found, total): (Vec<Arc<Record>>, usize) = {
        let book = relayer.book();
        let newest_first = book.records.values().rev();
        match wanted {
            None => (page.of(newest_first), book.records.len()),
            Some(wanted) => {
                let matching: Vec<&Arc<Record>> =
                    newest_first.filter(|record| record.status_at(now) == wanted).collect();
                (page.of(matching.iter().copied()), matching.len())
            }
        }
    };
    let views: Vec<_> = found.iter().map(|record| record.view(&relayer.identity, record.status_at(now))).collect();
    page.answer(&views, total)
}

async fn get_transaction(
    State(relayer): State<Arc<Relayer>>,
    Path((id, transaction)): Path<(String, String)>,
) -> Response {
    if let Some(answer) = relayer.unknown(&id) {
        return answer;
    }
    let found = Uuid::try_parse(&transaction).ok().and_then(|id| relayer.book().get(&id));
    match found {
        Some(record) => success(record.view(&relayer.identity, record.status_at(now()))),
        None => failure(StatusCode::NOT_FOUND, format!("Transaction with ID {transaction} not found")),
    }
}

impl Relayer {
    fn unknown(&self, id: &str) -> Option<Response> {
        (id != self.identity.id).then(|| failure(StatusCode::NOT_FOUND, format!("Relayer with ID {id} not found")))
    }

    /// As the real one is while its chain has not answered since the start.
    fn is_disabled(&self) -> bool {
        self.signer.as_ref().is_some_and(|signer| !signer.ready.load(Ordering::Relaxed))
    }

    fn to_json(&self) -> Value {
        let (network, signer) = if self.signer.is_some() { ("dev-chain", "key") } else { ("dev-none", "no-signer") };
        json!({
            "id": self.identity.id,
            "name": self.identity.name,
            "network": network,
            "network_type": "evm",
            "paused": false,
            "policies": {"min_balance": 0, "gas_limit_estimation": true, "include_revert_data": false},
            "signer_id": format!("{}-{signer}", self.identity.id),
            "notification_id": format!("{}-webhook", self.identity.id),
            "address": self.identity.address,
            "system_disabled": self.is_disabled(),
        })
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Page {
    number: usize,
    size: usize,
}

impl Page {
    fn parse(query: &[(String, String)]) -> Result<Self, String> {
        let number = |name, default| match find(query, name) {
            None => Ok(default),
            Some(text) => text.parse().map_err(|error| format!("Query deserialize error: {error}")),
        };
        Ok(Self { number: number("page", 1)?.max(1), size: number("per_page", PER_PAGE_DEFAULT)? })
    }

    fn of<'a>(&self, items: impl Iterator<Item = &'a Arc<Record>>) -> Vec<Arc<Record>> {
        items.skip((self.number - 1).saturating_mul(self.size)).take(self.size).cloned().collect()
    }

    fn answer<T: Serialize>(&self, data: &[T], total_items: usize) -> Response {
        let pagination = Some(Pagination { current_page: self.number, per_page: self.size, total_items });
        Json(Envelope { success: true, data, error: None, pagination }).into_response()
    }
}

fn find<'a>(query: &'a [(String, String)], name: &str) -> Option<&'a str> {
    query.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_have_the_real_ones_defaults() {
        let query = |pairs: &[(&str, &str)]| {
            let pairs: Vec<_> = pairs.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
            Page::parse(&pairs)
        };
        assert_eq!(query(&[("other", "x")]), Ok(Page { number: 1, size: 10 }));
        assert_eq!(query(&[("page", "0"), ("per_page", "1000")]), Ok(Page { number: 1, size: 1000 }));
        assert!(query(&[("page", "-1")]).unwrap_err().starts_with("Query deserialize error: "));
    }
}
