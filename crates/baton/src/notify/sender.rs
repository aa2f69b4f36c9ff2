//! One attempt: a POST to a client's URL, and what is read of the answer.
//!
//! The receiver is not trusted. A connection goes only to addresses that [`super::address_guard`] has checked, redirects
//! and proxies of the environment are not followed, and time and memory of an attempt are limited whatever the receiver
//! does. What follows from an attempt is decided by [`super::schedule`].
//!
//! A URL may contain a token, so no error contains a URL.

use std::collections::HashMap;
use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant, SystemTime};

use axum::http::Uri;
use axum::http::uri::Scheme;
use bytes::Bytes;
use futures::future::BoxFuture;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::body::Incoming;
use hyper_rustls::{ConfigBuilderExt, HttpsConnector, HttpsConnectorBuilder, MaybeHttpsStream};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use reqwest::header::{CONTENT_TYPE, DATE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER, USER_AGENT};
use reqwest::{StatusCode, Url};
use rustls::client::WantsClientCert;
use rustls::{ClientConfig, ConfigBuilder, RootCertStore, WantsVerifier};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tower_service::Service;

use super::address_guard::{AddressGuard, GuardError};
use crate::timestamp::Timestamp;

/// Limit of a connection: DNS, TCP and TLS together.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Idle connections are kept for this long, for the next event of a busy endpoint.
const IDLE_TIMEOUT: Duration = Duration::from_secs(20);
const IDLE_PER_HOST_MAX: usize = 4;
/// Maximum size of an answer's head, and of each piece of its body that is read at once.
const HEAD_BYTES_MAX: usize = 32 << 10;
const HEADERS_MAX: usize = 100;
/// An answer with more interim answers (1xx) before it is a failed attempt: hyper itself reads them without end.
const INTERIM_ANSWERS_MAX: usize = 10;
/// Beginning of an answer's body that is kept for people.
const ANSWER_BYTES_KEPT: usize = 1 << 10;
/// No more is read of an answer's body. A longer one is a failed attempt: whether it would have ended is not known.
const ANSWER_BYTES_MAX: usize = 4 << 10;
/// A receiver cannot postpone the next attempt for longer.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(24 * 3600);
/// Maximum length of the part of an error that other libraries word; TLS errors list names of the certificate.
const CAUSE_LENGTH_MAX: usize = 300;

const AGENT: &str = concat!("baton/", env!("CARGO_PKG_VERSION"));

type HttpClient = Client<Connector, Full<Bytes>>;

/// Makes attempts. Keeps a few idle connections.
#[derive(Debug)]
pub struct Sender {
    tls: ClientConfig,
    /// One for each owner, so that API keys share neither lookups nor connections. The operator's configuration bounds
    /// their number.
    clients: Mutex<HashMap<String, HttpClient>>,
    guard: AddressGuard,
    timeout: Duration,
}

/// The result of one attempt.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sent {
    /// The status of the answer, if its head arrived.
    pub status: Option<u16>,
    /// Why the attempt failed, for people; none if it succeeded.
    pub error: Option<String>,
    /// The first 1 KiB of the answer's body as text, without control characters; none if it was empty.
    pub answer: Option<String>,
    /// How long the receiver asks us to wait before the next attempt, at most 24 h.
    pub retry_after: Option<Duration>,
    /// How long the attempt took.
    pub duration: Duration,
}

impl Sender {
    /// A sender whose attempts take at most `timeout`, and which trusts the certificate authorities of the machine.
    pub fn new(guard: AddressGuard, timeout: Duration) -> Result<Self, String> {
        let tls = tls_config()?.try_with_platform_verifier().map_err(|error| error.to_string())?;
        Ok(Self::with_tls(guard, timeout, tls))
    }

    /// The same, but it trusts only these certificate authorities: for tests of TLS.
    pub fn trusting(authorities: RootCertStore, guard: AddressGuard, timeout: Duration) -> Result<Self, String> {
        Ok(Self::with_tls(guard, timeout, tls_config()?.with_root_certificates(authorities)))
    }

    fn with_tls(guard: AddressGuard, timeout: Duration, tls: ConfigBuilder<ClientConfig, WantsClientCert>) -> Self {
        Self { tls: tls.with_no_client_auth(), clients: Mutex::default(), guard, timeout }
    }

    fn client(&self, owner: &str) -> HttpClient {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = clients.get(owner) {
            return client.clone();
        }
        let client = self.new_client(owner);
        clients.insert(owner.to_owned(), client.clone());
        client
    }

    fn new_client(&self, owner: &str) -> HttpClient {
        let tcp = CheckedTcp { guard: self.guard.clone(), owner: owner.into() };
        let tls = HttpsConnectorBuilder::new().with_tls_config(self.tls.clone());
        let connector = Connector(tls.https_or_http().enable_http1().wrap_connector(tcp));
        let mut builder = Client::builder(TokioExecutor::new());
        builder.pool_timer(TokioTimer::new()).pool_idle_timeout(IDLE_TIMEOUT).pool_max_idle_per_host(IDLE_PER_HOST_MAX);
        builder.http1_max_buf_size(HEAD_BYTES_MAX).http1_max_headers(HEADERS_MAX);
        builder.build(connector)
    }

    /// Makes one attempt: sends `body`, which is JSON, with these headers to the URL, and reads the answer. The owner is
    /// the API key that the endpoint belongs to.
    pub async fn send(&self, owner: &str, url: &str, headers: Vec<(&'static str, String)>, body: Bytes) -> Sent {
        let began = Instant::now();
        let mut heard = Heard::default();
        // Dropped at the end of its time, the attempt closes its connection.
        let ended = tokio::time::timeout(self.timeout, self.attempt(owner, url, headers, body, &mut heard)).await;
        let problem = match ended {
            Ok(result) => result.err(),
            Err(_) if heard.status.is_some() => Some(format!("the answer did not end within {}", shown(self.timeout))),
            Err(_) => Some(format!("no answer within {}", shown(self.timeout))),
        };
        // A status that means failure says more than what went wrong after it.
        let error = heard.status.and_then(failure).or(problem);
        let status = heard.status.map(|status| status.as_u16());
        let answer = readable(&heard.answer);
        Sent { status, error, answer, retry_after: heard.retry_after, duration: began.elapsed() }
    }

    async fn attempt(
        &self,
        owner: &str,
        url: &str,
        headers: Vec<(&'static str, String)>,
        body: Bytes,
        heard: &mut Heard,
    ) -> Result<(), String> {
        // The policy may have changed since the URL was registered.
        let url = self.guard.check_url(url).map_err(|refused| format!("refused: the URL {refused}"))?;
        let mut request = request(&url, headers, body)?;
        let too_many = count_interim_answers(&mut request);
        // Dropped, the request closes its connection.
        let response = tokio::select! {
            biased;
            () = too_many.notified() => return Err(format!("more than {INTERIM_ANSWERS_MAX} interim answers (1xx)")),
            answered = self.client(owner).request(request) => answered.map_err(|error| no_answer(&error))?,
        };
        let (head, incoming) = response.into_parts();
        heard.status = Some(head.status);
        heard.retry_after = retry_after(&head.headers, Timestamp::from(SystemTime::now()));
        read_body(incoming, heard).await
    }
}

/// What has arrived of an answer.
#[derive(Default)]
struct Heard {
    status: Option<StatusCode>,
    retry_after: Option<Duration>,
    answer: Vec<u8>,
}

fn request(url: &Url, headers: Vec<(&'static str, String)>, body: Bytes) -> Result<Request<Full<Bytes>>, String> {
    let unusable = |what: &str| format!("the request cannot be made: {what} is invalid");
    let mut request = Request::post(url.as_str()).body(Full::new(body)).map_err(|_| unusable("the URL"))?;
    for (name, value) in headers {
        let value = HeaderValue::try_from(value).map_err(|_| unusable(name))?;
        request.headers_mut().insert(HeaderName::try_from(name).map_err(|_| unusable(name))?, value);
    }
    request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    request.headers_mut().insert(USER_AGENT, HeaderValue::from_static(AGENT));
    Ok(request)
}

/// Notifies once there are too many interim answers.
fn count_interim_answers(request: &mut Request<Full<Bytes>>) -> Arc<Notify> {
    let (too_many, count) = (Arc::new(Notify::new()), AtomicUsize::new(0));
    let notified = Arc::clone(&too_many);
    hyper::ext::on_informational(request, move |_| {
        if count.fetch_add(1, Ordering::Relaxed) == INTERIM_ANSWERS_MAX {
            notified.notify_one();
        }
    });
    too_many
}

/// Reads the body, whose end proves that the receiver was not cut off in its work. Only then is the connection used again.
async fn read_body(mut incoming: Incoming, heard: &mut Heard) -> Result<(), String> {
    let mut length = 0;
    while let Some(frame) = incoming.frame().await {
        let frame = frame.map_err(|error| format!("the answer broke off: {}", root(&error)))?;
        let Ok(piece) = frame.into_data() else { continue };
        let room = ANSWER_BYTES_KEPT - heard.answer.len();
        heard.answer.extend_from_slice(&piece[..piece.len().min(room)]);
        length += piece.len();
        if length > ANSWER_BYTES_MAX {
            return Err(format!("the answer is longer than {} KiB", ANSWER_BYTES_MAX >> 10));
        }
    }
    Ok(())
}

/// Why an answer with this status is a failure.
fn failure(status: StatusCode) -> Option<String> {
    let number = status.as_u16();
    match number {
        200..=299 => None,
        300..=399 => Some(format!("answered {number}; redirects are not followed")),
        _ => Some(format!("answered {number}")),
    }
}

/// The `Retry-After` header: seconds or a date. A date is compared with the receiver's own `Date`, whose clock may differ
/// from ours.
fn retry_after(headers: &HeaderMap, now: Timestamp) -> Option<Duration> {
    let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok()).map(str::trim);
    let wanted = text(RETRY_AFTER)?;
    let wait = if !wanted.is_empty() && wanted.bytes().all(|digit| digit.is_ascii_digit()) {
        Duration::from_secs(wanted.parse().unwrap_or(u64::MAX))
    } else {
        let now = text(DATE).and_then(Timestamp::parse_http).unwrap_or(now);
        Timestamp::parse_http(wanted)?.since(now)
    };
    Some(wait.min(RETRY_AFTER_MAX))
}

/// The bytes as text that is safe in a log, a terminal and a page.
fn readable(bytes: &[u8]) -> Option<String> {
    let printable = |letter: char| match letter {
        '\n' | '\r' | '\t' => ' ',
        control if control.is_control() => char::REPLACEMENT_CHARACTER,
        letter => letter,
    };
    (!bytes.is_empty()).then(|| String::from_utf8_lossy(bytes).chars().map(printable).collect())
}

/// Why a request got no answer, for people.
fn no_answer(error: &hyper_util::client::legacy::Error) -> String {
    let source = error.source();
    if let Some(problem) = source.and_then(|source| source.downcast_ref::<ConnectError>()) {
        return problem.to_string();
    }
    match source.and_then(|source| source.downcast_ref::<hyper::Error>()) {
        Some(problem) if problem.is_parse_too_large() => "the head of the answer is too large".to_owned(),
        Some(problem) if problem.is_parse() => "the answer is not HTTP".to_owned(),
        Some(problem) if problem.is_incomplete_message() => "the connection was closed before an answer".to_owned(),
        _ => format!("the connection was lost: {}", root(error)),
    }
}

/// The innermost cause: the outer ones only name the step that failed.
fn root(error: &(dyn Error + 'static)) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string().chars().take(CAUSE_LENGTH_MAX).collect()
}

fn shown(limit: Duration) -> String {
    if limit.subsec_millis() == 0 { format!("{} s", limit.as_secs()) } else { format!("{} ms", limit.as_millis()) }
}

fn tls_config() -> Result<ConfigBuilder<ClientConfig, WantsVerifier>, String> {
    let provider = rustls::crypto::ring::default_provider().into();
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    builder.map_err(|error| error.to_string())
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
enum ConnectError {
    #[error("refused: {0}")]
    Refused(GuardError),
    #[error("no connection: {0}")]
    Unresolved(GuardError),
    #[error("no connection: {0}")]
    Tcp(io::Error),
    #[error("no TLS connection: {0}")]
    Tls(String),
    #[error("no connection within {}", shown(CONNECT_TIMEOUT))]
    TimedOut,
}

impl From<GuardError> for ConnectError {
    fn from(error: GuardError) -> Self {
        match error {
            GuardError::Forbidden(_) => Self::Refused(error),
            GuardError::Unresolved(_) | GuardError::NoAddress => Self::Unresolved(error),
        }
    }
}

/// Connects over TCP or TLS within [`CONNECT_TIMEOUT`].
#[derive(Debug, Clone)]
struct Connector(HttpsConnector<CheckedTcp>);

impl Service<Uri> for Connector {
    type Response = MaybeHttpsStream<TokioIo<TcpStream>>;
    type Error = ConnectError;
    type Future = BoxFuture<'static, Result<Self::Response, ConnectError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let connecting = self.0.call(uri);
        Box::pin(async move {
            let connected = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await;
            connected.map_err(|_| ConnectError::TimedOut)?.map_err(|error| match error.downcast::<ConnectError>() {
                Ok(own) => *own,
                Err(other) => ConnectError::Tls(root(&*other)),
            })
        })
    }
}

/// TCP connections to the addresses that the guard has checked, and to no others.
#[derive(Debug, Clone)]
struct CheckedTcp {
    guard: AddressGuard,
    owner: Arc<str>,
}

impl Service<Uri> for CheckedTcp {
    type Response = TokioIo<TcpStream>;
    type Error = ConnectError;
    type Future = BoxFuture<'static, Result<Self::Response, ConnectError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), ConnectError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let (CheckedTcp { guard, owner }, deadline) = (self.clone(), Instant::now() + CONNECT_TIMEOUT);
        Box::pin(async move {
            let default_port = if uri.scheme() == Some(&Scheme::HTTP) { 80 } else { 443 };
            let port = uri.port_u16().unwrap_or(default_port);
            let addresses = guard.resolve(&owner, uri.host().unwrap_or_default(), port).await?;
            let stream = connect_to_one(&addresses, deadline).await?;
            stream.set_nodelay(true).map_err(ConnectError::Tcp)?;
            Ok(TokioIo::new(stream))
        })
    }
}

/// Tries the addresses in their order. Each gets its share of the time that is left, so that one that does not respond
/// leaves time for the others.
async fn connect_to_one(addresses: &[SocketAddr], deadline: Instant) -> Result<TcpStream, ConnectError> {
    let mut last = ConnectError::TimedOut;
    for (left, address) in (1..=addresses.len()).rev().zip(addresses) {
        let share = deadline.saturating_duration_since(Instant::now()) / u32::try_from(left).unwrap_or(u32::MAX);
        match tokio::time::timeout(share, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = ConnectError::Tcp(error),
            Err(_) => last = ConnectError::TimedOut,
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests;
