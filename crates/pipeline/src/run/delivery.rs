//! One message on its way through a run: its slot, its lease, and how it is settled.

use std::any::Any;
use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use super::settle::{Kind, Verdict};
use super::{Desk, Engine};
use crate::handler::Outcome;
use crate::message::Message;

/// One message with all it needs on its way: its slot, its lease and the desk that settles it.
pub(super) struct Delivery {
    pub(super) message: Message,
    pub(super) key: u64,
    pub(super) engine: Arc<Engine>,
    pub(super) desk: Desk,
    pub(super) handed_in: bool,
    /// Freed when the delivery is dropped.
    pub(super) slot: Option<OwnedSemaphorePermit>,
}

impl Delivery {
    pub(super) async fn settle(mut self, kind: Kind) {
        let verdict = Verdict::new(self.key, &self.message, kind);
        // The desk closes after the last delivery is gone; if it is closed all the same, nobody can settle this.
        self.handed_in = self.desk.send(verdict).await.is_ok();
    }

    /// What becomes of a message whose handler did not come to a verdict.
    pub(super) fn failed(&self, reason: &str) -> Outcome {
        let Message { id, receives, .. } = &self.message;
        let policy = &self.engine.options.panic_retry;
        self.engine.meters.panicked();
        let queue = self.engine.queue.name();
        tracing::error!(queue, messageId = %id, attempt = receives, reason, "a handler failed");
        if policy.allows_another(*receives) {
            Outcome::Retry { after: policy.delay(*receives, rand::random()), reason: reason.to_owned() }
        } else {
            Outcome::Dead { reason: format!("{reason} (attempt {receives} of {})", policy.attempts_max) }
        }
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        self.engine.meters.left(!self.handed_in);
        if !self.handed_in {
            self.engine.leases.forget(self.key);
        }
    }
}

pub(super) fn panic_reason(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("the handler panicked: {}", text.unwrap_or("no text"))
}
