//! `accept` and `relay` on MySQL with SQS and with RabbitMQ.

use std::process::Command;

use harness::engine::server;
use harness::wait::eventually;
use pipeline::queue::sqs::{SqsAccess, SqsOptions};
use sqlx::Connection;

use super::command::{assert_figure, bench, run};
use super::{REACHED_WITHIN, assert_interrupt_ends, assert_unset_is_named, rabbitmq_has_queue, run_name};

fn relay_bench(data: &tempfile::TempDir, args: &[&str]) -> Command {
    let mut command = bench(data, args);
    command.args(["--seconds", "1", "--rounds", "1", "--concurrency", "8", "--transactions", "50"]);
    command.env("DATABASE_URL", server("BATON_TEST_MYSQL_URL")).env("REDIS_URL", server("BATON_TEST_REDIS_URL"));
    command.env("RABBITMQ_URL", server("BATON_TEST_AMQP_URL")).env("SQS_ENDPOINT_URL", server("BATON_TEST_SQS_URL"));
    command.env("AWS_ACCESS_KEY_ID", "test").env("AWS_SECRET_ACCESS_KEY", "test");
    command
}

async fn databases(name: &str) -> i64 {
    let mut connection = sqlx::MySqlConnection::connect(&server("BATON_TEST_MYSQL_URL")).await.unwrap();
    let count = "SELECT COUNT(*) FROM information_schema.schemata WHERE schema_name = ?";
    sqlx::query_scalar(count).bind(name).fetch_one(&mut connection).await.unwrap()
}

async fn sqs_queues(prefix: &str) -> Vec<String> {
    let (url, key) = (server("BATON_TEST_SQS_URL"), "test".to_owned());
    let access = SqsAccess::Endpoint { url, access_key: key.clone(), secret_key: key };
    let client = SqsOptions::new(access, "ap-northeast-2", prefix, "none").client().await;
    let listed = client.list_queues().queue_name_prefix(prefix).send().await.unwrap();
    listed.queue_urls.unwrap_or_default()
}

async fn assert_removed(name: &str) {
    assert_eq!(databases(name).await, 0, "the database {name}");
    assert_eq!(sqs_queues(name).await, Vec::<String>::new());
    for queue in ["1", "1-dlq", "2", "raw"].map(|queue| format!("{name}-{queue}")) {
        assert!(!rabbitmq_has_queue(&queue).await, "the queue {queue}");
    }
}

async fn completes(args: &[&str], figure: &str) {
    let data = tempfile::tempdir().unwrap();
    let output = run(relay_bench(&data, args)).await;
    assert_figure(&output, figure);
    assert_removed(&run_name(&String::from_utf8_lossy(&output.stderr)).unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn accept_on_sqs_completes() {
    completes(&["accept", "--engine", "mysql-sqs"], "durable accept").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn accept_on_rabbitmq_completes() {
    completes(&["accept", "--engine", "mysql-rabbitmq"], "durable accept").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn relay_on_sqs_completes() {
    completes(&["relay", "--engine", "mysql-sqs"], "submissions of two consumers").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn relay_on_rabbitmq_completes() {
    completes(&["relay", "--engine", "mysql-rabbitmq"], "submissions of two consumers").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_accept_removes_its_database_and_queues() {
    let data = tempfile::tempdir().unwrap();
    let log = data.path().join("stderr");
    let mut command = relay_bench(&data, &["accept", "--engine", "mysql-rabbitmq"]);
    let child = command.stderr(std::fs::File::create(&log).unwrap()).spawn().unwrap();
    let name = eventually(REACHED_WITHIN, "the first measurement", || async {
        let stderr = std::fs::read_to_string(&log).unwrap();
        stderr.contains("round 1").then(|| run_name(&stderr).unwrap())
    })
    .await;
    assert_eq!(databases(&name).await, 1);
    assert_interrupt_ends(child).await;
    assert_removed(&name).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unset_variable_is_named() {
    let data = tempfile::tempdir().unwrap();
    for (engine, variable) in
        [("mysql-sqs", "SQS_ENDPOINT_URL"), ("mysql-rabbitmq", "RABBITMQ_URL"), ("mysql-sqs", "DATABASE_URL")]
    {
        assert_unset_is_named(relay_bench(&data, &["accept", "--engine", engine]), variable).await;
    }
}
