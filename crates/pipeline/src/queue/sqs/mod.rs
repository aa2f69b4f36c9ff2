//! AWS SQS, through the official SDK. What SQS does not have is made here, of what it has:
//!
//! - a message's id that outlives burial and replay is an attribute, as is all else that a copy must carry (`wire`);
//! - concurrent sends share requests (`outbox`), and every request has an end (`calls`);
//! - a delay beyond 15 minutes is several: who receives a message too early sends it on with what is left of its delay;
//! - a burial is a copy to the dead-letter queue and then a deletion, a replay the same the other way round. In that order,
//!   so that a crash in between leaves the message twice, never nowhere;
//! - dead letters are listed by taking all and putting them back (`dead`);
//! - queues that are gone while we run are made again, if they are ours to make.
//!
//! SQS counts in whole seconds: leases and delays round up.

mod dead_letter_changes;
mod dead_letters;
mod leases;
mod options;
mod receive;
mod requests;
mod send_batcher;
mod setup;
mod wire;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use tokio::runtime::Handle;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use self::dead_letter_changes::{Change, missing};
use self::leases::{Lease, Leases};
pub use self::options::{SqsAccess, SqsOpenError, SqsOptions};
use self::receive::long_poll_s;
use self::requests::{BATCH_MAX, Calls};
use self::send_batcher::Outbox;
use self::wire::{Burial, Content, whole_seconds};
use super::{Capabilities, Depth, Queue, QueueError, QueueOptions};
use crate::message::{DeadLetter, Message, MessageId, Outgoing, Receipt};

/// A wait longer than this is this long.
const WAIT_MAX: Duration = Duration::from_secs(24 * 3600);
/// The longest that a retry can be put off: SQS hides a message for 12 hours, the lease so far included.
const RETRY_MAX: Duration = Duration::from_secs(11 * 3600);

/// After queues could not be made again, the next try is not before this.
const MAKE_PAUSE: Duration = Duration::from_secs(1);

/// A queue in SQS. Cloning it is cheap and gives the same one.
///
/// ```no_run
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// use pipeline::queue::sqs::{SqsAccess, SqsOptions, SqsQueue};
/// use pipeline::{Outgoing, Queue, QueueOptions};
/// use std::time::Duration;
///
/// let options = SqsOptions::new(SqsAccess::Role, "ap-northeast-2", "greetings", "greetings-dlq");
/// let queue = SqsQueue::open(options, QueueOptions::default()).await?;
/// queue.send(&[Outgoing::new("hello")]).await;
/// let message = queue.receive(10, Duration::from_secs(20)).await?.remove(0);
/// queue.ack(&[message.receipt]).await;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct SqsQueue {
    shared: Arc<Shared>,
}

struct Shared {
    name: String,
    options: QueueOptions,
    sqs: SqsOptions,
    /// One makes queues at a time: when that was last tried in vain.
    making: tokio::sync::Mutex<Option<Instant>>,
    delay_step: Duration,
    calls: Arc<Calls>,
    queue_url: String,
    dead_url: String,
    outbox: Outbox,
    dead_outbox: Outbox,
    leases: Leases,
    /// One reader of the dead letters at a time: two would hide them from each other.
    reading: tokio::sync::Mutex<()>,
    tasks: TaskTracker,
    runtime: Handle,
}

impl SqsQueue {
    /// Finds the queues, creates them if missing and allowed, and checks that they are as configured.
    pub async fn open(sqs: SqsOptions, options: QueueOptions) -> Result<SqsQueue, SqsOpenError> {
        let calls = Arc::new(Calls::new(sqs.client().await, sqs.timeout));
        let urls = setup::prepare(&calls, &sqs, &options).await?;
        let tasks = TaskTracker::new();
        let shared = Shared {
            name: setup::name_of(&sqs.queue).to_owned(),
            options,
            delay_step: sqs.delay_step.min(wire::DELAY_MAX),
            sqs,
            making: tokio::sync::Mutex::new(None),
            outbox: Outbox::new(calls.clone(), urls.queue.clone(), tasks.clone()),
            dead_outbox: Outbox::new(calls.clone(), urls.dead.clone(), tasks.clone()),
            calls,
            queue_url: urls.queue,
            dead_url: urls.dead,
            leases: Leases::default(),
            reading: tokio::sync::Mutex::new(()),
            tasks,
            runtime: Handle::current(),
        };
        Ok(SqsQueue { shared: Arc::new(shared) })
    }

    /// Waits until nothing is under way any more. What is sent afterwards still goes out.
    pub async fn settled(&self) {
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
        self.shared.tasks.reopen();
    }

    /// After a failure: whether queues were missing, and are there again. A server that was replaced has none, and waiting
    /// for somebody to restart us would not bring them back. Whoever has others make the queues waits for them.
    async fn made_again(&self) -> bool {
        let shared = &self.shared;
        if !shared.sqs.auto_create || !shared.calls.missing.load(Ordering::Relaxed) {
            return false;
        }
        let mut tried_at = shared.making.lock().await;
        if !shared.calls.missing.load(Ordering::Relaxed) {
            return true;
        }
        if tried_at.is_some_and(|at| at.elapsed() < MAKE_PAUSE) {
            return false;
        }
        match setup::prepare(&shared.calls, &shared.sqs, &shared.options).await {
            Ok(_) => {
                tracing::warn!(queue = shared.name, "the queues were gone and are made again, empty");
                shared.calls.missing.store(false, Ordering::Relaxed);
                *tried_at = None;
                true
            }
            Err(error) => {
                tracing::warn!(queue = shared.name, error = &error as &dyn std::error::Error, "the queues are gone");
                *tried_at = Some(Instant::now());
                false
            }
        }
    }

    /// Runs what consists of several steps to its end, even if the caller goes away after the first.
    async fn to_the_end<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, QueueError> {
        let task = self.shared.tasks.spawn_on(work, &self.shared.runtime);
        task.await.map_err(|error| QueueError::OutcomeUnknown(error.into()))
    }

    /// The same for work on many entries.
    async fn each_to_the_end(
        &self,
        count: usize,
        work: impl Future<Output = Vec<Result<(), QueueError>>> + Send + 'static,
    ) -> Vec<Result<(), QueueError>> {
        if count == 0 {
            return Vec::new();
        }
        self.to_the_end(work).await.unwrap_or_else(|error| {
            let text = error.to_string();
            (0..count).map(|_| Err(QueueError::OutcomeUnknown(text.clone().into()))).collect()
        })
    }
}

#[async_trait]
impl Queue for SqsQueue {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            durable: true,
            ordered: false,
            // SQS may take an old receipt handle, and does not say.
            fenced: false,
            shared: true,
            cancel_safe: false,
            request_carries: BATCH_MAX,
            body_bytes_max: self.shared.options.body_bytes_max.min(wire::BODY_BYTES_MAX),
            delay_max: RETRY_MAX,
        }
    }

    async fn send(&self, messages: &[Outgoing]) -> Vec<Result<MessageId, QueueError>> {
        let shared = &self.shared;
        let now = SystemTime::now();
        let check = |message: &Outgoing| {
            wire::check_size(&message.body, &message.attributes, shared.options.body_bytes_max)?;
            Ok(MessageId(Uuid::now_v7().to_string()))
        };
        let ids: Vec<Result<MessageId, QueueError>> = messages.iter().map(check).collect();
        let parcel = |(message, id): (&Outgoing, &MessageId)| {
            let content =
                Content { id: id.clone(), body: message.body.clone(), attributes: message.attributes.clone() };
            wire::live(&content, None, message.delay, shared.delay_step, now)
        };
        let fitting = || messages.iter().zip(&ids).filter_map(|(message, id)| Some((message, id.as_ref().ok()?)));
        let mut sent = shared.outbox.send(fitting().map(parcel).collect()).await;
        if sent.iter().any(Result::is_err) && self.made_again().await {
            // Only what was certainly not sent.
            let unsent = |sent: &Result<(), QueueError>| matches!(sent, Err(QueueError::Unavailable(_)));
            let again = fitting().zip(&sent).filter(|(_, sent)| unsent(sent)).map(|(entry, _)| parcel(entry));
            let mut answers = shared.outbox.send(again.collect()).await.into_iter();
            for sent in sent.iter_mut().filter(|sent| unsent(sent)) {
                *sent = answers.next().unwrap_or_else(unanswered);
            }
        }
        let mut sent = sent.into_iter();
        ids.into_iter().map(|id| id.and_then(|id| sent.next().unwrap_or_else(unanswered).map(|()| id))).collect()
    }

    async fn receive(&self, max: usize, wait: Duration) -> Result<Vec<Message>, QueueError> {
        if max == 0 {
            return Ok(Vec::new());
        }
        let deadline = Instant::now() + wait.min(WAIT_MAX);
        let mut wait_s = long_poll_s(wait);
        loop {
            let messages = match self.take(max, wait_s).await {
                Err(_) if self.made_again().await => self.take(max, wait_s).await?,
                taken => taken?,
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if !messages.is_empty() || left.is_zero() {
                return Ok(messages);
            }
            wait_s = long_poll_s(left);
            if left < Duration::from_secs(1) {
                // Another whole second would be longer than asked.
                tokio::time::sleep(left).await;
                wait_s = 0;
            }
        }
    }

    async fn ack(&self, receipts: &[Receipt]) -> Vec<Result<(), QueueError>> {
        let handles: Vec<String> = receipts.iter().map(|receipt| receipt.0.clone()).collect();
        let answers = self.shared.calls.delete(&self.shared.queue_url, &handles).await;
        for (handle, answer) in handles.iter().zip(&answers) {
            if answer.is_ok() {
                self.shared.leases.remove(handle);
            }
        }
        answers
    }

    async fn retry_after(&self, entries: &[(Receipt, Duration)]) -> Vec<Result<(), QueueError>> {
        let leases = &self.shared.leases;
        let start = Instant::now();
        // What has been held for hours cannot be hidden for as long as asked, but for what is left of SQS's limit.
        let hide = |receipt: &Receipt, delay: Duration| match leases.get(&receipt.0) {
            Some(lease) if lease.is_lost(start) => Err(QueueError::LeaseLost),
            Some(lease) => Ok(whole_seconds(delay).min(lease.hideable_s(start))),
            None => Ok(whole_seconds(delay.min(RETRY_MAX))),
        };
        let wanted = entries.iter().map(|(receipt, delay)| (receipt, hide(receipt, *delay))).collect();
        self.hide(wanted, |handle, seconds| {
            leases.remove(handle);
            if seconds > 0 {
                leases.put_off(start + seconds_of(seconds), Instant::now());
            }
        })
        .await
    }

    async fn bury(&self, entries: &[(Receipt, String)]) -> Vec<Result<(), QueueError>> {
        let (shared, count, entries) = (self.shared.clone(), entries.len(), entries.to_vec());
        self.each_to_the_end(count, async move { shared.bury(&entries).await }).await
    }

    async fn extend(&self, receipts: &[Receipt], for_: Duration) -> Vec<Result<(), QueueError>> {
        let leases = &self.shared.leases;
        let start = Instant::now();
        let seconds = whole_seconds(for_);
        let hide = |receipt: &Receipt| match leases.get(&receipt.0) {
            Some(lease) if lease.is_lost(start) => Err(QueueError::LeaseLost),
            Some(lease) if seconds > lease.hideable_s(start) => {
                Err(QueueError::Unavailable("SQS leases a message for 12 hours at most".into()))
            }
            _ => Ok(seconds),
        };
        let wanted = receipts.iter().map(|receipt| (receipt, hide(receipt))).collect();
        let until = start + seconds_of(seconds);
        self.hide(wanted, |handle, _| leases.change(handle, |lease| lease.ends_at = until)).await
    }

    fn lease(&self) -> Duration {
        self.shared.options.lease
    }

    async fn depth(&self) -> Result<Depth, QueueError> {
        let shared = &self.shared;
        let both = || async {
            let (queue, dead) = (shared.calls.counts(&shared.queue_url), shared.calls.counts(&shared.dead_url));
            futures::future::try_join(queue, dead).await
        };
        let (live, dead) = match both().await {
            Err(_) if self.made_again().await => both().await?,
            counts => counts?,
        };
        if live.ready == 0 {
            shared.leases.saw(None, SystemTime::now());
        }
        // SQS calls a retry that is put off in flight. Those of this process are known; others' stay where they are.
        let put_off = shared.leases.put_off_count(Instant::now()).min(live.hidden);
        let oldest_age = if live.ready > 0 { shared.leases.oldest_age(SystemTime::now()) } else { None };
        Ok(Depth {
            ready: live.ready,
            in_flight: live.hidden - put_off,
            delayed: live.delayed + put_off,
            dead: dead.ready + dead.hidden + dead.delayed,
            oldest_age,
        })
    }

    async fn dead_letters(&self, after: Option<&MessageId>, max: usize) -> Result<Vec<DeadLetter>, QueueError> {
        let (shared, after) = (self.shared.clone(), after.cloned());
        let page = self.to_the_end(async move {
            let _turn = shared.turn_to_read().await?;
            let letters = shared.take_letters(None).await?;
            if !letters.complete {
                tracing::warn!(queue = shared.name, "not all dead letters could be read; this is a part of them");
            }
            let page = letters.page(after.as_ref(), max).ok_or_else(|| missing(letters.complete));
            letters.put_back(&shared.calls, &shared.dead_url).await;
            page
        });
        page.await?
    }

    async fn replay(&self, ids: &[MessageId], delay: Duration) -> Vec<Result<(), QueueError>> {
        let (shared, count, ids) = (self.shared.clone(), ids.len(), ids.to_vec());
        let work = async move { shared.change_letters(&ids, Change::Replay(delay)).await };
        self.each_to_the_end(count, work).await
    }

    async fn discard(&self, ids: &[MessageId]) -> Vec<Result<(), QueueError>> {
        let (shared, count, ids) = (self.shared.clone(), ids.len(), ids.to_vec());
        let work = async move { shared.change_letters(&ids, Change::Discard).await };
        self.each_to_the_end(count, work).await
    }
}

impl SqsQueue {
    /// Hides each entry for its seconds, and calls `done` for those that are; an entry may be refused beforehand.
    async fn hide(
        &self,
        wanted: Vec<(&Receipt, Result<i32, QueueError>)>,
        done: impl Fn(&str, i32),
    ) -> Vec<Result<(), QueueError>> {
        let entries: Vec<(String, i32)> =
            wanted.iter().filter_map(|(receipt, seconds)| Some((receipt.0.clone(), *seconds.as_ref().ok()?))).collect();
        let answers = self.shared.calls.hide(&self.shared.queue_url, &entries).await;
        for ((handle, seconds), answer) in entries.iter().zip(&answers) {
            if answer.is_ok() {
                done(handle, *seconds);
            }
        }
        let mut answers = answers.into_iter();
        let answer = |(_, seconds): (&Receipt, Result<i32, QueueError>)| {
            seconds.and_then(|_| answers.next().unwrap_or_else(unanswered))
        };
        wanted.into_iter().map(answer).collect()
    }
}

impl Shared {
    /// A letter for each message that is held, then the deletions of those whose letter is stored.
    async fn bury(&self, entries: &[(Receipt, String)]) -> Vec<Result<(), QueueError>> {
        let now = Instant::now();
        let held = |receipt: &Receipt| self.leases.get(&receipt.0).filter(|lease| lease.buried || !lease.is_lost(now));
        let leases: Vec<Option<Lease>> = entries.iter().map(|(receipt, _)| held(receipt)).collect();
        let parcels = entries.iter().zip(&leases).filter_map(|((_, reason), lease)| {
            let lease = lease.as_ref().filter(|lease| !lease.buried)?;
            let burial = Burial { reason: reason.clone(), at: SystemTime::now(), receives: lease.receives };
            Some(wire::dead(&lease.content, lease.sent_at, &burial))
        });
        let mut sent = self.dead_outbox.send(parcels.collect()).await.into_iter();
        let stored = leases.iter().map(|lease| match lease {
            None => Err(QueueError::LeaseLost),
            Some(lease) if lease.buried => Ok(()),
            Some(_) => sent.next().unwrap_or_else(unanswered),
        });
        let stored: Vec<Result<(), QueueError>> = stored.collect();
        let gone = entries.iter().zip(&stored).filter(|(_, stored)| stored.is_ok());
        let handles: Vec<String> = gone.map(|((receipt, _), _)| receipt.0.clone()).collect();
        for handle in &handles {
            // If the deletion fails and is tried again, there is no second letter.
            self.leases.change(handle, |lease| lease.buried = true);
        }
        let deleted = self.calls.delete(&self.queue_url, &handles).await;
        for (handle, deleted) in handles.iter().zip(&deleted) {
            if deleted.is_ok() {
                self.leases.remove(handle);
            }
        }
        let mut deleted = deleted.into_iter();
        stored.into_iter().map(|stored| stored.and_then(|()| deleted.next().unwrap_or_else(unanswered))).collect()
    }
}

fn unanswered() -> Result<(), QueueError> {
    Err(QueueError::OutcomeUnknown("no answer for this entry".into()))
}

fn seconds_of(seconds: i32) -> Duration {
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}
