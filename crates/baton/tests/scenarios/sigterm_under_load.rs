//! Two consumers under load get `SIGTERM` in turn: each finishes its submissions, returns unstarted messages immediately,
//! and exits within its drain timeout. The lease is five minutes, so a message that is not returned delays the scenario
//! visibly.

use std::time::{Duration, Instant};

use harness::relayer::{Faults, PostFault};
use harness::wait::eventually;

use crate::load_client::{LoadClient, LoadProfile};
use crate::relay_fixture::{LATER, SOON};
use crate::scenario::{Scenario, crash_setup, until_final};

const ROUNDS: usize = 4;
const PER_ROUND: usize = 150;
const CONCURRENCY: u64 = 8;
/// The relayers' time to answer until a consumer is stopped: two consumers submit at most eleven a second, so that messages
/// wait however slowly the API accepts.
const SLOW: Duration = Duration::from_millis(1500);
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

#[tokio::test]
async fn sigterm_under_load() {
    let mut scenario = Scenario::begin("sigterm_under_load");
    let setup = crash_setup(3).env("QUEUE_LEASE_MS", "300000").env("CONSUMER_CONCURRENCY", CONCURRENCY.to_string());
    let setup = setup.env("RELAYER_SUBMIT_TIMEOUT_MS", "8000").env("RELAYER_HANDLER_TIMEOUT_MS", "8000");
    let drain_timeout = DRAIN_TIMEOUT.as_millis().to_string();
    let mut relay = setup.env("CONSUMER_DRAIN_TIMEOUT_MS", drain_timeout).start().await;
    relay.add_consumer().await;
    relay.warm_up().await;
    scenario.start_watching(&relay);
    let client = LoadClient::of(&relay);
    let profile = LoadProfile { clients: 32, pause_max: Duration::from_millis(5), retry_until_accepted: false };
    let mut answers = crate::load_client::ClientAnswers::default();
    for round in 0..ROUNDS {
        for relayer in &relay.relayers {
            relayer.set_faults(Faults::every(PostFault::Slow(SLOW)));
        }
        answers.extend(client.send_all(profile, round * PER_ROUND..(round + 1) * PER_ROUND, scenario.seed).await);
        eventually(SOON, "both consumers to be busy and messages to wait", || async {
            let (_, health) = client.get("/health").await?;
            let (store, queue) = (&health["parts"]["store"], &health["parts"]["queue"]);
            (store["claims"].as_u64()? > CONCURRENCY && queue["ready"].as_u64()? > 50).then_some(())
        })
        .await;
        let pause = scenario.random_pause(Duration::from_millis(250));
        tokio::time::sleep(pause).await;
        let consumer = &mut relay.consumers[round % 2];
        let signalled = Instant::now();
        consumer.sigterm().unwrap();
        let exit = consumer.wait_exit(DRAIN_TIMEOUT).await.unwrap();
        assert_eq!(exit.code(), Some(0), "{}", consumer.log_excerpt());
        println!("  stopped after {:?}", signalled.elapsed());
        for relayer in &relay.relayers {
            relayer.set_faults(Faults::default());
        }
        assert_eq!(until_final(&relay, LATER).await, None, "the other consumer takes the rest before its lease ends");
        relay.consumers[round % 2].restart().await.unwrap();
    }
    assert!(answers.unanswered.is_empty(), "the API was up all the time: {:?}", answers.unanswered_causes);
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!((ledger.confirmed, ledger.failed), (ROUNDS * PER_ROUND, 0));
    assert_eq!(ledger.unknown, 0, "no submission was interrupted");
}
