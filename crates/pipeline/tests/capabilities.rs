//! Prints the capabilities of every backend as a table, and checks that `docs/queues.md` contains it.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

use std::time::Duration;

use harness::engine::server;
use pipeline::queue::memory::MemoryQueue;
use pipeline::queue::rabbitmq::{QueueType, RabbitMqOptions, RabbitMqQueue, Topology};
use pipeline::queue::sqlite::SqliteQueue;
use pipeline::queue::sqs::{SqsAccess, SqsOptions, SqsQueue};
use pipeline::sqlite::Database;
use pipeline::{Capabilities, Queue, QueueOptions};
use uuid::Uuid;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/queues.md");

#[tokio::test]
async fn the_documentation_lists_the_capabilities_of_each_queue() {
    let folder = tempfile::tempdir().unwrap();
    let memory = MemoryQueue::new("capabilities", QueueOptions::default());
    let database = Database::open(&folder.path().join("queue.db")).unwrap();
    let sqlite = SqliteQueue::open(&database, "capabilities", QueueOptions::default()).await.unwrap();
    let name = format!("capabilities-{}", Uuid::new_v4());
    let access =
        SqsAccess::Endpoint { url: server("BATON_TEST_SQS_URL"), access_key: "test".into(), secret_key: "test".into() };
    let options = SqsOptions::new(access, "ap-northeast-2", &name, format!("{name}-dlq"));
    let sqs = SqsQueue::open(SqsOptions { auto_create: true, ..options }, QueueOptions::default()).await.unwrap();
    let quorum = rabbitmq(&name, QueueType::Quorum).await;
    let classic = rabbitmq(&format!("{name}-classic"), QueueType::Classic).await;

    let table = table(&[
        ("memory", memory.capabilities()),
        ("SQLite", sqlite.capabilities()),
        ("SQS", sqs.capabilities()),
        ("RabbitMQ, quorum", quorum.capabilities()),
        ("RabbitMQ, classic", classic.capabilities()),
    ]);
    quorum.delete().await.unwrap();
    classic.delete().await.unwrap();
    println!("{table}");
    let page = std::fs::read_to_string(PAGE).unwrap();
    assert!(page.contains(&table), "docs/queues.md must contain this table:\n{table}");
}

async fn rabbitmq(name: &str, queue_type: QueueType) -> RabbitMqQueue {
    let topology = Topology { queue_type, ..Topology::named(name) };
    let options = RabbitMqOptions::new(server("BATON_TEST_AMQP_URL"), topology, QueueOptions::default());
    RabbitMqQueue::connect(options).await.unwrap()
}

/// A Markdown table with one column for each queue.
fn table(queues: &[(&str, Capabilities)]) -> String {
    type Cell = fn(&Capabilities) -> String;
    let rows: [(&str, Cell); 9] = [
        ("durable: a sent message survives kill -9", |can| yes(can.durable)),
        ("ordered: messages arrive in the order sent", |can| yes(can.ordered)),
        ("fenced: a receipt whose lease was lost settles nothing", |can| yes(can.fenced)),
        ("shared: several processes may use it", |can| yes(can.shared)),
        ("cancel-safe: a cancelled receive has taken nothing", |can| yes(can.cancel_safe)),
        ("messages per request at the cost of one", |can| can.messages_per_request.to_string()),
        ("dead letters read by one listing, at least", |can| can.dead_letters_per_read.to_string()),
        ("longest body by default", |can| format!("{} KiB", can.body_bytes_max / 1024)),
        ("longest delay in one step", |can| duration_text(can.delay_max)),
    ];
    let line = |first: &str, cells: Vec<String>| format!("| {first} | {} |\n", cells.join(" | "));
    let mut table = line("", queues.iter().map(|(name, _)| (*name).to_owned()).collect());
    table.push_str(&line("---", queues.iter().map(|_| "---".to_owned()).collect()));
    for (label, cell) in rows {
        table.push_str(&line(label, queues.iter().map(|(_, can)| cell(can)).collect()));
    }
    table
}

fn yes(value: bool) -> String {
    if value { "yes" } else { "no" }.to_owned()
}

fn duration_text(time: Duration) -> String {
    const DAY_S: u64 = 24 * 3600;
    match time.as_secs() {
        days if days.is_multiple_of(DAY_S) => format!("{} days", days / DAY_S),
        hours => format!("{} hours", hours / 3600),
    }
}
