//! Where the 202 is earned: the row and its message, durable before the answer. On the embedded engine they are one
//! commit, so a crash leaves both or neither; concurrent requests share commits in the database's writer.
//!
//! Next: the message reaches [`super::consumer`].

use std::time::{Duration, Instant};

use metrics::{counter, histogram};
use pipeline::queue::sqlite::SqliteQueue;
use sha2::{Digest, Sha256};
use tracing::error;

use super::call::DirectRequest;
use super::message::Envelope;
use super::store::sqlite::SqliteStore;
use super::store::{Accepted, IdempotencyKey, StoreError, TransactionStore};
use super::transaction::{Clocks, Kind, Status, Transaction, TransactionId};
use crate::timestamp::Timestamp;

/// Accepts transactions.
pub struct Intake {
    store: SqliteStore,
    queue: SqliteQueue,
    clocks: Clocks,
    /// How long storing may take before the client is told that the outcome is unknown.
    timeout: Duration,
}

/// What the client is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Receipt {
    /// Our id.
    pub id: TransactionId,
    /// `pending`.
    pub status: Status,
    /// When.
    pub created_at: Timestamp,
}

/// Why a transaction was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum IntakeError {
    /// Nothing was stored and nothing will happen.
    #[error("the store is unavailable; nothing was accepted")]
    Unavailable(#[source] StoreError),
    /// The idempotency key was used for another request.
    #[error("the idempotency key was used for another request")]
    KeyReused,
    /// It may have been stored: the status of this id will tell.
    #[error("it is not known whether transaction {0} was accepted")]
    OutcomeUnknown(TransactionId),
}

impl Intake {
    /// An intake on the embedded engine.
    pub fn new(store: SqliteStore, queue: SqliteQueue, clocks: Clocks, timeout: Duration) -> Self {
        Self { store, queue, clocks, timeout }
    }

    /// Stores a request and its message; when this returns, it will be done. A request that came before under the same
    /// idempotency key is answered with the transaction that it became.
    pub async fn accept(
        &self,
        request: &DirectRequest,
        api_key: &str,
        idempotency_key: Option<&str>,
    ) -> Result<Receipt, IntakeError> {
        let started = Instant::now();
        let id = TransactionId::generate();
        let row = Box::new(Transaction::accepted(id, request, api_key.to_owned(), Timestamp::now(), &self.clocks));
        let receipt = Receipt { id, status: row.status, created_at: row.created_at };
        let message = Envelope::of(&row).outgoing();
        let key = idempotency_key
            .map(|key| IdempotencyKey { key: key.to_owned(), body_sha256: Sha256::digest(&*row.request).into() });
        let stored = tokio::time::timeout(self.timeout, self.store.accept(row, key, message, &self.queue)).await;
        match stored {
            Ok(Ok(Accepted::Before(id))) => self.came_before(id).await,
            Ok(Ok(Accepted::Other)) => Err(IntakeError::KeyReused),
            Ok(Ok(Accepted::Now)) => {
                counter!("baton_accepted_total", "type" => Kind::Direct.name()).increment(1);
                counter!("baton_transactions_total", "status" => receipt.status.name()).increment(1);
                histogram!("baton_accept_seconds").record(started.elapsed().as_secs_f64());
                Ok(receipt)
            }
            Ok(Err(failure @ StoreError::OutcomeUnknown(_))) => {
                error!(transactionId = %id, action = "accept_unknown", "{failure}");
                counter!("baton_accept_failures_total", "reason" => "unknown").increment(1);
                Err(IntakeError::OutcomeUnknown(id))
            }
            Ok(Err(failure)) => {
                counter!("baton_accept_failures_total", "reason" => "unavailable").increment(1);
                Err(IntakeError::Unavailable(failure))
            }
            // The write is still queued and may yet be made: this is not a refusal.
            Err(_) => {
                counter!("baton_accept_failures_total", "reason" => "timeout").increment(1);
                Err(IntakeError::OutcomeUnknown(id))
            }
        }
    }

    async fn came_before(&self, id: TransactionId) -> Result<Receipt, IntakeError> {
        counter!("baton_idempotent_repeats_total").increment(1);
        match self.store.get(id).await {
            Ok(Some(row)) => Ok(Receipt { id, status: row.status, created_at: row.created_at }),
            // The transaction exists, since its key does; only its status is not to be had now.
            Ok(None) | Err(_) => Err(IntakeError::OutcomeUnknown(id)),
        }
    }
}
