//! Where the 202 is earned: the row and its message, durable before the answer.
//!
//! On the embedded engine they are one commit, so a crash leaves both or neither. Over two systems the row comes first:
//! a crash in between leaves a row without a message, which the reconciler queues; and if the queue does not take the
//! message, the row is marked as failed before the client reads that it will never happen.
//!
//! Requests under one `Idempotency-Key` become one transaction in the commit that stores the row
//! (`relay/store/*/idempotency_keys.rs`); the others are answered here, with that transaction.
//!
//! Next: the message reaches [`crate::relay::submit::consumer`].

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use metrics::{counter, histogram};
use pipeline::QueueError;
use pipeline::queue::sqlite::SqliteQueue;
use sha2::{Digest, Sha256};
use tracing::{error, warn};

use crate::config::Timings;
use crate::relay::request::call::DirectRequest;
use crate::relay::request::forward::Forward;
use crate::relay::state::transaction::{FailedBy, Kind, Status, Transaction, TransactionId};
use crate::relay::store::sqlite::SqliteStore;
use crate::relay::store::{Accepted, IdempotencyKey, NewTransaction, StoreError};
use crate::relay::update::guarded_store::{GuardedStore, Updated};
use crate::timestamp::Timestamp;

/// Stores accepted transactions and queues their messages.
pub struct TransactionIntake {
    mode: AcceptMode,
    guarded: Arc<GuardedStore>,
    /// Time limit of storing; after it the client's answer is that the outcome is unknown.
    timeout: Duration,
}

/// How row and message are stored.
pub enum AcceptMode {
    /// Both in one commit of the embedded engine.
    OneCommit(SqliteStore, SqliteQueue),
    /// The row, and then its message.
    RowThenMessage(RowWriter),
}

/// Stores one new row; the engine writes rows of concurrent requests together.
pub type RowWriter = Box<dyn Fn(NewTransaction) -> BoxFuture<'static, Result<Accepted, StoreError>> + Send + Sync>;

/// A client's request.
#[derive(Debug, Clone, Copy)]
pub enum AcceptRequest<'a> {
    /// `POST /relay/direct`.
    Direct(&'a DirectRequest),
    /// `POST /relay/gasless`.
    Gasless(&'a Arc<Forward>),
}

/// The answer to the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AcceptReceipt {
    /// Our id.
    pub id: TransactionId,
    /// `pending`, or the current status of an earlier request under the same key.
    pub status: Status,
    /// Time of acceptance.
    pub created_at: Timestamp,
}

/// Why a transaction was not accepted.
#[derive(Debug, thiserror::Error)]
pub enum TransactionIntakeError {
    /// Nothing was stored and nothing will happen.
    #[error("the store is unavailable; nothing was accepted")]
    Unavailable(#[source] StoreError),
    /// The queue did not take it; the row says so, and nothing will happen.
    #[error("the queue is unavailable; nothing was accepted")]
    NotQueued(#[source] QueueError),
    /// The idempotency key was used for another request.
    #[error("the idempotency key was used for another request")]
    KeyReused,
    /// This transaction has the signer's nonce; nothing was stored.
    #[error("transaction {0} has the signer's nonce")]
    NonceTaken(TransactionId),
    /// Its message is larger than the queue accepts; nothing was stored.
    #[error("the message has {size} bytes; the queue accepts {max}")]
    TooLarge {
        /// Bytes of the message.
        size: usize,
        /// Bytes that the queue accepts.
        max: usize,
    },
    /// It may have been stored; a status request for this id tells.
    #[error("it is not known whether transaction {0} was accepted")]
    OutcomeUnknown(TransactionId),
}

impl TransactionIntake {
    /// An intake over this store; `timeout` limits each request.
    pub fn new(mode: AcceptMode, guarded: Arc<GuardedStore>, timeout: Duration) -> Self {
        Self { mode, guarded, timeout }
    }

    /// By when a request that begins now must have its answer.
    pub fn deadline(&self) -> Instant {
        self.guarded.clock.instant() + self.timeout
    }

    /// The transaction of an earlier request under the same idempotency key. For requests that can pass their checks only
    /// once.
    pub async fn repeated(
        &self,
        request: AcceptRequest<'_>,
        api_key: &str,
        idempotency_key: &str,
        deadline: Instant,
    ) -> Result<Option<AcceptReceipt>, TransactionIntakeError> {
        let late = |_| Err(StoreError::Unavailable("no answer in time".into()));
        let asked =
            self.guarded.clock.timeout_at(deadline, self.guarded.store.key_owner(api_key, idempotency_key)).await;
        let Some(owner) = asked.unwrap_or_else(late).map_err(TransactionIntakeError::Unavailable)? else {
            return Ok(None);
        };
        if owner.body_sha256 != request.sha256() {
            return Err(TransactionIntakeError::KeyReused);
        }
        let row = self.guarded.clock.timeout_at(deadline, self.earlier_transaction(owner.id)).await;
        let row = row.unwrap_or(Err(TransactionIntakeError::OutcomeUnknown(owner.id)))?;
        if row.failed_by == Some(FailedBy::Intake) {
            return Ok(None);
        }
        counter!("baton_idempotent_repeats_total").increment(1);
        Ok(Some(AcceptReceipt { id: row.id, status: row.status, created_at: row.created_at }))
    }

    /// Stores a request and its message; both are durable when this returns `Ok`. A repeated request under the same
    /// idempotency key is answered with the transaction of the first one.
    pub async fn accept(
        &self,
        request: AcceptRequest<'_>,
        api_key: &str,
        idempotency_key: Option<&str>,
        deadline: Instant,
    ) -> Result<AcceptReceipt, TransactionIntakeError> {
        let clock = &self.guarded.clock;
        let started = clock.instant();
        let timings = &self.guarded.timings;
        let mut freed = false;
        loop {
            let id = TransactionId(self.guarded.random.uuid_v7());
            let row = Box::new(request.row(id, api_key, clock.now(), timings));
            let receipt = AcceptReceipt { id, status: row.status, created_at: row.created_at };
            let key = idempotency_key.map(|key| IdempotencyKey { key: key.to_owned(), body_sha256: request.sha256() });
            let message = self.guarded.message(&row);
            let (size, max) = (message.body.len(), self.guarded.queue.capabilities().body_bytes_max);
            if size > max {
                return Err(TransactionIntakeError::TooLarge { size, max });
            }
            let accepted = match &self.mode {
                AcceptMode::OneCommit(store, queue) => {
                    let stored =
                        self.guarded.clock.timeout_at(deadline, store.accept_queued(row, key, message, queue)).await;
                    accept_result(id, stored.map_err(drop))?
                }
                AcceptMode::RowThenMessage(rows) => {
                    let stored = self.guarded.clock.timeout_at(deadline, rows((*row, key))).await;
                    let accepted = accept_result(id, stored.map_err(drop))?;
                    if accepted == Accepted::Stored {
                        self.queue(id, message, deadline).await?;
                    }
                    accepted
                }
            };
            match accepted {
                Accepted::Stored => {
                    counter!("baton_accepted_total", "type" => request.kind().name()).increment(1);
                    counter!("baton_transactions_total", "status" => receipt.status.name()).increment(1);
                    histogram!("baton_accept_seconds").record(clock.elapsed(started).as_secs_f64());
                    return Ok(receipt);
                }
                Accepted::KeyReused => return Err(TransactionIntakeError::KeyReused),
                Accepted::NonceTaken(holder) => return Err(TransactionIntakeError::NonceTaken(holder)),
                Accepted::Duplicate(first) => {
                    counter!("baton_idempotent_repeats_total").increment(1);
                    let row = self.guarded.clock.timeout_at(deadline, self.earlier_transaction(first)).await;
                    let row = row.unwrap_or(Err(TransactionIntakeError::OutcomeUnknown(first)))?;
                    // The first request was answered with "will never happen": its key is free for another try.
                    if let (Some(FailedBy::Intake), Some(key), false) = (row.failed_by, idempotency_key, freed) {
                        freed = true;
                        let released = self
                            .guarded
                            .clock
                            .timeout_at(deadline, self.guarded.store.release_key(api_key, key, first))
                            .await;
                        let late = |_| Err(StoreError::Unavailable("no answer in time".into()));
                        released.unwrap_or_else(late).map_err(TransactionIntakeError::Unavailable)?;
                        continue;
                    }
                    return Ok(AcceptReceipt { id: first, status: row.status, created_at: row.created_at });
                }
            }
        }
    }

    /// The transaction of the first request under a key, marked so that it can no longer be withdrawn: over two systems
    /// the first request may still be running, and may yet find that the queue does not take its message.
    async fn earlier_transaction(&self, first: TransactionId) -> Result<Transaction, TransactionIntakeError> {
        // The transaction exists, since its key does; only its status cannot be read now.
        let unknown = || TransactionIntakeError::OutcomeUnknown(first);
        let row = self.guarded.store.get(first).await.ok().flatten().ok_or_else(unknown)?;
        if !row.is_untouched() || matches!(self.mode, AcceptMode::OneCommit(..)) {
            return Ok(row);
        }
        let now = self.guarded.clock.now();
        match self.guarded.update_from(row, |row| row.make_irrevocable(now, &self.guarded.timings)).await {
            Ok(Updated::Moved(row) | Updated::Refused(_, row)) => Ok(*row),
            Ok(Updated::Missing) | Err(_) => Err(unknown()),
        }
    }

    /// Queues the message of a stored row, or withdraws the row.
    async fn queue(
        &self,
        id: TransactionId,
        message: pipeline::Outgoing,
        deadline: Instant,
    ) -> Result<(), TransactionIntakeError> {
        // A third of the time is reserved for withdrawing the row.
        let send_until = deadline - self.timeout / 3;
        let sent = match self
            .guarded
            .clock
            .timeout_at(send_until, self.guarded.queue.send(std::slice::from_ref(&message)))
            .await
        {
            Ok(sent) => sent.into_iter().next().unwrap_or(Err(QueueError::OutcomeUnknown("no answer".into()))),
            Err(_) => Err(QueueError::OutcomeUnknown("no answer in time".into())),
        };
        let Err(failure) = sent else { return Ok(()) };
        warn!(
            transactionId = %id, action = "not_queued",
            "the queue did not take the message; withdrawing the row: {failure}"
        );
        let mut pause = Duration::from_millis(20);
        loop {
            let now = self.guarded.clock.now();
            match self.guarded.clock.timeout_at(deadline, self.guarded.update(id, |row| row.not_queued(now))).await {
                Ok(Ok(Updated::Moved(_))) => {
                    counter!("baton_accept_failures_total", "reason" => "queue").increment(1);
                    return Err(TransactionIntakeError::NotQueued(failure));
                }
                // An earlier try was saved without an answer.
                Ok(Ok(Updated::Refused(_, row))) if row.failed_by == Some(FailedBy::Intake) => {
                    counter!("baton_accept_failures_total", "reason" => "queue").increment(1);
                    return Err(TransactionIntakeError::NotQueued(failure));
                }
                // Its message arrived after all, and a consumer has it.
                Ok(Ok(Updated::Refused(..))) => return Ok(()),
                Ok(Err(away)) if away.is_transient() && self.guarded.clock.instant() + pause < deadline => {
                    self.guarded.clock.sleep(pause).await;
                    pause *= 2;
                }
                Ok(Ok(Updated::Missing) | Err(_)) | Err(_) => {
                    error!(
                        transactionId = %id, action = "accept_unknown",
                        "outcome unknown: the message was not queued and the row could not be withdrawn: {failure}"
                    );
                    counter!("baton_accept_failures_total", "reason" => "unknown").increment(1);
                    return Err(TransactionIntakeError::OutcomeUnknown(id));
                }
            }
        }
    }
}

impl AcceptRequest<'_> {
    fn row(self, id: TransactionId, api_key: &str, now: Timestamp, timings: &Timings) -> Transaction {
        let api_key = api_key.to_owned();
        match self {
            Self::Direct(request) => Transaction::accepted(id, request, api_key, now, timings),
            Self::Gasless(forward) => Transaction::accepted_gasless(id, forward, api_key, now, timings),
        }
    }

    fn kind(self) -> Kind {
        match self {
            Self::Direct(_) => Kind::Direct,
            Self::Gasless(_) => Kind::Gasless,
        }
    }

    /// Hash of the normalised request: formatting does not matter.
    fn sha256(self) -> [u8; 32] {
        match self {
            Self::Direct(request) => Sha256::digest(request.to_json()).into(),
            Self::Gasless(forward) => Sha256::digest(forward.gasless.to_json()).into(),
        }
    }
}

/// What the store's answer means for the client; `Err(())`: no answer in time.
fn accept_result(
    id: TransactionId,
    stored: Result<Result<Accepted, StoreError>, ()>,
) -> Result<Accepted, TransactionIntakeError> {
    match stored {
        Ok(Ok(accepted)) => Ok(accepted),
        Ok(Err(failure @ StoreError::OutcomeUnknown(_))) => {
            error!(transactionId = %id, action = "accept_unknown", "the store did not confirm the accept: {failure}");
            counter!("baton_accept_failures_total", "reason" => "unknown").increment(1);
            Err(TransactionIntakeError::OutcomeUnknown(id))
        }
        Ok(Err(failure)) => {
            counter!("baton_accept_failures_total", "reason" => "unavailable").increment(1);
            Err(TransactionIntakeError::Unavailable(failure))
        }
        // The write may still happen: this is not a refusal.
        Err(()) => {
            counter!("baton_accept_failures_total", "reason" => "timeout").increment(1);
            Err(TransactionIntakeError::OutcomeUnknown(id))
        }
    }
}
