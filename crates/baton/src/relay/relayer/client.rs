//! Talks to one relayer. Its only judgement is what an answer proves: [`SubmissionAnswer`] separates "accepted",
//! "certainly not accepted" and "outcome unknown", because a resend after a wrong guess is a double payment. The
//! consumer (`relay/submit/consumer.rs`) acts on it.

use std::sync::{Arc, RwLock};
use std::time::Duration;

use alloy_primitives::Address;
use bytes::Bytes;
use reqwest::header::{AUTHORIZATION, DATE, HeaderMap, HeaderValue, RETRY_AFTER};
use reqwest::{Method, StatusCode, Url};
use serde_json::Value;

use super::routing::ChainId;
use super::wire::{self, Dialect, Listed, Page, RelayerStatus};
use crate::clock::send_fence::SendFence;
use crate::config::Secret;
use crate::http::outgoing::{self, ConnectionLimits};
use crate::http::transport::{HttpRequest, HttpTransport, Response, Transport, TransportError, TransportFailure};
use crate::relay::request::call::Call;
use crate::relay::state::apply_report::Report;
use crate::relay::state::transaction::{RelayerTxId, RelayerUrl};
use crate::timestamp::Timestamp;

/// One relayer.
pub struct RelayerClient {
    url: RelayerUrl,
    base: Url,
    /// The relayer's id at its process, if the URL names one.
    wanted_id: Option<String>,
    transport: Arc<dyn Transport>,
    /// Learned from the process's list of relayers.
    target: RwLock<Option<Target>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Target {
    id: String,
    dialect: Dialect,
    address: Option<Address>,
}

impl Target {
    /// A record, if it is this relayer's record of that id: a proxy or a shared store may exchange answers.
    fn own(&self, report: Report, id: &RelayerTxId) -> Result<Report, RelayerError> {
        if report.tx_id != *id {
            return Err(RelayerError::Unreadable("it is about another transaction"));
        }
        if self.is_foreign(&report) {
            return Err(RelayerError::Unreadable("it is a transaction of another account"));
        }
        Ok(report)
    }

    /// Whether a record is of another account than this relayer's.
    fn is_foreign(&self, report: &Report) -> bool {
        let sender = report.from.as_deref().and_then(|from| from.parse::<Address>().ok());
        sender.zip(self.address).is_some_and(|(sender, own)| sender != own)
    }
}

/// What the answer to a submission proves.
#[derive(Debug, Clone, PartialEq)]
pub enum SubmissionAnswer {
    /// The relayer has it.
    Accepted(Box<Report>),
    /// The item itself was refused; the same would happen anywhere.
    Refused(String),
    /// A client error that the real relayer never answers with. It may have stored the transaction all the same; if it has
    /// not, another attempt may succeed.
    ClientError(String),
    /// The relayer certainly did not take it, for a reason that has nothing to do with the item.
    NotTaken {
        /// The kind of reason.
        why: NotTaken,
        /// The error text, for logs and the timeline.
        detail: String,
    },
    /// The relayer may or may not have taken it.
    Unknown {
        /// The error text, for logs and the timeline.
        reason: String,
        /// Whether the relayer itself answered: then it is no longer working on the request.
        answered: bool,
    },
}

/// Why a relayer took nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotTaken {
    /// No connection, or our credentials or path are wrong: a fault of the relayer or the configuration.
    Fault,
    /// Paused or disabled.
    Closed,
    /// Too many requests: pause this long.
    Busy(Duration),
    /// The send fence had passed: the claim was too old to send.
    Fenced,
}

/// Failure of a question to a relayer, which changes nothing there.
#[derive(Debug, thiserror::Error)]
pub enum RelayerError {
    /// No whole answer.
    #[error("the relayer did not answer")]
    Unreachable(#[source] TransportError),
    /// An error status.
    #[error("the relayer answered {status}: {detail}")]
    Status {
        /// The HTTP status.
        status: u16,
        /// The error text of its body.
        detail: String,
    },
    /// An answer longer than is read.
    #[error("the relayer's answer is too long")]
    TooLong,
    /// An answer that cannot be read.
    #[error("the relayer's answer is not understood: {0}")]
    Unreadable(&'static str),
}

impl RelayerError {
    /// Whether the relayer may just be slow, or have been asked too often; then it does not count as unhealthy.
    pub fn is_only_slow(&self) -> bool {
        match self {
            Self::Unreachable(error) => error.kind == TransportFailure::TimedOut,
            Self::Status { status, .. } => *status == 429,
            Self::TooLong | Self::Unreadable(_) => false,
        }
    }
}

/// Idle connections are closed after this; relayers keep theirs longer, so a request seldom meets a closing one.
const IDLE_TIMEOUT: Duration = Duration::from_secs(3);
/// Longest answer that is read, except a page of a list: several times a record of the largest request that we accept.
const ANSWER_BYTES_MAX: usize = 2 << 20;
/// Longest page of a list that is read. A longer one is read in smaller pages.
const PAGE_BYTES_MAX: usize = 8 << 20;

impl RelayerClient {
    /// A client for `url`: a base URL with one relayer behind it, or one that ends in `/api/v1/relayers/{id}`.
    ///
    /// The kernel gives a connection up whose bytes are not acknowledged for `unacknowledged_max`.
    pub fn new(url: &Url, api_key: &Secret, unacknowledged_max: Duration) -> Result<Self, String> {
        let mut headers = HeaderMap::new();
        let mut bearer = HeaderValue::from_str(&format!("Bearer {}", api_key.expose()))
            .map_err(|_| "the API key has characters that cannot stand in a header".to_owned())?;
        bearer.set_sensitive(true);
        headers.insert(AUTHORIZATION, bearer);
        let limits = ConnectionLimits { idle: IDLE_TIMEOUT, unacknowledged: Some(unacknowledged_max) };
        let http = outgoing::client(limits).map_err(|error| format!("no HTTP client: {error}"))?;
        Ok(Self::over(Arc::new(HttpTransport::new(http, headers)), url))
    }

    /// A client for `url` over any transport.
    pub fn over(transport: Arc<dyn Transport>, url: &Url) -> Self {
        let (base, wanted_id) = split_url(url);
        Self { url: RelayerUrl::of(url), base, wanted_id, transport, target: RwLock::new(None) }
    }

    /// The configured URL, which names the relayer.
    pub fn url(&self) -> &RelayerUrl {
        &self.url
    }

    /// Asks the relayer about itself, and learns its id and dialect.
    pub async fn look(&self, timeout: Duration) -> Result<Listed, RelayerError> {
        // A process lists ten relayers per page; only a relayer wanted by id may be on a later one.
        for page in 1..=100 {
            let path = if page == 1 { "api/v1/relayers".to_owned() } else { format!("api/v1/relayers?page={page}") };
            let listed = wire::read_list(&self.get(&path, timeout).await?)
                .ok_or(RelayerError::Unreadable("the list of relayers"))?;
            let empty = listed.is_empty();
            let found = match &self.wanted_id {
                Some(id) => listed.into_iter().find(|relayer| relayer.id == *id),
                // Their order is not fixed: if the first changed, claims would be looked for in the wrong list.
                None if listed.len() > 1 => {
                    return Err(RelayerError::Unreadable("several relayers here; name one: …/api/v1/relayers/{id}"));
                }
                None => listed.into_iter().next(),
            };
            if let Some(found) = found {
                let target = Target { id: found.id.clone(), dialect: found.dialect, address: found.address };
                if let Ok(mut known) = self.target.write() {
                    *known = Some(target);
                }
                return Ok(found);
            }
            if empty || self.wanted_id.is_none() {
                break;
            }
        }
        Err(RelayerError::Unreadable("no such relayer at this address"))
    }

    /// The address of its account, if it lists one.
    pub async fn address(&self, timeout: Duration) -> Option<Address> {
        self.known_target(timeout).await.ok()?.address
    }

    /// The address of its account as last listed. Nothing is asked.
    pub fn known_address(&self) -> Option<Address> {
        self.target.read().ok().and_then(|known| known.as_ref()?.address)
    }

    /// The id of the chain that it sends to, asked through it. Another error than [`ChainId::NotTold`] may pass.
    pub async fn chain_id(&self, timeout: Duration) -> Result<ChainId, RelayerError> {
        let target = self.known_target(timeout).await?;
        if target.dialect == Dialect::Flat {
            return Ok(ChainId::NotTold);
        }
        let url = self.join(&format!("api/v1/relayers/{}/rpc", target.id));
        let body = Bytes::from(wire::write_chain_id_question().to_string());
        let answer = self.transport.send(self.request(Method::POST, url, Some(body), timeout)).await?;
        match answer.status.as_u16() {
            // 403: it is paused or disabled, and will tell once it is not.
            400 | 404 | 405 | 501 => Ok(ChainId::NotTold),
            200..=299 => match serde_json::from_str(&text(&answer)) {
                Ok(body) => wire::read_chain_id(&body).ok_or(RelayerError::Unreadable("its chain's id")),
                Err(_) => Ok(ChainId::NotTold),
            },
            status => Err(RelayerError::Status { status, detail: wire::read_error(&text(&answer)) }),
        }
    }

    /// Its load, balance and state; it asks its chain for them, which may take long. `None`: the flat dialect has no such
    /// call, its list has what there is.
    pub async fn status(&self, timeout: Duration) -> Result<Option<RelayerStatus>, RelayerError> {
        let target = self.known_target(timeout).await?;
        match target.dialect {
            Dialect::Flat => Ok(None),
            Dialect::OpenZeppelin => {
                let body = self.get(&format!("api/v1/relayers/{}/status", target.id), timeout).await?;
                wire::read_status(&body).map(Some).ok_or(RelayerError::Unreadable("the relayer's status"))
            }
        }
    }

    /// Submits a call. Nothing is sent once the fence has closed: by then another process may have taken the claim
    /// over, and a process that was stopped and continued must not act on it.
    pub async fn submit(&self, call: &Call, fence: SendFence, timeout: Duration) -> SubmissionAnswer {
        let target = match self.known_target(timeout).await {
            Ok(target) => target,
            Err(error) => {
                return SubmissionAnswer::NotTaken { why: NotTaken::Fault, detail: describe(&error) };
            }
        };
        let url = match target.dialect {
            Dialect::OpenZeppelin => self.join(&format!("api/v1/relayers/{}/transactions", target.id)),
            Dialect::Flat => self.join("transactions"),
        };
        let body = Bytes::from(wire::write_send(call, target.dialect).to_string());
        let request = self.request(Method::POST, url, Some(body), timeout);
        match self.transport.send(HttpRequest { fence: Some(fence), ..request }).await {
            Ok(answer) => match judge_answer(answer.status, &answer.headers, &text(&answer)) {
                // A proxy may have exchanged the answers of two relayers.
                SubmissionAnswer::Accepted(report) if target.is_foreign(&report) => SubmissionAnswer::Unknown {
                    reason: format!("the answer is about a transaction of another account ({})", report.tx_id),
                    answered: true,
                },
                answer => answer,
            },
            Err(failure) => judge_failure(failure),
        }
    }

    /// One transaction; `None` if the relayer knows none of that id.
    pub async fn transaction(&self, id: &RelayerTxId, timeout: Duration) -> Result<Option<Report>, RelayerError> {
        let target = self.known_target(timeout).await?;
        let path = match target.dialect {
            Dialect::OpenZeppelin => format!("api/v1/relayers/{}/transactions/{}", target.id, id),
            Dialect::Flat => format!("transactions/{id}"),
        };
        match self.get(&path, timeout).await {
            // A proxy that exchanges answers must not make one transaction's end that of another.
            Ok(body) => match wire::read_record(&body) {
                Some(report) => target.own(report, id).map(Some),
                None => Err(RelayerError::Unreadable("a transaction")),
            },
            Err(RelayerError::Status { status: 404, detail }) if !detail.contains("elayer with ID") => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Asks the relayer to cancel a transaction; the record as it is then. `None` if the relayer knows none of that id, or
    /// the dialect cannot cancel.
    pub async fn cancel(&self, id: &RelayerTxId, timeout: Duration) -> Result<Option<Report>, RelayerError> {
        let target = self.known_target(timeout).await?;
        if target.dialect == Dialect::Flat {
            return Ok(None);
        }
        let url = self.join(&format!("api/v1/relayers/{}/transactions/{id}", target.id));
        let answer = self.transport.send(self.request(Method::DELETE, url, None, timeout)).await?;
        match answer.status.as_u16() {
            404 => Ok(None),
            200..=299 => {
                let body = serde_json::from_str(&text(&answer)).map_err(|_| RelayerError::Unreadable("not JSON"))?;
                let report = wire::read_record(&body).ok_or(RelayerError::Unreadable("a transaction"))?;
                target.own(report, id).map(Some)
            }
            status => Err(RelayerError::Status { status, detail: wire::read_error(&text(&answer)) }),
        }
    }

    /// The nonce that it will sign next, by its own counter, if it tells.
    pub async fn next_nonce(&self, timeout: Duration) -> Option<u64> {
        self.status(timeout).await.ok()??.nonce
    }

    /// One page of its transactions, newest first, and the `Date` of the answer; pages count from 1. Of a page that is
    /// [`RelayerError::TooLong`], smaller ones can be read.
    pub async fn transactions(
        &self,
        page: u64,
        size: usize,
        timeout: Duration,
    ) -> Result<(Page, Option<Timestamp>), RelayerError> {
        let target = self.known_target(timeout).await?;
        let path = match target.dialect {
            Dialect::OpenZeppelin => {
                format!("api/v1/relayers/{}/transactions?page={page}&per_page={size}", target.id)
            }
            Dialect::Flat => format!("transactions?page={page}&per_page={size}"),
        };
        let (body, clock) = self.get_dated(&path, timeout, PAGE_BYTES_MAX).await?;
        let page = wire::read_page(&body).ok_or(RelayerError::Unreadable("the list of transactions"))?;
        Ok((page, clock))
    }

    async fn known_target(&self, timeout: Duration) -> Result<Target, RelayerError> {
        if let Some(target) = self.target.read().ok().and_then(|known| known.clone()) {
            return Ok(target);
        }
        let listed = self.look(timeout).await?;
        Ok(Target { id: listed.id, dialect: listed.dialect, address: listed.address })
    }

    async fn get(&self, path: &str, timeout: Duration) -> Result<Value, RelayerError> {
        self.get_dated(path, timeout, ANSWER_BYTES_MAX).await.map(|(body, _)| body)
    }

    async fn get_dated(
        &self,
        path: &str,
        timeout: Duration,
        answer_bytes_max: usize,
    ) -> Result<(Value, Option<Timestamp>), RelayerError> {
        let request = self.request(Method::GET, self.join(path), None, timeout);
        let answer = self.transport.send(HttpRequest { answer_bytes_max, ..request }).await?;
        let clock = answer.headers.get(DATE).and_then(|date| Timestamp::parse_http(date.to_str().ok()?));
        if !answer.status.is_success() {
            let (status, detail) = (answer.status.as_u16(), wire::read_error(&text(&answer)));
            return Err(RelayerError::Status { status, detail });
        }
        let body = serde_json::from_slice(&answer.body).map_err(|_| RelayerError::Unreadable("not JSON"))?;
        Ok((body, clock))
    }

    fn request(&self, method: Method, url: String, body: Option<Bytes>, timeout: Duration) -> HttpRequest {
        HttpRequest { method, url, body, fence: None, timeout, answer_bytes_max: ANSWER_BYTES_MAX }
    }

    fn join(&self, path: &str) -> String {
        format!("{}/{path}", self.base.as_str().trim_end_matches('/'))
    }
}

fn text(answer: &Response) -> String {
    String::from_utf8_lossy(&answer.body).into_owned()
}

/// `http://host/api/v1/relayers/x` means relayer `x` at `http://host`.
fn split_url(url: &Url) -> (Url, Option<String>) {
    let path = url.path().trim_end_matches('/');
    if let Some((before, id)) = path.rsplit_once("/api/v1/relayers/") {
        let mut base = url.clone();
        base.set_path(before);
        return (base, Some(id.to_owned()));
    }
    (url.clone(), None)
}

impl From<TransportError> for RelayerError {
    fn from(error: TransportError) -> Self {
        match error.kind {
            TransportFailure::AnswerTooLong => Self::TooLong,
            _ => Self::Unreachable(error),
        }
    }
}

/// What a submission without a whole answer proves.
fn judge_failure(error: TransportError) -> SubmissionAnswer {
    if let Some(status) = error.status {
        let reason = format!("the answer broke off after status {status}: {}", describe(&error.into()));
        return SubmissionAnswer::Unknown { reason, answered: false };
    }
    match error.kind {
        TransportFailure::Fenced => SubmissionAnswer::NotTaken { why: NotTaken::Fenced, detail: error.cause },
        TransportFailure::NoConnection => {
            SubmissionAnswer::NotTaken { why: NotTaken::Fault, detail: format!("no connection: {}", error.cause) }
        }
        TransportFailure::TimedOut => {
            SubmissionAnswer::Unknown { reason: "no answer in time".to_owned(), answered: false }
        }
        TransportFailure::Lost | TransportFailure::AnswerTooLong => {
            SubmissionAnswer::Unknown { reason: format!("the connection was lost: {}", error.cause), answered: false }
        }
    }
}

/// What an answer proves.
fn judge_answer(status: StatusCode, headers: &HeaderMap, text: &str) -> SubmissionAnswer {
    let said = || format!("{}: {}", status.as_u16(), wire::read_error(text));
    match status.as_u16() {
        200..=299 => {
            let record = serde_json::from_str::<Value>(text).ok().as_ref().and_then(wire::read_record);
            match record {
                Some(report) => SubmissionAnswer::Accepted(Box::new(report)),
                None => SubmissionAnswer::Unknown {
                    reason: format!("status {status} with a body that cannot be read"),
                    answered: true,
                },
            }
        }
        400 => SubmissionAnswer::Refused(wire::read_error(text)),
        403 => SubmissionAnswer::NotTaken { why: NotTaken::Closed, detail: said() },
        429 => SubmissionAnswer::NotTaken { why: NotTaken::Busy(retry_after(headers)), detail: said() },
        401 | 404 => SubmissionAnswer::NotTaken { why: NotTaken::Fault, detail: said() },
        // 408: the server gave up waiting for a request that it may have had. Of the 5xx, only 500 is the relayer's own.
        // The others, 3xx and 405 come from something in between, which may have passed the request on, or from a handler
        // that ran out of time: the work behind them may go on.
        300..=399 | 405 | 408 | 500.. => SubmissionAnswer::Unknown { reason: said(), answered: status.as_u16() == 500 },
        _ => SubmissionAnswer::ClientError(said()),
    }
}

/// The relayer writes 0 for "under a second".
fn retry_after(headers: &HeaderMap) -> Duration {
    let seconds = headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse::<u64>().ok()).unwrap_or(0);
    Duration::from_secs(seconds.min(60)).max(Duration::from_millis(500))
}

/// An error with its cause, for logs and timelines.
pub fn describe(error: &RelayerError) -> String {
    match error {
        RelayerError::Unreachable(inner) => format!("{error} ({inner})"),
        _ => error.to_string(),
    }
}

/// The same for `/health`, which is public: what to look at, without what the relayer or the network said.
pub fn public_reason(error: &RelayerError) -> String {
    match error {
        RelayerError::Status { status: status @ (401 | 403), .. } => {
            format!("it refuses the key of OZ_RELAYER_API_KEY (status {status})")
        }
        RelayerError::Status { status: 404, .. } => {
            "the path in OZ_RELAYER_URLS leads to no relayer (status 404)".to_owned()
        }
        RelayerError::Status { status, .. } => format!("it answers with status {status}"),
        RelayerError::TooLong => "its answer is too long".to_owned(),
        RelayerError::Unreadable(_) => "its answer is not that of a relayer".to_owned(),
        RelayerError::Unreachable(error) => error.public_reason().to_owned(),
    }
}

#[cfg(test)]
mod tests;
