//! The batch form of a run: messages are prepared side by side, gathered in order, and handled in batches.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::{FutureExt, StreamExt, stream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::batch_buffer::Batch;
use super::delivery::{Delivery, panic_reason};
use super::options::BatchOptions;
use super::settle::Kind;
use super::{Engine, Pipeline, Summary};
use crate::handler::BatchHandler;
use crate::message::Message;

impl Pipeline {
    /// Prepares each message, gathers them into batches, hands each batch to `handler` and settles every message in
    /// it by its own verdict, until `shutdown` is cancelled. Then it does as [`Pipeline::run`]; batches that are not
    /// full are handled as they are.
    ///
    /// In flight are at most `size × (batchers + 1) + processors` messages; [`PipelineOptions::concurrency`] does not
    /// apply.
    pub async fn run_batches<H: BatchHandler>(
        self,
        handler: Arc<H>,
        batching: BatchOptions,
        shutdown: CancellationToken,
    ) -> Summary {
        let (engine, desk, helpers) = Engine::start(self, batching.in_flight_max());
        let shares = batching.processors.max(1);
        let processors = Arc::new(Semaphore::new(shares));
        // Every share holds a slot until it is gathered, so there is room for all of them.
        let (in_order, gathering) = mpsc::channel(batching.in_flight_max());
        let mut gatherer = JoinSet::new();
        gatherer.spawn(gather(handler.clone(), batching, gathering));
        let mut preparing = JoinSet::new();

        let ready = || {
            let handler = handler.clone();
            async move { handler.ready().await }
        };
        let start = |mut received: Vec<Delivery>| {
            while preparing.try_join_next().is_some() {}
            let share = received.len().div_ceil(shares);
            while !received.is_empty() {
                let rest = received.split_off(share.min(received.len()));
                let (done, share) = oneshot::channel();
                // Closed only if the gatherer has panicked; then each share's messages come back when their leases end.
                drop(in_order.try_send(share));
                let (handler, processors) = (handler.clone(), processors.clone());
                preparing.spawn(prepare_some(handler, processors, received, done, shutdown.clone()));
                received = rest;
            }
        };
        let unstarted = engine.fetch(desk, ready, &shutdown, start).await;

        for delivery in unstarted {
            delivery.settle(Kind::HandBack).await;
        }
        // The last sender gone tells the gatherer to flush.
        drop(in_order);
        let drained = async {
            while preparing.join_next().await.is_some() {}
            while gatherer.join_next().await.is_some() {}
        };
        engine.drain(drained).await;
        drop((preparing, gatherer));
        engine.finish(helpers).await
    }
}

/// Messages, each with what was made of it.
type Prepared<I> = Vec<(Delivery, I)>;

/// What one processor has prepared.
struct Share<I> {
    prepared: Prepared<I>,
    /// Of a message that joins no batch: a share holds a slot even if it is empty.
    _slot: Option<OwnedSemaphorePermit>,
}

/// Prepares one processor's share of what came together, one after the other: a task for each message would cost more
/// than most preparing does, and they would not stay in order.
async fn prepare_some<H: BatchHandler>(
    handler: Arc<H>,
    processors: Arc<Semaphore>,
    deliveries: Vec<Delivery>,
    done: oneshot::Sender<Share<H::Item>>,
    shutdown: CancellationToken,
) {
    let turn = tokio::select! {
        biased;
        () = shutdown.cancelled() => None,
        turn = processors.acquire() => turn.ok(),
    };
    let mut prepared = Vec::with_capacity(deliveries.len());
    let mut slot = None;
    let mut rest = deliveries.into_iter();
    while let Some(mut delivery) = rest.next() {
        if turn.is_none() || shutdown.is_cancelled() {
            delivery.settle(Kind::HandBack).await;
            continue;
        }
        let checked = {
            let mut checking = std::pin::pin!(AssertUnwindSafe(handler.prepare(&delivery.message)).catch_unwind());
            tokio::select! {
                biased;
                checked = &mut checking => checked,
                // The others do not wait for this one to be given back.
                () = shutdown.cancelled() => {
                    for other in rest.by_ref() {
                        other.settle(Kind::HandBack).await;
                    }
                    checking.await
                }
            }
        };
        match checked.unwrap_or_else(|panic| Err(delivery.failed(&panic_reason(&*panic)))) {
            Ok(item) => prepared.push((delivery, item)),
            Err(outcome) => {
                slot = delivery.slot.take();
                delivery.engine.meters.handled_alone();
                delivery.settle(outcome.into()).await;
            }
        }
    }
    // If the gatherer is gone the drain is over, and deliveries count as abandoned when they are dropped.
    drop(done.send(Share { prepared, _slot: slot }));
}

/// Makes batches of the shares in the order in which they came, not in which they are prepared: a queue may need far
/// fewer words for messages settled in its own order. A share that takes long keeps those after it waiting.
async fn gather<H: BatchHandler>(
    handler: Arc<H>,
    options: BatchOptions,
    mut in_order: mpsc::Receiver<oneshot::Receiver<Share<H::Item>>>,
) {
    let mut shares = std::pin::pin!(stream::poll_fn(|cx| in_order.poll_recv(cx)).then(|share| share));
    let batchers = Arc::new(Semaphore::new(options.batchers.max(1)));
    let mut handling = JoinSet::new();
    let mut batch = Batch::new(options.size, options.timeout);
    let mut open = true;
    while open {
        let due = batch.due();
        let mut full = Vec::new();
        tokio::select! {
            next = shares.next() => match next {
                Some(Ok(share)) => {
                    let now = Instant::now();
                    full.extend(share.prepared.into_iter().filter_map(|entry| batch.push(entry, now)));
                }
                // Its task was aborted at the end of the drain.
                Some(Err(_)) => {}
                None => {
                    open = false;
                    full.extend(batch.flush());
                }
            },
            () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                full.extend(batch.flush());
            }
        }
        for entries in full {
            // Waiting here stops the gathering, then the preparing, then the fetching.
            let turn = batchers.clone().acquire_owned().await.ok();
            while handling.try_join_next().is_some() {}
            handling.spawn(handle_batch(handler.clone(), entries, turn));
        }
    }
    while handling.join_next().await.is_some() {}
}

async fn handle_batch<H: BatchHandler>(
    handler: Arc<H>,
    entries: Prepared<H::Item>,
    _turn: Option<OwnedSemaphorePermit>,
) {
    let started = Instant::now();
    let (deliveries, items): (Vec<Delivery>, Vec<H::Item>) = entries.into_iter().unzip();
    let Some(meters) = deliveries.first().map(|delivery| delivery.engine.meters.clone()) else { return };
    let messages: Vec<&Message> = deliveries.iter().map(|delivery| &delivery.message).collect();
    let failure = match AssertUnwindSafe(handler.handle(&items, &messages)).catch_unwind().await {
        Ok(outcomes) if outcomes.len() == deliveries.len() => Err(outcomes),
        Ok(outcomes) => Ok(format!("the handler gave {} outcomes for {} messages", outcomes.len(), items.len())),
        Err(panic) => Ok(panic_reason(&*panic)),
    };
    let outcomes = match failure {
        Err(outcomes) => outcomes,
        Ok(reason) => deliveries.iter().map(|delivery| delivery.failed(&reason)).collect(),
    };
    meters.handled(deliveries.len() as u64, started.elapsed());
    for (delivery, outcome) in deliveries.into_iter().zip(outcomes) {
        delivery.settle(outcome.into()).await;
    }
}
