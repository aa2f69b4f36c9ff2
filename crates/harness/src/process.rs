//! A real binary under test: started with a known environment, killed, frozen, stopped, restarted.
//!
//! Its output goes to one file over all restarts, and the end of that file is part of every failure message.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fmt::Write as _,
    fs::OpenOptions,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};

/// Log lines in a failure message.
const LOG_LINES_SHOWN: usize = 60;
/// For one GET of a readiness URL.
const READY_TIMEOUT: Duration = Duration::from_secs(2);

/// A binary with its arguments. The environment has `PATH`, `HOME` and the variables set here, and nothing else.
#[derive(Clone, Debug)]
pub struct Program {
    path: PathBuf,
    args: Vec<OsString>,
    env: BTreeMap<OsString, OsString>,
    folder: Option<PathBuf>,
    log: Option<PathBuf>,
}

impl Program {
    /// The binary at this path, for instance `env!("CARGO_BIN_EXE_baton")`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), args: Vec::new(), env: BTreeMap::new(), folder: None, log: None }
    }

    /// Adds one argument.
    #[must_use]
    pub fn arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// Adds several arguments.
    #[must_use]
    pub fn args<A: Into<OsString>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Sets one environment variable.
    #[must_use]
    pub fn env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.insert(name.into(), value.into());
        self
    }

    /// Sets several environment variables.
    #[must_use]
    pub fn envs<N: Into<OsString>, V: Into<OsString>>(mut self, vars: impl IntoIterator<Item = (N, V)>) -> Self {
        self.env.extend(vars.into_iter().map(|(name, value)| (name.into(), value.into())));
        self
    }

    /// Runs in this folder instead of the test's own.
    #[must_use]
    pub fn folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folder = Some(folder.into());
        self
    }

    /// Writes standard output and error to this file (appending) instead of a new temporary one.
    #[must_use]
    pub fn log_to(mut self, log: impl Into<PathBuf>) -> Self {
        self.log = Some(log.into());
        self
    }

    /// Starts it without waiting; see [`Process::wait_ready`].
    ///
    /// # Errors
    /// When the log cannot be opened or the binary cannot be started.
    pub fn start(&self) -> Result<Process> {
        let mut program = self.clone();
        let kept = match &self.log {
            Some(_) => None,
            None => Some(tempfile::Builder::new().prefix("baton-process-").suffix(".log").tempfile()?.into_temp_path()),
        };
        let log = program.log.get_or_insert_with(|| kept.as_ref().map(|path| path.to_path_buf()).unwrap_or_default());
        let log = log.clone();
        let child = program.spawn(&log)?;
        Ok(Process { program, child, log, _kept: kept })
    }

    fn spawn(&self, log: &Path) -> Result<Child> {
        let out = OpenOptions::new()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("open the log {}", log.display()))?;
        let mut command = Command::new(&self.path);
        command.args(&self.args).env_clear().kill_on_drop(true).stdin(Stdio::null());
        for name in ["PATH", "HOME"] {
            if let Some(value) = std::env::var_os(name) {
                command.env(name, value);
            }
        }
        command.envs(&self.env).stdout(out.try_clone()?).stderr(out);
        if let Some(folder) = &self.folder {
            command.current_dir(folder);
        }
        command.spawn().with_context(|| format!("start {}", self.path.display()))
    }
}

/// A started program. Killed when dropped.
pub struct Process {
    program: Program,
    child: Child,
    log: PathBuf,
    /// Removes the temporary log with the process.
    _kept: Option<tempfile::TempPath>,
}

impl Process {
    /// The process id, while it has not been waited for.
    pub fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// Its output, over all restarts.
    pub fn output(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Whether it has not ended; a frozen process is running.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Waits until a GET of `url` answers 200.
    ///
    /// # Errors
    /// After the deadline, or at once when the process has ended; with the end of its log.
    pub async fn wait_ready(&mut self, url: &str, deadline: Duration) -> Result<()> {
        let client = crate::http_client();
        let start = Instant::now();
        let mut last = String::from("no attempt yet");
        while start.elapsed() < deadline {
            if let Some(status) = self.child.try_wait()? {
                bail!("the process ended ({status}) before {url} answered 200\n{}", self.log_excerpt());
            }
            match client.get(url).timeout(READY_TIMEOUT).send().await {
                Ok(answer) if answer.status() == 200 => return Ok(()),
                Ok(answer) => last = format!("status {}", answer.status()),
                Err(error) => last = error.to_string(),
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        bail!("{url} did not answer 200 within {deadline:?}; last: {last}\n{}", self.log_excerpt());
    }

    /// `kill -9`, and waits for its end.
    ///
    /// # Errors
    /// When the signal cannot be sent.
    pub async fn kill9(&mut self) -> Result<()> {
        self.child.start_kill().context("kill -9")?;
        self.child.wait().await.context("wait for the killed process")?;
        Ok(())
    }

    /// Sends `SIGTERM`.
    ///
    /// # Errors
    /// When it is not running.
    pub fn sigterm(&self) -> Result<()> {
        self.signal(Signal::TERM)
    }

    /// Freezes it (`SIGSTOP`): its sockets stay open and nothing answers.
    ///
    /// # Errors
    /// When it is not running.
    pub fn sigstop(&self) -> Result<()> {
        self.signal(Signal::STOP)
    }

    /// Continues it after [`Process::sigstop`].
    ///
    /// # Errors
    /// When it is not running.
    pub fn sigcont(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// After the deadline, with the end of its log. The process keeps running then.
    pub async fn wait_exit(&mut self, deadline: Duration) -> Result<ExitStatus> {
        match tokio::time::timeout(deadline, self.child.wait()).await {
            Ok(status) => Ok(status?),
            Err(_) => bail!("the process did not end within {deadline:?}\n{}", self.log_excerpt()),
        }
    }

    /// Starts it again with the same settings; a running process is ended with `kill -9` first.
    ///
    /// # Errors
    /// When it cannot be killed or started.
    pub async fn restart(&mut self) -> Result<()> {
        if self.is_running() {
            self.kill9().await?;
        }
        self.child = self.program.spawn(&self.log)?;
        Ok(())
    }

    /// Starts it again with other settings (for instance another version, or one variable changed); the log is kept.
    ///
    /// # Errors
    /// When it cannot be killed or started.
    pub async fn restart_as(&mut self, program: Program) -> Result<()> {
        self.program = program;
        self.restart().await
    }

    /// The program with its settings.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The command line and the end of the log, for failure messages.
    pub fn log_excerpt(&self) -> String {
        let output = self.output();
        let lines: Vec<&str> = output.lines().collect();
        let shown = lines.len().saturating_sub(LOG_LINES_SHOWN);
        let mut excerpt = format!("--- {} {:?}", self.program.path.display(), self.program.args);
        let _ = write!(excerpt, ": the last {} of {} lines it printed", lines.len() - shown, lines.len());
        for line in &lines[shown..] {
            let _ = write!(excerpt, "\n    {line}");
        }
        excerpt
    }

    /// Through `kill`: a signal call of our own would need unsafe code or one more dependency.
    fn signal(&self, signal: Signal) -> Result<()> {
        let id = self.child.id();
        let id =
            id.with_context(|| format!("cannot send {signal:?}: the process has ended\n{}", self.log_excerpt()))?;
        send_signal(id, signal)
    }
}

/// `SIGSTOP` to a process by its id, from code that does not hold the [`Process`].
///
/// # Errors
/// When it is not running.
pub fn freeze(id: u32) -> Result<()> {
    send_signal(id, Signal::STOP)
}

fn send_signal(id: u32, signal: Signal) -> Result<()> {
    let pid = i32::try_from(id).ok().and_then(Pid::from_raw).context("a process id")?;
    kill_process(pid, signal).with_context(|| format!("cannot send {signal:?} to {id}"))
}
