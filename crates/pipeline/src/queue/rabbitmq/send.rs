//! Publishing from the queue's side: new messages, delayed ones, dead letters, and moves of leased deliveries.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::oneshot;
use tokio::time::Instant;
use uuid::Uuid;

use super::delay_queue::{DELAY_MAX, delay_queue, split};
use super::inbox::Taken;
use super::publisher::{Publish, PublishError};
use super::session::Session;
use super::topology::{Delays, Topology};
use super::wire::{ATTRIBUTES_BYTES_MAX, Envelope, attributes_size};
use super::{Shared, WAIT_MAX, lock};
use crate::message::{MessageId, Outgoing};
use crate::queue::QueueError;

/// Where a message is published.
#[derive(Clone, Copy)]
pub(super) enum Destination {
    Queue(Duration),
    DeadLetters,
}

/// A message that the publisher has.
pub(super) struct Publishing {
    confirmed: oneshot::Receiver<Result<(), PublishError>>,
    by: Instant,
    session: Arc<Session>,
    key: String,
}

impl Shared {
    /// A new message and its delay.
    pub(super) fn envelope(&self, message: &Outgoing) -> Result<(Envelope, Duration), QueueError> {
        let options = &self.options.queue;
        let (size, max) = (message.body.len(), options.body_bytes_max);
        if size > max {
            return Err(QueueError::TooLarge { size, max });
        }
        let (size, max) = (attributes_size(&message.attributes), ATTRIBUTES_BYTES_MAX);
        if size > max {
            return Err(QueueError::TooLarge { size, max });
        }
        let (now, delay) = (SystemTime::now(), message.delay.min(WAIT_MAX));
        let envelope = Envelope {
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
        Ok((envelope, delay))
    }

    /// Puts a message into the queue, due after `delay`.
    pub(super) async fn publish(&self, envelope: &Envelope, delay: Duration) -> Result<(), QueueError> {
        let publishing = self.start(envelope, delay, self.deadline()).await?;
        self.confirmed(publishing).await
    }

    pub(super) async fn start(
        &self,
        envelope: &Envelope,
        delay: Duration,
        by: Instant,
    ) -> Result<Publishing, QueueError> {
        let session = self.session()?;
        let topology = &self.options.topology;
        if delay.is_zero() {
            return self.hand_over(session, &topology.exchange, &topology.queue, envelope, by).await;
        }
        let (exchange, queue, hops) = match &topology.delays {
            Delays::Fixed { exchange, queue, ttl } => (exchange.as_str(), queue.clone(), split(delay, *ttl).1),
            Delays::Queues => {
                let (queue, hops) = delay_queue(&topology.queue, delay, self.now_ms());
                self.in_time(session.declare_delay(self, &queue)).await?;
                ("", queue.name, hops)
            }
        };
        let mut envelope = envelope.clone();
        envelope.hops = hops;
        self.hand_over(session, exchange, &queue, &envelope, by).await
    }

    /// Lets a message wait once more, as long as one wait can be.
    pub(super) async fn publish_wait(&self, envelope: &Envelope) -> Result<(), QueueError> {
        let hops = envelope.hops;
        let longest = match &self.options.topology.delays {
            Delays::Fixed { ttl, .. } => *ttl,
            Delays::Queues => DELAY_MAX,
        };
        // Together with the waits that remain, so that they are written on it again.
        self.publish(envelope, longest.saturating_mul(hops.saturating_add(1))).await
    }

    pub(super) async fn publish_dead(&self, envelope: &Envelope) -> Result<(), QueueError> {
        let Topology { dead_exchange, dead_queue, .. } = &self.options.topology;
        let publishing = self.hand_over(self.session()?, dead_exchange, dead_queue, envelope, self.deadline()).await?;
        self.confirmed(publishing).await
    }

    /// Gives a message to the publisher.
    async fn hand_over(
        &self,
        session: Arc<Session>,
        exchange: &str,
        key: &str,
        envelope: &Envelope,
        by: Instant,
    ) -> Result<Publishing, QueueError> {
        if session.blocked() {
            return Err(PublishError::NotSent.into());
        }
        let room = tokio::time::timeout_at(by, session.publishes.clone().reserve_owned()).await;
        let Ok(Ok(room)) = room else { return Err(PublishError::NotSent.into()) };
        let (answer, confirmed) = oneshot::channel();
        room.send(Publish {
            exchange: exchange.to_owned(),
            key: key.to_owned(),
            properties: envelope.properties(&self.options.numbers),
            body: Arc::clone(&envelope.body),
            answer,
        });
        Ok(Publishing { confirmed, by, session, key: key.to_owned() })
    }

    /// Waits until the broker has the message.
    pub(super) async fn confirmed(&self, publishing: Publishing) -> Result<(), QueueError> {
        let Publishing { confirmed, by, session, key } = publishing;
        let answer = match tokio::time::timeout_at(by, confirmed).await {
            Ok(Ok(answer)) => answer,
            Ok(Err(_)) => Err(PublishError::Lost(None)),
            Err(_) => Err(PublishError::Late),
        };
        if let Err(PublishError::Unroutable(_)) = &answer {
            // This one is refused; the next finds its queue again.
            session.forget_delay(&key);
            self.in_time(session.declare(self)).await?;
        }
        Ok(answer?)
    }

    pub(super) fn deadline(&self) -> Instant {
        Instant::now() + self.options.timeout
    }

    pub(super) async fn move_taken(
        &self,
        taken: Taken,
        envelope: &Envelope,
        to: Destination,
    ) -> Result<(), QueueError> {
        let published = match to {
            Destination::Queue(delay) => self.publish(envelope, delay).await,
            Destination::DeadLetters => self.publish_dead(envelope).await,
        };
        let mut inbox = lock(&self.inbox);
        let answer = match published {
            Ok(()) if inbox.settle(&taken) => Ok(()),
            // The connection ended meanwhile: the broker gives out the original again, beside what was published.
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
