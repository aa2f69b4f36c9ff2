//! Writes of concurrent callers, made together: whatever has come in while a write was under way goes into the next one.
//! When idle an item is written at once. Few items wait for the write under way, because one for all of them costs the
//! database less than one for each; many, or a write that takes its time, and another one starts.
//!
//! The embedded engine needs none of this, its writer groups by itself. Used for new rows by [`super::intake`] and for
//! moves by [`super::store::mysql`], which also reads rows that are wanted at the same moment this way.

use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::error;

use super::store::StoreError;

/// How many items are written together: as many as go into one statement.
const ITEMS_MAX: usize = 256;
/// So many items do not wait for the others to be written.
const ITEMS_ENOUGH: usize = 64;
/// Nor do any, after so long: what holds the others up may be a lock that these do not need.
const PATIENCE: Duration = Duration::from_millis(20);
/// How many groups are under way at once.
const WRITES_MAX: usize = 4;
/// How many items may wait; beyond that a caller waits to wait.
const WAITING_MAX: usize = 10_000;

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
    pub fn new<F, Fut>(write: F) -> Self
    where
        F: Fn(Vec<T>) -> Fut + Send + 'static,
        Fut: Future<Output = Vec<Result<R, StoreError>>> + Send + 'static,
    {
        Self::with_patience(PATIENCE, write)
    }

    /// The same, where an item waits no longer than this for the others to be done.
    pub fn with_patience<F, Fut>(patience: Duration, write: F) -> Self
    where
        F: Fn(Vec<T>) -> Fut + Send + 'static,
        Fut: Future<Output = Vec<Result<R, StoreError>>> + Send + 'static,
    {
        let (sender, receiver) = mpsc::channel(WAITING_MAX);
        tokio::spawn(gather(patience, write, receiver));
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

async fn gather<T, R, F, Fut>(patience: Duration, write: F, mut receiver: mpsc::Receiver<Waiting<T, R>>)
where
    T: Send + 'static,
    R: Send + 'static,
    F: Fn(Vec<T>) -> Fut,
    Fut: Future<Output = Vec<Result<R, StoreError>>> + Send + 'static,
{
    let mut writes = JoinSet::new();
    let mut group: Vec<Waiting<T, R>> = Vec::with_capacity(ITEMS_MAX);
    // When the first of the group came.
    let mut since = Instant::now();
    let mut open = true;
    while open || !group.is_empty() {
        let late = since + patience;
        if may_write(writes.len(), group.len(), Instant::now() >= late || !open) {
            // Nobody waits for these any more, and they have not been begun.
            group.retain(|waiting| !waiting.answer.is_closed());
            if !group.is_empty() {
                let (items, answers): (Vec<_>, Vec<_>) =
                    group.drain(..).map(|waiting| (waiting.item, waiting.answer)).unzip();
                writes.spawn(answer(write(items), answers));
            }
            continue;
        }
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
            () = tokio::time::sleep_until(late), if !group.is_empty() && writes.len() < WRITES_MAX => {}
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

/// Whether a group goes out now, with so many under way.
fn may_write(under_way: usize, items: usize, late: bool) -> bool {
    items > 0 && under_way < WRITES_MAX && (under_way == 0 || items >= ITEMS_ENOUGH || late)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_item_waits_only_for_what_is_under_way_and_not_for_long() {
        assert!(!may_write(0, 0, true));
        assert!(may_write(0, 1, false), "no delay when idle");
        assert!(!may_write(1, ITEMS_ENOUGH - 1, false), "they share the next statement");
        assert!(may_write(1, ITEMS_ENOUGH, false));
        assert!(may_write(1, 1, true), "the statement under way takes its time");
        assert!(!may_write(WRITES_MAX, ITEMS_MAX, true));
    }
}
