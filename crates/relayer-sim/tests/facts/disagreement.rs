//! Where the relayer's report and the chain disagree, or the relayer stops moving (facts 1 and 11).

use std::time::Duration;

use relayer_sim::{ListFault, Memory, Outcome, Status};

use super::*;

fn ended(outcome: Outcome) -> (Fixture, Value) {
    let mut fixture = Fixture::new();
    fixture.set_faults(Faults::with_outcome(outcome));
    let id = fixture.accept(BODY);
    fixture.pass(600, Some(200));
    let record = fixture.show(&id);
    (fixture, record)
}

#[test]
fn confirmed_may_mean_that_a_no_op_ran() {
    let (_, record) = ended(Outcome::NoOp);
    assert_eq!((record["status"].as_str(), record["is_canceled"].as_bool()), (Some("confirmed"), Some(false)));
    assert_eq!(record["to"], record["from"]);
    assert_eq!(
        (record["value"].as_str(), record["data"].as_str(), record["gas_limit"].as_u64()),
        (Some("0x0"), Some("0x"), Some(21_000))
    );
}

#[test]
fn a_failed_call_may_have_been_executed() {
    let (fixture, record) = ended(Outcome::FailedButExecuted);
    assert_eq!(record["status"], "failed");
    let reason = record["status_reason"].as_str().unwrap();
    assert!(
        reason.starts_with("Nonce 0 consumed externally")
            && reason.ends_with("No matching transaction hash found on-chain")
    );
    assert!(record["sent_at"].is_null() && record["nonce"].is_u64(), "sent_at does not prove that nothing was sent");
    assert_eq!(fixture.relayer.audit()[0].broadcasts, 1);
}

#[test]
fn a_slow_relayer_gives_up_with_a_nonce_and_nothing_on_the_chain() {
    let (fixture, record) = ended(Outcome::GivenUp);
    assert_eq!(record["status_reason"], "Transaction in Pending state for over 2 minutes. Replacing with NOOP.");
    assert!(record["nonce"].is_u64());
    assert_eq!(fixture.relayer.audit()[0].broadcasts, 0);
}

#[test]
fn a_mined_call_may_stay_submitted() {
    let (mut fixture, record) = ended(Outcome::Stuck);
    assert_eq!(record["status"], "submitted");
    assert_eq!(fixture.relayer.audit()[0].broadcasts, 1);
    fixture.pass(480, Some(200));
    assert_eq!(fixture.relayer.records().next().unwrap().status, Status::Submitted);
}

#[test]
fn a_reverted_call_has_no_confirmation_time() {
    let (_, record) = ended(Outcome::Reverted);
    assert_eq!(record["status_reason"], "Transaction reverted on-chain (receipt status: failed)");
    assert!(record["confirmed_at"].is_null() && record["hash"].is_string());
}

#[test]
fn a_call_without_balance_fails_unsigned() {
    let mut fixture = Fixture::new();
    fixture.set_faults(Faults { out_of_funds: true, ..Faults::default() });
    let id = fixture.accept(BODY);
    fixture.pass(5, Some(200));
    let record = fixture.show(&id);
    assert!(record["status_reason"].as_str().unwrap().starts_with("Insufficient balance: Relayer balance "));
    assert!(record["nonce"].is_null() && record["hash"].is_null());
    assert!(!fixture.relayer.may_take_effect(&fixture.relayer.audit()[0]));
    assert_eq!(json(&fixture.get("/relayer-a/status"))["data"]["balance"], "0");
}

#[test]
fn gap_fillers_lose_their_name() {
    let mut fixture = Fixture::new();
    let id = fixture.relayer.add_gap_filler(fixture.now_ms, true);
    let webhook = fixture.pass(1, Some(200)).remove(0).1;
    assert_eq!((payload(&webhook)["id"].as_str(), status_of(&webhook).as_str()), (Some(id.as_str()), "submitted"));
    assert_eq!(payload(&webhook)["status_reason"], "Gap-filling NOOP for nonce 0");
    assert_eq!(fixture.show(&id)["status_reason"], "Gap-filling NOOP for nonce 0");
    fixture.pass(20, Some(200));
    let record = fixture.show(&id);
    assert!(record["status_reason"].as_str().unwrap().starts_with("Nonce 0 consumed externally"));
    assert_eq!((&record["to"], record["value"].as_str()), (&record["from"], Some("0x0")), "what is left to know it by");
    assert!(fixture.relayer.audit().is_empty(), "no client asked for it");
}

#[test]
fn a_record_without_a_job_is_listed_as_pending_and_never_moves() {
    let mut fixture = Fixture::new();
    let old = fixture.accept(BODY);
    fixture.pass(3, Some(200));
    let young = fixture.accept(BODY);
    fixture.relayer.restart(fixture.now_ms, Memory::LoseJobs(Duration::from_secs(1)));
    fixture.pass(3600, Some(200));
    let list = json(&fixture.get("/relayer-a/transactions?status=pending"));
    assert_eq!(list["data"][0]["id"], young);
    assert!(list["data"][0]["nonce"].is_null());
    assert_eq!(fixture.show(&old)["status"], "confirmed");
    let (_, record) = ended(Outcome::WithoutJob);
    assert_eq!(record["status"], "pending");
}

#[test]
fn lists_can_lag_omit_and_be_in_the_wrong_order() {
    let mut fixture = Fixture::new();
    let first = fixture.accept(BODY);
    fixture.pass(10, Some(200));
    let second = fixture.accept(BODY);
    let mut listed = |listing: ListFault| {
        fixture.set_faults(Faults { listing, ..Faults::default() });
        let list = json(&fixture.get("/relayer-a/transactions"));
        list["data"]
            .as_array()
            .unwrap()
            .iter()
            .map(|record| record["id"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        listed(ListFault { late_by: Duration::from_secs(5), ..Default::default() }),
        std::slice::from_ref(&first)
    );
    assert_eq!(listed(ListFault { omitted: vec![first.clone()], ..Default::default() }), std::slice::from_ref(&second));
    assert_eq!(listed(ListFault { oldest_first: true, ..Default::default() }), [first.clone(), second.clone()]);
    assert_eq!(listed(ListFault::default()), [second, first]);
}

#[test]
fn a_wrong_clock_shows_in_the_date_header_and_in_every_time() {
    let mut fixture = Fixture::new();
    assert_eq!(fixture.get("").header("date"), Some("Sun, 15 Nov 2026 18:30:57 GMT"));
    fixture.set_faults(Faults { clock_offset_ms: -120_000, ..Faults::default() });
    assert_eq!(fixture.get("").header("date"), Some("Sun, 15 Nov 2026 18:28:57 GMT"));
    let id = fixture.accept(BODY);
    assert_eq!(fixture.show(&id)["created_at"], "2026-11-15T18:28:57.458000000+00:00");
    let mut undated = Fixture::with(|options| options.date_header = false);
    assert_eq!(undated.get("").header("date"), None);
}

#[test]
fn records_stay_in_place_behind_a_frozen_chain() {
    let mut fixture = Fixture::new();
    fixture.set_faults(Faults { jammed: true, ..Faults::default() });
    fixture.accept(BODY);
    assert_eq!(fixture.statuses(600), ["sent", "submitted"]);
    fixture.set_faults(Faults::default());
    assert_eq!(fixture.statuses(600), ["confirmed"]);
}

#[test]
fn a_clone_runs_on_by_itself_and_equal_seeds_give_equal_relayers() {
    let mut fixture = Fixture::new();
    fixture.accept(BODY);
    let mut copy = Fixture { relayer: fixture.relayer.clone(), now_ms: fixture.now_ms };
    assert_eq!(fixture.pass(60, Some(200)), copy.pass(60, Some(200)));
    let mut other = Fixture::new();
    assert_eq!(other.accept(BODY), fixture.relayer.records().next().unwrap().id);
}
