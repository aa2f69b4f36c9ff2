//! A transaction: its identifiers, its states and what a row holds (pure). The legal moves are in [`super::moves`].

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use alloy_primitives::Address;
use serde_json::Value;
use uuid::Uuid;

use super::event::EventMark;
use crate::config::Timings;
use crate::relay::request::call::Call;
use crate::relay::request::forward::Forward;
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

/// A relayer's id of a transaction, the one in webhooks. A type of its own, because mixing it with ours loses payments.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RelayerTxId(pub String);

impl fmt::Display for RelayerTxId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A relayer, identified by its configured URL without a trailing slash.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RelayerUrl(pub String);

impl RelayerUrl {
    /// The relayer with this configured URL.
    pub fn of(url: &reqwest::Url) -> Self {
        Self(url.as_str().trim_end_matches('/').to_owned())
    }
}

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

/// The call that accepted a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `POST /relay/direct`.
    Direct,
    /// `POST /relay/gasless`.
    Gasless,
}

/// The status that clients read. It moves down this list only; the last three are final.
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
    /// It will not happen, or the chain did not execute the requested call.
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

/// The part that decided that a transaction failed. Only the consumer's failures have a dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailedBy {
    /// The queue was unavailable when it was accepted; the client got 503.
    Intake,
    /// The item itself was refused, or its attempts are used up.
    Consumer,
    /// The relayer took it and reported that it failed.
    Relayer,
    /// An operator gave it up with `tx resolve --fail`.
    Operator,
}

/// The right to submit, stored before the submission is sent: nothing is sent without one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    /// The consumer that holds it.
    pub consumer: ConsumerId,
    /// Identifies this claim: a consumer whose claim was taken over cannot act on the row.
    pub token: Uuid,
    /// The relayer that the submission goes to.
    pub relayer: RelayerUrl,
    /// The account that the relayer listed when the claim was made, if it listed one.
    pub account: Option<Address>,
    /// The earliest time at which the submission can have begun.
    pub at: Timestamp,
    /// Set when the submission is over and its outcome is unknown.
    pub unknown: Option<UnknownOutcome>,
}

impl Claim {
    /// When a submission under this claim has certainly ended at the relayer too: send window, submission timeout and
    /// the relayer's handler timeout after the claim.
    pub fn open_until(&self, timings: &Timings) -> Timestamp {
        self.at + timings.longest_submission()
    }
}

/// A submission whose outcome is unknown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownOutcome {
    /// The error that made the outcome unknown, for people.
    pub reason: String,
    /// Until then the relayer may still be working on the abandoned request, so absence from its list proves nothing. A
    /// relayer that did not read the request at once may work on it for longer: see [`Transaction::absent`].
    pub open_until: Timestamp,
    /// Why the outcome is unknown.
    pub kind: UnknownCause,
    /// When the relayer's list first did not show it.
    pub absent_since: Option<Timestamp>,
}

impl UnknownOutcome {
    /// Whether a list requested at `asked_at` that does not show the submission proves that it can no longer appear.
    pub fn is_over(&self, asked_at: Timestamp, timings: &Timings) -> bool {
        let confirmed = self.absent_since.is_some_and(|since| asked_at.since(since) >= self.confirm(timings));
        confirmed && asked_at >= self.open_until
    }

    /// Minimum time between the first listing without it and the one that proves absence.
    pub(super) fn confirm(&self, timings: &Timings) -> Duration {
        match self.kind {
            UnknownCause::Answered | UnknownCause::ClientError => timings.absence_confirm,
            UnknownCause::Silent | UnknownCause::Exchanged | UnknownCause::Orphaned => {
                timings.absence_confirm.max(timings.relayer_timeout)
            }
        }
    }
}

/// The relayer that has it, and its id there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binding {
    /// The relayer.
    pub relayer: RelayerUrl,
    /// Its id there.
    pub tx_id: RelayerTxId,
    /// When the consumer or the reconciler stored the binding.
    pub at: Timestamp,
    /// The furthest progress that the relayer has reported.
    pub progress: Progress,
    /// The nonce that the relayer signed it with, once reported.
    pub nonce: Option<u64>,
    /// When the relayer first answered that it knows no such transaction.
    pub forgotten_since: Option<Timestamp>,
}

/// Progress at the relayer before a final status. It moves down this list only.
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
    /// The call that accepted it.
    pub kind: Kind,
    /// The status that clients read.
    pub status: Status,
    /// Incremented by each saved move; a save with an old version is refused.
    pub version: u64,
    /// The request, normalised, as queued: JSON text.
    pub request: Arc<str>,
    /// Whether a status lookup found it at a relayer and stored it. Baton never sends such a row.
    pub imported: bool,
    /// The call that the relayer is asked to make.
    pub call: Call,
    /// The signed forward request of a gasless transaction.
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
    /// The block of the hash, once a relayer or the chain has reported it; only set on final rows.
    pub block_number: Option<u64>,
    /// The relayer's own address.
    pub from: Option<String>,
    /// The claim, while a consumer is or may be submitting it.
    pub claim: Option<Claim>,
    /// The relayer that has it.
    pub binding: Option<Binding>,
    /// Failures of the item itself.
    pub attempts: u32,
    /// Number of times that a relayer failed it unsigned for a reason of its own and another relayer took it.
    pub reroutes: u32,
    /// Number of replays from the dead-letter queue.
    pub replays: u32,
    /// Whether the one automatic replay has been used.
    pub auto_replayed: bool,
    /// The relayer that failed it last; skipped if another one is able.
    pub avoid: Option<RelayerUrl>,
    /// The part that decided the failure.
    pub failed_by: Option<FailedBy>,
    /// The reason of the last failure.
    pub error_message: Option<String>,
    /// The relayer's final report, in confirm mode.
    pub result: Option<Value>,
    /// When the reconciler next checks it; none once it is final.
    pub check_at: Option<Timestamp>,
    /// A final report of a relayer that waits for the chain: the record as received. In a failed row: what says that it was
    /// executed after all. It also holds since when the relayer gives no answer: see [`super::silence`].
    pub relayer_says: Option<Value>,
    /// When Baton last asked the bound relayer to cancel its record, because the relayer does not work on it.
    pub cancel_requested_at: Option<Timestamp>,
}

/// Why it is unknown whether a relayer took a submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnknownCause {
    /// The relayer answered with an error that proves nothing; it no longer works on the request.
    Answered,
    /// The relayer answered with a client error that proves nothing. If it turns out to have stored nothing, that uses up
    /// an attempt.
    ClientError,
    /// The relayer did not answer: it may still be working, or it may have crashed and lost its records.
    Silent,
    /// The relayer accepted it, but an equal transaction of unknown outcome was bound to that record first. The other
    /// transaction's submission may still arrive, and then belongs to this row.
    Exchanged,
    /// The consumer that sent it, or was about to, is gone.
    Orphaned,
}
names!(UnknownCause { Answered = "answered", ClientError = "client-error", Silent = "silent", Exchanged = "exchanged", Orphaned = "orphaned" });

impl UnknownCause {
    /// Whether the relayer did not answer, so that it may have lost its records as well.
    pub fn is_silence(self) -> bool {
        matches!(self, Self::Silent | Self::Exchanged)
    }
}

/// A move to be saved.
#[derive(Debug, Clone, PartialEq)]
pub struct Moved {
    /// The row as it should be.
    pub transaction: Transaction,
    /// Steps to append to its timeline.
    pub steps: Vec<Step>,
    /// What clients are notified of. [`crate::relay::update::guarded_store::GuardedStore::save`] adds them.
    pub events: Vec<EventMark>,
}

impl Moved {
    /// A move without events.
    pub fn new(transaction: Transaction, steps: Vec<Step>) -> Self {
        Self { transaction, steps, events: Vec::new() }
    }
}

/// One line of a transaction's timeline.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// A stable name such as `claimed`.
    pub action: &'static str,
    /// Details for people.
    pub detail: String,
}

impl Step {
    /// A step.
    pub fn new(action: &'static str, detail: impl Into<String>) -> Self {
        Self { action, detail: detail.into() }
    }
}

/// What the consumer that holds a row's message does next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NextStep {
    /// Submit it.
    Submit,
    /// A relayer has it: in confirm mode the consumer follows it, otherwise nothing is left to do.
    Follow,
    /// Nothing: delete the message.
    Nothing,
    /// Bury the message, for this reason.
    Bury(String),
    /// Another consumer holds the claim.
    LeaveAlone,
}

/// Why a row's relayer can no longer say what became of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordLost {
    /// It knows no transaction of that id, or it is no longer configured.
    NotKnown,
    /// Its record of that id is another call: it was replaced there, or the id in the relayer's answer was wrong.
    AnotherCall,
}

impl RecordLost {
    /// For logs and timelines, between the relayer's name and the id.
    pub fn describe(self) -> &'static str {
        match self {
            Self::NotKnown => "no longer knows",
            Self::AnotherCall => "has another call under the id",
        }
    }
}

/// Why a row does not allow a move. The row stays as it is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MoveRefused {
    /// It is final.
    #[error("the transaction is already {0}")]
    Final(Status),
    /// Another consumer holds the claim, or it was taken over.
    #[error("the claim is not ours")]
    NotOurClaim,
    /// There is a claim already.
    #[error("the transaction is claimed")]
    Claimed,
    /// A relayer has it already.
    #[error("a relayer already has the transaction")]
    Bound,
    /// The state does not allow the move, for this reason.
    #[error("{0}")]
    NotPossible(&'static str),
}
