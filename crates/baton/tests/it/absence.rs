//! Lists and answers of relayers that mislead, without a chain: what they do not prove is not sent again.

use std::time::{Duration, Instant};

use harness::relayer::{DateHeader, Faults, Memory, PostFault, SecondMemory};
use harness::wait::eventually_ok;
use serde_json::Value;

use crate::relay_fixture::{LATER, RelayFixture, RelaySetup, SOON, WARM_UP, serial_data};

/// The first look at an unknown outcome comes this late, so that a test can change the relayer before.
const LOOK_AFTER_MS: &str = "6000";

fn next_posts<const N: usize>(faults: [PostFault; N]) -> Faults {
    Faults { next_posts: faults.into_iter().map(Some).collect(), ..Faults::default() }
}

async fn until_unknown(relay: &RelayFixture, id: &str) {
    eventually_ok(SOON, format!("the outcome of {id} to be unknown"), || async {
        let status = relay.status(id).await;
        if status["outcomeUnknown"] == true { Ok(()) } else { Err(status.to_string()) }
    })
    .await;
}

async fn timeline(relay: &RelayFixture, id: &str) -> Value {
    relay.get(&format!("/api/v1/relay/transactions/{id}/timeline")).await.1
}

/// Waits until the relayer's list was looked at; then the transaction must be of unknown outcome, sent `times` times.
async fn assert_not_sent_again(relay: &RelayFixture, id: &str, serial: usize, times: usize) {
    eventually_ok(SOON, "a look at the relayer's list", || async {
        let unproven = relay.metric("baton_reconciler_total", "absence-unproven").await;
        let status = relay.status(id).await;
        let looked = unproven >= 1.0 || status["outcomeUnknown"] != true;
        if looked { Ok(()) } else { Err(status.to_string()) }
    })
    .await;
    let status = relay.status(id).await;
    assert_eq!(status["outcomeUnknown"], true, "{status}");
    let accepted = relay.relayers[0].accepted();
    let sent = accepted.iter().filter(|record| record.field("data") == serial_data(serial)).count();
    assert_eq!(sent, times, "{}", timeline(relay, id).await);
}

/// A storage that fails over loses what it stored last. Baton knows one of these records.
#[tokio::test]
async fn a_list_that_lost_its_last_seconds_proves_no_absence() {
    let relay = RelaySetup::relayers(1).env("RECONCILE_UNKNOWN_MS", LOOK_AFTER_MS).start().await;
    relay.warm_up().await;
    let began = Instant::now();
    relay.relayers[0].set_faults(next_posts([PostFault::ErrorAfterStoring]));
    let lost = relay.send_serial(1).await;
    until_unknown(&relay, &lost).await;
    let bound_since = relay.send_serial(2).await;
    relay.until_status(&bound_since, "confirmed").await;
    relay.relayers[0].restart(Memory::ForgetLast(began.elapsed() + Duration::from_millis(50))).await;
    assert_not_sent_again(&relay, &lost, 1, 1).await;
}

#[tokio::test]
async fn a_list_without_the_record_bound_last_before_the_claim_proves_no_absence() {
    let relay = RelaySetup::relayers(1).env("RECONCILE_UNKNOWN_MS", LOOK_AFTER_MS).start().await;
    relay.warm_up().await;
    let before = relay.relayers[0].records()[0].id.clone();
    relay.relayers[0].set_faults(next_posts([PostFault::ErrorBeforeStoring]));
    let lost = relay.send_serial(1).await;
    until_unknown(&relay, &lost).await;
    // More than are compared of those bound since.
    for (id, _) in relay.send_many(1000..1210).await {
        relay.until_status(&id, "confirmed").await;
    }
    relay.relayers[0].change_faults(|faults| faults.listing.omitted = vec![before]);
    assert_not_sent_again(&relay, &lost, 1, 0).await;
}

/// The answer to another submission named a record that is another call, which Baton notices after the claim.
#[tokio::test]
async fn a_relayer_that_has_forgotten_a_transaction_since_the_claim_proves_no_absence() {
    let relay = RelaySetup::relayers(1)
        .env("RECONCILE_UNKNOWN_MS", LOOK_AFTER_MS)
        .env("RECONCILE_SUBMITTED_MS", "200")
        .start()
        .await;
    relay.warm_up().await;
    relay.post_at_relayer(0, "0xbeef").await;
    relay.relayers[0].set_faults(next_posts([PostFault::ErrorBeforeStoring, PostFault::IdOfAnother]));
    let lost = relay.send_serial(1).await;
    until_unknown(&relay, &lost).await;
    let forgotten = relay.send_serial(2).await;
    until_unknown(&relay, &forgotten).await;
    assert_not_sent_again(&relay, &lost, 1, 0).await;
}

#[tokio::test]
async fn a_submission_whose_record_another_row_was_answered_with_is_not_sent_again() {
    let relay = RelaySetup::relayers(1).env("RECONCILE_UNKNOWN_MS", LOOK_AFTER_MS).start().await;
    relay.warm_up().await;
    relay.relayers[0].set_faults(next_posts([PostFault::ErrorAfterStoring, PostFault::IdOfAnother]));
    let lost = relay.send_serial(1).await;
    until_unknown(&relay, &lost).await;
    let other = relay.send_serial(2).await;
    relay.until_status(&other, "submitted").await;
    assert_not_sent_again(&relay, &lost, 1, 1).await;
}

#[tokio::test]
async fn an_answer_with_the_id_of_another_rows_record_is_an_unknown_outcome() {
    let relay = RelaySetup::relayers(1).start().await;
    relay.warm_up().await;
    relay.relayers[0].set_faults(next_posts([PostFault::IdOfAnother]));
    let id = relay.send_serial(1).await;
    relay.until_status(&id, "confirmed").await;
    let steps = timeline(&relay, &id).await.to_string();
    assert!(steps.contains("outcome-unknown") && steps.contains("its record was bound"), "{steps}");
    assert!(steps.contains("found in its list"), "{steps}");
    assert_eq!(relay.relayers[0].accepted().len(), 2, "the warm-up and this one, each once");
}

#[tokio::test]
async fn a_record_that_became_another_call_is_named_and_settles_nothing() {
    let relay = RelaySetup::relayers(1).env("RECONCILE_SUBMITTED_MS", "200").start().await;
    let another = relay.post_at_relayer(0, "0xbeef").await;
    relay.relayers[0].set_faults(next_posts([PostFault::IdOfAnother]));
    let id = relay.send_serial(1).await;
    until_unknown(&relay, &id).await;
    let steps = timeline(&relay, &id).await.to_string();
    assert!(steps.contains(&format!("has another call under the id {another}")), "{steps}");
    eventually_ok(LATER, "the other call to be confirmed at the relayer", || async {
        let record = relay.relayers[0].record(&another).unwrap();
        if record.status == harness::relayer::Status::Confirmed { Ok(()) } else { Err(format!("{record:?}")) }
    })
    .await;
    assert_eq!(relay.status(&id).await["status"], "submitted");
}

/// Every other record is in one memory, and the rest in the other. Baton knows records in both.
#[tokio::test]
async fn a_relayer_id_that_two_memories_serve_proves_no_absence() {
    let relay = RelaySetup::relayers(1).env("RECONCILE_UNKNOWN_MS", LOOK_AFTER_MS).start().await;
    for serial in WARM_UP..WARM_UP + 6 {
        let id = relay.send_serial(serial).await;
        relay.until_status(&id, "confirmed").await;
    }
    let lost = next_posts(std::array::from_fn::<_, 4, _>(|_| PostFault::ErrorAfterStoring));
    relay.relayers[0].set_faults(Faults { second_memory: Some(SecondMemory::Split), ..lost });
    let sent = relay.send_many(0..4).await;
    for (id, _) in &sent {
        until_unknown(&relay, id).await;
    }
    // A look shows two of the four, and not the other two.
    eventually_ok(LATER, "two looks at the list", || async {
        let unproven = relay.metric("baton_reconciler_total", "absence-unproven").await;
        let taken = relay.relayers[0].accepted().len();
        if unproven >= 4.0 || taken > 10 { Ok(()) } else { Err(format!("{unproven}, {taken}")) }
    })
    .await;
    assert_eq!(relay.count("failed").await, 0);
    relay.books(sent.clone()).assert_exactly_once();
    relay.relayers[0].set_faults(Faults::default());
    for (id, _) in &sent {
        relay.until_status(id, "confirmed").await;
    }
    relay.books(sent).assert_exactly_once();
}

/// The memory that answers every other question has nothing of the last hour.
#[tokio::test]
async fn a_record_that_only_one_of_two_memories_knows_is_neither_sent_again_nor_failed() {
    let relay = RelaySetup::relayers(2).env("RECONCILE_SUBMITTED_MS", "200").no_webhooks().start().await;
    for relayer in &relay.relayers {
        let second_memory = Some(SecondMemory::Behind(Duration::from_secs(3600)));
        relayer.set_faults(Faults { second_memory, jammed: true, ..Faults::default() });
    }
    let sent = relay.send_many(1..2).await;
    assert_forgotten_stays_open(&relay, &sent[0].0).await;
    relay.books(sent.clone()).assert_exactly_once();
    for relayer in &relay.relayers {
        relayer.set_faults(Faults::default());
    }
    relay.until_status(&sent[0].0, "confirmed").await;
    relay.books(sent).assert_exactly_once();
}

/// The relayer has the record under another id than it answered, and executes it.
#[tokio::test]
async fn an_answer_with_an_id_that_no_record_has_is_neither_sent_again_nor_failed() {
    let relay = RelaySetup::relayers(2).env("RECONCILE_SUBMITTED_MS", "200").start().await;
    relay.warm_up().await;
    for relayer in &relay.relayers {
        relayer.set_faults(Faults::every(PostFault::WrongId));
    }
    let sent = relay.send_many(1..2).await;
    assert_forgotten_stays_open(&relay, &sent[0].0).await;
    relay.books(sent).assert_exactly_once();
}

/// Waits until the relayer has answered several times that it does not know the record.
async fn assert_forgotten_stays_open(relay: &RelayFixture, id: &str) {
    eventually_ok(SOON, "looks at a record that the relayer does not know", || async {
        let forgotten = relay.metric("baton_reconciler_total", "\"forgotten\"").await;
        let status = relay.status(id).await;
        if forgotten >= 3.0 || status["status"] == "failed" { Ok(()) } else { Err(status.to_string()) }
    })
    .await;
    assert_eq!(relay.status(id).await["status"], "submitted", "{}", timeline(relay, id).await);
}

/// No record of ours shows the relayer's clock yet, and the `Date` that a proxy writes does not.
#[tokio::test]
async fn the_first_submission_to_a_relayer_whose_clock_is_behind_is_found() {
    let relay = RelaySetup::relayers(1).start().await;
    let faults = next_posts([PostFault::ErrorAfterStoring]);
    relay.relayers[0].set_faults(Faults { clock_offset_ms: -90_000, date: DateHeader::Proxy, ..faults });
    let id = relay.send_serial(1).await;
    relay.until_status(&id, "confirmed").await;
    assert_eq!(relay.relayers[0].accepted().len(), 1, "{}", timeline(&relay, &id).await);
}
