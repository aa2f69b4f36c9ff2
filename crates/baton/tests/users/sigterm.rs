//! A consumer with full batches in flight gets SIGTERM: it finishes the batches it has begun, returns the rest to the queue,
//! and exits with 0. Another consumer finds exactly what is left.

use harness::wait::eventually;

use crate::fixture::{SOON, Servers, UsersSetup};
use crate::scenario::{Scenario, enrol_users, ids, queue, users};

#[tokio::test]
async fn sigterm_with_full_batches() {
    let scenario = Scenario::begin("sigterm_with_full_batches");
    let plan =
        UsersSetup::on(Servers::shared()).env("USERS_BATCH_SIZE", "500").env("USERS_DATABASE_TIMEOUT_MS", "60000");
    let mut fixture = plan.start().await;
    let answers = enrol_users(&fixture, users()).await;
    assert_eq!(answers.accepted.len(), users());
    let mut lock = fixture.rows().await;
    sqlx::raw_sql("BEGIN; LOCK TABLE users IN SHARE MODE").execute(&mut lock).await.unwrap();
    fixture.add_consumer().await;
    eventually(SOON, "full batches in flight", || async {
        queue(&fixture).await["inFlight"].as_u64().is_some_and(|count| count >= 1500).then_some(())
    })
    .await;
    let (mut consumer, _) = fixture.consumers.pop().unwrap();
    consumer.sigterm().unwrap();
    eventually(SOON, "it to log that it stops", || async { consumer.output().contains("stopping").then_some(()) })
        .await;
    sqlx::raw_sql("ROLLBACK").execute(&mut lock).await.unwrap();
    let status = consumer.wait_exit(SOON).await.unwrap();
    assert_eq!(status.code(), Some(0), "{}", consumer.log_excerpt());
    let rows = ids(&fixture).await.len();
    assert!(rows >= 1000 && rows < users(), "two batches were in flight, and no other was begun: {rows}");
    fixture.add_consumer().await;
    scenario.end(&fixture, &answers).await;
    let repeated = crate::scenario::settled(&fixture, 0, "repeated").await;
    assert_eq!(repeated, 0.0, "every committed message was acknowledged");
}
