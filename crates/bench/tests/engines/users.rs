//! `users` on PostgreSQL and RabbitMQ.

use std::process::Command;

use harness::engine::server;
use harness::wait::eventually;
use sqlx::Connection;

use super::command::{assert_figure, bench, run};
use super::{
    REACHED_WITHIN, assert_interrupt_ends, assert_unset_is_named, rabbitmq_has_exchange, rabbitmq_has_queue, run_name,
};

fn users_bench(data: &tempfile::TempDir, args: &[&str]) -> Command {
    let mut command = bench(data, &["users", "--rounds", "1"]);
    command.args(args).env("USERS_DATABASE_URL", server("BATON_TEST_POSTGRES_URL"));
    command.env("RABBITMQ_URL", server("BATON_TEST_AMQP_URL"));
    command
}

async fn assert_removed(data: &tempfile::TempDir, stderr: &str) {
    assert!(!data.path().join("bench").exists(), "{stderr}");
    let name = run_name(stderr).unwrap();
    let mut connection = sqlx::PgConnection::connect(&server("BATON_TEST_POSTGRES_URL")).await.unwrap();
    let count = "SELECT COUNT(*) FROM pg_database WHERE datname = $1";
    let databases: i64 = sqlx::query_scalar(count).bind(&name).fetch_one(&mut connection).await.unwrap();
    assert_eq!(databases, 0, "the database {name}");
    for number in 1..=4 {
        for queue in ["queue", "retry_10s", "dlq"].map(|queue| format!("{name}_{number}_{queue}")) {
            assert!(!rabbitmq_has_queue(&queue).await, "the queue {queue}");
        }
        for exchange in ["exchange", "retry_exchange", "dlx"].map(|exchange| format!("{name}_{number}_{exchange}")) {
            assert!(!rabbitmq_has_exchange(&exchange).await, "the exchange {exchange}");
        }
    }
}

async fn completes(args: &[&str], figure: &str) {
    let data = tempfile::tempdir().unwrap();
    let output = run(users_bench(&data, args)).await;
    assert_figure(&output, figure);
    assert_removed(&data, &String::from_utf8_lossy(&output.stderr)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn users_reports_committed_rows() {
    completes(&["--messages", "2500"], "queued to committed").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn users_reports_the_cost_of_a_refused_row() {
    completes(&["--refused-row"], "batch, refused row: last").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_run_removes_its_database_exchanges_and_queues() {
    let data = tempfile::tempdir().unwrap();
    let log = data.path().join("stderr");
    let mut command = users_bench(&data, &["--messages", "1000000"]);
    let child = command.stderr(std::fs::File::create(&log).unwrap()).spawn().unwrap();
    eventually(REACHED_WITHIN, "the first queue", || async {
        let name = run_name(&std::fs::read_to_string(&log).unwrap())?;
        rabbitmq_has_queue(&format!("{name}_1_queue")).await.then_some(())
    })
    .await;
    assert_interrupt_ends(child).await;
    assert_removed(&data, &std::fs::read_to_string(&log).unwrap()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unset_variable_is_named() {
    let data = tempfile::tempdir().unwrap();
    for variable in ["USERS_DATABASE_URL", "RABBITMQ_URL"] {
        assert_unset_is_named(users_bench(&data, &[]), variable).await;
    }
}
