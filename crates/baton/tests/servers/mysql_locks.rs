//! Another client locks every row and gap of Baton's tables in the opposite order, once for longer than the lock wait
//! timeout. Baton retries deadlocks and lock timeouts, and no transaction fails.

use std::time::Duration;

use harness::engine::TestEngine;
use harness::servers::Servers;
use sqlx::{Connection, Executor, MySqlConnection, Row};

use crate::load_client::{ClientAnswers, LoadClient};
use crate::outage::{load_during, start_on};
use crate::scenario::Scenario;

/// Above the lock wait timeout of 2 s, which is half the timeout of a store call.
const OVER_LOCK_TIMEOUT: Duration = Duration::from_millis(2500);
const ROUNDS_MAX: usize = 40;

#[tokio::test]
async fn mysql_locks() {
    let mut scenario = Scenario::begin("mysql_locks");
    let servers = Servers::of(TestEngine::MySqlSqs).await;
    let relay = start_on(&servers).await;
    scenario.start_watching(&relay);
    let mut root = MySqlConnection::connect(&servers.address("BATON_TEST_MYSQL_URL")).await.unwrap();
    let mut other = MySqlConnection::connect(&relay.env["DATABASE_URL"]).await.unwrap();
    other.execute("CREATE TABLE ballast (number INT) ENGINE = InnoDB").await.unwrap();
    let (before, mut own) = (deadlocks(&mut root).await, 0);
    let holds: Vec<_> = (0..ROUNDS_MAX).map(|_| scenario.random_pause(Duration::from_millis(150))).collect();
    let lock = async |_: &LoadClient| {
        for (round, hold) in holds.into_iter().enumerate() {
            // The server rolls back the smaller transaction of a deadlock: many inserts make this one survive.
            other.execute("BEGIN").await.unwrap();
            other.execute("INSERT INTO ballast SELECT seq FROM seq_1_to_2000").await.unwrap();
            let timeline = other.execute("SELECT COUNT(*) FROM timeline FOR UPDATE").await;
            let both = match timeline {
                Ok(_) => other.execute("SELECT COUNT(*) FROM transactions FOR UPDATE").await,
                lost => lost,
            };
            own += i64::from(both.is_err());
            tokio::time::sleep(if round == 0 { OVER_LOCK_TIMEOUT } else { hold }).await;
            other.execute("ROLLBACK").await.unwrap();
            if round > 5 && deadlocks(&mut root).await - before - own >= 5 {
                break;
            }
            tokio::time::sleep(hold).await;
        }
        ClientAnswers::default()
    };
    let answers = load_during(&scenario, &relay, lock).await;
    let ours = deadlocks(&mut root).await - before - own;
    println!("  {ours} of Baton's transactions were rolled back by deadlocks");
    assert!(ours > 0, "no deadlock occurred");
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!(ledger.accepted_and_failed, 0, "a lock fails no accepted transaction");
}

async fn deadlocks(root: &mut MySqlConnection) -> i64 {
    let row = root.fetch_one("SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'").await.unwrap();
    row.get::<String, _>(1).parse().unwrap()
}
