//! The processes that are measured: this same binary, started as its users start it, on a data directory of its own.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::product;
use super::simulated_relayers::{RELAYER_KEY, WEBHOOK_KEY};

/// The key of every benchmark service.
pub const API_KEY: &str = "bench-key";

/// A directory that goes when the benchmark ends.
pub struct Directory(PathBuf);

impl Directory {
    /// A new one inside `parent`.
    pub fn create(parent: &Path, name: &str) -> anyhow::Result<Self> {
        let path = parent.join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self(path))
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
        if let Some(parent) = self.0.parent() {
            // Only if nothing else is in it.
            std::fs::remove_dir(parent).ok();
        }
    }
}

/// A running service; stopped when dropped.
pub struct Service {
    child: Child,
    /// Where it listens.
    pub address: SocketAddr,
}

impl Service {
    /// Starts `baton ARGS` with these variables and waits until it answers.
    pub async fn start(args: &[&str], port: u16, vars: &[(&str, String)]) -> anyhow::Result<Self> {
        Self::start_program(&product::binary()?, args, port, vars).await
    }

    /// Starts `bench ARGS`, one of its hidden commands, likewise.
    pub async fn start_own(args: &[&str], port: u16, vars: &[(&str, String)]) -> anyhow::Result<Self> {
        Self::start_program(&std::env::current_exe()?, args, port, vars).await
    }

    async fn start_program(program: &Path, args: &[&str], port: u16, vars: &[(&str, String)]) -> anyhow::Result<Self> {
        let mut command = Command::new(program);
        command.args(args).env_clear().env("PORT", port.to_string()).env("LOG_LEVEL", "error");
        command.envs(vars.iter().map(|(name, value)| (name, value))).stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.spawn().with_context(|| format!("cannot start baton {}", args.join(" ")))?;
        let mut service = Self { child, address: SocketAddr::from((Ipv4Addr::LOCALHOST, port)) };
        let deadline = Instant::now() + Duration::from_secs(20);
        while tokio::net::TcpStream::connect(service.address).await.is_err() {
            if let Some(status) = service.child.try_wait()? {
                bail!("baton {} ended at once: {status}", args.join(" "));
            }
            if Instant::now() > deadline {
                bail!("baton {} does not listen on {}", args.join(" "), service.address);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(service)
    }

    /// The most memory it has had, in MiB.
    pub fn peak_mib(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<f64>().ok());
        kib.unwrap_or(0.0) / 1024.0
    }

    /// The processor time it has had.
    pub fn processor_time(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        // After the name, which may hold anything but ends with the last bracket; user and system are the 12th and 13th.
        let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
        Duration::from_millis(ticks * 10)
    }
}

/// How busy the machine has been: the difference of two is what there was between them.
#[derive(Clone, Copy)]
pub struct Machine {
    busy: u64,
    all: u64,
}

impl Machine {
    /// Now.
    pub fn now() -> Self {
        let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
        let line = stat.lines().next().unwrap_or_default();
        let ticks: Vec<u64> = line.split_whitespace().skip(1).filter_map(|field| field.parse().ok()).collect();
        let all: u64 = ticks.iter().take(8).sum();
        let idle: u64 = ticks.iter().skip(3).take(2).sum();
        Self { busy: all - idle, all }
    }

    /// How much of it was in use since, in percent; 100 is all processors.
    pub fn busy_since(&self, start: &Self) -> f64 {
        100.0 * self.busy.saturating_sub(start.busy) as f64 / self.all.saturating_sub(start.all).max(1) as f64
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // What it holds is thrown away: there is nothing to drain.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// The variables of a service on this directory with these relayers.
pub fn vars(directory: &Path, relayer_urls: &str) -> Vec<(&'static str, String)> {
    vec![
        ("BATON_DATA_DIR", directory.display().to_string()),
        ("RELAY_API_KEY", API_KEY.to_owned()),
        ("OZ_RELAYER_URLS", relayer_urls.to_owned()),
        ("OZ_RELAYER_API_KEY", RELAYER_KEY.to_owned()),
        ("WEBHOOK_SIGNING_KEY", WEBHOOK_KEY.to_owned()),
        ("RELAYER_RATE_PER_SECOND", "0".to_owned()),
        ("RELAYER_MAX_IN_FLIGHT", "10000000".to_owned()),
        ("RELAYER_HEALTH_INTERVAL_MS", "1000".to_owned()),
    ]
}

/// A port that is free now, below the range that outgoing connections take theirs from.
pub fn free_port() -> anyhow::Result<u16> {
    for _ in 0..200 {
        let port = 20_000 + rand::random::<u16>() % 10_000;
        if std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return Ok(port);
        }
    }
    bail!("no free port")
}

/// The transaction that every benchmark sends: an ERC-20 transfer.
pub const BODY: &str = r#"{"to":"0x5FbDB2315678afecb367f032d93F642f64180aa3","value":"0","data":"0xa9059cbb000000000000000000000000f39fd6e51aad88f6f4ce6ab8827279cfffb922660000000000000000000000000000000000000000000000000de0b6b3a7640000","gas":"60000","speed":"fast"}"#;
