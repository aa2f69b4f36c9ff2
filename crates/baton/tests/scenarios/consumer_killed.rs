//! The consumer is killed 25 times while sixteen clients send and a tenth of the submissions have an unknown outcome.

use std::time::Duration;

use harness::engine::TestEngine;

use crate::load_client::{LoadClient, LoadProfile};
use crate::scenario::{Scenario, crash_setup, inject_unknown_outcomes};

const KILLS: usize = 25;

#[tokio::test]
async fn consumer_killed() {
    let mut scenario = Scenario::begin("consumer_killed");
    let mut relay = crash_setup(3).start().await;
    relay.warm_up().await;
    inject_unknown_outcomes(&relay, scenario.seed);
    scenario.start_watching(&relay);
    let mut consumer = relay.consumers.remove(0);
    let profile = LoadProfile { clients: 16, pause_max: Duration::from_millis(100), retry_until_accepted: false };
    let client = LoadClient::of(&relay);
    let seed = scenario.seed;
    let engine = TestEngine::from_env();
    let (count, kills) = (engine.scaled(2000), engine.scaled(KILLS));
    let (answers, ()) = tokio::join!(
        client.send_all(profile, 0..count, seed),
        scenario.kill_repeatedly(&mut consumer, kills, Duration::from_millis(700)),
    );
    assert_eq!(answers.accepted.len(), count, "the API was up all the time: {:?}", answers.unanswered_causes);
    relay.consumers.push(consumer);
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!((ledger.confirmed, ledger.failed), (count, 0));
    assert!(ledger.unknown > count / 20, "about a tenth were to have an unknown outcome, {} have", ledger.unknown);
}
