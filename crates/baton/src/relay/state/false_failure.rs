//! A transaction that is shown as failed and was executed after all (pure): the relayer says so later, or the chain does.
//! The status stays: a client may have acted on it. The row is marked as unverified, and an alarm is raised once.

use serde_json::{Value, json};

use super::apply_report::{Report, ReportedStatus};
use super::moves::moved;
use super::transaction::{FailedBy, MoveRefused, Moved, Progress, Status, Transaction};
use crate::timestamp::Timestamp;

/// The transaction behind a row's hash, as the chain shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Included {
    /// Its block.
    pub block: u64,
    /// What that proves.
    pub proof: Proof,
}

/// What a transaction in a block proves about the call of a failed row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Proof {
    /// The call was executed, for good.
    Executed,
    /// The call reverted, for good.
    Reverted,
    /// Nothing: its block may still be replaced, or it makes another call.
    None,
}

/// Marks what the chain says, among what relayers say.
const CHAIN: &str = "chain";

impl Transaction {
    /// Whether it is shown as failed although it may have been executed: on the word of a relayer that signed it, or
    /// although its relayer or the chain says since then that it was executed.
    pub fn is_unverified(&self) -> bool {
        let on_its_word = self.failed_by == Some(FailedBy::Relayer) && self.shows_signature();
        self.status == Status::Failed && self.block_number.is_none() && (on_its_word || self.is_said_executed())
    }

    /// Whether something says of this failed row that its call was executed.
    pub fn is_said_executed(&self) -> bool {
        let said = self.relayer_says.as_ref().and_then(|says| says["status"].as_str());
        self.status == Status::Failed && matches!(said, Some("confirmed" | "mined"))
    }

    /// The end of a row that has failed, if a report says that the same record executed the same call; `None` if that is
    /// known, or the report does not say so. A block that is known proves the failure of its hash alone.
    pub(super) fn contradicted(&self, report: &Report, now: Timestamp) -> Option<Moved> {
        let executed = match report.status {
            ReportedStatus::Confirmed => true,
            // Known before it failed: a repeated webhook.
            ReportedStatus::Open(Progress::Mined) => {
                let known = self.binding.as_ref().is_some_and(|binding| binding.progress == Progress::Mined);
                !(known && report.hash == self.hash)
            }
            _ => false,
        };
        let verified = self.block_number.is_some();
        let refuted = verified && (report.hash.is_none() || report.hash == self.hash);
        let news = self.status == Status::Failed && !self.is_said_executed() && !refuted;
        if !executed || !news || !self.call.is_still(report) {
            return None;
        }
        // The block belongs to the hash that is known.
        let mut next = if verified { self.next(now) } else { self.with_report(report, now) };
        next.relayer_says = Some(executed_says(report.hash.as_deref(), report.nonce, "relayer"));
        let hash = report.hash.as_deref().unwrap_or("unknown");
        let detail = format!("shown as failed, and the relayer says {}: hash {hash}", report.status.name());
        Some(moved(next, STEP, detail))
    }

    /// Whether its block is missing although its relayer reported an end on the chain.
    pub fn lacks_block(&self) -> bool {
        let ended_there = match self.status {
            Status::Confirmed | Status::Success => true,
            // Reverted or replaced; if it never reached the chain, the chain answers so.
            Status::Failed => {
                let chain_said = self.relayer_says.as_ref().is_some_and(|says| says["source"] == CHAIN);
                (self.failed_by == Some(FailedBy::Relayer) || self.is_said_executed()) && !chain_said
            }
            Status::Pending | Status::Submitted => false,
        };
        ended_there && self.hash.is_some() && self.block_number.is_none()
    }

    /// Stores the block of the hash, as the chain reports it. The status does not change. The block of a failed row says
    /// that the chain has verified the failure: it is stored only if the call reverted there.
    pub fn in_block(&self, hash: &str, included: Included, now: Timestamp) -> Result<Moved, MoveRefused> {
        if !self.lacks_block() || self.hash.as_deref() != Some(hash) {
            return Err(MoveRefused::NotPossible("its block is known, or its hash has changed"));
        }
        let block = included.block;
        match (self.status, included.proof) {
            (Status::Failed, Proof::Executed) => {
                let mut next = self.next(now);
                next.relayer_says = Some(executed_says(Some(hash), None, CHAIN));
                Ok(moved(
                    next,
                    STEP,
                    format!("shown as failed, and the chain has executed it: hash {hash}, block {block}"),
                ))
            }
            (Status::Failed, Proof::None) => Err(MoveRefused::NotPossible("the chain has not shown that it failed")),
            _ => {
                let mut next = self.next(self.updated_at);
                next.block_number = Some(block);
                Ok(Moved::new(next, Vec::new()))
            }
        }
    }
}

/// Name of the step.
const STEP: &str = "failed-but-executed";

fn executed_says(hash: Option<&str>, nonce: Option<u64>, source: &str) -> Value {
    json!({ "status": "confirmed", "hash": hash, "nonce": nonce, "source": source })
}
