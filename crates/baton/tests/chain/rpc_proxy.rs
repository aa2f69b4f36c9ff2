//! A proxy in front of a chain's JSON-RPC. It can drop `eth_sendRawTransaction` or its answer, hold back the requests of
//! one method, or answer in the node's place by a rule; it passes everything else, and counts requests by method.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use harness::chain::Chain;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Fault of `eth_sendRawTransaction`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendFault {
    None,
    /// The request does not reach the chain.
    Dropped,
    /// The chain gets the request, and its answer is lost.
    AnswerLost,
}

/// What a node does wrong with one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeFault {
    /// It answers with a JSON-RPC error of this code and text.
    Error(i64, &'static str),
    /// It never answers.
    Silent,
}

/// Chooses the fault of a request by its method and parameters.
type NodeRule = Arc<dyn Fn(&str, &Value) -> Option<NodeFault> + Send + Sync>;

/// A running proxy. Dropping it stops it.
pub struct RpcProxy {
    url: String,
    state: Arc<Inner>,
    server: JoinHandle<()>,
}

struct Inner {
    chain: String,
    http: reqwest::Client,
    fault: Mutex<SendFault>,
    rule: Mutex<NodeRule>,
    /// The method whose requests are held back.
    held: watch::Sender<Option<&'static str>>,
    /// Signed transactions of all send requests, dropped ones included.
    sent: Mutex<Vec<String>>,
    /// Number of requests by method.
    requests: Mutex<BTreeMap<String, usize>>,
}

impl RpcProxy {
    pub async fn start(chain: &Chain) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(Inner {
            chain: chain.url().to_owned(),
            http: harness::http_client(),
            fault: Mutex::new(SendFault::None),
            rule: Mutex::new(Arc::new(|_: &str, _: &Value| None)),
            held: watch::Sender::new(None),
            sent: Mutex::default(),
            requests: Mutex::default(),
        });
        let router = Router::new().route("/", post(forward)).with_state(Arc::clone(&state));
        let server = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { url, state, server }
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    pub fn set(&self, fault: SendFault) {
        *self.state.fault.lock().unwrap() = fault;
    }

    /// Answers by this rule from now on, in the node's place.
    pub fn set_rule(&self, rule: impl Fn(&str, &Value) -> Option<NodeFault> + Send + Sync + 'static) {
        *self.state.rule.lock().unwrap() = Arc::new(rule);
    }

    /// Holds back requests with this method, without an answer, until this is called again.
    pub fn hold(&self, method: Option<&'static str>) {
        self.state.held.send_replace(method);
    }

    /// The number of requests with this method.
    pub fn request_count(&self, method: &str) -> usize {
        self.requests().get(method).copied().unwrap_or_default()
    }

    /// The number of requests by method.
    pub fn requests(&self) -> BTreeMap<String, usize> {
        self.state.requests.lock().unwrap().clone()
    }

    /// The distinct signed transactions in all send requests.
    pub fn signed_transactions(&self) -> Vec<String> {
        let mut sent = self.state.sent.lock().unwrap().clone();
        sent.sort();
        sent.dedup();
        sent
    }
}

impl Drop for RpcProxy {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn forward(State(rpc): State<Arc<Inner>>, body: Bytes) -> Response {
    let request: Value = serde_json::from_slice(&body).unwrap();
    let method = request["method"].as_str().unwrap();
    *rpc.requests.lock().unwrap().entry(method.to_owned()).or_default() += 1;
    let rule = Arc::clone(&rpc.rule.lock().unwrap());
    match rule(method, &request["params"]) {
        None => {}
        Some(NodeFault::Silent) => std::future::pending().await,
        Some(NodeFault::Error(code, message)) => {
            let error = json!({ "code": code, "message": message });
            let answer = json!({ "jsonrpc": "2.0", "id": request["id"], "error": error });
            return ([("content-type", "application/json")], answer.to_string()).into_response();
        }
    }
    let _ = rpc.held.subscribe().wait_for(|held| *held != Some(method)).await;
    let is_send = method == "eth_sendRawTransaction";
    let fault = if is_send { *rpc.fault.lock().unwrap() } else { SendFault::None };
    if is_send {
        rpc.sent.lock().unwrap().push(request["params"][0].as_str().unwrap().to_owned());
    }
    if fault == SendFault::Dropped {
        return StatusCode::BAD_GATEWAY.into_response();
    }
    let forwarded = rpc.http.post(&rpc.chain).header("content-type", "application/json").body(body).send();
    let answer = forwarded.await.unwrap().bytes().await.unwrap();
    match fault {
        SendFault::AnswerLost => StatusCode::BAD_GATEWAY.into_response(),
        _ => ([("content-type", "application/json")], answer).into_response(),
    }
}
