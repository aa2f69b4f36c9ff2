//! What clients are notified of: the events of a change of a row (pure). The store writes them in the same commit as the
//! change ([`super::transaction::Moved::events`]), so that none is lost and none is invented.

use serde_json::json;

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

    /// The end of the name, which is also that of an event's id.
    fn suffix(self) -> &'static str {
        self.name().rsplit('.').next().unwrap_or_default()
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
    /// event; `which` tells several events of one kind apart. Ids sort by the age of their transactions, so that those in
    /// use are next to each other in the database.
    fn derive(transaction: TransactionId, kind: EventType, which: u64) -> Self {
        Self(format!("evt_{}_{which:x}_{}", transaction.0.simple(), kind.suffix()))
    }

    /// The kind of the event by its id alone, for one that is missing. The id of a test names none.
    pub fn kind(&self) -> EventType {
        let suffix = self.0.rsplit('_').next();
        let named = EventType::SUBSCRIBABLE.into_iter().find(|kind| suffix == Some(kind.suffix()));
        named.unwrap_or(EventType::Test)
    }
}

impl std::fmt::Display for EventId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// That an event happened. [`Transaction::event`] makes the event of it, which costs more than most events are worth:
/// often no endpoint asks for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventMark {
    /// Its kind.
    pub kind: EventType,
    /// When it happened, by the store's clock.
    at: Timestamp,
    /// Tells several events of one kind apart: the row's version, or when the row was claimed or bound.
    which: u64,
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

/// Longest error message in a payload: receivers expect payloads below 20 kB.
const MESSAGE_CHARS_MAX: usize = 2000;

impl Transaction {
    /// The events of the change of status from `before` to this row.
    pub fn events_since(&self, before: &Self) -> Vec<EventMark> {
        let mut events = Vec::new();
        if self.status != before.status {
            match self.status {
                Status::Submitted => events.push(self.mark(EventType::Submitted)),
                Status::Confirmed | Status::Success => {
                    events.push(self.mark(EventType::Confirmed));
                    events.push(self.mark(EventType::Completed));
                }
                // Its client read 503: for that client there is no such transaction.
                Status::Failed if self.failed_by == Some(FailedBy::Intake) => {}
                Status::Failed => {
                    events.push(self.mark(EventType::Failed));
                    events.push(self.mark(EventType::Completed));
                }
                Status::Pending => {}
            }
        }
        events
    }

    /// Since when its outcome is unknown, if it is.
    pub fn unknown_since(&self) -> Option<Timestamp> {
        if self.status.is_final() || !self.outcome_unknown() {
            return None;
        }
        match (&self.claim, &self.binding) {
            (Some(claim), _) => Some(claim.at),
            (None, binding) => binding.as_ref()?.forgotten_since,
        }
    }

    /// The event that its outcome waits for an operator: for a row whose outcome has been unknown for long at `now`. The
    /// same event each time the row is looked at. A look may leave `updated_at` as it is, so the time is a parameter.
    pub fn unknown_event(&self, now: Timestamp) -> Option<EventMark> {
        self.unknown_since()?;
        // A takeover changes the claim's token, not its time. A row is bound once to a record, at a time of its own.
        let began = self.claim.as_ref().map(|claim| claim.at).or(self.binding.as_ref().map(|binding| binding.at))?;
        Some(EventMark { kind: EventType::Unknown, at: now, which: began.0.unsigned_abs() })
    }

    fn mark(&self, kind: EventType) -> EventMark {
        EventMark { kind, at: self.updated_at, which: self.version }
    }

    /// The event behind a mark of this row.
    pub fn event(&self, mark: &EventMark) -> Event {
        let EventMark { kind, at, which } = *mark;
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
            "timestamp": at,
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
            at,
            payload: payload.to_string(),
            id,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::config::{Config, Service};
    use crate::relay::request::call::DirectRequest;
    use crate::relay::state::transaction::{ConsumerId, RelayerTxId, RelayerUrl};

    const NOW: Timestamp = Timestamp(1_800_000_000_000);

    fn submitted() -> (Transaction, Transaction) {
        let timings = Config::from_vars(Service::Command, |_| None).unwrap().relay.timings;
        let body = json!({ "to": "0x5FbDB2315678afecb367f032d93F642f64180aa3", "data": "0xab", "gas": 21000 });
        let request = DirectRequest::parse(&body).unwrap();
        let row = Transaction::accepted(TransactionId::generate(), &request, "key".into(), NOW, &timings);
        let (relayer, token) = (RelayerUrl("http://r1".into()), uuid::Uuid::new_v4());
        let consumer = ConsumerId("c".into());
        let claimed = row.claim(&consumer, token, &relayer, "test", NOW, &timings).unwrap().transaction;
        let id = RelayerTxId("oz-1".into());
        let bound = claimed.bind(token, &id, Some("0xf"), "test", NOW, &timings).unwrap().transaction;
        (claimed, bound)
    }

    fn ended(before: &Transaction, status: Status, by: Option<FailedBy>) -> Transaction {
        Transaction { status, failed_by: by, version: before.version + 1, ..before.clone() }
    }

    fn names(events: &[EventMark]) -> Vec<&'static str> {
        events.iter().map(|event| event.kind.name()).collect()
    }

    fn events(row: &Transaction, before: &Transaction) -> Vec<Event> {
        row.events_since(before).iter().map(|mark| row.event(mark)).collect()
    }

    #[test]
    fn a_change_of_status_has_its_events_and_nothing_else_has() {
        let (claimed, bound) = submitted();
        assert_eq!(names(&bound.events_since(&claimed)), ["transaction.submitted"]);
        assert!(bound.events_since(&bound).is_empty());
        let confirmed = ended(&bound, Status::Confirmed, None);
        assert_eq!(names(&confirmed.events_since(&bound)), ["transaction.confirmed", "transaction.completed"]);
        let failed = ended(&bound, Status::Failed, Some(FailedBy::Relayer));
        assert_eq!(names(&failed.events_since(&bound)), ["transaction.failed", "transaction.completed"]);
        let withdrawn = ended(&claimed, Status::Failed, Some(FailedBy::Intake));
        assert!(withdrawn.events_since(&claimed).is_empty(), "its client read 503");
    }

    #[test]
    fn an_id_is_the_same_for_the_same_change_and_positions_grow() {
        let (claimed, bound) = submitted();
        let first = events(&bound, &claimed);
        assert_eq!(first, events(&bound, &claimed));
        assert!(first[0].id.0.starts_with("evt_") && !first[0].id.0.contains('.'));
        let ends = events(&ended(&bound, Status::Confirmed, None), &bound);
        assert!(first[0].position < ends[0].position && ends[0].position < ends[1].position);
        assert_ne!(ends[0].id, ends[1].id);
        assert_eq!(ends[1].id.0, format!("evt_{}_{:x}_completed", bound.id.0.simple(), bound.version + 1));
        assert!(ends[1].id.0.len() <= 64, "as long as a column");
        assert_eq!([&first[0], &ends[0], &ends[1]].map(|event| event.id.kind() == event.kind), [true; 3]);
        assert_eq!(EventId("evt_67e5504410b1426f9247bb680e5fe0c8".to_owned()).kind(), EventType::Test);
    }

    #[test]
    fn an_unknown_outcome_has_one_event_however_often_it_is_looked_at() {
        let minute = std::time::Duration::from_secs(60);
        let (claimed, bound) = submitted();
        assert_eq!(bound.unknown_event(NOW), None, "its outcome is not unknown");
        let unknown = bound.unresolved("its nonce is open", NOW + minute * 2, NOW + minute).unwrap().transaction;
        assert_eq!(unknown.unknown_since(), Some(NOW + minute));
        let looked = unknown.unresolved("its nonce is open", NOW + minute * 9, NOW + minute * 8).unwrap().transaction;
        assert_eq!(looked.unknown_since(), Some(NOW + minute), "a look does not start it anew");
        let event = |row: &Transaction, at: Timestamp| row.event(&row.unknown_event(at).unwrap());
        let (first, second) = (event(&unknown, NOW + minute * 2), event(&looked, NOW + minute * 8));
        assert_eq!((&first.id, first.kind), (&second.id, EventType::Unknown));
        assert_eq!(second.at, NOW + minute * 8, "when it was found, although the look leaves `updatedAt`");
        let with_token = |token| {
            let mut row = claimed.clone();
            let claim = row.claim.as_mut().unwrap();
            claim.token = uuid::Uuid::from_u128(token);
            claim.unknown = Some(crate::relay::state::transaction::UnknownOutcome {
                reason: "no answer".to_owned(),
                open_until: NOW,
                kind: crate::relay::state::transaction::UnknownCause::Silent,
                absent_since: None,
            });
            row.unknown_event(NOW).unwrap()
        };
        assert_eq!(with_token(1), with_token(2), "a takeover changes the token");
    }

    #[test]
    fn a_payload_stays_below_20_kb() {
        let (_, bound) = submitted();
        let mut failed = ended(&bound, Status::Failed, Some(FailedBy::Relayer));
        failed.error_message = Some("\u{1}".repeat(1 << 20));
        for event in events(&failed, &bound) {
            assert!(event.payload.len() < 20_000, "{}", event.payload.len());
            let payload: Value = serde_json::from_str(&event.payload).unwrap();
            assert_eq!(payload["status"], "failed");
        }
    }
}
