//! The link to the broker is cut after the commit and before the acknowledgement: every message comes again, every row is
//! there already, and nothing is stuck.

use harness::proxy::{Mode, Proxy};
use harness::wait::eventually;

use crate::stand::{LATER, Plan, SOON, Servers};
use crate::story::{Story, crowd, ids, queue, settled};

/// Fewer than a consumer holds at once: all of them are in hand when the link goes.
const USERS: usize = 900;

#[tokio::test]
async fn link_cut_between_commit_and_acknowledgement() {
    let mut story = Story::begin("link_cut_between_commit_and_acknowledgement");
    let servers = Servers::shared();
    let mut url = reqwest::Url::parse(&servers.amqp).unwrap();
    let link = Proxy::start(format!("127.0.0.1:{}", url.port().unwrap())).await;
    url.set_port(Some(link.port())).unwrap();
    let mut stand = Plan::on(servers).env("USERS_DATABASE_TIMEOUT_MS", "60000").start().await;
    let promises = crowd(&stand, USERS).await;
    assert_eq!(promises.accepted.len(), USERS);

    let mut lock = stand.rows().await;
    sqlx::raw_sql("BEGIN; LOCK TABLE users IN SHARE MODE").execute(&mut lock).await.unwrap();
    let mut env = stand.env.clone();
    env.insert("RABBITMQ_URL".into(), url.to_string());
    stand.add_consumer_with(&env).await;
    eventually(SOON, "all to be in hand", || async { (queue(&stand).await["inFlight"] == USERS).then_some(()) }).await;
    link.set(Mode::BlackHole).await;
    sqlx::raw_sql("ROLLBACK").execute(&mut lock).await.unwrap();
    eventually(LATER, "all to be committed", || async { (ids(&stand).await.len() == USERS).then_some(()) }).await;
    // Not by another mode, which would let go of what is held.
    link.cut().await;
    story.kills += 1;
    link.set(Mode::Forward).await;
    eventually(LATER, "all to come again", || async {
        (settled(&stand, 0, "repeated").await >= USERS as f64).then_some(())
    })
    .await;
    assert_eq!(settled(&stand, 0, "inserted").await, USERS as f64);
    story.end(&stand, &promises).await;
}
