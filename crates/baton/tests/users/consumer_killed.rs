//! One of two consumers is killed repeatedly: the broker delivers the messages it held again, rows that it had committed but
//! not acknowledged are inserted twice, and each user is one row.

use std::time::Duration;

use crate::fixture::{SOON, Servers, UsersSetup};
use crate::scenario::{Scenario, enrol_users, users};

#[tokio::test]
async fn consumer_killed() {
    let mut scenario = Scenario::begin("consumer_killed");
    let mut fixture = UsersSetup::on(Servers::shared()).env("LOG_LEVEL", "warn").start().await;
    fixture.add_consumer().await;
    fixture.add_consumer().await;
    let (mut victim, base) = fixture.consumers.pop().unwrap();
    let killing = scenario.kill_repeatedly(&mut victim, 12, Duration::from_millis(900));
    let (answers, ()) = tokio::join!(enrol_users(&fixture, users()), killing);
    assert_eq!(answers.accepted.len(), users(), "the API never failed: {answers:?}");
    victim.wait_ready(&format!("{base}/ready"), SOON).await.unwrap();
    fixture.consumers.push((victim, base));
    scenario.end(&fixture, &answers).await;
}
