//! The users lane: rows a second from the queue into the table through one `users-consumer`, beside what database and
//! broker do by themselves with the same rows and the same messages.

mod bad;
mod place;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use futures::{StreamExt, TryStreamExt};
use pipeline::{Outgoing, Queue};
use sqlx::{Connection, PgConnection};

use super::process::{Directory, Service, free_port, vars};
use super::raw::postgres::{How, RawWrites};
use super::raw::rabbitmq::consume_rate;
use super::table::{Report, Spread, median};
use super::watched::watch;
use super::{progress, unless_interrupted};
use baton::config::{Config, Service as Kind};
use baton::users::engine::Engine;
use baton::users::user::{User, UserId};
use place::Place;

/// The share of the slowest raw part that the consumer must reach, in percent.
const BAR: f64 = 70.0;
/// What the consumer may take up, in MiB: 100 MB.
const MEMORY_MAX: f64 = 95.0;
/// Messages in one send, and sends under way while the queue is filled.
const SEND_MESSAGES: usize = 1000;
const SENDS_MAX: usize = 4;

/// What to measure on, and how much.
#[derive(Args, Clone)]
pub struct UsersBench {
    /// What the services run on
    #[arg(long, value_enum, default_value_t = UsersEngine::PostgresRabbitmq)]
    engine: UsersEngine,
    /// Messages queued beforehand; 1000000 shows whether the consumer's memory depends on it
    #[arg(long, value_name = "N", default_value_t = 200_000)]
    messages: usize,
    /// Rounds; the median counts
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// Instead: what one row that the database refuses costs its batch of 1,000
    #[arg(long)]
    bad: bool,
    /// Where to keep the data meanwhile; on the disk that is to be measured
    #[arg(long, value_name = "DIR", default_value = "./.baton-bench")]
    data_dir: PathBuf,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

/// What the users lane runs on.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum UsersEngine {
    /// PostgreSQL, RabbitMQ
    PostgresRabbitmq,
    /// SQLite, in the data directory
    Embedded,
}

/// Measures, and clears away, whether it worked, failed or was interrupted.
pub async fn run(bench: &UsersBench) -> anyhow::Result<Report> {
    let interrupted = baton::cli::shutdown_on_signal()?;
    let directory = Directory::create(&bench.data_dir, "users")?;
    if bench.engine == UsersEngine::Embedded {
        return unless_interrupted(interrupted, embedded(bench, &directory)).await;
    }
    let place = Place::prepare().await?;
    let measured = unless_interrupted(interrupted, on_servers(bench, &directory, &place)).await;
    place.remove().await;
    measured
}

async fn on_servers(bench: &UsersBench, directory: &Directory, place: &Place) -> anyhow::Result<Report> {
    let vars = |queues: &str| [vars(directory.path(), "http://127.0.0.1:1"), place.vars(queues)].concat();
    if bench.bad {
        return bad::run(&*open(&vars(&place.new_queues())).await?.store, bench.rounds).await;
    }
    let all: Arc<[User]> = users(bench.messages.max(1)).into();
    // Whoever opens it first brings the schema.
    fill(&vars(&place.new_queues()), &[]).await?;
    let mut copies = RawWrites::new(&place.database_url, How::Copy);
    let mut inserts = RawWrites::new(&place.database_url, How::Insert);
    let (mut copied, mut inserted, mut consumed) = (Vec::new(), Vec::new(), Vec::new());
    let mut done = Runs::default();
    for round in 1..=bench.rounds.max(1) {
        let say = |what: &str| progress(format_args!("round {round} of {}: {what}", bench.rounds));
        say("raw COPY");
        copied.push(copies.rate(&all).await?);
        say("raw multi-row inserts");
        inserted.push(inserts.rate(&all).await?);
        let mut best = 0.0_f64;
        for connections in [1, 2] {
            say("filling a queue for the raw consume + acknowledge");
            let queues = place.new_queues();
            // All of them: the longer its queue, the longer the broker pauses now and then.
            fill(&vars(&queues), &all).await?;
            let queue = format!("{queues}_queue");
            best = best.max(consume_rate(&place.rabbitmq_url, &queue, all.len() as u64, connections).await?);
        }
        consumed.push(best);
        say("filling the queue");
        let vars = vars(&place.new_queues());
        fill(&vars, &all).await?;
        say("one users-consumer");
        let mut table = PgConnection::connect(&place.database_url).await?;
        sqlx::raw_sql("TRUNCATE users, raw_users").execute(&mut table).await?;
        done.measure(&vars, all.len()).await?;
        let rows: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM users").fetch_one(&mut table).await?;
        anyhow::ensure!(usize::try_from(rows)? == all.len(), "{rows} rows of {} messages", all.len());
    }
    let (copied, inserted, consumed) = (Spread::of(copied), Spread::of(inserted), Spread::of(consumed));
    let slowest = copied.median.min(inserted.median).min(consumed.median);
    let mut report = Report::default();
    report.figure("raw binary COPY", copied.median, "rows/s", format!("{}; {}", copies.how(), copied.range));
    report.figure("raw multi-row insert", inserted.median, "rows/s", format!("{}; {}", inserts.how(), inserted.range));
    let how = "prefetch 1000, one acknowledgement for 250, the best of 1 and 2 connections";
    report.figure("raw consume + acknowledge", consumed.median, "msg/s", format!("{how}; {}", consumed.range));
    let in_turn = 1.0 / (1.0 / inserted.median + 1.0 / consumed.median);
    report.figure("  insert and consume in turn", in_turn, "/s", "if all of it is work for the same processors");
    let rate = done.report(&mut report, bench.messages);
    report.figure("  of the slowest raw part", 100.0 * rate / slowest, "%", "");
    report.figure("  of insert and consume in turn", 100.0 * rate / in_turn, "%", "");
    report.at_least("queued to committed, of the slowest raw part", 100.0 * rate / slowest, BAR, "%");
    report.at_most("peak memory of users-consumer", done.peak_mib, MEMORY_MAX, "MiB");
    Ok(report)
}

async fn embedded(bench: &UsersBench, directory: &Directory) -> anyhow::Result<Report> {
    let vars_in = |directory: &Directory| vars(directory.path(), "http://127.0.0.1:1");
    if bench.bad {
        return bad::run(&*open(&vars_in(directory)).await?.store, bench.rounds).await;
    }
    let all = users(bench.messages.max(1));
    let (mut inserted, mut drained) = (Vec::new(), Vec::new());
    let mut done = Runs::default();
    for round in 1..=bench.rounds.max(1) {
        let say = |what: &str| progress(format_args!("round {round} of {}: {what}", bench.rounds));
        let fresh = Directory::create(directory.path(), &format!("round-{round}"))?;
        let apart = Directory::create(fresh.path(), "apart")?;
        say("the store by itself");
        let Engine { store, queue, .. } = open(&vars_in(&apart)).await?;
        let started = Instant::now();
        for batch in all.chunks(SEND_MESSAGES) {
            store.insert(batch).await?;
        }
        inserted.push(all.len() as f64 / started.elapsed().as_secs_f64());
        say("the queue by itself");
        fill(&vars_in(&apart), &all).await?;
        drained.push(drain(&*queue, all.len()).await?);
        say("filling the queue");
        fill(&vars_in(&fresh), &all).await?;
        say("one users-consumer");
        done.measure(&vars_in(&fresh), all.len()).await?;
    }
    let (inserted, drained) = (Spread::of(inserted), Spread::of(drained));
    let in_turn = 1.0 / (1.0 / inserted.median + 1.0 / drained.median);
    let mut report = Report::default();
    report.figure("the store by itself", inserted.median, "rows/s", format!("1000 in a commit; {}", inserted.range));
    report.figure("the queue by itself", drained.median, "msg/s", format!("1000 at a time; {}", drained.range));
    report.figure("  these two in turn", in_turn, "/s", "they share one file and one writer");
    let rate = done.report(&mut report, bench.messages);
    report.figure("  of the two in turn", 100.0 * rate / in_turn, "%", "");
    report.at_most("peak memory of users-consumer", done.peak_mib, MEMORY_MAX, "MiB");
    Ok(report)
}

/// What the consumer did in each round.
#[derive(Default)]
struct Runs {
    rates: Vec<f64>,
    busy: Vec<f64>,
    micros: Vec<f64>,
    peak_mib: f64,
}

impl Runs {
    /// One consumer, from a full queue to the last row.
    async fn measure(&mut self, vars: &[(&str, String)], total: usize) -> anyhow::Result<()> {
        let consumer = [Service::start(&["users-consumer"], free_port()?, vars).await?];
        let middle = watch(&consumer, "baton_users_total{", "\"inserted\"", total as u64).await?;
        let [consumer] = consumer;
        self.rates.push(middle.rate);
        self.busy.push(middle.busy);
        self.micros.push(consumer.processor_time().as_secs_f64() * 1e6 / total as f64);
        self.peak_mib = self.peak_mib.max(consumer.peak_mib());
        Ok(())
    }

    fn report(&self, report: &mut Report, messages: usize) -> f64 {
        let rate = Spread::of(self.rates.clone());
        let note = format!("{messages} messages, one users-consumer; {}", rate.range);
        report.figure("queued to committed", rate.median, "rows/s", note);
        report.figure(
            "  users-consumer's processor time each",
            median(self.micros.clone()),
            "µs",
            "its start included",
        );
        report.figure("  machine in use meanwhile", median(self.busy.clone()), "%", "of all its processors");
        report.figure("  peak memory of users-consumer", self.peak_mib, "MiB", "");
        rate.median
    }
}

/// Opens the lane's engine as a service with these variables would.
async fn open(vars: &[(&'static str, String)]) -> anyhow::Result<Engine> {
    let lookup = |name: &str| vars.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
    Engine::open(&Config::from_vars(Kind::Command, lookup)?).await
}

/// Queues these users as the API does.
async fn fill(vars: &[(&'static str, String)], users: &[User]) -> anyhow::Result<()> {
    let queue = open(vars).await?.queue;
    let sends = futures::stream::iter(users.chunks(SEND_MESSAGES)).map(|part| {
        let queue = &queue;
        async move {
            let messages: Vec<_> = part.iter().map(|user| Outgoing::new(user.to_message())).collect();
            for sent in queue.send(&messages).await {
                sent?;
            }
            anyhow::Ok(())
        }
    });
    sends.buffer_unordered(SENDS_MAX).try_collect::<()>().await?;
    queue.close().await;
    Ok(())
}

/// Messages taken and acknowledged a second.
async fn drain(queue: &dyn Queue, count: usize) -> anyhow::Result<f64> {
    let (started, mut taken) = (Instant::now(), 0);
    while taken < count {
        let messages = queue.receive(SEND_MESSAGES, Duration::from_secs(1)).await?;
        anyhow::ensure!(!messages.is_empty(), "the queue ran dry");
        taken += messages.len();
        let receipts: Vec<_> = messages.into_iter().map(|message| message.receipt).collect();
        for acked in queue.ack(&receipts).await {
            acked?;
        }
    }
    Ok(taken as f64 / started.elapsed().as_secs_f64())
}

/// So many users, each another one.
fn users(count: usize) -> Vec<User> {
    let user = |number| User {
        id: UserId::generate(),
        name: format!("User Number {number}"),
        email: format!("user-{number}@example.com"),
    };
    (0..count).map(user).collect()
}
