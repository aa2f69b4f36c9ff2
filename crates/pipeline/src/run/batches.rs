//! A run with a [`BatchHandler`]: messages are prepared concurrently, collected in the order received, and handled in
//! batches.
//!
//! Messages that arrive together are split into one chunk for each processor. The collector reads the prepared chunks in
//! the order received and fills a [`BatchBuffer`]; a batch that is full or due is handled in a task of its own.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures::{FutureExt, StreamExt, stream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::batch_buffer::BatchBuffer;
use super::delivery::Delivery;
use super::options::BatchOptions;
use super::settle::Disposition;
use super::{Pipeline, Run, Summary, panic_reason};
use crate::handler::BatchHandler;
use crate::message::Message;

impl Pipeline {
    /// Prepares each message, collects messages into batches, passes each batch to `handler` and settles every message by
    /// its own outcome, until `shutdown` is cancelled. Shutdown works as in [`Pipeline::run`]; batches that are not full
    /// are handled as they are.
    ///
    /// At most `size × (batchers + 1) + processors` messages are in flight; [`PipelineOptions::concurrency`] does not
    /// apply.
    ///
    /// [`PipelineOptions::concurrency`]: crate::PipelineOptions::concurrency
    pub async fn run_batches<H: BatchHandler>(
        self,
        handler: Arc<H>,
        batching: BatchOptions,
        shutdown: CancellationToken,
    ) -> Summary {
        let (run, settlements, helpers) = Run::start(self, batching.in_flight_max());
        let processors = batching.processors.max(1);
        let processor_permits = Arc::new(Semaphore::new(processors));
        // Every chunk holds a slot until it is collected, so the channel has room for all of them.
        let (chunks, chunks_in_order) = mpsc::channel(batching.in_flight_max());
        let mut collector = JoinSet::new();
        collector.spawn(collect_batches(handler.clone(), batching, chunks_in_order));
        let mut preparing = JoinSet::new();

        let ready = || {
            let handler = handler.clone();
            async move { handler.ready().await }
        };
        let start = |mut received: Vec<Delivery>| {
            while preparing.try_join_next().is_some() {}
            let chunk_size = received.len().div_ceil(processors);
            while !received.is_empty() {
                let rest = received.split_off(chunk_size.min(received.len()));
                let (prepared, chunk) = oneshot::channel();
                // Closed only if the collector panicked; then the chunk's messages are due again when their leases end.
                drop(chunks.try_send(chunk));
                let (handler, permits) = (handler.clone(), processor_permits.clone());
                preparing.spawn(prepare_chunk(handler, permits, received, prepared, shutdown.clone()));
                received = rest;
            }
        };
        let unstarted = run.fetch(settlements, ready, &shutdown, start).await;

        for delivery in unstarted {
            delivery.settle(Disposition::HandBack).await;
        }
        // Without a sender the collector flushes its last batch and ends.
        drop(chunks);
        let drained = async {
            while preparing.join_next().await.is_some() {}
            while collector.join_next().await.is_some() {}
        };
        run.drain(drained).await;
        drop((preparing, collector));
        run.finish(helpers).await
    }
}

/// Deliveries, each with the item that `prepare` made of its message.
type Prepared<I> = Vec<(Delivery, I)>;

/// The messages that one processor has prepared.
struct PreparedChunk<I> {
    prepared: Prepared<I>,
    /// The slot of a message that joins no batch: even a chunk without prepared messages holds a slot until collected.
    _slot: Option<OwnedSemaphorePermit>,
}

/// Prepares the messages of one chunk in order. A task for each message would cost more than preparing usually does, and
/// would lose the order.
async fn prepare_chunk<H: BatchHandler>(
    handler: Arc<H>,
    processor_permits: Arc<Semaphore>,
    deliveries: Vec<Delivery>,
    done: oneshot::Sender<PreparedChunk<H::Item>>,
    shutdown: CancellationToken,
) {
    let permit = tokio::select! {
        biased;
        () = shutdown.cancelled() => None,
        permit = processor_permits.acquire() => permit.ok(),
    };
    let mut prepared = Vec::with_capacity(deliveries.len());
    let mut slot = None;
    let mut rest = deliveries.into_iter();
    while let Some(mut delivery) = rest.next() {
        if permit.is_none() || shutdown.is_cancelled() {
            delivery.settle(Disposition::HandBack).await;
            continue;
        }
        let result = {
            let mut preparing = std::pin::pin!(AssertUnwindSafe(handler.prepare(&delivery.message)).catch_unwind());
            tokio::select! {
                biased;
                result = &mut preparing => result,
                // Return the unstarted rest immediately; this message finishes.
                () = shutdown.cancelled() => {
                    for unstarted in rest.by_ref() {
                        unstarted.settle(Disposition::HandBack).await;
                    }
                    preparing.await
                }
            }
        };
        match result.unwrap_or_else(|panic| Err(delivery.failed(&panic_reason(&*panic)))) {
            Ok(item) => prepared.push((delivery, item)),
            Err(outcome) => {
                slot = delivery.slot.take();
                delivery.run.meters.handled_unbatched();
                delivery.settle(outcome.into()).await;
            }
        }
    }
    // If the collector is gone the drain is over, and dropping the deliveries counts them as abandoned.
    drop(done.send(PreparedChunk { prepared, _slot: slot }));
}

/// Fills batches with the chunks in the order received, not the order prepared: a queue may need far fewer requests to
/// settle messages in its own order. A slow chunk therefore delays the chunks after it.
async fn collect_batches<H: BatchHandler>(
    handler: Arc<H>,
    options: BatchOptions,
    mut chunks_in_order: mpsc::Receiver<oneshot::Receiver<PreparedChunk<H::Item>>>,
) {
    let mut chunks = std::pin::pin!(stream::poll_fn(|cx| chunks_in_order.poll_recv(cx)).then(|chunk| chunk));
    let batchers = Arc::new(Semaphore::new(options.batchers.max(1)));
    let mut handling = JoinSet::new();
    let mut buffer = BatchBuffer::new(options.size, options.timeout);
    let mut open = true;
    while open {
        let due = buffer.due();
        let mut batches = Vec::new();
        tokio::select! {
            next = chunks.next() => match next {
                Some(Ok(chunk)) => {
                    let now = Instant::now();
                    batches.extend(chunk.prepared.into_iter().filter_map(|entry| buffer.push(entry, now)));
                }
                // Its task was aborted at the end of the drain.
                Some(Err(_)) => {}
                None => {
                    open = false;
                    batches.extend(buffer.flush());
                }
            },
            () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                batches.extend(buffer.flush());
            }
        }
        for batch in batches {
            // Backpressure: waiting here stops the collecting, then the preparing, then the fetching.
            let permit = batchers.clone().acquire_owned().await.ok();
            while handling.try_join_next().is_some() {}
            handling.spawn(handle_batch(handler.clone(), batch, permit));
        }
    }
    while handling.join_next().await.is_some() {}
}

async fn handle_batch<H: BatchHandler>(
    handler: Arc<H>,
    batch: Prepared<H::Item>,
    _permit: Option<OwnedSemaphorePermit>,
) {
    let started = Instant::now();
    let (deliveries, items): (Vec<Delivery>, Vec<H::Item>) = batch.into_iter().unzip();
    let Some(meters) = deliveries.first().map(|delivery| delivery.run.meters.clone()) else { return };
    let messages: Vec<&Message> = deliveries.iter().map(|delivery| &delivery.message).collect();
    let outcomes = match AssertUnwindSafe(handler.handle(&items, &messages)).catch_unwind().await {
        Ok(outcomes) if outcomes.len() == deliveries.len() => Ok(outcomes),
        Ok(outcomes) => Err(format!("the handler gave {} outcomes for {} messages", outcomes.len(), items.len())),
        Err(panic) => Err(panic_reason(&*panic)),
    };
    let outcomes =
        outcomes.unwrap_or_else(|reason| deliveries.iter().map(|delivery| delivery.failed(&reason)).collect());
    meters.handled(deliveries.len() as u64, started.elapsed());
    for (delivery, outcome) in deliveries.into_iter().zip(outcomes) {
        delivery.settle(outcome.into()).await;
    }
}
