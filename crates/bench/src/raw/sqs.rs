//! Raw SQS: full batches with as many requests in flight as suit the endpoint, without attributes, leases or order.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use aws_sdk_sqs::Client;
use aws_sdk_sqs::types::{BatchResultErrorEntry, DeleteMessageBatchRequestEntry, SendMessageBatchRequestEntry};
use tokio::task::JoinSet;

use super::{candidate_span, fastest, join_sum};
use crate::transactions::message_body;

/// The way [`RawSqs::drain_rate`] drains, for a note.
pub const DRAIN_METHOD: &str = "receive and delete of 10, the best of 4, 8 and 16 in flight";
/// Messages in a request, the most that SQS takes.
const BATCH: u64 = 10;
/// Candidates: requests in flight.
const SENDS: [usize; 4] = [4, 8, 16, 32];
const RECEIVES: [usize; 3] = [4, 8, 16];
/// Requests in flight while a queue is filled.
const FILL_SENDS: usize = 16;

pub struct RawSqs {
    client: Client,
    run: String,
    /// Sends in flight, after the first measurement.
    fastest: Option<usize>,
    /// Queues created so far.
    queues: u32,
}

impl RawSqs {
    /// `run` is the prefix of the queues' names.
    pub fn new(client: Client, run: &str) -> Self {
        Self { client, run: run.to_owned(), fastest: None, queues: 0 }
    }

    /// The fastest candidate, for a note.
    pub fn fastest_publish(&self) -> String {
        format!("SendMessageBatch of {BATCH}, {} in flight", self.fastest.unwrap_or_default())
    }

    /// Messages sent per second with the fastest candidate, each measurement into an empty queue.
    pub async fn publish_rate(&mut self, span: Duration) -> anyhow::Result<f64> {
        let in_flight = match self.fastest {
            Some(known) => known,
            None => {
                let rate = async |in_flight| self.send_rate(in_flight, candidate_span(span)).await;
                let measured = fastest(SENDS, rate).await?;
                *self.fastest.insert(measured.0)
            }
        };
        self.send_rate(in_flight, span).await
    }

    /// Messages received and deleted per second with the fastest candidate.
    pub async fn drain_rate(&mut self, count: u64) -> anyhow::Result<f64> {
        let rate = async |in_flight| {
            let queue = self.create_queue().await?;
            let sent = Arc::new(AtomicU64::new(0));
            let body = String::from_utf8(message_body()?)?;
            self.run(FILL_SENDS, |client| fill(client, queue.clone(), body.clone(), Arc::clone(&sent), count)).await?;
            let started = Instant::now();
            let drained = self.run(in_flight, |client| drain(client, queue.clone())).await?;
            let rate = drained as f64 / started.elapsed().as_secs_f64();
            self.client.delete_queue().queue_url(&queue).send().await?;
            Ok(rate)
        };
        Ok(fastest(RECEIVES, rate).await?.1)
    }

    async fn send_rate(&mut self, in_flight: usize, span: Duration) -> anyhow::Result<f64> {
        let queue = self.create_queue().await?;
        let body = String::from_utf8(message_body()?)?;
        let started = Instant::now();
        let until = started + span;
        let sent = self.run(in_flight, |client| send(client, queue.clone(), body.clone(), until)).await?;
        let rate = sent as f64 / started.elapsed().as_secs_f64();
        self.client.delete_queue().queue_url(&queue).send().await?;
        Ok(rate)
    }

    /// Returns the URL of a new queue.
    async fn create_queue(&mut self) -> anyhow::Result<String> {
        self.queues += 1;
        let name = format!("{}-raw-{}", self.run, self.queues);
        let created = self.client.create_queue().queue_name(name).send().await?;
        created.queue_url.context("SQS created a queue without a URL")
    }

    /// Runs `in_flight` tasks of the same work and adds up their counts.
    async fn run<F>(&self, in_flight: usize, work: impl Fn(Client) -> F) -> anyhow::Result<u64>
    where
        F: Future<Output = anyhow::Result<u64>> + Send + 'static,
    {
        let mut tasks = JoinSet::new();
        for _ in 0..in_flight {
            tasks.spawn(work(self.client.clone()));
        }
        join_sum(tasks).await
    }
}

async fn send(client: Client, queue: String, body: String, until: Instant) -> anyhow::Result<u64> {
    let mut sent = 0;
    while Instant::now() < until {
        send_batch(&client, &queue, &body).await?;
        sent += BATCH;
    }
    Ok(sent)
}

/// Sends until all tasks together have sent `count`.
async fn fill(client: Client, queue: String, body: String, sent: Arc<AtomicU64>, count: u64) -> anyhow::Result<u64> {
    let mut own = 0;
    while sent.fetch_add(BATCH, Ordering::Relaxed) < count {
        send_batch(&client, &queue, &body).await?;
        own += BATCH;
    }
    Ok(own)
}

async fn send_batch(client: &Client, queue: &str, body: &str) -> anyhow::Result<()> {
    let entry = |number: u64| SendMessageBatchRequestEntry::builder().id(number.to_string()).message_body(body).build();
    let entries = (0..BATCH).map(entry).collect::<Result<Vec<_>, _>>()?;
    let response = client.send_message_batch().queue_url(queue).set_entries(Some(entries)).send().await?;
    ensure_all_succeeded(response.failed(), "send")
}

/// Receives and deletes until a receive is empty.
async fn drain(client: Client, queue: String) -> anyhow::Result<u64> {
    let mut drained = 0;
    loop {
        let received = client.receive_message().queue_url(&queue).max_number_of_messages(BATCH as i32).send().await?;
        if received.messages().is_empty() {
            return Ok(drained);
        }
        let entry = |(number, message): (usize, &aws_sdk_sqs::types::Message)| {
            let handle = message.receipt_handle().unwrap_or_default();
            DeleteMessageBatchRequestEntry::builder().id(number.to_string()).receipt_handle(handle).build()
        };
        let entries = received.messages().iter().enumerate().map(entry).collect::<Result<Vec<_>, _>>()?;
        let response = client.delete_message_batch().queue_url(&queue).set_entries(Some(entries)).send().await?;
        ensure_all_succeeded(response.failed(), "delete")?;
        drained += received.messages().len() as u64;
    }
}

fn ensure_all_succeeded(failed: &[BatchResultErrorEntry], action: &str) -> anyhow::Result<()> {
    let first = failed.first().map(|entry| format!("{}: {}", entry.code(), entry.message().unwrap_or_default()));
    ensure!(first.is_none(), "SQS did not {action} a message: {}", first.unwrap_or_default());
    Ok(())
}
