//! The consumer is killed after it has stored that a transaction is to be resent, and before it has queued the message. The
//! transaction must not have to wait for the sweep of unclaimed rows, which comes after ten minutes.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use harness::engine::TestEngine;
use harness::relayer::PostFault;
use rusqlite::Connection;
use uuid::Uuid;

use crate::load_client::{ClientAnswers, LoadClient, LoadProfile};
use crate::relay_fixture::SOON;
use crate::scenario::{Scenario, crash_setup, inject_faults};

const ROUNDS: usize = 3;
const PER_ROUND: usize = 100;

#[tokio::test]
async fn killed_before_queueing() {
    let mut scenario = Scenario::begin("killed_before_queueing");
    let mut relay = crash_setup(2).engine(TestEngine::Embedded).env("BREAKER_FAILURES", "1000").start().await;
    relay.warm_up().await;
    inject_faults(&relay, scenario.seed, |plan| {
        plan.with(PostFault::ErrorBeforeStoring, 0.3).with(PostFault::QueueUnavailable, 0.1)
    });
    scenario.start_watching(&relay);
    let client = LoadClient::of(&relay);
    let profile = LoadProfile { clients: 8, pause_max: Duration::from_millis(40), retry_until_accepted: false };
    let file = PathBuf::from(&relay.env["BATON_DATA_DIR"]).join("baton.db");
    let mut answers = ClientAnswers::default();
    for round in 0..ROUNDS {
        let file = file.clone();
        let locking = tokio::task::spawn_blocking(move || lock_at_gap(&file));
        let sending = client.send_all(profile, round * PER_ROUND..(round + 1) * PER_ROUND, scenario.seed);
        let kill = async {
            // If row and message are one commit, no such gap exists and the consumer is not killed.
            let Some(lock) = locking.await.unwrap() else { return 0 };
            relay.consumers[0].kill9().await.unwrap();
            drop(lock);
            relay.consumers[0].restart().await.unwrap();
            1
        };
        let (more, kills) = tokio::join!(sending, kill);
        answers.extend(more);
        scenario.kills += kills;
    }
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!((ledger.confirmed, ledger.failed), (answers.accepted.len(), 0));
}

/// Locks the database while a transaction is waiting and no message refers to it. Dropping the connection releases the
/// lock.
fn lock_at_gap(file: &PathBuf) -> Option<Connection> {
    let connection = Connection::open(file).unwrap();
    let until = Instant::now() + SOON / 3;
    while Instant::now() < until {
        if connection.execute_batch("BEGIN IMMEDIATE").is_err() {
            std::thread::yield_now();
            continue;
        }
        if has_gap(&connection).unwrap() {
            return Some(connection);
        }
        connection.execute_batch("ROLLBACK").unwrap();
        std::thread::sleep(Duration::from_micros(300));
    }
    None
}

fn has_gap(connection: &Connection) -> rusqlite::Result<bool> {
    let mut waiting = connection.prepare_cached(
        "SELECT id FROM transactions WHERE status = 'pending' AND claim_consumer IS NULL AND relayer_tx_id IS NULL",
    )?;
    let waiting = waiting.query_map([], |row| row.get::<_, [u8; 16]>(0))?.collect::<Result<Vec<_>, _>>()?;
    if waiting.is_empty() {
        return Ok(false);
    }
    let mut bodies =
        connection.prepare_cached("SELECT body FROM queue_messages UNION ALL SELECT body FROM queue_dead_messages")?;
    let bodies = bodies.query_map([], |row| row.get::<_, Vec<u8>>(0))?.collect::<Result<Vec<_>, _>>()?;
    let queued = |id: &[u8; 16]| {
        let id = Uuid::from_bytes(*id).to_string();
        bodies.iter().any(|body| String::from_utf8_lossy(body).contains(&id))
    };
    Ok(waiting.iter().any(|id| !queued(id)))
}
