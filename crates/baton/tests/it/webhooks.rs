//! What relayers tell, in any order, any number of times, or not at all: readers only ever see the state go on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use harness::relayer::{Faults, Outcome, Status, WebhookFaults, sign_base64};
use serde_json::json;

use crate::relay_fixture::{LATER, Plan, Stand, WEBHOOK_KEY};

fn rank(status: &str) -> u8 {
    match status {
        "pending" => 0,
        "submitted" => 1,
        _ => 2,
    }
}

/// Reads the status of these transactions again and again; panics if one ever goes back.
async fn watch_for_steps_back(stand: &Stand, ids: &[String], stop: &AtomicBool) -> u64 {
    let mut seen = vec![0; ids.len()];
    let mut reads = 0;
    while !stop.load(Ordering::Relaxed) {
        for (position, id) in ids.iter().enumerate() {
            let row = stand.status(id).await;
            let now = rank(row["status"].as_str().unwrap());
            assert!(now >= seen[position], "{id} went back: {row}");
            seen[position] = now;
            reads += 1;
        }
        let (_, page) = stand.get("/api/v1/relay/transactions?limit=200").await;
        for row in page["transactions"].as_array().unwrap() {
            if let Some(position) = ids.iter().position(|id| row["transactionId"] == id.as_str()) {
                let now = rank(row["status"].as_str().unwrap());
                assert!(now >= seen[position], "the list went back: {row}");
                seen[position] = now;
            }
        }
    }
    reads
}

#[tokio::test]
async fn repeated_reordered_late_and_early_webhooks_never_put_a_state_back() {
    let stand = Arc::new(Plan::relayers(3).start().await);
    let faults = [
        WebhookFaults { repeat: 1.0, reorder: 0.7, ..WebhookFaults::default() },
        WebhookFaults { late: true, repeat: 0.5, ..WebhookFaults::default() },
        WebhookFaults { before_answer: Some(Status::Confirmed), ..WebhookFaults::default() },
    ];
    for (relayer, webhooks) in stand.relayers.iter().zip(faults) {
        relayer.change_faults(|faults| faults.webhooks = webhooks);
    }
    let mut ids = Vec::new();
    for serial in 0..60 {
        ids.push(stand.send_serial(serial).await);
    }
    let stop = Arc::new(AtomicBool::new(false));
    let reader = tokio::spawn({
        let (stand, stop, ids) = (Arc::clone(&stand), Arc::clone(&stop), ids.clone());
        async move { watch_for_steps_back(&stand, &ids, &stop).await }
    });
    stand.until_all_final(LATER).await;
    // The late ones are still to come: wait until every relayer has said everything twice.
    harness::wait::eventually(LATER, "the late webhooks", || async {
        let late = &stand.relayers[1];
        (late.deliveries().len() >= 3 * late.accepted().len()).then_some(())
    })
    .await;
    stop.store(true, Ordering::Relaxed);
    assert!(reader.await.unwrap() > 60);
    assert_eq!(stand.count("confirmed").await, 60);
}

#[tokio::test]
async fn a_webhook_that_overtakes_the_bind_is_not_lost() {
    let stand = Plan::relayers(1).env("RECONCILE_SUBMITTED_MS", "600000").start().await;
    stand.relayers[0].change_faults(|faults| {
        faults.webhooks.before_answer = Some(Status::Confirmed);
    });
    for serial in 0..20 {
        let id = stand.send_serial(serial).await;
        stand.until_status(&id, "confirmed").await;
    }
}

#[tokio::test]
async fn lost_webhooks_are_made_up_for_by_asking() {
    let stand = Plan::relayers(2).env("RECONCILE_SUBMITTED_MS", "300").no_webhooks().start().await;
    let sent = stand.send_many(0..50).await;
    stand.until_all_final(LATER).await;
    for (id, _) in &sent {
        let row = stand.status(id).await;
        assert_eq!(row["status"], "confirmed");
        assert!(row["hash"].is_string(), "{row}");
    }
    assert!(stand.metric("baton_reconciler_total", "news-missed").await > 0.0);
}

#[tokio::test]
async fn a_confirmed_no_op_is_a_failure_that_says_so() {
    let stand = Plan::relayers(1).start().await;
    stand.relayers[0].set_faults(Faults::with_outcome(Outcome::NoOp));
    let id = stand.send_serial(1).await;
    let row = stand.until_status(&id, "failed").await;
    assert!(row["error_message"].as_str().unwrap().contains("no-op"), "{row}");
}

#[tokio::test]
async fn a_failure_that_was_never_signed_goes_to_another_relayer_unseen() {
    let stand = Plan::relayers(2).start().await;
    let reason = "Transaction in Pending state for over 2 minutes. Replacing with NOOP.";
    stand.relayers[0].set_faults(Faults::with_outcome(Outcome::NeverSigned(reason.into())));
    let mut ids = Vec::new();
    for serial in 0..10 {
        ids.push(stand.send_serial(serial).await);
    }
    for id in &ids {
        let row = stand.until_status(id, "confirmed").await;
        assert_eq!(row["ozRelayerUrl"], stand.relayers[1].url().as_str(), "{row}");
    }
    assert!(stand.metric("baton_reroutes_total", "").await >= 1.0);
    assert_eq!(stand.relayers[1].accepted().len(), 10, "each was sent there once");
}

#[tokio::test]
async fn a_revert_is_final_with_its_hash_and_reason() {
    let stand = Plan::relayers(1).start().await;
    stand.relayers[0].set_faults(Faults::with_outcome(Outcome::Reverted));
    let id = stand.send_serial(1).await;
    let row = stand.until_status(&id, "failed").await;
    assert!(row["hash"].is_string() && row["error_message"].as_str().unwrap().contains("reverted"), "{row}");
}

#[tokio::test]
async fn a_second_hash_after_confirmed_raises_the_alarm_and_keeps_both() {
    let stand = Plan::relayers(1).start().await;
    stand.relayers[0].set_faults(Faults::with_outcome(Outcome::SentTwice));
    let id = stand.send_serial(1).await;
    let first = stand.until_status(&id, "confirmed").await;
    harness::wait::eventually(LATER, "the alarm", || async {
        (stand.metric("baton_double_sends_total", "").await >= 1.0).then_some(())
    })
    .await;
    let (_, timeline) = stand.get(&format!("/api/v1/relay/transactions/{id}/timeline")).await;
    assert!(timeline.to_string().contains("double-send"), "{timeline}");
    let after = stand.status(&id).await;
    assert_eq!((&after["status"], &after["hash"]), (&json!("confirmed"), &first["hash"]));
}

#[tokio::test]
async fn a_hundred_webhooks_at_once_are_all_answered_and_repeats_are_harmless() {
    let stand = Plan::relayers(1).no_webhooks().env("RECONCILE_SUBMITTED_MS", "600000").start().await;
    let sent = stand.send_many(0..100).await;
    let mut bodies = Vec::new();
    for (id, _) in &sent {
        let row = stand.until_status(id, "submitted").await;
        let record = stand.relayers[0].record(row["ozRelayerTxId"].as_str().unwrap()).unwrap();
        let mut payload = record.to_json();
        payload["payload_type"] = json!("transaction");
        payload["status"] = json!("confirmed");
        payload["hash"] = json!(format!("0x{:064x}", bodies.len()));
        bodies.push(json!({ "id": "n", "event": "transaction_update", "payload": payload }).to_string());
    }
    for _ in 0..2 {
        let posts = bodies.iter().map(|body| {
            stand
                .http
                .post(format!("{}/api/v1/webhooks/oz-relayer", stand.base))
                .header("x-signature", sign_base64(WEBHOOK_KEY, body.as_bytes()))
                .header("content-type", "application/json")
                .timeout(Duration::from_secs(30))
                .body(body.clone())
                .send()
        });
        for answer in futures::future::join_all(posts).await {
            assert_eq!(answer.unwrap().status(), 200);
        }
    }
    assert_eq!(stand.count("confirmed").await, 100);
}

#[tokio::test]
async fn a_relayer_that_forgot_is_shown_and_an_operator_settles_it() {
    let stand = Plan::relayers(1).no_webhooks().env("RECONCILE_SUBMITTED_MS", "200").start().await;
    stand.relayers[0].change_faults(|faults| faults.jammed = true);
    let id = stand.send_serial(1).await;
    stand.until_status(&id, "submitted").await;
    stand.relayers[0].forget();
    harness::wait::eventually(LATER, "the loss to be seen", || async {
        (stand.status(&id).await["outcomeUnknown"] == true).then_some(())
    })
    .await;
    let (code, said) = stand.command(["tx", "resolve", &id, "--fail"]).await;
    assert_eq!(code, 0, "{said}");
    assert_eq!(stand.until_status(&id, "failed").await["error_message"], "given up by an operator");
}
