//! Every state, every move: walks all rows that any sequence of moves can reach and checks the rules on each edge.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use alloy_primitives::U256;
use serde_json::json;

use super::*;
use crate::config::RelayMode;
use crate::relay::state::apply_report::{Report, ReportedStatus, Source, Verdict};
use crate::relay::state::false_failure::{Included, Proof};

const TO: &str = "0x5fbdb2315678afecb367f032d93f642f64180aa3";

fn token(number: u128) -> Uuid {
    Uuid::from_u128(number)
}

fn consumer(name: &str) -> ConsumerId {
    ConsumerId(name.to_owned())
}

fn relayer(name: &str) -> RelayerUrl {
    RelayerUrl(format!("http://{name}"))
}

fn accepted(retry_on_failure: bool) -> Transaction {
    let body = json!({ "to": TO, "value": "7", "retryOnFailure": retry_on_failure });
    let request = DirectRequest::parse(&body).unwrap();
    Transaction::accepted(TransactionId(token(1)), &request, "test".into(), Timestamp(0), &Timings::DEFAULT)
}

fn report(status: ReportedStatus, signed: bool, reason: &str, hash: &str) -> Report {
    Report {
        tx_id: RelayerTxId("oz-1".into()),
        status,
        reason: Some(reason.to_owned()),
        hash: signed.then(|| hash.to_owned()),
        nonce: signed.then_some(1),
        from: None,
        to: Some(TO.to_owned()),
        value: Some(U256::from(7)),
        data: Some("0x".to_owned()),
        gas_limit: None,
        created_at: None,
        confirmed_at: None,
        block_number: None,
        raw: json!({ "nonce": signed.then_some(1) }),
    }
}

/// What a move is, for the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    Machine,
    OperatorReplay,
    /// A reader of the chain.
    Reader,
    /// A relayer, or the chain, says that a failed row was executed.
    Contradiction,
}

type Decide = Box<dyn Fn(&Transaction, Timestamp) -> Option<Moved>>;
type Move = (String, Who, Decide);

fn verdict(verdict: Verdict) -> Option<Moved> {
    match verdict {
        Verdict::Move(moved) | Verdict::Reroute(moved, _) => Some(*moved),
        Verdict::DoubleSend(_) | Verdict::Contradicted(_) | Verdict::Ignore(_) => None,
    }
}

fn contradiction(verdict: Verdict) -> Option<Moved> {
    if let Verdict::Contradicted(moved) = verdict { Some(*moved) } else { None }
}

/// Every move there is, by the right holder of the claim and by a wrong one.
fn moves() -> Vec<Move> {
    let mut moves: Vec<Move> = Vec::new();
    let mut add = |name: String, decide: Decide| {
        let who = match name.as_str() {
            "replay" => Who::OperatorReplay,
            "in block" => Who::Reader,
            name if name.starts_with("contradict") => Who::Contradiction,
            _ => Who::Machine,
        };
        moves.push((name, who, decide));
    };
    add("not queued".to_owned(), Box::new(|row, now| row.not_queued(now).ok()));
    add("put off".to_owned(), Box::new(|row, now| row.defer("not its turn", now, &Timings::DEFAULT).ok()));
    for may_pass in [true, false] {
        add(
            format!("fail unsent, may pass: {may_pass}"),
            Box::new(move |row, now| row.fail_unsent("reverts", may_pass, now, &Timings::DEFAULT).ok()),
        );
    }
    add("promise".to_owned(), Box::new(|row, now| row.make_irrevocable(now, &Timings::DEFAULT).ok()));
    for (number, holder) in [(10, "a"), (11, "b")] {
        let key = token(number);
        add(
            format!("claim {holder}"),
            Box::new(move |row, now| {
                row.claim(&consumer(holder), key, &relayer("r1"), "test", now, &Timings::DEFAULT).ok()
            }),
        );
        add(
            format!("release {holder}"),
            Box::new(move |row, now| row.release(key, "paused", now, &Timings::DEFAULT).ok()),
        );
        add(
            format!("bind {holder}"),
            Box::new(move |row, now| {
                row.bind(key, &RelayerTxId("oz-1".into()), None, "test", now, &Timings::DEFAULT).ok()
            }),
        );
        add(
            format!("unknown outcome {holder}"),
            Box::new(move |row, now| row.mark_unknown(key, "500", UnknownCause::Answered, now, &Timings::DEFAULT).ok()),
        );
        add(
            format!("unknown outcome unanswered {holder}"),
            Box::new(move |row, now| {
                row.mark_unknown(key, "timeout", UnknownCause::Silent, now, &Timings::DEFAULT).ok()
            }),
        );
        add(
            format!("unknown outcome exchanged {holder}"),
            Box::new(move |row, now| {
                row.mark_unknown(key, "taken", UnknownCause::Exchanged, now, &Timings::DEFAULT).ok()
            }),
        );
        add(
            format!("client error {holder}"),
            Box::new(move |row, now| {
                row.mark_unknown(key, "409", UnknownCause::ClientError, now, &Timings::DEFAULT).ok()
            }),
        );
        add(
            format!("attempts used up {holder}"),
            Box::new(move |row, now| row.exhausted(3, now, &Timings::DEFAULT).ok()),
        );
        add(format!("refuse {holder}"), Box::new(move |row, now| row.refuse(key, "400", now, &Timings::DEFAULT).ok()));
        add(format!("absent {holder}"), Box::new(move |row, now| row.absent(key, now, now, &Timings::DEFAULT).ok()));
        for gone in [true, false] {
            add(
                format!("take over {holder} {gone}"),
                Box::new(move |row, now| row.take_over(&consumer(holder), key, gone, now, &Timings::DEFAULT).ok()),
            );
        }
    }
    add("look again".into(), Box::new(|row, now| row.check_later(now + Duration::from_secs(9), now).ok()));
    add(
        "forgotten".into(),
        Box::new(|row, now| row.forgotten(RecordLost::NotKnown, now + Duration::from_secs(9), now).ok()),
    );
    for silent_for in [Duration::ZERO, Timings::DEFAULT.operator_after] {
        let again = move |now: Timestamp| now + Duration::from_secs(9);
        add(
            format!("unanswered for {silent_for:?}"),
            Box::new(move |row, now| row.unanswered(silent_for, again(now), now, &Timings::DEFAULT).ok()),
        );
    }
    add("answered".into(), Box::new(|row, now| row.answered(now).ok()));
    add("abandon".into(), Box::new(|row, now| row.abandon("unreadable", now).ok()));
    add("replay".into(), Box::new(|row, now| row.replay(now, &Timings::DEFAULT).ok()));
    add("resolve resend".into(), Box::new(|row, now| row.resolve_resend(now, &Timings::DEFAULT).ok()));
    let found = |proof| Included { block: 12, proof };
    add("in block".into(), Box::new(move |row, now| row.in_block("0x01", found(Proof::Reverted), now).ok()));
    let executed = move |row: &Transaction, now| row.in_block("0x01", found(Proof::Executed), now).ok();
    add(
        "contradict by the chain".into(),
        Box::new(move |row, now| executed(row, now).filter(|moved| moved.transaction.block_number.is_none())),
    );
    add("resolve fail".into(), Box::new(|row, now| row.resolve_fail(now).ok()));
    let reports = [
        report(ReportedStatus::Open(Progress::Sent), true, "", "0x01"),
        report(ReportedStatus::Open(Progress::Submitted), true, "", "0x02"),
        report(ReportedStatus::Open(Progress::Mined), true, "", "0x01"),
        report(ReportedStatus::Confirmed, true, "", "0x01"),
        report(ReportedStatus::Confirmed, true, "", "0x02"),
        report(ReportedStatus::Failed, true, "reverted", "0x01"),
        report(ReportedStatus::Failed, false, "Insufficient balance", ""),
        report(ReportedStatus::Failed, false, "gas limit exceeds block gas limit", ""),
        report(ReportedStatus::Canceled, false, "", ""),
        report(ReportedStatus::Expired, false, "", ""),
        report(ReportedStatus::Unknown, false, "", ""),
    ];
    let ways = [
        (RelayMode::FireAndForget, Source::Webhook),
        (RelayMode::FireAndForget, Source::Asked),
        (RelayMode::Confirm, Source::Webhook),
        (RelayMode::Confirm, Source::Asked),
    ];
    for (mode, source) in ways {
        for said in reports.clone() {
            let name = format!("report {:?} {:?} {mode:?} {source:?}", said.status, said.reason);
            let again = said.clone();
            add(
                name.clone(),
                Box::new(move |row, now| verdict(row.report(&said, source, mode, now, &Timings::DEFAULT))),
            );
            add(
                format!("contradict: {name}"),
                Box::new(move |row, now| contradiction(row.report(&again, source, mode, now, &Timings::DEFAULT))),
            );
        }
    }
    moves
}

/// Rows that differ only in counters and times behave alike: the walk visits one of them.
fn shape(row: &Transaction) -> String {
    format!(
        "{:?} {:?} {:?} {:?} {:?} {} {} {:?} {:?} {} {:?}",
        row.status,
        row.claim.as_ref().map(|claim| {
            let unknown = claim.unknown.as_ref();
            (claim.token, unknown.is_some(), unknown.map(|unknown| unknown.absent_since.is_some()))
        }),
        row.binding.as_ref().map(|binding| (binding.progress, binding.forgotten_since.is_some())),
        row.hash,
        row.block_number,
        row.attempts,
        row.auto_replayed,
        row.failed_by,
        row.avoid,
        row.replays.min(1),
        (row.is_said_executed(), row.silent_since().is_some(), row.is_only_silent()),
    )
}

#[test]
fn every_reachable_row_obeys_the_rules_under_every_move() {
    let moves = moves();
    let mut seen: HashMap<String, Transaction> = HashMap::new();
    let mut open: VecDeque<(Transaction, Timestamp)> = VecDeque::new();
    for retry_on_failure in [false, true] {
        let row = accepted(retry_on_failure);
        seen.insert(format!("{retry_on_failure} {}", shape(&row)), row.clone());
        open.push_back((row, Timestamp(0)));
    }
    let mut edges = 0;
    while let Some((row, at)) = open.pop_front() {
        // Soon, and late enough for every clock to have run out.
        for pause in [Duration::from_millis(1), Duration::from_secs(60)] {
            let now = at + pause;
            for (name, who, decide) in &moves {
                let Some(moved) = decide(&row, now) else { continue };
                check(&row, &moved, name, *who);
                edges += 1;
                let next = moved.transaction;
                let key = format!("{} {}", next.retry_on_failure, shape(&next));
                if seen.insert(key, next.clone()).is_none() {
                    open.push_back((next, now));
                }
            }
        }
    }
    assert!(seen.len() > 100 && edges > 1000, "the walk went nowhere: {} rows, {edges} moves", seen.len());
    for status in Status::ALL {
        assert!(seen.values().any(|row| row.status == *status), "{status} was never reached");
    }
}

fn check(before: &Transaction, moved: &Moved, name: &str, who: Who) {
    let after = &moved.transaction;
    let edge = format!("{name}: {} -> {}", shape(before), shape(after));
    assert_eq!(after.version, before.version + 1, "each move is one version: {edge}");
    assert!(after.updated_at >= before.updated_at, "time goes on: {edge}");
    assert!(!(after.claim.is_some() && after.binding.is_some()), "claimed or bound, never both: {edge}");
    assert_eq!(after.check_at.is_none(), after.status.is_final(), "looked at until final: {edge}");
    assert_eq!(after.failed_by.is_some(), after.status == Status::Failed, "failure has an author: {edge}");
    assert!(after.status != Status::Failed || after.error_message.is_some(), "failure has a reason: {edge}");
    assert_eq!((&after.request, &after.call), (&before.request, &before.call), "the request never changes: {edge}");
    if after.status.is_final() {
        assert!(after.claim.is_none(), "a final row has no claim: {edge}");
    }
    match who {
        Who::OperatorReplay => {
            assert_eq!(before.status, Status::Failed, "{edge}");
            assert!(before.binding.is_none(), "what a relayer took is not replayed: {edge}");
        }
        Who::Machine => {
            assert!(after.status.rank() >= before.status.rank(), "state went back: {edge}");
            assert!(!before.status.is_final(), "final is final: {edge}");
        }
        Who::Reader => {
            let block_number = after.block_number;
            assert!(before.status.is_final() && before.block_number.is_none() && block_number.is_some(), "{edge}");
            let version = after.version;
            assert_eq!(*after, Transaction { block_number, version, ..before.clone() }, "nothing else moves: {edge}");
            assert!(moved.steps.is_empty(), "{edge}");
        }
        Who::Contradiction => {
            assert_eq!((before.status, after.status), (Status::Failed, Status::Failed), "{edge}");
            assert_eq!((after.failed_by, &after.error_message), (before.failed_by, &before.error_message), "{edge}");
            assert!(after.is_unverified() || after.block_number.is_some(), "{edge}");
            assert_eq!(moved.steps.len(), 1, "{edge}");
        }
    }
    // A claim changes hands only when its submission has certainly ended or its owner is gone.
    if let (Some(old), Some(new)) = (&before.claim, &after.claim)
        && old.token != new.token
    {
        assert!(name.starts_with("take over"), "{edge}");
        assert_eq!(
            (old.relayer.clone(), old.at),
            (new.relayer.clone(), new.at),
            "the unknown outcome keeps its origin: {edge}"
        );
        assert!(new.unknown.is_some(), "the outcome of a claim that is taken over is unknown: {edge}");
    }
    // A claim ends only by an answer, by proof of absence, or by an operator.
    if before.claim.is_some() && after.claim.is_none() {
        let ways = ["release", "bind", "attempt failed", "refuse", "absent", "resolve"];
        assert!(ways.iter().any(|way| name.starts_with(way)), "{edge}");
    }
    // Only a relayer's word sets the hash, and only a claim leads to a binding.
    if after.hash != before.hash {
        assert!(name.starts_with("report") || who == Who::Contradiction, "{edge}");
    }
    if before.block_number.is_some() {
        assert_eq!(after.block_number, before.block_number, "a block that was shown stays: {edge}");
    }
    if before.binding.is_none() && after.binding.is_some() {
        assert!(before.claim.is_some() && name.starts_with("bind"), "{edge}");
    }
}

fn claimed(now: Timestamp) -> Transaction {
    accepted(false)
        .claim(&consumer("a"), token(10), &relayer("r1"), "test", now, &Timings::DEFAULT)
        .unwrap()
        .transaction
}

#[test]
fn a_second_claim_is_refused() {
    let row = claimed(Timestamp(0));
    let second = row.claim(&consumer("b"), token(11), &relayer("r2"), "test", Timestamp(1), &Timings::DEFAULT);
    assert_eq!(second.unwrap_err(), MoveRefused::Claimed);
}

#[test]
fn a_live_claim_cannot_be_taken_over_and_a_late_finish_is_refused() {
    let row = claimed(Timestamp(0));
    let early = row.take_over(&consumer("b"), token(11), false, Timestamp(64_999), &Timings::DEFAULT);
    assert_eq!(early.unwrap_err(), MoveRefused::NotOurClaim);
    let taken =
        row.take_over(&consumer("b"), token(11), false, Timestamp(65_000), &Timings::DEFAULT).unwrap().transaction;
    let late = taken.bind(token(10), &RelayerTxId("oz-1".into()), None, "test", Timestamp(66_000), &Timings::DEFAULT);
    assert_eq!(late.unwrap_err(), MoveRefused::NotOurClaim);
    assert!(
        row.take_over(&consumer("b"), token(11), true, Timestamp(1), &Timings::DEFAULT).is_ok(),
        "its owner is gone"
    );
}

#[test]
fn absence_counts_only_after_the_submission_has_certainly_ended_and_twice() {
    let row = claimed(Timestamp(0));
    let unresolved = row
        .mark_unknown(token(10), "timeout", UnknownCause::Silent, Timestamp(10_000), &Timings::DEFAULT)
        .unwrap()
        .transaction;
    let look = |row: &Transaction, at| {
        row.absent(token(10), Timestamp(at), Timestamp(at), &Timings::DEFAULT).unwrap().transaction
    };
    assert_eq!(look(&unresolved, 64_999).claim.unwrap().unknown.unwrap().absent_since, None);
    let first = look(&unresolved, 65_000);
    assert!(look(&first, 94_999).claim.is_some(), "a relayer that stood still may only now have read it");
    let proven = look(&first, 95_000);
    assert_eq!((proven.claim, proven.attempts), (None, 0));
}

#[test]
fn what_counts_is_when_the_list_was_asked_for() {
    let row = claimed(Timestamp(0));
    let unresolved = row
        .mark_unknown(token(10), "timeout", UnknownCause::Silent, Timestamp(10_000), &Timings::DEFAULT)
        .unwrap()
        .transaction;
    let look = |row: &Transaction, asked, now| {
        row.absent(token(10), Timestamp(asked), Timestamp(now), &Timings::DEFAULT).unwrap().transaction
    };
    let early = look(&unresolved, 64_999, 99_000);
    assert_eq!(early.claim.unwrap().unknown.unwrap().absent_since, None);
    let first = look(&unresolved, 65_000, 66_000);
    assert!(look(&first, 95_999, 99_000).claim.is_some());
    assert!(look(&first, 96_000, 99_000).claim.is_none());
}

#[test]
fn an_answered_request_has_ended_at_once() {
    let row = claimed(Timestamp(0));
    let unresolved = row
        .mark_unknown(token(10), "500", UnknownCause::Answered, Timestamp(100), &Timings::DEFAULT)
        .unwrap()
        .transaction;
    let first = unresolved.absent(token(10), Timestamp(1100), Timestamp(1100), &Timings::DEFAULT).unwrap().transaction;
    let proven = first.absent(token(10), Timestamp(6100), Timestamp(6100), &Timings::DEFAULT).unwrap().transaction;
    assert_eq!(proven.claim, None);
}

#[test]
fn three_failed_attempts_are_the_end() {
    let mut row = accepted(false);
    for attempt in 1..=3 {
        assert!(row.exhausted(3, Timestamp(attempt), &Timings::DEFAULT).is_err(), "attempts are left");
        let at = |seconds: i64| Timestamp(attempt * 100_000 + seconds * 1000);
        let (key, timings) = (token(10), &Timings::DEFAULT);
        row = row.claim(&consumer("a"), key, &relayer("r1"), "test", at(0), timings).unwrap().transaction;
        row = row.mark_unknown(key, "409", UnknownCause::ClientError, at(1), timings).unwrap().transaction;
        row = row.absent(key, at(2), at(2), timings).unwrap().transaction;
        row = row.absent(key, at(20), at(20), timings).unwrap().transaction;
    }
    row = row.exhausted(3, Timestamp(1_000_000), &Timings::DEFAULT).unwrap().transaction;
    assert_eq!(row.error_message.as_deref(), Some("409"));
    assert_eq!((row.status, row.attempts, row.failed_by), (Status::Failed, 3, Some(FailedBy::Consumer)));
    let again = row.replay(Timestamp(9), &Timings::DEFAULT).unwrap().transaction;
    assert_eq!((again.status, again.attempts, again.replays), (Status::Pending, 0, 1));
}

#[test]
fn retry_on_failure_starts_over_exactly_once() {
    let mut row = accepted(true);
    let mut failures = 0;
    while row.status != Status::Failed {
        row = row
            .claim(&consumer("a"), token(10), &relayer("r1"), "test", Timestamp(1), &Timings::DEFAULT)
            .unwrap()
            .transaction;
        row = row.refuse(token(10), "400", Timestamp(1), &Timings::DEFAULT).unwrap().transaction;
        failures += 1;
    }
    assert_eq!(failures, 2);
}

#[test]
fn releasing_uses_no_attempt() {
    let row = claimed(Timestamp(0)).release(token(10), "paused", Timestamp(1), &Timings::DEFAULT).unwrap().transaction;
    assert_eq!((row.status, row.attempts, row.claim), (Status::Pending, 0, None));
}

#[test]
fn an_operator_resolves_only_unknown_outcomes() {
    assert!(accepted(false).resolve_resend(Timestamp(1), &Timings::DEFAULT).is_err());
    assert!(claimed(Timestamp(0)).resolve_resend(Timestamp(1), &Timings::DEFAULT).is_err());
    assert!(claimed(Timestamp(0)).resolve_fail(Timestamp(1)).is_err());
    assert!(accepted(false).resolve_fail(Timestamp(1)).is_ok());
    let unresolved = claimed(Timestamp(0))
        .mark_unknown(token(10), "500", UnknownCause::Answered, Timestamp(1), &Timings::DEFAULT)
        .unwrap()
        .transaction;
    assert!(unresolved.outcome_unknown());
    let silent = claimed(Timestamp(0))
        .mark_unknown(token(10), "cut", UnknownCause::Silent, Timestamp(1), &Timings::DEFAULT)
        .unwrap();
    assert!(silent.transaction.resolve_resend(Timestamp(64_999), &Timings::DEFAULT).is_err(), "it may still land");
    assert!(silent.transaction.resolve_resend(Timestamp(65_000), &Timings::DEFAULT).is_ok());
    assert_eq!(unresolved.resolve_resend(Timestamp(2), &Timings::DEFAULT).unwrap().transaction.claim, None);
    assert_eq!(unresolved.resolve_fail(Timestamp(2)).unwrap().transaction.status, Status::Failed);
}

#[test]
fn an_accept_is_withdrawn_only_before_it_is_claimed() {
    let withdrawn = accepted(false).not_queued(Timestamp(5)).unwrap().transaction;
    assert_eq!((withdrawn.status, withdrawn.failed_by), (Status::Failed, Some(FailedBy::Intake)));
    assert_eq!(withdrawn.next_step(), NextStep::Nothing, "a message that arrives after all is dropped");
    assert!(
        withdrawn.claim(&consumer("a"), token(10), &relayer("r1"), "test", Timestamp(6), &Timings::DEFAULT).is_err()
    );
    assert!(
        withdrawn.replay(Timestamp(6), &Timings::DEFAULT).is_err(),
        "the client was told that it will never happen"
    );
    let claimed = claimed(Timestamp(0));
    let released = claimed.release(token(10), "paused", Timestamp(1), &Timings::DEFAULT).unwrap().transaction;
    let promised = accepted(false).make_irrevocable(Timestamp(1), &Timings::DEFAULT).unwrap().transaction;
    for taken in [claimed, released, promised] {
        assert!(taken.not_queued(Timestamp(5)).is_err());
    }
    assert!(
        withdrawn.make_irrevocable(Timestamp(6), &Timings::DEFAULT).is_err(),
        "a withdrawn row cannot become irrevocable"
    );
}

#[test]
fn only_what_has_ended_on_the_chain_has_a_block_to_be_asked_for() {
    let word = |row: &Transaction, status, signed, reason| {
        let said = report(status, signed, reason, "0x01");
        verdict(row.report(&said, Source::Webhook, RelayMode::FireAndForget, Timestamp(2), &Timings::DEFAULT))
            .unwrap()
            .transaction
    };
    let bind = |row: &Transaction| {
        row.bind(token(10), &RelayerTxId("oz-1".into()), None, "test", Timestamp(1), &Timings::DEFAULT)
    };
    let bound = bind(&claimed(Timestamp(0))).unwrap().transaction;
    let mined = word(&bound, ReportedStatus::Open(Progress::Mined), true, "");
    assert!(mined.hash.is_some() && !mined.lacks_block(), "it is not final");
    assert!(!word(&bound, ReportedStatus::Failed, false, "gas limit exceeds block gas limit").lacks_block());
    assert!(word(&mined, ReportedStatus::Failed, true, "reverted").lacks_block());
    let confirmed = word(&mined, ReportedStatus::Confirmed, true, "");
    assert!(confirmed.lacks_block());
    let shown = Included { block: 12, proof: Proof::None };
    assert!(confirmed.in_block("0x02", shown, Timestamp(9)).is_err(), "that is another transaction's block");
    let known = confirmed.in_block("0x01", shown, Timestamp(9)).unwrap().transaction;
    assert_eq!((known.block_number, known.lacks_block()), (Some(12), false));
    assert!(known.in_block("0x01", Included { block: 13, ..shown }, Timestamp(9)).is_err(), "it is said once");
}

#[test]
fn what_may_have_been_sent_does_not_fail_for_being_too_late() {
    let row = accepted(true);
    let claimed = row
        .claim(&consumer("a"), token(1), &relayer("r1"), "test", Timestamp(1), &Timings::DEFAULT)
        .unwrap()
        .transaction;
    let late = |row: &Transaction, may_pass| row.fail_unsent("late", may_pass, Timestamp(2), &Timings::DEFAULT);
    assert_eq!(late(&claimed, false).unwrap_err(), MoveRefused::Claimed);
    let unresolved = claimed
        .mark_unknown(token(1), "500", UnknownCause::Answered, Timestamp(2), &Timings::DEFAULT)
        .unwrap()
        .transaction;
    assert_eq!(late(&unresolved, false).unwrap_err(), MoveRefused::Claimed);
    let bound = claimed
        .bind(token(1), &RelayerTxId("x".into()), None, "test", Timestamp(2), &Timings::DEFAULT)
        .unwrap()
        .transaction;
    assert_eq!(late(&bound, false).unwrap_err(), MoveRefused::Bound);
    let released = claimed.release(token(1), "paused", Timestamp(2), &Timings::DEFAULT).unwrap().transaction;
    let failed = late(&released, false).unwrap().transaction;
    assert_eq!((failed.status, failed.failed_by), (Status::Failed, Some(FailedBy::Consumer)));
    // What may pass is started over once, if the client asked for that.
    let again = late(&released, true).unwrap().transaction;
    assert_eq!((again.status, again.auto_replayed), (Status::Pending, true));
    assert_eq!(late(&again, true).unwrap().transaction.status, Status::Failed);
}
