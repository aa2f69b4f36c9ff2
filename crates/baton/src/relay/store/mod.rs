//! The contract of a [`TransactionStore`], with one folder per database: the same functions in the same order.
//!
//! The store knows no rules: a move is decided by pure code ([`crate::relay::state::transaction`], [`crate::relay::state::apply_report`]) and saved
//! only if the row is still the one that was decided about.

pub mod coalescer;
pub mod mysql;
pub mod notifications;
mod row;
pub mod sqlite;

use std::time::Duration;

use async_trait::async_trait;
use pipeline::sqlite::DatabaseError;

use crate::errors;
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

    /// The transaction that used an idempotency key before, if any.
    async fn key_owner(&self, api_key: &str, key: &str) -> Result<Option<KeyOwner>, StoreError>;

    /// Releases an idempotency key for another try, if this transaction still owns it.
    async fn release_key(&self, api_key: &str, key: &str, id: TransactionId) -> Result<(), StoreError>;

    /// The gasless transaction that took that nonce last, in any status.
    async fn nonce_holder(&self, signer: Signer, nonce: u64) -> Result<Option<Transaction>, StoreError>;

    /// The highest nonce of a signer held by a transaction that has not failed.
    async fn last_nonce(&self, signer: Signer) -> Result<Option<u64>, StoreError>;

    /// The lowest nonce of a signer, not below `from`, whose last holder was never accepted: its client read 503.
    async fn withdrawn_nonce(&self, signer: Signer, from: u64) -> Result<Option<u64>, StoreError>;

    /// Records a gasless request that failed on the chain ([`crate::relay::request::forward::Forward::digest`]) before
    /// another one takes its nonce.
    async fn record_failed_forward(&self, digest: [u8; 32], now: Timestamp) -> Result<(), StoreError>;

    /// Whether this request is recorded as failed on the chain.
    async fn is_failed_forward(&self, digest: [u8; 32]) -> Result<bool, StoreError>;

    /// Stores new rows, all or none. Durable when it returns.
    async fn insert(&self, rows: &[Transaction]) -> Result<(), StoreError>;

    /// One row.
    async fn get(&self, id: TransactionId) -> Result<Option<Transaction>, StoreError>;

    /// The row that is, or ever was, bound to a relayer's transaction.
    async fn find_bound(&self, tx_id: &RelayerTxId) -> Result<Option<Transaction>, StoreError>;

    /// Which of these relayer transactions are, or ever were, bound to some row.
    async fn bound_among(&self, tx_ids: &[RelayerTxId]) -> Result<Vec<RelayerTxId>, StoreError>;

    /// Makes a row the owner of a relayer's or the chain's transaction without binding it. `false` if another row owns it.
    async fn take_record(&self, tx_id: &RelayerTxId, id: TransactionId) -> Result<bool, StoreError>;

    /// Saves a move, with its steps, if the row's version is one below; durable when it returns. A relayer
    /// transaction that another row already has is a [`StoreError::Conflict`].
    async fn save(&self, moved: &Moved) -> Result<Saved, StoreError>;

    /// Adds a step to a row's timeline without moving it.
    async fn note(&self, id: TransactionId, step: &Step, now: Timestamp) -> Result<(), StoreError>;

    /// A row's timeline, oldest first.
    async fn timeline(&self, id: TransactionId) -> Result<Vec<TimelineEntry>, StoreError>;

    /// A page of rows, newest first by the time of their creation; the rows that follow the row `before`, and none if there
    /// is no such row. Large rows make a page shorter than `max`, but not empty.
    async fn list(
        &self,
        filter: &Filter,
        before: Option<TransactionId>,
        max: usize,
    ) -> Result<Vec<Transaction>, StoreError>;

    /// Rows of that kind whose check is due, the longest overdue first; fewer than `max` if they are large.
    async fn due(&self, kind: Due, now: Timestamp, max: usize) -> Result<Vec<Transaction>, StoreError>;

    /// The same, and moves their check to `until` in one statement, so that no other consumer finds them due meanwhile. The
    /// rows' versions stay: a concurrent save wins, with its own time of the next check.
    async fn lease_due(
        &self,
        kind: Due,
        now: Timestamp,
        until: Timestamp,
        max: usize,
    ) -> Result<Vec<Transaction>, StoreError>;

    /// Takes the lease of a sweep that consumers share, until `until`: if it has ended, was never taken, or is the one that
    /// ends at `held`. Returns whether it was taken. A consumer that dies stops the sweep for the rest of its lease.
    async fn lease_sweep(
        &self,
        sweep: &'static str,
        held: Option<Timestamp>,
        now: Timestamp,
        until: Timestamp,
    ) -> Result<bool, StoreError>;

    /// Rows with a claim, newest first.
    async fn claimed(&self, max: usize) -> Result<Vec<Transaction>, StoreError>;

    /// The records of that relayer that were bound last before `before`, newest first: witnesses that its list must
    /// show. Imported rows, and rows bound to a transaction of the chain, are left out.
    async fn last_bound(
        &self,
        relayer: &RelayerUrl,
        before: Timestamp,
        max: usize,
    ) -> Result<Vec<BoundRecord>, StoreError>;

    /// Rows that are bound to that relayer and not final, in no order.
    async fn open_at(&self, relayer: &RelayerUrl, max: usize) -> Result<Vec<Transaction>, StoreError>;

    /// The records of rows bound to that relayer, not final, that have counted as forgotten since then although they were
    /// bound for less than `kept` (it deletes older records itself), in no order.
    async fn forgotten_at(
        &self,
        relayer: &RelayerUrl,
        since: Timestamp,
        kept: Duration,
        max: usize,
    ) -> Result<Vec<ForgottenRecord>, StoreError>;

    /// Which of these nonces of a relayer are of transactions bound there, and of which.
    async fn nonce_owners(&self, relayer: &RelayerUrl, nonces: &[u64])
    -> Result<Vec<(u64, TransactionId)>, StoreError>;

    /// Keeps a webhook whose transaction is not bound yet.
    async fn keep_early_webhook(&self, tx_id: &RelayerTxId, record: &str, now: Timestamp) -> Result<(), StoreError>;

    /// Takes out the webhooks kept for a transaction, in the order they came.
    async fn take_early_webhooks(&self, tx_id: &RelayerTxId) -> Result<Vec<String>, StoreError>;

    /// Deletes early webhooks received before `before`, and consumers without a heartbeat since.
    async fn forget(&self, before: Timestamp) -> Result<u64, StoreError>;

    /// Records that a consumer is alive.
    async fn heartbeat(&self, consumer: &ConsumerId, now: Timestamp) -> Result<(), StoreError>;

    /// The last recorded heartbeat of a consumer.
    async fn last_heartbeat(&self, consumer: &ConsumerId) -> Result<Option<Timestamp>, StoreError>;

    /// Counts for the metrics and the health page.
    async fn counts(&self) -> Result<TransactionCounts, StoreError>;

    /// Answers if the database does; the embedded one, if it can also write.
    async fn ping(&self) -> Result<(), StoreError>;

    /// What each of these relayers holds, in their order. A row that moves meanwhile may be counted twice, but is not missed.
    /// Reads the open rows of these relayers, however many rows are final or wait.
    async fn relayer_rows(
        &self,
        relayers: &[RelayerUrl],
        recent_since: RecentSince,
    ) -> Result<Vec<RelayerRows>, StoreError>;
}

/// A client's name for a request, so that it can be repeated safely.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdempotencyKey {
    /// As sent. Scoped to the API key.
    pub key: String,
    /// Hash of the normalised request: another request under the same key is a client error.
    pub body_sha256: [u8; 32],
}

/// The owner of an idempotency key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyOwner {
    /// The transaction.
    pub id: TransactionId,
    /// Hash of its request.
    pub body_sha256: [u8; 32],
}

/// A new row with its idempotency key.
pub type NewTransaction = (Transaction, Option<IdempotencyKey>);

/// The result of an accept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accepted {
    /// Stored.
    Stored,
    /// This transaction came from an equal request with the same key; nothing was stored.
    Duplicate(TransactionId),
    /// The key was used for a different request; nothing was stored.
    KeyReused,
    /// This transaction, which has not failed, holds the signer's nonce; nothing was stored.
    NonceTaken(TransactionId),
}

/// What a due row waits for; a row waits for one thing at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    /// A consumer holds a claim.
    Claimed,
    /// A relayer has it.
    Bound,
    /// Neither: its message should be in the queue.
    Waiting,
}

/// The result of a save.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saved {
    /// Stored. `early`: the row was newly bound to a relayer transaction that has early webhooks.
    Yes {
        /// Whether early webhooks wait to be applied.
        early: bool,
    },
    /// Another writer moved the row: read it again and decide again.
    Stale,
}

/// One line of a timeline, as stored.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct TimelineEntry {
    /// Position in the timeline, from 1.
    pub seq: u64,
    /// Time by the store's clock.
    pub at: Timestamp,
    /// A stable name such as `claimed`.
    pub action: String,
    /// Details for people.
    pub detail: String,
}

/// A relayer's record that a row is bound to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BoundRecord {
    /// The relayer's id.
    pub tx_id: RelayerTxId,
    /// When the row was bound to it, by the store's clock.
    pub at: Timestamp,
    /// The account that the relayer named for it.
    pub account: Option<String>,
}

/// A relayer's record whose row counts as forgotten.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForgottenRecord {
    /// The relayer's id.
    pub tx_id: RelayerTxId,
    /// When the row was bound to it, by the store's clock.
    pub at: Timestamp,
    /// Whether the relayer only gives no answer about it. It has not said that it does not know it.
    pub only_silent: bool,
}

/// A place in the list: a row's creation time and its id. Ids alone would not do: an imported row has its relayer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListPlace {
    /// When the row was accepted, or created at its relayer.
    pub created_at: Timestamp,
    /// Decides between rows of one millisecond.
    pub id: TransactionId,
}

/// Which rows to list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    /// Only this status.
    pub status: Option<Status>,
    /// Only this kind.
    pub kind: Option<Kind>,
    /// Only rows bound to or claimed for this relayer.
    pub relayer: Option<RelayerUrl>,
    /// Only created at or after.
    pub from: Option<Timestamp>,
    /// Only created before.
    pub until: Option<Timestamp>,
    /// Only rows whose outcome is unknown.
    pub outcome_unknown: bool,
}

impl Filter {
    /// One filter for each status and kind that match. An index that begins with both has the rows of each in the order of
    /// the list, so that a list of several is a merge that skips no row.
    pub(crate) fn by_status_and_kind(&self) -> Vec<Self> {
        let statuses = self.status.as_ref().map_or(Status::ALL, std::slice::from_ref);
        let kinds = self.kind.as_ref().map_or(Kind::ALL, std::slice::from_ref);
        let each = statuses.iter().flat_map(|status| kinds.iter().map(move |kind| (*status, *kind)));
        each.map(|(status, kind)| Self { status: Some(status), kind: Some(kind), ..self.clone() }).collect()
    }
}

/// Row counts for the metrics and `/health`.
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

/// What counts as recent in [`TransactionStore::relayer_rows`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecentSince {
    /// Open rows that were bound or claimed at or after this time.
    pub open_since: Timestamp,
    /// Rows that became final at or after this time.
    pub ended_since: Timestamp,
    /// Counting of ended rows stops at this number.
    pub ended_max: u64,
}

/// The rows of one relayer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RelayerRows {
    /// Bound to it and not final.
    pub bound: u64,
    /// Claimed for it: being submitted, or of unknown outcome.
    pub claimed: u64,
    /// Those of both that were bound or claimed recently.
    pub recent: u64,
    /// Those of them that it has not signed, as far as it has said.
    pub recent_unsigned: u64,
    /// Bound to it, not final, and without a known nonce.
    pub unsigned: u64,
    /// When the oldest of those was bound that were bound recently.
    pub oldest_unsigned: Option<Timestamp>,
    /// The lowest nonce of its open rows, and when that row was bound.
    pub oldest_signed: Option<(u64, Timestamp)>,
    /// The highest nonce of its open rows.
    pub nonce_max: Option<u64>,
    /// Rows of it that became final recently, up to the maximum.
    pub ended: u64,
    /// When a row of it last became final, or was changed after that.
    pub last_ended: Option<Timestamp>,
}

impl RelayerRows {
    /// All rows that it has or may have.
    pub fn open(&self) -> u64 {
        self.bound + self.claimed
    }
}

/// Failures of a store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The database failed; nothing was changed.
    #[error("the database is unavailable")]
    Unavailable(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The database did not answer; the change may have happened.
    #[error("the database did not answer; the outcome is unknown")]
    OutcomeUnknown(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A unique constraint forbids it.
    #[error("the constraint {constraint} forbids it")]
    Conflict {
        /// Name of the constraint.
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
    /// The schema is newer than this program, which could misread it.
    #[error("the database's schema is at version {found} and this program knows {known}: run a newer version of baton")]
    TooNew {
        /// The version found.
        found: usize,
        /// The last version that this program knows.
        known: usize,
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

    /// The cause in a few words for `/health`, which is public.
    pub fn reason(&self) -> &'static str {
        let (Self::Unavailable(source) | Self::OutcomeUnknown(source)) = self else { return "error" };
        source.downcast_ref::<DatabaseError>().map_or("no answer", errors::public_reason)
    }
}

/// The largest number that every database stores. Nonces and block numbers beyond it come from a faulty relayer or node.
pub const NUMBER_MAX: u64 = i64::MAX as u64;

/// The constraint that a relayer transaction belongs to one row.
pub const RELAYER_TX_ID_UNIQUE: &str = "relayer_transactions";

/// How long early webhooks are kept: the bind follows within a submission timeout, or after the reconciler's lookup.
pub const EARLY_WEBHOOK_LIFETIME: Duration = Duration::from_secs(3600);
