//! Writes of concurrent callers, made together: whatever has come in while a write was under way goes into the next one.
//! When idle an item is written at once. Few items wait for the write under way, because one for all of them costs the
//! database less than one for each; many, or a write that takes its time, and another one starts. Where a write costs much
//! more than an item in it, a group that is far smaller than the last one waits a moment for the others to come.
//!
//! The embedded engine needs none of this, its writer groups by itself. Used for new rows by [`crate::relay::accept::intake`] and for
//! moves by [`crate::relay::store::mysql`], which also reads rows that are wanted at the same moment this way.

use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::error;

use crate::relay::store::StoreError;

/// How many items are written together: as many as go into one statement.
const ITEMS_MAX: usize = 256;
/// How many groups are under way at once.
const WRITES_MAX: usize = 4;
/// How many items may wait; beyond that a caller waits to wait.
const WAITING_MAX: usize = 10_000;

/// When a group is written.
#[derive(Debug, Clone, Copy)]
pub struct Grouping {
    /// So many items do not wait for those that are being written.
    pub enough: usize,
    /// Nor do any, after so long: what holds the others up may be a lock that these do not need.
    pub patience: Duration,
    /// How long a group waits for more items though nothing is being written, if it has not half of what the last one
    /// had.
    pub gather: Duration,
}

impl Default for Grouping {
    fn default() -> Self {
        Self { enough: 64, patience: Duration::from_millis(20), gather: Duration::ZERO }
    }
}

/// The way to the store.
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
    /// Writes by this function, which has one answer for each item; ends when the last clone of this is gone and
    /// everything is written.
    pub fn new<F, Fut>(grouping: Grouping, write: F) -> Self
    where
        F: Fn(Vec<T>) -> Fut + Send + 'static,
        Fut: Future<Output = Vec<Result<R, StoreError>>> + Send + 'static,
    {
        let (sender, receiver) = mpsc::channel(WAITING_MAX);
        tokio::spawn(gather(grouping, write, receiver));
        Self { sender }
    }

    /// Writes an item together with others. If this future is dropped the item may still be written.
    pub async fn put(&self, item: T) -> Result<R, StoreError> {
        let (answer, answered) = oneshot::channel();
        let sent = self.sender.send(Waiting { item, answer }).await;
        sent.map_err(|_| StoreError::Unavailable("the service is stopping".into()))?;
        answered.await.unwrap_or_else(|_| Err(StoreError::OutcomeUnknown("a writer ended without an answer".into())))
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
    let mut group: Vec<Waiting<T, R>> = Vec::with_capacity(ITEMS_MAX);
    // When the first of the group came, and how many went together last.
    let (mut since, mut last) = (Instant::now(), 0);
    let mut open = true;
    while open || !group.is_empty() {
        let waited = if open { since.elapsed() } else { Duration::MAX };
        let look_again = match grouping.wait(writes.len(), group.len(), last, waited) {
            Wait::None => {
                // Nobody waits for these any more, and they have not been begun.
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
        let room = ITEMS_MAX - group.len();
        tokio::select! {
            // Those that are done make room, so they come first.
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
        error!(action = "store_miscounted", "{} answers for {} items", results.len(), answers.len());
    }
    for (answer, result) in answers.into_iter().zip(results) {
        // A caller that has gone away does not mind.
        drop(answer.send(result));
    }
}

/// Whether a group waits.
#[derive(Debug, PartialEq, Eq)]
enum Wait {
    /// It goes out now.
    None,
    /// No longer than this.
    For(Duration),
    /// Until something comes, or is done.
    ForOthers,
}

impl Grouping {
    /// How long a group of so many waits that has waited so long, with so many groups under way and after one of so many.
    fn wait(&self, under_way: usize, items: usize, last: usize, waited: Duration) -> Wait {
        let no_longer_than = match under_way {
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
    const GROUPING: Grouping = Grouping { enough: 64, patience: Duration::from_millis(20), gather: Duration::ZERO };

    #[test]
    fn an_item_waits_only_for_what_is_under_way_and_not_for_long() {
        assert_eq!(GROUPING.wait(0, 0, 0, MS * 100), Wait::ForOthers);
        assert_eq!(GROUPING.wait(0, 1, 50, Duration::ZERO), Wait::None, "no delay when idle");
        assert_eq!(GROUPING.wait(1, 63, 50, MS * 5), Wait::For(MS * 15), "they share the next statement");
        assert_eq!(GROUPING.wait(1, 64, 50, Duration::ZERO), Wait::None);
        assert_eq!(GROUPING.wait(1, 1, 50, MS * 20), Wait::None, "the statement under way takes its time");
        assert_eq!(GROUPING.wait(WRITES_MAX, ITEMS_MAX, 50, MS * 100), Wait::ForOthers);
    }

    #[test]
    fn a_group_far_smaller_than_the_last_waits_a_moment() {
        let grouping = Grouping { gather: MS * 3, ..GROUPING };
        assert_eq!(grouping.wait(0, 7, 16, MS), Wait::For(MS * 2));
        assert_eq!(grouping.wait(0, 7, 16, MS * 3), Wait::None, "a moment");
        assert_eq!(grouping.wait(0, 8, 16, Duration::ZERO), Wait::None, "half as many");
        assert_eq!(grouping.wait(0, 1, 1, Duration::ZERO), Wait::None, "one after the other does not wait");
        assert_eq!(grouping.wait(0, 1, 16, Duration::MAX), Wait::None, "at the end");
    }
}
