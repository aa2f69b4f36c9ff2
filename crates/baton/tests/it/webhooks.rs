//! Webhooks in any order, repeated, late or lost: a reader never sees a status move back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use harness::relayer::{Faults, Outcome, Status, WebhookFaults, sign_base64};
use serde_json::{Value, json};

use crate::relay_fixture::{LATER, RelayFixture, RelaySetup, SOON, WEBHOOK_KEY};

fn rank(status: &str) -> u8 {
    match status {
        "pending" => 0,
        "submitted" => 1,
        _ => 2,
    }
}

/// Polls the status of these transactions until `stop`, and at least twice; returns the number of reads.
///
/// # Panics
/// If a status moves back.
async fn assert_no_status_moves_back(relay: &RelayFixture, ids: &[String], stop: &AtomicBool) -> u64 {
    let mut seen = vec![0; ids.len()];
    let mut reads = 0;
    while !stop.load(Ordering::Relaxed) || reads <= ids.len() as u64 {
        for (position, id) in ids.iter().enumerate() {
            let row = relay.status(id).await;
            let now = rank(row["status"].as_str().unwrap());
            assert!(now >= seen[position], "{id} moved back: {row}");
            seen[position] = now;
            reads += 1;
        }
        let (_, page) = relay.get("/api/v1/relay/transactions?limit=200").await;
        for row in page["transactions"].as_array().unwrap() {
            if let Some(position) = ids.iter().position(|id| row["transactionId"] == id.as_str()) {
                let now = rank(row["status"].as_str().unwrap());
                assert!(now >= seen[position], "the list moved back: {row}");
                seen[position] = now;
            }
        }
    }
    reads
}

#[tokio::test]
async fn repeated_reordered_late_and_early_webhooks_never_move_a_status_back() {
    let relay = Arc::new(RelaySetup::relayers(3).start().await);
    let faults = [
        WebhookFaults { repeat: 1.0, reorder: 0.7, ..WebhookFaults::default() },
        WebhookFaults { late: true, repeat: 0.5, ..WebhookFaults::default() },
        WebhookFaults { before_answer: Some(Status::Confirmed), ..WebhookFaults::default() },
    ];
    for (relayer, webhooks) in relay.relayers.iter().zip(faults) {
        relayer.change_faults(|faults| faults.webhooks = webhooks);
    }
    let mut ids = Vec::new();
    for serial in 0..60 {
        ids.push(relay.send_serial(serial).await);
    }
    let stop = Arc::new(AtomicBool::new(false));
    let reader = tokio::spawn({
        let (relay, stop, ids) = (Arc::clone(&relay), Arc::clone(&stop), ids.clone());
        async move { assert_no_status_moves_back(&relay, &ids, &stop).await }
    });
    relay.until_all_final(LATER).await;
    // Late webhooks arrive after the final status: wait until the second relayer has sent three per transaction.
    harness::wait::eventually(LATER, "the late webhooks", || async {
        let late = &relay.relayers[1];
        (late.deliveries().len() >= 3 * late.accepted().len()).then_some(())
    })
    .await;
    stop.store(true, Ordering::Relaxed);
    assert!(reader.await.unwrap() > 60);
    assert_eq!(relay.count("confirmed").await, 60);
}

#[tokio::test]
async fn a_webhook_that_arrives_before_the_submission_is_answered_is_not_lost() {
    let relay = RelaySetup::relayers(1).env("RECONCILE_SUBMITTED_MS", "600000").start().await;
    relay.relayers[0].change_faults(|faults| {
        faults.webhooks.before_answer = Some(Status::Confirmed);
    });
    for serial in 0..20 {
        let id = relay.send_serial(serial).await;
        relay.until_status(&id, "confirmed").await;
    }
}

#[tokio::test]
async fn without_webhooks_the_reconciler_finds_every_confirmation() {
    let relay = RelaySetup::relayers(2).env("RECONCILE_SUBMITTED_MS", "300").no_webhooks().start().await;
    let sent = relay.send_many(0..50).await;
    relay.until_all_final(LATER).await;
    for (id, _) in &sent {
        let row = relay.status(id).await;
        assert_eq!(row["status"], "confirmed");
        assert!(row["hash"].is_string(), "{row}");
    }
    assert!(relay.metric("baton_reconciler_total", "news-missed").await > 0.0);
}

#[tokio::test]
async fn a_confirmed_no_op_is_a_failure_with_that_reason() {
    let relay = RelaySetup::relayers(1).start().await;
    relay.relayers[0].set_faults(Faults::with_outcome(Outcome::NoOp));
    let id = relay.send_serial(1).await;
    let row = relay.until_status(&id, "failed").await;
    assert!(row["error_message"].as_str().unwrap().contains("no-op"), "{row}");
}

#[tokio::test]
async fn a_transaction_that_fails_unsigned_is_rerouted_to_another_relayer() {
    let relay = RelaySetup::relayers(2).start().await;
    let reason = "Transaction in Pending state for over 2 minutes. Replacing with NOOP.";
    relay.relayers[0].set_faults(Faults::with_outcome(Outcome::NeverSigned(reason.into())));
    let mut ids = Vec::new();
    for serial in 0..10 {
        ids.push(relay.send_serial(serial).await);
    }
    for id in &ids {
        let row = relay.until_status(id, "confirmed").await;
        assert_eq!(row["ozRelayerUrl"], relay.relayers[1].url().as_str(), "{row}");
    }
    assert!(relay.metric("baton_reroutes_total", "").await >= 1.0);
    assert_eq!(relay.relayers[1].accepted().len(), 10, "each was sent to the second relayer once");
}

#[tokio::test]
async fn a_record_that_its_relayer_does_not_work_on_is_canceled_and_goes_to_another_relayer() {
    let relay =
        RelaySetup::relayers(2).env("RECONCILE_SUBMITTED_MS", "300").env("RECONCILE_UNPROVEN_MS", "1500").start().await;
    for relayer in &relay.relayers {
        relayer.change_faults(|faults| faults.next_outcomes = [Outcome::WithoutJob].into());
    }
    let id = relay.send_serial(1).await;
    let taken = |index: usize| relay.relayers[index].records().len() == 1;
    let first =
        harness::wait::eventually(LATER, "a relayer to take it", || async { (0..2).find(|at| taken(*at)) }).await;
    relay.relayers[1 - first].change_faults(|faults| faults.next_outcomes.clear());
    relay.until_status(&id, "confirmed").await;
    let canceled = &relay.relayers[first].records()[0];
    assert_eq!((canceled.status, canceled.nonce), (Status::Canceled, None));
    assert_eq!(relay.relayers[1 - first].records().len(), 1, "the other relayer made the call");
    let (_, timeline) = relay.get(&format!("/api/v1/relay/transactions/{id}/timeline")).await;
    assert!(timeline.to_string().contains("cancel-requested"), "{timeline}");
}

#[tokio::test]
async fn an_unsigned_record_is_not_canceled_before_it_has_waited_long() {
    let relay = RelaySetup::relayers(1)
        .no_webhooks()
        .env("RECONCILE_SUBMITTED_MS", "100")
        .env("RECONCILE_UNPROVEN_MS", "600000")
        .start()
        .await;
    relay.relayers[0].set_faults(Faults::with_outcome(Outcome::WithoutJob));
    let id = relay.send_serial(1).await;
    let row = relay.until_status(&id, "submitted").await;
    let record = format!("/transactions/{}", row["ozRelayerTxId"].as_str().unwrap());
    let asked = |method| relay.relayers[0].count_requests(method, &record);
    harness::wait::eventually(LATER, "the relayer to be asked about it", || async {
        (asked("GET") >= 3 || asked("DELETE") > 0).then_some(())
    })
    .await;
    assert_eq!(asked("DELETE"), 0);
}

#[tokio::test]
async fn a_revert_is_final_with_its_hash_and_reason() {
    let relay = RelaySetup::relayers(1).start().await;
    relay.relayers[0].set_faults(Faults::with_outcome(Outcome::Reverted));
    let id = relay.send_serial(1).await;
    let row = relay.until_status(&id, "failed").await;
    assert!(row["hash"].is_string() && row["error_message"].as_str().unwrap().contains("reverted"), "{row}");
}

#[tokio::test]
async fn a_second_hash_after_confirmation_raises_an_alarm_and_keeps_the_first() {
    let relay = RelaySetup::relayers(1).start().await;
    relay.relayers[0].set_faults(Faults::with_outcome(Outcome::SentTwice));
    let id = relay.send_serial(1).await;
    let first = relay.until_status(&id, "confirmed").await;
    harness::wait::eventually(LATER, "the double-send alarm", || async {
        (relay.metric("baton_double_sends_total", "").await >= 1.0).then_some(())
    })
    .await;
    // The alarm is counted before the step is stored.
    harness::wait::eventually(LATER, "the double send in the timeline", || async {
        let (_, timeline) = relay.get(&format!("/api/v1/relay/transactions/{id}/timeline")).await;
        timeline.to_string().contains("double-send").then_some(())
    })
    .await;
    let after = relay.status(&id).await;
    assert_eq!((&after["status"], &after["hash"]), (&json!("confirmed"), &first["hash"]));
}

#[tokio::test]
async fn a_hundred_concurrent_webhooks_are_all_answered_and_repeats_change_nothing() {
    let relay = RelaySetup::relayers(1).no_webhooks().env("RECONCILE_SUBMITTED_MS", "600000").start().await;
    let sent = relay.send_many(0..100).await;
    let mut bodies = Vec::new();
    for (id, _) in &sent {
        let row = relay.until_status(id, "submitted").await;
        let record = relay.relayers[0].record(row["ozRelayerTxId"].as_str().unwrap()).unwrap();
        let mut payload = record.to_json();
        payload["payload_type"] = json!("transaction");
        payload["status"] = json!("confirmed");
        payload["hash"] = json!(format!("0x{:064x}", bodies.len()));
        bodies.push(json!({ "id": "n", "event": "transaction_update", "payload": payload }).to_string());
    }
    for _ in 0..2 {
        let posts = bodies.iter().map(|body| {
            relay
                .http
                .post(format!("{}/api/v1/webhooks/oz-relayer", relay.base))
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
    assert_eq!(relay.count("confirmed").await, 100);
}

#[tokio::test]
async fn a_transaction_that_its_relayer_lost_is_shown_and_an_operator_resolves_it() {
    let relay = RelaySetup::relayers(1).no_webhooks().env("RECONCILE_SUBMITTED_MS", "200").start().await;
    relay.relayers[0].change_faults(|faults| faults.jammed = true);
    let id = relay.send_serial(1).await;
    relay.until_status(&id, "submitted").await;
    relay.relayers[0].forget();
    harness::wait::eventually(LATER, "the lost record to be noticed", || async {
        (relay.status(&id).await["outcomeUnknown"] == true).then_some(())
    })
    .await;
    let (code, output) = relay.command(["tx", "resolve", &id, "--fail"]).await;
    assert_eq!(code, 0, "{output}");
    assert_eq!(relay.until_status(&id, "failed").await["error_message"], "given up by an operator");
}

/// A signed webhook about a transaction, as the relayer would send it with these changes; returns the answer's status.
async fn send_webhook(relay: &RelayFixture, base: &str, tx_id: &str, key: &str, changes: &Value) -> u16 {
    let record = relay.relayers.iter().find_map(|relayer| relayer.record(tx_id)).unwrap();
    let mut payload = record.to_json();
    payload["payload_type"] = json!("transaction");
    for (name, value) in changes.as_object().unwrap() {
        payload[name] = value.clone();
    }
    let body = json!({ "id": "n", "event": "transaction_update", "payload": payload }).to_string();
    let request = relay.http.post(format!("{base}/api/v1/webhooks/oz-relayer"));
    let request = request.header("x-signature", sign_base64(key, body.as_bytes())).timeout(SOON).body(body);
    request.send().await.unwrap().status().as_u16()
}

/// 300 replays raised 300 alarms.
#[tokio::test]
async fn replays_of_a_second_hash_raise_one_alarm_and_another_hash_another() {
    let relay = RelaySetup::relayers(1).start().await;
    let id = relay.send_serial(1).await;
    let row = relay.until_status(&id, "confirmed").await;
    let tx_id = row["ozRelayerTxId"].as_str().unwrap();
    let second =
        |digit: &str| json!({ "status": "confirmed", "hash": format!("0x{}", digit.repeat(64)), "nonce": 7777 });
    let (first, other) = (second("a"), second("b"));
    let replays = (0..50).map(|_| send_webhook(&relay, &relay.base, tx_id, WEBHOOK_KEY, &first));
    assert!(futures::future::join_all(replays).await.iter().all(|status| *status == 200));
    assert_eq!(relay.metric("baton_double_sends_total", "").await, 1.0);
    send_webhook(&relay, &relay.base, tx_id, WEBHOOK_KEY, &other).await;
    assert_eq!(relay.metric("baton_double_sends_total", "").await, 2.0);
    let (_, timeline) = relay.get(&format!("/api/v1/relay/transactions/{id}/timeline")).await;
    assert_eq!(timeline.to_string().matches("\"double-send\"").count(), 2, "{timeline}");
    let after = relay.status(&id).await;
    assert_eq!((&after["status"], &after["hash"]), (&row["status"], &row["hash"]));
}

#[tokio::test]
async fn text_that_is_no_hash_is_not_stored() {
    let relay = RelaySetup::relayers(1).no_webhooks().start().await;
    relay.relayers[0].change_faults(|faults| faults.jammed = true);
    let id = relay.send_serial(1).await;
    let row = relay.until_status(&id, "submitted").await;
    let tx_id = row["ozRelayerTxId"].as_str().unwrap();
    let changes = json!({ "status": "sent", "hash": "<img src=x onerror=alert(1)>", "nonce": 0 });
    assert_eq!(send_webhook(&relay, &relay.base, tx_id, WEBHOOK_KEY, &changes).await, 200);
    assert_eq!(relay.status(&id).await["hash"], Value::Null);
    let (_, timeline) = relay.get(&format!("/api/v1/relay/transactions/{id}/timeline")).await;
    assert!(
        timeline.to_string().contains("the relayer says sent") && !timeline.to_string().contains("<img"),
        "{timeline}"
    );
}

#[tokio::test]
async fn keys_are_rotated_with_overlap_and_a_relayers_own_key_is_for_its_transactions_only() {
    let relay = RelaySetup::relayers(2).no_webhooks().env("RECONCILE_SUBMITTED_MS", "600000").start().await;
    let urls: Vec<_> = relay.relayers.iter().map(|relayer| relayer.url()).collect();
    let keys = ["one", "two", "old", "gone"].map(|name| format!("{name}-0123456789abcdef0123456789abcdef"));
    let mut env = relay.env.clone();
    let list = format!("{}={},{}={},{}", urls[0], keys[0], urls[1], keys[1], keys[2]);
    env.insert("WEBHOOK_SIGNING_KEY".to_owned(), list);
    let port = harness::ports::free_port();
    let base = format!("http://127.0.0.1:{port}");
    let mut api = crate::relay_fixture::baton(["relay-api"], &env).env("PORT", port.to_string()).start().unwrap();
    api.wait_ready(&format!("{base}/ready"), SOON).await.unwrap();
    let id = relay.send_serial(1).await;
    let row = relay.until_status(&id, "submitted").await;
    let tx_id = row["ozRelayerTxId"].as_str().unwrap();
    let own = urls.iter().position(|url| row["ozRelayerUrl"] == url.as_str()).unwrap();
    let sent = json!({ "status": "sent" });
    let with = async |key: &str| send_webhook(&relay, &base, tx_id, key, &sent).await;
    assert_eq!((with(&keys[own]).await, with(&keys[2]).await), (200, 200));
    assert_eq!((with(&keys[1 - own]).await, with(&keys[3]).await), (401, 401));
}
