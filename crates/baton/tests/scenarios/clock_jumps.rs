//! The machine's clock jumps by an hour while leases, claims and unknown outcomes are open; the relayers keep the true
//! time. No transaction is lost, sent twice, or delayed by the hour.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use harness::engine::TestEngine;
use harness::relayer::PostFault;
use harness::wait::eventually_ok;

use crate::load_client::{LoadClient, LoadProfile};
use crate::relay_fixture::{RelayFixture, SOON};
use crate::scenario::{Scenario, crash_setup, inject_faults};

const PROFILE: LoadProfile =
    LoadProfile { clients: 16, pause_max: Duration::from_millis(250), retry_until_accepted: false };
/// Debian installs the library in a folder named after the architecture.
const LIBRARIES: &str = "/usr/lib";
const LIBRARY: &str = "faketime/libfaketime.so.1";
const TRANSACTIONS: usize = 600;

#[tokio::test]
async fn clock_jumps_ahead() {
    jump("clock_jumps_ahead", &["+1h", "+2h", "+3h"]).await;
}

#[tokio::test]
async fn clock_jumps_back() {
    jump("clock_jumps_back", &["-1h", "-2h", "-3h"]).await;
}

/// The clock is wrong for a while in each direction, then corrected: rows stored meanwhile carry the wrong time.
#[tokio::test]
async fn clock_put_right() {
    jump("clock_put_right", &["+1h", "+0", "-1h", "+0"]).await;
}

/// Sets the clock to these offsets in turn, under load.
async fn jump(name: &'static str, offsets: &[&str]) {
    let mut scenario = Scenario::begin(name);
    let clock = Clock::new();
    let relay = clock.start_relay().await;
    inject_clock_jump_faults(&relay, scenario.seed);
    scenario.start_watching(&relay);
    let client = LoadClient::of(&relay);
    let seed = scenario.seed;
    let jump = async {
        for offset in offsets {
            let pause = Duration::from_millis(500) + scenario.random_pause(Duration::from_millis(1500));
            tokio::time::sleep(pause).await;
            clock.set(offset);
            clock.until_logged(&relay, offset).await;
        }
    };
    let (answers, ()) = tokio::join!(client.send_all(PROFILE, 0..TRANSACTIONS, seed), jump);
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!((ledger.confirmed, ledger.failed), (TRANSACTIONS, 0));
}

/// The machine restarts with its clock an hour behind the earlier one; the monotonic clock starts again.
#[tokio::test]
async fn clock_back_after_a_restart_of_the_machine() {
    let mut scenario = Scenario::begin("clock_back_after_a_restart_of_the_machine");
    let clock = Clock::new();
    clock.set("+1h");
    let mut relay = clock.start_relay().await;
    inject_clock_jump_faults(&relay, scenario.seed);
    let (client, seed) = (LoadClient::of(&relay), scenario.seed);
    let mut answers = client.send_all(PROFILE, 0..TRANSACTIONS / 4, seed).await;
    let crash = async {
        let pause = Duration::from_millis(500) + scenario.random_pause(Duration::from_millis(500));
        tokio::time::sleep(pause).await;
        relay.consumers[0].kill9().await.unwrap();
        relay.api.kill9().await.unwrap();
        scenario.kills += 2;
    };
    let (more, ()) = tokio::join!(client.send_all(PROFILE, TRANSACTIONS / 4..TRANSACTIONS / 2, seed), crash);
    answers.extend(more);
    // A machine's restart takes longer than a relayer's request handler.
    tokio::time::sleep(Duration::from_secs(4)).await;
    clock.set("+0");
    let path = Path::new(&relay.env["BATON_DATA_DIR"]).join("baton.db");
    rusqlite::Connection::open(path).unwrap().execute("UPDATE machine_clock SET start = 'before'", []).unwrap();
    relay.api.restart().await.unwrap();
    relay.api_ready().await;
    relay.consumers[0].restart().await.unwrap();
    scenario.start_watching(&relay);
    answers.extend(client.send_all(PROFILE, TRANSACTIONS / 2..TRANSACTIONS, seed).await);
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!(ledger.failed, 0);
}

/// The machine's wall clock runs away from its steady clock, as after a virtual machine was paused and its clock put right:
/// between a claim and its submission hours may have passed. Nothing is sent until the clocks agree again.
#[tokio::test]
async fn clock_disagrees_with_the_time_that_passed() {
    let clock = Clock::new();
    let relay = clock.start_relay().await;
    let accepted = || relay.relayers.iter().map(|relayer| relayer.accepted().len()).sum::<usize>();
    let before = accepted();
    // A day in each second: more than a second between the claim and the submission.
    clock.set("+0 x86400");
    let id = relay.send_serial(1).await;
    eventually_ok(SOON, "a submission to be held back", || async {
        let (_, timeline) = relay.get(&format!("/api/v1/relay/transactions/{id}/timeline")).await;
        if timeline.to_string().contains("clock jumped") { Ok(()) } else { Err(timeline.to_string()) }
    })
    .await;
    assert_eq!(accepted(), before, "none was sent");
    // Without a rate libfaketime keeps the last one.
    clock.set("+0 x1");
    relay.until_status(&id, "confirmed").await;
    assert_eq!(accepted(), before + 1);
}

fn inject_clock_jump_faults(relay: &RelayFixture, seed: u64) {
    inject_faults(relay, seed, |plan| {
        plan.with(PostFault::ErrorBeforeStoring, 0.03)
            .with(PostFault::ErrorAfterStoring, 0.03)
            .with(PostFault::CutBeforeStoring, 0.03)
            .with(PostFault::CutAfterStoring, 0.03)
            .with(PostFault::HangThenStore(Duration::from_millis(1500)), 0.06)
            .with(PostFault::Slow(Duration::from_millis(500)), 0.3)
    });
}

/// The wall clock of the processes under test, set through the preloaded libfaketime.
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

    async fn start_relay(&self) -> RelayFixture {
        let relay = crash_setup(3)
            .engine(TestEngine::Embedded)
            .env("LD_PRELOAD", library().display().to_string())
            .env("FAKETIME_TIMESTAMP_FILE", self.file.display().to_string())
            .env("FAKETIME_NO_CACHE", "1")
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .start()
            .await;
        relay.warm_up().await;
        relay
    }

    /// Replaces the file atomically: a reader never finds it empty.
    fn set(&self, offset: &str) {
        let new = self.file.with_extension("new");
        std::fs::write(&new, offset).unwrap();
        std::fs::rename(new, &self.file).unwrap();
    }

    /// Waits until the consumer logs a line with the shifted time, which proves that the clock jumped. The unknown outcomes
    /// make the consumer log.
    async fn until_logged(&self, relay: &RelayFixture, offset: &str) {
        let hours: i64 = offset.trim_end_matches('h').parse().unwrap();
        eventually_ok(SOON, format!("the consumer's clock to be off by {offset}"), || async {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() as i64;
            let output = relay.consumers[0].output();
            let last = output.lines().last().unwrap_or_default();
            let seen = second_of_day(last).ok_or_else(|| last.to_owned())?;
            // Across midnight the difference is off by a day.
            let off = (seen - now - hours * 3600).rem_euclid(86_400);
            if off.min(86_400 - off) < 600 { Ok(()) } else { Err(last.to_owned()) }
        })
        .await;
    }
}

/// The second of the day in a log line that begins with `{"timestamp":"2026-11-15T23:41:28.727Z"`.
fn second_of_day(line: &str) -> Option<i64> {
    let time = line.strip_prefix("{\"timestamp\":\"")?.get(11..19)?;
    time.split(':').try_fold(0, |sum, part| Some(sum * 60 + part.parse::<i64>().ok()?))
}

fn library() -> PathBuf {
    let folders = std::fs::read_dir(LIBRARIES).into_iter().flatten().flatten();
    let found = folders.map(|folder| folder.path().join(LIBRARY)).find(|path| path.exists());
    found.expect("libfaketime is needed: `apt-get install faketime`, or `scripts/test tools`, which does it")
}
