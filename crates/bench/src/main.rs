//! `bench accept|relay|queue|users`: how fast it is, beside the raw cost of the same parts in the same run on the same machine.
//! Figures from two machines, or from two moments of one, do not compare; the ratios do.

mod accept;
mod beyond;
mod load;
mod process;
mod product;
mod queue;
mod raw;
mod relay;
mod servers;
mod simulated_relayers;
mod table;
mod users;
mod watched;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use baton::config::{Config, Service};
use clap::{Args, Parser, Subcommand, ValueEnum};
use tokio_util::sync::CancellationToken;

use servers::Servers;
use table::Report;
use users::UsersBench;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Measures Baton beside the raw cost of the same parts, in the same run on the same machine.
#[derive(Parser)]
#[command(name = "bench", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: BenchCommand,
}

/// What to measure.
#[derive(Subcommand)]
enum BenchCommand {
    /// Accepting: durable 202s a second, beside the same server doing nothing and what store and queue do by themselves
    #[command(after_help = ENGINE_HELP)]
    Accept(OnEngine),
    /// Relaying: submissions a second, beside raw POSTs to the same relayers and the queue by itself; and the idle delay
    #[command(after_help = ENGINE_HELP)]
    Relay(OnEngine),
    /// The embedded queue: the cost of a message at 1,000 and at 1,000,000 queued
    Queue(Settings),
    /// Enrolling: rows a second of one users-consumer with a full queue, beside what database and broker do by themselves
    #[command(after_help = USERS_HELP)]
    Users(UsersBench),
    /// The server that answers 202 and does nothing
    #[command(hide = true)]
    EmptyServer,
    /// The simulated relayers
    #[command(hide = true)]
    Relayers(simulated_relayers::RelayerArgs),
}

const USERS_HELP: &str = "PostgreSQL and RabbitMQ are found by USERS_DATABASE_URL (its server) and RABBITMQ_URL. A database, \
    exchanges and queues named baton_bench_… are made on them and removed afterwards. `scripts/services start` runs such \
    servers.";

const ENGINE_HELP: &str = "The engines beyond one machine are found by the usual variables: DATABASE_URL (its server), \
    SQS_ENDPOINT_URL with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or RABBITMQ_URL, and REDIS_URL if set. A database and \
    queues named baton_bench_… are made on them and removed afterwards. `scripts/services start` runs such servers.";

/// What to measure on, and how.
#[derive(Args, Clone)]
pub struct OnEngine {
    /// What the services run on
    #[arg(long, value_enum, default_value_t = EngineName::Embedded)]
    engine: EngineName,
    #[command(flatten)]
    settings: Settings,
}

/// What the services run on.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineName {
    /// SQLite, in the data directory
    Embedded,
    /// MySQL or MariaDB, SQS
    MysqlSqs,
    /// MySQL or MariaDB, RabbitMQ
    MysqlRabbitmq,
}

impl EngineName {
    /// As on the command line.
    fn name(self) -> &'static str {
        match self {
            Self::Embedded => "embedded",
            Self::MysqlSqs => "mysql-sqs",
            Self::MysqlRabbitmq => "mysql-rabbitmq",
        }
    }
}

/// How to measure.
#[derive(Args, Clone)]
pub struct Settings {
    /// Connections, or messages handled at once
    #[arg(long, value_name = "N", default_value_t = 256)]
    concurrency: usize,
    /// Seconds for each measurement
    #[arg(long, value_name = "S", default_value_t = 5)]
    seconds: u64,
    /// Rounds; the median counts
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// Transactions to relay
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    transactions: u64,
    /// Messages in the deep queue
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    depth: usize,
    /// Where to keep the data meanwhile; on the disk that is to be measured
    #[arg(long, value_name = "DIR", default_value = "./.baton-bench")]
    data_dir: PathBuf,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

impl Settings {
    fn span(&self) -> Duration {
        Duration::from_secs(self.seconds.max(1))
    }
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn run(command: BenchCommand) -> anyhow::Result<()> {
    let installed = rustls::crypto::ring::default_provider().install_default();
    anyhow::ensure!(installed.is_ok(), "another TLS provider is already installed");
    match command {
        BenchCommand::EmptyServer => accept::serve_nothing(Config::from_env(Service::RelayApi)?).await,
        BenchCommand::Relayers(args) => simulated_relayers::serve(args).await,
        measurement => measure(measurement).await,
    }
}

async fn measure(command: BenchCommand) -> anyhow::Result<()> {
    product::prepare()?;
    let (report, json) = match command {
        BenchCommand::Accept(OnEngine { engine: EngineName::Embedded, settings }) => {
            (accept::run(&settings).await?, settings.json)
        }
        BenchCommand::Relay(OnEngine { engine: EngineName::Embedded, settings }) => {
            (relay::run(&settings).await?, settings.json)
        }
        BenchCommand::Accept(OnEngine { engine, settings }) => {
            let measure = async |servers: &Servers| beyond::accept(&settings, servers).await;
            (on_servers(engine, measure).await?, settings.json)
        }
        BenchCommand::Relay(OnEngine { engine, settings }) => {
            let measure = async |servers: &Servers| beyond::relay(&settings, servers).await;
            (on_servers(engine, measure).await?, settings.json)
        }
        BenchCommand::Queue(settings) => (queue::run(&settings).await?, settings.json),
        BenchCommand::Users(bench) => (users::run(&bench).await?, bench.json),
        BenchCommand::EmptyServer | BenchCommand::Relayers(_) => return Ok(()),
    };
    report.print(json);
    Ok(())
}

/// Measures on the servers and clears away, whether it worked, failed or was interrupted.
async fn on_servers(
    engine: EngineName,
    measure: impl AsyncFnOnce(&Servers) -> anyhow::Result<Report>,
) -> anyhow::Result<Report> {
    let interrupted = baton::cli::shutdown_on_signal()?;
    let servers = Servers::prepare(engine).await?;
    let measured = unless_interrupted(interrupted, measure(&servers)).await;
    servers.remove().await;
    measured
}

/// What is dropped half-way ends its services.
async fn unless_interrupted(
    interrupted: CancellationToken,
    measure: impl Future<Output = anyhow::Result<Report>>,
) -> anyhow::Result<Report> {
    tokio::select! {
        measured = measure => measured,
        () = interrupted.cancelled() => Err(anyhow::anyhow!("interrupted")),
    }
}

/// Says on the error stream what is being done, so that the output stays clean.
fn progress(text: impl std::fmt::Display) {
    eprintln!("… {text}");
}
