//! The API is killed repeatedly while clients send. Each user that got 200 is enrolled once; one that got no answer is
//! enrolled once or not at all.

use std::time::Duration;

use crate::fixture::{SOON, Servers, UsersSetup};
use crate::scenario::{Scenario, enrol_users_at, users};

#[tokio::test]
async fn api_killed() {
    let mut scenario = Scenario::begin("api_killed");
    let mut fixture = UsersSetup::on(Servers::shared()).env("LOG_LEVEL", "warn").start().await;
    fixture.add_consumer().await;
    let (base, http) = (fixture.base.clone(), fixture.http.clone());
    let killing = scenario.kill_repeatedly(&mut fixture.api, 12, Duration::from_millis(900));
    let (answers, ()) = tokio::join!(enrol_users_at(&base, &http, users()), killing);
    fixture.api.wait_ready(&format!("{base}/ready"), SOON).await.unwrap();
    assert!(answers.accepted.len() >= users() / 2, "{} accepted", answers.accepted.len());
    scenario.end(&fixture, &answers).await;
}
