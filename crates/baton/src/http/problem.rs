//! The only place where an error becomes a response: RFC 9457 `application/problem+json`, with a stable `type` and
//! `code`, plus `statusCode` and `message`, which clients of the existing service read.

use std::fmt;

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, Response, StatusCode, header};
use axum::response::IntoResponse;
use serde_json::{Value, json};
use tracing::error;

use crate::errors::chain;

/// One invalid field of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FieldProblem {
    /// The field's name as the client wrote it.
    pub field: String,
    /// The rule that its value breaks.
    pub message: String,
}

impl fmt::Display for FieldProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.message)
    }
}

/// An error as the client receives it.
#[derive(Debug, Clone)]
pub struct Problem {
    /// The HTTP status.
    pub status: u16,
    /// Stable identifier for programs; also the end of `type`.
    pub code: &'static str,
    /// Summary, the same for every occurrence of the code.
    pub title: &'static str,
    /// This occurrence, for people. A 5xx contains no internals.
    pub detail: String,
    /// Every invalid field; empty if the problem is not about fields.
    pub errors: Vec<FieldProblem>,
    /// Additional members of the body, such as the id of a transaction.
    pub more: Vec<(&'static str, Value)>,
    /// Additional response headers.
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

impl Problem {
    fn new(status: StatusCode, code: &'static str, title: &'static str, detail: impl Into<String>) -> Self {
        Self {
            status: status.as_u16(),
            code,
            title,
            detail: detail.into(),
            errors: Vec::new(),
            more: Vec::new(),
            headers: Vec::new(),
        }
    }

    /// 400: the request cannot be parsed.
    pub fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad-request", "The request cannot be read", detail)
    }

    /// 400: these fields are invalid. The answer names each once, and [`PROBLEMS_MAX`] of them.
    pub fn invalid(errors: Vec<FieldProblem>) -> Self {
        let (errors, more) = shown(errors);
        let mut detail = errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
        if more {
            detail.push_str("; and more");
        }
        let mut problem =
            Self::new(StatusCode::BAD_REQUEST, "invalid-request", "The request has invalid fields", detail);
        problem.errors = errors;
        problem
    }

    /// 401: no valid API key, or no valid webhook signature.
    pub fn unauthorized(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized", "Not authorized", detail)
    }

    /// 401: the signature of a forward request is not its signer's.
    pub fn bad_signature(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "bad-signature", "The signature is not valid", detail)
    }

    /// 403: this service does not call the address that a client registers.
    pub fn forbidden_url(message: impl Into<String>) -> Self {
        let found = FieldProblem { field: "url".to_owned(), message: message.into() };
        let title = "The address is not allowed";
        let mut problem = Self::new(StatusCode::FORBIDDEN, "forbidden-url", title, found.to_string());
        problem.errors.push(found);
        problem
    }

    /// 404: gasless transactions are not configured, so this service has no such resource.
    pub fn gasless_off() -> Self {
        let detail = "gasless transactions are not configured on this service; its operator must set FORWARDER_ADDRESS, \
                      RPC_URL and CHAIN_ID";
        Self::new(StatusCode::NOT_FOUND, "gasless-off", "Gasless transactions are off", detail)
    }

    /// 421: the request is for another host.
    pub fn wrong_host() -> Self {
        let detail = "this development service answers for localhost only; start it with --host NAME for another name";
        Self::new(StatusCode::MISDIRECTED_REQUEST, "wrong-host", "Wrong host", detail)
    }

    /// 404: no such path or record.
    pub fn not_found(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not-found", "Not found", detail)
    }

    /// 405: the path exists, but not with this method.
    pub fn method_not_allowed() -> Self {
        let detail = "this path does not support this method";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "method-not-allowed", "Method not allowed", detail)
    }

    /// 408: the body did not arrive in time; the request has had no effect.
    pub fn too_slow() -> Self {
        let detail = "the request body did not arrive in time";
        Self::new(StatusCode::REQUEST_TIMEOUT, "request-timeout", "Request timeout", detail)
    }

    /// 409: the API key has this many endpoints, which is the maximum.
    pub fn too_many_endpoints(max: usize) -> Self {
        let detail = format!("this API key has {max} endpoints, the maximum (WEBHOOK_ENDPOINTS_MAX); delete one first");
        Self::new(StatusCode::CONFLICT, "too-many-endpoints", "Too many endpoints", detail)
    }

    /// 409: the endpoint takes no test event now, for this reason.
    pub fn no_test_event(detail: &'static str) -> Self {
        Self::new(StatusCode::CONFLICT, "no-test-event", "No test event", detail)
    }

    /// 409: other requests changed the record each time between our read and our save; nothing was changed.
    pub fn changed_meanwhile() -> Self {
        let detail = "other requests changed it at the same time; nothing was changed, send it again";
        Self::new(StatusCode::CONFLICT, "changed-meanwhile", "Changed meanwhile", detail)
    }

    /// 409: this key already has a call in progress that recovers events; nothing was changed.
    pub fn already_recovering() -> Self {
        let detail =
            "another call of this API key is recovering events; nothing was changed, retry after it has finished";
        Self::new(StatusCode::CONFLICT, "already-recovering", "Events are being recovered", detail)
    }

    /// 413: the body, or a line of an upload, exceeds this many bytes.
    pub fn too_large(max: usize) -> Self {
        let detail = format!("the body has more than {max} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "too-large", "The body is too large", detail)
    }

    /// 413: the body is small enough, but the message made of it is larger than the queue accepts.
    pub fn too_large_for_queue(size: usize, max: usize) -> Self {
        let detail = format!("the transaction makes a message of {size} bytes, and the queue accepts {max}");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "too-large", "The body is too large", detail)
    }

    /// 415: the body must be `application/json`.
    pub fn wrong_content_type() -> Self {
        Self::wrong_content_type_for("application/json")
    }

    /// 415: the body must be of this type.
    pub fn wrong_content_type_for(wanted: &str) -> Self {
        let detail = format!("send the body as Content-Type: {wanted}");
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported-media-type", "Unsupported media type", detail)
    }

    /// 422: the idempotency key belongs to another request.
    pub fn key_reused() -> Self {
        let detail = "this Idempotency-Key was used with another body; use a new key for a new request";
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "idempotency-key-reused", "Idempotency key reused", detail)
    }

    /// 429: the id is not in the store, and the limit of relayer lookups for unknown ids is reached.
    pub fn too_many_lookups() -> Self {
        let detail =
            "the id is not in the store, and the limit of relayer lookups for unknown ids is reached; retry later";
        let title = "Too many lookups of unknown ids";
        let mut problem = Self::new(StatusCode::TOO_MANY_REQUESTS, "too-many-lookups", title, detail);
        problem.headers.push((header::RETRY_AFTER, HeaderValue::from_static("1")));
        problem
    }

    /// 500: a bug, such as a panic.
    pub fn internal() -> Self {
        let detail = "an internal error; the log has the cause under the request id";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "Internal error", detail)
    }

    /// 504: a read, or a change that may be repeated, was not answered in time.
    pub fn no_answer() -> Self {
        let detail = "there was no answer in time; try again";
        Self::new(StatusCode::GATEWAY_TIMEOUT, "no-answer", "No answer in time", detail)
    }

    /// 503: the request was refused and will never have an effect. The cause goes to the log only.
    pub fn unavailable(detail: impl Into<String>, cause: &(dyn std::error::Error + 'static)) -> Self {
        error!(action = "unavailable", "{}", chain(cause));
        let mut problem = Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", "Service unavailable", detail);
        problem.headers.push((header::RETRY_AFTER, HeaderValue::from_static("1")));
        problem
    }

    /// 503: the lane waits for one of its servers since the start of the process; nothing was accepted.
    pub fn starting() -> Self {
        let detail = "the service is waiting for its database or queue; nothing was accepted, send it again later";
        let mut problem = Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", "Service unavailable", detail);
        problem.headers.push((header::RETRY_AFTER, HeaderValue::from_static("1")));
        problem
    }

    /// The code of a refusal under load.
    pub const OVERLOADED: &'static str = "overloaded";

    /// 503: more request bodies arrive than this process keeps in memory. The request was refused and will never have an
    /// effect.
    pub fn overloaded() -> Self {
        let detail = "too many requests are being read; nothing was accepted, send it again later";
        let mut problem = Self::new(StatusCode::SERVICE_UNAVAILABLE, Self::OVERLOADED, "Service overloaded", detail);
        problem.headers.push((header::RETRY_AFTER, HeaderValue::from_static("1")));
        problem
    }

    /// 503: the address that a client registers cannot be checked now, for this reason; nothing was changed.
    pub fn unchecked_url(why: impl std::fmt::Display) -> Self {
        let detail = format!("the url cannot be checked now: {why}; nothing was changed, send it again later");
        let mut problem = Self::new(StatusCode::SERVICE_UNAVAILABLE, Self::OVERLOADED, "Service overloaded", detail);
        problem.headers.push((header::RETRY_AFTER, HeaderValue::from_static("1")));
        problem
    }

    /// 504: unknown whether the transaction was accepted; its status shows it later.
    pub fn outcome_unknown(transaction_id: &str) -> Self {
        let detail = "it is unknown whether the transaction was accepted; check its status before sending it again";
        let mut problem = Self::new(StatusCode::GATEWAY_TIMEOUT, "outcome-unknown", "Outcome unknown", detail);
        problem.more.push(("transactionId", json!(transaction_id)));
        problem
    }

    /// 504: unknown whether the user was accepted; a lookup shows it later.
    pub fn user_outcome_unknown(id: &str) -> Self {
        let detail = "it is unknown whether the user was accepted; look it up by its id before sending it again, or \
                      send it again under the same Idempotency-Key";
        let mut problem = Self::new(StatusCode::GATEWAY_TIMEOUT, "outcome-unknown", "Outcome unknown", detail);
        problem.more.push(("id", json!(id)));
        problem
    }

    /// 504: unknown whether an endpoint was changed; reading it shows that. The cause goes to the log only.
    pub fn endpoint_outcome_unknown(cause: &(dyn std::error::Error + 'static)) -> Self {
        error!(action = "outcome_unknown", "{}", chain(cause));
        let detail = "it is unknown whether the endpoint was changed; read your endpoints before sending it again";
        Self::new(StatusCode::GATEWAY_TIMEOUT, "outcome-unknown", "Outcome unknown", detail)
    }

    /// The response body; `request_id` lets the client name the request to the operator.
    pub fn to_json(&self, request_id: Option<&str>) -> Value {
        let mut body = json!({
            "type": format!("urn:baton:problem:{}", self.code),
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            "statusCode": self.status,
            "message": self.detail,
        });
        if let Some(fields) = body.as_object_mut() {
            if let Some(id) = request_id {
                fields.insert("request_id".to_owned(), json!(id));
            }
            if !self.errors.is_empty() {
                let errors = self.errors.iter().map(|found| json!({ "field": found.field, "message": found.message }));
                fields.insert("errors".to_owned(), errors.collect());
            }
            for (name, value) in &self.more {
                fields.insert((*name).to_owned(), value.clone());
            }
        }
        body
    }

    /// The response, with the request id if it is known.
    pub fn respond(&self, request_id: Option<&str>) -> Response<Body> {
        let mut response = Response::new(Body::from(self.to_json(request_id).to_string()));
        *response.status_mut() = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        for (name, value) in &self.headers {
            headers.insert(name.clone(), value.clone());
        }
        response
    }
}

/// Most invalid fields that one answer names.
pub const PROBLEMS_MAX: usize = 10;
/// Characters of a field's name in an answer.
const FIELD_LENGTH_SHOWN: usize = 64;

/// The problems that an answer names, and whether there are more. A client writes the names, and as many as it likes.
fn shown(problems: Vec<FieldProblem>) -> (Vec<FieldProblem>, bool) {
    let mut shown: Vec<FieldProblem> = Vec::new();
    for FieldProblem { field, message } in problems {
        let cut = field.char_indices().nth(FIELD_LENGTH_SHOWN).map(|(end, _)| format!("{}…", &field[..end]));
        let problem = FieldProblem { field: cut.unwrap_or(field), message };
        if shown.contains(&problem) {
            continue;
        }
        if shown.len() == PROBLEMS_MAX {
            return (shown, true);
        }
        shown.push(problem);
    }
    (shown, false)
}

impl IntoResponse for Problem {
    /// Keeps the problem as an extension, so that the server's outer layer can render it again with the request id, which
    /// a handler does not know.
    fn into_response(self) -> axum::response::Response {
        let mut response = self.respond(None);
        response.extensions_mut().insert(self);
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> FieldProblem {
        FieldProblem { field: name.to_owned(), message: "is not known".to_owned() }
    }

    #[test]
    fn a_problem_names_each_field_once_and_ten_at_most() {
        let many = (0..10_000).map(|number| named(&format!("f{}", number % 500))).collect();
        let problem = Problem::invalid(many);
        assert_eq!((problem.errors.len(), problem.errors[9].field.as_str()), (PROBLEMS_MAX, "f9"));
        assert!(problem.detail.ends_with("f9: is not known; and more"), "{}", problem.detail);
        let problem = Problem::invalid(vec![named("a"), named("a"), named("b")]);
        assert_eq!(problem.detail, "a: is not known; b: is not known");
        let problem = Problem::invalid(vec![named(&"ü".repeat(100_000))]);
        assert_eq!(problem.errors[0].field.chars().count(), FIELD_LENGTH_SHOWN + 1);
    }
}
