//! Reads and changes the dead-letter queue. AMQP reads a queue only by consuming it: the reader receives all messages,
//! acknowledges only those that it removes, and requeues the rest. A quorum queue may requeue at its end, so letters are
//! ordered by burial time and not by their position.
//!
//! Letters are removed in transactions, each of which the broker passes to the queue as one command. Of many single
//! acknowledgements it holds back those after the 32nd command that a quorum queue has not applied yet, and forgets them when
//! the channel closes: the letters would come back.
//!
//! While one process reads, others see fewer dead letters. If it dies, the broker requeues all of them.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, SystemTime};

use futures::StreamExt;
use futures::stream::FuturesUnordered;
use lapin::Channel;
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions, QueueDeclareOptions,
};
use lapin::types::FieldTable;
use tokio::time::Instant;

use super::send::PendingConfirm;
use super::session::Session;
use super::wire::{Burial, WireMessage};
use super::{RabbitMqState, WAIT_MAX};
use crate::message::{DeadLetter, MessageId};
use crate::queue::QueueError;

/// Dead letters that one call reads; further ones are reached once these are removed.
pub const DEAD_LETTERS_READ_MAX: usize = 10_000;
/// Total size of the bodies that one call reads.
pub const DEAD_LETTERS_READ_BYTES_MAX: usize = 64 * 1024 * 1024;
/// Letters removed in one transaction. A crash before its end leaves copies of all of them; a whole reading needs far fewer
/// transactions than the broker's limit of commands.
const REMOVALS_PER_COMMIT: usize = 1000;
/// How long to wait for the next counted letter before assuming that another reader has taken it.
const NEXT_LETTER_WAIT: Duration = Duration::from_secs(2);
/// How long to wait until requeued letters are counted again.
const REQUEUE_VISIBLE_WAIT: Duration = Duration::from_secs(1);
const CHECK_EVERY: Duration = Duration::from_millis(5);

/// A dead letter that the reader has received.
pub(super) struct HeldDeadLetter {
    tag: u64,
    pub(super) message: WireMessage,
    pub(super) burial: Burial,
}

/// Holds the received letters until [`DeadLetterReader::finish`].
pub(super) struct DeadLetterReader {
    channel: Channel,
    queue: String,
    /// Messages in the queue at the start.
    count_at_start: usize,
    taken: usize,
    removed: usize,
}

impl DeadLetterReader {
    /// Receives all letters, up to the limits, and returns them in the order of burial.
    pub(super) async fn start(session: &Session, queue: &str) -> lapin::Result<(Self, Vec<HeldDeadLetter>)> {
        let channel = session.channel().await?;
        let count_at_start = message_count(&channel, queue).await?;
        let mut reading = Self { channel, queue: queue.to_owned(), count_at_start, taken: 0, removed: 0 };
        let mut found = Vec::new();
        let expected = count_at_start.min(DEAD_LETTERS_READ_MAX);
        if expected == 0 {
            return Ok((reading, found));
        }
        let credit = u16::try_from(expected).unwrap_or(u16::MAX);
        reading.channel.basic_qos(credit, BasicQosOptions { global: false }).await?;
        let options = BasicConsumeOptions::default();
        let mut consumer =
            reading.channel.basic_consume(queue.into(), "".into(), options, FieldTable::default()).await?;
        let mut size = 0;
        while reading.taken < expected && size < DEAD_LETTERS_READ_BYTES_MAX {
            let Ok(Some(delivery)) = tokio::time::timeout(NEXT_LETTER_WAIT, consumer.next()).await else { break };
            let delivery = delivery?;
            reading.taken += 1;
            size += delivery.data.len();
            let now = SystemTime::now();
            let message = WireMessage::read(&delivery.properties, delivery.data, now);
            let burial = message.burial_or(&delivery.properties, now);
            found.push(HeldDeadLetter { tag: delivery.delivery_tag, message, burial });
        }
        reading.channel.basic_cancel(consumer.tag(), BasicCancelOptions::default()).await?;
        while let Some(delivery) = consumer.next().await {
            delivery?;
            reading.taken += 1;
        }
        found.sort_by_key(|found| found.burial.at);
        Ok((reading, found))
    }

    /// Removes a letter, permanently once [`DeadLetterReader::finish`] returns.
    pub(super) async fn remove(&mut self, found: &HeldDeadLetter) -> lapin::Result<()> {
        if self.removed == 0 {
            self.channel.tx_select().await?;
        }
        self.channel.basic_ack(found.tag, BasicAckOptions { multiple: false }).await?;
        self.removed += 1;
        if self.removed.is_multiple_of(REMOVALS_PER_COMMIT) {
            self.channel.tx_commit().await?;
        }
        Ok(())
    }

    /// Requeues the letters that were not removed, and waits until they are counted again.
    pub(super) async fn finish(self) -> lapin::Result<()> {
        if self.taken > self.removed {
            // Tag 0 means all unacknowledged deliveries.
            self.channel.basic_nack(0, BasicNackOptions { multiple: true, requeue: true }).await?;
        }
        if self.removed > 0 {
            self.channel.tx_commit().await?;
        }
        let left = self.count_at_start.saturating_sub(self.removed);
        let deadline = Instant::now() + REQUEUE_VISIBLE_WAIT;
        while message_count(&self.channel, &self.queue).await? < left && Instant::now() < deadline {
            tokio::time::sleep(CHECK_EVERY).await;
        }
        self.channel.close(200, "done".into()).await
    }
}

/// Messages that are ready in the queue.
pub(super) async fn message_count(channel: &Channel, queue: &str) -> lapin::Result<usize> {
    let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    let queue = channel.queue_declare(queue.into(), options, FieldTable::default()).await?;
    Ok(usize::try_from(queue.message_count()).unwrap_or(usize::MAX))
}

#[derive(Clone, Copy)]
pub(super) enum DeadLetterChange {
    Replay(Duration),
    Discard,
}

impl RabbitMqState {
    pub(super) async fn dead_letters(
        &self,
        after: Option<&MessageId>,
        max: usize,
    ) -> Result<Vec<DeadLetter>, QueueError> {
        if max == 0 {
            return Ok(Vec::new());
        }
        let session = self.session()?;
        let read = async {
            let _reading = self.reading_lock.lock().await;
            let (reading, found) = DeadLetterReader::start(&session, &self.options.topology.dead_queue).await?;
            reading.finish().await?;
            Ok(found)
        };
        let found = self.with_timeout(read).await?;
        let skip = match after {
            None => 0,
            Some(id) => 1 + found.iter().position(|found| found.message.id == *id).ok_or(QueueError::NotFound)?,
        };
        Ok(found.into_iter().skip(skip).take(max).map(|found| found.message.letter(found.burial)).collect())
    }

    pub(super) async fn change_dead(
        &self,
        ids: &[MessageId],
        change: DeadLetterChange,
    ) -> Result<Vec<Result<(), QueueError>>, QueueError> {
        let session = self.session()?;
        self.with_timeout(async {
            let _reading = self.reading_lock.lock().await;
            let (mut reading, found) = DeadLetterReader::start(&session, &self.options.topology.dead_queue).await?;
            // If several letters have the same id, the oldest is changed first.
            let mut by_id: HashMap<MessageId, VecDeque<HeldDeadLetter>> = HashMap::with_capacity(found.len());
            for letter in found {
                by_id.entry(letter.message.id.clone()).or_default().push_back(letter);
            }
            let mut answers: Vec<_> = ids.iter().map(|_| Err(QueueError::NotFound)).collect();
            // Published in order; the confirms may arrive in any order.
            let mut moving = FuturesUnordered::new();
            for (place, id) in ids.iter().enumerate() {
                let Some(letter) = by_id.get_mut(id).and_then(VecDeque::pop_front) else { continue };
                let published = match change {
                    DeadLetterChange::Replay(delay) => self.start_replay(&letter.message, delay).await.map(Some),
                    DeadLetterChange::Discard => Ok(None),
                };
                moving.push(async move {
                    let moved = match published {
                        Ok(Some(pending)) => self.confirmed(pending).await,
                        Ok(None) => Ok(()),
                        Err(error) => Err(error),
                    };
                    (place, letter, moved)
                });
            }
            while let Some((place, letter, moved)) = moving.next().await {
                if moved.is_ok() {
                    reading.remove(&letter).await?;
                }
                answers[place] = moved;
            }
            reading.finish().await?;
            Ok(answers)
        })
        .await
    }

    /// Publishes a dead letter to the queue again, with a receive count of zero and a new retention.
    async fn start_replay(&self, letter: &WireMessage, delay: Duration) -> Result<PendingConfirm, QueueError> {
        let mut message = letter.clone();
        message.receives = 0;
        message.burial = None;
        message.expires_at = Some(SystemTime::now() + delay + self.options.queue.retention.min(WAIT_MAX));
        self.start(&message, delay, self.deadline()).await
    }
}
