//! `dev`: everything in one process on the embedded engine, with three development relayers. They touch no chain, or sign
//! for the one behind `--rpc`.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use relayer_sim::dev::{ChainOptions, DevRelayer, DevRelayerOptions, Key};
use reqwest::Url;
use sha2::{Digest, Sha256};
use tracing::warn;

use super::lanes::Lanes;
use super::output::{self, OutputError, say};
use super::service::{Listeners, run_parts};
use crate::config::{Config, Service};
use crate::telemetry;

/// The arguments of `dev`.
#[derive(Args)]
pub struct DevArgs {
    /// Port of the API
    #[arg(long, default_value_t = 3000)]
    port: u16,
    /// Where to keep the data
    #[arg(long, value_name = "DIR", default_value = "./.baton")]
    data_dir: PathBuf,
    /// First of three consecutive ports for the development relayers
    // Fixed, because Baton identifies a relayer by its URL: claims of the last run must find it again.
    #[arg(long, value_name = "PORT", default_value_t = 3081, value_parser = first_port())]
    relayer_port: u16,
    /// Use the databases, queues and cache that the environment names (DATABASE_URL and others)
    #[arg(long)]
    external: bool,
    /// Also accept requests for this host name, not only for localhost
    // A web page can point a name of its own at 127.0.0.1 and call the API from the user's browser, with the known key.
    #[arg(long = "host", value_name = "NAME")]
    hosts: Vec<String>,
    #[command(flatten)]
    chain: ChainArgs,
}

/// A port with two more above it.
fn first_port() -> clap::builder::RangedI64ValueParser<u16> {
    clap::value_parser!(u16).range(1..=i64::from(u16::MAX - RELAYERS + 1))
}

/// The chain for which development relayers sign, if any.
#[derive(Args)]
pub struct ChainArgs {
    /// JSON-RPC URL of a chain; the development relayers then sign and send real transactions
    #[arg(long, value_name = "URL")]
    rpc: Option<Url>,
    /// Private keys of the three development relayers, separated by commas; default: well-known keys, accepted on local
    /// chains only
    // Also from the environment, because every user of the machine can read a command line.
    #[arg(long = "key", value_name = "KEYS", env = "BATON_DEV_KEYS", hide_env_values = true, value_delimiter = ',')]
    keys: Vec<String>,
}

impl ChainArgs {
    /// One for each relayer, in order; `None` without a chain.
    fn options(&self) -> anyhow::Result<Vec<Option<ChainOptions>>> {
        let Some(rpc) = &self.rpc else { return Ok(vec![None, None, None]) };
        let well_known = self.keys.is_empty();
        let keys = if well_known { WELL_KNOWN_KEYS.map(str::to_owned).to_vec() } else { self.keys.clone() };
        anyhow::ensure!(keys.len() == usize::from(RELAYERS), "--key needs {RELAYERS} keys, not {}", keys.len());
        let mut options: Vec<Option<ChainOptions>> = Vec::new();
        for (index, key) in keys.iter().enumerate() {
            // The key itself must not appear in a message.
            let key = Key::from_str(key.trim())
                .map_err(|_| anyhow::anyhow!("key {} of --key is not a private key (0x and 64 digits)", index + 1))?;
            let known = options.iter().flatten().any(|other| other.key.address() == key.address());
            anyhow::ensure!(
                !known,
                "key {} of --key is there twice: two relayers would take each other's nonces",
                index + 1
            );
            options.push(Some(ChainOptions { rpc: rpc.clone(), key, well_known }));
        }
        Ok(options)
    }
}

/// The last three of the ten accounts that every development chain funds; the first ones are left to the user.
const WELL_KNOWN_KEYS: [&str; 3] = [
    "0x4bbbf85ce3377467afe5d46f804f221813b2bb87f24d81f60f1fcdbf7cbf4356",
    "0xdbda1821b80551c9d65939329250298aa3472ba22feea921c0cf5d620ea67b97",
    "0x2a871d0798f97d79848a013d4936a73bf4cc922c825d33c1cf7073dff6d409c6",
];

/// The arguments of `dev-relayers`.
#[derive(Args)]
pub struct RelayerArgs {
    /// First of three consecutive ports
    #[arg(long, default_value_t = 3081, value_parser = first_port())]
    port: u16,
    /// Where to send webhooks
    #[arg(long, value_name = "URL")]
    webhook_url: String,
    /// Where to keep the data
    #[arg(long, value_name = "DIR", default_value = "./.baton")]
    data_dir: PathBuf,
    /// The key that callers must present
    #[arg(long, default_value = "bench-relayers-need-no-secret-at-all")]
    api_key: String,
    /// The key that webhooks are signed with
    #[arg(long, default_value = "bench-webhooks-need-no-secret-at-all")]
    webhook_key: String,
    /// Milliseconds between two states of a transaction, with a webhook each
    #[arg(long, default_value_t = 300)]
    step_ms: u64,
    #[command(flatten)]
    chain: ChainArgs,
}

/// Runs development relayers and nothing else.
pub async fn run_relayers(args: RelayerArgs) -> anyhow::Result<ExitCode> {
    let shutdown = super::shutdown_on_signal()?;
    if args.chain.rpc.is_some() {
        telemetry::start_logs(&Config::from_env(Service::Command)?.log)?;
    }
    let keys = Keys { api: &args.api_key, webhook: &args.webhook_key };
    let plan = RelayerPlan {
        first_port: args.port,
        data_dir: &args.data_dir,
        webhook_url: &args.webhook_url,
        keys,
        step: Duration::from_millis(args.step_ms),
        chain: args.chain.options()?,
        hosts: LOCAL_HOSTS.map(str::to_owned).to_vec(),
    };
    let relayers = start_relayers(plan).await?;
    shutdown.cancelled().await;
    for relayer in relayers {
        relayer.stop().await;
    }
    Ok(ExitCode::SUCCESS)
}

/// The set-up of the three development relayers.
struct RelayerPlan<'a> {
    first_port: u16,
    data_dir: &'a Path,
    webhook_url: &'a str,
    keys: Keys<'a>,
    step: Duration,
    /// One for each relayer.
    chain: Vec<Option<ChainOptions>>,
    /// Names of hosts that requests may be for.
    hosts: Vec<String>,
}

/// Secrets that development relayers share with their callers.
struct Keys<'a> {
    api: &'a str,
    webhook: &'a str,
}

/// Keys for one machine and no money. Services other than `dev` have no default keys.
const API_KEY: &str = "dev-key";
const RELAYER_KEY: &str = "development-relayers-need-no-secret";
const WEBHOOK_KEY: &str = "development-webhooks-need-no-secret";
const RELAYERS: u16 = 3;
/// Names of this machine, which no web page can point elsewhere.
const LOCAL_HOSTS: [&str; 3] = ["localhost", "127.0.0.1", "[::1]"];
/// Time between two statuses of a transaction at a development relayer.
const STEP: Duration = Duration::from_millis(300);

/// The variables that choose an engine other than the embedded one.
const ENGINES: [&str; 9] = [
    "DATABASE_URL",
    "REDIS_URL",
    "RELAY_QUEUE",
    "SQS_QUEUE_URL",
    "RABBITMQ_URL",
    "USERS_DATABASE_URL",
    "USERS_QUEUE",
    "USERS_SQS_QUEUE_URL",
    "SQS_ENDPOINT_URL",
];

/// Marks the data directory as used by a `dev`, and warns if another has it. Two would take each other's work, for relayers
/// that only one of them has.
fn lock_directory(data_dir: &Path) -> anyhow::Result<File> {
    let fail = || format!("cannot use the data directory {}", data_dir.display());
    DirBuilder::new().recursive(true).mode(0o700).create(data_dir).with_context(fail)?;
    let mut options = OpenOptions::new();
    let file = options.create(true).append(true).mode(0o600).open(data_dir.join("dev.lock")).with_context(fail)?;
    if let Err(TryLockError::WouldBlock) = file.try_lock() {
        let directory = data_dir.display();
        warn!(
            action = "directory_shared",
            "another `baton dev` uses {directory}: they take each other's transactions; choose another --data-dir"
        );
    }
    Ok(file)
}

/// Runs `dev`.
pub async fn run(args: DevArgs) -> anyhow::Result<ExitCode> {
    let mut config = config(&args, "http://127.0.0.1:1")?;
    let listeners = Listeners::bind(&config.http)?;
    let address = listeners.service.local_addr()?;
    let metrics = telemetry::start_metrics()?;
    let shutdown = super::shutdown_on_signal()?;

    // The relayers start first, because their URLs are part of the configuration, and stop last, so that the consumer
    // can finish its work.
    telemetry::start_logs(&config.log)?;
    let _lock = lock_directory(&args.data_dir)?;
    if !args.external {
        for name in ENGINES.iter().filter(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty())) {
            warn!(
                action = "variable_ignored",
                "{name} is set and not used: `dev` is embedded unless you add --external"
            );
        }
    }
    if args.chain.rpc.is_none() && std::env::var_os("RPC_URL").is_some_and(|value| !value.is_empty()) {
        warn!(action = "variable_ignored", "RPC_URL is set and not used: `dev` touches no chain unless you add --rpc");
    }
    let relayers = {
        let keys = Keys { api: RELAYER_KEY, webhook: WEBHOOK_KEY };
        let webhook_url = format!("http://{address}/api/v1/webhooks/oz-relayer");
        let chain = args.chain.options()?;
        let plan = RelayerPlan {
            first_port: args.relayer_port,
            data_dir: &args.data_dir,
            webhook_url: &webhook_url,
            keys,
            step: STEP,
            chain,
            hosts: config.http.hosts.clone(),
        };
        start_relayers(plan).await?
    };
    let urls = relayers.iter().map(DevRelayer::url).collect::<Vec<_>>().join(",");
    config.relay.relayers = self::config(&args, &urls)?.relay.relayers;

    let lanes = Lanes::open(&config, Service::Serve).await?;
    // The service does not depend on a reader of its greeting.
    greet(&args, &config, address, &relayers).ok();
    let code = run_parts(&config, Service::Serve, &lanes, listeners, metrics, shutdown).await;
    for relayer in relayers {
        relayer.stop().await;
    }
    output::print(format_args!("Stopped. Everything is kept in {}.\n", args.data_dir.display())).ok();
    code
}

/// The environment applies here too, with defaults that suit one machine.
fn config(args: &DevArgs, relayer_urls: &str) -> anyhow::Result<Config> {
    let mut fixed = vec![
        ("BATON_DATA_DIR", args.data_dir.display().to_string()),
        ("PORT", args.port.to_string()),
        ("HOST", "127.0.0.1".to_owned()),
        ("OZ_RELAYER_URLS", relayer_urls.to_owned()),
        ("OZ_RELAYER_API_KEY", RELAYER_KEY.to_owned()),
        ("WEBHOOK_SIGNING_KEY", WEBHOOK_KEY.to_owned()),
    ];
    if !args.external {
        fixed.extend(ENGINES.map(|name| (name, String::new())));
    }
    // Relayers that touch no chain confirm what no chain has.
    if args.chain.rpc.is_none() {
        fixed.push(("RPC_URL", String::new()));
    }
    let rpc = args.chain.rpc.as_ref().map(Url::as_str);
    let mut defaults = vec![
        ("RELAY_API_KEY", API_KEY),
        ("LOG_FORMAT", "text"),
        ("LOG_LEVEL", "warn,baton=info"),
        ("RELAYER_HEALTH_INTERVAL_MS", "1000"),
        ("RELAYER_RATE_PER_SECOND", "0"),
        ("RELAYER_MAX_IN_FLIGHT", "100000"),
        // Receivers of a `dev` are on this machine.
        ("WEBHOOK_ALLOW_PRIVATE", "true"),
    ];
    // The relayers and the checks before submission use the same chain.
    defaults.extend(rpc.map(|rpc| ("RPC_URL", rpc)));
    let mut config = Config::from_env_between(Service::Serve, &fixed, &defaults)?;
    config.http.hosts =
        LOCAL_HOSTS.map(str::to_owned).into_iter().chain(args.hosts.iter().map(|host| host.to_lowercase())).collect();
    Ok(config)
}

async fn start_relayers(plan: RelayerPlan<'_>) -> anyhow::Result<Vec<DevRelayer>> {
    let RelayerPlan { first_port, data_dir, webhook_url, keys, step, chain, hosts } = plan;
    let mut relayers = Vec::new();
    for (index, chain) in (1..=RELAYERS).zip(chain) {
        let port = first_port + index - 1;
        let options = DevRelayerOptions {
            index: usize::from(index),
            port: Some(port),
            hosts: hosts.clone(),
            api_key: keys.api.to_owned(),
            webhook_url: webhook_url.to_owned(),
            webhook_key: keys.webhook.to_owned(),
            journal: data_dir.join(format!("dev-relayer-{index}.jsonl")),
            seed: 0,
            step,
            chain,
        };
        let started = DevRelayer::start(options).await;
        let hint = || format!("development relayer {index} cannot use port {port}; choose others with --relayer-port");
        relayers.push(started.with_context(hint)?);
    }
    Ok(relayers)
}

/// This process's own program, as a shell takes it: after `cargo run`, `baton` is not on the PATH.
fn this_program() -> String {
    let path = std::env::current_exe().map_or("baton".to_owned(), |path| path.display().to_string());
    let is_plain = path.chars().all(|char| char.is_alphanumeric() || "/._-".contains(char));
    if is_plain { path } else { format!("'{}'", path.replace('\'', r"'\''")) }
}

fn greet(args: &DevArgs, config: &Config, api: SocketAddr, relayers: &[DevRelayer]) -> Result<(), OutputError> {
    say!("Baton (development) listens on http://{api}; data in {}", args.data_dir.display());
    for (index, relayer) in relayers.iter().enumerate() {
        let what = match relayer.address() {
            Some(address) => format!("signs as {address}"),
            None => "touches no chain".to_owned(),
        };
        say!("  development relayer {} on {} ({what})", index + 1, relayer.url());
    }
    if let Some(rpc) = &args.chain.rpc {
        // Only the host: some providers put a key into the user or the path.
        say!("  on the chain behind {}", rpc.host_str().unwrap_or("--rpc"));
    }
    // A key from the environment is not printed.
    let own: [u8; 32] = Sha256::digest(API_KEY).into();
    let ours = config.http.api_keys.iter().any(|key| key.sha256 == own);
    let key = if ours { API_KEY } else { "$RELAY_API_KEY" };
    say!();
    say!("Send a transaction:");
    say!();
    say!("  curl -s -w '\\n' http://{api}/api/v1/relay/direct \\");
    say!("    -H \"X-API-Key: {key}\" -H 'Content-Type: application/json' \\");
    // On a chain the relayers pay, so little, and to an account: the other address is the first contract on many chains.
    let (to, value) = match args.chain.rpc {
        Some(_) => ("0x70997970C51812dc3A010C7d01b50e0d17dc79C8", "1000"),
        None => ("0x5FbDB2315678afecb367f032d93F642f64180aa3", "1000000000000000001"),
    };
    say!("    -d '{{\"to\":\"{to}\",\"value\":\"{value}\",\"speed\":\"fast\"}}'");
    say!();
    say!("Follow it with the transactionId of the answer:");
    say!();
    say!("  curl -s -w '\\n' http://{api}/api/v1/relay/status/TRANSACTION_ID -H \"X-API-Key: {key}\"");
    say!("  curl -s -w '\\n' http://{api}/api/v1/relay/transactions/TRANSACTION_ID/timeline -H \"X-API-Key: {key}\"");
    say!();
    say!("Get notified: listen in another terminal, register that address, and send a transaction:");
    say!();
    say!("  {} webhooks listen", this_program());
    say!(
        "  curl -s -w '\\n' http://{api}/api/v1/webhooks/register -H \"X-API-Key: {key}\" -H 'Content-Type: application/json' \
         -d '{{\"url\":\"http://127.0.0.1:8080\"}}'"
    );
    say!();
    say!("Enrol a user:");
    say!();
    say!("  curl -s -w '\\n' http://{api}/api/v1/users -H \"X-API-Key: {key}\" -H 'Content-Type: application/json' \\");
    say!("    -d '{{\"name\":\"John Silva\",\"email\":\"john@email.com\"}}'");
    say!("  curl -s -w '\\n' http://{api}/api/v1/users/USER_ID -H \"X-API-Key: {key}\"");
    say!();
    say!("Transactions: http://{api}/api/v1/relay/transactions    Health: http://{api}/health    Ctrl-C stops.");
    say!();
    Ok(())
}
