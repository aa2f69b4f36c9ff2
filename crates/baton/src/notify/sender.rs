//! One attempt: a POST to a client's URL, and what is read of the answer.
//!
//! The receiver is not trusted. A connection goes only to addresses that [`super::address_guard`] has checked, redirects
//! and proxies of the environment are not followed, and time and memory of an attempt are limited whatever the receiver
//! does. What follows from an attempt is decided by [`super::schedule`].
//!
//! A URL may contain a token, so no error contains a URL.

use std::collections::HashMap;
use std::error::Error;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper::body::Incoming;
use hyper_rustls::{ConfigBuilderExt, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use reqwest::header::{CONTENT_TYPE, DATE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER, USER_AGENT};
use reqwest::{StatusCode, Url};
use rustls::client::WantsClientCert;
use rustls::{ClientConfig, ConfigBuilder, RootCertStore, WantsVerifier};
use tokio::sync::Notify;

use super::address_guard::AddressGuard;
use super::connections::{CheckedTcp, ConnectError, Connector, OpenConnections, root, shown};
use super::host_breaker::HostState;
use crate::timestamp::Timestamp;

/// Idle connections are kept for this long, for the next event of a busy endpoint.
const IDLE_TIMEOUT: Duration = Duration::from_secs(20);
const IDLE_PER_HOST_MAX: usize = 4;
/// Open connections, idle ones included, from which each further attempt closes its connection. Clients choose the number
/// of hosts, so a limit for each host does not bound the total.
const OPEN_BEFORE_CLOSING: usize = 512;
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

const AGENT: &str = concat!("baton/", env!("CARGO_PKG_VERSION"));

type HttpClient = Client<Connector, Full<Bytes>>;

/// Makes attempts. Keeps a few idle connections.
#[derive(Debug)]
pub struct Sender {
    tls: ClientConfig,
    /// One for each owner, so that API keys share neither lookups nor connections; and one for each that keeps no
    /// connection. The operator's configuration bounds their number.
    clients: Mutex<HashMap<(String, Keep), HttpClient>>,
    guard: AddressGuard,
    timeout: Duration,
    open: OpenConnections,
    open_before_closing: usize,
}

/// What becomes of a connection after an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Keep {
    Idle,
    Close,
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
    /// What the attempt showed of the host.
    pub host: HostState,
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
        Self {
            tls: tls.with_no_client_auth(),
            clients: Mutex::default(),
            guard,
            timeout,
            open: OpenConnections::default(),
            open_before_closing: OPEN_BEFORE_CLOSING,
        }
    }

    fn client(&self, owner: &str) -> HttpClient {
        let keep = if self.open.count() < self.open_before_closing { Keep::Idle } else { Keep::Close };
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        let client = clients.entry((owner.to_owned(), keep));
        client.or_insert_with(|| self.new_client(owner, keep)).clone()
    }

    fn new_client(&self, owner: &str, keep: Keep) -> HttpClient {
        let tcp = CheckedTcp { guard: self.guard.clone(), owner: owner.into(), open: self.open.clone() };
        let tls = HttpsConnectorBuilder::new().with_tls_config(self.tls.clone());
        let connector = Connector(tls.https_or_http().enable_http1().wrap_connector(tcp));
        let idle_max = match keep {
            Keep::Idle => IDLE_PER_HOST_MAX,
            Keep::Close => 0,
        };
        let mut builder = Client::builder(TokioExecutor::new());
        builder.pool_timer(TokioTimer::new()).pool_idle_timeout(IDLE_TIMEOUT).pool_max_idle_per_host(idle_max);
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
        Sent { status, error, answer, retry_after: heard.retry_after, duration: began.elapsed(), host: heard.host }
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
            () = too_many.notified() => {
                heard.host = HostState::Reached;
                return Err(format!("more than {INTERIM_ANSWERS_MAX} interim answers (1xx)"));
            }
            answered = self.client(owner).request(request) => answered.map_err(|error| {
                heard.host = connect_error(&error).map_or(HostState::Reached, ConnectError::host);
                no_answer(&error)
            })?,
        };
        heard.host = HostState::Reached;
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
    host: HostState,
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

/// Why there was no connection, if there was none.
fn connect_error(error: &hyper_util::client::legacy::Error) -> Option<&ConnectError> {
    error.source().and_then(|source| source.downcast_ref::<ConnectError>())
}

/// Why a request got no answer, for people.
fn no_answer(error: &hyper_util::client::legacy::Error) -> String {
    if let Some(problem) = connect_error(error) {
        return problem.to_string();
    }
    match error.source().and_then(|source| source.downcast_ref::<hyper::Error>()) {
        Some(problem) if problem.is_parse_too_large() => "the head of the answer is too large".to_owned(),
        Some(problem) if problem.is_parse() => "the answer is not HTTP".to_owned(),
        Some(problem) if problem.is_incomplete_message() => "the connection was closed before an answer".to_owned(),
        _ => format!("the connection was lost: {}", root(error)),
    }
}

fn tls_config() -> Result<ConfigBuilder<ClientConfig, WantsVerifier>, String> {
    let provider = rustls::crypto::ring::default_provider().into();
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    builder.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests;
