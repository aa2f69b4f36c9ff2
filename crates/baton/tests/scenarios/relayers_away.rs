//! No relayer takes a submission until every message could have used up its deliveries: not listening, paused, or rate
//! limited. No transaction fails, and after the outage each has one effect.

use std::time::Duration;

use harness::relayer::{Faults, PostFault};
use harness::wait::{eventually, eventually_ok};

use crate::load_client::{LoadClient, LoadProfile};
use crate::relay_fixture::{LATER, RelayFixture, SOON};
use crate::scenario::{Scenario, crash_setup, until_final};

const DELIVERIES_MAX: usize = 2;
const PER_OUTAGE: usize = 150;
/// Long enough for a message to use up its deliveries: each takes a lease and the consumer's pause of two seconds.
const OUTAGE: Duration = Duration::from_secs(6);

#[tokio::test]
async fn relayers_away() {
    let mut scenario = Scenario::begin("relayers_away");
    let setup = crash_setup(3).env("QUEUE_LEASE_MS", "300").env("QUEUE_MAX_RECEIVES", DELIVERIES_MAX.to_string());
    let relay = setup.env("MAX_ATTEMPTS", "1").start().await;
    relay.warm_up().await;
    scenario.start_watching(&relay);
    let client = LoadClient::of(&relay);
    let profile = LoadProfile { clients: 8, pause_max: Duration::from_millis(20), retry_until_accepted: false };
    let send_during =
        |number: usize| client.send_all(profile, number * PER_OUTAGE..(number + 1) * PER_OUTAGE, scenario.seed);

    // Not listening.
    for relayer in &relay.relayers {
        relayer.stop_listening().await;
    }
    let mut answers = send_during(0).await;
    until_all(&relay, "unreachable").await;
    tokio::time::sleep(OUTAGE).await;
    for relayer in &relay.relayers {
        relayer.listen_again().await;
    }
    assert_eq!(until_final(&relay, LATER).await, None);

    // Paused: first between two health checks, then known to be paused.
    for relayer in &relay.relayers {
        relayer.change_faults(|faults| faults.paused = true);
    }
    answers.extend(send_during(1).await);
    until_all(&relay, "paused").await;
    tokio::time::sleep(OUTAGE).await;
    for relayer in &relay.relayers {
        relayer.change_faults(|faults| faults.paused = false);
    }
    assert_eq!(until_final(&relay, LATER).await, None);

    // Healthy by their own account, and answering 429 to every submission.
    for relayer in &relay.relayers {
        relayer.set_faults(Faults::every(PostFault::RateLimited));
    }
    answers.extend(send_during(2).await);
    let wanted = PER_OUTAGE * (DELIVERIES_MAX + 2);
    eventually_ok(SOON, format!("{wanted} answers of 429"), || async {
        let answered: usize = relay.relayers.iter().map(|relayer| relayer.faults_struck()["rate limited"]).sum();
        if answered >= wanted { Ok(()) } else { Err(answered) }
    })
    .await;
    tokio::time::sleep(OUTAGE).await;
    assert_eq!(relay.count("failed").await, 0);
    for relayer in &relay.relayers {
        relayer.set_faults(Faults::default());
    }

    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!((ledger.confirmed, ledger.failed), (3 * PER_OUTAGE, 0));
    assert_eq!(ledger.dead_letters, 0, "buried messages were put back");
}

async fn until_all(relay: &RelayFixture, state: &str) {
    for index in 0..relay.relayers.len() {
        relay.until_relayer(index, state).await;
    }
    eventually(SOON, "the consumer to stop receiving", || async {
        let text = relay
            .http
            .get(format!("{}/metrics", harness::admin_url(&relay.consumer_bases[0])))
            .send()
            .await
            .ok()?
            .text()
            .await
            .ok()?;
        text.lines().any(|line| line == "baton_consumer_receiving 0").then_some(())
    })
    .await;
}
