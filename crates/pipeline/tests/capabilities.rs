//! The table of what each queue can do: asked of the queues themselves, printed, and the same in `docs/queues.md`.

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
async fn the_page_says_what_each_queue_can_do() {
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
    assert!(page.contains(&table), "docs/queues.md is to have this table:\n{table}");
}

async fn rabbitmq(name: &str, queue_type: QueueType) -> RabbitMqQueue {
    let topology = Topology { queue_type, ..Topology::named(name) };
    let options = RabbitMqOptions::new(server("BATON_TEST_AMQP_URL"), topology, QueueOptions::default());
    RabbitMqQueue::connect(options).await.unwrap()
}

/// In Markdown, a column for each queue.
fn table(queues: &[(&str, Capabilities)]) -> String {
    type Ask = fn(&Capabilities) -> String;
    let rows: [(&str, Ask); 8] = [
        ("durable: survives kill -9 once `send` has answered", |can| yes(can.durable)),
        ("ordered: equal age comes in the order sent", |can| yes(can.ordered)),
        ("fenced: a receipt whose lease was lost settles nothing", |can| yes(can.fenced)),
        ("shared between processes", |can| yes(can.shared)),
        ("cancel-safe: a cancelled receive has taken nothing", |can| yes(can.cancel_safe)),
        ("messages in a request that costs as much as one", |can| can.messages_per_request.to_string()),
        ("longest body, unless set shorter", |can| format!("{} KiB", can.body_bytes_max / 1024)),
        ("longest delay in one step", |can| long(can.delay_max)),
    ];
    let line = |first: &str, cells: Vec<String>| format!("| {first} | {} |\n", cells.join(" | "));
    let mut table = line("", queues.iter().map(|(name, _)| (*name).to_owned()).collect());
    table.push_str(&line("---", queues.iter().map(|_| "---".to_owned()).collect()));
    for (what, ask) in rows {
        table.push_str(&line(what, queues.iter().map(|(_, can)| ask(can)).collect()));
    }
    table
}

fn yes(it_is: bool) -> String {
    if it_is { "yes" } else { "no" }.to_owned()
}

fn long(time: Duration) -> String {
    const DAY_S: u64 = 24 * 3600;
    match time.as_secs() {
        days if days.is_multiple_of(DAY_S) => format!("{} days", days / DAY_S),
        hours => format!("{} hours", hours / 3600),
    }
}
