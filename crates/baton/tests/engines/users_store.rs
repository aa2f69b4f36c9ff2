//! The contract of the users' store, on both databases, and what only PostgreSQL can do to us.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use baton::timestamp::Timestamp;
use baton::users::quarantine::Quarantined;
use baton::users::store::postgres::{PostgresOptions, PostgresStore};
use baton::users::store::sqlite::SqliteStore;
use baton::users::store::{Fate, Trouble, UserStore};
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

fn refused(fates: &[Fate]) -> Vec<usize> {
    let is_refused = |fate: &Fate| matches!(fate, Fate::Refused(_));
    fates.iter().enumerate().filter(|(_, fate)| is_refused(fate)).map(|(place, _)| place).collect()
}

async fn stored(store: &dyn UserStore, users: &[User]) -> usize {
    let mut count = 0;
    for user in users {
        count += usize::from(store.get(user.id).await.unwrap().is_some_and(|found| found.user == *user));
    }
    count
}

async fn a_user_may_come_twice(store: Arc<dyn UserStore>) {
    let before = Timestamp::now();
    let mut batch = users(5);
    batch.push(batch[2].clone());
    let first = store.insert(&batch).await.unwrap();
    assert_eq!((first.new, first.fates), (5, vec![Fate::Stored; 6]));
    batch.push(user(9));
    let again = store.insert(&batch).await.unwrap();
    assert_eq!((again.new, again.fates), (1, vec![Fate::Stored; 7]));
    let found = store.get(batch[0].id).await.unwrap().unwrap();
    assert_eq!(found.user, batch[0]);
    assert!(found.created_at.0 >= before.0 - 5000 && found.created_at.0 <= Timestamp::now().0 + 5000);
    assert_eq!(store.get(UserId::generate()).await.unwrap(), None);
    assert_eq!(store.insert(&[]).await.unwrap().fates, []);
}

async fn another_user_under_the_same_id_is_refused(store: Arc<dyn UserStore>) {
    let first = user(1);
    store.insert(std::slice::from_ref(&first)).await.unwrap();
    let other = User { name: "Other".into(), ..first.clone() };
    let inserted = store.insert(&[user(2), other, first.clone()]).await.unwrap();
    assert_eq!((inserted.new, refused(&inserted.fates)), (1, vec![1]));
    assert_eq!(stored(&*store, &[first]).await, 1);
}

async fn bad_rows_leave_the_batch_alone(store: Arc<dyn UserStore>) {
    for bad in [vec![0], vec![999], vec![499], vec![0, 1, 500, 998, 999], (100..150).collect()] {
        let mut batch = users(1000);
        for place in &bad {
            batch[*place] = too_long(batch[*place].clone());
        }
        let inserted = store.insert(&batch).await.unwrap();
        assert_eq!(refused(&inserted.fates), bad);
        assert_eq!(inserted.new, 1000 - bad.len());
        let Fate::Refused(reason) = &inserted.fates[bad[0]] else { unreachable!() };
        assert!(reason.contains("users_name_length") && !reason.contains("nnnn"), "{reason}");
        assert_eq!(stored(&*store, &batch[90..160]).await, (90..160).filter(|place| !bad.contains(place)).count());
    }
}

async fn a_quarantined_message_is_kept_byte_for_byte(store: Arc<dyn UserStore>) {
    let letter = |id: &str, body: &[u8]| Quarantined {
        message_id: id.into(),
        error: "invalid user: a\0b".into(),
        body: body.to_vec(),
        at: Timestamp(1_700_000_000_123),
    };
    store.quarantine(&[letter("b", b"\0\xff{"), letter("a", b"")]).await.unwrap();
    store.quarantine(&[letter("b", b"other")]).await.unwrap();
    assert_eq!(store.count_quarantined().await.unwrap(), 2);
    let listed = store.list_quarantined(None, 10).await.unwrap();
    let ids: Vec<_> = listed.iter().map(|letter| letter.message_id.as_str()).collect();
    assert_eq!((ids, listed[1].body.as_slice(), listed[1].at.0), (vec!["a", "b"], &b"\0\xff{"[..], 1_700_000_000_123));
    assert_eq!(store.list_quarantined(Some("a"), 10).await.unwrap().len(), 1);
    assert_eq!((store.remove_quarantined("a").await.unwrap(), store.remove_quarantined("a").await.unwrap()), (true, false));
    store.ping().await.unwrap();
}

async fn on_sqlite<F: Future<Output = ()>>(story: impl Fn(Arc<dyn UserStore>) -> F) {
    let directory = tempfile::tempdir().unwrap();
    let database = Database::open(&directory.path().join("users.db")).unwrap();
    SqliteStore::open(&database).await.unwrap();
    story(Arc::new(SqliteStore::open(&database).await.unwrap())).await;
}

/// A database of its own on the server.
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
    assert_eq!(PostgresStore::migrate(&options).await.unwrap(), 0, "once is enough");
    PostgresStore::open(&options).unwrap()
}

macro_rules! on_both {
    ($($story:ident),* $(,)?) => {
        mod sqlite {
            $(#[tokio::test]
            async fn $story() {
                super::on_sqlite(super::$story).await;
            })*
        }
        mod postgres {
            $(#[tokio::test]
            async fn $story() {
                super::$story(std::sync::Arc::new(super::postgres().await.0)).await;
            })*
        }
    };
}

on_both!(
    a_user_may_come_twice,
    another_user_under_the_same_id_is_refused,
    bad_rows_leave_the_batch_alone,
    a_quarantined_message_is_kept_byte_for_byte,
);

#[tokio::test]
async fn rules_that_somebody_added_to_the_table_are_broken_by_their_row_alone() {
    let (store, mut admin, _) = postgres().await;
    sqlx::raw_sql("CREATE UNIQUE INDEX users_email ON users (email)").execute(&mut admin).await.unwrap();
    let known = user(7);
    store.insert(std::slice::from_ref(&known)).await.unwrap();
    let mut batch = users(300);
    batch[7].email = "twin@x".into();
    batch[40].email = known.email.clone();
    batch[41].email = "twin@x".into();
    batch[200].name = "a\0b".into();
    let inserted = store.insert(&batch).await.unwrap();
    assert_eq!((inserted.new, refused(&inserted.fates)), (297, vec![40, 41, 200]));

    // A trigger says nothing about the row that it refuses.
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
    assert_eq!(inserted.fates[617], Fate::Refused("not welcome".into()));
    assert_eq!((inserted.new, refused(&inserted.fates)), (999, vec![617]));
}

/// It is looked at when the whole batch has been written, so nothing on the way says which row it is.
#[tokio::test]
async fn a_deferred_rule_is_broken_by_its_row_alone() {
    let (store, mut admin, _) = postgres().await;
    let rule = "ALTER TABLE users ADD CONSTRAINT users_name UNIQUE (name) DEFERRABLE INITIALLY DEFERRED";
    sqlx::raw_sql(rule).execute(&mut admin).await.unwrap();
    let mut batch = users(1000);
    batch[401].name = batch[400].name.clone();
    let inserted = store.insert(&batch).await.unwrap();
    assert_eq!((inserted.new, refused(&inserted.fates)), (999, vec![401]));
}

/// The server's limit for an entry is smaller than what a name of other rules may hold.
#[tokio::test]
async fn an_index_entry_that_is_too_long_is_its_rows_fault() {
    let (store, mut admin, _) = postgres().await;
    let rule = "ALTER TABLE users DROP CONSTRAINT users_name_length; CREATE INDEX users_name ON users (name)";
    sqlx::raw_sql(rule).execute(&mut admin).await.unwrap();
    let mut batch = users(300);
    // Such that it cannot be compressed.
    batch[130].name = (0..300).map(|_| Uuid::new_v4().simple().to_string()).collect();
    let inserted = store.insert(&batch).await.unwrap();
    assert_eq!((inserted.new, refused(&inserted.fates)), (299, vec![130]));
}

#[tokio::test]
async fn trouble_of_the_database_is_nobodys_fault_and_says_its_kind() {
    let (store, mut admin, url) = postgres().await;
    let batch = users(3);
    let trouble = async |store: &PostgresStore| store.insert(&batch).await.unwrap_err().trouble;

    sqlx::raw_sql("BEGIN; LOCK TABLE users IN EXCLUSIVE MODE").execute(&mut admin).await.unwrap();
    assert_eq!(trouble(&store).await, Trouble::Timeout);
    sqlx::raw_sql("ROLLBACK").execute(&mut admin).await.unwrap();

    let database = url.rsplit('/').next().unwrap();
    let read_only = format!("ALTER DATABASE {database} SET default_transaction_read_only = on");
    sqlx::raw_sql(AssertSqlSafe(read_only)).execute(&mut admin).await.unwrap();
    let options = PostgresOptions { timeout: Duration::from_secs(2), ..PostgresOptions::new(&url) };
    let there = PostgresStore::open(&options).unwrap();
    assert_eq!(trouble(&there).await, Trouble::ReadOnly);
    assert_eq!(there.ping().await.unwrap_err().trouble, Trouble::ReadOnly);
    let writable = format!("ALTER DATABASE {database} RESET default_transaction_read_only");
    sqlx::raw_sql(AssertSqlSafe(writable)).execute(&mut admin).await.unwrap();

    sqlx::raw_sql("ALTER TABLE users RENAME TO gone").execute(&mut admin).await.unwrap();
    assert_eq!(trouble(&store).await, Trouble::Other);
    sqlx::raw_sql("ALTER TABLE gone RENAME TO users").execute(&mut admin).await.unwrap();

    // As the server says it when the disk is full, and when its stack is: no row is to blame for either.
    for (code, kind) in [("53100", Trouble::DiskFull), ("54001", Trouble::Other)] {
        let fails = format!(
            "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS \
             $$ BEGIN RAISE EXCEPTION 'no room' USING ERRCODE = '{code}'; END $$; \
             CREATE TRIGGER fail BEFORE INSERT ON users FOR EACH ROW EXECUTE FUNCTION fail()"
        );
        sqlx::raw_sql(AssertSqlSafe(fails)).execute(&mut admin).await.unwrap();
        assert_eq!(trouble(&store).await, kind);
        sqlx::raw_sql("DROP TRIGGER fail ON users; DROP FUNCTION fail").execute(&mut admin).await.unwrap();
    }
    assert_eq!(store.insert(&batch).await.unwrap().new, 3);
}

/// We hold one row and somebody else another, and each wants the other's. Ours is the one that closes the circle, so it is
/// ours that the server ends.
#[tokio::test]
async fn a_deadlock_is_nobodys_fault_and_the_batch_may_be_tried_again() {
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
    assert_eq!(ours.await.unwrap().unwrap_err().trouble, Trouble::Deadlock);
    sqlx::raw_sql("ROLLBACK").execute(&mut theirs.await.unwrap()).await.unwrap();
    assert_eq!(store.insert(&batch).await.unwrap().new, 2);
}

/// Waits until so many wait for a lock in this database.
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
async fn a_restarted_server_is_found_again_without_an_error() {
    let (_, _, url) = postgres().await;
    let mut through = reqwest::Url::parse(&url).unwrap();
    let link = Proxy::start(format!("127.0.0.1:{}", through.port().unwrap())).await;
    through.set_port(Some(link.port())).unwrap();
    let store = open(through.as_str()).await;
    store.insert(&users(3)).await.unwrap();
    link.set(Mode::Cut).await;
    assert_eq!(store.insert(&users(3)).await.unwrap_err().trouble, Trouble::Down);
    link.set(Mode::Forward).await;
    store.insert(&users(3)).await.unwrap();
    link.set(Mode::Cut).await;
    link.set(Mode::Forward).await;
    assert_eq!(store.insert(&users(3)).await.unwrap().new, 3, "the old connection is replaced");
    link.set(Mode::BlackHole).await;
    assert_eq!(store.insert(&users(3)).await.unwrap_err().trouble, Trouble::Timeout);
}
