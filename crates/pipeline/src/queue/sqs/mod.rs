//! AWS SQS, through the official SDK. This backend builds what SQS lacks:
//!
//! - the message id that burial and replay keep is a message attribute, like everything else that a copy must carry
//!   (`wire`);
//! - concurrent sends share requests (`send_batcher`), and every request has a time limit (`client`);
//! - a delay beyond 15 minutes takes several steps: a message received too early is sent again with the remaining delay
//!   (`receive`);
//! - a burial copies the message to the dead-letter queue and then deletes it; a replay does the reverse. In this order a
//!   crash leaves two copies, never none;
//! - dead letters are listed by taking all of them and putting them back (`dead_letters`);
//! - queues that disappear at run time are created again if [`SqsOptions::auto_create`] is set.
//!
//! SQS counts in whole seconds: leases and delays are rounded up.

mod client;
mod dead_letter_changes;
mod dead_letters;
mod leases;
mod options;
mod receive;

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

use self::client::{BATCH_MAX, SqsClient};
use self::dead_letter_changes::{DeadLetterChange, not_found};
use self::leases::{SqsLease, SqsLeases};
pub use self::options::{SqsAccess, SqsOpenError, SqsOptions};
use self::receive::long_poll_s;
use self::send_batcher::SendBatcher;
use self::wire::{Burial, MessageContent, whole_seconds};
use super::{Capabilities, Depth, Queue, QueueError, QueueOptions};
use crate::message::{DeadLetter, Message, MessageId, Outgoing, Receipt};

/// Upper limit of a receive's wait; longer ones are shortened to it.
const WAIT_MAX: Duration = Duration::from_secs(24 * 3600);
/// The longest delay of a retry. SQS hides a message for at most 12 hours, which includes the time since its delivery.
const RETRY_MAX: Duration = Duration::from_secs(11 * 3600);
/// Pause between two attempts to create missing queues again.
const RECREATE_PAUSE: Duration = Duration::from_secs(1);

/// A queue in SQS. Clones share the same queue.
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
    state: Arc<SqsQueueState>,
}

struct SqsQueueState {
    name: String,
    options: QueueOptions,
    sqs: SqsOptions,
    /// Held while queues are created again; the time of the last failed attempt.
    recreating: tokio::sync::Mutex<Option<Instant>>,
    delay_step: Duration,
    client: Arc<SqsClient>,
    queue_url: String,
    dead_url: String,
    sender: SendBatcher,
    dead_sender: SendBatcher,
    leases: SqsLeases,
    /// Held while dead letters are read: two concurrent readers would hide letters from each other.
    reading: tokio::sync::Mutex<()>,
    tasks: TaskTracker,
    runtime: Handle,
}

impl SqsQueue {
    /// Finds the queues, creates them if missing and allowed, and checks that they are as configured.
    pub async fn open(sqs: SqsOptions, options: QueueOptions) -> Result<SqsQueue, SqsOpenError> {
        let client = Arc::new(SqsClient::new(sqs.client().await, sqs.timeout));
        let urls = setup::prepare(&client, &sqs, &options).await?;
        let tasks = TaskTracker::new();
        let state = SqsQueueState {
            name: setup::name_of(&sqs.queue).to_owned(),
            options,
            delay_step: sqs.delay_step.min(wire::DELAY_MAX),
            sqs,
            recreating: tokio::sync::Mutex::new(None),
            sender: SendBatcher::new(client.clone(), urls.queue.clone(), tasks.clone()),
            dead_sender: SendBatcher::new(client.clone(), urls.dead.clone(), tasks.clone()),
            client,
            queue_url: urls.queue,
            dead_url: urls.dead,
            leases: SqsLeases::default(),
            reading: tokio::sync::Mutex::new(()),
            tasks,
            runtime: Handle::current(),
        };
        Ok(SqsQueue { state: Arc::new(state) })
    }

    /// Waits until no task of this queue is running. The queue stays usable.
    pub async fn settled(&self) {
        self.state.tasks.close();
        self.state.tasks.wait().await;
        self.state.tasks.reopen();
    }

    /// Called after a failure. Creates missing queues again and returns whether they exist now. A replaced server has no
    /// queues, and a restart of this process should not be needed to create them. Without `auto_create` it does nothing.
    async fn recreated_queues(&self) -> bool {
        let state = &self.state;
        if !state.sqs.auto_create || !state.client.queue_missing.load(Ordering::Relaxed) {
            return false;
        }
        let mut tried_at = state.recreating.lock().await;
        if !state.client.queue_missing.load(Ordering::Relaxed) {
            return true;
        }
        if tried_at.is_some_and(|at| at.elapsed() < RECREATE_PAUSE) {
            return false;
        }
        match setup::prepare(&state.client, &state.sqs, &state.options).await {
            Ok(_) => {
                tracing::warn!(queue = state.name, "the SQS queues were missing; created them again, empty");
                state.client.queue_missing.store(false, Ordering::Relaxed);
                *tried_at = None;
                true
            }
            Err(error) => {
                tracing::warn!(
                    queue = state.name,
                    error = &error as &dyn std::error::Error,
                    "the SQS queues are missing and cannot be created"
                );
                *tried_at = Some(Instant::now());
                false
            }
        }
    }

    /// Runs work of several steps in a task, so that it completes even if the caller drops its future.
    async fn run_to_completion<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, QueueError> {
        let task = self.state.tasks.spawn_on(work, &self.state.runtime);
        task.await.map_err(|error| QueueError::OutcomeUnknown(error.into()))
    }

    /// [`SqsQueue::run_to_completion`] for work with one answer for each of `count` entries.
    async fn run_each_to_completion(
        &self,
        count: usize,
        work: impl Future<Output = Vec<Result<(), QueueError>>> + Send + 'static,
    ) -> Vec<Result<(), QueueError>> {
        if count == 0 {
            return Vec::new();
        }
        self.run_to_completion(work).await.unwrap_or_else(|error| {
            let text = error.to_string();
            (0..count).map(|_| Err(QueueError::OutcomeUnknown(text.clone().into()))).collect()
        })
    }
}

#[async_trait]
impl Queue for SqsQueue {
    fn name(&self) -> &str {
        &self.state.name
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            durable: true,
            ordered: false,
            // SQS may accept an old receipt handle without an error.
            fenced: false,
            shared: true,
            cancel_safe: false,
            messages_per_request: BATCH_MAX,
            dead_letters_per_read: dead_letters::LETTERS_MAX,
            body_bytes_max: self.state.options.body_bytes_max.min(wire::BODY_BYTES_MAX),
            delay_max: RETRY_MAX,
        }
    }

    async fn send(&self, messages: &[Outgoing]) -> Vec<Result<MessageId, QueueError>> {
        let state = &self.state;
        let now = SystemTime::now();
        let check = |message: &Outgoing| {
            wire::check_size(&message.body, &message.attributes, state.options.body_bytes_max)?;
            Ok(MessageId(Uuid::now_v7().to_string()))
        };
        let ids: Vec<Result<MessageId, QueueError>> = messages.iter().map(check).collect();
        let entry = |(message, id): (&Outgoing, &MessageId)| {
            let content =
                MessageContent { id: id.clone(), body: message.body.clone(), attributes: message.attributes.clone() };
            wire::live(&content, None, message.delay, state.delay_step, now)
        };
        let fitting = || messages.iter().zip(&ids).filter_map(|(message, id)| Some((message, id.as_ref().ok()?)));
        let mut sent = state.sender.send(fitting().map(entry).collect()).await;
        if sent.iter().any(Result::is_err) && self.recreated_queues().await {
            // Repeat only the entries that were certainly not sent.
            let unsent = |sent: &Result<(), QueueError>| matches!(sent, Err(QueueError::Unavailable(_)));
            let again = fitting().zip(&sent).filter(|(_, sent)| unsent(sent)).map(|(message, _)| entry(message));
            let mut answers = state.sender.send(again.collect()).await.into_iter();
            for sent in sent.iter_mut().filter(|sent| unsent(sent)) {
                *sent = answers.next().unwrap_or_else(no_answer);
            }
        }
        let mut sent = sent.into_iter();
        ids.into_iter().map(|id| id.and_then(|id| sent.next().unwrap_or_else(no_answer).map(|()| id))).collect()
    }

    async fn receive(&self, max: usize, wait: Duration) -> Result<Vec<Message>, QueueError> {
        if max == 0 {
            return Ok(Vec::new());
        }
        let deadline = Instant::now() + wait.min(WAIT_MAX);
        let mut wait_s = long_poll_s(wait);
        loop {
            let messages = match self.take(max, wait_s).await {
                Err(_) if self.recreated_queues().await => self.take(max, wait_s).await?,
                taken => taken?,
            };
            let left = deadline.saturating_duration_since(Instant::now());
            if !messages.is_empty() || left.is_zero() {
                return Ok(messages);
            }
            wait_s = long_poll_s(left);
            if left < Duration::from_secs(1) {
                // A long poll of a whole second would exceed the caller's wait.
                tokio::time::sleep(left).await;
                wait_s = 0;
            }
        }
    }

    async fn ack(&self, receipts: &[Receipt]) -> Vec<Result<(), QueueError>> {
        let handles: Vec<String> = receipts.iter().map(|receipt| receipt.0.clone()).collect();
        let answers = self.state.client.delete(&self.state.queue_url, &handles).await;
        for (handle, answer) in handles.iter().zip(&answers) {
            if answer.is_ok() {
                self.state.leases.remove(handle);
            }
        }
        answers
    }

    async fn retry_after(&self, entries: &[(Receipt, Duration)]) -> Vec<Result<(), QueueError>> {
        let leases = &self.state.leases;
        let start = Instant::now();
        // A message held for hours is hidden only for the rest of SQS's 12 hours.
        let hide = |receipt: &Receipt, delay: Duration| match leases.get(&receipt.0) {
            Some(lease) if lease.is_lost(start) => Err(QueueError::LeaseLost),
            Some(lease) => Ok(whole_seconds(delay).min(lease.hide_max_s(start))),
            None => Ok(whole_seconds(delay.min(RETRY_MAX))),
        };
        let wanted = entries.iter().map(|(receipt, delay)| (receipt, hide(receipt, *delay))).collect();
        self.hide(wanted, |handle, seconds| {
            leases.remove(handle);
            if seconds > 0 {
                leases.add_delayed_retry(start + seconds_of(seconds), Instant::now());
            }
        })
        .await
    }

    async fn bury(&self, entries: &[(Receipt, String)]) -> Vec<Result<(), QueueError>> {
        let (state, count, entries) = (self.state.clone(), entries.len(), entries.to_vec());
        self.run_each_to_completion(count, async move { state.bury(&entries).await }).await
    }

    async fn extend(&self, receipts: &[Receipt], duration: Duration) -> Vec<Result<(), QueueError>> {
        let leases = &self.state.leases;
        let start = Instant::now();
        let seconds = whole_seconds(duration);
        let hide = |receipt: &Receipt| match leases.get(&receipt.0) {
            Some(lease) if lease.is_lost(start) => Err(QueueError::LeaseLost),
            Some(lease) if seconds > lease.hide_max_s(start) => {
                Err(QueueError::Unavailable("SQS leases a message for at most 12 hours".into()))
            }
            _ => Ok(seconds),
        };
        let wanted = receipts.iter().map(|receipt| (receipt, hide(receipt))).collect();
        let until = start + seconds_of(seconds);
        self.hide(wanted, |handle, _| leases.change(handle, |lease| lease.ends_at = until)).await
    }

    fn lease(&self) -> Duration {
        self.state.options.lease
    }

    async fn depth(&self) -> Result<Depth, QueueError> {
        let state = &self.state;
        let both = || async {
            let (queue, dead) = (state.client.counts(&state.queue_url), state.client.counts(&state.dead_url));
            futures::future::try_join(queue, dead).await
        };
        let (live, dead) = match both().await {
            Err(_) if self.recreated_queues().await => both().await?,
            counts => counts?,
        };
        if live.ready == 0 {
            state.leases.observe(None, SystemTime::now());
        }
        // SQS counts a delayed retry as in flight. Count this process's retries as delayed; those of others are unknown.
        let delayed_retries = state.leases.delayed_retry_count(Instant::now()).min(live.hidden);
        let oldest_age = if live.ready > 0 { state.leases.oldest_age(SystemTime::now()) } else { None };
        Ok(Depth {
            ready: live.ready,
            in_flight: live.hidden - delayed_retries,
            delayed: live.delayed + delayed_retries,
            dead: dead.ready + dead.hidden + dead.delayed,
            oldest_age,
        })
    }

    async fn dead_letters(&self, after: Option<&MessageId>, max: usize) -> Result<Vec<DeadLetter>, QueueError> {
        let (state, after) = (self.state.clone(), after.cloned());
        let page = self.run_to_completion(async move {
            let _reading = state.lock_reading().await?;
            let letters = state.snapshot_dead_letters(None).await?;
            if !letters.complete {
                tracing::warn!(queue = state.name, "could not read all dead letters; returning a part of them");
            }
            let page = letters.page(after.as_ref(), max).ok_or_else(|| not_found(letters.complete));
            letters.put_back(&state.client, &state.dead_url).await;
            page
        });
        page.await?
    }

    async fn replay(&self, ids: &[MessageId], delay: Duration) -> Vec<Result<(), QueueError>> {
        let (state, count, ids) = (self.state.clone(), ids.len(), ids.to_vec());
        let work = async move { state.change_dead_letters(&ids, DeadLetterChange::Replay(delay)).await };
        self.run_each_to_completion(count, work).await
    }

    async fn discard(&self, ids: &[MessageId]) -> Vec<Result<(), QueueError>> {
        let (state, count, ids) = (self.state.clone(), ids.len(), ids.to_vec());
        let work = async move { state.change_dead_letters(&ids, DeadLetterChange::Discard).await };
        self.run_each_to_completion(count, work).await
    }
}

impl SqsQueue {
    /// Hides each entry for its number of seconds and calls `done` for each success. An entry that is already an error is
    /// not sent.
    async fn hide(
        &self,
        wanted: Vec<(&Receipt, Result<i32, QueueError>)>,
        done: impl Fn(&str, i32),
    ) -> Vec<Result<(), QueueError>> {
        let entries: Vec<(String, i32)> =
            wanted.iter().filter_map(|(receipt, seconds)| Some((receipt.0.clone(), *seconds.as_ref().ok()?))).collect();
        let answers = self.state.client.hide(&self.state.queue_url, &entries).await;
        for ((handle, seconds), answer) in entries.iter().zip(&answers) {
            if answer.is_ok() {
                done(handle, *seconds);
            }
        }
        let mut answers = answers.into_iter();
        let answer = |(_, seconds): (&Receipt, Result<i32, QueueError>)| {
            seconds.and_then(|_| answers.next().unwrap_or_else(no_answer))
        };
        wanted.into_iter().map(answer).collect()
    }
}

impl SqsQueueState {
    /// Stores a dead letter for each held message, then deletes the messages whose letter is stored.
    async fn bury(&self, entries: &[(Receipt, String)]) -> Vec<Result<(), QueueError>> {
        let now = Instant::now();
        let held = |receipt: &Receipt| self.leases.get(&receipt.0).filter(|lease| lease.buried || !lease.is_lost(now));
        let leases: Vec<Option<SqsLease>> = entries.iter().map(|(receipt, _)| held(receipt)).collect();
        let letters = entries.iter().zip(&leases).filter_map(|((_, reason), lease)| {
            let lease = lease.as_ref().filter(|lease| !lease.buried)?;
            let burial = Burial { reason: reason.clone(), at: SystemTime::now(), receives: lease.receives };
            Some(wire::dead(&lease.content, lease.sent_at, &burial))
        });
        let mut sent = self.dead_sender.send(letters.collect()).await.into_iter();
        let stored = leases.iter().map(|lease| match lease {
            None => Err(QueueError::LeaseLost),
            Some(lease) if lease.buried => Ok(()),
            Some(_) => sent.next().unwrap_or_else(no_answer),
        });
        let stored: Vec<Result<(), QueueError>> = stored.collect();
        let gone = entries.iter().zip(&stored).filter(|(_, stored)| stored.is_ok());
        let handles: Vec<String> = gone.map(|((receipt, _), _)| receipt.0.clone()).collect();
        for handle in &handles {
            // If the deletion fails and the burial is retried, no second letter is stored.
            self.leases.change(handle, |lease| lease.buried = true);
        }
        let deleted = self.client.delete(&self.queue_url, &handles).await;
        for (handle, deleted) in handles.iter().zip(&deleted) {
            if deleted.is_ok() {
                self.leases.remove(handle);
            }
        }
        let mut deleted = deleted.into_iter();
        stored.into_iter().map(|stored| stored.and_then(|()| deleted.next().unwrap_or_else(no_answer))).collect()
    }
}

fn no_answer() -> Result<(), QueueError> {
    Err(QueueError::OutcomeUnknown("no answer for this entry".into()))
}

fn seconds_of(seconds: i32) -> Duration {
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}
