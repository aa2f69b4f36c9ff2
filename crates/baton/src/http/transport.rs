//! Requests to other services as bytes: what leaves this process and what comes back, below all JSON and all judgement
//! of answers. The real transport is HTTP; the simulation has a network of its own.

use std::error::Error;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::{Body, Frame, SizeHint};
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::{Method, StatusCode, Url};

use super::outgoing::HttpClient;
use crate::clock::send_fence::SendFence;

/// A way to send a request and receive its answer.
#[async_trait]
pub trait Transport: Send + Sync + 'static {
    /// Sends one request. An error says how far the request may have got: see [`TransportError`].
    async fn send(&self, request: HttpRequest) -> Result<Response, TransportError>;
}

/// A request.
#[derive(Debug, Clone)]
pub struct HttpRequest {
    /// GET, POST or DELETE.
    pub method: Method,
    /// The full URL.
    pub url: String,
    /// JSON text; a GET has none.
    pub body: Option<Bytes>,
    /// The send fence: the body is not written once it has closed. Without its body a POST has no effect.
    pub fence: Option<SendFence>,
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

impl TransportError {
    /// What to look at, for `/health`, which is public: without what the network said.
    pub fn public_reason(&self) -> &'static str {
        match self.kind {
            TransportFailure::TimedOut => "no answer in time",
            TransportFailure::AnswerTooLong => "its answer is too long",
            TransportFailure::Lost | TransportFailure::Fenced => "the connection was lost",
            TransportFailure::NoConnection => {
                let cause = self.cause.to_lowercase();
                let known = [
                    ("lookup address", "its host name cannot be resolved (DNS)"),
                    ("refused", "connection refused: nothing listens there"),
                    ("certificate", "its TLS certificate is not accepted"),
                    ("unreachable", "there is no route to its host"),
                ];
                let known = known.iter().find(|(word, _)| cause.contains(word));
                known.map_or("no connection", |(_, reason)| reason)
            }
        }
    }
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
    http: HttpClient,
    headers: HeaderMap,
}

impl HttpTransport {
    /// Sends over this client's connections, with these headers in each request.
    pub fn new(http: HttpClient, headers: HeaderMap) -> Self {
        Self { http, headers }
    }
}

#[async_trait]
impl Transport for HttpTransport {
    async fn send(&self, request: HttpRequest) -> Result<Response, TransportError> {
        let (timeout, answer_bytes_max) = (request.timeout, request.answer_bytes_max);
        let refused = Arc::new(AtomicBool::new(false));
        let call = self.call(request, &refused)?;
        // Dropped at the end of its time, the call closes its connection, and nothing more of it is delivered.
        let status = std::sync::OnceLock::new();
        let answered = tokio::time::timeout(timeout, async {
            let response = self.http.request(call).await.map_err(|error| {
                let (fenced, connect) = (refused.load(Ordering::Relaxed), error.is_connect());
                let kind = if fenced {
                    TransportFailure::Fenced
                } else if connect {
                    TransportFailure::NoConnection
                } else {
                    TransportFailure::Lost
                };
                TransportError { kind, cause: root(&error), status: None }
            })?;
            let (head, mut incoming) = response.into_parts();
            let _ = status.set(head.status);
            let mut body = Vec::new();
            while let Some(frame) = incoming.frame().await {
                let frame = frame.map_err(|error| TransportError {
                    kind: TransportFailure::Lost,
                    cause: root(&error),
                    status: Some(head.status),
                })?;
                let Ok(piece) = frame.into_data() else { continue };
                if body.len() + piece.len() > answer_bytes_max {
                    let cause = "the answer is too long".to_owned();
                    return Err(TransportError {
                        kind: TransportFailure::AnswerTooLong,
                        cause,
                        status: Some(head.status),
                    });
                }
                body.extend_from_slice(&piece);
            }
            Ok(Response { status: head.status, headers: head.headers, body: body.into() })
        })
        .await;
        answered.unwrap_or_else(|_| {
            let (kind, cause) = (TransportFailure::TimedOut, "no answer in time".to_owned());
            Err(TransportError { kind, cause, status: status.get().copied() })
        })
    }
}

impl HttpTransport {
    fn call(
        &self,
        request: HttpRequest,
        refused: &Arc<AtomicBool>,
    ) -> Result<hyper::Request<RequestBody>, TransportError> {
        let unusable = |cause: &dyn std::fmt::Display| TransportError {
            kind: TransportFailure::NoConnection,
            cause: format!("the request cannot be made: {cause}"),
            status: None,
        };
        let mut url = Url::parse(&request.url).map_err(|error| unusable(&error))?;
        let mut headers = self.headers.clone();
        headers.entry(ACCEPT).or_insert(HeaderValue::from_static("*/*"));
        if let Some(credentials) = credentials(&mut url) {
            headers.insert(AUTHORIZATION, credentials);
        }
        if request.body.is_some() {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        let body = RequestBody { bytes: request.body, fence: request.fence, refused: Arc::clone(refused) };
        let mut call = hyper::Request::builder().method(request.method).uri(url.as_str()).body(body);
        if let Ok(call) = &mut call {
            *call.headers_mut() = headers;
        }
        call.map_err(|error| unusable(&error))
    }
}

/// User and password of a URL as a header; they are taken out of the URL.
fn credentials(url: &mut Url) -> Option<HeaderValue> {
    if url.username().is_empty() && url.password().is_none() {
        return None;
    }
    let decoded = |text: &str| percent_decoded(text);
    let pair = format!("{}:{}", decoded(url.username()), decoded(url.password().unwrap_or_default()));
    // Neither fails for a URL that has a host.
    let _ = (url.set_username(""), url.set_password(None));
    let mut header = HeaderValue::from_str(&format!("Basic {}", BASE64_STANDARD.encode(pair))).ok()?;
    header.set_sensitive(true);
    Some(header)
}

/// The text with its `%xx` decoded.
fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let code = after.get(..2).and_then(|code| std::str::from_utf8(code).ok());
        match code.filter(|_| *first == b'%').and_then(|code| u8::from_str_radix(code, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A request's body, handed over when the connection is about to write it, and only inside the fence.
pub struct RequestBody {
    bytes: Option<Bytes>,
    fence: Option<SendFence>,
    /// Set if the fence was closed.
    refused: Arc<AtomicBool>,
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
        let Some(bytes) = self.bytes.take() else { return Poll::Ready(None) };
        Poll::Ready(Some(match self.fence.as_ref().and_then(SendFence::closed) {
            None => Ok(Frame::data(bytes)),
            Some(why) => {
                self.refused.store(true, Ordering::Relaxed);
                Err(std::io::Error::other(why))
            }
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
    }
}

/// The innermost cause: the outer ones only name the step that failed.
fn root(error: &dyn Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests;
