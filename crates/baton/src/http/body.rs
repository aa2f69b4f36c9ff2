//! Request bodies: content type, size, syntax and arrival time are checked here.

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::header;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde_json::Value;

use super::problem::Problem;
use super::server::BodyLimits;

/// A request body as sent, within [`BodyLimits`].
pub struct RawBody(pub Bytes);

impl<S: Send + Sync> FromRequest<S> for RawBody {
    type Rejection = Problem;

    async fn from_request(request: Request, _: &S) -> Result<Self, Problem> {
        let limits = *request.extensions().get::<BodyLimits>().expect("the server sets the limits of every request");
        // Timed apart from the handler: a body that arrives too late (408) has had no effect.
        let body = Limited::new(request.into_body(), limits.bytes_max).collect();
        match tokio::time::timeout(limits.timeout, body).await {
            Ok(Ok(body)) => Ok(Self(body.to_bytes())),
            Ok(Err(failure)) if failure.is::<LengthLimitError>() => Err(Problem::too_large(limits.bytes_max)),
            Ok(Err(_)) => Err(Problem::bad_request("the body ended early")),
            Err(_) => Err(Problem::too_slow()),
        }
    }
}

/// A request body of type `application/json`, parsed; its fields are unchecked.
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
