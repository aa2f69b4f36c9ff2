//! A consumer is frozen at work until its claims and leases have expired, and another consumer takes everything over. When
//! the first one continues, its late writes are rejected.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use harness::process::freeze as freeze_process;
use harness::relayer::PostFault;
use harness::wait::eventually_ok;

use crate::load_client::{Answer, ClientAnswers, LoadClient, LoadProfile};
use crate::relay_fixture::{LATER, RelayFixture, SOON};
use crate::scenario::{Scenario, crash_setup, inject_faults, until_final};

const ROUNDS: usize = 4;
const PER_ROUND: usize = 120;
/// Attempts to freeze a consumer while it does not hold the database lock.
const FREEZES_MAX: usize = 20;

#[tokio::test]
async fn frozen_process() {
    let mut scenario = Scenario::begin("frozen_process");
    // The submit timeout outlasts the freeze, so that the thawed consumer still acts on its relayers' answers.
    let mut relay = crash_setup(3).env("RELAYER_SUBMIT_TIMEOUT_MS", "8000").start().await;
    relay.add_consumer().await;
    relay.warm_up().await;
    // Slow answers: the consumer has submissions in flight whenever it is frozen.
    inject_faults(&relay, scenario.seed, |plan| {
        plan.with(PostFault::Slow(Duration::from_millis(400)), 0.7).with(PostFault::ErrorAfterStoring, 0.05)
    });
    scenario.start_watching(&relay);
    let client = LoadClient::of(&relay);
    let profile = LoadProfile { clients: 16, pause_max: Duration::from_millis(10), retry_until_accepted: false };
    let mut answers = ClientAnswers::default();
    let mut serial = 0;
    for round in 0..ROUNDS {
        let frozen = round % 2;
        let seed = scenario.seed;
        answers.extend(client.send_all(profile, serial..serial + PER_ROUND, seed).await);
        serial += PER_ROUND;
        serial = freeze(&mut scenario, &relay, frozen, serial, &mut answers).await;
        // The other consumer finishes everything, including the frozen consumer's work.
        assert_eq!(until_final(&relay, LATER).await, None);
        relay.consumers[frozen].sigcont().unwrap();
        // The thawed consumer has recovered once new load is final and no old claim is left.
        answers.extend(client.send_all(profile, serial..serial + PER_ROUND, seed).await);
        serial += PER_ROUND;
        relay.consumers[frozen].wait_ready(&format!("{}/ready", relay.consumer_bases[frozen]), SOON).await.unwrap();
        assert_eq!(until_final(&relay, LATER).await, None);
    }
    let late = eventually_ok(SOON, "late answers to be rejected", || async {
        let late: usize = relay.consumers.iter().map(|consumer| consumer.output().matches("late_answer").count()).sum();
        if late > 0 { Ok(late) } else { Err(late) }
    })
    .await;
    println!("  {late} late answers were rejected");
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!(ledger.failed, 0);
}

/// A consumer is frozen while a relayer answers it, and its claim is taken over. The relayer's list shows nothing, so that
/// only the late answer tells where the transaction is.
#[tokio::test]
async fn late_answer() {
    let scenario = Scenario::begin("late_answer");
    let mut relay = crash_setup(1).env("RELAYER_SUBMIT_TIMEOUT_MS", "60000").start().await;
    relay.warm_up().await;
    relay.relayers[0].change_faults(|faults| faults.listing.empty = true);
    let (client, frozen) = (LoadClient::of(&relay), relay.consumers[0].id().unwrap());
    let mut answers = ClientAnswers::default();
    let armed = Arc::new(AtomicBool::new(false));
    relay.relayers[0].set_post_rule({
        let armed = Arc::clone(&armed);
        move |_| {
            let freezes = armed.swap(false, Ordering::Relaxed);
            freezes.then(|| freeze_process(frozen).unwrap()).map(|()| PostFault::Slow(Duration::from_millis(300)))
        }
    });
    let mut serial = 0;
    let late = loop {
        armed.store(true, Ordering::Relaxed);
        let Answer::Accepted(id) = client.send(serial, None).await else { panic!("it was not accepted") };
        answers.add(serial, Answer::Accepted(id.clone()));
        eventually_ok(SOON, "its submission to arrive", || async {
            if armed.load(Ordering::Relaxed) { Err("none arrived") } else { Ok(()) }
        })
        .await;
        // Again if the consumer holds the database lock.
        let probed = probe(&client, serial + 1).await;
        let free = matches!(probed, Answer::Accepted(_));
        answers.add(serial + 1, probed);
        serial += 2;
        if free {
            break id;
        }
        relay.consumers[0].sigcont().unwrap();
        assert!(serial < 2 * FREEZES_MAX, "the consumer held the database lock each time");
    };
    relay.add_consumer().await;
    eventually_ok(SOON, "the list to prove nothing", || async {
        let unproven = relay.consumer_metric(1, "baton_reconciler_total", "absence-unproven").await;
        if unproven >= 1.0 { Ok(()) } else { Err(relay.status(&late).await) }
    })
    .await;
    assert_eq!(relay.status(&late).await["outcomeUnknown"], true);
    relay.consumers[0].sigcont().unwrap();
    relay.until_status(&late, "confirmed").await;
    let (_, timeline) = relay.get(&format!("/api/v1/relay/transactions/{late}/timeline")).await;
    assert!(timeline.to_string().contains("its answer came late"), "{timeline}");
    assert_eq!(until_final(&relay, LATER).await, None);
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!(ledger.failed, 0);
}

/// A consumer frozen between storing a claim and submitting wakes with a claim that another consumer has settled
/// meanwhile. It must not submit.
///
/// Whether the freeze meets that gap is a matter of milliseconds, and on a busy machine it may not. The simulation freezes
/// there exactly (mutations `NoFence` and `LateFence`); here the real process must cause no second effect wherever it stops.
#[tokio::test]
async fn frozen_before_sending() {
    const ROUNDS_MAX: usize = 4;
    const FENCED_MIN: usize = 1;
    let mut scenario = Scenario::begin("frozen_before_sending");
    let mut relay = crash_setup(3).env("LOG_LEVEL", "info").start().await;
    relay.add_consumer().await;
    relay.warm_up().await;
    scenario.start_watching(&relay);
    let client = LoadClient::of(&relay);
    let profile = LoadProfile { clients: 64, pause_max: Duration::ZERO, retry_until_accepted: false };
    let (mut answers, mut serial, mut fenced) = (ClientAnswers::default(), 0, 0);
    for _ in 0..ROUNDS_MAX {
        let burst = client.send_all(profile, serial..serial + 3 * PER_ROUND, scenario.seed);
        serial += 3 * PER_ROUND;
        let (sent, next) = tokio::join!(burst, freeze_in_a_burst(&relay, 0, serial));
        answers.extend(sent);
        for answer in next {
            answers.add(serial, answer);
            serial += 1;
        }
        assert_eq!(until_final(&relay, LATER).await, None);
        relay.consumers[0].sigcont().unwrap();
        relay.consumers[0].wait_ready(&format!("{}/ready", relay.consumer_bases[0]), SOON).await.unwrap();
        answers.extend(client.send_all(profile, serial..serial + PER_ROUND, scenario.seed).await);
        serial += PER_ROUND;
        assert_eq!(until_final(&relay, LATER).await, None);
        fenced = relay.consumers[0].output().matches("\"action\":\"not_taken\"").count();
        if fenced >= FENCED_MIN {
            break;
        }
    }
    println!("  {fenced} late submissions were not sent");
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!(ledger.failed, 0);
}

/// Freezes a consumer right after one of its submissions arrived: others of the same burst are claimed and not sent yet.
/// Returns the answers to the probes that check whether the database is unlocked.
async fn freeze_in_a_burst(relay: &RelayFixture, which: usize, mut serial: usize) -> Vec<Answer> {
    let client = LoadClient::of(relay);
    // The relayer's side freezes it: the burst lasts only a few milliseconds, and no task switch may come in between.
    let (armed, consumer) = (Arc::new(AtomicBool::new(false)), relay.consumers[which].id().unwrap());
    for relayer in &relay.relayers {
        let armed = Arc::clone(&armed);
        relayer.set_post_rule(move |_| {
            if armed.swap(false, Ordering::Relaxed) {
                freeze_process(consumer).unwrap();
            }
            None
        });
    }
    let mut all = Vec::new();
    for _ in 0..FREEZES_MAX {
        armed.store(true, Ordering::Relaxed);
        eventually_ok(SOON, "a submission to arrive", || async {
            if armed.load(Ordering::Relaxed) { Err("none arrived") } else { Ok(()) }
        })
        .await;
        let answer = probe(&client, serial).await;
        serial += 1;
        let free = matches!(answer, Answer::Accepted(_));
        all.push(answer);
        if free {
            return all;
        }
        relay.consumers[which].sigcont().unwrap();
    }
    panic!("the consumer held the database lock in {FREEZES_MAX} attempts");
}

/// Sends one request with a short timeout: it is accepted unless the frozen consumer holds the database lock.
async fn probe(client: &LoadClient, serial: usize) -> Answer {
    tokio::time::timeout(Duration::from_secs(2), client.send(serial, None))
        .await
        .unwrap_or_else(|late| Answer::OutcomeUnknown(late.to_string()))
}

/// Freezes a consumer at a random time, but not while it holds the lock of the database file, which would block the other
/// consumer too. Returns the next free serial number.
async fn freeze(
    scenario: &mut Scenario,
    relay: &RelayFixture,
    which: usize,
    mut serial: usize,
    answers: &mut ClientAnswers,
) -> usize {
    let client = LoadClient::of(relay);
    for _ in 0..FREEZES_MAX {
        let pause = scenario.random_pause(Duration::from_millis(100));
        tokio::time::sleep(pause).await;
        relay.consumers[which].sigstop().unwrap();
        let answer = probe(&client, serial).await;
        let free = matches!(answer, Answer::Accepted(_));
        answers.add(serial, answer);
        serial += 1;
        if free {
            return serial;
        }
        relay.consumers[which].sigcont().unwrap();
    }
    panic!("the consumer held the database lock in {FREEZES_MAX} attempts");
}
