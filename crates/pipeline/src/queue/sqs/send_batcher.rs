//! Batches concurrent sends to one queue. Each send puts its entries into a queue in memory; a request takes up to ten of
//! them, within SQS's limit of bytes, whichever callers they belong to. When idle, an entry is sent immediately and alone;
//! while requests are in flight, the next entries accumulate and share a request. No entry is delayed to fill one.
//!
//! A request runs in a task of its own, so a cancelled caller does not cancel the entries of others.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

use futures::future::join_all;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, timeout_at};
use tokio_util::task::TaskTracker;

use super::client::{BATCH_MAX, RequestError, SqsClient};
use super::wire::{BYTES_MAX, SendEntry};
use crate::lock::lock;
use crate::queue::QueueError;

/// Concurrent requests that are not full; entries that arrive meanwhile share the next one.
const SMALL_REQUESTS_MAX: usize = 1;
/// Concurrent requests when each is full.
const REQUESTS_MAX: usize = 16;
/// Size limit of the queued entries; callers with more wait.
const QUEUED_KIB_MAX: usize = 32 * 1024;

/// Sends to one queue in SQS. Clones share the queued entries.
#[derive(Clone)]
pub(super) struct SendBatcher {
    state: Arc<BatcherState>,
}

struct BatcherState {
    client: Arc<SqsClient>,
    queue_url: String,
    queued: Mutex<QueuedSends>,
    room: Arc<Semaphore>,
    tasks: TaskTracker,
    runtime: Handle,
}

#[derive(Default)]
struct QueuedSends {
    sends: VecDeque<QueuedSend>,
    requests_running: usize,
    last_number: u64,
}

struct QueuedSend {
    number: u64,
    entry: SendEntry,
    answer: oneshot::Sender<Result<(), QueueError>>,
    /// Its share of [`QUEUED_KIB_MAX`], released with the answer.
    _room: OwnedSemaphorePermit,
}

/// A queued entry from the caller's side.
struct PendingSend {
    number: u64,
    answer: oneshot::Receiver<Result<(), QueueError>>,
}

impl SendBatcher {
    /// Runs its requests on the caller's runtime and tracks them in `tasks`.
    pub(super) fn new(client: Arc<SqsClient>, queue_url: String, tasks: TaskTracker) -> Self {
        let (queued, room) = (Mutex::default(), Arc::new(Semaphore::new(QUEUED_KIB_MAX)));
        Self { state: Arc::new(BatcherState { client, queue_url, queued, room, tasks, runtime: Handle::current() }) }
    }

    /// Sends entries and returns one answer for each, in order, within the client's time limit. An entry that is still
    /// queued when the time is up is removed and was certainly not sent.
    pub(super) async fn send(&self, entries: Vec<SendEntry>) -> Vec<Result<(), QueueError>> {
        let deadline = self.state.client.deadline();
        let mut pending_sends = Vec::with_capacity(entries.len());
        for entry in entries {
            let wanted = u32::try_from(entry.bytes / 1024 + 1).unwrap_or(u32::MAX);
            let room = match self.state.room.clone().try_acquire_many_owned(wanted) {
                Ok(room) => Some(room),
                Err(_) => {
                    self.state.start_requests();
                    let room = self.state.room.clone().acquire_many_owned(wanted);
                    timeout_at(deadline, room).await.ok().and_then(Result::ok)
                }
            };
            pending_sends.push(room.map(|room| self.state.enqueue(entry, room)));
        }
        self.state.start_requests();
        join_all(pending_sends.into_iter().map(|pending| self.answer(pending, deadline))).await
    }

    async fn answer(&self, pending: Option<PendingSend>, deadline: Instant) -> Result<(), QueueError> {
        let Some(PendingSend { number, answer }) = pending else { return Err(RequestError::not_started().into()) };
        match timeout_at(deadline, answer).await {
            Ok(Ok(answer)) => answer,
            _ if self.state.withdraw(number) => Err(RequestError::not_started().into()),
            _ => Err(QueueError::OutcomeUnknown("no answer in time".into())),
        }
    }
}

impl BatcherState {
    fn queued(&self) -> MutexGuard<'_, QueuedSends> {
        lock(&self.queued)
    }

    fn enqueue(&self, entry: SendEntry, room: OwnedSemaphorePermit) -> PendingSend {
        let (answer, answered) = oneshot::channel();
        let mut queued = self.queued();
        queued.last_number += 1;
        let number = queued.last_number;
        queued.sends.push_back(QueuedSend { number, entry, answer, _room: room });
        PendingSend { number, answer: answered }
    }

    /// Removes a queued entry; `false` if a request has taken it.
    fn withdraw(&self, number: u64) -> bool {
        let mut queued = self.queued();
        match queued.sends.binary_search_by_key(&number, |send| send.number) {
            Ok(place) => queued.sends.remove(place).is_some(),
            Err(_) => false,
        }
    }

    fn start_requests(self: &Arc<Self>) {
        loop {
            let mut queued = self.queued();
            let sizes = queued.sends.iter().map(|send| send.entry.bytes);
            let batch = next_batch(sizes);
            if !may_start(queued.requests_running, &batch) {
                return;
            }
            let entries: Vec<QueuedSend> = queued.sends.drain(..batch.len).collect();
            queued.requests_running += 1;
            drop(queued);
            let request = RequestGuard(self.clone());
            self.tasks.spawn_on(async move { request.0.request(entries).await }, &self.runtime);
        }
    }

    async fn request(&self, entries: Vec<QueuedSend>) {
        let (entries, answers): (Vec<_>, Vec<_>) =
            entries.into_iter().map(|entry| (entry.entry, (entry.answer, entry._room))).unzip();
        let results = self.client.send(&self.queue_url, entries).await;
        for ((answer, _room), result) in answers.into_iter().zip(results) {
            // The caller may have dropped its future.
            drop(answer.send(result));
        }
    }
}

/// A request in flight. When it ends, even by a panic, the next may start.
struct RequestGuard(Arc<BatcherState>);

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.queued().requests_running -= 1;
        self.0.start_requests();
    }
}

/// What the next request would take from the front of the queued entries.
#[derive(Debug, PartialEq, Eq)]
struct Batch {
    len: usize,
    /// No further entry would fit.
    full: bool,
}

fn next_batch(sizes: impl Iterator<Item = usize>) -> Batch {
    let mut batch = Batch { len: 0, full: false };
    let mut bytes = 0;
    for size in sizes {
        bytes += size;
        // A single entry is always sent: if it is too large, SQS rejects it.
        if batch.len == BATCH_MAX || (batch.len > 0 && bytes > BYTES_MAX) {
            batch.full = true;
            break;
        }
        batch.len += 1;
    }
    batch.full |= batch.len == BATCH_MAX;
    batch
}

/// Full requests may use the whole concurrency; small ones are limited so that entries accumulate and share them.
fn may_start(running: usize, batch: &Batch) -> bool {
    batch.len > 0 && running < if batch.full { REQUESTS_MAX } else { SMALL_REQUESTS_MAX }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(len: usize, full: bool) -> Batch {
        Batch { len, full }
    }

    #[test]
    fn a_batch_ends_at_ten_entries() {
        for (waiting, wanted) in [
            (0, batch(0, false)),
            (1, batch(1, false)),
            (9, batch(9, false)),
            (10, batch(10, true)),
            (25, batch(10, true)),
        ] {
            assert_eq!(next_batch(std::iter::repeat_n(100, waiting)), wanted);
        }
    }

    #[test]
    fn a_batch_ends_at_its_bytes() {
        assert_eq!(next_batch([BYTES_MAX, 1].into_iter()), batch(1, true));
        assert_eq!(next_batch([BYTES_MAX - 1, 1].into_iter()), batch(2, false));
        assert_eq!(next_batch([100_000, 100_000, 100_000].into_iter()), batch(2, true));
        assert_eq!(next_batch([BYTES_MAX + 1].into_iter()), batch(1, false), "a single entry is always sent");
    }

    #[test]
    fn a_small_request_waits_for_the_one_in_flight() {
        assert!(!may_start(0, &batch(0, false)));
        assert!(may_start(0, &batch(1, false)), "no delay when idle");
        assert!(!may_start(SMALL_REQUESTS_MAX, &batch(9, false)));
        assert!(may_start(SMALL_REQUESTS_MAX, &batch(10, true)));
        assert!(!may_start(REQUESTS_MAX, &batch(10, true)));
    }
}
