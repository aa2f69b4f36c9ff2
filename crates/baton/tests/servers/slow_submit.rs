//! A relayer takes longer than a message is leased for, and the lease cannot be renewed: first because the way to SQS is
//! gone, then because the consumer is frozen. Another consumer is given the message, and there is one effect.

use std::time::Duration;

use harness::engine::{Engine, server};
use harness::proxy::{Mode, Proxy};
use harness::relayer::{FaultPlan, Faults, PostFault};
use harness::wait::eventually_ok;

use crate::load_client::{Client, Promises};
use crate::outage::{CROWD, consumer_metric, short_clocks};
use crate::relay_fixture::{LATER, SOON, Stand};
use crate::scenario::{Story, until_final};

const LEASE_MS: u64 = 1000;
const EACH: usize = 150;

#[tokio::test]
async fn slow_submit() {
    let mut story = Story::begin("slow_submit");
    let url = reqwest::Url::parse(&server("BATON_TEST_SQS_URL")).unwrap();
    let link = Proxy::start(format!("127.0.0.1:{}", url.port().unwrap())).await;
    let mut stand = short_clocks()
        .engine(Engine::MySqlSqs)
        .env("QUEUE_LEASE_MS", LEASE_MS.to_string())
        .env("RELAYER_SUBMIT_TIMEOUT_MS", "8000")
        .env("RELAYER_HANDLER_TIMEOUT_MS", "8000")
        .start()
        .await;
    // The second one, and it alone, reaches SQS by the link.
    let direct = stand.env.insert("SQS_ENDPOINT_URL".to_owned(), link.url()).unwrap();
    stand.add_consumer().await;
    stand.env.insert("SQS_ENDPOINT_URL".to_owned(), direct);
    stand.warm_up().await;
    for (number, relayer) in stand.relayers.iter().enumerate() {
        let plan = FaultPlan::new(story.seed.wrapping_add(number as u64))
            .with(PostFault::Slow(Duration::from_millis(4 * LEASE_MS)), 0.3)
            .with(PostFault::Slow(Duration::from_millis(LEASE_MS)), 0.3);
        relayer.set_faults(Faults::planned(plan));
    }
    story.watch(&stand);
    let client = Client::of(&stand);
    let mut promises = Promises::default();

    // Leases are renewed.
    promises.extend(client.crowd(CROWD, 0..EACH, story.seed).await);

    // They cannot be: the other one meets messages whose rows are claimed.
    let (sent, ()) = tokio::join!(client.crowd(CROWD, EACH..2 * EACH, story.seed), async {
        until_busy(&stand, 1).await;
        link.set(Mode::BlackHole).await;
    });
    promises.extend(sent);
    eventually_ok(SOON, "leases to be lost", || async {
        let lost = consumer_metric(&stand, 1, "pipeline_lease_lost_total", "").await;
        if lost > 0.0 { Ok(()) } else { Err(lost) }
    })
    .await;
    link.set(Mode::Cut).await;
    link.set(Mode::Forward).await;

    // Nobody is there to do it.
    let (sent, ()) = tokio::join!(client.crowd(CROWD, 2 * EACH..3 * EACH, story.seed), async {
        until_busy(&stand, 1).await;
        stand.consumers[1].sigstop().unwrap();
    });
    promises.extend(sent);
    assert_eq!(until_final(&stand, LATER).await, None);
    stand.consumers[1].sigcont().unwrap();

    assert_eq!(promises.accepted.len(), 3 * EACH, "the API was well all the time");
    let ledger = story.end(&stand, &promises).await;
    assert_eq!((ledger.confirmed, ledger.failed), (3 * EACH, 0));
}

/// Waits until a consumer has submissions under way.
async fn until_busy(stand: &Stand, which: usize) {
    eventually_ok(SOON, "a consumer to be busy", || async {
        let busy = consumer_metric(stand, which, "pipeline_in_flight", "").await;
        if busy >= 5.0 { Ok(()) } else { Err(busy) }
    })
    .await;
}
