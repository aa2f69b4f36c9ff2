//! Tests of the group-committing database and of the embedded queue on it, mostly under failures.

use std::collections::HashSet;
use std::time::Duration;

use futures::FutureExt;
use pipeline::queue::sqlite::SqliteQueue;
use pipeline::sqlite::{Database, DatabaseError};
use pipeline::{Outgoing, Queue, QueueError, QueueOptions};
use tempfile::TempDir;
use tokio::task::JoinSet;
use tokio::time::Instant;

pub const PATIENCE: Duration = Duration::from_secs(30);

fn open() -> (Database, TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let db = Database::open(&dir.path().join("test.db")).unwrap();
    (db, dir)
}

async fn with_numbers() -> (Database, TempDir) {
    let (db, dir) = open();
    db.write(|conn| conn.execute_batch("CREATE TABLE numbers (n INTEGER PRIMARY KEY) STRICT")).await.unwrap();
    (db, dir)
}

async fn insert(db: &Database, n: i64) -> Result<usize, DatabaseError> {
    db.write(move |conn| conn.prepare_cached("INSERT INTO numbers (n) VALUES (?1)")?.execute([n])).await
}

async fn numbers(db: &Database) -> Vec<i64> {
    db.read(|conn| {
        let mut statement = conn.prepare("SELECT n FROM numbers ORDER BY n")?;
        let rows = statement.query_map([], |row| row.get(0))?;
        rows.collect()
    })
    .await
    .unwrap()
}

/// Blocks the writer until the returned sender is used, so that jobs submitted meanwhile share one commit.
async fn hold_writer(db: &Database, then: &mut JoinSet<()>) -> std::sync::mpsc::Sender<()> {
    let (release, wait) = std::sync::mpsc::channel();
    let (started, has_started) = tokio::sync::oneshot::channel();
    let db = db.clone();
    then.spawn(async move {
        let job = move |_: &rusqlite::Connection| {
            started.send(()).unwrap();
            wait.recv().unwrap();
            Ok(())
        };
        db.write(job).await.unwrap();
    });
    has_started.await.unwrap();
    release
}

/// Bursts of reads started up to 120 threads, each with an allocator's memory of its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bursts_of_reads_run_on_a_few_threads() {
    let (db, _dir) = with_numbers().await;
    let mut threads = HashSet::new();
    for _ in 0..20 {
        let reads = (0..200).map(|_| db.read(|_| Ok(std::thread::current().id())));
        threads.extend(futures::future::join_all(reads).await.into_iter().map(Result::unwrap));
    }
    assert!(threads.len() <= 4, "{} threads", threads.len());
}

#[tokio::test]
async fn concurrent_writes_share_commits() {
    let (db, _dir) = with_numbers().await;
    let before = db.commits();
    let mut tasks = JoinSet::new();
    let release = hold_writer(&db, &mut tasks).await;
    for n in 0..100 {
        let db = db.clone();
        tasks.spawn(async move { assert_eq!(insert(&db, n).await.unwrap(), 1) });
    }
    // The runtime has one thread, so each task submits its job before this returns.
    tokio::task::yield_now().await;
    release.send(()).unwrap();
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    assert_eq!(numbers(&db).await.len(), 100);
    let commits = db.commits() - before;
    assert!(commits <= 2, "101 jobs took {commits} commits");
}

#[tokio::test]
async fn an_idle_write_is_one_commit_and_is_on_disk_when_answered() {
    let (db, _dir) = with_numbers().await;
    let before = db.commits();
    insert(&db, 1).await.unwrap();
    assert_eq!(db.commits() - before, 1);
    let other = rusqlite::Connection::open(db.path()).unwrap();
    let n: i64 = other.query_row("SELECT n FROM numbers", [], |row| row.get(0)).unwrap();
    assert_eq!(n, 1);
}

#[tokio::test]
async fn a_marked_signal_has_fired_when_the_write_is_answered() {
    let (db, _dir) = with_numbers().await;
    let signal = db.signal("test");
    // Repeated, because the poller may fire once by chance.
    for round in 0..100 {
        let mut commits = signal.subscribe();
        let inside = signal.clone();
        db.write(move |_| {
            inside.mark();
            Ok(())
        })
        .await
        .unwrap();
        // Bypass Tokio's coop budget, or a ready change may look pending.
        let fired = tokio::task::unconstrained(commits.changed()).now_or_never();
        assert!(fired.is_some(), "round {round}");
    }
}

#[tokio::test]
async fn a_failing_job_does_not_affect_others_in_its_commit() {
    let (db, _dir) = with_numbers().await;
    insert(&db, 5).await.unwrap();
    let before = db.commits();
    let mut tasks = JoinSet::new();
    let release = hold_writer(&db, &mut tasks).await;
    for n in 0..10 {
        let db = db.clone();
        tasks.spawn(async move {
            let answer = db
                .write(move |conn| {
                    conn.execute("INSERT INTO numbers (n) VALUES (?1)", [n + 100])?;
                    conn.execute("INSERT INTO numbers (n) VALUES (?1)", [n])
                })
                .await;
            match answer {
                Err(DatabaseError::Sqlite(error)) if n == 5 => {
                    assert_eq!(error.sqlite_error_code(), Some(rusqlite::ErrorCode::ConstraintViolation));
                }
                answer => assert!(n != 5 && answer.is_ok(), "{n}: {answer:?}"),
            }
        });
    }
    tokio::task::yield_now().await;
    release.send(()).unwrap();
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
    assert!(db.commits() - before <= 2, "they did not share a commit");
    let mut expected: Vec<i64> = (0..10).chain(100..110).collect();
    expected.retain(|n| *n != 105);
    assert_eq!(numbers(&db).await, expected);
}

#[tokio::test]
async fn a_panicking_job_is_rolled_back_alone() {
    let (db, _dir) = with_numbers().await;
    let answer = db
        .write::<(), _>(|conn| {
            conn.execute("INSERT INTO numbers (n) VALUES (1)", [])?;
            panic!("on purpose");
        })
        .await;
    assert!(matches!(&answer, Err(DatabaseError::Panicked(text)) if text == "on purpose"), "{answer:?}");
    insert(&db, 2).await.unwrap();
    assert_eq!(numbers(&db).await, [2]);
}

#[tokio::test]
async fn a_panicking_read_does_not_affect_later_reads() {
    let (db, _dir) = with_numbers().await;
    for _ in 0..10 {
        let answer = db.read::<(), _>(|_| panic!("on purpose")).await;
        assert!(matches!(answer, Err(DatabaseError::Panicked(_))), "{answer:?}");
    }
    assert!(numbers(&db).await.is_empty());
}

#[tokio::test]
async fn a_job_that_ends_the_shared_transaction_is_not_reported_as_done() {
    let (db, _dir) = with_numbers().await;
    let answer = db.write(|conn| conn.execute_batch("ROLLBACK")).await;
    assert!(matches!(answer, Err(DatabaseError::OutcomeUnknown(_))), "{answer:?}");
    insert(&db, 1).await.unwrap();
    assert_eq!(numbers(&db).await, [1]);
}

#[tokio::test]
async fn a_read_connection_cannot_write() {
    let (db, _dir) = with_numbers().await;
    let answer = db.read(|conn| conn.execute("INSERT INTO numbers (n) VALUES (1)", [])).await;
    assert!(matches!(answer, Err(DatabaseError::Sqlite(_))), "{answer:?}");
}

#[test]
fn blocking_writes_work_without_a_runtime() {
    let (db, _dir) = open();
    db.write_blocking(|conn| conn.execute_batch("CREATE TABLE t (n INTEGER) STRICT")).unwrap();
    assert_eq!(db.write_blocking(|conn| conn.execute("INSERT INTO t (n) VALUES (1)", [])).unwrap(), 1);
}

#[tokio::test]
async fn a_reopened_file_keeps_its_data() {
    let (db, dir) = open();
    let queue = SqliteQueue::open(&db, "test", QueueOptions::default()).await.unwrap();
    let id = queue.send(&[Outgoing::new("kept")]).await.remove(0).unwrap();
    drop((queue, db));
    let db = Database::open(&dir.path().join("test.db")).unwrap();
    let queue = SqliteQueue::open(&db, "test", QueueOptions::default()).await.unwrap();
    assert_eq!(queue.receive(1, PATIENCE).await.unwrap().remove(0).id, id);
}

#[tokio::test]
async fn dropping_the_last_handle_finishes_queued_jobs() {
    let (db, dir) = with_numbers().await;
    let mut tasks = JoinSet::new();
    let release = hold_writer(&db, &mut tasks).await;
    {
        // Cancelled after it was submitted and before it is answered.
        let insert = insert(&db, 7);
        assert!(tokio::time::timeout(Duration::from_millis(10), insert).await.is_err());
    }
    tasks.abort_all();
    while tasks.join_next().await.is_some() {}
    drop(db);
    release.send(()).unwrap();
    let db = Database::open(&dir.path().join("test.db")).unwrap();
    let deadline = Instant::now() + PATIENCE;
    while numbers(&db).await != [7] {
        assert!(Instant::now() < deadline, "the job was lost");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[test]
fn an_unusable_path_is_an_error_with_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "not a directory").unwrap();
    let error = Database::open(&file.join("test.db")).unwrap_err();
    assert!(matches!(error, DatabaseError::Io { .. }), "{error:?}");
    assert!(error.to_string().contains("test.db"), "{error}");
    let error = Database::open(&file).unwrap_err();
    assert!(!matches!(error, DatabaseError::Busy | DatabaseError::Full), "{error:?}");
}

#[tokio::test]
async fn two_handles_on_one_file_share_the_queue_and_wake_each_other() {
    let (db, dir) = open();
    let other_db = Database::open(&dir.path().join("test.db")).unwrap();
    let here = SqliteQueue::open(&db, "test", QueueOptions::default()).await.unwrap();
    let there = SqliteQueue::open(&other_db, "test", QueueOptions::default()).await.unwrap();
    // Without the wake-up it would find the message only at the end of its wait.
    let receiver = tokio::spawn(async move { here.receive(1, PATIENCE * 10).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    let id = there.send(&[Outgoing::new("from over there")]).await.remove(0).unwrap();
    let got = tokio::time::timeout(PATIENCE, receiver).await.expect("not woken").unwrap().unwrap();
    assert_eq!(got[0].id, id);
    assert!(there.receive(1, Duration::ZERO).await.unwrap().is_empty(), "leased here, received there");
}

#[tokio::test]
async fn queues_of_one_file_do_not_mix() {
    let (db, _dir) = open();
    let one = SqliteQueue::open(&db, "one", QueueOptions::default()).await.unwrap();
    let two = SqliteQueue::open(&db, "two", QueueOptions::default()).await.unwrap();
    one.send(&[Outgoing::new("for one")]).await.remove(0).unwrap();
    assert!(two.receive(1, Duration::ZERO).await.unwrap().is_empty());
    let message = one.receive(1, PATIENCE).await.unwrap().remove(0);
    one.bury(&[(message.receipt, "no".into())]).await.remove(0).unwrap();
    assert!(two.dead_letters(None, 10).await.unwrap().is_empty());
    assert!(matches!(two.discard(&[message.id]).await[..], [Err(QueueError::NotFound)]));
}

#[tokio::test]
async fn an_idle_receiver_writes_nothing() {
    let (db, _dir) = open();
    let queue = SqliteQueue::open(&db, "test", QueueOptions::default()).await.unwrap();
    queue.send(&[Outgoing::new("later").delayed(Duration::from_secs(3600))]).await.remove(0).unwrap();
    let before = db.commits();
    assert!(queue.receive(1, Duration::from_millis(300)).await.unwrap().is_empty());
    assert_eq!(db.commits(), before);
}

#[tokio::test]
async fn a_message_wakes_one_receiver_not_all() {
    let (db, _dir) = open();
    let queue = SqliteQueue::open(&db, "test", QueueOptions::default()).await.unwrap();
    let mut receivers = JoinSet::new();
    for _ in 0..50 {
        let queue = queue.clone();
        receivers.spawn(async move { queue.receive(1, PATIENCE).await.unwrap() });
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    let before = db.jobs();
    for _ in 0..50 {
        queue.send(&[Outgoing::new("one")]).await.remove(0).unwrap();
    }
    while let Some(got) = receivers.join_next().await {
        assert_eq!(got.unwrap().len(), 1);
    }
    // One job for each send, one for each take, and up to ten takes that found nothing.
    let jobs = db.jobs() - before;
    assert!(jobs <= 110, "{jobs} jobs for 50 messages");
}

#[tokio::test]
async fn the_callers_row_and_its_message_are_one_commit() {
    let (db, _dir) = with_numbers().await;
    let queue = SqliteQueue::open(&db, "test", QueueOptions::default()).await.unwrap();
    let inside = queue.clone();
    let failing = db.write(move |conn| {
        inside.enqueue(conn, &[Outgoing::new("never")])?;
        conn.execute("INSERT INTO no_such_table VALUES (1)", [])
    });
    assert!(failing.await.is_err());
    assert!(queue.receive(1, Duration::ZERO).await.unwrap().is_empty());

    let inside = queue.clone();
    let too_large = db.write(move |conn| {
        conn.execute("INSERT INTO numbers (n) VALUES (1)", [])?;
        inside.enqueue(conn, &[Outgoing::new(vec![0; 2 * 1024 * 1024])])
    });
    assert!(too_large.await.is_err());
    assert!(numbers(&db).await.is_empty());

    let receiver = {
        let queue = queue.clone();
        tokio::spawn(async move { queue.receive(1, PATIENCE * 10).await.unwrap() })
    };
    let inside = queue.clone();
    let ids = db
        .write(move |conn| {
            conn.execute("INSERT INTO numbers (n) VALUES (1)", [])?;
            inside.enqueue(conn, &[Outgoing::new("both")])
        })
        .await
        .unwrap();
    let got = tokio::time::timeout(PATIENCE, receiver).await.expect("not woken by the commit").unwrap();
    assert_eq!(got[0].id, ids[0]);
    assert_eq!(numbers(&db).await, [1]);
}

#[tokio::test]
async fn a_full_disk_refuses_whole_sends_and_the_queue_recovers() {
    let (db, _dir) = open();
    let queue = SqliteQueue::open(&db, "test", QueueOptions::default()).await.unwrap();
    let limit = |pages: i64| {
        move |conn: &rusqlite::Connection| {
            conn.query_row(&format!("PRAGMA max_page_count = {pages}"), [], |row| row.get::<_, i64>(0))
        }
    };
    let pages: i64 = db.read(|conn| conn.query_row("PRAGMA page_count", [], |row| row.get(0))).await.unwrap();
    db.write(limit(pages + 20)).await.unwrap();
    let mut stored = HashSet::new();
    let mut refused = 0;
    for _ in 0..40 {
        // Three in one send: all of them are stored or none.
        let answers = queue.send(&[(); 3].map(|()| Outgoing::new(vec![b'x'; 5000]))).await;
        if answers.iter().all(Result::is_ok) {
            stored.extend(answers.into_iter().map(Result::unwrap));
        } else {
            assert!(answers.iter().all(|answer| matches!(answer, Err(QueueError::Unavailable(_)))), "{answers:?}");
            refused += 1;
        }
    }
    assert!(refused > 0 && !stored.is_empty(), "{refused} refused, {} stored", stored.len());
    assert_eq!(queue.depth().await.unwrap().ready, stored.len() as u64);

    // Work that needs no space continues, so a full disk can be emptied.
    let message = queue.receive(1, PATIENCE).await.unwrap().remove(0);
    queue.ack(&[message.receipt]).await.remove(0).unwrap();
    stored.remove(&message.id);

    db.write(limit(1_000_000)).await.unwrap();
    let answer = queue.send(&[Outgoing::new(vec![b'x'; 50_000])]).await.remove(0);
    stored.insert(answer.unwrap());
    let mut got = HashSet::new();
    while got.len() < stored.len() {
        let messages = queue.receive(100, PATIENCE).await.unwrap();
        assert!(!messages.is_empty());
        got.extend(messages.into_iter().map(|message| message.id));
    }
    assert_eq!(got, stored);
}

#[tokio::test]
async fn a_full_disk_fails_the_group_and_answers_every_job() {
    let (db, _dir) = with_numbers().await;
    db.write(|conn| conn.execute_batch("CREATE TABLE blobs (b BLOB) STRICT")).await.unwrap();
    let pages: i64 = db.read(|conn| conn.query_row("PRAGMA page_count", [], |row| row.get(0))).await.unwrap();
    db.write(move |conn| conn.query_row(&format!("PRAGMA max_page_count = {pages}"), [], |_| Ok(()))).await.unwrap();
    let mut tasks = JoinSet::new();
    let release = hold_writer(&db, &mut tasks).await;
    // The blocking job is in this group too and gets the error as well.
    tasks.detach_all();
    let mut group = JoinSet::new();
    for n in 0..3 {
        let db = db.clone();
        group.spawn(async move {
            db.write(move |conn| {
                if n == 2 {
                    conn.execute("INSERT INTO blobs (b) VALUES (zeroblob(100000))", [])
                } else {
                    conn.execute("INSERT INTO numbers (n) VALUES (?1)", [n])
                }
            })
            .await
        });
    }
    tokio::task::yield_now().await;
    release.send(()).unwrap();
    let mut failed = 0;
    while let Some(answer) = group.join_next().await {
        failed += i32::from(matches!(answer.unwrap(), Err(DatabaseError::Full)));
    }
    let kept = numbers(&db).await;
    assert!(failed >= 1);
    assert_eq!(kept.len(), 3 - failed as usize, "rows of jobs with Ok are stored, rows of jobs with Full are not");
    db.write(|conn| conn.query_row("PRAGMA max_page_count = 1000000", [], |_| Ok(()))).await.unwrap();
    insert(&db, 50).await.unwrap();
}

#[tokio::test]
async fn a_file_that_is_no_longer_in_its_place_is_refused_until_it_is_back() {
    let (db, dir) = with_numbers().await;
    insert(&db, 1).await.unwrap();
    for name in ["test.db", "test.db-wal"] {
        let (place, elsewhere) = (dir.path().join(name), dir.path().join("elsewhere"));
        std::fs::rename(&place, &elsewhere).unwrap();
        for replaced in [false, true] {
            if replaced {
                std::fs::copy(&elsewhere, &place).unwrap();
            }
            let written = insert(&db, 2).await;
            assert!(matches!(written, Err(DatabaseError::Gone { .. })), "{name}: {written:?}");
            let read = db.read(|conn| conn.query_row("SELECT 1", [], |_| Ok(()))).await;
            assert!(matches!(read, Err(DatabaseError::Gone { .. })), "{name}: {read:?}");
        }
        std::fs::rename(&elsewhere, &place).unwrap();
        insert(&db, 3).await.unwrap();
        db.write(|conn| conn.execute("DELETE FROM numbers WHERE n = 3", [])).await.unwrap();
    }
    assert_eq!(numbers(&db).await, [1]);
}

#[tokio::test]
async fn a_file_that_is_deleted_during_a_commit_leaves_its_outcome_unknown() {
    let (db, dir) = with_numbers().await;
    let file = dir.path().join("test.db");
    let delete = move |_: &rusqlite::Connection| {
        std::fs::remove_file(file).unwrap();
        Ok(())
    };
    let answer = db.write(delete).await;
    assert!(matches!(answer, Err(DatabaseError::OutcomeUnknown(_))), "{answer:?}");
}

#[tokio::test]
async fn a_closed_file_has_no_log_and_takes_no_jobs() {
    let (db, dir) = with_numbers().await;
    let queue = SqliteQueue::open(&db, "test", QueueOptions::default()).await.unwrap();
    // The poller, readers and the writer each have the file open.
    let receiver = tokio::spawn(async move { queue.receive(1, PATIENCE * 10).await });
    insert(&db, 1).await.unwrap();
    assert_eq!(numbers(&db).await, [1]);
    assert!(dir.path().join("test.db-wal").exists());
    db.close().await;
    let names: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["test.db"]);
    assert!(matches!(insert(&db, 2).await, Err(DatabaseError::Closed)));
    let read = db.read(|conn| conn.query_row("SELECT 1", [], |_| Ok(()))).await;
    assert!(matches!(read, Err(DatabaseError::Closed)), "{read:?}");
    db.close().await;
    receiver.abort();
    assert_eq!(numbers(&Database::open(db.path()).unwrap()).await, [1]);
}

#[tokio::test]
async fn a_file_that_is_not_there_is_not_created_for_a_reader() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("below/test.db");
    assert!(matches!(Database::open_existing(&path), Err(DatabaseError::Io { .. })));
    assert!(!path.parent().unwrap().exists());
    drop(Database::open(&path).unwrap());
    Database::open_existing(&path).unwrap();
}

#[tokio::test]
async fn a_lock_of_another_process_is_waited_for_up_to_the_busy_timeout() {
    let (db, _dir) = with_numbers().await;
    let other = rusqlite::Connection::open(db.path()).unwrap();
    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let waiting = {
        let db = db.clone();
        tokio::spawn(async move { insert(&db, 1).await })
    };
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!waiting.is_finished());
    other.execute_batch("COMMIT").unwrap();
    waiting.await.unwrap().unwrap();

    other.execute_batch("BEGIN IMMEDIATE").unwrap();
    let refused = insert(&db, 2).await;
    assert!(matches!(refused, Err(DatabaseError::Busy)), "{refused:?}");
    other.execute_batch("COMMIT").unwrap();
    insert(&db, 3).await.unwrap();
    assert_eq!(numbers(&db).await, [1, 3]);
}

#[tokio::test]
async fn the_log_does_not_grow_without_bound() {
    let (db, _dir) = open();
    db.write(|conn| conn.execute_batch("CREATE TABLE blobs (id INTEGER PRIMARY KEY, b BLOB) STRICT")).await.unwrap();
    for _ in 0..100 {
        db.write(|conn| {
            let sql =
                "INSERT INTO blobs (id, b) VALUES (1, randomblob(1000000)) ON CONFLICT DO UPDATE SET b = excluded.b";
            conn.execute(sql, [])
        })
        .await
        .unwrap();
    }
    let mut log = db.path().as_os_str().to_owned();
    log.push("-wal");
    let bytes = std::fs::metadata(log).unwrap().len();
    assert!(bytes < 64 * 1024 * 1024, "100 MB written, the log has {bytes} bytes");
}

#[tokio::test]
async fn a_failing_job_without_a_savepoint_fails_its_group_and_the_next_group_succeeds() {
    let (db, _dir) = with_numbers().await;
    insert(&db, 5).await.unwrap();
    let mut tasks = JoinSet::new();
    let release = hold_writer(&db, &mut tasks).await;
    let mut jobs = JoinSet::new();
    for n in 0..10 {
        let db = db.clone();
        jobs.spawn(async move {
            db.write_without_savepoint(move |conn| conn.execute("INSERT INTO numbers (n) VALUES (?1)", [n]))
                .await
                .is_ok()
        });
    }
    // Every job must wait before the writer continues, so that all share one group.
    while db.waiting() < 10 {
        tokio::task::yield_now().await;
    }
    release.send(()).unwrap();
    let kept = jobs.join_all().await.into_iter().filter(|ok| *ok).count();
    while tasks.join_next().await.is_some() {}
    let stored: usize =
        db.read(|conn| conn.query_row("SELECT COUNT(*) FROM numbers", [], |row| row.get(0))).await.unwrap();
    assert_eq!(stored, 1 + kept, "exactly the rows of successful jobs are stored");
    assert!(kept < 10, "the duplicate key cannot be stored");
    db.write_without_savepoint(|conn| conn.execute("INSERT INTO numbers (n) VALUES (99)", [])).await.unwrap();
}

#[tokio::test]
async fn all_handles_on_a_file_share_one_clock() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("test.db");
    let (one, two) = (Database::open(&path).unwrap(), Database::open(&path).unwrap());
    assert_eq!(one.clock(), two.clock());
    drop((one, two));
    let again = Database::open(&path).unwrap();
    let behind = std::time::SystemTime::now().duration_since(again.clock().now()).unwrap_or_default();
    assert!(behind < Duration::from_secs(60), "the clock starts from the system clock, but is {behind:?} behind");
}

#[tokio::test]
async fn a_read_whose_caller_is_gone_is_stopped() {
    // Counts for minutes, unless it is interrupted.
    const ENDLESS: &str =
        "WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n LIMIT 100000000) SELECT COUNT(*) FROM n";
    let dir = tempfile::tempdir().unwrap();
    let db = Database::open(&dir.path().join("test.db")).unwrap();
    let (started, mut starts) = tokio::sync::mpsc::unbounded_channel();
    // More than may read at the same time, so that some are dropped before they begin.
    for _ in 0..12 {
        let (db, started) = (db.clone(), started.clone());
        let read = tokio::spawn(async move {
            let endless = db.read(move |connection| {
                started.send(()).unwrap();
                connection.query_row(ENDLESS, [], |row| row.get::<_, i64>(0))
            });
            tokio::time::timeout(Duration::from_millis(50), endless).await.is_err()
        });
        assert!(read.await.unwrap(), "an endless read has no answer");
    }
    starts.recv().await.unwrap();
    let read = db.read(|connection| connection.query_row("SELECT 1", [], |row| row.get::<_, i64>(0)));
    assert_eq!(tokio::time::timeout(Duration::from_secs(30), read).await.expect("a free reader").unwrap(), 1);
}
