//! The consuming side of a connection: fetches what receivers ask for, acknowledges, and takes back ended leases.
//!
//! A message in a local buffer is hidden from every other process although nobody works on it. So consumers are given
//! exactly as much credit as receivers here have asked for, and a consumer keeps its credit as its messages are
//! settled. When nobody has asked for a while the consumers are cancelled and what came unasked is given back.

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

use super::inbox::{Held, Taken};
use super::wire::{Burial, Envelope, earlier_deliveries};
use super::{Shared, lock};

/// Nobody waiting for this long: consumers are cancelled.
const IDLE_AFTER: Duration = Duration::from_millis(200);
/// More consumers than this on one channel are not kept: the spent ones are cancelled.
const CONSUMERS_MAX: usize = 8;
/// How many deliveries are taken in before acknowledgements get their turn.
const ARRIVALS_MAX: usize = 1000;
/// Before a message that could not be moved is given back to the broker, which delivers it again at once.
const MOVE_AGAIN_AFTER: Duration = Duration::from_secs(1);

/// A delivery to the consumer of that number; `None`: it has ended.
type Arrival = (u32, Option<lapin::Result<Delivery>>);

struct Intake<'a> {
    shared: &'a Arc<Shared>,
    channel: &'a Channel,
    consumers: HashMap<u32, Consumer>,
    arrivals: SelectAll<BoxStream<'static, Arrival>>,
    last_consumer: u32,
}

struct Consumer {
    tag: ShortString,
    /// How many deliveries it may have outstanding.
    credit: usize,
    outstanding: usize,
}

/// Runs until the channel or `ended` does.
pub(super) async fn run(shared: &Arc<Shared>, channel: &Channel, ended: &CancellationToken) -> lapin::Result<()> {
    let mut intake =
        Intake { shared, channel, consumers: HashMap::new(), arrivals: SelectAll::new(), last_consumer: 0 };
    let result = ended.run_until_cancelled(intake.work()).await.unwrap_or(Ok(()));
    if channel.status().connected() {
        // What was settled before the end is not delivered again after it.
        intake.send_frames(true).await?;
    }
    result
}

impl Intake<'_> {
    async fn work(&mut self) -> lapin::Result<()> {
        loop {
            let next_end = self.take_back_lapsed();
            let acks_due = self.send_frames(false).await?;
            let idle_at = self.rest_when_idle().await?;
            self.ask_for_more().await?;
            let wake_at = [next_end, acks_due, idle_at].into_iter().flatten().min();
            tokio::select! {
                Some(arrival) = self.arrivals.next(), if !self.arrivals.is_empty() => self.take_in(arrival)?,
                () = self.shared.changed.notified() => {}
                () = tokio::time::sleep_until(wake_at.unwrap_or_else(Instant::now)), if wake_at.is_some() => {}
            }
        }
    }

    /// Takes in this arrival and all that have come with it.
    fn take_in(&mut self, first: Arrival) -> lapin::Result<()> {
        let mut next = Some(first);
        for _ in 0..ARRIVALS_MAX {
            match next.take() {
                Some((number, Some(delivery))) => self.arrive(number, delivery?),
                // Not at our wish: the queue was deleted, or its leader went away.
                Some((number, None)) if self.consumers.contains_key(&number) => return Err(consumer_ended()),
                Some((_, None)) => {}
                None => break,
            }
            next = self.arrivals.next().now_or_never().flatten();
        }
        if let Some((number, Some(delivery))) = next {
            self.arrive(number, delivery?);
        }
        if lock(&self.shared.inbox).worth_telling(Instant::now()) {
            self.shared.arrived.notify_waiters();
        }
        Ok(())
    }

    fn arrive(&mut self, number: u32, delivery: Delivery) {
        let Delivery { delivery_tag: tag, redelivered, properties, data, .. } = delivery;
        if let Some(consumer) = self.consumers.get_mut(&number) {
            consumer.outstanding += 1;
        }
        let now = SystemTime::now();
        let envelope = Envelope::read(&properties, data, now);
        let options = &self.shared.options.queue;
        let mut inbox = lock(&self.shared.inbox);
        inbox.delivered(tag, number);
        let receives = inbox.received(&envelope, earlier_deliveries(&properties, redelivered));
        let (hops, expires_at) = (envelope.hops, envelope.expires_at);
        let held = Held { tag, envelope: Arc::new(envelope), receives };
        let reason = if expires_at.is_some_and(|at| at <= now) {
            "retention over".to_owned()
        } else if options.receives_max.is_some_and(|max| receives >= max) {
            format!("received {receives} times without being settled")
        } else if hops == 0 {
            return inbox.keep(held);
        } else {
            let mut envelope = Envelope::clone(&held.envelope);
            envelope.hops -= 1;
            let taken = inbox.divert(held, Instant::now());
            return spawn_move(self.shared, taken, Move::Wait(envelope));
        };
        let mut envelope = Envelope::clone(&held.envelope);
        envelope.receives = receives;
        envelope.burial = Some(Burial { reason, by_queue: true, at: now });
        let taken = inbox.divert(held, Instant::now());
        spawn_move(self.shared, taken, Move::Bury(envelope));
    }

    /// Ended leases go to the end of the queue with one more receive. Returns when the next one ends.
    fn take_back_lapsed(&mut self) -> Option<Instant> {
        let (lapsed, next_end) = lock(&self.shared.inbox).lapsed(Instant::now());
        for taken in lapsed {
            let mut envelope = Envelope::clone(&taken.held.envelope);
            envelope.receives = taken.held.receives.saturating_add(1);
            spawn_move(self.shared, taken, Move::Lapse(envelope));
        }
        next_end
    }

    /// Sends what can be sent now, or with `last` all there is; returns when there is more to send.
    async fn send_frames(&mut self, last: bool) -> lapin::Result<Option<Instant>> {
        let (frames, acks_due) = {
            let mut inbox = lock(&self.shared.inbox);
            (inbox.frames(Instant::now(), last), inbox.acks_wait_until())
        };
        // All frames are queued at the first poll, in this order: what is counted as acknowledged is so for the broker
        // before the next frame for many is worked out.
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

    /// With nobody waiting, cancels the consumers and gives back what they brought; or says when to.
    async fn rest_when_idle(&mut self) -> lapin::Result<Option<Instant>> {
        let idle_since = lock(&self.shared.inbox).idle_since();
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
        self.shared.arrived.notify_waiters();
        lock(&self.shared.inbox).give_back_unread();
        self.send_frames(true).await?;
        Ok(None)
    }

    async fn ask_for_more(&mut self) -> lapin::Result<()> {
        let wanted = lock(&self.shared.inbox).wanted(self.shared.options.held_max);
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
        let queue = self.shared.options.topology.queue.as_str().into();
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

/// Where a delivery goes that nobody received, or whose receiver was lost.
enum Move {
    /// To the dead letters.
    Bury(Envelope),
    /// Back to the queue.
    Lapse(Envelope),
    /// To wait once more: its delay is longer than one queue can hold it.
    Wait(Envelope),
}

/// Publishes it where it goes, then acknowledges the delivery: a crash between the two makes it twice, never none.
fn spawn_move(shared: &Arc<Shared>, taken: Taken, to: Move) {
    let shared = Arc::clone(shared);
    shared.tasks.clone().spawn(async move {
        let published = match &to {
            Move::Bury(envelope) => shared.publish_dead(envelope).await,
            Move::Lapse(envelope) => shared.publish(envelope, Duration::ZERO).await,
            Move::Wait(envelope) => shared.publish_wait(envelope).await,
        };
        match published {
            Ok(()) => drop(lock(&shared.inbox).settle(&taken)),
            Err(error) => {
                warn!(
                    queue = shared.name(),
                    messageId = %taken.held.envelope.id,
                    error = &error as &dyn std::error::Error,
                    "a message could not be moved and stays in the queue"
                );
                if !matches!(to, Move::Lapse(_)) {
                    let _ = tokio::time::timeout(MOVE_AGAIN_AFTER, shared.stop.cancelled()).await;
                }
                lock(&shared.inbox).give_back(&taken);
            }
        }
        shared.changed.notify_one();
    });
}

fn consumer_ended() -> lapin::Error {
    ErrorKind::InvalidChannelState(ChannelState::Closed, "the broker cancelled the consumer").into()
}
