//! What must hold: at every save, at every write to the network, at every record that a relayer stores, at every read,
//! and once everything has come to rest.

use baton::relay::state::transaction::{Claim, ConsumerId, FailedBy, Status, Transaction};
use baton::timestamp::Timestamp;
use relayer_sim::{Audit, Status as RecordStatus};

use super::chain::{ChainTransaction, EvmChain};
use super::setup::{Fault, Mutation};
use super::world::{CLOCK_SKEW, Effect, RETENTION, TIMINGS, World, relayer_index};

impl World {
    /// A save, before it is made. `by` is the consumer that saves; none: the API or an operator.
    pub fn check_save(
        &mut self,
        index: usize,
        before: &Transaction,
        next: &Transaction,
        by: Option<&ConsumerId>,
        resolved: bool,
    ) {
        if let (Some(claim), Some(by)) = (&before.claim, by)
            && next.claim.is_none()
            && claim.consumer != *by
            && !self.is_late_answer(index, claim, next)
        {
            self.fail(format!("t{index}: {by} ended the claim of {}", claim.consumer));
        }
        if let (Some(claim), Some(now_claim)) = (&before.claim, &next.claim)
            && claim.unknown.is_none()
            && claim.token != now_claim.token
            // Earlier, its owner may have had no heartbeat for lack of answers.
            && self.unanswered_claims.iter().any(|(token, at)| *token == claim.token && self.now - at > 60_000)
            && !(self.was_made_with(Fault::Freeze) || self.was_made_with(Fault::Panic))
            && self.processes.iter().any(|process| process.id == claim.consumer && process.alive && !process.starved)
        {
            self.fail(format!("t{index}: {} left a claim under which it sent nothing", claim.consumer));
        }
        if before.claim.is_some() && next.claim.is_none() && by.is_none() && !resolved && next.status != Status::Failed
        {
            self.fail(format!("t{index}: the API ended a claim"));
        }
        let (was, is) = ((before.replays, before.status.rank()), (next.replays, next.status.rank()));
        if is < was || (was == is && before.status.is_final() && before.status != next.status) {
            self.fail(format!("t{index}: went back from {} to {}", before.status, next.status));
        }
        if !before.status.is_final() && matches!(next.status, Status::Confirmed | Status::Success) {
            self.check_confirmed(index, next);
        }
        if next.failed_by == Some(FailedBy::Consumer) && before.failed_by.is_none() && self.is_excusable(index, next) {
            self.truth[index].excusable = true;
        }
        if let Some(binding) = &next.binding {
            let known = self.bound_ever.iter().find(|(tx_id, _)| *tx_id == binding.tx_id).map(|(_, owner)| *owner);
            match known {
                None => self.bound_ever.push((binding.tx_id.clone(), next.id)),
                Some(owner) if owner != next.id => {
                    self.fail(format!("{} is bound to t{index} and another row", binding.tx_id));
                }
                Some(_) => {}
            }
        }
    }

    /// Whether a save ends a claim of unknown outcome by a record that its relayer really stored for this row's call: the
    /// answer to the submission came after the claim was taken over.
    fn is_late_answer(&self, index: usize, claim: &Claim, next: &Transaction) -> bool {
        let Some(binding) = next.binding.as_ref().filter(|binding| binding.relayer == claim.relayer) else {
            return false;
        };
        let node = &self.nodes[relayer_index(&claim.relayer)];
        let stored = node.relayer.audit().iter().zip(&node.effects_stored);
        let is_own =
            |(audit, effect): (&Audit, &Effect)| audit.id == binding.tx_id.0 && *effect == self.truth[index].effect;
        claim.unknown.is_some() && stored.into_iter().any(is_own)
    }

    /// A row becomes final: with a chain its call must be in a block now.
    fn check_confirmed(&mut self, index: usize, row: &Transaction) {
        let Some(chain) = &self.evm else { return };
        let hash = row.hash.as_deref().unwrap_or_default();
        let mined = chain.mined(&self.truth[index].effect).any(|known| format!("{:#x}", known.hash) == hash);
        if !mined {
            self.fail(format!("t{index} becomes {}, and the chain does not have its call", row.status));
        }
    }

    /// A submission leaves our process.
    pub fn check_written(&mut self, node: usize, effect: &Effect, fence: Option<i64>) {
        let now = self.now;
        if fence.is_none_or(|fence| now >= fence) {
            self.fail(format!("r{node}: a submission is written after its send fence"));
        }
        let gasless = self.truth.iter().find(|truth| truth.effect == *effect).and_then(|truth| truth.gasless);
        let Some((signer, nonce, deadline)) = gasless else { return };
        // The deadline is checked before the claim; the fence bounds the time from there.
        if now > (deadline + 1) * 1000 + TIMINGS.send_window.as_millis() as i64 {
            self.fail(format!("r{node}: a submission is written {} ms after its deadline", now - deadline * 1000));
        }
        let Some(before) = nonce.checked_sub(1) else { return };
        let is_before =
            |truth: &&super::world::Truth| truth.gasless.is_some_and(|(by, taken, _)| (by, taken) == (signer, before));
        let in_order = self.truth.iter().filter(is_before).any(|truth| {
            let mined = self.evm.as_ref().is_some_and(|chain| chain.mined(&truth.effect).next().is_some());
            mined
                || self.nodes.iter().enumerate().any(|(place, known)| {
                    known.records_of(&truth.effect).any(|record| {
                        let executed = record.status == RecordStatus::Confirmed;
                        executed || (place == node && record.nonce.is_some())
                    })
                })
        });
        if !in_order {
            self.fail(format!("r{node}: nonce {nonce} of signer {signer} is submitted before nonce {before}"));
        }
    }

    /// The effects that have taken place or may still do so, against the transactions accepted.
    pub fn check_effects(&mut self, effect: &Effect) {
        if self.excused.contains(effect) {
            return;
        }
        let stored: usize = self.nodes.iter().map(|node| node.effects(effect, self.evm.as_ref()).count()).sum();
        let wanted = |index: &usize| {
            let refused = self.rows[*index].failed_by == Some(FailedBy::Intake);
            self.truth[*index].effect == *effect && !refused && !self.truth[*index].history
        };
        let accepted = (0..self.rows.len()).filter(wanted).count();
        if stored > accepted {
            self.fail(format!("double: {stored} submissions stored for {accepted} accepted transactions"));
        }
    }

    /// A reader has seen a status. `replays` is the row's count when the reader began.
    pub fn check_read(&mut self, index: usize, replays: u32, status: Status) {
        let truth = &mut self.truth[index];
        let sees = (replays, status.rank());
        let (before, rank) = truth.seen;
        if replays == before && self.rows[index].replays == replays && status.rank() < rank {
            self.fail(format!("a reader saw t{index} go back: rank {rank}, then {}", status.rank()));
        } else {
            truth.seen = truth.seen.max(sees);
        }
    }

    pub fn is_within_retention(&self, at: Timestamp) -> bool {
        Timestamp(self.now).since(at) + CLOCK_SKEW < RETENTION
    }

    /// Whether nothing can be learned about a row of unknown outcome, given what really happened.
    fn is_rightly_unknown(&mut self, index: usize) -> Result<(), String> {
        let row = self.rows[index].clone();
        let now = self.now;
        if self.waits_for_job(index) {
            self.counters.waits_for_job += 1;
            return Ok(());
        }
        if !row.outcome_unknown() {
            return Err(format!("t{index} is {} and nothing works on it", row.status));
        }
        if self.is_contested(index) {
            self.counters.contested += 1;
            return Ok(());
        }
        if let (Some(chain), Some(_)) = (&self.evm, &row.binding) {
            return self.is_never_on_chain(index, chain).map(|()| self.counters.never_on_chain += 1);
        }
        if let Some(binding) = &row.binding {
            let node = &self.nodes[relayer_index(&binding.relayer)];
            if node.relayer.record(now, &binding.tx_id.0).is_none() {
                return Ok(());
            }
            return Err(format!("t{index} counts as forgotten, and its relayer knows it"));
        }
        let Some(claim) = &row.claim else { return Err(format!("t{index} is of unknown outcome without a claim")) };
        let node = &self.nodes[relayer_index(&claim.relayer)];
        if !self.is_within_retention(claim.at) {
            return Ok(());
        }
        if self.evm.is_some() {
            return Err(format!("t{index} stays of unknown outcome, and the chain is there"));
        }
        // A no-op that may stand for the submission; one that was made later, or says its name, does not.
        let late = claim.open_until(&TIMINGS).0 + CLOCK_SKEW.as_millis() as i64 + 1000;
        let free_no_op = node.relayer.records().any(|record| {
            let named = record.status_reason.as_deref().is_some_and(|reason| reason.starts_with("Gap-filling"));
            let skew = 2 * node.relayer.faults().clock_offset_ms.abs();
            let bound = self.bound_ever.iter().any(|(tx_id, _)| tx_id.0 == record.id);
            record.is_no_op() && !bound && !named && record.created_at_ms <= late + skew
        });
        if node.epoch > 0 || free_no_op {
            return Ok(());
        }
        // The relayer has deleted records only by its retention. Of one that was bound long after it was made, that looks as
        // if the relayer had lost it.
        let lost = |other: &Transaction| {
            let binding = other.binding.as_ref().filter(|binding| binding.relayer == claim.relayer);
            let since = binding.and_then(|binding| binding.forgotten_since).filter(|_| !other.is_only_silent());
            since.is_some_and(|since| since >= claim.at)
        };
        if self.rows.iter().any(|other| !other.status.is_final() && lost(other)) {
            self.counters.witness_expired += 1;
            return Ok(());
        }
        let witness = self.last_bound(&claim.relayer, claim.at, 1).pop();
        let silent = claim.unknown.as_ref().is_some_and(|unknown| unknown.kind.is_silence());
        match witness.filter(|binding| self.is_within_retention(binding.at)) {
            None if silent => {
                self.counters.untestable += 1;
                return Ok(());
            }
            // Bound long after the relayer was done with it: its retention is over before ours.
            Some(binding) if node.relayer.record(now, &binding.tx_id.0).is_none() => {
                self.counters.witness_expired += 1;
                return Ok(());
            }
            _ => {}
        }
        Err(format!("t{index} stays of unknown outcome, and its relayer remembers everything"))
    }

    /// Whether a row waits for an equal one whose job its relayer has lost: it has no nonce yet.
    fn is_contested(&self, index: usize) -> bool {
        let relayer = |row: &Transaction| {
            let claimed = row.claim.as_ref().map(|claim| claim.relayer.clone());
            claimed.or_else(|| row.binding.as_ref().map(|binding| binding.relayer.clone()))
        };
        let row = &self.rows[index];
        let mut others = self.rows.iter().enumerate().filter(|(other, _)| *other != index);
        others.any(|(place, other)| {
            let equal = self.truth[place].effect == self.truth[index].effect && relayer(other) == relayer(row);
            equal && !other.status.is_final() && self.waits_for_job(place)
        })
    }

    /// Whether a row's relayer has stored it and lost its job: it is `pending` there for good.
    pub fn waits_for_job(&self, index: usize) -> bool {
        let Some(binding) = &self.rows[index].binding else { return false };
        let record = self.nodes[relayer_index(&binding.relayer)].relayer.record(self.now, &binding.tx_id.0);
        self.evm.is_some() && record.is_some_and(|record| record.status == RecordStatus::Pending)
    }

    /// Whether a bound row is not on the chain, and its relayer does not tell its end.
    fn is_never_on_chain(&self, index: usize, chain: &EvmChain) -> Result<(), String> {
        let Some(binding) = &self.rows[index].binding else { return Ok(()) };
        let account = relayer_index(&binding.relayer);
        // Equal rows are interchangeable.
        let taken = |known: &&ChainTransaction| {
            let hash = format!("{:#x}", known.hash);
            self.rows.iter().any(|row| row.status.is_final() && row.hash.as_ref() == Some(&hash))
        };
        if !chain.mined_by(account, &self.truth[index].effect).all(|known| taken(&known)) {
            return Err(format!("t{index} stays of unknown outcome, and the chain has its call"));
        }
        match self.nodes[relayer_index(&binding.relayer)].relayer.record(self.now, &binding.tx_id.0) {
            Some(record) => Err(format!("t{index} stays of unknown outcome, and its relayer says {:?}", record.status)),
            None => Ok(()),
        }
    }

    /// What rows show, against what the chain has executed.
    fn check_chain(&mut self) {
        let Some(chain) = self.evm.take() else { return };
        self.counters.executed += chain.transactions().filter(|known| known.block.is_some()).count() as u64;
        let mut hashes: Vec<&str> = Vec::new();
        let mut violations = Vec::new();
        for (index, row) in self.rows.iter().enumerate().filter(|(index, _)| !self.truth[*index].history) {
            if !matches!(row.status, Status::Confirmed | Status::Success) {
                continue;
            }
            let effect = &self.truth[index].effect;
            let hash = row.hash.as_deref().unwrap_or_default();
            let executed = chain.mined(effect).any(|known| !known.reverts && format!("{:#x}", known.hash) == hash);
            if !executed {
                violations.push(format!("t{index} is {}, and the chain does not have its call", row.status));
            }
            if hashes.contains(&hash) {
                violations.push(format!("t{index} is {} by another row's transaction", row.status));
            }
            hashes.push(hash);
        }
        for effect in self.truth.iter().filter(|truth| !truth.history).map(|truth| &truth.effect) {
            let rows = (0..self.rows.len()).filter(|index| self.truth[*index].effect == *effect);
            let may_own = |index: &usize| {
                let row = &self.rows[*index];
                row.status != Status::Failed || row.failed_by == Some(FailedBy::Operator)
            };
            let owners = rows.filter(may_own).count();
            let executed = chain.mined(effect).filter(|known| !known.reverts).count();
            if executed > owners {
                violations.push(format!("a failed row was executed: {executed} calls on the chain, {owners} rows"));
            }
        }
        self.evm = Some(chain);
        for violation in violations {
            self.fail(violation);
        }
    }

    /// What must hold once everything has come to rest.
    pub fn check_end(&mut self) {
        for index in 0..self.rows.len() {
            let row = self.rows[index].clone();
            if self.truth[index].promised == Some(true) && row.failed_by == Some(FailedBy::Intake) {
                self.fail(format!("t{index} was accepted with 202 and then taken back"));
            }
            if !row.status.is_final() {
                self.counters.left_unknown += 1;
                if let Err(why) = self.is_rightly_unknown(index) {
                    self.fail(format!("lost: {why}"));
                }
                continue;
            }
            if !self.truth[index].history {
                self.check_final(index, &row);
            }
        }
        self.check_chain();
        let effects: Vec<Effect> = self.truth.iter().map(|truth| truth.effect.clone()).collect();
        for effect in &effects {
            self.check_effects(effect);
            if self.evm.is_some() {
                continue;
            }
            let bound = |id: &str| self.bound_ever.iter().any(|(tx_id, _)| tx_id.0 == id);
            let stored = self.nodes.iter().flat_map(|node| node.effects(effect, self.evm.as_ref()));
            let orphans = stored.filter(|id| !bound(id)).count();
            let may_own = |index: &usize| {
                let row = &self.rows[*index];
                self.truth[*index].effect == *effect
                    && (!row.status.is_final() && row.claim.is_some() || row.failed_by == Some(FailedBy::Operator))
            };
            let owners = (0..self.rows.len()).filter(may_own).count();
            if orphans > owners && !self.excused.contains(effect) {
                self.fail(format!("double: {orphans} submissions belong to no row, {owners} rows may own them"));
            }
        }
    }

    fn check_final(&mut self, index: usize, row: &Transaction) {
        let node = row.binding.as_ref().map(|binding| &self.nodes[relayer_index(&binding.relayer)]);
        let record =
            node.zip(row.binding.as_ref()).and_then(|(node, binding)| Some((node, node.find(&binding.tx_id.0)?)));
        let executed = record.map(|(_, record)| record.status == RecordStatus::Confirmed && !record.is_no_op());
        let sent = record.is_some_and(|(node, record)| node.failed_but_sent(record));
        match (row.status, row.failed_by) {
            (Status::Confirmed | Status::Success, _) => {
                self.counters.confirmed += 1;
                if executed != Some(true) && self.evm.is_none() {
                    self.fail(format!("t{index} is {}, and its relayer did not do it", row.status));
                }
            }
            (_, Some(FailedBy::Relayer)) => {
                self.counters.failed += 1;
                let unverified = row.is_unverified();
                self.counters.unverified += u64::from(unverified);
                if self.evm.is_none() && (executed != Some(false) || sent && !unverified) {
                    self.fail(format!("t{index} failed, and its relayer did it"));
                }
            }
            (_, Some(FailedBy::Consumer)) => {
                self.counters.failed += 1;
                self.check_failed_by_consumer(index, row);
            }
            _ => self.counters.failed += 1,
        }
        let failures = self.item_failures.iter().filter(|effect| **effect == self.truth[index].effect).count();
        if row.status != Status::Failed && row.attempts as usize > failures {
            self.fail(format!("t{index} lost an attempt through no fault of its own"));
        }
    }

    fn check_failed_by_consumer(&mut self, index: usize, row: &Transaction) {
        let truth = &self.truth[index];
        let blamed = self.item_failures.contains(&truth.effect) || truth.panics > 0;
        if !blamed && !truth.excusable {
            self.fail(format!("t{index} failed through no fault of its own"));
        }
        let effect = self.truth[index].effect.clone();
        let own = |id: &str| self.bound_ever.iter().any(|(tx_id, owner)| tx_id.0 == id && *owner == row.id);
        let executed = self.nodes.iter().flat_map(|node| node.effects(&effect, self.evm.as_ref())).any(own);
        if executed && self.mutation != Mutation::NoForwardOnly {
            self.fail(format!("t{index} failed before a relayer took it, and a relayer has it"));
        }
    }

    /// Whether a gasless transaction rightly fails now although the item is not to blame.
    fn is_excusable(&self, index: usize, row: &Transaction) -> bool {
        self.truth[index].gasless.is_some_and(|(signer, nonce, deadline)| {
            let expired = row.updated_at.0 / 1000 > deadline;
            let predecessor_failed = (0..self.rows.len()).any(|other| {
                let before = nonce.checked_sub(1).map(|before| (signer, before));
                let is_before = self.truth[other].gasless.map(|(by, taken, _)| (by, taken)) == before;
                before.is_some() && is_before && self.rows[other].status == Status::Failed
            });
            let replaced = self
                .nonces
                .iter()
                .any(|(by, taken, holder)| *by == super::world::signer(signer) && *taken == nonce && *holder != row.id);
            expired || predecessor_failed || replaced || self.executed(signer) > nonce
        })
    }
}
