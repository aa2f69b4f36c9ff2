//! Receives from SQS: splits a large receive into requests, records leases, and forwards messages that arrived before
//! their delay has passed.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::future::join_all;
use tokio::time::Instant;

use super::client::BATCH_MAX;
use super::leases::SqsLease;
use super::wire::{self, SqsDelivery, whole_seconds};
use super::{SqsQueue, SqsQueueState};
use crate::message::{Message, Receipt};
use crate::queue::QueueError;

/// The longest wait that SQS accepts in one request.
const LONG_POLL_MAX: Duration = Duration::from_secs(20);
/// Further requests of one receive, after a first full one.
const RECEIVES_MAX: usize = 8;

impl SqsQueue {
    /// Receives once: up to ten messages in one request and, if it was full and more are wanted, the rest in concurrent
    /// requests.
    pub(super) async fn take(&self, max: usize, wait_s: i32) -> Result<Vec<Message>, QueueError> {
        let state = &self.state;
        let lease_s = whole_seconds(state.options.lease);
        let receive = |max, wait_s| state.client.receive(&state.queue_url, max, wait_s, lease_s);
        let mut taken = receive(max, wait_s).await?;
        if taken.len() == BATCH_MAX && max > BATCH_MAX {
            for more in join_all(further_receives(max).into_iter().map(|max| receive(max, 0))).await {
                match more {
                    Ok(more) => taken.extend(more),
                    // The messages of the other requests are leased and must be returned.
                    Err(error) => tracing::debug!(queue = state.name, %error, "an additional receive failed"),
                }
            }
        }
        let newest = taken.iter().map(|delivery| delivery.sent_at).max();
        let now = SystemTime::now();
        state.leases.observe(newest, now);
        let (early, due): (Vec<_>, Vec<_>) =
            taken.into_iter().partition(|delivery| delivery.not_before.is_some_and(|at| at > now));
        let messages = due.into_iter().map(|delivery| state.lease_message(delivery)).collect();
        if !early.is_empty() {
            let state = self.state.clone();
            self.run_to_completion(async move { state.forward_early(early).await }).await?;
        }
        Ok(messages)
    }
}

impl SqsQueueState {
    fn lease_message(&self, delivery: SqsDelivery) -> Message {
        let now = Instant::now();
        let content = Arc::new(delivery.content);
        let lease = SqsLease {
            content: content.clone(),
            receives: delivery.receives,
            sent_at: delivery.sent_at,
            received_at: now,
            ends_at: now + self.options.lease,
            buried: false,
        };
        self.leases.add(delivery.handle.clone(), lease, now);
        Message {
            id: content.id.clone(),
            body: content.body.clone(),
            attributes: content.attributes.clone(),
            receives: delivery.receives,
            sent_at: delivery.sent_at,
            receipt: Receipt(delivery.handle),
        }
    }

    /// Sends messages that arrived too early again, with their remaining delay. A copy has a receive count of zero, so no
    /// attempt is used up and SQS does not bury it. A message that cannot be copied is due again when its lease ends.
    async fn forward_early(&self, early: Vec<SqsDelivery>) {
        let now = SystemTime::now();
        let copy = |delivery: &SqsDelivery| {
            let left = delivery.not_before.and_then(|at| at.duration_since(now).ok()).unwrap_or_default();
            wire::live(&delivery.content, Some(delivery.sent_at), left, self.delay_step, now)
        };
        let sent = self.sender.send(early.iter().map(copy).collect()).await;
        let gone = early.iter().zip(&sent).filter(|(_, sent)| sent.is_ok());
        let handles: Vec<String> = gone.map(|(delivery, _)| delivery.handle.clone()).collect();
        let deleted = self.client.delete(&self.queue_url, &handles).await;
        let failed = early.len() - deleted.iter().filter(|deleted| deleted.is_ok()).count();
        if failed > 0 {
            tracing::warn!(queue = self.name, failed, "cannot forward delayed messages; they become due again");
        }
    }
}

/// The wait of one request: at most SQS's limit, rounded up to whole seconds.
pub(super) fn long_poll_s(wait: Duration) -> i32 {
    whole_seconds(wait.min(LONG_POLL_MAX))
}

/// The sizes of the receives that follow a first full one.
fn further_receives(max: usize) -> Vec<usize> {
    let rest = max - BATCH_MAX;
    (0..rest.div_ceil(BATCH_MAX).min(RECEIVES_MAX)).map(|number| (rest - number * BATCH_MAX).min(BATCH_MAX)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_receive_is_split_into_requests() {
        assert_eq!(further_receives(11), [1]);
        assert_eq!(further_receives(35), [10, 10, 5]);
        assert_eq!(further_receives(1000), [10; RECEIVES_MAX]);
    }

    #[test]
    fn waits_are_rounded_up_to_seconds_and_capped() {
        for (wait_ms, seconds) in [(0, 0), (1, 1), (1000, 1), (1500, 2), (20_000, 20), (90_000, 20)] {
            assert_eq!(long_poll_s(Duration::from_millis(wait_ms)), seconds);
        }
    }
}
