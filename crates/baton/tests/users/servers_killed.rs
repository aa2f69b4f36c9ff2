//! RabbitMQ and PostgreSQL are killed under load, each twice, and restarted with their data. No accepted user is missing, and
//! no refused user appears.

use std::time::Duration;

use harness::servers::{self, Server};

use crate::fixture::{Servers, UsersFixture, UsersSetup};
use crate::scenario::{Scenario, enrol_users, users};

async fn under_load(name: &'static str, server: Server) {
    let mut scenario = Scenario::begin(name);
    let servers = servers::Servers::running(&[Server::Postgres, Server::RabbitMq]).await;
    let mut fixture = start(&servers).await;
    fixture.add_consumer().await;
    let pauses = [scenario.random_pause(Duration::from_secs(2)), scenario.random_pause(Duration::from_secs(3))];
    let killing = async {
        for pause in pauses {
            tokio::time::sleep(pause).await;
            servers.kill(server).await;
            servers.restart(server).await;
        }
    };
    let (answers, ()) = tokio::join!(enrol_users(&fixture, users()), killing);
    scenario.kills = pauses.len();
    assert!(answers.accepted.len() >= users() / 2, "{} accepted", answers.accepted.len());
    scenario.end(&fixture, &answers).await;
}

async fn start(servers: &servers::Servers) -> UsersFixture {
    let (amqp, postgres) = (servers.address("BATON_TEST_AMQP_URL"), servers.address("BATON_TEST_POSTGRES_URL"));
    UsersSetup::on(Servers { amqp, postgres }).env("LOG_LEVEL", "warn").start().await
}

#[tokio::test]
async fn broker_killed() {
    under_load("broker_killed", Server::RabbitMq).await;
}

#[tokio::test]
async fn database_killed() {
    under_load("database_killed", Server::Postgres).await;
}
