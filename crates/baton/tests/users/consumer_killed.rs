//! A consumer dies again and again beside one that lives: what it held comes back to the queue, rows that it had committed
//! without saying so come twice, and each user is one row.

use std::time::Duration;

use crate::stand::{Plan, SOON, Servers};
use crate::story::{Story, crowd, users};

#[tokio::test]
async fn consumer_killed() {
    let mut story = Story::begin("consumer_killed");
    let mut stand = Plan::on(Servers::shared()).env("LOG_LEVEL", "warn").start().await;
    stand.add_consumer().await;
    stand.add_consumer().await;
    let (mut mortal, base) = stand.consumers.pop().unwrap();
    let killing = story.kill_again_and_again(&mut mortal, 12, Duration::from_millis(900));
    let (promises, ()) = tokio::join!(crowd(&stand, users()), killing);
    assert_eq!(promises.accepted.len(), users(), "the API never failed: {promises:?}");
    mortal.wait_ready(&format!("{base}/ready"), SOON).await.unwrap();
    stand.consumers.push((mortal, base));
    story.end(&stand, &promises).await;
}
