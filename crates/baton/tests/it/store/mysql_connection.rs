//! The MySQL store when its connections are cut, lose answers, or stay silent.

use std::time::Instant;

use baton::relay::store::mysql::MySqlStore;
use baton::relay::store::{StoreError, TransactionStore};
use harness::proxy::{Mode, Proxy};
use sqlx::AssertSqlSafe;

use super::fixture::{Schema, row};
use super::lossy_link::{Loss, LossyLink};
use super::mysql::{PATIENCE, count, keyed};

#[tokio::test]
async fn a_commit_whose_answer_is_lost_is_an_unknown_outcome() {
    let schema = Schema::migrated().await;
    let tap = LossyLink::start(schema.address(), "COMMIT", Loss::Answer).await;
    let store = MySqlStore::open(&schema.options_through(&tap.address, PATIENCE)).await.unwrap();
    tap.arm();
    let stored = row(1);
    let answer = store.insert(std::slice::from_ref(&stored)).await;
    assert!(matches!(answer, Err(StoreError::OutcomeUnknown(_))), "{answer:?}");
    assert_eq!(store.get(stored.id).await.unwrap(), Some(stored), "this time it was stored");
    tap.arm();
    let answers = store.accept(&[keyed("a", 1), keyed("b", 1)]).await;
    assert!(answers.iter().all(|answer| matches!(answer, Err(StoreError::OutcomeUnknown(_)))), "{answers:?}");
    assert_eq!(count(&schema).await, 3);
}

#[tokio::test]
async fn a_commit_that_never_arrives_is_an_unknown_outcome_too() {
    let schema = Schema::migrated().await;
    let tap = LossyLink::start(schema.address(), "COMMIT", Loss::Request).await;
    let store = MySqlStore::open(&schema.options_through(&tap.address, PATIENCE)).await.unwrap();
    tap.arm();
    let lost = row(1);
    let answer = store.insert(std::slice::from_ref(&lost)).await;
    assert!(matches!(answer, Err(StoreError::OutcomeUnknown(_))), "{answer:?}");
    assert_eq!(store.get(lost.id).await.unwrap(), None, "this time it was not stored");
}

#[tokio::test]
async fn a_connection_lost_before_the_commit_changed_nothing() {
    let schema = Schema::migrated().await;
    for loss in [Loss::Request, Loss::Answer] {
        let tap = LossyLink::start(schema.address(), "INSERT INTO transactions", loss).await;
        let store = MySqlStore::open(&schema.options_through(&tap.address, PATIENCE)).await.unwrap();
        tap.arm();
        let lost = row(1);
        let answer = store.insert(std::slice::from_ref(&lost)).await;
        assert!(matches!(answer, Err(StoreError::Unavailable(_))), "{answer:?}");
        assert_eq!(store.get(lost.id).await.unwrap(), None);
        store.insert(std::slice::from_ref(&lost)).await.unwrap();
        assert_eq!(store.get(lost.id).await.unwrap(), Some(lost));
    }
}

#[tokio::test]
async fn a_server_that_stands_still_is_given_up_in_time_and_its_connection_thrown_away() {
    let schema = Schema::migrated().await;
    let proxy = Proxy::start(schema.address()).await;
    let store = MySqlStore::open(&schema.options_through(&proxy.address(), PATIENCE)).await.unwrap();
    let before = proxy.connections();
    proxy.set(Mode::BlackHole).await;
    let lost = row(1);
    for call in ["write", "read"] {
        let started = Instant::now();
        let answer = match call {
            "write" => store.insert(std::slice::from_ref(&lost)).await,
            _ => store.ping().await,
        };
        assert!(matches!(answer, Err(StoreError::Unavailable(_))), "{call}: {answer:?}");
        assert!(started.elapsed() < PATIENCE * 2, "{call} took {:?}", started.elapsed());
    }
    proxy.set(Mode::Forward).await;
    store.insert(std::slice::from_ref(&lost)).await.unwrap();
    assert!(proxy.connections() > before, "a connection that did not answer was used again");
    assert_eq!(count(&schema).await, 1);
}

#[tokio::test]
async fn a_commit_that_is_not_answered_in_time_is_an_unknown_outcome() {
    let schema = Schema::migrated().await;
    let tap = LossyLink::start(schema.address(), "COMMIT", Loss::Silence).await;
    let store = MySqlStore::open(&schema.options_through(&tap.address, PATIENCE)).await.unwrap();
    tap.arm();
    let stored = row(1);
    let started = Instant::now();
    let answer = store.insert(std::slice::from_ref(&stored)).await;
    assert!(matches!(answer, Err(StoreError::OutcomeUnknown(_))), "{answer:?}");
    assert!(started.elapsed() < PATIENCE * 2, "it took {:?}", started.elapsed());
    // The next call has a connection of its own: the answer that comes late is not taken for its own.
    assert_eq!(store.get(stored.id).await.unwrap(), Some(stored));
}

#[tokio::test]
async fn a_server_that_is_away_changes_nothing_and_is_found_again() {
    let schema = Schema::migrated().await;
    let proxy = Proxy::start(schema.address()).await;
    let store = MySqlStore::open(&schema.options_through(&proxy.address(), PATIENCE)).await.unwrap();
    proxy.set(Mode::Refuse).await;
    let refused = store.insert(&[row(1)]).await;
    assert!(matches!(refused, Err(StoreError::Unavailable(_))), "{refused:?}");
    proxy.set(Mode::Forward).await;
    store.insert(&[row(1)]).await.unwrap();
    // Cut while idle, as a restarted server leaves them: nobody notices.
    proxy.cut().await;
    store.insert(&[row(1)]).await.unwrap();
    proxy.cut().await;
    store.ping().await.unwrap();
    // Ended by the server, which says so to the next who asks.
    kill_all(&schema).await;
    store.insert(&[row(1)]).await.unwrap();
    kill_all(&schema).await;
    store.ping().await.unwrap();
    assert_eq!(count(&schema).await, 3);
}

/// Ends every connection to this database but the one that does it.
async fn kill_all(schema: &Schema) {
    const SQL: &str =
        "SELECT CAST(id AS SIGNED) FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()";
    let mut connection = schema.connect().await;
    let ids: Vec<i64> = sqlx::query_scalar(SQL).fetch_all(&mut connection).await.unwrap();
    assert!(!ids.is_empty());
    for id in ids {
        // One that has gone by itself meanwhile cannot be ended, and need not be.
        sqlx::query(AssertSqlSafe(format!("KILL {id}"))).execute(&mut connection).await.ok();
    }
}
