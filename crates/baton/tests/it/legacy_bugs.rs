//! What the existing service gets wrong, one test each, named after what went wrong.

use std::time::{Duration, Instant};

use harness::relayer::{Faults, PostFault};
use serde_json::json;

use crate::relay_fixture::{LATER, Plan, SOON, TO};

#[tokio::test]
async fn messages_were_handled_one_after_another() {
    // 100 submissions of half a second each: one after another they would take 50 s.
    let stand = Plan::relayers(2).start().await;
    for relayer in &stand.relayers {
        relayer.set_faults(Faults::every(PostFault::Slow(Duration::from_millis(500))));
    }
    stand.send_many(0..100).await;
    harness::wait::eventually(LATER, "many to be under way at once", || async {
        let (_, health) = stand.get("/health").await;
        health["parts"]["store"]["claims"].as_u64().filter(|claims| *claims > 10)
    })
    .await;
    stand.until_all_final(LATER).await;
    assert_eq!(stand.count("confirmed").await, 100);
}

#[tokio::test]
async fn slow_relayers_made_twelve_submissions_of_ten_requests() {
    // Slower than the lease: the queue would deliver each message again while it is being handled.
    let stand = Plan::relayers(3).env("QUEUE_LEASE_MS", "400").env("RELAYER_SUBMIT_TIMEOUT_MS", "10000").start().await;
    for relayer in &stand.relayers {
        relayer.set_faults(Faults::every(PostFault::Slow(Duration::from_millis(1500))));
    }
    let sent = stand.send_many(0..10).await;
    stand.until_all_final(LATER).await;
    stand.books(sent).assert_exactly_once();
}

#[tokio::test]
async fn a_status_asked_too_early_stayed_stale() {
    let stand = Plan::relayers(1).split().start().await;
    for serial in 0..10 {
        let id = stand.send_serial(serial).await;
        stand.status(&id).await;
        stand.until_status(&id, "confirmed").await;
    }
}

#[tokio::test]
async fn sigterm_dropped_what_was_in_flight() {
    let mut stand = Plan::relayers(2).split().start().await;
    for relayer in &stand.relayers {
        relayer.set_faults(Faults::every(PostFault::Slow(Duration::from_millis(700))));
    }
    let sent = stand.send_many(0..200).await;
    harness::wait::eventually(SOON, "work to be in flight", || async {
        (stand.relayers.iter().map(|relayer| relayer.accepted().len()).sum::<usize>() > 20).then_some(())
    })
    .await;
    stand.consumers[0].sigterm().unwrap();
    let exit = stand.consumers[0].wait_exit(LATER).await.unwrap();
    assert_eq!(exit.code(), Some(0), "{}", stand.consumers[0].output());
    let (_, health) = stand.get("/health").await;
    assert_eq!(health["parts"]["store"]["claims"], 0, "nothing was left half-done: {health}");
    assert_eq!(health["parts"]["queue"]["inFlight"], 0, "what was not started was handed back: {health}");
    stand.add_consumer().await;
    stand.until_all_final(LATER).await;
    stand.books(sent).assert_exactly_once();
}

#[tokio::test]
async fn an_empty_body_got_202() {
    let stand = Plan::relayers(1).start().await;
    assert_eq!(stand.post(&json!({})).await.0, 400);
    let empty = stand.request(reqwest::Method::POST, "/api/v1/relay/direct").send().await.unwrap();
    assert_eq!(empty.status(), 415);
}

#[tokio::test]
async fn a_frozen_neighbour_hung_the_caller() {
    // Every relayer accepts connections and never answers anything: accepting and reading go on.
    let stand = Plan::relayers(2).start().await;
    stand.warm_up().await;
    for relayer in &stand.relayers {
        relayer.change_faults(|faults| {
            faults.relayer_reads.hang = true;
            faults.transaction_reads.hang = true;
            faults.every_post = Some(PostFault::HangBeforeStoring);
        });
    }
    let ids = stand.send_many(0..20).await;
    let started = Instant::now();
    for (id, _) in &ids {
        assert_eq!(stand.status(id).await["status"], "pending");
    }
    let unknown = "00000000-0000-7000-8000-000000000000";
    assert_eq!(stand.get(&format!("/api/v1/relay/status/{unknown}")).await.0, 404);
    assert!(started.elapsed() < SOON, "the relayers' silence is not the callers'");
    for relayer in &stand.relayers {
        relayer.set_faults(Faults::default());
    }
    stand.until_all_final(LATER).await;
    stand.books(ids).assert_exactly_once();
}

#[tokio::test]
async fn the_amount_was_rounded() {
    let stand = Plan::relayers(1).start().await;
    stand.send(&json!({ "to": TO, "value": "1000000000000000001" })).await;
    stand.until_all_final(LATER).await;
    assert_eq!(stand.relayers[0].accepted()[0].value_text, "\"1000000000000000001\"");
}
