//! Runs the relay lane on a real chain for a test: three development relayers that sign, in one process, and `baton` in
//! one process or in two.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use alloy_primitives::{Address, U256};
use harness::chain::{Chain, PrivateKeySigner, key_text};
use harness::ports::{free_port, free_row};
use harness::process::{Process, Program};
use harness::wait::eventually_ok;
use serde_json::{Value, json};

use crate::relay_fixture;

/// Deadline of a wait, long enough for a busy machine. A passing test does not wait for it.
pub const SOON: Duration = Duration::from_secs(30);
/// Deadline of a wait that includes restarts or outages.
pub const LATER: Duration = Duration::from_secs(120);
pub const API_KEY: &str = "test-key-of-more-than-32-characters";
pub const RELAYER_KEY: &str = "relayers-of-the-chain-tests-0123456789";
const WEBHOOK_KEY: &str = "whsec-0123456789abcdef0123456789abcdef";
pub const RELAYERS: u16 = 3;

/// Settings of a fixture.
pub struct ChainSetup {
    chain: Chain,
    rpc: String,
    env: BTreeMap<String, String>,
    split: bool,
}

impl ChainSetup {
    pub fn on(chain: &Chain) -> Self {
        let env = [
            ("LOG_LEVEL", "info"),
            ("RELAYER_HEALTH_INTERVAL_MS", "200"),
            ("RELAYER_RATE_PER_SECOND", "0"),
            ("RELAYER_CLOCK_SKEW_MS", "1"),
            ("RECONCILE_INTERVAL_MS", "100"),
            ("RECONCILE_UNKNOWN_MS", "200"),
            ("RECONCILE_ABSENT_MS", "500"),
            // A relayer killed in its first submission shows nothing from before: only the chain and time settle that.
            ("RECONCILE_UNPROVEN_MS", "10000"),
            ("RELAYER_SUBMIT_TIMEOUT_MS", "2000"),
            ("RELAYER_HANDLER_TIMEOUT_MS", "2000"),
            ("CONSUMER_DEAD_AFTER_MS", "2000"),
            ("BREAKER_OPEN_MS", "500"),
        ];
        let mut env: BTreeMap<_, _> =
            env.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        env.insert("RPC_URL".to_owned(), chain.url().to_owned());
        Self { chain: chain.clone(), rpc: chain.url().to_owned(), env, split: false }
    }

    /// Makes the relayers reach the chain at this URL.
    pub fn rpc(mut self, url: impl Into<String>) -> Self {
        self.rpc = url.into();
        self
    }

    /// Runs the API and the consumer as two processes on one data directory.
    pub fn split(mut self) -> Self {
        self.split = true;
        self
    }

    /// Sets a variable for the `baton` processes.
    pub fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.env.insert(name.to_owned(), value.into());
        self
    }

    /// Starts everything and waits until it is ready.
    pub async fn start(self) -> ChainFixture {
        let directory = tempfile::tempdir().unwrap();
        let (port, first) = (free_port(), free_row(RELAYERS));
        let base = format!("http://127.0.0.1:{port}");
        let mut keys = Vec::new();
        for _ in 0..RELAYERS {
            keys.push(self.chain.funded_key().await);
        }
        let relayers = baton()
            .args(["dev-relayers", "--port", &first.to_string(), "--rpc", &self.rpc])
            .args(["--webhook-url", &format!("{base}/api/v1/webhooks/oz-relayer"), "--webhook-key", WEBHOOK_KEY])
            .args(["--api-key", RELAYER_KEY, "--data-dir", &directory.path().join("relayers").display().to_string()])
            .env("BATON_DEV_KEYS", keys.iter().map(key_text).collect::<Vec<_>>().join(","))
            .env("LOG_LEVEL", "info")
            .start()
            .unwrap();
        let relayer_urls: Vec<String> =
            (first..first + RELAYERS).map(|port| format!("http://127.0.0.1:{port}")).collect();
        let mut env = self.env;
        env.insert("BATON_DATA_DIR".into(), directory.path().join("baton").display().to_string());
        env.insert("OZ_RELAYER_URLS".into(), relayer_urls.join(","));
        env.insert("OZ_RELAYER_API_KEY".into(), RELAYER_KEY.into());
        env.insert("RELAY_API_KEY".into(), API_KEY.into());
        env.insert("WEBHOOK_SIGNING_KEY".into(), WEBHOOK_KEY.into());
        let service = if self.split { "relay-api" } else { "serve" };
        let mut api = baton().arg(service).envs(env.clone()).env("PORT", port.to_string()).start().unwrap();
        api.wait_ready(&format!("{base}/ready"), SOON).await.unwrap();
        let consumer = self
            .split
            .then(|| baton().arg("queue-consumer").envs(env).env("PORT", free_port().to_string()).start().unwrap());
        let http = harness::http_client();
        let mut relay = ChainFixture {
            _directory: directory,
            chain: self.chain,
            keys,
            relayer_urls,
            relayers,
            base,
            api,
            consumer,
            http,
        };
        relay.relayers_ready().await;
        relay
    }
}

/// The binary under test.
pub fn baton() -> Program {
    Program::new(PathBuf::from(env!("CARGO_BIN_EXE_baton")))
}

/// Running relayers and `baton` processes. Dropping it stops them.
pub struct ChainFixture {
    /// Removed on drop.
    _directory: tempfile::TempDir,
    pub chain: Chain,
    /// The relayers' signing keys, in their order.
    pub keys: Vec<PrivateKeySigner>,
    pub relayer_urls: Vec<String>,
    pub relayers: Process,
    pub base: String,
    pub api: Process,
    /// With [`ChainSetup::split`].
    pub consumer: Option<Process>,
    pub http: reqwest::Client,
}

impl ChainFixture {
    /// Waits until all relayers listen.
    pub async fn relayers_ready(&mut self) {
        for url in &self.relayer_urls {
            self.relayers.wait_ready(&format!("{url}/api/v1/health"), SOON).await.unwrap();
        }
    }

    /// Posts to `/relay/{kind}`; returns status and body.
    pub async fn post(&self, kind: &str, body: &Value) -> (u16, Value) {
        let url = format!("{}/api/v1/relay/{kind}", self.base);
        answer(self.http.post(url).header("x-api-key", API_KEY).json(body)).await
    }

    /// Sends a direct transaction that must be accepted; returns its id.
    pub async fn send(&self, to: Address, value: U256, data: &[u8]) -> String {
        let data = format!("0x{}", hex::encode(data));
        let body = json!({ "to": to.to_string(), "value": value.to_string(), "data": data, "speed": "fast" });
        let (status, answer) = self.post("direct", &body).await;
        assert_eq!(status, 202, "{answer}");
        answer["transactionId"].as_str().unwrap().to_owned()
    }

    pub async fn get(&self, path: &str) -> (u16, Value) {
        answer(self.http.get(format!("{}{path}", self.base)).header("x-api-key", API_KEY)).await
    }

    pub async fn status(&self, id: &str) -> Value {
        let (status, body) = self.get(&format!("/api/v1/relay/status/{id}")).await;
        assert_eq!(status, 200, "{body}");
        body
    }

    /// Waits until the transaction has the status `wanted`.
    pub async fn until_status(&self, id: &str, wanted: &str) -> Value {
        eventually_ok(LATER, format!("{id} to be {wanted}"), || async {
            let body = self.status(id).await;
            if body["status"] == wanted { Ok(body) } else { Err(format!("{body}\n{}", self.process_logs())) }
        })
        .await
    }

    /// Waits until the status has a block number.
    pub async fn until_block(&self, id: &str) -> Value {
        eventually_ok(LATER, format!("{id} to have a block"), || async {
            let body = self.status(id).await;
            if body["block_number"].is_u64() { Ok(body) } else { Err(format!("{body}\n{}", self.process_logs())) }
        })
        .await
    }

    /// Posts a transfer to a relayer directly; returns the relayer's id.
    pub async fn post_at_relayer(&self, index: usize, to: Address, value: u64) -> String {
        let body = json!({ "to": to.to_string(), "value": value.to_string(), "speed": "fast" });
        let url = self.relayer_path(index, "/transactions");
        let (status, record) = answer(self.http.post(url).bearer_auth(RELAYER_KEY).json(&body)).await;
        assert_eq!(status, 200, "{record}");
        record["data"]["id"].as_str().unwrap().to_owned()
    }

    /// The relayer's record of a transaction.
    pub async fn record(&self, index: usize, id: &str) -> Value {
        let url = self.relayer_path(index, &format!("/transactions/{id}"));
        let (status, record) = answer(self.http.get(url).bearer_auth(RELAYER_KEY)).await;
        assert_eq!(status, 200, "{record}");
        record["data"].clone()
    }

    /// Waits until the relayer's record has the status `wanted`.
    pub async fn until_record(&self, index: usize, id: &str, wanted: &str) -> Value {
        eventually_ok(LATER, format!("record {id} to be {wanted}"), || async {
            let record = self.record(index, id).await;
            if record["status"] == wanted { Ok(record) } else { Err(format!("{record}\n{}", self.process_logs())) }
        })
        .await
    }

    /// Waits until a relayer reports that it is enabled.
    pub async fn until_enabled(&self, index: usize) {
        eventually_ok(SOON, format!("relayer {index} to be enabled"), || async {
            let (_, relayer) = answer(self.http.get(self.relayer_path(index, "")).bearer_auth(RELAYER_KEY)).await;
            if relayer["data"]["system_disabled"] == false { Ok(()) } else { Err(relayer.to_string()) }
        })
        .await;
    }

    /// The ends of all processes' logs, for failure messages.
    pub fn process_logs(&self) -> String {
        let processes = [Some(&self.relayers), Some(&self.api), self.consumer.as_ref()];
        processes.into_iter().flatten().map(Process::log_excerpt).collect::<Vec<_>>().join("\n")
    }

    /// A metric of the API process, summed over the series whose labels contain `label`.
    pub async fn metric(&self, name: &str, label: &str) -> f64 {
        relay_fixture::metric(&self.http, &self.base, name, label).await
    }

    /// The number of mined transactions of all relayers together.
    pub async fn mined(&self) -> u64 {
        let mut sum = 0;
        for key in &self.keys {
            sum += self.chain.nonce(key.address()).await;
        }
        sum
    }

    fn relayer_path(&self, index: usize, path: &str) -> String {
        format!("{}/api/v1/relayers/dev-relayer-{}{path}", self.relayer_urls[index], index + 1)
    }
}

/// Sends a request with a timeout; returns status and body.
pub async fn answer(request: reqwest::RequestBuilder) -> (u16, Value) {
    relay_fixture::answer(request.timeout(SOON)).await
}
