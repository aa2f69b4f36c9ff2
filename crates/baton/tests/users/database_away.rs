//! PostgreSQL is away for longer than all rounds of retries: everything becomes a dead letter. When it is back, everything
//! becomes a row, and nobody does anything for it.

use harness::servers::{self, Server};
use harness::wait::eventually;

use crate::stand::{LATER, Plan, Servers};
use crate::story::{Story, crowd, queue, users};

#[tokio::test]
async fn database_away() {
    let mut story = Story::begin("database_away");
    let servers = servers::Servers::running(&[Server::Postgres]).await;
    let on = Servers { postgres: servers.address("BATON_TEST_POSTGRES_URL"), ..Servers::shared() };
    let mut stand = Plan::on(on).env("LOG_LEVEL", "warn").start().await;
    stand.add_consumer().await;
    servers.kill(Server::Postgres).await;
    story.kills += 1;
    let promises = crowd(&stand, users()).await;
    assert_eq!(promises.accepted.len(), users(), "the API needs no database: {promises:?}");
    eventually(LATER, "everything to be a dead letter", || async {
        (queue(&stand).await["dead"] == users()).then_some(())
    })
    .await;
    servers.restart(Server::Postgres).await;
    story.end(&stand, &promises).await;
}
