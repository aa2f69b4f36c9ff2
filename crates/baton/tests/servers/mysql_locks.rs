//! Somebody else works in the same tables: locks every row and every gap, in the opposite order to ours, and sometimes
//! for longer than a lock is waited for. Deadlocks and lost locks are tried again; nobody's work is at fault.

use std::time::Duration;

use harness::engine::Engine;
use harness::servers::Servers;
use sqlx::{Connection, Executor, MySqlConnection, Row};

use crate::load_client::{Client, Promises};
use crate::outage::{load_during, stand_on};
use crate::scenario::Story;

/// A lock is waited for 2 seconds: half of what a call may take.
const TOO_LONG: Duration = Duration::from_millis(2500);
const ROUNDS_MAX: usize = 40;

#[tokio::test]
async fn mysql_locks() {
    let mut story = Story::begin("mysql_locks");
    let servers = Servers::of(Engine::MySqlSqs).await;
    let stand = stand_on(&servers).await;
    story.watch(&stand);
    let mut root = MySqlConnection::connect(&servers.address("BATON_TEST_MYSQL_URL")).await.unwrap();
    let mut other = MySqlConnection::connect(&stand.env["DATABASE_URL"]).await.unwrap();
    other.execute("CREATE TABLE ballast (number INT) ENGINE = InnoDB").await.unwrap();
    let (before, mut own) = (deadlocks(&mut root).await, 0);
    let holds: Vec<_> = (0..ROUNDS_MAX).map(|_| story.moment(Duration::from_millis(150))).collect();
    let lock = async |_: &Client| {
        for (round, hold) in holds.into_iter().enumerate() {
            // The server ends the lighter one of two: weight makes us the one that stays.
            other.execute("BEGIN").await.unwrap();
            other.execute("INSERT INTO ballast SELECT seq FROM seq_1_to_2000").await.unwrap();
            let timeline = other.execute("SELECT COUNT(*) FROM timeline FOR UPDATE").await;
            let both = match timeline {
                Ok(_) => other.execute("SELECT COUNT(*) FROM transactions FOR UPDATE").await,
                lost => lost,
            };
            own += i64::from(both.is_err());
            tokio::time::sleep(if round == 0 { TOO_LONG } else { hold }).await;
            other.execute("ROLLBACK").await.unwrap();
            if round > 5 && deadlocks(&mut root).await - before - own >= 5 {
                break;
            }
            tokio::time::sleep(hold).await;
        }
        Promises::default()
    };
    let promises = load_during(&story, &stand, lock).await;
    let ours = deadlocks(&mut root).await - before - own;
    println!("  {ours} transactions of ours were undone by deadlocks");
    assert!(ours > 0, "nobody got in the way of anybody");
    let ledger = story.end(&stand, &promises).await;
    assert_eq!(ledger.failed_promises, 0, "a lock is not the work's fault");
}

async fn deadlocks(root: &mut MySqlConnection) -> i64 {
    let row = root.fetch_one("SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'").await.unwrap();
    row.get::<String, _>(1).parse().unwrap()
}
