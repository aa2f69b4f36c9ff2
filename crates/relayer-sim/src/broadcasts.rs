//! What the chain gets from the relayer, and what the relayer learns from a chain that its driver simulates.
//!
//! Without [`SimRelayer::follow_chain`] records end by their plan alone, as if the chain did at once what it was asked.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

use crate::core::SimRelayer;
use crate::on_chain::Signs;
use crate::plan::Step;

/// A transaction that the chain got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broadcast {
    /// Id of the record it was made for.
    pub id: String,
    /// Its nonce.
    pub nonce: u64,
    /// Its hash: 0x-hex.
    pub hash: String,
    /// Its target; none for a contract creation.
    pub to: Option<String>,
    /// Wei in 0x-hex.
    pub value: String,
    /// Call data: 0x-hex.
    pub data: String,
    /// Whether its call reverts once it is mined.
    pub reverts: bool,
}

impl SimRelayer {
    /// Every transaction that the chain got, oldest first, in [`Mode::Audited`](crate::Mode::Audited) only. Two with the
    /// same nonce exclude each other.
    pub fn broadcasts(&self) -> &[Broadcast] {
        &self.broadcasts
    }

    /// From now on a record ends only once the chain has used its nonce, and ends as the chain has it. `used` has the hash
    /// that used each nonce of this relayer's address so far.
    pub fn follow_chain(&mut self, now_ms: i64, used: BTreeMap<u64, String>) {
        self.used = Some(used);
        self.release_jammed(now_ms);
    }

    /// Whether a record's end has to wait for the chain.
    pub(crate) fn is_unmined(&self, place: usize) -> bool {
        let nonce = self.entries[place].record.nonce;
        self.used.as_ref().zip(nonce).is_some_and(|(used, nonce)| !used.contains_key(&nonce))
    }

    /// The step that the chain leaves of a planned one.
    pub(crate) fn as_mined(&self, place: usize, step: Step) -> Step {
        let record = &self.entries[place].record;
        let mined = self.used.as_ref().zip(record.nonce).and_then(|(used, nonce)| Some((used.get(&nonce)?, nonce)));
        let Some((hash, nonce)) = mined else { return step };
        let own = record.hash.as_ref() == Some(hash);
        match step {
            Step::Confirm if !own => Step::FailExecuted,
            // The original was mined before what should have replaced it.
            Step::ConfirmAsNoOp | Step::Cancel if own => Step::Confirm,
            Step::ConfirmAsNoOp | Step::Cancel if *hash != self.other_hash(nonce, "no-op") => Step::FailExecuted,
            step => step,
        }
    }

    /// Hands a record's call to the chain, and the no-op that is to replace it, if its plan has one. `stored` is whether
    /// the record has this hash.
    pub(crate) fn list_call(&mut self, place: usize, stored: bool) {
        let entry = &self.entries[place];
        let (Some(nonce), Some(hash)) = (entry.record.nonce, entry.record.hash.clone()) else { return };
        let hash = if stored { hash } else { self.other_hash(nonce, "unstored") };
        self.list_broadcast(place, nonce, hash);
        let replaces = |(_, step): &(i64, Step)| matches!(step, Step::ConfirmAsNoOp | Step::Cancel);
        if self.entries[place].plan.iter().any(replaces) {
            self.list_no_op(place, "no-op");
        }
    }

    /// Hands a record's call to the chain under this nonce and hash.
    pub(crate) fn list_broadcast(&mut self, place: usize, nonce: u64, hash: String) {
        let entry = &self.entries[place];
        let record = &entry.record;
        let reverts = entry.plan.iter().any(|(_, step)| *step == Step::Revert);
        let (to, value) = (record.to.clone(), record.value.clone());
        let data = record.data.clone().unwrap_or_else(|| "0x".to_owned());
        let id = record.id.clone();
        if self.is_audited() {
            self.broadcasts.push(Broadcast { id, nonce, hash, to, value, data, reverts });
        }
    }

    /// Signs a record's call once more, under another nonce, and hands it to the chain; the record does not change.
    pub(crate) fn broadcast_again(&mut self, place: usize) {
        let nonce = self.take_nonce();
        if let Some(audit) = self.entries[place].audit {
            self.audit[audit].broadcasts += 1;
        }
        let signed = self.sign_on_chain(place, nonce, Signs::TheCall);
        self.send_last_signed(nonce);
        let hash = signed.map_or_else(|| self.hash(nonce), |signed| signed.hash);
        self.list_broadcast(place, nonce, hash);
    }

    /// A record ends although its own nonce was not sent.
    pub(crate) fn leave_gap(&mut self, place: usize, now_ms: i64) {
        if let Some(nonce) = self.entries[place].record.nonce {
            self.open_gap(nonce, now_ms);
        }
    }

    /// Hands a transfer of nothing to itself to the chain, under a record's nonce.
    pub(crate) fn list_no_op(&mut self, place: usize, what: &str) {
        let record = &self.entries[place].record;
        let Some(nonce) = record.nonce else { return };
        let (id, to) = (record.id.clone(), Some(self.address.to_string()));
        let hash = self.other_hash(nonce, what);
        let (value, data) = ("0x0".to_owned(), "0x".to_owned());
        if self.is_audited() {
            self.broadcasts.push(Broadcast { id, nonce, hash, to, value, data, reverts: false });
        }
    }

    /// The hash of the no-op in a record's place, if a driver simulates the chain.
    pub(crate) fn no_op_hash(&self, place: usize) -> Option<String> {
        let nonce = self.entries[place].record.nonce.filter(|_| self.used.is_some())?;
        Some(self.other_hash(nonce, "no-op"))
    }

    /// A made-up hash of another transaction with this nonce.
    pub(crate) fn other_hash(&self, nonce: u64, what: &str) -> String {
        let digest = Sha256::digest(format!("{} {} nonce {nonce} {what}", self.options.seed, self.id));
        format!("0x{}", hex::encode(digest))
    }
}

#[cfg(test)]
mod tests {
    use crate::{Faults, Outcome, RelayerOptions, Reply, SimRelayer, SimRequest, Status};

    use super::*;

    /// A relayer that follows a chain and has accepted one call, some minutes ago.
    fn after(outcome: Outcome) -> SimRelayer {
        let mut relayer = SimRelayer::new(RelayerOptions::new("a"), 7);
        relayer.follow_chain(0, BTreeMap::new());
        relayer.set_faults(0, Faults::with_outcome(outcome));
        let bearer = "Bearer api-key-of-a-0123456789abcdef0123456789";
        let headers = [("authorization", bearer), ("content-type", "application/json")];
        let body = br#"{"to":"0x90F79bf6EB2c4f870365E785982E1f101E93b906","value":1,"speed":"fast"}"#;
        let path = "/api/v1/relayers/a/transactions";
        let request = SimRequest { method: "POST", path, query: "", headers: &headers, body };
        assert!(matches!(relayer.handle(0, &request), Reply::Answer { .. }));
        relayer.advance(300_000);
        relayer
    }

    /// The record's status once the chain has used nonce 0 for this broadcast.
    fn mined(mut relayer: SimRelayer, broadcast: usize) -> Status {
        assert!(!relayer.records().next().unwrap().status.is_final(), "it waits for the chain");
        let Broadcast { nonce, hash, .. } = relayer.broadcasts()[broadcast].clone();
        relayer.follow_chain(300_001, BTreeMap::from([(nonce, hash)]));
        relayer.advance(300_001);
        relayer.records().next().unwrap().status
    }

    #[test]
    fn a_record_ends_as_the_chain_has_it() {
        assert_eq!(mined(after(Outcome::Confirmed), 0), Status::Confirmed);
        assert_eq!(mined(after(Outcome::Canceled), 1), Status::Canceled, "its no-op was mined");
        assert_eq!(mined(after(Outcome::Canceled), 0), Status::Confirmed, "the original was quicker");
        assert_eq!(mined(after(Outcome::FailedButExecuted), 0), Status::Failed);
    }

    #[test]
    fn what_the_chain_gets_is_not_always_what_the_record_says() {
        let sent = |outcome| {
            let relayer = after(outcome);
            let record = relayer.records().next().unwrap().clone();
            let sent = relayer.broadcasts().iter().map(|sent| (sent.nonce, Some(&sent.hash) == record.hash.as_ref()));
            (record.status, sent.collect::<Vec<_>>(), relayer.nonce_gaps().count())
        };
        assert_eq!(sent(Outcome::GivenUp), (Status::Failed, vec![], 1));
        assert_eq!(sent(Outcome::GivenUpButSent), (Status::Failed, vec![(0, false)], 1));
        assert_eq!(sent(Outcome::GivenUpButSentAgain), (Status::Failed, vec![(1, false)], 1));
        assert_eq!(sent(Outcome::ConfirmedUnsent), (Status::Confirmed, vec![], 1));
        assert_eq!(sent(Outcome::FailedUnsignedButSent), (Status::Failed, vec![(0, false)], 0));
        assert!(after(Outcome::FailedUnsignedButSent).records().next().unwrap().never_signed());
    }

    #[test]
    fn a_gap_filler_takes_the_nonce() {
        let mut relayer = after(Outcome::GivenUp);
        let id = relayer.add_gap_filler(300_000, false);
        let filler = relayer.broadcasts().last().unwrap();
        assert_eq!((filler.id.as_str(), filler.nonce, relayer.nonce_gaps().count()), (id.as_str(), 0, 0));
    }
}
