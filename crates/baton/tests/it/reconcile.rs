//! The reconciler's sweeps, and the selection of dead letters by commands, on the embedded store with a queue that shows how
//! it is used.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use baton::clock::Clock;
use baton::config::{Config, RelayMode, Secret, Service};
use baton::dead_letters::{self, Selection};
use baton::randomness::Randomness;
use baton::relay::reconcile::dead_letters::RelayDeadLetters;
use baton::relay::reconcile::sweeps::{Reconciler, ReconcilerSettings, Sweep};
use baton::relay::relayer::client::RelayerClient;
use baton::relay::relayer::pool::{Pool, PoolSettings};
use baton::relay::state::message::TransactionMessage;
use baton::relay::state::transaction::{ConsumerId, RelayerTxId, RelayerUrl, Transaction};
use baton::relay::store::TransactionStore;
use baton::relay::store::sqlite::SqliteStore;
use baton::relay::update::cache::Cache;
use baton::relay::update::guarded_store::GuardedStore;
use harness::relayer::{Relayer, RelayerOptions};
use harness::wait::eventually;
use pipeline::queue::memory::MemoryQueue;
use pipeline::sqlite::Database;
use pipeline::{
    CancellationToken, Capabilities, DeadLetter, Depth, Message, MessageId, Outgoing, Queue, QueueError, QueueOptions,
    Receipt,
};
use serde_json::json;
use uuid::Uuid;

use crate::relay_fixture::{SOON, TO, answer};
use crate::store::fixture::{now, row};

/// A queue in memory whose dead letters are read like those of RabbitMQ and SQS: all of them for each page.
struct ProbeQueue {
    inner: MemoryQueue,
    /// Dead letters read so far.
    letters_read: AtomicUsize,
    /// The next reading of dead letters fails.
    fails: AtomicBool,
    /// It takes no messages.
    refuses: AtomicBool,
    /// The next question for its depth panics.
    panics: AtomicBool,
    /// Reading dead letters blocks its thread until this is open.
    gate: Gate,
}

#[derive(Default)]
struct Gate {
    closed: Mutex<bool>,
    changed: Condvar,
}

/// Opens the gate at the end of the test, also of one that fails: the runtime waits for the blocked thread.
struct OpensAtEnd<'a>(&'a Gate);

impl Drop for OpensAtEnd<'_> {
    fn drop(&mut self) {
        self.0.set_closed(false);
    }
}

impl Gate {
    fn set_closed(&self, closed: bool) {
        *self.closed.lock().unwrap() = closed;
        self.changed.notify_all();
    }

    fn pass(&self) {
        drop(self.changed.wait_while(self.closed.lock().unwrap(), |closed| *closed).unwrap());
    }
}

#[async_trait::async_trait]
impl Queue for ProbeQueue {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn capabilities(&self) -> Capabilities {
        Capabilities { dead_letters_per_read: 10_000, ..self.inner.capabilities() }
    }
    async fn send(&self, messages: &[Outgoing]) -> Vec<Result<MessageId, QueueError>> {
        if self.refuses.load(Ordering::SeqCst) {
            return messages.iter().map(|_| Err(QueueError::Unavailable("test".into()))).collect();
        }
        self.inner.send(messages).await
    }
    async fn receive(&self, max: usize, wait: Duration) -> Result<Vec<Message>, QueueError> {
        self.inner.receive(max, wait).await
    }
    async fn ack(&self, receipts: &[Receipt]) -> Vec<Result<(), QueueError>> {
        self.inner.ack(receipts).await
    }
    async fn retry_after(&self, entries: &[(Receipt, Duration)]) -> Vec<Result<(), QueueError>> {
        self.inner.retry_after(entries).await
    }
    async fn bury(&self, entries: &[(Receipt, String)]) -> Vec<Result<(), QueueError>> {
        self.inner.bury(entries).await
    }
    async fn extend(&self, receipts: &[Receipt], duration: Duration) -> Vec<Result<(), QueueError>> {
        self.inner.extend(receipts, duration).await
    }
    fn lease(&self) -> Duration {
        self.inner.lease()
    }
    async fn depth(&self) -> Result<Depth, QueueError> {
        assert!(!self.panics.swap(false, Ordering::SeqCst), "on purpose");
        self.inner.depth().await
    }
    async fn dead_letters(&self, after: Option<&MessageId>, max: usize) -> Result<Vec<DeadLetter>, QueueError> {
        self.gate.pass();
        if self.fails.swap(false, Ordering::SeqCst) {
            return Err(QueueError::Unavailable("the broker is away".into()));
        }
        let all = self.inner.dead_letters(None, 10_000).await?;
        self.letters_read.fetch_add(all.len(), Ordering::SeqCst);
        let skip = after.map_or(0, |after| 1 + all.iter().position(|letter| letter.id == *after).unwrap_or(0));
        Ok(all.into_iter().skip(skip).take(max).collect())
    }
    async fn replay(&self, ids: &[MessageId], delay: Duration) -> Vec<Result<(), QueueError>> {
        self.inner.replay(ids, delay).await
    }
    async fn discard(&self, ids: &[MessageId]) -> Vec<Result<(), QueueError>> {
        self.inner.discard(ids).await
    }
}

struct Fixture {
    queue: Arc<ProbeQueue>,
    guarded: Arc<GuardedStore>,
    me: ConsumerId,
    reconciler: Arc<Reconciler>,
    pool: Arc<Pool>,
    settings: ReconcilerSettings,
    _directory: tempfile::TempDir,
}

impl Fixture {
    async fn new() -> Self {
        Self::over(Vec::new()).await
    }

    /// With these relayers.
    async fn over(clients: Vec<RelayerClient>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let database = Database::open(&directory.path().join("baton.db")).unwrap();
        let store: Arc<dyn TransactionStore> = Arc::new(SqliteStore::open(&database).await.unwrap());
        let inner = MemoryQueue::new("relay-transactions", QueueOptions::default());
        let queue = Arc::new(ProbeQueue {
            inner,
            letters_read: AtomicUsize::new(0),
            fails: AtomicBool::new(false),
            refuses: AtomicBool::new(false),
            panics: AtomicBool::new(false),
            gate: Gate::default(),
        });
        let config = Config::from_vars(Service::Command, |_| None).unwrap().relay;
        let clock = Clock::of_file(database.clock());
        let guarded = Arc::new(GuardedStore {
            store: Arc::clone(&store),
            queue: Arc::clone(&queue) as Arc<dyn Queue>,
            cache: Cache::default(),
            mode: RelayMode::FireAndForget,
            timings: config.timings,
            clock: clock.clone(),
            random: Randomness::system(),
            chain_decides: false,
        });
        let settings = PoolSettings {
            routing: config.routing.clone(),
            health_interval: config.health_interval,
            health_timeout: config.health_timeout,
            chain_id: None,
            has_chain: false,
        };
        let pool = Pool::new(clients, settings, store, clock);
        let settings = ReconcilerSettings {
            interval: Duration::from_millis(20),
            dead_letters_every: Duration::from_millis(20),
            dead_letters_reread_after: None,
            consumer_dead_after: Duration::from_millis(40),
            clock_skew: Duration::ZERO,
            relayer_retention: Duration::from_secs(3600),
            question_timeout: SOON,
        };
        let me = ConsumerId::generate();
        let reconciler = Reconciler::new(Arc::clone(&guarded), Arc::clone(&pool), me.clone(), settings.clone(), None);
        Self { queue, guarded, me, reconciler: Arc::new(reconciler), pool, settings, _directory: directory }
    }

    /// The reconciler of another consumer.
    fn another(&self, dead_letters_every: Duration) -> Reconciler {
        let settings = ReconcilerSettings { dead_letters_every, ..self.settings.clone() };
        Reconciler::new(Arc::clone(&self.guarded), Arc::clone(&self.pool), ConsumerId::generate(), settings, None)
    }

    /// A row that has been at the relayer for so long that it is due.
    async fn due_at(&self, relayer: &RelayerUrl, tx_id: RelayerTxId) {
        let timings = &self.guarded.timings;
        let then = self.guarded.clock.now() - timings.submitted_check * 2;
        let (row, token) = (row(then.0), Uuid::new_v4());
        let claimed = row.claim(&self.me, token, relayer, "test", then, timings).unwrap().transaction;
        let bound = claimed.bind(token, &tx_id, None, "test", then, timings).unwrap().transaction;
        self.guarded.store.insert(&[bound]).await.unwrap();
    }

    /// Dead letters of unknown transactions: they stay where they are, so that every page has to be read.
    async fn bury_unknown(&self, count: usize) {
        let bodies: Vec<_> = (0..count).map(|_| self.guarded.message(&row(now().0))).collect();
        assert!(bodies.iter().all(|body| TransactionMessage::parse(&body.body).is_ok()));
        assert!(self.queue.send(&bodies).await.iter().all(Result::is_ok));
        for message in self.queue.receive(count, Duration::ZERO).await.unwrap() {
            self.queue.bury(&[(message.receipt, "test".to_owned())]).await;
        }
    }
}

#[tokio::test]
async fn all_dead_letters_are_swept_in_linear_time() {
    const LETTERS: usize = 2000;
    let fixture = Fixture::new().await;
    fixture.bury_unknown(LETTERS).await;
    fixture.reconciler.sweep(Sweep::DeadLetters).await.unwrap();
    assert_eq!(fixture.queue.letters_read.load(Ordering::SeqCst), LETTERS, "each letter is read once");
}

#[tokio::test]
async fn commands_select_dead_letters_in_linear_time() {
    const LETTERS: usize = 2000;
    let fixture = Fixture::new().await;
    fixture.bury_unknown(LETTERS).await;
    let lane = RelayDeadLetters { guarded: Arc::clone(&fixture.guarded) };
    let selected = dead_letters::select(&lane, &Selection::default()).await.unwrap();
    assert_eq!(selected.len(), LETTERS);
    assert_eq!(fixture.queue.letters_read.load(Ordering::SeqCst), LETTERS, "each letter is read once");
}

/// On servers a reading costs requests.
#[tokio::test]
async fn dead_letters_whose_number_has_not_changed_are_read_once_in_a_while() {
    let fixture = Fixture::new().await;
    let read_again = |after: Duration| {
        let settings = ReconcilerSettings {
            dead_letters_every: Duration::ZERO,
            dead_letters_reread_after: Some(after),
            ..fixture.settings.clone()
        };
        let (guarded, pool) = (Arc::clone(&fixture.guarded), Arc::clone(&fixture.pool));
        Reconciler::new(guarded, pool, ConsumerId::generate(), settings, None)
    };
    let letters_read = || fixture.queue.letters_read.load(Ordering::SeqCst);
    let seldom = read_again(Duration::from_secs(3600));
    for (buried, read) in [(2, 2), (0, 2), (0, 2), (1, 5), (0, 5)] {
        fixture.bury_unknown(buried).await;
        until_its_turn(&fixture, &seldom).await;
        assert_eq!(letters_read(), read, "{buried} more were buried");
    }
    fixture.bury_unknown(1).await;
    fixture.queue.fails.store(true, Ordering::SeqCst);
    for read in [5, 9, 9] {
        until_its_turn(&fixture, &seldom).await;
        assert_eq!(letters_read(), read, "a reading that failed is repeated at the next turn, and then not again");
    }
    until_its_turn(&fixture, &read_again(Duration::ZERO)).await;
    assert_eq!(letters_read(), 13, "that time has passed");
}

/// Sweeps the dead letters once the turn of the reconciler before has ended.
async fn until_its_turn(fixture: &Fixture, reconciler: &Reconciler) {
    let (store, clock) = (&fixture.guarded.store, &fixture.guarded.clock);
    eventually(SOON, "the turn to end", || async {
        let now = clock.now();
        store.lease_sweep(Sweep::DeadLetters.name(), None, now, now).await.unwrap().then_some(())
    })
    .await;
    reconciler.sweep(Sweep::DeadLetters).await.unwrap();
}

/// Every reconciler read all of them.
#[tokio::test]
async fn consumers_take_turns_at_the_dead_letters_and_a_dead_one_loses_its_turn() {
    let fixture = Fixture::new().await;
    fixture.bury_unknown(1).await;
    let letters_read = || fixture.queue.letters_read.load(Ordering::SeqCst);
    let pause = Duration::from_secs(3600);
    let consumers: Vec<_> = (0..4).map(|_| fixture.another(pause)).collect();
    for consumer in &consumers {
        consumer.sweep(Sweep::DeadLetters).await.unwrap();
    }
    assert_eq!(letters_read(), 1, "one of four consumers sweeps");

    // One that died in the middle of its sweep.
    let fixture = Fixture::new().await;
    fixture.bury_unknown(1).await;
    let (store, clock) = (&fixture.guarded.store, &fixture.guarded.clock);
    let until = clock.now() + Duration::from_millis(300);
    assert!(store.lease_sweep(Sweep::DeadLetters.name(), None, clock.now(), until).await.unwrap());
    let consumer = fixture.another(pause);
    let letters_read = || fixture.queue.letters_read.load(Ordering::SeqCst);
    eventually(SOON, "the next consumer's sweep", || async {
        consumer.sweep(Sweep::DeadLetters).await.unwrap();
        (letters_read() > 0).then_some(())
    })
    .await;
    assert!(clock.now() >= until, "the lease had ended");
}

/// Every reconciler asked about the same rows.
#[tokio::test]
async fn consumers_ask_a_relayer_about_each_submitted_row_once() {
    // More than one consumer takes at a time.
    const ROWS: usize = 40;
    let relayer = Relayer::start(RelayerOptions::new("relayer-1")).await;
    let http = harness::http_client();
    let key = Secret::new(relayer.api_key());
    let client = RelayerClient::new(&relayer.url().parse().unwrap(), &key, SOON).unwrap();
    let url = client.url().clone();
    let fixture = Fixture::over(vec![client]).await;
    let mut ids = Vec::new();
    for _ in 0..ROWS {
        let submit = http.post(format!("{}/api/v1/relayers/relayer-1/transactions", relayer.url()));
        let body = json!({ "to": TO, "value": "1", "data": "0x", "speed": "fast" });
        let (status, record) = answer(submit.bearer_auth(relayer.api_key()).json(&body)).await;
        let id = record["data"]["id"].as_str().unwrap_or_else(|| panic!("{status}: {record}")).to_owned();
        fixture.due_at(&url, RelayerTxId(id.clone())).await;
        ids.push(id);
    }
    // The answers come after each consumer has looked for rows that are due.
    relayer.change_faults(|faults| faults.transaction_reads.delay = Some(Duration::from_millis(300)));
    let pause = fixture.settings.dead_letters_every;
    let consumers = [fixture.another(pause), fixture.another(pause), fixture.another(pause)];
    let sweeps = consumers.iter().map(|consumer| consumer.sweep(Sweep::Submitted));
    futures::future::try_join_all(sweeps).await.unwrap();
    let asked: Vec<_> = ids.iter().map(|id| relayer.count_requests("GET", id)).collect();
    assert_eq!(asked, [1; ROWS], "questions about each row");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_sweep_that_blocks_its_thread_does_not_delay_the_heartbeat() {
    let fixture = Fixture::new().await;
    fixture.queue.gate.set_closed(true);
    let opens = OpensAtEnd(&fixture.queue.gate);
    let shutdown = CancellationToken::new();
    let running = tokio::spawn(Arc::clone(&fixture.reconciler).run(shutdown.clone()));
    let mut beats = std::collections::BTreeSet::new();
    let store = &fixture.guarded.store;
    for _ in 0..5 {
        let at = eventually(SOON, "another heartbeat", || async {
            store.last_heartbeat(&fixture.me).await.unwrap().filter(|at| !beats.contains(at))
        })
        .await;
        beats.insert(at);
    }
    drop(opens);
    shutdown.cancel();
    running.await.unwrap();
}

/// Otherwise it would not run again until the process is restarted, while the other sweeps go on.
#[tokio::test]
async fn a_sweep_that_panics_is_run_again() {
    let fixture = Fixture::new().await;
    let guarded = &fixture.guarded;
    let waiting = row((guarded.clock.now() - guarded.timings.pending_check * 2).0);
    guarded.store.insert(std::slice::from_ref(&waiting)).await.unwrap();
    fixture.queue.panics.store(true, Ordering::SeqCst);
    let shutdown = CancellationToken::new();
    let running = tokio::spawn(Arc::clone(&fixture.reconciler).run(shutdown.clone()));
    eventually(SOON, "the row to be queued again", || async {
        (fixture.queue.inner.depth().await.unwrap().ready == 1).then_some(())
    })
    .await;
    assert!(!fixture.queue.panics.load(Ordering::SeqCst), "the first run panicked");
    shutdown.cancel();
    running.await.unwrap();
}

/// A consumer killed right before it queued a row again left it for the ten minutes of `RECONCILE_PENDING_MS`.
#[tokio::test]
async fn a_row_that_did_not_get_into_the_queue_again_is_due_soon() {
    let fixture = Fixture::new().await;
    let (guarded, timings) = (&fixture.guarded, fixture.guarded.timings);
    let waiting = row((guarded.clock.now() - timings.pending_check * 2).0);
    guarded.store.insert(std::slice::from_ref(&waiting)).await.unwrap();
    let swept = async |refuses: bool| {
        fixture.queue.refuses.store(refuses, Ordering::SeqCst);
        let before = guarded.clock.now();
        fixture.reconciler.sweep(Sweep::Waiting).await.unwrap();
        let check_at = guarded.store.get(waiting.id).await.unwrap().unwrap().check_at.unwrap();
        (check_at.since(before), fixture.queue.depth().await.unwrap().ready)
    };
    let (due_in, ready) = swept(true).await;
    assert!(due_in < timings.pending_check / 2 && ready == 0, "due in {due_in:?}");
    // Due again, as after that time.
    let due = |row: &Transaction| row.check_later(guarded.clock.now(), guarded.clock.now());
    guarded.update(waiting.id, due).await.unwrap();
    let (due_in, ready) = swept(false).await;
    assert!(due_in >= timings.pending_check && ready == 1, "due in {due_in:?}");
}
