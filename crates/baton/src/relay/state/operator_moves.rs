//! The moves that only an operator makes (pure): replay a dead letter, resolve an unknown outcome.

use super::moves::{failed, moved};
use super::transaction::{FailedBy, MoveRefused, Moved, Status, Transaction};
use crate::config::Timings;
use crate::timestamp::Timestamp;

impl Transaction {
    /// Starts a dead letter over, for an operator: the only way out of a final state.
    pub fn replay(&self, now: Timestamp, timings: &Timings) -> Result<Moved, MoveRefused> {
        match (self.status, self.failed_by) {
            (Status::Failed, Some(FailedBy::Consumer)) if self.binding.is_none() => {}
            (Status::Failed, _) => {
                return Err(MoveRefused::NotPossible(
                    "only a transaction that failed before a relayer accepted it can be replayed",
                ));
            }
            _ => return Err(MoveRefused::NotPossible("only a failed transaction can be replayed")),
        }
        let mut next = self.next(now);
        next.status = Status::Pending;
        next.attempts = 0;
        next.replays += 1;
        next.failed_by = None;
        next.error_message = None;
        next.check_at = Some(now + timings.message_check());
        Ok(moved(next, "replayed", format!("by an operator (replay {})", self.replays + 1)))
    }

    /// Sends it again on an operator's decision that no relayer has it.
    pub fn resolve_resend(&self, now: Timestamp, timings: &Timings) -> Result<Moved, MoveRefused> {
        self.require_outcome_unknown()?;
        if self.imported {
            return Err(MoveRefused::NotPossible("a status lookup imported it; Baton never sends it"));
        }
        let open_until = self.claim.as_ref().and_then(|claim| claim.unknown.as_ref()).map(|unknown| unknown.open_until);
        if open_until.is_some_and(|open_until| now < open_until) {
            return Err(MoveRefused::NotPossible(
                "the relayer may still be working on the first submission; try again in a minute",
            ));
        }
        let mut next = self.next(now);
        next.claim = None;
        next.binding = None;
        next.relayer_says = None;
        next.check_at = Some(now + timings.message_check());
        Ok(moved(next, "resolved", "an operator decided: send it again"))
    }

    /// Gives it up on an operator's decision.
    pub fn resolve_fail(&self, now: Timestamp) -> Result<Moved, MoveRefused> {
        self.not_final()?;
        if self.claim.is_some() || self.binding.is_some() {
            self.require_outcome_unknown()?;
        }
        let mut next = self.next(now);
        next.claim = None;
        Ok(failed(next, FailedBy::Operator, "given up by an operator"))
    }

    /// Allows an operator's decision only if an outcome is unknown or the relayer has forgotten the transaction.
    pub(super) fn require_outcome_unknown(&self) -> Result<(), MoveRefused> {
        self.not_final()?;
        let unresolved = self.claim.as_ref().is_some_and(|claim| claim.unknown.is_some());
        let forgotten = self.binding.as_ref().is_some_and(|binding| binding.forgotten_since.is_some());
        if unresolved || forgotten {
            return Ok(());
        }
        Err(MoveRefused::NotPossible(
            "its outcome is known: the transaction is waiting, being sent, or held by its relayer",
        ))
    }
}
