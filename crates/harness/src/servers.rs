//! Servers of a story's own, to be killed and frozen: what `scripts/services` runs, in a directory of their own.
//!
//! They take seconds to start, so a story that ended well leaves its set to the next one; a story that failed takes its
//! set with it. Whatever happens to this process, somebody who waits for its end stops what is left.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail};
use tokio::process::Command;

use crate::engine::Engine;

/// One server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Server {
    /// MySQL, as MariaDB. After `kill -9` it still knows what it was told.
    MariaDb,
    /// Redis, which forgets everything.
    Redis,
    /// SQS, as LocalStack, which forgets its messages and its queues.
    Sqs,
    /// RabbitMQ, which knows what it has confirmed.
    RabbitMq,
    /// PostgreSQL. After `kill -9` it still knows what it was told.
    Postgres,
    /// An Ethereum chain, which forgets everything.
    Chain,
}

/// Some servers, for one story at a time.
pub struct Servers {
    /// There until it is dropped.
    set: Option<Set>,
}

/// Sets that nobody uses at the moment.
static IDLE: Mutex<Vec<Set>> = Mutex::new(Vec::new());

struct Set {
    servers: &'static [Server],
    directory: PathBuf,
    addresses: BTreeMap<String, String>,
    /// Stops the servers when its standard input ends: when this is dropped, or this process has come to any end.
    keeper: Child,
}

impl Server {
    /// As `scripts/services` calls it.
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
    /// A set in which all of these run.
    ///
    /// # Panics
    /// When they do not start.
    pub async fn running(servers: &'static [Server]) -> Self {
        let mut set = Set::any(servers).expect("a directory for the servers");
        set.start().await.expect("the servers start");
        Self { set: Some(set) }
    }

    /// Those of an engine.
    ///
    /// # Panics
    /// When they do not start.
    pub async fn of(engine: Engine) -> Self {
        Self::running(match engine {
            Engine::Embedded => &[],
            Engine::MySqlSqs => &[Server::MariaDb, Server::Sqs, Server::Redis],
            Engine::MySqlRabbitMq => &[Server::MariaDb, Server::RabbitMq, Server::Redis],
        })
        .await
    }

    /// Which engine they are for.
    pub fn engine(&self) -> Engine {
        match self.set().servers {
            servers if servers.contains(&Server::Sqs) => Engine::MySqlSqs,
            servers if servers.contains(&Server::MariaDb) => Engine::MySqlRabbitMq,
            _ => Engine::Embedded,
        }
    }

    /// The address in a variable that `scripts/services env` prints.
    ///
    /// # Panics
    /// When there is no such server in this set.
    pub fn address(&self, variable: &str) -> String {
        let found = self.set().addresses.get(variable);
        found.unwrap_or_else(|| panic!("there is no {variable} among {:?}", self.set().addresses)).clone()
    }

    /// `kill -9`.
    ///
    /// # Panics
    /// When that does not work.
    pub async fn kill(&self, server: Server) {
        self.set().run("kill", &[server]).await.expect("it is killed");
    }

    /// Starts it again, on the same port and with the same data; returns when it answers.
    ///
    /// # Panics
    /// When it does not.
    pub async fn restart(&self, server: Server) {
        self.set().run("restart", &[server]).await.expect("it starts again");
    }

    /// `SIGSTOP`: its connections stay open, new ones come up, and nothing answers.
    ///
    /// # Panics
    /// When that does not work.
    pub fn freeze(&self, server: Server) {
        self.set().signal(server, "STOP").expect("it is frozen");
    }

    /// `SIGCONT`.
    ///
    /// # Panics
    /// When that does not work.
    pub fn thaw(&self, server: Server) {
        self.set().signal(server, "CONT").expect("it goes on");
    }

    fn set(&self) -> &Set {
        self.set.as_ref().expect("it is there until it is dropped")
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        let Some(set) = self.set.take() else { return };
        for server in set.servers {
            // One that was killed cannot go on, and need not.
            let _ = set.signal(*server, "CONT");
        }
        if !std::thread::panicking() {
            IDLE.lock().unwrap_or_else(PoisonError::into_inner).push(set);
        }
    }
}

impl Set {
    /// One that is idle, or a new one.
    fn any(servers: &'static [Server]) -> Result<Self> {
        let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = idle.iter().position(|set| set.servers == servers) {
            return Ok(idle.swap_remove(place));
        }
        let directory = tempfile::Builder::new().prefix("baton-servers-").tempdir()?.keep();
        // PostgreSQL runs as a user of its own and must get through.
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o755))?;
        let stop_at_the_end = r#"trap "" INT TERM; cat >/dev/null; "$0" stop; rm -rf "$BATON_SERVICES_DIR""#;
        let keeper = std::process::Command::new("sh")
            .args(["-c", stop_at_the_end, SCRIPT])
            .env("BATON_SERVICES_DIR", &directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self { servers, directory, addresses: BTreeMap::new(), keeper })
    }

    /// Starts what does not run.
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
        let output = run.output().await.context("scripts/services can be run")?;
        if !output.status.success() {
            let said = [output.stdout, output.stderr].concat();
            bail!("scripts/services {command} {servers:?}: {}", String::from_utf8_lossy(&said));
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// To each of its processes, by the pids that `scripts/services` keeps.
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
        // Nobody is left to be told if it fails.
        let _ = self.keeper.wait();
    }
}

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/services");
