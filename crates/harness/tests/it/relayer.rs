//! The relayer's API and each of its faults.

use std::time::{Duration, Instant};

use harness::{
    ledger::EffectLedger,
    relayer::{
        Dialect, FaultPlan, Faults, Memory, Outcome, PostFault, ReadFault, Relayer, RelayerOptions, Status, hex_amount,
    },
    wait::eventually,
};
use serde_json::{Value, json};

use crate::{SOON, body, post, read, send, start};

async fn until(relayer: &Relayer, id: &str, status: Status) -> harness::relayer::Record {
    eventually(SOON, format!("{id} to become {status:?}"), || async {
        relayer.record(id).filter(|record| record.status == status)
    })
    .await
}

fn id_of(answer: &Value) -> String {
    answer["data"]["id"].as_str().expect("an accepted record has an id").to_owned()
}

#[tokio::test]
async fn a_record_runs_to_confirmed_and_keeps_what_was_sent() {
    let relayer = start("relayer-a").await;
    let text = r#"{"to":"0x90F79bf6EB2c4f870365E785982E1f101E93b906","value":115792089237316195423570985008687907853269984665640564039457584007913129639935,"data":"0x","gas_limit":21000,"speed":"fast"}"#;
    let (status, answer) = send(&relayer, text).await.unwrap();
    assert_eq!(status, 200);
    let fields: Vec<&String> = answer["data"].as_object().unwrap().keys().collect();
    assert_eq!(
        fields.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(","),
        "id,hash,status,status_reason,created_at,sent_at,confirmed_at,gas_price,gas_limit,nonce,value,from,to,\
         relayer_id,data,max_fee_per_gas,max_priority_fee_per_gas,signature,speed,is_canceled"
    );
    assert_eq!((&answer["data"]["status"], &answer["data"]["nonce"]), (&json!("pending"), &Value::Null));
    assert_eq!(answer["data"]["value"], format!("0x{}", "f".repeat(64)));
    assert_eq!(answer["data"]["created_at"].as_str().unwrap().len(), "2026-11-15T18:30:57.458707822+00:00".len());
    assert_eq!(relayer.accepted()[0].body, text);
    assert_eq!(
        relayer.accepted()[0].value_text,
        "115792089237316195423570985008687907853269984665640564039457584007913129639935"
    );
    let id = id_of(&answer);
    let record = until(&relayer, &id, Status::Confirmed).await;
    assert_eq!(record.nonce, Some(0));
    assert_eq!(record.hash.unwrap().len(), 66);
    let (status, seen) = read(&relayer, &format!("/relayer-a/transactions/{id}")).await.unwrap();
    assert_eq!((status, &seen["data"]["status"]), (200, &json!("confirmed")));
    assert_eq!(relayer.accepted()[0].broadcasts, 1);
}

#[tokio::test]
async fn each_relayer_counts_its_own_nonces() {
    let (a, b) = (start("relayer-a").await, start("relayer-b").await);
    for serial in 0..3 {
        send(&a, &body(serial).to_string()).await.unwrap();
        send(&b, &body(serial).to_string()).await.unwrap();
    }
    for relayer in [&a, &b] {
        let mut nonces = eventually(SOON, "all nonces to be taken", || async {
            relayer.records().iter().map(|record| record.nonce).collect::<Option<Vec<_>>>()
        })
        .await;
        nonces.sort_unstable();
        assert_eq!(nonces, [0, 1, 2]);
    }
}

#[tokio::test]
async fn requests_are_refused_as_by_the_real_relayer() {
    let relayer = start("relayer-a").await;
    let with = |name: &str, value: Value| {
        let mut body = body(1);
        body[name] = value;
        body.to_string()
    };
    let without = |name: &str| {
        let mut body = body(1);
        body.as_object_mut().unwrap().remove(name);
        body.to_string()
    };
    let pricing = "Transaction must specify either gasPrice, speed, or EIP1559 parameters";
    let cases = [
        (without("value"), "missing field `value`"),
        (without("speed"), pricing),
        (json!({"to": "0x12", "data": "0x", "value": "0", "gasLimit": "100000"}).to_string(), pricing),
        (
            with("speed", json!("slow")),
            "unknown variant `slow`, expected one of `fastest`, `fast`, `average`, `safeLow`",
        ),
        (with("gas_limit", json!("21000")), "invalid type: string \"21000\", expected u64"),
        (
            json!({"to": "0x12", "value": 0, "gas_limit": 20000, "speed": "fast"}).to_string(),
            "gas_limit is too low, intrinsic gas is 21000 and gas_limit is 20000",
        ),
        (
            with("gas_price", json!(1)),
            "Cannot mix different transaction types. Use either gasPrice, speed, or EIP1559 parameters",
        ),
        (with("valid_until", json!("2020-01-01T00:00:00Z")), "The validUntil time cannot be in the past"),
    ];
    for (body, message) in cases {
        let answer = send(&relayer, &body).await.unwrap();
        assert_eq!(answer, (400, json!({"success": false, "data": null, "error": message})), "{body}");
    }
    for value in [json!("-1"), json!("1.5"), json!(1.5), json!(""), json!("0x"), json!(null), json!("1_000")] {
        let (status, _) = send(&relayer, &with("value", value.clone())).await.unwrap();
        assert_eq!(status, 400, "{value}");
    }
    let answer = post(&relayer, "{").send().await.unwrap();
    assert_eq!(answer.status(), 400);
    assert!(answer.headers()["content-type"].to_str().unwrap().starts_with("text/plain"));
    assert!(answer.text().await.unwrap().starts_with("Json deserialize error: "));
    assert_eq!(relayer.accepted().len(), 0);
}

#[tokio::test]
async fn every_call_but_health_needs_the_key() {
    let relayer = start("relayer-a").await;
    let client = harness::http_client();
    let list = format!("{}/api/v1/relayers", relayer.url());
    let missing = client.get(&list).send().await.unwrap();
    assert_eq!(missing.status(), 401);
    assert!(missing.headers().contains_key("content-type"));
    let wrong = client.get(&list).bearer_auth("other").header("x-request-id", "r-1").send().await.unwrap();
    assert_eq!(wrong.status(), 401);
    assert!(!wrong.headers().contains_key("content-type"));
    assert_eq!(wrong.headers()["x-request-id"], "r-1");
    let health = client.get(format!("{}/api/v1/health", relayer.url())).send().await.unwrap();
    assert_eq!((health.status().as_u16(), health.text().await.unwrap().as_str()), (200, "OK"));
    let unknown = client.get(format!("{}/api/v1/nothing", relayer.url())).bearer_auth(relayer.api_key()).send().await;
    assert_eq!(unknown.unwrap().status(), 404);
    assert_eq!(relayer.count_requests("GET", "/relayers"), 2);
    let (status, answer) = read(&relayer, "/nope").await.unwrap();
    assert_eq!((status, &answer["error"]), (404, &json!("Relayer with ID nope not found")));
}

#[tokio::test]
async fn lists_are_paged_filtered_and_newest_first() {
    let relayer = Relayer::start(RelayerOptions { decoys: 12, ..RelayerOptions::new("relayer-a") }).await;
    let (_, first) = read(&relayer, "").await.unwrap();
    assert_eq!(first["pagination"], json!({"current_page": 1, "per_page": 10, "total_items": 13}));
    let (_, second) = read(&relayer, "?page=2").await.unwrap();
    assert_eq!(second["data"].as_array().unwrap().last().unwrap()["id"], "relayer-a");

    let mut ids = Vec::new();
    relayer.set_faults(Faults {
        next_outcomes: [Outcome::Confirmed].into(),
        outcome: Outcome::Stuck,
        ..Faults::default()
    });
    for serial in 0..4 {
        ids.push(id_of(&send(&relayer, &body(serial).to_string()).await.unwrap().1));
    }
    until(&relayer, &ids[0], Status::Confirmed).await;
    let (_, page) = read(&relayer, "/relayer-a/transactions?page=2&per_page=3").await.unwrap();
    assert_eq!(page["data"].as_array().unwrap().len(), 1);
    assert_eq!(page["data"][0]["id"], ids[0]);
    let (_, confirmed) = read(&relayer, "/relayer-a/transactions?status=CONFIRMED").await.unwrap();
    assert_eq!(confirmed["pagination"]["total_items"], 1);
    assert_eq!(read(&relayer, "/relayer-a/transactions?status=nope").await.unwrap().0, 400);
    let (_, status) = read(&relayer, "/relayer-a/status").await.unwrap();
    assert_eq!(status["data"]["pending_transactions_count"], 3);
}

#[tokio::test]
async fn faults_with_an_answer_store_a_record_or_not() {
    let relayer = start("relayer-a").await;
    let cases = [
        (PostFault::Unauthorized, 401),
        (PostFault::Paused, 403),
        (PostFault::Disabled, 403),
        (PostFault::RateLimited, 429),
        (PostFault::Refused("no".to_owned()), 400),
        (PostFault::Status(409), 409),
        (PostFault::ErrorBeforeStoring, 500),
        (PostFault::ErrorAfterStoring, 500),
        (PostFault::QueueUnavailable, 500),
        (PostFault::TimeoutAfterStoring, 504),
        (PostFault::GarbledAnswer, 200),
    ];
    for (serial, (fault, status)) in (0..).zip(cases) {
        let before = relayer.accepted().len();
        relayer.set_faults(Faults::for_next(1, fault.clone()));
        let (answered, answer) = send(&relayer, &body(serial).to_string()).await.unwrap();
        assert_eq!(answered, status, "{fault:?}");
        assert_eq!(relayer.accepted().len() - before, usize::from(fault.stores()), "{fault:?}");
        assert!(answer["data"]["id"].is_null(), "{fault:?} must not show the id: {answer}");
        assert_eq!(send(&relayer, &body(99).to_string()).await.unwrap().0, 200, "only the next one is struck");
    }
    let left = relayer.records().into_iter().find(|record| record.status_reason.is_some()).unwrap();
    assert_eq!((left.status, left.nonce, left.hash), (Status::Failed, None, None));
}

#[tokio::test]
async fn faults_without_an_answer_store_or_not() {
    let relayer = start("relayer-a").await;
    let cases = [
        (PostFault::CutBeforeStoring, 0),
        (PostFault::CutAfterStoring, 1),
        (PostFault::HangBeforeStoring, 0),
        (PostFault::HangAfterStoring, 1),
    ];
    for (fault, stored) in cases {
        let before = relayer.accepted().len();
        relayer.set_faults(Faults::for_next(1, fault.clone()));
        let result = post(&relayer, &body(1).to_string()).timeout(Duration::from_millis(300)).send().await;
        let error = result.expect_err("no answer");
        let hangs = matches!(fault, PostFault::HangBeforeStoring | PostFault::HangAfterStoring);
        assert_eq!(error.is_timeout(), hangs, "{fault:?}: {error:?}");
        assert_eq!(relayer.accepted().len() - before, stored, "{fault:?}");
    }
}

#[tokio::test]
async fn a_hung_request_may_be_stored_after_its_sender_gave_up() {
    let relayer = start("relayer-a").await;
    relayer.set_faults(Faults::every(PostFault::HangThenStore(Duration::from_millis(400))));
    let sent = post(&relayer, &body(1).to_string()).timeout(Duration::from_millis(100)).send().await;
    assert!(sent.expect_err("no answer").is_timeout());
    assert_eq!(relayer.accepted().len(), 0, "not yet");
    eventually(SOON, "the late record", || async { (relayer.accepted().len() == 1).then_some(()) }).await;
}

#[tokio::test]
async fn a_slow_answer_is_slow_and_a_read_can_be_slow_or_fail() {
    let relayer = start("relayer-a").await;
    let slow = Duration::from_millis(200);
    relayer.set_faults(Faults {
        every_post: Some(PostFault::Slow(slow)),
        relayer_reads: ReadFault { status: Some(500), ..ReadFault::default() },
        transaction_reads: ReadFault { delay: Some(slow), ..ReadFault::default() },
        ..Faults::default()
    });
    let start = Instant::now();
    assert_eq!(send(&relayer, &body(1).to_string()).await.unwrap().0, 200);
    assert!(start.elapsed() >= slow);
    assert_eq!(read(&relayer, "/relayer-a/status").await.unwrap().0, 500);
    let start = Instant::now();
    assert_eq!(read(&relayer, "/relayer-a/transactions").await.unwrap().0, 200);
    assert!(start.elapsed() >= slow);
    relayer.set_faults(Faults { every_request: Some(503), ..Faults::default() });
    assert_eq!(read(&relayer, "/relayer-a/transactions").await.unwrap().0, 503);
    assert_eq!(send(&relayer, &body(1).to_string()).await.unwrap().0, 503);
}

#[tokio::test]
async fn the_same_seed_gives_the_same_faults() {
    let mut runs = Vec::new();
    for seed in [7, 7, 8] {
        let relayer = start("relayer-a").await;
        relayer.set_faults(Faults::planned(FaultPlan::storm(seed)));
        let mut statuses = Vec::new();
        for serial in 0..60 {
            statuses.push(send(&relayer, &body(serial).to_string()).await.map(|(status, _)| status).unwrap_or(0));
        }
        assert!(relayer.faults_struck().len() >= 4, "{:?}", relayer.faults_struck());
        runs.push(statuses);
    }
    assert_eq!(runs[0], runs[1]);
    assert_ne!(runs[0], runs[2]);
}

#[tokio::test]
async fn a_rule_applies_to_the_requests_that_it_names() {
    let relayer = start("relayer-a").await;
    relayer.set_post_rule(|request| (request["data"] == "0x00000002").then_some(PostFault::Status(409)));
    relayer.set_outcome_rule(|request| (request["data"] == "0x00000001").then_some(Outcome::Reverted));
    let (_, first) = send(&relayer, &body(1).to_string()).await.unwrap();
    assert_eq!(send(&relayer, &body(2).to_string()).await.unwrap().0, 409);
    let record = until(&relayer, &id_of(&first), Status::Failed).await;
    assert!(record.nonce.is_some() && record.hash.is_some());
}

#[tokio::test]
async fn outcomes_end_as_the_real_ones_do() {
    let relayer = start("relayer-a").await;
    let accept = async |outcome: Outcome| {
        relayer.set_faults(Faults::with_outcome(outcome));
        id_of(&send(&relayer, &body(1).to_string()).await.unwrap().1)
    };
    let id = accept(Outcome::NoOp).await;
    let noop = until(&relayer, &id, Status::Confirmed).await;
    assert_eq!(noop.to.as_deref(), Some(relayer.address()));
    assert_eq!((noop.value.as_str(), noop.data.as_deref()), ("0x0", Some("0x")));

    let id = accept(Outcome::NeverSigned("Insufficient balance".to_owned())).await;
    let failed = until(&relayer, &id, Status::Failed).await;
    assert_eq!(
        (failed.nonce, failed.hash, failed.status_reason.as_deref()),
        (None, None, Some("Insufficient balance"))
    );
    let effects: Vec<String> = relayer.effects().into_iter().map(|effect| effect.id).collect();
    assert_eq!(effects, [noop.id], "what failed unsigned is no effect");

    let id = accept(Outcome::Canceled).await;
    assert!(until(&relayer, &id, Status::Canceled).await.is_canceled);

    let id = accept(Outcome::SentTwice).await;
    // It is confirmed for some milliseconds only, which a look may miss; relayer-sim's own tests see each step.
    eventually(SOON, "the second send", || async { (relayer.accepted().last()?.broadcasts == 2).then_some(()) }).await;
    until(&relayer, &id, Status::Submitted).await;
}

#[tokio::test]
async fn a_jam_holds_everything_at_submitted() {
    let relayer = start("relayer-a").await;
    relayer.set_faults(Faults { jammed: true, ..Faults::default() });
    let id = id_of(&send(&relayer, &body(1).to_string()).await.unwrap().1);
    until(&relayer, &id, Status::Submitted).await;
    // Another relayer's whole run says how long to look, whatever the machine is busy with.
    let free = start("relayer-b").await;
    let other = id_of(&send(&free, &body(1).to_string()).await.unwrap().1);
    until(&free, &other, Status::Confirmed).await;
    assert_eq!(relayer.record(&id).unwrap().status, Status::Submitted);
    relayer.set_faults(Faults::default());
    until(&relayer, &id, Status::Confirmed).await;
}

#[tokio::test]
async fn a_paused_or_disabled_relayer_refuses_and_shows_it() {
    let relayer = start("relayer-a").await;
    relayer.set_balance("0");
    for (faults, message) in [
        (Faults { paused: true, ..Faults::default() }, "Relayer paused"),
        (Faults { system_disabled: true, ..Faults::default() }, "Relayer disabled"),
    ] {
        relayer.set_faults(faults.clone());
        let (status, answer) = send(&relayer, &body(1).to_string()).await.unwrap();
        assert_eq!((status, &answer["error"]), (403, &json!(message)));
        let (_, status) = read(&relayer, "/relayer-a/status").await.unwrap();
        assert_eq!(status["data"]["paused"], faults.paused);
        assert_eq!(status["data"]["system_disabled"], faults.system_disabled);
        assert_eq!(status["data"]["balance"], "0");
    }
    assert_eq!(relayer.accepted().len(), 0);
}

#[tokio::test]
async fn a_stopped_relayer_refuses_and_comes_back_on_its_port_with_or_without_its_memory() {
    let relayer = start("relayer-a").await;
    relayer.set_faults(Faults { jammed: true, ..Faults::default() });
    let id = id_of(&send(&relayer, &body(1).to_string()).await.unwrap().1);
    let url = relayer.url();
    relayer.stop().await;
    assert!(send(&relayer, &body(2).to_string()).await.expect_err("refused").is_connect());
    relayer.set_faults(Faults::default());
    relayer.restart(Memory::Keep).await;
    assert_eq!(relayer.url(), url);
    until(&relayer, &id, Status::Confirmed).await;
    relayer.restart(Memory::Forget).await;
    assert_eq!(read(&relayer, &format!("/relayer-a/transactions/{id}")).await.unwrap().0, 404);
    assert_eq!(relayer.accepted().len(), 1, "the audit forgets nothing");
    let id = id_of(&send(&relayer, &body(3).to_string()).await.unwrap().1);
    assert_eq!(until(&relayer, &id, Status::Confirmed).await.nonce, Some(1), "the chain forgets nothing either");
}

#[tokio::test]
async fn stopping_cuts_a_request_that_hangs() {
    let relayer = start("relayer-a").await;
    relayer.set_faults(Faults::every(PostFault::HangAfterStoring));
    let hanging = tokio::spawn(post(&relayer, &body(1).to_string()).send());
    eventually(SOON, "the record", || async { relayer.accepted().pop() }).await;
    relayer.stop().await;
    let error = hanging.await.unwrap().expect_err("cut");
    assert!(!error.is_timeout(), "{error:?}");
}

#[tokio::test]
async fn the_rate_limit_answers_429() {
    let options = RelayerOptions { rate_limit: Some((0.001, 3.0)), ..RelayerOptions::new("relayer-a") };
    let relayer = Relayer::start(options).await;
    let mut statuses = Vec::new();
    for serial in 0..5 {
        statuses.push(send(&relayer, &body(serial).to_string()).await.unwrap().0);
    }
    assert_eq!(statuses, [200, 200, 200, 429, 429]);
}

#[tokio::test]
async fn the_older_dialect_can_be_chosen() {
    let options = RelayerOptions { dialect: Dialect::Spec, ..RelayerOptions::new("relayer-1") };
    let relayer = Relayer::start(options).await;
    let (_, list) = read(&relayer, "").await.unwrap();
    assert_eq!(
        list,
        json!({"data": [{"relayerId": "relayer-1", "id": "relayer-1", "pending_transactions": 0, "status": "active"}]})
    );
    let answer = harness::http_client()
        .post(format!("{}/transactions", relayer.url()))
        .bearer_auth(relayer.api_key())
        .json(&json!({"to": "0x12", "data": "0x", "value": "18446744073709551616", "gasLimit": "100000"}))
        .send()
        .await
        .unwrap();
    assert_eq!(answer.status(), 200);
    let answer: Value = answer.json().await.unwrap();
    assert_eq!(answer["status"], "pending");
    let record = relayer.record(answer["transactionId"].as_str().unwrap()).unwrap();
    assert_eq!((record.value.as_str(), record.gas_limit), ("0x10000000000000000", Some(100_000)));
}

#[tokio::test]
async fn the_ledger_finds_lost_doubled_and_unpromised_effects() {
    let (a, b) = (start("relayer-a").await, start("relayer-b").await);
    for (relayer, serial) in [(&a, 1), (&a, 2), (&b, 2), (&b, 3)] {
        send(relayer, &body(serial).to_string()).await.unwrap();
    }
    let key = |serial: u32| format!("0x{serial:08x}");
    let compare = |serials: &[u32]| {
        let promised: Vec<_> = serials.iter().map(|serial| (format!("our-{serial}"), key(*serial))).collect();
        EffectLedger::compare(promised, [&a, &b], |accepted| accepted.field("data"))
    };
    let ledger = compare(&[1, 2, 4]);
    assert_eq!(ledger.once, 1);
    assert_eq!(ledger.lost, [("our-4".to_owned(), key(4))]);
    assert_eq!((ledger.duplicates[0].0.as_str(), ledger.duplicates[0].1.len()), (key(2).as_str(), 2));
    assert_eq!(ledger.extras[0].0, key(3));
    let table = ledger.to_string();
    assert!(table.contains("our-4") && table.contains("at relayer-b"), "{table}");
    assert!(!compare(&[1, 2, 3]).is_at_most_once());
    assert!(std::panic::catch_unwind(|| ledger.assert_at_most_once()).is_err());
    assert_eq!(a.count_by(|accepted| accepted.field("data"))[&key(2)], 1);
}

#[test]
fn amounts_keep_every_digit() {
    for (text, hex) in [
        ("0", "0x0"),
        ("1000000000000000", "0x38d7ea4c68000"),
        ("\"1000000000000000\"", "0x38d7ea4c68000"),
        ("\"0x0038D7EA4C68000\"", "0x38d7ea4c68000"),
        ("340282366920938463463374607431768211457", "0x100000000000000000000000000000001"),
    ] {
        assert_eq!(hex_amount(text).as_deref(), Ok(hex), "{text}");
    }
    for text in ["-1", "1e18", "\"\"", "\"0x\"", "0x10", "true", "\"+1\"", &format!("\"0x1{}\"", "0".repeat(64))] {
        assert!(hex_amount(text).is_err(), "{text}");
    }
}
