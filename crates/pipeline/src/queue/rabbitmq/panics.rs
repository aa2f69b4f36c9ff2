//! Panics on request, for tests: a part of a session fails as it would by an error in its code. Only with the feature
//! `testing`.

use std::future::Future;
use std::sync::Arc;

use tokio::sync::Notify;

use super::{RabbitMqQueue, RabbitMqState};

/// A part of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionPart {
    /// The task that publishes.
    Publishing,
    /// Receiving and acknowledging.
    Consuming,
}

/// The panics that were requested and have not happened yet, at most one for each part.
#[derive(Default)]
pub(super) struct RequestedPanics {
    publishing: Notify,
    consuming: Notify,
}

impl RabbitMqQueue {
    /// Makes this part panic, once: that of the current session, or of the next one if there is none.
    pub fn panic_once(&self, part: SessionPart) {
        self.state.panics.of(part).notify_one();
    }
}

impl RequestedPanics {
    fn of(&self, part: SessionPart) -> &Notify {
        match part {
            SessionPart::Publishing => &self.publishing,
            SessionPart::Consuming => &self.consuming,
        }
    }
}

/// Runs `work`, which panics on request.
pub(super) async fn on_request<F: Future>(state: Arc<RabbitMqState>, part: SessionPart, work: F) -> F::Output {
    tokio::select! {
        biased;
        () = state.panics.of(part).notified() => panic!("on request"),
        output = work => output,
    }
}
