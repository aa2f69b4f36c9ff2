//! Builds messages and sends them where they belong: to the queue, to a delay queue or to the dead letters. A move of a
//! leased delivery is publish, confirm, acknowledge. The [`publisher`](super::publisher) task does the publishing.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::oneshot;
use tokio::time::Instant;
use uuid::Uuid;

use super::delay_queue::{DELAY_MAX, delay_queue, split};
use super::inbox::DetachedDelivery;
use super::publisher::{Publish, PublishError};
use super::session::Session;
use super::topology::{Delays, Topology};
use super::wire::{ATTRIBUTES_BYTES_MAX, WireMessage, attributes_size};
use super::{RabbitMqState, WAIT_MAX};
use crate::lock::lock;
use crate::message::{MessageId, Outgoing};
use crate::queue::{QueueError, check_size};

/// Where a message is published.
#[derive(Clone, Copy)]
pub(super) enum Destination {
    Queue(Duration),
    DeadLetters,
}

/// A submitted message that waits for the broker's confirm.
pub(super) struct PendingConfirm {
    confirmed: oneshot::Receiver<Result<(), PublishError>>,
    by: Instant,
    session: Arc<Session>,
    key: String,
}

impl RabbitMqState {
    /// Checks the sizes and gives the message its id and times. Returns it with its delay.
    pub(super) fn new_message(&self, message: &Outgoing) -> Result<(WireMessage, Duration), QueueError> {
        let options = &self.options.queue;
        check_size(message.body.len(), options.body_bytes_max)?;
        check_size(attributes_size(&message.attributes), ATTRIBUTES_BYTES_MAX)?;
        let (now, delay) = (SystemTime::now(), message.delay.min(WAIT_MAX));
        let message = WireMessage {
            id: MessageId(Uuid::now_v7().to_string()),
            body: Arc::new(message.body.clone()),
            attributes: message.attributes.clone(),
            receives: 0,
            sent_at: now,
            expires_at: Some(now + delay + options.retention.min(WAIT_MAX)),
            hops: 0,
            burial: None,
            content_type: None,
        };
        Ok((message, delay))
    }

    /// Publishes a message, due after `delay`, and waits for the confirm.
    pub(super) async fn publish(&self, message: &WireMessage, delay: Duration) -> Result<(), QueueError> {
        let pending = self.start(message, delay, self.deadline()).await?;
        self.confirmed(pending).await
    }

    pub(super) async fn start(
        &self,
        message: &WireMessage,
        delay: Duration,
        by: Instant,
    ) -> Result<PendingConfirm, QueueError> {
        let session = self.session()?;
        let topology = &self.options.topology;
        if delay.is_zero() {
            return self.submit(session, &topology.exchange, &topology.queue, message, by).await;
        }
        let (exchange, queue, hops) = match &topology.delays {
            Delays::Fixed { exchange, queue, ttl } => (exchange.as_str(), queue.clone(), split(delay, *ttl).1),
            Delays::Queues => {
                let (queue, hops) = delay_queue(&topology.queue, delay, self.now_ms());
                self.with_timeout(session.declare_delay(self, &queue)).await?;
                ("", queue.name, hops)
            }
        };
        let mut message = message.clone();
        message.hops = hops;
        self.submit(session, exchange, &queue, &message, by).await
    }

    /// Publishes a message for another full step of a delay that is longer than one delay queue can hold.
    pub(super) async fn publish_delay_again(&self, message: &WireMessage) -> Result<(), QueueError> {
        let hops = message.hops;
        let longest = match &self.options.topology.delays {
            Delays::Fixed { ttl, .. } => *ttl,
            Delays::Queues => DELAY_MAX,
        };
        // The delay includes the remaining steps, so that `start` writes their number into the message.
        self.publish(message, longest.saturating_mul(hops.saturating_add(1))).await
    }

    pub(super) async fn publish_dead(&self, message: &WireMessage) -> Result<(), QueueError> {
        let Topology { dead_exchange, dead_queue, .. } = &self.options.topology;
        let pending = self.submit(self.session()?, dead_exchange, dead_queue, message, self.deadline()).await?;
        self.confirmed(pending).await
    }

    /// Submits a message to the publisher.
    async fn submit(
        &self,
        session: Arc<Session>,
        exchange: &str,
        key: &str,
        message: &WireMessage,
        by: Instant,
    ) -> Result<PendingConfirm, QueueError> {
        if session.blocked() {
            return Err(PublishError::NotSent.into());
        }
        let room = tokio::time::timeout_at(by, session.publishes.clone().reserve_owned()).await;
        let Ok(Ok(room)) = room else { return Err(PublishError::NotSent.into()) };
        let (answer, confirmed) = oneshot::channel();
        room.send(Publish {
            exchange: exchange.to_owned(),
            key: key.to_owned(),
            properties: message.properties(&self.options.numbers),
            body: Arc::clone(&message.body),
            answer,
        });
        Ok(PendingConfirm { confirmed, by, session, key: key.to_owned() })
    }

    /// Waits for the broker's confirm.
    pub(super) async fn confirmed(&self, pending: PendingConfirm) -> Result<(), QueueError> {
        let PendingConfirm { confirmed, by, session, key } = pending;
        let answer = match tokio::time::timeout_at(by, confirmed).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(PublishError::Lost(None)),
            Err(_) => Err(PublishError::Late),
        };
        if let Err(PublishError::Unroutable(_)) = &answer {
            // This message failed; declare the queues again for the next one.
            session.forget_delay(&key);
            self.with_timeout(session.declare(self)).await?;
        }
        Ok(answer?)
    }

    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.options.timeout
    }

    pub(super) async fn publish_then_ack(
        &self,
        taken: DetachedDelivery,
        message: &WireMessage,
        to: Destination,
    ) -> Result<(), QueueError> {
        let published = match to {
            Destination::Queue(delay) => self.publish(message, delay).await,
            Destination::DeadLetters => self.publish_dead(message).await,
        };
        let mut inbox = lock(&self.inbox);
        let answer = match published {
            Ok(()) if inbox.settle(&taken) => Ok(()),
            // The connection ended meanwhile: the broker redelivers the original in addition to the published copy.
            Ok(()) => Err(QueueError::LeaseLost),
            Err(error) if inbox.put_back(taken) => Err(error),
            Err(_) => Err(QueueError::LeaseLost),
        };
        drop(inbox);
        self.changed.notify_one();
        answer
    }

    fn now_ms(&self) -> u64 {
        let now = self.started.0.duration_since(UNIX_EPOCH).unwrap_or_default() + self.started.1.elapsed();
        u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
    }
}
