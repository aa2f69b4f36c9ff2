//! New rows of concurrent requests, written together: whatever has come in while a statement was under way goes into
//! the next one. When idle a row is written at once. Few rows wait for the statement under way, because one for all of
//! them costs the database less than one for each; many, or a statement that takes its time, and another one starts.
//!
//! The embedded engine needs none of this, its writer groups by itself. Used by [`super::intake`].

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::error;

use super::store::{Accepted, NewTransaction, StoreError, TransactionStore};

/// How many rows are written together: as many as go into one statement.
const ROWS_MAX: usize = 256;
/// So many rows do not wait for the others to be written.
const ROWS_ENOUGH: usize = 64;
/// Nor do any, after so long: what holds the others up may be a lock that these do not need.
const PATIENCE: Duration = Duration::from_millis(5);
/// How many groups are under way at once.
const WRITES_MAX: usize = 4;
/// How many rows may wait; beyond that a request waits to wait.
const WAITING_MAX: usize = 10_000;

/// The way to the store.
#[derive(Clone)]
pub struct Coalescer {
    sender: mpsc::Sender<Waiting>,
}

struct Waiting {
    row: NewTransaction,
    answer: oneshot::Sender<Result<Accepted, StoreError>>,
}

impl Coalescer {
    /// Writes to this store; ends when the last clone of this is gone and everything is written.
    pub fn new(store: Arc<dyn TransactionStore>) -> Self {
        let (sender, receiver) = mpsc::channel(WAITING_MAX);
        tokio::spawn(gather(store, receiver));
        Self { sender }
    }

    /// Stores a row together with others. If this future is dropped the row may still be stored.
    pub async fn accept(&self, row: NewTransaction) -> Result<Accepted, StoreError> {
        let (answer, answered) = oneshot::channel();
        let sent = self.sender.send(Waiting { row, answer }).await;
        sent.map_err(|_| StoreError::Unavailable("the service is stopping".into()))?;
        answered.await.unwrap_or_else(|_| Err(StoreError::OutcomeUnknown("a writer ended without an answer".into())))
    }
}

async fn gather(store: Arc<dyn TransactionStore>, mut receiver: mpsc::Receiver<Waiting>) {
    let mut writes = JoinSet::new();
    let mut group = Vec::with_capacity(ROWS_MAX);
    // When the first of the group came.
    let mut since = Instant::now();
    let mut open = true;
    while open || !group.is_empty() {
        let late = since + PATIENCE;
        if may_write(writes.len(), group.len(), Instant::now() >= late || !open) {
            writes.spawn(write(Arc::clone(&store), std::mem::replace(&mut group, Vec::with_capacity(ROWS_MAX))));
            continue;
        }
        let room = ROWS_MAX - group.len();
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

/// Whether a group goes out now, with so many under way.
fn may_write(under_way: usize, rows: usize, late: bool) -> bool {
    rows > 0 && under_way < WRITES_MAX && (under_way == 0 || rows >= ROWS_ENOUGH || late)
}

async fn write(store: Arc<dyn TransactionStore>, mut group: Vec<Waiting>) {
    // Nobody waits for these any more, and they have not been begun.
    group.retain(|waiting| !waiting.answer.is_closed());
    let (rows, answers): (Vec<_>, Vec<_>) = group.into_iter().map(|waiting| (waiting.row, waiting.answer)).unzip();
    if rows.is_empty() {
        return;
    }
    let results = store.accept(&rows).await;
    if results.len() != answers.len() {
        error!(action = "store_miscounted", "{} answers for {} rows", results.len(), answers.len());
    }
    for (answer, result) in answers.into_iter().zip(results) {
        // A client that has gone away does not mind.
        drop(answer.send(result));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_waits_only_for_what_is_under_way_and_not_for_long() {
        assert!(!may_write(0, 0, true));
        assert!(may_write(0, 1, false), "no delay when idle");
        assert!(!may_write(1, ROWS_ENOUGH - 1, false), "they share the next statement");
        assert!(may_write(1, ROWS_ENOUGH, false));
        assert!(may_write(1, 1, true), "the statement under way takes its time");
        assert!(!may_write(WRITES_MAX, ROWS_MAX, true));
    }
}
