//! Runs the users lane for a test: an API, consumers, and what they need: files, or a database and queues of their own on
//! PostgreSQL and RabbitMQ.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use harness::engine::server;
use harness::ports::free_port;
use harness::process::{Process, Program};
use harness::wait::eventually;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use uuid::Uuid;

/// Deadline of a wait, long enough for a busy machine. A passing test does not wait for it.
pub const SOON: Duration = Duration::from_secs(60);
/// Deadline of a wait for thousands of users.
pub const LATER: Duration = Duration::from_secs(240);
pub const API_KEY: &str = "test-key-of-more-than-32-characters";

/// The servers that a fixture runs on.
#[derive(Clone)]
pub struct Servers {
    pub amqp: String,
    /// The address of the server, without a database.
    pub postgres: String,
}

impl Servers {
    /// The servers that all tests share.
    pub fn shared() -> Self {
        Self { amqp: server("BATON_TEST_AMQP_URL"), postgres: server("BATON_TEST_POSTGRES_URL") }
    }
}

/// Settings of a fixture.
pub struct UsersSetup {
    servers: Option<Servers>,
    env: BTreeMap<String, String>,
    api_env: BTreeMap<String, String>,
}

impl UsersSetup {
    fn new(servers: Option<Servers>) -> Self {
        let env = [
            ("LOG_LEVEL", "info"),
            ("USERS_BATCH_TIMEOUT_MS", "50"),
            ("RETRY_TTL_MS", "300"),
            ("USERS_DLQ_INTERVAL_MS", "200"),
            ("USERS_DATABASE_TIMEOUT_MS", "3000"),
            ("REQUEST_TIMEOUT_MS", "6000"),
        ];
        let env = env.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        Self { servers, env, api_env: BTreeMap::new() }
    }

    /// Store and queue embedded, in files.
    pub fn embedded() -> Self {
        Self::new(None)
    }

    /// On these servers.
    pub fn on(servers: Servers) -> Self {
        Self::new(Some(servers))
    }

    /// Sets a variable for all processes.
    pub fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.env.insert(name.to_owned(), value.into());
        self
    }

    /// Sets a variable for the API only.
    pub fn api_env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.api_env.insert(name.to_owned(), value.into());
        self
    }

    /// Creates the database and starts the API, without a consumer.
    pub async fn start(self) -> UsersFixture {
        let directory = tempfile::tempdir().unwrap();
        let name = format!("baton_{}", Uuid::new_v4().simple());
        let mut env = self.env;
        env.insert("BATON_DATA_DIR".into(), directory.path().display().to_string());
        env.insert("RELAY_API_KEY".into(), API_KEY.into());
        let mut database = None;
        if let Some(servers) = &self.servers {
            let mut admin = PgConnection::connect(&servers.postgres).await.unwrap();
            sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&mut admin).await.unwrap();
            let mut url = reqwest::Url::parse(&servers.postgres).unwrap();
            url.set_path(&name);
            database = Some(url.to_string());
            env.entry("USERS_DATABASE_URL".into()).or_insert(url.to_string());
            env.entry("RABBITMQ_URL".into()).or_insert(servers.amqp.clone());
            env.entry("USERS_QUEUE_NAME".into()).or_insert(name.clone());
        }
        let port = free_port();
        let base = format!("http://127.0.0.1:{port}");
        let program = baton("users-api", &env).envs(self.api_env).env("PORT", port.to_string());
        let mut api = program.start().unwrap();
        api.wait_ready(&format!("{base}/ready"), SOON).await.unwrap();
        let http = harness::http_client();
        UsersFixture { _directory: directory, env, database, base, api, consumers: Vec::new(), http }
    }
}

/// A program that runs the binary under test with these variables.
pub fn baton(command: &str, env: &BTreeMap<String, String>) -> Program {
    Program::new(PathBuf::from(env!("CARGO_BIN_EXE_baton"))).arg(command).envs(env.clone())
}

/// The running processes, and how to reach them.
pub struct UsersFixture {
    _directory: tempfile::TempDir,
    pub env: BTreeMap<String, String>,
    /// The URL of the users' database, not through any link; `None` if it is a file.
    pub database: Option<String>,
    pub base: String,
    pub api: Process,
    pub consumers: Vec<(Process, String)>,
    pub http: reqwest::Client,
}

impl UsersFixture {
    /// Starts one more consumer and waits until it is ready.
    pub async fn add_consumer(&mut self) {
        let env = self.env.clone();
        self.add_consumer_with(&env).await;
    }

    /// Starts one more consumer with other variables and waits until it is ready.
    pub async fn add_consumer_with(&mut self, env: &BTreeMap<String, String>) {
        let port = free_port();
        let mut consumer = baton("users-consumer", env).env("PORT", port.to_string()).start().unwrap();
        let base = format!("http://127.0.0.1:{port}");
        consumer.wait_ready(&format!("{base}/ready"), SOON).await.unwrap();
        self.consumers.push((consumer, base));
    }

    pub fn request(&self, method: reqwest::Method, path: &str) -> reqwest::RequestBuilder {
        self.http.request(method, format!("{}{path}", self.base)).header("x-api-key", API_KEY)
    }

    pub async fn post(&self, body: &Value, key: Option<&str>) -> (u16, Value) {
        let mut request = self.request(reqwest::Method::POST, "/api/v1/users").json(body);
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        answer(request).await
    }

    /// Enrols one user; returns its id.
    pub async fn enrol(&self, number: usize) -> String {
        let (status, body) = self.post(&user(number), None).await;
        assert_eq!(status, 200, "{body}");
        body["id"].as_str().unwrap().to_owned()
    }

    pub async fn get(&self, id: &str) -> (u16, Value) {
        answer(self.request(reqwest::Method::GET, &format!("/api/v1/users/{id}"))).await
    }

    /// Waits until the user is enrolled; returns it.
    pub async fn until_enrolled(&self, id: &str) -> Value {
        eventually(SOON, format!("user {id} to be enrolled"), || async {
            let (status, body) = self.get(id).await;
            (status == 200).then_some(body)
        })
        .await
    }

    /// The lane's part of a service's `/health`.
    pub async fn health(&self, base: &str) -> Value {
        let (_, body) = answer(self.http.get(format!("{base}/health"))).await;
        body["parts"]["users"].clone()
    }

    /// Waits until the queue is empty: nothing ready, in flight, delayed or dead.
    pub async fn until_quiet(&self, deadline: Duration) {
        eventually(deadline, "the queue to be empty", || async {
            let base = &self.consumers.first().map_or(&self.base, |(_, base)| base).clone();
            let queue = self.health(base).await["queue"].clone();
            ["ready", "inFlight", "delayed", "dead"].iter().all(|state| queue[state] == 0).then_some(())
        })
        .await;
    }

    /// A connection to the users' database; waits until the database answers.
    pub async fn rows(&self) -> PgConnection {
        let url = self.database.as_ref().expect("the fixture is on PostgreSQL");
        eventually(SOON, "the database to answer", || async { PgConnection::connect(url).await.ok() }).await
    }

    /// The numbers of rows, of distinct ids, and of quarantined messages.
    pub async fn count(&self) -> (i64, i64, i64) {
        let mut rows = self.rows().await;
        sqlx::query_as("SELECT COUNT(*), COUNT(DISTINCT id), (SELECT COUNT(*) FROM users_set_aside) FROM users")
            .fetch_one(&mut rows)
            .await
            .unwrap()
    }

    /// A value in the metrics of a service, summed over the lines that contain `label`.
    pub async fn metric(&self, base: &str, name: &str, label: &str) -> f64 {
        let text =
            self.http.get(format!("{}/metrics", harness::admin_url(base))).send().await.unwrap().text().await.unwrap();
        let lines = text.lines().filter(|line| line.starts_with(name) && line.contains(label));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// Runs an operator's command; returns its exit code and its output.
    pub async fn command(&self, args: &[&str]) -> (i32, String) {
        let program =
            Program::new(PathBuf::from(env!("CARGO_BIN_EXE_baton"))).args(args.to_vec()).envs(self.env.clone());
        let mut process = program.start().unwrap();
        let status = process.wait_exit(SOON).await.unwrap();
        (status.code().unwrap_or(-1), process.output())
    }
}

pub async fn answer(request: reqwest::RequestBuilder) -> (u16, Value) {
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    let text = response.text().await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

/// The request body of a user with a name and an address of its own.
pub fn user(number: usize) -> Value {
    json!({ "name": format!("User {number}"), "email": format!("user-{number}@example.com") })
}
