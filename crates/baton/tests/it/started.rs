//! A process of both lanes that a test starts while one of its servers is away.

use std::collections::BTreeMap;

use harness::ports::free_port;
use harness::process::Process;
use harness::wait::eventually_ok;
use serde_json::Value;

use crate::relay_fixture::{API_KEY, SOON, answer, baton};

/// A process with its own port and data directory.
pub struct Started {
    pub process: Process,
    base: String,
    http: reqwest::Client,
    _directory: tempfile::TempDir,
}

impl Started {
    /// Starts `serve` and waits until it listens.
    pub async fn serve(env: &BTreeMap<String, String>, variable: &str, url: &str) -> Self {
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

    pub async fn get(&self, path: &str) -> (u16, Value) {
        answer(self.http.get(format!("{}{path}", self.base)).header("x-api-key", API_KEY)).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        answer(self.http.post(format!("{}{path}", self.base)).header("x-api-key", API_KEY).json(body)).await
    }

    /// Waits until this lane is open: its part of `/health` does not say `starting`.
    pub async fn until_open(&self, lane: &str) {
        eventually_ok(SOON, "the lane to open", || async {
            let (_, health) = self.get("/health").await;
            if health["parts"][lane]["status"] == "starting" { Err(health.to_string()) } else { Ok(()) }
        })
        .await;
    }

    /// Waits until every lane is open and its servers answer.
    pub async fn until_ready(&self) {
        eventually_ok(SOON, "the process to be ready", || async {
            let (status, ready) = self.get("/ready").await;
            if status == 200 { Ok(()) } else { Err(ready.to_string()) }
        })
        .await;
    }

    /// Waits until this transaction is confirmed.
    pub async fn until_confirmed(&self, id: &str) {
        eventually_ok(SOON, "the transaction to be confirmed", || async {
            let (_, shown) = self.get(&format!("/api/v1/relay/status/{id}")).await;
            if shown["status"] == "confirmed" { Ok(()) } else { Err(shown.to_string()) }
        })
        .await;
    }

    /// Waits until the log names the server that is awaited.
    pub async fn until_waiting(&self, server: &str) {
        eventually_ok(SOON, "the log to name the server", || async {
            let output = self.process.output();
            if output.contains("waiting_for_server") && output.contains(server) { Ok(()) } else { Err(output) }
        })
        .await;
        assert_eq!(self.get("/live").await.0, 200);
        assert_eq!(self.get("/ready").await.0, 503);
    }
}
