//! One received message with its slot and its lease, from the receive to its settlement.

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use super::Run;
use super::settle::{Disposition, Settlement, SettlementSender};
use crate::handler::Outcome;
use crate::message::Message;

/// A received message. Dropping it frees its slot; one that is dropped without a settlement counts as abandoned.
pub(super) struct Delivery {
    pub(super) message: Message,
    /// Its entry in the run's lease table.
    pub(super) lease_key: u64,
    pub(super) run: Arc<Run>,
    pub(super) settlements: SettlementSender,
    pub(super) handed_in: bool,
    pub(super) slot: Option<OwnedSemaphorePermit>,
}

impl Delivery {
    pub(super) async fn settle(mut self, disposition: Disposition) {
        let settlement = Settlement::new(self.lease_key, &self.message, disposition);
        // The channel outlives every delivery, unless the settler was stopped: then this message cannot be settled.
        self.handed_in = self.settlements.send(settlement).await;
    }

    /// The outcome for a message whose handler panicked or returned the wrong number of outcomes.
    pub(super) fn failed(&self, reason: &str) -> Outcome {
        let Message { id, receives, .. } = &self.message;
        let policy = &self.run.options.panic_retry;
        self.run.meters.panicked();
        let queue = self.run.queue.name();
        tracing::error!(queue, messageId = %id, attempt = receives, reason, "the handler failed");
        if policy.allows_another(*receives) {
            Outcome::Retry { after: policy.delay(*receives, rand::random()), reason: reason.to_owned() }
        } else {
            Outcome::Dead { reason: format!("{reason} (attempt {receives} of {})", policy.attempts_max) }
        }
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        self.run.meters.delivery_ended(!self.handed_in);
        if !self.handed_in {
            self.run.leases.remove(self.lease_key);
        }
    }
}
