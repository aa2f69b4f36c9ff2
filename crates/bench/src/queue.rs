//! The embedded queue alone: the cost of sending, receiving and acknowledging, and whether it grows with the depth.

use std::time::{Duration, Instant};

use pipeline::queue::sqlite::SqliteQueue;
use pipeline::sqlite::Database;
use pipeline::{Message, Outgoing, Queue, QueueOptions};

use crate::Settings;
use crate::report::{Report, median};
use crate::scratch::{Round, ScratchDirectory, progress};
use crate::transactions::BODY;

const SHALLOW_DEPTH: usize = 1000;
/// Messages in a receive.
const RECEIVE_BATCH: usize = 10;
/// Messages in a send that fills a queue.
const FILL_BATCH: usize = 500;
/// Receives in one measurement.
const RECEIVES: usize = 300;
/// Target: cost at the deep queue, as a multiple of the cost at the shallow one.
const DEEP_COST_MAX: f64 = 1.2;

pub async fn run(settings: &Settings) -> anyhow::Result<Report> {
    let directory = ScratchDirectory::create(&settings.data_dir, "queue")?;
    let shallow = open(&directory, "shallow").await?;
    let deep = open(&directory, "deep").await?;
    progress(format_args!("filling the shallow queue with {SHALLOW_DEPTH} messages"));
    fill(&shallow, SHALLOW_DEPTH).await?;
    progress(format_args!("filling the deep queue with {} messages", settings.depth));
    let started = Instant::now();
    fill(&deep, settings.depth).await?;
    let fill_rate = settings.depth as f64 / started.elapsed().as_secs_f64();

    let (mut sends, mut shallow_us, mut deep_us) = (Vec::new(), Vec::new(), Vec::new());
    for round in Round::all(settings.rounds.max(3)) {
        round.progress("sending, receiving and acknowledging");
        sends.push(send_rate(&shallow, settings).await?);
        // Both queues in each round, so that other load on the machine affects both.
        shallow_us.push(receive_cost_us(&shallow).await?);
        deep_us.push(receive_cost_us(&deep).await?);
    }
    let (shallow_us, deep_us) = (median(shallow_us), median(deep_us));
    let mut report = Report::default();
    report.figure("send, one message", median(sends), "msg/s", format!("{} senders, durable", settings.concurrency));
    report.figure(format!("send, {FILL_BATCH} messages"), fill_rate, "msg/s", "filling the deep queue");
    let note = format!("{RECEIVE_BATCH} messages in a receive");
    report.figure(format!("receive and acknowledge at {SHALLOW_DEPTH}"), shallow_us, "µs/msg", &note);
    report.figure(format!("receive and acknowledge at {}", settings.depth), deep_us, "µs/msg", &note);
    report.at_most("cost at the deep queue, of the shallow", deep_us / shallow_us, DEEP_COST_MAX, "×");
    Ok(report)
}

async fn open(directory: &ScratchDirectory, name: &str) -> anyhow::Result<SqliteQueue> {
    let database = Database::open(&directory.path().join(format!("{name}.db")))?;
    Ok(SqliteQueue::open(&database, name, QueueOptions::default()).await?)
}

async fn fill(queue: &SqliteQueue, count: usize) -> anyhow::Result<()> {
    let mut last_progress = Instant::now();
    for start in (0..count).step_by(FILL_BATCH) {
        let messages = vec![Outgoing::new(BODY); FILL_BATCH.min(count - start)];
        for sent in queue.send(&messages).await {
            sent?;
        }
        if last_progress.elapsed() > Duration::from_secs(2) {
            progress(format_args!("{start} of {count}"));
            last_progress = Instant::now();
        }
    }
    Ok(())
}

/// Receives up to `max` messages and acknowledges them; returns their number. Fails on an empty queue.
pub async fn receive_and_acknowledge(queue: &dyn Queue, max: usize, wait: Duration) -> anyhow::Result<usize> {
    let messages: Vec<Message> = queue.receive(max, wait).await?;
    anyhow::ensure!(!messages.is_empty(), "the queue is empty too early");
    let receipts: Vec<_> = messages.into_iter().map(|message| message.receipt).collect();
    for acknowledged in queue.ack(&receipts).await {
        acknowledged?;
    }
    Ok(receipts.len())
}

/// Microseconds to receive and acknowledge one message. Keeps the depth: each receive is followed by a send.
async fn receive_cost_us(queue: &SqliteQueue) -> anyhow::Result<f64> {
    let mut spent = Duration::ZERO;
    for _ in 0..RECEIVES {
        let started = Instant::now();
        let received = receive_and_acknowledge(queue, RECEIVE_BATCH, Duration::ZERO).await?;
        anyhow::ensure!(received == RECEIVE_BATCH, "received {received} messages instead of {RECEIVE_BATCH}");
        spent += started.elapsed();
        fill(queue, RECEIVE_BATCH).await?;
    }
    Ok(spent.as_secs_f64() * 1e6 / (RECEIVES * RECEIVE_BATCH) as f64)
}

async fn send_rate(queue: &SqliteQueue, settings: &Settings) -> anyhow::Result<f64> {
    let span = settings.span();
    let deadline = Instant::now() + span;
    let message = [Outgoing::new(BODY)];
    let senders = (0..settings.concurrency).map(|_| async {
        let mut sent = 0;
        while Instant::now() < deadline {
            for result in queue.send(&message).await {
                result?;
            }
            sent += 1;
        }
        Ok::<usize, pipeline::QueueError>(sent)
    });
    let sent: usize = futures::future::try_join_all(senders).await?.iter().sum();
    // The next measurement needs the depth from before.
    let mut left = sent;
    while left > 0 {
        left -= receive_and_acknowledge(queue, left.min(FILL_BATCH), Duration::ZERO).await?;
    }
    Ok(sent as f64 / span.as_secs_f64())
}
