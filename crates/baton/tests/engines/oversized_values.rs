//! A relayer reports a value longer than its column. The database would reject it on every attempt, so Baton must not try to
//! store it: the record would block its transaction forever, and with it every other transaction of the same sweep.

use harness::engine::TestEngine;
use harness::relayer::sign_base64;
use serde_json::json;

use crate::relay_fixture::{RelaySetup, TO, WEBHOOK_KEY};

#[tokio::test]
async fn a_hash_too_long_for_its_column_still_confirms_the_transaction() {
    let relay = RelaySetup::relayers(1).engine(TestEngine::MySqlRabbitMq).no_webhooks().split().start().await;
    relay.relayers[0].change_faults(|faults| faults.jammed = true);
    let id = relay.send_serial(1).await;
    let row = relay.until_status(&id, "submitted").await;
    let mut payload = relay.relayers[0].record(row["ozRelayerTxId"].as_str().unwrap()).unwrap().to_json();
    payload["payload_type"] = json!("transaction");
    payload["status"] = json!("confirmed");
    payload["hash"] = json!(format!("0x{}", "ab".repeat(5000)));
    payload["from"] = json!("0x".repeat(5000));
    let body = json!({ "id": "n", "event": "transaction_update", "payload": payload }).to_string();
    let request = relay.request(reqwest::Method::POST, "/api/v1/webhooks/oz-relayer");
    let signature = sign_base64(WEBHOOK_KEY, body.as_bytes());
    let answer = request.header("x-signature", signature).body(body).send().await.unwrap();
    assert_eq!(answer.status(), 200, "{}", answer.text().await.unwrap());
    relay.until_status(&id, "confirmed").await;
}

/// It got 503 at every try: the body was allowed, but the message made of it is larger than SQS takes.
#[tokio::test]
async fn a_body_too_large_for_the_queue_is_refused_for_good() {
    let relay = RelaySetup::relayers(1).engine(TestEngine::MySqlSqs).split().start().await;
    let sized = |bytes: usize| json!({ "to": TO, "value": "1", "data": format!("0x{}", "ab".repeat(bytes / 2)) });
    for bytes in [249 * 1024, 255 * 1024] {
        let (status, problem) = relay.post(&sized(bytes)).await;
        assert_eq!((status, &problem["code"]), (413, &json!("too-large")), "{problem}");
    }
    let (_, page) = relay.get("/api/v1/relay/transactions").await;
    assert_eq!(page["transactions"], json!([]), "nothing is stored");
    let (status, answer) = relay.post(&sized(240 * 1024)).await;
    assert_eq!(status, 202, "{answer}");
    relay.until_status(answer["transactionId"].as_str().unwrap(), "confirmed").await;
}
