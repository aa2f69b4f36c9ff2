//! Receives from SQS: splits a large receive into requests, leases what is due and sends on what came too early.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::future::join_all;
use tokio::time::Instant;

use super::leases::Lease;
use super::requests::BATCH_MAX;
use super::wire::{self, Delivery, whole_seconds};
use super::{Shared, SqsQueue};
use crate::message::{Message, Receipt};
use crate::queue::QueueError;

/// The longest wait that SQS takes in one request.
const LONG_POLL_MAX: Duration = Duration::from_secs(20);
/// How many requests one receive adds after a first full one.
const RECEIVES_MAX: usize = 8;

impl SqsQueue {
    /// One look: up to ten, and when there are ten and more is wanted, the rest in several requests at once.
    pub(super) async fn take(&self, max: usize, wait_s: i32) -> Result<Vec<Message>, QueueError> {
        let shared = &self.shared;
        let lease_s = whole_seconds(shared.options.lease);
        let receive = |max, wait_s| shared.calls.receive(&shared.queue_url, max, wait_s, lease_s);
        let mut taken = receive(max, wait_s).await?;
        if taken.len() == BATCH_MAX && max > BATCH_MAX {
            for more in join_all(further_receives(max).into_iter().map(|max| receive(max, 0))).await {
                match more {
                    Ok(more) => taken.extend(more),
                    // What came already must be handed out.
                    Err(error) => tracing::debug!(queue = shared.name, %error, "a further receive failed"),
                }
            }
        }
        let newest = taken.iter().map(|delivery| delivery.sent_at).max();
        let now = SystemTime::now();
        shared.leases.saw(newest, now);
        let (early, due): (Vec<_>, Vec<_>) =
            taken.into_iter().partition(|delivery| delivery.not_before.is_some_and(|at| at > now));
        let messages = due.into_iter().map(|delivery| shared.hand_out(delivery)).collect();
        if !early.is_empty() {
            let shared = self.shared.clone();
            self.to_the_end(async move { shared.send_on(early).await }).await?;
        }
        Ok(messages)
    }
}

impl Shared {
    fn hand_out(&self, delivery: Delivery) -> Message {
        let now = Instant::now();
        let content = Arc::new(delivery.content);
        let lease = Lease {
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

    /// Sends messages that came too early on their way again, as copies: a copy has not been received yet, so that no
    /// attempt is used up and SQS does not bury it. What cannot be sent on comes again when its lease ends.
    async fn send_on(&self, early: Vec<Delivery>) {
        let now = SystemTime::now();
        let copy = |delivery: &Delivery| {
            let left = delivery.not_before.and_then(|at| at.duration_since(now).ok()).unwrap_or_default();
            wire::live(&delivery.content, Some(delivery.sent_at), left, self.delay_step, now)
        };
        let sent = self.outbox.send(early.iter().map(copy).collect()).await;
        let gone = early.iter().zip(&sent).filter(|(_, sent)| sent.is_ok());
        let handles: Vec<String> = gone.map(|(delivery, _)| delivery.handle.clone()).collect();
        let deleted = self.calls.delete(&self.queue_url, &handles).await;
        let failed = early.len() - deleted.iter().filter(|deleted| deleted.is_ok()).count();
        if failed > 0 {
            tracing::warn!(queue = self.name, failed, "delayed messages could not be sent on; they come again");
        }
    }
}

/// What SQS can wait in one request, rounded up to whole seconds.
pub(super) fn long_poll_s(wait: Duration) -> i32 {
    whole_seconds(wait.min(LONG_POLL_MAX))
}

/// The receives that follow a first full one, by how many each asks for.
fn further_receives(max: usize) -> Vec<usize> {
    let rest = max - BATCH_MAX;
    (0..rest.div_ceil(BATCH_MAX).min(RECEIVES_MAX)).map(|number| (rest - number * BATCH_MAX).min(BATCH_MAX)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_receive_is_split() {
        assert_eq!(further_receives(11), [1]);
        assert_eq!(further_receives(35), [10, 10, 5]);
        assert_eq!(further_receives(1000), [10; RECEIVES_MAX]);
    }

    #[test]
    fn waits_round_up_to_what_sqs_takes() {
        for (wait_ms, seconds) in [(0, 0), (1, 1), (1000, 1), (1500, 2), (20_000, 20), (90_000, 20)] {
            assert_eq!(long_poll_s(Duration::from_millis(wait_ms)), seconds);
        }
    }
}
