//! Whose turn it is among the gasless transactions of one signer: the forwarder executes them in the order of their
//! nonces alone, so one goes out only when the one before it cannot be overtaken any more.
//!
//! That is so when the chain has executed it, or when a relayer has given it a nonce of its own: then the next goes to
//! the same relayer, whose nonces the chain keeps in order. All of it is read from the rows, the relayer and the chain
//! each time, so there is nothing that a crash could lose. See `docs/adr/0009-one-signers-transactions-in-order.md`.

use std::sync::Arc;
use std::time::Duration;

use alloy_primitives::U256;
use tracing::debug;

use super::book::{Book, Origin};
use super::chain::Chain;
use super::forward_request::Forward;
use super::relayer::client::describe;
use super::relayer::pool::Pool;
use super::store::StoreError;
use super::transaction::{RelayerUrl, Status, Transaction};
use crate::errors::chain as causes;
use crate::timestamp::Timestamp;

/// Keeps the order.
pub struct Order {
    book: Arc<Book>,
    pool: Arc<Pool>,
    chain: Option<Arc<Chain>>,
    question_timeout: Duration,
}

/// What a transaction may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Turn {
    /// Be sent: to this relayer, if it must be a certain one.
    Now(Option<RelayerUrl>),
    /// Wait, for this reason, and be looked at again after this long.
    Later(Duration, String),
    /// Fail, for this reason: its turn never comes.
    Never(String),
}

/// How soon and how late a waiting transaction is looked at again, if nobody wakes it.
const WAIT_MIN: Duration = Duration::from_millis(200);
const WAIT_MAX: Duration = Duration::from_secs(10);

impl Order {
    /// Keeps the order over these. Without a chain, only relayers can say that a transaction is done with.
    pub fn new(book: Arc<Book>, pool: Arc<Pool>, chain: Option<Arc<Chain>>, question_timeout: Duration) -> Self {
        Self { book, pool, chain, question_timeout }
    }

    /// Whether it is this transaction's turn, which nobody has sent.
    pub async fn turn(&self, row: &Transaction) -> Result<Turn, StoreError> {
        let Some(forward) = &row.forward else { return Ok(Turn::Now(None)) };
        let (signer, nonce) = (forward.signer(), forward.nonce());
        // It failed, its nonce was given to another, and then an operator replayed it.
        match self.book.store.nonce_holder(signer, nonce).await? {
            Some(holder) if holder.id != row.id => {
                return Ok(Turn::Never(format!("its nonce {nonce} was given to transaction {}", holder.id)));
            }
            _ => {}
        }
        let Some(before) = nonce.checked_sub(1) else { return Ok(Turn::Now(None)) };
        // None: it was the forwarder's next when it was accepted.
        let Some(previous) = self.book.store.nonce_holder(signer, before).await? else { return Ok(Turn::Now(None)) };
        match previous.status {
            Status::Confirmed | Status::Success => Ok(Turn::Now(None)),
            Status::Failed => Ok(self.after_failed(forward, &previous).await),
            Status::Pending => Ok(later(&previous, "waits to be sent")),
            Status::Submitted => self.after_submitted(row, &previous).await,
        }
    }

    /// Whether the chain has executed all that come before it.
    pub async fn is_next_on_chain(&self, row: &Transaction) -> bool {
        let (Some(forward), Some(chain)) = (&row.forward, &self.chain) else { return false };
        chain.nonce(forward.signer()).await.is_ok_and(|count| count >= U256::from(forward.nonce()))
    }

    /// The one before it will not be executed, unless somebody else has done it.
    async fn after_failed(&self, forward: &Forward, previous: &Transaction) -> Turn {
        let Some(chain) = &self.chain else { return never(previous) };
        match chain.nonce(forward.signer()).await {
            Ok(count) if count >= U256::from(forward.nonce()) => Turn::Now(None),
            Ok(_) => never(previous),
            Err(error) => {
                later(previous, &format!("failed, and whether it was executed is not known: {}", causes(&error)))
            }
        }
    }

    /// A relayer has the one before it: this one follows there once that one has its place.
    async fn after_submitted(&self, row: &Transaction, previous: &Transaction) -> Result<Turn, StoreError> {
        let Some(binding) = &previous.binding else { return Ok(later(previous, "is being sent")) };
        if let Some(client) = self.pool.ask_one(&binding.relayer) {
            if binding.nonce.is_some() && binding.forgotten_since.is_none() {
                return Ok(Turn::Now(Some(binding.relayer.clone())));
            }
            match client.transaction(&binding.tx_id, self.question_timeout).await {
                Ok(Some(report)) => {
                    let placed = report.nonce.is_some();
                    self.book.apply(previous.id, &report, Origin::Follow).await?;
                    if placed && !report.status.is_over() {
                        return Ok(Turn::Now(Some(binding.relayer.clone())));
                    }
                }
                Ok(None) => {}
                Err(failure) => debug!(transactionId = %previous.id, "not asked for its nonce: {}", describe(&failure)),
            }
        }
        if self.is_next_on_chain(row).await {
            return Ok(Turn::Now(None));
        }
        Ok(later(previous, "has no place at its relayer yet"))
    }
}

/// The longer the one before it stands still, the longer the pause.
fn later(previous: &Transaction, why: &str) -> Turn {
    let stood_still = Timestamp::now().since(previous.updated_at);
    let pause = (stood_still / 4).clamp(WAIT_MIN, WAIT_MAX);
    Turn::Later(pause, format!("transaction {}, which comes before it, {why}", previous.id))
}

fn never(previous: &Transaction) -> Turn {
    let reason = previous.error_message.as_deref().unwrap_or("no reason given");
    Turn::Never(format!("transaction {}, which its signer sent before it, failed: {reason}", previous.id))
}
