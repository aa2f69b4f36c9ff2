//! Each server is killed with `kill -9` under load and restarted: accepted requests have one effect, refused requests none.

use std::time::Duration;

use harness::engine::TestEngine;
use harness::servers::{Server, Servers};
use harness::wait::eventually;

use crate::load_client::{ClientAnswers, LoadClient};
use crate::outage::{load_during, start_on};
use crate::relay_fixture::{RelayFixture, SOON};
use crate::scenario::Scenario;

async fn killed(name: &'static str, engine: TestEngine, server: Server, times: usize) -> (RelayFixture, Servers) {
    let mut scenario = Scenario::begin(name);
    let servers = Servers::of(engine).await;
    let relay = start_on(&servers).await;
    scenario.start_watching(&relay);
    let pauses: Vec<_> = (0..times).map(|_| scenario.random_pause(Duration::from_millis(1500))).collect();
    let kill = async |client: &LoadClient| {
        for pause in pauses {
            tokio::time::sleep(pause).await;
            // A frozen consumer leaves messages in the queue, which the killed server may lose.
            relay.consumers[0].sigstop().unwrap();
            until_pending(client).await;
            servers.kill(server).await;
            relay.consumers[0].sigcont().unwrap();
            servers.restart(server).await;
        }
        ClientAnswers::default()
    };
    let answers = load_during(&scenario, &relay, kill).await;
    scenario.kills = times;
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!(ledger.accepted_and_failed, 0, "an outage fails no accepted transaction");
    (relay, servers)
}

/// Waits until ten rows are pending.
async fn until_pending(client: &LoadClient) {
    eventually(SOON, "pending rows", || async {
        let (_, page) = client.get("/api/v1/relay/transactions?status=pending").await?;
        page["transactions"].as_array().is_some_and(|rows| rows.len() >= 10).then_some(())
    })
    .await;
}

#[tokio::test]
async fn mariadb_killed() {
    killed("mariadb_killed", TestEngine::MySqlSqs, Server::MariaDb, 3).await;
}

/// The emulator loses its messages and queues; the reconciler restores the messages from the rows.
#[tokio::test]
async fn sqs_killed() {
    let (relay, _servers) = killed("sqs_killed", TestEngine::MySqlSqs, Server::Sqs, 2).await;
    let requeued = relay.consumer_metric(0, "baton_reconciler_total", "unclaimed").await;
    println!("  {requeued} messages were lost with the server and requeued");
    assert!(requeued > 0.0, "no message was lost with the server");
}

#[tokio::test]
async fn redis_killed() {
    killed("redis_killed", TestEngine::MySqlSqs, Server::Redis, 3).await;
}

#[tokio::test]
async fn rabbitmq_killed() {
    killed("rabbitmq_killed", TestEngine::MySqlRabbitMq, Server::RabbitMq, 1).await;
}
