//! The link to the broker is cut after the commit and before the acknowledgement: every message is delivered again, every
//! row exists already, and no message is stuck.

use harness::proxy::{Mode, Proxy};
use harness::wait::eventually;

use crate::fixture::{LATER, SOON, Servers, UsersSetup};
use crate::scenario::{Scenario, enrol_users, ids, queue, settled};

/// Fewer than a consumer holds at once: all of them are in flight when the link is cut.
const USERS: usize = 900;

#[tokio::test]
async fn link_cut_between_commit_and_acknowledgement() {
    let mut scenario = Scenario::begin("link_cut_between_commit_and_acknowledgement");
    let servers = Servers::shared();
    let mut url = reqwest::Url::parse(&servers.amqp).unwrap();
    let link = Proxy::start(format!("127.0.0.1:{}", url.port().unwrap())).await;
    url.set_port(Some(link.port())).unwrap();
    let mut fixture = UsersSetup::on(servers).env("USERS_DATABASE_TIMEOUT_MS", "60000").start().await;
    let answers = enrol_users(&fixture, USERS).await;
    assert_eq!(answers.accepted.len(), USERS);

    let mut lock = fixture.rows().await;
    sqlx::raw_sql("BEGIN; LOCK TABLE users IN SHARE MODE").execute(&mut lock).await.unwrap();
    let mut env = fixture.env.clone();
    env.insert("RABBITMQ_URL".into(), url.to_string());
    fixture.add_consumer_with(&env).await;
    eventually(SOON, "all to be in flight", || async { (queue(&fixture).await["inFlight"] == USERS).then_some(()) })
        .await;
    link.set(Mode::BlackHole).await;
    sqlx::raw_sql("ROLLBACK").execute(&mut lock).await.unwrap();
    eventually(LATER, "all to be committed", || async { (ids(&fixture).await.len() == USERS).then_some(()) }).await;
    // `set` to another mode would deliver the bytes that the link holds.
    link.cut().await;
    scenario.kills += 1;
    link.set(Mode::Forward).await;
    eventually(LATER, "all to be delivered again", || async {
        (settled(&fixture, 0, "repeated").await >= USERS as f64).then_some(())
    })
    .await;
    assert_eq!(settled(&fixture, 0, "inserted").await, USERS as f64);
    scenario.end(&fixture, &answers).await;
}
