//! The API dies again and again while clients send, and then the store is taken away from it. What got 202 is done,
//! what got 503 never is, and what got no answer is done once or not at all. Those who named their requests ask until
//! they are told, and get one transaction each.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use harness::engine::{self, Engine};
use harness::proxy::{Mode, Proxy};
use harness::wait::eventually;

use crate::load_client::{Client, Manners};
use crate::relay_fixture::{SOON, Stand};
use crate::scenario::{Story, a_tenth_unknown, mortal};

const KILLS: usize = 22;
/// How many get to see 503, so that there is something that must never happen.
const REFUSALS: usize = 10;

#[tokio::test]
async fn api_killed() {
    let mut story = Story::begin("api_killed");
    // Over two systems a row may have lost its message with the API that was to send it.
    let mut plan = mortal(3).env("RECONCILE_PENDING_MS", "4000");
    let link = match Engine::from_env() {
        Engine::Embedded => None,
        Engine::MySqlSqs | Engine::MySqlRabbitMq => Some(Proxy::start(engine::address("BATON_TEST_MYSQL_URL")).await),
    };
    if let Some(link) = &link {
        plan = plan.api_behind("DATABASE_URL", link);
    }
    let mut stand = plan.start().await;
    stand.warm_up().await;
    a_tenth_unknown(&stand, story.seed);
    story.watch(&stand);
    let manners = Manners { clients: 16, pause_max: Duration::from_millis(100), insistent: true };
    let client = Client::of(&stand);
    let seed = story.seed;
    let (mut promises, ()) = tokio::join!(
        client.crowd(manners, 0..2000, seed),
        story.kill_again_and_again(&mut stand.api, KILLS, Duration::from_millis(900)),
    );
    stand.api.wait_ready(&format!("{}/ready", stand.base), SOON).await.unwrap();
    assert!(promises.accepted.len() > 1000, "the clients got through: {}", promises.accepted.len());

    let away = Away::take(&stand, link.as_ref()).await;
    let unlock = async {
        eventually(SOON, "requests to be refused", || async {
            (client.refusals.load(Ordering::Relaxed) >= REFUSALS).then_some(())
        })
        .await;
        away.give_back().await;
    };
    let manners = Manners { insistent: false, ..manners };
    let (locked_out, ()) = tokio::join!(client.crowd(manners, 2000..2064, seed), unlock);
    promises.extend(locked_out);

    let ledger = story.end(&stand, &promises).await;
    assert_eq!(ledger.failed_promises, 0);
}

/// The store, taken away from the API.
enum Away<'l> {
    Locked(rusqlite::Connection),
    Cut(&'l Proxy),
}

impl<'l> Away<'l> {
    async fn take(stand: &Stand, link: Option<&'l Proxy>) -> Self {
        if let Some(link) = link {
            link.set(Mode::Refuse).await;
            return Self::Cut(link);
        }
        let lock = rusqlite::Connection::open(Path::new(&stand.env["BATON_DATA_DIR"]).join("baton.db")).unwrap();
        lock.busy_timeout(SOON).unwrap();
        lock.execute_batch("BEGIN IMMEDIATE").unwrap();
        Self::Locked(lock)
    }

    async fn give_back(self) {
        match self {
            Self::Locked(lock) => lock.execute_batch("ROLLBACK").unwrap(),
            Self::Cut(link) => link.set(Mode::Forward).await,
        }
    }
}
