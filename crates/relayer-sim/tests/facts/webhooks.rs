//! Webhooks: signatures over captured bodies, shape, events (facts 6).

use relayer_sim::{Outcome, WebhookFaults, sign_base64};

use super::*;

const STATE_UPDATE: &str = r#"{"id":"159deef3-e25f-4eed-90a4-d62ed85a1336","event":"relayer_state_update","payload":{"payload_type":"relayer_enabled","relayer":{"id":"relayer-c","name":"Relayer C","network":"devnet","network_type":"evm","paused":false,"policies":{"min_balance":0,"gas_limit_estimation":true,"include_revert_data":false},"signer_id":"signer-c","notification_id":"hook-c","address":"0x3c44cdddb6a900fa2b585dd299e03d12fa4293bc","system_disabled":false},"retry_count":0},"timestamp":"2026-11-15T18:35:05.047327432+00:00"}"#;

const TRANSACTION_UPDATE: &str = r#"{"id":"1501abdc-ee12-4de1-8686-bcea6f119820","event":"transaction_update","payload":{"payload_type":"transaction","id":"75a98651-4035-449c-b5a5-b8c407485e26","hash":"0xcf00b729e903ea467fde35c0fdd3ad0edaf4794918256e49148be454ae9a89c1","status":"confirmed","status_reason":null,"created_at":"2026-11-15T18:30:57.458707822+00:00","sent_at":"2026-11-15T18:30:58.049530740+00:00","confirmed_at":"2026-11-15T18:31:07.224789542+00:00","gas_price":null,"gas_limit":21000,"nonce":0,"value":"0x38d7ea4c68000","from":"0xf39fd6e51aad88f6f4ce6ab8827279cfffb92266","to":"0x90F79bf6EB2c4f870365E785982E1f101E93b906","relayer_id":"relayer-a","data":"0x","max_fee_per_gas":"2199338160","max_priority_fee_per_gas":"850000000","signature":{"r":"a173e1e57a61d0f79b8de9a2dbe9f17c37e388fe5df6f6a4d01e38162ac23dd0","s":"51a2931956ab19a0c1f923e2c98db53ee697d94fcb04c05455d7939aa4144a1a","v":1,"sig":"a173e1e57a61d0f79b8de9a2dbe9f17c37e388fe5df6f6a4d01e38162ac23dd051a2931956ab19a0c1f923e2c98db53ee697d94fcb04c05455d7939aa4144a1a01"},"speed":"fast","is_canceled":false},"timestamp":"2026-11-15T18:31:07.224853264+00:00"}"#;

/// Names of all fields, nested ones included, in order, with the JSON type of each value.
fn shape(value: &Value) -> Vec<String> {
    let kind = |value: &Value| match value {
        Value::Null => "null",
        Value::Bool(_) => "bool",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        _ => "nested",
    };
    let fields = value.as_object().into_iter().flatten();
    fields.flat_map(|(name, value)| [vec![format!("{name}:{}", kind(value))], shape(value)].concat()).collect()
}

#[test]
fn captured_bodies_have_the_captured_signatures() {
    assert_eq!(sign_base64(WEBHOOK_KEY, TRANSACTION_UPDATE.as_bytes()), "5ngy8iYdwNxnC36ofAn6509VQvr4BOkmdakKGxkxyHw=");
    assert_eq!(sign_base64(WEBHOOK_KEY, STATE_UPDATE.as_bytes()), "9p4FdzOnppTgiWQu2howvfmqAqw+5zy52Hk0LdJrxg8=");
}

#[test]
fn a_webhook_has_the_captured_fields_types_and_headers() {
    let mut fixture = Fixture::new();
    fixture.accept(BODY);
    let webhooks = fixture.pass(20, Some(200));
    let confirmed = &webhooks[2].1;
    let captured: Value = serde_json::from_str(TRANSACTION_UPDATE).unwrap();
    assert_eq!(shape(&serde_json::from_str(&confirmed.body).unwrap()), shape(&captured));
    assert_eq!(&*confirmed.url, "http://127.0.0.1:19000/hook/a");
    let signature = sign_base64(WEBHOOK_KEY, confirmed.body.as_bytes());
    assert_eq!(confirmed.headers, [("x-signature", signature), ("content-type", "application/json".to_owned())]);
}

#[test]
fn a_state_change_has_the_captured_fields() {
    let mut fixture = Fixture::new();
    fixture.relayer.set_system_disabled(fixture.now_ms, true);
    fixture.relayer.set_system_disabled(fixture.now_ms, false);
    let webhooks = fixture.pass(1, Some(200));
    let captured: Value = serde_json::from_str(STATE_UPDATE).unwrap();
    assert_eq!(shape(&serde_json::from_str(&webhooks[1].1.body).unwrap()), shape(&captured));
    let disabled = payload(&webhooks[0].1);
    assert_eq!(disabled["payload_type"], "relayer_disabled");
    assert_eq!(disabled["disable_reason"]["type"], "RpcValidationFailed");
}

#[test]
fn a_double_send_is_reported_after_the_confirmation() {
    let mut fixture = Fixture::new();
    fixture.set_faults(Faults::with_outcome(Outcome::SentTwice));
    let id = fixture.accept(BODY);
    let webhooks = fixture.pass(180, Some(200));
    let statuses: Vec<String> = webhooks.iter().map(|(_, webhook)| status_of(webhook)).collect();
    assert_eq!(statuses, ["sent", "submitted", "confirmed", "sent", "submitted"]);
    assert_ne!(payload(&webhooks[2].1)["nonce"], payload(&webhooks[4].1)["nonce"]);
    assert_ne!(payload(&webhooks[2].1)["hash"], payload(&webhooks[4].1)["hash"]);
    assert_eq!(fixture.show(&id)["status"], "submitted", "it stays so");
    let status = json(&fixture.get("/relayer-a/status"));
    assert_eq!(status["data"]["pending_transactions_count"], 1);
    assert_eq!(fixture.relayer.audit()[0].broadcasts, 2);
}

#[test]
fn webhooks_can_be_lost_repeated_overtaken_and_forged() {
    let mut fixture = Fixture::new();
    let mut run = |webhooks: WebhookFaults| {
        fixture.set_faults(Faults { webhooks, ..Faults::default() });
        fixture.accept(BODY);
        fixture.pass(60, Some(200)).into_iter().map(|(_, webhook)| webhook).collect::<Vec<_>>()
    };
    assert!(run(WebhookFaults { lose: 1.0, ..Default::default() }).is_empty());
    let repeated = run(WebhookFaults { repeat: 1.0, ..Default::default() });
    assert_eq!(repeated.len(), 6);
    assert_eq!(repeated[0].body, repeated[1].body);
    let late = run(WebhookFaults { late: true, ..Default::default() });
    assert_eq!(late.iter().map(status_of).collect::<Vec<_>>(), ["confirmed", "sent", "submitted"]);
    let forged = run(WebhookFaults { forged: true, ..Default::default() });
    assert_ne!(forged[0].headers[0].1, sign_base64(WEBHOOK_KEY, forged[0].body.as_bytes()));
}
