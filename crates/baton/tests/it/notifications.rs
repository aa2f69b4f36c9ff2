//! Client notifications over the real binary: registered, signed, delivered in order, tried again, given up, recovered.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use baton::config::Secret;
use baton::notify::signature;
use harness::engine::TestEngine;
use harness::ports::free_port;
use harness::sink::{Received, Reply, Sink};
use harness::wait::{eventually, eventually_ok};
use serde_json::{Value, json};

use crate::relay_fixture::{LATER, RelayFixture, RelaySetup, SOON, answer, baton, serial_body};

/// Endpoints of the tests are on this machine.
fn setup() -> RelaySetup {
    RelaySetup::relayers(2).env("WEBHOOK_ALLOW_PRIVATE", "true")
}

/// A registered endpoint.
struct Registered {
    id: String,
    secret: Secret,
}

async fn register(relay: &RelayFixture, url: &str, events: &[&str]) -> Registered {
    let body = json!({ "url": url, "events": events });
    let (status, endpoint) = post(relay, "/api/v1/webhooks/register", &body).await;
    assert_eq!(status, 201, "{endpoint}");
    let text = |name: &str| endpoint[name].as_str().unwrap().to_owned();
    Registered { id: text("id"), secret: Secret::new(text("secret")) }
}

async fn post(relay: &RelayFixture, path: &str, body: &Value) -> (u16, Value) {
    answer(relay.request(reqwest::Method::POST, path).json(body)).await
}

async fn endpoint(relay: &RelayFixture, registered: &Registered) -> Value {
    let (status, endpoint) = relay.get(&format!("/api/v1/webhooks/endpoints/{}", registered.id)).await;
    assert_eq!(status, 200, "{endpoint}");
    endpoint
}

fn verify(secret: &Secret, received: &Received) -> Result<(), String> {
    let header = |name| received.header(name).unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    signature::verify(
        secret,
        header("webhook-id"),
        header("webhook-timestamp"),
        header("webhook-signature"),
        &received.body,
        i64::try_from(now).unwrap(),
    )
}

/// The names of events by transaction, in the order of arrival, each at its first arrival.
fn by_transaction(received: &[Received]) -> BTreeMap<String, Vec<String>> {
    let mut ids = BTreeSet::new();
    let mut events: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for one in received {
        if ids.insert(one.header("webhook-id").unwrap().to_owned()) {
            let body = one.json();
            let text = |name: &str| body[name].as_str().unwrap().to_owned();
            events.entry(text("transactionId")).or_default().push(text("event"));
        }
    }
    events
}

#[tokio::test]
async fn a_registered_endpoint_gets_signed_events_in_order() {
    let relay = setup().start().await;
    let sink = Sink::start().await;
    let kinds = ["transaction.submitted", "transaction.confirmed", "transaction.completed"];
    let endpoint = register(&relay, &sink.url(), &kinds).await;
    let sent = relay.send_many(0..20).await;
    relay.until_all_final(LATER).await;
    let received = sink.wait_for(60, LATER).await;
    assert_eq!(received.len(), 60, "each event once");
    for one in &received {
        verify(&endpoint.secret, one).unwrap();
        assert!(verify(&signature::generate_secret(), one).is_err(), "another secret");
        assert_eq!(one.header("content-type"), Some("application/json"));
        let body = one.json();
        assert_eq!(body["eventId"].as_str(), one.header("webhook-id"));
        if body["event"] != "transaction.submitted" {
            assert_eq!((&body["status"], &body["hash"].is_string()), (&json!("confirmed"), &true), "{body}");
        }
    }
    let events = by_transaction(&received);
    assert_eq!(events.keys().collect::<BTreeSet<_>>(), sent.iter().map(|(id, _)| id).collect());
    assert!(events.values().all(|events| events == &kinds), "{events:?}");
    // The timeline shows the deliveries.
    let (_, timeline) = relay.get(&format!("/api/v1/relay/transactions/{}/timeline", sent[0].0)).await;
    let notified = timeline["steps"].as_array().unwrap().iter().filter(|step| step["action"] == "notified").count();
    assert_eq!(notified, 3, "{timeline}");
}

#[tokio::test]
async fn a_failed_attempt_is_repeated_with_its_id_and_holds_up_later_events_of_the_transaction() {
    let relay = setup().env("WEBHOOK_SCHEDULE_SECOND_US", "20000").start().await;
    let sink = Sink::start().await;
    sink.reply_next(1, Reply::Status(500));
    sink.reply_next(1, Reply::Cut);
    let endpoint = register(&relay, &sink.url(), &["transaction.submitted", "transaction.completed"]).await;
    let id = relay.send(&serial_body(1)).await;
    let received = sink.wait_for(4, SOON).await;
    let ids: Vec<_> = received.iter().map(|one| one.header("webhook-id").unwrap()).collect();
    assert_eq!((ids[0], ids[1]), (ids[1], ids[2]), "{ids:?}");
    assert_ne!(ids[2], ids[3]);
    assert_eq!(by_transaction(&received)[&id], ["transaction.submitted", "transaction.completed"]);
    let path = format!("/api/v1/webhooks/endpoints/{}/attempts", endpoint.id);
    let attempts = eventually_ok(SOON, "four attempts to be listed", || async {
        let (_, page) = relay.get(&path).await;
        let attempts = page["attempts"].as_array().cloned().unwrap_or_default();
        if attempts.len() == 4 { Ok(attempts) } else { Err(page.to_string()) }
    })
    .await;
    let errors: Vec<_> = attempts.iter().map(|attempt| attempt["error"].as_str()).collect();
    assert!(errors[0].is_none() && errors[1].is_none(), "{errors:?}");
    assert_eq!(errors[3], Some("answered 500"));
    assert!(errors[2].is_some());
    for (action, times) in [("webhook_failing", 1), ("webhook_works_again", 1)] {
        assert_eq!(relay.api.output().matches(action).count(), times, "{action}: {}", relay.api.log_excerpt());
    }
}

#[tokio::test]
async fn an_endpoint_that_is_gone_is_disabled_and_recovers_what_it_missed() {
    let relay = setup().start().await;
    let sink = Sink::start().await;
    let registered = register(&relay, &sink.url(), &["transaction.completed"]).await;
    sink.reply(Reply::Status(410));
    relay.send(&serial_body(1)).await;
    let path = format!("/api/v1/webhooks/endpoints/{}", registered.id);
    eventually(SOON, "the endpoint to be disabled", || async {
        (endpoint(&relay, &registered).await["status"] == "disabled").then_some(())
    })
    .await;
    assert!(endpoint(&relay, &registered).await["disabledReason"].as_str().unwrap().contains("410"));
    relay.send(&serial_body(2)).await;
    relay.until_all_final(LATER).await;
    sink.clear();
    sink.reply(Reply::Ok);
    let (status, enabled) =
        answer(relay.request(reqwest::Method::PATCH, &path).json(&json!({ "enabled": true }))).await;
    assert_eq!((status, &enabled["status"]), (200, &json!("enabled")));
    let (status, queued) = post(&relay, &format!("{path}/recover?since=2020-01-01T00:00:00Z"), &json!({})).await;
    assert_eq!((status, &queued["queued"]), (202, &json!(2)));
    let received = sink.wait_for(2, SOON).await;
    assert_eq!(by_transaction(&received).len(), 2);
}

/// The receiver at the old URL answers "gone" after its owner has registered another one.
#[tokio::test]
async fn a_late_410_of_an_earlier_url_does_not_disable_the_endpoint() {
    let relay = setup().env("WEBHOOK_TIMEOUT_MS", "15000").start().await;
    let (old, new) = (Sink::start().await, Sink::start().await);
    let registered = register(&relay, &old.url(), &["transaction.completed"]).await;
    old.reply(Reply::Held(410));
    let id = relay.send(&serial_body(1)).await;
    old.wait_for(1, LATER).await;
    let path = format!("/api/v1/webhooks/endpoints/{}", registered.id);
    let change = relay.request(reqwest::Method::PATCH, &path).json(&json!({ "url": new.url() }));
    assert_eq!(answer(change).await.0, 200);
    old.release();
    let received = new.wait_for(1, LATER).await;
    assert_eq!(received[0].json()["transactionId"], id.as_str());
    assert_eq!(endpoint(&relay, &registered).await["status"], "enabled");
}

/// The whole schedule of 75 hours in five seconds.
#[tokio::test]
async fn after_the_whole_schedule_an_event_is_given_up_and_can_be_recovered() {
    let relay = setup().env("WEBHOOK_SCHEDULE_SECOND_US", "20").start().await;
    let sink = Sink::start().await;
    let registered = register(&relay, &sink.url(), &["transaction.completed"]).await;
    // The 9th attempt of the second one succeeds.
    sink.reply(Reply::Status(503));
    relay.send(&serial_body(1)).await;
    eventually(LATER, "the event to be given up", || async {
        (endpoint(&relay, &registered).await["givenUp"] == 1).then_some(())
    })
    .await;
    let received = sink.received();
    assert_eq!(received.len(), 15, "attempts");
    assert_eq!(received.iter().map(|one| one.header("webhook-id")).collect::<BTreeSet<_>>().len(), 1);
    sink.clear();
    sink.reply(Reply::Ok);
    let path = format!("/api/v1/webhooks/endpoints/{}/recover?since=2020-01-01T00:00:00Z", registered.id);
    assert_eq!(post(&relay, &path, &json!({})).await.1["queued"], 1);
    let received = sink.wait_for(1, SOON).await;
    verify(&registered.secret, &received[0]).unwrap();
    eventually(SOON, "nothing to be left", || async {
        let shown = endpoint(&relay, &registered).await;
        (shown["givenUp"] == 0 && shown["waiting"] == 0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_endpoint_that_is_down_for_most_of_the_schedule_gets_everything_when_it_is_back() {
    let relay = setup().env("WEBHOOK_SCHEDULE_SECOND_US", "20").start().await;
    let sink = Sink::start().await;
    register(&relay, &sink.url(), &["transaction.submitted", "transaction.completed"]).await;
    sink.stop().await;
    let sent = relay.send_many(0..10).await;
    relay.until_all_final(LATER).await;
    sink.restart().await;
    let received = eventually_ok(LATER, "all events", || async {
        let events = by_transaction(&sink.received());
        let count: usize = events.values().map(Vec::len).sum();
        if count == 20 { Ok(events) } else { Err(format!("{count} so far")) }
    })
    .await;
    assert_eq!(received.len(), sent.len());
    assert!(received.values().all(|events| events == &["transaction.submitted", "transaction.completed"]));
}

#[tokio::test]
async fn a_hanging_endpoint_does_not_hold_up_the_others() {
    let relay = setup().start().await;
    let hanging = Sink::start().await;
    hanging.reply(Reply::Hang);
    register(&relay, &hanging.url(), &["transaction.submitted", "transaction.completed"]).await;
    let mut healthy = Vec::new();
    for _ in 0..3 {
        let sink = Sink::start().await;
        register(&relay, &sink.url(), &["transaction.submitted", "transaction.completed"]).await;
        healthy.push(sink);
    }
    relay.send_many(0..50).await;
    relay.until_all_final(LATER).await;
    for sink in &healthy {
        sink.wait_for(100, SOON).await;
    }
    assert!(hanging.count() <= 4, "{} attempts in flight at once", hanging.count());
}

#[tokio::test]
async fn both_secrets_sign_during_a_rotation() {
    let relay = setup().start().await;
    let sink = Sink::start().await;
    let old = register(&relay, &sink.url(), &["transaction.submitted"]).await;
    let path = format!("/api/v1/webhooks/endpoints/{}/rotate", old.id);
    let (status, rotated) = post(&relay, &path, &json!({ "overlapSeconds": 3600 })).await;
    assert_eq!(status, 200, "{rotated}");
    let new = Secret::new(rotated["secret"].as_str().unwrap());
    relay.send(&serial_body(1)).await;
    let first = sink.wait_for(1, SOON).await;
    verify(&old.secret, &first[0]).unwrap();
    verify(&new, &first[0]).unwrap();
    let (_, again) = post(&relay, &path, &json!({ "overlapSeconds": 0 })).await;
    let newest = Secret::new(again["secret"].as_str().unwrap());
    relay.send(&serial_body(2)).await;
    let second = sink.wait_for(2, SOON).await;
    verify(&newest, &second[1]).unwrap();
    assert!(verify(&new, &second[1]).is_err(), "no overlap was asked for");
}

#[tokio::test]
async fn the_environments_endpoint_gets_every_event_and_a_notifier_delivers_alone() {
    let sink = Sink::start().await;
    let secret = signature::generate_secret();
    let relay = setup()
        .env("NOTIFIER_IN_CONSUMER", "false")
        .env("CLIENT_WEBHOOK_URL", sink.url())
        .env("CLIENT_WEBHOOK_SECRET", secret.expose())
        .start()
        .await;
    let port = free_port();
    // It needs no relayers, and so neither their key.
    let mut env = relay.env.clone();
    env.remove("OZ_RELAYER_API_KEY");
    let mut notifier = baton(["notifier"], &env).env("PORT", port.to_string()).start().unwrap();
    notifier.wait_ready(&format!("http://127.0.0.1:{port}/ready"), SOON).await.unwrap();
    // Events are written once the notifier has stored its endpoint.
    eventually(SOON, "the endpoint to be stored", || async {
        relay.command(["webhooks", "list"]).await.1.contains("CLIENT_WEBHOOK_URL").then_some(())
    })
    .await;
    let id = relay.send(&serial_body(1)).await;
    let received = sink.wait_for(3, SOON).await;
    for one in &received {
        verify(&secret, one).unwrap();
    }
    assert_eq!(
        by_transaction(&received)[&id],
        ["transaction.submitted", "transaction.confirmed", "transaction.completed"]
    );
    notifier.sigterm().unwrap();
    assert!(notifier.wait_exit(SOON).await.unwrap().success());
    relay.send(&serial_body(2)).await;
    relay.until_all_final(LATER).await;
    assert_eq!(sink.count(), 3, "only a notifier delivers");
}

#[tokio::test]
async fn an_environments_endpoint_at_a_refused_address_is_warned_about_at_the_start() {
    let secret = signature::generate_secret();
    for (allow_http, wanted) in [
        ("false", "must use https (WEBHOOK_ALLOW_HTTP allows http)"),
        ("true", "points to an address that is loopback (WEBHOOK_ALLOW_PRIVATE allows it)"),
    ] {
        let relay = RelaySetup::relayers(1)
            .env("CLIENT_WEBHOOK_URL", "http://127.0.0.1:9/s3cret")
            .env("CLIENT_WEBHOOK_SECRET", secret.expose())
            .env("WEBHOOK_ALLOW_HTTP", allow_http)
            .start()
            .await;
        let output = eventually_ok(SOON, "the warning", || async {
            let output = relay.api.output();
            if output.contains("every attempt to deliver to it fails") { Ok(output) } else { Err(output) }
        })
        .await;
        assert!(output.contains(wanted) && !output.contains("s3cret"), "{output}");
    }
}

/// Something deletes the row of an event that waits for its next attempt.
#[tokio::test]
async fn an_event_that_is_missing_is_given_up_and_reported_and_the_next_one_follows() {
    let relay = setup().engine(TestEngine::Embedded).env("WEBHOOK_SCHEDULE_SECOND_US", "200000").start().await;
    let sink = Sink::start().await;
    sink.reply(Reply::Status(500));
    let registered = register(&relay, &sink.url(), &["transaction.submitted", "transaction.completed"]).await;
    let id = relay.send(&serial_body(1)).await;
    sink.wait_for(1, SOON).await;
    let file = std::path::Path::new(&relay.env["BATON_DATA_DIR"]).join("baton.db");
    let database = rusqlite::Connection::open(file).unwrap();
    database.busy_timeout(SOON).unwrap();
    assert_eq!(database.execute("DELETE FROM events WHERE id LIKE '%submitted'", []).unwrap(), 1);
    eventually(SOON, "the log to say so", || async {
        relay.api.output().contains("webhook_event_missing").then_some(())
    })
    .await;
    sink.reply(Reply::Ok);
    eventually_ok(SOON, "the event behind it", || async {
        let received = sink.received();
        let is_next =
            |one: &Received| one.json()["event"] == "transaction.completed" && one.json()["transactionId"] == id;
        if received.iter().any(is_next) { Ok(()) } else { Err(format!("{} arrived", received.len())) }
    })
    .await;
    assert_eq!(endpoint(&relay, &registered).await["givenUp"], 1);
    let (_, attempts) = relay.command(["webhooks", "attempts", &registered.id]).await;
    assert!(attempts.contains("failed: nothing was sent: the event is missing in the database"), "{attempts}");
    assert_eq!(relay.metric("baton_webhook_attempts_total", "event_missing").await, 1.0);
}

#[tokio::test]
async fn retry_after_is_honoured() {
    let relay = setup().env("WEBHOOK_SCHEDULE_SECOND_US", "1000").start().await;
    let sink = Sink::start().await;
    register(&relay, &sink.url(), &["transaction.submitted"]).await;
    sink.reply_next(1, Reply::RetryAfter(429, "2".to_owned()));
    relay.send(&serial_body(1)).await;
    let received = sink.wait_for(2, SOON).await;
    let pause = received[1].at - received[0].at;
    assert!(pause >= Duration::from_secs(2), "{pause:?}");
}
