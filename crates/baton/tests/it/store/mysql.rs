//! The MySQL store's migrations, batches of accepts, and locks held by other processes.

use std::time::Duration;

use baton::relay::state::transaction::{Moved, RelayerTxId, Step, Transaction, TransactionId};
use baton::relay::store::mysql::MySqlStore;
use baton::relay::store::{Accepted, IdempotencyKey, NewTransaction, Saved, StoreError, TransactionStore};
use baton::timestamp::Timestamp;
use futures::future::join_all;
use harness::wait::eventually;
use sqlx::{AssertSqlSafe, MySqlConnection};

use super::fixture::{Schema, bind, claim, gasless_row, now, row};
use crate::relay_fixture::SOON;

/// Timeout of store calls in tests that wait for it: long enough for a busy machine.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(3);

#[tokio::test]
async fn opening_a_store_without_its_schema_names_the_migrate_command() {
    let schema = Schema::create().await;
    let Err(failure) = MySqlStore::open(&schema.options()).await else { panic!("the store opened") };
    assert!(failure.to_string().contains("run `baton migrate`"), "{failure}");
    assert!(!failure.is_transient());
}

#[tokio::test]
async fn a_schema_newer_than_the_program_is_refused() {
    let schema = Schema::migrated().await;
    let mut connection = schema.connect().await;
    let newer = "INSERT INTO schema_version (version, applied_at) VALUES (1000, NOW(3))";
    sqlx::query(newer).execute(&mut connection).await.unwrap();
    let migrated = MySqlStore::migrate(&schema.options()).await;
    assert!(matches!(migrated, Err(StoreError::TooNew { found: 1000, .. })), "{migrated:?}");
    let Err(opened) = MySqlStore::open(&schema.options()).await else { panic!("the store opened") };
    assert!(matches!(opened, StoreError::TooNew { found: 1000, .. }), "{opened:?}");
}

#[tokio::test]
async fn concurrent_migrations_apply_each_step_once() {
    let schema = Schema::create().await;
    let options = schema.options();
    let steps = join_all((0..4).map(|_| MySqlStore::migrate(&options))).await;
    let steps: usize = steps.into_iter().map(Result::unwrap).sum();
    assert_eq!(steps, 12);
    assert_eq!(MySqlStore::migrate(&options).await.unwrap(), 0);
    MySqlStore::open(&options).await.unwrap();
}

#[tokio::test]
async fn an_interrupted_migration_is_completed() {
    let schema = Schema::migrated().await;
    for drop_column in [false, true] {
        let mut connection = schema.connect().await;
        sqlx::query("DELETE FROM schema_version").execute(&mut connection).await.unwrap();
        sqlx::query("DROP TABLE consumers, timeline").execute(&mut connection).await.unwrap();
        if drop_column {
            sqlx::query("ALTER TABLE transactions DROP COLUMN block_number").execute(&mut connection).await.unwrap();
        }
        assert_eq!(MySqlStore::migrate(&schema.options()).await.unwrap(), 12);
        let store = MySqlStore::open(&schema.options()).await.unwrap();
        store.timeline(TransactionId::generate()).await.unwrap();
        assert_eq!(store.get(TransactionId::generate()).await.unwrap(), None);
    }
}

#[tokio::test]
async fn a_batch_of_accepts_is_stored_and_duplicates_are_identified() {
    let schema = Schema::migrated().await;
    let store = MySqlStore::open(&schema.options()).await.unwrap();
    // More than fit into one statement.
    let plain: Vec<NewTransaction> = (0..600).map(|_| (row(1000), None)).collect();
    assert!(store.accept(&plain).await.into_iter().all(|accepted| accepted.unwrap() == Accepted::Stored));
    assert!(store.accept(&[]).await.is_empty());
    for (row, _) in plain.iter().step_by(99) {
        assert_eq!(store.get(row.id).await.unwrap().as_ref(), Some(row));
    }
    let first = keyed("one", 1);
    let batch = [
        first.clone(),
        (row(1), None),
        keyed("two", 2),
        keyed("one", 1),
        keyed("one", 9),
        keyed("ONE", 3),
        keyed("one ", 4),
    ];
    let answers: Vec<_> = store.accept(&batch).await.into_iter().map(Result::unwrap).collect();
    use Accepted::{Duplicate, KeyReused, Stored};
    assert_eq!(answers, [Stored, Stored, Stored, Duplicate(first.0.id), KeyReused, Stored, Stored]);
    let repeated: Vec<_> = store.accept(&batch).await.into_iter().map(|answer| answer.ok()).collect();
    assert_eq!(repeated[0], None, "a known id is a conflict, even under its own key");
    let again: Vec<_> =
        store.accept(&[keyed("two", 2), keyed("two", 5)]).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(again, [Duplicate(batch[2].0.id), KeyReused]);
    let mut elsewhere = keyed("one", 1);
    elsewhere.0.api_key = "another key".into();
    assert_eq!(
        store.accept(&[elsewhere]).await.remove(0).unwrap(),
        Stored,
        "idempotency keys are scoped to the API key"
    );
    assert_eq!(count(&schema).await, 600 + 5 + 1);
}

#[tokio::test]
async fn concurrent_duplicate_requests_create_one_transaction() {
    let schema = Schema::migrated().await;
    let store = MySqlStore::open(&schema.options()).await.unwrap();
    let other = MySqlStore::open(&schema.options()).await.unwrap();
    for round in 0..5 {
        // Each batch has the same ten keys in another order, with rows without a key between them.
        let batches: Vec<Vec<NewTransaction>> = (0..8)
            .map(|batch| {
                let keyed = (0..10).map(|key| keyed(&format!("{round}-{}", (key * 7 + batch * 3) % 10), 1));
                keyed.flat_map(|keyed| [keyed, (row(1), None)]).collect()
            })
            .collect();
        let answers = accept_concurrently([&store, &other], &batches).await;
        for key in 0..10 {
            let name = format!("{round}-{key}");
            let of_key = batches.iter().zip(&answers).flat_map(|(batch, answers)| batch.iter().zip(answers));
            let of_key: Vec<_> =
                of_key.filter(|((_, key), _)| key.as_ref().is_some_and(|key| key.key == name)).collect();
            let winners: Vec<_> = of_key.iter().filter(|(_, answer)| **answer == Accepted::Stored).collect();
            assert_eq!((of_key.len(), winners.len()), (8, 1), "{of_key:?}");
            let winner = winners[0].0.0.id;
            assert!(
                of_key
                    .iter()
                    .all(|(_, answer)| matches!(answer, Accepted::Stored) || **answer == Accepted::Duplicate(winner))
            );
        }
    }
    assert_eq!(count(&schema).await, 5 * (10 + 80));
}

/// Accepts the batches concurrently, alternating between two stores.
async fn accept_concurrently(stores: [&MySqlStore; 2], batches: &[Vec<NewTransaction>]) -> Vec<Vec<Accepted>> {
    let accepts = batches.iter().enumerate().map(|(index, batch)| stores[index % 2].accept(batch));
    let answers = join_all(accepts).await.into_iter();
    answers.map(|answers| answers.into_iter().map(Result::unwrap).collect()).collect()
}

#[tokio::test]
async fn each_nonce_in_concurrent_batches_goes_to_one_row() {
    let schema = Schema::migrated().await;
    let store = MySqlStore::open(&schema.options()).await.unwrap();
    let other = MySqlStore::open(&schema.options()).await.unwrap();
    for round in 0..5_u64 {
        // Each batch has the same ten nonces in another order, under its own keys, with direct rows between them.
        let batches: Vec<Vec<NewTransaction>> = (0..8_u64)
            .map(|batch| {
                let wanted = (0..10).map(|nonce| round * 10 + (nonce * 7 + batch * 3) % 10);
                let key = |nonce| IdempotencyKey { key: format!("{batch}-{nonce}"), body_sha256: [1; 32] };
                wanted.flat_map(|nonce| [(gasless_row(nonce), Some(key(nonce))), (row(1), None)]).collect()
            })
            .collect();
        let answers = accept_concurrently([&store, &other], &batches).await;
        let all: Vec<_> = batches.iter().zip(&answers).flat_map(|(batch, answers)| batch.iter().zip(answers)).collect();
        assert!(all.iter().all(|((row, _), answer)| row.forward.is_some() || **answer == Accepted::Stored));
        for nonce in round * 10..round * 10 + 10 {
            let is_of_nonce = |row: &Transaction| row.forward.as_ref().is_some_and(|forward| forward.nonce() == nonce);
            let of_nonce: Vec<_> = all.iter().filter(|((row, _), _)| is_of_nonce(row)).collect();
            let winners: Vec<_> = of_nonce.iter().filter(|(_, answer)| **answer == Accepted::Stored).collect();
            let losers: Vec<_> = of_nonce.iter().filter(|(_, answer)| **answer != Accepted::Stored).collect();
            assert_eq!((winners.len(), losers.len()), (1, 7));
            let winner = winners[0].0.0.id;
            assert!(losers.iter().all(|(_, answer)| **answer == Accepted::NonceTaken(winner)), "{losers:?}");
            for ((row, key), _) in losers {
                let key = &key.as_ref().unwrap().key;
                assert_eq!(store.key_owner(&row.api_key, key).await.unwrap(), None, "its key stays free");
                assert_eq!(store.get(row.id).await.unwrap(), None);
            }
        }
    }
}

#[tokio::test]
async fn one_invalid_row_does_not_fail_its_batch() {
    let schema = Schema::migrated().await;
    let store = MySqlStore::open(&schema.options()).await.unwrap();
    let known = row(1);
    store.insert(std::slice::from_ref(&known)).await.unwrap();
    let mut too_long = keyed("too-long", 1);
    too_long.0.api_key = "k".repeat(300);
    let batch = [keyed("good", 1), (known, None), too_long, (row(2), None), keyed("good", 1)];
    let answers = store.accept(&batch).await;
    assert!(matches!(answers[0], Ok(Accepted::Stored)), "{answers:?}");
    assert!(matches!(answers[1], Err(StoreError::Conflict { constraint: "transactions_pkey" })), "{answers:?}");
    assert!(matches!(answers[2], Err(StoreError::Unavailable(_))), "{answers:?}");
    assert!(matches!(answers[3], Ok(Accepted::Stored)), "{answers:?}");
    assert!(matches!(&answers[4], Ok(Accepted::Duplicate(id)) if *id == batch[0].0.id), "{answers:?}");
    assert_eq!(count(&schema).await, 3);
}

/// Stores and claims a row; returns it as accepted, and the move that binds it to `tx_id`, unsaved.
async fn prepare_bind(store: &MySqlStore, tx_id: &str) -> (Transaction, Moved) {
    let accepted = row(now().0);
    store.insert(std::slice::from_ref(&accepted)).await.unwrap();
    let (claimed, token) = claim(&accepted);
    store.save(&claimed).await.unwrap();
    let bound = bind(&claimed.transaction, token, tx_id);
    (accepted, bound)
}

#[tokio::test]
async fn a_deadlock_is_retried() {
    let schema = Schema::migrated().await;
    let store = MySqlStore::open(&schema.options()).await.unwrap();
    let (accepted, bound) = prepare_bind(&store, "wanted").await;

    // The rival holds the record that the bind needs, and 200 more rows, so that the server does not choose it as victim.
    let mut rival = schema.connect().await;
    sqlx::query("BEGIN").execute(&mut rival).await.unwrap();
    let values: Vec<_> = (0..200).map(|number| format!("('other-{number}', 'x')")).collect();
    let insert = format!("INSERT INTO relayer_transactions VALUES ('wanted', 'x'), {}", values.join(", "));
    sqlx::query(AssertSqlSafe(insert)).execute(&mut rival).await.unwrap();
    let saving = tokio::spawn({
        let store = store.clone();
        async move { store.save(&bound).await }
    });
    until_blocked(&schema, "INSERT INTO relayer_transactions").await;
    // The rival now locks the row that the bind holds. It succeeds only because the server rolls the bind back.
    sqlx::query("SELECT 1 FROM transactions FOR UPDATE").fetch_all(&mut rival).await.unwrap();
    assert!(!saving.is_finished());
    sqlx::query("ROLLBACK").execute(&mut rival).await.unwrap();
    assert_eq!(saving.await.unwrap().unwrap(), Saved::Yes { early: false });
    assert_eq!(store.timeline(accepted.id).await.unwrap().len(), 2, "the rolled back attempt left no step");
}

#[tokio::test]
async fn a_webhook_waits_for_an_uncommitted_bind_that_found_no_early_webhook() {
    let schema = Schema::migrated().await;
    let store = MySqlStore::open(&schema.options()).await.unwrap();
    let (accepted, bound) = prepare_bind(&store, "oz-1").await;

    // The rival blocks the bind at its last step, after the bind has found no early webhook.
    let mut rival = schema.connect().await;
    sqlx::query("BEGIN").execute(&mut rival).await.unwrap();
    let step = format!("INSERT INTO timeline VALUES ('{}', 2, '2026-01-01', 'x', 'x')", accepted.id);
    sqlx::query(AssertSqlSafe(step)).execute(&mut rival).await.unwrap();
    let (binding, receiving) = (store.clone(), store.clone());
    let saving = tokio::spawn(async move { binding.save(&bound).await });
    until_blocked(&schema, "INSERT INTO timeline").await;
    let mut webhook = tokio::spawn(async move {
        let tx_id = RelayerTxId("oz-1".into());
        receiving.keep_early_webhook(&tx_id, "{}", now()).await.unwrap();
        receiving.find_bound(&tx_id).await.unwrap()
    });
    tokio::select! {
        () = until_blocked(&schema, "SELECT 1 FROM relayer_transactions") => {}
        found = &mut webhook => panic!("the webhook did not wait: {found:?}"),
    }
    sqlx::query("ROLLBACK").execute(&mut rival).await.unwrap();
    assert_eq!(saving.await.unwrap().unwrap(), Saved::Yes { early: false });
    assert_eq!(webhook.await.unwrap().unwrap().id, accepted.id);
}

#[tokio::test]
async fn a_dropped_call_leaves_no_database_transaction_open() {
    let schema = Schema::migrated().await;
    let store = MySqlStore::open(&schema.options_through(&schema.address(), SOON)).await.unwrap();
    let accepted = row(1);
    store.insert(std::slice::from_ref(&accepted)).await.unwrap();
    let mut rival = lock_all_rows(&schema).await;
    {
        let step = Step::new("never", "written");
        let noting = std::pin::pin!(store.note(accepted.id, &step, Timestamp(1)));
        let blocked = std::pin::pin!(until_blocked(&schema, "SELECT 1 FROM transactions"));
        futures::future::select(noting, blocked).await;
    }
    sqlx::query("ROLLBACK").execute(&mut rival).await.unwrap();
    // The pool has one connection: if it were still in the old transaction, this write would never be committed.
    store.note(accepted.id, &Step::new("noted", "by a test"), Timestamp(2)).await.unwrap();
    let steps: i64 =
        sqlx::query_scalar("SELECT COUNT(*) FROM timeline").fetch_one(&mut schema.connect().await).await.unwrap();
    assert_eq!(steps, 1, "the dropped call wrote nothing");
}

#[tokio::test]
async fn a_lock_timeout_changes_nothing() {
    let schema = Schema::migrated().await;
    let store = MySqlStore::open(&schema.options_through(&schema.address(), CALL_TIMEOUT)).await.unwrap();
    let accepted = row(1);
    store.insert(std::slice::from_ref(&accepted)).await.unwrap();
    let mut rival = lock_all_rows(&schema).await;
    let claimed = claim(&accepted).0;
    let answer = store.save(&claimed).await;
    assert!(matches!(answer, Err(StoreError::Unavailable(_))), "{answer:?}");
    sqlx::query("ROLLBACK").execute(&mut rival).await.unwrap();
    assert_eq!(store.get(accepted.id).await.unwrap(), Some(accepted));
    assert_eq!(store.save(&claimed).await.unwrap(), Saved::Yes { early: false });
}

/// A connection whose open transaction locks every row.
async fn lock_all_rows(schema: &Schema) -> MySqlConnection {
    let mut connection = schema.connect().await;
    sqlx::query("BEGIN").execute(&mut connection).await.unwrap();
    sqlx::query("SELECT 1 FROM transactions FOR UPDATE").fetch_all(&mut connection).await.unwrap();
    connection
}

pub fn keyed(key: &str, body: u8) -> NewTransaction {
    (row(1), Some(IdempotencyKey { key: key.into(), body_sha256: [body; 32] }))
}

pub async fn count(schema: &Schema) -> i64 {
    sqlx::query_scalar("SELECT COUNT(*) FROM transactions").fetch_one(&mut schema.connect().await).await.unwrap()
}

/// Waits until a statement with this beginning has been running for a second in this database. (The server caches its own
/// list of lock waits while it is being polled.)
pub async fn until_blocked(schema: &Schema, statement: &str) {
    const SQL: &str = "SELECT COUNT(*) FROM information_schema.processlist \
        WHERE db = DATABASE() AND info LIKE CONCAT(?, '%') AND time >= 1";
    let connection = tokio::sync::Mutex::new(schema.connect().await);
    eventually(SOON, "a wait for a lock", || async {
        let connection: &mut MySqlConnection = &mut *connection.lock().await;
        let blocked: i64 = sqlx::query_scalar(SQL).bind(statement).fetch_one(connection).await.unwrap();
        (blocked > 0).then_some(())
    })
    .await;
}
