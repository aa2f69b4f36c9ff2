//! Messages on their way into one queue. Whoever sends puts its entries in line; a request takes the first ten, as many
//! bytes as SQS takes, whoever they belong to. When idle an entry goes out at once and alone; while requests are
//! under way the next ones pile up behind them and share a request. Nothing is ever held back to fill one.
//!
//! A request runs as a task of its own, so that a caller who goes away does not take the others' entries along.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures::future::join_all;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, timeout_at};
use tokio_util::task::TaskTracker;

use super::requests::{BATCH_MAX, Calls, Fault};
use super::wire::{BYTES_MAX, Parcel};
use crate::queue::QueueError;

/// So many requests run at once, however little is in them: what comes meanwhile shares the next.
const SMALL_REQUESTS_MAX: usize = 1;
/// So many run at once when each is full.
const REQUESTS_MAX: usize = 16;
/// How much may stand in line; whoever brings more waits.
const LINE_KIB_MAX: usize = 32 * 1024;

/// The line in front of one queue.
#[derive(Clone)]
pub(super) struct Outbox {
    inner: Arc<Inner>,
}

struct Inner {
    calls: Arc<Calls>,
    queue_url: String,
    line: Mutex<Line>,
    room: Arc<Semaphore>,
    tasks: TaskTracker,
    runtime: Handle,
}

#[derive(Default)]
struct Line {
    waiting: VecDeque<Waiting>,
    running: usize,
    last_number: u64,
}

struct Waiting {
    number: u64,
    parcel: Parcel,
    answer: oneshot::Sender<Result<(), QueueError>>,
    /// Its part of the room, given back with its answer.
    _room: OwnedSemaphorePermit,
}

/// Where an entry stands, and where its answer comes.
struct Ticket {
    number: u64,
    answer: oneshot::Receiver<Result<(), QueueError>>,
}

impl Outbox {
    /// An empty line. Its tasks run on the caller's runtime and are counted in `tasks`.
    pub(super) fn new(calls: Arc<Calls>, queue_url: String, tasks: TaskTracker) -> Self {
        let (line, room) = (Mutex::default(), Arc::new(Semaphore::new(LINE_KIB_MAX)));
        Self { inner: Arc::new(Inner { calls, queue_url, line, room, tasks, runtime: Handle::current() }) }
    }

    /// Sends; one answer for each, in order, within the time limit. What is still in line when it ends is taken out
    /// of it and was certainly not sent.
    pub(super) async fn send(&self, parcels: Vec<Parcel>) -> Vec<Result<(), QueueError>> {
        let deadline = self.inner.calls.deadline();
        let mut tickets = Vec::with_capacity(parcels.len());
        for parcel in parcels {
            let wanted = u32::try_from(parcel.bytes / 1024 + 1).unwrap_or(u32::MAX);
            let room = match self.inner.room.clone().try_acquire_many_owned(wanted) {
                Ok(room) => Some(room),
                Err(_) => {
                    self.inner.start_requests();
                    let room = self.inner.room.clone().acquire_many_owned(wanted);
                    timeout_at(deadline, room).await.ok().and_then(Result::ok)
                }
            };
            tickets.push(room.map(|room| self.inner.stand_in_line(parcel, room)));
        }
        self.inner.start_requests();
        join_all(tickets.into_iter().map(|ticket| self.answer(ticket, deadline))).await
    }

    async fn answer(&self, ticket: Option<Ticket>, deadline: Instant) -> Result<(), QueueError> {
        let Some(Ticket { number, answer }) = ticket else { return Err(Fault::not_started().into()) };
        match timeout_at(deadline, answer).await {
            Ok(Ok(answer)) => answer,
            _ if self.inner.withdraw(number) => Err(Fault::not_started().into()),
            _ => Err(QueueError::OutcomeUnknown("no answer in time".into())),
        }
    }
}

impl Inner {
    fn line(&self) -> MutexGuard<'_, Line> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn stand_in_line(&self, parcel: Parcel, room: OwnedSemaphorePermit) -> Ticket {
        let (answer, answered) = oneshot::channel();
        let mut line = self.line();
        line.last_number += 1;
        let number = line.last_number;
        line.waiting.push_back(Waiting { number, parcel, answer, _room: room });
        Ticket { number, answer: answered }
    }

    /// Takes an entry out of the line; `false` if it has left already.
    fn withdraw(&self, number: u64) -> bool {
        let mut line = self.line();
        match line.waiting.binary_search_by_key(&number, |waiting| waiting.number) {
            Ok(place) => line.waiting.remove(place).is_some(),
            Err(_) => false,
        }
    }

    fn start_requests(self: &Arc<Self>) {
        loop {
            let mut line = self.line();
            let sizes = line.waiting.iter().map(|waiting| waiting.parcel.bytes);
            let batch = next_batch(sizes);
            if !may_start(line.running, &batch) {
                return;
            }
            let entries: Vec<Waiting> = line.waiting.drain(..batch.len).collect();
            line.running += 1;
            drop(line);
            let request = Running(self.clone());
            self.tasks.spawn_on(async move { request.0.request(entries).await }, &self.runtime);
        }
    }

    async fn request(&self, entries: Vec<Waiting>) {
        let (parcels, answers): (Vec<_>, Vec<_>) =
            entries.into_iter().map(|entry| (entry.parcel, (entry.answer, entry._room))).unzip();
        let results = self.calls.send(&self.queue_url, parcels).await;
        for ((answer, _room), result) in answers.into_iter().zip(results) {
            // A caller that has gone away does not mind.
            drop(answer.send(result));
        }
    }
}

/// A request under way: when it ends, however it ends, the next may start.
struct Running(Arc<Inner>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.line().running -= 1;
        self.0.start_requests();
    }
}

/// What the next request would take from the front of the line.
#[derive(Debug, PartialEq, Eq)]
struct Batch {
    len: usize,
    /// No more would fit.
    full: bool,
}

fn next_batch(sizes: impl Iterator<Item = usize>) -> Batch {
    let mut batch = Batch { len: 0, full: false };
    let mut bytes = 0;
    for size in sizes {
        bytes += size;
        // One alone always goes: SQS itself says no to it.
        if batch.len == BATCH_MAX || (batch.len > 0 && bytes > BYTES_MAX) {
            batch.full = true;
            break;
        }
        batch.len += 1;
    }
    batch.full |= batch.len == BATCH_MAX;
    batch
}

/// Full requests saturate the endpoint; small ones only so far that entries begin to share them.
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
        assert_eq!(next_batch([BYTES_MAX + 1].into_iter()), batch(1, false), "one alone always goes");
    }

    #[test]
    fn small_requests_leave_room_for_sharing() {
        assert!(!may_start(0, &batch(0, false)));
        assert!(may_start(0, &batch(1, false)), "no delay when idle");
        assert!(!may_start(SMALL_REQUESTS_MAX, &batch(9, false)));
        assert!(may_start(SMALL_REQUESTS_MAX, &batch(10, true)));
        assert!(!may_start(REQUESTS_MAX, &batch(10, true)));
    }
}
