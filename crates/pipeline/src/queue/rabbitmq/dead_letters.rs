//! Reading the dead-letter queue. A queue can only be read by taking: all its messages are delivered to us, nothing is
//! acknowledged but what is removed, and the rest goes back. A quorum queue may put what goes back at its end, so the
//! order is that of the burials, not of the queue.
//!
//! While one process reads, the others see fewer dead letters. Should it die, the broker gives all of them back.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, SystemTime};

use futures::StreamExt;
use lapin::Channel;
use lapin::options::{
    BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions, QueueDeclareOptions,
};
use lapin::types::FieldTable;
use tokio::time::Instant;

use super::session::Session;
use super::wire::{Burial, Envelope};
use super::{Shared, WAIT_MAX};
use crate::message::{DeadLetter, MessageId};
use crate::queue::QueueError;

/// How many dead letters one call reads at most; those behind them are reached when these are gone.
pub const DEAD_LETTERS_READ_MAX: usize = 10_000;
/// How large they may be together.
pub const DEAD_LETTERS_READ_BYTES_MAX: usize = 64 * 1024 * 1024;
/// A delivery that the broker counted and that does not come for this long was taken by somebody else.
const NEXT_WITHIN: Duration = Duration::from_secs(2);
/// How long to wait until the broker shows again what was given back.
const SHOWN_WITHIN: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// A dead letter in hand.
pub(super) struct Found {
    tag: u64,
    pub(super) envelope: Envelope,
    pub(super) burial: Burial,
}

/// The dead-letter queue, being read.
pub(super) struct Reading {
    channel: Channel,
    queue: String,
    /// How many there were at the start.
    there: usize,
    taken: usize,
    removed: usize,
}

impl Reading {
    /// Takes all there is, up to the limits. Returns it in the order of burial.
    pub(super) async fn start(session: &Session, queue: &str) -> lapin::Result<(Self, Vec<Found>)> {
        let channel = session.channel().await?;
        let there = message_count(&channel, queue).await?;
        let mut reading = Self { channel, queue: queue.to_owned(), there, taken: 0, removed: 0 };
        let mut found = Vec::new();
        let expected = there.min(DEAD_LETTERS_READ_MAX);
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
            let Ok(Some(delivery)) = tokio::time::timeout(NEXT_WITHIN, consumer.next()).await else { break };
            let delivery = delivery?;
            reading.taken += 1;
            size += delivery.data.len();
            let now = SystemTime::now();
            let envelope = Envelope::read(&delivery.properties, delivery.data, now);
            let burial = envelope.burial_or(&delivery.properties, now);
            found.push(Found { tag: delivery.delivery_tag, envelope, burial });
        }
        reading.channel.basic_cancel(consumer.tag(), BasicCancelOptions::default()).await?;
        while let Some(delivery) = consumer.next().await {
            delivery?;
            reading.taken += 1;
        }
        found.sort_by_key(|found| found.burial.at);
        Ok((reading, found))
    }

    /// Removes one for good.
    pub(super) async fn remove(&mut self, found: &Found) -> lapin::Result<()> {
        self.removed += 1;
        self.channel.basic_ack(found.tag, BasicAckOptions { multiple: false }).await
    }

    /// Gives back what was not removed, and waits until it can be seen again.
    pub(super) async fn finish(self) -> lapin::Result<()> {
        if self.taken > self.removed {
            // Zero stands for all that were delivered.
            self.channel.basic_nack(0, BasicNackOptions { multiple: true, requeue: true }).await?;
        }
        let left = self.there.saturating_sub(self.removed);
        let deadline = Instant::now() + SHOWN_WITHIN;
        while message_count(&self.channel, &self.queue).await? < left && Instant::now() < deadline {
            tokio::time::sleep(LOOK_EVERY).await;
        }
        self.channel.close(200, "done".into()).await
    }
}

/// How many messages are due in the queue.
pub(super) async fn message_count(channel: &Channel, queue: &str) -> lapin::Result<usize> {
    let options = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    let queue = channel.queue_declare(queue.into(), options, FieldTable::default()).await?;
    Ok(usize::try_from(queue.message_count()).unwrap_or(usize::MAX))
}

#[derive(Clone, Copy)]
pub(super) enum DeadChange {
    Replay(Duration),
    Discard,
}

impl Shared {
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
            let _turn = self.reading.lock().await;
            let (reading, found) = Reading::start(&session, &self.options.topology.dead_queue).await?;
            reading.finish().await?;
            Ok(found)
        };
        let found = self.in_time(read).await?;
        let skip = match after {
            None => 0,
            Some(id) => 1 + found.iter().position(|found| found.envelope.id == *id).ok_or(QueueError::NotFound)?,
        };
        Ok(found.into_iter().skip(skip).take(max).map(|found| found.envelope.letter(found.burial)).collect())
    }

    pub(super) async fn change_dead(
        &self,
        ids: &[MessageId],
        change: DeadChange,
    ) -> Result<Vec<Result<(), QueueError>>, QueueError> {
        let session = self.session()?;
        self.in_time(async {
            let _turn = self.reading.lock().await;
            let (mut reading, found) = Reading::start(&session, &self.options.topology.dead_queue).await?;
            // Of letters with one id the oldest is the first to go.
            let mut by_id: HashMap<MessageId, VecDeque<Found>> = HashMap::with_capacity(found.len());
            for letter in found {
                by_id.entry(letter.envelope.id.clone()).or_default().push_back(letter);
            }
            let mut answers = Vec::with_capacity(ids.len());
            for id in ids {
                let Some(letter) = by_id.get_mut(id).and_then(VecDeque::pop_front) else {
                    answers.push(Err(QueueError::NotFound));
                    continue;
                };
                let moved = match change {
                    DeadChange::Replay(delay) => self.publish_again(&letter.envelope, delay).await,
                    DeadChange::Discard => Ok(()),
                };
                if moved.is_ok() {
                    reading.remove(&letter).await?;
                }
                answers.push(moved);
            }
            reading.finish().await?;
            Ok(answers)
        })
        .await
    }

    /// A dead letter, alive: as it was sent, with no receives.
    async fn publish_again(&self, letter: &Envelope, delay: Duration) -> Result<(), QueueError> {
        let mut envelope = letter.clone();
        envelope.receives = 0;
        envelope.burial = None;
        envelope.expires_at = Some(SystemTime::now() + delay + self.options.queue.retention.min(WAIT_MAX));
        self.publish(&envelope, delay).await
    }
}
