//! A consumer with full batches in hand is told to stop: it finishes what it has begun, gives back the rest, and ends with
//! 0. Another one finds exactly what is left.

use harness::wait::eventually;

use crate::stand::{Plan, SOON, Servers};
use crate::story::{Story, crowd, ids, queue, users};

#[tokio::test]
async fn sigterm_with_full_batches() {
    let story = Story::begin("sigterm_with_full_batches");
    let plan = Plan::on(Servers::shared()).env("USERS_BATCH_SIZE", "500").env("USERS_DATABASE_TIMEOUT_MS", "60000");
    let mut stand = plan.start().await;
    let promises = crowd(&stand, users()).await;
    assert_eq!(promises.accepted.len(), users());
    let mut lock = stand.rows().await;
    sqlx::raw_sql("BEGIN; LOCK TABLE users IN SHARE MODE").execute(&mut lock).await.unwrap();
    stand.add_consumer().await;
    eventually(SOON, "full batches in hand", || async {
        queue(&stand).await["inFlight"].as_u64().is_some_and(|count| count >= 1500).then_some(())
    })
    .await;
    let (mut consumer, _) = stand.consumers.pop().unwrap();
    consumer.sigterm().unwrap();
    eventually(SOON, "it to have heard", || async { consumer.output().contains("stopping").then_some(()) }).await;
    sqlx::raw_sql("ROLLBACK").execute(&mut lock).await.unwrap();
    let status = consumer.wait_exit(SOON).await.unwrap();
    assert_eq!(status.code(), Some(0), "{}", consumer.log_excerpt());
    let rows = ids(&stand).await.len();
    assert!(rows >= 1000 && rows < users(), "two batches were under way, and no more was begun: {rows}");
    stand.add_consumer().await;
    story.end(&stand, &promises).await;
    let repeated = crate::story::settled(&stand, 0, "repeated").await;
    assert_eq!(repeated, 0.0, "what was committed was acknowledged");
}
