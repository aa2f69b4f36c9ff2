//! A whole development relayer over real sockets: what Baton sees of it, and what survives a restart.

use std::{
    net::Ipv4Addr,
    sync::{
        Mutex,
        atomic::{self, AtomicBool},
    },
};

use axum::{Router, body::Bytes, extract::State, http::StatusCode, routing::post};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::*;

const KEY: &str = "an-api-key-of-at-least-32-characters";
const SOON: Duration = Duration::from_secs(10);

/// A receiver of webhooks that refuses on request.
#[derive(Default)]
struct Inbox {
    refuses: AtomicBool,
    bodies: Mutex<Vec<Value>>,
}

struct DevFixture {
    inbox: Arc<Inbox>,
    webhook_url: String,
    folder: tempfile::TempDir,
}

struct Running {
    relayer: DevRelayer,
}

impl DevFixture {
    async fn new() -> Self {
        // Another test may have installed it before.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let inbox = Arc::new(Inbox::default());
        let receive = async |State(inbox): State<Arc<Inbox>>, body: Bytes| {
            inbox.bodies.lock().unwrap().push(serde_json::from_slice(&body).unwrap());
            if inbox.refuses.load(atomic::Ordering::SeqCst) { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }
        };
        let router = Router::new().route("/hook", post(receive)).with_state(inbox.clone());
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let webhook_url = format!("http://{}/hook", listener.local_addr().unwrap());
        tokio::spawn(axum::serve(listener, router).into_future());
        Self { inbox, webhook_url, folder: tempfile::tempdir().unwrap() }
    }

    fn journal(&self, index: usize) -> PathBuf {
        self.folder.path().join(format!("data/dev-relayer-{index}.jsonl"))
    }

    async fn start(&self, index: usize, step: Duration) -> Running {
        let options = DevRelayerOptions {
            index,
            port: None,
            hosts: Vec::new(),
            api_key: KEY.to_owned(),
            webhook_url: self.webhook_url.clone(),
            webhook_key: "whsec-0123456789abcdef0123456789abcdef".to_owned(),
            journal: self.journal(index),
            seed: 7,
            step,
            chain: None,
        };
        Running { relayer: DevRelayer::start(options).await.unwrap() }
    }

    fn received(&self) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let bodies = self.inbox.bodies.lock().unwrap();
        bodies.iter().map(|body| (text(&body["payload"]["id"]), text(&body["payload"]["status"]))).collect()
    }

    async fn until_delivered(&self, id: &str, status: &str) {
        tokio::time::timeout(SOON, async {
            while !self.received().contains(&(id.to_owned(), status.to_owned())) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
        .unwrap_or_else(|_| panic!("{id} was never reported as {status}: {:?}", self.received()));
    }
}

impl Running {
    async fn get(&self, path: &str) -> (u16, Value) {
        let url = format!("{}/api/v1/relayers{path}", self.relayer.url());
        let answer = reqwest::Client::new().get(url).bearer_auth(KEY).send().await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap_or_default())
    }

    async fn send(&self, body: &Value) -> (u16, Value) {
        let url = format!("{}/api/v1/relayers/{}/transactions", self.relayer.url(), self.relayer.id());
        let answer = reqwest::Client::new().post(url).bearer_auth(KEY).json(body).send().await.unwrap();
        (answer.status().as_u16(), answer.json().await.unwrap_or_default())
    }

    async fn accept(&self) -> String {
        let (status, answer) = self.send(&body()).await;
        assert_eq!((status, &answer["data"]["status"]), (200, &json!("pending")), "{answer}");
        answer["data"]["id"].as_str().unwrap().to_owned()
    }

    async fn stop(self) {
        tokio::time::timeout(SOON, self.relayer.stop()).await.expect("all tasks end");
    }
}

fn body() -> Value {
    json!({"to": "0x90F79bf6EB2c4f870365E785982E1f101E93b906", "value": "7", "data": "0x12", "gas_limit": 60000,
        "speed": "fast"})
}

#[tokio::test]
async fn a_record_runs_to_confirmed_and_sends_a_webhook_for_each_status() {
    let fixture = DevFixture::new().await;
    let running = fixture.start(2, Duration::from_millis(40)).await;
    let (_, list) = running.get("").await;
    assert_eq!(list["data"][0]["name"], "Development relayer 2 (no chain)");
    assert_eq!((&list["data"][0]["network"], &list["data"][0]["id"]), (&json!("dev-none"), &json!("dev-relayer-2")));
    assert_eq!(list["pagination"], json!({"current_page": 1, "per_page": 10, "total_items": 1}));
    let id = running.accept().await;
    for status in ["sent", "submitted", "mined", "confirmed"] {
        fixture.until_delivered(&id, status).await;
    }
    let (_, seen) = running.get(&format!("/dev-relayer-2/transactions/{id}")).await;
    assert_eq!((&seen["data"]["status"], &seen["data"]["nonce"]), (&json!("confirmed"), &json!(0)));
    let (_, status) = running.get("/dev-relayer-2/status").await;
    assert_eq!((&status["data"]["pending_transactions_count"], &status["data"]["nonce"]), (&json!(0), &json!("1")));
    assert!(status["data"]["last_confirmed_transaction_timestamp"].is_string());
    running.stop().await;
}

#[tokio::test]
async fn a_record_under_way_continues_after_a_restart_with_its_nonce() {
    let fixture = DevFixture::new().await;
    let running = fixture.start(1, Duration::from_millis(700)).await;
    let id = running.accept().await;
    let (_, status) = running.get("/dev-relayer-1/status").await;
    assert_eq!(status["data"]["pending_transactions_count"], 1);
    running.stop().await;
    assert!(!fixture.received().contains(&(id.clone(), "confirmed".to_owned())), "it was stopped on the way");

    let running = fixture.start(1, Duration::from_millis(40)).await;
    let second = running.accept().await;
    fixture.until_delivered(&id, "confirmed").await;
    fixture.until_delivered(&second, "confirmed").await;
    let (_, first) = running.get(&format!("/dev-relayer-1/transactions/{id}")).await;
    assert_eq!(first["data"]["nonce"], 0);
    let (_, list) = running.get("/dev-relayer-1/transactions?status=Confirmed&per_page=1").await;
    assert_eq!(list["pagination"]["total_items"], 2);
    assert_eq!((&list["data"][0]["id"], &list["data"][0]["nonce"]), (&json!(second), &json!(1)), "newest first");
    running.stop().await;
}

#[tokio::test]
async fn an_undelivered_final_webhook_is_sent_again_after_a_restart_and_then_no_more() {
    let fixture = DevFixture::new().await;
    fixture.inbox.refuses.store(true, atomic::Ordering::SeqCst);
    let running = fixture.start(1, Duration::from_millis(10)).await;
    let id = running.accept().await;
    fixture.until_delivered(&id, "confirmed").await;
    running.stop().await;

    fixture.inbox.refuses.store(false, atomic::Ordering::SeqCst);
    fixture.inbox.bodies.lock().unwrap().clear();
    let running = fixture.start(1, Duration::from_millis(10)).await;
    fixture.until_delivered(&id, "confirmed").await;
    // The next record's end proves that the mark of the first one has had its turn.
    let second = running.accept().await;
    fixture.until_delivered(&second, "confirmed").await;
    tokio::time::timeout(SOON, async {
        while journal::load(&fixture.journal(1)).unwrap().values().any(|(_, notified)| !notified) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .expect("both ends are marked");
    running.stop().await;

    fixture.inbox.bodies.lock().unwrap().clear();
    let running = fixture.start(1, Duration::from_millis(10)).await;
    let third = running.accept().await;
    fixture.until_delivered(&third, "confirmed").await;
    assert!(fixture.received().iter().all(|(id, _)| *id == third), "{:?}", fixture.received());
    running.stop().await;
}

#[tokio::test]
async fn relayers_do_not_see_each_others_records() {
    let fixture = DevFixture::new().await;
    let step = Duration::from_millis(10);
    let (one, two) = (fixture.start(1, step).await, fixture.start(2, step).await);
    let (first, second) = (one.accept().await, two.accept().await);
    let third = one.accept().await;
    fixture.until_delivered(&third, "confirmed").await;
    assert_eq!(one.get(&format!("/dev-relayer-1/transactions/{second}")).await.0, 404);
    assert_eq!(one.get("/dev-relayer-2/transactions").await.0, 404);
    one.stop().await;
    two.stop().await;
    let one = fixture.start(1, step).await;
    let (_, list) = one.get("/dev-relayer-1/transactions").await;
    assert_eq!(list["pagination"]["total_items"], 2);
    for (place, id, nonce) in [(0, third, 1), (1, first, 0)] {
        assert_eq!((&list["data"][place]["id"], &list["data"][place]["nonce"]), (&json!(id), &json!(nonce)));
    }
    one.stop().await;
}

#[tokio::test]
async fn a_reverting_and_a_malformed_call_fail_with_a_nonce() {
    let fixture = DevFixture::new().await;
    let running = fixture.start(1, Duration::from_millis(10)).await;
    for (field, value) in [("data", "0xDEADBEEF00"), ("to", "0x1234")] {
        let mut body = body();
        body[field] = json!(value);
        let id = running.send(&body).await.1["data"]["id"].as_str().unwrap().to_owned();
        fixture.until_delivered(&id, "failed").await;
        let (_, seen) = running.get(&format!("/dev-relayer-1/transactions/{id}")).await;
        assert!(seen["data"]["nonce"].is_number() && seen["data"]["hash"].is_string(), "{seen}");
        assert!(seen["data"]["confirmed_at"].is_null());
    }
    running.stop().await;
}

#[tokio::test]
async fn refusals_leave_nothing_behind() {
    let fixture = DevFixture::new().await;
    let running = fixture.start(1, Duration::from_millis(10)).await;
    let mut unpriced = body();
    unpriced.as_object_mut().unwrap().remove("speed");
    let (status, answer) = running.send(&unpriced).await;
    let message = "Transaction must specify either gasPrice, speed, or EIP1559 parameters";
    assert_eq!((status, answer), (400, json!({"success": false, "data": null, "error": message})));
    let url = format!("{}/api/v1/relayers/dev-relayer-1/transactions", running.relayer.url());
    let client = reqwest::Client::new();
    let kind =
        |answer: &reqwest::Response| answer.headers().get("content-type").map(|kind| kind.to_str().unwrap().to_owned());
    let answer = client.post(&url).json(&body()).send().await.unwrap();
    assert_eq!((answer.status().as_u16(), kind(&answer).as_deref()), (401, Some("application/json")));
    let answer = client.post(&url).bearer_auth("other").json(&body()).send().await.unwrap();
    assert_eq!((answer.status().as_u16(), kind(&answer)), (401, None));
    let bad = client.post(&url).bearer_auth(KEY).header("content-type", "application/json").body("{").send().await;
    let bad = bad.unwrap();
    assert_eq!(bad.status(), 400);
    assert!(kind(&bad).unwrap().starts_with("text/plain"));
    assert!(bad.text().await.unwrap().starts_with("Json deserialize error: "));
    let (_, list) = running.get("/dev-relayer-1/transactions").await;
    assert_eq!(list["pagination"]["total_items"], 0);
    let health = client.get(format!("{}/api/v1/health", running.relayer.url())).send().await.unwrap();
    assert_eq!(health.text().await.unwrap(), "OK");
    running.stop().await;
}
