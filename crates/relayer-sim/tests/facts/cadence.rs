//! When records move and when webhooks are tried again (facts 4 and 6).

use relayer_sim::{Memory, Outcome, Status, Timing};
use std::time::Duration;

use super::*;

#[test]
fn a_transaction_is_confirmed_8_to_12_seconds_after_its_post() {
    for seed in 0..50 {
        let mut fixture = Fixture::with(|options| options.seed = seed);
        fixture.accept(BODY);
        let webhooks = fixture.pass(60, Some(200));
        let statuses: Vec<String> = webhooks.iter().map(|(_, webhook)| status_of(webhook)).collect();
        assert_eq!(statuses, ["sent", "submitted", "confirmed"], "none for pending, and mined is skipped");
        let after_ms = webhooks[2].0 - CREATED;
        assert!((8_000..=12_000).contains(&after_ms), "{after_ms} ms");
    }
}

#[test]
fn nonces_do_not_follow_the_order_of_posts() {
    let mut fixture = Fixture::with(|options| options.timing.sent = Duration::from_secs(2));
    for _ in 0..60 {
        fixture.accept(BODY);
        fixture.now_ms += 10;
    }
    fixture.pass(30, Some(200));
    let nonces: Vec<u64> = fixture.relayer.records().filter_map(|record| record.nonce).collect();
    assert_eq!(nonces.len(), 60);
    assert!(nonces.windows(2).any(|pair| pair[0] > pair[1]), "{nonces:?}");
}

#[test]
fn a_webhook_is_tried_at_0_2_6_15_and_23_seconds_with_the_same_bytes_and_then_dropped() {
    let mut fixture = Fixture::new();
    fixture.set_faults(Faults::with_outcome(Outcome::NeverSigned("no".to_owned())));
    fixture.accept(BODY);
    let attempts = fixture.pass(600, Some(503));
    let first = attempts[0].0;
    let seconds: Vec<i64> = attempts.iter().map(|(at_ms, _)| (at_ms - first) / 1000).collect();
    assert_eq!(seconds, [0, 2, 6, 15, 23]);
    assert!(attempts.iter().all(|(_, webhook)| webhook.body == attempts[0].1.body));
    assert!(attempts.iter().all(|(_, webhook)| webhook.headers == attempts[0].1.headers));
    assert_eq!(attempts.last().unwrap().1.attempt, 5);
}

#[test]
fn a_malformed_target_takes_a_nonce_fails_after_two_minutes_and_holds_the_next_one() {
    let mut fixture = Fixture::new();
    fixture.set_faults(Faults { gaps_jam: true, ..Faults::default() });
    let malformed = fixture.accept(&BODY.replace("0x90F79bf6EB2c4f870365E785982E1f101E93b906", "0x1234"));
    fixture.pass(2, Some(200));
    let valid = fixture.accept(BODY);
    fixture.pass(116, Some(200));
    assert_eq!(fixture.show(&malformed)["status"], "sent");
    fixture.pass(10, Some(200));
    let failed = fixture.show(&malformed);
    assert_eq!((failed["status"].as_str(), failed["nonce"].as_u64()), (Some("failed"), Some(0)));
    let second = fixture.accept(BODY);
    fixture.pass(60, Some(200));
    assert_eq!(fixture.show(&second)["status"], "submitted", "the gap holds it");
    fixture.relayer.add_gap_filler(fixture.now_ms, false);
    fixture.pass(20, Some(200));
    assert_eq!(fixture.show(&second)["status"], "confirmed");
    assert_eq!(fixture.show(&valid)["status"], "confirmed");
}

#[test]
fn final_records_are_404_after_their_retention_of_four_hours() {
    let mut fixture = Fixture::new();
    let id = fixture.accept(BODY);
    fixture.pass(4 * 3600, Some(200));
    assert_eq!(fixture.show(&id)["status"], "confirmed");
    fixture.pass(60, Some(200));
    assert_eq!(fixture.get(&format!("/relayer-a/transactions/{id}")).status, 404);
    let list = json(&fixture.get("/relayer-a/transactions"));
    assert_eq!(list["pagination"]["total_items"], 0);
}

#[test]
fn in_memory_storage_loses_every_record_and_redis_none() {
    for (memory, status) in
        [(Memory::Keep, 200), (Memory::Forget, 404), (Memory::ForgetLast(Duration::from_secs(1)), 404)]
    {
        let mut fixture = Fixture::new();
        let id = fixture.accept(BODY);
        fixture.relayer.crash(fixture.now_ms + 1);
        fixture.now_ms += 5_000;
        fixture.relayer.restart(fixture.now_ms, memory);
        fixture.pass(30, Some(200));
        assert_eq!(fixture.get(&format!("/relayer-a/transactions/{id}")).status, status, "{memory:?}");
        let (audit, kept) = (&fixture.relayer.audit()[0], status == 200);
        assert_eq!((audit.broadcasts, fixture.relayer.may_take_effect(audit)), (u32::from(kept), kept), "{memory:?}");
        assert_eq!(fixture.relayer.forgotten().len(), usize::from(!kept));
    }
}

#[test]
fn older_records_survive_a_storage_that_forgets_the_last_seconds() {
    let mut fixture = Fixture::new();
    let old = fixture.accept(BODY);
    fixture.pass(20, Some(200));
    let young = fixture.accept(BODY);
    fixture.relayer.restart(fixture.now_ms, Memory::ForgetLast(Duration::from_secs(5)));
    assert_eq!(fixture.show(&old)["status"], "confirmed");
    assert_eq!(fixture.get(&format!("/relayer-a/transactions/{young}")).status, 404);
    let next = fixture.accept(BODY);
    fixture.pass(20, Some(200));
    assert_eq!(fixture.relayer.record(fixture.now_ms, &next).unwrap().status, Status::Confirmed);
}

#[test]
fn records_keep_the_times_that_held_when_they_were_stored() {
    let mut fixture = Fixture::new();
    let slow = fixture.accept(BODY);
    fixture.relayer.set_timing(Timing::default());
    let quick = fixture.accept(BODY);
    fixture.pass(2, Some(200));
    let (slow, quick) = (fixture.show(&slow), fixture.show(&quick));
    assert_eq!((slow["status"].as_str(), quick["status"].as_str()), (Some("submitted"), Some("confirmed")));
}
