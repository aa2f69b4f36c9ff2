//! A transaction's journey without faults, in every mode of the relay lane.

use harness::relayer::{Dialect, Faults, Outcome};
use serde_json::json;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::relay_fixture::{LATER, RelaySetup, TO};

#[tokio::test]
async fn a_transaction_is_accepted_submitted_and_confirmed() {
    let relay = RelaySetup::relayers(3).start().await;
    let response = relay
        .request(reqwest::Method::POST, "/api/v1/relay/direct")
        .json(&json!({ "to": TO, "value": "5", "data": "0x01", "gas": "60000", "speed": "fast" }))
        .send()
        .await
        .unwrap();
    assert_eq!(response.status(), 202);
    let location = response.headers()["location"].to_str().unwrap().to_owned();
    let body: serde_json::Value = response.json().await.unwrap();
    assert_eq!(body["status"], "pending");
    assert!(body.get("hash").is_none(), "{body}");
    let id = body["transactionId"].as_str().unwrap();
    assert_eq!(location, format!("/api/v1/relay/status/{id}"));

    let end = relay.until_status(id, "confirmed").await;
    assert!(end["hash"].as_str().unwrap().starts_with("0x"), "{end}");
    assert_eq!(end["hash"], end["transactionHash"]);
    assert_eq!((&end["to"], &end["value"], &end["type"]), (&json!(TO), &json!("5"), &json!("direct")));
    assert!(end["confirmedAt"].is_string() && end["from"].is_string() && end["ozRelayerTxId"].is_string(), "{end}");
    assert!(relay.relayers.iter().any(|relayer| end["ozRelayerUrl"] == relayer.url().as_str()), "{end}");

    let (_, timeline) = relay.get(&format!("/api/v1/relay/transactions/{id}/timeline")).await;
    let actions: Vec<_> =
        timeline["steps"].as_array().unwrap().iter().map(|step| step["action"].as_str().unwrap()).collect();
    assert_eq!(actions[..3], ["accepted", "claimed", "submitted"], "{timeline}");
    assert_eq!(actions.last(), Some(&"confirmed"), "{timeline}");
}

#[tokio::test]
async fn the_largest_value_reaches_the_relayer_without_rounding() {
    let relay = RelaySetup::relayers(1).start().await;
    for value in
        ["115792089237316195423570985008687907853269984665640564039457584007913129639935", "1000000000000000001"]
    {
        let id = relay.send(&json!({ "to": TO, "value": value })).await;
        let end = relay.until_status(&id, "confirmed").await;
        assert_eq!(end["value"], value);
        let arrived = relay.relayers[0].accepted();
        assert_eq!(arrived.last().unwrap().value_text, format!("\"{value}\""));
    }
}

#[tokio::test]
async fn api_and_consumer_as_separate_processes_share_one_data_directory() {
    let mut relay = RelaySetup::relayers(3).split().start().await;
    relay.add_consumer().await;
    let sent = relay.send_many(0..300).await;
    relay.until_all_final(LATER).await;
    assert_eq!(relay.count("confirmed").await, 300);
    relay.books(sent).assert_exactly_once();
}

#[tokio::test]
async fn a_transaction_survives_a_restart() {
    let mut relay = RelaySetup::relayers(1).start().await;
    let id = relay.send_serial(1).await;
    let end = relay.until_status(&id, "confirmed").await;
    relay.api.sigterm().unwrap();
    assert_eq!(relay.api.wait_exit(LATER).await.unwrap().code(), Some(0), "{}", relay.api.output());
    relay.api.restart().await.unwrap();
    relay.api_ready().await;
    assert_eq!(relay.status(&id).await, end);
}

#[tokio::test]
async fn confirm_mode_polls_until_final_and_stores_the_result() {
    let relay = RelaySetup::relayers(2).env("RELAY_MODE", "confirm").no_webhooks().start().await;
    let id = relay.send_serial(1).await;
    let end = relay.until_status(&id, "success").await;
    assert_eq!(end["result"]["status"], "confirmed", "{end}");
    assert_eq!(end["result"]["hash"], end["hash"]);
}

#[tokio::test]
async fn the_relayer_api_as_documented_works_too() {
    let relay = RelaySetup::relayers(2)
        .relayer(0, |options| options.dialect = Dialect::Spec)
        .relayer(1, |options| options.dialect = Dialect::Spec)
        .start()
        .await;
    let sent = relay.send_many(0..20).await;
    relay.until_all_final(LATER).await;
    assert_eq!(relay.count("confirmed").await, 20);
    relay.books(sent).assert_exactly_once();
}

#[tokio::test]
async fn one_of_many_relayers_behind_a_url_can_be_selected_by_id() {
    let mut relay = RelaySetup::relayers(1).relayer(0, |options| options.decoys = 25).start().await;
    let url = format!("{}/api/v1/relayers/relayer-1", relay.relayers[0].url());
    let program = relay.api.program().clone().env("OZ_RELAYER_URLS", url.clone());
    relay.api.restart_as(program).await.unwrap();
    relay.api_ready().await;
    let id = relay.send_serial(1).await;
    let end = relay.until_status(&id, "confirmed").await;
    assert_eq!(end["ozRelayerUrl"], url.as_str());
}

#[tokio::test]
async fn the_list_is_filtered_and_paged_newest_first() {
    let relay = RelaySetup::relayers(2).start().await;
    let mut sent: Vec<String> = Vec::new();
    for serial in 0..7 {
        sent.push(relay.send_serial(serial).await);
    }
    relay.until_all_final(LATER).await;
    sent.reverse();
    let mut listed = Vec::new();
    let mut path = "/api/v1/relay/transactions?limit=3".to_owned();
    loop {
        let (status, page) = relay.get(&path).await;
        assert_eq!(status, 200, "{page}");
        let ids = page["transactions"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| row["transactionId"].as_str().unwrap().to_owned());
        listed.extend(ids);
        match page["nextCursor"].as_str() {
            Some(cursor) => path = format!("/api/v1/relay/transactions?limit=3&cursor={cursor}"),
            None => break,
        }
    }
    assert_eq!(listed, sent);
    let relayer = relay.relayers[0].url();
    let (_, page) =
        relay.get(&format!("/api/v1/relay/transactions?relayer={relayer}&status=confirmed&type=direct")).await;
    let here = page["transactions"].as_array().unwrap();
    assert_eq!(here.len(), relay.relayers[0].accepted().len());
    let (_, page) = relay.get("/api/v1/relay/transactions?until=2020-01-01T00:00:00Z").await;
    assert_eq!(page["transactions"].as_array().unwrap().len(), 0);
    let (_, page) = relay.get("/api/v1/relay/transactions?from=2020-01-01T00:00:00Z").await;
    assert_eq!(page["transactions"].as_array().unwrap().len(), 7);
}

#[tokio::test]
async fn a_transaction_known_only_to_a_relayer_is_found_and_stored() {
    let hour_ago = |faults: &mut Faults| faults.clock_offset_ms = -3_600_000;
    let relay = RelaySetup::relayers(2).no_webhooks().faults(1, hour_ago).start().await;
    let id = relay.post_at_relayer(1, "0x").await;
    let earlier = relay.send_serial(1).await;
    let (status, found) = relay.get(&format!("/api/v1/relay/status/{id}")).await;
    assert_eq!(status, 200, "{found}");
    assert_eq!((&found["ozRelayerTxId"], &found["value"]), (&json!(id), &json!("3")));
    let created_at = relay.relayers[1].record(&id).unwrap().created_at_ms;
    let said = OffsetDateTime::parse(found["createdAt"].as_str().unwrap(), &Rfc3339).unwrap();
    assert_eq!(said.unix_timestamp_nanos(), i128::from(created_at) * 1_000_000, "by its relayer's clock: {found}");
    // Listed where it belongs by that time, although it was stored later than another and its id sorts anywhere.
    let later = relay.send_serial(2).await;
    let (_, page) = relay.get("/api/v1/relay/transactions").await;
    let listed: Vec<_> = page["transactions"].as_array().unwrap().iter().map(|row| &row["transactionId"]).collect();
    assert_eq!(listed, [&json!(later), &json!(earlier), &json!(id)], "{page}");
}

#[tokio::test]
async fn a_relayer_record_with_invalid_data_is_not_imported() {
    let relay = RelaySetup::relayers(1).no_webhooks().start().await;
    let id = relay.post_at_relayer(0, "zz").await;
    assert_eq!(relay.get(&format!("/api/v1/relay/status/{id}")).await.0, 404);
    assert_eq!(relay.get("/api/v1/relay/transactions").await.0, 200);
    let id = relay.send_serial(1).await;
    relay.until_status(&id, "submitted").await;
}

#[tokio::test]
async fn an_imported_transaction_is_never_resent() {
    let relay = RelaySetup::relayers(2).env("RECONCILE_SUBMITTED_MS", "100").no_webhooks().start().await;
    relay.relayers[0].set_faults(Faults::with_outcome(Outcome::NeverSigned("Insufficient balance: …".into())));
    let id = relay.post_at_relayer(0, "0x").await;
    let end = relay.until_status(&id, "failed").await;
    assert!(end["error_message"].as_str().unwrap().contains("Insufficient balance"), "{end}");
    let taken: usize = relay.relayers.iter().map(|relayer| relayer.accepted().len()).sum();
    assert_eq!(taken, 1, "only the one posted directly");
}

#[tokio::test]
async fn every_service_has_health_and_metrics() {
    let relay = RelaySetup::relayers(1).split().start().await;
    let id = relay.send_serial(1).await;
    relay.until_status(&id, "confirmed").await;
    let admin = harness::admin_url(&relay.base);
    for path in ["/live", "/ready", "/health", "/metrics"] {
        let answer = relay.http.get(format!("{}{path}", relay.base)).send().await.unwrap();
        assert_eq!(answer.status(), 200, "{path}");
        let answer = relay.http.get(format!("{admin}{path}")).send().await.unwrap();
        assert_eq!(answer.status(), 200, "{path}");
    }
    let (status, body) = relay.get("/api/v1/health").await;
    assert_eq!((status, &body["service"]), (200, &json!("relay-api")), "{body}");
    assert_eq!(relay.metric("baton_accepted_total", "direct").await, 1.0);
    assert_eq!(relay.metric("baton_transactions_total", "confirmed").await, 1.0);
    let text = relay
        .http
        .get(format!("{}/metrics", harness::admin_url(&relay.consumer_bases[0])))
        .send()
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    for name in [
        "baton_submissions_total",
        "baton_submit_seconds",
        "pipeline_settled_total",
        "baton_claims",
        "baton_queue_messages",
        "baton_relayer_breaker",
    ] {
        assert!(text.contains(name), "{name} is missing in\n{text}");
    }
}

#[tokio::test]
async fn duplicate_requests_under_one_idempotency_key_are_one_transaction() {
    let relay = RelaySetup::relayers(2).start().await;
    let post = async |key: &str, value: &str| {
        let request = relay.request(reqwest::Method::POST, "/api/v1/relay/direct").header("idempotency-key", key);
        let response = request.json(&json!({ "to": TO, "value": value, "data": "0x01" })).send().await.unwrap();
        (response.status().as_u16(), response.json::<serde_json::Value>().await.unwrap())
    };
    let answers = futures::future::join_all((0..20).map(|_| post("order-1", "5"))).await;
    let ids: std::collections::BTreeSet<_> =
        answers.iter().map(|(status, body)| (*status, body["transactionId"].as_str().unwrap().to_owned())).collect();
    assert_eq!(ids.len(), 1, "{ids:?}");
    let (status, id) = ids.into_iter().next().unwrap();
    assert_eq!(status, 202);
    relay.until_status(&id, "confirmed").await;
    let (status, again) = post("order-1", "5").await;
    assert_eq!((status, &again["transactionId"], &again["status"]), (202, &json!(id), &json!("confirmed")));
    let (status, problem) = post("order-1", "6").await;
    assert_eq!((status, &problem["code"]), (422, &json!("idempotency-key-reused")));
    assert_ne!(post("order-2", "5").await.1["transactionId"], id.as_str());
    assert_eq!(post("", "5").await.0, 400);
    relay.until_all_final(LATER).await;
    let taken: usize = relay.relayers.iter().map(|relayer| relayer.accepted().len()).sum();
    assert_eq!(taken, 2);
}
