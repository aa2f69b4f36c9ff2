//! RabbitMQ and PostgreSQL die under load, each several times, and come back with their data. Nothing that was accepted is
//! missing, nothing that was refused appears.

use std::time::Duration;

use harness::servers::{self, Server};

use crate::stand::{Plan, Servers, Stand};
use crate::story::{Story, crowd, users};

async fn under_load(name: &'static str, server: Server) {
    let mut story = Story::begin(name);
    let servers = servers::Servers::running(&[Server::Postgres, Server::RabbitMq]).await;
    let mut stand = stand(&servers).await;
    stand.add_consumer().await;
    let pauses = [story.moment(Duration::from_secs(2)), story.moment(Duration::from_secs(3))];
    let killing = async {
        for pause in pauses {
            tokio::time::sleep(pause).await;
            servers.kill(server).await;
            servers.restart(server).await;
        }
    };
    let (promises, ()) = tokio::join!(crowd(&stand, users()), killing);
    story.kills = pauses.len();
    assert!(promises.accepted.len() >= users() / 2, "{} accepted", promises.accepted.len());
    story.end(&stand, &promises).await;
}

async fn stand(servers: &servers::Servers) -> Stand {
    let (amqp, postgres) = (servers.address("BATON_TEST_AMQP_URL"), servers.address("BATON_TEST_POSTGRES_URL"));
    Plan::on(Servers { amqp, postgres }).env("LOG_LEVEL", "warn").start().await
}

#[tokio::test]
async fn broker_killed() {
    under_load("broker_killed", Server::RabbitMq).await;
}

#[tokio::test]
async fn database_killed() {
    under_load("database_killed", Server::Postgres).await;
}
