//! Two consumers under load are told to stop in turn: each finishes what it has begun, hands back the rest at once, and
//! ends well within its limit. With a lease of a minute, anything that was kept back would show.

use std::time::{Duration, Instant};

use harness::engine::Engine;
use harness::relayer::{Faults, PostFault};
use harness::wait::eventually;

use crate::load_client::{Client, Manners};
use crate::relay_fixture::SOON;
use crate::scenario::{Story, mortal, until_final};

const ROUNDS: usize = 4;
const PER_ROUND: usize = 300;
const LIMIT: Duration = Duration::from_secs(10);

#[tokio::test]
async fn sigterm_under_load() {
    let mut story = Story::begin("sigterm_under_load");
    // Servers accept more slowly, and yet the clients are to be ahead.
    let (at_once, answer_after) = match Engine::from_env() {
        Engine::Embedded => (16, Duration::from_millis(250)),
        Engine::MySqlSqs | Engine::MySqlRabbitMq => (8, Duration::from_millis(400)),
    };
    let plan = mortal(3).env("QUEUE_LEASE_MS", "60000").env("CONSUMER_CONCURRENCY", at_once.to_string());
    let limit = LIMIT.as_millis().to_string();
    let mut stand = plan.env("CONSUMER_DRAIN_TIMEOUT_MS", limit).start().await;
    stand.add_consumer().await;
    stand.warm_up().await;
    for relayer in &stand.relayers {
        relayer.set_faults(Faults::every(PostFault::Slow(answer_after)));
    }
    story.watch(&stand);
    let client = Client::of(&stand);
    let manners = Manners { clients: 32, pause_max: Duration::from_millis(5), insistent: false };
    let mut promises = crate::load_client::Promises::default();
    for round in 0..ROUNDS {
        promises.extend(client.crowd(manners, round * PER_ROUND..(round + 1) * PER_ROUND, story.seed).await);
        eventually(SOON, "both to be at work with more waiting", || async {
            let (_, health) = client.get("/health").await?;
            let (store, queue) = (&health["parts"]["store"], &health["parts"]["queue"]);
            (store["claims"].as_u64()? > at_once && queue["ready"].as_u64()? > 50).then_some(())
        })
        .await;
        let moment = story.moment(Duration::from_millis(250));
        tokio::time::sleep(moment).await;
        let consumer = &mut stand.consumers[round % 2];
        let told = Instant::now();
        consumer.sigterm().unwrap();
        let exit = consumer.wait_exit(LIMIT).await.unwrap();
        assert_eq!(exit.code(), Some(0), "{}", consumer.story());
        println!("  stopped after {:?}", told.elapsed());
        assert_eq!(until_final(&stand, SOON).await, None, "the other one takes the rest at once");
        stand.consumers[round % 2].restart().await.unwrap();
    }
    assert!(promises.unanswered.is_empty(), "the API was there all the time: {:?}", promises.silences);
    let ledger = story.end(&stand, &promises).await;
    assert_eq!((ledger.confirmed, ledger.failed), (ROUNDS * PER_ROUND, 0));
    assert_eq!(ledger.unknown, 0, "nothing was left half-done");
}
