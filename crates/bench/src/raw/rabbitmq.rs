//! Raw RabbitMQ: persistent messages into a quorum queue with many confirms open, and out of it with acknowledgements
//! for many at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use lapin::options::{
    BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
    QueueDeclareOptions, QueueDeleteOptions,
};
use lapin::types::{AMQPValue, FieldTable};
use lapin::{BasicProperties, Channel, Confirmation, Connection, ConnectionProperties};
use tokio::task::JoinSet;

use super::{message_body, probe_span};

/// Connections that are tried.
const PUBLISHERS: [usize; 3] = [1, 2, 4];
const CONSUMERS: [usize; 2] = [1, 2];
/// Confirms open on each.
const OPEN_MAX: usize = 1000;
/// Deliveries that one acknowledgement is for.
const ACK_EVERY: u64 = 250;
/// A persistent message.
const PERSISTENT: u8 = 2;
/// No message for so long: there are no more.
const DRY_AFTER: Duration = Duration::from_secs(2);

/// See the top of this file.
pub struct RawRabbitMq {
    url: String,
    queue: String,
    best: Option<usize>,
}

/// The raw queue of a benchmark of that name.
pub fn queue(name: &str) -> String {
    format!("{name}-raw")
}

/// When to stop publishing.
#[derive(Clone, Copy)]
enum Until {
    Time(Instant),
    Count(u64),
}

impl RawRabbitMq {
    /// On this broker, with a queue of this name.
    pub fn new(url: &str, name: &str) -> Self {
        Self { url: url.to_owned(), queue: queue(name), best: None }
    }

    /// How many connections were best.
    pub fn connections(&self) -> usize {
        self.best.unwrap_or_default()
    }

    /// Messages confirmed a second.
    pub async fn publish_rate(&mut self, span: Duration) -> anyhow::Result<f64> {
        let connections = match self.best {
            Some(best) => best,
            None => {
                let mut best = (0.0, PUBLISHERS[0]);
                for connections in PUBLISHERS {
                    let rate = self.publish(connections, probe_span(span)).await?;
                    if rate > best.0 {
                        best = (rate, connections);
                    }
                }
                *self.best.insert(best.1)
            }
        };
        self.publish(connections, span).await
    }

    /// Messages consumed and acknowledged a second.
    pub async fn drain_rate(&mut self, count: u64) -> anyhow::Result<f64> {
        let mut best = 0.0_f64;
        for connections in CONSUMERS {
            let (connection, channel) = self.open().await?;
            publish(channel.clone(), self.queue.clone(), Until::Count(count)).await?;
            best = best.max(consume_rate(&self.url, &self.queue, count, connections).await?);
            self.close(connection, channel).await?;
        }
        Ok(best)
    }

    async fn publish(&self, connections: usize, span: Duration) -> anyhow::Result<f64> {
        let (connection, channel) = self.open().await?;
        let mut publishers = Vec::new();
        for _ in 0..connections {
            publishers.push(self.connect().await?);
        }
        let started = Instant::now();
        let mut tasks = JoinSet::new();
        for (_, channel) in &publishers {
            tasks.spawn(publish(channel.clone(), self.queue.clone(), Until::Time(started + span)));
        }
        let mut total = 0;
        while let Some(done) = tasks.join_next().await {
            total += done??;
        }
        let rate = total as f64 / started.elapsed().as_secs_f64();
        self.close(connection, channel).await?;
        for (connection, _) in publishers {
            connection.close(200, "done".into()).await?;
        }
        Ok(rate)
    }

    async fn connect(&self) -> anyhow::Result<(Connection, Channel)> {
        connect(&self.url).await
    }

    /// A connection and an empty queue.
    async fn open(&self) -> anyhow::Result<(Connection, Channel)> {
        let (connection, channel) = self.connect().await?;
        let mut arguments = FieldTable::default();
        arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
        let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        channel.queue_declare(self.queue.as_str().into(), durable, arguments).await?;
        Ok((connection, channel))
    }

    async fn close(&self, connection: Connection, channel: Channel) -> anyhow::Result<()> {
        channel.queue_delete(self.queue.as_str().into(), QueueDeleteOptions::default()).await?;
        Ok(connection.close(200, "done".into()).await?)
    }
}

async fn publish(channel: Channel, queue: String, until: Until) -> anyhow::Result<u64> {
    let body = Arc::new(message_body()?);
    let properties = BasicProperties::default().with_delivery_mode(PERSISTENT);
    let (mut sent, mut confirmed) = (0_u64, 0_u64);
    let mut open = FuturesUnordered::new();
    loop {
        let more = match until {
            Until::Time(at) => Instant::now() < at,
            Until::Count(count) => sent < count,
        };
        if more && open.len() < OPEN_MAX {
            let options = BasicPublishOptions::default();
            let publish =
                channel.basic_publish("".into(), queue.as_str().into(), options, &body, properties.clone()).await?;
            open.push(publish);
            sent += 1;
            continue;
        }
        match open.next().await {
            Some(confirmation) => {
                anyhow::ensure!(matches!(confirmation?, Confirmation::Ack(_)), "the broker refused a message");
                confirmed += 1;
            }
            None => return Ok(confirmed),
        }
    }
}

/// Messages of this queue, which holds at least so many, consumed and acknowledged a second.
pub async fn consume_rate(url: &str, queue: &str, count: u64, connections: usize) -> anyhow::Result<f64> {
    let mut tasks = JoinSet::new();
    let share = count / connections as u64;
    let started = Instant::now();
    for _ in 0..connections {
        let (connection, channel) = connect(url).await?;
        tasks.spawn(consume(connection, channel, queue.to_owned(), share));
    }
    let (mut total, mut last) = (0, started);
    while let Some(done) = tasks.join_next().await {
        let (count, at) = done??;
        (total, last) = (total + count, last.max(at));
    }
    Ok(total as f64 / (last - started).as_secs_f64().max(0.001))
}

async fn connect(url: &str) -> anyhow::Result<(Connection, Channel)> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    Ok((connection, channel))
}

/// Takes so many, or all there are; how many it were and when the last was acknowledged.
async fn consume(
    connection: Connection,
    channel: Channel,
    queue: String,
    share: u64,
) -> anyhow::Result<(u64, Instant)> {
    channel.basic_qos(1000, BasicQosOptions::default()).await?;
    let (options, arguments) = (BasicConsumeOptions::default(), FieldTable::default());
    let mut consumer = channel.basic_consume(queue.into(), "".into(), options, arguments).await?;
    let (mut taken, mut last) = (0, Instant::now());
    while taken < share
        && let Ok(Some(delivery)) = tokio::time::timeout(DRY_AFTER, consumer.next()).await
    {
        taken += 1;
        if taken % ACK_EVERY == 0 || taken == share {
            channel.basic_ack(delivery?.delivery_tag, BasicAckOptions { multiple: true }).await?;
            last = Instant::now();
        }
    }
    connection.close(200, "done".into()).await?;
    Ok((taken, last))
}
