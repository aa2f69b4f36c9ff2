//! The contract of a transaction store, on every database. A database adds a constructor in `store/fixture.rs`, not tests.
//! Tests of MySQL alone are in `store/mysql.rs` and `store/mysql_connection.rs`.

macro_rules! on_every_database {
    ($($test:ident)+) => {
        mod on_sqlite {
            $(#[tokio::test] async fn $test() { super::$test(&super::StoreFixture::sqlite().await).await; })+
        }
        mod on_mysql {
            $(#[tokio::test] async fn $test() { super::$test(&super::StoreFixture::mysql().await).await; })+
        }
    };
}

mod early_webhooks;
pub mod fixture;
mod gasless;
mod lossy_link;
mod mysql;
mod mysql_connection;
mod notifications;
mod relayer_rows;
mod sweeps_and_lists;

use std::time::Duration;

use baton::config::RelayMode;
use baton::relay::state::apply_report::{Report, ReportedStatus, Source, Verdict};
use baton::relay::state::false_failure::{Included, Proof};
use baton::relay::state::transaction::{
    ConsumerId, Kind, Progress, RecordLost, RelayerTxId, RelayerUrl, Status, Step, Transaction, TransactionId,
    UnknownCause,
};
use baton::relay::store::{Due, Filter, Saved, StoreError};
use baton::timestamp::Timestamp;
use serde_json::json;
use uuid::Uuid;

use fixture::{StoreFixture, bind, claim, now, row};

const HOUR: Duration = Duration::from_secs(3600);

on_every_database! {
    a_row_is_read_back_unchanged_in_every_state
    a_row_from_a_schema_without_block_numbers_is_read_and_can_get_one
    the_account_of_an_earlier_claim_is_not_taken_for_that_of_a_claim
    only_one_of_several_moves_from_one_version_is_saved
    concurrent_moves_each_get_their_own_answer
    a_relayer_transaction_belongs_to_one_row
    only_one_of_several_concurrent_rows_binds_a_record
    relayer_ids_differ_by_case_accent_and_trailing_space
    a_batch_with_a_duplicate_row_inserts_nothing
    due_rows_are_oldest_first_and_never_final
    lists_are_filtered_and_paged_newest_first
    the_records_bound_last_to_a_relayer_are_known
    nonces_of_a_relayer_lead_to_their_rows
    concurrent_timeline_steps_get_distinct_numbers
    a_timeline_is_limited_and_keeps_room_for_alarms
    open_rows_claims_and_unknown_outcomes_are_counted
    an_unreadable_row_is_an_error_that_names_its_column
}

async fn a_row_is_read_back_unchanged_in_every_state(fixture: &StoreFixture) {
    let row = fixture.inserted().await;
    assert_eq!(fixture.store.get(row.id).await.unwrap(), Some(row.clone()));
    let (me, token, now) = (ConsumerId::generate(), Uuid::new_v4(), now());
    let relayer = RelayerUrl("http://r1".into());
    let mut moves = vec![row.claim(&me, token, &relayer, "test", now, &fixture.timings).unwrap()];
    if let Some(claim) = &mut moves[0].transaction.claim {
        claim.account = Some(alloy_primitives::Address::repeat_byte(0xab));
    }
    moves.push(
        moves[0].transaction.mark_unknown(token, "500 ✗", UnknownCause::Answered, now, &fixture.timings).unwrap(),
    );
    moves.push(moves[1].transaction.absent(token, now, now, &fixture.timings).unwrap());
    moves.push(
        moves[2].transaction.bind(token, &RelayerTxId("oz".into()), Some("0xf"), "t", now, &fixture.timings).unwrap(),
    );
    moves.push(moves[3].transaction.forgotten(RecordLost::NotKnown, now, now).unwrap());
    moves.push(moves[4].transaction.resolve_fail(now).unwrap());
    for moved in moves {
        assert_eq!(fixture.store.save(&moved).await.unwrap(), Saved::Yes { early: false });
        assert_eq!(fixture.store.get(row.id).await.unwrap(), Some(moved.transaction));
    }
    // Fields that none of the moves above sets.
    let mut last = fixture.store.get(row.id).await.unwrap().unwrap();
    last.version += 1;
    last.confirmed_at = Some(Timestamp(1_700_000_000_123));
    last.hash = Some(format!("0x{}", "ab".repeat(32)));
    last.block_number = Some(u64::from(u32::MAX) + 7);
    last.result = Some(json!({ "hash": "0x1", "nested": [1, u64::MAX, "é", null] }));
    last.avoid = Some(RelayerUrl("http://r2".into()));
    (last.attempts, last.reroutes, last.replays, last.auto_replayed) = (1, 2, 3, true);
    last.error_message = Some("x".repeat(100_000));
    last.relayer_says = Some(json!({ "status": "confirmed", "nonce": 7, "name": "é" }));
    last.cancel_requested_at = Some(Timestamp(1_700_000_000_456));
    if let Some(binding) = &mut last.binding {
        binding.nonce = Some(u64::from(u32::MAX) + 1);
    }
    let moved = baton::relay::state::transaction::Moved::new(last, Vec::new());
    assert_eq!(fixture.store.save(&moved).await.unwrap(), Saved::Yes { early: false });
    assert_eq!(fixture.store.get(row.id).await.unwrap(), Some(moved.transaction));
    assert_eq!(fixture.store.get(TransactionId::generate()).await.unwrap(), None);
}

async fn a_row_from_a_schema_without_block_numbers_is_read_and_can_get_one(fixture: &StoreFixture) {
    let bound = fixture.bound("oz-1").await.unwrap();
    fixture.execute("ALTER TABLE transactions DROP COLUMN block_number").await;
    fixture.execute("DELETE FROM schema_version WHERE version >= 3").await;
    fixture.execute("ALTER TABLE transactions DROP COLUMN relayer_says").await;
    fixture.execute("ALTER TABLE transactions DROP COLUMN cancel_requested_at").await;
    fixture.execute("ALTER TABLE transactions DROP COLUMN claim_unsent").await;
    fixture.execute("ALTER TABLE transactions DROP COLUMN claim_account").await;
    assert!(fixture.migrate().await >= 3, "each later step again");
    assert_eq!(fixture.migrate().await, 0);
    assert_eq!(fixture.store.get(bound.id).await.unwrap(), Some(bound.clone()));
    let report = Report { hash: Some("0x1".into()), ..report("oz-1", ReportedStatus::Confirmed) };
    let now = now();
    let verdict = bound.report(&report, Source::Webhook, RelayMode::FireAndForget, now, &fixture.timings);
    let Verdict::Move(moved) = verdict else { panic!("{verdict:?}") };
    fixture.store.save(&moved).await.unwrap();
    let included = Included { block: 12, proof: Proof::None };
    let moved = moved.transaction.in_block("0x1", included, now).unwrap();
    fixture.store.save(&moved).await.unwrap();
    assert_eq!(fixture.store.get(bound.id).await.unwrap(), Some(moved.transaction));
}

async fn nonces_of_a_relayer_lead_to_their_rows(fixture: &StoreFixture) {
    let bound = fixture.bound("oz-1").await.unwrap();
    let relayer = bound.binding.clone().unwrap().relayer;
    assert_eq!(fixture.store.nonce_owners(&relayer, &[7]).await.unwrap(), []);
    let signed = Report { nonce: Some(7), ..report("oz-1", ReportedStatus::Open(Progress::Sent)) };
    let now = now();
    let verdict = bound.report(&signed, Source::Webhook, RelayMode::FireAndForget, now, &fixture.timings);
    let Verdict::Move(moved) = verdict else { panic!("{verdict:?}") };
    fixture.store.save(&moved).await.unwrap();
    assert_eq!(fixture.store.nonce_owners(&relayer, &[6, 7, 8]).await.unwrap(), [(7, bound.id)]);
    assert_eq!(fixture.store.nonce_owners(&RelayerUrl("http://other".into()), &[7]).await.unwrap(), []);
    assert_eq!(fixture.store.nonce_owners(&relayer, &[]).await.unwrap(), []);
}

/// A relayer's report with an id and a status and no other field.
fn report(tx_id: &str, status: ReportedStatus) -> Report {
    Report {
        tx_id: RelayerTxId(tx_id.into()),
        status,
        reason: None,
        hash: None,
        nonce: None,
        from: None,
        to: None,
        value: None,
        data: None,
        gas_limit: None,
        created_at: None,
        confirmed_at: None,
        block_number: None,
        raw: json!({ "nonce": null }),
    }
}

/// A process of an earlier version leaves the column as it is.
async fn the_account_of_an_earlier_claim_is_not_taken_for_that_of_a_claim(fixture: &StoreFixture) {
    let (claimed, _) = fixture.claimed().await;
    let stored = "UPDATE transactions SET claim_account = \
         '00000000-0000-4000-8000-000000000000 0x90F79bf6EB2c4f870365E785982E1f101E93b906'";
    fixture.execute(stored).await;
    assert_eq!(fixture.store.get(claimed.id).await.unwrap().unwrap().claim.unwrap().account, None);
}

async fn only_one_of_several_moves_from_one_version_is_saved(fixture: &StoreFixture) {
    let row = fixture.inserted().await;
    let claims: Vec<_> = (0..4).map(|_| claim(&row).0).collect();
    let saves = claims.iter().map(|moved| fixture.store.save(moved));
    let saved: Vec<_> = futures::future::join_all(saves).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(saved.iter().filter(|saved| **saved == (Saved::Yes { early: false })).count(), 1, "{saved:?}");
    assert_eq!(saved.iter().filter(|saved| **saved == Saved::Stale).count(), 3, "{saved:?}");
    assert_eq!(fixture.store.timeline(row.id).await.unwrap().len(), 1, "a stale move leaves no step");
    let unknown = claim(&fixture::row(1)).0;
    assert_eq!(fixture.store.save(&unknown).await.unwrap(), Saved::Stale, "the row does not exist");
}

async fn concurrent_moves_each_get_their_own_answer(fixture: &StoreFixture) {
    fixture.bound("taken").await.unwrap();
    let now = now();
    fixture.store.keep_early_webhook(&RelayerTxId("oz-3".into()), "{}", now).await.unwrap();
    let mut moves = Vec::new();
    for number in 0..40 {
        let (row, token) = fixture.claimed().await;
        let mut moved = match number % 8 {
            5 => bind(&row, token, "taken"),
            6 => row.release(token, "relayer busy", now, &fixture.timings).unwrap(),
            _ => bind(&row, token, &format!("oz-{number}")),
        };
        if number % 8 == 7 {
            moved.transaction.version += 1;
        }
        moves.push((row, moved));
    }
    // Two rows bind the same record: one of them succeeds.
    let (rival, token) = fixture.claimed().await;
    let wanted = bind(&rival, token, "oz-0");
    moves.push((rival, wanted));
    let saves = moves.iter().map(|(_, moved)| fixture.store.save(moved));
    let answers = futures::future::join_all(saves).await;
    let mut conflicts = 0;
    for (number, ((before, moved), answer)) in moves.iter().zip(answers).enumerate() {
        let saved = match (number, number % 8, &answer) {
            (0 | 40, _, Err(StoreError::Conflict { constraint: "relayer_transactions" })) => {
                conflicts += 1;
                false
            }
            (0 | 40, _, Ok(Saved::Yes { early: false })) => true,
            (_, 5, Err(StoreError::Conflict { constraint: "relayer_transactions" })) => false,
            (_, 7, Ok(Saved::Stale)) => false,
            (3, _, Ok(Saved::Yes { early: true })) => true,
            (_, 0..=4 | 6, Ok(Saved::Yes { early: false })) if number != 3 => true,
            _ => panic!("{number}: {answer:?}"),
        };
        let now = if saved { &moved.transaction } else { before };
        assert_eq!(fixture.store.get(before.id).await.unwrap().as_ref(), Some(now), "{number}");
        let steps = 1 + if saved { moved.steps.len() } else { 0 };
        assert_eq!(fixture.store.timeline(before.id).await.unwrap().len(), steps, "{number}");
    }
    assert_eq!(conflicts, 1);
}

async fn a_relayer_transaction_belongs_to_one_row(fixture: &StoreFixture) {
    let first = fixture.bound("oz-1").await.unwrap();
    let (rival, token) = fixture.claimed().await;
    let second = fixture.store.save(&bind(&rival, token, "oz-1")).await;
    assert!(matches!(second, Err(StoreError::Conflict { constraint: "relayer_transactions" })), "{second:?}");
    assert_eq!(
        fixture.store.get(rival.id).await.unwrap(),
        Some(rival.clone()),
        "a rejected move leaves the row unchanged"
    );
    assert_eq!(fixture.store.timeline(rival.id).await.unwrap().len(), 1, "and its timeline too");
    let tx_id = RelayerTxId("oz-1".into());
    assert_eq!(fixture.store.find_bound(&tx_id).await.unwrap().unwrap().id, first.id);
    // After a reroute, the old record still belongs to this row.
    let reason = Some("Insufficient balance".into());
    let report = Report { reason, ..report("oz-1", ReportedStatus::Failed) };
    let now = now();
    let verdict = first.report(&report, Source::Asked, RelayMode::FireAndForget, now, &fixture.timings);
    let Verdict::Reroute(moved, _) = verdict else { panic!("{verdict:?}") };
    fixture.store.save(&moved).await.unwrap();
    assert_eq!(fixture.store.find_bound(&tx_id).await.unwrap().unwrap().id, first.id);
    assert!(matches!(fixture.bound("oz-1").await, Err(StoreError::Conflict { .. })));
    let among = [tx_id.clone(), RelayerTxId("oz-2".into())];
    assert_eq!(fixture.store.bound_among(&among).await.unwrap(), [tx_id]);
    assert_eq!(fixture.store.bound_among(&[]).await.unwrap(), []);
    // Taken without a bind.
    assert!(fixture.store.take_record(&among[1], rival.id).await.unwrap());
    assert!(fixture.store.take_record(&among[1], rival.id).await.unwrap(), "it has it");
    assert!(!fixture.store.take_record(&among[1], first.id).await.unwrap(), "another row has it");
    assert!(!fixture.store.take_record(&among[0], rival.id).await.unwrap(), "another row is bound to it");
    assert_eq!(fixture.store.find_bound(&among[1]).await.unwrap().unwrap().id, rival.id);
    assert_eq!(fixture.store.get(rival.id).await.unwrap(), Some(rival), "the row does not move");
}

async fn only_one_of_several_concurrent_rows_binds_a_record(fixture: &StoreFixture) {
    for round in 0..10 {
        let tx_id = format!("oz-{round}");
        let mut binds = Vec::new();
        for _ in 0..4 {
            let (claimed, token) = fixture.claimed().await;
            binds.push(bind(&claimed, token, &tx_id));
        }
        let saves = futures::future::join_all(binds.iter().map(|moved| fixture.store.save(moved))).await;
        assert_eq!(saves.iter().filter(|saved| matches!(saved, Ok(Saved::Yes { .. }))).count(), 1, "{saves:?}");
        let refused = saves
            .iter()
            .filter(|saved| matches!(saved, Err(StoreError::Conflict { constraint: "relayer_transactions" })));
        assert_eq!(refused.count(), 3, "{saves:?}");
    }
}

async fn relayer_ids_differ_by_case_accent_and_trailing_space(fixture: &StoreFixture) {
    for tx_id in ["oz-a", "oz-A", "oz-a ", "oz-á"] {
        let row = fixture.bound(tx_id).await.unwrap();
        assert_eq!(fixture.store.find_bound(&RelayerTxId(tx_id.into())).await.unwrap(), Some(row));
    }
}

async fn a_batch_with_a_duplicate_row_inserts_nothing(fixture: &StoreFixture) {
    let (old, new) = (fixture.inserted().await, row(1000));
    let again = fixture.store.insert(&[new.clone(), old]).await;
    assert!(matches!(again, Err(StoreError::Conflict { constraint: "transactions_pkey" })), "{again:?}");
    assert_eq!(fixture.store.get(new.id).await.unwrap(), None);
    let taken = fixture.bound("oz-1").await.unwrap();
    let import = Transaction { id: new.id, ..taken };
    let imported = fixture.store.insert(&[row(1), import]).await;
    assert!(matches!(imported, Err(StoreError::Conflict { constraint: "relayer_transactions" })), "{imported:?}");
    assert_eq!(fixture.store.get(new.id).await.unwrap(), None);
    fixture.store.insert(&[]).await.unwrap();
}

async fn due_rows_are_oldest_first_and_never_final(fixture: &StoreFixture) {
    let (late, early, done) = (row(2000), row(1000), row(500));
    fixture.store.insert(&[late.clone(), early.clone(), done.clone()]).await.unwrap();
    fixture.store.save(&done.resolve_fail(Timestamp(3000)).unwrap()).await.unwrap();
    let at = |row: &Transaction| row.check_at.unwrap();
    assert!(fixture.store.due(Due::Waiting, Timestamp(at(&early).0 - 1), 10).await.unwrap().is_empty());
    let due: Vec<_> =
        fixture.store.due(Due::Waiting, at(&late), 10).await.unwrap().into_iter().map(|row| row.id).collect();
    assert_eq!(due, [early.id, late.id]);
    assert_eq!(fixture.store.due(Due::Waiting, at(&late), 1).await.unwrap().len(), 1);
    let forever = Timestamp(i64::MAX);
    assert!(fixture.store.due(Due::Claimed, forever, 10).await.unwrap().is_empty());
    fixture.store.save(&claim(&early).0).await.unwrap();
    let bound = fixture.bound("oz-1").await.unwrap();
    for (kind, expected) in [(Due::Claimed, early.id), (Due::Bound, bound.id), (Due::Waiting, late.id)] {
        let due: Vec<_> = fixture.store.due(kind, forever, 10).await.unwrap().into_iter().map(|row| row.id).collect();
        assert_eq!(due, [expected], "{kind:?}");
    }
    let claimed: Vec<_> = fixture.store.claimed(10).await.unwrap().into_iter().map(|row| row.id).collect();
    assert_eq!(claimed, [early.id]);
}

async fn lists_are_filtered_and_paged_newest_first(fixture: &StoreFixture) {
    let mut ids = Vec::new();
    for _ in 0..5 {
        ids.push(fixture.inserted().await.id);
    }
    let bound = fixture.bound("oz-1").await.unwrap();
    let (claimed, _) = fixture.claimed().await;
    ids.extend([bound.id, claimed.id]);
    ids.reverse();
    let store = &fixture.store;
    let list = async |filter: Filter, before, max| {
        let rows = store.list(&filter, before, max).await.unwrap();
        rows.into_iter().map(|row| row.id).collect::<Vec<_>>()
    };
    assert_eq!(list(Filter::default(), None, 100).await, ids);
    assert_eq!(list(Filter::default(), None, 3).await, ids[..3]);
    assert_eq!(list(Filter::default(), Some(ids[2]), 3).await, ids[3..6]);
    let only = |status| Filter { status: Some(status), ..Filter::default() };
    assert_eq!(list(only(Status::Submitted), None, 10).await, [bound.id]);
    assert_eq!(list(only(Status::Pending), None, 10).await.len(), 6);
    assert_eq!(list(Filter { kind: Some(Kind::Gasless), ..Filter::default() }, None, 10).await, []);
    assert_eq!(list(Filter { kind: Some(Kind::Direct), ..Filter::default() }, None, 10).await.len(), 7);
    let relayer = Some(RelayerUrl("http://r1".into()));
    assert_eq!(list(Filter { relayer, ..Filter::default() }, None, 10).await, [claimed.id, bound.id]);
    let at = async |id| store.get(id).await.unwrap().unwrap().created_at;
    let (newest, oldest) = (at(ids[0]).await, at(ids[6]).await);
    let after = Timestamp(newest.0 + 1);
    assert_eq!(list(Filter { from: Some(oldest), until: Some(after), ..Filter::default() }, None, 10).await, ids);
    assert_eq!(list(Filter { until: Some(oldest), ..Filter::default() }, None, 10).await, []);
    assert_eq!(list(Filter { from: Some(after), ..Filter::default() }, None, 10).await, []);
}

async fn the_records_bound_last_to_a_relayer_are_known(fixture: &StoreFixture) {
    let (relayer, other) = (RelayerUrl("http://r1".into()), RelayerUrl("http://r2".into()));
    let later = Timestamp(now().0 + 60_000);
    let store = &fixture.store;
    let last = async |relayer: &RelayerUrl, before, max| {
        let records = store.last_bound(relayer, before, max).await.unwrap();
        records.into_iter().map(|record| record.tx_id.0).collect::<Vec<_>>()
    };
    assert_eq!(last(&relayer, later, 10).await, Vec::<String>::new());
    let first = fixture.bound("oz-1").await.unwrap();
    let bound_at = first.binding.as_ref().unwrap().at;
    // Bound a moment later: the order is by time, to the millisecond.
    let (claimed, token) = fixture.claimed().await;
    let second = RelayerTxId("oz-2".into());
    let moved = claimed
        .bind(token, &second, Some("0xa1"), "it answered", bound_at + Duration::from_millis(5), &fixture.timings)
        .unwrap();
    assert!(matches!(store.save(&moved).await.unwrap(), Saved::Yes { .. }));
    let (on_chain, token) = fixture.claimed().await;
    let found = RelayerTxId("chain:0x1".into());
    let found = on_chain.bind(token, &found, None, "found on the chain", later, &fixture.timings).unwrap();
    assert!(matches!(store.save(&found).await.unwrap(), Saved::Yes { .. }));
    fixture.claimed().await;
    let far = later + Duration::from_secs(60);
    assert_eq!(last(&relayer, far, 10).await, ["oz-2", "oz-1"], "not the chain's own");
    assert_eq!(last(&relayer, far, 1).await, ["oz-2"]);
    let newest = store.last_bound(&relayer, far, 1).await.unwrap();
    assert_eq!(newest[0].account.as_deref(), Some("0xa1"));
    assert_eq!(last(&relayer, bound_at + Duration::from_millis(1), 10).await, ["oz-1"]);
    assert_eq!(last(&relayer, Timestamp(1000), 10).await, Vec::<String>::new());
    assert_eq!(last(&other, far, 10).await, Vec::<String>::new());
    let mut open: Vec<_> = store.open_at(&relayer, 10).await.unwrap().into_iter().map(|row| row.id).collect();
    open.sort();
    assert_eq!(open, [first.id, claimed.id, on_chain.id]);
    assert_eq!(store.open_at(&relayer, 2).await.unwrap().len(), 2);
    assert_eq!(store.open_at(&other, 10).await.unwrap(), []);
    let forgotten_at = async |relayer: &RelayerUrl, since, kept, max| {
        let records = store.forgotten_at(relayer, since, kept, max).await.unwrap();
        let mut records: Vec<_> = records.into_iter().map(|record| (record.tx_id.0, record.only_silent)).collect();
        records.sort();
        records
    };
    assert_eq!(forgotten_at(&relayer, Timestamp(0), HOUR, 10).await, []);
    let forgotten = moved.transaction.forgotten(RecordLost::NotKnown, later, later).unwrap();
    assert!(matches!(store.save(&forgotten).await.unwrap(), Saved::Yes { .. }));
    let oz_2 = ("oz-2".to_owned(), false);
    assert_eq!(forgotten_at(&relayer, later, HOUR, 10).await, std::slice::from_ref(&oz_2));
    assert_eq!(forgotten_at(&relayer, far, HOUR, 10).await, []);
    let kept = later.since(bound_at) - Duration::from_secs(1);
    assert_eq!(forgotten_at(&relayer, later, kept, 10).await, [], "the relayer deleted it in its time");
    assert_eq!(forgotten_at(&other, Timestamp(0), HOUR, 10).await, []);
    // About the first one it only gives no answer.
    let (long, timings) = (fixture.timings.operator_after, &fixture.timings);
    let waits = first.ask_chain(&report("oz-1", ReportedStatus::Confirmed), bound_at).unwrap();
    let asked = waits.transaction.unanswered(Duration::ZERO, later, bound_at, timings).unwrap();
    let silent = asked.transaction.unanswered(long, later, later, timings).unwrap();
    for moved in [&waits, &asked, &silent] {
        assert!(matches!(store.save(moved).await.unwrap(), Saved::Yes { .. }));
    }
    assert_eq!(forgotten_at(&relayer, later, HOUR, 10).await, [("oz-1".to_owned(), true), oz_2]);
    assert_eq!(forgotten_at(&relayer, later, HOUR, 1).await.len(), 1);
    let silent = store.forgotten_at(&relayer, later, HOUR, 10).await.unwrap();
    assert!(silent.iter().any(|record| record.only_silent && record.at == bound_at));
}

async fn concurrent_timeline_steps_get_distinct_numbers(fixture: &StoreFixture) {
    let row = fixture.inserted().await;
    let claimed = claim(&row).0;
    let notes = (0..8).map(|_| async {
        fixture.store.note(row.id, &Step::new("noted", "by a test"), now()).await.unwrap();
    });
    let (saved, _) = tokio::join!(fixture.store.save(&claimed), futures::future::join_all(notes));
    assert_eq!(saved.unwrap(), Saved::Yes { early: false });
    let numbers: Vec<_> = fixture.store.timeline(row.id).await.unwrap().into_iter().map(|entry| entry.seq).collect();
    assert_eq!(numbers, (1..=9).collect::<Vec<_>>());
}

async fn a_timeline_is_limited_and_keeps_room_for_alarms(fixture: &StoreFixture) {
    let row = fixture.inserted().await;
    for _ in 0..205 {
        fixture.store.note(row.id, &Step::new("webhook-ignored", "again"), Timestamp(1)).await.unwrap();
    }
    assert_eq!(fixture.store.timeline(row.id).await.unwrap().len(), 200);
    fixture.store.note(row.id, &Step::new("sent-twice", "an alarm"), Timestamp(2)).await.unwrap();
    assert_eq!(fixture.store.timeline(row.id).await.unwrap().len(), 201, "alarms are stored above the limit");
}

async fn open_rows_claims_and_unknown_outcomes_are_counted(fixture: &StoreFixture) {
    let oldest = fixture.inserted().await;
    let bound = fixture.bound("oz-1").await.unwrap();
    let (claimed, token) = fixture.claimed().await;
    let now = now();
    fixture
        .store
        .save(&claimed.mark_unknown(token, "500", UnknownCause::Answered, now, &fixture.timings).unwrap())
        .await
        .unwrap();
    let counts = fixture.store.counts().await.unwrap();
    assert_eq!(counts.open, [(Status::Pending, 2), (Status::Submitted, 1)]);
    assert_eq!((counts.claims, counts.claims_outcome_unknown, counts.forgotten), (1, 1, 0));
    assert_eq!(counts.oldest_pending, Some(oldest.created_at));
    let outcome_unknown = Filter { outcome_unknown: true, ..Filter::default() };
    let unresolved = fixture.store.list(&outcome_unknown, None, 10).await.unwrap();
    assert_eq!(unresolved.iter().map(|row| row.id).collect::<Vec<_>>(), [claimed.id]);
    let forgotten = bound.forgotten(RecordLost::NotKnown, now, now).unwrap();
    fixture.store.save(&forgotten).await.unwrap();
    assert_eq!(fixture.store.counts().await.unwrap().forgotten, 1);
    assert_eq!(fixture.store.list(&outcome_unknown, None, 10).await.unwrap().len(), 2);
    fixture.store.save(&forgotten.transaction.resolve_fail(now).unwrap()).await.unwrap();
    assert_eq!(fixture.store.counts().await.unwrap().forgotten, 0);
    assert_eq!(fixture.store.list(&outcome_unknown, None, 10).await.unwrap().len(), 1);
    let me = ConsumerId::generate();
    fixture.store.heartbeat(&me, Timestamp(5)).await.unwrap();
    fixture.store.heartbeat(&me, Timestamp(9)).await.unwrap();
    assert_eq!(fixture.store.last_heartbeat(&me).await.unwrap(), Some(Timestamp(9)));
    assert_eq!(fixture.store.last_heartbeat(&ConsumerId::generate()).await.unwrap(), None);
    fixture.store.forget(Timestamp(10)).await.unwrap();
    assert_eq!(fixture.store.last_heartbeat(&me).await.unwrap(), None);
    fixture.store.ping().await.unwrap();
}

async fn an_unreadable_row_is_an_error_that_names_its_column(fixture: &StoreFixture) {
    let row = fixture.inserted().await;
    fixture.execute("UPDATE transactions SET status = 'perhaps'").await;
    let read = fixture.store.get(row.id).await;
    assert!(matches!(read, Err(StoreError::Corrupt { column: "status", .. })), "{read:?}");
    let good = fixture.inserted().await;
    let listed = fixture.store.list(&Filter::default(), None, 10).await.unwrap();
    assert_eq!(listed, [good], "one unreadable row does not hide the others");
    fixture.store.note(row.id, &Step::new("noted", "by a test"), Timestamp(2)).await.unwrap();
    let timeline = fixture.store.timeline(row.id).await.unwrap();
    assert_eq!((timeline[0].action.as_str(), timeline[0].at), ("noted", Timestamp(2)));
}
