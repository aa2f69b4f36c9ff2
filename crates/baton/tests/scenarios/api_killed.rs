//! The API is killed 22 times while clients send, and then loses its store. A request with 202 has one effect, a request
//! with 503 none, and a request without an answer at most one. Clients with idempotency keys repeat their requests until
//! they are accepted, and get one transaction each.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use harness::engine::{self, TestEngine};
use harness::proxy::{Mode, Proxy};
use harness::wait::eventually;

use crate::load_client::{LoadClient, LoadProfile};
use crate::relay_fixture::{RelayFixture, SOON};
use crate::scenario::{Scenario, crash_setup, inject_unknown_outcomes};

const KILLS: usize = 22;
/// Minimum number of 503 answers before the store comes back.
const REFUSALS: usize = 10;

#[tokio::test]
async fn api_killed() {
    let mut scenario = Scenario::begin("api_killed");
    // With separate store and queue, a killed API may leave a row without a message until the reconciler queues it.
    let mut setup = crash_setup(3).env("RECONCILE_PENDING_MS", "4000");
    let link = match TestEngine::from_env() {
        TestEngine::Embedded => None,
        TestEngine::MySqlSqs | TestEngine::MySqlRabbitMq => {
            Some(Proxy::start(engine::address("BATON_TEST_MYSQL_URL")).await)
        }
    };
    if let Some(link) = &link {
        setup = setup.api_behind("DATABASE_URL", link);
    }
    let mut relay = setup.start().await;
    relay.warm_up().await;
    inject_unknown_outcomes(&relay, scenario.seed);
    scenario.start_watching(&relay);
    let profile = LoadProfile { clients: 16, pause_max: Duration::from_millis(100), retry_until_accepted: true };
    let client = LoadClient::of(&relay);
    let seed = scenario.seed;
    let engine = TestEngine::from_env();
    let (count, kills) = (engine.scaled(2000), engine.scaled(KILLS));
    let (mut answers, ()) = tokio::join!(
        client.send_all(profile, 0..count, seed),
        scenario.kill_repeatedly(&mut relay.api, kills, Duration::from_millis(900)),
    );
    relay.api.wait_ready(&format!("{}/ready", relay.base), SOON).await.unwrap();
    assert!(answers.accepted.len() > count / 2, "only {} requests were accepted", answers.accepted.len());

    let outage = StoreOutage::start(&relay, link.as_ref()).await;
    let end_outage = async {
        eventually(SOON, "requests to be refused", || async {
            (client.refusals.load(Ordering::Relaxed) >= REFUSALS).then_some(())
        })
        .await;
        outage.end().await;
    };
    let profile = LoadProfile { retry_until_accepted: false, ..profile };
    let (during_outage, ()) = tokio::join!(client.send_all(profile, count..count + 64, seed), end_outage);
    answers.extend(during_outage);

    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!(ledger.accepted_and_failed, 0);
}

/// Makes the store unavailable to the API.
enum StoreOutage<'l> {
    /// A lock on the SQLite file.
    Locked(rusqlite::Connection),
    /// A link to MySQL that refuses connections.
    Refused(&'l Proxy),
}

impl<'l> StoreOutage<'l> {
    async fn start(relay: &RelayFixture, link: Option<&'l Proxy>) -> Self {
        if let Some(link) = link {
            link.set(Mode::Refuse).await;
            return Self::Refused(link);
        }
        let lock = rusqlite::Connection::open(Path::new(&relay.env["BATON_DATA_DIR"]).join("baton.db")).unwrap();
        lock.busy_timeout(SOON).unwrap();
        lock.execute_batch("BEGIN IMMEDIATE").unwrap();
        Self::Locked(lock)
    }

    async fn end(self) {
        match self {
            Self::Locked(lock) => lock.execute_batch("ROLLBACK").unwrap(),
            Self::Refused(link) => link.set(Mode::Forward).await,
        }
    }
}
