//! Compares the users lane's exchanges, queues and bindings on the broker with the tables in the existing service's
//! documentation, written here in the broker's own list format.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tokio::process::Command;
use uuid::Uuid;

use crate::users_fixture::{Servers, UsersSetup};

/// The existing service's tables: names, kinds and arguments as documented, argument types as its client writes them (text
/// as `longstr`, whole numbers as `long`).
fn documented() -> Vec<(&'static str, Value)> {
    let queue = |name: &str, arguments: Value| {
        (
            "queue",
            json!({ "name": name, "type": "classic", "durable": true, "auto_delete": false, "arguments": arguments }),
        )
    };
    let exchange = |name: &str| {
        ("exchange", json!({ "name": name, "type": "direct", "durable": true, "auto_delete": false, "arguments": [] }))
    };
    let binding = |from: &str, to: &str| ("binding", json!({ "from": from, "to": to, "key": to, "arguments": [] }));
    vec![
        exchange("raffle_dlx"),
        exchange("raffle_exchange"),
        exchange("raffle_retry_exchange"),
        queue("raffle_dlq", json!([])),
        queue(
            "raffle_queue",
            json!([
                ["x-dead-letter-exchange", "longstr", "raffle_dlx"],
                ["x-dead-letter-routing-key", "longstr", "raffle_dlq"],
            ]),
        ),
        queue(
            "raffle_retry_10s",
            json!([
                ["x-dead-letter-exchange", "longstr", "raffle_exchange"],
                ["x-dead-letter-routing-key", "longstr", "raffle_queue"],
                ["x-message-ttl", "long", 10_000],
            ]),
        ),
        binding("raffle_dlx", "raffle_dlq"),
        binding("raffle_exchange", "raffle_queue"),
        binding("raffle_retry_exchange", "raffle_retry_10s"),
    ]
}

async fn rabbitmqctl(args: &[&str]) -> Vec<u8> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/services");
    let output = Command::new(script).args(["rabbitmqctl", "--quiet"]).args(args).output().await.unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// The rows that a `rabbitmqctl` list command prints for a virtual host, with arguments sorted by name.
async fn listed(vhost: &str, command: &[&str]) -> Vec<Value> {
    let answer = rabbitmqctl(&[command, &["--vhost", vhost, "--formatter", "json"]].concat()).await;
    let mut rows: Vec<Value> = serde_json::from_slice(&answer).unwrap();
    for row in &mut rows {
        row["arguments"].as_array_mut().unwrap().sort_by_key(|argument| argument[0].to_string());
    }
    rows
}

/// The exchanges, queues and bindings of a virtual host, without the broker's built-in ones.
async fn read_back(vhost: &str) -> Vec<(&'static str, Value)> {
    let mut found = Vec::new();
    for row in listed(vhost, &["list_exchanges", "name", "type", "durable", "auto_delete", "arguments"]).await {
        let name = row["name"].as_str().unwrap();
        if !name.is_empty() && !name.starts_with("amq.") {
            found.push(("exchange", row));
        }
    }
    for row in listed(vhost, &["list_queues", "name", "type", "durable", "auto_delete", "arguments"]).await {
        found.push(("queue", row));
    }
    for row in listed(vhost, &["list_bindings"]).await {
        if row["source_name"] != "" {
            assert_eq!(row["destination_kind"], "queue");
            let (from, to, key) = (&row["source_name"], &row["destination_name"], &row["routing_key"]);
            found.push(("binding", json!({ "from": from, "to": to, "key": key, "arguments": row["arguments"] })));
        }
    }
    found
}

#[tokio::test]
async fn the_broker_has_exactly_the_documented_topology() {
    // A separate virtual host allows the real names.
    let vhost = format!("baton_{}", Uuid::new_v4().simple());
    rabbitmqctl(&["add_vhost", &vhost]).await;
    rabbitmqctl(&["set_permissions", "-p", &vhost, "guest", ".*", ".*", ".*"]).await;
    let shared = Servers::shared();
    let mut amqp = reqwest::Url::parse(&shared.amqp).unwrap();
    amqp.set_path(&vhost);
    let plan = UsersSetup::on(Servers { amqp: amqp.to_string(), ..shared });
    let mut stand = plan.env("USERS_QUEUE_NAME", "raffle").env("RETRY_TTL_MS", "10000").start().await;
    stand.add_consumer().await;
    let id = stand.enrol(1).await;
    stand.until_enrolled(&id).await;

    let text = |rows: Vec<(&str, Value)>| -> BTreeSet<String> {
        rows.into_iter().map(|(kind, row)| format!("{kind} {row}")).collect()
    };
    let (document, broker) = (text(documented()), text(read_back(&vhost).await));
    drop(stand);
    rabbitmqctl(&["delete_vhost", &vhost]).await;
    for row in document.union(&broker) {
        let mark = |set: &BTreeSet<String>| if set.contains(row) { "yes" } else { "NO" };
        println!("document {:3}  broker {:3}  {row}", mark(&document), mark(&broker));
    }
    assert_eq!(document, broker);
}
