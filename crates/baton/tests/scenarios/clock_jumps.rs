//! The machine's clock jumps by an hour while leases, claims and doubts run; the relayers keep the true time. Nothing
//! happens twice, nothing is lost, and nobody has to wait until the hour has passed.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use harness::engine::Engine;
use harness::relayer::{FaultPlan, Faults, PostFault};
use harness::wait::eventually_ok;

use crate::load_client::{Client, Manners};
use crate::relay_fixture::{SOON, Stand};
use crate::scenario::{Story, mortal};

const MANNERS: Manners = Manners { clients: 16, pause_max: Duration::from_millis(250), insistent: false };
/// Where Debian puts the library; the folder is named after the machine.
const LIBRARIES: &str = "/usr/lib";
const LIBRARY: &str = "faketime/libfaketime.so.1";
const TRANSACTIONS: usize = 800;

#[tokio::test]
async fn clock_jumps_ahead() {
    jump("clock_jumps_ahead", &["+1h", "+2h", "+3h"]).await;
}

#[tokio::test]
async fn clock_jumps_back() {
    jump("clock_jumps_back", &["-1h", "-2h", "-3h"]).await;
}

/// Wrong for a while, each way, and put right again: what was stored meanwhile carries the wrong time.
#[tokio::test]
async fn clock_put_right() {
    jump("clock_put_right", &["+1h", "+0", "-1h", "+0"]).await;
}

/// Under load the clock is off by these, one after the other.
async fn jump(name: &'static str, offsets: &[&str]) {
    let mut story = Story::begin(name);
    let clock = Clock::new();
    let stand = clock.stand().await;
    trouble(&stand, story.seed);
    story.watch(&stand);
    let client = Client::of(&stand);
    let seed = story.seed;
    let jump = async {
        for offset in offsets {
            let moment = Duration::from_millis(500) + story.moment(Duration::from_millis(1500));
            tokio::time::sleep(moment).await;
            clock.set(offset);
            clock.until_seen(&stand, offset).await;
        }
    };
    let (promises, ()) = tokio::join!(client.crowd(MANNERS, 0..TRANSACTIONS, seed), jump);
    let ledger = story.end(&stand, &promises).await;
    assert_eq!((ledger.confirmed, ledger.failed), (TRANSACTIONS, 0));
}

/// The machine starts again with a clock that is an hour behind the one it had; the processes begin a new count.
#[tokio::test]
async fn clock_back_after_a_restart_of_the_machine() {
    let mut story = Story::begin("clock_back_after_a_restart_of_the_machine");
    let clock = Clock::new();
    clock.set("+1h");
    let mut stand = clock.stand().await;
    trouble(&stand, story.seed);
    let (client, seed) = (Client::of(&stand), story.seed);
    let mut promises = client.crowd(MANNERS, 0..TRANSACTIONS / 4, seed).await;
    let crash = async {
        let moment = Duration::from_millis(500) + story.moment(Duration::from_millis(500));
        tokio::time::sleep(moment).await;
        stand.consumers[0].kill9().await.unwrap();
        stand.api.kill9().await.unwrap();
        story.kills += 2;
    };
    let (more, ()) = tokio::join!(client.crowd(MANNERS, TRANSACTIONS / 4..TRANSACTIONS / 2, seed), crash);
    promises.extend(more);
    // A machine is away for longer than a relayer works on a request.
    tokio::time::sleep(Duration::from_secs(4)).await;
    clock.set("+0");
    let path = Path::new(&stand.env["BATON_DATA_DIR"]).join("baton.db");
    rusqlite::Connection::open(path).unwrap().execute("UPDATE machine_clock SET start = 'before'", []).unwrap();
    stand.api.restart().await.unwrap();
    stand.api_ready().await;
    stand.consumers[0].restart().await.unwrap();
    story.watch(&stand);
    promises.extend(client.crowd(MANNERS, TRANSACTIONS / 2..TRANSACTIONS, seed).await);
    let ledger = story.end(&stand, &promises).await;
    assert_eq!(ledger.failed, 0);
}

fn trouble(stand: &Stand, seed: u64) {
    for (number, relayer) in stand.relayers.iter().enumerate() {
        let plan = FaultPlan::new(seed.wrapping_add(number as u64))
            .with(PostFault::ErrorBeforeStoring, 0.03)
            .with(PostFault::ErrorAfterStoring, 0.03)
            .with(PostFault::CutBeforeStoring, 0.03)
            .with(PostFault::CutAfterStoring, 0.03)
            .with(PostFault::HangThenStore(Duration::from_millis(1500)), 0.06)
            .with(PostFault::Slow(Duration::from_millis(500)), 0.3);
        relayer.set_faults(Faults::planned(plan));
    }
}

/// The clock that the processes under test see, through a library that is loaded before them.
struct Clock {
    file: PathBuf,
    _folder: tempfile::TempDir,
}

impl Clock {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let clock = Self { file: folder.path().join("clock"), _folder: folder };
        clock.set("+0");
        clock
    }

    async fn stand(&self) -> Stand {
        let stand = mortal(3)
            .engine(Engine::Embedded)
            .env("LD_PRELOAD", library().display().to_string())
            .env("FAKETIME_TIMESTAMP_FILE", self.file.display().to_string())
            .env("FAKETIME_NO_CACHE", "1")
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .start()
            .await;
        stand.warm_up().await;
        stand
    }

    /// In one step: a reader never finds the file empty.
    fn set(&self, offset: &str) {
        let new = self.file.with_extension("new");
        std::fs::write(&new, offset).unwrap();
        std::fs::rename(new, &self.file).unwrap();
    }

    /// Waits until a line of the log is dated accordingly; a story in which no clock jumps tells nothing. The many
    /// unknown outcomes see to it that there are lines.
    async fn until_seen(&self, stand: &Stand, offset: &str) {
        let hours: i64 = offset.trim_end_matches('h').parse().unwrap();
        eventually_ok(SOON, format!("the consumer's clock to be off by {offset}"), || async {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64;
            let output = stand.consumers[0].output();
            let last = output.lines().last().unwrap_or_default();
            let seen = second_of_day(last).ok_or_else(|| last.to_owned())?;
            // Over midnight the difference is a day off.
            let off = (seen - now - hours * 3600).rem_euclid(86_400);
            if off.min(86_400 - off) < 600 { Ok(()) } else { Err(last.to_owned()) }
        })
        .await;
    }
}

/// Of a line that begins with `{"timestamp":"2026-11-15T23:41:28.727Z"`.
fn second_of_day(line: &str) -> Option<i64> {
    let time = line.strip_prefix("{\"timestamp\":\"")?.get(11..19)?;
    time.split(':').try_fold(0, |sum, part| Some(sum * 60 + part.parse::<i64>().ok()?))
}

fn library() -> PathBuf {
    let folders = std::fs::read_dir(LIBRARIES).into_iter().flatten().flatten();
    let found = folders.map(|folder| folder.path().join(LIBRARY)).find(|path| path.exists());
    found.expect("libfaketime is needed: `apt-get install faketime`, or `scripts/test tools`, which does it")
}
