//! Where transactions are kept: the contract of a [`TransactionStore`]. One file per database, the same functions in
//! the same order.
//!
//! The store knows no rules: a move is decided by pure code ([`crate::relay::state::transaction`], [`crate::relay::state::report`]) and saved
//! only if the row is still the one that was decided about.

pub mod coalescer;
pub mod mysql;
mod row;
pub mod sqlite;

use std::time::Duration;

use async_trait::async_trait;

use crate::relay::request::forward::Signer;
use crate::relay::state::transaction::{
    ConsumerId, Kind, Moved, RelayerTxId, RelayerUrl, Status, Step, Transaction, TransactionId,
};
use crate::timestamp::Timestamp;

/// Keeps transactions.
#[async_trait]
pub trait TransactionStore: Send + Sync + 'static {
    /// Stores newly accepted rows and answers for each. Durable when it returns; an answer of
    /// [`StoreError::Unavailable`] means that nothing was stored for that row and nothing will be.
    async fn accept(&self, rows: &[NewTransaction]) -> Vec<Result<Accepted, StoreError>>;

    /// What an idempotency key stands for, if it was used before.
    async fn key_owner(&self, api_key: &str, key: &str) -> Result<Option<KeyOwner>, StoreError>;

    /// Frees an idempotency key for another try, if it still stands for this transaction.
    async fn release_key(&self, api_key: &str, key: &str, id: TransactionId) -> Result<(), StoreError>;

    /// The gasless transaction that took that nonce last, whatever became of it.
    async fn nonce_holder(&self, signer: Signer, nonce: u64) -> Result<Option<Transaction>, StoreError>;

    /// The highest nonce of a signer that a transaction has taken which has not failed.
    async fn last_nonce(&self, signer: Signer) -> Result<Option<u64>, StoreError>;

    /// Stores new rows, all or none. Durable when it returns.
    async fn insert(&self, rows: &[Transaction]) -> Result<(), StoreError>;

    /// One row.
    async fn get(&self, id: TransactionId) -> Result<Option<Transaction>, StoreError>;

    /// The row that is, or ever was, bound to a relayer's transaction.
    async fn find_bound(&self, tx_id: &RelayerTxId) -> Result<Option<Transaction>, StoreError>;

    /// Which of these relayer transactions are, or ever were, bound to some row.
    async fn bound_among(&self, tx_ids: &[RelayerTxId]) -> Result<Vec<RelayerTxId>, StoreError>;

    /// Saves a move, with its steps, if the row's version is one below; durable when it returns. A relayer
    /// transaction that another row already has is a [`StoreError::Conflict`].
    async fn save(&self, moved: &Moved) -> Result<Saved, StoreError>;

    /// Adds a step to a row's timeline without moving it.
    async fn note(&self, id: TransactionId, step: &Step, now: Timestamp) -> Result<(), StoreError>;

    /// A row's timeline, oldest first.
    async fn timeline(&self, id: TransactionId) -> Result<Vec<TimelineEntry>, StoreError>;

    /// A page of rows, newest first.
    async fn list(
        &self,
        filter: &Filter,
        before: Option<TransactionId>,
        max: usize,
    ) -> Result<Vec<Transaction>, StoreError>;

    /// Rows of that kind whose check is due, the longest overdue first.
    async fn due(&self, kind: Due, now: Timestamp, max: usize) -> Result<Vec<Transaction>, StoreError>;

    /// Rows with a claim, newest first.
    async fn claimed(&self, max: usize) -> Result<Vec<Transaction>, StoreError>;

    /// The row last bound to that relayer before `before`: a witness of whether the relayer still remembers.
    async fn bound_before(&self, relayer: &RelayerUrl, before: Timestamp) -> Result<Option<Transaction>, StoreError>;

    /// Keeps a webhook whose transaction is not bound yet.
    async fn keep_early_webhook(&self, tx_id: &RelayerTxId, record: &str, now: Timestamp) -> Result<(), StoreError>;

    /// Takes out the webhooks kept for a transaction, in the order they came.
    async fn take_early_webhooks(&self, tx_id: &RelayerTxId) -> Result<Vec<String>, StoreError>;

    /// Drops early webhooks received before `before`, and consumers not seen since.
    async fn forget(&self, before: Timestamp) -> Result<u64, StoreError>;

    /// Says that a consumer is alive.
    async fn heartbeat(&self, consumer: &ConsumerId, now: Timestamp) -> Result<(), StoreError>;

    /// When a consumer was last alive.
    async fn last_heartbeat(&self, consumer: &ConsumerId) -> Result<Option<Timestamp>, StoreError>;

    /// Counts for the metrics and the health page.
    async fn counts(&self) -> Result<TransactionCounts, StoreError>;

    /// Answers if the database does.
    async fn ping(&self) -> Result<(), StoreError>;
}

/// What a client calls a request, so that it can repeat it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdempotencyKey {
    /// As sent; it belongs to the API key it came with.
    pub key: String,
    /// Of the request, normalised: another request under the same key is a mistake of the client's.
    pub body_sha256: [u8; 32],
}

/// What an idempotency key stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyOwner {
    /// The transaction.
    pub id: TransactionId,
    /// Of its request.
    pub body_sha256: [u8; 32],
}

/// A new row, and what the client called its request.
pub type NewTransaction = (Transaction, Option<IdempotencyKey>);

/// What became of an accept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accepted {
    /// Stored.
    Stored,
    /// The same request came before, as this transaction.
    Duplicate(TransactionId),
    /// Another request came before under the same key.
    KeyReused,
    /// Nothing was stored: this transaction, which has not failed, has the signer's nonce.
    NonceTaken(TransactionId),
}

/// What a row that is due is waiting for; a row waits for one thing at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// Somebody holds a claim.
    Claimed,
    /// A relayer has it.
    Bound,
    /// Neither: its message should be in the queue.
    Waiting,
}

/// What became of a save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saved {
    /// It is stored. `early`: the row was newly bound to a relayer transaction that webhooks have spoken of already.
    Yes {
        /// See above.
        early: bool,
    },
    /// Somebody else moved the row in between: read it again and decide anew.
    Stale,
}

/// One line of a timeline, as stored.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct TimelineEntry {
    /// Its place.
    pub seq: u64,
    /// When.
    pub at: Timestamp,
    /// What, in one word.
    pub action: String,
    /// The rest.
    pub detail: String,
}

/// Which rows to list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// Only this status.
    pub status: Option<Status>,
    /// Only this kind.
    pub kind: Option<Kind>,
    /// Only what this relayer has, or may have.
    pub relayer: Option<RelayerUrl>,
    /// Only accepted at or after.
    pub from: Option<Timestamp>,
    /// Only accepted before.
    pub until: Option<Timestamp>,
    /// Only those whose outcome is of unknown outcome.
    pub outcome_unknown: bool,
}

/// Counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TransactionCounts {
    /// Rows that are not final, by status.
    pub open: Vec<(Status, u64)>,
    /// When the oldest pending row was accepted.
    pub oldest_pending: Option<Timestamp>,
    /// Claims held.
    pub claims: u64,
    /// Claims whose outcome is unknown.
    pub claims_outcome_unknown: u64,
    /// Rows whose relayer has forgotten them.
    pub forgotten: u64,
}

/// What can go wrong at the seam.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The database could not do it; nothing was changed.
    #[error("the database is unavailable")]
    Unavailable(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// No answer: it may have been changed.
    #[error("the database did not answer; the outcome is unknown")]
    OutcomeUnknown(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A rule of the database forbids it.
    #[error("the rule {constraint} forbids it")]
    Conflict {
        /// Which one.
        constraint: &'static str,
    },
    /// The schema is older than this program.
    #[error("the database's schema is at version {found} and this program needs {needed}: run `baton migrate`")]
    NotMigrated {
        /// The version found.
        found: usize,
        /// The version needed.
        needed: usize,
    },
    /// A row cannot be read back.
    #[error("row {id} of {table} has an unreadable {column}")]
    Corrupt {
        /// The table.
        table: &'static str,
        /// The column.
        column: &'static str,
        /// The row.
        id: String,
    },
}

impl StoreError {
    /// Whether the same call may succeed later.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::OutcomeUnknown(_))
    }
}

/// The rule that a relayer transaction belongs to one row.
pub const RELAYER_TX_ID_UNIQUE: &str = "relayer_transactions";

/// How long early webhooks are kept: a bind comes within a submission's time, or after the reconciler's search.
pub const EARLY_WEBHOOK_LIFETIME: Duration = Duration::from_secs(3600);
