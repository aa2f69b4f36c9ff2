//! One attempt to deliver one event: sign, send, decide what follows, store that in one commit.
//!
//! A process that dies before the commit leaves the delivery leased; it is tried again after the lease, with the same id.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use metrics::{counter, histogram};
use pipeline::{Handler, Message, Outcome};
use tracing::{debug, error, info, warn};

use super::outbox_queue::OutboxQueue;
use super::schedule::{AttemptResult, after_attempt};
use super::sender::{Sender, Sent};
use super::signature;
use crate::clock::Clock;
use crate::config::Secret;
use crate::randomness::Randomness;
use crate::relay::store::notifications::{
    Attempt, AttemptRecord, Delivery, DeliveryThen, Endpoint, EndpointId, EndpointThen, NotificationStore, Recorded,
};
use crate::timestamp::Timestamp;

/// Why a delivery without its event is given up, in the log of attempts.
const EVENT_MISSING: &str = "nothing was sent: the event is missing in the database; read the transaction's status";

/// Delivers what the queue hands out.
pub struct Deliverer {
    /// Where the deliveries come from.
    pub queue: Arc<OutboxQueue>,
    /// Endpoints, and what attempts led to.
    pub store: Arc<dyn NotificationStore>,
    /// Sends requests to allowed addresses.
    pub sender: Sender,
    /// The store's clock.
    pub clock: Clock,
    /// Ids of attempts, and jitter.
    pub random: Randomness,
    /// Signs what the environment's endpoint gets.
    pub environment_secret: Option<Secret>,
    /// Length of one second of the schedule.
    pub schedule_second: Duration,
    /// Longest time that the result of an attempt is kept for a store that is away. Below the rest of the lease.
    pub store_for: Duration,
}

#[async_trait]
impl Handler for Deliverer {
    async fn handle(&self, message: &Message) -> Outcome {
        let Some(delivery) = self.queue.delivery(&message.receipt) else { return Outcome::Done };
        let again = |reason: String| Outcome::Retry { after: Duration::ZERO, reason };
        let endpoint = match self.store.endpoint(delivery.endpoint).await {
            Ok(Some(endpoint)) => endpoint,
            // Deleted since, with its deliveries.
            Ok(None) => return Outcome::Done,
            Err(failure) => return again(failure.to_string()),
        };
        if endpoint.disabled.is_some() {
            return again("the endpoint is disabled".to_owned());
        }
        let Some(payload) = delivery.payload.clone() else {
            self.give_up_missing(&endpoint, delivery).await;
            return Outcome::Done;
        };
        let (at, sent) = self.attempt(&endpoint, &delivery, &payload).await;
        let mut record = self.record(&endpoint, delivery, at, sent);
        if record.then != DeliveryThen::Delivered && self.has_changed(&endpoint).await {
            // The answer is about another URL, or its owner has just looked after it.
            (record.then, record.endpoint) = (DeliveryThen::RetryAt(record.now), EndpointThen::Unchanged);
        }
        if let Some(recorded) = self.store_record(&record).await {
            self.report(&endpoint, &record, recorded);
        }
        Outcome::Done
    }
}

impl Deliverer {
    async fn attempt(&self, endpoint: &Endpoint, delivery: &Delivery, payload: &str) -> (Timestamp, Sent) {
        let now = self.clock.now();
        // Receivers compare with their own clocks, so this is the time of this machine.
        let timestamp = Timestamp::from(self.clock.wall()).0 / 1000;
        let Some(signature) =
            signature::sign(&self.secrets(endpoint, now), &delivery.event.0, timestamp, payload.as_bytes())
        else {
            let error = Some("the endpoint's secret is missing or malformed".to_owned());
            return (now, Sent { error, ..Sent::default() });
        };
        let headers = vec![
            ("webhook-id", delivery.event.0.clone()),
            ("webhook-timestamp", timestamp.to_string()),
            ("webhook-signature", signature),
        ];
        let body = Bytes::from(payload.to_owned());
        let sent = self.sender.send(&endpoint.owner, &endpoint.url, headers, body).await;
        self.queue.attempted(&endpoint.owner, &endpoint.url, sent.host);
        (now, sent)
    }

    /// Ends a delivery whose event is missing, so that those behind it go on. It says nothing about the endpoint.
    async fn give_up_missing(&self, endpoint: &Endpoint, delivery: Delivery) {
        let now = self.clock.now();
        let attempt = Attempt {
            id: self.random.uuid_v7(),
            event: delivery.event.clone(),
            number: delivery.attempts + 1,
            at: now,
            duration: Duration::ZERO,
            status: None,
            error: Some(EVENT_MISSING.to_owned()),
            answer: None,
        };
        let (then, then_endpoint) = (DeliveryThen::GivenUp, EndpointThen::Unchanged);
        let endpoint_version = endpoint.version;
        let record = AttemptRecord { delivery, attempt, then, endpoint: then_endpoint, endpoint_version, now };
        if self.store_record(&record).await != Some(Recorded::AsDecided) {
            return;
        }
        counter!("baton_webhook_attempts_total", "result" => "event_missing").increment(1);
        error!(
            endpointId = %endpoint.id, key = endpoint.owner, eventId = %record.delivery.event,
            transactionId = %record.delivery.transaction, action = "webhook_event_missing",
            "the event was deleted before it was delivered, so it is given up; tell the endpoint's owner to read the \
             transaction's status"
        );
    }

    /// Whether the endpoint has another URL since it was read, or was disabled. Other changes leave the schedule as it is:
    /// an owner that repeats them would be sent attempts without pauses.
    async fn has_changed(&self, read: &Endpoint) -> bool {
        match self.store.endpoint(read.id).await {
            Ok(current) => current.is_none_or(|current| current.url != read.url || current.disabled.is_some()),
            Err(_) => false,
        }
    }

    /// The secrets to sign with: during a rotation both.
    fn secrets(&self, endpoint: &Endpoint, now: Timestamp) -> Vec<Secret> {
        if endpoint.id == EndpointId::ENVIRONMENT {
            return self.environment_secret.iter().cloned().collect();
        }
        let previous = endpoint.previous_secret.iter().filter(|(_, until)| *until > now).map(|(secret, _)| secret);
        std::iter::once(&endpoint.secret).chain(previous).cloned().collect()
    }

    fn record(&self, endpoint: &Endpoint, delivery: Delivery, at: Timestamp, sent: Sent) -> AttemptRecord {
        let now = self.clock.now();
        let result =
            AttemptResult { status: sent.status, succeeded: sent.error.is_none(), retry_after: sent.retry_after };
        let endpoint_version = endpoint.version;
        let failing_for = endpoint.failing_since.map(|since| self.clock.passed_since(since)).unwrap_or_default();
        let (second, fraction) = (self.schedule_second, self.random.fraction());
        let (then, endpoint) = after_attempt(endpoint, &delivery, &result, now, failing_for, second, fraction);
        let attempt = Attempt {
            id: self.random.uuid_v7(),
            event: delivery.event.clone(),
            number: delivery.attempts + 1,
            at,
            duration: sent.duration,
            status: sent.status,
            error: sent.error,
            answer: sent.answer,
        };
        AttemptRecord { delivery, attempt, then, endpoint, endpoint_version, now }
    }

    /// Counts and logs what was stored.
    fn report(&self, known: &Endpoint, record: &AttemptRecord, recorded: Recorded) {
        let AttemptRecord { delivery, attempt, then, endpoint, .. } = record;
        let result = match (then, recorded) {
            (DeliveryThen::Delivered, _) => "delivered",
            (DeliveryThen::GivenUp, Recorded::AsDecided) => "given_up",
            _ => "failed",
        };
        counter!("baton_webhook_attempts_total", "result" => result).increment(1);
        histogram!("baton_webhook_attempt_seconds").record(attempt.duration.as_secs_f64());
        let why = attempt.error.as_deref().unwrap_or("delivered");
        debug!(
            endpointId = %delivery.endpoint, eventId = %delivery.event, transactionId = %delivery.transaction,
            action = "webhook_attempt", result, attempt = attempt.number, status = attempt.status,
            duration_ms = attempt.duration.as_millis() as u64, "{why}"
        );
        if recorded != Recorded::AsDecided {
            return;
        }
        match endpoint {
            EndpointThen::Fails { .. } if known.failures == 0 => warn!(
                endpointId = %delivery.endpoint, key = known.owner, action = "webhook_failing",
                "deliveries to the endpoint fail and are repeated: {why}"
            ),
            EndpointThen::Works if known.failures > 0 => info!(
                endpointId = %delivery.endpoint, key = known.owner, action = "webhook_works_again",
                "deliveries to the endpoint succeed again"
            ),
            _ => {}
        }
        if *then == DeliveryThen::GivenUp {
            warn!(
                endpointId = %delivery.endpoint, eventId = %delivery.event, transactionId = %delivery.transaction,
                action = "webhook_given_up", attempt = attempt.number,
                "the event is given up; `baton webhooks recover` sends it: {why}"
            );
        }
        if let EndpointThen::Disable { reason, .. } = endpoint {
            counter!("baton_webhook_endpoints_disabled_total").increment(1);
            error!(endpointId = %delivery.endpoint, action = "webhook_disabled", "the endpoint is disabled: {reason}");
        }
    }

    /// Stores the result, also while the store is away for a while. If it stays away, the delivery is tried again later.
    async fn store_record(&self, record: &AttemptRecord) -> Option<Recorded> {
        let deadline = self.clock.instant() + self.store_for;
        let mut pause = Duration::from_millis(50);
        loop {
            match self.store.record_attempt(record).await {
                Ok(recorded) => return Some(recorded),
                Err(failure) if failure.is_transient() && self.clock.instant() < deadline => {
                    self.clock.sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_secs(2));
                }
                Err(failure) => {
                    info!(
                        endpointId = %record.delivery.endpoint, eventId = %record.delivery.event,
                        action = "webhook_not_recorded", "the attempt is not recorded, so it will be repeated: {failure}"
                    );
                    return None;
                }
            }
        }
    }
}
