//! The users lane on PostgreSQL and RabbitMQ, beside raw COPY, raw inserts and raw consuming.

use std::sync::Arc;

use baton::users::user::User;
use sqlx::{Connection, PgConnection};

use super::{ConsumerRounds, UsersArgs, fill, new_users, open, refused_row};
use crate::process::{NO_RELAYERS, service_vars};
use crate::raw::postgres::{RawWrites, WriteMethod};
use crate::raw::rabbitmq::{CONSUME_METHOD, CONSUMERS, consume_rate};
use crate::report::{Report, Spread, sequential_rate};
use crate::scratch::{Round, ScratchDirectory};
use crate::servers::users::UsersServers;

/// Target: share of the slowest raw part, in percent.
const SLOWEST_PART_SHARE_MIN: f64 = 70.0;

pub async fn run(args: &UsersArgs, directory: &ScratchDirectory, servers: &UsersServers) -> anyhow::Result<Report> {
    let vars = |queues: &str| [service_vars(directory.path(), NO_RELAYERS), servers.vars(queues)].concat();
    if args.refused_row {
        return refused_row::run(&*open(&vars(&servers.new_queues())).await?.store, args.rounds).await;
    }
    let users: Arc<[User]> = new_users(args.messages.max(1)).into();
    // Opening the engine creates the table that the raw tables copy.
    open(&vars(&servers.new_queues())).await?.queue.close().await;
    let mut copies = RawWrites::new(&servers.database_url, WriteMethod::Copy);
    let mut inserts = RawWrites::new(&servers.database_url, WriteMethod::Insert);
    let (mut copied, mut inserted, mut consumed) = (Vec::new(), Vec::new(), Vec::new());
    let mut consumer = ConsumerRounds::default();
    for round in Round::all(args.rounds) {
        round.progress("raw COPY");
        copied.push(copies.rate(&users).await?);
        round.progress("raw multi-row inserts");
        inserted.push(inserts.rate(&users).await?);
        let mut best = 0.0_f64;
        for connections in CONSUMERS {
            round.progress("filling a queue for the raw consume + acknowledge");
            let queues = servers.new_queues();
            // As many messages as the product gets: the broker pauses longer the longer its queue is.
            fill(&vars(&queues), &users).await?;
            let queue = format!("{queues}_queue");
            best = best.max(consume_rate(&servers.rabbitmq_url, &queue, users.len() as u64, connections).await?);
        }
        consumed.push(best);
        round.progress("filling the queue");
        let vars = vars(&servers.new_queues());
        fill(&vars, &users).await?;
        round.progress("one users-consumer");
        let mut table = PgConnection::connect(&servers.database_url).await?;
        sqlx::raw_sql("TRUNCATE users, raw_users").execute(&mut table).await?;
        consumer.measure(&vars, users.len()).await?;
        let rows: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM users").fetch_one(&mut table).await?;
        anyhow::ensure!(usize::try_from(rows)? == users.len(), "{rows} rows of {} messages", users.len());
    }
    let (copied, inserted, consumed) = (Spread::of(copied), Spread::of(inserted), Spread::of(consumed));
    let slowest = copied.median.min(inserted.median).min(consumed.median);
    let sequential = sequential_rate(&[inserted.median, consumed.median]);
    let mut report = Report::default();
    let note = format!("{}; {}", copies.fastest(), copied.range);
    report.figure("raw binary COPY", copied.median, "rows/s", note);
    let note = format!("{}; {}", inserts.fastest(), inserted.range);
    report.figure("raw multi-row insert", inserted.median, "rows/s", note);
    let note = format!("{CONSUME_METHOD}; {}", consumed.range);
    report.figure("raw consume + acknowledge", consumed.median, "msg/s", note);
    report.figure("  insert and consume in sequence", sequential, "/s", "if they share the same processors");
    let rate = consumer.report(&mut report, args.messages);
    report.figure("  share of the slowest raw part", 100.0 * rate / slowest, "%", "");
    report.figure("  share of insert and consume in sequence", 100.0 * rate / sequential, "%", "");
    let name = "queued to committed, share of the slowest raw part";
    report.at_least(name, 100.0 * rate / slowest, SLOWEST_PART_SHARE_MIN, "%");
    Ok(report)
}
