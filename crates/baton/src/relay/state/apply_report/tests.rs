//! Each kind of report, on rows in each state.

use serde_json::json;
use uuid::Uuid;

use super::*;
use crate::relay::request::call::DirectRequest;
use crate::relay::state::false_failure::{Included, Proof};
use crate::relay::state::transaction::{ConsumerId, RelayerUrl, TransactionId};

const HASH: &str = "0x01";

fn submitted() -> Transaction {
    let body = json!({ "to": "0x5fbdb2315678afecb367f032d93f642f64180aa3", "value": "7", "data": "0xab" });
    let request = DirectRequest::parse(&body).unwrap();
    let (now, token) = (Timestamp(0), Uuid::new_v4());
    let row = Transaction::accepted(TransactionId::generate(), &request, "test".into(), now, &Timings::DEFAULT);
    let (me, relayer) = (ConsumerId::generate(), RelayerUrl("http://r1".into()));
    let row = row.claim(&me, token, &relayer, "test", now, &Timings::DEFAULT).unwrap().transaction;
    row.bind(token, &RelayerTxId("oz-1".into()), None, "test", now, &Timings::DEFAULT).unwrap().transaction
}

fn word(status: ReportedStatus) -> Report {
    Report {
        tx_id: RelayerTxId("oz-1".into()),
        status,
        reason: None,
        hash: Some(HASH.into()),
        nonce: Some(4),
        from: Some("0xf39fd6e51aad88f6f4ce6ab8827279cfffb92266".into()),
        to: Some("0x5FBDB2315678afecb367f032d93f642f64180aa3".into()),
        value: Some(U256::from(7)),
        data: Some("0xAB".into()),
        gas_limit: None,
        created_at: None,
        confirmed_at: Some(Timestamp(99)),
        block_number: None,
        raw: json!({ "all": "of it" }),
    }
}

fn after(row: &Transaction, report: &Report) -> Transaction {
    match row.report(report, Source::Webhook, RelayMode::FireAndForget, Timestamp(1), &Timings::DEFAULT) {
        Verdict::Move(moved) | Verdict::Reroute(moved, _) => moved.transaction,
        other => panic!("expected a move, got {other:?}"),
    }
}

#[test]
fn confirmed_sets_hash_and_time() {
    let row = after(&submitted(), &word(ReportedStatus::Confirmed));
    assert_eq!((row.status, row.hash.as_deref()), (Status::Confirmed, Some(HASH)));
    assert_eq!((row.confirmed_at, row.check_at, row.result), (Some(Timestamp(99)), None, None));
}

#[test]
fn a_block_that_the_relayer_tells_is_kept_at_the_end_and_not_before() {
    let told = |status| Report { block_number: Some(12), ..word(status) };
    let row = after(&submitted(), &told(ReportedStatus::Open(Progress::Mined)));
    assert_eq!(row.block_number, None, "it may still be another");
    assert_eq!(after(&row, &told(ReportedStatus::Confirmed)).block_number, Some(12));
    assert_eq!(after(&row, &told(ReportedStatus::Failed)).block_number, Some(12), "it reverted there");
}

#[test]
fn confirm_mode_ends_in_success_with_the_result() {
    let verdict = submitted().report(
        &word(ReportedStatus::Confirmed),
        Source::Webhook,
        RelayMode::Confirm,
        Timestamp(1),
        &Timings::DEFAULT,
    );
    let Verdict::Move(moved) = verdict else { panic!("{verdict:?}") };
    assert_eq!(moved.transaction.status, Status::Success);
    assert_eq!(moved.transaction.result, Some(json!({ "all": "of it" })));
}

#[test]
fn a_confirmed_no_op_is_a_failure() {
    let mut report = word(ReportedStatus::Confirmed);
    report.to = report.from.clone();
    report.value = Some(U256::ZERO);
    report.data = Some("0x".into());
    assert!(report.is_no_op());
    let row = after(&submitted(), &report);
    assert_eq!((row.status, row.failed_by), (Status::Failed, Some(FailedBy::Relayer)));
    assert!(row.error_message.unwrap().contains("no-op"));
}

#[test]
fn a_late_webhook_never_puts_a_final_row_back() {
    let confirmed = after(&submitted(), &word(ReportedStatus::Confirmed));
    for status in [
        ReportedStatus::Open(Progress::Sent),
        ReportedStatus::Open(Progress::Submitted),
        ReportedStatus::Failed,
        ReportedStatus::Confirmed,
    ] {
        let verdict =
            confirmed.report(&word(status), Source::Webhook, RelayMode::FireAndForget, Timestamp(2), &Timings::DEFAULT);
        assert!(matches!(verdict, Verdict::Ignore(_)), "{status:?}: {verdict:?}");
    }
}

#[test]
fn progress_only_goes_on() {
    let row = after(&submitted(), &word(ReportedStatus::Open(Progress::Mined)));
    let verdict = row.report(
        &word(ReportedStatus::Open(Progress::Sent)),
        Source::Webhook,
        RelayMode::FireAndForget,
        Timestamp(2),
        &Timings::DEFAULT,
    );
    assert_eq!(verdict, Verdict::Ignore("older than what is known"));
    assert_eq!(row.status, Status::Submitted);
}

#[test]
fn a_second_hash_after_confirmed_is_an_alarm() {
    let confirmed = after(&submitted(), &word(ReportedStatus::Confirmed));
    let mut again = word(ReportedStatus::Open(Progress::Submitted));
    (again.hash, again.nonce) = (Some("0x02".into()), Some(5));
    let verdict = confirmed.report(&again, Source::Webhook, RelayMode::FireAndForget, Timestamp(2), &Timings::DEFAULT);
    let Verdict::DoubleSend(step) = verdict else { panic!("{verdict:?}") };
    assert!(step.detail.contains("0x01") && step.detail.contains("0x02"));
}

/// A relayer that sends twice does so right after it says confirmed, while the chain has not answered yet.
#[test]
fn a_second_hash_while_the_chain_is_asked_is_an_alarm() {
    let mut said = word(ReportedStatus::Confirmed);
    (said.raw, said.nonce) = (json!({ "status": "confirmed" }), Some(4));
    let waits = submitted().ask_chain(&said, Timestamp(1)).unwrap().transaction;
    let mut again = word(ReportedStatus::Open(Progress::Sent));
    (again.hash, again.nonce) = (Some("0x02".into()), Some(5));
    let verdict = |row: &Transaction, report: &Report| {
        row.report(report, Source::Webhook, RelayMode::FireAndForget, Timestamp(2), &Timings::DEFAULT)
    };
    let Verdict::DoubleSend(early) = verdict(&waits, &again) else { panic!("{:?}", verdict(&waits, &again)) };
    let Verdict::DoubleSend(late) = verdict(&after(&waits, &said), &again) else { panic!("after the chain's answer") };
    assert_eq!(early, late, "one alarm for both");
    again.nonce = Some(4);
    assert!(!matches!(verdict(&waits, &again), Verdict::DoubleSend(_)), "a gas bump");
    again.nonce = Some(5);
    let signed_anew = after(&submitted(), &Report { nonce: Some(4), ..word(ReportedStatus::Open(Progress::Sent)) });
    assert!(!matches!(verdict(&signed_anew, &again), Verdict::DoubleSend(_)), "it may have given the first one up");
}

#[test]
fn an_old_hash_of_the_same_nonce_is_neither_an_alarm_nor_taken_back() {
    let row = after(&submitted(), &word(ReportedStatus::Open(Progress::Submitted)));
    let mut bumped = word(ReportedStatus::Open(Progress::Submitted));
    bumped.hash = Some("0x02".into());
    let asked = row.report(&bumped, Source::Asked, RelayMode::FireAndForget, Timestamp(2), &Timings::DEFAULT);
    let Verdict::Move(moved) = asked else { panic!("{asked:?}") };
    let row = moved.transaction;
    assert_eq!(row.hash.as_deref(), Some("0x02"));
    let late = word(ReportedStatus::Open(Progress::Submitted));
    let verdict = row.report(&late, Source::Webhook, RelayMode::FireAndForget, Timestamp(3), &Timings::DEFAULT);
    assert_eq!(verdict, Verdict::Ignore("already known"));
    let mut confirmed = word(ReportedStatus::Confirmed);
    confirmed.hash = Some("0x02".into());
    let row = after(&row, &confirmed);
    let verdict = row.report(&late, Source::Webhook, RelayMode::FireAndForget, Timestamp(4), &Timings::DEFAULT);
    assert!(matches!(verdict, Verdict::Ignore(_)), "{verdict:?}");
}

#[test]
fn what_was_given_up_as_unsigned_and_then_signed_is_an_alarm() {
    let mut report = word(ReportedStatus::Confirmed);
    report.tx_id = RelayerTxId("given-up".into());
    let verdict =
        submitted().report(&report, Source::Webhook, RelayMode::FireAndForget, Timestamp(1), &Timings::DEFAULT);
    assert!(matches!(verdict, Verdict::DoubleSend(_)), "{verdict:?}");
}

#[test]
fn a_dialect_without_nonces_proves_nothing_about_signing() {
    let mut report = word(ReportedStatus::Failed);
    (report.hash, report.nonce, report.reason) = (None, None, Some("Insufficient balance".into()));
    assert_eq!(after(&submitted(), &report).status, Status::Failed);
}

#[test]
fn an_unsigned_failure_of_the_relayers_own_is_rerouted_without_an_attempt() {
    for reason in ["Transaction in Pending state for over 2 minutes. Replacing with NOOP.", "Insufficient balance: …"]
    {
        let mut report = word(ReportedStatus::Failed);
        (report.hash, report.nonce, report.reason) = (None, None, Some(reason.into()));
        report.raw = json!({ "nonce": null });
        let heard = after(&submitted(), &report);
        assert_eq!((&heard.binding, heard.check_at), (&submitted().binding, Some(Timestamp(1))), "a webhook only asks");
        let verdict =
            submitted().report(&report, Source::Asked, RelayMode::FireAndForget, Timestamp(1), &Timings::DEFAULT);
        let Verdict::Reroute(moved, _) = verdict else { panic!("{verdict:?}") };
        let row = moved.transaction;
        assert_eq!((row.status, row.attempts, row.reroutes), (Status::Submitted, 0, 1));
        assert_eq!((row.binding, row.avoid), (None, Some(RelayerUrl("http://r1".into()))));
    }
}

#[test]
fn an_unsigned_failure_of_the_items_own_and_a_signed_one_are_final() {
    let mut unsigned = word(ReportedStatus::Failed);
    (unsigned.hash, unsigned.nonce, unsigned.raw) = (None, None, json!({ "nonce": null }));
    unsigned.reason = Some("Transaction gas limit (1) exceeds block gas limit (2)".into());
    assert_eq!(after(&submitted(), &unsigned).status, Status::Failed);
    let mut reverted = word(ReportedStatus::Failed);
    reverted.reason = Some("Transaction reverted on-chain (receipt status: failed)".into());
    let row = after(&submitted(), &reverted);
    assert_eq!((row.status, row.hash.as_deref()), (Status::Failed, Some(HASH)));
}

#[test]
fn a_report_about_another_relayer_transaction_changes_nothing() {
    let mut report = word(ReportedStatus::Confirmed);
    report.tx_id = RelayerTxId("oz-2".into());
    report.hash = None;
    let verdict =
        submitted().report(&report, Source::Webhook, RelayMode::FireAndForget, Timestamp(1), &Timings::DEFAULT);
    assert!(matches!(verdict, Verdict::Ignore(_)));
}

#[test]
fn a_record_matches_only_with_everything_that_was_sent() {
    let row = submitted();
    assert!(row.call.matches(&word(ReportedStatus::Failed)));
    let changes: [fn(&mut Report); 4] = [
        |report| report.to = Some("0x0000000000000000000000000000000000000001".into()),
        |report| report.value = Some(U256::from(8)),
        |report| report.data = Some("0xabcd".into()),
        |report| report.to = None,
    ];
    for change in changes {
        let mut other = word(ReportedStatus::Failed);
        change(&mut other);
        assert!(!row.call.matches(&other), "{other:?}");
    }
    let with_gas = Call { gas_limit: Some(21000), ..row.call };
    assert!(!with_gas.matches(&word(ReportedStatus::Failed)));
}

#[test]
fn only_ends_that_were_signed_need_the_chain() {
    let row = submitted();
    for status in [ReportedStatus::Confirmed, ReportedStatus::Failed, ReportedStatus::Canceled, ReportedStatus::Expired]
    {
        assert!(row.needs_chain(&word(status), Timestamp(5), &Timings::DEFAULT), "{status:?}");
    }
    assert!(!row.needs_chain(&word(ReportedStatus::Open(Progress::Mined)), Timestamp(5), &Timings::DEFAULT));
    let unsigned = Report { hash: None, nonce: None, ..word(ReportedStatus::Failed) };
    assert!(!row.needs_chain(&unsigned, Timestamp(5), &Timings::DEFAULT));
    let sent = after(&row, &Report { hash: None, nonce: None, ..word(ReportedStatus::Open(Progress::Sent)) });
    assert!(
        sent.needs_chain(&unsigned, Timestamp(5), &Timings::DEFAULT),
        "it was signed, and the relayer no longer says so"
    );
    let other = Report { tx_id: RelayerTxId("oz-2".into()), ..word(ReportedStatus::Failed) };
    assert!(!row.needs_chain(&other, Timestamp(5), &Timings::DEFAULT));
    assert!(
        !after(&row, &word(ReportedStatus::Confirmed)).needs_chain(
            &word(ReportedStatus::Failed),
            Timestamp(5),
            &Timings::DEFAULT
        ),
        "it is final"
    );
}

#[test]
fn every_unsigned_end_of_a_relayer_that_names_nonces_needs_the_chain() {
    let raw = json!({ "id": "oz-1", "nonce": null, "hash": null });
    for status in [ReportedStatus::Failed, ReportedStatus::Canceled, ReportedStatus::Expired] {
        for reason in ["Transaction in Pending state for over 2 minutes", "exceeds block gas limit"] {
            let reason = Some(reason.to_owned());
            let ended = Report { hash: None, nonce: None, reason, raw: raw.clone(), ..word(status) };
            assert!(
                submitted().needs_chain(&ended, Timestamp(5), &Timings::DEFAULT),
                "it may have lost its last seconds"
            );
            let older_dialect = Report { raw: json!({ "transactionId": "oz-1" }), ..ended };
            assert!(!submitted().needs_chain(&older_dialect, Timestamp(5), &Timings::DEFAULT));
        }
    }
}

#[test]
fn each_trace_of_a_signature_alone_needs_the_chain() {
    for status in [ReportedStatus::Failed, ReportedStatus::Canceled, ReportedStatus::Expired] {
        let unsigned = Report { hash: None, nonce: None, ..word(status) };
        assert!(!submitted().needs_chain(&unsigned, Timestamp(5), &Timings::DEFAULT), "{status:?}");
        let (nonce, hash) = (Some(4), Some(HASH.to_owned()));
        assert!(
            submitted().needs_chain(&Report { nonce, ..unsigned.clone() }, Timestamp(5), &Timings::DEFAULT),
            "{status:?}: a nonce"
        );
        assert!(
            submitted().needs_chain(&Report { hash, ..unsigned.clone() }, Timestamp(5), &Timings::DEFAULT),
            "{status:?}: a hash"
        );
        let earlier: [fn(&mut Transaction); 3] = [
            |row| row.hash = Some(HASH.to_owned()),
            |row| row.binding.as_mut().unwrap().nonce = Some(4),
            |row| row.binding.as_mut().unwrap().progress = Progress::Sent,
        ];
        for (position, was_signed) in earlier.into_iter().enumerate() {
            let mut row = submitted();
            was_signed(&mut row);
            assert!(
                row.needs_chain(&unsigned, Timestamp(5), &Timings::DEFAULT),
                "{status:?}: known from an earlier report, {position}"
            );
        }
    }
}

#[test]
fn a_final_report_awaiting_the_chain_is_shown_once_and_cleared_at_the_end() {
    let failed = Report { reason: Some("Nonce 4 consumed externally".into()), ..word(ReportedStatus::Failed) };
    let asked = submitted().ask_chain(&failed, Timestamp(5)).unwrap();
    let row = asked.transaction;
    assert_eq!((row.status, row.check_at), (Status::Submitted, Some(Timestamp(5))));
    assert_eq!(row.binding.as_ref().unwrap().nonce, Some(4));
    assert!(row.error_message.as_ref().unwrap().contains("consumed externally"));
    assert!(row.ask_chain(&failed, Timestamp(6)).is_err(), "a repeated webhook changes nothing");
    let end = after(&row, &word(ReportedStatus::Confirmed));
    assert_eq!((end.status, end.error_message), (Status::Confirmed, None));
}

#[test]
fn a_nonce_lost_to_another_call_reroutes_without_an_attempt() {
    let row = submitted().ask_chain(&word(ReportedStatus::Failed), Timestamp(5)).unwrap().transaction;
    let moved = row.not_executed("another call used its nonce 4", Timestamp(6), &Timings::DEFAULT).unwrap();
    let row = moved.transaction;
    assert_eq!((row.status, row.attempts, row.reroutes), (Status::Submitted, 0, 1));
    assert_eq!((row.binding, row.hash, row.error_message), (None, None, None));
}

#[test]
fn what_the_chain_does_not_tell_is_an_unknown_outcome() {
    let row = submitted();
    let unknown = row.unresolved("its nonce is open", Timestamp(9), Timestamp(6)).unwrap();
    assert_eq!(unknown.steps.len(), 1);
    assert!(unknown.transaction.outcome_unknown());
    assert_eq!(unknown.transaction.check_at, Some(Timestamp(9)));
    let again = unknown.transaction.unresolved("its nonce is open", Timestamp(19), Timestamp(16)).unwrap();
    assert!(again.steps.is_empty(), "said once");
}

#[test]
fn a_signed_failure_without_a_chain_is_unverified_and_a_receipt_verifies_it() {
    let says = word(ReportedStatus::Failed);
    let verdict = submitted().report(&says, Source::Asked, RelayMode::FireAndForget, Timestamp(1), &Timings::DEFAULT);
    let Verdict::Move(failed) = verdict else { panic!("{verdict:?}") };
    assert!(failed.transaction.is_unverified());
    let noted = failed.steps.iter().find(|step| step.action == "unverified").expect("the timeline says it");
    assert!(noted.detail.contains("RPC_URL"), "{noted:?}");
    let receipt = Report { block_number: Some(7), ..word(ReportedStatus::Failed) };
    assert!(!after(&submitted(), &receipt).is_unverified());
    let unsigned = Report { hash: None, nonce: None, ..word(ReportedStatus::Canceled) };
    assert!(!after(&submitted(), &unsigned).is_unverified());
    let sent = Report { hash: None, nonce: None, ..word(ReportedStatus::Open(Progress::Sent)) };
    assert!(after(&after(&submitted(), &sent), &unsigned).is_unverified(), "known as sent, without nonce and hash");
}

/// The relayer says that it canceled a record that it never signed.
fn canceled_unsigned() -> Report {
    let mut report = word(ReportedStatus::Canceled);
    (report.hash, report.nonce) = (None, None);
    report.raw = json!({ "nonce": null });
    report
}

#[test]
fn our_own_cancellation_of_an_unsigned_record_is_rerouted_and_any_other_is_the_end() {
    let asked = |row: &Transaction| {
        row.report(&canceled_unsigned(), Source::Asked, RelayMode::FireAndForget, Timestamp(5), &Timings::DEFAULT)
    };
    let long_ago = Timestamp(5) - Timings::DEFAULT.cancel_settles();
    let requested = submitted().request_cancel(Timestamp(9), long_ago).unwrap();
    assert_eq!(requested.steps[0].action, "cancel-requested");
    let row = requested.transaction;
    assert!(row.request_cancel(Timestamp(9), Timestamp(5)).unwrap().steps.is_empty(), "once in the timeline");
    let Verdict::Reroute(moved, _) = asked(&row) else { panic!("{:?}", asked(&row)) };
    let rerouted = moved.transaction;
    assert_eq!((rerouted.status, rerouted.attempts, rerouted.binding), (Status::Submitted, 0, None));
    assert_eq!(rerouted.cancel_requested_at, None, "the next relayer starts afresh");
    let Verdict::Move(moved) = asked(&submitted()) else { panic!("{:?}", asked(&submitted())) };
    assert_eq!(moved.transaction.status, Status::Failed, "an operator canceled it at the relayer");
    let just_requested = submitted().request_cancel(Timestamp(9), Timestamp(4)).unwrap().transaction;
    assert!(matches!(asked(&just_requested), Verdict::Ignore(_)), "it may have been signed meanwhile");
    assert!(row.needs_chain(&canceled_unsigned(), Timestamp(5), &Timings::DEFAULT), "the chain is asked as well");
    let heard =
        row.report(&canceled_unsigned(), Source::Webhook, RelayMode::FireAndForget, Timestamp(5), &Timings::DEFAULT);
    let Verdict::Move(moved) = heard else { panic!("{heard:?}") };
    let heard = moved.transaction;
    assert_eq!((heard.status, heard.check_at), (Status::Submitted, Some(Timestamp(5))), "a webhook only asks");
}

/// The first request failed, and the minute was counted from it: a cancellation was certain at the instant it was made.
#[test]
fn the_minute_after_a_cancellation_counts_from_the_last_request() {
    let settles = Timings::DEFAULT.cancel_settles();
    let (first, second) = (Timestamp(4), Timestamp(4) + settles);
    let row = submitted().request_cancel(Timestamp(9), first).unwrap().transaction;
    let row = row.request_cancel(Timestamp(9), second).unwrap().transaction;
    let certain = |now| row.is_cancel_certain(&canceled_unsigned(), now, &Timings::DEFAULT);
    assert!(!certain(second), "it may have been signed meanwhile");
    assert!(certain(second + settles));
}

#[test]
fn a_record_that_was_signed_before_our_cancellation_is_not_rerouted() {
    let row = submitted().request_cancel(Timestamp(9), Timestamp(4)).unwrap().transaction;
    let row = after(&row, &word(ReportedStatus::Open(Progress::Sent)));
    let verdict =
        row.report(&canceled_unsigned(), Source::Asked, RelayMode::FireAndForget, Timestamp(5), &Timings::DEFAULT);
    assert!(matches!(verdict, Verdict::Move(moved) if moved.transaction.status == Status::Failed));
}

#[test]
fn a_record_that_is_another_call_says_nothing_about_this_one() {
    for status in [ReportedStatus::Confirmed, ReportedStatus::Failed, ReportedStatus::Open(Progress::Sent)] {
        let mut report = word(status);
        report.value = Some(U256::from(8));
        let verdict =
            submitted().report(&report, Source::Asked, RelayMode::FireAndForget, Timestamp(1), &Timings::DEFAULT);
        assert_eq!(verdict, Verdict::Ignore("the record is about another call"), "{status:?}");
        assert!(!submitted().needs_chain(&report, Timestamp(5), &Timings::DEFAULT));
    }
}

#[test]
fn a_final_report_that_waits_for_the_chain_is_kept_without_its_call_data() {
    let mut report = word(ReportedStatus::Confirmed);
    report.raw = json!({ "id": "oz-1", "status": "confirmed", "hash": HASH, "data": "0xab", "signature": {} });
    let waiting = submitted().ask_chain(&report, Timestamp(1)).unwrap().transaction;
    assert_eq!(waiting.relayer_says, Some(json!({ "id": "oz-1", "status": "confirmed", "hash": HASH })));
    let ended = after(&waiting, &word(ReportedStatus::Confirmed));
    assert_eq!(ended.relayer_says, None);
}

#[test]
fn another_relayers_report_about_this_id_changes_nothing() {
    let mut row = submitted();
    row.from = Some("0x70997970C51812dc3A010C7d01b50e0d17dc79C8".into());
    for status in [ReportedStatus::Failed, ReportedStatus::Confirmed, ReportedStatus::Open(Progress::Mined)] {
        let verdict =
            row.report(&word(status), Source::Webhook, RelayMode::FireAndForget, Timestamp(1), &Timings::DEFAULT);
        assert!(matches!(verdict, Verdict::Ignore(_)), "{verdict:?}");
        assert!(!row.needs_chain(&word(status), Timestamp(5), &Timings::DEFAULT));
    }
}

#[test]
fn a_record_that_the_row_has_left_is_an_alarm_only_if_it_made_the_call() {
    let left = |status| Report { tx_id: RelayerTxId("left".into()), ..word(status) };
    let verdict = |report: &Report| {
        submitted().report(report, Source::Webhook, RelayMode::FireAndForget, Timestamp(1), &Timings::DEFAULT)
    };
    assert!(matches!(verdict(&left(ReportedStatus::Confirmed)), Verdict::DoubleSend(_)));
    for status in [ReportedStatus::Failed, ReportedStatus::Open(Progress::Submitted)] {
        assert!(matches!(verdict(&left(status)), Verdict::Ignore(_)), "{status:?}");
    }
    let mut no_op = left(ReportedStatus::Confirmed);
    (no_op.to, no_op.value, no_op.data) = (no_op.from.clone(), Some(U256::ZERO), Some("0x".into()));
    assert!(matches!(verdict(&no_op), Verdict::Ignore(_)));
    // The row was bound to the chain's transaction, and its former record names the same one.
    let found = submitted().found_on_chain(&RelayerTxId(format!("chain:{HASH}")), 9, Timestamp(1)).unwrap().transaction;
    let mut mined = word(ReportedStatus::Confirmed);
    mined.tx_id = RelayerTxId(format!("chain:{HASH}"));
    let late = after(&found, &mined).report(
        &word(ReportedStatus::Confirmed),
        Source::Webhook,
        RelayMode::FireAndForget,
        Timestamp(1),
        &Timings::DEFAULT,
    );
    assert!(matches!(late, Verdict::Ignore(_)), "{late:?}");
}

fn heard(row: &Transaction, report: &Report) -> Verdict {
    row.report(report, Source::Webhook, RelayMode::FireAndForget, Timestamp(2), &Timings::DEFAULT)
}

/// Rows that have failed, without anything that shows a signature: ended unsigned, and given up by an operator.
fn failed_unsigned() -> [Transaction; 2] {
    let mut unsigned = word(ReportedStatus::Failed);
    (unsigned.hash, unsigned.nonce, unsigned.raw) = (None, None, json!({ "nonce": null }));
    unsigned.reason = Some("Transaction gas limit (1) exceeds block gas limit (2)".into());
    let lost = submitted().unresolved("no answer", Timestamp(9), Timestamp(1)).unwrap().transaction;
    [after(&submitted(), &unsigned), lost.resolve_fail(Timestamp(1)).unwrap().transaction]
}

#[test]
fn a_failed_row_that_its_relayer_executed_is_an_alarm_and_unverified() {
    for row in failed_unsigned() {
        assert!(!row.is_unverified(), "{:?}", row.failed_by);
        for status in [ReportedStatus::Confirmed, ReportedStatus::Open(Progress::Mined)] {
            let Verdict::Contradicted(moved) = heard(&row, &word(status)) else {
                panic!("{:?}", heard(&row, &word(status)))
            };
            let after = moved.transaction;
            assert_eq!((moved.steps[0].action, after.status), ("failed-but-executed", Status::Failed));
            assert_eq!((after.failed_by, &after.error_message), (row.failed_by, &row.error_message));
            assert!(after.is_unverified() && after.lacks_block(), "{:?}", row.failed_by);
            assert_eq!(after.hash.as_deref(), Some(HASH));
            assert!(matches!(heard(&after, &word(ReportedStatus::Confirmed)), Verdict::Ignore(_)), "once");
        }
    }
}

#[test]
fn a_failed_row_is_contradicted_only_by_its_own_call() {
    let mut no_op = word(ReportedStatus::Confirmed);
    (no_op.to, no_op.value, no_op.data) = (no_op.from.clone(), Some(U256::ZERO), Some("0x".into()));
    let replaced = after(&submitted(), &no_op);
    let verdict = heard(&replaced, &no_op);
    assert!(matches!(verdict, Verdict::Ignore(_)), "{verdict:?}");
    for row in failed_unsigned() {
        for status in [ReportedStatus::Failed, ReportedStatus::Open(Progress::Submitted)] {
            let verdict = heard(&row, &word(status));
            assert!(matches!(verdict, Verdict::Ignore(_)), "{verdict:?}");
        }
    }
    let mined = word(ReportedStatus::Open(Progress::Mined));
    let failed = after(&after(&submitted(), &mined), &word(ReportedStatus::Failed));
    assert!(matches!(heard(&failed, &mined), Verdict::Ignore(_)), "known before it failed");
    assert!(matches!(heard(&failed, &word(ReportedStatus::Confirmed)), Verdict::Contradicted(_)));
}

#[test]
fn a_failure_that_the_chain_has_verified_stays_verified() {
    let reverted = Report { block_number: Some(7), ..word(ReportedStatus::Failed) };
    let row = after(&submitted(), &reverted);
    let verdict = heard(&row, &word(ReportedStatus::Confirmed));
    assert!(matches!(verdict, Verdict::Ignore(_)), "the receipt of this hash says that it reverted: {verdict:?}");
    let second = Report { hash: Some("0x02".into()), nonce: Some(5), ..word(ReportedStatus::Confirmed) };
    let Verdict::Contradicted(moved) = heard(&row, &second) else { panic!("{:?}", heard(&row, &second)) };
    let after = moved.transaction;
    assert_eq!((after.hash.as_deref(), after.block_number), (Some(HASH), Some(7)), "the block is that of this hash");
    assert!(!after.is_unverified());
}

#[test]
fn only_a_revert_on_the_chain_verifies_a_failure() {
    let failed = after(&submitted(), &word(ReportedStatus::Failed));
    let found = |proof| failed.in_block(HASH, Included { block: 12, proof }, Timestamp(9));
    assert!(failed.is_unverified() && found(Proof::None).is_err(), "another call, or its block may be replaced");
    let reverted = found(Proof::Reverted).unwrap();
    assert_eq!((reverted.transaction.block_number, reverted.steps.len()), (Some(12), 0));
    assert!(!reverted.transaction.is_unverified());
    let executed = found(Proof::Executed).unwrap();
    let row = executed.transaction;
    assert_eq!((row.status, row.block_number, executed.steps[0].action), (Status::Failed, None, "failed-but-executed"));
    assert!(row.is_unverified() && !row.lacks_block(), "said once");
    assert!(matches!(heard(&row, &word(ReportedStatus::Confirmed)), Verdict::Ignore(_)), "known");
    // The block of a transaction that ended well proves nothing, and is shown.
    let confirmed = after(&submitted(), &word(ReportedStatus::Confirmed));
    let shown = confirmed.in_block(HASH, Included { block: 12, proof: Proof::None }, Timestamp(9)).unwrap();
    assert_eq!(shown.transaction.block_number, Some(12));
}
