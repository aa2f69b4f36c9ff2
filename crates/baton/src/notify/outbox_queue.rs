//! The deliveries that are due, as a queue for the pipeline: which one is next, and how many run at once.
//!
//! Endpoints take turns, so that a large backlog of one does not delay the others. An endpoint, a host with several
//! endpoints and an API key with several endpoints have a limited number of attempts in flight in each process. An endpoint
//! that keeps failing has a single one, and all of those together take half of the places: receivers that hang leave the
//! rest to the others. A host that cannot be reached is left alone for a while (`host_breaker.rs`).
//!
//! What an attempt leads to is stored by the handler ([`super::delivery`]) in one commit; settling a message here only
//! frees its place, or gives back what was not tried.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use futures::future::join_all;
use pipeline::{Attributes, Capabilities, DeadLetter, Depth, Message, MessageId, Outgoing, Queue, QueueError, Receipt};
use reqwest::Url;
use tokio::sync::Mutex as AsyncMutex;
use tracing::{info, warn};

use super::host_breaker::{Allowed, HostBreakers, HostState};
use super::schedule::FAILURES_BEFORE_PAUSE;
use crate::clock::Clock;
use crate::randomness::Randomness;
use crate::relay::store::StoreError;
use crate::relay::store::notifications::{Delivery, DueEndpoint, EndpointId, NotificationStore};

/// Name in logs and metrics.
pub const QUEUE: &str = "webhook-deliveries";
/// Attempts in flight of one endpoint in one process.
const ENDPOINT_MAX: usize = 4;
/// Attempts in flight to one host in one process.
const HOST_MAX: usize = 16;
/// Share of all places, and of those of one host, that the endpoints of one API key take, in quarters.
const OWNER_QUARTERS: usize = 3;
/// Share of all places that failing endpoints take, in quarters.
const FAILING_QUARTERS: usize = 2;
/// Pause between two looks for due deliveries while there are none.
const POLL: Duration = Duration::from_millis(100);
/// Pause of a delivery that the pipeline would bury.
const AFTER_BURIAL: Duration = Duration::from_secs(60);
/// Longest wait of a receive that found endpoints with nothing to lease. It leaves them out, and it has only the places that
/// were free when it began.
const BLOCKED_WAIT: Duration = Duration::from_secs(1);

/// See the top of this file.
pub struct OutboxQueue {
    store: Arc<dyn NotificationStore>,
    clock: Clock,
    random: Randomness,
    lease: Duration,
    concurrency: usize,
    in_flight: Mutex<InFlight>,
    /// Held from the choice of places until what was leased for them counts as in flight: concurrent receives would give
    /// the same places twice.
    leasing: AsyncMutex<()>,
}

/// The deliveries that this process has leased, by receipt.
#[derive(Default)]
struct InFlight {
    deliveries: HashMap<String, (Delivery, Place)>,
    by_endpoint: HashMap<EndpointId, usize>,
    by_host: HashMap<String, usize>,
    by_owner: HashMap<String, usize>,
    by_host_and_owner: HashMap<String, usize>,
    failing: usize,
    breakers: HostBreakers,
}

/// What a delivery in flight counts towards.
#[derive(Clone)]
struct Place {
    host: String,
    owner: String,
    failing: bool,
}

impl Place {
    fn of(due: &DueEndpoint) -> Self {
        let failing = due.failures >= FAILURES_BEFORE_PAUSE;
        Self { host: host(&due.url), owner: due.owner.clone(), failing }
    }

    fn host_and_owner(&self) -> String {
        host_and_owner(&self.host, &self.owner)
    }
}

impl OutboxQueue {
    /// The deliveries of this store. Each is leased for `lease`, which must be longer than an attempt and the storing of its
    /// result; then another process may try. At most `concurrency` are in flight.
    pub fn new(
        store: Arc<dyn NotificationStore>,
        clock: Clock,
        random: Randomness,
        lease: Duration,
        concurrency: usize,
    ) -> Self {
        Self { store, clock, random, lease, concurrency, in_flight: Mutex::default(), leasing: AsyncMutex::default() }
    }

    /// The delivery of a message that was received here and is not settled.
    pub fn delivery(&self, receipt: &Receipt) -> Option<Delivery> {
        self.lock().deliveries.get(&receipt.0).map(|(delivery, _)| delivery.clone())
    }

    /// What an attempt for an endpoint of this API key showed of the URL's host.
    pub fn attempted(&self, owner: &str, url: &str, host_is: HostState) {
        let host = host(url);
        let (now, key) = (self.clock.instant(), host_and_owner(&host, owner));
        let breakers = &mut self.lock().breakers;
        match host_is {
            HostState::Unreachable if breakers.failed(&key, now) => warn!(
                key = owner,
                host,
                action = "webhook_host_paused",
                "the host cannot be reached: its endpoints are tried one at a time, with pauses"
            ),
            HostState::Reached if breakers.reached(&key) => {
                info!(key = owner, host, action = "webhook_host_reached", "the host can be reached again");
            }
            HostState::Unreachable | HostState::Reached | HostState::Unclear => {}
        }
    }

    /// The number of hosts that are paused, counted for each API key.
    pub fn paused_hosts(&self) -> usize {
        self.lock().breakers.open_count(self.clock.instant())
    }

    /// Leases what is due for endpoints other than `blocked`, at most `max`. If there is nothing to lease for the endpoints
    /// whose turn it is, adds them to `blocked`.
    async fn lease_due(&self, max: usize, blocked: &mut HashSet<EndpointId>) -> Result<Vec<Message>, QueueError> {
        let now = self.clock.now();
        let mut due = self.store.due_endpoints(now).await.map_err(queue_error)?;
        due.retain(|due| !blocked.contains(&due.id));
        let _leasing = self.leasing.lock().await;
        let places = self.lock().places(&due, max, self.concurrency, self.clock.instant());
        if places.is_empty() {
            return Ok(Vec::new());
        }
        let kinds: HashMap<EndpointId, Place> = due.iter().map(|due| (due.id, Place::of(due))).collect();
        let lease = self.random.uuid_v4();
        let leased = self.store.lease_deliveries(&places, now, now + self.lease, lease).await.map_err(queue_error)?;
        if leased.is_empty() {
            blocked.extend(places.iter().map(|(endpoint, _)| *endpoint));
        }
        let mut in_flight = self.lock();
        let messages = leased.into_iter().map(|delivery| {
            let receipt = Receipt(format!("{} {} {lease}", delivery.endpoint, delivery.event));
            let message = Message {
                id: MessageId(format!("{} {}", delivery.event, delivery.endpoint)),
                body: Vec::new(),
                attributes: Attributes::new(),
                receives: delivery.attempts + 1,
                sent_at: SystemTime::UNIX_EPOCH + Duration::from_millis(delivery.created_at.0.unsigned_abs()),
                receipt: receipt.clone(),
            };
            in_flight.add(receipt, kinds[&delivery.endpoint].clone(), delivery);
            message
        });
        Ok(messages.collect())
    }

    /// Gives back a delivery that was not tried; it is due again after this long, or when its lease has ended if the store
    /// is away. Its place is free in any case.
    async fn give_back(&self, receipt: &Receipt, after: Duration) -> Result<(), QueueError> {
        let Some(delivery) = self.lock().remove(receipt) else { return Ok(()) };
        let due_at = self.clock.now() + after;
        self.store.return_deliveries(&[delivery], due_at).await.map_err(queue_error)
    }

    fn lock(&self) -> MutexGuard<'_, InFlight> {
        self.in_flight.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl InFlight {
    /// How many deliveries to lease for each endpoint. Each place goes to the API key with the fewest attempts in flight, and
    /// there to the endpoint with the fewest, and then to the longest overdue: an endpoint with a backlog of slow answers
    /// would otherwise get each place that becomes free. The one place of a paused host goes to endpoints that do not fail
    /// first: others may hang, and say nothing about the host.
    fn places(&self, due: &[DueEndpoint], max: usize, concurrency: usize, now: Instant) -> Vec<(EndpointId, usize)> {
        let (mut by_host, mut by_owner, mut failing) = (self.by_host.clone(), self.by_owner.clone(), self.failing);
        let quarters = |all: usize, count: usize| (all * count / 4).max(1);
        let kinds: Vec<_> = due.iter().map(Place::of).collect();
        let allowed: Vec<_> = kinds
            .iter()
            .map(|kind| match self.breakers.allowed(&kind.host_and_owner(), now) {
                Allowed::All => quarters(HOST_MAX, OWNER_QUARTERS),
                Allowed::One => 1,
                Allowed::None => 0,
            })
            .collect();
        let mut by_host_and_owner = self.by_host_and_owner.clone();
        let mut places = vec![0; due.len()];
        for _ in 0..max {
            let free = kinds.iter().enumerate().filter_map(|(index, kind)| {
                let count = |counts: &HashMap<String, usize>, key: &str| counts.get(key).copied().unwrap_or(0);
                let taken = self.by_endpoint.get(&due[index].id).copied().unwrap_or(0) + places[index];
                let of_owner = count(&by_owner, &kind.owner);
                let is_free = taken < if kind.failing { 1 } else { ENDPOINT_MAX }
                    && count(&by_host, &kind.host) < HOST_MAX
                    && count(&by_host_and_owner, &kind.host_and_owner()) < allowed[index]
                    && of_owner < quarters(concurrency, OWNER_QUARTERS)
                    && !(kind.failing && failing >= quarters(concurrency, FAILING_QUARTERS));
                is_free.then_some((of_owner, allowed[index] == 1 && kind.failing, taken, index))
            });
            let Some((.., index)) = free.min() else { break };
            let kind = &kinds[index];
            places[index] += 1;
            *by_host.entry(kind.host.clone()).or_default() += 1;
            *by_host_and_owner.entry(kind.host_and_owner()).or_default() += 1;
            *by_owner.entry(kind.owner.clone()).or_default() += 1;
            failing += usize::from(kind.failing);
        }
        due.iter().map(|due| due.id).zip(places).filter(|(_, places)| *places > 0).collect()
    }

    fn add(&mut self, receipt: Receipt, place: Place, delivery: Delivery) {
        *self.by_endpoint.entry(delivery.endpoint).or_default() += 1;
        *self.by_host.entry(place.host.clone()).or_default() += 1;
        *self.by_owner.entry(place.owner.clone()).or_default() += 1;
        *self.by_host_and_owner.entry(place.host_and_owner()).or_default() += 1;
        self.failing += usize::from(place.failing);
        self.deliveries.insert(receipt.0, (delivery, place));
    }

    fn remove(&mut self, receipt: &Receipt) -> Option<Delivery> {
        let (delivery, place) = self.deliveries.remove(&receipt.0)?;
        release(&mut self.by_endpoint, &delivery.endpoint);
        release(&mut self.by_host, &place.host);
        release(&mut self.by_owner, &place.owner);
        release(&mut self.by_host_and_owner, &place.host_and_owner());
        self.failing -= usize::from(place.failing);
        Some(delivery)
    }
}

fn release<K: std::hash::Hash + Eq>(counts: &mut HashMap<K, usize>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}

fn host_and_owner(host: &str, owner: &str) -> String {
    format!("{host} {owner}")
}

/// Host and port: endpoints with the same one share a limit.
fn host(url: &str) -> String {
    let parsed = Url::parse(url).ok();
    parsed
        .and_then(|url| Some(format!("{}:{}", url.host_str()?, url.port_or_known_default().unwrap_or(0))))
        .unwrap_or_default()
}

fn queue_error(error: StoreError) -> QueueError {
    QueueError::Unavailable(Box::new(error))
}

#[async_trait]
impl Queue for OutboxQueue {
    fn name(&self) -> &str {
        QUEUE
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            durable: true,
            ordered: false,
            fenced: true,
            shared: true,
            cancel_safe: false,
            messages_per_request: 1,
            dead_letters_per_read: 1,
            body_bytes_max: 0,
            delay_max: Duration::MAX,
        }
    }

    /// Events are written by the store, with the change that they report.
    async fn send(&self, messages: &[Outgoing]) -> Vec<Result<MessageId, QueueError>> {
        messages.iter().map(|_| Err(QueueError::Unavailable("the store writes the events itself".into()))).collect()
    }

    async fn receive(&self, max: usize, wait: Duration) -> Result<Vec<Message>, QueueError> {
        let mut until = self.clock.instant() + wait;
        let mut blocked = HashSet::new();
        loop {
            let before = blocked.len();
            let leased = self.lease_due(max, &mut blocked).await?;
            let now = self.clock.instant();
            if !leased.is_empty() || now >= until {
                return Ok(leased);
            }
            if blocked.len() > before {
                // The next endpoints at once.
                until = until.min(now + BLOCKED_WAIT);
                continue;
            }
            self.clock.sleep(POLL.min(until - now)).await;
        }
    }

    async fn ack(&self, receipts: &[Receipt]) -> Vec<Result<(), QueueError>> {
        let mut in_flight = self.lock();
        receipts
            .iter()
            .map(|receipt| {
                in_flight.remove(receipt);
                Ok(())
            })
            .collect()
    }

    async fn retry_after(&self, entries: &[(Receipt, Duration)]) -> Vec<Result<(), QueueError>> {
        join_all(entries.iter().map(|(receipt, after)| self.give_back(receipt, *after))).await
    }

    /// A delivery is given up by what is stored of its attempts alone: one whose handling failed is tried again.
    async fn bury(&self, entries: &[(Receipt, String)]) -> Vec<Result<(), QueueError>> {
        join_all(entries.iter().map(|(receipt, _)| self.give_back(receipt, AFTER_BURIAL))).await
    }

    /// A lease is longer than an attempt.
    async fn extend(&self, receipts: &[Receipt], _: Duration) -> Vec<Result<(), QueueError>> {
        receipts.iter().map(|_| Ok(())).collect()
    }

    fn lease(&self) -> Duration {
        self.lease
    }

    async fn depth(&self) -> Result<Depth, QueueError> {
        let now = self.clock.now();
        let counts = self.store.notification_counts(now).await.map_err(queue_error)?;
        let in_flight = self.lock().deliveries.len() as u64;
        let oldest_age = counts.oldest_waiting.map(|since| now.since(since));
        Ok(Depth { ready: counts.waiting.saturating_sub(in_flight), in_flight, oldest_age, ..Depth::default() })
    }

    async fn dead_letters(&self, _: Option<&MessageId>, _: usize) -> Result<Vec<DeadLetter>, QueueError> {
        Ok(Vec::new())
    }

    async fn replay(&self, ids: &[MessageId], _: Duration) -> Vec<Result<(), QueueError>> {
        ids.iter().map(|_| Err(QueueError::NotFound)).collect()
    }

    async fn discard(&self, ids: &[MessageId]) -> Vec<Result<(), QueueError>> {
        ids.iter().map(|_| Err(QueueError::NotFound)).collect()
    }
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::timestamp::Timestamp;

    fn due(id: u128, url: &str, failures: u32) -> DueEndpoint {
        let (id, owner) = (EndpointId(Uuid::from_u128(id)), "a".to_owned());
        DueEndpoint { id, owner, url: url.to_owned(), failures, since: Timestamp(0) }
    }

    fn places(in_flight: &InFlight, due: &[DueEndpoint], max: usize) -> Vec<usize> {
        let given = in_flight.places(due, max, 64, Instant::now());
        due.iter().map(|due| given.iter().find(|(id, _)| *id == due.id).map_or(0, |(_, places)| *places)).collect()
    }

    #[test]
    fn endpoints_take_turns_and_none_gets_more_than_its_limit() {
        let three = [due(1, "https://a/", 0), due(2, "https://b/", 0), due(3, "https://c/", 0)];
        assert_eq!(places(&InFlight::default(), &three, 5), [2, 2, 1]);
        assert_eq!(places(&InFlight::default(), &three, 100), [ENDPOINT_MAX; 3]);
        let failing = [due(1, "https://a/", FAILURES_BEFORE_PAUSE), due(2, "https://b/", 1)];
        assert_eq!(places(&InFlight::default(), &failing, 100), [1, ENDPOINT_MAX]);
    }

    #[test]
    fn endpoints_of_one_host_share_a_limit() {
        let many: Vec<_> = (0..20).map(|id| due(id, "https://a/hook", 0)).collect();
        assert_eq!(places(&InFlight::default(), &many, 100).iter().sum::<usize>(), 12, "three quarters for one key");
        let others = (20..40).map(|id| DueEndpoint { owner: "b".to_owned(), ..due(id, "https://a/hook", 0) });
        let both: Vec<_> = many.into_iter().chain(others).collect();
        assert_eq!(places(&InFlight::default(), &both, 100).iter().sum::<usize>(), HOST_MAX);
    }

    #[test]
    fn one_key_and_failing_endpoints_leave_places_to_others() {
        let own: Vec<_> = (0..100).map(|id| due(id, &format!("https://h{id}/"), 0)).collect();
        assert_eq!(places(&InFlight::default(), &own, 1000).iter().sum::<usize>(), 48, "three quarters for one key");
        let dead: Vec<_> = own.iter().map(|due| DueEndpoint { failures: 9, ..due.clone() }).collect();
        assert_eq!(places(&InFlight::default(), &dead, 1000).iter().sum::<usize>(), 32, "half for failing endpoints");
        let mut in_flight = InFlight { failing: 32, ..InFlight::default() };
        assert_eq!(in_flight.places(&dead, 1000, 64, Instant::now()), []);
        in_flight.by_owner.insert("a".to_owned(), 48);
        assert_eq!(in_flight.places(&own, 1000, 64, Instant::now()), []);
        let other = [DueEndpoint { owner: "b".to_owned(), ..due(7, "https://b/", 0) }];
        assert_eq!(in_flight.places(&other, 1000, 64, Instant::now()), [(other[0].id, ENDPOINT_MAX)]);
    }

    /// Answers that take long keep their places; the next one is for a client that has none.
    #[test]
    fn a_free_place_goes_to_the_key_with_the_fewest_in_flight() {
        let slow = due(1, "https://slow/", 0);
        let quick = DueEndpoint { owner: "b".to_owned(), since: Timestamp(9), ..due(2, "https://quick/", 0) };
        let in_flight = InFlight { by_owner: HashMap::from([("a".to_owned(), 20)]), ..InFlight::default() };
        assert_eq!(in_flight.places(&[slow, quick.clone()], 1, 64, Instant::now()), [(quick.id, 1)]);
    }

    #[test]
    fn a_host_that_cannot_be_reached_gets_one_attempt_after_a_pause() {
        let own: Vec<_> = (0..8).map(|id| due(id, &format!("https://down/{id}"), 0)).collect();
        let other = DueEndpoint { owner: "b".to_owned(), ..due(8, "https://down/hook", 0) };
        let elsewhere = due(9, "https://up/", 0);
        let all: Vec<_> = own.iter().cloned().chain([other, elsewhere]).collect();
        let (mut in_flight, now) = (InFlight::default(), Instant::now());
        while in_flight.breakers.open_count(now) == 0 {
            in_flight.breakers.failed("down:443 a", now);
        }
        let given = |in_flight: &InFlight, now| {
            let given = in_flight.places(&all, 100, 64, now);
            all.iter().map(|due| given.iter().find(|(id, _)| *id == due.id).map_or(0, |(_, places)| *places)).collect()
        };
        let during: Vec<usize> = given(&in_flight, now);
        assert_eq!(during, [0, 0, 0, 0, 0, 0, 0, 0, ENDPOINT_MAX, ENDPOINT_MAX]);
        let later = now + Duration::from_secs(60);
        let after: Vec<usize> = given(&in_flight, later);
        assert_eq!(after, [1, 0, 0, 0, 0, 0, 0, 0, ENDPOINT_MAX, ENDPOINT_MAX]);
        in_flight.by_host_and_owner.insert("down:443 a".to_owned(), 1);
        assert_eq!(given(&in_flight, later)[0], 0, "it is under way");
        in_flight.breakers.reached("down:443 a");
        assert_eq!(given(&in_flight, later).iter().sum::<usize>(), HOST_MAX - 1 + ENDPOINT_MAX);
    }

    #[test]
    fn the_one_place_of_a_paused_host_goes_to_an_endpoint_that_does_not_fail() {
        let hanging = [1, 2].map(|id| due(id, "https://down/", FAILURES_BEFORE_PAUSE));
        let all = [hanging[0].clone(), hanging[1].clone(), due(3, "https://down/", 0)];
        let (mut in_flight, now) = (InFlight::default(), Instant::now());
        while in_flight.breakers.open_count(now) == 0 {
            in_flight.breakers.failed("down:443 a", now);
        }
        assert_eq!(in_flight.places(&all, 100, 64, now + Duration::from_secs(60)), [(all[2].id, 1)]);
    }

    #[test]
    fn what_is_in_flight_counts() {
        let one = [due(1, "https://a/", 0)];
        let in_flight = InFlight {
            by_endpoint: HashMap::from([(one[0].id, 3)]),
            by_host: HashMap::from([("a:443".to_owned(), 3)]),
            ..InFlight::default()
        };
        assert_eq!(places(&in_flight, &one, 100), [1]);
    }
}
