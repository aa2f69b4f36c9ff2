//! The users lane on the embedded engine, beside its store alone and its queue alone.

use std::time::{Duration, Instant};

use baton::users::engine::UsersEngine;
use pipeline::Queue;

use super::{BATCH, ConsumerRounds, UsersArgs, fill, new_users, open, refused_row};
use crate::process::{NO_RELAYERS, service_vars};
use crate::queue::receive_and_acknowledge;
use crate::report::{Report, Spread, sequential_rate};
use crate::scratch::{Round, ScratchDirectory};

pub async fn run(args: &UsersArgs, directory: &ScratchDirectory) -> anyhow::Result<Report> {
    let vars_in = |directory: &ScratchDirectory| service_vars(directory.path(), NO_RELAYERS);
    if args.refused_row {
        return refused_row::run(&*open(&vars_in(directory)).await?.store, args.rounds).await;
    }
    let users = new_users(args.messages.max(1));
    let (mut inserted, mut drained) = (Vec::new(), Vec::new());
    let mut consumer = ConsumerRounds::default();
    for round in Round::all(args.rounds) {
        let product_directory = ScratchDirectory::create(directory.path(), &format!("round-{}", round.number))?;
        let parts_directory = ScratchDirectory::create(product_directory.path(), "parts")?;
        round.progress("store alone");
        let UsersEngine { store, queue, .. } = open(&vars_in(&parts_directory)).await?;
        let started = Instant::now();
        for batch in users.chunks(BATCH) {
            store.insert(batch).await?;
        }
        inserted.push(users.len() as f64 / started.elapsed().as_secs_f64());
        round.progress("queue alone");
        fill(&vars_in(&parts_directory), &users).await?;
        drained.push(drain_rate(&*queue, users.len()).await?);
        round.progress("filling the queue");
        fill(&vars_in(&product_directory), &users).await?;
        round.progress("one users-consumer");
        consumer.measure(&vars_in(&product_directory), users.len()).await?;
    }
    let (inserted, drained) = (Spread::of(inserted), Spread::of(drained));
    let sequential = sequential_rate(&[inserted.median, drained.median]);
    let mut report = Report::default();
    report.figure("store alone", inserted.median, "rows/s", format!("{BATCH} rows in a commit; {}", inserted.range));
    report.figure("queue alone", drained.median, "msg/s", format!("{BATCH} messages in a receive; {}", drained.range));
    report.figure("  store and queue in sequence", sequential, "/s", "they share one file and one writer");
    let rate = consumer.report(&mut report, args.messages);
    report.figure("  share of the two in sequence", 100.0 * rate / sequential, "%", "");
    Ok(report)
}

/// Messages received and acknowledged per second.
async fn drain_rate(queue: &dyn Queue, count: usize) -> anyhow::Result<f64> {
    let (started, mut drained) = (Instant::now(), 0);
    while drained < count {
        drained += receive_and_acknowledge(queue, BATCH, Duration::from_secs(1)).await?;
    }
    Ok(drained as f64 / started.elapsed().as_secs_f64())
}
