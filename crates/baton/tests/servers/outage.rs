//! What all stories here have in common: short clocks, and clients that send before, during and after the trouble.

use std::cell::{Cell, RefCell};
use std::sync::atomic::Ordering;
use std::time::Duration;

use harness::servers::Servers;
use harness::wait::{eventually, eventually_ok};

use crate::load_client::{Client, Manners, Promises, Told};
use crate::relay_fixture::{Plan, SOON, Stand};
use crate::scenario::Story;

/// Every second client names its requests; told nothing, it asks again until it is accepted.
pub const CROWD: Manners = Manners { clients: 12, pause_max: Duration::from_millis(150), insistent: true };
/// Those who ask once, and are done when all are answered: also while nothing is accepted.
pub const ONCE: Manners = Manners { insistent: false, ..CROWD };
/// The numbers from which a trouble takes its own.
pub const OWN_SERIALS: usize = 1_000_000;
/// So many are sent while there is trouble, or more if it lasts.
const DURING_MIN: usize = 240;
/// Between two looks at whether it is over.
const ROUND: usize = 60;
/// And so many afterwards, when all is well again.
const AFTER: usize = 96;

/// The API and a consumer, three relayers, and clocks by which everything is found again within seconds.
pub fn short_clocks() -> Plan {
    Plan::relayers(3)
        .env("REQUEST_TIMEOUT_MS", "8000")
        .env("QUEUE_LEASE_MS", "3000")
        .env("RECONCILE_PENDING_MS", "3000")
        .env("RECONCILE_SUBMITTED_MS", "2000")
        .env("LOG_LEVEL", "warn")
        .split()
}

/// All of it on servers that belong to this story.
pub async fn stand_on(servers: &Servers) -> Stand {
    let stand = short_clocks().on(servers).start().await;
    stand.warm_up().await;
    stand
}

/// Clients send while `trouble` goes on, and when it is over until they are accepted again; then they go on.
/// Nobody is left without an answer. A trouble may send itself, by [`OWN_SERIALS`].
pub async fn load_during(story: &Story, stand: &Stand, trouble: impl AsyncFnOnce(&Client) -> Promises) -> Promises {
    let client = Client::of(stand);
    let over = Cell::new(false);
    let load = async {
        let (mut promises, mut serial) = (Promises::default(), 0);
        while !over.get() || serial < DURING_MIN {
            promises.extend(client.crowd(CROWD, serial..serial + ROUND, story.seed ^ serial as u64).await);
            serial += ROUND;
        }
        (promises, serial)
    };
    let ((mut promises, mut serial), own) = tokio::join!(load, async {
        let own = trouble(&client).await;
        over.set(true);
        own
    });
    promises.extend(own);
    let tries = RefCell::new(Promises::default());
    eventually(SOON, "the API to accept again", || async {
        let serial = serial + tries.borrow().total();
        let told = client.send(serial, None).await;
        let accepted = matches!(told, Told::Accepted(_));
        tries.borrow_mut().add(serial, told);
        accepted.then_some(())
    })
    .await;
    serial += tries.borrow().total();
    promises.extend(tries.into_inner());
    let after = client.crowd(CROWD, serial..serial + AFTER, story.seed).await;
    // Not all, on a machine that is busy with something else.
    assert!(after.accepted.len() > AFTER / 2, "all is well, and yet: {:?} {:?}", after.refused, after.unanswered);
    promises.extend(after);
    assert_eq!(client.silences.load(Ordering::Relaxed), 0, "somebody was not answered at all");
    promises
}

/// Waits until so many more have been refused.
pub async fn until_refused(client: &Client, more: usize) {
    let before = client.refusals.load(Ordering::Relaxed);
    eventually_ok(SOON, format!("{more} more to be refused"), || async {
        let refused = client.refusals.load(Ordering::Relaxed) - before;
        if refused >= more { Ok(()) } else { Err(refused) }
    })
    .await;
}

/// A metric of a consumer's process, summed over its labels that contain `label`.
pub async fn consumer_metric(stand: &Stand, which: usize, name: &str, label: &str) -> f64 {
    let url = format!("{}/metrics", stand.consumer_bases[which]);
    let text = stand.http.get(url).send().await.unwrap().text().await.unwrap();
    let lines = text.lines().filter(|line| line.starts_with(name) && line.contains(label));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// Waits until the queue has nothing left to hand out or hand out again.
pub async fn until_queue_empty(stand: &Stand) {
    eventually_ok(SOON, "the queue to be empty", || async {
        let (_, mut health) = stand.get("/health").await;
        let queue = health["parts"]["queue"].take();
        let empty = ["ready", "inFlight", "delayed"].iter().all(|part| queue[part] == 0);
        if empty { Ok(()) } else { Err(queue.to_string()) }
    })
    .await;
}
