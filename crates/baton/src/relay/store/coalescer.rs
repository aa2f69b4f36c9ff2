//! Groups the writes (or reads) of concurrent callers: items that arrive during a write go into the next one. When idle, an item is
//! written at once. A small group waits for the write in flight, because one statement costs the database less than
//! several; a large group, or a slow write, starts another one. Where a write costs much more than an item, a group that
//! is far smaller than the last one waits up to `gather` for more.
//!
//! The embedded engine groups writes by itself. On servers the intake uses this for new rows, and [`super::mysql`] for
//! moves and for reads.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::error;

use crate::relay::store::StoreError;

/// Maximum groups in flight.
const WRITES_MAX: usize = 4;
/// Maximum queued items; further callers wait for room.
const WAITING_MAX: usize = 10_000;

/// When a group is written.
#[derive(Debug, Clone, Copy)]
pub struct Grouping {
    /// Maximum items of a group.
    pub items_max: usize,
    /// Minimum size of a group that does not wait for the writes in flight.
    pub enough: usize,
    /// Maximum wait for the writes in flight: they may be blocked by a lock that this group does not need.
    pub patience: Duration,
    /// Maximum wait for more items while no write is in flight, if the group has less than half of the last one's items.
    pub gather: Duration,
}

impl Grouping {
    /// For reads of rows by id. Few in a group, because all its rows are in memory at once, and one may have hundreds of
    /// kilobytes. Sequential readers wait at most 1 ms to be batched.
    pub(super) const READS: Self =
        Self { items_max: 32, enough: 32, patience: Duration::from_millis(1), gather: Duration::ZERO };
}

impl Default for Grouping {
    fn default() -> Self {
        // As many as fit into one statement.
        Self { items_max: 256, enough: 64, patience: Duration::from_millis(20), gather: Duration::ZERO }
    }
}

/// Hands items to the grouped write.
pub struct Coalescer<T, R> {
    sender: mpsc::Sender<Waiting<T, R>>,
}

struct Waiting<T, R> {
    item: T,
    answer: oneshot::Sender<Result<R, StoreError>>,
}

impl<T, R> Clone for Coalescer<T, R> {
    fn clone(&self) -> Self {
        Self { sender: self.sender.clone() }
    }
}

impl<T: Send + 'static, R: Send + 'static> Coalescer<T, R> {
    /// Writes groups with `write`, which returns one answer for each item. The task ends when the last clone is dropped and
    /// every item is written.
    pub fn new<F, Fut>(grouping: Grouping, write: F) -> Self
    where
        F: Fn(Vec<T>) -> Fut + Send + 'static,
        Fut: Future<Output = Vec<Result<R, StoreError>>> + Send + 'static,
    {
        let (sender, receiver) = mpsc::channel(WAITING_MAX);
        tokio::spawn(gather(grouping, write, receiver));
        Self { sender }
    }

    /// Writes an item within a group. If this future is dropped, the item may still be written.
    pub async fn put(&self, item: T) -> Result<R, StoreError> {
        let (answer, answered) = oneshot::channel();
        let sent = self.sender.send(Waiting { item, answer }).await;
        sent.map_err(|_| StoreError::Unavailable("the service is stopping".into()))?;
        answered
            .await
            .unwrap_or_else(|_| Err(StoreError::OutcomeUnknown("the writer task ended without an answer".into())))
    }
}

async fn gather<T, R, F, Fut>(grouping: Grouping, write: F, mut receiver: mpsc::Receiver<Waiting<T, R>>)
where
    T: Send + 'static,
    R: Send + 'static,
    F: Fn(Vec<T>) -> Fut,
    Fut: Future<Output = Vec<Result<R, StoreError>>> + Send + 'static,
{
    let mut writes = JoinSet::new();
    let mut group: Vec<Waiting<T, R>> = Vec::with_capacity(grouping.items_max);
    // Arrival of the group's first item, and the size of the last group.
    let (mut since, mut last) = (Instant::now(), 0);
    let mut open = true;
    while open || !group.is_empty() {
        let waited = if open { since.elapsed() } else { Duration::MAX };
        let look_again = match grouping.wait(writes.len(), group.len(), last, waited) {
            Wait::None => {
                // The callers of these items have gone, and no write of them has begun.
                group.retain(|waiting| !waiting.answer.is_closed());
                last = group.len();
                if !group.is_empty() {
                    let (items, answers): (Vec<_>, Vec<_>) =
                        group.drain(..).map(|waiting| (waiting.item, waiting.answer)).unzip();
                    writes.spawn(answer(write(items), answers));
                }
                continue;
            }
            Wait::For(time) => Some(Instant::now() + time),
            Wait::ForOthers => None,
        };
        let room = grouping.items_max - group.len();
        tokio::select! {
            // Finished writes first: they make room.
            biased;
            Some(_) = writes.join_next(), if !writes.is_empty() => {}
            came = receiver.recv_many(&mut group, room), if open && room > 0 => {
                open = came > 0;
                if group.len() == came {
                    since = Instant::now();
                }
            }
            () = tokio::time::sleep_until(look_again.unwrap_or_else(Instant::now)), if look_again.is_some() => {}
        }
    }
    while writes.join_next().await.is_some() {}
}

async fn answer<R>(
    write: impl Future<Output = Vec<Result<R, StoreError>>>,
    answers: Vec<oneshot::Sender<Result<R, StoreError>>>,
) {
    let results = write.await;
    if results.len() != answers.len() {
        error!(action = "store_miscounted", "the store returned {} answers for {} items", results.len(), answers.len());
    }
    for (answer, result) in answers.into_iter().zip(results) {
        // The caller may have gone.
        drop(answer.send(result));
    }
}

/// The failure of a group for one of its callers.
pub(super) fn same_failure(failure: &Arc<StoreError>) -> StoreError {
    let source = Box::new(Arc::clone(failure));
    match **failure {
        StoreError::Unavailable(_) => StoreError::Unavailable(source),
        // No other error proves that nothing was stored.
        _ => StoreError::OutcomeUnknown(source),
    }
}

/// How long a group waits.
#[derive(Debug, PartialEq, Eq)]
enum Wait {
    /// Write it now.
    None,
    /// At most this long.
    For(Duration),
    /// Until an item arrives or a write ends.
    ForOthers,
}

impl Grouping {
    /// Remaining wait, given group size and age, writes in flight and last group size.
    fn wait(&self, in_flight: usize, items: usize, last: usize, waited: Duration) -> Wait {
        let no_longer_than = match in_flight {
            _ if items == 0 => return Wait::ForOthers,
            WRITES_MAX.. => return Wait::ForOthers,
            0 if items >= last / 2 => Duration::ZERO,
            0 => self.gather,
            _ if items >= self.enough => Duration::ZERO,
            _ => self.patience,
        };
        match no_longer_than.saturating_sub(waited) {
            Duration::ZERO => Wait::None,
            time => Wait::For(time),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const GROUPING: Grouping =
        Grouping { items_max: 256, enough: 64, patience: Duration::from_millis(20), gather: Duration::ZERO };

    #[test]
    fn a_group_waits_only_for_writes_in_flight_and_at_most_its_patience() {
        assert_eq!(GROUPING.wait(0, 0, 0, MS * 100), Wait::ForOthers);
        assert_eq!(GROUPING.wait(0, 1, 50, Duration::ZERO), Wait::None, "no delay when idle");
        assert_eq!(GROUPING.wait(1, 63, 50, MS * 5), Wait::For(MS * 15), "they share the next statement");
        assert_eq!(GROUPING.wait(1, 64, 50, Duration::ZERO), Wait::None);
        assert_eq!(GROUPING.wait(1, 1, 50, MS * 20), Wait::None, "the statement under way takes its time");
        assert_eq!(GROUPING.wait(WRITES_MAX, 256, 50, MS * 100), Wait::ForOthers);
    }

    #[test]
    fn a_group_far_smaller_than_the_last_one_waits_up_to_gather() {
        let grouping = Grouping { gather: MS * 3, ..GROUPING };
        assert_eq!(grouping.wait(0, 7, 16, MS), Wait::For(MS * 2));
        assert_eq!(grouping.wait(0, 7, 16, MS * 3), Wait::None, "a moment");
        assert_eq!(grouping.wait(0, 8, 16, Duration::ZERO), Wait::None, "half as many");
        assert_eq!(grouping.wait(0, 1, 1, Duration::ZERO), Wait::None, "one after the other does not wait");
        assert_eq!(grouping.wait(0, 1, 16, Duration::MAX), Wait::None, "at the end");
    }
}
