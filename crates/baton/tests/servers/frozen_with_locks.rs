//! A consumer is frozen in the middle of a database transaction, with rows locked. The server ends that transaction by
//! itself, others go on with those rows, and what the frozen one does when it wakes is refused.

use harness::engine::Engine;
use harness::servers::Servers;
use sqlx::{Connection, Executor, MySqlConnection};

use crate::load_client::{Client, Promises};
use crate::outage::{CROWD, short_clocks};
use crate::relay_fixture::LATER;
use crate::scenario::{Story, until_final};

const EACH: usize = 120;
const ROUNDS_MAX: usize = 10;
/// How often it is stopped during one round until it is caught.
const STOPS_MAX: usize = 100;

#[tokio::test]
async fn frozen_with_locks() {
    let mut story = Story::begin("frozen_with_locks");
    let servers = Servers::of(Engine::MySqlSqs).await;
    let mut stand = short_clocks().on(&servers).start().await;
    stand.add_consumer().await;
    stand.warm_up().await;
    story.watch(&stand);
    let mut root = MySqlConnection::connect(&servers.address("BATON_TEST_MYSQL_URL")).await.unwrap();
    let client = Client::of(&stand);
    let (mut promises, mut serial, mut caught) = (Promises::default(), 0, false);
    for _ in 0..ROUNDS_MAX {
        let sending = client.crowd(CROWD, serial..serial + EACH, story.seed);
        let catching = async {
            for _ in 0..STOPS_MAX {
                stand.consumers[0].sigstop().unwrap();
                if keeps_locks(&mut root).await {
                    return true;
                }
                stand.consumers[0].sigcont().unwrap();
            }
            false
        };
        let sent;
        (sent, caught) = tokio::join!(sending, catching);
        serial += EACH;
        promises.extend(sent);
        if caught {
            break;
        }
    }
    assert!(caught, "the consumer was never stopped in the middle of a transaction");
    // While it is frozen.
    assert_eq!(until_final(&stand, LATER).await, None);
    stand.consumers[0].sigcont().unwrap();
    promises.extend(client.crowd(CROWD, serial..serial + EACH, story.seed).await);
    let ledger = story.end(&stand, &promises).await;
    assert_eq!(ledger.failed_promises, 0, "a stopped process is not the work's fault");
}

/// Whether somebody has changed rows, says nothing more, and is still there a moment later.
async fn keeps_locks(root: &mut MySqlConnection) -> bool {
    const IDLE: &str = "SELECT trx_mysql_thread_id FROM information_schema.innodb_trx \
         JOIN information_schema.processlist ON id = trx_mysql_thread_id \
         WHERE command = 'Sleep' AND trx_rows_modified > 0 AND time_ms > 300";
    // Longer than whoever is awake takes between two statements, on a busy machine too.
    root.execute("DO SLEEP(0.35)").await.unwrap();
    !root.fetch_all(IDLE).await.unwrap().is_empty()
}
