//! Shared by all scenarios here: short timings, and clients that send during and after an outage.

use std::cell::{Cell, RefCell};
use std::sync::atomic::Ordering;
use std::time::Duration;

use harness::engine::address;
use harness::proxy::Proxy;
use harness::servers::Servers;
use harness::wait::{eventually, eventually_ok};

use crate::load_client::{Answer, ClientAnswers, LoadClient, LoadProfile};
use crate::relay_fixture::{RelayFixture, RelaySetup, SOON};
use crate::scenario::Scenario;

/// Every second client sends idempotency keys and, without an answer, repeats the request until it is accepted.
pub const RETRYING_LOAD: LoadProfile =
    LoadProfile { clients: 12, pause_max: Duration::from_millis(150), retry_until_accepted: true };
/// Each request is sent once, so that the load ends even while nothing is accepted.
pub const SINGLE_TRY_LOAD: LoadProfile = LoadProfile { retry_until_accepted: false, ..RETRYING_LOAD };
/// The first serial number of the requests that an outage sends itself.
pub const OUTAGE_SERIALS: usize = 1_000_000;
/// Minimum number of requests during an outage.
const DURING_MIN: usize = 240;
/// Requests between two checks whether the outage is over.
const PER_ROUND: usize = 60;
/// Requests after the outage.
const AFTER: usize = 96;

/// An API, a consumer and three relayers, with timings that let the reconciler recover everything within seconds.
pub fn short_timings() -> RelaySetup {
    RelaySetup::relayers(3)
        .env("REQUEST_TIMEOUT_MS", "8000")
        .env("QUEUE_LEASE_MS", "3000")
        .env("RECONCILE_PENDING_MS", "3000")
        .env("RECONCILE_SUBMITTED_MS", "2000")
        .env("LOG_LEVEL", "warn")
        .split()
}

/// Starts the relay lane with [`short_timings`] on servers that belong to this scenario.
pub async fn start_on(servers: &Servers) -> RelayFixture {
    let relay = short_timings().on(servers).start().await;
    relay.warm_up().await;
    relay
}

/// A link to the server that this variable names.
pub async fn link_to(variable: &str) -> Proxy {
    Proxy::start(address(variable)).await
}

/// Sends load while `outage` runs, probes until the API accepts again, and then sends more. Checks that every request got a
/// response. `outage` may send its own requests, from [`OUTAGE_SERIALS`] on.
pub async fn load_during(
    scenario: &Scenario,
    relay: &RelayFixture,
    outage: impl AsyncFnOnce(&LoadClient) -> ClientAnswers,
) -> ClientAnswers {
    let client = LoadClient::of(relay);
    let over = Cell::new(false);
    let load = async {
        let (mut answers, mut serial) = (ClientAnswers::default(), 0);
        while !over.get() || serial < DURING_MIN {
            answers.extend(
                client.send_all(RETRYING_LOAD, serial..serial + PER_ROUND, scenario.seed ^ serial as u64).await,
            );
            serial += PER_ROUND;
        }
        (answers, serial)
    };
    let ((mut answers, mut serial), own) = tokio::join!(load, async {
        let own = outage(&client).await;
        over.set(true);
        own
    });
    answers.extend(own);
    let tries = RefCell::new(ClientAnswers::default());
    eventually(SOON, "the API to accept again", || async {
        let serial = serial + tries.borrow().total();
        let answer = client.send(serial, None).await;
        let accepted = matches!(answer, Answer::Accepted(_));
        tries.borrow_mut().add(serial, answer);
        accepted.then_some(())
    })
    .await;
    serial += tries.borrow().total();
    answers.extend(tries.into_inner());
    let after = client.send_all(RETRYING_LOAD, serial..serial + AFTER, scenario.seed).await;
    // Not all of them: the machine may be busy.
    assert!(
        after.accepted.len() > AFTER / 2,
        "too few accepted after the outage; refused {:?}, unanswered {:?}",
        after.refused,
        after.unanswered
    );
    answers.extend(after);
    assert_eq!(client.without_response.load(Ordering::Relaxed), 0, "a request got no response");
    answers
}

/// Waits until `more` further requests have been refused.
pub async fn until_refused(client: &LoadClient, more: usize) {
    let before = client.refusals.load(Ordering::Relaxed);
    eventually_ok(SOON, format!("{more} more to be refused"), || async {
        let refused = client.refusals.load(Ordering::Relaxed) - before;
        if refused >= more { Ok(()) } else { Err(refused) }
    })
    .await;
}

/// Waits until the queue has no message left, neither ready nor leased nor delayed.
pub async fn until_queue_empty(relay: &RelayFixture) {
    eventually_ok(SOON, "the queue to be empty", || async {
        let (_, mut health) = relay.get("/health").await;
        let queue = health["parts"]["queue"].take();
        let empty = ["ready", "inFlight", "delayed"].iter().all(|part| queue[part] == 0);
        if empty { Ok(()) } else { Err(queue.to_string()) }
    })
    .await;
}
