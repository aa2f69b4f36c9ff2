//! The consuming side of a connection: takes deliveries for waiting receivers, acknowledges, and requeues messages whose
//! lease ended.
//!
//! A message in the local buffer is hidden from every other process although no handler works on it. So consumers get
//! exactly as much credit (prefetch) as receivers of this process demand, and a consumer keeps its credit as its messages
//! are settled. After [`IDLE_AFTER`] without a receiver, the consumers are cancelled and buffered messages are returned.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::stream::{self, BoxStream, SelectAll};
use futures::{FutureExt, StreamExt};
use lapin::message::Delivery;
use lapin::options::{BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicNackOptions, BasicQosOptions};
use lapin::types::{FieldTable, ShortString};
use lapin::{Channel, ChannelState, ErrorKind};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::RabbitMqState;
use super::inbox::{Announcement, DetachedDelivery, HeldDelivery};
use super::wire::{Burial, WireMessage, earlier_deliveries};
use crate::lock::lock;
use crate::queue::burial_reason;

/// Consumers are cancelled after this time without a waiting receiver.
const IDLE_AFTER: Duration = Duration::from_millis(200);
/// From this number of consumers on a channel, those without free credit are cancelled.
const CONSUMERS_MAX: usize = 8;
/// Deliveries accepted in a row before acknowledgements are sent.
const ARRIVALS_MAX: usize = 1000;
/// Pause before a message that could not be moved is returned to the broker, which redelivers it immediately.
const MOVE_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// A delivery to the consumer with this number; `None`: the consumer has ended.
type Arrival = (u32, Option<lapin::Result<Delivery>>);

struct ConsumeLoop<'a> {
    state: &'a Arc<RabbitMqState>,
    channel: &'a Channel,
    consumers: HashMap<u32, Consumer>,
    arrivals: SelectAll<BoxStream<'static, Arrival>>,
    last_consumer: u32,
}

struct Consumer {
    tag: ShortString,
    /// Unacknowledged deliveries that it may have (prefetch).
    credit: usize,
    outstanding: usize,
}

/// Runs until the channel fails or `ended` is cancelled.
pub(super) async fn run(state: &Arc<RabbitMqState>, channel: &Channel, ended: &CancellationToken) -> lapin::Result<()> {
    let mut consume_loop =
        ConsumeLoop { state, channel, consumers: HashMap::new(), arrivals: SelectAll::new(), last_consumer: 0 };
    let result = ended.run_until_cancelled(consume_loop.work()).await.unwrap_or(Ok(()));
    if channel.status().connected() {
        // Send the last acknowledgements, so that settled messages are not redelivered.
        consume_loop.send_frames(true).await?;
    }
    result
}

impl ConsumeLoop<'_> {
    async fn work(&mut self) -> lapin::Result<()> {
        loop {
            // First: the receivers can work while frames are sent.
            self.announce();
            let next_end = self.requeue_expired();
            let acks_due = self.send_frames(false).await?;
            let idle_at = self.cancel_when_idle().await?;
            self.request_more().await?;
            let announce_at = self.announce();
            let wake_at = [next_end, acks_due, idle_at, announce_at].into_iter().flatten().min();
            tokio::select! {
                Some(arrival) = self.arrivals.next(), if !self.arrivals.is_empty() => self.accept_arrivals(arrival)?,
                () = self.state.changed.notified() => {}
                () = tokio::time::sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => {}
            }
        }
    }

    /// Accepts this arrival and all others that are ready.
    fn accept_arrivals(&mut self, first: Arrival) -> lapin::Result<()> {
        let mut next = Some(first);
        for _ in 0..ARRIVALS_MAX {
            match next.take() {
                Some((number, Some(delivery))) => self.arrive(number, delivery?),
                // Cancelled by the broker: the queue was deleted, or its leader is gone.
                Some((number, None)) if self.consumers.contains_key(&number) => return Err(consumer_ended()),
                Some((_, None)) => {}
                None => break,
            }
            next = self.arrivals.next().now_or_never().flatten();
        }
        if let Some((number, Some(delivery))) = next {
            self.arrive(number, delivery?);
        }
        Ok(())
    }

    /// Wakes the waiting receivers if there are messages for them, or returns when to do so.
    fn announce(&self) -> Option<Instant> {
        let announcement = lock(&self.state.inbox).announce(Instant::now());
        match announcement {
            Announcement::Nothing => None,
            Announcement::Later(at) => Some(at),
            Announcement::Now => {
                self.state.arrived.notify_waiters();
                None
            }
        }
    }

    fn arrive(&mut self, number: u32, delivery: Delivery) {
        let Delivery { delivery_tag: tag, redelivered, properties, data, .. } = delivery;
        if let Some(consumer) = self.consumers.get_mut(&number) {
            consumer.outstanding += 1;
        }
        let now = SystemTime::now();
        let message = WireMessage::read(&properties, data, now);
        let options = &self.state.options.queue;
        let mut inbox = lock(&self.state.inbox);
        inbox.delivered(tag, number);
        let receives = inbox.received(&message, earlier_deliveries(&properties, redelivered));
        let (hops, expires_at) = (message.hops, message.expires_at);
        let held = HeldDelivery { tag, message: Arc::new(message), receives };
        let expired = expires_at.is_some_and(|at| at <= now);
        let burial = burial_reason(expired, receives, options.receives_max);
        if burial.is_none() && hops == 0 {
            return inbox.buffer(held);
        }
        let mut message = WireMessage::clone(&held.message);
        let to = match burial {
            Some(reason) => {
                message.receives = receives;
                message.ensure_own_id();
                message.burial = Some(Burial { reason, by_queue: true, at: now });
                Move::Bury(message)
            }
            None => {
                message.hops -= 1;
                Move::DelayAgain(message)
            }
        };
        spawn_move(self.state, inbox.detach(held, Instant::now()), to);
    }

    /// Requeues messages whose lease ended, with one more receive. Returns when the next lease ends.
    fn requeue_expired(&mut self) -> Option<Instant> {
        let (expired, next_end) = lock(&self.state.inbox).expired(Instant::now());
        for taken in expired {
            let mut message = WireMessage::clone(&taken.held.message);
            message.receives = taken.held.receives.saturating_add(1);
            spawn_move(self.state, taken, Move::Requeue(message));
        }
        next_end
    }

    /// Sends the acknowledgements that are due, or all of them with `last`. Returns when the next ones are due.
    async fn send_frames(&mut self, last: bool) -> lapin::Result<Option<Instant>> {
        let (frames, acks_due) = {
            let mut inbox = lock(&self.state.inbox);
            (inbox.frames(Instant::now(), last), inbox.acks_deadline())
        };
        // All frames are queued at the first poll, in this order, so the broker sees them before the next multiple
        // acknowledgement is computed.
        let acks = frames
            .acks
            .iter()
            .map(|frame| self.channel.basic_ack(frame.tag, BasicAckOptions { multiple: frame.multiple }).boxed());
        let options = BasicNackOptions { multiple: false, requeue: true };
        let returns = frames.returns.iter().map(|tag| self.channel.basic_nack(*tag, options).boxed());
        for sent in futures::future::join_all(acks.chain(returns)).await {
            sent?;
        }
        for number in frames.consumers {
            if let Some(consumer) = self.consumers.get_mut(&number) {
                consumer.outstanding = consumer.outstanding.saturating_sub(1);
            }
        }
        Ok(acks_due)
    }

    /// After [`IDLE_AFTER`] without receivers, cancels the consumers and returns buffered messages. Before that, returns
    /// when to do so.
    async fn cancel_when_idle(&mut self) -> lapin::Result<Option<Instant>> {
        let idle_since = lock(&self.state.inbox).idle_since();
        let Some(idle_since) = idle_since.filter(|_| !self.consumers.is_empty()) else { return Ok(None) };
        if Instant::now() < idle_since + IDLE_AFTER {
            return Ok(Some(idle_since + IDLE_AFTER));
        }
        for (_, consumer) in std::mem::take(&mut self.consumers) {
            self.channel.basic_cancel(consumer.tag, BasicCancelOptions::default()).await?;
        }
        while let Some((number, arrival)) = self.arrivals.next().await {
            if let Some(delivery) = arrival {
                self.arrive(number, delivery?);
            }
        }
        self.state.arrived.notify_waiters();
        lock(&self.state.inbox).return_unread();
        self.send_frames(true).await?;
        Ok(None)
    }

    async fn request_more(&mut self) -> lapin::Result<()> {
        let wanted = lock(&self.state.inbox).wanted(self.state.options.held_max);
        let free: usize = self.consumers.values().map(|one| one.credit.saturating_sub(one.outstanding)).sum();
        if wanted <= free {
            return Ok(());
        }
        if self.consumers.len() >= CONSUMERS_MAX {
            let spent = self.consumers.extract_if(|_, one| one.outstanding >= one.credit).collect::<Vec<_>>();
            for (_, consumer) in spent {
                self.channel.basic_cancel(consumer.tag, BasicCancelOptions::default()).await?;
            }
        }
        let credit = u16::try_from(wanted - free).unwrap_or(u16::MAX);
        self.channel.basic_qos(credit, BasicQosOptions { global: false }).await?;
        let queue = self.state.options.topology.queue.as_str().into();
        let options = BasicConsumeOptions::default();
        let consumer = self.channel.basic_consume(queue, "".into(), options, FieldTable::default()).await?;
        self.last_consumer += 1;
        let (number, tag) = (self.last_consumer, consumer.tag());
        self.consumers.insert(number, Consumer { tag, credit: credit.into(), outstanding: 0 });
        let arrivals = consumer.map(move |delivery| (number, Some(delivery)));
        self.arrivals.push(arrivals.chain(stream::once(std::future::ready((number, None)))).boxed());
        Ok(())
    }
}

/// Where a delivery goes that no receiver takes, or whose lease ended.
enum Move {
    /// To the dead-letter queue.
    Bury(WireMessage),
    /// Back to the queue.
    Requeue(WireMessage),
    /// To a delay queue again: its delay is longer than one queue can hold it.
    DelayAgain(WireMessage),
}

/// Publishes the message, then acknowledges the old delivery: a crash in between leaves two copies, never none.
fn spawn_move(state: &Arc<RabbitMqState>, taken: DetachedDelivery, to: Move) {
    let state = Arc::clone(state);
    state.tasks.clone().spawn(async move {
        let published = match &to {
            Move::Bury(message) => state.publish_dead(message).await,
            Move::Requeue(message) => state.publish(message, Duration::ZERO).await,
            Move::DelayAgain(message) => state.publish_delay_again(message).await,
        };
        match published {
            Ok(()) => drop(lock(&state.inbox).settle(&taken)),
            Err(error) => {
                warn!(
                    queue = state.name(),
                    messageId = %taken.held.message.id,
                    error = &error as &dyn std::error::Error,
                    "cannot move the message; it stays in the queue"
                );
                if !matches!(to, Move::Requeue(_)) {
                    let _ = tokio::time::timeout(MOVE_AGAIN_AFTER, state.stop.cancelled()).await;
                }
                lock(&state.inbox).return_delivery(&taken);
            }
        }
        state.changed.notify_one();
    });
}

fn consumer_ended() -> lapin::Error {
    ErrorKind::InvalidChannelState(ChannelState::Closed, "the broker cancelled the consumer").into()
}
