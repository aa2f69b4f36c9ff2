//! A server that is away when a process starts: the process waits for it and says so, and the other lane works meanwhile.

use harness::ports::free_port;
use harness::proxy::{Mode, Proxy};
use harness::wait::eventually_ok;
use serde_json::{Value, json};

use crate::relay_fixture::{RelaySetup, SOON, baton, serial_body};
use crate::started::Started;
use crate::store::fixture::Schema;

fn user(number: u32) -> Value {
    json!({ "name": format!("User {number}"), "email": format!("user-{number}@example.com") })
}

#[tokio::test]
async fn without_postgres_the_relay_lane_works_and_a_signal_ends_the_wait() {
    let relay = RelaySetup::relayers(1).no_webhooks().env("RECONCILE_SUBMITTED_MS", "200").start().await;
    let address = format!("127.0.0.1:{}", free_port());
    let url = format!("postgres://baton:hunter2@{address}/users");
    let mut started = Started::serve(&relay.env, "USERS_DATABASE_URL", &url).await;
    started.until_waiting(&format!("USERS_DATABASE_URL (postgres://{address})")).await;
    let (_, health) = started.get("/health").await;
    assert_eq!(health["parts"]["users"]["waitsFor"], format!("USERS_DATABASE_URL (postgres://{address})"), "{health}");
    let (status, problem) = started.post("/api/v1/users", &user(1)).await;
    assert_eq!((status, problem["code"].as_str()), (503, Some("unavailable")), "{problem}");

    started.until_open("relay").await;
    let (status, accepted) = started.post("/api/v1/relay/direct", &serial_body(1)).await;
    assert_eq!(status, 202, "{accepted}");
    started.until_confirmed(accepted["transactionId"].as_str().unwrap()).await;

    started.process.sigterm().unwrap();
    assert_eq!(started.process.wait_exit(SOON).await.unwrap().code(), Some(0), "{}", started.process.output());
    let output = started.process.output();
    assert_eq!(output.matches("waiting_for_server").count(), 1, "once for each outage: {output}");
    assert!(!output.contains("hunter2"), "the log must not contain the password: {output}");
}

#[tokio::test]
async fn without_mysql_the_users_lane_works_and_the_relay_lane_starts_when_it_is_back() {
    let relay = RelaySetup::relayers(1).no_webhooks().start().await;
    let schema = Schema::create().await;
    let link = Proxy::start(schema.address()).await;
    link.set(Mode::Refuse).await;
    let url = schema.options_through(&link.address(), SOON).url;
    let started = Started::serve(&relay.env, "DATABASE_URL", &url).await;
    started.until_waiting("DATABASE_URL (mysql://").await;
    assert_eq!(started.post("/api/v1/relay/direct", &serial_body(1)).await.0, 503);
    started.until_open("users").await;
    let (status, enrolled) = started.post("/api/v1/users", &user(1)).await;
    assert_eq!(status, 200, "{enrolled}");
    let id = enrolled["id"].as_str().unwrap();
    eventually_ok(SOON, "the user to be enrolled", || async {
        let (status, found) = started.get(&format!("/api/v1/users/{id}")).await;
        if status == 200 { Ok(()) } else { Err(found.to_string()) }
    })
    .await;

    // Connections that are taken and then dropped are an outage too.
    link.set(Mode::Cut).await;
    link.set(Mode::Forward).await;
    started.until_ready().await;
    let (status, accepted) = started.post("/api/v1/relay/direct", &serial_body(1)).await;
    assert_eq!(status, 202, "{accepted}");
    let id = accepted["transactionId"].as_str().unwrap();
    assert_eq!(started.get(&format!("/api/v1/relay/status/{id}")).await.0, 200);
}

#[tokio::test]
async fn a_mysql_server_that_refuses_the_password_is_an_error_and_not_an_outage() {
    let relay = RelaySetup::relayers(1).no_webhooks().start().await;
    let schema = Schema::create().await;
    let mut env = relay.env.clone();
    env.insert("DATABASE_URL".to_owned(), format!("mysql://nobody:wrong@{}/none", schema.address()));
    let mut process = baton(["serve"], &env).env("PORT", free_port().to_string()).start().unwrap();
    let code = process.wait_exit(SOON).await.unwrap().code();
    let output = process.output();
    assert!(code == Some(1) && output.contains("DATABASE_URL"), "{output}");
}
