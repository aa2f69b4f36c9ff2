//! Each server is killed with `kill -9` under load and started again: what was accepted is done, once, and what was
//! refused is not.

use std::time::Duration;

use harness::engine::Engine;
use harness::servers::{Server, Servers};
use harness::wait::eventually;

use crate::load_client::{Client, Promises};
use crate::outage::{consumer_metric, load_during, stand_on};
use crate::relay_fixture::{SOON, Stand};
use crate::scenario::Story;

async fn killed(name: &'static str, engine: Engine, server: Server, times: usize) -> (Stand, Servers) {
    let mut story = Story::begin(name);
    let servers = Servers::of(engine).await;
    let stand = stand_on(&servers).await;
    story.watch(&stand);
    let pauses: Vec<_> = (0..times).map(|_| story.moment(Duration::from_millis(1500))).collect();
    let kill = async |client: &Client| {
        for pause in pauses {
            tokio::time::sleep(pause).await;
            // So that the queue has something to lose.
            stand.consumers[0].sigstop().unwrap();
            until_some_wait(client).await;
            servers.kill(server).await;
            stand.consumers[0].sigcont().unwrap();
            servers.restart(server).await;
        }
        Promises::default()
    };
    let promises = load_during(&story, &stand, kill).await;
    story.kills = times;
    let ledger = story.end(&stand, &promises).await;
    assert_eq!(ledger.failed_promises, 0, "an outage is not the work's fault");
    (stand, servers)
}

/// Waits until there are rows that nobody has taken yet.
async fn until_some_wait(client: &Client) {
    eventually(SOON, "rows that wait", || async {
        let (_, page) = client.get("/api/v1/relay/transactions?status=pending").await?;
        page["transactions"].as_array().is_some_and(|rows| rows.len() >= 10).then_some(())
    })
    .await;
}

#[tokio::test]
async fn mariadb_killed() {
    killed("mariadb_killed", Engine::MySqlSqs, Server::MariaDb, 3).await;
}

/// It forgets its messages and even its queues: the rows know better.
#[tokio::test]
async fn sqs_killed() {
    let (stand, _servers) = killed("sqs_killed", Engine::MySqlSqs, Server::Sqs, 2).await;
    let again = consumer_metric(&stand, 0, "baton_reconciler_total", "unclaimed").await;
    println!("  {again} messages were lost with the server and queued again");
    assert!(again > 0.0, "nothing was lost with the server");
}

#[tokio::test]
async fn redis_killed() {
    killed("redis_killed", Engine::MySqlSqs, Server::Redis, 3).await;
}

#[tokio::test]
async fn rabbitmq_killed() {
    killed("rabbitmq_killed", Engine::MySqlRabbitMq, Server::RabbitMq, 1).await;
}
