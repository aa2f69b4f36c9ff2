//! One message at a time: limits, verdicts, panics, leases, outages, shutdown.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use pipeline::queue::memory::MemoryQueue;
use pipeline::queue::sqlite::SqliteQueue;
use pipeline::sqlite::Database;
use pipeline::{
    CancellationToken, Capabilities, DeadLetter, Depth, Handler, Message, MessageId, Outcome, Outgoing, Pipeline,
    PipelineOptions, Queue, QueueError, QueueOptions, Receipt, RetryPolicy, Summary,
};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio::time::Instant;

pub const PATIENCE: Duration = Duration::from_secs(30);
pub const LONG: Duration = Duration::from_secs(300);

/// A handler made of a closure.
struct Handle<F>(F);

#[async_trait::async_trait]
impl<F, R> Handler for Handle<F>
where
    F: Fn(Message) -> R + Send + Sync + 'static,
    R: Future<Output = Outcome> + Send,
{
    async fn handle(&self, message: &Message) -> Outcome {
        (self.0)(message.clone()).await
    }
}

struct Running {
    shutdown: CancellationToken,
    task: JoinHandle<Summary>,
}

impl Running {
    fn start(queue: impl Queue, options: PipelineOptions, handler: impl Handler) -> Self {
        Self::start_with(queue, options, handler, CancellationToken::new())
    }

    fn start_with(
        queue: impl Queue,
        options: PipelineOptions,
        handler: impl Handler,
        shutdown: CancellationToken,
    ) -> Self {
        let task = tokio::spawn(Pipeline::new(Arc::new(queue), options).run(Arc::new(handler), shutdown.clone()));
        Self { shutdown, task }
    }

    async fn stop(self) -> Summary {
        self.shutdown.cancel();
        tokio::time::timeout(PATIENCE, self.task).await.expect("it does not stop").unwrap()
    }
}

pub fn memory(lease: Duration) -> MemoryQueue {
    MemoryQueue::new("test", QueueOptions { lease, ..QueueOptions::default() })
}

pub async fn send(queue: &impl Queue, count: usize) -> Vec<MessageId> {
    let messages: Vec<_> = (0..count).map(|number| Outgoing::new(number.to_string())).collect();
    queue.send(&messages).await.into_iter().map(Result::unwrap).collect()
}

/// Waits for a condition with a deadline.
pub async fn until<R: Future<Output = bool>>(what: &str, condition: impl Fn() -> R) {
    let deadline = Instant::now() + PATIENCE;
    while !condition().await {
        assert!(Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub async fn until_empty(queue: &impl Queue) {
    until("the queue is empty", || async {
        let depth = queue.depth().await.unwrap();
        depth.ready + depth.in_flight + depth.delayed == 0
    })
    .await;
}

fn with_concurrency(concurrency: usize) -> PipelineOptions {
    PipelineOptions { concurrency, ..PipelineOptions::default() }
}

/// A gate that handlers wait at.
fn gate() -> (Arc<Semaphore>, Arc<AtomicUsize>) {
    (Arc::new(Semaphore::new(0)), Arc::new(AtomicUsize::new(0)))
}

/// Waits at the gate, and panics if more than three are inside.
fn three_at_most(gate: &Arc<Semaphore>, inside: &Arc<AtomicUsize>) -> impl Handler {
    let (gate, inside) = (gate.clone(), inside.clone());
    Handle(move |_| {
        let (gate, inside) = (gate.clone(), inside.clone());
        async move {
            assert!(inside.fetch_add(1, Ordering::SeqCst) < 3, "more than three at once");
            gate.acquire().await.unwrap().forget();
            inside.fetch_sub(1, Ordering::SeqCst);
            Outcome::Done
        }
    })
}

#[tokio::test]
async fn handles_as_many_at_once_as_it_may_and_takes_no_more() {
    let queue = memory(LONG);
    send(&queue, 10).await;
    let (gate, inside) = gate();
    let running = Running::start(queue.clone(), with_concurrency(3), three_at_most(&gate, &inside));
    until("three are inside", || async { inside.load(Ordering::SeqCst) == 3 }).await;
    let depth = queue.depth().await.unwrap();
    assert_eq!((depth.in_flight, depth.ready), (3, 7), "it took what it had no room for");
    gate.add_permits(10);
    until_empty(&queue).await;
    let summary = running.stop().await;
    assert_eq!((summary.done, summary.panics), (10, 0));
}

#[tokio::test]
async fn settles_by_the_verdict() {
    let queue = memory(LONG);
    send(&queue, 3).await;
    let running = Running::start(
        queue.clone(),
        with_concurrency(8),
        Handle(|message: Message| async move {
            match message.body.as_slice() {
                b"1" if message.receives == 1 => Outcome::Retry { after: Duration::ZERO, reason: "not yet".into() },
                b"2" => Outcome::Dead { reason: "never".into() },
                _ => Outcome::Done,
            }
        }),
    );
    until_empty(&queue).await;
    let summary = running.stop().await;
    assert_eq!((summary.done, summary.retried, summary.dead), (2, 1, 1));
    assert_eq!((summary.received, summary.handled), (4, 4));
    let letters = queue.dead_letters(None, 10).await.unwrap();
    assert_eq!((letters[0].body.as_slice(), letters[0].reason.as_str()), (b"2".as_slice(), "never"));
}

#[tokio::test]
async fn a_panic_is_a_failed_attempt_and_the_last_one_buries() {
    let queue = memory(LONG);
    send(&queue, 1).await;
    let panic_retry = RetryPolicy { attempts_max: 3, first_delay: Duration::from_millis(1), ..RetryPolicy::default() };
    let options = PipelineOptions { panic_retry, ..PipelineOptions::default() };
    let running = Running::start(
        queue.clone(),
        options,
        Handle(|message: Message| async move {
            if message.body == b"0" {
                panic!("on purpose");
            }
            Outcome::Done
        }),
    );
    until_empty(&queue).await;
    send(&queue, 2).await;
    until_empty(&queue).await;
    let summary = running.stop().await;
    assert_eq!((summary.panics, summary.retried, summary.dead, summary.done), (6, 4, 2, 1));
    let letter = queue.dead_letters(None, 1).await.unwrap().remove(0);
    assert_eq!(letter.receives, 3);
    assert_eq!(letter.reason, "the handler panicked: on purpose (attempt 3 of 3)");
}

#[tokio::test]
async fn a_lease_is_kept_while_the_handler_works() {
    let lease = Duration::from_millis(150);
    let queue = memory(lease);
    send(&queue, 3).await;
    let running = Running::start(
        queue.clone(),
        with_concurrency(8),
        Handle(move |message: Message| async move {
            assert_eq!(message.receives, 1, "delivered twice");
            tokio::time::sleep(lease * 5).await;
            Outcome::Done
        }),
    );
    until_empty(&queue).await;
    let summary = running.stop().await;
    assert_eq!((summary.received, summary.done, summary.lease_lost, summary.panics), (3, 3, 0, 0));
}

#[tokio::test]
async fn a_lost_lease_is_counted_and_the_handler_goes_on() {
    let queue = memory(LONG);
    send(&queue, 1).await;
    let second = Arc::new(Semaphore::new(0));
    let finished = Arc::new(AtomicUsize::new(0));
    let (stolen_from, come_again, ended) = (queue.clone(), second.clone(), finished.clone());
    let running = Running::start(
        queue.clone(),
        with_concurrency(8),
        Handle(move |message: Message| {
            let (queue, second, finished) = (stolen_from.clone(), come_again.clone(), ended.clone());
            async move {
                if message.receives == 1 {
                    queue.extend(&[message.receipt], Duration::ZERO).await.remove(0).unwrap();
                    second.acquire().await.unwrap().forget();
                } else {
                    second.add_permits(1);
                }
                finished.fetch_add(1, Ordering::SeqCst);
                Outcome::Done
            }
        }),
    );
    until("both have finished", || async { finished.load(Ordering::SeqCst) == 2 }).await;
    until_empty(&queue).await;
    let summary = running.stop().await;
    assert_eq!((summary.handled, summary.done, summary.lease_lost), (2, 1, 1));
}

#[tokio::test]
async fn shutdown_lets_running_handlers_finish_and_takes_nothing_new() {
    let queue = memory(LONG);
    send(&queue, 5).await;
    let (gate, inside) = gate();
    let (handler_gate, handler_inside) = (gate.clone(), inside.clone());
    let running = Running::start(
        queue.clone(),
        with_concurrency(2),
        Handle(move |_| {
            let (gate, inside) = (handler_gate.clone(), handler_inside.clone());
            async move {
                inside.fetch_add(1, Ordering::SeqCst);
                gate.acquire().await.unwrap().forget();
                Outcome::Done
            }
        }),
    );
    until("two are inside", || async { inside.load(Ordering::SeqCst) == 2 }).await;
    running.shutdown.cancel();
    tokio::task::yield_now().await;
    gate.add_permits(5);
    let summary = running.stop().await;
    assert_eq!((summary.received, summary.done, summary.abandoned), (2, 2, 0));
    assert_eq!(queue.depth().await.unwrap().ready, 3);
}

#[tokio::test]
async fn shutdown_ends_a_receive_that_waits() {
    // Longer than the test's patience: sitting out the receive would fail it.
    let options = PipelineOptions { receive_wait: LONG, ..PipelineOptions::default() };
    let running = Running::start(memory(LONG), options, Handle(|_| async { Outcome::Done }));
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(running.stop().await, Summary::default());
}

#[tokio::test]
async fn a_handler_that_does_not_end_is_abandoned_and_its_message_comes_back() {
    let queue = memory(Duration::from_millis(100));
    let id = send(&queue, 1).await.remove(0);
    let inside = Arc::new(AtomicUsize::new(0));
    let entered = inside.clone();
    let options = PipelineOptions { drain_timeout: Duration::from_millis(300), ..PipelineOptions::default() };
    let running = Running::start(
        queue.clone(),
        options,
        Handle(move |_| {
            entered.fetch_add(1, Ordering::SeqCst);
            std::future::pending()
        }),
    );
    until("it is inside", || async { inside.load(Ordering::SeqCst) == 1 }).await;
    let summary = running.stop().await;
    assert_eq!((summary.received, summary.abandoned, summary.handled, summary.unsettled), (1, 1, 0, 0));
    // Kept during the drain, which was three leases long, and free after it.
    assert_eq!(inside.load(Ordering::SeqCst), 1);
    let message = queue.receive(1, PATIENCE).await.unwrap().remove(0);
    assert_eq!((message.id, message.receives), (id, 2));
}

#[tokio::test]
async fn what_was_taken_during_shutdown_is_handed_back_at_once() {
    let inner = memory(LONG);
    send(&inner, 4).await;
    let shutdown = CancellationToken::new();
    let queue = Faulty { cancel_in_receive: Some(shutdown.clone()), ..Faulty::new(inner.clone()) };
    let handler = Handle(|_| async { panic!("it was started") });
    let running = Running::start_with(queue, PipelineOptions::default(), handler, shutdown);
    let summary = tokio::time::timeout(PATIENCE, running.task).await.expect("it does not stop").unwrap();
    assert_eq!((summary.received, summary.handed_back, summary.handled), (4, 4, 0));
    assert_eq!(inner.depth().await.unwrap().ready, 4, "due at once");
}

#[tokio::test]
async fn a_receive_outage_passes() {
    let inner = memory(LONG);
    let queue = Faulty::new(inner.clone());
    for _ in 0..3 {
        queue.fail_receive(Fault::Refuse);
    }
    send(&inner, 2).await;
    let running = Running::start(queue, PipelineOptions::default(), Handle(|_| async { Outcome::Done }));
    until_empty(&inner).await;
    assert_eq!(running.stop().await.done, 2);
}

#[tokio::test]
async fn a_verdict_is_told_again_until_the_queue_takes_it() {
    let inner = memory(LONG);
    let queue = Faulty::new(inner.clone());
    for _ in 0..3 {
        queue.fail_ack(Fault::Refuse);
    }
    send(&inner, 1).await;
    let running = Running::start(queue, PipelineOptions::default(), Handle(|_| async { Outcome::Done }));
    until_empty(&inner).await;
    let summary = running.stop().await;
    assert_eq!((summary.received, summary.done, summary.unsettled, summary.lease_lost), (1, 1, 0, 0));
}

#[tokio::test]
async fn an_unanswered_verdict_that_had_worked_is_not_a_lost_lease() {
    let inner = memory(LONG);
    let queue = Faulty::new(inner.clone());
    queue.fail_ack(Fault::LoseTheAnswer);
    send(&inner, 1).await;
    let running = Running::start(queue, PipelineOptions::default(), Handle(|_| async { Outcome::Done }));
    until_empty(&inner).await;
    let summary = running.stop().await;
    assert_eq!((summary.done, summary.lease_lost, summary.unsettled), (1, 0, 0));
}

#[tokio::test]
async fn verdicts_that_pile_up_go_out_together() {
    let inner = memory(LONG);
    send(&inner, 50).await;
    let queue = Faulty { ack_gate: Some(Arc::new(Semaphore::new(0))), ..Faulty::new(inner.clone()) };
    let (gate, calls) = (queue.ack_gate.clone().unwrap(), queue.ack_calls.clone());
    let handled = Arc::new(AtomicUsize::new(0));
    let count = handled.clone();
    let running = Running::start(
        queue,
        with_concurrency(50),
        Handle(move |_| {
            count.fetch_add(1, Ordering::SeqCst);
            async { Outcome::Done }
        }),
    );
    until("all are handled", || async { handled.load(Ordering::SeqCst) == 50 }).await;
    gate.add_permits(100);
    until_empty(&inner).await;
    assert_eq!(running.stop().await.done, 50);
    assert!(calls.load(Ordering::SeqCst) <= 3, "{} calls for 50 messages", calls.load(Ordering::SeqCst));
}

#[tokio::test]
async fn small_receives_run_side_by_side_while_there_is_more() {
    let inner = memory(LONG);
    send(&inner, 200).await;
    let queue = Faulty { receive_pause: Duration::from_millis(5), ..Faulty::new(inner.clone()) };
    let most = queue.receives_most.clone();
    let options = PipelineOptions { concurrency: 64, receive_max: 10, receives_max: 3, ..PipelineOptions::default() };
    let running = Running::start(queue, options, Handle(|_| async { Outcome::Done }));
    until_empty(&inner).await;
    assert_eq!(running.stop().await.done, 200);
    assert_eq!(most.load(Ordering::SeqCst), 3);
}

#[tokio::test]
async fn where_a_receive_carries_many_some_wait_for_their_turn_and_go_back_at_shutdown() {
    let queue = memory(LONG);
    send(&queue, 30).await;
    let (gate, inside) = gate();
    let running = Running::start(
        Faulty { request_carries: 10, ..Faulty::new(queue.clone()) },
        PipelineOptions { receives_max: 2, ..with_concurrency(3) },
        three_at_most(&gate, &inside),
    );
    let at_once = || async { (inside.load(Ordering::SeqCst), queue.depth().await.unwrap().in_flight) };
    until("three are handled and two receives are taken", || async { at_once().await == (3, 23) }).await;
    running.shutdown.cancel();
    until("those without a turn are back", || async { at_once().await == (3, 3) }).await;
    assert_eq!(queue.depth().await.unwrap().ready, 27);
    gate.add_permits(3);
    let summary = running.stop().await;
    assert_eq!((summary.done, summary.handed_back, summary.panics), (3, 20, 0));
}

#[tokio::test]
async fn nothing_is_taken_while_the_handler_is_not_ready() {
    struct Gated(Arc<Semaphore>);
    #[async_trait::async_trait]
    impl Handler for Gated {
        async fn handle(&self, _: &Message) -> Outcome {
            Outcome::Done
        }
        async fn ready(&self) {
            drop(self.0.acquire().await.unwrap());
        }
    }
    let queue = memory(LONG);
    send(&queue, 3).await;
    let gate = Arc::new(Semaphore::new(0));
    let running = Running::start(queue.clone(), PipelineOptions::default(), Gated(gate.clone()));
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(queue.depth().await.unwrap().ready, 3);
    gate.add_permits(1);
    until_empty(&queue).await;
    assert_eq!(running.stop().await.done, 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_pipelines_on_the_embedded_queue_do_everything_once() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("test.db");
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (mut queues, mut pipelines) = (Vec::new(), Vec::new());
    for _ in 0..2 {
        let db = Database::open(&file).unwrap();
        let queue = SqliteQueue::open(&db, "test", QueueOptions::default()).await.unwrap();
        let seen = seen.clone();
        pipelines.push(Running::start(
            queue.clone(),
            with_concurrency(16),
            Handle(move |message: Message| {
                seen.lock().unwrap().push(message.id);
                async { Outcome::Done }
            }),
        ));
        queues.push(queue);
    }
    let mut sent = Vec::new();
    for _ in 0..20 {
        sent.extend(send(&queues[0], 50).await);
    }
    until_empty(&queues[1]).await;
    let mut done = 0;
    for running in pipelines {
        done += running.stop().await.done;
    }
    let mut seen = seen.lock().unwrap().clone();
    seen.sort();
    sent.sort();
    assert_eq!(seen, sent);
    assert_eq!(done, 1000);
}

/// What goes wrong with one call.
#[derive(Clone, Copy)]
enum Fault {
    /// The queue is not there.
    Refuse,
    /// The queue does it, and nobody hears of it.
    LoseTheAnswer,
}

/// A queue that misbehaves as told.
struct Faulty {
    inner: MemoryQueue,
    request_carries: usize,
    receive_faults: Mutex<VecDeque<Fault>>,
    ack_faults: Mutex<VecDeque<Fault>>,
    ack_gate: Option<Arc<Semaphore>>,
    ack_calls: Arc<AtomicUsize>,
    cancel_in_receive: Option<CancellationToken>,
    receive_pause: Duration,
    receives_now: AtomicUsize,
    receives_most: Arc<AtomicUsize>,
}

impl Faulty {
    fn new(inner: MemoryQueue) -> Self {
        Self {
            inner,
            request_carries: 1,
            receive_faults: Mutex::default(),
            ack_faults: Mutex::default(),
            ack_gate: None,
            ack_calls: Arc::default(),
            cancel_in_receive: None,
            receive_pause: Duration::ZERO,
            receives_now: AtomicUsize::new(0),
            receives_most: Arc::default(),
        }
    }

    fn fail_receive(&self, fault: Fault) {
        self.receive_faults.lock().unwrap().push_back(fault);
    }

    fn fail_ack(&self, fault: Fault) {
        self.ack_faults.lock().unwrap().push_back(fault);
    }
}

#[async_trait::async_trait]
impl Queue for Faulty {
    fn name(&self) -> &str {
        "faulty"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { request_carries: self.request_carries, ..self.inner.capabilities() }
    }

    async fn send(&self, messages: &[Outgoing]) -> Vec<Result<MessageId, QueueError>> {
        self.inner.send(messages).await
    }

    async fn receive(&self, max: usize, wait: Duration) -> Result<Vec<Message>, QueueError> {
        let fault = self.receive_faults.lock().unwrap().pop_front();
        if fault.is_some() {
            return Err(QueueError::Unavailable("on purpose".into()));
        }
        let now = self.receives_now.fetch_add(1, Ordering::SeqCst) + 1;
        self.receives_most.fetch_max(now, Ordering::SeqCst);
        let got = self.inner.receive(max, wait).await;
        tokio::time::sleep(self.receive_pause).await;
        self.receives_now.fetch_sub(1, Ordering::SeqCst);
        if let Some(shutdown) = &self.cancel_in_receive {
            // Both at once: the shutdown, and the answer of a receive that has its messages already.
            shutdown.cancel();
            let mut woken = false;
            let once = std::future::poll_fn(move |context| {
                context.waker().wake_by_ref();
                if std::mem::replace(&mut woken, true) { Poll::Ready(()) } else { Poll::Pending }
            });
            once.await;
        }
        got
    }

    async fn ack(&self, receipts: &[Receipt]) -> Vec<Result<(), QueueError>> {
        self.ack_calls.fetch_add(1, Ordering::SeqCst);
        if let Some(gate) = &self.ack_gate {
            gate.acquire().await.unwrap().forget();
        }
        let fault = self.ack_faults.lock().unwrap().pop_front();
        match fault {
            None => self.inner.ack(receipts).await,
            Some(Fault::Refuse) => receipts.iter().map(|_| Err(QueueError::Unavailable("on purpose".into()))).collect(),
            Some(Fault::LoseTheAnswer) => {
                let answers = self.inner.ack(receipts).await;
                answers.into_iter().map(|_| Err(QueueError::OutcomeUnknown("on purpose".into()))).collect()
            }
        }
    }

    async fn retry_after(&self, entries: &[(Receipt, Duration)]) -> Vec<Result<(), QueueError>> {
        self.inner.retry_after(entries).await
    }

    async fn bury(&self, entries: &[(Receipt, String)]) -> Vec<Result<(), QueueError>> {
        self.inner.bury(entries).await
    }

    async fn extend(&self, receipts: &[Receipt], for_: Duration) -> Vec<Result<(), QueueError>> {
        self.inner.extend(receipts, for_).await
    }

    fn lease(&self) -> Duration {
        self.inner.lease()
    }

    async fn depth(&self) -> Result<Depth, QueueError> {
        self.inner.depth().await
    }

    async fn dead_letters(&self, after: Option<&MessageId>, max: usize) -> Result<Vec<DeadLetter>, QueueError> {
        self.inner.dead_letters(after, max).await
    }

    async fn replay(&self, ids: &[MessageId], delay: Duration) -> Vec<Result<(), QueueError>> {
        self.inner.replay(ids, delay).await
    }

    async fn discard(&self, ids: &[MessageId]) -> Vec<Result<(), QueueError>> {
        self.inner.discard(ids).await
    }
}
