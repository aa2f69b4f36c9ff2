//! The store's contract for client notifications: events are written with the change, deliveries are leased in order, and
//! what follows from an attempt is one commit.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use baton::clock::{Clock, TimeSource};
use baton::config::{Config, NotifyConfig, Secret, Service};
use baton::notify::notifier::Notifier;
use baton::notify::outbox_queue::OutboxQueue;
use baton::notify::schedule::{AttemptResult, after_attempt};
use baton::randomness::Randomness;
use baton::relay::state::event::{Event, EventId, EventType};
use baton::relay::state::transaction::{FailedBy, Moved, Status, Step, Transaction, TransactionId};
use baton::relay::store::Saved;
use baton::relay::store::notifications::{
    Attempt, AttemptRecord, Delivery, DeliveryThen, Disabled, EVERY_KEY, Endpoint, EndpointId, EndpointThen, Recorded,
    Requeue, Requeued,
};
use baton::timestamp::Timestamp;
use futures::future::{BoxFuture, join_all};
use harness::wait::eventually;
use pipeline::Queue;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::fixture::{StoreFixture, now};
use super::mysql::until_blocked;
use crate::relay_fixture::SOON;

const MINUTE: Duration = Duration::from_secs(60);

on_every_database! {
    an_endpoint_is_read_back_unchanged_and_changed_by_one_version_only
    an_owner_has_a_limited_number_of_endpoints
    events_are_written_with_the_change_or_not_at_all
    only_endpoints_of_the_key_that_ask_for_an_event_get_it
    an_event_that_is_written_again_is_the_same_event
    events_of_one_transaction_are_leased_in_order
    a_delivery_is_leased_once_until_its_lease_ends
    a_failed_delivery_puts_off_the_later_events_of_its_transaction
    a_success_counts_although_its_lease_was_lost
    a_disabled_endpoint_gets_nothing_and_can_recover_what_it_missed
    one_event_is_delivered_again_on_request_and_to_its_owner_only
    attempts_are_listed_newest_first_and_old_rows_are_deleted
    paused_endpoints_are_not_due
    an_endpoint_that_has_worked_or_changed_is_not_disabled_and_its_event_is_tried_again
    failures_that_begin_anew_forget_when_the_first_was
    an_event_behind_another_one_is_not_due
    another_url_starts_without_failures_and_pauses
    what_was_recovered_is_leased_in_order
    a_notifier_deletes_what_is_older_than_its_retention
    a_notifier_deletes_nothing_after_its_clock_jumped_ahead
    a_failure_says_nothing_about_a_later_version_of_the_endpoint
    a_repeated_event_waits_for_an_earlier_one
    what_waits_for_its_next_attempt_is_recovered_and_a_pause_ends
    an_endpoint_is_deleted_with_everything_of_it
    what_waits_for_a_disabled_endpoint_is_deleted_after_the_retention
    an_event_follows_an_older_one_that_is_deleted
    deliveries_without_an_endpoint_are_deleted
    events_that_no_endpoint_got_are_deleted
    deliveries_are_counted_up_to_a_limit
    a_large_backlog_is_given_up_in_part_and_no_event_waits_for_one_that_was
    what_is_left_is_given_up_when_the_attempt_is_recorded_again
    a_late_410_does_not_give_up_the_events_of_an_endpoint_that_its_owner_disabled
    a_series_of_failures_begins_with_the_first
    a_disabled_endpoint_does_not_count_as_waiting
    concurrent_receives_share_the_limit_of_an_endpoint
    a_long_recovery_continues_where_the_last_call_ended
    an_event_whose_process_died_waits_for_an_earlier_one
    an_event_that_is_given_back_waits_for_an_earlier_one
    an_event_that_waits_for_a_delivered_one_is_recovered
    an_endpoint_with_nothing_to_lease_leaves_its_place_to_others
    a_delivery_whose_event_is_missing_ends_and_those_behind_it_go_on
}

fn endpoint(owner: &str, events: &[EventType]) -> Endpoint {
    Endpoint {
        id: EndpointId(Uuid::now_v7()),
        owner: owner.to_owned(),
        url: "https://example.com/hook?a=ü".to_owned(),
        events: events.to_vec(),
        description: Some("billing".to_owned()),
        secret: Secret::new("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"),
        previous_secret: None,
        version: 1,
        created_at: now(),
        updated_at: now(),
        disabled: None,
        failing_since: None,
        failures: 0,
        paused_until: None,
    }
}

/// Stores an endpoint of the fixture's API key.
async fn registered(fixture: &StoreFixture, events: &[EventType]) -> Endpoint {
    let endpoint = endpoint("key", events);
    assert!(fixture.notifications.put_endpoint(&endpoint, 10).await.unwrap());
    endpoint
}

/// A submitted row whose move to that status was saved with its events.
async fn submitted(fixture: &StoreFixture) -> Transaction {
    let (claimed, token) = fixture.claimed().await;
    let bound = super::fixture::bind(&claimed, token, &Uuid::new_v4().to_string());
    save(fixture, &claimed, bound).await
}

async fn failed(fixture: &StoreFixture, row: &Transaction) -> Transaction {
    failed_at(fixture, row, row.updated_at).await
}

async fn failed_at(fixture: &StoreFixture, row: &Transaction, at: Timestamp) -> Transaction {
    let mut next = row.clone();
    (next.version, next.updated_at) = (next.version + 1, at);
    (next.status, next.failed_by) = (Status::Failed, Some(FailedBy::Relayer));
    (next.error_message, next.check_at) = (Some("it reverted".to_owned()), None);
    save(fixture, row, Moved::new(next, vec![Step::new("failed", "it reverted")])).await
}

async fn save(fixture: &StoreFixture, before: &Transaction, moved: Moved) -> Transaction {
    let events = moved.transaction.events_since(before);
    let moved = Moved { events, ..moved };
    assert_eq!(fixture.store.save(&moved).await.unwrap(), Saved::Yes { early: false });
    moved.transaction
}

async fn lease(fixture: &StoreFixture, endpoint: &Endpoint, at: Timestamp) -> Vec<Delivery> {
    let store = &fixture.notifications;
    store.lease_deliveries(&[(endpoint.id, 100)], at, at + MINUTE, Uuid::new_v4()).await.unwrap()
}

async fn lease_many(fixture: &StoreFixture, endpoint: &Endpoint, max: usize) -> Vec<Delivery> {
    let (places, at) = ([(endpoint.id, max)], now() + MINUTE);
    fixture.notifications.lease_deliveries(&places, at, at + MINUTE, Uuid::new_v4()).await.unwrap()
}

fn kinds(deliveries: &[Delivery]) -> Vec<EventType> {
    deliveries.iter().map(|delivery| delivery.kind).collect()
}

fn record(delivery: &Delivery, then: DeliveryThen, endpoint: EndpointThen) -> AttemptRecord {
    let error = (then != DeliveryThen::Delivered).then(|| "answered 500".to_owned());
    let attempt = Attempt {
        id: Uuid::now_v7(),
        event: delivery.event.clone(),
        number: delivery.attempts + 1,
        at: now(),
        duration: Duration::from_millis(12),
        status: Some(if error.is_some() { 500 } else { 204 }),
        answer: Some("ä".to_owned()),
        error,
    };
    AttemptRecord { delivery: delivery.clone(), attempt, then, endpoint, endpoint_version: 1, now: now() }
}

async fn deliver(fixture: &StoreFixture, delivery: &Delivery) {
    let record = record(delivery, DeliveryThen::Delivered, EndpointThen::Works);
    fixture.notifications.record_attempt(&record).await.unwrap();
}

async fn an_endpoint_is_read_back_unchanged_and_changed_by_one_version_only(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let first = registered(fixture, &EventType::SUBSCRIBABLE).await;
    assert_eq!(store.endpoint(first.id).await.unwrap().as_ref(), Some(&first));
    assert_eq!(store.endpoint(EndpointId(Uuid::nil())).await.unwrap(), None);
    let changed = Endpoint {
        url: "https://example.com/other".to_owned(),
        events: vec![EventType::Failed],
        description: None,
        previous_secret: Some((first.secret.clone(), now() + MINUTE)),
        disabled: Some(Disabled { at: now(), reason: "because".to_owned() }),
        ..first.clone()
    };
    assert!(store.change_endpoint(&changed).await.unwrap());
    assert!(!store.change_endpoint(&changed).await.unwrap(), "its version has changed");
    let stored = Endpoint { version: 2, ..changed };
    assert_eq!(store.endpoint(first.id).await.unwrap().as_ref(), Some(&stored));
    assert_eq!(store.endpoints(Some("key")).await.unwrap(), [stored]);
    assert!(store.endpoints(Some("other")).await.unwrap().is_empty());
    assert_eq!(store.endpoints(None).await.unwrap().len(), 1);
    assert!(store.delete_endpoint(first.id).await.unwrap());
    assert!(!store.delete_endpoint(first.id).await.unwrap());
}

async fn an_owner_has_a_limited_number_of_endpoints(fixture: &StoreFixture) {
    // Several rounds, because only registrations at the same moment could exceed the limit.
    for owner in 0..10 {
        let owner = format!("owner-{owner}");
        let many: Vec<_> = (0..12).map(|_| endpoint(&owner, &[EventType::Failed])).collect();
        let stored = many.iter().map(|endpoint| fixture.notifications.put_endpoint(endpoint, 3));
        let stored = futures::future::join_all(stored).await;
        assert_eq!(stored.into_iter().filter(|stored| *stored.as_ref().unwrap()).count(), 3);
    }
}

async fn events_are_written_with_the_change_or_not_at_all(fixture: &StoreFixture) {
    let endpoint = registered(fixture, &EventType::SUBSCRIBABLE).await;
    let (claimed, token) = fixture.claimed().await;
    let bound = super::fixture::bind(&claimed, token, "oz-1");
    let moved = Moved { events: bound.transaction.events_since(&claimed), ..bound.clone() };
    // A stale move changes nothing, and writes no event.
    let mut stale = moved.clone();
    stale.transaction.version += 5;
    assert_eq!(fixture.store.save(&stale).await.unwrap(), Saved::Stale);
    assert!(lease(fixture, &endpoint, now() + MINUTE).await.is_empty());
    assert_eq!(fixture.store.save(&moved).await.unwrap(), Saved::Yes { early: false });
    let leased = lease(fixture, &endpoint, now() + MINUTE).await;
    assert_eq!(kinds(&leased), [EventType::Submitted]);
    let payload: serde_json::Value = serde_json::from_str(leased[0].payload.as_ref().unwrap()).unwrap();
    assert_eq!(payload["event"], "transaction.submitted");
    assert_eq!(payload["transactionId"], claimed.id.to_string());
    assert_eq!(payload["sequence"], moved.transaction.version);
    assert_eq!(payload["eventId"], leased[0].event.0);
}

async fn only_endpoints_of_the_key_that_ask_for_an_event_get_it(fixture: &StoreFixture) {
    let ends = registered(fixture, &[EventType::Completed]).await;
    let failures = registered(fixture, &[EventType::Failed, EventType::Unknown]).await;
    let stranger = endpoint("other", &EventType::SUBSCRIBABLE);
    let everyone = Endpoint { id: EndpointId::ENVIRONMENT, ..endpoint(EVERY_KEY, &[EventType::Submitted]) };
    assert!(fixture.notifications.put_endpoint(&stranger, 10).await.unwrap());
    assert!(fixture.notifications.put_endpoint(&everyone, 10).await.unwrap());
    let row = submitted(fixture).await;
    failed(fixture, &row).await;
    let at = now() + MINUTE;
    assert_eq!(kinds(&lease(fixture, &ends, at).await), [EventType::Completed]);
    assert_eq!(kinds(&lease(fixture, &failures, at).await), [EventType::Failed]);
    assert_eq!(kinds(&lease(fixture, &everyone, at).await), [EventType::Submitted]);
    assert!(lease(fixture, &stranger, at).await.is_empty());
}

async fn an_event_that_is_written_again_is_the_same_event(fixture: &StoreFixture) {
    let endpoint = registered(fixture, &[EventType::Submitted]).await;
    let row = submitted(fixture).await;
    let leased = lease(fixture, &endpoint, now() + MINUTE).await;
    deliver(fixture, &leased[0]).await;
    // As an event that is emitted at every look at a row.
    let mut next = row.clone();
    next.version += 1;
    let mut before = row.clone();
    before.status = Status::Pending;
    let events = row.events_since(&before);
    assert_eq!(row.event(&events[0]).id, leased[0].event);
    let again = Moved { events, ..Moved::new(next, Vec::new()) };
    assert_eq!(fixture.store.save(&again).await.unwrap(), Saved::Yes { early: false });
    assert!(lease(fixture, &endpoint, now() + MINUTE).await.is_empty(), "it was delivered");
}

async fn events_of_one_transaction_are_leased_in_order(fixture: &StoreFixture) {
    let endpoint = registered(fixture, &EventType::SUBSCRIBABLE).await;
    let row = submitted(fixture).await;
    failed(fixture, &row).await;
    submitted(fixture).await;
    let mut seen = Vec::new();
    for _ in 0..3 {
        let leased = lease(fixture, &endpoint, now() + MINUTE).await;
        for delivery in leased.iter().filter(|delivery| delivery.transaction == row.id) {
            seen.push(delivery.kind);
        }
        for delivery in &leased {
            deliver(fixture, delivery).await;
        }
    }
    assert_eq!(seen, [EventType::Submitted, EventType::Failed, EventType::Completed]);
    assert!(lease(fixture, &endpoint, now() + MINUTE).await.is_empty());
}

async fn a_delivery_is_leased_once_until_its_lease_ends(fixture: &StoreFixture) {
    let endpoint = registered(fixture, &[EventType::Submitted]).await;
    for _ in 0..20 {
        submitted(fixture).await;
    }
    let at = now() + MINUTE;
    let store = &fixture.notifications;
    let until = at + MINUTE;
    let leases = (0..4).map(|_| async {
        let mut mine = Vec::new();
        loop {
            let some = store.lease_deliveries(&[(endpoint.id, 3)], at, until, Uuid::new_v4()).await.unwrap();
            if some.is_empty() {
                return mine;
            }
            mine.extend(some);
        }
    });
    let leased = futures::future::join_all(leases).await.concat();
    let distinct: BTreeSet<_> = leased.iter().map(|delivery| &delivery.event).collect();
    assert_eq!((leased.len(), distinct.len()), (20, 20));
    assert!(store.due_endpoints(until - Duration::from_millis(1)).await.unwrap().is_empty());
    assert_eq!(store.due_endpoints(until).await.unwrap().len(), 1, "its process died");
    // What was not tried is given back at once; an attempt after the lease ended cannot put it off.
    let (kept, returned) = leased.split_at(10);
    store.return_deliveries(returned, at).await.unwrap();
    assert_eq!(lease(fixture, &endpoint, at).await.len(), 10);
    let again = lease(fixture, &endpoint, until).await;
    assert_eq!(again.len(), 20, "all leases have ended");
    let late = record(
        &kept[0],
        DeliveryThen::RetryAt(at + MINUTE * 600),
        EndpointThen::Fails { paused_until: None, anew: false },
    );
    store.record_attempt(&late).await.unwrap();
    store.return_deliveries(&again, at).await.unwrap();
    assert_eq!(lease(fixture, &endpoint, at).await.len(), 20, "none was put off");
}

async fn a_failed_delivery_puts_off_the_later_events_of_its_transaction(fixture: &StoreFixture) {
    let endpoint = registered(fixture, &[EventType::Submitted, EventType::Completed]).await;
    let row = submitted(fixture).await;
    failed(fixture, &row).await;
    let at = now() + MINUTE;
    let first = lease(fixture, &endpoint, at).await.remove(0);
    let later = at + MINUTE * 10;
    let fails = EndpointThen::Fails { paused_until: None, anew: false };
    fixture.notifications.record_attempt(&record(&first, DeliveryThen::RetryAt(later), fails.clone())).await.unwrap();
    assert!(fixture.notifications.due_endpoints(later - Duration::from_millis(1)).await.unwrap().is_empty());
    let stored = fixture.notifications.endpoint(endpoint.id).await.unwrap().unwrap();
    assert_eq!(stored.failures, 1);
    assert!(stored.failing_since.is_some());
    let again = lease(fixture, &endpoint, later).await;
    assert_eq!((kinds(&again), again[0].attempts), (vec![EventType::Submitted], 1));
    // Given up: the next one follows at once.
    fixture.notifications.record_attempt(&record(&again[0], DeliveryThen::GivenUp, fails)).await.unwrap();
    let next = lease(fixture, &endpoint, now() + MINUTE).await;
    assert_eq!(kinds(&next), [EventType::Completed]);
    deliver(fixture, &next[0]).await;
    let stored = fixture.notifications.endpoint(endpoint.id).await.unwrap().unwrap();
    assert_eq!((stored.failures, stored.failing_since), (0, None));
    let counts = fixture.notifications.endpoint_counts(endpoint.id).await.unwrap();
    assert_eq!((counts.waiting, counts.given_up), (0, 1));
    let timeline = fixture.store.timeline(row.id).await.unwrap();
    let actions: Vec<_> = timeline.iter().map(|entry| entry.action.as_str()).collect();
    assert!(actions.ends_with(&["notification-failed", "notification-given-up", "notified"]), "{actions:?}");
    assert!(timeline.iter().all(|step| !step.detail.contains("answered 500")), "every key may read it: {timeline:?}");
}

async fn a_success_counts_although_its_lease_was_lost(fixture: &StoreFixture) {
    let endpoint = registered(fixture, &[EventType::Submitted]).await;
    submitted(fixture).await;
    let at = now() + MINUTE;
    let first = lease(fixture, &endpoint, at).await.remove(0);
    let second = lease(fixture, &endpoint, at + MINUTE).await.remove(0);
    deliver(fixture, &first).await;
    let late =
        record(&second, DeliveryThen::RetryAt(at + MINUTE), EndpointThen::Fails { paused_until: None, anew: false });
    fixture.notifications.record_attempt(&late).await.unwrap();
    assert!(lease(fixture, &endpoint, at + MINUTE * 600).await.is_empty());
    assert_eq!(fixture.notifications.attempts(endpoint.id, None, 10).await.unwrap().len(), 2);
}

async fn a_disabled_endpoint_gets_nothing_and_can_recover_what_it_missed(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let endpoint = registered(fixture, &[EventType::Submitted]).await;
    let start = now();
    let waiting = submitted(fixture).await;
    submitted(fixture).await;
    let at = now() + MINUTE;
    // Its owner disables it: what waits is kept, and not due.
    let disabled = Some(Disabled { at: now(), reason: "disabled by its owner".to_owned() });
    assert!(store.change_endpoint(&Endpoint { disabled, ..endpoint.clone() }).await.unwrap());
    assert!(store.due_endpoints(at).await.unwrap().is_empty());
    assert!(store.change_endpoint(&Endpoint { version: 2, ..endpoint.clone() }).await.unwrap());
    assert_eq!(store.due_endpoints(at).await.unwrap().len(), 1);
    let first = lease(fixture, &endpoint, at).await.remove(0);
    let gone = EndpointThen::Disable { reason: "the endpoint answered 410 Gone".to_owned(), failing_since: None };
    let last = AttemptRecord { endpoint_version: 3, ..record(&first, DeliveryThen::GivenUp, gone) };
    store.record_attempt(&last).await.unwrap();
    let stored = store.endpoint(endpoint.id).await.unwrap().unwrap();
    assert_eq!(stored.disabled.as_ref().unwrap().reason, "the endpoint answered 410 Gone");
    let missed = submitted(fixture).await;
    assert!(store.due_endpoints(at + MINUTE * 60).await.unwrap().is_empty());
    assert_eq!(store.endpoint_counts(endpoint.id).await.unwrap().given_up, 2);

    assert!(store.change_endpoint(&Endpoint { disabled: None, ..stored }).await.unwrap());
    let enabled = store.endpoint(endpoint.id).await.unwrap().unwrap();
    assert_eq!((enabled.failures, enabled.failing_since, enabled.paused_until), (0, None, None));
    assert_eq!(store.requeue(endpoint.id, &Requeue::Since(now() + MINUTE), now()).await.unwrap().queued, 0);
    assert_eq!(store.requeue(endpoint.id, &Requeue::Since(start), now()).await.unwrap().queued, 3);
    let recovered: BTreeSet<_> =
        lease(fixture, &enabled, now() + MINUTE).await.iter().map(|delivery| delivery.transaction).collect();
    assert_eq!(recovered.len(), 3);
    assert!(recovered.contains(&waiting.id) && recovered.contains(&missed.id));
}

async fn one_event_is_delivered_again_on_request_and_to_its_owner_only(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let own = registered(fixture, &[EventType::Submitted]).await;
    let stranger = endpoint("other", &[EventType::Submitted]);
    assert!(store.put_endpoint(&stranger, 10).await.unwrap());
    submitted(fixture).await;
    let first = lease(fixture, &own, now() + MINUTE).await.remove(0);
    deliver(fixture, &first).await;
    let event = Requeue::Event(first.event.clone());
    assert_eq!(store.requeue(own.id, &event, now()).await.unwrap().queued, 1);
    let again = lease(fixture, &own, now() + MINUTE).await;
    assert_eq!((again.len(), &again[0].event, again[0].attempts), (1, &first.event, 0));
    assert_eq!(store.requeue(stranger.id, &event, now()).await.unwrap().queued, 0, "another key's event");
    let unknown = Requeue::Event(EventId("evt_unknown".to_owned()));
    assert_eq!(store.requeue(own.id, &unknown, now()).await.unwrap().queued, 0);
    let test = Event {
        id: EventId("evt_test".to_owned()),
        kind: EventType::Test,
        transaction: TransactionId(Uuid::nil()),
        api_key: "key".to_owned(),
        position: 0,
        at: now(),
        payload: "{}".to_owned(),
    };
    assert!(store.put_test(own.id, &test, 2).await.unwrap());
    let second = Event { id: EventId("evt_test2".to_owned()), ..test.clone() };
    assert!(store.put_test(own.id, &second, 2).await.unwrap());
    let third = Event { id: EventId("evt_test3".to_owned()), ..test };
    assert!(!store.put_test(own.id, &third, 2).await.unwrap(), "two wait already");
    assert_eq!(kinds(&lease(fixture, &own, now() + MINUTE).await), [EventType::Test, EventType::Test]);
}

async fn attempts_are_listed_newest_first_and_old_rows_are_deleted(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let endpoint = registered(fixture, &[EventType::Submitted]).await;
    for _ in 0..5 {
        submitted(fixture).await;
    }
    let leased = lease(fixture, &endpoint, now() + MINUTE).await;
    for delivery in &leased[..4] {
        deliver(fixture, delivery).await;
    }
    let first = store.attempts(endpoint.id, None, 3).await.unwrap();
    let rest = store.attempts(endpoint.id, Some(first[2].id), 3).await.unwrap();
    assert_eq!((first.len(), rest.len()), (3, 1));
    let events: Vec<_> = first.iter().chain(&rest).map(|attempt| &attempt.event).collect();
    let sent: Vec<_> = leased[..4].iter().rev().map(|delivery| &delivery.event).collect();
    assert_eq!(events, sent);
    assert_eq!(
        (first[0].status, first[0].answer.as_deref(), first[0].duration.as_millis()),
        (Some(204), Some("ä"), 12)
    );

    let counts = store.notification_counts(now()).await.unwrap();
    assert_eq!((counts.waiting, counts.enabled, counts.disabled), (1, 1, 0));
    assert!(counts.oldest_waiting.is_some());
    assert_eq!(store.forget_notifications(now() - MINUTE, now(), 100).await.unwrap(), 0);
    let mut deleted = 0;
    loop {
        let some = store.forget_notifications(now() + MINUTE, now(), 3).await.unwrap();
        deleted += some;
        if some == 0 {
            break;
        }
    }
    assert_eq!(deleted, 4 + 4 + 4, "deliveries, attempts and events that have ended");
    assert_eq!(store.endpoint_counts(endpoint.id).await.unwrap().waiting, 1, "what waits is kept");
    assert_eq!(lease(fixture, &endpoint, now() + MINUTE * 60).await.len(), 1);
}

/// Another attempt succeeded, or the owner changed the endpoint, between the decision and its commit.
async fn an_endpoint_that_has_worked_or_changed_is_not_disabled_and_its_event_is_tried_again(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let endpoint = registered(fixture, &[EventType::Submitted]).await;
    submitted(fixture).await;
    submitted(fixture).await;
    let at = now() + MINUTE;
    let leased = lease(fixture, &endpoint, at).await;
    let fails = EndpointThen::Fails { paused_until: None, anew: false };
    store.record_attempt(&record(&leased[0], DeliveryThen::RetryAt(at), fails)).await.unwrap();
    let failing_since = store.endpoint(endpoint.id).await.unwrap().unwrap().failing_since;
    assert!(failing_since.is_some());
    let five_days = EndpointThen::Disable { reason: "every attempt failed for 5 days".to_owned(), failing_since };
    let late = record(&leased[1], DeliveryThen::GivenUp, five_days.clone());
    let second = lease(fixture, &endpoint, at).await;
    deliver(fixture, &second[0]).await;
    assert_eq!(store.record_attempt(&late).await.unwrap(), Recorded::NotDisabled, "it has just worked");
    let again = lease(fixture, &endpoint, at).await;
    assert_eq!((again.len(), &again[0].event), (1, &leased[1].event), "not given up");
    let changed = store.endpoint(endpoint.id).await.unwrap().unwrap();
    assert!(store.change_endpoint(&Endpoint { description: Some("new".to_owned()), ..changed }).await.unwrap());
    let gone = EndpointThen::Disable { reason: "gone".to_owned(), failing_since: None };
    let late = record(&again[0], DeliveryThen::GivenUp, gone.clone());
    assert_eq!(store.record_attempt(&late).await.unwrap(), Recorded::NotDisabled, "it is another version");
    let again = lease(fixture, &endpoint, at).await;
    assert_eq!(again.len(), 1);
    assert!(store.endpoint(endpoint.id).await.unwrap().unwrap().disabled.is_none());
    let current = AttemptRecord { endpoint_version: 2, ..record(&again[0], DeliveryThen::GivenUp, gone) };
    assert_eq!(store.record_attempt(&current).await.unwrap(), Recorded::AsDecided);
    assert!(store.endpoint(endpoint.id).await.unwrap().unwrap().disabled.is_some());
}

async fn failures_that_begin_anew_forget_when_the_first_was(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let endpoint = registered(fixture, &[EventType::Submitted]).await;
    submitted(fixture).await;
    let at = now() + MINUTE;
    for (hours, anew, first) in [(0, false, 0), (1, false, 0), (2, true, 2), (3, false, 2)] {
        let leased = lease(fixture, &endpoint, at).await;
        let fails = EndpointThen::Fails { paused_until: None, anew };
        let mut failed = record(&leased[0], DeliveryThen::RetryAt(at), fails);
        failed.attempt.at = at + MINUTE * 60 * hours;
        store.record_attempt(&failed).await.unwrap();
        let known = store.endpoint(endpoint.id).await.unwrap().unwrap();
        assert_eq!((known.failing_since, known.failures), (Some(at + MINUTE * 60 * first), hours + 1));
    }
}

async fn paused_endpoints_are_not_due(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let endpoint = registered(fixture, &[EventType::Submitted]).await;
    submitted(fixture).await;
    submitted(fixture).await;
    let at = now() + MINUTE;
    let first = lease(fixture, &endpoint, at).await.remove(0);
    let paused = EndpointThen::Fails { paused_until: Some(at + MINUTE), anew: false };
    store.record_attempt(&record(&first, DeliveryThen::RetryAt(at), paused)).await.unwrap();
    assert!(store.due_endpoints(at + MINUTE - Duration::from_millis(1)).await.unwrap().is_empty());
    let due = store.due_endpoints(at + MINUTE).await.unwrap();
    assert_eq!((due.len(), due[0].failures, due[0].url.as_str()), (1, 1, endpoint.url.as_str()));
}

/// Endpoints whose only events wait for an earlier one would otherwise take every place, in vain.
async fn an_event_behind_another_one_is_not_due(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let endpoint = registered(fixture, &EventType::SUBSCRIBABLE).await;
    let row = submitted(fixture).await;
    let at = now() + MINUTE;
    let first = lease(fixture, &endpoint, at).await.remove(0);
    let later = at + MINUTE * 60;
    let fails = EndpointThen::Fails { paused_until: None, anew: false };
    store.record_attempt(&record(&first, DeliveryThen::RetryAt(later), fails)).await.unwrap();
    failed(fixture, &row).await;
    assert!(store.due_endpoints(later - Duration::from_millis(1)).await.unwrap().is_empty());
    let again = lease(fixture, &endpoint, later).await;
    assert_eq!(kinds(&again), [EventType::Submitted]);
    deliver(fixture, &again[0]).await;
    for kind in [EventType::Failed, EventType::Completed] {
        let next = lease(fixture, &endpoint, now() + MINUTE).await;
        assert_eq!(kinds(&next), [kind]);
        deliver(fixture, &next[0]).await;
    }
}

async fn another_url_starts_without_failures_and_pauses(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let endpoint = registered(fixture, &[EventType::Submitted]).await;
    submitted(fixture).await;
    submitted(fixture).await;
    let at = now() + MINUTE;
    let leased = lease(fixture, &endpoint, at).await;
    let paused = |until| EndpointThen::Fails { paused_until: until, anew: false };
    store.record_attempt(&record(&leased[0], DeliveryThen::RetryAt(at), paused(Some(at + MINUTE * 60)))).await.unwrap();
    // Neither a failure without a pause nor a success shortens it.
    store.record_attempt(&record(&leased[1], DeliveryThen::RetryAt(at), paused(None))).await.unwrap();
    deliver(fixture, &leased[1]).await;
    let stored = store.endpoint(endpoint.id).await.unwrap().unwrap();
    assert_eq!((stored.paused_until, stored.failures), (Some(at + MINUTE * 60), 0));
    let url = "https://example.com/mended".to_owned();
    assert!(store.change_endpoint(&Endpoint { url, ..stored }).await.unwrap());
    let stored = store.endpoint(endpoint.id).await.unwrap().unwrap();
    assert_eq!((stored.paused_until, stored.failing_since, stored.failures), (None, None, 0));
    assert_eq!(store.due_endpoints(at).await.unwrap().len(), 1);
}

async fn what_was_recovered_is_leased_in_order(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let endpoint = registered(fixture, &EventType::SUBSCRIBABLE).await;
    let start = now();
    let rows = [submitted(fixture).await, submitted(fixture).await];
    for row in &rows {
        failed(fixture, row).await;
    }
    let first = lease(fixture, &endpoint, now() + MINUTE).await.remove(0);
    let gone = EndpointThen::Disable { reason: "gone".to_owned(), failing_since: None };
    store.record_attempt(&record(&first, DeliveryThen::GivenUp, gone)).await.unwrap();
    let disabled = store.endpoint(endpoint.id).await.unwrap().unwrap();
    assert!(store.change_endpoint(&Endpoint { disabled: None, ..disabled }).await.unwrap());
    assert_eq!(store.requeue(endpoint.id, &Requeue::Since(start), now()).await.unwrap().queued, 6);
    for kind in [EventType::Submitted, EventType::Failed, EventType::Completed] {
        let leased = lease(fixture, &endpoint, now() + MINUTE).await;
        assert_eq!(kinds(&leased), [kind; 2]);
        for delivery in &leased {
            deliver(fixture, delivery).await;
        }
    }
    assert_eq!(store.endpoint_counts(endpoint.id).await.unwrap().waiting, 0);
}

async fn a_notifier_deletes_what_is_older_than_its_retention(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let endpoint = registered(fixture, &[EventType::Submitted]).await;
    for _ in 0..3 {
        submitted(fixture).await;
    }
    for delivery in &lease(fixture, &endpoint, now() + MINUTE).await {
        deliver(fixture, delivery).await;
    }
    assert_eq!(store.attempts(endpoint.id, None, 9).await.unwrap().len(), 3);
    let config =
        NotifyConfig { retention: Duration::ZERO, ..Config::from_vars(Service::Command, |_| None).unwrap().notify };
    let notifier = Notifier::new(Arc::clone(store), Clock::system(), config, Duration::ZERO);
    let deleted = eventually(SOON, "the attempts to be deleted", || async {
        store.attempts(endpoint.id, None, 1).await.unwrap().is_empty().then_some(())
    });
    tokio::select! {
        ended = notifier.run(CancellationToken::new()) => panic!("the notifier ended: {ended:?}"),
        () = deleted => {}
    }
    assert_eq!(store.forget_notifications(now() + MINUTE, now(), 100).await.unwrap(), 0, "nothing is left");
}

/// A clock that has just jumped ahead. It notices the pause after the first pass of the upkeep.
struct Jumped(CancellationToken);

impl TimeSource for Jumped {
    fn now(&self) -> Timestamp {
        now() + MINUTE * 120
    }

    fn steady_since(&self) -> Timestamp {
        now() + MINUTE * 119
    }

    fn sleep(&self, span: Duration) -> BoxFuture<'static, ()> {
        if span >= Duration::from_secs(5) {
            self.0.cancel();
        }
        Box::pin(tokio::time::sleep(span))
    }
}

async fn a_notifier_deletes_nothing_after_its_clock_jumped_ahead(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let endpoint = registered(fixture, &[EventType::Submitted]).await;
    submitted(fixture).await;
    for delivery in &lease(fixture, &endpoint, now() + MINUTE).await {
        deliver(fixture, delivery).await;
    }
    let config =
        NotifyConfig { retention: MINUTE * 60, ..Config::from_vars(Service::Command, |_| None).unwrap().notify };
    let passed = CancellationToken::new();
    let clock = Clock::new(Jumped(passed.clone()));
    let notifier = Notifier::new(Arc::clone(store), clock, config, Duration::ZERO);
    tokio::select! {
        ended = notifier.run(CancellationToken::new()) => panic!("the notifier ended: {ended:?}"),
        passed = tokio::time::timeout(SOON, passed.cancelled()) => passed.unwrap(),
    }
    assert_eq!(store.attempts(endpoint.id, None, 9).await.unwrap().len(), 1);
}

async fn a_failure_says_nothing_about_a_later_version_of_the_endpoint(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let endpoint = registered(fixture, &[EventType::Submitted]).await;
    for _ in 0..2 {
        submitted(fixture).await;
    }
    let leased = lease(fixture, &endpoint, now() + MINUTE).await;
    let moved = Endpoint { url: "https://example.com/new".to_owned(), ..endpoint.clone() };
    assert!(store.change_endpoint(&moved).await.unwrap());
    let paused = EndpointThen::Fails { paused_until: Some(now() + MINUTE * 60), anew: false };
    store.record_attempt(&record(&leased[0], DeliveryThen::RetryAt(now()), paused)).await.unwrap();
    let gone = EndpointThen::Disable { reason: "answered 410".to_owned(), failing_since: None };
    store.record_attempt(&record(&leased[1], DeliveryThen::RetryAt(now()), gone)).await.unwrap();
    let stored = store.endpoint(endpoint.id).await.unwrap().unwrap();
    assert_eq!((stored.failures, stored.paused_until, stored.disabled), (0, None, None));
    assert_eq!(lease(fixture, &endpoint, now() + MINUTE).await.len(), 2, "both are tried at the new URL");
}

/// The second event is in flight when the first is delivered again; then both fail.
async fn a_repeated_event_waits_for_an_earlier_one(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let endpoint = registered(fixture, &EventType::SUBSCRIBABLE).await;
    let row = submitted(fixture).await;
    let first = lease(fixture, &endpoint, now() + MINUTE).await.remove(0);
    deliver(fixture, &first).await;
    failed(fixture, &row).await;
    let second = lease(fixture, &endpoint, now() + MINUTE).await.remove(0);
    assert_eq!(store.requeue(endpoint.id, &Requeue::Event(first.event.clone()), now()).await.unwrap().queued, 1);
    let first = lease(fixture, &endpoint, now() + MINUTE).await.remove(0);
    let fails = EndpointThen::Fails { paused_until: None, anew: false };
    let late = now() + MINUTE * 60;
    store.record_attempt(&record(&first, DeliveryThen::RetryAt(late), fails.clone())).await.unwrap();
    store.record_attempt(&record(&second, DeliveryThen::RetryAt(now()), fails)).await.unwrap();
    assert_eq!(store.due_endpoints(now() + MINUTE).await.unwrap(), [], "the second event waits for the first");
    assert_eq!(kinds(&lease(fixture, &endpoint, late + MINUTE).await), [first.kind]);
}

async fn what_waits_for_its_next_attempt_is_recovered_and_a_pause_ends(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let start = now();
    let endpoint = registered(fixture, &[EventType::Submitted]).await;
    submitted(fixture).await;
    let leased = lease(fixture, &endpoint, now() + MINUTE).await;
    let late = now() + MINUTE * 600;
    let paused = EndpointThen::Fails { paused_until: Some(late), anew: false };
    store.record_attempt(&record(&leased[0], DeliveryThen::RetryAt(late), paused)).await.unwrap();
    assert_eq!(store.due_endpoints(now() + MINUTE).await.unwrap(), []);
    let requeued = store.requeue(endpoint.id, &Requeue::Since(start - MINUTE), now()).await.unwrap();
    assert_eq!(requeued, Requeued { queued: 1, next_since: None });
    assert_eq!(store.due_endpoints(now() + MINUTE).await.unwrap().len(), 1);
    assert_eq!(lease(fixture, &endpoint, now() + MINUTE).await[0].attempts, 1, "its attempts count");
}

async fn an_endpoint_is_deleted_with_everything_of_it(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let (gone, other) =
        (registered(fixture, &[EventType::Submitted]).await, registered(fixture, &[EventType::Submitted]).await);
    for _ in 0..3 {
        submitted(fixture).await;
    }
    deliver(fixture, &lease(fixture, &gone, now() + MINUTE).await[0]).await;
    deliver(fixture, &lease(fixture, &other, now() + MINUTE).await[0]).await;
    assert!(store.delete_endpoint(gone.id).await.unwrap());
    assert!(!store.delete_endpoint(gone.id).await.unwrap(), "it is gone");
    assert_eq!(store.endpoint_counts(gone.id).await.unwrap().waiting, 0);
    assert!(store.attempts(gone.id, None, 9).await.unwrap().is_empty());
    assert_eq!(store.endpoint_counts(other.id).await.unwrap().waiting, 2);
    assert_eq!(store.attempts(other.id, None, 9).await.unwrap().len(), 1);
}

/// Deletes what is older, until nothing is left; returns how many.
async fn forget(fixture: &StoreFixture, before: Timestamp) -> u64 {
    let mut deleted = 0;
    loop {
        let some = fixture.notifications.forget_notifications(before, now(), 3).await.unwrap();
        deleted += some;
        if some == 0 {
            return deleted;
        }
    }
}

async fn disabled_by_owner(fixture: &StoreFixture, endpoint: &Endpoint) {
    let disabled = Some(Disabled { at: now(), reason: "disabled by its owner".to_owned() });
    assert!(fixture.notifications.change_endpoint(&Endpoint { disabled, ..endpoint.clone() }).await.unwrap());
}

async fn what_waits_for_a_disabled_endpoint_is_deleted_after_the_retention(fixture: &StoreFixture) {
    let endpoint = registered(fixture, &[EventType::Submitted, EventType::Failed]).await;
    for _ in 0..3 {
        let row = submitted(fixture).await;
        failed(fixture, &row).await;
    }
    assert_eq!(forget(fixture, now() + MINUTE).await, 0, "what waits for an enabled one is kept");
    disabled_by_owner(fixture, &endpoint).await;
    assert_eq!(forget(fixture, now() - MINUTE).await, 0);
    assert_eq!(fixture.notifications.endpoint_counts(endpoint.id).await.unwrap().waiting, 6);
    assert_eq!(forget(fixture, now() + MINUTE).await, 6 + 6, "deliveries and events");
    assert_eq!(fixture.notifications.endpoint_counts(endpoint.id).await.unwrap().waiting, 0);
}

async fn an_event_follows_an_older_one_that_is_deleted(fixture: &StoreFixture) {
    let endpoint = registered(fixture, &[EventType::Submitted, EventType::Failed]).await;
    let row = submitted(fixture).await;
    let between = now() + Duration::from_millis(1);
    eventually(SOON, "the clock to go on", || async { (now() > between).then_some(()) }).await;
    failed_at(fixture, &row, now()).await;
    disabled_by_owner(fixture, &endpoint).await;
    assert_eq!(forget(fixture, between).await, 2);
    assert!(fixture.notifications.change_endpoint(&Endpoint { version: 2, ..endpoint.clone() }).await.unwrap());
    assert_eq!(kinds(&lease(fixture, &endpoint, now() + MINUTE).await), [EventType::Failed]);
}

/// As a save leaves them that had read the endpoint before it was deleted.
async fn deliveries_without_an_endpoint_are_deleted(fixture: &StoreFixture) {
    let (own, gone) = (registered(fixture, &[EventType::Submitted]).await, endpoint("other", &[EventType::Submitted]));
    let gone = Endpoint { owner: EVERY_KEY.to_owned(), ..gone };
    assert!(fixture.notifications.put_endpoint(&gone, 10).await.unwrap());
    submitted(fixture).await;
    fixture.execute("DELETE FROM webhook_endpoints WHERE api_key = ''").await;
    assert_eq!(fixture.notifications.endpoint_counts(gone.id).await.unwrap().waiting, 1);
    assert_eq!(forget(fixture, now() - MINUTE).await, 1);
    assert_eq!(fixture.notifications.endpoint_counts(gone.id).await.unwrap().waiting, 0);
    assert_eq!(fixture.notifications.endpoint_counts(own.id).await.unwrap().waiting, 1);
}

async fn events_that_no_endpoint_got_are_deleted(fixture: &StoreFixture) {
    let endpoint = registered(fixture, &[EventType::Submitted]).await;
    disabled_by_owner(fixture, &endpoint).await;
    for _ in 0..7 {
        submitted(fixture).await;
    }
    assert_eq!(forget(fixture, now() - MINUTE).await, 0);
    assert_eq!(forget(fixture, now() + MINUTE).await, 7);
    submitted(fixture).await;
    assert_eq!(forget(fixture, now() + MINUTE).await, 1, "it goes on from there");
}

/// A client may ask as often as it wants, and connections to the store are few.
async fn deliveries_are_counted_up_to_a_limit(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let endpoint = registered(fixture, &[EventType::Submitted]).await;
    submitted(fixture).await;
    fixture.write_backlog().await;
    assert_eq!(store.endpoint_counts(endpoint.id).await.unwrap().waiting, 10_000);
    let counts = store.notification_counts(now()).await.unwrap();
    assert_eq!((counts.waiting, counts.enabled), (10_000, 1));
    assert!(counts.oldest_waiting.is_some_and(|oldest| oldest < now() + MINUTE), "the backlog is from later");
    fixture.execute("UPDATE webhook_deliveries SET due_at = NULL, ended = 'given-up'").await;
    let counts = store.endpoint_counts(endpoint.id).await.unwrap();
    assert_eq!((counts.waiting, counts.given_up), (0, 10_000));
}

async fn a_large_backlog_is_given_up_in_part_and_no_event_waits_for_one_that_was(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let endpoint = registered(fixture, &[EventType::Submitted, EventType::Failed]).await;
    let row = submitted(fixture).await;
    failed(fixture, &row).await;
    fixture.write_backlog().await;
    let late = now() + MINUTE * 180;
    let places = [(endpoint.id, 2)];
    let mut leased = store.lease_deliveries(&places, late, late + MINUTE, Uuid::new_v4()).await.unwrap();
    // One of the backlog fails; the row's first event is given back, and so the longest due.
    let first = leased.remove(1);
    store.return_deliveries(&leased, now()).await.unwrap();
    let gone = EndpointThen::Disable { reason: "answered 410".to_owned(), failing_since: None };
    let record = AttemptRecord { now: late, ..record(&first, DeliveryThen::GivenUp, gone) };
    store.record_attempt(&record).await.unwrap();
    let stored = store.endpoint(endpoint.id).await.unwrap().unwrap();
    assert!(store.change_endpoint(&Endpoint { disabled: None, ..stored }).await.unwrap());
    let places = [(endpoint.id, 3000)];
    let leased = store.lease_deliveries(&places, late, late + MINUTE, Uuid::new_v4()).await.unwrap();
    assert_eq!(leased.len(), 12_100 + 2 - 10_001, "the rest waits until it is enabled");
    assert!(kinds(&leased).contains(&EventType::Failed));
}

/// The store went away after the commit that disabled the endpoint, so the attempt is recorded again.
async fn what_is_left_is_given_up_when_the_attempt_is_recorded_again(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let endpoint = registered(fixture, &[EventType::Submitted]).await;
    for _ in 0..3 {
        submitted(fixture).await;
    }
    let (places, at) = ([(endpoint.id, 1)], now() + MINUTE);
    let first = store.lease_deliveries(&places, at, at + MINUTE, Uuid::new_v4()).await.unwrap().remove(0);
    let gone = EndpointThen::Disable { reason: "answered 410".to_owned(), failing_since: None };
    let record = record(&first, DeliveryThen::GivenUp, gone);
    assert_eq!(store.record_attempt(&record).await.unwrap(), Recorded::AsDecided);
    // As if the commits after that one had failed. The attempt's own delivery has ended.
    fixture.execute("UPDATE webhook_deliveries SET due_at = created_at, ended = NULL WHERE attempts = 0").await;
    assert_eq!(store.endpoint_counts(endpoint.id).await.unwrap().waiting, 2);
    assert_eq!(store.record_attempt(&record).await.unwrap(), Recorded::AsDecided, "so that it is logged and counted");
    let counts = store.endpoint_counts(endpoint.id).await.unwrap();
    assert_eq!((counts.waiting, counts.given_up), (0, 3));
}

/// The attempt's lease has ended, and the owner has disabled the endpoint by itself meanwhile: its events are kept.
async fn a_late_410_does_not_give_up_the_events_of_an_endpoint_that_its_owner_disabled(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let endpoint = registered(fixture, &[EventType::Submitted]).await;
    for _ in 0..2 {
        submitted(fixture).await;
    }
    let first = lease(fixture, &endpoint, now() + MINUTE).await.remove(0);
    assert_eq!(store.requeue(endpoint.id, &Requeue::Event(first.event.clone()), now()).await.unwrap().queued, 1);
    disabled_by_owner(fixture, &endpoint).await;
    let gone = EndpointThen::Disable { reason: "answered 410".to_owned(), failing_since: None };
    store.record_attempt(&record(&first, DeliveryThen::GivenUp, gone)).await.unwrap();
    let counts = store.endpoint_counts(endpoint.id).await.unwrap();
    assert_eq!((counts.waiting, counts.given_up), (2, 0));
}

/// What decides about the second failure sees no pause that ended long ago.
async fn a_series_of_failures_begins_with_the_first(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let endpoint = registered(fixture, &[EventType::Submitted]).await;
    submitted(fixture).await;
    let (mut first_at, mut at) = (None, now() + MINUTE);
    for _ in 0..4 {
        let stored = store.endpoint(endpoint.id).await.unwrap().unwrap();
        let delivery = lease(fixture, &endpoint, at).await.remove(0);
        let failed = AttemptResult { status: Some(500), succeeded: false, retry_after: None };
        let (then, health) = after_attempt(&stored, &delivery, &failed, at, Duration::ZERO, MINUTE / 60, 0.0);
        let mut attempt = record(&delivery, then, health);
        (attempt.now, attempt.attempt.at) = (at, at);
        store.record_attempt(&attempt).await.unwrap();
        first_at.get_or_insert(at);
        at = at + MINUTE * 60;
    }
    let stored = store.endpoint(endpoint.id).await.unwrap().unwrap();
    assert_eq!((stored.failures, stored.failing_since, stored.paused_until), (4, first_at, None));
}

async fn a_disabled_endpoint_does_not_count_as_waiting(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let endpoint = registered(fixture, &[EventType::Submitted]).await;
    submitted(fixture).await;
    assert_eq!(store.notification_counts(now()).await.unwrap().waiting, 1);
    disabled_by_owner(fixture, &endpoint).await;
    let counts = store.notification_counts(now()).await.unwrap();
    assert_eq!((counts.waiting, counts.oldest_waiting, counts.disabled), (0, None, 1));
}

async fn concurrent_receives_share_the_limit_of_an_endpoint(fixture: &StoreFixture) {
    registered(fixture, &[EventType::Submitted]).await;
    for _ in 0..20 {
        submitted(fixture).await;
    }
    let (store, random) = (Arc::clone(&fixture.notifications), Randomness::system());
    let queue = OutboxQueue::new(store, Clock::system(), random, MINUTE, 256);
    let received = join_all((0..4).map(|_| queue.receive(64, Duration::ZERO))).await;
    let total: usize = received.into_iter().map(|messages| messages.unwrap().len()).sum();
    assert_eq!(total, 4);
}

/// One call looks at 100,000 events.
async fn a_long_recovery_continues_where_the_last_call_ended(fixture: &StoreFixture) {
    let (store, start) = (&fixture.notifications, now());
    let endpoint = registered(fixture, &[EventType::Submitted]).await;
    fixture.write_events_before_a_missed_one().await;
    let Requeued { queued, next_since } =
        store.requeue(endpoint.id, &Requeue::Since(start - MINUTE), now()).await.unwrap();
    let since = next_since.expect("it has not looked at all events");
    assert!(queued == 0 && since > start, "{queued} {since}");
    let rest = store.requeue(endpoint.id, &Requeue::Since(since), now()).await.unwrap();
    assert_eq!(rest, Requeued { queued: 1, next_since: None });
    assert_eq!(lease(fixture, &endpoint, now() + MINUTE).await.len(), 1);
}

/// The second event was in flight when the first was made due again, and its process was killed.
async fn an_event_whose_process_died_waits_for_an_earlier_one(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let endpoint = registered(fixture, &[EventType::Submitted, EventType::Failed]).await;
    let row = submitted(fixture).await;
    let first = lease(fixture, &endpoint, now() + MINUTE).await.remove(0);
    deliver(fixture, &first).await;
    failed(fixture, &row).await;
    assert_eq!(kinds(&lease(fixture, &endpoint, now() + MINUTE).await), [EventType::Failed]);
    assert_eq!(store.requeue(endpoint.id, &Requeue::Event(first.event.clone()), now()).await.unwrap().queued, 1);
    let first = lease(fixture, &endpoint, now() + MINUTE).await.remove(0);
    let (at, late) = (now() + MINUTE * 10, now() + MINUTE * 60);
    let fails = EndpointThen::Fails { paused_until: None, anew: false };
    store.record_attempt(&record(&first, DeliveryThen::RetryAt(late), fails)).await.unwrap();
    assert!(lease(fixture, &endpoint, at).await.is_empty(), "it follows the first one");
    assert_eq!(store.due_endpoints(at).await.unwrap(), [], "it would take the places of others, in vain");
    let first = lease(fixture, &endpoint, late).await.remove(0);
    assert_eq!(first.kind, EventType::Submitted);
    deliver(fixture, &first).await;
    assert_eq!(kinds(&lease(fixture, &endpoint, now() + MINUTE).await), [EventType::Failed]);
}

async fn an_event_that_is_given_back_waits_for_an_earlier_one(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let endpoint = registered(fixture, &[EventType::Submitted, EventType::Failed]).await;
    let row = submitted(fixture).await;
    let first = lease(fixture, &endpoint, now() + MINUTE).await.remove(0);
    deliver(fixture, &first).await;
    failed(fixture, &row).await;
    let second = lease(fixture, &endpoint, now() + MINUTE).await;
    assert_eq!(store.requeue(endpoint.id, &Requeue::Event(first.event.clone()), now()).await.unwrap().queued, 1);
    let first = lease(fixture, &endpoint, now() + MINUTE).await.remove(0);
    store.return_deliveries(&second, now()).await.unwrap();
    assert_eq!(store.due_endpoints(now() + MINUTE).await.unwrap(), []);
    deliver(fixture, &first).await;
    assert_eq!(kinds(&lease(fixture, &endpoint, now() + MINUTE).await), [EventType::Failed]);
}

/// As a process of another version could leave it.
async fn an_event_that_waits_for_a_delivered_one_is_recovered(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let start = now();
    let endpoint = registered(fixture, &[EventType::Submitted, EventType::Failed]).await;
    let row = submitted(fixture).await;
    failed(fixture, &row).await;
    let delivered = "UPDATE webhook_deliveries SET due_at = NULL, ended_at = created_at, ended = 'delivered' \
         WHERE event_id LIKE '%submitted'";
    fixture.execute(delivered).await;
    assert_eq!(store.due_endpoints(now() + MINUTE).await.unwrap(), []);
    let recovered = store.requeue(endpoint.id, &Requeue::Since(start - MINUTE), now()).await.unwrap();
    assert_eq!(recovered, Requeued { queued: 1, next_since: None });
    assert_eq!(kinds(&lease(fixture, &endpoint, now() + MINUTE).await), [EventType::Failed]);
}

/// The longest overdue delivery is behind one that waits, so there is nothing to lease for its endpoint.
async fn an_endpoint_with_nothing_to_lease_leaves_its_place_to_others(fixture: &StoreFixture) {
    const OVERDUE: &str =
        "UPDATE webhook_deliveries SET due_at = created_at, lease = NULL WHERE event_id LIKE '%failed'";
    let blocked = registered(fixture, &[EventType::Submitted, EventType::Failed]).await;
    let row = submitted(fixture).await;
    failed(fixture, &row).await;
    let first = lease(fixture, &blocked, now() + MINUTE).await.remove(0);
    let waits = record(&first, DeliveryThen::RetryAt(now() + MINUTE * 60), EndpointThen::Unchanged);
    fixture.notifications.record_attempt(&waits).await.unwrap();
    fixture.execute(OVERDUE).await;
    assert!(fixture.notifications.change_endpoint(&Endpoint { events: Vec::new(), ..blocked }).await.unwrap());
    let healthy = registered(fixture, &[EventType::Submitted]).await;
    submitted(fixture).await;
    let (store, random) = (Arc::clone(&fixture.notifications), Randomness::system());
    let queue = OutboxQueue::new(store, Clock::system(), random, MINUTE, 64);
    let received = queue.receive(1, Duration::ZERO).await.unwrap();
    assert!(received.is_empty(), "the endpoint with nothing to lease has the first turn");
    fixture.execute(OVERDUE).await;
    let received = queue.receive(1, SOON).await.unwrap();
    let endpoints: Vec<_> = received.iter().filter_map(|message| queue.delivery(&message.receipt)).collect();
    assert_eq!(endpoints.iter().map(|delivery| delivery.endpoint).collect::<Vec<_>>(), [healthy.id]);
}

/// It was due for ever, and the later events of its transaction were parked behind it.
async fn a_delivery_whose_event_is_missing_ends_and_those_behind_it_go_on(fixture: &StoreFixture) {
    let store = &fixture.notifications;
    let start = now();
    // The address is refused, so that nothing is sent.
    let url = "http://127.0.0.1:9/".to_owned();
    let endpoint = Endpoint { url, ..endpoint("key", &[EventType::Submitted, EventType::Failed]) };
    assert!(store.put_endpoint(&endpoint, 10).await.unwrap());
    let row = submitted(fixture).await;
    failed(fixture, &row).await;
    fixture.execute("DELETE FROM events WHERE id LIKE '%submitted'").await;
    let leased = lease(fixture, &endpoint, now() + MINUTE).await;
    assert_eq!((kinds(&leased), &leased[0].payload), (vec![EventType::Submitted], &None));
    store.return_deliveries(&leased, now()).await.unwrap();

    let config = Config::from_vars(Service::Command, |_| None).unwrap().notify;
    let notifier = Notifier::new(Arc::clone(store), Clock::system(), config, Duration::ZERO);
    let tried = eventually(SOON, "an attempt for the event behind it", || async {
        let attempts = store.attempts(endpoint.id, None, 9).await.unwrap();
        (attempts.len() == 2).then_some(attempts)
    });
    let attempts = tokio::select! {
        ended = notifier.run(CancellationToken::new()) => panic!("the notifier ended: {ended:?}"),
        attempts = tried => attempts,
    };
    let of_missing = attempts.iter().find(|attempt| attempt.event == leased[0].event).unwrap();
    assert_eq!((of_missing.number, of_missing.status), (1, None));
    assert!(of_missing.error.as_deref().unwrap().contains("the event is missing"), "{of_missing:?}");
    let counts = store.endpoint_counts(endpoint.id).await.unwrap();
    assert_eq!((counts.given_up, counts.waiting), (1, 1));
    let failures = store.endpoint(endpoint.id).await.unwrap().unwrap().failures;
    assert_eq!(failures, 1, "that of the address: a missing event is not the endpoint's fault");
    let timeline = fixture.store.timeline(row.id).await.unwrap();
    let given_up = timeline.iter().find(|step| step.action == "notification-given-up").unwrap();
    assert!(given_up.detail.contains("transaction.submitted"), "{given_up:?}");

    // It cannot be recovered, and holds up no recovery.
    let recovered = store.requeue(endpoint.id, &Requeue::Since(start - MINUTE), now()).await.unwrap();
    assert_eq!(recovered, Requeued { queued: 1, next_since: None });
    let missing = Requeue::Event(leased[0].event.clone());
    assert_eq!(store.requeue(endpoint.id, &missing, now()).await.unwrap().queued, 0);
    assert_eq!(kinds(&lease(fixture, &endpoint, now() + MINUTE * 60).await), [EventType::Failed]);
}

/// A planner that takes another index reads every delivery that the endpoint ever had, at each look for due ones.
#[tokio::test]
async fn mysql_reads_only_deliveries_that_wait() {
    const ENDED: usize = 300;
    let fixture = StoreFixture::mysql().await;
    let endpoint = registered(&fixture, &[EventType::Submitted]).await;
    for _ in 0..ENDED {
        submitted(&fixture).await;
    }
    let store = &fixture.notifications;
    let (places, at) = ([(endpoint.id, ENDED)], now() + MINUTE);
    for delivery in &store.lease_deliveries(&places, at, at + MINUTE, Uuid::new_v4()).await.unwrap() {
        deliver(&fixture, delivery).await;
    }
    submitted(&fixture).await;
    let before = fixture.mysql_rows_read("webhook_deliveries").await;
    assert_eq!(store.due_endpoints(now() + MINUTE).await.unwrap().len(), 1);
    let leased = lease(&fixture, &endpoint, now() + MINUTE).await;
    deliver(&fixture, &leased[0]).await;
    let read = fixture.mysql_rows_read("webhook_deliveries").await - before;
    assert!(0 < read && read < 20, "{read} rows read for one delivery");
}

/// With a large backlog, a client that asks for one event again, or changes the description, must not make the store go
/// through all of it.
#[tokio::test]
async fn mysql_reads_one_transaction_for_a_redelivery_and_none_for_a_change() {
    let fixture = StoreFixture::mysql().await;
    let endpoint = registered(&fixture, &[EventType::Submitted]).await;
    for _ in 0..200 {
        submitted(&fixture).await;
    }
    let store = &fixture.notifications;
    let places = [(endpoint.id, 1)];
    let leased = store.lease_deliveries(&places, now() + MINUTE, now() + 2 * MINUTE, Uuid::new_v4()).await.unwrap();
    deliver(&fixture, &leased[0]).await;
    let before = fixture.mysql_rows_read("webhook_deliveries").await;
    let again = Requeue::Event(leased[0].event.clone());
    assert_eq!(store.requeue(endpoint.id, &again, now()).await.unwrap().queued, 1);
    assert!(store.change_endpoint(&Endpoint { description: None, ..endpoint }).await.unwrap());
    let read = fixture.mysql_rows_read("webhook_deliveries").await - before;
    assert!(read < 20, "{read} rows read");
}

/// The statement that gives up what waits must not go through what was delivered in thirty days.
#[tokio::test]
async fn mysql_reads_only_deliveries_that_wait_when_it_disables_an_endpoint() {
    const ENDED: usize = 300;
    let fixture = StoreFixture::mysql().await;
    let endpoint = registered(&fixture, &[EventType::Submitted]).await;
    for _ in 0..ENDED {
        submitted(&fixture).await;
    }
    for delivery in &lease_many(&fixture, &endpoint, ENDED).await {
        deliver(&fixture, delivery).await;
    }
    for _ in 0..3 {
        submitted(&fixture).await;
    }
    let first = lease(&fixture, &endpoint, now() + MINUTE).await.remove(0);
    let gone = EndpointThen::Disable { reason: "answered 410".to_owned(), failing_since: None };
    let before = fixture.mysql_rows_read("webhook_deliveries").await;
    fixture.notifications.record_attempt(&record(&first, DeliveryThen::GivenUp, gone)).await.unwrap();
    let read = fixture.mysql_rows_read("webhook_deliveries").await - before;
    assert!(0 < read && read < 50, "{read} rows read");
    assert_eq!(fixture.notifications.endpoint_counts(endpoint.id).await.unwrap().given_up, 3);
}

/// A client could not enable its endpoint if that took longer than a statement may.
#[tokio::test]
async fn mysql_reads_no_backlog_when_an_endpoint_is_enabled() {
    let fixture = StoreFixture::mysql().await;
    let endpoint = registered(&fixture, &[EventType::Submitted, EventType::Failed]).await;
    for _ in 0..100 {
        let row = submitted(&fixture).await;
        failed(&fixture, &row).await;
    }
    let store = &fixture.notifications;
    let disabled = Some(Disabled { at: now(), reason: "disabled by its owner".to_owned() });
    assert!(store.change_endpoint(&Endpoint { disabled, ..endpoint.clone() }).await.unwrap());
    let before = fixture.mysql_rows_read("webhook_deliveries").await;
    assert!(store.change_endpoint(&Endpoint { version: 2, ..endpoint }).await.unwrap());
    assert_eq!(fixture.mysql_rows_read("webhook_deliveries").await - before, 0);
}

/// The second event fails again while another process commits the delivery of the first, which was made due again.
#[tokio::test]
async fn mysql_parks_no_event_behind_one_that_ends_at_the_same_time() {
    let fixture = StoreFixture::mysql().await;
    let endpoint = registered(&fixture, &[EventType::Submitted, EventType::Failed]).await;
    let row = submitted(&fixture).await;
    let first = lease(&fixture, &endpoint, now() + MINUTE).await.remove(0);
    deliver(&fixture, &first).await;
    failed(&fixture, &row).await;
    let store = Arc::clone(&fixture.notifications);
    let second = lease(&fixture, &endpoint, now() + MINUTE).await.remove(0);
    let fails = EndpointThen::Fails { paused_until: None, anew: false };
    store.record_attempt(&record(&second, DeliveryThen::RetryAt(now()), fails.clone())).await.unwrap();
    let second = lease(&fixture, &endpoint, now() + MINUTE).await.remove(0);
    assert_eq!(store.requeue(endpoint.id, &Requeue::Event(first.event), now()).await.unwrap().queued, 1);

    let (schema, mut rival) = fixture.mysql_connection().await;
    for sql in [
        "BEGIN",
        "SELECT id FROM transactions FOR UPDATE",
        "UPDATE webhook_deliveries SET due_at = NULL, ended = 'delivered' WHERE event_id LIKE '%submitted'",
    ] {
        sqlx::query(sql).execute(&mut rival).await.unwrap();
    }
    let late = now() + MINUTE * 60;
    let failed_again = record(&second, DeliveryThen::RetryAt(late), fails);
    let mut recording = tokio::spawn(async move { store.record_attempt(&failed_again).await });
    tokio::select! {
        () = until_blocked(schema, "SELECT id FROM transactions") => {}
        recorded = &mut recording => panic!("it did not wait for the other event's end: {recorded:?}"),
    }
    sqlx::query("COMMIT").execute(&mut rival).await.unwrap();
    recording.await.unwrap().unwrap();
    assert_eq!(kinds(&lease(&fixture, &endpoint, late + MINUTE).await), [EventType::Failed]);
}

/// Events whose deliveries ended later than they happened are older than the retention, and cannot be deleted yet.
#[tokio::test]
async fn mysql_looks_once_at_events_that_cannot_be_deleted_yet() {
    let fixture = StoreFixture::mysql().await;
    let endpoint = registered(&fixture, &[EventType::Submitted]).await;
    for _ in 0..200 {
        submitted(&fixture).await;
    }
    for delivery in &lease_many(&fixture, &endpoint, 200).await {
        deliver(&fixture, delivery).await;
    }
    fixture.execute("UPDATE webhook_deliveries SET ended_at = ended_at + INTERVAL 1 DAY").await;
    let before = now() + MINUTE;
    assert_eq!(forget(&fixture, before).await, 200, "the attempts");
    let read = fixture.mysql_rows_read("events").await;
    assert_eq!(forget(&fixture, before).await, 0);
    let read = fixture.mysql_rows_read("events").await - read;
    assert!(read < 20, "{read} rows read");
    assert_eq!(forget(&fixture, now() + MINUTE * 60 * 25).await, 400, "with their deliveries");
}

/// An endpoint is deleted after its deliveries: one that is added between the two would stay for ever.
#[tokio::test]
async fn mysql_adds_no_delivery_for_an_endpoint_that_is_being_deleted() {
    let fixture = StoreFixture::mysql().await;
    let endpoint = registered(&fixture, &[EventType::Submitted]).await;
    submitted(&fixture).await;
    let first = lease(&fixture, &endpoint, now() + MINUTE).await.remove(0);
    let (schema, mut rival) = fixture.mysql_connection().await;
    for sql in ["BEGIN", "DELETE FROM webhook_deliveries", "DELETE FROM webhook_endpoints"] {
        sqlx::query(sql).execute(&mut rival).await.unwrap();
    }
    let (store, event) = (Arc::clone(&fixture.notifications), Requeue::Event(first.event));
    let mut requeuing = tokio::spawn(async move { store.requeue(endpoint.id, &event, now()).await });
    tokio::select! {
        () = until_blocked(schema, "SELECT 1 FROM webhook_endpoints") => {}
        () = until_blocked(schema, "INSERT INTO webhook_deliveries") => {}
        requeued = &mut requeuing => panic!("it did not wait for the deletion: {requeued:?}"),
    }
    sqlx::query("COMMIT").execute(&mut rival).await.unwrap();
    assert_eq!(requeuing.await.unwrap().unwrap().queued, 0);
    assert_eq!(fixture.notifications.endpoint_counts(endpoint.id).await.unwrap().waiting, 0);
}

/// The events of one key with many endpoints would make a commit that saves moves of all keys pass its time limit. The last
/// of these moves waits for a lock, and with it those of its commit.
#[tokio::test]
async fn mysql_saves_moves_with_many_deliveries_in_several_commits() {
    let fixture = StoreFixture::mysql().await;
    for _ in 0..100 {
        let endpoint = endpoint("key", &[EventType::Submitted]);
        assert!(fixture.notifications.put_endpoint(&endpoint, 100).await.unwrap());
    }
    let mut moves = Vec::new();
    for number in 0..20 {
        let (claimed, token) = fixture.claimed().await;
        let bound = super::fixture::bind(&claimed, token, &format!("oz-{number}"));
        moves.push(Moved { events: bound.transaction.events_since(&claimed), ..bound });
    }
    let ids: Vec<_> = moves.iter().map(|moved| moved.transaction.id).collect();
    let (_, mut rival) = fixture.mysql_connection().await;
    sqlx::query("BEGIN").execute(&mut rival).await.unwrap();
    let lock = sqlx::query("SELECT 1 FROM transactions WHERE id = ? FOR UPDATE").bind(ids[19].to_string());
    lock.fetch_one(&mut rival).await.unwrap();
    let store = Arc::clone(&fixture.store);
    let saving =
        tokio::spawn(async move { futures::future::join_all(moves.iter().map(|moved| store.save(moved))).await });
    eventually(SOON, "half of the moves to be saved", || async {
        let rows = futures::future::join_all(ids.iter().map(|id| fixture.store.get(*id))).await;
        let is_saved = |row: &Transaction| row.status == Status::Submitted;
        let saved = rows.into_iter().filter(|row| row.as_ref().unwrap().as_ref().is_some_and(is_saved)).count();
        (saved >= 8).then_some(())
    })
    .await;
    sqlx::query("ROLLBACK").execute(&mut rival).await.unwrap();
    for saved in saving.await.unwrap() {
        assert_eq!(saved.unwrap(), Saved::Yes { early: false });
    }
}

/// The save waits for a row that a rival has locked; the endpoint is enabled and recovers what it missed meanwhile.
#[tokio::test]
async fn mysql_delivers_to_an_endpoint_that_was_enabled_while_the_save_waited() {
    let fixture = StoreFixture::mysql().await;
    let endpoint = registered(&fixture, &[EventType::Submitted]).await;
    disabled_by_owner(&fixture, &endpoint).await;
    let (claimed, token) = fixture.claimed().await;
    let moved = super::fixture::bind(&claimed, token, &Uuid::new_v4().to_string());
    let events = moved.transaction.events_since(&claimed);
    let moved = Moved { events, ..moved };
    let (schema, mut rival) = fixture.mysql_connection().await;
    for sql in ["BEGIN", "SELECT id FROM transactions FOR UPDATE"] {
        sqlx::query(sql).execute(&mut rival).await.unwrap();
    }
    let store = Arc::clone(&fixture.store);
    let mut saving = tokio::spawn(async move { store.save(&moved).await });
    tokio::select! {
        () = until_blocked(schema, "SELECT id, version FROM transactions") => {}
        saved = &mut saving => panic!("it did not wait for the row: {saved:?}"),
    }
    let notifications = &fixture.notifications;
    let stored = notifications.endpoint(endpoint.id).await.unwrap().unwrap();
    assert!(notifications.change_endpoint(&Endpoint { disabled: None, ..stored }).await.unwrap());
    let since = Requeue::Since(now() - MINUTE);
    assert_eq!(notifications.requeue(endpoint.id, &since, now()).await.unwrap().queued, 0);
    sqlx::query("COMMIT").execute(&mut rival).await.unwrap();
    assert_eq!(saving.await.unwrap().unwrap(), Saved::Yes { early: false });
    assert_eq!(lease(&fixture, &endpoint, now() + MINUTE).await.len(), 1);
}
