//! `RPC_URL` without `CHAIN_ID`: the relayers and the other URLs must be on the chain of the URL that answers first. The nodes
//! are simulated.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Json, Router, routing};
use harness::wait::{eventually, eventually_ok};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::relay_fixture::{LATER, RelaySetup, SOON};

/// The chain of the simulated relayers.
const CHAIN_ID: u64 = 31_337;

/// A node of an empty chain. Dropping it stops it.
struct Node {
    url: String,
    state: Arc<Mutex<NodeState>>,
    server: JoinHandle<()>,
}

struct NodeState {
    chain_id: u64,
    /// It answers nothing.
    is_away: bool,
    /// The methods that it was asked.
    asked: BTreeSet<String>,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Node {
    async fn start(chain_id: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new(NodeState { chain_id, is_away: false, asked: BTreeSet::new() }));
        let app = Router::new().route("/", routing::post(reply)).with_state(Arc::clone(&state));
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { url, state, server }
    }

    fn asked(&self) -> Vec<String> {
        self.state.lock().unwrap().asked.iter().cloned().collect()
    }
}

async fn reply(State(state): State<Arc<Mutex<NodeState>>>, Json(body): Json<Value>) -> Result<Json<Value>, StatusCode> {
    let mut state = state.lock().unwrap();
    if state.is_away {
        return Err(StatusCode::SERVICE_UNAVAILABLE);
    }
    let method = body["method"].as_str().unwrap();
    state.asked.insert(method.to_owned());
    let now = time::OffsetDateTime::now_utc().unix_timestamp();
    let result = match method {
        "eth_chainId" => json!(format!("{:#x}", state.chain_id)),
        "eth_getTransactionCount" => json!("0x0"),
        "eth_getBlockByNumber" => json!({
            "number": "0x64", "hash": format!("0x{:064x}", 100), "timestamp": format!("{now:#x}"), "transactions": [],
        }),
        _ => Value::Null,
    };
    Ok(Json(json!({ "jsonrpc": "2.0", "id": body["id"], "result": result })))
}

#[tokio::test]
async fn without_a_chain_id_a_relayer_on_another_chain_than_rpc_url_is_on_the_wrong_network() {
    let node = Node::start(CHAIN_ID).await;
    // The wrong one is the first: by the relayers alone, the other one would be wrong.
    let relay = RelaySetup::relayers(2)
        .env("RPC_URL", &node.url)
        .relayer(0, |options| (options.chain_id, options.network) = (Some(1), "mainnet".to_owned()))
        .start()
        .await;
    relay.send_many(0..20).await;
    eventually(LATER, "the right relayer to take all", || async {
        (relay.relayers[1].accepted().len() == 20).then_some(())
    })
    .await;
    assert!(relay.relayers[0].accepted().is_empty());
    relay.until_relayer(0, "wrong network").await;
    relay.until_relayer(1, "ok").await;
    let (_, health) = relay.get("/health").await;
    let url = relay.relayers[0].url();
    let each = health["parts"]["relayers"]["each"].as_array().unwrap();
    let wrong = each.iter().find(|relayer| relayer["url"] == url.as_str()).unwrap();
    assert_eq!((&wrong["chainId"], &wrong["expectedChainId"]), (&json!(1), &json!(CHAIN_ID)), "{wrong}");
    assert!(relay.api.output().contains("relayer_wrong_network"), "the log says it");
}

#[tokio::test]
async fn a_second_rpc_url_on_another_chain_is_refused_and_named_in_the_log() {
    let (node, other) = (Node::start(CHAIN_ID).await, Node::start(2).await);
    let relay = RelaySetup::relayers(1)
        .env("RPC_URL", format!("{},{}", node.url, other.url))
        .env("RECONCILE_SUBMITTED_MS", "200")
        .start()
        .await;
    let logged = async |text: &str| {
        eventually_ok(SOON, format!("{text:?} in the log"), || async {
            let output = relay.api.output();
            if output.contains(text) { Ok(()) } else { Err(output) }
        })
        .await;
    };
    logged("chain_id_not_set").await;
    logged("chain_ready").await;
    node.state.lock().unwrap().is_away = true;
    // The relayer soon says confirmed, and only the second URL answers.
    relay.send_serial(1).await;
    logged("wrong_chain").await;
    logged("the chain at URL 2 of RPC_URL has the id 2, but that at another URL has 31337; it is not asked").await;
    assert_eq!(other.asked(), ["eth_chainId"]);
    relay.until_relayer(0, "ok").await;
    node.state.lock().unwrap().is_away = false;
    let (_, list) = relay.get("/api/v1/relay/transactions").await;
    assert_eq!(list["transactions"][0]["status"], "submitted", "{list}");
}
