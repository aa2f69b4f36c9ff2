//! The store of users and of quarantined messages: the contract, which [`postgres`] and [`sqlite`] implement and the same
//! tests check on both.

pub mod postgres;
pub mod sqlite;

use std::cmp::Ordering;

use async_trait::async_trait;

use super::quarantined_message::Quarantined;
use super::user::{User, UserId};
use crate::timestamp::Timestamp;

/// The users' database.
#[async_trait]
pub trait UserStore: Send + Sync + 'static {
    /// Stores users and returns one outcome for each, in order. A row that is [`InsertOutcome::Stored`] is on disk when
    /// this returns. A user that exists already counts as stored, so that a message may be delivered twice; one with the
    /// same id but another name or address is refused. After an error the outcome of every row is unknown, and all may
    /// be inserted again.
    async fn insert(&self, users: &[User]) -> Result<Inserted, UserStoreError>;

    /// One user; `None` if it is not stored.
    async fn get(&self, id: UserId) -> Result<Option<Enrolled>, UserStoreError>;

    /// Adds messages to the quarantine. One that is there already stays as it is.
    async fn quarantine(&self, messages: &[Quarantined]) -> Result<(), UserStoreError>;

    /// Quarantined messages ordered by message id, after this id, up to `max`.
    async fn list_quarantined(&self, after: Option<&str>, max: usize) -> Result<Vec<Quarantined>, UserStoreError>;

    /// Removes one message from the quarantine; returns whether it was there.
    async fn remove_quarantined(&self, message_id: &str) -> Result<bool, UserStoreError>;

    /// The number of quarantined messages.
    async fn count_quarantined(&self) -> Result<u64, UserStoreError>;

    /// Fails unless the database accepts writes.
    async fn ping(&self) -> Result<(), UserStoreError>;
}

/// The result of inserting a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inserted {
    /// One for each user, in the order given.
    pub outcomes: Vec<InsertOutcome>,
    /// Rows that did not exist before.
    pub new: usize,
}

/// The result for one user of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InsertOutcome {
    /// Its row exists, inserted now or earlier.
    Stored,
    /// Refused, with the reason; the rest of the batch is stored.
    Refused(String),
}

/// A stored user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Enrolled {
    /// The user as it was accepted.
    pub user: User,
    /// When its row was inserted.
    pub created_at: Timestamp,
}

/// Reason of a refusal: the stored row of this id has another name or address.
pub(crate) const OTHER_USER: &str = "another user has this id";

/// A failure of the database itself, never of a row.
#[derive(Debug, thiserror::Error)]
#[error("the users' database failed ({})", kind.name())]
pub struct UserStoreError {
    /// For the metrics and the reason of a retry.
    pub kind: UserStoreErrorKind,
    /// The error of the database or its driver.
    #[source]
    pub source: pipeline::BoxError,
}

/// Kinds of failure. All of them are transient: they end by themselves or by an operator's action.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UserStoreErrorKind {
    /// Unreachable, or the connection was lost.
    Down,
    /// The database refuses writes.
    ReadOnly,
    /// Deadlock or serialization failure.
    Deadlock,
    /// No answer within the time limit.
    Timeout,
    /// No space left.
    DiskFull,
    /// Anything else, such as a missing table or privilege.
    Other,
}

impl UserStoreErrorKind {
    /// The name in metrics, reasons and `/health`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Down => "down",
            Self::ReadOnly => "read-only",
            Self::Deadlock => "deadlock",
            Self::Timeout => "timeout",
            Self::DiskFull => "disk-full",
            Self::Other => "other",
        }
    }
}

impl UserStoreError {
    pub(crate) fn new(kind: UserStoreErrorKind, source: impl Into<pipeline::BoxError>) -> Self {
        Self { kind, source: source.into() }
    }
}

/// Fails if the schema's version is not the one that this program knows.
pub(crate) fn check_version(found: usize, known: usize) -> Result<(), UserStoreError> {
    let what = match found.cmp(&known) {
        Ordering::Less => "run `baton migrate`",
        Ordering::Equal => return Ok(()),
        Ordering::Greater => "run a newer version of baton",
    };
    let text = format!("the users' schema is at version {found} and this program knows {known}: {what}");
    Err(UserStoreError::new(UserStoreErrorKind::Other, text))
}
