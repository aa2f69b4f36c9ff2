//! PostgreSQL is away for longer than all retries last: every message becomes a dead letter. Once PostgreSQL is back, every
//! message becomes a row without an operator.

use harness::servers::{self, Server};
use harness::wait::eventually;

use crate::fixture::{LATER, Servers, UsersSetup};
use crate::scenario::{Scenario, enrol_users, queue, users};

#[tokio::test]
async fn database_away() {
    let mut scenario = Scenario::begin("database_away");
    let servers = servers::Servers::running(&[Server::Postgres]).await;
    let on = Servers { postgres: servers.address("BATON_TEST_POSTGRES_URL"), ..Servers::shared() };
    let mut fixture = UsersSetup::on(on).env("LOG_LEVEL", "warn").start().await;
    fixture.add_consumer().await;
    servers.kill(Server::Postgres).await;
    scenario.kills += 1;
    let answers = enrol_users(&fixture, users()).await;
    assert_eq!(answers.accepted.len(), users(), "the API needs no database: {answers:?}");
    eventually(LATER, "everything to be a dead letter", || async {
        (queue(&fixture).await["dead"] == users()).then_some(())
    })
    .await;
    servers.restart(Server::Postgres).await;
    scenario.end(&fixture, &answers).await;
}
