//! A submission takes longer than the message's lease, and the lease cannot be renewed: first because the link to SQS is
//! silent, then because the consumer is frozen. Another consumer receives the message, and there is one effect.

use std::time::Duration;

use harness::engine::TestEngine;
use harness::proxy::Mode;
use harness::relayer::PostFault;
use harness::wait::eventually_ok;

use crate::load_client::{ClientAnswers, LoadClient};
use crate::outage::{RETRYING_LOAD, link_to, short_timings};
use crate::relay_fixture::{LATER, RelayFixture, SOON};
use crate::scenario::{Scenario, inject_faults, until_final};

const LEASE_MS: u64 = 1000;
const EACH: usize = 90;

#[tokio::test]
async fn slow_submit() {
    let mut scenario = Scenario::begin("slow_submit");
    let link = link_to("BATON_TEST_SQS_URL").await;
    let mut relay = short_timings()
        .engine(TestEngine::MySqlSqs)
        .env("QUEUE_LEASE_MS", LEASE_MS.to_string())
        .env("RELAYER_SUBMIT_TIMEOUT_MS", "8000")
        .env("RELAYER_HANDLER_TIMEOUT_MS", "8000")
        .start()
        .await;
    // Only the second consumer reaches SQS through the link.
    let direct = relay.env.insert("SQS_ENDPOINT_URL".to_owned(), link.url()).unwrap();
    relay.add_consumer().await;
    relay.env.insert("SQS_ENDPOINT_URL".to_owned(), direct);
    relay.warm_up().await;
    inject_faults(&relay, scenario.seed, |plan| {
        plan.with(PostFault::Slow(Duration::from_millis(4 * LEASE_MS)), 0.3)
            .with(PostFault::Slow(Duration::from_millis(LEASE_MS)), 0.3)
    });
    scenario.start_watching(&relay);
    let client = LoadClient::of(&relay);
    let mut answers = ClientAnswers::default();

    // Leases are renewed.
    answers.extend(client.send_all(RETRYING_LOAD, 0..EACH, scenario.seed).await);

    // Renewal is impossible: the other consumer receives messages whose rows are claimed.
    let (sent, ()) = tokio::join!(client.send_all(RETRYING_LOAD, EACH..2 * EACH, scenario.seed), async {
        until_busy(&relay, 1).await;
        link.set(Mode::BlackHole).await;
    });
    answers.extend(sent);
    eventually_ok(SOON, "leases to be lost", || async {
        let lost = relay.consumer_metric(1, "pipeline_lease_lost_total", "").await;
        if lost > 0.0 { Ok(()) } else { Err(lost) }
    })
    .await;
    link.set(Mode::Cut).await;
    link.set(Mode::Forward).await;

    // The consumer is frozen and renews nothing.
    let (sent, ()) = tokio::join!(client.send_all(RETRYING_LOAD, 2 * EACH..3 * EACH, scenario.seed), async {
        until_busy(&relay, 1).await;
        relay.consumers[1].sigstop().unwrap();
    });
    answers.extend(sent);
    assert_eq!(until_final(&relay, LATER).await, None);
    relay.consumers[1].sigcont().unwrap();

    assert_eq!(answers.accepted.len(), 3 * EACH, "the API was healthy all the time");
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!((ledger.confirmed, ledger.failed), (3 * EACH, 0));
}

/// Waits until a consumer has five submissions in flight.
async fn until_busy(relay: &RelayFixture, which: usize) {
    eventually_ok(SOON, "a consumer to be busy", || async {
        let busy = relay.consumer_metric(which, "pipeline_in_flight", "").await;
        if busy >= 5.0 { Ok(()) } else { Err(busy) }
    })
    .await;
}
