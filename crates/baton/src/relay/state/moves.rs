//! The legal moves of a transaction (pure; drawn in `docs/state-machine.md`).
//!
//! Every move takes the row as it is and returns the row as it should be, one version higher, with the steps for its
//! timeline; or a [`MoveRefused`]. A store saves a move only if the row still has the version that the move started
//! from, so each rule below holds across all processes. `confirmed`, `success` and `hash` are set in
//! [`super::apply_report`] alone.

use std::sync::Arc;

use uuid::Uuid;

use super::transaction::{
    Binding, Claim, ConsumerId, FailedBy, Kind, MoveRefused, Moved, NextStep, Progress, RecordLost, RelayerTxId,
    RelayerUrl, Status, Step, Transaction, TransactionId, UnknownCause, UnknownOutcome,
};
use crate::config::Timings;
use crate::mutations::Mutation;
use crate::relay::request::call::DirectRequest;
use crate::relay::request::forward::Forward;
use crate::timestamp::Timestamp;

impl Transaction {
    /// A newly accepted transaction.
    pub fn accepted(
        id: TransactionId,
        request: &DirectRequest,
        api_key: String,
        now: Timestamp,
        timings: &Timings,
    ) -> Self {
        Self {
            id,
            kind: Kind::Direct,
            status: Status::Pending,
            version: 1,
            request: request.to_json().into(),
            imported: false,
            call: request.call.clone(),
            forward: None,
            retry_on_failure: request.retry_on_failure,
            api_key,
            created_at: now,
            updated_at: now,
            confirmed_at: None,
            hash: None,
            block_number: None,
            from: None,
            claim: None,
            binding: None,
            attempts: 0,
            reroutes: 0,
            replays: 0,
            auto_replayed: false,
            avoid: None,
            failed_by: None,
            error_message: None,
            result: None,
            check_at: Some(now + timings.pending_check),
            relayer_says: None,
            cancel_requested_at: None,
        }
    }

    /// A newly accepted gasless transaction.
    pub fn accepted_gasless(
        id: TransactionId,
        forward: &Arc<Forward>,
        api_key: String,
        now: Timestamp,
        timings: &Timings,
    ) -> Self {
        let request = DirectRequest { call: forward.call(), retry_on_failure: forward.gasless.retry_on_failure };
        Self {
            kind: Kind::Gasless,
            request: forward.to_json().into(),
            forward: Some(Arc::clone(forward)),
            ..Self::accepted(id, &request, api_key, now, timings)
        }
    }

    /// Takes the right to submit to `relayer`, before any effect: the submission may begin as soon as this is stored.
    pub fn claim(
        &self,
        consumer: &ConsumerId,
        token: Uuid,
        relayer: &RelayerUrl,
        because: &str,
        now: Timestamp,
        timings: &Timings,
    ) -> Result<Moved, MoveRefused> {
        self.not_final()?;
        if self.binding.is_some() {
            return Err(MoveRefused::Bound);
        }
        if self.claim.is_some() {
            return Err(MoveRefused::Claimed);
        }
        if self.imported {
            return Err(MoveRefused::NotPossible("a status lookup imported it; Baton never sends it"));
        }
        let mut next = self.next(now);
        next.claim = Some(Claim {
            consumer: consumer.clone(),
            token,
            relayer: relayer.clone(),
            account: None,
            at: now,
            unknown: None,
        });
        next.check_at = Some(now + timings.claim_check);
        Ok(moved(
            next,
            "claimed",
            format!("by {consumer}, attempt {}, routed to {relayer}: {because}", self.attempts + 1),
        ))
    }

    /// Gives the claim back: the relayer certainly did not take it.
    pub fn release(&self, token: Uuid, reason: &str, now: Timestamp, timings: &Timings) -> Result<Moved, MoveRefused> {
        let claim = self.claimed_with(token)?;
        let detail = format!("{} did not take it: {reason}", claim.relayer);
        let mut next = self.next(now);
        next.claim = None;
        next.check_at = Some(now + timings.pending_check);
        Ok(moved(next, "not-taken", detail))
    }

    /// Records that the claimed relayer has it, under its own id.
    pub fn bind(
        &self,
        token: Uuid,
        tx_id: &RelayerTxId,
        from: Option<&str>,
        how: &str,
        now: Timestamp,
        timings: &Timings,
    ) -> Result<Moved, MoveRefused> {
        let relayer = self.claimed_with(token)?.relayer.clone();
        let mut next = self.next(now);
        let detail = format!("{relayer} has it as {tx_id} ({how})");
        next.claim = None;
        next.binding = Some(Binding {
            relayer,
            tx_id: tx_id.clone(),
            at: now,
            progress: Progress::Pending,
            nonce: None,
            forgotten_since: None,
        });
        // Not what an earlier relayer had.
        next.from = from.map(str::to_owned);
        next.status = Status::Submitted;
        next.avoid = None;
        next.error_message = None;
        next.relayer_says = None;
        next.cancel_requested_at = None;
        next.check_at = Some(now + timings.submitted_check);
        Ok(moved(next, "submitted", detail))
    }

    /// Records that it is unknown whether the relayer took it. The claim stays.
    pub fn mark_unknown(
        &self,
        token: Uuid,
        reason: &str,
        kind: UnknownCause,
        now: Timestamp,
        timings: &Timings,
    ) -> Result<Moved, MoveRefused> {
        let claim = self.claimed_with(token)?;
        let relayer = claim.relayer.clone();
        let open_until = match kind {
            UnknownCause::Answered | UnknownCause::ClientError => now,
            UnknownCause::Silent | UnknownCause::Orphaned => claim.open_until(timings),
            UnknownCause::Exchanged => now + timings.longest_submission(),
        };
        let mut next = self.next(now);
        if let Some(claim) = &mut next.claim {
            claim.unknown = Some(UnknownOutcome { reason: reason.to_owned(), open_until, kind, absent_since: None });
        }
        next.check_at = Some(now + timings.unknown_check);
        Ok(moved(next, "outcome-unknown", format!("at {relayer}: {reason}")))
    }

    /// Takes over a claim whose outcome is unknown, or whose owner can no longer be working on it.
    pub fn take_over(
        &self,
        consumer: &ConsumerId,
        token: Uuid,
        owner_gone: bool,
        now: Timestamp,
        timings: &Timings,
    ) -> Result<Moved, MoveRefused> {
        self.not_final()?;
        let claim = self.claim.as_ref().ok_or(MoveRefused::NotPossible("there is no claim to take over"))?;
        if claim.unknown.is_none() && !owner_gone && now < claim.open_until(timings) {
            return Err(MoveRefused::NotOurClaim);
        }
        let unknown = claim.unknown.clone().unwrap_or_else(|| UnknownOutcome {
            reason: format!("its consumer {} stopped before the answer was stored", claim.consumer),
            open_until: claim.open_until(timings),
            kind: UnknownCause::Orphaned,
            absent_since: None,
        });
        let newly = claim.unknown.is_none();
        let detail = format!("at {}: {}", claim.relayer, unknown.reason);
        let mut next = self.next(now);
        if let Some(claim) = &mut next.claim {
            claim.consumer = consumer.clone();
            claim.token = token;
            claim.unknown = Some(unknown);
        }
        // Longer than settling it takes, so that consumers do not take it from each other.
        next.check_at = Some(now + timings.claim_check * 3);
        let steps = if newly { vec![Step::new("outcome-unknown", detail)] } else { Vec::new() };
        Ok(Moved::new(next, steps))
    }

    /// Records that the claimed relayer's list, requested at `asked_at`, does not show it. The first such listing starts
    /// the confirmation time; once that has passed, a second one ends the claim and the transaction may be sent again.
    ///
    /// A relayer that was stopped may read a request long after it was sent, at the same time as the first list request.
    /// So the second listing counts only after the longest time that a relayer may work on a request.
    pub fn absent(
        &self,
        token: Uuid,
        asked_at: Timestamp,
        now: Timestamp,
        timings: &Timings,
    ) -> Result<Moved, MoveRefused> {
        let claim = self.claimed_with(token)?;
        let unknown = claim.unknown.as_ref().ok_or(MoveRefused::NotPossible("the claim's outcome is not unknown"))?;
        let relayer = claim.relayer.clone();
        let mut next = self.next(now);
        if asked_at < unknown.open_until {
            next.check_at = Some(unknown.open_until);
            return Ok(Moved::new(next, Vec::new()));
        }
        let confirm = unknown.confirm(timings);
        match unknown.absent_since {
            Some(_) if unknown.is_over(asked_at, timings) => {
                if unknown.kind == UnknownCause::ClientError {
                    next.attempts += 1;
                    next.error_message = Some(unknown.reason.clone());
                }
                next.claim = None;
                next.check_at = Some(now + timings.message_check());
                Ok(moved(next, "absent", format!("{relayer} certainly does not have it; it will be sent again")))
            }
            Some(since) => {
                next.check_at = Some(since + confirm);
                Ok(Moved::new(next, Vec::new()))
            }
            None => {
                if let Some(unknown) = next.claim.as_mut().and_then(|claim| claim.unknown.as_mut()) {
                    unknown.absent_since = Some(now);
                }
                next.check_at = Some(now + confirm);
                Ok(moved(next, "not-listed", format!("{relayer} does not list it; a second listing must confirm that")))
            }
        }
    }

    /// Withdraws an accept whose message did not reach the queue, unless the row has moved since: then a consumer or
    /// relayer already has it, or a duplicate request was answered with it. Only after this move may the API answer
    /// 503: a message that arrives after all finds a failed row.
    pub fn not_queued(&self, now: Timestamp) -> Result<Moved, MoveRefused> {
        self.not_final()?;
        if !self.is_untouched() || self.imported {
            return Err(MoveRefused::NotPossible(
                "a consumer or relayer already has it, or a duplicate request was answered with it",
            ));
        }
        Ok(failed(self.next(now), FailedBy::Intake, "queue unavailable"))
    }

    /// Makes a row that another request is still storing irrevocable, so that a duplicate request can be answered with
    /// it. If its message does not arrive, the reconciler queues it.
    pub fn make_irrevocable(&self, now: Timestamp, timings: &Timings) -> Result<Moved, MoveRefused> {
        if !self.is_untouched() {
            return Err(MoveRefused::NotPossible("it can no longer be withdrawn"));
        }
        self.check_later(now + timings.message_check(), now)
    }

    /// Whether its message is obsolete: a relayer has the transaction, or it succeeded.
    pub fn needs_no_message(&self) -> bool {
        self.status != Status::Failed && (self.binding.is_some() || self.status.is_final())
    }

    /// Whether it has not moved since it was accepted.
    pub fn is_untouched(&self) -> bool {
        self.version == 1
    }

    /// Schedules the next check without any other change.
    pub fn check_later(&self, at: Timestamp, now: Timestamp) -> Result<Moved, MoveRefused> {
        self.not_final()?;
        let mut next = self.next(now);
        next.updated_at = self.updated_at;
        next.check_at = Some(at);
        Ok(Moved::new(next, Vec::new()))
    }

    /// Defers a transaction whose message waits in the queue, so that the reconciler does not queue it again so soon.
    pub fn defer(&self, reason: &str, now: Timestamp, timings: &Timings) -> Result<Moved, MoveRefused> {
        if self.claim.is_some() || self.binding.is_some() {
            return Err(MoveRefused::NotPossible("a consumer or relayer already has it"));
        }
        let mut moved = self.check_later(now + timings.pending_check, now)?;
        moved.steps.push(Step::new("waiting", reason));
        Ok(moved)
    }

    /// Gives up a transaction whose attempts are used up: for good, unless its one automatic replay is still open.
    pub fn exhausted(&self, attempts_max: u32, now: Timestamp, timings: &Timings) -> Result<Moved, MoveRefused> {
        self.not_final()?;
        if self.claim.is_some() || self.binding.is_some() {
            return Err(MoveRefused::NotPossible("a consumer or relayer already has it"));
        }
        if self.attempts < attempts_max {
            return Err(MoveRefused::NotPossible("it has attempts left"));
        }
        let reason = self.error_message.clone().unwrap_or_else(|| "its attempts are used up".to_owned());
        let mut next = self.next(now);
        next.check_at = Some(now + timings.pending_check);
        Ok(give_up(next, &reason))
    }

    /// The item itself was refused: no further attempt can help.
    pub fn refuse(&self, token: Uuid, reason: &str, now: Timestamp, timings: &Timings) -> Result<Moved, MoveRefused> {
        self.claimed_with(token)?;
        let mut next = self.next(now);
        next.claim = None;
        next.attempts += 1;
        next.check_at = Some(now + timings.pending_check);
        Ok(give_up(next, reason))
    }

    /// Fails a transaction that cannot succeed and that no consumer has sent. If the reason `may_pass`, its one automatic
    /// replay is used first.
    pub fn fail_unsent(
        &self,
        reason: &str,
        may_pass: bool,
        now: Timestamp,
        timings: &Timings,
    ) -> Result<Moved, MoveRefused> {
        self.not_final()?;
        if self.binding.is_some() {
            return Err(MoveRefused::Bound);
        }
        if self.claim.is_some() {
            return Err(MoveRefused::Claimed);
        }
        let mut next = self.next(now);
        next.attempts += 1;
        next.check_at = Some(now + timings.pending_check);
        if may_pass { Ok(give_up(next, reason)) } else { Ok(failed(next, FailedBy::Consumer, reason)) }
    }

    /// Fails a row whose message was buried although the row shows no failure (the handler panicked each time).
    pub fn abandon(&self, reason: &str, now: Timestamp) -> Result<Moved, MoveRefused> {
        self.not_final()?;
        if self.binding.is_some() {
            return Err(MoveRefused::Bound);
        }
        if self.claim.is_some() {
            return Err(MoveRefused::Claimed);
        }
        Ok(failed(self.next(now), FailedBy::Consumer, reason))
    }

    /// Records that the relayer knows no such transaction, or has another call under its id.
    pub fn forgotten(&self, how: RecordLost, at: Timestamp, now: Timestamp) -> Result<Moved, MoveRefused> {
        self.not_final()?;
        let binding = self.binding.as_ref().ok_or(MoveRefused::NotPossible("no relayer has it"))?;
        let first = binding.forgotten_since.is_none() || self.is_only_silent();
        let (relayer, tx_id) = (&binding.relayer, &binding.tx_id);
        let detail = format!("{relayer} {} {tx_id}; the chain or an operator must resolve it", how.describe());
        let mut next = self.next(now);
        next.end_silence();
        if let Some(binding) = &mut next.binding {
            binding.forgotten_since = binding.forgotten_since.or(Some(now));
        }
        next.check_at = Some(at);
        let steps = if first { vec![Step::new("forgotten", detail)] } else { Vec::new() };
        Ok(Moved::new(next, steps))
    }

    /// What the consumer that holds a message about this row does next.
    pub fn next_step(&self) -> NextStep {
        if self.status.is_final() {
            // The consumer stopped between marking the row and burying the message.
            return match (self.failed_by, &self.error_message) {
                (Some(FailedBy::Consumer), Some(reason)) => NextStep::Bury(reason.clone()),
                _ => NextStep::Nothing,
            };
        }
        match (&self.binding, &self.claim) {
            (Some(_), _) => NextStep::Follow,
            // Unknown outcome: the reconciler settles it, and queues it again if it is to be sent again.
            (None, Some(claim)) if claim.unknown.is_some() => NextStep::Nothing,
            (None, Some(_)) => NextStep::LeaveAlone,
            (None, None) => NextStep::Submit,
        }
    }

    /// Whether this move may unblock the signer's next gasless transaction: this one has got a nonce at its relayer, or
    /// has ended.
    pub fn unblocks_next_nonce(&self, before: &Self) -> bool {
        let place = |row: &Self| row.binding.as_ref().and_then(|binding| binding.nonce);
        self.forward.is_some()
            && (self.status.is_final() != before.status.is_final()
                || (place(self) != place(before) && place(self).is_some()))
    }

    /// Whether a submission's outcome is unknown, or its relayer has forgotten it.
    pub fn outcome_unknown(&self) -> bool {
        self.require_outcome_unknown().is_ok()
    }

    pub(super) fn not_final(&self) -> Result<(), MoveRefused> {
        if self.status.is_final() { Err(MoveRefused::Final(self.status)) } else { Ok(()) }
    }

    fn claimed_with(&self, token: Uuid) -> Result<&Claim, MoveRefused> {
        self.not_final()?;
        let ours = |claim: &&Claim| claim.token == token || Mutation::NoToken.is_on();
        self.claim.as_ref().filter(ours).ok_or(MoveRefused::NotOurClaim)
    }

    /// Adds a step to the timeline and changes nothing else.
    pub fn noted(&self, step: Step, now: Timestamp) -> Moved {
        let mut next = self.next(now);
        next.updated_at = self.updated_at;
        Moved::new(next, vec![step])
    }

    /// The same row, one version higher.
    pub(super) fn next(&self, now: Timestamp) -> Self {
        let mut next = self.clone();
        next.version += 1;
        next.updated_at = now.max(self.updated_at);
        next
    }
}

pub(super) fn moved(transaction: Transaction, action: &'static str, detail: impl Into<String>) -> Moved {
    Moved::new(transaction, vec![Step::new(action, detail)])
}

/// Final failure.
pub(super) fn failed(mut next: Transaction, by: FailedBy, reason: &str) -> Moved {
    next.status = Status::Failed;
    next.failed_by = Some(by);
    next.error_message = Some(reason.to_owned());
    next.check_at = None;
    moved(next, "failed", reason)
}

/// Ends the attempts: the one automatic replay if the client asked for it, else failure.
fn give_up(mut next: Transaction, reason: &str) -> Moved {
    if next.retry_on_failure && !next.auto_replayed {
        next.auto_replayed = true;
        next.attempts = 0;
        next.error_message = Some(reason.to_owned());
        return moved(next, "auto-replay", format!("{reason}; started over once, as the client asked"));
    }
    failed(next, FailedBy::Consumer, reason)
}

#[cfg(test)]
mod tests;
