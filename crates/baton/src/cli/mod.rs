//! The command line: one file per command, wiring only.

mod dev;
mod dlq;
mod dlq_users;
mod migrate;
mod service;
mod tx;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tokio_util::sync::CancellationToken;

use crate::config::{Config, Service};

/// Takes work over HTTP, answers at once, and gets it done once.
#[derive(Parser)]
#[command(name = "baton", version, about, max_term_width = 100)]
#[command(
    after_help = "Configuration comes from the environment: see docs/operations/configuration.md, or .env.example.\n\
    To try it with nothing installed: baton dev"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Everything in one process with three development relayers; touches no chain but the one you name
    Dev(dev::DevArgs),
    /// Both lanes, API and consumer, in one process, with your relayers (OZ_RELAYER_URLS)
    Serve,
    /// The relay API alone
    RelayApi,
    /// The relay consumer alone
    QueueConsumer,
    /// The users API alone
    UsersApi,
    /// The users consumer alone
    UsersConsumer,
    /// Bring the database schema up to date
    Migrate,
    /// Dead letters: read them, start them over, drop them
    Dlq {
        /// Whose
        #[arg(long, value_enum, default_value_t = dlq::Lane::Relay, global = true)]
        lane: dlq::Lane,
        #[command(subcommand)]
        command: dlq::DlqCommand,
    },
    /// The development relayers alone, for tests that restart them
    #[command(hide = true)]
    DevRelayers(dev::RelayerArgs),
    /// Transactions: look at one, watch it, settle one whose outcome is unknown
    #[command(subcommand)]
    Tx(tx::TxCommand),
}

/// Runs the process; the exit code is 0, 1 for a failure, 2 for a wrong call or configuration.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    if rustls::crypto::ring::default_provider().install_default().is_err() {
        eprintln!("baton: another TLS provider is already installed");
        return ExitCode::FAILURE;
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("baton: the runtime cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(run(cli.command));
    match result {
        Ok(code) => code,
        Err(error) => match error.downcast_ref::<crate::config::ConfigError>() {
            Some(wrong) => {
                eprintln!("baton: the configuration is not usable:");
                for line in &wrong.0 {
                    eprintln!("  {line}");
                }
                ExitCode::from(2)
            }
            None => {
                eprintln!("baton: {error:#}");
                ExitCode::FAILURE
            }
        },
    }
}

async fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Dev(args) => dev::run(args).await,
        Command::Serve => service::run(Config::from_env(Service::Serve)?, Service::Serve).await,
        Command::RelayApi => service::run(Config::from_env(Service::RelayApi)?, Service::RelayApi).await,
        Command::QueueConsumer => service::run(Config::from_env(Service::QueueConsumer)?, Service::QueueConsumer).await,
        Command::UsersApi => service::run(Config::from_env(Service::UsersApi)?, Service::UsersApi).await,
        Command::UsersConsumer => service::run(Config::from_env(Service::UsersConsumer)?, Service::UsersConsumer).await,
        Command::Migrate => migrate::run(&Config::from_env(Service::Command)?).await,
        Command::Dlq { lane, command } => {
            let config = Config::from_env(Service::Command)?;
            match lane {
                dlq::Lane::Relay => dlq::run(&config, command).await,
                dlq::Lane::Users => dlq_users::run(&config, command).await,
            }
        }
        Command::DevRelayers(args) => dev::run_relayers(args).await,
        Command::Tx(command) => tx::run(&Config::from_env(Service::Command)?, command).await,
    }
}

/// A token that is cancelled by the first Ctrl-C or SIGTERM. A second one ends the process at once: what it was doing
/// is taken over as after any crash.
pub fn shutdown_on_signal() -> anyhow::Result<CancellationToken> {
    use tokio::signal::unix::{SignalKind, signal};
    let token = CancellationToken::new();
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let cancel = token.clone();
    tokio::spawn(async move {
        tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
        tracing::info!(action = "stopping", "stopping: finishing what is under way (again to stop at once)");
        cancel.cancel();
        tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
        std::process::exit(130);
    });
    Ok(token)
}
