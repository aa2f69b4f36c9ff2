//! A consumer is frozen within a database transaction while it holds row locks. The server rolls that transaction back, the
//! other consumer continues with those rows, and the thawed consumer's writes are rejected.

use harness::engine::TestEngine;
use harness::servers::Servers;
use sqlx::{Connection, Executor, MySqlConnection};

use crate::load_client::{ClientAnswers, LoadClient};
use crate::outage::{RETRYING_LOAD, short_timings};
use crate::relay_fixture::LATER;
use crate::scenario::{Scenario, until_final};

const EACH: usize = 120;
const ROUNDS_MAX: usize = 10;
/// Freezes per round until one hits an open transaction.
const STOPS_MAX: usize = 100;

#[tokio::test]
async fn frozen_with_locks() {
    let mut scenario = Scenario::begin("frozen_with_locks");
    let servers = Servers::of(TestEngine::MySqlSqs).await;
    let mut relay = short_timings().on(&servers).start().await;
    relay.add_consumer().await;
    relay.warm_up().await;
    scenario.start_watching(&relay);
    let mut root = MySqlConnection::connect(&servers.address("BATON_TEST_MYSQL_URL")).await.unwrap();
    let client = LoadClient::of(&relay);
    let (mut answers, mut serial, mut caught) = (ClientAnswers::default(), 0, false);
    for _ in 0..ROUNDS_MAX {
        let sending = client.send_all(RETRYING_LOAD, serial..serial + EACH, scenario.seed);
        let catching = async {
            for _ in 0..STOPS_MAX {
                relay.consumers[0].sigstop().unwrap();
                if holds_idle_locks(&mut root).await {
                    return true;
                }
                relay.consumers[0].sigcont().unwrap();
            }
            false
        };
        let sent;
        (sent, caught) = tokio::join!(sending, catching);
        serial += EACH;
        answers.extend(sent);
        if caught {
            break;
        }
    }
    assert!(caught, "the consumer was never frozen within a transaction");
    // Everything becomes final while the consumer is still frozen.
    assert_eq!(until_final(&relay, LATER).await, None);
    relay.consumers[0].sigcont().unwrap();
    answers.extend(client.send_all(RETRYING_LOAD, serial..serial + EACH, scenario.seed).await);
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!(ledger.accepted_and_failed, 0, "a frozen process fails no accepted transaction");
}

/// Whether a connection with uncommitted changes has been idle for 300 ms.
async fn holds_idle_locks(root: &mut MySqlConnection) -> bool {
    const IDLE: &str = "SELECT trx_mysql_thread_id FROM information_schema.innodb_trx \
         JOIN information_schema.processlist ON id = trx_mysql_thread_id \
         WHERE command = 'Sleep' AND trx_rows_modified > 0 AND time_ms > 300";
    // Longer than a running process takes between two statements, even on a busy machine.
    root.execute("DO SLEEP(0.35)").await.unwrap();
    !root.fetch_all(IDLE).await.unwrap().is_empty()
}
