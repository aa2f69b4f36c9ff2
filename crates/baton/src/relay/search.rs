//! What a relayer's own list says about a submission whose outcome nobody knows (pure). The judgement here is all there
//! is between a lost answer and a double payment; the reasons for each rule are in ADR 4.
//!
//! [`super::doubt`] reads the list, asks what has to be asked and acts on the judgement.

use std::collections::HashSet;
use std::time::Duration;

use super::call::Call;
use super::report::Report;
use super::transaction::{Claim, Doubt, RelayerTxId};
use crate::timestamp::Timestamp;

/// What was read of a relayer's list.
#[derive(Debug, Clone)]
pub struct Search {
    /// Records that may matter, oldest first.
    pub records: Vec<Report>,
    /// When the oldest record that was seen was made, whether or not it matters.
    pub oldest: Option<Timestamp>,
    /// Whether the list was read far enough back.
    pub complete: bool,
    /// How far the relayer's clock may be from ours.
    pub skew: Duration,
}

/// A submission in doubt.
#[derive(Debug, Clone, Copy)]
pub struct Case<'a> {
    /// What was, or was not, submitted.
    pub call: &'a Call,
    /// By whom and when.
    pub claim: &'a Claim,
    /// Why nobody knows.
    pub doubt: &'a Doubt,
    /// How much further off from the relayer's clock the claim's time may be than a time of now.
    pub slip: Duration,
}

/// What follows from a list.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Judgement<'a> {
    /// This record is it.
    Bind(&'a Report),
    /// It is not there, and would be.
    Absent,
    /// It is not there, which proves nothing unless the relayer still knows what it had before.
    AskMemory,
    /// It is not to be seen, for a reason that proves nothing.
    Unproven(&'static str),
}

/// Whether a relayer still knows what it had before the claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// It does.
    Kept,
    /// It does not.
    Lost,
    /// It could not be asked.
    Unasked,
    /// There is nothing to ask it about.
    Untestable,
}

impl Search {
    /// Whether a record should be kept for these cases.
    pub fn matters<'a>(record: &Report, mut calls: impl Iterator<Item = &'a Call>) -> bool {
        record.is_no_op() || calls.any(|call| call.is_still(record))
    }

    /// Judges one case; `bound` are the records that belong to some row.
    pub fn judge<'a>(&'a self, case: Case<'_>, bound: &HashSet<RelayerTxId>) -> Judgement<'a> {
        let since = case.claim.at - self.skew - case.slip;
        let is_since = |record: &Report| record.created_at.is_none_or(|created| created >= since);
        let free = |record: &&Report| !bound.contains(&record.tx_id) && is_since(record);
        let mut records = self.records.iter().filter(free);
        if let Some(record) = records.clone().find(|record| case.call.matches(record)) {
            return Judgement::Bind(record);
        }
        if !self.complete {
            return Judgement::Unproven("the relayer's list is too long to search");
        }
        if records.any(|record| may_stand_for(record, case.call)) {
            return Judgement::Unproven("the relayer has a record that may be this one, or a no-op in its place");
        }
        if self.oldest.is_some_and(|oldest| oldest < since) {
            return Judgement::Absent;
        }
        Judgement::AskMemory
    }
}

impl Case<'_> {
    /// The end of [`Judgement::AskMemory`].
    pub fn judge_memory(self, memory: Memory) -> Judgement<'static> {
        match memory {
            Memory::Kept => Judgement::Absent,
            Memory::Lost => Judgement::Unproven("the relayer has forgotten transactions that it had before"),
            Memory::Unasked => Judgement::Unproven("the relayer could not be asked whether it remembers"),
            // If it fell silent it may have died with all it knew; if it answered, or only our own consumer died,
            // there is no reason to suspect it.
            Memory::Untestable if self.doubt.silent => {
                Judgement::Unproven("the relayer fell silent and shows nothing from before")
            }
            Memory::Untestable => Judgement::Absent,
        }
    }
}

/// Whether a record is not certainly something else: a field is missing, or a no-op stands where some call was.
fn may_stand_for(record: &Report, call: &Call) -> bool {
    let filler = record.reason.as_deref().unwrap_or_default().starts_with("Gap-filling");
    let other_gas = matches!((call.gas_limit, record.gas_limit), (Some(sent), Some(had)) if sent != had);
    (call.is_still(record) && !other_gas) || (record.is_no_op() && !filler)
}

#[cfg(test)]
mod tests {
    use alloy_primitives::U256;
    use serde_json::json;
    use uuid::Uuid;

    use super::super::call::DirectRequest;
    use super::super::report::ReportedStatus;
    use super::super::transaction::{ConsumerId, Progress, RelayerUrl};
    use super::*;

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
            raw: json!({}),
        }
    }

    fn judged(records: Vec<Report>, oldest: Option<i64>, bound: &[&str]) -> String {
        let search = Search { records, oldest: oldest.map(Timestamp), complete: true, skew: Duration::from_secs(30) };
        let doubt = Doubt { reason: "t".into(), open_until: Timestamp(0), silent: true, absent_since: None };
        let claim = Claim {
            consumer: ConsumerId("c".into()),
            token: Uuid::nil(),
            relayer: RelayerUrl("http://r".into()),
            at: Timestamp(CLAIMED_AT),
            doubt: Some(doubt.clone()),
        };
        let bound = bound.iter().map(|id| RelayerTxId((*id).into())).collect();
        match search.judge(Case { call: &call(), claim: &claim, doubt: &doubt, slip: Duration::ZERO }, &bound) {
            Judgement::Bind(record) => format!("bind {}", record.tx_id),
            other => format!("{other:?}"),
        }
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
    fn a_list_that_does_not_reach_back_proves_nothing_by_itself() {
        assert_eq!(judged(vec![], None, &[]), "AskMemory");
        assert_eq!(judged(vec![], Some(CLAIMED_AT), &[]), "AskMemory");
    }

    #[test]
    fn memory_that_cannot_be_tested_is_believed_only_of_a_relayer_that_answered() {
        for (silent, memory, absent) in [
            (false, Memory::Kept, true),
            (true, Memory::Kept, true),
            (false, Memory::Lost, false),
            (false, Memory::Unasked, false),
            (false, Memory::Untestable, true),
            (true, Memory::Untestable, false),
        ] {
            let doubt = Doubt { reason: "t".into(), open_until: Timestamp(0), silent, absent_since: None };
            let claim = Claim {
                consumer: ConsumerId("c".into()),
                token: Uuid::nil(),
                relayer: RelayerUrl("http://r".into()),
                at: Timestamp(0),
                doubt: None,
            };
            let judgement =
                Case { call: &call(), claim: &claim, doubt: &doubt, slip: Duration::ZERO }.judge_memory(memory);
            assert_eq!(judgement == Judgement::Absent, absent, "{silent} {memory:?}");
        }
    }
}
