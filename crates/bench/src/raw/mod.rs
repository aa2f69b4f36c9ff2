//! Databases and brokers without the product. Each measurement first searches for the batch size and the number of
//! connections that suit the server best, so that the product is compared with the best possible rate.

pub mod mysql;
pub mod postgres;
pub mod rabbitmq;
pub mod sqs;

use std::time::Duration;

use tokio::task::JoinSet;

/// A broker without the product.
pub enum RawBroker {
    Sqs(sqs::RawSqs),
    RabbitMq(rabbitmq::RawRabbitMq),
}

impl RawBroker {
    /// Durable messages per second into a queue.
    pub async fn publish_rate(&mut self, span: Duration) -> anyhow::Result<f64> {
        match self {
            Self::Sqs(sqs) => sqs.publish_rate(span).await,
            Self::RabbitMq(rabbitmq) => rabbitmq.publish_rate(span).await,
        }
    }

    /// Messages per second received and removed, from a queue of `count` messages.
    pub async fn drain_rate(&mut self, count: u64) -> anyhow::Result<f64> {
        match self {
            Self::Sqs(sqs) => sqs.drain_rate(count).await,
            Self::RabbitMq(rabbitmq) => rabbitmq.drain_rate(count).await,
        }
    }

    /// The fastest way to publish, for a note.
    pub fn fastest_publish(&self) -> String {
        match self {
            Self::Sqs(sqs) => sqs.fastest_publish(),
            Self::RabbitMq(rabbitmq) => rabbitmq.fastest_publish(),
        }
    }

    /// The way [`RawBroker::drain_rate`] is measured, for a note.
    pub fn drain_method(&self) -> &'static str {
        match self {
            Self::Sqs(_) => sqs::DRAIN_METHOD,
            Self::RabbitMq(_) => rabbitmq::CONSUME_METHOD,
        }
    }

    /// The name of the figure that [`RawBroker::drain_rate`] measures.
    pub fn drain_name(&self) -> &'static str {
        match self {
            Self::Sqs(_) => "raw receive + delete",
            Self::RabbitMq(_) => "raw consume + acknowledge",
        }
    }
}

/// Measures every candidate; returns the one with the highest rate, and that rate.
async fn fastest<C: Copy>(
    candidates: impl IntoIterator<Item = C>,
    mut rate: impl AsyncFnMut(C) -> anyhow::Result<f64>,
) -> anyhow::Result<(C, f64)> {
    let mut best: Option<(C, f64)> = None;
    for candidate in candidates {
        let measured = rate(candidate).await?;
        if best.is_none_or(|(_, fastest)| measured > fastest) {
            best = Some((candidate, measured));
        }
    }
    best.ok_or_else(|| anyhow::anyhow!("there is no candidate to measure"))
}

/// Every pair of a batch size and a number of connections.
fn pairs<const N: usize, const M: usize>(
    batches: [usize; N],
    connections: [usize; M],
) -> impl Iterator<Item = (usize, usize)> {
    batches.into_iter().flat_map(move |batch| connections.map(|connections| (batch, connections)))
}

/// Duration of the measurement of one candidate, given that of the final one.
fn candidate_span(span: Duration) -> Duration {
    (span / 4).max(Duration::from_millis(250))
}

/// Waits for all tasks and adds up their counts.
async fn join_sum(mut tasks: JoinSet<anyhow::Result<u64>>) -> anyhow::Result<u64> {
    let mut total = 0;
    while let Some(done) = tasks.join_next().await {
        total += done??;
    }
    Ok(total)
}
