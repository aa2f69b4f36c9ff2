//! Runs the relay lane for a test: simulated relayers, a data directory, and `baton` in one process or in two.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use harness::engine::{EngineSetup, TestEngine};
use harness::ledger::EffectLedger;
use harness::ports::free_port;
use harness::process::{Process, Program};
use harness::proxy::Proxy;
use harness::relayer::{Faults, Relayer, RelayerOptions};
use harness::servers::Servers;
use harness::wait::{eventually, eventually_ok};
use serde_json::{Value, json};

/// Deadline of a wait, long enough for a busy machine. A passing test does not wait for it.
pub const SOON: Duration = Duration::from_secs(30);
/// Deadline of a wait for thousands of transactions.
pub const LATER: Duration = Duration::from_secs(120);
pub const API_KEY: &str = "test-key-of-more-than-32-characters";
pub const WEBHOOK_KEY: &str = "whsec-0123456789abcdef0123456789abcdef";
pub const TO: &str = "0x5FbDB2315678afecb367f032d93F642f64180aa3";

/// A change of a relayer's faults before `baton` starts.
type FaultChange = Box<dyn FnOnce(&mut Faults) + Send>;

/// Settings of a fixture.
pub struct RelaySetup {
    relayers: Vec<RelayerOptions>,
    faults: Vec<(usize, FaultChange)>,
    env: BTreeMap<String, String>,
    links: BTreeMap<String, u16>,
    api_links: BTreeMap<String, u16>,
    engine: TestEngine,
    setup: Option<EngineSetup>,
    split: bool,
    webhooks: bool,
}

impl RelaySetup {
    /// `count` equal relayers, and timings short enough for a test.
    pub fn relayers(count: usize) -> Self {
        let env = [
            ("LOG_LEVEL", "info"),
            ("RELAYER_HEALTH_INTERVAL_MS", "200"),
            ("RELAYER_RATE_PER_SECOND", "0"),
            ("RELAYER_MAX_IN_FLIGHT", "100000"),
            ("RELAYER_SUBMIT_TIMEOUT_MS", "2000"),
            ("RELAYER_HANDLER_TIMEOUT_MS", "2000"),
            // Baton and the simulated relayers share one clock.
            ("RELAYER_CLOCK_SKEW_MS", "1"),
            ("RECONCILE_INTERVAL_MS", "100"),
            ("RECONCILE_UNKNOWN_MS", "200"),
            ("RECONCILE_ABSENT_MS", "500"),
            ("CONSUMER_DEAD_AFTER_MS", "2000"),
            ("BREAKER_OPEN_MS", "500"),
            ("RETRY_FIRST_DELAY_MS", "50"),
            ("AUTO_REPLAY_DELAY_MS", "300"),
        ];
        Self {
            relayers: (1..=count).map(|number| RelayerOptions::new(format!("relayer-{number}"))).collect(),
            faults: Vec::new(),
            env: env.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
            links: BTreeMap::new(),
            api_links: BTreeMap::new(),
            engine: TestEngine::from_env(),
            setup: None,
            split: false,
            webhooks: true,
        }
    }

    /// Sets a variable for all processes.
    pub fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.env.insert(name.to_owned(), value.into());
        self
    }

    /// On this engine, whatever `BATON_TEST_ENGINE` says.
    pub fn engine(mut self, engine: TestEngine) -> Self {
        self.engine = engine;
        self
    }

    /// On these servers instead of the shared ones.
    pub fn on(mut self, servers: &Servers) -> Self {
        self.setup = Some(TestEngine::set_up_on(servers));
        self
    }

    /// Makes all processes reach the server in this variable through `link`.
    pub fn behind(mut self, name: &str, link: &Proxy) -> Self {
        self.links.insert(name.to_owned(), link.port());
        self
    }

    /// Makes only the API reach the server in this variable through `link`.
    pub fn api_behind(mut self, name: &str, link: &Proxy) -> Self {
        self.api_links.insert(name.to_owned(), link.port());
        self
    }

    /// Runs the API and the consumer as two processes on one data directory.
    pub fn split(mut self) -> Self {
        self.split = true;
        self
    }

    /// Relayers that send no webhooks.
    pub fn no_webhooks(mut self) -> Self {
        self.webhooks = false;
        self
    }

    /// Changes one relayer's options.
    pub fn relayer(mut self, index: usize, change: impl FnOnce(&mut RelayerOptions)) -> Self {
        change(&mut self.relayers[index]);
        self
    }

    /// Changes one relayer's faults before `baton` starts.
    pub fn faults(mut self, index: usize, change: impl FnOnce(&mut Faults) + Send + 'static) -> Self {
        self.faults.push((index, Box::new(change)));
        self
    }

    /// Starts everything and waits until it is ready.
    pub async fn start(self) -> RelayFixture {
        let directory = tempfile::tempdir().unwrap();
        let engine = self.setup.unwrap_or_else(|| self.engine.set_up());
        let port = free_port();
        let base = format!("http://127.0.0.1:{port}");
        let mut relayers = Vec::new();
        for options in self.relayers {
            let options = if self.webhooks {
                options.webhook(format!("{base}/api/v1/webhooks/oz-relayer"), WEBHOOK_KEY)
            } else {
                options
            };
            relayers.push(Relayer::start(options).await);
        }
        for (index, change) in self.faults {
            relayers[index].change_faults(change);
        }
        let mut env = self.env;
        for (name, value) in &engine.vars {
            env.entry(name.clone()).or_insert_with(|| value.clone());
        }
        for (name, port) in self.links {
            let url = with_port(&env[&name], port);
            env.insert(name, url);
        }
        let list = |part: &dyn Fn(&Relayer) -> String| relayers.iter().map(part).collect::<Vec<_>>().join(",");
        env.insert("BATON_DATA_DIR".into(), directory.path().display().to_string());
        env.insert("OZ_RELAYER_URLS".into(), list(&|relayer| relayer.url()));
        env.insert("OZ_RELAYER_API_KEY".into(), list(&|relayer| relayer.api_key().to_owned()));
        env.insert("RELAY_API_KEY".into(), API_KEY.into());
        env.insert("WEBHOOK_SIGNING_KEY".into(), WEBHOOK_KEY.into());
        let service = if self.split { "relay-api" } else { "serve" };
        let mut api_env = env.clone();
        for (name, port) in self.api_links {
            let url = with_port(&env[&name], port);
            api_env.insert(name, url);
        }
        let api = baton([service], &api_env).env("PORT", port.to_string()).start().unwrap();
        let mut relay = RelayFixture {
            _directory: directory,
            _engine: engine,
            engine: self.engine,
            relayers,
            env,
            base,
            api,
            consumers: Vec::new(),
            consumer_bases: Vec::new(),
            http: harness::http_client(),
        };
        relay.api_ready().await;
        if self.split {
            relay.add_consumer().await;
        }
        relay
    }
}

/// The URL with its port replaced.
fn with_port(url: &str, port: u16) -> String {
    let mut url = reqwest::Url::parse(url).unwrap();
    url.set_port(Some(port)).unwrap();
    url.to_string()
}

/// A program that runs the binary under test with these variables.
pub fn baton<const N: usize>(args: [&str; N], env: &BTreeMap<String, String>) -> Program {
    Program::new(PathBuf::from(env!("CARGO_BIN_EXE_baton"))).args(args).envs(env.clone())
}

/// The first serial number of the warm-up's transactions.
pub const WARM_UP: usize = 0xffff_0000;

/// Running relayers and `baton` processes. Dropping it stops them.
pub struct RelayFixture {
    /// Removed on drop.
    _directory: tempfile::TempDir,
    _engine: EngineSetup,
    pub engine: TestEngine,
    pub relayers: Vec<Relayer>,
    pub env: BTreeMap<String, String>,
    pub base: String,
    pub api: Process,
    pub consumers: Vec<Process>,
    pub consumer_bases: Vec<String>,
    pub http: reqwest::Client,
}

impl RelayFixture {
    pub async fn api_ready(&mut self) {
        self.api.wait_ready(&format!("{}/ready", self.base), SOON).await.unwrap();
    }

    /// Starts one more consumer process on the same data.
    pub async fn add_consumer(&mut self) {
        let port = free_port();
        let base = format!("http://127.0.0.1:{port}");
        let mut consumer = baton(["queue-consumer"], &self.env).env("PORT", port.to_string()).start().unwrap();
        consumer.wait_ready(&format!("{base}/ready"), SOON).await.unwrap();
        self.consumer_bases.push(base);
        self.consumers.push(consumer);
    }

    /// A request with the API key.
    pub fn request(&self, method: reqwest::Method, path: &str) -> reqwest::RequestBuilder {
        self.http.request(method, format!("{}{path}", self.base)).header("x-api-key", API_KEY).timeout(SOON)
    }

    pub async fn get(&self, path: &str) -> (u16, Value) {
        answer(self.request(reqwest::Method::GET, path)).await
    }

    /// Confirms transactions until every relayer has one. A proof of absence needs an older record in the relayer's list.
    pub async fn warm_up(&self) {
        let mut serial = WARM_UP;
        while self.relayers.iter().any(|relayer| relayer.accepted().is_empty()) {
            let id = self.send_serial(serial).await;
            self.until_status(&id, "confirmed").await;
            serial += 1;
        }
    }

    /// Posts to `/relay/direct`; returns status and body.
    pub async fn post(&self, body: &Value) -> (u16, Value) {
        answer(self.request(reqwest::Method::POST, "/api/v1/relay/direct").json(body)).await
    }

    /// Sends a transaction that must be accepted; returns its id.
    pub async fn send(&self, body: &Value) -> String {
        let (status, answer) = self.post(body).await;
        assert_eq!(status, 202, "{answer}");
        answer["transactionId"].as_str().unwrap().to_owned()
    }

    /// Sends the transaction with this serial number, which its `data` carries.
    pub async fn send_serial(&self, serial: usize) -> String {
        self.send(&serial_body(serial)).await
    }

    /// Sends these transactions, 64 at a time; returns id and `data` of each.
    pub async fn send_many(&self, serials: std::ops::Range<usize>) -> Vec<(String, String)> {
        let mut sent = Vec::new();
        for chunk in serials.collect::<Vec<_>>().chunks(64) {
            let posts =
                chunk.iter().map(|serial| async move { (self.send_serial(*serial).await, serial_data(*serial)) });
            sent.extend(futures::future::join_all(posts).await);
        }
        sent
    }

    pub async fn status(&self, id: &str) -> Value {
        let (status, body) = self.get(&format!("/api/v1/relay/status/{id}")).await;
        assert_eq!(status, 200, "{body}");
        body
    }

    /// Waits until the transaction has the status `wanted`.
    pub async fn until_status(&self, id: &str, wanted: &str) -> Value {
        eventually_ok(SOON, format!("{id} to be {wanted}"), || async {
            let body = self.status(id).await;
            if body["status"] == wanted { Ok(body) } else { Err(body.to_string()) }
        })
        .await
    }

    /// Waits until no transaction is pending or submitted.
    pub async fn until_all_final(&self, deadline: Duration) {
        eventually_ok(deadline, "every transaction to be final", || async {
            let (_, health) = self.get("/health").await;
            let open = &health["parts"]["store"]["open"];
            if open["pending"] == 0 && open["submitted"] == 0 { Ok(()) } else { Err(health.to_string()) }
        })
        .await;
    }

    /// Compares accepted transactions with the relayers' records, without the warm-up.
    pub fn books(&self, sent: impl IntoIterator<Item = (String, String)>) -> EffectLedger {
        let mut books = EffectLedger::compare(sent, &self.relayers, |accepted| accepted.field("data"));
        books.extras.retain(|(key, _)| *key < serial_data(WARM_UP));
        books
    }

    /// The number of transactions with this status.
    pub async fn count(&self, status: &str) -> usize {
        let mut count = 0;
        let mut cursor = String::new();
        loop {
            let (_, page) = self.get(&format!("/api/v1/relay/transactions?status={status}&limit=200{cursor}")).await;
            count += page["transactions"].as_array().unwrap().len();
            match page["nextCursor"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => return count,
            }
        }
    }

    /// Runs a command of the binary on the same data; returns its exit code and output.
    pub async fn command<const N: usize>(&self, args: [&str; N]) -> (i32, String) {
        let mut env = self.env.clone();
        for name in ["OZ_RELAYER_URLS", "OZ_RELAYER_API_KEY", "RELAY_API_KEY", "WEBHOOK_SIGNING_KEY"] {
            env.remove(name);
        }
        let mut process = baton(args, &env).start().unwrap();
        let status = process.wait_exit(SOON).await.unwrap();
        (status.code().unwrap_or(-1), process.output())
    }

    /// Resolves an unknown outcome as an operator does: repeats the command while it answers that the submission may still
    /// arrive.
    pub async fn resolve(&self, id: &str, how: &str) {
        eventually_ok(SOON, format!("{id} to be resolved"), || async {
            let (code, output) = self.command(["tx", "resolve", id, how]).await;
            if code == 0 { Ok(()) } else { Err(output) }
        })
        .await;
    }

    /// Posts a transaction to a relayer directly; returns the relayer's id.
    pub async fn post_at_relayer(&self, index: usize, data: &str) -> String {
        let relayer = &self.relayers[index];
        let url = format!("{}/api/v1/relayers/{}/transactions", relayer.url(), relayer.id());
        let body = json!({ "to": TO, "value": "3", "data": data, "speed": "fast" });
        let (_, record) = answer(self.http.post(url).bearer_auth(relayer.api_key()).json(&body)).await;
        record["data"]["id"].as_str().unwrap().to_owned()
    }

    /// A metric of the API process, summed over the series whose labels contain `label`.
    pub async fn metric(&self, name: &str, label: &str) -> f64 {
        metric(&self.http, &self.base, name, label).await
    }

    /// The same of a consumer process.
    pub async fn consumer_metric(&self, which: usize, name: &str, label: &str) -> f64 {
        metric(&self.http, &self.consumer_bases[which], name, label).await
    }

    /// The state of one relayer according to `/health`.
    pub async fn relayer_state(&self, index: usize) -> String {
        let (_, health) = self.get("/health").await;
        let url = self.relayers[index].url();
        let each = health["parts"]["relayers"]["each"].as_array().unwrap();
        let found = each.iter().find(|relayer| relayer["url"] == url.as_str()).unwrap();
        found["status"].as_str().unwrap().to_owned()
    }

    /// Waits until `/health` shows this state for one relayer.
    pub async fn until_relayer(&self, index: usize, state: &str) {
        eventually(SOON, format!("relayer {index} to be {state}"), || async {
            (self.relayer_state(index).await == state).then_some(())
        })
        .await;
    }
}

/// Sends a request; returns status and body.
pub async fn answer(request: reqwest::RequestBuilder) -> (u16, Value) {
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

/// A metric of the process at `base`, summed over the series whose labels contain `label`.
pub async fn metric(http: &reqwest::Client, base: &str, name: &str, label: &str) -> f64 {
    let text = http.get(format!("{}/metrics", harness::admin_url(base))).send().await.unwrap().text().await.unwrap();
    let lines = text.lines().filter(|line| line.starts_with(name) && line.contains(label));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// A body whose `data` carries a serial number; the relayer receives `data` unchanged.
pub fn serial_body(serial: usize) -> Value {
    json!({ "to": TO, "value": "1", "data": serial_data(serial), "gas": 60000, "speed": "fast" })
}

pub fn serial_data(serial: usize) -> String {
    format!("0x{serial:08x}")
}
