//! One URL of `RPC_URL`, and what the last calls to it showed. `/health` is public, so it names an endpoint by its place in
//! `RPC_URL`: providers put keys into every part of a URL, the host included.

use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};

use reqwest::{StatusCode, Url};

use super::ChainError;
use crate::clock::TimedOut;
use crate::http::transport::TransportError;
use crate::timestamp::Timestamp;

/// One URL of `RPC_URL`.
pub(super) struct Endpoint {
    pub url: Url,
    /// Whether it was found to be on the right chain.
    pub checked: AtomicBool,
    /// Whether the log says that it is on another one.
    pub announced: AtomicBool,
    seen: Mutex<EndpointView>,
}

/// What the last calls to an endpoint showed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EndpointView {
    /// Whether the last call was answered.
    pub answers: bool,
    /// When a call was last answered.
    pub answered_at: Option<Timestamp>,
    /// The newest block at the last look.
    pub head: Option<u64>,
    /// Why the last call was not answered, for people.
    pub reason: Option<String>,
}

/// Why a call has no answer.
#[derive(Debug, thiserror::Error)]
pub enum NoAnswer {
    /// No whole answer.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// The endpoint refuses to work for us, whatever the question.
    #[error("status {status}{detail}")]
    Refused {
        /// The HTTP status.
        status: StatusCode,
        /// Whether it says that the limit of calls is reached.
        limited: bool,
        /// What it says; empty, or to be appended.
        detail: String,
    },
    /// None within the caller's own time limit.
    #[error(transparent)]
    Late(#[from] TimedOut),
    /// Not asked.
    #[error("it is not asked again so soon after a failure")]
    Paused,
}

impl Endpoint {
    pub fn new(url: Url) -> Self {
        let (checked, announced) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { url, checked, announced, seen: Mutex::default() }
    }

    /// Learns how a call ended.
    pub fn saw<T>(&self, answer: &Result<T, ChainError>, now: Timestamp) {
        let mut seen = self.seen();
        seen.answers = answer.is_ok();
        seen.reason = answer.as_ref().err().map(ChainError::public_reason);
        if seen.answers {
            seen.answered_at = Some(now);
        }
    }

    /// Learns its newest block.
    pub fn saw_head(&self, head: u64) {
        self.seen().head = Some(head);
    }

    pub fn view(&self) -> EndpointView {
        self.seen().clone()
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, EndpointView> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ChainError {
    /// What to look at, for `/health`, which is public: nothing that the node or the network said, and nothing of the URL.
    pub fn public_reason(&self) -> String {
        match self {
            Self::Unreachable(NoAnswer::Transport(error)) => error.public_reason().to_owned(),
            Self::Unreachable(NoAnswer::Refused { limited: true, .. }) => "its limit of calls is reached".to_owned(),
            Self::Unreachable(NoAnswer::Refused { status, .. }) => match status.as_u16() {
                status @ (401 | 403) => format!("it refuses the key in RPC_URL (status {status})"),
                404 => "the path in RPC_URL leads to no node (status 404)".to_owned(),
                status => format!("it answers with status {status}"),
            },
            Self::Unreachable(NoAnswer::Late(late)) => late.to_string(),
            Self::Unreachable(NoAnswer::Paused) => NoAnswer::Paused.to_string(),
            Self::Refused { code, .. } => format!("it answers with error {code}"),
            Self::TooLong => "its answer is too long".to_owned(),
            Self::Unreadable(_) => "its answer is not that of a node".to_owned(),
            Self::Mismatch(difference) => difference.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::transport::TransportFailure;

    #[test]
    fn a_reason_names_what_to_look_at_and_quotes_nothing() {
        let transport = |kind, cause: &str| TransportError { kind, cause: cause.to_owned(), status: None }.into();
        let refused = |status, limited| {
            let status = StatusCode::from_u16(status).unwrap();
            NoAnswer::Refused { status, limited, detail: ": s3cret".to_owned() }
        };
        let refusal = ChainError::Refused { code: -32_601, message: "s3cret".to_owned(), data: "s3cret".into() };
        for (error, wanted) in [
            (ChainError::Unreachable(refused(401, false)), "the key in RPC_URL (status 401)"),
            (ChainError::Unreachable(refused(404, false)), "the path in RPC_URL"),
            (ChainError::Unreachable(refused(200, true)), "limit of calls"),
            (ChainError::Unreachable(refused(502, false)), "status 502"),
            (ChainError::Unreachable(NoAnswer::Late(TimedOut)), "no answer in time"),
            (transport(TransportFailure::TimedOut, "s3cret"), "no answer in time"),
            (transport(TransportFailure::NoConnection, "s3cret: Connection refused"), "connection refused"),
            (transport(TransportFailure::NoConnection, "s3cret: failed to lookup address"), "DNS"),
            (transport(TransportFailure::Lost, "s3cret"), "the connection was lost"),
            (ChainError::Unreadable("s3cret"), "not that of a node"),
            (refusal, "error -32601"),
        ] {
            let reason = error.public_reason();
            assert!(reason.contains(wanted) && !reason.contains("s3cret"), "{wanted} in {reason}");
        }
    }

    #[test]
    fn an_endpoint_that_fails_keeps_its_last_answer_and_head() {
        let endpoint = Endpoint::new("http://node".parse().unwrap());
        assert_eq!(endpoint.view(), EndpointView::default());
        endpoint.saw(&Ok(()), Timestamp(1000));
        endpoint.saw_head(7);
        let mut wanted =
            EndpointView { answers: true, answered_at: Some(Timestamp(1000)), head: Some(7), reason: None };
        assert_eq!(endpoint.view(), wanted);
        endpoint.saw::<()>(&Err(ChainError::TooLong), Timestamp(2000));
        (wanted.answers, wanted.reason) = (false, Some("its answer is too long".to_owned()));
        assert_eq!(endpoint.view(), wanted);
    }
}
