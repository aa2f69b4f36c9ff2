//! The relayer's webhooks: content, signatures and faults.

use std::time::Duration;

use harness::{
    relayer::{Dialect, Faults, Outcome, Relayer, RelayerOptions, Status, WebhookFaults, sign_base64, sign_hex},
    sink::{Received, Reply, Sink},
    wait::eventually,
};

use crate::{KEY, SOON, body, send};

const STATE_UPDATE: &str = r#"{"id":"159deef3-e25f-4eed-90a4-d62ed85a1336","event":"relayer_state_update","payload":{"payload_type":"relayer_enabled","relayer":{"id":"relayer-c","name":"Relayer C","network":"devnet","network_type":"evm","paused":false,"policies":{"min_balance":0,"gas_limit_estimation":true,"include_revert_data":false},"signer_id":"signer-c","notification_id":"hook-c","address":"0x3c44cdddb6a900fa2b585dd299e03d12fa4293bc","system_disabled":false},"retry_count":0},"timestamp":"2026-11-15T18:35:05.047327432+00:00"}"#;

const TRANSACTION_UPDATE: &str = r#"{"id":"1501abdc-ee12-4de1-8686-bcea6f119820","event":"transaction_update","payload":{"payload_type":"transaction","id":"75a98651-4035-449c-b5a5-b8c407485e26","hash":"0xcf00b729e903ea467fde35c0fdd3ad0edaf4794918256e49148be454ae9a89c1","status":"confirmed","status_reason":null,"created_at":"2026-11-15T18:30:57.458707822+00:00","sent_at":"2026-11-15T18:30:58.049530740+00:00","confirmed_at":"2026-11-15T18:31:07.224789542+00:00","gas_price":null,"gas_limit":21000,"nonce":0,"value":"0x38d7ea4c68000","from":"0xf39fd6e51aad88f6f4ce6ab8827279cfffb92266","to":"0x90F79bf6EB2c4f870365E785982E1f101E93b906","relayer_id":"relayer-a","data":"0x","max_fee_per_gas":"2199338160","max_priority_fee_per_gas":"850000000","signature":{"r":"a173e1e57a61d0f79b8de9a2dbe9f17c37e388fe5df6f6a4d01e38162ac23dd0","s":"51a2931956ab19a0c1f923e2c98db53ee697d94fcb04c05455d7939aa4144a1a","v":1,"sig":"a173e1e57a61d0f79b8de9a2dbe9f17c37e388fe5df6f6a4d01e38162ac23dd051a2931956ab19a0c1f923e2c98db53ee697d94fcb04c05455d7939aa4144a1a01"},"speed":"fast","is_canceled":false},"timestamp":"2026-11-15T18:31:07.224853264+00:00"}"#;

async fn pair() -> (Sink, Relayer) {
    let sink = Sink::start().await;
    let pauses = vec![Duration::from_millis(20); 4];
    let options = RelayerOptions { webhook_pauses: pauses, ..RelayerOptions::new("relayer-a") };
    let relayer = Relayer::start(options.webhook(sink.url(), KEY)).await;
    (sink, relayer)
}

fn statuses(received: &[Received]) -> Vec<String> {
    received.iter().map(|hook| hook.json()["payload"]["status"].as_str().unwrap_or_default().to_owned()).collect()
}

#[test]
fn the_signature_is_the_measured_one() {
    assert_eq!(sign_base64(KEY, TRANSACTION_UPDATE.as_bytes()), "5ngy8iYdwNxnC36ofAn6509VQvr4BOkmdakKGxkxyHw=");
    assert_eq!(sign_base64(KEY, STATE_UPDATE.as_bytes()), "9p4FdzOnppTgiWQu2howvfmqAqw+5zy52Hk0LdJrxg8=");
}

#[tokio::test]
async fn every_change_sends_a_signed_webhook_in_order() {
    let (sink, relayer) = pair().await;
    let (_, answer) = send(&relayer, &body(1).to_string()).await.unwrap();
    let received = sink.wait_for(3, SOON).await;
    assert_eq!(statuses(&received), ["sent", "submitted", "confirmed"]);
    for hook in &received {
        assert_eq!(hook.header("x-signature"), Some(sign_base64(KEY, &hook.body).as_str()));
        assert_eq!(hook.json()["payload"]["id"], answer["data"]["id"]);
        assert_eq!(hook.json()["event"], "transaction_update");
    }
    // The payload is the record's object behind its type, field for field as measured.
    let measured: serde_json::Value = serde_json::from_str(TRANSACTION_UPDATE).unwrap();
    let fields = |value: &serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(fields(&received[2].json()), fields(&measured));
    assert_eq!(fields(&received[2].json()["payload"]), fields(&measured["payload"]));
}

#[tokio::test]
async fn a_webhook_is_tried_five_times_with_the_same_bytes_and_then_dropped() {
    let (sink, relayer) = pair().await;
    sink.reply(Reply::Status(500));
    relayer.set_faults(Faults::with_outcome(Outcome::NeverSigned("no".to_owned())));
    send(&relayer, &body(1).to_string()).await.unwrap();
    let received = sink.wait_for(5, SOON).await;
    assert!(received.iter().all(|hook| hook.body == received[0].body));
    eventually(SOON, "the delivery to be given up", || async {
        relayer.deliveries().into_iter().find(|delivery| delivery.attempts == 5 && !delivery.delivered)
    })
    .await;
    // A later webhook proves that no sixth attempt of the first one is on its way before it.
    sink.reply(Reply::Ok);
    relayer.send_gap_filler();
    let received = sink.wait_for(6, SOON).await;
    assert!(received[5].json()["payload"]["status_reason"].as_str().unwrap().starts_with("Gap-filling NOOP"));
}

#[tokio::test]
async fn a_failed_attempt_is_followed_by_a_good_one() {
    let (sink, relayer) = pair().await;
    sink.reply_next(1, Reply::Cut);
    sink.reply_next(1, Reply::RetryAfter(503, "1".to_owned()));
    relayer.send_webhook(STATE_UPDATE);
    let received = sink.wait_for(3, SOON).await;
    assert_eq!(received[2].header("x-signature"), Some("9p4FdzOnppTgiWQu2howvfmqAqw+5zy52Hk0LdJrxg8="));
    eventually(SOON, "the delivery", || async { relayer.deliveries().pop().filter(|hook| hook.delivered) }).await;
}

#[tokio::test]
async fn webhooks_can_be_lost_repeated_and_forged() {
    let (sink, relayer) = pair().await;
    let webhooks = |webhooks| Faults { webhooks, ..Faults::default() };
    relayer.set_faults(webhooks(WebhookFaults { lose: 1.0, ..WebhookFaults::default() }));
    send(&relayer, &body(1).to_string()).await.unwrap();
    eventually(SOON, "three losses", || async {
        (relayer.deliveries().iter().filter(|delivery| delivery.lost).count() == 3).then_some(())
    })
    .await;
    assert_eq!(sink.count(), 0);

    relayer.set_faults(webhooks(WebhookFaults { repeat: 1.0, ..WebhookFaults::default() }));
    send(&relayer, &body(2).to_string()).await.unwrap();
    let received = sink.wait_for(6, SOON).await;
    let confirmed = received.iter().filter(|hook| hook.json()["payload"]["status"] == "confirmed");
    assert_eq!(confirmed.count(), 2);

    sink.clear();
    relayer.set_faults(webhooks(WebhookFaults { forged: true, ..WebhookFaults::default() }));
    send(&relayer, &body(3).to_string()).await.unwrap();
    let forged = &sink.wait_for(1, SOON).await[0];
    assert_ne!(forged.header("x-signature"), Some(sign_base64(KEY, &forged.body).as_str()));
}

#[tokio::test]
async fn early_statuses_can_come_after_the_final_one() {
    let (sink, relayer) = pair().await;
    relayer.set_faults(Faults { webhooks: WebhookFaults { late: true, ..Default::default() }, ..Faults::default() });
    send(&relayer, &body(1).to_string()).await.unwrap();
    assert_eq!(statuses(&sink.wait_for(3, SOON).await), ["confirmed", "sent", "submitted"]);
}

#[tokio::test]
async fn held_back_webhooks_are_overtaken() {
    let (sink, relayer) = pair().await;
    let late = Duration::from_millis(500);
    let webhooks = WebhookFaults { reorder: 0.5, reorder_within: late, ..WebhookFaults::default() };
    relayer.set_faults(Faults { webhooks, ..Faults::default() });
    for serial in 0..20 {
        send(&relayer, &body(serial).to_string()).await.unwrap();
    }
    let received = sink.wait_for(60, SOON).await;
    let order = statuses(&received);
    let inversions = received.iter().enumerate().filter(|(place, hook)| {
        let id = &hook.json()["payload"]["id"];
        order[*place] == "confirmed" && received[place + 1..].iter().any(|later| &later.json()["payload"]["id"] == id)
    });
    assert!(inversions.count() > 0, "{order:?}");
}

#[tokio::test]
async fn webhooks_can_come_before_the_answer() {
    let (sink, relayer) = pair().await;
    let webhooks = WebhookFaults { before_answer: Some(Status::Confirmed), ..WebhookFaults::default() };
    relayer.set_faults(Faults { webhooks, ..Faults::default() });
    let (_, answer) = send(&relayer, &body(1).to_string()).await.unwrap();
    assert_eq!(statuses(&sink.received()), ["sent", "submitted", "confirmed"]);
    assert_eq!(answer["data"]["status"], "pending");
}

#[tokio::test]
async fn a_double_send_is_reported_after_the_confirmation() {
    let (sink, relayer) = pair().await;
    relayer.set_faults(Faults::with_outcome(Outcome::SentTwice));
    send(&relayer, &body(1).to_string()).await.unwrap();
    let received = sink.wait_for(5, SOON).await;
    assert_eq!(statuses(&received), ["sent", "submitted", "confirmed", "sent", "submitted"]);
    assert_ne!(received[2].json()["payload"]["hash"], received[4].json()["payload"]["hash"]);
}

#[tokio::test]
async fn a_change_of_the_disabled_flag_sends_a_webhook() {
    let (sink, relayer) = pair().await;
    relayer.set_system_disabled(true);
    relayer.set_system_disabled(false);
    let received = sink.wait_for(2, SOON).await;
    let mut kinds: Vec<_> = received.iter().map(|hook| hook.json()["payload"]["payload_type"].to_string()).collect();
    kinds.sort();
    assert_eq!(kinds, [r#""relayer_disabled""#, r#""relayer_enabled""#]);
}

#[tokio::test]
async fn the_older_dialect_signs_flat_bodies_in_hex() {
    let sink = Sink::start().await;
    let options = RelayerOptions { dialect: Dialect::Spec, ..RelayerOptions::new("relayer-1") };
    let relayer = Relayer::start(options.webhook(sink.url(), KEY)).await;
    let request = harness::http_client()
        .post(format!("{}/transactions", relayer.url()))
        .bearer_auth(relayer.api_key())
        .json(&serde_json::json!({"to": "0x12", "data": "0x", "value": "0", "gasLimit": "100000"}));
    assert_eq!(request.send().await.unwrap().status(), 200);
    let received = sink.wait_for(3, SOON).await;
    assert_eq!(received[2].header("x-oz-signature"), Some(sign_hex(KEY, &received[2].body).as_str()));
    let reported = received[2].json();
    assert_eq!((reported["status"].as_str(), reported["confirmedAt"].is_string()), (Some("confirmed"), true));
    assert_eq!(reported["transactionId"], relayer.records()[0].id);
}

#[tokio::test]
async fn the_sink_hangs_is_slow_and_comes_back_on_its_port() {
    let sink = Sink::start().await;
    let client = harness::http_client();
    let ask = |millis| client.post(sink.url()).timeout(Duration::from_millis(millis)).body("x").send();
    sink.reply_next(1, Reply::Hang);
    assert!(ask(100).await.expect_err("no answer").is_timeout());
    sink.reply_next(1, Reply::Slow(Duration::from_millis(200)));
    assert!(ask(50).await.expect_err("too slow").is_timeout());
    sink.reply_next(1, Reply::Status(410));
    assert_eq!(ask(5000).await.unwrap().status(), 410);
    let url = sink.url();
    sink.stop().await;
    assert!(ask(5000).await.expect_err("refused").is_connect());
    sink.restart().await;
    assert_eq!(sink.url(), url);
    assert_eq!(ask(5000).await.unwrap().status(), 200);
    assert_eq!(sink.count(), 4);
}
