//! The processes under test, started as an operator starts them, and their resource use.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use baton::config::{Config, Service};
use relayer_sim::server::ports::free_port;

use crate::product;
use crate::simulated_relayers::{RELAYER_KEY, WEBHOOK_KEY};

/// API key of every service.
pub const API_KEY: &str = "bench-key-of-more-than-32-characters";
/// Relayer URL for services that submit nothing.
pub const NO_RELAYERS: &str = "http://127.0.0.1:1";
/// Time for a service to listen.
const START_MAX: Duration = Duration::from_secs(20);

/// Environment variables of a service, each name once.
pub type Vars = Vec<(&'static str, String)>;

/// A running process, killed on drop.
pub struct ServiceProcess {
    child: Child,
    /// Address of its HTTP server.
    pub address: SocketAddr,
    /// Address of its probes and metrics.
    pub admin: SocketAddr,
}

impl ServiceProcess {
    /// Starts `baton ARGS` on a free port and waits until it accepts connections.
    pub async fn start(args: &[&str], vars: &Vars) -> anyhow::Result<Self> {
        Self::start_on(free_port(), args, vars).await
    }

    /// Starts `baton ARGS` on this port and waits until it accepts connections.
    pub async fn start_on(port: u16, args: &[&str], vars: &Vars) -> anyhow::Result<Self> {
        Self::start_program(&product::binary()?, port, args, vars).await
    }

    /// Starts `bench ARGS`, one of the hidden commands, and waits until it accepts connections.
    pub async fn start_own(port: u16, args: &[&str], vars: &Vars) -> anyhow::Result<Self> {
        Self::start_program(&std::env::current_exe()?, port, args, vars).await
    }

    async fn start_program(program: &Path, port: u16, args: &[&str], vars: &Vars) -> anyhow::Result<Self> {
        let name = format!("{} {}", program.display(), args.join(" "));
        let mut command = Command::new(program);
        let admin = free_port();
        command.args(args).env_clear().env("PORT", port.to_string()).env("LOG_LEVEL", "error");
        command.env("ADMIN_PORT", admin.to_string());
        command.envs(vars.iter().map(|(name, value)| (name, value))).stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.spawn().with_context(|| format!("cannot start {name}"))?;
        let local = |port: u16| SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let mut service = Self { child, address: local(port), admin: local(admin) };
        let deadline = Instant::now() + START_MAX;
        loop {
            let listens = tokio::net::TcpStream::connect(service.address).await.is_ok();
            // Asked after connecting: another process may listen on the port, and this one then ends.
            if let Some(status) = service.child.try_wait()? {
                bail!("{name} ended at start: {status}");
            }
            if listens {
                return Ok(service);
            }
            if Instant::now() > deadline {
                bail!("{name} does not listen on {}", service.address);
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Peak resident memory, in MiB.
    pub fn peak_mib(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|rest| rest.trim().trim_end_matches(" kB").parse::<f64>().ok());
        kib.unwrap_or(0.0) / 1024.0
    }

    /// Processor time of user and system mode since the start.
    pub fn cpu_time(&self) -> Duration {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        // The name may contain spaces and brackets; after its closing bracket, user and system time are fields 12 and 13.
        let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
        Duration::from_millis(ticks * 10)
    }
}

impl Drop for ServiceProcess {
    fn drop(&mut self) {
        // Its data is thrown away, so it need not drain.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// The variables of a service with this data directory and these relayers; and `RPC_URL`, if the benchmark has it.
pub fn service_vars(directory: &Path, relayer_urls: &str) -> Vars {
    let rpc_url = std::env::var("RPC_URL").ok().filter(|url| !url.is_empty());
    let mut vars = vec![
        ("BATON_DATA_DIR", directory.display().to_string()),
        ("RELAY_API_KEY", API_KEY.to_owned()),
        ("OZ_RELAYER_URLS", relayer_urls.to_owned()),
        ("OZ_RELAYER_API_KEY", RELAYER_KEY.to_owned()),
        ("WEBHOOK_SIGNING_KEY", WEBHOOK_KEY.to_owned()),
        ("RELAYER_RATE_PER_SECOND", "0".to_owned()),
        ("RELAYER_MAX_IN_FLIGHT", "10000000".to_owned()),
        ("RELAYER_HEALTH_INTERVAL_MS", "1000".to_owned()),
    ];
    vars.extend(rpc_url.map(|url| ("RPC_URL", url)));
    vars
}

/// The configuration of a command with these variables, to open the engine of a service in this process.
pub fn config(vars: &Vars) -> anyhow::Result<Config> {
    let lookup = |name: &str| vars.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
    Ok(Config::from_vars(Service::Command, lookup)?)
}
