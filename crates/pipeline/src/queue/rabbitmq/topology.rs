//! The exchanges and queues on the broker: their names, arguments and declaration.

use std::time::Duration;

use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{Channel, ExchangeKind};

use super::delay_queue::DelayQueue;

/// Disables RabbitMQ 4's delivery limit of 20: this backend counts deliveries and buries messages itself.
const DELIVERIES_MAX: i64 = i32::MAX as i64;

/// The names on the broker. Routing keys equal queue names; an empty exchange name is the broker's default exchange.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// Exchange for messages of the queue.
    pub exchange: String,
    /// Name of the queue.
    pub queue: String,
    /// Exchange for dead letters.
    pub dead_exchange: String,
    /// Name of the dead-letter queue.
    pub dead_queue: String,
    /// Where delayed messages wait.
    pub delays: Delays,
    /// The type of all queues.
    pub queue_type: QueueType,
    /// Whether missing exchanges and queues are created; otherwise connecting fails without them.
    pub create: bool,
}

/// The type of a queue on the broker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueType {
    /// Replicated and fsynced; counts deliveries; a delayed message leaves its delay queue only when the main queue has it.
    Quorum,
    /// On one node; reports only whether a message was delivered before, and may lose delayed messages in a crash.
    Classic,
}

/// Where delayed messages wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delays {
    /// In generated queues, one for each delay in use; they expire when unused.
    Queues,
    /// In one existing queue with a fixed message TTL. Every delay is rounded up to a multiple of it.
    Fixed {
        /// Exchange for delayed messages.
        exchange: String,
        /// Name of the delay queue.
        queue: String,
        /// Message TTL of the delay queue.
        ttl: Duration,
    },
}

impl Topology {
    /// Quorum queues `name` and `name-dlq` on the default exchange, created when missing.
    pub fn named(name: impl Into<String>) -> Self {
        let queue = name.into();
        Self {
            exchange: String::new(),
            dead_exchange: String::new(),
            dead_queue: format!("{queue}-dlq"),
            queue,
            delays: Delays::Queues,
            queue_type: QueueType::Quorum,
            create: true,
        }
    }

    /// Creates the exchanges and queues, or checks that they exist.
    pub(super) async fn declare(&self, channel: &Channel) -> lapin::Result<()> {
        let dead_letter =
            [("x-dead-letter-exchange", &self.dead_exchange), ("x-dead-letter-routing-key", &self.dead_queue)];
        self.declare_exchange(channel, &self.dead_exchange).await?;
        self.declare_queue(channel, &self.dead_exchange, &self.dead_queue, self.arguments()).await?;
        self.declare_exchange(channel, &self.exchange).await?;
        let mut arguments = self.arguments();
        for (name, value) in dead_letter {
            arguments.insert(name.into(), AMQPValue::LongString(value.as_str().into()));
        }
        self.declare_queue(channel, &self.exchange, &self.queue, arguments).await?;
        if let Delays::Fixed { exchange, queue, ttl } = &self.delays {
            self.declare_exchange(channel, exchange).await?;
            let arguments = self.delay_arguments(u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX), None);
            self.declare_queue(channel, exchange, queue, arguments).await?;
        }
        Ok(())
    }

    /// Creates a delay queue.
    pub(super) async fn declare_delay(&self, channel: &Channel, queue: &DelayQueue) -> lapin::Result<()> {
        let options = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        let arguments = self.delay_arguments(queue.ttl_ms, Some(queue.expires_ms));
        channel.queue_declare(queue.name.as_str().into(), options, arguments).await.map(drop)
    }

    async fn declare_exchange(&self, channel: &Channel, exchange: &str) -> lapin::Result<()> {
        if exchange.is_empty() {
            return Ok(());
        }
        let options =
            ExchangeDeclareOptions { durable: true, passive: !self.create, ..ExchangeDeclareOptions::default() };
        channel.exchange_declare(exchange.into(), ExchangeKind::Direct, options, FieldTable::default()).await
    }

    async fn declare_queue(
        &self,
        channel: &Channel,
        exchange: &str,
        queue: &str,
        arguments: FieldTable,
    ) -> lapin::Result<()> {
        let options = QueueDeclareOptions { durable: true, passive: !self.create, ..QueueDeclareOptions::default() };
        channel.queue_declare(queue.into(), options, arguments).await?;
        if !exchange.is_empty() && self.create {
            let options = QueueBindOptions::default();
            channel.queue_bind(queue.into(), exchange.into(), queue.into(), options, FieldTable::default()).await?;
        }
        Ok(())
    }

    fn arguments(&self) -> FieldTable {
        let mut arguments = FieldTable::default();
        if self.queue_type == QueueType::Quorum {
            arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
            arguments.insert("x-delivery-limit".into(), AMQPValue::LongLongInt(DELIVERIES_MAX));
        }
        arguments
    }

    fn delay_arguments(&self, ttl_ms: u64, expires_ms: Option<u64>) -> FieldTable {
        let mut arguments = FieldTable::default();
        let mut number = |name: &str, value: u64| {
            arguments.insert(name.into(), AMQPValue::LongLongInt(i64::try_from(value).unwrap_or(i64::MAX)));
        };
        number("x-message-ttl", ttl_ms);
        if let Some(expires_ms) = expires_ms {
            number("x-expires", expires_ms);
        }
        let mut text = |name: &str, value: &str| {
            arguments.insert(name.into(), AMQPValue::LongString(value.into()));
        };
        text("x-dead-letter-exchange", &self.exchange);
        text("x-dead-letter-routing-key", &self.queue);
        if self.queue_type == QueueType::Quorum {
            text("x-queue-type", "quorum");
            // A message leaves only when the main queue has it. The broker requires `reject-publish` with this strategy.
            text("x-dead-letter-strategy", "at-least-once");
            text("x-overflow", "reject-publish");
        }
        arguments
    }
}
