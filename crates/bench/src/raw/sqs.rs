//! Raw SQS: batches of ten with as many requests in flight as suits the endpoint, without attributes, leases or order.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use aws_sdk_sqs::Client;
use aws_sdk_sqs::types::{DeleteMessageBatchRequestEntry, SendMessageBatchRequestEntry};
use tokio::task::JoinSet;

use super::{message_body, probe_span};

const BATCH: u64 = 10;
/// Requests in flight that are tried.
const SENDS: [usize; 4] = [4, 8, 16, 32];
const RECEIVES: [usize; 3] = [4, 8, 16];

/// See the top of this file.
pub struct RawSqs {
    client: Client,
    name: String,
    best: Option<usize>,
    queues: u32,
}

impl RawSqs {
    /// Queues whose names begin like this are its own.
    pub fn new(client: Client, name: &str) -> Self {
        Self { client, name: name.to_owned(), best: None, queues: 0 }
    }

    /// How many in flight were best.
    pub fn in_flight(&self) -> usize {
        self.best.unwrap_or_default()
    }

    /// Messages sent a second, into a queue of their own.
    pub async fn publish_rate(&mut self, span: Duration) -> anyhow::Result<f64> {
        let in_flight = match self.best {
            Some(best) => best,
            None => {
                let mut best = (0.0, SENDS[0]);
                for in_flight in SENDS {
                    let rate = self.send(in_flight, probe_span(span)).await?;
                    if rate > best.0 {
                        best = (rate, in_flight);
                    }
                }
                *self.best.insert(best.1)
            }
        };
        self.send(in_flight, span).await
    }

    /// Messages received and deleted a second.
    pub async fn drain_rate(&mut self, count: u64) -> anyhow::Result<f64> {
        let mut best = 0.0_f64;
        for in_flight in RECEIVES {
            let queue = self.queue().await?;
            let sent = Arc::new(AtomicU64::new(0));
            let body = String::from_utf8(message_body()?)?;
            self.run(SENDS[2], |client| fill(client, queue.clone(), body.clone(), Arc::clone(&sent), count)).await?;
            let started = Instant::now();
            let drained = self.run(in_flight, |client| drain(client, queue.clone())).await?;
            best = best.max(drained as f64 / started.elapsed().as_secs_f64());
            self.client.delete_queue().queue_url(&queue).send().await?;
        }
        Ok(best)
    }

    async fn send(&mut self, in_flight: usize, span: Duration) -> anyhow::Result<f64> {
        let queue = self.queue().await?;
        let body = String::from_utf8(message_body()?)?;
        let started = Instant::now();
        let until = started + span;
        let sent = self.run(in_flight, |client| send(client, queue.clone(), body.clone(), until)).await?;
        let rate = sent as f64 / started.elapsed().as_secs_f64();
        self.client.delete_queue().queue_url(&queue).send().await?;
        Ok(rate)
    }

    async fn queue(&mut self) -> anyhow::Result<String> {
        self.queues += 1;
        let created =
            self.client.create_queue().queue_name(format!("{}-raw-{}", self.name, self.queues)).send().await?;
        created.queue_url.context("a queue without a URL")
    }

    /// So many of the same at once; the sum of what they did.
    async fn run<F>(&self, in_flight: usize, work: impl Fn(Client) -> F) -> anyhow::Result<u64>
    where
        F: Future<Output = anyhow::Result<u64>> + Send + 'static,
    {
        let mut tasks = JoinSet::new();
        for _ in 0..in_flight {
            tasks.spawn(work(self.client.clone()));
        }
        let mut total = 0;
        while let Some(done) = tasks.join_next().await {
            total += done??;
        }
        Ok(total)
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

async fn fill(client: Client, queue: String, body: String, sent: Arc<AtomicU64>, count: u64) -> anyhow::Result<u64> {
    while sent.fetch_add(BATCH, Ordering::Relaxed) < count {
        send_batch(&client, &queue, &body).await?;
    }
    Ok(0)
}

async fn send_batch(client: &Client, queue: &str, body: &str) -> anyhow::Result<()> {
    let entry = |number: u64| SendMessageBatchRequestEntry::builder().id(number.to_string()).message_body(body).build();
    let entries = (0..BATCH).map(entry).collect::<Result<Vec<_>, _>>()?;
    let answer = client.send_message_batch().queue_url(queue).set_entries(Some(entries)).send().await?;
    anyhow::ensure!(answer.failed().is_empty(), "SQS refused a message: {:?}", answer.failed());
    Ok(())
}

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
        let answer = client.delete_message_batch().queue_url(&queue).set_entries(Some(entries)).send().await?;
        anyhow::ensure!(answer.failed().is_empty(), "SQS did not delete a message: {:?}", answer.failed());
        drained += received.messages().len() as u64;
    }
}
