//! Clients' endpoints over HTTP and for operators: who may see and change them, what is refused, and that a test event
//! arrives, signed.

use std::collections::BTreeMap;
use std::path::Path;
use std::pin::pin;
use std::time::{SystemTime, UNIX_EPOCH};

use baton::config::Secret;
use baton::notify::signature;
use futures::future::{Either, select};
use harness::ports::free_port;
use harness::sink::{Received, Sink};
use harness::wait::{eventually, eventually_ok};
use reqwest::Method;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::relay_fixture::{API_KEY, RelayFixture, RelaySetup, SOON, answer, baton};

const OTHER_KEY: &str = "another-key-of-more-than-32-characters";
const ENDPOINTS: &str = "/api/v1/webhooks/endpoints";
const UNKNOWN: &str = "00000000-0000-7000-8000-000000000000";
/// A public address that needs no DNS. No test delivers to it.
const PUBLIC: &str = "https://93.184.216.34/hooks";

/// A service with two API keys.
fn setup() -> RelaySetup {
    let hash = hex::encode(Sha256::digest(OTHER_KEY));
    RelaySetup::relayers(1).env("RELAY_API_KEYS", format!("other:{hash}"))
}

async fn start() -> RelayFixture {
    setup().env("WEBHOOK_ALLOW_PRIVATE", "true").start().await
}

/// A call under an API key, with a JSON body unless it is null.
async fn call_as(relay: &RelayFixture, key: &str, method: Method, path: &str, body: Value) -> (u16, Value) {
    let request = relay.http.request(method, format!("{}{path}", relay.base)).header("x-api-key", key).timeout(SOON);
    answer(if body.is_null() { request } else { request.json(&body) }).await
}

async fn call(relay: &RelayFixture, method: Method, path: &str, body: Value) -> (u16, Value) {
    call_as(relay, API_KEY, method, path, body).await
}

async fn try_register(relay: &RelayFixture, body: Value) -> (u16, Value) {
    call(relay, Method::POST, "/api/v1/webhooks/register", body).await
}

/// Registers an endpoint that must be accepted; returns its path and secret.
async fn register(relay: &RelayFixture, url: &str) -> (String, Secret) {
    let (status, endpoint) = try_register(relay, json!({ "url": url })).await;
    assert_eq!(status, 201, "{endpoint}");
    (format!("{ENDPOINTS}/{}", text(&endpoint, "id")), Secret::new(text(&endpoint, "secret")))
}

fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_else(|| panic!("{name} in {value}"))
}

fn fields(problem: &Value) -> Vec<&str> {
    let errors = problem["errors"].as_array().unwrap_or_else(|| panic!("no errors in {problem}"));
    errors.iter().map(|error| text(error, "field")).collect()
}

/// Whether a webhook is signed with this secret.
fn is_signed(webhook: &Received, secret: &Secret) -> bool {
    let header = |name| webhook.header(name).unwrap();
    let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let (id, at, signatures) = (header("webhook-id"), header("webhook-timestamp"), header("webhook-signature"));
    signature::verify(secret, id, at, signatures, &webhook.body, i64::try_from(now_s).unwrap()).is_ok()
}

#[tokio::test]
async fn an_endpoint_is_registered_listed_changed_and_deleted() {
    let relay = start().await;
    let body = json!({ "url": PUBLIC, "description": "billing" });
    let request = relay.request(Method::POST, "/api/v1/webhooks/register").json(&body);
    let response = request.send().await.unwrap();
    assert_eq!((response.status().as_u16(), &response.headers()["cache-control"]), (201, &"no-store".parse().unwrap()));
    let location = response.headers()["location"].to_str().unwrap().to_owned();
    let created: Value = response.json().await.unwrap();
    assert_eq!(location, format!("{ENDPOINTS}/{}", text(&created, "id")));
    let secret = text(&created, "secret").to_owned();
    assert!(secret.starts_with("whsec_"), "{created}");
    assert_eq!(created["events"], json!(["transaction.completed", "transaction.unknown"]));
    assert_eq!((text(&created, "url"), text(&created, "status")), (PUBLIC, "enabled"));

    let (_, list) = relay.get(ENDPOINTS).await;
    let mut shown = created.clone();
    shown.as_object_mut().unwrap().remove("secret");
    assert_eq!(list, json!({ "endpoints": [shown] }), "the secret is shown once");
    let (status, one) = relay.get(&location).await;
    assert_eq!((status, &one["waiting"], &one["givenUp"]), (200, &json!(0), &json!(0)), "{one}");
    assert!(one.get("secret").is_none(), "{one}");

    let change = json!({ "url": format!("{PUBLIC}/2"), "events": ["transaction.failed"], "description": null });
    let (status, changed) = call(&relay, Method::PATCH, &location, change).await;
    assert_eq!((status, text(&changed, "url")), (200, format!("{PUBLIC}/2").as_str()), "{changed}");
    assert_eq!((&changed["events"], &changed["description"]), (&json!(["transaction.failed"]), &Value::Null));
    let (_, disabled) = call(&relay, Method::PATCH, &location, json!({ "enabled": false })).await;
    assert_eq!((text(&disabled, "status"), text(&disabled, "disabledReason")), ("disabled", "disabled by its owner"));
    assert!(disabled["disabledAt"].is_string() && disabled.get("failures").is_none(), "{disabled}");
    let (_, again) = relay.get(&location).await;
    assert_eq!(text(&again, "disabledReason"), "disabled by its owner", "it is stored");
    let (_, enabled) = call(&relay, Method::PATCH, &location, json!({ "enabled": true })).await;
    assert_eq!((text(&enabled, "status"), &enabled["failures"]), ("enabled", &json!(0)), "{enabled}");
    assert!(enabled.get("disabledReason").is_none(), "{enabled}");

    let (status, _) = call(&relay, Method::DELETE, &location, Value::Null).await;
    assert_eq!(status, 204);
    for method in [Method::GET, Method::DELETE] {
        assert_eq!(call(&relay, method, &location, Value::Null).await.0, 404);
    }
    assert_eq!(relay.get(ENDPOINTS).await.1, json!({ "endpoints": [] }));
    assert!(!relay.api.output().contains(&secret), "the log shows no secret");
}

#[tokio::test]
async fn a_key_sees_and_changes_only_its_own_endpoints() {
    let secret = format!("whsec_{}", "A".repeat(32));
    let url = "http://127.0.0.1:1/hook";
    let relay = setup()
        .env("WEBHOOK_ALLOW_PRIVATE", "true")
        .env("CLIENT_WEBHOOK_URL", url)
        .env("CLIENT_WEBHOOK_SECRET", secret)
        .start()
        .await;
    let (own, _) = register(&relay, PUBLIC).await;
    let environment = format!("{ENDPOINTS}/00000000-0000-0000-0000-000000000001");
    let event = format!("events/evt_{}/redeliver", "0".repeat(32));
    for (key, path) in [(OTHER_KEY, &own), (OTHER_KEY, &environment), (API_KEY, &environment)] {
        for (method, rest, body) in [
            (Method::GET, "", Value::Null),
            (Method::PATCH, "", json!({ "enabled": false })),
            (Method::DELETE, "", Value::Null),
            (Method::POST, "/rotate", Value::Null),
            (Method::POST, "/test", Value::Null),
            (Method::POST, "/recover?since=2026-01-01T00:00:00Z", Value::Null),
            (Method::POST, &format!("/{event}"), Value::Null),
            (Method::GET, "/attempts", Value::Null),
        ] {
            let (status, problem) = call_as(&relay, key, method.clone(), &format!("{path}{rest}"), body).await;
            assert_eq!((status, &problem["code"]), (404, &json!("not-found")), "{method} {path}{rest}: {problem}");
        }
    }
    let (_, list) = call_as(&relay, OTHER_KEY, Method::GET, ENDPOINTS, Value::Null).await;
    assert_eq!(list, json!({ "endpoints": [] }));
    let (_, list) = relay.get(ENDPOINTS).await;
    assert_eq!(list["endpoints"].as_array().unwrap().len(), 1, "not the environment's");
    let (status, endpoint) = relay.get(&own).await;
    assert_eq!((status, text(&endpoint, "status")), (200, "enabled"));
    let without_key = relay.http.get(format!("{}{ENDPOINTS}", relay.base)).send().await.unwrap();
    assert_eq!(without_key.status(), 401);
}

#[tokio::test]
async fn bad_input_is_refused_by_field_and_stores_nothing() {
    let relay = start().await;
    let (endpoint, _) = register(&relay, PUBLIC).await;
    let register = "/api/v1/webhooks/register".to_owned();
    let (rotate, recover) = (format!("{endpoint}/rotate"), format!("{endpoint}/recover"));
    let long = format!("https://client.example/{}", "x".repeat(2048));
    for (method, path, body, wanted) in [
        (Method::POST, &register, json!({}), vec!["url"]),
        (Method::POST, &register, json!([]), vec!["body"]),
        (Method::POST, &register, json!({ "url": 5 }), vec!["url"]),
        (Method::POST, &register, json!({ "url": "nowhere" }), vec!["url"]),
        (Method::POST, &register, json!({ "url": "ftp://client.example" }), vec!["url"]),
        (Method::POST, &register, json!({ "url": "https://me:secret@client.example" }), vec!["url"]),
        (Method::POST, &register, json!({ "url": long }), vec!["url"]),
        (Method::POST, &register, json!({ "url": PUBLIC, "events": ["transaction.done"] }), vec!["events"]),
        (Method::POST, &register, json!({ "url": PUBLIC, "events": ["webhook.test"] }), vec!["events"]),
        (Method::POST, &register, json!({ "url": PUBLIC, "events": [] }), vec!["events"]),
        (Method::POST, &register, json!({ "url": PUBLIC, "description": "x".repeat(501) }), vec!["description"]),
        (Method::POST, &register, json!({ "url": PUBLIC, "secret": "mine" }), vec!["secret"]),
        (
            Method::POST,
            &register,
            json!({ "u": 1, "events": 1, "description": 1 }),
            vec!["u", "url", "events", "description"],
        ),
        (
            Method::PATCH,
            &endpoint,
            json!({ "enabled": "yes", "url": null, "owner": "me" }),
            vec!["owner", "url", "enabled"],
        ),
        (Method::POST, &rotate, json!({ "overlapSeconds": 604_801 }), vec!["overlapSeconds"]),
        (Method::POST, &rotate, json!({ "overlap": 1 }), vec!["overlap"]),
        (Method::POST, &recover, Value::Null, vec!["since"]),
        (Method::POST, &format!("{recover}?since=yesterday"), Value::Null, vec!["since"]),
        (Method::POST, &format!("{recover}?since=2026-01-01T00:00:00Z&x=1"), Value::Null, vec!["x"]),
        (Method::GET, &format!("{endpoint}/attempts?limit=0&cursor=x&y=1"), Value::Null, vec!["limit", "cursor", "y"]),
        (Method::GET, &format!("{ENDPOINTS}/first"), Value::Null, vec!["id"]),
        (Method::DELETE, &format!("{ENDPOINTS}/%ff"), Value::Null, vec!["id"]),
        (Method::POST, &format!("{ENDPOINTS}/x/events/y/redeliver"), Value::Null, vec!["id"]),
    ] {
        let (status, problem) = call(&relay, method.clone(), path, body.clone()).await;
        let shown: String = body.to_string().chars().take(80).collect();
        assert_eq!(status, 400, "{method} {path} {shown}: {problem}");
        assert_eq!(fields(&problem), wanted, "{method} {path} {shown}");
    }
    let (_, problem) = try_register(&relay, json!({ "url": PUBLIC, "events": ["transaction.done"] })).await;
    assert!(text(&problem, "detail").contains("transaction.submitted, transaction.confirmed"), "{problem}");
    let form = relay.request(Method::POST, &rotate).body("overlapSeconds=1");
    assert_eq!(answer(form).await.0, 415);
    let (_, list) = relay.get(ENDPOINTS).await;
    assert_eq!(list["endpoints"].as_array().unwrap().len(), 1, "{list}");
    assert_eq!(list["endpoints"][0]["previousSecretValidUntil"], Value::Null, "nothing was rotated");
}

#[tokio::test]
async fn addresses_inside_the_network_are_forbidden_unless_allowed() {
    let relay = setup().start().await;
    let (endpoint, _) = register(&relay, PUBLIC).await;
    for url in [
        "https://127.0.0.1/hooks",
        "https://localhost/hooks",
        "https://10.1.2.3",
        "https://192.168.0.1:8443",
        "https://169.254.169.254/latest/meta-data",
        "https://[::1]/",
        "https://[::ffff:10.0.0.1]/",
        "http://93.184.216.34/hooks",
    ] {
        for (method, path) in [(Method::POST, "/api/v1/webhooks/register"), (Method::PATCH, endpoint.as_str())] {
            let (status, problem) = call(&relay, method.clone(), path, json!({ "url": url })).await;
            assert_eq!((status, &problem["code"]), (403, &json!("forbidden-url")), "{method} {url}: {problem}");
            assert_eq!(fields(&problem), ["url"], "{url}");
        }
    }
    let (status, problem) = try_register(&relay, json!({ "url": "https://10.1.2.3", "events": [] })).await;
    assert_eq!((status, fields(&problem)), (400, vec!["events", "url"]), "all problems at once");
    let (_, list) = relay.get(ENDPOINTS).await;
    assert_eq!(list["endpoints"].as_array().unwrap().len(), 1, "{list}");
    assert_eq!(list["endpoints"][0]["url"], PUBLIC);
}

#[tokio::test]
async fn a_key_has_a_limited_number_of_endpoints() {
    let relay = setup().env("WEBHOOK_ENDPOINTS_MAX", "2").start().await;
    let (first, _) = register(&relay, PUBLIC).await;
    register(&relay, PUBLIC).await;
    let (status, problem) = try_register(&relay, json!({ "url": PUBLIC })).await;
    assert_eq!((status, &problem["code"]), (409, &json!("too-many-endpoints")), "{problem}");
    assert!(text(&problem, "detail").contains("2 endpoints"), "{problem}");
    let (status, _) =
        call_as(&relay, OTHER_KEY, Method::POST, "/api/v1/webhooks/register", json!({ "url": PUBLIC })).await;
    assert_eq!(status, 201, "each key has its own limit");
    assert_eq!(call(&relay, Method::DELETE, &first, Value::Null).await.0, 204);
    let (third, _) = register(&relay, PUBLIC).await;
    let (_, list) = relay.get(ENDPOINTS).await;
    assert_eq!(list["endpoints"].as_array().unwrap().len(), 2);
    assert!(third.ends_with(text(&list["endpoints"][1], "id")), "oldest first: {list}");
}

#[tokio::test]
async fn concurrent_changes_are_saved_one_after_the_other_or_refused() {
    let relay = start().await;
    let (endpoint, _) = register(&relay, PUBLIC).await;
    let changes = (0..16).map(|number| {
        let body = json!({ "description": format!("change {number}") });
        call(&relay, Method::PATCH, &endpoint, body)
    });
    let mut saved = Vec::new();
    for (status, answer) in futures::future::join_all(changes).await {
        match status {
            200 => saved.push(answer["description"].clone()),
            _ => assert_eq!((status, &answer["code"]), (409, &json!("changed-meanwhile")), "{answer}"),
        }
    }
    let (_, endpoint) = relay.get(&endpoint).await;
    assert!(saved.contains(&endpoint["description"]), "{endpoint} of {saved:?}");
}

#[tokio::test]
async fn a_test_event_arrives_signed_and_its_attempts_can_be_read_and_repeated() {
    let relay = start().await;
    let sink = Sink::start().await;
    let (endpoint, secret) = register(&relay, &sink.url()).await;
    let (status, sent) = call(&relay, Method::POST, &format!("{endpoint}/test"), Value::Null).await;
    assert_eq!(status, 202, "{sent}");
    let event = text(&sent, "eventId");
    let webhook = sink.wait_for(1, SOON).await.remove(0);
    assert_eq!(webhook.header("webhook-id"), Some(event));
    assert!(is_signed(&webhook, &secret), "{webhook:?}");
    let payload = webhook.json();
    assert_eq!((text(&payload, "event"), text(&payload, "eventId")), ("webhook.test", event));
    assert!(endpoint.ends_with(text(&payload, "endpointId")) && payload["timestamp"].is_string(), "{payload}");

    let attempts = format!("{endpoint}/attempts");
    let page = eventually(SOON, "the attempt to be recorded", || async {
        let (_, page) = relay.get(&attempts).await;
        (page["attempts"].as_array().unwrap().len() == 1).then_some(page)
    })
    .await;
    let attempt = &page["attempts"][0];
    assert_eq!((text(attempt, "eventId"), &attempt["status"]), (event, &json!(200)), "{attempt}");
    assert_eq!((&attempt["succeeded"], &attempt["error"], &attempt["number"]), (&json!(true), &Value::Null, &json!(1)));
    assert!(attempt["durationMs"].is_u64() && attempt["at"].is_string() && attempt["id"].is_string(), "{attempt}");

    let redeliver = |event: &str| format!("{endpoint}/events/{event}/redeliver");
    let (status, queued) = call(&relay, Method::POST, &redeliver(event), Value::Null).await;
    assert_eq!((status, queued), (202, json!({ "queued": 1 })));
    let webhook = sink.wait_for(2, SOON).await.remove(1);
    assert_eq!(webhook.header("webhook-id"), Some(event), "the same id");
    for unknown in [format!("evt_{}", "0".repeat(32)), "nothing".to_owned(), UNKNOWN.to_owned()] {
        assert_eq!(call(&relay, Method::POST, &redeliver(&unknown), Value::Null).await.0, 404, "{unknown}");
    }

    let first = eventually(SOON, "a second page", || async {
        let (_, page) = relay.get(&format!("{attempts}?limit=1")).await;
        page["nextCursor"].is_string().then_some(page)
    })
    .await;
    let cursor = text(&first, "nextCursor");
    assert_eq!(cursor, text(&first["attempts"][0], "id"));
    let (_, second) = relay.get(&format!("{attempts}?limit=1&cursor={cursor}")).await;
    assert_eq!((&second["attempts"][0]["id"], &second["nextCursor"]), (&attempt["id"], &Value::Null), "newest first");
}

#[tokio::test]
async fn a_rotated_secret_and_the_one_before_it_both_sign_until_the_overlap_is_over() {
    let relay = start().await;
    let sink = Sink::start().await;
    let (endpoint, first) = register(&relay, &sink.url()).await;
    let rotate = async |body: Value| {
        let (status, answer) = call(&relay, Method::POST, &format!("{endpoint}/rotate"), body).await;
        assert_eq!(status, 200, "{answer}");
        (Secret::new(text(&answer, "secret")), answer["previousSecretValidUntil"].clone())
    };
    let test = async |count: usize| {
        assert_eq!(call(&relay, Method::POST, &format!("{endpoint}/test"), Value::Null).await.0, 202);
        sink.wait_for(count, SOON).await.pop().unwrap()
    };
    let (second, until) = rotate(Value::Null).await;
    let (_, shown) = relay.get(&endpoint).await;
    assert!(until.is_string() && shown["previousSecretValidUntil"] == until, "{until}: {shown}");
    let webhook = test(1).await;
    assert!(is_signed(&webhook, &first) && is_signed(&webhook, &second) && first != second);

    let (third, until) = rotate(json!({ "overlapSeconds": 0 })).await;
    assert_eq!(until, Value::Null);
    let webhook = test(2).await;
    assert!(is_signed(&webhook, &third) && !is_signed(&webhook, &second) && !is_signed(&webhook, &first));
}

#[tokio::test]
async fn an_event_of_a_disabled_endpoint_is_recovered() {
    let relay = start().await;
    let sink = Sink::start().await;
    let (endpoint, _) = register(&relay, &sink.url()).await;
    call(&relay, Method::PATCH, &endpoint, json!({ "enabled": false })).await;
    let id = relay.send_serial(1).await;
    relay.until_status(&id, "confirmed").await;
    call(&relay, Method::PATCH, &endpoint, json!({ "enabled": true })).await;
    let recover = |since: &str| format!("{endpoint}/recover?since={since}");
    let (status, queued) = call(&relay, Method::POST, &recover("2999-01-01T00:00:00Z"), Value::Null).await;
    assert_eq!((status, queued), (202, json!({ "queued": 0, "nextSince": null })));
    let (status, queued) = call(&relay, Method::POST, &recover("2026-01-01T00:00:00Z"), Value::Null).await;
    assert_eq!((status, queued), (202, json!({ "queued": 1, "nextSince": null })));
    let payload = sink.wait_for(1, SOON).await[0].json();
    assert_eq!((text(&payload, "event"), text(&payload, "transactionId")), ("transaction.completed", id.as_str()));
}

#[tokio::test]
async fn a_key_recovers_with_one_call_at_a_time() {
    let relay = start().await;
    let (endpoint, _) = register(&relay, PUBLIC).await;
    let lock = rusqlite::Connection::open(Path::new(&relay.env["BATON_DATA_DIR"]).join("baton.db")).unwrap();
    lock.busy_timeout(SOON).unwrap();
    lock.execute_batch("BEGIN IMMEDIATE").unwrap();
    let recover = async || {
        call(&relay, Method::POST, &format!("{endpoint}/recover?since=2026-01-01T00:00:00Z"), Value::Null).await
    };
    // One of them waits for the store, so the other is the first to be answered.
    let (one, other) = (pin!(recover()), pin!(recover()));
    let (first, waiting) = match select(one, other).await {
        Either::Left((first, waiting)) | Either::Right((first, waiting)) => (first, waiting),
    };
    assert_eq!((first.0, text(&first.1, "code")), (409, "already-recovering"), "{}", first.1);
    lock.execute_batch("ROLLBACK").unwrap();
    assert_eq!(waiting.await.0, 202);
    assert_eq!(recover().await.0, 202, "the next call");
}

#[tokio::test]
async fn operators_list_disable_and_repair_endpoints() {
    let relay = start().await;
    let sink = Sink::start().await;
    let (endpoint, secret) = register(&relay, &sink.url()).await;
    let id = endpoint.rsplit('/').next().unwrap();
    let (code, list) = relay.command(["webhooks", "list"]).await;
    assert!(code == 0 && list.contains(id) && list.contains("default") && list.contains("1 endpoint"), "{list}");
    let (code, output) = relay.command(["webhooks", "disable", id, "--reason", "too\nslow"]).await;
    assert!(code == 0 && output.contains("is disabled"), "{output}");
    let (_, shown) = relay.get(&endpoint).await;
    assert_eq!(text(&shown, "disabledReason"), "too\nslow");
    let (code, output) = relay.command(["webhooks", "show", id]).await;
    assert!(code == 0 && output.contains("disabled: too\\nslow") && output.contains("waiting      0"), "{output}");
    assert!(!output.contains(secret.expose()), "{output}");

    let transaction = relay.send_serial(1).await;
    relay.until_status(&transaction, "confirmed").await;
    let (code, output) = relay.command(["webhooks", "recover", id, "--since", "2026-01-01T00:00:00Z"]).await;
    assert!(code == 0 && output.contains("1 due again") && output.contains("is disabled"), "{output}");
    let (code, output) = relay.command(["webhooks", "recover", id, "--since", "2020-01-01T00:00:00Z"]).await;
    assert!(code == 0 && output.contains("events are kept for WEBHOOK_RETENTION_DAYS"), "{output}");
    let (code, output) = relay.command(["webhooks", "enable", id]).await;
    assert!(code == 0 && output.contains("is enabled"), "{output}");
    let webhook = sink.wait_for(1, SOON).await.remove(0);
    let event = webhook.header("webhook-id").unwrap();
    let attempts = eventually_ok(SOON, "the attempt to be recorded", || async {
        let (_, output) = relay.command(["webhooks", "attempts", id]).await;
        if output.contains("1 shown") { Ok(output) } else { Err(output) }
    })
    .await;
    assert!(attempts.contains(event) && attempts.contains("delivered"), "{attempts}");
    let (code, output) = relay.command(["webhooks", "redeliver", id, event]).await;
    assert!(code == 0 && output.contains("is due again"), "{output}");
    assert_eq!(sink.wait_for(2, SOON).await[1].header("webhook-id"), Some(event));

    for args in [["webhooks", "show", UNKNOWN], ["webhooks", "enable", UNKNOWN], ["webhooks", "disable", UNKNOWN]] {
        let (code, output) = relay.command(args).await;
        assert!(code == 1 && output.contains(&format!("no endpoint {UNKNOWN}")), "{args:?}: {output}");
    }
    let (code, output) = relay.command(["webhooks", "redeliver", id, "evt_0"]).await;
    assert!(code == 1 && output.contains("no event evt_0"), "{output}");
    relay.command(["webhooks", "disable", id]).await;
    let (code, output) = relay.command(["webhooks", "redeliver", id, event]).await;
    assert!(code == 0 && output.contains(&format!("baton webhooks enable {id}")), "{output}");
    let (code, output) = relay.command(["webhooks", "show", "foo"]).await;
    assert!(code == 2 && output.contains("must be a UUID, as `baton webhooks list` shows it"), "{output}");
    let (code, output) = relay.command(["webhooks", "recover", id, "--since", "yesterday"]).await;
    assert!(code == 2 && output.contains("RFC 3339"), "{output}");
}

#[tokio::test]
async fn the_listener_prints_and_verifies_what_arrives() {
    let relay = start().await;
    let port = free_port();
    let (endpoint, secret) = register(&relay, &format!("http://127.0.0.1:{port}")).await;
    let args = ["webhooks", "listen", "--port", &port.to_string(), "--secret", secret.expose()];
    let mut listener = baton(args, &BTreeMap::new()).start().unwrap();
    let wait_for = async |line: &str| {
        eventually_ok(SOON, format!("the line {line:?}"), || async {
            let output = listener.output();
            if output.contains(line) { Ok(output) } else { Err(output) }
        })
        .await
    };
    wait_for("Listening on").await;
    assert_eq!(call(&relay, Method::POST, &format!("{endpoint}/test"), Value::Null).await.0, 202);
    let output = wait_for("webhook.test  verified").await;
    assert!(!output.contains("NOT VERIFIED"), "{output}");
    let id = relay.send_serial(1).await;
    wait_for(&format!("transaction.completed  {id}  confirmed  sequence ")).await;

    let forged = relay.http.post(format!("http://127.0.0.1:{port}/any/path")).body(r#"{"event":"forged"}"#);
    let (status, problem) = answer(forged).await;
    assert_eq!(status, 400, "{problem}");
    wait_for("forged  NOT VERIFIED: there is no webhook-id header").await;
    let large = relay.http.post(format!("http://127.0.0.1:{port}/")).body("x".repeat(100_000));
    assert_eq!(answer(large).await.0, 413);
    listener.sigterm().unwrap();
    assert_eq!(listener.wait_exit(SOON).await.unwrap().code(), Some(0), "{}", listener.output());

    let args = ["webhooks", "listen", "--secret", "whsec_short"];
    let mut refused = baton(args, &BTreeMap::new()).start().unwrap();
    assert_eq!(refused.wait_exit(SOON).await.unwrap().code(), Some(1), "{}", refused.output());
}

#[tokio::test]
async fn a_listener_without_a_secret_accepts_everything_and_says_so() {
    let port = free_port();
    let args = ["webhooks", "listen", "--port", &port.to_string()];
    let mut listener = baton(args, &BTreeMap::new()).start().unwrap();
    eventually(SOON, "the listener", || async { listener.output().contains("not verified").then_some(()) }).await;
    let http = harness::http_client();
    let body = r#"{"event":"transaction.failed","transactionId":"01a1","status":"failed","sequence":4}"#;
    let (status, _) = answer(http.post(format!("http://127.0.0.1:{port}/")).body(body)).await;
    assert_eq!(status, 204);
    let output = listener.output();
    assert!(output.contains("transaction.failed  01a1  failed  sequence 4  not verified"), "{output}");
    assert_eq!(answer(http.get(format!("http://127.0.0.1:{port}/"))).await.0, 405);
    listener.sigterm().unwrap();
    assert_eq!(listener.wait_exit(SOON).await.unwrap().code(), Some(0), "{}", listener.output());
}
