//! `bench accept|relay|queue|users`: measures the product beside the raw cost of the same parts, in one run on one machine.
//! Absolute figures of two machines, or of two hours on one machine, do not compare; the ratios do.
//!
//! One folder per measurement; [`raw`] measures databases and brokers without the product, [`servers`] prepares and
//! removes what a run needs on them, [`process`] starts the services, [`report`] prints the figures.

mod accept;
mod cpu;
mod empty_server;
mod load;
mod process;
mod product;
mod queue;
mod raw;
mod receiver;
mod relay;
mod report;
mod scratch;
mod servers;
mod simulated_relayers;
mod throughput;
mod transactions;
mod users;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use report::Report;
use servers::relay::RelayServers;
use users::UsersArgs;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Measures Baton beside the raw cost of the same parts, in one run on one machine.
#[derive(Parser)]
#[command(name = "bench", version, max_term_width = 100, after_help = PRODUCT_HELP)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    #[command(flatten)]
    Measure(Measurement),
    /// The empty server of `accept`: the product's HTTP layers without work
    #[command(hide = true)]
    EmptyServer,
    /// The receiver of client notifications
    #[command(hide = true)]
    Receiver(receiver::ReceiverArgs),
    /// The simulated relayers of `relay`
    #[command(hide = true)]
    Relayers(simulated_relayers::RelayerArgs),
}

#[derive(Subcommand)]
enum Measurement {
    /// Durable 202 responses per second, beside an empty server, the database alone and the queue alone
    #[command(after_help = RELAY_HELP)]
    Accept(RelayArgs),
    /// Submissions per second, beside raw POSTs to the same relayers and the queue alone; and the latency when idle
    #[command(after_help = RELAY_HELP)]
    Relay(RelayArgs),
    /// Embedded queue: the cost of a message at 1,000 and at 1,000,000 queued
    Queue(Settings),
    /// Rows per second of one users-consumer with a full queue, beside the database alone and the broker alone
    #[command(after_help = USERS_HELP)]
    Users(UsersArgs),
}

const PRODUCT_HELP: &str = "Measures the `baton` binary of the same target directory and profile, which `cargo run` \
    builds first. BATON_BIN names another binary.";

const RELAY_HELP: &str = "The servers of the mysql-* engines come from the product's variables: DATABASE_URL (only its \
    server is used), SQS_ENDPOINT_URL with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or RABBITMQ_URL; and REDIS_URL if \
    set. The services get RPC_URL, if set. The benchmark creates a database and queues named baton_bench_… on them and removes both afterwards. \
    `scripts/services start` runs such servers.";

const USERS_HELP: &str = "PostgreSQL and RabbitMQ come from USERS_DATABASE_URL (only its server is used) and \
    RABBITMQ_URL. The benchmark creates a database, exchanges and queues named baton_bench_… on them and removes all \
    afterwards. `scripts/services start` runs such servers.";

/// The arguments of `accept` and `relay`.
#[derive(Args)]
struct RelayArgs {
    /// Store and queue that the services use
    #[arg(long, value_enum, default_value_t = RelayEngineName::Embedded)]
    engine: RelayEngineName,
    #[command(flatten)]
    settings: Settings,
}

/// Store and queue of the relay lane.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq)]
enum RelayEngineName {
    /// SQLite in the data directory
    Embedded,
    /// MySQL or MariaDB, and SQS
    MysqlSqs,
    /// MySQL or MariaDB, and RabbitMQ
    MysqlRabbitmq,
}

/// Duration and size of the measurements.
#[derive(Args)]
struct Settings {
    /// Concurrent connections or senders
    #[arg(long, value_name = "N", default_value_t = 256)]
    concurrency: usize,
    /// Duration of each measurement, in seconds
    #[arg(long, value_name = "S", default_value_t = 5)]
    seconds: u64,
    /// Number of rounds; figures are medians over them
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: usize,
    /// Transactions to relay (`relay` only)
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    transactions: u64,
    /// Deliver client notifications of every event to a receiver on this machine (`accept` and `relay` only)
    #[arg(long)]
    notify: bool,
    /// Messages in the deep queue (`queue` only)
    #[arg(long, value_name = "N", default_value_t = 1_000_000)]
    depth: usize,
    /// Directory for temporary data, on the disk to measure
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
async fn run(command: Command) -> anyhow::Result<()> {
    let installed = rustls::crypto::ring::default_provider().install_default();
    anyhow::ensure!(installed.is_ok(), "another TLS provider is already installed");
    match command {
        Command::Measure(measurement) => measure(measurement).await,
        Command::EmptyServer => empty_server::serve().await,
        Command::Receiver(args) => receiver::serve(args).await,
        Command::Relayers(args) => simulated_relayers::serve(args).await,
    }
}

async fn measure(measurement: Measurement) -> anyhow::Result<()> {
    // The queue is measured in this process.
    if !matches!(measurement, Measurement::Queue(_)) {
        product::prepare()?;
    }
    let (report, json) = match measurement {
        Measurement::Accept(RelayArgs { engine: RelayEngineName::Embedded, settings }) => {
            (accept::embedded::run(&settings).await?, settings.json)
        }
        Measurement::Relay(RelayArgs { engine: RelayEngineName::Embedded, settings }) => {
            (relay::embedded::run(&settings).await?, settings.json)
        }
        Measurement::Accept(RelayArgs { engine, settings }) => {
            let measure = async |servers: &RelayServers| accept::servers::run(&settings, servers).await;
            (on_servers(engine, measure).await?, settings.json)
        }
        Measurement::Relay(RelayArgs { engine, settings }) => {
            let measure = async |servers: &RelayServers| relay::servers::run(&settings, servers).await;
            (on_servers(engine, measure).await?, settings.json)
        }
        Measurement::Queue(settings) => (queue::run(&settings).await?, settings.json),
        Measurement::Users(args) => (users::run(&args).await?, args.json),
    };
    report.print(json);
    Ok(())
}

/// Removes what the run created on the servers, also after a failure or an interrupt.
async fn on_servers(
    engine: RelayEngineName,
    measure: impl AsyncFnOnce(&RelayServers) -> anyhow::Result<Report>,
) -> anyhow::Result<Report> {
    let interrupted = baton::cli::shutdown_on_signal()?;
    let servers = RelayServers::prepare(engine).await?;
    let measured = scratch::unless_interrupted(interrupted, measure(&servers)).await;
    servers.remove().await;
    measured
}
