//! The API dies again and again while clients send. What got 200 is enrolled, and what got no answer is enrolled once or
//! not at all; those who insist get one user each.

use std::time::Duration;

use crate::stand::{Plan, SOON, Servers};
use crate::story::{Story, crowd_at, users};

#[tokio::test]
async fn api_killed() {
    let mut story = Story::begin("api_killed");
    let mut stand = Plan::on(Servers::shared()).env("LOG_LEVEL", "warn").start().await;
    stand.add_consumer().await;
    let (base, http) = (stand.base.clone(), stand.http.clone());
    let killing = story.kill_again_and_again(&mut stand.api, 12, Duration::from_millis(900));
    let (promises, ()) = tokio::join!(crowd_at(&base, &http, users()), killing);
    stand.api.wait_ready(&format!("{base}/ready"), SOON).await.unwrap();
    assert!(promises.accepted.len() >= users() / 2, "{} accepted", promises.accepted.len());
    story.end(&stand, &promises).await;
}
