//! Reads a JSON body: content type, size and form are checked here, for every way the server is started.

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use serde_json::Value;

use super::problem::Problem;
use super::server::BodyLimit;

/// A request body that is JSON of any shape.
pub struct JsonBody(pub Value);

impl<S: Send + Sync> FromRequest<S> for JsonBody {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let content_type = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        let essence = content_type.unwrap_or_default().split(';').next().unwrap_or_default().trim();
        if !essence.eq_ignore_ascii_case("application/json") {
            return Err(Problem::wrong_content_type());
        }
        let limit = request.extensions().get::<BodyLimit>().map_or(usize::MAX, |limit| limit.0);
        let body = Bytes::from_request(request, state).await.map_err(|rejection| match rejection.status() {
            StatusCode::PAYLOAD_TOO_LARGE => Problem::too_large(limit),
            _ => Problem::bad_request("the body broke off"),
        })?;
        let value = serde_json::from_slice(&body)
            .map_err(|error| Problem::bad_request(format!("the body is not JSON: {error}")))?;
        Ok(Self(value))
    }
}
