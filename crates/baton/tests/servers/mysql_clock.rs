//! MySQL's clock is set while the outcome of a submission is unknown. The relayer and Baton's machine keep the true time.
//! However the clock is set, a submission that the relayer has, or is about to store, is not repeated.

use std::path::PathBuf;
use std::time::Duration;

use harness::engine::TestEngine;
use harness::relayer::{Faults, PostFault};
use harness::servers::Servers;
use harness::wait::eventually_ok;

use crate::relay_fixture::{RelayFixture, RelaySetup, SOON, serial_data};

/// Two jumps ahead while the relayer still works on the request: the first would end the time in which it may, the second
/// the time between the two listings that prove absence.
#[tokio::test]
async fn mysql_clock_jumps_ahead() {
    let clock = ServerClock::start("+0").await;
    // The relayer stores it after Baton has given it up, and within the time that a relayer may take.
    let relay = clock.start_relay(|setup| setup.env("RELAYER_HANDLER_TIMEOUT_MS", "10000")).await;
    relay.relayers[0].set_faults(Faults::for_next(1, PostFault::HangThenStore(Duration::from_secs(8))));
    let id = relay.send_serial(1).await;
    until_unknown(&relay, &id).await;
    for (jump, offset) in ["+1h", "+2h"].into_iter().enumerate() {
        clock.set(offset);
        until_logged(&relay, "clock_jumped", jump + 1).await;
    }
    relay.until_status(&id, "confirmed").await;
    // A resend would be confirmed before the relayer stores the first submission.
    let (_, timeline) = relay.get(&format!("/api/v1/relay/transactions/{id}/timeline")).await;
    assert!(!timeline.to_string().contains("\"absent\""), "{timeline}");
    assert_eq!(records(&relay, 1), 1, "{}", relay.api.log_excerpt());
}

/// The clock was an hour ahead and is put right between the claim and the search: the record looks older than the claim.
#[tokio::test]
async fn mysql_clock_set_back() {
    let clock = ServerClock::start("+1h").await;
    let relay = clock.start_relay(|setup| setup.env("RECONCILE_UNKNOWN_MS", "5000")).await;
    relay.relayers[0].set_faults(Faults::for_next(1, PostFault::CutAfterStoring));
    let id = relay.send_serial(1).await;
    until_unknown(&relay, &id).await;
    clock.set("+0");
    until_logged(&relay, "clock_set_back", 1).await;
    relay.until_status(&id, "confirmed").await;
    assert_eq!(records(&relay, 1), 1, "{}", relay.api.log_excerpt());
}

/// The same while no process runs: the one that starts afterwards knows the earlier time from the database.
#[tokio::test]
async fn mysql_clock_set_back_while_baton_is_stopped() {
    let clock = ServerClock::start("+1h").await;
    let mut relay = clock.start_relay(|setup| setup.env("RECONCILE_UNKNOWN_MS", "6000")).await;
    relay.relayers[0].set_faults(Faults::for_next(1, PostFault::CutAfterStoring));
    let id = relay.send_serial(1).await;
    until_unknown(&relay, &id).await;
    relay.api.kill9().await.unwrap();
    clock.set("+0");
    relay.api.restart().await.unwrap();
    relay.api_ready().await;
    relay.until_status(&id, "confirmed").await;
    assert_eq!(records(&relay, 1), 1, "{}", relay.api.log_excerpt());
}

/// A private MariaDB whose clock can be set.
struct ServerClock {
    servers: Servers,
    file: PathBuf,
    _folder: tempfile::TempDir,
}

impl ServerClock {
    async fn start(offset: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("clock");
        std::fs::write(&file, offset).unwrap();
        let servers = Servers::mariadb_with_clock(&file).await;
        Self { servers, file, _folder: folder }
    }

    /// One relayer, and Baton with its rows in that MariaDB and its queue in a file.
    async fn start_relay(&self, change: impl FnOnce(RelaySetup) -> RelaySetup) -> RelayFixture {
        let url = self.servers.address("BATON_TEST_MYSQL_URL");
        let setup = RelaySetup::relayers(1)
            .engine(TestEngine::Embedded)
            .env("DATABASE_URL", format!("{url}/mysql_clock"))
            .env("RECONCILE_SUBMITTED_MS", "500");
        create_database(&url).await;
        let relay = change(setup).start().await;
        relay.warm_up().await;
        relay
    }

    /// Replaces the file atomically: a reader never finds it empty.
    fn set(&self, offset: &str) {
        let new = self.file.with_extension("new");
        std::fs::write(&new, offset).unwrap();
        std::fs::rename(new, &self.file).unwrap();
    }
}

async fn create_database(url: &str) {
    use sqlx::{Connection, Executor};
    let mut root = sqlx::MySqlConnection::connect(url).await.unwrap();
    root.execute("CREATE DATABASE mysql_clock").await.unwrap();
}

async fn until_unknown(relay: &RelayFixture, id: &str) {
    eventually_ok(SOON, "the outcome to be unknown", || async {
        let status = relay.status(id).await;
        if status["outcomeUnknown"] == true { Ok(()) } else { Err(status.to_string()) }
    })
    .await;
}

/// Waits until Baton has logged this action `times` times.
async fn until_logged(relay: &RelayFixture, action: &str, times: usize) {
    eventually_ok(SOON, format!("{action} in the log"), || async {
        let found = relay.api.output().matches(action).count();
        if found >= times { Ok(()) } else { Err(relay.api.log_excerpt()) }
    })
    .await;
}

fn records(relay: &RelayFixture, serial: usize) -> usize {
    let accepted = relay.relayers[0].accepted();
    accepted.iter().filter(|record| record.field("data") == serial_data(serial)).count()
}
