//! `bench accept|relay|queue`: how fast it is, beside the raw cost of the same parts in the same run on the same machine.
//! Figures from two machines, or from two moments of one, do not compare; the ratios do.

mod accept;
mod load;
mod process;
mod queue;
mod relay;
mod table;

pub use accept::serve_nothing;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand};

/// What to measure.
#[derive(Subcommand)]
pub enum BenchCommand {
    /// Accepting: durable 202s a second, beside the same server doing nothing and raw group commits
    Accept(Settings),
    /// Relaying: submissions a second on one consumer, beside raw POSTs to the same relayers; and the idle delay
    Relay(Settings),
    /// The embedded queue: the cost of a message at 1,000 and at 1,000,000 queued
    Queue(Settings),
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

/// Runs one of them.
pub async fn run(command: BenchCommand) -> anyhow::Result<ExitCode> {
    let (report, json) = match command {
        BenchCommand::Accept(settings) => (accept::run(&settings).await?, settings.json),
        BenchCommand::Relay(settings) => (relay::run(&settings).await?, settings.json),
        BenchCommand::Queue(settings) => (queue::run(&settings).await?, settings.json),
    };
    report.print(json);
    Ok(ExitCode::SUCCESS)
}

/// Says on the error stream what is being done, so that the output stays clean.
fn progress(text: impl std::fmt::Display) {
    eprintln!("… {text}");
}
