//! Race tests of lease renewal, settlement and drain under the `shuttle` scheduler, which runs threads one at a time and
//! picks the next one at random at each scheduling point. The model queue below has a scheduling point before and after
//! each call takes effect; the code of the run itself is the real one.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use shuttle::future::block_on;
use shuttle::rand::Rng;
use shuttle::sync::Mutex;
use shuttle::thread;
use tokio::time::Instant;

use super::delivery::Delivery;
use super::lease::{LeaseTable, record_renewals};
use super::meters::Meters;
use super::settle::{self, Settlement, settle_group};
use super::{PipelineOptions, Run, Summary};
use crate::handler::Outcome;
use crate::message::{DeadLetter, Message, MessageId, Outgoing, Receipt};
use crate::queue::memory::MemoryQueue;
use crate::queue::{Capabilities, Depth, Queue, QueueError, QueueOptions};

const ITERATIONS: usize = 2_000;
const MESSAGES: usize = 3;
const LEASE: Duration = Duration::from_secs(3600);

/// Leases by receipt. An acknowledgement or another receiver ends them.
struct ModelQueue {
    leased: Mutex<HashSet<Receipt>>,
    /// Answers every other acknowledgement, at random, as unknown although it took effect.
    drops_answers: bool,
}

impl ModelQueue {
    fn apply<T>(&self, change: impl Fn(&mut HashSet<Receipt>) -> T) -> T {
        thread::yield_now();
        let answer = change(&mut self.leased.lock().unwrap());
        thread::yield_now();
        answer
    }

    /// The message goes to another receiver.
    fn steal(&self, receipt: &Receipt) {
        self.apply(|leased| leased.remove(receipt));
    }
}

fn held(is_held: bool) -> Result<(), QueueError> {
    if is_held { Ok(()) } else { Err(QueueError::LeaseLost) }
}

#[async_trait]
impl Queue for ModelQueue {
    fn name(&self) -> &str {
        "model"
    }

    fn capabilities(&self) -> Capabilities {
        MemoryQueue::new("model", QueueOptions::default()).capabilities()
    }

    async fn ack(&self, receipts: &[Receipt]) -> Vec<Result<(), QueueError>> {
        let answers = self.apply(|leased| receipts.iter().map(|one| held(leased.remove(one))).collect());
        if self.drops_answers && shuttle::rand::thread_rng().r#gen::<bool>() {
            return receipts.iter().map(|_| Err(QueueError::OutcomeUnknown("dropped".into()))).collect();
        }
        answers
    }

    async fn extend(&self, receipts: &[Receipt], _: Duration) -> Vec<Result<(), QueueError>> {
        self.apply(|leased| receipts.iter().map(|one| held(leased.contains(one))).collect())
    }

    fn lease(&self) -> Duration {
        LEASE
    }

    async fn send(&self, _: &[Outgoing]) -> Vec<Result<MessageId, QueueError>> {
        unreachable!("the tests do not send")
    }

    async fn receive(&self, _: usize, _: Duration) -> Result<Vec<Message>, QueueError> {
        unreachable!("the tests do not receive")
    }

    async fn retry_after(&self, _: &[(Receipt, Duration)]) -> Vec<Result<(), QueueError>> {
        unreachable!("the tests do not retry")
    }

    async fn bury(&self, _: &[(Receipt, String)]) -> Vec<Result<(), QueueError>> {
        unreachable!("the tests do not bury")
    }

    async fn depth(&self) -> Result<Depth, QueueError> {
        unreachable!("the tests do not count")
    }

    async fn dead_letters(&self, _: Option<&MessageId>, _: usize) -> Result<Vec<DeadLetter>, QueueError> {
        unreachable!("the tests have no dead letters")
    }

    async fn replay(&self, _: &[MessageId], _: Duration) -> Vec<Result<(), QueueError>> {
        unreachable!("the tests have no dead letters")
    }

    async fn discard(&self, _: &[MessageId]) -> Vec<Result<(), QueueError>> {
        unreachable!("the tests have no dead letters")
    }
}

/// A run with [`MESSAGES`] leased messages.
struct Fixture {
    queue: Arc<ModelQueue>,
    run: Arc<Run>,
    messages: Vec<(u64, Message)>,
    /// When every lease is due for renewal and still valid.
    renewal_at: Instant,
}

impl Fixture {
    fn new(drops_answers: bool) -> Self {
        let now = Instant::now();
        let messages: Vec<Message> = (0..MESSAGES).map(message).collect();
        let leased = Mutex::new(messages.iter().map(|message| message.receipt.clone()).collect());
        let queue = Arc::new(ModelQueue { leased, drops_answers });
        let run = Arc::new(Run {
            queue: queue.clone(),
            options: PipelineOptions::default(),
            capacity: MESSAGES,
            meters: Arc::new(Meters::new("model")),
            leases: LeaseTable::new(LEASE),
        });
        let messages = messages.into_iter().map(|message| (run.leases.add(&message, now), message)).collect();
        Self { queue, run, messages, renewal_at: now + LEASE / 2 }
    }

    /// Renews twice, as the renewal task does.
    fn renew(&self) -> thread::JoinHandle<()> {
        let (run, renewal_at) = (self.run.clone(), self.renewal_at);
        thread::spawn(move || {
            for _ in 0..2 {
                let (keys, receipts): (Vec<_>, Vec<_>) = run.leases.due_for_renewal(renewal_at).into_iter().unzip();
                let answers = block_on(run.queue.extend(&receipts, LEASE));
                // The lease's end stays, so that every round renews every message.
                record_renewals(&run, &keys, renewal_at, answers);
            }
        })
    }

    /// Settles all messages as done, in groups of one and with retries, as the settler does.
    fn settle(&self) -> thread::JoinHandle<()> {
        let (run, messages) = (self.run.clone(), self.messages.clone());
        thread::spawn(move || {
            for (lease_key, message) in &messages {
                let mut group = vec![Settlement::new(*lease_key, message, Outcome::Done.into())];
                while !group.is_empty() {
                    group = block_on(settle_group(&run, group));
                    // The settler sleeps before a retry.
                    thread::yield_now();
                }
            }
        })
    }

    fn steal_all(&self) -> thread::JoinHandle<()> {
        let (queue, messages) = (self.queue.clone(), self.messages.clone());
        thread::spawn(move || messages.iter().for_each(|(_, message)| queue.steal(&message.receipt)))
    }

    fn summary(&self) -> Summary {
        self.run.meters.summary(self.run.leases.len())
    }
}

fn message(number: usize) -> Message {
    Message {
        id: MessageId(number.to_string()),
        body: Vec::new(),
        attributes: Default::default(),
        receives: 1,
        sent_at: SystemTime::now(),
        receipt: Receipt(number.to_string()),
    }
}

fn join(threads: impl IntoIterator<Item = thread::JoinHandle<()>>) {
    for one in threads {
        one.join().unwrap();
    }
}

#[test]
fn a_settled_message_is_never_counted_as_a_lost_lease() {
    let scenario = || {
        let fixture = Fixture::new(false);
        join([fixture.renew(), fixture.settle()]);
        let summary = fixture.summary();
        assert_eq!((summary.done, summary.lease_lost, summary.unsettled), (MESSAGES as u64, 0, 0));
    };
    shuttle::check_random(scenario, ITERATIONS);
}

#[test]
fn a_settlement_whose_answer_was_dropped_is_counted_once_and_not_as_a_lost_lease() {
    let scenario = || {
        let fixture = Fixture::new(true);
        join([fixture.renew(), fixture.settle()]);
        let summary = fixture.summary();
        assert_eq!((summary.done, summary.lease_lost, summary.unsettled), (MESSAGES as u64, 0, 0));
    };
    shuttle::check_random(scenario, ITERATIONS);
}

#[test]
fn every_message_is_either_settled_or_counted_once_as_a_lost_lease() {
    let scenario = || {
        let fixture = Fixture::new(false);
        join([fixture.renew(), fixture.settle(), fixture.steal_all()]);
        let summary = fixture.summary();
        assert_eq!((summary.done + summary.lease_lost, summary.unsettled), (MESSAGES as u64, 0), "{summary:?}");
    };
    shuttle::check_random(scenario, ITERATIONS);
}

#[test]
fn a_delivery_abandoned_at_the_end_of_the_drain_leaves_no_lease() {
    let scenario = || {
        let fixture = Fixture::new(false);
        let (settlements, _receiver) = settle::channel();
        let abandon = {
            let (run, messages) = (fixture.run.clone(), fixture.messages.clone());
            thread::spawn(move || {
                for (lease_key, message) in messages {
                    let (run, settlements) = (run.clone(), settlements.clone());
                    run.meters.received();
                    drop(Delivery { message, lease_key, run, settlements, handed_in: false, slot: None });
                    thread::yield_now();
                }
            })
        };
        join([fixture.renew(), abandon]);
        let summary = fixture.summary();
        assert_eq!((summary.abandoned, summary.lease_lost, summary.unsettled), (MESSAGES as u64, 0, 0));
    };
    shuttle::check_random(scenario, ITERATIONS);
}
