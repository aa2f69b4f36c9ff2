//! Private servers of a scenario, to be killed and frozen: those of `scripts/services`, in a directory of their own.
//!
//! They take seconds to start, so a successful scenario leaves its set to the next one; a failed one stops its set. A
//! small shell process outlives this one and stops the servers that are left, however this one ends.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use tokio::process::Command;

use crate::engine::TestEngine;

/// One server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Server {
    /// MySQL, as MariaDB. Committed data survives `kill -9`.
    MariaDb,
    /// Redis. Loses its data in `kill -9`.
    Redis,
    /// SQS, as LocalStack. Loses its messages and queues in `kill -9`.
    Sqs,
    /// RabbitMQ. Confirmed messages survive `kill -9`.
    RabbitMq,
    /// PostgreSQL. Committed data survives `kill -9`.
    Postgres,
    /// An Ethereum chain. Loses its state in `kill -9`.
    Chain,
}

/// A set of servers, for one scenario at a time.
pub struct Servers {
    /// Present until the drop.
    set: Option<Set>,
}

/// Running sets that no scenario uses.
static IDLE: Mutex<Vec<Set>> = Mutex::new(Vec::new());

struct Set {
    servers: &'static [Server],
    directory: PathBuf,
    addresses: BTreeMap<String, String>,
    /// Stops the servers when its standard input ends: when this is dropped, or this process ends in any way.
    keeper: Child,
    /// Variables of `scripts/services`; a set that has some is not left to another scenario.
    environment: Vec<(&'static str, PathBuf)>,
}

impl Server {
    /// The name in `scripts/services`.
    fn name(self) -> &'static str {
        match self {
            Self::MariaDb => "mariadb",
            Self::Redis => "redis",
            Self::Sqs => "sqs",
            Self::RabbitMq => "rabbitmq",
            Self::Postgres => "postgres",
            Self::Chain => "chain",
        }
    }
}

impl Servers {
    /// A set in which all of these servers run.
    ///
    /// # Panics
    /// When they do not start.
    pub async fn running(servers: &'static [Server]) -> Self {
        let mut set = Set::any(servers).expect("a directory for the servers");
        set.start().await.expect("the servers start");
        Self { set: Some(set) }
    }

    /// A MariaDB whose clock the file `clock` sets, in the syntax of libfaketime (`+1h`).
    ///
    /// # Panics
    /// When it does not start.
    pub async fn mariadb_with_clock(clock: &Path) -> Self {
        Self::with(&[Server::MariaDb], "BATON_MARIADB_CLOCK", clock).await
    }

    /// MariaDB and PostgreSQL with TLS, by `server.pem` and `server.key` in the directory `files`.
    ///
    /// # Panics
    /// When they do not start.
    pub async fn databases_with_tls(files: &Path) -> Self {
        Self::with(&[Server::MariaDb, Server::Postgres], "BATON_DATABASE_TLS", files).await
    }

    async fn with(servers: &'static [Server], variable: &'static str, path: &Path) -> Self {
        let environment = vec![(variable, path.to_owned())];
        let mut set = Set::new(servers, environment).expect("a directory for the servers");
        set.start().await.expect("the servers start");
        Self { set: Some(set) }
    }

    /// The servers of an engine.
    ///
    /// # Panics
    /// When they do not start.
    pub async fn of(engine: TestEngine) -> Self {
        Self::running(match engine {
            TestEngine::Embedded => &[],
            TestEngine::MySqlSqs => &[Server::MariaDb, Server::Sqs, Server::Redis],
            TestEngine::MySqlRabbitMq => &[Server::MariaDb, Server::RabbitMq, Server::Redis],
        })
        .await
    }

    /// The engine that they belong to.
    pub fn engine(&self) -> TestEngine {
        match self.set().servers {
            servers if servers.contains(&Server::Sqs) => TestEngine::MySqlSqs,
            servers if servers.contains(&Server::MariaDb) => TestEngine::MySqlRabbitMq,
            _ => TestEngine::Embedded,
        }
    }

    /// The address in a variable that `scripts/services env` prints.
    ///
    /// # Panics
    /// When this set has no such server.
    pub fn address(&self, variable: &str) -> String {
        let found = self.set().addresses.get(variable);
        found.unwrap_or_else(|| panic!("there is no {variable} among {:?}", self.set().addresses)).clone()
    }

    /// `kill -9`.
    ///
    /// # Panics
    /// When the signal cannot be sent.
    pub async fn kill(&self, server: Server) {
        self.set().run("kill", &[server]).await.expect("it is killed");
    }

    /// Starts it again, on the same port and with the same data; returns when it answers.
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn restart(&self, server: Server) {
        self.set().run("restart", &[server]).await.expect("it starts again");
    }

    /// `SIGSTOP`: its connections stay open, new ones are accepted, and nothing answers.
    ///
    /// # Panics
    /// When the signal cannot be sent.
    pub fn freeze(&self, server: Server) {
        self.set().signal(server, "STOP").expect("it is frozen");
    }

    /// `SIGCONT`, after [`Servers::freeze`].
    ///
    /// # Panics
    /// When the signal cannot be sent.
    pub fn thaw(&self, server: Server) {
        self.set().signal(server, "CONT").expect("it goes on");
    }

    fn set(&self) -> &Set {
        self.set.as_ref().expect("it is present until the drop")
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        let Some(set) = self.set.take() else { return };
        for server in set.servers {
            // A killed server cannot continue, and need not.
            let _ = set.signal(*server, "CONT");
        }
        if !std::thread::panicking() && set.environment.is_empty() {
            IDLE.lock().unwrap_or_else(PoisonError::into_inner).push(set);
        }
    }
}

impl Set {
    /// An idle set, or a new one.
    fn any(servers: &'static [Server]) -> Result<Self> {
        let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = idle.iter().position(|set| set.servers == servers) {
            return Ok(idle.swap_remove(place));
        }
        Self::new(servers, Vec::new())
    }

    fn new(servers: &'static [Server], environment: Vec<(&'static str, PathBuf)>) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("baton-servers-").tempdir()?.keep();
        // PostgreSQL runs as another user and needs access.
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o755))?;
        let stop_at_the_end = r#"trap "" INT TERM; cat >/dev/null; "$0" stop; rm -rf "$BATON_SERVICES_DIR""#;
        let keeper = std::process::Command::new("sh")
            .args(["-c", stop_at_the_end, SCRIPT])
            .env("BATON_SERVICES_DIR", &directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self { servers, directory, addresses: BTreeMap::new(), keeper, environment })
    }

    /// Starts the servers that do not run.
    async fn start(&mut self) -> Result<()> {
        self.run("start", self.servers).await?;
        let exports = self.run("env", self.servers).await?;
        let read = |line: &str| {
            let (name, value) = line.strip_prefix("export ")?.split_once('=')?;
            Some((name.to_owned(), value.trim_matches('\'').to_owned()))
        };
        self.addresses = exports.lines().filter_map(read).collect();
        Ok(())
    }

    async fn run(&self, command: &str, servers: &[Server]) -> Result<String> {
        let names = servers.iter().map(|server| server.name());
        let mut run = Command::new(SCRIPT);
        run.arg(command).args(names).env("BATON_SERVICES_DIR", &self.directory).stdin(Stdio::null());
        run.envs(self.environment.iter().map(|(name, path)| (*name, path)));
        let output = run.output().await.context("scripts/services can be run")?;
        if !output.status.success() {
            let said = [output.stdout, output.stderr].concat();
            bail!("scripts/services {command} {servers:?}: {}", String::from_utf8_lossy(&said));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Signals each of its processes, by the pid files of `scripts/services`.
    fn signal(&self, server: Server, name: &str) -> Result<()> {
        let mut pids = Vec::new();
        for file in std::fs::read_dir(self.directory.join(server.name()))? {
            let path = file?.path();
            if path.extension().is_some_and(|extension| extension == "pid") {
                let text = std::fs::read_to_string(path)?;
                pids.extend(text.split_whitespace().next().map(str::to_owned));
            }
        }
        let status =
            std::process::Command::new("kill").args(["-s", name]).args(&pids).stderr(Stdio::null()).status()?;
        if pids.is_empty() || !status.success() {
            bail!("kill -s {name} {pids:?} of {server:?}: {status}");
        }
        Ok(())
    }
}

impl Drop for Set {
    fn drop(&mut self) {
        drop(self.keeper.stdin.take());
        // A failure cannot be reported in a drop.
        let _ = self.keeper.wait();
    }
}

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/services");
