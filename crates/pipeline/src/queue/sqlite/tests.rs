//! Tests of the embedded queue beyond the contract: query plans, clock, retention and cancellation.

use std::sync::atomic::{AtomicI64, Ordering};

use futures::FutureExt;

use super::rows::millis;
use super::statements::{DEAD_EXPIRED, DEAD_OLDEST, DEAD_ROW_ID, DELETE, DEPTH_DUE, DEPTH_HIDDEN, DUE, EXPIRED, LEASE};
use super::*;

const DAY: Duration = Duration::from_secs(24 * 3600);

struct Fixture {
    queue: SqliteQueue,
    db: Database,
    now: Arc<AtomicI64>,
    _dir: tempfile::TempDir,
}

impl Fixture {
    async fn new(options: QueueOptions) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let db = Database::open(&dir.path().join("test.db")).unwrap();
        let now = Arc::new(AtomicI64::new(1_700_000_000_000));
        let clock = now.clone();
        let clock: NowMs = Arc::new(move || clock.load(Ordering::Relaxed));
        let queue = SqliteQueue::open_with_clock(&db, "test", options, clock).await.unwrap();
        Self { queue, db, now, _dir: dir }
    }

    fn pass(&self, time: Duration) {
        self.now.fetch_add(millis(time), Ordering::Relaxed);
    }

    async fn send(&self, body: &str) -> MessageId {
        self.queue.send(&[Outgoing::new(body)]).await.remove(0).unwrap()
    }

    async fn take(&self) -> Vec<Message> {
        self.queue.receive(10, Duration::ZERO).await.unwrap()
    }

    async fn plan(&self, sql: &'static str) -> String {
        let explain = move |conn: &Connection| {
            let mut statement = conn.prepare(&format!("EXPLAIN QUERY PLAN {sql}"))?;
            // Parameters stay unbound: the plan does not depend on them.
            let mut rows = statement.raw_query();
            let mut steps = Vec::new();
            while let Some(row) = rows.next()? {
                steps.push(row.get::<_, String>(3)?);
            }
            Ok(steps)
        };
        self.db.read(explain).await.unwrap().join("\n")
    }
}

#[tokio::test]
async fn taking_reads_the_front_of_the_index_without_sorting() {
    let fixture = Fixture::new(QueueOptions::default()).await;
    for sql in [DUE, NEXT_VISIBLE, EXPIRED] {
        let plan = fixture.plan(sql).await;
        assert!(plan.contains("queue_messages_due (queue=?"), "{sql}\n{plan}");
        assert!(!plan.contains("TEMP B-TREE") && !plan.contains("SCAN"), "{sql}\n{plan}");
    }
    for sql in [DEPTH_DUE, DEPTH_HIDDEN] {
        let plan = fixture.plan(sql).await;
        assert!(plan.contains("COVERING INDEX queue_messages_due"), "{sql}\n{plan}");
    }
    for sql in [LEASE, ACK, RELEASE, EXTEND, DELETE] {
        let plan = fixture.plan(sql).await;
        assert!(plan.contains("INTEGER PRIMARY KEY (rowid=?)"), "{sql}\n{plan}");
    }
    for sql in [DEAD_LIST, DEAD_ROW_ID, DEAD_OLDEST, DEAD_EXPIRED] {
        let plan = fixture.plan(sql).await;
        assert!(!plan.contains("TEMP B-TREE") && !plan.contains("SCAN"), "{sql}\n{plan}");
    }
}

#[tokio::test]
async fn every_change_that_may_make_a_message_due_earlier_wakes_receivers() {
    let fixture = Fixture::new(QueueOptions::default()).await;
    let queue = &fixture.queue;
    // Repeated, because a poller may cause a single wake-up by chance.
    for _ in 0..50 {
        let mut commits = queue.state.signal.subscribe();
        let mut has_fired = |what| {
            assert!(commits.changed().now_or_never().is_some(), "{what}");
            commits = queue.state.signal.subscribe();
        };
        fixture.send("x").await;
        has_fired("send");
        let receipt = fixture.take().await.remove(0).receipt;
        queue.extend(std::slice::from_ref(&receipt), Duration::ZERO).await.remove(0).unwrap();
        has_fired("extend");
        queue.retry_after(&[(receipt, Duration::ZERO)]).await.remove(0).unwrap();
        has_fired("retry_after");
        let message = fixture.take().await.remove(0);
        queue.bury(&[(message.receipt, "no".into())]).await.remove(0).unwrap();
        queue.replay(&[message.id], Duration::ZERO).await.remove(0).unwrap();
        has_fired("replay");
        let message = fixture.take().await.remove(0);
        queue.ack(&[message.receipt]).await.remove(0).unwrap();
    }
}

#[tokio::test]
async fn an_expired_lease_can_still_be_settled_until_the_message_is_received_again() {
    let fixture = Fixture::new(QueueOptions::default()).await;
    fixture.send("slow").await;
    let message = fixture.take().await.remove(0);
    fixture.pass(fixture.queue.lease() * 2);
    assert_eq!(fixture.queue.depth().await.unwrap().ready, 1);
    assert!(fixture.queue.ack(&[message.receipt]).await.remove(0).is_ok());
    assert!(fixture.take().await.is_empty());
}

#[tokio::test]
async fn an_old_receipt_does_not_settle_a_message_in_a_reused_row() {
    let fixture = Fixture::new(QueueOptions::default()).await;
    fixture.send("first").await;
    let first = fixture.take().await.remove(0);
    assert!(fixture.queue.ack(std::slice::from_ref(&first.receipt)).await.remove(0).is_ok());
    fixture.send("second, in the same row").await;
    let second = fixture.take().await.remove(0);
    assert_eq!(first.receipt.0.split_once('.').unwrap().0, second.receipt.0.split_once('.').unwrap().0);
    assert!(matches!(fixture.queue.ack(&[first.receipt]).await[..], [Err(QueueError::LeaseLost)]));
    assert!(fixture.queue.ack(&[second.receipt]).await.remove(0).is_ok());
}

#[tokio::test]
async fn a_live_message_past_its_retention_is_buried_not_lost() {
    let fixture = Fixture::new(QueueOptions::default()).await;
    let id = fixture.send("forgotten").await;
    fixture.pass(DAY * 4);
    assert!(fixture.take().await.is_empty());
    let letters = fixture.queue.dead_letters(None, 10).await.unwrap();
    assert_eq!(letters.len(), 1);
    assert_eq!((&letters[0].id, letters[0].reason.as_str()), (&id, "retention period ended"));
}

#[tokio::test]
async fn retention_counts_from_the_end_of_a_delay() {
    let fixture = Fixture::new(QueueOptions::default()).await;
    fixture.queue.send(&[Outgoing::new("next week").delayed(DAY * 7)]).await.remove(0).unwrap();
    fixture.pass(DAY * 7);
    assert_eq!(fixture.take().await.len(), 1);
}

#[tokio::test]
async fn a_sweep_removes_dead_letters_past_their_retention() {
    let fixture = Fixture::new(QueueOptions::default()).await;
    for body in ["old", "new"] {
        fixture.send(body).await;
        let message = fixture.take().await.remove(0);
        fixture.queue.bury(&[(message.receipt, body.into())]).await.remove(0).unwrap();
        fixture.pass(DAY * 2);
    }
    fixture.take().await;
    let left = fixture.queue.dead_letters(None, 10).await.unwrap();
    assert_eq!(left.iter().map(|letter| letter.reason.as_str()).collect::<Vec<_>>(), ["new"]);
}

#[tokio::test]
async fn a_replay_restarts_the_retention() {
    let fixture = Fixture::new(QueueOptions::default()).await;
    let id = fixture.send("again").await;
    let message = fixture.take().await.remove(0);
    fixture.pass(DAY * 3);
    fixture.queue.bury(&[(message.receipt, "no".into())]).await.remove(0).unwrap();
    fixture.pass(DAY * 3);
    fixture.queue.replay(&[id], Duration::ZERO).await.remove(0).unwrap();
    assert_eq!(fixture.take().await.len(), 1);
}

#[tokio::test]
async fn a_message_that_cannot_be_read_is_buried_and_does_not_block_the_rest() {
    let fixture = Fixture::new(QueueOptions::default()).await;
    let bad = fixture.send("bad").await;
    fixture.db.write(|conn| conn.execute("UPDATE queue_messages SET attributes = '{torn'", [])).await.unwrap();
    fixture.send("good").await;
    assert_eq!(fixture.take().await.remove(0).body, b"good");
    let letter = fixture.queue.dead_letters(None, 10).await.unwrap().remove(0);
    assert_eq!(letter.id, bad);
    assert!(letter.reason.contains("cannot be read"), "{}", letter.reason);
    assert_eq!(letter.attributes.get("unreadable").map(String::as_str), Some("{torn"));
}

#[tokio::test]
async fn a_message_behind_many_undeliverable_ones_is_still_received() {
    let options = QueueOptions { receives_max: Some(1), ..QueueOptions::default() };
    let fixture = Fixture::new(options).await;
    let hopeless: Vec<_> = (0..250).map(|_| Outgoing::new("x")).collect();
    assert!(fixture.queue.send(&hopeless).await.iter().all(Result::is_ok));
    assert_eq!(fixture.queue.receive(250, Duration::ZERO).await.unwrap().len(), 250);
    fixture.pass(fixture.queue.lease());
    fixture.send("behind").await;
    let got = fixture.queue.receive(1, Duration::from_secs(30)).await.unwrap();
    assert_eq!(got[0].body, b"behind");
    assert_eq!(fixture.queue.depth().await.unwrap().dead, 250);
}

#[tokio::test]
async fn messages_taken_by_a_cancelled_receive_are_due_immediately_with_their_old_count() {
    let fixture = Fixture::new(QueueOptions::default()).await;
    fixture.send("dropped").await;
    let (started, wait_started) = tokio::sync::oneshot::channel();
    let (go_on, wait_go_on) = std::sync::mpsc::channel::<()>();
    // Keep the writer busy, so that the take below is cancelled after it was submitted and before it ran.
    let db = fixture.db.clone();
    let blocker = tokio::spawn(async move {
        db.write(move |_| {
            started.send(()).unwrap();
            wait_go_on.recv().unwrap();
            Ok(())
        })
        .await
    });
    wait_started.await.unwrap();
    let taking = fixture.queue.take(1);
    assert!(tokio::time::timeout(Duration::from_millis(50), taking).await.is_err());
    go_on.send(()).unwrap();
    blocker.await.unwrap().unwrap();
    // The test's clock stands still, so the lease has not ended.
    let message = fixture.queue.receive(1, Duration::from_secs(30)).await.unwrap().remove(0);
    assert_eq!((message.body.as_slice(), message.receives), (b"dropped".as_slice(), 1));
}
