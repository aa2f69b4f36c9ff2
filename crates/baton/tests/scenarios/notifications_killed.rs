//! Consumer and notifier are killed while endpoints of clients fail at random. Every endpoint gets every event at least
//! once, repeats have the same id and content, and the events of one transaction arrive in order.
//!
//! `NOTIFIED_TRANSACTIONS`, `NOTIFIED_ENDPOINTS` and `NOTIFIED_KILLS` set the size of a run.

use std::collections::BTreeMap;
use std::time::Duration;

use harness::ports::free_port;
use harness::sink::{Received, Reply, Sink};
use harness::wait::eventually_ok;
use rand::RngExt;
use serde_json::json;

use crate::load_client::{LoadClient, LoadProfile};
use crate::relay_fixture::{RelayFixture, SOON, answer, baton};
use crate::scenario::{Scenario, crash_setup};

/// The events that the endpoints ask for, in the order of a transaction that is confirmed.
const EVENTS: [&str; 3] = ["transaction.submitted", "transaction.confirmed", "transaction.completed"];

#[tokio::test]
async fn notifications_killed() {
    let (transactions, endpoints, kills) =
        (size("NOTIFIED_TRANSACTIONS", 250), size("NOTIFIED_ENDPOINTS", 5), size("NOTIFIED_KILLS", 16));
    let mut scenario = Scenario::begin("notifications_killed");
    let mut relay = crash_setup(3)
        .env("WEBHOOK_ALLOW_PRIVATE", "true")
        .env("WEBHOOK_TIMEOUT_MS", "1000")
        .env("WEBHOOK_SCHEDULE_SECOND_US", "20000")
        .start()
        .await;
    relay.warm_up().await;
    let mut sinks = Vec::new();
    for _ in 0..endpoints {
        let sink = Sink::start().await;
        // Every sixth answer is none.
        for _ in 0..transactions * EVENTS.len() {
            let reply = match scenario.rng.random_range(0..60) {
                0..4 => Reply::Status(500),
                4..6 => Reply::Cut,
                6 => Reply::Hang,
                7..9 => Reply::Status(302),
                9 => Reply::RetryAfter(503, "0".to_owned()),
                _ => Reply::Ok,
            };
            sink.reply_next(1, reply);
        }
        // Another program may call a port that was its own a moment ago; the path is this endpoint's alone.
        let endpoint = Endpoint { path: format!("/hook/{}", uuid::Uuid::new_v4()), sink };
        endpoint.register(&relay).await;
        sinks.push(endpoint);
    }
    let port = free_port().to_string();
    let mut notifier = baton(["notifier"], &relay.env).env("PORT", port).start().unwrap();
    let mut consumer = relay.consumers.remove(0);
    let profile = LoadProfile { clients: 16, pause_max: Duration::from_millis(100), retry_until_accepted: false };
    let client = LoadClient::of(&relay);
    let seed = scenario.seed;
    let killing = async {
        for _ in 0..kills / 2 {
            scenario.kill_repeatedly(&mut notifier, 1, Duration::from_millis(700)).await;
            scenario.kill_repeatedly(&mut consumer, 1, Duration::from_millis(700)).await;
        }
    };
    let (answers, ()) = tokio::join!(client.send_all(profile, 0..transactions, seed), killing);
    assert_eq!(answers.accepted.len(), transactions, "{:?}", answers.unanswered_causes);
    relay.consumers.push(consumer);
    let expected = transactions * EVENTS.len();
    for sink in &sinks {
        // For runs of any size: the largest so far took 11 minutes.
        eventually_ok(Duration::from_secs(3600), "every event at every endpoint", || async {
            let requests = sink.count();
            if requests < expected {
                return Err(format!("{requests} requests for {expected} events"));
            }
            let events = distinct(&sink.received());
            if events >= expected { Ok(()) } else { Err(format!("{events} of {expected}")) }
        })
        .await;
    }
    let mut repeats = 0;
    for sink in &sinks {
        let received = sink.received();
        repeats += received.len() - expected;
        check(&received, expected);
    }
    println!("each of {endpoints} endpoints got {expected} events; {repeats} repeats");
    scenario.end(&relay, &answers).await;
}

fn size(name: &str, default: usize) -> usize {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

/// A receiver, and the path that is registered there.
struct Endpoint {
    sink: Sink,
    path: String,
}

impl Endpoint {
    async fn register(&self, relay: &RelayFixture) {
        let url = self.sink.url().replace("/hook", &self.path);
        let body = json!({ "url": url, "events": EVENTS });
        let request = relay.request(reqwest::Method::POST, "/api/v1/webhooks/register").timeout(SOON).json(&body);
        let (status, endpoint) = answer(request).await;
        assert_eq!(status, 201, "{endpoint}");
    }

    /// Requests so far; cheaper than [`Endpoint::received`].
    fn count(&self) -> usize {
        self.sink.count()
    }

    fn received(&self) -> Vec<Received> {
        self.sink.received().into_iter().filter(|one| one.path == self.path).collect()
    }
}

/// Events without those of the warm-up, whose transactions ended before there was an endpoint.
fn distinct(received: &[Received]) -> usize {
    let ids: std::collections::BTreeSet<_> = received.iter().filter_map(|one| one.header("webhook-id")).collect();
    ids.len()
}

/// Same id and content on repeats, and the order of each transaction.
fn check(received: &[Received], expected: usize) {
    let mut bodies: BTreeMap<&str, &[u8]> = BTreeMap::new();
    let mut last: BTreeMap<String, (u64, usize)> = BTreeMap::new();
    for one in received {
        let id = one.header("webhook-id").unwrap();
        let first = bodies.entry(id).or_insert(&one.body);
        assert_eq!(*first, &one.body[..], "a repeat of {id} has other content");
        let body = one.json();
        let name = body["event"].as_str().unwrap();
        let place = (body["sequence"].as_u64().unwrap(), EVENTS.iter().position(|known| *known == name).unwrap());
        let before = last.insert(body["transactionId"].as_str().unwrap().to_owned(), place);
        assert!(before.is_none_or(|before| before <= place), "{body} came after {before:?}");
    }
    assert_eq!(bodies.len(), expected, "events");
    assert_eq!(last.len() * EVENTS.len(), expected, "transactions");
}
