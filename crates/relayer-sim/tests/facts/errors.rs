//! The error matrix for POST transactions (facts 5), and the errors of other calls.

use relayer_sim::PostFault;
use serde_json::json;

use super::*;

/// Message of a refusal in the usual envelope.
#[track_caller]
fn assert_refused(response: &SimResponse, status: u16, message: &str) {
    assert_eq!((response.status, response.header("content-type")), (status, Some("application/json")));
    assert_eq!(json(response), json!({"success": false, "data": null, "error": message}));
}

#[test]
fn a_missing_key_and_a_wrong_one_are_answered_differently() {
    let mut fixture = Fixture::new();
    let path = "/api/v1/relayers/relayer-a/transactions";
    let missing = answer(fixture.reply("POST", path, &[], BODY));
    assert_eq!((missing.status, missing.header("content-type")), (401, Some("application/json")));
    assert_eq!(
        text(&missing),
        r#"{"success": false, "code": 401, "error": "Unauthorized", "message": "Unauthorized"}"#
    );
    for wrong in ["Bearer other", API_KEY] {
        let refused = answer(fixture.reply("POST", path, &[("authorization", wrong)], BODY));
        assert_eq!((refused.status, refused.header("content-type")), (401, None));
        assert_eq!(text(&refused), r#"{"success":false,"code":401,"error":"Unauthorized","message":"Unauthorized"}"#);
    }
    assert_eq!(answer(fixture.reply("GET", "/api/v1/health", &[], "")).body, b"OK");
    assert_eq!(answer(fixture.reply("GET", "/api/v1/ready", &[], "")).status, 200);
    assert_eq!(fixture.relayer.records().count(), 0);
}

#[test]
fn an_unknown_relayer_transaction_or_route_is_404() {
    let mut fixture = Fixture::new();
    let unknown = answer(fixture.authorized("POST", "/api/v1/relayers/nope/transactions", BODY));
    assert_refused(&unknown, 404, "Relayer with ID nope not found");
    assert_eq!(fixture.get("/relayer-a/transactions/00000000-0000-4000-8000-000000000000").status, 404);
    let route = answer(fixture.authorized("GET", "/api/v1/nothing", ""));
    assert_eq!((route.status, route.body.len()), (404, 0));
}

#[test]
fn a_paused_and_a_disabled_relayer_refuse() {
    let mut fixture = Fixture::new();
    fixture.set_faults(Faults { paused: true, ..Faults::default() });
    assert_refused(&fixture.post(BODY), 403, "Relayer paused");
    fixture.set_faults(Faults { system_disabled: true, ..Faults::default() });
    assert_refused(&fixture.post(BODY), 403, "Relayer disabled");
    assert_eq!(fixture.relayer.records().count(), 0);
}

#[test]
fn invalid_requests_are_refused_in_the_measured_words() {
    let mut fixture = Fixture::new();
    let pricing = "Transaction must specify either gasPrice, speed, or EIP1559 parameters";
    for (body, message) in [
        (r#"{"to":"0x12","data":"0x","value":"0","gasLimit":"100000"}"#.to_owned(), pricing),
        (BODY.replace(r#""value":1000000000000000,"#, ""), "missing field `value`"),
        (
            BODY.replace("fast", "slow"),
            "unknown variant `slow`, expected one of `fastest`, `fast`, `average`, `safeLow`",
        ),
        (BODY.replace("21000", "20000"), "gas_limit is too low, intrinsic gas is 21000 and gas_limit is 20000"),
        (
            r#"{"to":"0x12","data":"0x00ff","value":0,"speed":"fast","gas_limit":21019}"#.to_owned(),
            "gas_limit is too low, intrinsic gas is 21020 and gas_limit is 21019",
        ),
        (BODY.replace("21000", "\"21000\""), "invalid type: string \"21000\", expected u64"),
        (
            r#"{"to":"0x12","value":0,"max_fee_per_gas":2}"#.to_owned(),
            "EIP1559 transactions require both maxFeePerGas and maxPriorityFeePerGas",
        ),
        (
            r#"{"value":0,"speed":"fast"}"#.to_owned(),
            "Both txs `to` and `data` fields are missing. At least one of them has to be set.",
        ),
        (
            BODY.replace(r#""speed""#, r#""gas_price":1,"speed""#),
            "Cannot mix different transaction types. Use either gasPrice, speed, or EIP1559 parameters",
        ),
        (
            BODY.replace(r#""speed""#, r#""valid_until":"2026-11-15T18:30:57Z","speed""#),
            "The validUntil time cannot be in the past",
        ),
    ] {
        assert_refused(&fixture.post(&body), 400, message);
    }
    assert_eq!(fixture.relayer.records().count(), 0);
}

#[test]
fn a_body_that_is_not_json_is_refused_in_plain_text() {
    for body in ["", "{", "{]", r#"{"value":0} x"#] {
        let response = Fixture::new().post(body);
        assert_eq!(response.status, 400, "{body}");
        assert!(response.header("content-type").unwrap().starts_with("text/plain"), "{body}");
        assert!(text(&response).starts_with("Json deserialize error: "), "{body}");
    }
}

#[test]
fn the_rate_limit_is_a_bucket_of_300_filled_with_100_per_second() {
    let mut fixture = Fixture::new();
    let passed = (0..400).filter(|_| fixture.get("").status == 200).count();
    assert_eq!(passed, 300);
    let limited = fixture.get("");
    assert_eq!(
        text(&limited),
        r#"{ "success": false, "code":429, "error": "TooManyRequests", "message": "Too Many Requests", "after": 0}"#
    );
    assert_eq!(
        (limited.status, limited.header("retry-after"), limited.header("x-ratelimit-after")),
        (429, Some("0"), Some("0"))
    );
    fixture.now_ms += 1000;
    assert_eq!((0..400).filter(|_| fixture.get("").status == 200).count(), 100);
}

#[test]
fn too_many_concurrent_requests_have_a_body_of_their_own() {
    let mut fixture = Fixture::new();
    fixture.set_faults(Faults::for_next(1, PostFault::TooManyConcurrent));
    let response = fixture.post(BODY);
    assert_eq!(
        (response.status, text(&response)),
        (429, r#"{"error":"Too many concurrent requests","max_concurrent":100}"#)
    );
}

#[test]
fn a_500_or_504_proves_nothing_about_the_record() {
    let mut fixture = Fixture::new();
    fixture.set_faults(Faults::for_next(1, PostFault::ErrorAfterStoring));
    let failed = fixture.post(BODY);
    assert_eq!(failed.status, 500);
    assert!(json(&failed)["error"].as_str().unwrap().starts_with("Queue error: Redis error: "));
    fixture.set_faults(Faults::for_next(1, PostFault::TimeoutAfterStoring));
    let timed_out = fixture.post(BODY);
    assert_eq!((timed_out.status, text(&timed_out)), (504, "Request handler timeout"));
    assert!(timed_out.header("content-type").unwrap().starts_with("text/plain"));
    fixture.pass(20, Some(200));
    assert!(fixture.relayer.audit().iter().all(|audit| audit.broadcasts == 1), "both were executed");
    fixture.set_faults(Faults::for_next(1, PostFault::ErrorBeforeStoring));
    assert_eq!(fixture.post(BODY).status, 500);
    assert_eq!(fixture.relayer.audit().len(), 2);
}

#[test]
fn a_dead_queue_at_post_leaves_a_failed_record_that_was_never_signed() {
    let mut fixture = Fixture::new();
    fixture.set_faults(Faults::for_next(1, PostFault::QueueUnavailable));
    assert_eq!(fixture.post(BODY).status, 500);
    let record = fixture.relayer.records().next().unwrap();
    assert_eq!((record.status_reason.as_deref(), record.never_signed()), (Some("Queue unavailable"), true));
}

#[test]
fn a_status_call_that_waits_for_a_hanging_chain_is_504_in_plain_text() {
    let mut fixture = Fixture::new();
    let mut faults = Faults::default();
    faults.relayer_reads.status = Some(504);
    fixture.set_faults(faults);
    let response = fixture.get("/relayer-a/status");
    assert_eq!((response.status, text(&response)), (504, "Request handler timeout"));
}

#[test]
fn a_lost_connection_may_or_may_not_leave_a_record_at_once_or_later() {
    let after = std::time::Duration::from_secs(40);
    for (fault, reply, stored, stored_later) in [
        (PostFault::CutBeforeStoring, Reply::Cut, 0, 0),
        (PostFault::CutAfterStoring, Reply::Cut, 1, 1),
        (PostFault::HangBeforeStoring, Reply::Hang, 0, 0),
        (PostFault::HangAfterStoring, Reply::Hang, 1, 1),
        (PostFault::HangThenStore(after), Reply::Hang, 0, 1),
        (PostFault::CutThenStore(after), Reply::Cut, 0, 1),
    ] {
        let mut fixture = Fixture::new();
        fixture.set_faults(Faults::for_next(1, fault.clone()));
        assert_eq!(fixture.post_reply(BODY), reply, "{fault:?}");
        assert_eq!(fixture.relayer.audit().len(), stored, "{fault:?}");
        fixture.pass(60, Some(200));
        assert_eq!(fixture.relayer.audit().len(), stored_later, "{fault:?}");
    }
}

#[test]
fn a_late_store_is_answered_late_and_a_frozen_process_reads_late() {
    let mut fixture = Fixture::new();
    fixture.set_faults(Faults::for_next(1, PostFault::StoreLate(std::time::Duration::from_secs(5))));
    let Reply::Waiting(first) = fixture.post_reply(BODY) else { panic!("it is stored late") };
    fixture.relayer.stall_until(fixture.now_ms + 10_000);
    let Reply::Waiting(second) = fixture.post_reply(BODY) else { panic!("it is frozen") };
    assert!(fixture.relayer.advance(fixture.now_ms + 9_999).is_empty());
    let events = fixture.relayer.advance(fixture.now_ms + 10_000);
    let replies: Vec<_> = events
        .into_iter()
        .filter_map(|event| match event {
            Event::Reply { ticket, reply } => Some((ticket, answer(reply).status)),
            _ => None,
        })
        .collect();
    assert_eq!(replies.len(), 2);
    assert!(replies.contains(&(first, 200)) && replies.contains(&(second, 200)), "{replies:?}");
}
