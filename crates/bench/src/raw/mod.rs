//! The servers without the product: what the same database and the same broker do for a program that does nothing else.
//! Each measurement first looks for what suits the server best, how much at once and over how many connections, so
//! that the product is compared with the best that can be had and not with a straw man.

pub mod mysql;
pub mod postgres;
pub mod rabbitmq;
pub mod sqs;

use std::time::Duration;

use super::process::BODY;
use baton::relay::call::DirectRequest;
use baton::relay::message::Envelope;
use baton::relay::transaction::{Transaction, TransactionId};
use baton::timestamp::Timestamp;

/// A broker without us.
pub enum Broker {
    Sqs(sqs::RawSqs),
    RabbitMq(rabbitmq::RawRabbitMq),
}

impl Broker {
    /// Messages a second into a queue.
    pub async fn publish_rate(&mut self, span: Duration) -> anyhow::Result<f64> {
        match self {
            Self::Sqs(sqs) => sqs.publish_rate(span).await,
            Self::RabbitMq(rabbitmq) => rabbitmq.publish_rate(span).await,
        }
    }

    /// Messages a second out of a queue, for good.
    pub async fn drain_rate(&mut self, count: u64) -> anyhow::Result<f64> {
        match self {
            Self::Sqs(sqs) => sqs.drain_rate(count).await,
            Self::RabbitMq(rabbitmq) => rabbitmq.drain_rate(count).await,
        }
    }

    /// In which way the publishing was fastest.
    pub fn published_how(&self) -> String {
        match self {
            Self::Sqs(sqs) => format!("SendMessageBatch of 10, {} in flight", sqs.in_flight()),
            Self::RabbitMq(rabbitmq) => format!("confirmed, {} connections, 1000 open each", rabbitmq.connections()),
        }
    }

    /// What is done to take a message out for good.
    pub fn drained_how(&self) -> &'static str {
        match self {
            Self::Sqs(_) => "receive and delete, 10 at a time, the best of 4, 8, 16 in flight",
            Self::RabbitMq(_) => "consume and acknowledge, 250 at a time, the best of 1 and 2 connections",
        }
    }

    /// For the table.
    pub fn drain_name(&self) -> &'static str {
        match self {
            Self::Sqs(_) => "raw receive + delete",
            Self::RabbitMq(_) => "raw consume + acknowledge",
        }
    }
}

/// A row as an accept makes it.
pub fn new_row(clocks: &baton::relay::transaction::Clocks) -> anyhow::Result<Transaction> {
    let request = DirectRequest::parse(&serde_json::from_str(BODY)?)
        .map_err(|_| anyhow::anyhow!("the benchmark's body is not valid"))?;
    Ok(Transaction::accepted(TransactionId::generate(), &request, "bench".to_owned(), Timestamp::now(), clocks))
}

/// A message's body as an accept makes it.
fn message_body() -> anyhow::Result<Vec<u8>> {
    let config = baton::config::Config::from_vars(baton::config::Service::Command, |_| None)?;
    Ok(Envelope::of(&new_row(&config.relay.clocks)?).outgoing().body)
}

/// How long one look at a way takes before the best is measured.
fn probe_span(span: Duration) -> Duration {
    (span / 4).max(Duration::from_millis(250))
}
