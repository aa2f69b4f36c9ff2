//! Client notifications over the real binary: what operators see of endpoints that fail, and what one endpoint does to the
//! others.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use baton::config::Secret;
use baton::notify::signature;
use harness::ports::free_port;
use harness::sink::{Received, Reply, Sink};
use harness::wait::{eventually, eventually_ok};
use reqwest::Method;
use serde_json::{Value, json};

use crate::relay_fixture::{LATER, RelayFixture, RelaySetup, SOON, answer, baton, serial_body};

/// Endpoints of the tests are on this machine.
fn setup() -> RelaySetup {
    RelaySetup::relayers(2).env("WEBHOOK_ALLOW_PRIVATE", "true")
}

async fn post(relay: &RelayFixture, path: &str, body: &Value) -> Value {
    let (status, answered) = answer(relay.request(Method::POST, path).json(body)).await;
    assert!((200..300).contains(&status), "{status} {answered}");
    answered
}

/// The path and the secret of a new endpoint.
async fn register(relay: &RelayFixture, url: &str, events: &[&str]) -> (String, Secret) {
    let made = post(relay, "/api/v1/webhooks/register", &json!({ "url": url, "events": events })).await;
    let text = |name: &str| made[name].as_str().unwrap().to_owned();
    (format!("/api/v1/webhooks/endpoints/{}", text("id")), Secret::new(text("secret")))
}

fn verifies(secret: &Secret, received: &Received) -> bool {
    let header = |name| received.header(name).unwrap();
    let (id, timestamp) = (header("webhook-id"), header("webhook-timestamp"));
    let now: i64 = timestamp.parse().unwrap();
    signature::verify(secret, id, timestamp, header("webhook-signature"), &received.body, now).is_ok()
}

#[tokio::test]
async fn the_metrics_of_notifications_follow_the_endpoints() {
    let relay = setup().start().await;
    let (works, fails) = (Sink::start().await, Sink::start().await);
    fails.reply(Reply::Status(500));
    register(&relay, &works.url(), &["transaction.completed"]).await;
    register(&relay, &fails.url(), &["transaction.completed"]).await;
    relay.send(&serial_body(1)).await;
    let shows = async |name: &str, label: &str, wanted: &dyn Fn(f64) -> bool| {
        eventually_ok(SOON, format!("{name} {label}"), || async {
            let value = relay.metric(name, label).await;
            if wanted(value) { Ok(()) } else { Err(value) }
        })
        .await;
    };
    shows("baton_webhook_attempts_total", "result=\"delivered\"", &|value| value == 1.0).await;
    shows("baton_webhook_attempts_total", "result=\"failed\"", &|value| value >= 1.0).await;
    shows("baton_webhook_attempt_seconds_count", "", &|value| value >= 2.0).await;
    shows("baton_webhook_events_waiting", "", &|value| value == 1.0).await;
    shows("baton_webhook_events_oldest_seconds", "", &|value| value > 0.0).await;
    shows("baton_webhook_endpoints", "state=\"enabled\"", &|value| value == 2.0).await;
    shows("baton_webhook_endpoints", "state=\"failing\"", &|value| value == 1.0).await;
    fails.reply(Reply::Status(410));
    shows("baton_webhook_endpoints_disabled_total", "", &|value| value == 1.0).await;
    shows("baton_webhook_attempts_total", "result=\"given_up\"", &|value| value == 1.0).await;
    shows("baton_webhook_endpoints", "state=\"disabled\"", &|value| value == 1.0).await;
    shows("baton_webhook_events_waiting", "", &|value| value == 0.0).await;
}

#[tokio::test]
async fn a_host_that_cannot_be_reached_is_paused_until_it_can() {
    // Fifty times as fast, so that the endpoints' own pauses end soon.
    let relay = setup().env("WEBHOOK_SCHEDULE_SECOND_US", "20000").start().await;
    let sink = Sink::start().await;
    sink.stop().await;
    for _ in 0..6 {
        register(&relay, &sink.url(), &["transaction.completed"]).await;
    }
    relay.send(&serial_body(1)).await;
    let paused = async |wanted: f64| {
        eventually_ok(SOON, format!("{wanted} paused hosts"), || async {
            let value = relay.metric("baton_webhook_hosts_paused", "").await;
            if value == wanted { Ok(()) } else { Err(value) }
        })
        .await;
    };
    paused(1.0).await;
    sink.restart().await;
    paused(0.0).await;
    eventually_ok(SOON, "all deliveries", || async {
        let value = relay.metric("baton_webhook_attempts_total", "result=\"delivered\"").await;
        if value == 6.0 { Ok(()) } else { Err(value) }
    })
    .await;
    for action in ["webhook_host_paused", "webhook_host_reached"] {
        assert!(relay.api.output().contains(action), "{action}");
    }
}

#[tokio::test]
async fn a_change_of_the_url_answers_without_the_failures_of_the_one_before() {
    let relay = setup().start().await;
    let (fails, works) = (Sink::start().await, Sink::start().await);
    fails.reply(Reply::RetryAfter(429, "3600".to_owned()));
    let (path, _) = register(&relay, &fails.url(), &["transaction.completed"]).await;
    relay.send(&serial_body(1)).await;
    eventually(SOON, "the endpoint to fail", || async {
        let (_, shown) = relay.get(&path).await;
        (shown["failures"] == 1 && shown["pausedUntil"].is_string()).then_some(())
    })
    .await;
    let (_, changed) = answer(relay.request(Method::PATCH, &path).json(&json!({ "url": works.url() }))).await;
    assert_eq!(
        (&changed["failures"], &changed["failingSince"], &changed["pausedUntil"]),
        (&json!(0), &Value::Null, &Value::Null)
    );
}

/// Five days in nine seconds.
#[tokio::test]
async fn an_endpoint_that_only_fails_for_five_days_is_disabled_logged_and_counted() {
    let relay = setup().env("WEBHOOK_SCHEDULE_SECOND_US", "20").start().await;
    let sink = Sink::start().await;
    sink.reply(Reply::Status(500));
    let (path, _) = register(&relay, &sink.url(), &["transaction.submitted", "transaction.completed"]).await;
    let shown = eventually_ok(LATER, "the endpoint to be disabled", || async {
        let (_, shown) = relay.get(&path).await;
        if shown["status"] == "disabled" {
            return Ok(shown);
        }
        // Each transaction has two events, and each of them three days of attempts after the one before.
        if shown["waiting"] == 0 {
            relay.send(&serial_body(1)).await;
        }
        Err(shown)
    })
    .await;
    assert_eq!(shown["disabledReason"], "every attempt failed for 5 days");
    eventually_ok(SOON, "the log line", || async {
        let output = relay.api.output();
        let lines = output.lines().filter(|line| line.contains("webhook_disabled"));
        if lines.filter(|line| line.contains("every attempt failed for 5 days")).count() == 1 {
            Ok(())
        } else {
            Err(output)
        }
    })
    .await;
    assert_eq!(relay.metric("baton_webhook_endpoints_disabled_total", "").await, 1.0);
}

#[tokio::test]
async fn the_environments_endpoint_is_disabled_without_its_variable_and_enabled_with_it() {
    let sink = Sink::start().await;
    let secret = signature::generate_secret();
    let mut relay =
        setup().env("CLIENT_WEBHOOK_URL", sink.url()).env("CLIENT_WEBHOOK_SECRET", secret.expose()).start().await;
    listed(&relay, "enabled").await;
    relay.send(&serial_body(1)).await;
    sink.wait_for(3, SOON).await;
    let with = relay.env.clone();
    let mut without = with.clone();
    without.retain(|name, _| !name.starts_with("CLIENT_WEBHOOK_"));
    restart(&mut relay, &without).await;
    listed(&relay, "disabled: CLIENT_WEBHOOK_URL is not set").await;
    eventually_ok(SOON, "the warning", || async {
        let output = relay.api.output();
        if output.contains("CLIENT_WEBHOOK_URL is not set: the endpoint") { Ok(()) } else { Err(output) }
    })
    .await;
    relay.send(&serial_body(2)).await;
    relay.until_all_final(LATER).await;
    restart(&mut relay, &with).await;
    listed(&relay, "enabled").await;
    let third = relay.send(&serial_body(3)).await;
    let received = sink.wait_for(6, SOON).await;
    assert!(received[3..].iter().all(|one| one.json()["transactionId"] == third.as_str() && verifies(&secret, one)));
}

/// Waits until the operator's list shows the environment's endpoint in this state.
async fn listed(relay: &RelayFixture, state: &str) {
    eventually_ok(SOON, format!("the endpoint to be {state}"), || async {
        let output = relay.command(["webhooks", "list"]).await.1;
        if output.contains("CLIENT_WEBHOOK_URL") && output.contains(state) { Ok(()) } else { Err(output) }
    })
    .await;
}

async fn restart(relay: &mut RelayFixture, env: &BTreeMap<String, String>) {
    relay.api.sigterm().unwrap();
    relay.api.wait_exit(SOON).await.unwrap();
    let port = relay.base.rsplit(':').next().unwrap().to_owned();
    relay.api = baton(["serve"], env).env("PORT", port).start().unwrap();
    relay.api_ready().await;
}

#[tokio::test]
async fn the_old_secret_of_a_rotation_ends_by_time() {
    let relay = setup().start().await;
    let sink = Sink::start().await;
    let (path, old) = register(&relay, &sink.url(), &["transaction.completed"]).await;
    let rotated = post(&relay, &format!("{path}/rotate"), &json!({ "overlapSeconds": 4 })).await;
    let new = Secret::new(rotated["secret"].as_str().unwrap());
    let mut signed_by_both = false;
    let mut sent = 0;
    eventually(SOON, "the old secret to end", || {
        sent += 1;
        let (relay, sink, path, count) = (&relay, &sink, &path, sent);
        async move {
            post(relay, &format!("{path}/test"), &json!({})).await;
            sink.wait_for(count, SOON).await;
            let received = &sink.received()[count - 1];
            (received.header("webhook-signature").unwrap().split(' ').count() == 1).then_some(())
        }
    })
    .await;
    for received in sink.received() {
        assert!(verifies(&new, &received), "the new secret signs from the start");
        signed_by_both |= verifies(&old, &received);
    }
    assert!(signed_by_both, "the old one signs until it ends");
    assert!(!verifies(&old, sink.received().last().unwrap()));
}

/// `HTTP_PROXY` and its like would send requests past the check of addresses.
#[tokio::test]
async fn proxies_of_the_environment_are_not_used() {
    let (sink, proxy) = (Sink::start().await, Sink::start().await);
    let relay = setup().env("NOTIFIER_IN_CONSUMER", "false").start().await;
    let mut notifier = baton(["notifier"], &relay.env);
    for name in ["HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"] {
        notifier = notifier.env(name, proxy.url());
    }
    let port = free_port();
    let mut notifier = notifier.env("PORT", port.to_string()).start().unwrap();
    notifier.wait_ready(&format!("http://127.0.0.1:{port}/ready"), SOON).await.unwrap();
    register(&relay, &sink.url(), &["transaction.completed"]).await;
    relay.send(&serial_body(1)).await;
    sink.wait_for(1, SOON).await;
    assert_eq!(proxy.count(), 0);
}

/// Prints the delays of the healthy ones; what counts is that they get everything although two never answer.
#[tokio::test]
async fn a_hanging_and_a_slow_endpoint_do_not_hold_up_98_healthy_ones() {
    const TRANSACTIONS: usize = 40;
    const ENDS: [&str; 1] = ["transaction.completed"];
    // No attempt at the one that hangs ends during the test.
    let relay = setup().env("WEBHOOK_TIMEOUT_MS", "600000").start().await;
    let mut healthy = Vec::new();
    for _ in 0..98 {
        let sink = Sink::start().await;
        register(&relay, &sink.url(), &ENDS).await;
        healthy.push(sink);
    }
    let round = async |which: &str, serials: std::ops::Range<usize>| {
        healthy.iter().for_each(Sink::clear);
        let began = Instant::now();
        relay.send_many(serials).await;
        let mut delays = Vec::new();
        for sink in &healthy {
            let received = sink.wait_for(TRANSACTIONS, LATER).await;
            delays.extend(received.iter().map(|one| one.at - began));
        }
        delays.sort();
        let (median, last) = (delays[delays.len() / 2], delays[delays.len() - 1]);
        println!("{which}: {} deliveries, after {median:?} (median) and {last:?} (last)", delays.len());
    };
    round("98 healthy endpoints, first", 0..TRANSACTIONS).await;
    round("98 healthy endpoints", TRANSACTIONS..2 * TRANSACTIONS).await;
    let (hanging, slow) = (Sink::start().await, Sink::start().await);
    hanging.reply(Reply::Hang);
    slow.reply(Reply::Slow(Duration::from_secs(10)));
    let bad = [register(&relay, &hanging.url(), &ENDS).await, register(&relay, &slow.url(), &ENDS).await];
    round("beside one that hangs and one that takes 10 s", 2 * TRANSACTIONS..3 * TRANSACTIONS).await;
    for (path, _) in bad {
        let waiting = relay.get(&path).await.1["waiting"].as_u64().unwrap();
        assert!(waiting > 0, "its own events wait");
    }
}
