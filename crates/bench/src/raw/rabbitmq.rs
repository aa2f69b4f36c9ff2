//! Raw RabbitMQ: persistent messages into a quorum queue with many outstanding confirms, and out of it with
//! acknowledgements for many deliveries each.

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

use super::{candidate_span, fastest, join_sum};
use crate::transactions::message_body;

/// Candidates: connections that consume.
pub const CONSUMERS: [usize; 2] = [1, 2];
/// The way [`consume_rate`] consumes, for a note.
pub const CONSUME_METHOD: &str = "prefetch 1000, one acknowledgement for 250, the best of 1 and 2 connections";
/// Candidates: connections that publish.
const PUBLISHERS: [usize; 3] = [1, 2, 4];
/// Outstanding confirms on each connection.
const UNCONFIRMED_MAX: usize = 1000;
/// Deliveries that a consumer holds unacknowledged.
const PREFETCH: u16 = 1000;
/// Deliveries that one acknowledgement covers.
const ACKNOWLEDGE_EVERY: u64 = 250;
/// AMQP's delivery mode of a persistent message.
const PERSISTENT: u8 = 2;
/// A queue without a delivery for this long is empty.
const EMPTY_AFTER: Duration = Duration::from_secs(2);

pub struct RawRabbitMq {
    url: String,
    queue: String,
    /// Publishing connections, after the first measurement.
    fastest: Option<usize>,
}

/// The queue of this measurement in a run of that name.
pub fn queue_name(run: &str) -> String {
    format!("{run}-raw")
}

/// When to stop publishing.
#[derive(Clone, Copy)]
enum PublishUntil {
    Time(Instant),
    Count(u64),
}

impl RawRabbitMq {
    pub fn new(url: &str, run: &str) -> Self {
        Self { url: url.to_owned(), queue: queue_name(run), fastest: None }
    }

    /// The fastest candidate, for a note.
    pub fn fastest_publish(&self) -> String {
        let connections = self.fastest.unwrap_or_default();
        format!("confirmed, {connections} connections with {UNCONFIRMED_MAX} outstanding confirms each")
    }

    /// Messages confirmed per second with the fastest candidate.
    pub async fn publish_rate(&mut self, span: Duration) -> anyhow::Result<f64> {
        let connections = match self.fastest {
            Some(known) => known,
            None => {
                let rate = async |connections| self.publish(connections, candidate_span(span)).await;
                let measured = fastest(PUBLISHERS, rate).await?;
                *self.fastest.insert(measured.0)
            }
        };
        self.publish(connections, span).await
    }

    /// Messages consumed and acknowledged per second with the fastest candidate.
    pub async fn drain_rate(&mut self, count: u64) -> anyhow::Result<f64> {
        let rate = async |connections| {
            let (connection, channel) = self.create_queue().await?;
            publish(channel.clone(), self.queue.clone(), PublishUntil::Count(count)).await?;
            let rate = consume_rate(&self.url, &self.queue, count, connections).await?;
            self.delete_queue(connection, channel).await?;
            Ok(rate)
        };
        Ok(fastest(CONSUMERS, rate).await?.1)
    }

    async fn publish(&self, connections: usize, span: Duration) -> anyhow::Result<f64> {
        let (connection, channel) = self.create_queue().await?;
        let mut publishers = Vec::new();
        for _ in 0..connections {
            publishers.push(connect(&self.url).await?);
        }
        let started = Instant::now();
        let mut tasks = JoinSet::new();
        for (_, channel) in &publishers {
            tasks.spawn(publish(channel.clone(), self.queue.clone(), PublishUntil::Time(started + span)));
        }
        let rate = join_sum(tasks).await? as f64 / started.elapsed().as_secs_f64();
        self.delete_queue(connection, channel).await?;
        for (connection, _) in publishers {
            connection.close(200, "done".into()).await?;
        }
        Ok(rate)
    }

    async fn create_queue(&self) -> anyhow::Result<(Connection, Channel)> {
        let (connection, channel) = connect(&self.url).await?;
        let mut arguments = FieldTable::default();
        arguments.insert("x-queue-type".into(), AMQPValue::LongString("quorum".into()));
        let durable = QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() };
        channel.queue_declare(self.queue.as_str().into(), durable, arguments).await?;
        Ok((connection, channel))
    }

    async fn delete_queue(&self, connection: Connection, channel: Channel) -> anyhow::Result<()> {
        channel.queue_delete(self.queue.as_str().into(), QueueDeleteOptions::default()).await?;
        Ok(connection.close(200, "done".into()).await?)
    }
}

/// A connection and a channel in confirm mode.
async fn connect(url: &str) -> anyhow::Result<(Connection, Channel)> {
    let connection = Connection::connect(url, ConnectionProperties::default()).await?;
    let channel = connection.create_channel().await?;
    channel.confirm_select(ConfirmSelectOptions::default()).await?;
    Ok((connection, channel))
}

/// Returns the number of confirmed messages.
async fn publish(channel: Channel, queue: String, until: PublishUntil) -> anyhow::Result<u64> {
    let body = Arc::new(message_body()?);
    let properties = BasicProperties::default().with_delivery_mode(PERSISTENT);
    let (mut sent, mut confirmed) = (0_u64, 0_u64);
    let mut unconfirmed = FuturesUnordered::new();
    loop {
        let more = match until {
            PublishUntil::Time(at) => Instant::now() < at,
            PublishUntil::Count(count) => sent < count,
        };
        if more && unconfirmed.len() < UNCONFIRMED_MAX {
            let options = BasicPublishOptions::default();
            let publish =
                channel.basic_publish("".into(), queue.as_str().into(), options, &body, properties.clone()).await?;
            unconfirmed.push(publish);
            sent += 1;
            continue;
        }
        match unconfirmed.next().await {
            Some(confirmation) => {
                anyhow::ensure!(matches!(confirmation?, Confirmation::Ack(_)), "the broker refused a message");
                confirmed += 1;
            }
            None => return Ok(confirmed),
        }
    }
}

/// Messages consumed and acknowledged per second, from a queue of at least `count` messages.
pub async fn consume_rate(url: &str, queue: &str, count: u64, connections: usize) -> anyhow::Result<f64> {
    let mut tasks = JoinSet::new();
    let share = count / connections as u64;
    let started = Instant::now();
    for _ in 0..connections {
        let (connection, channel) = connect(url).await?;
        tasks.spawn(consume(connection, channel, queue.to_owned(), share));
    }
    let (mut total, mut ended) = (0, started);
    while let Some(done) = tasks.join_next().await {
        let (count, last_acknowledged) = done??;
        (total, ended) = (total + count, ended.max(last_acknowledged));
    }
    Ok(total as f64 / (ended - started).as_secs_f64().max(0.001))
}

/// Consumes `share` messages, or fewer if the queue is empty earlier; returns their number and the time of the last
/// acknowledgement.
async fn consume(
    connection: Connection,
    channel: Channel,
    queue: String,
    share: u64,
) -> anyhow::Result<(u64, Instant)> {
    channel.basic_qos(PREFETCH, BasicQosOptions::default()).await?;
    let (options, arguments) = (BasicConsumeOptions::default(), FieldTable::default());
    let mut consumer = channel.basic_consume(queue.into(), "".into(), options, arguments).await?;
    let (mut consumed, mut last_acknowledged) = (0, Instant::now());
    while consumed < share
        && let Ok(Some(delivery)) = tokio::time::timeout(EMPTY_AFTER, consumer.next()).await
    {
        consumed += 1;
        if consumed % ACKNOWLEDGE_EVERY == 0 || consumed == share {
            channel.basic_ack(delivery?.delivery_tag, BasicAckOptions { multiple: true }).await?;
            last_acknowledged = Instant::now();
        }
    }
    connection.close(200, "done".into()).await?;
    Ok((consumed, last_acknowledged))
}
