//! Reads request bodies: content type, size, form and time are checked here, for every way the server is started.

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::header;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde_json::Value;

use super::problem::Problem;
use super::server::BodyLimits;

/// A request body, byte for byte.
pub struct RawBody(pub Bytes);

impl<S: Send + Sync> FromRequest<S> for RawBody {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let limits = *request.extensions().get::<BodyLimits>().expect("the server sets the limits of every request");
        // Timed apart from the work that follows: a client that is slow to send has not been refused anything.
        let body = Limited::new(request.into_body(), limits.bytes_max).collect();
        match tokio::time::timeout(limits.timeout, body).await {
            Ok(Ok(body)) => Ok(Self(body.to_bytes())),
            Ok(Err(failure)) if failure.is::<LengthLimitError>() => Err(Problem::too_large(limits.bytes_max)),
            Ok(Err(_)) => Err(Problem::bad_request("the body broke off")),
            Err(_) => Err(Problem::too_slow()),
        }
    }
}

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
        let RawBody(body) = RawBody::from_request(request, state).await?;
        let value = serde_json::from_slice(&body)
            .map_err(|error| Problem::bad_request(format!("the body is not JSON: {error}")))?;
        Ok(Self(value))
    }
}
