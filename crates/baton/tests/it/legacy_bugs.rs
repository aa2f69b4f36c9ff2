//! Bugs of the existing service, one test each, named after what went wrong there. Each test checks that Baton does it
//! right.

use std::time::{Duration, Instant};

use harness::relayer::{Faults, PostFault};
use serde_json::json;

use crate::relay_fixture::{LATER, RelaySetup, SOON, TO};

#[tokio::test]
async fn messages_were_handled_one_after_another() {
    // 100 submissions of half a second each would take 50 s in sequence.
    let relay = RelaySetup::relayers(2).start().await;
    for relayer in &relay.relayers {
        relayer.set_faults(Faults::every(PostFault::Slow(Duration::from_millis(500))));
    }
    relay.send_many(0..100).await;
    harness::wait::eventually(LATER, "more than ten concurrent claims", || async {
        let (_, health) = relay.get("/health").await;
        health["parts"]["store"]["claims"].as_u64().filter(|claims| *claims > 10)
    })
    .await;
    relay.until_all_final(LATER).await;
    assert_eq!(relay.count("confirmed").await, 100);
}

#[tokio::test]
async fn slow_relayers_led_to_twelve_submissions_for_ten_requests() {
    // The relayers are slower than the lease: without renewal, the queue would deliver each message a second time.
    let relay =
        RelaySetup::relayers(3).env("QUEUE_LEASE_MS", "400").env("RELAYER_SUBMIT_TIMEOUT_MS", "10000").start().await;
    for relayer in &relay.relayers {
        relayer.set_faults(Faults::every(PostFault::Slow(Duration::from_millis(1500))));
    }
    let sent = relay.send_many(0..10).await;
    relay.until_all_final(LATER).await;
    relay.books(sent).assert_exactly_once();
}

#[tokio::test]
async fn a_status_read_too_early_stayed_stale() {
    let relay = RelaySetup::relayers(1).split().start().await;
    for serial in 0..10 {
        let id = relay.send_serial(serial).await;
        relay.status(&id).await;
        relay.until_status(&id, "confirmed").await;
    }
}

#[tokio::test]
async fn sigterm_dropped_submissions_in_flight() {
    let mut relay = RelaySetup::relayers(2).split().start().await;
    for relayer in &relay.relayers {
        relayer.set_faults(Faults::every(PostFault::Slow(Duration::from_millis(700))));
    }
    let sent = relay.send_many(0..200).await;
    harness::wait::eventually(SOON, "work to be in flight", || async {
        (relay.relayers.iter().map(|relayer| relayer.accepted().len()).sum::<usize>() > 20).then_some(())
    })
    .await;
    relay.consumers[0].sigterm().unwrap();
    let exit = relay.consumers[0].wait_exit(LATER).await.unwrap();
    assert_eq!(exit.code(), Some(0), "{}", relay.consumers[0].output());
    let (_, health) = relay.get("/health").await;
    assert_eq!(health["parts"]["store"]["claims"], 0, "every claim was settled: {health}");
    assert_eq!(health["parts"]["queue"]["inFlight"], 0, "unstarted messages were returned: {health}");
    relay.add_consumer().await;
    relay.until_all_final(LATER).await;
    relay.books(sent).assert_exactly_once();
}

#[tokio::test]
async fn an_empty_body_got_202() {
    let relay = RelaySetup::relayers(1).start().await;
    assert_eq!(relay.post(&json!({})).await.0, 400);
    let empty = relay.request(reqwest::Method::POST, "/api/v1/relay/direct").send().await.unwrap();
    assert_eq!(empty.status(), 415);
}

#[tokio::test]
async fn a_hanging_relayer_hung_the_caller() {
    // Every relayer accepts connections and never answers. Clients can still send and read.
    let relay = RelaySetup::relayers(2).start().await;
    relay.warm_up().await;
    for relayer in &relay.relayers {
        relayer.change_faults(|faults| {
            faults.relayer_reads.hang = true;
            faults.transaction_reads.hang = true;
            faults.every_post = Some(PostFault::HangBeforeStoring);
        });
    }
    let ids = relay.send_many(0..20).await;
    let started = Instant::now();
    for (id, _) in &ids {
        assert_eq!(relay.status(id).await["status"], "pending");
    }
    let unknown = "00000000-0000-7000-8000-000000000000";
    assert_eq!(relay.get(&format!("/api/v1/relay/status/{unknown}")).await.0, 404);
    assert!(started.elapsed() < SOON, "reads do not wait for the relayers");
    for relayer in &relay.relayers {
        relayer.set_faults(Faults::default());
    }
    relay.until_all_final(LATER).await;
    relay.books(ids).assert_exactly_once();
}

#[tokio::test]
async fn the_amount_was_rounded() {
    let relay = RelaySetup::relayers(1).start().await;
    relay.send(&json!({ "to": TO, "value": "1000000000000000001" })).await;
    relay.until_all_final(LATER).await;
    assert_eq!(relay.relayers[0].accepted()[0].value_text, "\"1000000000000000001\"");
}
