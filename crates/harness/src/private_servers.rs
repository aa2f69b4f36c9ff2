//! Servers of a test's own, which it may kill: `scripts/services` on a directory that goes when the test ends.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// Running servers. Stopped, and their data deleted, when dropped.
pub struct PrivateServers {
    directory: tempfile::TempDir,
    urls: String,
}

impl PrivateServers {
    /// Starts those servers, such as `postgres` and `rabbitmq`.
    ///
    /// # Errors
    /// When one of them does not start.
    pub async fn start(names: &[&str]) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("baton-servers-").tempdir()?;
        // PostgreSQL runs as a user of its own and must get through.
        std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755))?;
        let mut servers = Self { directory, urls: String::new() };
        servers.run("start", names).await?;
        servers.urls = servers.run("env", names).await?;
        Ok(servers)
    }

    /// Where a server is, by the name of the variable that says so.
    ///
    /// # Panics
    /// If it was not started.
    pub fn url(&self, variable: &str) -> String {
        let line = self.urls.lines().find_map(|line| line.strip_prefix(&format!("export {variable}=")));
        line.unwrap_or_else(|| panic!("{variable} is not in\n{}", self.urls)).trim_matches('\'').to_owned()
    }

    /// `kill -9`; its data stay.
    ///
    /// # Errors
    /// When it is not running.
    pub async fn kill(&self, name: &str) -> Result<()> {
        self.run("kill", &[name]).await.map(drop)
    }

    /// Again, on the same port and the same data.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn restart(&self, name: &str) -> Result<()> {
        self.run("restart", &[name]).await.map(drop)
    }

    async fn run(&self, command: &str, names: &[&str]) -> Result<String> {
        let mut services = self.command(command, names);
        let output = tokio::task::spawn_blocking(move || services.output()).await?.context("run scripts/services")?;
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        ensure!(output.status.success(), "scripts/services {command} {names:?}: {out}{err}");
        Ok(out.into_owned())
    }

    fn command(&self, command: &str, names: &[&str]) -> Command {
        let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../scripts/services");
        let mut services = Command::new(script);
        services.arg(command).args(if command == "env" { &[] } else { names }).stdin(Stdio::null());
        services.env("BATON_SERVICES_DIR", self.directory.path());
        services
    }
}

impl Drop for PrivateServers {
    fn drop(&mut self) {
        if let Err(error) = self.command("stop", &[]).output() {
            eprintln!("private servers in {} were not stopped: {error}", self.directory.path().display());
        }
    }
}
