//! What clients are notified of: the events of a change of a row (pure). The store writes them in the same commit as the
//! change ([`super::transaction::Moved::events`]), so that none is lost and none is invented.

use std::time::Duration;

use serde_json::json;
use sha2::{Digest, Sha256};

use super::transaction::{FailedBy, Status, Transaction, TransactionId};
use crate::timestamp::Timestamp;

/// The kinds of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EventType {
    /// A relayer has the transaction.
    Submitted,
    /// The chain has executed it.
    Confirmed,
    /// It failed.
    Failed,
    /// It is final: confirmed or failed.
    Completed,
    /// Its outcome is unknown and waits for an operator.
    Unknown,
    /// A test that a client asked for; it belongs to no transaction.
    Test,
}

impl EventType {
    /// The kinds that an endpoint can subscribe to.
    pub const SUBSCRIBABLE: [Self; 5] =
        [Self::Submitted, Self::Confirmed, Self::Failed, Self::Completed, Self::Unknown];

    /// The name that clients read.
    pub fn name(self) -> &'static str {
        match self {
            Self::Submitted => "transaction.submitted",
            Self::Confirmed => "transaction.confirmed",
            Self::Failed => "transaction.failed",
            Self::Completed => "transaction.completed",
            Self::Unknown => "transaction.unknown",
            Self::Test => "webhook.test",
        }
    }

    /// The kind of that name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::SUBSCRIBABLE.into_iter().chain([Self::Test]).find(|kind| kind.name() == name)
    }
}

/// The id of an event: `webhook-id` of each of its deliveries, the same over all attempts.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EventId(pub String);

impl EventId {
    /// The id of this kind of event of this transaction. Derived, so that an event that is written again is the same
    /// event; `which` tells several events of one kind apart.
    fn derive(transaction: TransactionId, kind: EventType, which: &[u8]) -> Self {
        let mut hash = Sha256::new();
        hash.update(transaction.0.as_bytes());
        hash.update(kind.name().as_bytes());
        hash.update([0]);
        hash.update(which);
        Self(format!("evt_{}", hex::encode(&hash.finalize()[..16])))
    }
}

impl std::fmt::Display for EventId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Something that happened to a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Its id.
    pub id: EventId,
    /// Its kind.
    pub kind: EventType,
    /// The transaction.
    pub transaction: TransactionId,
    /// The name of the API key that sent the transaction.
    pub api_key: String,
    /// Its place among the transaction's events: it only grows.
    pub position: u64,
    /// When it happened, by the store's clock.
    pub at: Timestamp,
    /// What the client receives: JSON text.
    pub payload: String,
}

/// An unknown outcome that is older than this waits for an operator: by then the chain and the relayer's list have had
/// several looks.
const OPERATOR_AFTER: Duration = Duration::from_secs(600);
/// Longest error message in a payload: receivers expect payloads below 20 kB.
const MESSAGE_CHARS_MAX: usize = 2000;

impl Transaction {
    /// The events of the move from `before` to this row.
    pub fn events_since(&self, before: &Self) -> Vec<Event> {
        let mut events = Vec::new();
        if self.status != before.status {
            match self.status {
                Status::Submitted => events.push(self.event(EventType::Submitted)),
                Status::Confirmed | Status::Success => {
                    events.push(self.event(EventType::Confirmed));
                    events.push(self.event(EventType::Completed));
                }
                // Its client read 503: for that client there is no such transaction.
                Status::Failed if self.failed_by == Some(FailedBy::Intake) => {}
                Status::Failed => {
                    events.push(self.event(EventType::Failed));
                    events.push(self.event(EventType::Completed));
                }
                Status::Pending => {}
            }
        }
        events.extend(self.unknown_event());
        events
    }

    /// The event that its outcome waits for an operator. The same event each time the row is looked at.
    fn unknown_event(&self) -> Option<Event> {
        if self.status.is_final() || !self.outcome_unknown() {
            return None;
        }
        let (since, which) = match (&self.claim, &self.binding) {
            (Some(claim), _) => (claim.at, claim.token.as_bytes().to_vec()),
            (None, Some(binding)) => (binding.forgotten_since?, binding.tx_id.0.as_bytes().to_vec()),
            (None, None) => return None,
        };
        (self.updated_at.since(since) >= OPERATOR_AFTER).then(|| self.event_named(EventType::Unknown, &which))
    }

    fn event(&self, kind: EventType) -> Event {
        self.event_named(kind, &self.version.to_be_bytes())
    }

    fn event_named(&self, kind: EventType, which: &[u8]) -> Event {
        let id = EventId::derive(self.id, kind, which);
        // Two for each version: `completed` follows the kind that it sums up.
        let position = self.version * 2 + u64::from(kind == EventType::Completed);
        let message = self.error_message.as_ref().map(|text| text.chars().take(MESSAGE_CHARS_MAX).collect::<String>());
        let payload = json!({
            "event": kind.name(),
            "eventId": id.0,
            "transactionId": self.id.to_string(),
            "status": self.status.name(),
            "sequence": self.version,
            "timestamp": self.updated_at,
            "hash": self.hash,
            "transactionHash": self.hash,
            "blockNumber": self.block_number,
            "createdAt": self.created_at,
            "confirmedAt": self.confirmed_at,
            "type": self.kind.name(),
            "from": self.from,
            "to": self.call.to.to_checksum(None),
            "value": self.call.value.to_string(),
            "outcomeUnknown": self.outcome_unknown(),
            "unverified": self.is_unverified(),
            "error_message": message,
        });
        Event {
            kind,
            transaction: self.id,
            api_key: self.api_key.clone(),
            position,
            at: self.updated_at,
            payload: payload.to_string(),
            id,
        }
    }
}
