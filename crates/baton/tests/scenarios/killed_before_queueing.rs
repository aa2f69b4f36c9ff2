//! The consumer dies at the worst moment: it has just stored that a transaction is to be sent again, and has not queued
//! it yet. Nobody may have to wait for the sweep of forgotten rows, which comes after ten minutes.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use harness::engine::Engine;
use harness::relayer::{FaultPlan, Faults, PostFault};
use rusqlite::Connection;
use uuid::Uuid;

use crate::load_client::{Client, Manners};
use crate::relay_fixture::SOON;
use crate::scenario::{Story, mortal};

const ROUNDS: usize = 3;
const PER_ROUND: usize = 100;

#[tokio::test]
async fn killed_before_queueing() {
    let mut story = Story::begin("killed_before_queueing");
    let mut stand = mortal(2).engine(Engine::Embedded).env("BREAKER_FAILURES", "1000").start().await;
    stand.warm_up().await;
    for (number, relayer) in stand.relayers.iter().enumerate() {
        let plan = FaultPlan::new(story.seed.wrapping_add(number as u64))
            .with(PostFault::ErrorBeforeStoring, 0.3)
            .with(PostFault::QueueUnavailable, 0.1);
        relayer.set_faults(Faults::planned(plan));
    }
    story.watch(&stand);
    let client = Client::of(&stand);
    let manners = Manners { clients: 8, pause_max: Duration::from_millis(40), insistent: false };
    let file = PathBuf::from(&stand.env["BATON_DATA_DIR"]).join("baton.db");
    let mut promises = crate::load_client::Promises::default();
    for round in 0..ROUNDS {
        let file = file.clone();
        let catch = tokio::task::spawn_blocking(move || catch_a_gap(&file));
        let crowd = client.crowd(manners, round * PER_ROUND..(round + 1) * PER_ROUND, story.seed);
        let kill = async {
            // Where row and message are one commit there is no such moment, and nothing to kill for.
            let Some(lock) = catch.await.unwrap() else { return 0 };
            stand.consumers[0].kill9().await.unwrap();
            drop(lock);
            stand.consumers[0].restart().await.unwrap();
            1
        };
        let (more, kills) = tokio::join!(crowd, kill);
        promises.extend(more);
        story.kills += kills;
    }
    let ledger = story.end(&stand, &promises).await;
    assert_eq!((ledger.confirmed, ledger.failed), (promises.accepted.len(), 0));
}

/// Locks the database at a moment in which a transaction waits and no message speaks of it. The lock is kept until the
/// connection goes.
fn catch_a_gap(file: &PathBuf) -> Option<Connection> {
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
