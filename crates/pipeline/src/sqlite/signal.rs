//! Sleeping until a commit changes something. A write job marks a [`Signal`]; after its commit, never before, whoever
//! waits on it wakes.
//!
//! Commits of other processes are noticed by one thread that reads `PRAGMA data_version`, which SQLite keeps in the
//! memory that all processes share. SQLite has no other notice to give across processes: file watching does not see
//! writes through a memory map and differs on every system. One look takes 1.3 µs (measured), so looking every
//! 20 ms costs less than 0.01 % of a core, and only while somebody waits. A waiting receiver therefore wakes at once
//! for a commit in its own process, and within 50 ms for one in another.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rusqlite::Connection;
use tokio::sync::watch;

use super::{Role, connect};

/// Between two looks for commits of other processes.
const POLL_EVERY: Duration = Duration::from_millis(20);
/// After a look that failed.
const POLL_AFTER_ERROR: Duration = Duration::from_secs(1);

/// Tells those who wait that a commit has changed what they wait for. Get one with [`super::Database::signal`].
#[derive(Debug)]
pub struct Signal {
    marked: AtomicBool,
    fired: watch::Sender<u64>,
    poll: Arc<Poll>,
}

impl Signal {
    /// Called in a write job: wake those who wait once it is committed. If the job fails they wake for nothing.
    pub fn mark(&self) {
        self.marked.store(true, Ordering::Release);
    }

    /// Starts to listen. Do this before looking at the data: what is committed after this call is not missed.
    pub fn waiting(&self) -> Waiting {
        self.poll.join();
        Waiting { fired: self.fired.subscribe(), poll: self.poll.clone() }
    }

    fn fire(&self) {
        self.fired.send_modify(|count| *count = count.wrapping_add(1));
    }
}

/// Somebody listening to a [`Signal`].
#[derive(Debug)]
pub struct Waiting {
    fired: watch::Receiver<u64>,
    poll: Arc<Poll>,
}

impl Waiting {
    /// Returns at the first commit since the last call, or since [`Signal::waiting`]. It may return for nothing.
    pub async fn changed(&mut self) {
        if self.fired.changed().await.is_err() {
            // The database is gone, and with it every reason to wake.
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.poll.leave();
    }
}

/// All signals of one database.
#[derive(Debug)]
pub(super) struct Signals {
    path: PathBuf,
    by_name: Mutex<HashMap<String, Arc<Signal>>>,
    poll: Arc<Poll>,
}

impl Signals {
    pub(super) fn new(path: PathBuf) -> Arc<Self> {
        Arc::new(Self { path, by_name: Mutex::default(), poll: Arc::default() })
    }

    pub(super) fn get(self: &Arc<Self>, name: &str) -> Arc<Signal> {
        let mut by_name = lock(&self.by_name);
        if by_name.is_empty() {
            self.start_poller();
        }
        let make = || {
            Arc::new(Signal { marked: AtomicBool::new(false), fired: watch::Sender::new(0), poll: self.poll.clone() })
        };
        by_name.entry(name.to_owned()).or_insert_with(make).clone()
    }

    pub(super) fn fire_marked(&self) {
        for signal in lock(&self.by_name).values() {
            if signal.marked.swap(false, Ordering::AcqRel) {
                signal.fire();
            }
        }
    }

    pub(super) fn stop(&self) {
        lock(&self.poll.state).stopped = true;
        self.poll.changed.notify_all();
    }

    fn fire_all(&self) {
        lock(&self.by_name).values().for_each(|signal| signal.fire());
    }

    fn start_poller(self: &Arc<Self>) {
        let signals = self.clone();
        let started = std::thread::Builder::new().name("sqlite-poller".into()).spawn(move || poll(&signals));
        if let Err(error) = started {
            tracing::error!(%error, "no thread to notice other processes' commits: their messages may be seen late");
        }
    }
}

/// Who waits, so that the poller can rest while nobody does.
#[derive(Debug, Default)]
struct Poll {
    state: Mutex<PollState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct PollState {
    waiting: usize,
    stopped: bool,
}

impl Poll {
    fn join(&self) {
        let mut state = lock(&self.state);
        state.waiting += 1;
        if state.waiting == 1 {
            self.changed.notify_all();
        }
    }

    fn leave(&self) {
        lock(&self.state).waiting -= 1;
    }

    /// Rests until somebody waits; `false` when it is time to stop.
    fn until_needed(&self) -> bool {
        let rest = self.changed.wait_while(lock(&self.state), |state| state.waiting == 0 && !state.stopped);
        !rest.unwrap_or_else(PoisonError::into_inner).stopped
    }

    fn pause(&self, pause: Duration) {
        let pausing = self.changed.wait_timeout_while(lock(&self.state), pause, |state| !state.stopped);
        drop(pausing.unwrap_or_else(PoisonError::into_inner));
    }
}

fn poll(signals: &Signals) {
    let mut connection: Option<Connection> = None;
    let mut seen = None;
    while signals.poll.until_needed() {
        let version = match &connection {
            Some(connection) => data_version(connection),
            None => connect(&signals.path, Role::Reader).and_then(|opened| {
                let version = data_version(&opened)?;
                connection = Some(opened);
                Ok(version)
            }),
        };
        match version {
            Ok(version) => {
                if seen.replace(version) != Some(version) {
                    signals.fire_all();
                }
                signals.poll.pause(POLL_EVERY);
            }
            Err(error) => {
                tracing::warn!(error = %error, "cannot look for other processes' commits");
                // Not knowing, everybody looks for themselves.
                connection = None;
                seen = None;
                signals.fire_all();
                signals.poll.pause(POLL_AFTER_ERROR);
            }
        }
    }
}

fn data_version(connection: &Connection) -> Result<i64, super::DatabaseError> {
    Ok(connection.prepare_cached("PRAGMA data_version")?.query_row([], |row| row.get(0))?)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
