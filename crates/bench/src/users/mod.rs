//! Rows per second from the queue into the table through one `users-consumer`, beside database and broker alone with the
//! same rows and the same messages.

mod embedded;
mod refused_row;
mod servers;

use std::path::PathBuf;

use baton::users::engine::UsersEngine;
use baton::users::user::{User, UserId};
use clap::{Args, ValueEnum};
use futures::{StreamExt, TryStreamExt};
use pipeline::Outgoing;

use crate::process::{ServiceProcess, Vars, config};
use crate::report::{Report, Spread, median};
use crate::scratch::{ScratchDirectory, unless_interrupted};
use crate::servers::users::UsersServers;
use crate::throughput;

/// Target for the peak memory of `users-consumer`, in MiB: 100 MB.
const MEMORY_MAX_MIB: f64 = 95.0;
/// Rows in a batch: messages in a send, a receive or a commit.
const BATCH: usize = 1000;
/// Concurrent sends while a queue is filled.
const SENDS_MAX: usize = 4;

/// The arguments of `users`.
#[derive(Args)]
pub struct UsersArgs {
    /// Store and queue that the services use
    #[arg(long, value_enum, default_value_t = UsersEngineName::PostgresRabbitmq)]
    engine: UsersEngineName,
    /// Messages queued before the consumer starts; 1000000 shows whether its memory grows with the backlog
    #[arg(long, value_name = "N", default_value_t = 200_000)]
    messages: usize,
    /// Number of rounds; figures are medians over them
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// Measure instead what one row that the database refuses adds to the time of its batch of 1,000
    #[arg(long)]
    refused_row: bool,
    /// Directory for temporary data, on the disk to measure
    #[arg(long, value_name = "DIR", default_value = "./.baton-bench")]
    data_dir: PathBuf,
    /// Print JSON instead of a table
    #[arg(long)]
    pub json: bool,
}

/// Store and queue of the users lane.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum UsersEngineName {
    /// PostgreSQL and RabbitMQ
    PostgresRabbitmq,
    /// SQLite in the data directory
    Embedded,
}

/// Measures, and removes what it created, also after a failure or an interrupt.
pub async fn run(args: &UsersArgs) -> anyhow::Result<Report> {
    let interrupted = baton::cli::shutdown_on_signal()?;
    let directory = ScratchDirectory::create(&args.data_dir, "users")?;
    if args.engine == UsersEngineName::Embedded {
        return unless_interrupted(interrupted, embedded::run(args, &directory)).await;
    }
    let servers = UsersServers::prepare().await?;
    let measured = unless_interrupted(interrupted, servers::run(args, &directory, &servers)).await;
    servers.remove().await;
    measured
}

/// The consumer's figures of all rounds.
#[derive(Default)]
struct ConsumerRounds {
    rates: Vec<f64>,
    machine_percent: Vec<f64>,
    cpu_us_per_message: Vec<f64>,
    peak_mib: f64,
}

impl ConsumerRounds {
    /// Starts one consumer on a full queue and waits for the last row.
    async fn measure(&mut self, vars: &Vars, total: usize) -> anyhow::Result<()> {
        let consumers = [ServiceProcess::start(&["users-consumer"], vars).await?];
        let throughput = throughput::measure(&consumers, "baton_users_total{", "\"inserted\"", total as u64).await?;
        let [consumer] = consumers;
        self.rates.push(throughput.rate);
        self.machine_percent.push(throughput.cpu_percent);
        self.cpu_us_per_message.push(consumer.cpu_time().as_secs_f64() * 1e6 / total as f64);
        self.peak_mib = self.peak_mib.max(consumer.peak_mib());
        Ok(())
    }

    /// Adds the figures and returns the median rate.
    fn report(&self, report: &mut Report, messages: usize) -> f64 {
        let rate = Spread::of(self.rates.clone());
        let (cpu_us, machine) = (median(self.cpu_us_per_message.clone()), median(self.machine_percent.clone()));
        let note = format!("{messages} messages, one users-consumer; {}", rate.range);
        report.figure("queued to committed", rate.median, "rows/s", note);
        report.figure("  CPU time of users-consumer per message", cpu_us, "µs", "its start included");
        report.figure("  CPU use of the machine", machine, "%", "100 is all processors");
        report.figure("  peak memory of users-consumer", self.peak_mib, "MiB", "");
        report.at_most("peak memory of users-consumer", self.peak_mib, MEMORY_MAX_MIB, "MiB");
        rate.median
    }
}

/// Opens the engine of a service with these variables.
async fn open(vars: &Vars) -> anyhow::Result<UsersEngine> {
    UsersEngine::open(&config(vars)?).await
}

/// Queues the users as the API does.
async fn fill(vars: &Vars, users: &[User]) -> anyhow::Result<()> {
    let queue = open(vars).await?.queue;
    let sends = futures::stream::iter(users.chunks(BATCH)).map(|batch| {
        let queue = &queue;
        async move {
            let messages: Vec<_> = batch.iter().map(|user| Outgoing::new(user.to_message())).collect();
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

/// `count` distinct users.
fn new_users(count: usize) -> Vec<User> {
    let user = |number| User {
        id: UserId::generate(),
        name: format!("User Number {number}"),
        email: format!("user-{number}@example.com"),
    };
    (0..count).map(user).collect()
}
