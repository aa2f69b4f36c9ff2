//! What a relayer's own list proves about a submission of unknown outcome (pure). A wrong finding here is a double
//! payment; ADR 4 gives the reason for each rule.
//!
//! [`super::relayer_list`] reads the list and checks that it proves itself; [`super::unknown_outcomes`] acts on the
//! finding. One listing is not enough: `Transaction::absent` in `state/moves.rs` ends a claim only after a second one.

use std::collections::HashSet;
use std::time::Duration;

use crate::config::Timings;
use crate::mutations::Mutation;
use crate::relay::reconcile::relayer_list::RelayerListing;
use crate::relay::request::call::Call;
use crate::relay::state::apply_report::Report;
use crate::relay::state::transaction::{Claim, RelayerTxId, Transaction, UnknownOutcome};
use crate::timestamp::Timestamp;

/// A submission of unknown outcome.
#[derive(Debug, Clone, Copy)]
pub struct LostSubmission<'a> {
    /// The submitted call.
    pub call: &'a Call,
    /// The claim that the submission was sent under.
    pub claim: &'a Claim,
    /// Why its outcome is unknown.
    pub unknown: &'a UnknownOutcome,
    /// Additional uncertainty of the claim's time: our clock may have been set since.
    pub slip: Duration,
    /// Whether the submission can no longer appear, provided that this list does not show it either.
    pub over: bool,
    /// The limits of a submission.
    pub timings: &'a Timings,
}

/// What a list proves about one submission.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Finding<'a> {
    /// This record is the submission.
    Bind(&'a Report),
    /// The relayer does not have it: a stored submission would be listed.
    Absent,
    /// It is not found, and this reason prevents a proof.
    Unproven(&'static str),
}

impl RelayerListing {
    /// Finds one submission. `bound` are the records that belong to a row, and `rivals` the equal claims at the same
    /// relayer, both read after the list.
    ///
    /// A record that may belong to an equal claim is bound only if our own submission is proven absent and can no longer
    /// arrive. Otherwise the other row, finding its record taken, is sent again although our submission also arrives. A
    /// record that failed unsigned is bound last for the same reason: the row bound to it is sent again.
    pub fn judge<'a>(
        &'a self,
        case: LostSubmission<'_>,
        bound: &HashSet<RelayerTxId>,
        rivals: EqualClaims<'_>,
    ) -> Finding<'a> {
        let since = self.since(case);
        let is_since = |record: &Report| record.created_at.is_none_or(|created| created >= since);
        let free: Vec<&Report> =
            self.records.iter().filter(|record| !bound.contains(&record.tx_id) && is_since(record)).collect();
        let matching = |record: &&&Report| case.call.matches(record);
        let contested = |record: &Report| rivals.want(record) || record.failed_unsigned();
        let ours: Vec<&Report> = free.iter().copied().filter(|record| !contested(record)).collect();
        if let Some(record) = ours.iter().find(matching) {
            return Finding::Bind(record);
        }
        let Some(oldest) = free.iter().find(matching) else { return self.judge_absence(case, &free) };
        let absence = self.judge_absence(case, &ours);
        let unproven = matches!(absence, Finding::Unproven(_)) && self.read_at >= case.unknown.open_until;
        let over = case.over || Mutation::TakesWhileOpen.is_on();
        if (absence != Finding::Absent || !over) && !(unproven && Mutation::TakesUnproven.is_on()) {
            return absence;
        }
        // A call without a gas limit also matches records of calls with one, but not the other way round. Leave such
        // records to the stricter calls while another one is available.
        let spare =
            |record: &&&Report| matching(record) && (!rivals.need(record, case.call) || Mutation::TakesOldest.is_on());
        Finding::Bind(free.iter().filter(matching).find(spare).unwrap_or(oldest))
    }

    /// The oldest listed record that matches this submission and belongs to no row, whether or not an equal claim wants it.
    pub fn first_free<'a>(&'a self, case: LostSubmission<'_>, owned: &HashSet<RelayerTxId>) -> Option<&'a Report> {
        let since = self.since(case);
        let free = |record: &&Report| {
            !owned.contains(&record.tx_id) && record.created_at.is_none_or(|created| created >= since)
        };
        self.records.iter().filter(free).find(|record| case.call.matches(record))
    }

    /// Whether it shows a record from before the claim: one of ours, or any other.
    pub fn shows_memory(&self, case: LostSubmission<'_>) -> bool {
        let since = self.since(case);
        self.kept_since.is_some_and(|bound| bound < case.claim.at) || self.oldest.is_some_and(|oldest| oldest < since)
    }

    /// The earliest creation time, by the relayer's clock, of a record of this submission.
    fn since(&self, case: LostSubmission<'_>) -> Timestamp {
        case.claim.at - self.behind - case.slip
    }

    /// The finding when none of these records is the submission.
    fn judge_absence(&self, case: LostSubmission<'_>, records: &[&Report]) -> Finding<'static> {
        if let Some(why) = self.unproven {
            return Finding::Unproven(why);
        }
        if records.iter().any(|record| self.may_stand_for(record, case)) {
            return Finding::Unproven("the relayer has a record that may be this one, or a no-op in its place");
        }
        // Either a record of ours from before, or any record from before the claim, shows that the relayer has kept its
        // records. Without one, a relayer that did not answer may have crashed and lost all of them; after an answer, or
        // after a crash of our own consumer, there is no reason to suspect that.
        let silent = case.unknown.kind.is_silence() && !Mutation::NoMemoryProof.is_on();
        if silent && !self.shows_memory(case) {
            return Finding::Unproven("the relayer fell silent and shows nothing from before");
        }
        Finding::Absent
    }

    /// Whether a record may be this submission after all: a field is missing, or a no-op replaced a call.
    ///
    /// A no-op that was created after the submission was certainly over fills a gap of nonces. Its reason says so only at
    /// first; the relayer overwrites it.
    fn may_stand_for(&self, record: &Report, case: LostSubmission<'_>) -> bool {
        let named = record.reason.as_deref().unwrap_or_default().starts_with("Gap-filling");
        let late = record.created_at.is_some_and(|created| created > self.until(case.claim, case.slip, case.timings));
        case.call.may_be(record) || (record.is_no_op() && !named && !late)
    }

    /// Whether a record stored at that time may be what a claim's submission has become: a record that was replaced, by a
    /// no-op or another call, keeps the time at which it was stored.
    pub fn may_have_become(
        &self,
        created: Option<Timestamp>,
        claim: &Claim,
        slip: Duration,
        timings: &Timings,
    ) -> bool {
        let (since, until) = (claim.at - self.behind - slip, self.until(claim, slip, timings));
        created.is_none_or(|created| (since..=until).contains(&created))
    }

    /// The latest creation time, by the relayer's clock, of a record of a claim's submission.
    fn until(&self, claim: &Claim, slip: Duration, timings: &Timings) -> Timestamp {
        let own = claim.open_until(timings);
        claim.unknown.as_ref().map_or(own, |unknown| unknown.open_until.max(own)) + self.ahead + slip
    }
}

/// The calls of other claimed rows that match the same records as this row.
pub fn rivals<'a>(row: &Transaction, claims: impl IntoIterator<Item = &'a Transaction>) -> Vec<Call> {
    let is_rival = |other: &&Transaction| {
        let (a, b) = (&other.call, &row.call);
        let there = other.claim.as_ref().map(|claim| &claim.relayer) == row.claim.as_ref().map(|claim| &claim.relayer);
        there && other.id != row.id && (a.to, a.value, &a.data) == (b.to, b.value, &b.data)
    };
    claims.into_iter().filter(is_rival).map(|rival| rival.call.clone()).collect()
}

/// Equal claims at the same relayer.
#[derive(Debug, Clone, Copy)]
pub enum EqualClaims<'a> {
    /// Their calls.
    Calls(&'a [Call]),
    /// Too many to compare: every record may belong to one of them.
    TooMany,
}

impl EqualClaims<'_> {
    /// Whether there is one.
    pub fn any(self) -> bool {
        match self {
            Self::Calls(calls) => !calls.is_empty(),
            Self::TooMany => true,
        }
    }

    fn want(self, record: &Report) -> bool {
        match self {
            Self::Calls(calls) => calls.iter().any(|call| call.matches(record)),
            Self::TooMany => true,
        }
    }

    /// Whether a stricter call than this one matches the record.
    fn need(self, record: &Report, call: &Call) -> bool {
        let picky = |rival: &&Call| rival.gas_limit.is_some() && *rival != call;
        match self {
            Self::Calls(calls) => calls.iter().filter(picky).any(|rival| rival.matches(record)),
            Self::TooMany => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use alloy_primitives::U256;
    use serde_json::json;
    use uuid::Uuid;

    use super::*;
    use crate::relay::request::call::DirectRequest;
    use crate::relay::state::apply_report::ReportedStatus;
    use crate::relay::state::transaction::{ConsumerId, Progress, RelayerUrl, UnknownCause};

    const TO: &str = "0x5fbdb2315678afecb367f032d93f642f64180aa3";
    const CLAIMED_AT: i64 = 1_000_000;

    fn call() -> Call {
        DirectRequest::parse(&json!({ "to": TO, "value": "7", "data": "0xab", "gas": 60000 })).unwrap().call
    }

    fn record(id: &str, at: i64) -> Report {
        Report {
            tx_id: RelayerTxId(id.into()),
            status: ReportedStatus::Open(Progress::Pending),
            reason: None,
            hash: None,
            nonce: None,
            from: Some("0xf39fd6e51aad88f6f4ce6ab8827279cfffb92266".into()),
            to: Some(TO.into()),
            value: Some(U256::from(7)),
            data: Some("0xab".into()),
            gas_limit: Some(60000),
            created_at: Some(Timestamp(at)),
            confirmed_at: None,
            block_number: None,
            raw: json!({}),
        }
    }

    /// A submission of unknown outcome, the list that was read, and what is known of equal claims.
    struct Question {
        search: RelayerListing,
        unknown: UnknownOutcome,
        call: Call,
        bound: Vec<&'static str>,
        rivals: Vec<Call>,
        over: bool,
    }

    impl Question {
        fn about(records: Vec<Report>, oldest: Option<i64>) -> Self {
            let skew = Duration::from_secs(30);
            let (oldest, read_at) = (oldest.map(Timestamp), Timestamp(CLAIMED_AT + 100));
            let search = RelayerListing {
                records,
                oldest,
                unproven: None,
                kept_since: None,
                behind: skew,
                ahead: skew,
                signed: Vec::new(),
                read_at,
            };
            let unknown = UnknownOutcome {
                reason: "t".into(),
                open_until: Timestamp(0),
                kind: UnknownCause::Silent,
                absent_since: None,
            };
            Self { search, unknown, call: call(), bound: Vec::new(), rivals: Vec::new(), over: true }
        }

        fn bound(mut self, bound: &[&'static str]) -> Self {
            self.bound = bound.to_vec();
            self
        }

        fn claim(&self) -> Claim {
            Claim {
                consumer: ConsumerId("c".into()),
                token: Uuid::nil(),
                relayer: RelayerUrl("http://r".into()),
                account: None,
                at: Timestamp(CLAIMED_AT),
                unknown: Some(self.unknown.clone()),
            }
        }

        fn judged(&self) -> String {
            let claim = self.claim();
            let bound = self.bound.iter().map(|id| RelayerTxId((*id).into())).collect();
            let case = LostSubmission {
                call: &self.call,
                claim: &claim,
                unknown: &self.unknown,
                slip: Duration::ZERO,
                over: self.over,
                timings: &Timings::DEFAULT,
            };
            match self.search.judge(case, &bound, EqualClaims::Calls(&self.rivals)) {
                Finding::Bind(record) => format!("bind {}", record.tx_id),
                other => format!("{other:?}"),
            }
        }
    }

    fn judged(records: Vec<Report>, oldest: Option<i64>, bound: &[&'static str]) -> String {
        Question::about(records, oldest).bound(bound).judged()
    }

    #[test]
    fn the_oldest_free_match_since_the_claim_is_it() {
        let records =
            || vec![record("old", CLAIMED_AT - 30_001), record("a", CLAIMED_AT - 29_000), record("b", CLAIMED_AT + 5)];
        assert_eq!(judged(records(), None, &[]), "bind a");
        assert_eq!(judged(records(), None, &["a"]), "bind b");
        assert_eq!(judged(records(), Some(CLAIMED_AT - 30_001), &["a", "b"]), "Absent");
    }

    #[test]
    fn what_may_be_it_forbids_a_resend() {
        let mut without_value = record("flat", CLAIMED_AT);
        without_value.value = None;
        let mut no_op = record("no-op", CLAIMED_AT);
        (no_op.to, no_op.value, no_op.data, no_op.gas_limit) =
            (no_op.from.clone(), Some(U256::ZERO), Some("0x".into()), Some(21000));
        let mut filler = no_op.clone();
        filler.reason = Some("Gap-filling NOOP for nonce 1".into());
        let mut other_gas = record("other", CLAIMED_AT);
        other_gas.gas_limit = Some(60001);
        let long_ago = Some(CLAIMED_AT - 60_000);
        assert!(judged(vec![without_value], long_ago, &[]).starts_with("Unproven"));
        assert!(judged(vec![no_op.clone()], long_ago, &[]).starts_with("Unproven"));
        assert_eq!(judged(vec![no_op], long_ago, &["no-op"]), "Absent");
        assert_eq!(judged(vec![filler], long_ago, &[]), "Absent");
        assert_eq!(judged(vec![other_gas], long_ago, &[]), "Absent");
    }

    #[test]
    fn a_no_op_is_a_gap_filler_by_its_time_whatever_its_reason_says() {
        let no_op = |at| {
            let from = record("no-op", at).from;
            let (value, data, gas_limit) = (Some(U256::ZERO), Some("0x".into()), Some(21000));
            // The relayer has overwritten the reason that named it.
            let reason = Some("Nonce 158 consumed externally".into());
            vec![Report { to: from, value, data, gas_limit, reason, ..record("no-op", at) }]
        };
        // The longest submission, and the relayer's clock 30 s ahead of ours.
        let over = CLAIMED_AT + 65_000 + 30_000;
        let long_ago = Some(CLAIMED_AT - 60_000);
        assert!(judged(no_op(over), long_ago, &[]).starts_with("Unproven"), "it may have replaced the submission");
        assert_eq!(judged(no_op(over + 1), long_ago, &[]), "Absent", "stored after the submission was over");
        assert_eq!(judged(no_op(CLAIMED_AT - 30_001), long_ago, &[]), "Absent", "stored before the claim");
    }

    /// What an operator made of the record at the relayer does not matter: it keeps its time.
    #[test]
    fn a_record_stored_while_the_submission_could_arrive_may_have_been_it() {
        let question = Question::about(vec![], None);
        let claim = question.claim();
        let may_be = |at: Option<i64>| {
            question.search.may_have_become(at.map(Timestamp), &claim, Duration::ZERO, &Timings::DEFAULT)
        };
        assert!(may_be(Some(CLAIMED_AT - 30_000)) && may_be(Some(CLAIMED_AT + 65_000 + 30_000)) && may_be(None));
        assert!(!may_be(Some(CLAIMED_AT - 30_001)), "stored before the claim");
        assert!(!may_be(Some(CLAIMED_AT + 65_000 + 30_001)), "stored after the submission was over");
    }

    #[test]
    fn a_silent_relayer_must_show_something_from_before() {
        for (silent, ours, oldest, absent) in [
            (false, None, None, true),
            (true, None, None, false),
            (true, None, Some(CLAIMED_AT), false),
            (true, Some(CLAIMED_AT - 5), None, true),
            (true, Some(CLAIMED_AT + 5), None, false),
            (true, None, Some(CLAIMED_AT - 60_000), true),
        ] {
            let mut question = Question::about(vec![], oldest);
            question.unknown.kind = if silent { UnknownCause::Silent } else { UnknownCause::Orphaned };
            question.search.kept_since = ours.map(Timestamp);
            assert_eq!(question.judged() == "Absent", absent, "{silent} {ours:?} {oldest:?}");
        }
    }

    #[test]
    fn a_list_that_does_not_prove_itself_proves_no_absence_but_what_it_shows_counts() {
        let mut question = Question::about(vec![], Some(CLAIMED_AT - 60_000));
        question.search.unproven = Some("not sorted");
        assert!(question.judged().starts_with("Unproven"));
        let mut question = Question::about(vec![record("a", CLAIMED_AT)], Some(CLAIMED_AT - 60_000));
        question.search.unproven = Some("not sorted");
        assert_eq!(question.judged(), "bind a");
    }

    #[test]
    fn a_relayer_whose_clock_is_behind_dates_the_record_before_the_claim() {
        let mut question = Question::about(vec![record("a", CLAIMED_AT - 90_000)], Some(CLAIMED_AT - 120_000));
        assert_eq!(question.judged(), "Absent");
        question.search.behind = Duration::from_secs(120);
        assert_eq!(question.judged(), "bind a");
    }

    #[test]
    fn a_record_that_an_equal_one_may_look_for_is_taken_only_when_ours_cannot_come_any_more() {
        let long_ago = Some(CLAIMED_AT - 60_000);
        let mut question = Question::about(vec![record("a", CLAIMED_AT), record("b", CLAIMED_AT + 5)], long_ago);
        question.rivals = vec![call()];
        assert_eq!(question.judged(), "bind a");
        question.over = false;
        assert_eq!(question.judged(), "Absent", "so far");
        question.rivals.clear();
        assert_eq!(question.judged(), "bind a");
    }

    #[test]
    fn a_record_that_an_equal_one_may_look_for_is_not_taken_from_a_relayer_that_may_have_forgotten_ours() {
        let mut question = Question::about(vec![record("a", CLAIMED_AT)], None);
        question.rivals = vec![call()];
        assert!(question.judged().starts_with("Unproven"), "{}", question.judged());
        question.search.kept_since = Some(Timestamp(CLAIMED_AT - 5));
        assert_eq!(question.judged(), "bind a");
    }

    #[test]
    fn a_call_without_gas_limit_leaves_records_of_calls_with_one_for_last() {
        let mut estimated = record("estimated", CLAIMED_AT + 5);
        estimated.gas_limit = Some(48_000);
        let mut question = Question::about(vec![record("named", CLAIMED_AT), estimated], Some(CLAIMED_AT - 60_000));
        let unnamed = Call { gas_limit: None, ..call() };
        (question.call, question.rivals) = (unnamed.clone(), vec![call(), unnamed]);
        assert_eq!(question.judged(), "bind estimated");
        question.bound = vec!["estimated"];
        assert_eq!(question.judged(), "bind named");
    }

    #[test]
    fn a_record_that_failed_unsigned_is_left_for_last() {
        let mut unsigned = record("unsigned", CLAIMED_AT);
        (unsigned.status, unsigned.raw) = (ReportedStatus::Failed, json!({ "nonce": null }));
        let long_ago = Some(CLAIMED_AT - 60_000);
        assert_eq!(judged(vec![unsigned.clone(), record("b", CLAIMED_AT + 5)], long_ago, &[]), "bind b");
        let mut question = Question::about(vec![unsigned], long_ago);
        assert_eq!(question.judged(), "bind unsigned");
        question.over = false;
        assert_eq!(question.judged(), "Absent", "so far");
    }
}
