//! What a process says about its surroundings: in the log and in `/health`.

use std::sync::{Arc, Mutex};

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Json, Router};
use harness::ports::free_port;
use harness::process::Process;
use harness::wait::{eventually, eventually_ok};
use harness::{engine::TestEngine, http_client};
use serde_json::{Value, json};

use crate::relay_fixture::{RelayFixture, RelaySetup, SOON, baton};
use harness::relayer::{Faults, PostFault};

/// `serve` with a relayer of each kind that gives no answer: its key is wrong, its path, its port, its name.
struct Unreachable {
    port: u16,
    urls: [String; 4],
    process: Process,
    _relay: RelayFixture,
    _directory: tempfile::TempDir,
}

/// What tells an operator which of them it is, in the same order.
const WHY: [&str; 4] = ["OZ_RELAYER_API_KEY", "path in OZ_RELAYER_URLS", "connection refused", "DNS"];

impl Unreachable {
    async fn start() -> Self {
        let relay = RelaySetup::relayers(1).start().await;
        let good = relay.relayers[0].url();
        let name_too_long = "a".repeat(64);
        let urls = [
            good.clone(),
            format!("{good}/elsewhere"),
            format!("http://127.0.0.1:{}", free_port()),
            format!("http://{name_too_long}:1"),
        ];
        let port = free_port();
        let directory = tempfile::tempdir().unwrap();
        let keys = format!("wrong,{},any,any", relay.relayers[0].api_key());
        let program = baton(["serve"], &relay.env)
            .env("OZ_RELAYER_URLS", urls.join(","))
            .env("OZ_RELAYER_API_KEY", keys)
            .env("BATON_DATA_DIR", directory.path().display().to_string())
            .env("PORT", port.to_string());
        let process = program.start().unwrap();
        Self { port, urls, process, _relay: relay, _directory: directory }
    }
}

#[tokio::test]
async fn health_says_why_a_relayer_is_unreachable() {
    let started = Unreachable::start().await;
    let health = eventually(SOON, "each relayer's reason", || async {
        let health = http_client().get(format!("http://127.0.0.1:{}/health", started.port)).send().await.ok()?;
        let health: Value = health.json().await.ok()?;
        let each = health["parts"]["relayers"]["each"].as_array()?.clone();
        each.iter().all(|relayer| relayer["reason"].is_string()).then_some(each)
    })
    .await;
    for (relayer, wanted) in health.iter().zip(WHY) {
        assert_eq!(relayer["status"], "unreachable", "{relayer}");
        assert!(relayer["reason"].as_str().unwrap().contains(wanted), "{wanted} in {relayer}");
    }
}

/// The messages with this action, each with its relayer.
fn logged(process: &Process, action: &str) -> Vec<(Value, String)> {
    let output = process.output();
    let lines = output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let lines = lines.filter(|line| line["action"] == action);
    lines.map(|line| (line["relayer"].clone(), line["message"].as_str().unwrap().to_owned())).collect()
}

#[tokio::test]
async fn the_log_says_why_a_relayer_is_unreachable() {
    let started = Unreachable::start().await;
    let (_, stopped) = eventually(SOON, "the consumer to stop receiving", || async {
        logged(&started.process, "receiving_stopped").pop()
    })
    .await;
    let failed = logged(&started.process, "relayer_health_failed");
    for (url, wanted) in started.urls.iter().zip(WHY) {
        let (_, failed) = failed.iter().find(|(relayer, _)| relayer == url).unwrap();
        assert!(failed.contains(wanted), "{wanted} in {failed}");
        let (_, of_this) = stopped.split_once(&format!("{url}: unreachable (")).unwrap();
        assert!(of_this.split(": unreachable (").next().unwrap().contains(wanted), "{wanted} for {url} in {stopped}");
    }
}

/// A relayer that takes connections and answers nothing, and then is gone: the second reason is news too.
#[tokio::test]
async fn the_log_says_that_a_relayer_gives_no_answer_in_time_and_then_that_it_is_gone() {
    let relay = RelaySetup::relayers(1).start().await;
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (url, port) = (format!("http://{}", silent.local_addr().unwrap()), free_port());
    let directory = tempfile::tempdir().unwrap();
    let program = baton(["serve"], &relay.env).env("OZ_RELAYER_URLS", url.as_str());
    let program = program.env("BATON_DATA_DIR", directory.path().display().to_string()).env("PORT", port.to_string());
    let process = program.start().unwrap();
    let until = |wanted: &'static str| {
        let process = &process;
        eventually(SOON, wanted, move || async move {
            let failed = logged(process, "relayer_health_failed");
            failed.iter().any(|(_, message)| message.contains(wanted)).then_some(())
        })
    };
    until("no answer in time").await;
    drop(silent);
    until("connection refused").await;
}

#[tokio::test]
async fn the_log_names_the_engines_and_an_outage_of_redis_once() {
    let setup = RelaySetup::relayers(1).engine(TestEngine::Embedded);
    let closed = free_port();
    let relay = setup.env("REDIS_URL", format!("redis://:s3cret@127.0.0.1:{closed}")).start().await;
    // Each asks Redis, and the first look of the process has asked it before.
    for _ in 0..3 {
        let (_, health) = relay.get("/health").await;
        assert_eq!(health["parts"]["cache"]["status"], "unavailable", "{health}");
        assert_eq!(health["parts"]["chain"], Value::Null, "RPC_URL is not set: {health}");
    }
    let output = relay.api.output();
    let count = |text: &str| output.lines().filter(|line| line.contains(text)).count();
    assert_eq!(count("redis_unavailable"), 1, "{output}");
    assert_eq!(count("\"engines\""), 2, "one for each lane: {output}");
    assert!(output.contains("baton.db") && output.contains("users.db"), "{output}");
    assert!(output.contains(&format!("Redis, redis://127.0.0.1:{closed}")) && !output.contains("s3cret"), "{output}");
}

/// A node at the block [`HEAD`], or one that answers with another status.
#[derive(Clone)]
struct Node {
    port: u16,
    status: Arc<Mutex<StatusCode>>,
}

const HEAD: u64 = 291;

impl Node {
    async fn start() -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let node = Self { port: listener.local_addr().unwrap().port(), status: Arc::default() };
        let app = Router::new().fallback(Self::reply).with_state(node.clone());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        node
    }

    fn answer_with(&self, status: StatusCode) {
        *self.status.lock().unwrap() = status;
    }

    async fn reply(
        State(node): State<Self>,
        Json(body): Json<Value>,
    ) -> Result<Json<Value>, (StatusCode, &'static str)> {
        let status = *node.status.lock().unwrap();
        if status != StatusCode::OK {
            return Err((status, "the project s3cret is unknown"));
        }
        let block = json!({ "number": format!("{HEAD:#x}"), "transactions": [] });
        Ok(Json(match body["method"].as_str().unwrap() {
            "eth_chainId" => json!({ "result": "0x7a69" }),
            "eth_getBlockByNumber" => json!({ "result": block }),
            method => json!({ "error": { "code": -32_601, "message": format!("no {method}") } }),
        }))
    }
}

/// Direct transactions do not need the chain, so that its outage takes no process out of service.
#[tokio::test]
async fn health_says_that_the_chain_does_not_answer_and_why_and_stays_200() {
    let node = Node::start().await;
    let url = |port: u16| format!("http://user:s3cret@127.0.0.1:{port}/v3/s3cret?token=s3cret");
    let urls = format!("{},{}", url(free_port()), url(node.port));
    let relay = RelaySetup::relayers(1).env("RPC_URL", urls).env("CHAIN_ID", "31337").start().await;
    relay.until_relayer(0, "ok").await;
    let until_chain = async |status: &str| {
        eventually_ok(SOON, format!("the chain to be {status}"), || async {
            let (code, health) = relay.get("/health").await;
            assert!(!health.to_string().contains("s3cret") && !health.to_string().contains("v3"), "{health}");
            assert_eq!((code, &health["status"]), (200, &json!("ok")), "{health}");
            let chain = health["parts"]["chain"].clone();
            if chain["status"] == status { Ok(chain) } else { Err(health) }
        })
        .await
    };
    let chain = until_chain("ok").await;
    let [first, second] = &chain["endpoints"].as_array().unwrap()[..] else { panic!("{chain}") };
    assert_eq!((&chain["head"], &chain["lastAnswerAt"]), (&json!(HEAD), &second["lastAnswerAt"]), "{chain}");
    assert_eq!(
        (&first["place"], &first["status"], &first["lastAnswerAt"]),
        (&json!(1), &json!("unavailable"), &Value::Null)
    );
    assert!(first["reason"].as_str().unwrap().contains("connection refused"), "{first}");
    assert_eq!((&second["place"], &second["status"], &second["reason"]), (&json!(2), &json!("ok"), &Value::Null));

    node.answer_with(StatusCode::UNAUTHORIZED);
    let chain = until_chain("unavailable").await;
    assert!(chain["endpoints"][1]["reason"].as_str().unwrap().contains("the key in RPC_URL (status 401)"), "{chain}");
    assert!(chain["head"] == HEAD && chain["lastAnswerAt"].is_string(), "what was known last: {chain}");
    assert_eq!(relay.get("/ready").await.0, 200);
    relay.send_serial(1).await;

    node.answer_with(StatusCode::OK);
    until_chain("ok").await;
}

#[tokio::test]
async fn one_message_has_one_id_in_the_log() {
    let relay = RelaySetup::relayers(1).env("LOG_LEVEL", "debug").start().await;
    relay.relayers[0].set_faults(Faults::every(PostFault::Refused("never".into())));
    let id = relay.send_serial(1).await;
    relay.until_status(&id, "failed").await;
    let lines = eventually(SOON, "the line of the dead letter", || async {
        let lines: Vec<Value> = relay.api.output().lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let dead = |line: &Value| line["message"].as_str().is_some_and(|text| text.contains("dead-letter queue"));
        lines.iter().any(dead).then_some(lines)
    })
    .await;
    let mut ids: Vec<_> = lines.iter().filter_map(|line| line["messageId"].as_str()).collect();
    assert!(ids.len() > 2, "{lines:?}");
    ids.dedup();
    assert_eq!(ids.len(), 1, "{lines:?}");
    let texts = lines.iter().filter_map(|line| line["message"].as_str());
    assert!(texts.into_iter().all(|text| !text.contains("Dead {")), "{lines:?}");
}
