//! Tells an outage of a backend's server from an answer of it: a process may wait for the one to end, and must report the
//! other, which is an error of its settings or its permissions.

use std::fmt;
use std::sync::Arc;

use super::QueueError;

/// The source of a [`QueueError`] if the backend's server was away: no connection, one that broke, or no answer in time.
#[derive(Debug, Clone)]
pub(super) struct ServerAway(pub(super) Arc<str>);

impl fmt::Display for ServerAway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ServerAway {}

impl QueueError {
    /// Whether the backend's server was away; if not, it answered.
    pub fn is_server_away(&self) -> bool {
        match self {
            Self::Unavailable(source) | Self::OutcomeUnknown(source) => source.is::<ServerAway>(),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_server_that_did_not_answer_is_away() {
        let away = || ServerAway("connection reset".into()).into();
        assert!(QueueError::Unavailable(away()).is_server_away());
        assert!(QueueError::OutcomeUnknown(away()).is_server_away());
        assert!(!QueueError::Unavailable("access refused".into()).is_server_away());
        assert!(!QueueError::NotFound.is_server_away());
    }
}
