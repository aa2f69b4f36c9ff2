//! The contract of a [`NotificationStore`]: endpoints of clients, and what is still to be delivered to them. Both stores
//! implement it beside [`super::TransactionStore`], because an event is written in the same commit as the change of its row.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use super::StoreError;
use crate::config::Secret;
use crate::relay::state::event::{Event, EventId, EventType};
use crate::relay::state::transaction::{Step, TransactionId};
use crate::timestamp::Timestamp;

/// Keeps endpoints, deliveries and attempts.
#[async_trait]
pub trait NotificationStore: Send + Sync + 'static {
    /// Stores a new endpoint unless its owner has `max` endpoints already; returns whether it was stored. An endpoint that
    /// has this id already is replaced.
    async fn put_endpoint(&self, endpoint: &Endpoint, max: usize) -> Result<bool, StoreError>;

    /// One endpoint.
    async fn endpoint(&self, id: EndpointId) -> Result<Option<Endpoint>, StoreError>;

    /// The endpoints of an owner, or all of them, oldest first.
    async fn endpoints(&self, owner: Option<&str>) -> Result<Vec<Endpoint>, StoreError>;

    /// Saves what an owner or operator changed, with the next version, if the stored version is `endpoint.version`;
    /// returns whether it was saved. Counts of failures and pauses are not saved, except that enabling an endpoint or giving
    /// it another URL resets them.
    async fn change_endpoint(&self, endpoint: &Endpoint) -> Result<bool, StoreError>;

    /// Deletes an endpoint with its deliveries and attempts; returns whether there was one.
    async fn delete_endpoint(&self, id: EndpointId) -> Result<bool, StoreError>;

    /// Enabled endpoints that are not paused and have a delivery due, the longest overdue first.
    async fn due_endpoints(&self, now: Timestamp) -> Result<Vec<DueEndpoint>, StoreError>;

    /// Leases due deliveries until `until`, at most `places` of each endpoint: the longest due first, and never one that
    /// follows an undelivered event of the same transaction: that is not due before the earlier one has ended. Of an endpoint
    /// that has nothing else due, such deliveries are put off, so that [`Self::due_endpoints`] does not list it. A delivery whose
    /// event is missing is leased too, without a payload: it has to end, or those behind it never go on.
    async fn lease_deliveries(
        &self,
        places: &[(EndpointId, usize)],
        now: Timestamp,
        until: Timestamp,
        lease: Uuid,
    ) -> Result<Vec<Delivery>, StoreError>;

    /// Ends leases without an attempt, if this lease still holds them: the deliveries are due again now, or after an earlier
    /// event of the same transaction.
    async fn return_deliveries(&self, deliveries: &[Delivery], now: Timestamp) -> Result<(), StoreError>;

    /// Records an attempt and what follows from it, in one commit. A success counts even if the lease was lost; a failure
    /// then adds to the log of attempts only. An endpoint that may not be disabled any more is left as it is, and its
    /// delivery is tried again.
    async fn record_attempt(&self, record: &AttemptRecord) -> Result<Recorded, StoreError>;

    /// Writes a test event for one endpoint only, due now, unless `max` test events wait there already; returns whether it
    /// was written.
    async fn put_test(&self, endpoint: EndpointId, event: &Event, max: usize) -> Result<bool, StoreError>;

    /// Makes events due again for an endpoint; never one that is missing.
    async fn requeue(&self, endpoint: EndpointId, what: &Requeue, now: Timestamp) -> Result<Requeued, StoreError>;

    /// A page of an endpoint's attempts, newest first, after the attempt `before`.
    async fn attempts(
        &self,
        endpoint: EndpointId,
        before: Option<Uuid>,
        max: usize,
    ) -> Result<Vec<Attempt>, StoreError>;

    /// Counts for metrics, health and lists; of each endpoint, up to 10,000 deliveries.
    async fn notification_counts(&self, now: Timestamp) -> Result<NotificationCounts, StoreError>;

    /// The same for one endpoint, each up to 10,000.
    async fn endpoint_counts(&self, endpoint: EndpointId) -> Result<EndpointCounts, StoreError>;

    /// Deletes what is older than `before`, up to about `max` rows of each kind: ended deliveries with their events, those
    /// that wait for a disabled endpoint, events without a delivery, and attempts. Returns how many; called again and again,
    /// it goes on from where it was.
    async fn forget_notifications(&self, before: Timestamp, now: Timestamp, max: usize) -> Result<u64, StoreError>;
}

/// The id of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointId(pub Uuid);

impl EndpointId {
    /// The endpoint of `CLIENT_WEBHOOK_URL`.
    pub const ENVIRONMENT: Self = Self(Uuid::from_u128(1));
}

impl std::fmt::Display for EndpointId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// The owner of an endpoint that gets the events of every API key.
pub const EVERY_KEY: &str = "";

/// An address that a client wants to be notified at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Its id.
    pub id: EndpointId,
    /// The name of the API key that registered it; [`EVERY_KEY`] for the environment's.
    pub owner: String,
    /// As registered.
    pub url: String,
    /// The kinds of events that it gets; not empty.
    pub events: Vec<EventType>,
    /// The owner's own words.
    pub description: Option<String>,
    /// Signs deliveries: `whsec_` and base64. Empty for the environment's endpoint, whose secret is not stored.
    pub secret: Secret,
    /// The secret before the last rotation, and until when deliveries are signed with it too.
    pub previous_secret: Option<(Secret, Timestamp)>,
    /// Incremented by each change.
    pub version: u64,
    /// When it was registered.
    pub created_at: Timestamp,
    /// When it was last changed by its owner, an operator, or a disabling.
    pub updated_at: Timestamp,
    /// Since when it gets nothing, and why.
    pub disabled: Option<Disabled>,
    /// When the first of the current failures was; none after a success.
    pub failing_since: Option<Timestamp>,
    /// Failures since the last success.
    pub failures: u32,
    /// No attempt before this time.
    pub paused_until: Option<Timestamp>,
}

/// Why an endpoint gets nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Disabled {
    /// When it was disabled.
    pub at: Timestamp,
    /// Why, for people.
    pub reason: String,
}

/// An endpoint with something to deliver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DueEndpoint {
    /// Its id.
    pub id: EndpointId,
    /// The API key that registered it, which shares a limit with that key's other endpoints.
    pub owner: String,
    /// Its URL, whose host shares a limit with other endpoints.
    pub url: String,
    /// Failures since the last success.
    pub failures: u32,
    /// When its longest overdue delivery became due.
    pub since: Timestamp,
}

/// One event for one endpoint, leased.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// The endpoint.
    pub endpoint: EndpointId,
    /// The event.
    pub event: EventId,
    /// The kind of the event.
    pub kind: EventType,
    /// The transaction.
    pub transaction: TransactionId,
    /// The event's place among those of its transaction.
    pub position: u64,
    /// When the event happened.
    pub created_at: Timestamp,
    /// Attempts before this one.
    pub attempts: u32,
    /// What is sent; none if the event is missing: something deleted it before it was delivered.
    pub payload: Option<String>,
    /// Identifies the lease.
    pub lease: Uuid,
}

/// One line of an endpoint's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// Sorts by time.
    pub id: Uuid,
    /// The event.
    pub event: EventId,
    /// 1 for the first attempt.
    pub number: u32,
    /// When it began.
    pub at: Timestamp,
    /// How long it took.
    pub duration: Duration,
    /// The status of the answer, if there was one.
    pub status: Option<u16>,
    /// Why it failed; none if it succeeded.
    pub error: Option<String>,
    /// The first bytes of the answer.
    pub answer: Option<String>,
}

/// An attempt with its consequences.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttemptRecord {
    /// The delivery.
    pub delivery: Delivery,
    /// What happened.
    pub attempt: Attempt,
    /// What becomes of the delivery.
    pub then: DeliveryThen,
    /// What becomes of the endpoint.
    pub endpoint: EndpointThen,
    /// The version of the endpoint that the attempt was made to. A failure says nothing about a later one, which may have
    /// another URL.
    pub endpoint_version: u64,
    /// The current time.
    pub now: Timestamp,
}

/// What [`NotificationStore::record_attempt`] stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recorded {
    /// What the record says, now or when the same record was stored before.
    AsDecided,
    /// The attempt only: its lease was lost.
    Late,
    /// The delivery is tried again: its endpoint was to be disabled, but was changed meanwhile, or has worked.
    NotDisabled,
}

/// What becomes of a delivery after an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeliveryThen {
    /// Done. The next event of the transaction is due now.
    Delivered,
    /// Tried again at this time. Later events of the transaction wait for it.
    RetryAt(Timestamp),
    /// Not tried again unless asked for. The next event of the transaction is due now.
    GivenUp,
}

/// What becomes of an endpoint after an attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EndpointThen {
    /// Nothing: the attempt was made to an earlier version of it.
    Unchanged,
    /// It works: failures are forgotten. A pause that another answer asked for stays.
    Works,
    /// One more failure; no other attempt before this time, or before the end of a longer pause.
    Fails {
        /// The pause, if any.
        paused_until: Option<Timestamp>,
        /// Whether its failures before this one count for nothing: they are long ago.
        anew: bool,
    },
    /// It is disabled. After that commit, what it waits for is given up, the longest due first and up to 10,000 events. The
    /// rest waits until it is enabled.
    Disable {
        /// Why, for people.
        reason: String,
        /// Only if it has failed since this time without a success, if there is one.
        failing_since: Option<Timestamp>,
    },
}

/// What to deliver again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Requeue {
    /// One event, delivered before or not. Nothing, if it is unknown or of another key.
    Event(EventId),
    /// Every event since then that the endpoint asks for and that was not delivered to it: given up, written while it was
    /// disabled, or waiting for its next attempt.
    Since(Timestamp),
}

/// What [`NotificationStore::requeue`] did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Requeued {
    /// Events that are due now.
    pub queued: u64,
    /// Events since then were not looked at: one call looks at a limited number. The next call goes on from here.
    pub next_since: Option<Timestamp>,
}

/// Counts of all endpoints.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NotificationCounts {
    /// Deliveries of enabled endpoints that are not delivered and not given up.
    pub waiting: u64,
    /// When the oldest of their events happened, and of those that are parked behind others.
    pub oldest_waiting: Option<Timestamp>,
    /// Enabled endpoints.
    pub enabled: u64,
    /// Disabled endpoints.
    pub disabled: u64,
    /// Enabled endpoints whose last attempt failed.
    pub failing: u64,
}

/// Counts of one endpoint.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EndpointCounts {
    /// Not delivered and not given up.
    pub waiting: u64,
    /// Given up, and still kept.
    pub given_up: u64,
}

impl AttemptRecord {
    /// The same attempt, without consequences: the delivery is due again.
    pub(super) fn try_again(&self) -> Self {
        Self { then: DeliveryThen::RetryAt(self.now), endpoint: EndpointThen::Unchanged, ..self.clone() }
    }

    /// Whether it disabled its endpoint, now or when it was stored before.
    pub(super) fn has_disabled(&self, recorded: Recorded) -> bool {
        recorded == Recorded::AsDecided && matches!(self.endpoint, EndpointThen::Disable { .. })
    }

    /// Why it disables its endpoint, if it does.
    pub(super) fn disabling_reason(&self) -> Option<&str> {
        match &self.endpoint {
            EndpointThen::Disable { reason, .. } => Some(reason),
            _ => None,
        }
    }

    /// What the transaction's timeline says of it: the first failure and the end, not each attempt. Every key may read it, so
    /// it does not say what a receiver answered, and nothing of the operator's own endpoint.
    pub fn step(&self) -> Option<Step> {
        let Delivery { endpoint, kind, transaction, .. } = &self.delivery;
        if transaction.0.is_nil() || *endpoint == EndpointId::ENVIRONMENT {
            return None;
        }
        let (number, kind) = (self.attempt.number, kind.name());
        match self.then {
            DeliveryThen::Delivered => {
                Some(Step::new("notified", format!("{kind} delivered to endpoint {endpoint} at attempt {number}")))
            }
            DeliveryThen::GivenUp => Some(Step::new("notification-given-up", format!("{kind} to endpoint {endpoint}"))),
            DeliveryThen::RetryAt(_) if number == 1 => {
                Some(Step::new("notification-failed", format!("{kind} to endpoint {endpoint}; tried again")))
            }
            DeliveryThen::RetryAt(_) => None,
        }
    }
}

/// When an event is due that waits for an earlier one of its transaction: the last second of the year 9999.
pub(super) const PARKED: Timestamp = Timestamp(253_402_300_799_000);

/// Deliveries that one commit gives up after an [`EndpointThen::Disable`].
pub(super) const GIVEN_UP_AT_ONCE: u32 = 1000;

/// Such commits after one [`EndpointThen::Disable`].
pub(super) const GIVE_UP_PAGES_MAX: u32 = 10;

/// Events that one commit of [`NotificationStore::requeue`] makes due again.
pub(super) const REQUEUED_AT_ONCE: usize = 2000;

/// Pages of [`REQUEUED_AT_ONCE`] events that one call of [`NotificationStore::requeue`] looks at.
pub(super) const REQUEUE_PAGES_MAX: usize = 50;

/// Rows that one commit of a deletion or a release deletes or changes.
pub(super) const CHANGED_AT_ONCE: usize = 2000;

/// A place among the events of a key: time and id.
pub(super) type EventPlace = (Timestamp, String);

/// Deliveries that a count goes up to: a client may ask for it as often as it wants.
pub(super) const COUNT_MAX: u32 = 10_000;

/// Pages of events that one call of [`NotificationStore::forget_notifications`] looks at.
pub(super) const FORGET_PAGES_MAX: usize = 50;

/// How far a store has looked for old events without a delivery. An event with one is deleted with its last delivery, so
/// there is no need to look at it again; now and then it starts anew, for what was overlooked.
#[derive(Debug, Clone, Default)]
pub(super) struct OrphanedEventScan(Arc<Mutex<Option<(Timestamp, EventPlace)>>>);

impl OrphanedEventScan {
    /// Duration of a pass, at least.
    const ANEW_EVERY: Duration = Duration::from_secs(3600);

    /// The place to go on from, and whether a new pass begins there.
    pub fn begin(&self, before: Timestamp) -> (EventPlace, bool) {
        let mut pass = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &*pass {
            Some((began, place)) if before.since(*began) < Self::ANEW_EVERY => (place.clone(), false),
            _ => {
                let start = (Timestamp(0), String::new());
                *pass = Some((before, start.clone()));
                (start, true)
            }
        }
    }

    pub fn go_on_from(&self, place: &EventPlace) {
        if let Some((_, last)) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            last.clone_from(place);
        }
    }
}

/// A page of a key's events, as [`NotificationStore::requeue`] looks at them.
#[derive(Debug, Default)]
pub(super) struct MissedPage {
    /// Events that the endpoint asks for and does not have.
    pub missed: Vec<String>,
    /// Events that are parked behind none, and that nothing would make due.
    pub stranded: Vec<String>,
    events: usize,
    last: Option<EventPlace>,
}

impl MissedPage {
    /// The next event of the page, of this kind. `delivery`: whether its delivery is stranded, if the endpoint has one.
    pub fn add(&mut self, endpoint: &Endpoint, place: EventPlace, kind: &str, delivery: Option<bool>) {
        match delivery {
            None if endpoint.events.iter().any(|wanted| wanted.name() == kind) => self.missed.push(place.1.clone()),
            Some(true) => self.stranded.push(place.1.clone()),
            _ => {}
        }
        self.events += 1;
        self.last = Some(place);
    }

    /// The place to go on from, if there may be more events.
    pub fn next(self) -> Option<EventPlace> {
        self.last.filter(|_| self.events == REQUEUED_AT_ONCE)
    }
}

/// Kinds of events as the stores keep them.
pub(super) fn event_names(events: &[EventType]) -> String {
    events.iter().map(|kind| kind.name()).collect::<Vec<_>>().join(",")
}

/// The kinds behind [`event_names`]; a name that this version does not know is left out.
pub(super) fn parse_events(names: &str) -> Vec<EventType> {
    names.split(',').filter_map(EventType::parse).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_timeline_says_nothing_of_the_operators_endpoint_and_not_what_a_receiver_answered() {
        let step = |endpoint, then| {
            let event = EventId("evt_1".to_owned());
            let delivery = Delivery {
                endpoint,
                event: event.clone(),
                kind: EventType::Completed,
                transaction: TransactionId(Uuid::from_u128(1)),
                position: 4,
                created_at: Timestamp(0),
                attempts: 0,
                payload: Some("{}".to_owned()),
                lease: Uuid::from_u128(2),
            };
            let attempt = Attempt {
                id: Uuid::from_u128(3),
                event,
                number: 1,
                at: Timestamp(0),
                duration: Duration::ZERO,
                status: None,
                error: Some("the certificate is for inside.example".to_owned()),
                answer: None,
            };
            let (endpoint, now) = (EndpointThen::Works, Timestamp(0));
            AttemptRecord { delivery, attempt, then, endpoint, endpoint_version: 1, now }.step()
        };
        for then in [DeliveryThen::Delivered, DeliveryThen::GivenUp, DeliveryThen::RetryAt(Timestamp(9))] {
            assert_eq!(step(EndpointId::ENVIRONMENT, then), None);
            let shown = step(EndpointId(Uuid::from_u128(7)), then).unwrap();
            assert!(!shown.detail.contains("inside"), "{}", shown.detail);
        }
    }
}
