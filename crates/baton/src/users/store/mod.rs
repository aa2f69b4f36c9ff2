//! Where users are kept, and the dead letters that can never become one. [`postgres`] and [`sqlite`] keep the same
//! contract; the same tests run on both.

pub mod postgres;
pub mod sqlite;

use async_trait::async_trait;

use super::quarantine::Quarantined;
use super::user::{User, UserId};
use crate::timestamp::Timestamp;

/// The users' database.
#[async_trait]
pub trait UserStore: Send + Sync + 'static {
    /// Stores users, each by its own fate, in the order given: what is [`Fate::Stored`] is on disk when this returns.
    /// A user that is there already counts as stored, so that a message may come twice; under the same id with another
    /// name or address it is refused. An error means that nobody knows of any of them, and that all may be tried again.
    async fn insert(&self, users: &[User]) -> Result<Inserted, StoreError>;

    /// One user, if it is stored.
    async fn get(&self, id: UserId) -> Result<Option<Enrolled>, StoreError>;

    /// Keeps dead letters that can never become a user. One that was kept before stays as it is.
    async fn quarantine(&self, messages: &[Quarantined]) -> Result<(), StoreError>;

    /// Quarantined messages ordered by message id, after this id, up to `max`.
    async fn list_quarantined(&self, after: Option<&str>, max: usize) -> Result<Vec<Quarantined>, StoreError>;

    /// Removes one of them; whether it was there.
    async fn remove_quarantined(&self, message_id: &str) -> Result<bool, StoreError>;

    /// The number of quarantined messages.
    async fn count_quarantined(&self) -> Result<u64, StoreError>;

    /// Whether it can be written to.
    async fn ping(&self) -> Result<(), StoreError>;
}

/// What became of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inserted {
    /// One for each user.
    pub fates: Vec<Fate>,
    /// How many were not there before.
    pub new: usize,
}

/// What became of one user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fate {
    /// It is there, since now or since before.
    Stored,
    /// The database takes the others but not this one, because.
    Refused(String),
}

/// A stored user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Enrolled {
    /// Who.
    pub user: User,
    /// When it was stored.
    pub created_at: Timestamp,
}

/// Why two rows with one id are not the same user.
pub(crate) const OTHER_USER: &str = "another user has this id";

/// What can go wrong with the database itself.
#[derive(Debug, thiserror::Error)]
#[error("the users' database has trouble ({})", trouble.name())]
pub struct StoreError {
    /// Of what kind.
    pub trouble: Trouble,
    /// What it said.
    #[source]
    pub source: pipeline::BoxError,
}

/// Kinds of trouble, for the metrics and the reason of a retry. All of them pass, by themselves or by an operator's hand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// Not reachable, or the connection was lost.
    Down,
    /// It takes no writes.
    ReadOnly,
    /// Two writers got in each other's way.
    Deadlock,
    /// No answer in time.
    Timeout,
    /// No space left.
    DiskFull,
    /// Anything else, such as a missing table or privilege.
    Other,
}

impl Trouble {
    /// For metrics and reasons.
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

impl StoreError {
    pub(crate) fn new(trouble: Trouble, source: impl Into<pipeline::BoxError>) -> Self {
        Self { trouble, source: source.into() }
    }
}
