//! Invalid input: the answer names the field and the rule, and nothing is stored or sent.

use harness::relayer::{sign_base64, sign_hex};
use serde_json::{Value, json};

use crate::relay_fixture::{API_KEY, RelayFixture, RelaySetup, TO, WEBHOOK_KEY};

async fn post_raw(relay: &RelayFixture, content_type: &str, body: impl Into<reqwest::Body>) -> (u16, Value, String) {
    let request = relay.http.post(format!("{}/api/v1/relay/direct", relay.base)).header("x-api-key", API_KEY);
    let response = request.header("content-type", content_type).body(body).send().await.unwrap();
    let status = response.status().as_u16();
    let kind = response.headers()["content-type"].to_str().unwrap().to_owned();
    (status, response.json().await.unwrap(), kind)
}

fn fields(problem: &Value) -> Vec<&str> {
    problem["errors"].as_array().unwrap().iter().map(|error| error["field"].as_str().unwrap()).collect()
}

async fn assert_nothing_stored_or_sent(relay: &RelayFixture) {
    let (_, page) = relay.get("/api/v1/relay/transactions").await;
    assert_eq!(page["transactions"], json!([]));
    assert!(relay.relayers.iter().all(|relayer| relayer.accepted().is_empty()));
}

#[tokio::test]
async fn a_missing_and_a_wrong_api_key_get_the_same_answer() {
    let relay = RelaySetup::relayers(1).start().await;
    let url = format!("{}/api/v1/relay/direct", relay.base);
    let body = json!({ "to": TO });
    let without = relay.http.post(&url).json(&body).send().await.unwrap();
    assert_eq!(without.status(), 401);
    let mut without: Value = without.json().await.unwrap();
    let wrong = relay.http.post(&url).header("x-api-key", "wrong").json(&body).send().await.unwrap();
    assert_eq!(wrong.status(), 401);
    let mut wrong: Value = wrong.json().await.unwrap();
    for body in [&mut without, &mut wrong] {
        body.as_object_mut().unwrap().remove("request_id").expect("a problem carries its request id");
    }
    assert_eq!(without, wrong, "the answer does not reveal which of the two it was");
    for path in ["/api/v1/relay/transactions", "/api/v1/relay/status/x"] {
        assert_eq!(relay.http.get(format!("{}{path}", relay.base)).send().await.unwrap().status(), 401, "{path}");
    }
    assert_nothing_stored_or_sent(&relay).await;
}

#[tokio::test]
async fn a_body_that_is_not_json_or_too_large_gets_a_problem_document() {
    let relay = RelaySetup::relayers(1).start().await;
    let json_type = "application/json";
    let good = json!({ "to": TO }).to_string();
    for (content_type, body, expected) in [
        (json_type, "{".to_owned(), 400),
        (json_type, String::new(), 400),
        (json_type, "null".to_owned(), 400),
        (json_type, "[]".to_owned(), 400),
        ("text/plain", good.clone(), 415),
        ("application/x-www-form-urlencoded", good.clone(), 415),
        (json_type, format!(r#"{{"to":"{TO}","data":"0x{}"}}"#, "00".repeat(140_000)), 413),
    ] {
        let shown: String = body.chars().take(60).collect();
        let (status, problem, kind) = post_raw(&relay, content_type, body).await;
        assert_eq!(
            (status, kind.as_str()),
            (expected, "application/problem+json"),
            "{content_type} {shown}: {problem}"
        );
        assert_eq!((&problem["status"], &problem["statusCode"]), (&json!(expected), &json!(expected)));
        for name in ["type", "title", "detail", "message", "code", "request_id"] {
            assert!(problem[name].is_string(), "{name} in {problem}");
        }
    }
    let (status, _, _) = post_raw(&relay, "application/json; charset=utf-8", good).await;
    assert_eq!(status, 202);
}

#[tokio::test]
async fn all_invalid_fields_are_named_in_one_answer() {
    let relay = RelaySetup::relayers(1).start().await;
    let too_much = "115792089237316195423570985008687907853269984665640564039457584007913129639936";
    for (field, bad) in [
        ("to", json!("0x1234")),
        ("to", json!("0x5FbDB2315678afecb367f032d93F642f64180aaz")),
        ("to", json!("0x5FbDB2315678afecb367f032d93F642f64180aA3")),
        ("data", json!("0x123")),
        ("value", json!("-1")),
        ("value", json!("1.5")),
        ("value", json!(too_much)),
        ("gas", json!("plenty")),
        ("gas", json!(0)),
        ("gas", json!("18446744073709551616")),
        ("speed", json!("warp")),
        ("nonce", json!(7)),
    ] {
        let mut body = json!({ "to": TO });
        body[field] = bad.clone();
        let (status, problem) = relay.post(&body).await;
        assert_eq!(status, 400, "{field} = {bad}: {problem}");
        assert_eq!(fields(&problem), [field], "{field} = {bad}");
        assert!(problem["message"].as_str().unwrap().starts_with(field), "{problem}");
    }
    let (status, problem) = relay.post(&json!({})).await;
    assert_eq!((status, fields(&problem)), (400, vec!["to"]));
    let (_, problem) = relay.post(&json!({ "data": "0x1", "value": "x", "gas": "y", "speed": "z", "w": 1 })).await;
    assert_eq!(fields(&problem), ["w", "to", "data", "value", "gas", "speed"]);
    assert_nothing_stored_or_sent(&relay).await;
}

#[tokio::test]
async fn unknown_ids_paths_and_methods_get_a_problem_document() {
    let relay = RelaySetup::relayers(1).start().await;
    let unknown = "00000000-0000-7000-8000-000000000000";
    for (path, expected) in [
        ("/api/v1/relay/status/not-a-uuid".to_owned(), 400),
        (format!("/api/v1/relay/status/{unknown}"), 404),
        (format!("/api/v1/relay/transactions/{unknown}/timeline"), 404),
        ("/api/v1/relay/transactions?limit=many".to_owned(), 400),
        ("/api/v1/relay/direct".to_owned(), 405),
        ("/nowhere".to_owned(), 404),
    ] {
        let (status, problem) = relay.get(&path).await;
        assert_eq!(status, expected, "{path}: {problem}");
        assert_eq!(problem["statusCode"], expected, "{path}");
    }
}

#[tokio::test]
async fn an_unsigned_truncated_or_unknown_webhook_changes_nothing() {
    let relay = RelaySetup::relayers(1).no_webhooks().start().await;
    let id = relay.send_serial(1).await;
    let row = relay.until_status(&id, "submitted").await;
    let bad = format!("0x{}", "bad0".repeat(16));
    let tx_id = row["ozRelayerTxId"].as_str().unwrap();
    let body = |tx_id: &str| {
        json!({ "id": "n", "event": "transaction_update", "payload": { "payload_type": "transaction", "id": tx_id,
            "status": "confirmed", "hash": bad, "nonce": 1 }, "timestamp": "2026-11-15T18:31:07Z" })
        .to_string()
    };
    let send = async |header: Option<(&str, String)>, body: String| {
        let mut request = relay.http.post(format!("{}/api/v1/webhooks/oz-relayer", relay.base));
        if let Some((name, value)) = header {
            request = request.header(name, value);
        }
        request.header("content-type", "application/json").body(body).send().await.unwrap().status().as_u16()
    };
    let signed = |body: &str| sign_base64(WEBHOOK_KEY, body.as_bytes());
    let good = body(tx_id);
    assert_eq!(send(None, good.clone()).await, 401);
    assert_eq!(send(Some(("x-signature", sign_base64("another key", good.as_bytes()))), good.clone()).await, 401);
    assert_eq!(send(Some(("x-signature", signed(&good))), good[..good.len() - 1].to_owned()).await, 401);
    // Baton's own id is not the relayer's id: it must not match.
    let ours = body(&id);
    assert_eq!(send(Some(("x-signature", signed(&ours))), ours.clone()).await, 404);
    let unknown = body("11111111-2222-3333-4444-555555555555");
    assert_eq!(send(Some(("x-oz-signature", sign_hex(WEBHOOK_KEY, unknown.as_bytes()))), unknown).await, 404);
    assert_ne!(relay.status(&id).await["hash"], bad.as_str());
    let (_, page) = relay.get("/api/v1/relay/transactions").await;
    assert_eq!(page["transactions"].as_array().unwrap().len(), 1, "no row is created");
}

/// A proxy in front may have checked the other one.
#[tokio::test]
async fn a_field_or_a_key_that_is_there_twice_is_refused() {
    let relay = RelaySetup::relayers(1).start().await;
    let body = format!(r#"{{"to":"{TO}","value":"1","value":"2"}}"#);
    let (status, problem, _) = post_raw(&relay, "application/json", body).await;
    assert_eq!((status, &problem["code"]), (400, &json!("bad-request")), "{problem}");
    assert!(problem["detail"].as_str().unwrap().contains(r#"the field "value" twice"#), "{problem}");
    let request = relay.request(reqwest::Method::POST, "/api/v1/relay/direct").json(&json!({ "to": TO }));
    let answer = request.header("idempotency-key", "a").header("idempotency-key", "b").send().await.unwrap();
    assert_eq!(answer.status(), 400);
    assert_nothing_stored_or_sent(&relay).await;
}

/// It was 503, an outage, and one error in the log for each call.
#[tokio::test]
async fn gasless_calls_without_a_forwarder_are_not_an_outage() {
    let relay = RelaySetup::relayers(1).start().await;
    let address = format!("/api/v1/relay/gasless/nonce/{TO}");
    let (status, problem) = relay.get(&address).await;
    assert_eq!((status, &problem["code"]), (404, &json!("gasless-off")), "{problem}");
    assert!(problem["detail"].as_str().unwrap().contains("FORWARDER_ADDRESS"), "{problem}");
    assert!(!relay.api.output().contains("request_failed"), "{}", relay.api.log_excerpt());
}

#[tokio::test]
async fn a_request_without_a_key_is_refused_although_an_empty_key_has_a_hash() {
    let relay = RelaySetup::relayers(1).start().await;
    let mut env = relay.env.clone();
    let nothing = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    env.insert("RELAY_API_KEYS".to_owned(), format!("ci:{nothing}"));
    env.insert("PORT".to_owned(), harness::ports::free_port().to_string());
    let mut process = crate::relay_fixture::baton(["relay-api"], &env).start().unwrap();
    let status = process.wait_exit(crate::relay_fixture::SOON).await.unwrap();
    assert!(status.code() == Some(2) && process.output().contains("RELAY_API_KEYS"), "{}", process.output());
}
