//! The embedded queue by itself: what sending, taking and acknowledging cost, and whether it depends on the depth.

use std::time::{Duration, Instant};

use pipeline::queue::sqlite::SqliteQueue;
use pipeline::sqlite::Database;
use pipeline::{Outgoing, Queue, QueueOptions};

use super::process::{BODY, Directory};
use super::table::{Report, median};
use super::{Settings, progress};

const SHALLOW: usize = 1000;
const BATCH: usize = 10;
/// Receives and acknowledgements in one measurement.
const TAKES: usize = 300;

pub async fn run(settings: &Settings) -> anyhow::Result<Report> {
    let directory = Directory::create(&settings.data_dir, "queue")?;
    let shallow = open(&directory, "shallow").await?;
    let deep = open(&directory, "deep").await?;
    progress(format_args!("filling the shallow queue with {SHALLOW} messages"));
    fill(&shallow, SHALLOW).await?;
    progress(format_args!("filling the deep queue with {} messages", settings.depth));
    let (filled, started) = (settings.depth, Instant::now());
    fill(&deep, filled).await?;
    let fill_rate = filled as f64 / started.elapsed().as_secs_f64();

    let (mut at_shallow, mut at_deep, mut sends) = (Vec::new(), Vec::new(), Vec::new());
    for round in 1..=settings.rounds.max(3) {
        progress(format_args!("round {round}: sending and taking"));
        sends.push(send_rate(&shallow, settings).await?);
        // Turn and turn about, so that whatever else the machine does strikes both.
        at_shallow.push(take_cost(&shallow).await?);
        at_deep.push(take_cost(&deep).await?);
    }
    let (at_shallow, at_deep) = (median(at_shallow), median(at_deep));
    let mut report = Report::default();
    report.figure("send, one each", median(sends), "msg/s", format!("{} senders, durable", settings.concurrency));
    report.figure("send, 500 at a time", fill_rate, "msg/s", "filling the deep queue");
    report.figure(format!("take and acknowledge at {SHALLOW}"), at_shallow, "µs/msg", format!("{BATCH} at a time"));
    report.figure(format!("take and acknowledge at {filled}"), at_deep, "µs/msg", format!("{BATCH} at a time"));
    report.at_most("cost at the deep end, of the shallow", at_deep / at_shallow, 1.2, "×");
    Ok(report)
}

async fn open(directory: &Directory, name: &str) -> anyhow::Result<SqliteQueue> {
    let database = Database::open(&directory.path().join(format!("{name}.db")))?;
    Ok(SqliteQueue::open(&database, name, QueueOptions::default()).await?)
}

async fn fill(queue: &SqliteQueue, count: usize) -> anyhow::Result<()> {
    const AT_ONCE: usize = 500;
    let mut said = Instant::now();
    for start in (0..count).step_by(AT_ONCE) {
        let messages = vec![Outgoing::new(BODY); AT_ONCE.min(count - start)];
        for sent in queue.send(&messages).await {
            sent?;
        }
        if said.elapsed() > Duration::from_secs(2) {
            progress(format_args!("{start} of {count}"));
            said = Instant::now();
        }
    }
    Ok(())
}

/// Microseconds for one message, taken and acknowledged; as many are put back as were taken.
async fn take_cost(queue: &SqliteQueue) -> anyhow::Result<f64> {
    let mut spent = Duration::ZERO;
    for _ in 0..TAKES {
        let started = Instant::now();
        let messages = queue.receive(BATCH, Duration::ZERO).await?;
        anyhow::ensure!(messages.len() == BATCH, "the queue ran dry");
        let receipts: Vec<_> = messages.into_iter().map(|message| message.receipt).collect();
        for acked in queue.ack(&receipts).await {
            acked?;
        }
        spent += started.elapsed();
        fill(queue, BATCH).await?;
    }
    Ok(spent.as_secs_f64() * 1e6 / (TAKES * BATCH) as f64)
}

async fn send_rate(queue: &SqliteQueue, settings: &Settings) -> anyhow::Result<f64> {
    let span = settings.span();
    let deadline = Instant::now() + span;
    let message = [Outgoing::new(BODY)];
    let senders = (0..settings.concurrency).map(|_| async {
        let mut sent = 0_u64;
        while Instant::now() < deadline {
            for result in queue.send(&message).await {
                result?;
            }
            sent += 1;
        }
        Ok::<_, pipeline::QueueError>(sent)
    });
    let sent: u64 = futures::future::try_join_all(senders).await?.iter().sum();
    // Back to its depth, so that the next measurement finds it as it was.
    let mut left = sent;
    while left > 0 {
        let messages = queue.receive(usize::try_from(left.min(500)).unwrap_or(500), Duration::ZERO).await?;
        anyhow::ensure!(!messages.is_empty(), "the queue ran dry");
        left -= messages.len() as u64;
        let receipts: Vec<_> = messages.into_iter().map(|message| message.receipt).collect();
        queue.ack(&receipts).await;
    }
    Ok(sent as f64 / span.as_secs_f64())
}
