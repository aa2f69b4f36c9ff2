//! A node that can be deaf or dumb where it matters: only what sends a transaction is held back, or loses its answer. It
//! counts what it is asked.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use harness::chain::Chain;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// What becomes of a transaction that is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sends {
    /// The chain gets it and answers.
    Pass,
    /// The chain never hears of it.
    HeldBack,
    /// The chain gets it, and its answer is lost.
    Unanswered,
}

/// Stands before a chain's JSON-RPC.
pub struct Gate {
    url: String,
    state: Arc<Inner>,
    server: JoinHandle<()>,
}

struct Inner {
    chain: String,
    http: reqwest::Client,
    sends: Mutex<Sends>,
    /// Bodies of sends, whatever became of them.
    seen: Mutex<Vec<String>>,
    /// How often each method came by.
    asked: Mutex<BTreeMap<String, usize>>,
}

impl Gate {
    pub async fn before(chain: &Chain) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(Inner {
            chain: chain.url().to_owned(),
            http: harness::http_client(),
            sends: Mutex::new(Sends::Pass),
            seen: Mutex::default(),
            asked: Mutex::default(),
        });
        let router = Router::new().route("/", post(pass)).with_state(Arc::clone(&state));
        let server = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { url, state, server }
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    pub fn set(&self, sends: Sends) {
        *self.state.sends.lock().unwrap() = sends;
    }

    /// How often it was asked that.
    pub fn asked(&self, method: &str) -> usize {
        self.state.asked.lock().unwrap().get(method).copied().unwrap_or_default()
    }

    /// The signed transactions that came by, each once.
    pub fn transactions(&self) -> Vec<String> {
        let mut seen = self.state.seen.lock().unwrap().clone();
        seen.sort();
        seen.dedup();
        seen
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn pass(State(gate): State<Arc<Inner>>, body: Bytes) -> Response {
    let question: serde_json::Value = serde_json::from_slice(&body).unwrap();
    let method = question["method"].as_str().unwrap();
    *gate.asked.lock().unwrap().entry(method.to_owned()).or_default() += 1;
    let is_send = method == "eth_sendRawTransaction";
    let sends = if is_send { *gate.sends.lock().unwrap() } else { Sends::Pass };
    if is_send {
        gate.seen.lock().unwrap().push(question["params"][0].as_str().unwrap().to_owned());
    }
    if sends == Sends::HeldBack {
        return StatusCode::BAD_GATEWAY.into_response();
    }
    let asked = gate.http.post(&gate.chain).header("content-type", "application/json").body(body).send();
    let answer = asked.await.unwrap().bytes().await.unwrap();
    match sends {
        Sends::Unanswered => StatusCode::BAD_GATEWAY.into_response(),
        _ => ([("content-type", "application/json")], answer).into_response(),
    }
}
