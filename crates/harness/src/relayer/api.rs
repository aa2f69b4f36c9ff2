//! The relayer's HTTP side: who may come in, what they get, and how a POST goes wrong.

use std::{sync::Arc, time::Instant};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{ConnectInfo, Path, Query, Request as HttpRequest, State},
    http::{HeaderMap, HeaderValue, StatusCode, header::CONTENT_TYPE},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use serde_json::{Value, json};

use super::{
    Dialect, Seen,
    faults::{Faults, PostFault, ReadFault},
    progress::Shared,
    record::Status,
};
use crate::server::Line;

type Pairs = Query<Vec<(String, String)>>;

pub(super) fn router(shared: &Arc<Shared>) -> Router {
    let routes = match shared.options.dialect {
        Dialect::Real => Router::new()
            .route("/api/v1/relayers", get(list_relayers))
            .route("/api/v1/relayers/{id}", get(get_relayer))
            .route("/api/v1/relayers/{id}/status", get(get_status))
            .route("/api/v1/relayers/{id}/transactions", post(send).get(list_transactions))
            .route("/api/v1/relayers/{id}/transactions/{tx}", get(get_transaction)),
        Dialect::Spec => Router::new()
            .route("/api/v1/relayers", get(spec_list))
            .route("/relayers/{id}", get(spec_relayer))
            .route("/transactions", post(spec_send))
            .route("/transactions/{tx}", get(spec_transaction)),
    };
    routes
        .route("/api/v1/health", get(|| async { "OK" }))
        .layer(middleware::from_fn_with_state(Arc::clone(shared), enter))
        .with_state(Arc::clone(shared))
}

/// Before every request: count it, then the faults that strike everything, the rate limit, and the key.
async fn enter(State(shared): State<Arc<Shared>>, request: HttpRequest, next: Next) -> Response {
    let headers = request.headers();
    let request_id = headers
        .get("x-request-id")
        .cloned()
        .unwrap_or_else(|| HeaderValue::from_str(&uuid::Uuid::new_v4().to_string()).expect("a UUID is a header value"));
    let key = headers.get("authorization").map(|value| value.as_bytes().to_vec());
    let is_health = request.uri().path() == "/api/v1/health";
    let refusal = {
        let mut state = shared.lock();
        state.seen.push(Seen {
            method: request.method().to_string(),
            path: request.uri().path().to_owned(),
            query: request.uri().query().unwrap_or_default().to_owned(),
            at: Instant::now(),
        });
        if let Some(status) = state.faults.every_request {
            Some(failure(status, "Internal Server Error"))
        } else if !state.within_limit(shared.options.rate_limit) {
            Some(rate_limited())
        } else if is_health {
            None
        } else {
            unauthorized(key.as_deref(), &shared.options.api_key)
        }
    };
    let mut answer = match refusal {
        Some(refusal) => refusal,
        None => next.run(request).await,
    };
    answer.headers_mut().insert("x-request-id", request_id);
    answer
}

fn unauthorized(given: Option<&[u8]>, key: &str) -> Option<Response> {
    match given {
        None => {
            let body = r#"{"success": false, "code": 401, "error": "Unauthorized", "message": "Unauthorized"}"#;
            Some((StatusCode::UNAUTHORIZED, [(CONTENT_TYPE, "application/json")], body).into_response())
        }
        Some(given) if given == format!("Bearer {key}").as_bytes() => None,
        Some(_) => Some(wrong_key()),
    }
}

/// The real one sends this without a content type.
fn wrong_key() -> Response {
    let body = r#"{"success":false,"code":401,"error":"Unauthorized","message":"Unauthorized"}"#;
    let mut answer = Response::new(Body::from(body));
    *answer.status_mut() = StatusCode::UNAUTHORIZED;
    answer
}

fn rate_limited() -> Response {
    let body =
        r#"{ "success": false, "code":429, "error": "TooManyRequests", "message": "Too Many Requests", "after": 0}"#;
    let headers = [("content-type", "application/json"), ("retry-after", "0"), ("x-ratelimit-after", "0")];
    (StatusCode::TOO_MANY_REQUESTS, headers, body).into_response()
}

fn code(status: u16) -> StatusCode {
    StatusCode::from_u16(status).expect("an HTTP status")
}

fn reply(status: u16, body: &Value) -> Response {
    (code(status), [(CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

fn success(data: Value) -> Response {
    reply(200, &json!({"success": true, "data": data, "error": null}))
}

fn failure(status: u16, message: &str) -> Response {
    reply(status, &json!({"success": false, "data": null, "error": message}))
}

fn text(status: u16, message: String) -> Response {
    (code(status), [(CONTENT_TYPE, "text/plain; charset=utf-8")], message).into_response()
}

/// Delays, fails or holds a read as the fault says.
async fn suffer(fault: ReadFault, line: &Line) -> Option<Response> {
    if fault.hang {
        line.is_cut().await;
    }
    if let Some(delay) = fault.delay {
        tokio::time::sleep(delay).await;
    }
    fault.status.map(|status| failure(status, "Provider error: made up by the test"))
}

/// The page asked for and its size; the error is a whole answer.
fn page(query: &[(String, String)]) -> Result<(usize, usize), Box<Response>> {
    let number = |name: &str, default: usize| match query.iter().find(|(key, _)| key == name) {
        None => Ok(default),
        Some((_, text)) => text
            .parse::<usize>()
            .map_err(|error| Box::new(self::text(400, format!("Query deserialize error: {error}")))),
    };
    Ok((number("page", 1)?.max(1), number("per_page", 10)?))
}

fn paged(items: &[Value], page: usize, per_page: usize) -> Response {
    let shown: Vec<&Value> = items.iter().skip((page - 1).saturating_mul(per_page)).take(per_page).collect();
    let pagination = json!({"current_page": page, "per_page": per_page, "total_items": items.len()});
    reply(200, &json!({"success": true, "data": shown, "error": null, "pagination": pagination}))
}

impl Shared {
    /// The relayer object of reads and state webhooks.
    pub(super) fn to_json(&self, faults: &Faults) -> Value {
        let mut relayer = described(&self.options.id, &self.address, faults.paused, faults.system_disabled);
        if faults.system_disabled {
            relayer["disabled_reason"] = json!({"type": "RpcValidationFailed", "details": "made up by the test"});
        }
        relayer
    }

    fn is_mine(&self, id: &str) -> Option<Response> {
        (id != self.options.id).then(|| failure(404, &format!("Relayer with ID {id} not found")))
    }
}

fn described(id: &str, address: &str, paused: bool, system_disabled: bool) -> Value {
    json!({
        "id": id, "name": format!("Relayer {id}"), "network": "testnet", "network_type": "evm", "paused": paused,
        "policies": {"min_balance": 0, "gas_limit_estimation": true, "include_revert_data": false},
        "signer_id": format!("signer-{id}"), "notification_id": format!("hook-{id}"), "address": address,
        "system_disabled": system_disabled,
    })
}

async fn list_relayers(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(line): ConnectInfo<Line>,
    Query(query): Pairs,
) -> Response {
    let fault = shared.lock().faults.relayer_reads.clone();
    if let Some(answer) = suffer(fault, &line).await {
        return answer;
    }
    let mut relayers: Vec<Value> = (0..shared.options.decoys)
        .map(|n| described(&format!("decoy-{n}"), &format!("0x{n:040x}"), true, false))
        .collect();
    relayers.push(shared.to_json(&shared.lock().faults));
    match page(&query) {
        Ok((page, per_page)) => paged(&relayers, page, per_page),
        Err(answer) => *answer,
    }
}

async fn get_relayer(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(line): ConnectInfo<Line>,
    Path(id): Path<String>,
) -> Response {
    let fault = shared.lock().faults.relayer_reads.clone();
    if let Some(answer) = suffer(fault, &line).await {
        return answer;
    }
    shared.is_mine(&id).unwrap_or_else(|| success(shared.to_json(&shared.lock().faults)))
}

async fn get_status(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(line): ConnectInfo<Line>,
    Path(id): Path<String>,
) -> Response {
    let fault = shared.lock().faults.relayer_reads.clone();
    if let Some(answer) = suffer(fault, &line).await {
        return answer;
    }
    if let Some(answer) = shared.is_mine(&id) {
        return answer;
    }
    let state = shared.lock();
    let pending = state.entries.iter().filter(|entry| entry.record.status.is_pending()).count();
    success(json!({
        "network_type": "evm",
        "balance": state.balance,
        "pending_transactions_count": pending,
        "last_confirmed_transaction_timestamp": state.last_confirmed.map(super::record::timestamp),
        "system_disabled": state.faults.system_disabled,
        "paused": state.faults.paused,
        "nonce": state.next_nonce.to_string(),
    }))
}

async fn list_transactions(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(line): ConnectInfo<Line>,
    Path(id): Path<String>,
    Query(query): Pairs,
) -> Response {
    let fault = shared.lock().faults.transaction_reads.clone();
    if let Some(answer) = suffer(fault, &line).await {
        return answer;
    }
    if let Some(answer) = shared.is_mine(&id) {
        return answer;
    }
    let status = match query.iter().find(|(key, _)| key == "status") {
        None => None,
        Some((_, text)) => match Status::parse(text) {
            Some(status) => Some(status),
            None => return self::text(400, format!("Query deserialize error: unknown variant `{text}`")),
        },
    };
    let (page, per_page) = match page(&query) {
        Ok(page) => page,
        Err(answer) => return *answer,
    };
    let state = shared.lock();
    let newest_first = state.entries.iter().rev().map(|entry| &entry.record);
    let records: Vec<Value> = newest_first
        .filter(|record| status.is_none_or(|status| record.status == status))
        .map(|r| r.to_json())
        .collect();
    paged(&records, page, per_page)
}

async fn get_transaction(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(line): ConnectInfo<Line>,
    Path((id, tx)): Path<(String, String)>,
) -> Response {
    let fault = shared.lock().faults.transaction_reads.clone();
    if let Some(answer) = suffer(fault, &line).await {
        return answer;
    }
    if let Some(answer) = shared.is_mine(&id) {
        return answer;
    }
    match shared.lock().entry(&tx) {
        Some(entry) => success(entry.record.to_json()),
        None => failure(404, &format!("Transaction with ID {tx} not found")),
    }
}

async fn send(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(line): ConnectInfo<Line>,
    Path(id): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    if !headers.get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"application/json")) {
        return text(400, "Content type error".to_owned());
    }
    if let Some(answer) = shared.is_mine(&id) {
        return answer;
    }
    take(&shared, &line, &body).await
}

async fn take(shared: &Arc<Shared>, line: &Line, body: &Bytes) -> Response {
    let request: Value = match serde_json::from_slice(body) {
        Ok(request) => request,
        Err(error) => return text(400, format!("Json deserialize error: {error}")),
    };
    let (fault, ahead) = {
        let mut state = shared.lock();
        if state.faults.paused {
            return failure(403, "Relayer paused");
        }
        if state.faults.system_disabled {
            return failure(403, "Relayer disabled");
        }
        (state.next_fault(&request), state.faults.webhooks.before_answer)
    };
    if let Some(fault) = fault.as_ref().filter(|fault| !fault.stores()) {
        return before_storing(fault, line).await;
    }
    if let Some(PostFault::HangThenStore(delay)) = &fault {
        shared.accept_later(body.to_vec(), *delay);
        line.is_cut().await;
        return failure(500, "never seen: the connection is gone");
    }
    let record = match shared.accept(body, fault.as_ref()) {
        Ok(record) => record,
        Err(message) => return failure(400, &message),
    };
    if let Some(status) = ahead {
        shared.run_ahead(&record.id, status).await;
    }
    let answer = match shared.options.dialect {
        Dialect::Real => success(record.to_json()),
        Dialect::Spec => reply(200, &json!({"transactionId": record.id, "status": record.status.as_str()})),
    };
    match fault {
        None => answer,
        Some(fault) => after_storing(&fault, line, answer).await,
    }
}

async fn before_storing(fault: &PostFault, line: &Line) -> Response {
    match fault {
        PostFault::Unauthorized => wrong_key(),
        PostFault::Paused => failure(403, "Relayer paused"),
        PostFault::Disabled => failure(403, "Relayer disabled"),
        PostFault::RateLimited => rate_limited(),
        PostFault::Refused(message) => failure(400, message),
        PostFault::Status(status) => failure(*status, "made up by the test"),
        PostFault::HangBeforeStoring => {
            line.is_cut().await;
            failure(500, "never seen: the connection is gone")
        }
        PostFault::CutBeforeStoring => {
            line.cut();
            failure(500, "never seen: the connection is gone")
        }
        _ => failure(500, "Internal Server Error: made up by the test, before storing"),
    }
}

async fn after_storing(fault: &PostFault, line: &Line, answer: Response) -> Response {
    match fault {
        PostFault::ErrorAfterStoring | PostFault::QueueUnavailable => {
            failure(500, "Queue error: Redis error: made up by the test")
        }
        PostFault::TimeoutAfterStoring => text(504, "Request handler timeout".to_owned()),
        PostFault::HangAfterStoring => {
            line.is_cut().await;
            answer
        }
        PostFault::CutAfterStoring => {
            line.cut();
            answer
        }
        PostFault::Slow(delay) => {
            tokio::time::sleep(*delay).await;
            answer
        }
        PostFault::GarbledAnswer => {
            (code(200), [(CONTENT_TYPE, "text/html")], "<html>Welcome to the hotel network</html>").into_response()
        }
        _ => answer,
    }
}

async fn spec_list(State(shared): State<Arc<Shared>>, ConnectInfo(line): ConnectInfo<Line>) -> Response {
    let fault = shared.lock().faults.relayer_reads.clone();
    if let Some(answer) = suffer(fault, &line).await {
        return answer;
    }
    let state = shared.lock();
    let pending = state.entries.iter().filter(|entry| entry.record.status.is_pending()).count();
    let status = if state.faults.paused || state.faults.system_disabled { "paused" } else { "active" };
    let id = &shared.options.id;
    reply(200, &json!({"data": [{"relayerId": id, "id": id, "pending_transactions": pending, "status": status}]}))
}

async fn spec_relayer(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(line): ConnectInfo<Line>,
    Path(id): Path<String>,
) -> Response {
    let fault = shared.lock().faults.relayer_reads.clone();
    if let Some(answer) = suffer(fault, &line).await {
        return answer;
    }
    if let Some(answer) = shared.is_mine(&id) {
        return answer;
    }
    let state = shared.lock();
    let pending = state.entries.iter().filter(|entry| entry.record.status.is_pending()).count();
    let paused = state.faults.paused;
    reply(200, &json!({"relayerId": id, "numberOfPendingTransactions": pending, "paused": paused}))
}

async fn spec_send(State(shared): State<Arc<Shared>>, ConnectInfo(line): ConnectInfo<Line>, body: Bytes) -> Response {
    take(&shared, &line, &body).await
}

async fn spec_transaction(
    State(shared): State<Arc<Shared>>,
    ConnectInfo(line): ConnectInfo<Line>,
    Path(tx): Path<String>,
) -> Response {
    let fault = shared.lock().faults.transaction_reads.clone();
    if let Some(answer) = suffer(fault, &line).await {
        return answer;
    }
    match shared.lock().entry(&tx) {
        Some(entry) => reply(200, &entry.record.to_flat_json()),
        None => failure(404, &format!("Transaction with ID {tx} not found")),
    }
}
