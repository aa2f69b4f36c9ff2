//! A relayer that signs for a chain: what it sends, and what it reports, follow the chain or deliberately differ from it
//! (facts 1, 4 and 11). The chain here is a list of what was sent; the run on a real one is the product's target `misled`.

use std::{sync::Arc, time::Duration};

use relayer_sim::{Memory, Outcome, SignatureParts, SignedCall, UnsignedCall, Wallet};

use super::*;

/// Signs by writing down what it signs.
struct Scribe;

impl Wallet for Scribe {
    fn sign(&self, call: &UnsignedCall) -> Option<SignedCall> {
        let data = call.data.clone().unwrap_or_default();
        let hash = format!("{} {} {data} for {}", call.nonce, call.to.clone().unwrap_or_default(), call.max_fee);
        let signature = SignatureParts { r: "1".to_owned(), s: "2".to_owned(), v: 0 };
        Some(SignedCall { nonce: call.nonce, raw: data.into_bytes(), hash, signature })
    }
}

fn on_chain(faults: Faults) -> Fixture {
    let mut fixture = Fixture::new();
    fixture.relayer.join_chain(Arc::new(Scribe), 7);
    fixture.set_faults(faults);
    fixture
}

fn sent(fixture: &mut Fixture) -> Vec<(u64, String)> {
    fixture.relayer.take_broadcasts().into_iter().map(|signed| (signed.nonce, signed.hash)).collect()
}

/// Sends one with this outcome; returns what went to the node within a minute.
fn send(outcome: Outcome) -> (Fixture, String, Vec<(u64, String)>) {
    let mut fixture = on_chain(Faults::with_outcome(outcome));
    let id = fixture.accept(BODY);
    fixture.pass(60, Some(200));
    let sent = sent(&mut fixture);
    (fixture, id, sent)
}

const CALL: &str = "7 0x90F79bf6EB2c4f870365E785982E1f101E93b906 0x for 20000000000";
const NO_OP: &str = "7 0xf39fd6e51aad88f6f4ce6ab8827279cfffb92266  for 40000000000";

#[test]
fn a_record_is_confirmed_when_the_chain_has_it_and_not_before() {
    let (mut fixture, id, sent) = send(Outcome::Confirmed);
    assert_eq!(sent, [(7, CALL.to_owned())]);
    assert_eq!((&fixture.show(&id)["status"], &fixture.show(&id)["hash"]), (&"submitted".into(), &CALL.into()));
    assert_eq!(fixture.relayer.unmined(), [(7, vec![CALL.to_owned()])]);
    fixture.relayer.report_mined(fixture.now_ms, 7, CALL, true);
    assert_eq!(fixture.statuses(1), ["confirmed"]);
    assert!(fixture.relayer.unmined().is_empty());
}

#[test]
fn a_reverted_transaction_is_failed_by_its_receipt() {
    let (mut fixture, id, _) = send(Outcome::Confirmed);
    fixture.relayer.report_mined(fixture.now_ms, 7, CALL, false);
    fixture.pass(1, Some(200));
    assert_eq!(fixture.show(&id)["status_reason"], "Transaction reverted on-chain (receipt status: failed)");
}

#[test]
fn a_call_that_is_reported_as_failed_was_sent_under_a_hash_that_no_record_shows() {
    let (mut fixture, id, sent) = send(Outcome::FailedButExecuted);
    let [(7, hash)] = &sent[..] else { panic!("{sent:?}") };
    assert!(hash.starts_with("7 0x90F79bf6") && hash != CALL, "the call, for another price: {hash}");
    assert_eq!(fixture.show(&id)["hash"], CALL);
    fixture.relayer.report_mined(fixture.now_ms, 7, hash, true);
    fixture.pass(1, Some(200));
    let record = fixture.show(&id);
    assert_eq!(
        (&record["status"], &record["hash"], record["sent_at"].is_null()),
        (&"failed".into(), &CALL.into(), true)
    );
}

#[test]
fn a_no_op_is_sent_in_place_of_a_call_that_it_replaces() {
    for (outcome, status) in [(Outcome::NoOp, "confirmed"), (Outcome::Canceled, "canceled")] {
        let (mut fixture, id, sent) = send(outcome);
        assert_eq!(sent, [(7, NO_OP.to_owned())]);
        fixture.relayer.report_mined(fixture.now_ms, 7, NO_OP, true);
        fixture.pass(1, Some(200));
        let record = fixture.show(&id);
        assert_eq!((&record["status"], &record["to"]), (&status.into(), &record["from"]));
        assert_eq!(fixture.relayer.audit()[0].broadcasts, 0, "the call itself was never sent");
    }
}

#[test]
fn a_raised_price_sends_the_call_again_with_the_same_nonce_whether_or_not_the_node_lost_the_first() {
    let mut fixture = on_chain(Faults::with_outcome(Outcome::GasBumped));
    (0..20).for_each(|_| drop(fixture.accept(BODY)));
    fixture.pass(60, Some(200));
    let sent = sent(&mut fixture);
    let prices = |wanted: u64| -> Vec<&str> {
        let of_nonce = sent.iter().filter(|(nonce, _)| *nonce == wanted);
        of_nonce.map(|(_, hash)| hash.rsplit(' ').next().unwrap()).collect()
    };
    let lost = (7..27).filter(|nonce| prices(*nonce) == ["40000000000"]).count();
    let kept = (7..27).filter(|nonce| prices(*nonce) == ["20000000000", "40000000000"]).count();
    assert_eq!(lost + kept, 20, "{sent:?}");
    assert!(lost > 0 && kept > 0, "both happen: {lost} and {kept}");
}

#[test]
fn a_nonce_that_is_given_up_jams_the_next_one_until_a_no_op_fills_the_gap() {
    let mut fixture = on_chain(Faults::default());
    fixture
        .relayer
        .set_faults(fixture.now_ms, Faults { next_outcomes: [Outcome::GivenUp].into(), ..Faults::default() });
    let first = fixture.accept(BODY);
    fixture.pass(200, Some(200));
    assert_eq!(fixture.show(&first)["nonce"], 7);
    let second = fixture.accept(BODY);
    fixture.pass(600, Some(200));
    assert_eq!(sent(&mut fixture).iter().map(|(nonce, _)| *nonce).collect::<Vec<_>>(), [8], "7 was never sent");
    assert_eq!(fixture.show(&second)["status"], "submitted");
    fixture.relayer.fill_gaps(fixture.now_ms);
    let [(7, filler)] = &sent(&mut fixture)[..] else { panic!("one filler") };
    assert!(filler.starts_with("7 0xf39fd6e51aad88f6f4ce6ab8827279cfffb92266"));
    let (_, hashes) = fixture.relayer.unmined().into_iter().find(|(nonce, _)| *nonce == 8).unwrap();
    fixture.relayer.report_mined(fixture.now_ms, 8, &hashes[0], true);
    fixture.pass(1, Some(200));
    assert_eq!(fixture.show(&second)["status"], "confirmed");
}

#[test]
fn what_was_sent_before_a_crash_stays_sent_and_what_was_only_signed_leaves_a_gap() {
    let mut fixture = on_chain(Faults::default());
    fixture.accept(BODY);
    fixture.pass(2, Some(200));
    // Signed after 600 ms, sent after 800: this one is between the two.
    let between = fixture.relayer.records().count();
    fixture.accept(BODY);
    while fixture.relayer.records().nth(between).is_some_and(|record| record.nonce.is_none()) {
        let due = fixture.relayer.next_due_ms().unwrap();
        fixture.relayer.advance(due);
        fixture.now_ms = due;
    }
    fixture.relayer.restart(fixture.now_ms, Memory::ForgetLast(Duration::from_secs(3)));
    fixture.pass(60, Some(200));
    assert_eq!(fixture.relayer.records().count(), 0, "both are forgotten");
    assert_eq!(sent(&mut fixture), [(7, CALL.to_owned())]);
    assert_eq!(fixture.relayer.nonce_gaps().collect::<Vec<_>>(), [8]);
}

#[test]
fn a_cancellation_that_comes_too_late_ends_confirmed() {
    let (mut fixture, id, _) = send(Outcome::Confirmed);
    let path = format!("/api/v1/relayers/relayer-a/transactions/{id}");
    assert_eq!(json(&answer(fixture.authorized("DELETE", &path, "")))["data"]["is_canceled"], true);
    assert_eq!(sent(&mut fixture), [(7, NO_OP.to_owned())]);
    let mut canceled = Fixture { relayer: fixture.relayer.clone(), now_ms: fixture.now_ms };
    canceled.relayer.report_mined(canceled.now_ms, 7, NO_OP, true);
    canceled.pass(60, Some(200));
    assert_eq!(canceled.show(&id)["status"], "canceled");
    fixture.relayer.report_mined(fixture.now_ms, 7, CALL, true);
    fixture.pass(60, Some(200));
    assert_eq!(fixture.show(&id)["status"], "confirmed");
}
