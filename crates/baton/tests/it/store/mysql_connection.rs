//! The MySQL store when its connections are cut, lose answers, or stay silent.

use std::time::{Duration, Instant};

use baton::relay::state::transaction::ConsumerId;
use baton::relay::store::mysql::{MySqlOptions, MySqlStore};
use baton::relay::store::{StoreError, TransactionStore};
use harness::proxy::{Mode, Proxy};
use harness::wait::eventually;
use sqlx::AssertSqlSafe;

use super::fixture::{Schema, now, row};
use super::lossy_link::{Loss, LossyLink};
use super::mysql::{CALL_TIMEOUT, count, keyed};
use crate::relay_fixture::SOON;

#[tokio::test]
async fn a_commit_whose_answer_is_lost_is_an_unknown_outcome() {
    let schema = Schema::migrated().await;
    let (link, store) = open_lossy(&schema, "COMMIT", Loss::Answer).await;
    link.arm();
    let stored = row(1);
    let answer = store.insert(std::slice::from_ref(&stored)).await;
    assert!(matches!(answer, Err(StoreError::OutcomeUnknown(_))), "{answer:?}");
    assert_eq!(store.get(stored.id).await.unwrap(), Some(stored), "the commit was executed");
    link.arm();
    let answers = store.accept(&[keyed("a", 1), keyed("b", 1)]).await;
    assert!(answers.iter().all(|answer| matches!(answer, Err(StoreError::OutcomeUnknown(_)))), "{answers:?}");
    assert_eq!(count(&schema).await, 3);
}

#[tokio::test]
async fn a_commit_that_never_arrives_is_an_unknown_outcome() {
    let schema = Schema::migrated().await;
    let (link, store) = open_lossy(&schema, "COMMIT", Loss::Request).await;
    link.arm();
    let lost = row(1);
    let answer = store.insert(std::slice::from_ref(&lost)).await;
    assert!(matches!(answer, Err(StoreError::OutcomeUnknown(_))), "{answer:?}");
    assert_eq!(store.get(lost.id).await.unwrap(), None, "the commit was not executed");
}

#[tokio::test]
async fn a_connection_lost_before_the_commit_changes_nothing() {
    let schema = Schema::migrated().await;
    for loss in [Loss::Request, Loss::Answer] {
        let (link, store) = open_lossy(&schema, "INSERT INTO transactions", loss).await;
        link.arm();
        let lost = row(1);
        let answer = store.insert(std::slice::from_ref(&lost)).await;
        assert!(matches!(answer, Err(StoreError::Unavailable(_))), "{answer:?}");
        assert_eq!(store.get(lost.id).await.unwrap(), None);
        store.insert(std::slice::from_ref(&lost)).await.unwrap();
        assert_eq!(store.get(lost.id).await.unwrap(), Some(lost));
    }
}

#[tokio::test]
async fn calls_to_a_silent_server_time_out_and_their_connection_is_discarded() {
    let schema = Schema::migrated().await;
    let proxy = Proxy::start(schema.address()).await;
    let store = open_through(&schema, &proxy.address()).await;
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
        assert!(started.elapsed() < CALL_TIMEOUT * 2, "{call} took {:?}", started.elapsed());
    }
    proxy.set(Mode::Forward).await;
    store.insert(std::slice::from_ref(&lost)).await.unwrap();
    assert!(proxy.connections() > before, "a silent connection was reused");
    assert_eq!(count(&schema).await, 1);
}

#[tokio::test]
async fn a_commit_that_times_out_is_an_unknown_outcome() {
    let schema = Schema::migrated().await;
    let (link, store) = open_lossy(&schema, "COMMIT", Loss::AnswerInSilence).await;
    link.arm();
    let stored = row(1);
    let started = Instant::now();
    let answer = store.insert(std::slice::from_ref(&stored)).await;
    assert!(matches!(answer, Err(StoreError::OutcomeUnknown(_))), "{answer:?}");
    assert!(started.elapsed() < CALL_TIMEOUT * 2, "it took {:?}", started.elapsed());
    // The next call uses another connection, so it cannot read the late answer of the first.
    assert_eq!(store.get(stored.id).await.unwrap(), Some(stored));
}

#[tokio::test]
async fn calls_without_a_server_change_nothing_and_the_store_reconnects() {
    let schema = Schema::migrated().await;
    let proxy = Proxy::start(schema.address()).await;
    let store = open_through(&schema, &proxy.address()).await;
    proxy.set(Mode::Refuse).await;
    let refused = store.insert(&[row(1)]).await;
    assert!(matches!(refused, Err(StoreError::Unavailable(_))), "{refused:?}");
    proxy.set(Mode::Forward).await;
    store.insert(&[row(1)]).await.unwrap();
    // Connections cut while idle, as by a server's restart, cause no error.
    proxy.cut().await;
    store.insert(&[row(1)]).await.unwrap();
    proxy.cut().await;
    store.ping().await.unwrap();
    // Connections killed by the server answer the next statement with an error, which the store hides.
    kill_all(&schema).await;
    store.insert(&[row(1)]).await.unwrap();
    kill_all(&schema).await;
    store.ping().await.unwrap();
    assert_eq!(count(&schema).await, 3);
}

/// A client that gives up must not keep the server busy. Its connection is closed, which a server does not notice while it
/// works: the statement's own time limit ends it.
#[tokio::test]
async fn a_read_that_timed_out_or_whose_caller_is_gone_is_stopped() {
    const RUNNING: &str = "SELECT COUNT(*) FROM information_schema.processlist WHERE db = DATABASE() \
         AND id <> CONNECTION_ID() AND info LIKE 'SELECT seen_at%'";
    let schema = Schema::migrated().await;
    let options = MySqlOptions { timeout: Duration::from_secs(5), ..schema.options() };
    let store = MySqlStore::open(&options).await.unwrap();
    let me = ConsumerId::generate();
    store.heartbeat(&me, now()).await.unwrap();
    // Reading a heartbeat takes hours of work. A server that only sleeps would look whether its client is still there.
    let view =
        "CREATE VIEW consumers AS SELECT id, seen_at FROM beats WHERE BENCHMARK(1000000000000, SHA2(id, 512)) = 0";
    for sql in ["RENAME TABLE consumers TO beats", view] {
        sqlx::query(sql).execute(&mut schema.connect().await).await.unwrap();
    }
    let until_running = async |wanted: i64, what: &str| {
        eventually(SOON, what, || async {
            let running: i64 = sqlx::query_scalar(RUNNING).fetch_one(&mut schema.connect().await).await.unwrap();
            (running == wanted).then_some(())
        })
        .await;
    };
    for caller_stays in [true, false] {
        let (store, me) = (store.clone(), me.clone());
        let read = tokio::spawn(async move { store.last_heartbeat(&me).await });
        until_running(1, "the read to run").await;
        if caller_stays {
            let answer = read.await.unwrap();
            assert!(matches!(answer, Err(StoreError::Unavailable(_))), "{answer:?}");
        } else {
            read.abort();
        }
        until_running(0, "the server to stop the read").await;
    }
}

/// A store whose only connection goes through a [`LossyLink`].
async fn open_lossy(schema: &Schema, text: &'static str, loss: Loss) -> (LossyLink, MySqlStore) {
    let link = LossyLink::start(schema.address(), text, loss).await;
    let store = open_through(schema, &link.address).await;
    (link, store)
}

async fn open_through(schema: &Schema, address: &str) -> MySqlStore {
    MySqlStore::open(&schema.options_through(address, CALL_TIMEOUT)).await.unwrap()
}

/// Kills every connection to this database except its own.
async fn kill_all(schema: &Schema) {
    const SQL: &str =
        "SELECT CAST(id AS SIGNED) FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()";
    let mut connection = schema.connect().await;
    let ids: Vec<i64> = sqlx::query_scalar(SQL).fetch_all(&mut connection).await.unwrap();
    assert!(!ids.is_empty());
    for id in ids {
        // Fails if the connection has closed meanwhile.
        sqlx::query(AssertSqlSafe(format!("KILL {id}"))).execute(&mut connection).await.ok();
    }
}
