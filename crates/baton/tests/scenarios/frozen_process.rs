//! A consumer is frozen in the middle of its work for longer than its claims and leases last, another one takes
//! everything over, and then the first goes on as if nothing had happened: what it does late is refused.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use harness::relayer::{FaultPlan, Faults, PostFault};
use harness::wait::eventually_ok;

use crate::load_client::{Client, Manners, Promises, Told};
use crate::relay_fixture::{LATER, SOON, Stand};
use crate::scenario::{Story, mortal, until_final};

const ROUNDS: usize = 4;
const PER_ROUND: usize = 120;

#[tokio::test]
async fn frozen_process() {
    let mut story = Story::begin("frozen_process");
    // The frozen one must not have given up waiting for its answers when it wakes: it is to act on them, late.
    let mut stand = mortal(3).env("RELAYER_SUBMIT_TIMEOUT_MS", "8000").start().await;
    stand.add_consumer().await;
    stand.warm_up().await;
    for (number, relayer) in stand.relayers.iter().enumerate() {
        // Slow answers: there is always something for which the frozen one is waiting.
        let plan = FaultPlan::new(story.seed.wrapping_add(number as u64))
            .with(PostFault::Slow(Duration::from_millis(400)), 0.7)
            .with(PostFault::ErrorAfterStoring, 0.05);
        relayer.set_faults(Faults::planned(plan));
    }
    story.watch(&stand);
    let client = Client::of(&stand);
    let manners = Manners { clients: 16, pause_max: Duration::from_millis(10), insistent: false };
    let mut promises = Promises::default();
    let mut serial = 0;
    for round in 0..ROUNDS {
        let frozen = round % 2;
        let seed = story.seed;
        promises.extend(client.crowd(manners, serial..serial + PER_ROUND, seed).await);
        serial += PER_ROUND;
        serial = freeze(&mut story, &stand, frozen, serial, &mut promises).await;
        // The other one finishes everything, what the frozen one had begun included.
        assert_eq!(until_final(&stand, LATER).await, None);
        stand.consumers[frozen].sigcont().unwrap();
        // It is well again once it has done something new and nothing is left that it holds.
        promises.extend(client.crowd(manners, serial..serial + PER_ROUND, seed).await);
        serial += PER_ROUND;
        stand.consumers[frozen].wait_ready(&format!("{}/ready", stand.consumer_bases[frozen]), SOON).await.unwrap();
        assert_eq!(until_final(&stand, LATER).await, None);
    }
    let late = eventually_ok(SOON, "answers that came too late to be refused", || async {
        let late: usize = stand.consumers.iter().map(|consumer| consumer.output().matches("late_answer").count()).sum();
        if late > 0 { Ok(late) } else { Err(late) }
    })
    .await;
    println!("  {late} late answers were refused");
    let ledger = story.end(&stand, &promises).await;
    assert_eq!(ledger.failed, 0);
}

/// The moment between storing a claim and sending is the one that matters most: whoever wakes in it holds a claim that
/// somebody else has settled since, and must not send any more.
#[tokio::test]
async fn frozen_before_sending() {
    const ROUNDS_MAX: usize = 8;
    const FENCED_MIN: usize = 3;
    let mut story = Story::begin("frozen_before_sending");
    let mut stand = mortal(3).env("LOG_LEVEL", "info").start().await;
    stand.add_consumer().await;
    stand.warm_up().await;
    story.watch(&stand);
    let client = Client::of(&stand);
    let manners = Manners { clients: 64, pause_max: Duration::ZERO, insistent: false };
    let (mut promises, mut serial, mut fenced) = (Promises::default(), 0, 0);
    for _ in 0..ROUNDS_MAX {
        let burst = client.crowd(manners, serial..serial + 3 * PER_ROUND, story.seed);
        serial += 3 * PER_ROUND;
        let (sent, next) = tokio::join!(burst, freeze_in_a_burst(&stand, 0, serial));
        promises.extend(sent);
        for told in next {
            promises.add(serial, told);
            serial += 1;
        }
        assert_eq!(until_final(&stand, LATER).await, None);
        stand.consumers[0].sigcont().unwrap();
        stand.consumers[0].wait_ready(&format!("{}/ready", stand.consumer_bases[0]), SOON).await.unwrap();
        promises.extend(client.crowd(manners, serial..serial + PER_ROUND, story.seed).await);
        serial += PER_ROUND;
        assert_eq!(until_final(&stand, LATER).await, None);
        fenced = stand.consumers[0].output().matches("\"action\":\"not_taken\"").count();
        if fenced >= FENCED_MIN {
            break;
        }
    }
    println!("  {fenced} submissions came too late and were not sent");
    let ledger = story.end(&stand, &promises).await;
    assert_eq!(ledger.failed, 0);
    assert!(fenced > 0, "the consumer was never frozen between a claim and its submission");
}

/// Freezes a consumer right after one of its submissions arrived: others of the same burst are claimed and not sent.
/// Answers what was told to those who asked whether the database is free.
async fn freeze_in_a_burst(stand: &Stand, which: usize, mut serial: usize) -> Vec<Told> {
    let client = Client::of(stand);
    let arrivals = Arc::new(AtomicUsize::new(0));
    for relayer in &stand.relayers {
        let arrivals = Arc::clone(&arrivals);
        relayer.set_post_rule(move |_| {
            arrivals.fetch_add(1, Ordering::Relaxed);
            None
        });
    }
    let arrived = || arrivals.load(Ordering::Relaxed);
    let mut all = Vec::new();
    for _ in 0..20 {
        let before = arrived();
        // At once: a moment later the burst is over.
        let arrives = async {
            while arrived() == before {
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(SOON, arrives).await.expect("a submission arrives");
        stand.consumers[which].sigstop().unwrap();
        let told = tokio::time::timeout(Duration::from_secs(2), client.send(serial, None))
            .await
            .unwrap_or_else(|late| Told::Nothing(late.to_string()));
        serial += 1;
        let free = matches!(told, Told::Accepted(_));
        all.push(told);
        if free {
            return all;
        }
        stand.consumers[which].sigcont().unwrap();
    }
    panic!("the consumer held the database's lock twenty times in a row");
}

/// Freezes a consumer at a random moment of its work, but not while it holds the lock of the database file: that
/// would be a frozen database, and nobody could go on. Returns the next free serial number.
async fn freeze(story: &mut Story, stand: &Stand, which: usize, mut serial: usize, promises: &mut Promises) -> usize {
    let client = Client::of(stand);
    for _ in 0..20 {
        let moment = story.moment(Duration::from_millis(100));
        tokio::time::sleep(moment).await;
        stand.consumers[which].sigstop().unwrap();
        // Whatever this one is told counts as well.
        let told = tokio::time::timeout(Duration::from_secs(2), client.send(serial, None))
            .await
            .unwrap_or_else(|late| Told::Nothing(late.to_string()));
        let free = matches!(told, Told::Accepted(_));
        promises.add(serial, told);
        serial += 1;
        if free {
            return serial;
        }
        stand.consumers[which].sigcont().unwrap();
    }
    panic!("the consumer held the database's lock twenty times in a row");
}
