//! A transaction, its states and their only legal moves (pure; drawn in `docs/state-machine.md`).
//!
//! Every move takes the row as it is and returns the row as it should be, one version higher, with the steps for
//! its timeline; or a [`Refused`]. Nothing here does any input or output: [`super::store`] saves a move only if
//! nobody else saved one in between, so each rule below holds over all processes.
//!
//! What a relayer's word means for a row is in [`super::report`].

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use uuid::Uuid;

use super::call::{Call, DirectRequest};
use super::forward_request::Forward;
pub use crate::config::Timings as Clocks;
use crate::timestamp::Timestamp;

/// Our id of a transaction: the one clients know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TransactionId(pub Uuid);

impl TransactionId {
    /// A new id; ids made later sort later.
    pub fn generate() -> Self {
        Self(Uuid::now_v7())
    }
}

impl fmt::Display for TransactionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A relayer's id of a transaction: the one webhooks know. Never to be mixed with ours.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RelayerTxId(pub String);

impl fmt::Display for RelayerTxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A relayer, named by its configured URL.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RelayerUrl(pub String);

impl fmt::Display for RelayerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One run of one consumer process.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ConsumerId(pub String);

impl ConsumerId {
    /// A new one for this process; a restarted consumer is another consumer.
    pub fn generate() -> Self {
        Self(format!("{}-{}", std::process::id(), Uuid::new_v4().simple()))
    }
}

impl fmt::Display for ConsumerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// How a transaction came to us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `POST /relay/direct`.
    Direct,
    /// `POST /relay/gasless`.
    Gasless,
}

/// What clients see. The order of the variants is the only direction of travel; the last three are final.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Status {
    /// Accepted; no relayer is known to have it.
    Pending,
    /// A relayer has it.
    Submitted,
    /// On the chain, in fire-and-forget mode.
    Confirmed,
    /// On the chain, in confirm mode.
    Success,
    /// Will not happen, or did not have the effect asked for.
    Failed,
}

/// Text names of a closed set, for stores and clients.
macro_rules! names {
    ($type:ty { $($variant:ident = $name:literal),+ $(,)? }) => {
        impl $type {
            /// Every value.
            pub const ALL: &'static [Self] = &[$(Self::$variant),+];

            /// The name that is stored and shown.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }

            /// The value of that name.
            pub fn parse(name: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|value| value.name() == name)
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

names!(Kind { Direct = "direct", Gasless = "gasless" });
names!(Status {
    Pending = "pending",
    Submitted = "submitted",
    Confirmed = "confirmed",
    Success = "success",
    Failed = "failed",
});
names!(FailedBy { Intake = "intake", Consumer = "consumer", Relayer = "relayer", Operator = "operator" });

impl Status {
    /// Whether nothing but an operator's replay can follow.
    pub fn is_final(self) -> bool {
        self.rank() == 2
    }

    /// How far along it is; a reader never sees this fall.
    pub fn rank(self) -> u8 {
        match self {
            Self::Pending => 0,
            Self::Submitted => 1,
            Self::Confirmed | Self::Success | Self::Failed => 2,
        }
    }
}

/// Who decided that a transaction failed; a dead letter belongs only to what the consumer gave up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailedBy {
    /// The queue was unavailable when it was accepted; the client got 503.
    Intake,
    /// The item itself was refused, or its attempts are used up.
    Consumer,
    /// The relayer took it and reported that it failed.
    Relayer,
    /// An operator said so.
    Operator,
}

/// The right to submit, recorded before any effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// Who holds it.
    pub consumer: ConsumerId,
    /// This claim and no other: a consumer that lost it cannot act on the row.
    pub token: Uuid,
    /// Where the transaction may have gone.
    pub relayer: RelayerUrl,
    /// When the first submission under it may have begun.
    pub at: Timestamp,
    /// Set once nobody is sending any more and nobody knows whether the relayer has it.
    pub doubt: Option<Doubt>,
}

impl Claim {
    /// When a submission under this claim has certainly ended at the relayer too: the last moment it may begin, and
    /// the time it may take there, whether or not we still wait for it.
    fn open_until(&self, clocks: &Clocks) -> Timestamp {
        self.at + clocks.longest_submission()
    }
}

/// A submission whose outcome is unknown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Doubt {
    /// What made it unknown.
    pub reason: String,
    /// Until then the relayer may still be working on a request that we no longer hear of; absence proves nothing. A
    /// relayer that did not read the request at once may work on it for longer: see [`Transaction::absent`].
    pub open_until: Timestamp,
    /// What kind of not knowing it is.
    pub kind: Unknown,
    /// The first time the relayer's own list did not show it.
    pub absent_since: Option<Timestamp>,
}

impl Doubt {
    /// Whether nothing can come of the submission any more, if a list asked for at `asked_at` does not show it either.
    pub fn is_over(&self, asked_at: Timestamp, clocks: &Clocks) -> bool {
        let confirmed = self.absent_since.is_some_and(|since| asked_at.since(since) >= self.confirm(clocks));
        confirmed && asked_at >= self.open_until
    }

    /// How long after the first look in vain the second one counts.
    fn confirm(&self, clocks: &Clocks) -> Duration {
        match self.kind {
            Unknown::Answered => clocks.absence_confirm,
            Unknown::Silent | Unknown::Exchanged | Unknown::Orphaned => {
                clocks.absence_confirm.max(clocks.relayer_timeout)
            }
        }
    }
}

/// Which relayer has it, under which id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    /// The relayer.
    pub relayer: RelayerUrl,
    /// Its id there.
    pub tx_id: RelayerTxId,
    /// When we learned it.
    pub at: Timestamp,
    /// How far the relayer has said it is.
    pub progress: Progress,
    /// The nonce that it was signed with, if the relayer has said.
    pub nonce: Option<u64>,
    /// Since when the relayer says it knows no such transaction.
    pub forgotten_since: Option<Timestamp>,
}

/// How far a transaction is at its relayer, short of final. The order is the direction of travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Progress {
    /// Stored there.
    Pending,
    /// Nonce taken and signed.
    Sent,
    /// Accepted by a node.
    Submitted,
    /// In a block.
    Mined,
}
names!(Progress { Pending = "pending", Sent = "sent", Submitted = "submitted", Mined = "mined" });

/// A row: one accepted transaction.
#[derive(Debug, Clone, PartialEq)]
pub struct Transaction {
    /// Our id.
    pub id: TransactionId,
    /// How it came.
    pub kind: Kind,
    /// What clients see.
    pub status: Status,
    /// One higher with each saved move; the guard against acting on an old view.
    pub version: u64,
    /// The request, normalised, as queued: JSON text.
    pub request: Arc<str>,
    /// Whether only a relayer knew it and a status lookup brought it here. Such a row is never sent by us.
    pub imported: bool,
    /// What the relayer is asked to do.
    pub call: Call,
    /// What a user signed, if it is gasless.
    pub forward: Option<Arc<Forward>>,
    /// Whether the client asked for one automatic replay.
    pub retry_on_failure: bool,
    /// The name of the API key that sent it.
    pub api_key: String,
    /// When it was accepted.
    pub created_at: Timestamp,
    /// When it last moved.
    pub updated_at: Timestamp,
    /// When the chain confirmed it.
    pub confirmed_at: Option<Timestamp>,
    /// The chain's hash: only a relayer's report sets it.
    pub hash: Option<String>,
    /// The block that the hash is in, once a relayer or the chain has said so; only of what has ended.
    pub block_number: Option<u64>,
    /// The relayer's own address.
    pub from: Option<String>,
    /// The claim, while somebody is or may be submitting it.
    pub claim: Option<Claim>,
    /// The relayer that has it.
    pub binding: Option<Binding>,
    /// Failures of the item itself.
    pub attempts: u32,
    /// How often a relayer of its own accord failed it unsigned and it went to another.
    pub reroutes: u32,
    /// How often it was started over from the dead-letter queue.
    pub replays: u32,
    /// Whether the one automatic replay has been used.
    pub auto_replayed: bool,
    /// The relayer that failed it last, to be passed over if there is another.
    pub avoid: Option<RelayerUrl>,
    /// Who gave it up.
    pub failed_by: Option<FailedBy>,
    /// Why.
    pub error_message: Option<String>,
    /// The relayer's last word, in confirm mode.
    pub result: Option<Value>,
    /// When the reconciler should look at it; none once it is final.
    pub check_at: Option<Timestamp>,
}

/// Why nobody knows whether a relayer took a submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unknown {
    /// It answered, badly: it is done with the request, one way or the other.
    Answered,
    /// It did not answer: it may still be at it, or be gone with all it knew.
    Silent,
    /// It answered well, but an equal transaction in doubt was bound to the record meanwhile. What that one sent may
    /// still be on its way, and is ours now.
    Exchanged,
    /// Whoever sent it, or was about to, is gone.
    Orphaned,
}
names!(Unknown { Answered = "answered", Silent = "silent", Exchanged = "exchanged", Orphaned = "orphaned" });

impl Unknown {
    /// Whether the relayer fell silent, so that it may have lost its memory with the answer.
    pub fn is_silence(self) -> bool {
        matches!(self, Self::Silent | Self::Exchanged)
    }
}

/// A saved move.
#[derive(Debug, Clone, PartialEq)]
pub struct Moved {
    /// The row as it should be.
    pub transaction: Transaction,
    /// What to write in its timeline.
    pub steps: Vec<Step>,
}

/// One line of a transaction's timeline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// What happened, in one word.
    pub action: &'static str,
    /// The rest, for people.
    pub detail: String,
}

impl Step {
    /// A step.
    pub fn new(action: &'static str, detail: impl Into<String>) -> Self {
        Self { action, detail: detail.into() }
    }
}

/// What a row asks of whoever holds its message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NextStep {
    /// Submit it.
    Submit,
    /// A relayer has it: in confirm mode it is followed, otherwise there is nothing left to do.
    Follow,
    /// Nothing: the message can go.
    Nothing,
    /// Bury the message, for this reason.
    Bury(String),
    /// Somebody else is at it.
    LeaveAlone,
}

/// A move that the row's state does not allow. The row stays as it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// It is final.
    #[error("the transaction is already {0}")]
    Final(Status),
    /// Another consumer holds the claim, or this one's was taken over.
    #[error("the claim is not ours")]
    NotOurClaim,
    /// There is a claim already.
    #[error("the transaction is claimed")]
    Claimed,
    /// A relayer has it already.
    #[error("a relayer already has the transaction")]
    Bound,
    /// The move makes no sense from here.
    #[error("{0}")]
    NotPossible(&'static str),
}

impl Transaction {
    /// A newly accepted transaction.
    pub fn accepted(
        id: TransactionId,
        request: &DirectRequest,
        api_key: String,
        now: Timestamp,
        clocks: &Clocks,
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
            check_at: Some(now + clocks.pending_check),
        }
    }

    /// A newly accepted gasless transaction.
    pub fn accepted_gasless(
        id: TransactionId,
        forward: &Arc<Forward>,
        api_key: String,
        now: Timestamp,
        clocks: &Clocks,
    ) -> Self {
        let request = DirectRequest { call: forward.call(), retry_on_failure: forward.gasless.retry_on_failure };
        Self {
            kind: Kind::Gasless,
            request: forward.to_json().into(),
            forward: Some(Arc::clone(forward)),
            ..Self::accepted(id, &request, api_key, now, clocks)
        }
    }

    /// Takes the right to submit to `relayer`, before any effect.
    pub fn claim(
        &self,
        consumer: &ConsumerId,
        token: Uuid,
        relayer: &RelayerUrl,
        because: &str,
        now: Timestamp,
        clocks: &Clocks,
    ) -> Result<Moved, Refused> {
        self.not_final()?;
        if self.binding.is_some() {
            return Err(Refused::Bound);
        }
        if self.claim.is_some() {
            return Err(Refused::Claimed);
        }
        if self.imported {
            return Err(Refused::NotPossible("it was not given to us, so it is not ours to send"));
        }
        let mut next = self.next(now);
        next.claim = Some(Claim { consumer: consumer.clone(), token, relayer: relayer.clone(), at: now, doubt: None });
        next.check_at = Some(now + clocks.claim_check);
        Ok(moved(
            next,
            "claimed",
            format!("by {consumer}, attempt {}, routed to {relayer}: {because}", self.attempts + 1),
        ))
    }

    /// Gives the claim back: the relayer certainly did not take it.
    pub fn release(&self, token: Uuid, reason: &str, now: Timestamp, clocks: &Clocks) -> Result<Moved, Refused> {
        let claim = self.claimed_with(token)?;
        let detail = format!("{} did not take it: {reason}", claim.relayer);
        let mut next = self.next(now);
        next.claim = None;
        next.check_at = Some(now + clocks.pending_check);
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
        clocks: &Clocks,
    ) -> Result<Moved, Refused> {
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
        next.from = from.map(str::to_owned).or(next.from);
        next.status = Status::Submitted;
        next.avoid = None;
        next.error_message = None;
        next.check_at = Some(now + clocks.submitted_check);
        Ok(moved(next, "submitted", detail))
    }

    /// Records that nobody knows whether the relayer took it. The claim stays.
    pub fn doubt(
        &self,
        token: Uuid,
        reason: &str,
        kind: Unknown,
        now: Timestamp,
        clocks: &Clocks,
    ) -> Result<Moved, Refused> {
        let claim = self.claimed_with(token)?;
        let relayer = claim.relayer.clone();
        let open_until = match kind {
            Unknown::Answered => now,
            Unknown::Silent | Unknown::Orphaned => claim.open_until(clocks),
            Unknown::Exchanged => now + clocks.longest_submission(),
        };
        let mut next = self.next(now);
        if let Some(claim) = &mut next.claim {
            claim.doubt = Some(Doubt { reason: reason.to_owned(), open_until, kind, absent_since: None });
        }
        next.check_at = Some(now + clocks.doubt_check);
        Ok(moved(next, "outcome-unknown", format!("at {relayer}: {reason}")))
    }

    /// Takes over a claim that is in doubt, or whose owner cannot be working on it any more.
    pub fn take_over(
        &self,
        consumer: &ConsumerId,
        token: Uuid,
        owner_gone: bool,
        now: Timestamp,
        clocks: &Clocks,
    ) -> Result<Moved, Refused> {
        self.not_final()?;
        let claim = self.claim.as_ref().ok_or(Refused::NotPossible("there is no claim to take over"))?;
        if claim.doubt.is_none() && !owner_gone && now < claim.open_until(clocks) {
            return Err(Refused::NotOurClaim);
        }
        let doubt = claim.doubt.clone().unwrap_or_else(|| Doubt {
            reason: format!("its consumer {} stopped before the answer was stored", claim.consumer),
            open_until: claim.open_until(clocks),
            kind: Unknown::Orphaned,
            absent_since: None,
        });
        let newly = claim.doubt.is_none();
        let detail = format!("at {}: {}", claim.relayer, doubt.reason);
        let mut next = self.next(now);
        if let Some(claim) = &mut next.claim {
            claim.consumer = consumer.clone();
            claim.token = token;
            claim.doubt = Some(doubt);
        }
        next.check_at = Some(now + clocks.claim_check);
        let steps = if newly { vec![Step::new("outcome-unknown", detail)] } else { Vec::new() };
        Ok(Moved { transaction: next, steps })
    }

    /// Records that the claimed relayer's list, asked for at `asked_at`, does not show it. The first sighting starts a clock; once it has
    /// been absent for long enough the claim ends, and the transaction may be sent again.
    ///
    /// A relayer that was stopped may read a request long after it was sent, at the same time as our first question.
    /// Having answered that, it gets as long as it may work on a request before the answer to the second counts.
    pub fn absent(&self, token: Uuid, asked_at: Timestamp, now: Timestamp, clocks: &Clocks) -> Result<Moved, Refused> {
        let claim = self.claimed_with(token)?;
        let doubt = claim.doubt.as_ref().ok_or(Refused::NotPossible("the claim is not in doubt"))?;
        let relayer = claim.relayer.clone();
        let mut next = self.next(now);
        if asked_at < doubt.open_until {
            next.check_at = Some(doubt.open_until);
            return Ok(Moved { transaction: next, steps: Vec::new() });
        }
        let confirm = doubt.confirm(clocks);
        match doubt.absent_since {
            Some(_) if doubt.is_over(asked_at, clocks) => {
                next.claim = None;
                next.check_at = Some(now + clocks.message_check());
                Ok(moved(next, "absent", format!("{relayer} certainly does not have it; it will be sent again")))
            }
            Some(since) => {
                next.check_at = Some(since + confirm);
                Ok(Moved { transaction: next, steps: Vec::new() })
            }
            None => {
                if let Some(doubt) = next.claim.as_mut().and_then(|claim| claim.doubt.as_mut()) {
                    doubt.absent_since = Some(now);
                }
                next.check_at = Some(now + confirm);
                Ok(moved(next, "not-listed", format!("{relayer} does not list it; asking once more to be certain")))
            }
        }
    }

    /// Takes back an accept whose message did not get into the queue, unless anybody has touched the row since: then
    /// it is under way, or somebody else was promised it. Only after this may a client be told that it will never
    /// happen: a message that arrives after all finds a failed row.
    pub fn not_queued(&self, now: Timestamp) -> Result<Moved, Refused> {
        self.not_final()?;
        if !self.is_untouched() || self.imported {
            return Err(Refused::NotPossible("it is under way, or promised to somebody else"));
        }
        Ok(failed(self.next(now), FailedBy::Intake, "queue unavailable"))
    }

    /// Promises a row that another request is still storing: from now on it cannot be taken back, and if its message
    /// does not come the reconciler queues it.
    pub fn promise(&self, now: Timestamp, clocks: &Clocks) -> Result<Moved, Refused> {
        if !self.is_untouched() {
            return Err(Refused::NotPossible("it is past being taken back"));
        }
        self.look_again(now + clocks.message_check(), now)
    }

    /// Whether its message has nothing left to say: a relayer has it, or it has ended well.
    pub fn needs_no_message(&self) -> bool {
        self.status != Status::Failed && (self.binding.is_some() || self.status.is_final())
    }

    /// Whether it is as it was accepted.
    pub fn is_untouched(&self) -> bool {
        self.version == 1
    }

    /// Nothing learned: look again later.
    pub fn look_again(&self, at: Timestamp, now: Timestamp) -> Result<Moved, Refused> {
        self.not_final()?;
        let mut next = self.next(now);
        next.updated_at = self.updated_at;
        next.check_at = Some(at);
        Ok(Moved { transaction: next, steps: Vec::new() })
    }

    /// It waits for its turn, and whoever holds its message looks after it: the reconciler need not queue it again so soon.
    pub fn put_off(&self, reason: &str, now: Timestamp, clocks: &Clocks) -> Result<Moved, Refused> {
        if self.claim.is_some() || self.binding.is_some() {
            return Err(Refused::NotPossible("it is under way"));
        }
        let mut moved = self.look_again(now + clocks.pending_check, now)?;
        moved.steps.push(Step::new("waiting", reason));
        Ok(moved)
    }

    /// Counts a failure of the item itself. With attempts left it goes back to waiting; otherwise it fails for good,
    /// unless its one automatic replay is still open.
    pub fn attempt_failed(
        &self,
        token: Uuid,
        reason: &str,
        attempts_max: u32,
        now: Timestamp,
        clocks: &Clocks,
    ) -> Result<Moved, Refused> {
        self.claimed_with(token)?;
        let mut next = self.next(now);
        next.claim = None;
        next.attempts += 1;
        next.error_message = Some(reason.to_owned());
        next.check_at = Some(now + clocks.pending_check);
        if next.attempts < attempts_max {
            let detail = format!("{reason} (attempt {} of {attempts_max})", next.attempts);
            return Ok(moved(next, "attempt-failed", detail));
        }
        Ok(give_up(next, reason))
    }

    /// The item itself was refused: no further attempt can help.
    pub fn refuse(&self, token: Uuid, reason: &str, now: Timestamp, clocks: &Clocks) -> Result<Moved, Refused> {
        self.claimed_with(token)?;
        let mut next = self.next(now);
        next.claim = None;
        next.attempts += 1;
        next.check_at = Some(now + clocks.pending_check);
        Ok(give_up(next, reason))
    }

    /// It cannot succeed, which was found out while nobody could have sent it. If the reason `may_pass`, its one automatic
    /// replay is worth trying.
    pub fn fail_unsent(&self, reason: &str, may_pass: bool, now: Timestamp, clocks: &Clocks) -> Result<Moved, Refused> {
        self.not_final()?;
        if self.binding.is_some() {
            return Err(Refused::Bound);
        }
        if self.claim.is_some() {
            return Err(Refused::Claimed);
        }
        let mut next = self.next(now);
        next.attempts += 1;
        next.check_at = Some(now + clocks.pending_check);
        if may_pass { Ok(give_up(next, reason)) } else { Ok(failed(next, FailedBy::Consumer, reason)) }
    }

    /// A handler gave its message up without a word in the row (it panicked each time), and nobody holds a claim.
    pub fn abandon(&self, reason: &str, now: Timestamp) -> Result<Moved, Refused> {
        self.not_final()?;
        if self.binding.is_some() {
            return Err(Refused::Bound);
        }
        if self.claim.is_some() {
            return Err(Refused::Claimed);
        }
        Ok(failed(self.next(now), FailedBy::Consumer, reason))
    }

    /// The relayer says it knows no such transaction.
    pub fn forgotten(&self, at: Timestamp, now: Timestamp) -> Result<Moved, Refused> {
        self.not_final()?;
        let binding = self.binding.as_ref().ok_or(Refused::NotPossible("no relayer has it"))?;
        let first = binding.forgotten_since.is_none();
        let detail = format!("{} no longer knows {}; an operator must settle it", binding.relayer, binding.tx_id);
        let mut next = self.next(now);
        if let Some(binding) = &mut next.binding {
            binding.forgotten_since = binding.forgotten_since.or(Some(now));
        }
        next.check_at = Some(at);
        let steps = if first { vec![Step::new("forgotten", detail)] } else { Vec::new() };
        Ok(Moved { transaction: next, steps })
    }

    /// An operator starts a dead letter over: the only way out of a final state.
    pub fn replay(&self, now: Timestamp, clocks: &Clocks) -> Result<Moved, Refused> {
        match (self.status, self.failed_by) {
            (Status::Failed, Some(FailedBy::Consumer)) if self.binding.is_none() => {}
            (Status::Failed, _) => {
                return Err(Refused::NotPossible("only what failed before a relayer took it can be replayed"));
            }
            _ => return Err(Refused::NotPossible("only a failed transaction can be replayed")),
        }
        let mut next = self.next(now);
        next.status = Status::Pending;
        next.attempts = 0;
        next.replays += 1;
        next.failed_by = None;
        next.error_message = None;
        next.check_at = Some(now + clocks.message_check());
        Ok(moved(next, "replayed", format!("by an operator (replay {})", self.replays + 1)))
    }

    /// An operator, having looked, says that no relayer has it: it may be sent again.
    pub fn resolve_resend(&self, now: Timestamp, clocks: &Clocks) -> Result<Moved, Refused> {
        self.in_doubt()?;
        if self.imported {
            return Err(Refused::NotPossible("it was not given to us, so it is not ours to send"));
        }
        let open_until = self.claim.as_ref().and_then(|claim| claim.doubt.as_ref()).map(|doubt| doubt.open_until);
        if open_until.is_some_and(|open_until| now < open_until) {
            return Err(Refused::NotPossible(
                "the relayer may still be working on the first submission; wait a minute and look again",
            ));
        }
        let mut next = self.next(now);
        next.claim = None;
        next.binding = None;
        next.check_at = Some(now + clocks.message_check());
        Ok(moved(next, "resolved", "an operator decided: send it again"))
    }

    /// An operator gives it up.
    pub fn resolve_fail(&self, now: Timestamp) -> Result<Moved, Refused> {
        self.not_final()?;
        if self.claim.is_some() || self.binding.is_some() {
            self.in_doubt()?;
        }
        let mut next = self.next(now);
        next.claim = None;
        Ok(failed(next, FailedBy::Operator, "given up by an operator"))
    }

    /// Whether the chain may know a block that we do not: it has ended there, by all that its relayer said.
    pub fn lacks_block(&self) -> bool {
        let ended_there = match self.status {
            Status::Confirmed | Status::Success => true,
            // Reverted, or something else stands in its place; if it never got there, the chain says so.
            Status::Failed => self.failed_by == Some(FailedBy::Relayer),
            Status::Pending | Status::Submitted => false,
        };
        ended_there && self.hash.is_some() && self.block_number.is_none()
    }

    /// The chain says which block this hash is in. That is only a reading: the transaction itself has not moved.
    pub fn in_block(&self, hash: &str, block_number: u64) -> Result<Moved, Refused> {
        if !self.lacks_block() || self.hash.as_deref() != Some(hash) {
            return Err(Refused::NotPossible("its block is known, or nobody asked for it"));
        }
        let mut next = self.next(self.updated_at);
        next.block_number = Some(block_number);
        Ok(Moved { transaction: next, steps: Vec::new() })
    }

    /// The one gate for operators: a claim in doubt, or a relayer that has forgotten it.
    fn in_doubt(&self) -> Result<(), Refused> {
        self.not_final()?;
        let doubtful = self.claim.as_ref().is_some_and(|claim| claim.doubt.is_some());
        let forgotten = self.binding.as_ref().is_some_and(|binding| binding.forgotten_since.is_some());
        if doubtful || forgotten {
            return Ok(());
        }
        Err(Refused::NotPossible(
            "its outcome is not in doubt: it is waiting, being sent right now, or known to its relayer",
        ))
    }

    /// What is left to do for whoever holds a message about this row.
    pub fn next_step(&self) -> NextStep {
        if self.status.is_final() {
            // Stopped between marking the row and burying the message: the dead letter is still owed.
            return match (self.failed_by, &self.error_message) {
                (Some(FailedBy::Consumer), Some(reason)) => NextStep::Bury(reason.clone()),
                _ => NextStep::Nothing,
            };
        }
        match (&self.binding, &self.claim) {
            (Some(_), _) => NextStep::Follow,
            // In doubt: the reconciler settles it, and queues it again if it is to be sent again.
            (None, Some(claim)) if claim.doubt.is_some() => NextStep::Nothing,
            (None, Some(_)) => NextStep::LeaveAlone,
            (None, None) => NextStep::Submit,
        }
    }

    /// Whether the signer's next gasless transaction may have more to do than `before`: this one has got a nonce at a
    /// relayer, or has ended.
    pub fn lets_the_next_go_on(&self, before: &Self) -> bool {
        let place = |row: &Self| row.binding.as_ref().and_then(|binding| binding.nonce);
        self.forward.is_some()
            && (self.status.is_final() != before.status.is_final()
                || (place(self) != place(before) && place(self).is_some()))
    }

    /// Whether its submission may or may not have happened, or its relayer has forgotten it.
    pub fn is_in_doubt(&self) -> bool {
        self.in_doubt().is_ok()
    }

    fn not_final(&self) -> Result<(), Refused> {
        if self.status.is_final() { Err(Refused::Final(self.status)) } else { Ok(()) }
    }

    fn claimed_with(&self, token: Uuid) -> Result<&Claim, Refused> {
        self.not_final()?;
        self.claim.as_ref().filter(|claim| claim.token == token).ok_or(Refused::NotOurClaim)
    }

    /// The same row, one version on.
    pub(super) fn next(&self, now: Timestamp) -> Self {
        let mut next = self.clone();
        next.version += 1;
        next.updated_at = now.max(self.updated_at);
        next
    }
}

pub(super) fn moved(transaction: Transaction, action: &'static str, detail: impl Into<String>) -> Moved {
    Moved { transaction, steps: vec![Step::new(action, detail)] }
}

/// Final failure.
pub(super) fn failed(mut next: Transaction, by: FailedBy, reason: &str) -> Moved {
    next.status = Status::Failed;
    next.failed_by = Some(by);
    next.error_message = Some(reason.to_owned());
    next.check_at = None;
    moved(next, "failed", reason)
}

/// The end of the attempts: the one automatic replay if it was asked for, else failure.
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
