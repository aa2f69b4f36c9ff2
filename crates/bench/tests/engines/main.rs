//! `bench` on the engines beyond one machine, on sizes that say nothing about speed: it runs through, and leaves nothing
//! on the servers, whether it ends or is interrupted.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

use std::process::{Command, Output, Stdio};
use std::time::Duration;

use harness::engine::server;
use harness::wait::eventually;
use lapin::options::{ExchangeDeclareOptions, QueueDeclareOptions};
use pipeline::queue::sqs::{SqsAccess, SqsOptions};
use serde_json::Value;
use sqlx::Connection;

/// The benchmark with all that it needs to find the servers.
fn bench(data: &tempfile::TempDir, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bench"));
    command.args(args).args(["--seconds", "1", "--rounds", "1", "--concurrency", "8"]);
    command.args(["--transactions", "50", "--json", "--data-dir"]).arg(data.path().join("bench"));
    command.env_clear().env("DATABASE_URL", server("BATON_TEST_MYSQL_URL"));
    command.env("REDIS_URL", server("BATON_TEST_REDIS_URL")).env("RABBITMQ_URL", server("BATON_TEST_AMQP_URL"));
    command.env("SQS_ENDPOINT_URL", server("BATON_TEST_SQS_URL"));
    command.env("AWS_ACCESS_KEY_ID", "test").env("AWS_SECRET_ACCESS_KEY", "test");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

async fn run(command: Command) -> Output {
    let mut command = command;
    tokio::task::spawn_blocking(move || command.output()).await.unwrap().unwrap()
}

/// What the benchmark called its place on the servers.
fn place(stderr: &str) -> Option<String> {
    let start = stderr.find("baton_bench_")?;
    Some(stderr[start..].chars().take_while(|char| char.is_ascii_alphanumeric() || *char == '_').collect())
}

async fn databases(name: &str) -> i64 {
    let mut connection = sqlx::MySqlConnection::connect(&server("BATON_TEST_MYSQL_URL")).await.unwrap();
    let count = "SELECT COUNT(*) FROM information_schema.schemata WHERE schema_name = ?";
    sqlx::query_scalar(count).bind(name).fetch_one(&mut connection).await.unwrap()
}

async fn queues_in_sqs(name: &str) -> Vec<String> {
    let (url, key) = (server("BATON_TEST_SQS_URL"), "test".to_owned());
    let access = SqsAccess::Endpoint { url, access_key: key.clone(), secret_key: key };
    let client = SqsOptions::new(access, "ap-northeast-2", name, "none").client().await;
    let listed = client.list_queues().queue_name_prefix(name).send().await.unwrap();
    listed.queue_urls.unwrap_or_default()
}

async fn is_in_rabbitmq(queue: &str) -> bool {
    let url = server("BATON_TEST_AMQP_URL");
    let connection = lapin::Connection::connect(&url, lapin::ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let look = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(queue.into(), look, lapin::types::FieldTable::default()).await.is_ok()
}

async fn is_exchange(exchange: &str) -> bool {
    let url = server("BATON_TEST_AMQP_URL");
    let connection = lapin::Connection::connect(&url, lapin::ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    let look = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
    let (kind, none) = (lapin::ExchangeKind::Direct, lapin::types::FieldTable::default());
    channel.exchange_declare(exchange.into(), kind, look, none).await.is_ok()
}

async fn nothing_is_left(name: &str) {
    assert_eq!(databases(name).await, 0, "the database {name}");
    assert_eq!(queues_in_sqs(name).await, Vec::<String>::new());
    for queue in ["1", "1-dlq", "2", "raw"].map(|queue| format!("{name}-{queue}")) {
        assert!(!is_in_rabbitmq(&queue).await, "the queue {queue}");
    }
}

/// The users lane's benchmark, which has settings of its own.
fn users_bench(data: &tempfile::TempDir, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_bench"));
    command.args(["users", "--rounds", "1", "--json"]).args(args);
    command.arg("--data-dir").arg(data.path().join("bench")).env_clear();
    command.env("USERS_DATABASE_URL", server("BATON_TEST_POSTGRES_URL"));
    command.env("RABBITMQ_URL", server("BATON_TEST_AMQP_URL"));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

async fn nothing_of_users_is_left(data: &tempfile::TempDir, stderr: &str) {
    assert!(!data.path().join("bench").exists(), "{stderr}");
    let Some(name) = place(stderr) else { return };
    let mut connection = sqlx::PgConnection::connect(&server("BATON_TEST_POSTGRES_URL")).await.unwrap();
    let count = "SELECT COUNT(*) FROM pg_database WHERE datname = $1";
    let databases: i64 = sqlx::query_scalar(count).bind(&name).fetch_one(&mut connection).await.unwrap();
    assert_eq!(databases, 0, "the database {name}");
    for number in 1..=4 {
        for queue in ["queue", "retry_10s", "dlq"].map(|queue| format!("{name}_{number}_{queue}")) {
            assert!(!is_in_rabbitmq(&queue).await, "the queue {queue}");
        }
        for exchange in ["exchange", "retry_exchange", "dlx"].map(|exchange| format!("{name}_{number}_{exchange}")) {
            assert!(!is_exchange(&exchange).await, "the exchange {exchange}");
        }
    }
}

async fn users_run_through(args: &[&str], figure: &str) {
    let data = tempfile::tempdir().unwrap();
    let output = run(users_bench(&data, args)).await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    has_figure(&output, figure);
    assert_eq!(place(&stderr).is_some(), !args.contains(&"embedded"), "{stderr}");
    nothing_of_users_is_left(&data, &stderr).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn enrolling_is_measured() {
    users_run_through(&["--messages", "2500"], "queued to committed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn enrolling_on_the_embedded_engine_is_measured() {
    users_run_through(&["--messages", "2500", "--engine", "embedded"], "queued to committed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_bad_row_costs_is_measured() {
    users_run_through(&["--bad"], "batch, bad row: the last").await;
    users_run_through(&["--bad", "--engine", "embedded"], "batch, bad row: the last").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_one_of_users_clears_away() {
    let data = tempfile::tempdir().unwrap();
    let log = data.path().join("stderr");
    let mut command = users_bench(&data, &["--messages", "1000000"]);
    let mut child = command.stderr(std::fs::File::create(&log).unwrap()).spawn().unwrap();
    eventually(Duration::from_secs(60), "the first queue", || async {
        let said = std::fs::read_to_string(&log).unwrap();
        match place(&said) {
            Some(name) => is_in_rabbitmq(&format!("{name}_1_queue")).await.then_some(()),
            None => None,
        }
    })
    .await;
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let ended = tokio::task::spawn_blocking(move || child.wait()).await.unwrap().unwrap();
    assert!(!ended.success());
    nothing_of_users_is_left(&data, &std::fs::read_to_string(&log).unwrap()).await;
}

async fn runs_through(args: &[&str], figure: &str) {
    let data = tempfile::tempdir().unwrap();
    let output = run(bench(&data, args)).await;
    has_figure(&output, figure);
    nothing_is_left(&place(&String::from_utf8_lossy(&output.stderr)).unwrap()).await;
}

fn has_figure(output: &Output, figure: &str) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let figures = report["figures"].as_array().unwrap();
    let found = figures.iter().find(|found| found["what"] == figure).unwrap_or_else(|| panic!("{report:#}"));
    assert!(found["value"].as_f64().unwrap() > 0.0, "{report:#}");
    assert!(!report["bars"].as_array().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn accepting_on_sqs_is_measured() {
    runs_through(&["accept", "--engine", "mysql-sqs"], "durable accept").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn accepting_on_rabbitmq_is_measured() {
    runs_through(&["accept", "--engine", "mysql-rabbitmq"], "durable accept").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn relaying_on_sqs_is_measured() {
    runs_through(&["relay", "--engine", "mysql-sqs"], "submissions of two consumers").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn relaying_on_rabbitmq_is_measured() {
    runs_through(&["relay", "--engine", "mysql-rabbitmq"], "submissions of two consumers").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_one_clears_away() {
    let data = tempfile::tempdir().unwrap();
    let log = data.path().join("stderr");
    let mut command = bench(&data, &["accept", "--engine", "mysql-rabbitmq"]);
    let mut child = command.stderr(std::fs::File::create(&log).unwrap()).spawn().unwrap();
    let name = eventually(Duration::from_secs(60), "the first measurement", || async {
        let said = std::fs::read_to_string(&log).unwrap();
        said.contains("round 1").then(|| place(&said).unwrap())
    })
    .await;
    assert_eq!(databases(&name).await, 1);
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let ended = tokio::task::spawn_blocking(move || child.wait()).await.unwrap().unwrap();
    assert!(!ended.success());
    nothing_is_left(&name).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_missing_is_named() {
    let data = tempfile::tempdir().unwrap();
    for (engine, variable) in
        [("mysql-sqs", "SQS_ENDPOINT_URL"), ("mysql-rabbitmq", "RABBITMQ_URL"), ("mysql-sqs", "DATABASE_URL")]
    {
        let mut command = bench(&data, &["accept", "--engine", engine]);
        command.env_remove(variable);
        let output = run(command).await;
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success());
        assert!(stderr.contains(&format!("{variable} is not set")) && stderr.contains("scripts/services"), "{stderr}");
    }
    for variable in ["USERS_DATABASE_URL", "RABBITMQ_URL"] {
        let mut command = users_bench(&data, &[]);
        command.env_remove(variable);
        let output = run(command).await;
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success());
        assert!(stderr.contains(&format!("{variable} is not set")) && stderr.contains("scripts/services"), "{stderr}");
    }
}
