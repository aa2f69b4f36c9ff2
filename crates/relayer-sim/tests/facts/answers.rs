//! Answers to requests that succeed: envelope, fields, number encodings, lists (facts 2, 3, 4 and 8).

use relayer_sim::{Dialect, Outcome, ReadFault, Status};
use serde_json::json;

use super::*;

/// The captured answer to [`BODY`].
const ACCEPTED: &str = r#"{"success":true,"data":{"id":"75a98651-4035-449c-b5a5-b8c407485e26","hash":null,"status":"pending","status_reason":null,"created_at":"2026-11-15T18:30:57.458707822+00:00","sent_at":null,"confirmed_at":null,"gas_price":null,"gas_limit":21000,"nonce":null,"value":"0x38d7ea4c68000","from":"0xf39fd6e51aad88f6f4ce6ab8827279cfffb92266","to":"0x90F79bf6EB2c4f870365E785982E1f101E93b906","relayer_id":"relayer-a","data":"0x","max_fee_per_gas":null,"max_priority_fee_per_gas":null,"signature":null,"speed":"fast","is_canceled":false},"error":null}"#;
/// The captured list of relayers.
const RELAYERS: &str = r#"{"success":true,"data":[{"id":"relayer-a","name":"Relayer A","network":"devnet","network_type":"evm","paused":false,"policies":{"min_balance":0,"gas_limit_estimation":true,"include_revert_data":false},"signer_id":"signer-a","notification_id":"hook-a","address":"0xf39fd6e51aad88f6f4ce6ab8827279cfffb92266","system_disabled":false}],"error":null,"pagination":{"current_page":1,"per_page":10,"total_items":1}}"#;
/// The captured status of a fresh relayer.
const STATUS: &str = r#"{"success":true,"data":{"network_type":"evm","balance":"10000000000000000000000","pending_transactions_count":0,"last_confirmed_transaction_timestamp":null,"system_disabled":false,"paused":false,"nonce":"0"},"error":null}"#;
/// The captured balance: a bare integer larger than 64 bits.
const BALANCE: &str = r#"{"success":true,"data":{"balance":10000000000000000000000,"unit":"wei"},"error":null}"#;

#[test]
fn an_accepted_transaction_is_answered_as_captured() {
    let mut fixture = Fixture::new();
    let response = fixture.post(BODY);
    assert_eq!((response.status, response.header("content-type")), (200, Some("application/json")));
    let id = json(&response)["data"]["id"].as_str().unwrap().to_owned();
    let expected = ACCEPTED
        .replace("75a98651-4035-449c-b5a5-b8c407485e26", &id)
        .replace("18:30:57.458707822", "18:30:57.458000000");
    assert_eq!(text(&response), expected);
}

#[test]
fn reads_of_a_relayer_are_answered_as_captured() {
    let mut fixture = Fixture::new();
    let list = text(&fixture.get("")).replace("signer-relayer-a", "signer-a").replace("hook-relayer-a", "hook-a");
    assert_eq!(list, RELAYERS);
    assert_eq!(text(&fixture.get("/relayer-a/status")), STATUS);
    assert_eq!(text(&fixture.get("/relayer-a/balance")), BALANCE);
}

#[test]
fn json_rpc_is_passed_on_unless_the_relayer_is_paused() {
    let mut fixture = Fixture::new();
    let ask = |fixture: &mut Fixture, method: &str| {
        let body = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"{method}","params":[]}}"#);
        answer(fixture.authorized("POST", "/api/v1/relayers/relayer-a/rpc", &body))
    };
    let told = json(&ask(&mut fixture, "eth_chainId"));
    assert_eq!((&told["result"], &told["id"], &told["error"]), (&json!("0x7a69"), &json!(1), &json!(null)));
    assert_eq!(json(&ask(&mut fixture, "eth_other"))["error"]["code"], json!(-32601));
    fixture.set_faults(Faults { paused: true, ..Faults::default() });
    assert_eq!(ask(&mut fixture, "eth_chainId").status, 403);
    let mut other = Fixture::with(|options| (options.chain_id, options.network) = (Some(1), "mainnet".to_owned()));
    assert_eq!(json(&ask(&mut other, "eth_chainId"))["result"], "0x1");
    assert_eq!(json(&other.get(""))["data"][0]["network"], "mainnet");
    let mut without = Fixture::with(|options| options.chain_id = None);
    assert_eq!(ask(&mut without, "eth_chainId").status, 404);
}

#[test]
fn a_slow_chain_delays_the_status_and_not_the_list() {
    let mut fixture = Fixture::new();
    let delay = Some(std::time::Duration::from_secs(13));
    fixture.set_faults(Faults { chain_reads: ReadFault { delay, ..ReadFault::default() }, ..Faults::default() });
    let after = |reply: Reply| match reply {
        Reply::Answer { after_ms, .. } => after_ms,
        other => panic!("no answer but {other:?}"),
    };
    assert_eq!(after(fixture.authorized("GET", "/api/v1/relayers", "")), 0);
    for path in ["status", "balance"] {
        assert_eq!(after(fixture.authorized("GET", &format!("/api/v1/relayers/relayer-a/{path}"), "")), 13_000);
    }
    assert_eq!(after(fixture.authorized("POST", "/api/v1/relayers/relayer-a/rpc", "{}")), 13_000);
}

#[test]
fn a_disabled_relayer_names_the_reason() {
    let mut fixture = Fixture::new();
    fixture.set_faults(Faults { system_disabled: true, ..Faults::default() });
    let relayer = json(&fixture.get("/relayer-a"))["data"].clone();
    assert_eq!(
        (&relayer["system_disabled"], &relayer["disabled_reason"]["type"]),
        (&json!(true), &json!("RpcValidationFailed"))
    );
}

#[test]
fn the_same_request_twice_is_two_transactions_whatever_marks_it_carries() {
    let mut fixture = Fixture::new();
    let marked = BODY.replace("\"speed\"", "\"external_id\":\"x\",\"idempotency_key\":\"x\",\"speed\"");
    let bearer = format!("Bearer {API_KEY}");
    let headers = [
        ("authorization", bearer.as_str()),
        ("content-type", "application/json"),
        ("idempotency-key", "x"),
        ("x-request-id", "x"),
    ];
    let mut send = || answer(fixture.reply("POST", "/api/v1/relayers/relayer-a/transactions/", &headers, &marked));
    let (first, second) = (send(), send());
    assert_eq!((first.status, second.status), (200, 200), "a trailing slash is trimmed");
    assert_ne!(json(&first)["data"]["id"], json(&second)["data"]["id"]);
    assert_eq!(first.header("x-request-id"), Some("x"), "it is echoed");
    fixture.pass(20, Some(200));
    let nonces: Vec<_> = fixture.relayer.records().map(|record| record.nonce).collect();
    assert!(nonces.contains(&Some(0)) && nonces.contains(&Some(1)), "{nonces:?}");
}

#[test]
fn numbers_are_encoded_as_measured() {
    let mut fixture = Fixture::new();
    for (value, hex) in [("1000000000000000", "0x38d7ea4c68000"), ("\"5\"", "0x5"), ("\"0x0A\"", "0xa"), ("0", "0x0")] {
        let id = fixture.accept(&BODY.replace("1000000000000000", value));
        assert_eq!(fixture.show(&id)["value"], hex);
    }
    let priced =
        BODY.replace("\"speed\":\"fast\"", "\"max_fee_per_gas\":2199338160,\"max_priority_fee_per_gas\":850000000");
    let id = fixture.accept(&priced);
    fixture.pass(20, Some(200));
    let record = fixture.show(&id);
    assert_eq!(
        (&record["max_fee_per_gas"], &record["max_priority_fee_per_gas"]),
        (&json!("2199338160"), &json!("850000000"))
    );
    assert!(record["nonce"].is_u64() && record["gas_limit"].is_u64());
    let signature = &record["signature"];
    let [r, s, sig] = ["r", "s", "sig"].map(|name| signature[name].as_str().unwrap().to_owned());
    assert_eq!((r.len(), sig.as_str()), (64, format!("{r}{s}01").as_str()));
    let status = json(&fixture.get("/relayer-a/status"))["data"].clone();
    assert!(status["balance"].is_string() && status["nonce"].is_string());
}

#[test]
fn a_contract_creation_and_malformed_fields_are_accepted() {
    let mut fixture = Fixture::new();
    fixture.accept(r#"{"value":0,"data":"0x6000","speed":"fast"}"#);
    fixture.accept(r#"{"to":"0x1234","value":0,"speed":"fast"}"#);
    fixture.accept(&BODY.replace("\"0x\"", "\"zz\""));
    assert_eq!(fixture.post(&BODY.replace("21000", "\"21000\"")).status, 400, "a gas limit must be a number");
}

#[test]
fn lists_are_newest_first_paged_and_filtered_by_one_status() {
    let mut fixture = Fixture::new();
    let ids: Vec<String> = (0..12)
        .map(|_| {
            fixture.now_ms += 1;
            fixture.accept(BODY)
        })
        .collect();
    let first = json(&fixture.get("/relayer-a/transactions"));
    assert_eq!(first["pagination"], json!({"current_page": 1, "per_page": 10, "total_items": 12}));
    assert_eq!(first["data"][0]["id"], ids[11]);
    let second = json(&fixture.get("/relayer-a/transactions?page=2&unknown=x"));
    assert_eq!((second["data"].as_array().unwrap().len(), &second["data"][1]["id"]), (2, &json!(ids[0])));
    assert_eq!(json(&fixture.get("/relayer-a/transactions?per_page=1000"))["data"].as_array().unwrap().len(), 12);
    assert_eq!(json(&fixture.get("/relayer-a/transactions?status=PENDING"))["pagination"]["total_items"], 12);
    assert_eq!(json(&fixture.get("/relayer-a/transactions?status=mined"))["pagination"]["total_items"], 0);
    let unknown = fixture.get("/relayer-a/transactions?status=nope");
    assert_eq!(unknown.status, 400);
    assert!(unknown.header("content-type").unwrap().starts_with("text/plain"));
}

#[test]
fn pending_counts_sent_and_submitted_but_not_mined() {
    let mut fixture = Fixture::with(|options| options.timing.mined = Some(std::time::Duration::from_secs(4)));
    fixture.accept(BODY);
    let counted = |fixture: &mut Fixture| {
        let status = fixture.relayer.records().next().unwrap().status;
        (status, json(&fixture.get("/relayer-a/status"))["data"]["pending_transactions_count"].as_u64().unwrap())
    };
    assert_eq!(counted(&mut fixture), (Status::Pending, 1));
    fixture.pass(2, Some(200));
    assert_eq!(counted(&mut fixture), (Status::Submitted, 1));
    fixture.pass(5, Some(200));
    assert_eq!(counted(&mut fixture), (Status::Mined, 0));
}

#[test]
fn a_record_is_found_by_its_nonce() {
    let mut fixture = Fixture::new();
    let id = fixture.accept(BODY);
    assert_eq!(fixture.get("/relayer-a/transactions/by-nonce/0").status, 404);
    fixture.pass(2, Some(200));
    assert_eq!(json(&fixture.get("/relayer-a/transactions/by-nonce/0"))["data"]["id"], id);
}

#[test]
fn a_pending_transaction_is_cancelled_at_once_and_a_submitted_one_by_a_no_op() {
    let mut fixture = Fixture::new();
    let cancel = |fixture: &mut Fixture, id: &str| {
        answer(fixture.authorized("DELETE", &format!("/api/v1/relayers/relayer-a/transactions/{id}"), ""))
    };
    let pending = fixture.accept(BODY);
    assert_eq!(json(&cancel(&mut fixture, &pending))["data"]["status"], "canceled");
    let submitted = fixture.accept(BODY);
    fixture.pass(2, Some(200));
    let created_at = fixture.show(&submitted)["created_at"].clone();
    let answered = json(&cancel(&mut fixture, &submitted))["data"].clone();
    assert_eq!(
        (&answered["status"], &answered["is_canceled"], &answered["to"]),
        (&json!("submitted"), &json!(true), &answered["from"])
    );
    let hidden = json(&fixture.get("/relayer-a/transactions?status=submitted"));
    assert_eq!(hidden["pagination"]["total_items"], 0, "a cancellation in progress is hidden from the filter");
    fixture.pass(20, Some(200));
    let ended = fixture.show(&submitted);
    assert_eq!((&ended["status"], &ended["created_at"]), (&json!("canceled"), &created_at));
    assert_eq!(cancel(&mut fixture, &submitted).status, 400, "it is final");
}

#[test]
fn the_older_dialect_has_the_shapes_of_the_documents() {
    let mut fixture = Fixture::with(|options| options.dialect = Dialect::Spec);
    let body = r#"{"to":"0x12","data":"0x","value":"18446744073709551616","gasLimit":"100000"}"#;
    let accepted = json(&answer(fixture.authorized("POST", "/transactions", body)));
    assert_eq!(accepted["status"], "pending");
    let list = json(&fixture.get(""));
    assert_eq!((&list["data"][0]["pending_transactions"], &list["data"][0]["status"]), (&json!(1), &json!("active")));
    let relayer = json(&answer(fixture.authorized("GET", "/relayers/relayer-a", "")));
    assert_eq!(relayer, json!({"relayerId": "relayer-a", "numberOfPendingTransactions": 1, "paused": false}));
    fixture.set_faults(Faults::with_outcome(Outcome::Confirmed));
    let webhooks = fixture.pass(20, Some(200));
    let last: Value = serde_json::from_str(&webhooks.last().unwrap().1.body).unwrap();
    let fields: Vec<&str> = last.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(fields, ["transactionId", "hash", "status", "from", "to", "createdAt", "confirmedAt"]);
    assert_eq!(webhooks[0].1.headers[0].0, "x-oz-signature");
}
