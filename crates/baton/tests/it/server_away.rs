//! A server that is away when a process starts: the process waits for it and says so, and the other lane works meanwhile.

use std::collections::BTreeMap;

use harness::ports::free_port;
use harness::process::Process;
use harness::proxy::{Mode, Proxy};
use harness::wait::eventually_ok;
use serde_json::{Value, json};

use crate::relay_fixture::{API_KEY, RelaySetup, SOON, answer, baton, serial_body};
use crate::store::fixture::Schema;

/// A process with its own port and data directory.
struct Started {
    process: Process,
    base: String,
    http: reqwest::Client,
    _directory: tempfile::TempDir,
}

impl Started {
    /// Starts `serve` and waits until it listens.
    async fn serve(env: &BTreeMap<String, String>, variable: &str, url: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let port = free_port();
        let mut env = env.clone();
        env.insert("BATON_DATA_DIR".to_owned(), directory.path().display().to_string());
        env.insert(variable.to_owned(), url.to_owned());
        let mut process = baton(["serve"], &env).env("PORT", port.to_string()).start().unwrap();
        let base = format!("http://127.0.0.1:{port}");
        process.wait_ready(&format!("{base}/live"), SOON).await.unwrap();
        Self { process, base, http: harness::http_client(), _directory: directory }
    }

    async fn get(&self, path: &str) -> (u16, Value) {
        answer(self.http.get(format!("{}{path}", self.base)).header("x-api-key", API_KEY)).await
    }

    async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        answer(self.http.post(format!("{}{path}", self.base)).header("x-api-key", API_KEY).json(body)).await
    }

    /// Waits until this lane is open: its part of `/health` does not say `starting`.
    async fn until_open(&self, lane: &str) {
        eventually_ok(SOON, "the lane to open", || async {
            let (_, health) = self.get("/health").await;
            if health["parts"][lane]["status"] == "starting" { Err(health.to_string()) } else { Ok(()) }
        })
        .await;
    }

    /// Waits until the log names the server that is awaited.
    async fn until_waiting(&self, server: &str) {
        eventually_ok(SOON, "the log to name the server", || async {
            let output = self.process.output();
            if output.contains("waiting_for_server") && output.contains(server) { Ok(()) } else { Err(output) }
        })
        .await;
        assert_eq!(self.get("/live").await.0, 200);
        assert_eq!(self.get("/ready").await.0, 503);
    }
}

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
    let id = accepted["transactionId"].as_str().unwrap();
    eventually_ok(SOON, "the transaction to be confirmed", || async {
        let (_, shown) = started.get(&format!("/api/v1/relay/status/{id}")).await;
        if shown["status"] == "confirmed" { Ok(()) } else { Err(shown.to_string()) }
    })
    .await;

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
    eventually_ok(SOON, "the process to be ready", || async {
        let (status, ready) = started.get("/ready").await;
        if status == 200 { Ok(()) } else { Err(ready.to_string()) }
    })
    .await;
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
