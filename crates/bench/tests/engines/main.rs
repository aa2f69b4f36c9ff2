//! The benchmark on the servers of `scripts/services`, with sizes that say nothing about speed: it completes, and removes
//! what it created on them, also when it is interrupted.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

#[path = "../it/command.rs"]
mod command;
mod relay;
mod users;

use std::process::{Child, Command};
use std::time::Duration;

use command::run;
use harness::engine::server;
use lapin::options::{ExchangeDeclareOptions, QueueDeclareOptions};
use lapin::types::FieldTable;

/// Time for an interrupted benchmark to reach the state that the test waits for.
const REACHED_WITHIN: Duration = Duration::from_secs(60);

/// The random name of what the run created on the servers, from its messages.
fn run_name(stderr: &str) -> Option<String> {
    let start = stderr.find("baton_bench_")?;
    Some(stderr[start..].chars().take_while(|char| char.is_ascii_alphanumeric() || *char == '_').collect())
}

async fn assert_interrupt_ends(mut child: Child) {
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let status = tokio::task::spawn_blocking(move || child.wait()).await.unwrap().unwrap();
    assert!(!status.success());
}

async fn assert_unset_is_named(mut command: Command, variable: &str) {
    command.env_remove(variable);
    let output = run(command).await;
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    assert!(stderr.contains(&format!("{variable} is not set")) && stderr.contains("scripts/services"), "{stderr}");
}

async fn rabbitmq_channel() -> (lapin::Connection, lapin::Channel) {
    let url = server("BATON_TEST_AMQP_URL");
    let connection = lapin::Connection::connect(&url, lapin::ConnectionProperties::default()).await.unwrap();
    let channel = connection.create_channel().await.unwrap();
    (connection, channel)
}

async fn rabbitmq_has_queue(queue: &str) -> bool {
    let (_connection, channel) = rabbitmq_channel().await;
    let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    channel.queue_declare(queue.into(), passive, FieldTable::default()).await.is_ok()
}

async fn rabbitmq_has_exchange(exchange: &str) -> bool {
    let (_connection, channel) = rabbitmq_channel().await;
    let passive = ExchangeDeclareOptions { passive: true, ..ExchangeDeclareOptions::default() };
    let kind = lapin::ExchangeKind::Direct;
    channel.exchange_declare(exchange.into(), kind, passive, FieldTable::default()).await.is_ok()
}
