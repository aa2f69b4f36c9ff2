//! A relayer says more than a column holds. The database refuses such a value each time it is asked, so it must never be
//! asked: one absurd record would hold up its transaction for ever, and with it every other one in the same sweep.

use harness::engine::Engine;
use harness::relayer::sign_base64;
use serde_json::json;

use crate::relay_fixture::{Plan, WEBHOOK_KEY};

#[tokio::test]
async fn a_hash_that_no_column_holds_ends_the_transaction_all_the_same() {
    let stand = Plan::relayers(1).engine(Engine::MySqlRabbitMq).no_webhooks().split().start().await;
    stand.relayers[0].change_faults(|faults| faults.jammed = true);
    let id = stand.send_serial(1).await;
    let row = stand.until_status(&id, "submitted").await;
    let mut payload = stand.relayers[0].record(row["ozRelayerTxId"].as_str().unwrap()).unwrap().to_json();
    payload["payload_type"] = json!("transaction");
    payload["status"] = json!("confirmed");
    payload["hash"] = json!(format!("0x{}", "ab".repeat(5000)));
    payload["from"] = json!("0x".repeat(5000));
    let said = json!({ "id": "n", "event": "transaction_update", "payload": payload }).to_string();
    let request = stand.request(reqwest::Method::POST, "/api/v1/webhooks/oz-relayer");
    let signature = sign_base64(WEBHOOK_KEY, said.as_bytes());
    let answer = request.header("x-signature", signature).body(said).send().await.unwrap();
    assert_eq!(answer.status(), 200, "{}", answer.text().await.unwrap());
    stand.until_status(&id, "confirmed").await;
}
