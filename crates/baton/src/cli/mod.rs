//! The command line: one file per command, wiring only. The environment is read here and nowhere below.

mod config;
mod dev;
mod dlq;
mod lanes;
mod migrate;
mod output;
mod service;
mod tx;
mod webhook_listener;
mod webhooks;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tokio_util::sync::CancellationToken;

use self::output::{OutputError, complain};
use crate::config::{Config, ConfigError, Service, render};

/// Durable front end for OpenZeppelin Relayers: stores a transaction before answering, then submits it at most once.
/// Also enrols users into a database in batches
#[derive(Parser)]
#[command(name = "baton", version, max_term_width = 100)]
#[command(after_help = "Configuration comes from the environment: `baton serve --help` lists the variables, as does\n\
    docs/operations/configuration.md. To try Baton with nothing installed: baton dev")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run everything in one process with three development relayers; no chain unless you name one
    Dev(dev::DevArgs),
    /// Run both lanes, API and consumer, in one process, with your relayers (OZ_RELAYER_URLS)
    #[command(after_long_help = render::help(Service::Serve))]
    Serve,
    /// Run the relay API only
    #[command(after_long_help = render::help(Service::RelayApi))]
    RelayApi,
    /// Run the relay consumer only
    #[command(after_long_help = render::help(Service::QueueConsumer))]
    QueueConsumer,
    /// Run the users API only
    #[command(after_long_help = render::help(Service::UsersApi))]
    UsersApi,
    /// Run the users consumer only
    #[command(after_long_help = render::help(Service::UsersConsumer))]
    UsersConsumer,
    /// Deliver client notifications only
    #[command(after_long_help = render::help(Service::Notifier))]
    Notifier,
    /// Bring the database schemas up to date
    Migrate,
    /// List, show, replay and drop dead letters
    Dlq {
        /// The lane whose dead letters to work on
        #[arg(long, value_enum, default_value_t = dlq::LaneName::Relay, global = true)]
        lane: dlq::LaneName,
        #[command(subcommand)]
        command: dlq::DlqCommand,
    },
    /// Run the simulated relayers only, for tests that restart them
    #[command(hide = true)]
    DevRelayers(dev::RelayerArgs),
    /// Show and watch transactions, and list and resolve unknown outcomes
    #[command(subcommand)]
    Tx(tx::TxCommand),
    /// List, repair and disable clients' webhook endpoints, or receive webhooks on this machine
    #[command(subcommand)]
    Webhooks(webhooks::WebhooksCommand),
    /// Write the files that list the environment variables
    #[command(subcommand, hide = true)]
    Config(config::ConfigCommand),
}

/// Exit code of a command whose reader went away: that of a process that SIGPIPE ended.
const READER_GONE: u8 = 141;

/// Runs the process. Exit codes: 0 success, 1 failure, 2 wrong arguments or configuration, 124 `tx watch` ended before the
/// transaction did, 141 the reader of the output went away.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    if rustls::crypto::ring::default_provider().install_default().is_err() {
        complain(format_args!("baton: another TLS provider is already installed"));
        return ExitCode::FAILURE;
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            complain(format_args!("baton: the runtime cannot start: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let result = runtime.block_on(run(cli.command));
    let error = match result {
        Ok(code) => return code,
        Err(error) => error,
    };
    if let Some(ConfigError(problems)) = error.downcast_ref() {
        complain(format_args!("baton: the configuration has problems:"));
        for line in problems {
            complain(format_args!("  {line}"));
        }
        return ExitCode::from(2);
    }
    if error.downcast_ref::<OutputError>().is_some_and(OutputError::is_closed) {
        return ExitCode::from(READER_GONE);
    }
    complain(format_args!("baton: {error:#}"));
    ExitCode::FAILURE
}

async fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Dev(args) => dev::run(args).await,
        Command::Notifier => service::run(Config::from_env(Service::Notifier)?, Service::Notifier).await,
        Command::Serve => service::run(Config::from_env(Service::Serve)?, Service::Serve).await,
        Command::RelayApi => service::run(Config::from_env(Service::RelayApi)?, Service::RelayApi).await,
        Command::QueueConsumer => service::run(Config::from_env(Service::QueueConsumer)?, Service::QueueConsumer).await,
        Command::UsersApi => service::run(Config::from_env(Service::UsersApi)?, Service::UsersApi).await,
        Command::UsersConsumer => service::run(Config::from_env(Service::UsersConsumer)?, Service::UsersConsumer).await,
        Command::Migrate => migrate::run(&Config::from_env(Service::Command)?).await,
        Command::Dlq { lane, command } => dlq::run(&Config::from_env(Service::Command)?, lane, command).await,
        Command::DevRelayers(args) => dev::run_relayers(args).await,
        Command::Tx(command) => tx::run(&Config::from_env(Service::Command)?, command).await,
        Command::Webhooks(command) => webhooks::run(command).await,
        Command::Config(command) => config::run(command),
    }
}

/// A token that the first Ctrl-C or SIGTERM cancels. A second signal ends the process immediately; its work is then
/// recovered as after a crash.
pub fn shutdown_on_signal() -> anyhow::Result<CancellationToken> {
    use tokio::signal::unix::{SignalKind, signal};
    let token = CancellationToken::new();
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let cancel = token.clone();
    tokio::spawn(async move {
        tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
        tracing::info!(
            action = "stopping",
            "stopping: finishing work in progress (send the signal again to stop immediately)"
        );
        cancel.cancel();
        tokio::select! { _ = interrupt.recv() => {}, _ = terminate.recv() => {} }
        std::process::exit(130);
    });
    Ok(token)
}
