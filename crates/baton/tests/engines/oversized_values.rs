//! A relayer reports a value longer than its column. The database would reject it on every attempt, so Baton must not try to
//! store it: the record would block its transaction forever, and with it every other transaction of the same sweep.

use harness::engine::TestEngine;
use harness::relayer::sign_base64;
use serde_json::json;

use crate::relay_fixture::{RelaySetup, WEBHOOK_KEY};

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
