//! A full disk under the data directory: requests are refused whole, the process says that it is not ready, and it recovers
//! by itself.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;

use harness::engine::TestEngine;
use harness::ports::free_port;
use harness::process::{Process, Program};
use harness::wait::eventually;
use reqwest::Method;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::relay_fixture::{API_KEY, LATER, RelayFixture, RelaySetup, SOON, answer, serial_body};
use crate::store::fixture::Schema;
use crate::users_fixture::{Servers, UsersSetup, user};

/// A service whose data directory is a file system of its own, small enough to fill.
struct SmallDisk {
    base: String,
    /// A file that takes the free space.
    ballast: PathBuf,
    http: reqwest::Client,
    _process: Process,
    _mount: tempfile::TempDir,
}

impl SmallDisk {
    /// Starts the service and waits until it is ready. Needs user namespaces, not root.
    async fn start(service: &str, env: &BTreeMap<String, String>) -> Self {
        let mount = tempfile::tempdir().unwrap();
        let port = free_port();
        let script = "mount -t tmpfs -o size=24m tmpfs \"$BATON_DATA_DIR\" && exec \"$0\" \"$1\"";
        let mut process = Program::new(PathBuf::from("unshare"))
            .args(["--user", "--map-root-user", "--mount", "sh", "-c", script, env!("CARGO_BIN_EXE_baton"), service])
            .envs(env.clone())
            .env("BATON_DATA_DIR", mount.path().display().to_string())
            .env("PORT", port.to_string())
            .start()
            .unwrap();
        let base = format!("http://127.0.0.1:{port}");
        process.wait_ready(&format!("{base}/ready"), SOON).await.unwrap();
        let inside = format!("/proc/{}/root{}/ballast", process.id().unwrap(), mount.path().display());
        Self { base, ballast: inside.into(), http: harness::http_client(), _process: process, _mount: mount }
    }

    fn fill(&self) {
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(&self.ballast).unwrap();
        while file.write_all(&[0; 4096]).is_ok() {}
    }

    fn make_room(&self) {
        std::fs::remove_file(&self.ballast).unwrap();
    }

    async fn request(&self, method: Method, path: &str, body: Option<&Value>) -> (u16, Value) {
        let mut request = self.http.request(method, format!("{}{path}", self.base)).header("x-api-key", API_KEY);
        if let Some(body) = body {
            request = request.json(body);
        }
        answer(request).await
    }

    async fn get(&self, path: &str) -> (u16, Value) {
        self.request(Method::GET, path, None).await
    }

    async fn post_transaction(&self, serial: usize) -> (u16, Value) {
        self.request(Method::POST, "/api/v1/relay/direct", Some(&serial_body(serial))).await
    }

    async fn post_user(&self, number: usize) -> (u16, Value) {
        self.request(Method::POST, "/api/v1/users", Some(&user(number))).await
    }

    /// Asserts that `/ready` and `/health` answer 503; returns the parts of `/health`.
    async fn assert_not_ready(&self) -> Value {
        assert_eq!(self.get("/ready").await.0, 503, "reading works, but nothing can be stored");
        let (status, health) = self.get("/health").await;
        assert_eq!((status, &health["status"]), (503, &json!("degraded")), "{health}");
        health["parts"].clone()
    }

    /// Makes room, and waits until the service is ready without a restart.
    async fn assert_recovers(&self) {
        self.make_room();
        eventually(LATER, "the service to be ready again", || async {
            (self.get("/ready").await.0 == 200).then_some(())
        })
        .await;
        assert_eq!(self.get("/health").await.0, 200);
    }
}

/// Posts with numbers from 1 until this many are refused; returns the numbers of the accepted ones.
async fn post_until_refused(refusals: usize, accepted: u16, post: impl AsyncFn(usize) -> (u16, Value)) -> Vec<usize> {
    let (mut taken, mut refused) = (Vec::new(), 0);
    for number in 1..2000 {
        match post(number).await {
            (status, _) if status == accepted => taken.push(number),
            (503, _) => refused += 1,
            (other, body) => panic!("{other}: {body}"),
        }
        if refused == refusals {
            return taken;
        }
    }
    panic!("the disk was never full: {} accepted", taken.len())
}

/// The variables of the relay lane, with relayers to call.
async fn relay() -> RelayFixture {
    RelaySetup::relayers(1).engine(TestEngine::Embedded).start().await
}

/// The variables of the users lane.
fn users_env() -> BTreeMap<String, String> {
    BTreeMap::from([("RELAY_API_KEY".to_owned(), API_KEY.to_owned())])
}

#[tokio::test]
async fn a_full_disk_refuses_whole_requests_and_recovers_by_itself() {
    let relay = relay().await;
    let api = SmallDisk::start("relay-api", &relay.env).await;
    assert_eq!(api.post_transaction(0).await.0, 202);
    api.fill();
    let accepted = post_until_refused(20, 202, async |serial| api.post_transaction(serial).await).await;
    let parts = api.assert_not_ready().await;
    for part in ["store", "queue"] {
        assert_eq!(parts[part]["reason"], "the disk is full", "{parts}");
    }
    api.make_room();
    eventually(LATER, "the API to accept again without a restart", || async {
        (api.post_transaction(100_000).await.0 == 202).then_some(())
    })
    .await;
    assert_eq!(api.get("/ready").await.0, 200);

    let mut listed = 0;
    let mut cursor = String::new();
    loop {
        let (_, page) = api.get(&format!("/api/v1/relay/transactions?limit=200{cursor}")).await;
        listed += page["transactions"].as_array().unwrap().len();
        match page["nextCursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    let (_, health) = api.get("/health").await;
    assert_eq!(health["parts"]["queue"]["ready"], listed, "every row has a message and every message a row");
    // The first and the last one were accepted too.
    let accepted = accepted.len() + 2;
    assert!(listed == accepted || listed == accepted + 1, "{listed} rows, {accepted} accepted");
}

/// The rows are on a server, and no transaction is accepted without the queue.
#[tokio::test]
async fn an_embedded_queue_on_a_full_disk_is_not_ready_although_mysql_is() {
    let (relay, schema) = (relay().await, Schema::migrated().await);
    let mut env = relay.env.clone();
    env.insert("DATABASE_URL".to_owned(), schema.options().url);
    let api = SmallDisk::start("relay-api", &env).await;
    assert_eq!(api.post_transaction(0).await.0, 202);
    api.fill();
    post_until_refused(1, 202, async |serial| api.post_transaction(serial).await).await;
    let parts = api.assert_not_ready().await;
    assert_eq!(parts["store"]["status"], "ok", "{parts}");
    assert_eq!(
        (&parts["queue"]["status"], &parts["queue"]["reason"]),
        (&json!("unavailable"), &json!("the disk is full"))
    );
    api.assert_recovers().await;
    assert_eq!(api.post_transaction(100_000).await.0, 202);
}

/// It answered `/ready` with 200 while every request got 503.
#[tokio::test]
async fn a_users_api_on_a_full_disk_is_not_ready() {
    let api = SmallDisk::start("users-api", &users_env()).await;
    assert_eq!(api.post_user(0).await.0, 200);
    api.fill();
    post_until_refused(1, 200, async |number| api.post_user(number).await).await;
    let parts = api.assert_not_ready().await;
    assert_eq!(parts["users"]["queue"]["reason"], "the disk is full", "{parts}");
    assert!(parts["users"]["queue"]["ready"].as_u64().unwrap() >= 1, "the queue still says what it holds: {parts}");
    api.assert_recovers().await;
    assert_eq!(api.post_user(100_000).await.0, 200);
}

/// With the store on a server, so that only the queue is a file.
#[tokio::test]
async fn an_embedded_users_queue_on_a_full_disk_is_not_ready_although_postgres_is() {
    let fixture = UsersSetup::on(Servers::shared()).env("USERS_QUEUE", "embedded").start().await;
    let api = SmallDisk::start("users-api", &fixture.env).await;
    api.fill();
    let parts = api.assert_not_ready().await;
    assert_eq!(parts["users"]["queue"]["reason"], "the disk is full", "{parts}");
    assert_eq!(parts["users"]["store"]["status"], "ok", "{parts}");
    api.assert_recovers().await;
}

/// With the queue on a server, so that only the store is a file.
#[tokio::test]
async fn an_embedded_users_store_on_a_full_disk_is_not_ready_although_rabbitmq_is() {
    for service in ["users-api", "users-consumer"] {
        let mut env = users_env();
        env.insert("USERS_QUEUE".to_owned(), "rabbitmq".to_owned());
        env.insert("RABBITMQ_URL".to_owned(), Servers::shared().amqp);
        env.insert("USERS_QUEUE_NAME".to_owned(), format!("baton_{}", Uuid::new_v4().simple()));
        let disk = SmallDisk::start(service, &env).await;
        disk.fill();
        let parts = disk.assert_not_ready().await;
        assert_eq!(parts["users"]["store"]["error"], "disk-full", "{service}: {parts}");
        assert_eq!(parts["users"]["queue"]["status"], "ok", "{service}: {parts}");
        disk.assert_recovers().await;
    }
}
