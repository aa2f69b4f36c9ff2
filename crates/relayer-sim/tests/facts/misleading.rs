//! Answers that mislead a caller who believes them: lists that hide what is there, two memories behind one id, dates by a
//! proxy, and POSTs whose answer is about another call (facts 11, and what was tried beyond it).

use std::time::Duration;

use relayer_sim::{DateHeader, ListFault, Outcome, PostFault, SecondMemory, WebhookFaults};

use super::*;

/// A relayer with `count` records, one a second, and their ids.
fn with_records(count: usize) -> (Fixture, Vec<String>) {
    let mut fixture = Fixture::new();
    let accept = |_| {
        let id = fixture.accept(BODY);
        fixture.pass(1, Some(200));
        id
    };
    let ids = (0..count).map(accept).collect();
    (fixture, ids)
}

fn list(fixture: &mut Fixture, query: &str) -> (Vec<String>, Value) {
    let list = json(&fixture.get(&format!("/relayer-a/transactions{query}")));
    let records = list["data"].as_array().expect("a list of records");
    let ids = records.iter().map(|record| record["id"].as_str().expect("an id").to_owned()).collect();
    (ids, list["pagination"].clone())
}

fn set_listing(fixture: &mut Fixture, listing: ListFault) {
    fixture.set_faults(Faults { listing, ..Faults::default() });
}

#[test]
fn a_list_can_be_empty_while_single_reads_work() {
    let (mut fixture, ids) = with_records(3);
    set_listing(&mut fixture, ListFault { empty: true, ..ListFault::default() });
    let (listed, pagination) = list(&mut fixture, "");
    assert!(listed.is_empty());
    assert_eq!(pagination["total_items"], 0);
    assert_eq!(fixture.show(&ids[2])["id"], ids[2].as_str());
}

#[test]
fn pages_can_be_unsorted_and_still_complete() {
    let (mut fixture, ids) = with_records(40);
    set_listing(&mut fixture, ListFault { unsorted: true, ..ListFault::default() });
    let mut listed = list(&mut fixture, "?per_page=25").0;
    listed.extend(list(&mut fixture, "?per_page=25&page=2").0);
    let newest_first: Vec<String> = ids.iter().rev().cloned().collect();
    assert_ne!(listed, newest_first);
    assert_ne!(listed, ids);
    listed.sort();
    let mut all = ids;
    all.sort();
    assert_eq!(listed, all);
}

#[test]
fn a_page_can_have_fewer_records_than_it_says_and_the_rest_is_on_no_page() {
    let (mut fixture, ids) = with_records(12);
    set_listing(&mut fixture, ListFault { page_max: Some(2), ..ListFault::default() });
    let (first, pagination) = list(&mut fixture, "?per_page=10");
    assert_eq!(first, [ids[11].clone(), ids[10].clone()]);
    assert_eq!((&pagination["per_page"], &pagination["total_items"]), (&Value::from(10), &Value::from(12)));
    assert_eq!(list(&mut fixture, "?per_page=10&page=2").0, [ids[1].clone(), ids[0].clone()]);
}

#[test]
fn every_other_answer_can_be_from_an_older_memory() {
    let (mut fixture, ids) = with_records(5);
    let second_memory = Some(SecondMemory::Behind(Duration::from_secs(3)));
    fixture.set_faults(Faults { second_memory, ..Faults::default() });
    let mut counts: Vec<usize> = (0..4).map(|_| list(&mut fixture, "").0.len()).collect();
    assert_eq!((counts[0], counts[1]), (counts[2], counts[3]));
    counts.sort_unstable();
    assert_eq!(counts, [3, 3, 5, 5]);
    let mut known: Vec<u16> =
        (0..2).map(|_| fixture.get(&format!("/relayer-a/transactions/{}", ids[4])).status).collect();
    known.sort_unstable();
    assert_eq!(known, [200, 404], "one id is known and unknown in turn");
}

#[test]
fn two_memories_can_have_half_of_the_records_each() {
    let (mut fixture, ids) = with_records(6);
    fixture.set_faults(Faults { second_memory: Some(SecondMemory::Split), ..Faults::default() });
    let (one, total) = list(&mut fixture, "");
    let (other, _) = list(&mut fixture, "");
    assert_eq!((one.len(), other.len(), &total["total_items"]), (3, 3, &Value::from(3)));
    assert!(one.iter().all(|id| !other.contains(id)) && ids.iter().all(|id| one.contains(id) || other.contains(id)));
}

#[test]
fn a_proxy_can_write_the_right_date_for_a_wrong_clock_or_none_at_all() {
    let mut fixture = Fixture::new();
    let date = |fixture: &mut Fixture, date: DateHeader| {
        fixture.set_faults(Faults { clock_offset_ms: -90_000, date, ..Faults::default() });
        fixture.get("").header("date").map(str::to_owned)
    };
    assert_eq!(date(&mut fixture, DateHeader::Proxy).as_deref(), Some("Sun, 15 Nov 2026 18:30:57 GMT"));
    let id = fixture.accept(BODY);
    assert_eq!(fixture.show(&id)["created_at"], "2026-11-15T18:29:27.458000000+00:00");
    assert_eq!(date(&mut fixture, DateHeader::Own).as_deref(), Some("Sun, 15 Nov 2026 18:29:27 GMT"));
    assert_eq!(date(&mut fixture, DateHeader::Absent), None);
}

#[test]
fn a_conflict_may_hide_a_stored_record() {
    let mut fixture = Fixture::new();
    fixture.set_faults(Faults::for_next(1, PostFault::StatusAfterStoring(409)));
    assert_eq!(fixture.post(BODY).status, 409);
    fixture.pass(60, Some(200));
    assert_eq!(fixture.relayer.records().next().unwrap().status.as_str(), "confirmed");
    assert_eq!(fixture.relayer.audit()[0].broadcasts, 1);
}

#[test]
fn an_answer_may_be_about_another_record_or_about_none() {
    let (mut fixture, ids) = with_records(1);
    fixture.set_faults(Faults::for_next(1, PostFault::IdOfAnother));
    assert_eq!(fixture.accept(BODY), ids[0]);
    fixture.set_faults(Faults::for_next(1, PostFault::WrongId));
    let made_up = fixture.accept(BODY);
    assert_eq!(fixture.get(&format!("/relayer-a/transactions/{made_up}")).status, 404);
    assert_eq!(fixture.relayer.records().count(), 3, "all three are stored");
}

#[test]
fn a_proxy_can_exchange_two_answers() {
    let mut fixture = Fixture::new();
    fixture.set_faults(Faults::for_next(3, PostFault::ExchangedAnswer));
    let value_of = |response: &SimResponse| json(response)["data"]["value"].as_str().unwrap().to_owned();
    let body = |value: u32| BODY.replace("1000000000000000", &value.to_string());
    let Reply::Waiting(first) = fixture.post_reply(&body(1)) else { panic!("the first answer waits") };
    let second = fixture.post(&body(2));
    assert_eq!(value_of(&second), "0x1", "the answer of the first");
    let replies = |events: Vec<Event>| {
        events.into_iter().filter_map(|event| match event {
            Event::Reply { ticket, reply } => Some((ticket, value_of(&answer(reply)))),
            _ => None,
        })
    };
    assert_eq!(replies(fixture.relayer.advance(fixture.now_ms)).collect::<Vec<_>>(), [(first, "0x2".to_owned())]);
    // A third one has no partner: it gets its own answer a little later.
    let Reply::Waiting(third) = fixture.post_reply(&body(3)) else { panic!("it waits for another") };
    assert_eq!(replies(fixture.relayer.advance(fixture.now_ms + 299)).count(), 0);
    let late = replies(fixture.relayer.advance(fixture.now_ms + 300)).collect::<Vec<_>>();
    assert_eq!(late, [(third, "0x3".to_owned())]);
}

#[test]
fn another_relayer_can_report_a_failure_of_an_id_that_is_not_its_own() {
    let mut fixture = Fixture::new();
    fixture.set_faults(Faults {
        webhooks: WebhookFaults { foreign: 1.0, ..WebhookFaults::default() },
        ..Faults::default()
    });
    let id = fixture.accept(BODY);
    let webhooks = fixture.pass(60, Some(200));
    let foreign: Vec<Value> = webhooks
        .iter()
        .map(|(_, webhook)| {
            let signature = relayer_sim::sign_base64(WEBHOOK_KEY, webhook.body.as_bytes());
            assert!(webhook.headers.contains(&("x-signature", signature)), "rightly signed");
            payload(webhook)
        })
        .filter(|payload| payload["relayer_id"] != "relayer-a")
        .collect();
    assert_eq!(foreign.len(), 3, "after sent, submitted and confirmed");
    for payload in foreign {
        assert_eq!((payload["id"].as_str(), payload["status"].as_str()), (Some(id.as_str()), Some("failed")));
        assert!(payload["nonce"].is_null() && payload["hash"].is_null());
        assert_eq!(payload["payload_type"], "transaction");
    }
    assert_eq!(fixture.show(&id)["status"], "confirmed");
}

#[test]
fn a_raised_price_changes_the_hash_and_sends_no_webhook() {
    let mut fixture = Fixture::new();
    fixture.set_faults(Faults::with_outcome(Outcome::GasBumped));
    let id = fixture.accept(BODY);
    let webhooks = fixture.pass(600, Some(200));
    let said: Vec<(String, Value)> =
        webhooks.iter().map(|(_, webhook)| (status_of(webhook), payload(webhook)["hash"].clone())).collect();
    let statuses: Vec<&str> = said.iter().map(|(status, _)| status.as_str()).collect();
    assert_eq!(statuses, ["sent", "submitted", "confirmed"]);
    assert_eq!(said[0].1, said[1].1);
    assert_ne!(said[1].1, said[2].1);
    assert_eq!(fixture.show(&id)["hash"], said[2].1);
    assert_eq!(fixture.relayer.audit()[0].broadcasts, 1, "one call, however often it is signed");
}

#[test]
fn a_gap_is_filled_late_or_never() {
    let mut fixture = Fixture::new();
    let given_up = Faults { outcome: Outcome::GivenUp, ..Faults::default() };
    fixture.set_faults(given_up.clone());
    fixture.accept(BODY);
    fixture.pass(600, Some(200));
    assert_eq!(fixture.relayer.nonce_gaps().collect::<Vec<_>>(), [0]);
    fixture.set_faults(Faults { gap_filled_after: Some(Duration::from_secs(30)), ..given_up });
    fixture.accept(BODY);
    let records = |fixture: &Fixture| fixture.relayer.records().count();
    fixture.pass(150, Some(200));
    assert_eq!(records(&fixture), 2, "given up after 120 s and not filled yet");
    fixture.pass(60, Some(200));
    assert_eq!((records(&fixture), fixture.relayer.nonce_gaps().collect::<Vec<_>>()), (3, vec![0]));
    assert_eq!(fixture.relayer.fill_gaps(fixture.now_ms), 1);
    assert_eq!(fixture.relayer.nonce_gaps().count(), 0);
}

#[test]
fn a_record_without_a_job_is_canceled_at_once() {
    let mut fixture = Fixture::new();
    fixture.set_faults(Faults::with_outcome(Outcome::WithoutJob));
    let id = fixture.accept(BODY);
    fixture.pass(3600, Some(200));
    let path = format!("/api/v1/relayers/relayer-a/transactions/{id}");
    let canceled = json(&answer(fixture.authorized("DELETE", &path, "")));
    assert_eq!(canceled["data"]["status"], "canceled");
    assert!(canceled["data"]["nonce"].is_null(), "it used no nonce");
    assert_eq!(answer(fixture.authorized("DELETE", &path, "")).status, 400, "it is final");
}
