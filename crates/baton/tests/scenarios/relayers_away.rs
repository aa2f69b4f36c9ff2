//! No relayer takes anything, for longer than any count of deliveries lasts: not listening, paused, too busy. Nothing
//! may fail for that, and when they are back everything is done once.

use std::time::Duration;

use harness::relayer::{Faults, PostFault};
use harness::wait::{eventually, eventually_ok};

use crate::load_client::{Client, Manners};
use crate::relay_fixture::{LATER, SOON, Stand};
use crate::scenario::{Story, mortal, until_final};

const DELIVERIES_MAX: usize = 2;
const PER_OUTAGE: usize = 150;
/// Longer than a message would need to use up its deliveries: each is a lease and the consumer's pause of two seconds.
const OUTAGE: Duration = Duration::from_secs(6);

#[tokio::test]
async fn relayers_away() {
    let mut story = Story::begin("relayers_away");
    let plan = mortal(3).env("QUEUE_LEASE_MS", "300").env("QUEUE_MAX_RECEIVES", DELIVERIES_MAX.to_string());
    let stand = plan.env("MAX_ATTEMPTS", "1").start().await;
    stand.warm_up().await;
    story.watch(&stand);
    let client = Client::of(&stand);
    let manners = Manners { clients: 8, pause_max: Duration::from_millis(20), insistent: false };
    let outage = |number: usize| client.crowd(manners, number * PER_OUTAGE..(number + 1) * PER_OUTAGE, story.seed);

    // Not listening.
    for relayer in &stand.relayers {
        relayer.stop_listening().await;
    }
    let mut promises = outage(0).await;
    until_all(&stand, "unreachable").await;
    tokio::time::sleep(OUTAGE).await;
    for relayer in &stand.relayers {
        relayer.listen_again().await;
    }
    assert_eq!(until_final(&stand, LATER).await, None);

    // Paused: first between two looks at their health, then known to be.
    for relayer in &stand.relayers {
        relayer.change_faults(|faults| faults.paused = true);
    }
    promises.extend(outage(1).await);
    until_all(&stand, "paused").await;
    tokio::time::sleep(OUTAGE).await;
    for relayer in &stand.relayers {
        relayer.change_faults(|faults| faults.paused = false);
    }
    assert_eq!(until_final(&stand, LATER).await, None);

    // Well by their own account, and too busy for every single request.
    for relayer in &stand.relayers {
        relayer.set_faults(Faults::every(PostFault::RateLimited));
    }
    promises.extend(outage(2).await);
    let wanted = PER_OUTAGE * (DELIVERIES_MAX + 2);
    eventually_ok(SOON, format!("{wanted} answers of 429"), || async {
        let met: usize = stand.relayers.iter().map(|relayer| relayer.faults_struck()["rate limited"]).sum();
        if met >= wanted { Ok(()) } else { Err(met) }
    })
    .await;
    tokio::time::sleep(OUTAGE).await;
    assert_eq!(stand.count("failed").await, 0);
    for relayer in &stand.relayers {
        relayer.set_faults(Faults::default());
    }

    let ledger = story.end(&stand, &promises).await;
    assert_eq!((ledger.confirmed, ledger.failed), (3 * PER_OUTAGE, 0));
    assert_eq!(ledger.dead_letters, 0, "what the queue buried was put back");
}

async fn until_all(stand: &Stand, state: &str) {
    for index in 0..stand.relayers.len() {
        stand.until_relayer(index, state).await;
    }
    eventually(SOON, "the consumer to stop receiving", || async {
        let text =
            stand.http.get(format!("{}/metrics", stand.consumer_bases[0])).send().await.ok()?.text().await.ok()?;
        text.lines().any(|line| line == "baton_consumer_receiving 0").then_some(())
    })
    .await;
}
