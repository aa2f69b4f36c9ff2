//! New rows of concurrent requests, written together: whatever has come in while a statement was under way goes into
//! the next one. When idle a row is written at once; nothing is ever held back to make a group larger.
//!
//! The embedded engine needs none of this, its writer groups by itself. Used by [`super::intake`].

use std::sync::Arc;

use tokio::sync::{Mutex, mpsc, oneshot};
use tracing::error;

use super::store::{Accepted, NewTransaction, StoreError, TransactionStore};

/// How many rows go into one statement.
const ROWS_MAX: usize = 200;
/// How many statements are under way at once: one is written while the next is on its way.
const WRITERS: usize = 4;
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
    /// Writers on this store; they end when the last clone of this is gone and everything is written.
    pub fn new(store: Arc<dyn TransactionStore>) -> Self {
        let (sender, receiver) = mpsc::channel(WAITING_MAX);
        let receiver = Arc::new(Mutex::new(receiver));
        for _ in 0..WRITERS {
            tokio::spawn(write(Arc::clone(&store), Arc::clone(&receiver)));
        }
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

async fn write(store: Arc<dyn TransactionStore>, receiver: Arc<Mutex<mpsc::Receiver<Waiting>>>) {
    loop {
        let mut group = Vec::new();
        if receiver.lock().await.recv_many(&mut group, ROWS_MAX).await == 0 {
            return;
        }
        // Nobody waits for these any more, and they have not been begun.
        group.retain(|waiting| !waiting.answer.is_closed());
        let (rows, answers): (Vec<_>, Vec<_>) = group.into_iter().map(|waiting| (waiting.row, waiting.answer)).unzip();
        if rows.is_empty() {
            continue;
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
}
