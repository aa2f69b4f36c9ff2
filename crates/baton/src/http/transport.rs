//! Requests to other services as bytes: what leaves this process and what comes back, below all JSON and all judgement
//! of answers. The real transport is HTTP; the simulation has a network of its own.

use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use reqwest::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderMap};
use reqwest::{Method, StatusCode};

/// A way to send a request and receive its answer.
#[async_trait]
pub trait Transport: Send + Sync + 'static {
    /// Sends one request. An error says how far the request may have got: see [`TransportError`].
    async fn send(&self, request: Request) -> Result<Response, TransportError>;
}

/// A request.
#[derive(Debug, Clone)]
pub struct Request {
    /// GET, POST or DELETE.
    pub method: Method,
    /// The full URL.
    pub url: String,
    /// JSON text; a GET has none.
    pub body: Option<Bytes>,
    /// The send fence: the body is not written after this. Without its body a POST has no effect.
    pub not_after: Option<Instant>,
    /// Time limit from connecting to the last byte of the answer.
    pub timeout: Duration,
    /// Longest answer that is read.
    pub answer_bytes_max: usize,
}

/// An answer, read to its end.
#[derive(Debug, Clone)]
pub struct Response {
    /// The HTTP status.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
}

/// Why there is no whole answer.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{cause}")]
pub struct TransportError {
    /// How far the request got.
    pub kind: TransportFailure,
    /// The innermost cause; never the URL, which may hold a key.
    pub cause: String,
    /// The status of an answer that broke off in its body.
    pub status: Option<StatusCode>,
}

/// How far a request without an answer may have got.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransportFailure {
    /// There was no connection: the other side certainly has nothing.
    NoConnection,
    /// The send fence had passed: the body was not written.
    Fenced,
    /// No whole answer within the time limit: the other side may have the request.
    TimedOut,
    /// The connection was lost after sending began: the other side may have the request.
    Lost,
    /// The answer is longer than allowed.
    AnswerTooLong,
}

/// The real transport.
pub struct HttpTransport {
    http: reqwest::Client,
}

/// Text of the error that stops a fenced body.
const FENCED: &str = "the claim is too old to send";

impl HttpTransport {
    /// Sends with this client's connections and headers.
    pub fn new(http: reqwest::Client) -> Self {
        Self { http }
    }
}

#[async_trait]
impl Transport for HttpTransport {
    async fn send(&self, request: Request) -> Result<Response, TransportError> {
        let Request { method, url, body, not_after, timeout, answer_bytes_max } = request;
        let mut call = self.http.request(method, url).timeout(timeout);
        if let Some(body) = body {
            call = call.header(CONTENT_TYPE, "application/json").header(CONTENT_LENGTH, body.len());
            call = match not_after {
                None => call.body(body),
                // The body is handed over only when the connection is about to write it, and only inside the fence.
                Some(not_after) => call.body(reqwest::Body::wrap_stream(futures::stream::once(async move {
                    if Instant::now() < not_after { Ok(body) } else { Err(std::io::Error::other(FENCED)) }
                }))),
            };
        }
        let mut response = call.send().await.map_err(|error| {
            let past_fence = not_after.is_some_and(|not_after| Instant::now() >= not_after);
            failure(error, past_fence, None)
        })?;
        let (status, headers) = (response.status(), response.headers().clone());
        let mut body = Vec::new();
        while let Some(piece) = response.chunk().await.map_err(|error| failure(error, false, Some(status)))? {
            if body.len() + piece.len() > answer_bytes_max {
                let cause = "the answer is too long".to_owned();
                return Err(TransportError { kind: TransportFailure::AnswerTooLong, cause, status: Some(status) });
            }
            body.extend_from_slice(&piece);
        }
        Ok(Response { status, headers, body: body.into() })
    }
}

/// What a failed send proves. Only a connection that was never made, or a body that was never handed over, proves that
/// nothing was sent.
fn failure(error: reqwest::Error, past_fence: bool, status: Option<StatusCode>) -> TransportError {
    let error = error.without_url();
    let cause = root(&error);
    let kind = if past_fence && cause.contains(FENCED) {
        TransportFailure::Fenced
    } else if error.is_connect() {
        TransportFailure::NoConnection
    } else if error.is_timeout() {
        TransportFailure::TimedOut
    } else {
        TransportFailure::Lost
    };
    TransportError { kind, cause, status }
}

/// The innermost cause: reqwest's own text names only the URL.
fn root(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}
