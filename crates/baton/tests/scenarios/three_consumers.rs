//! Three consumers share one queue and are killed in turn: the others take over each one's work.

use std::time::Duration;

use harness::engine::TestEngine;

use crate::load_client::{LoadClient, LoadProfile};
use crate::scenario::{Scenario, crash_setup, inject_unknown_outcomes};

const ROUNDS: usize = 7;

#[tokio::test]
async fn three_consumers() {
    let mut scenario = Scenario::begin("three_consumers");
    let mut relay = crash_setup(3).start().await;
    relay.add_consumer().await;
    relay.add_consumer().await;
    relay.warm_up().await;
    inject_unknown_outcomes(&relay, scenario.seed);
    scenario.start_watching(&relay);
    let profile = LoadProfile { clients: 16, pause_max: Duration::from_millis(120), retry_until_accepted: false };
    let client = LoadClient::of(&relay);
    let seed = scenario.seed;
    let engine = TestEngine::from_env();
    let (count, rounds) = (engine.scaled(1500), engine.scaled(ROUNDS));
    let kill = async {
        for _ in 0..rounds {
            for consumer in &mut relay.consumers {
                scenario.kill_repeatedly(consumer, 1, Duration::from_millis(600)).await;
            }
        }
    };
    let (answers, ()) = tokio::join!(client.send_all(profile, 0..count, seed), kill);
    assert_eq!(answers.accepted.len(), count, "the API was up all the time");
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!((ledger.confirmed, ledger.failed), (count, 0));
}
