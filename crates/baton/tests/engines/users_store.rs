//! The contract of the users' store, on both databases, and failures that only PostgreSQL has.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use baton::timestamp::Timestamp;
use baton::users::quarantined_message::Quarantined;
use baton::users::store::postgres::{PostgresOptions, PostgresStore};
use baton::users::store::sqlite::SqliteUserStore;
use baton::users::store::{InsertOutcome, UserStore, UserStoreErrorKind};
use baton::users::user::{User, UserId};
use harness::engine::server;
use harness::proxy::{Mode, Proxy};
use harness::wait::eventually;
use pipeline::sqlite::Database;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use uuid::Uuid;

fn user(number: usize) -> User {
    User { id: UserId::generate(), name: format!("User {number}"), email: format!("u{number}@x") }
}

fn users(count: usize) -> Vec<User> {
    (0..count).map(user).collect()
}

fn too_long(mut user: User) -> User {
    user.name = "n".repeat(256);
    user
}

fn refused(outcomes: &[InsertOutcome]) -> Vec<usize> {
    let is_refused = |fate: &InsertOutcome| matches!(fate, InsertOutcome::Refused(_));
    outcomes.iter().enumerate().filter(|(_, fate)| is_refused(fate)).map(|(place, _)| place).collect()
}

async fn stored(store: &dyn UserStore, users: &[User]) -> usize {
    let mut count = 0;
    for user in users {
        count += usize::from(store.get(user.id).await.unwrap().is_some_and(|found| found.user == *user));
    }
    count
}

async fn inserting_a_user_twice_makes_one_row(store: Arc<dyn UserStore>) {
    let before = Timestamp::from(std::time::SystemTime::now());
    let mut batch = users(5);
    batch.push(batch[2].clone());
    let first = store.insert(&batch).await.unwrap();
    assert_eq!((first.new, first.outcomes), (5, vec![InsertOutcome::Stored; 6]));
    batch.push(user(9));
    let again = store.insert(&batch).await.unwrap();
    assert_eq!((again.new, again.outcomes), (1, vec![InsertOutcome::Stored; 7]));
    let found = store.get(batch[0].id).await.unwrap().unwrap();
    assert_eq!(found.user, batch[0]);
    assert!(
        found.created_at.0 >= before.0 - 5000
            && found.created_at.0 <= Timestamp::from(std::time::SystemTime::now()).0 + 5000
    );
    assert_eq!(store.get(UserId::generate()).await.unwrap(), None);
    assert_eq!(store.insert(&[]).await.unwrap().outcomes, []);
}

async fn another_user_under_the_same_id_is_refused(store: Arc<dyn UserStore>) {
    let first = user(1);
    store.insert(std::slice::from_ref(&first)).await.unwrap();
    let other = User { name: "Other".into(), ..first.clone() };
    let inserted = store.insert(&[user(2), other, first.clone()]).await.unwrap();
    assert_eq!((inserted.new, refused(&inserted.outcomes)), (1, vec![1]));
    assert_eq!(stored(&*store, &[first]).await, 1);
}

async fn a_bad_row_is_refused_and_the_rest_of_its_batch_stored(store: Arc<dyn UserStore>) {
    for bad in [vec![0], vec![999], vec![499], vec![0, 1, 500, 998, 999], (100..150).collect()] {
        let mut batch = users(1000);
        for place in &bad {
            batch[*place] = too_long(batch[*place].clone());
        }
        let inserted = store.insert(&batch).await.unwrap();
        assert_eq!(refused(&inserted.outcomes), bad);
        assert_eq!(inserted.new, 1000 - bad.len());
        let InsertOutcome::Refused(reason) = &inserted.outcomes[bad[0]] else { unreachable!() };
        assert!(reason.contains("users_name_length") && !reason.contains("nnnn"), "{reason}");
        assert_eq!(stored(&*store, &batch[90..160]).await, (90..160).filter(|place| !bad.contains(place)).count());
    }
}

async fn a_quarantined_message_is_kept_byte_for_byte(store: Arc<dyn UserStore>) {
    let message = |id: &str, body: &[u8]| Quarantined {
        message_id: id.into(),
        error: "invalid user: a\0b".into(),
        body: body.to_vec(),
        at: Timestamp(1_700_000_000_123),
    };
    store.quarantine(&[message("b", b"\0\xff{"), message("a", b"")]).await.unwrap();
    store.quarantine(&[message("b", b"other")]).await.unwrap();
    assert_eq!(store.count_quarantined().await.unwrap(), 2);
    let listed = store.list_quarantined(None, 10).await.unwrap();
    let ids: Vec<_> = listed.iter().map(|message| message.message_id.as_str()).collect();
    assert_eq!((ids, listed[1].body.as_slice(), listed[1].at.0), (vec!["a", "b"], &b"\0\xff{"[..], 1_700_000_000_123));
    assert_eq!(store.list_quarantined(Some("a"), 10).await.unwrap().len(), 1);
    assert_eq!(
        (store.remove_quarantined("a").await.unwrap(), store.remove_quarantined("a").await.unwrap()),
        (true, false)
    );
    store.ping().await.unwrap();
}

async fn on_sqlite<F: Future<Output = ()>>(test: impl Fn(Arc<dyn UserStore>) -> F) {
    let directory = tempfile::tempdir().unwrap();
    let database = Database::open(&directory.path().join("users.db")).unwrap();
    SqliteUserStore::open(&database).await.unwrap();
    test(Arc::new(SqliteUserStore::open(&database).await.unwrap())).await;
}

/// A new database on the server: a store on it, a connection to it, and its URL.
async fn postgres() -> (PostgresStore, PgConnection, String) {
    let url = server("BATON_TEST_POSTGRES_URL");
    let name = format!("baton_{}", Uuid::new_v4().simple());
    let mut admin = PgConnection::connect(&url).await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&mut admin).await.unwrap();
    let mut url = reqwest::Url::parse(&url).unwrap();
    url.set_path(&name);
    let (store, url) = (open(url.as_str()).await, url.to_string());
    (store, PgConnection::connect(&url).await.unwrap(), url)
}

async fn open(url: &str) -> PostgresStore {
    let options = PostgresOptions { timeout: Duration::from_secs(2), ..PostgresOptions::new(url) };
    PostgresStore::migrate(&options).await.unwrap();
    assert_eq!(PostgresStore::migrate(&options).await.unwrap(), 0, "a second migration has nothing to do");
    PostgresStore::open(&options).unwrap()
}

macro_rules! on_both {
    ($($test:ident),* $(,)?) => {
        mod sqlite {
            $(#[tokio::test]
            async fn $test() {
                super::on_sqlite(super::$test).await;
            })*
        }
        mod postgres {
            $(#[tokio::test]
            async fn $test() {
                super::$test(std::sync::Arc::new(super::postgres().await.0)).await;
            })*
        }
    };
}

on_both!(
    inserting_a_user_twice_makes_one_row,
    another_user_under_the_same_id_is_refused,
    a_bad_row_is_refused_and_the_rest_of_its_batch_stored,
    a_quarantined_message_is_kept_byte_for_byte,
);

#[tokio::test]
async fn a_schema_of_another_version_is_refused() {
    let (_, mut admin, url) = postgres().await;
    let options = PostgresOptions::new(&url);
    PostgresStore::check_schema(&options).await.unwrap();
    sqlx::raw_sql("INSERT INTO users_schema_version (version) VALUES (1000)").execute(&mut admin).await.unwrap();
    for refused in [PostgresStore::check_schema(&options).await, PostgresStore::migrate(&options).await.map(drop)] {
        let error = refused.unwrap_err().source.to_string();
        assert!(error.contains("1000") && error.contains("newer version of baton"), "{error}");
    }
    sqlx::raw_sql("DROP TABLE users_schema_version").execute(&mut admin).await.unwrap();
    let error = PostgresStore::check_schema(&options).await.unwrap_err().source.to_string();
    assert!(error.contains("run `baton migrate`"), "{error}");
}

#[tokio::test]
async fn a_row_that_breaks_an_added_constraint_is_refused_alone() {
    let (store, mut admin, _) = postgres().await;
    sqlx::raw_sql("CREATE UNIQUE INDEX users_email ON users (email)").execute(&mut admin).await.unwrap();
    let known = user(7);
    store.insert(std::slice::from_ref(&known)).await.unwrap();
    let mut batch = users(300);
    batch[7].email = "same@x".into();
    batch[40].email = known.email.clone();
    batch[41].email = "same@x".into();
    batch[200].name = "a\0b".into();
    let inserted = store.insert(&batch).await.unwrap();
    assert_eq!((inserted.new, refused(&inserted.outcomes)), (297, vec![40, 41, 200]));

    // A trigger's error does not name the row that it refuses.
    sqlx::raw_sql(
        "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS \
         $$ BEGIN IF NEW.name = 'Nobody' THEN RAISE EXCEPTION 'not welcome'; END IF; RETURN NEW; END $$; \
         CREATE TRIGGER no BEFORE INSERT ON users FOR EACH ROW EXECUTE FUNCTION no()",
    )
    .execute(&mut admin)
    .await
    .unwrap();
    let mut batch: Vec<User> = users(1300).split_off(300);
    batch[617].name = "Nobody".into();
    let inserted = store.insert(&batch).await.unwrap();
    assert_eq!(inserted.outcomes[617], InsertOutcome::Refused("not welcome".into()));
    assert_eq!((inserted.new, refused(&inserted.outcomes)), (999, vec![617]));
}

/// A deferred constraint is checked at the commit, so the error does not say which row broke it.
#[tokio::test]
async fn a_row_that_breaks_a_deferred_constraint_is_refused_alone() {
    let (store, mut admin, _) = postgres().await;
    let rule = "ALTER TABLE users ADD CONSTRAINT users_name UNIQUE (name) DEFERRABLE INITIALLY DEFERRED";
    sqlx::raw_sql(rule).execute(&mut admin).await.unwrap();
    let mut batch = users(1000);
    batch[401].name = batch[400].name.clone();
    let inserted = store.insert(&batch).await.unwrap();
    assert_eq!((inserted.new, refused(&inserted.outcomes)), (999, vec![401]));
}

/// Without our own length constraint, a name can exceed the server's limit for an index entry.
#[tokio::test]
async fn a_row_with_an_index_entry_that_is_too_long_is_refused_alone() {
    let (store, mut admin, _) = postgres().await;
    let rule = "ALTER TABLE users DROP CONSTRAINT users_name_length; CREATE INDEX users_name ON users (name)";
    sqlx::raw_sql(rule).execute(&mut admin).await.unwrap();
    let mut batch = users(300);
    // Random text, so that the server cannot compress it.
    batch[130].name = (0..300).map(|_| Uuid::new_v4().simple().to_string()).collect();
    let inserted = store.insert(&batch).await.unwrap();
    assert_eq!((inserted.new, refused(&inserted.outcomes)), (299, vec![130]));
}

#[tokio::test]
async fn a_failing_database_refuses_no_row_and_reports_the_kind_of_failure() {
    let (store, mut admin, url) = postgres().await;
    let batch = users(3);
    let kind_of = async |store: &PostgresStore| store.insert(&batch).await.unwrap_err().kind;

    sqlx::raw_sql("BEGIN; LOCK TABLE users IN EXCLUSIVE MODE").execute(&mut admin).await.unwrap();
    assert_eq!(kind_of(&store).await, UserStoreErrorKind::Timeout);
    sqlx::raw_sql("ROLLBACK").execute(&mut admin).await.unwrap();

    let database = url.rsplit('/').next().unwrap();
    let read_only = format!("ALTER DATABASE {database} SET default_transaction_read_only = on");
    sqlx::raw_sql(AssertSqlSafe(read_only)).execute(&mut admin).await.unwrap();
    let options = PostgresOptions { timeout: Duration::from_secs(2), ..PostgresOptions::new(&url) };
    let there = PostgresStore::open(&options).unwrap();
    assert_eq!(kind_of(&there).await, UserStoreErrorKind::ReadOnly);
    assert_eq!(there.ping().await.unwrap_err().kind, UserStoreErrorKind::ReadOnly);
    let writable = format!("ALTER DATABASE {database} RESET default_transaction_read_only");
    sqlx::raw_sql(AssertSqlSafe(writable)).execute(&mut admin).await.unwrap();

    sqlx::raw_sql("ALTER TABLE users RENAME TO gone").execute(&mut admin).await.unwrap();
    assert_eq!(kind_of(&store).await, UserStoreErrorKind::Other);
    sqlx::raw_sql("ALTER TABLE gone RENAME TO users").execute(&mut admin).await.unwrap();

    // The server's errors for a full disk and for a stack overflow: no row is at fault in either.
    for (code, kind) in [("53100", UserStoreErrorKind::DiskFull), ("54001", UserStoreErrorKind::Other)] {
        let fails = format!(
            "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS \
             $$ BEGIN RAISE EXCEPTION 'no room' USING ERRCODE = '{code}'; END $$; \
             CREATE TRIGGER fail BEFORE INSERT ON users FOR EACH ROW EXECUTE FUNCTION fail()"
        );
        sqlx::raw_sql(AssertSqlSafe(fails)).execute(&mut admin).await.unwrap();
        assert_eq!(kind_of(&store).await, kind);
        sqlx::raw_sql("DROP TRIGGER fail ON users; DROP FUNCTION fail").execute(&mut admin).await.unwrap();
    }
    assert_eq!(store.insert(&batch).await.unwrap().new, 3);
}

/// Our batch and another connection each hold a row that the other wants. Only ours has the default `deadlock_timeout`, so
/// the server ends ours.
#[tokio::test]
async fn a_deadlock_refuses_no_row_and_the_batch_can_be_repeated() {
    let (_, mut gate, url) = postgres().await;
    let options = PostgresOptions { timeout: Duration::from_secs(30), ..PostgresOptions::new(&url) };
    let store = PostgresStore::open(&options).unwrap();
    let batch = vec![user(1), User { name: "Late".into(), ..user(2) }];
    sqlx::raw_sql(
        "CREATE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS \
         $$ BEGIN IF NEW.name = 'Late' THEN PERFORM pg_advisory_xact_lock(1); END IF; RETURN NEW; END $$; \
         CREATE TRIGGER gate BEFORE INSERT ON users FOR EACH ROW EXECUTE FUNCTION gate(); \
         SELECT pg_advisory_lock(1)",
    )
    .execute(&mut gate)
    .await
    .unwrap();
    let mut other = PgConnection::connect(&url).await.unwrap();
    sqlx::raw_sql("SET deadlock_timeout = '1h'; BEGIN").execute(&mut other).await.unwrap();
    let take = "INSERT INTO users (id, name, email) VALUES ($1, 'Other', 'other@x')";
    sqlx::query(take).bind(batch[1].id.0).execute(&mut other).await.unwrap();

    let ours = tokio::spawn({
        let (store, batch) = (store.clone(), batch.clone());
        async move { store.insert(&batch).await }
    });
    until_waiting(&mut gate, 1).await;
    let first = batch[0].id.0;
    let theirs = tokio::spawn(async move {
        sqlx::query(take).bind(first).execute(&mut other).await.unwrap();
        other
    });
    until_waiting(&mut gate, 2).await;
    sqlx::raw_sql("SELECT pg_advisory_unlock(1)").execute(&mut gate).await.unwrap();
    assert_eq!(ours.await.unwrap().unwrap_err().kind, UserStoreErrorKind::Deadlock);
    sqlx::raw_sql("ROLLBACK").execute(&mut theirs.await.unwrap()).await.unwrap();
    assert_eq!(store.insert(&batch).await.unwrap().new, 2);
}

/// Waits until `count` connections wait for a lock in this database.
async fn until_waiting(admin: &mut PgConnection, count: i64) {
    let waiting = "SELECT COUNT(*) FROM pg_stat_activity \
         WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let admin = tokio::sync::Mutex::new(admin);
    eventually(Duration::from_secs(20), format!("{count} to wait"), || async {
        let found: i64 = sqlx::query_scalar(waiting).fetch_one(&mut **admin.lock().await).await.unwrap();
        (found == count).then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_call_after_a_server_restart_reconnects_without_an_error() {
    let (_, _, url) = postgres().await;
    let mut through = reqwest::Url::parse(&url).unwrap();
    let link = Proxy::start(format!("127.0.0.1:{}", through.port().unwrap())).await;
    through.set_port(Some(link.port())).unwrap();
    let store = open(through.as_str()).await;
    store.insert(&users(3)).await.unwrap();
    link.set(Mode::Cut).await;
    assert_eq!(store.insert(&users(3)).await.unwrap_err().kind, UserStoreErrorKind::Down);
    link.set(Mode::Forward).await;
    store.insert(&users(3)).await.unwrap();
    link.set(Mode::Cut).await;
    link.set(Mode::Forward).await;
    assert_eq!(store.insert(&users(3)).await.unwrap().new, 3, "the old connection is replaced");
    link.set(Mode::BlackHole).await;
    assert_eq!(store.insert(&users(3)).await.unwrap_err().kind, UserStoreErrorKind::Timeout);
}
