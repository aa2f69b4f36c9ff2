//! The nonce order of one signer's gasless transactions: the forwarder executes them only in the order of their nonces, so a
//! transaction is submitted only once its predecessor cannot be overtaken any more.
//!
//! That is so when the chain has executed the predecessor, or when a relayer has given it a nonce of the relayer's own
//! account: then the successor goes to the same relayer, whose nonces the chain keeps in order. Rows, relayer and chain are
//! read anew each time, so a crash loses nothing. See `docs/adr/0009-one-signers-transactions-in-order.md`.

use std::sync::Arc;
use std::time::Duration;

use alloy_primitives::U256;
use tracing::debug;

use crate::errors::chain as causes;
use crate::relay::chain::Chain;
use crate::relay::relayer::client::describe;
use crate::relay::relayer::pool::Pool;
use crate::relay::request::forward::Forward;
use crate::relay::state::transaction::{FailedBy, RelayerUrl, Status, Transaction};
use crate::relay::store::StoreError;
use crate::relay::update::guarded_store::{GuardedStore, Origin};

/// Decides when a gasless transaction may be submitted.
pub struct NonceOrder {
    guarded: Arc<GuardedStore>,
    pool: Arc<Pool>,
    chain: Option<Arc<Chain>>,
    question_timeout: Duration,
}

/// Decision about one transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Turn {
    /// Submit it; to this relayer, if it is set.
    Now(Option<RelayerUrl>),
    /// Wait this long, for this reason.
    Later(Duration, String),
    /// Fail it, for this reason: its turn never comes.
    Never(String),
}

/// Shortest pause before a waiting transaction is looked at again.
const WAIT_MIN: Duration = Duration::from_millis(200);
/// Longest pause before a waiting transaction is looked at again.
const WAIT_MAX: Duration = Duration::from_secs(10);

impl NonceOrder {
    /// A nonce order. Without a chain, only relayers can report that a predecessor is done.
    pub fn new(
        guarded: Arc<GuardedStore>,
        pool: Arc<Pool>,
        chain: Option<Arc<Chain>>,
        question_timeout: Duration,
    ) -> Self {
        Self { guarded, pool, chain, question_timeout }
    }

    /// Whether it is the turn of this transaction, which has not been submitted.
    pub async fn turn(&self, row: &Transaction) -> Result<Turn, StoreError> {
        let Some(forward) = &row.forward else { return Ok(Turn::Now(None)) };
        let (signer, nonce) = (forward.signer(), forward.nonce());
        // It failed, another transaction took its nonce, and then an operator replayed it.
        match self.guarded.store.nonce_holder(signer, nonce).await? {
            Some(holder) if holder.id != row.id => {
                return Ok(Turn::Never(format!("its nonce {nonce} was given to transaction {}", holder.id)));
            }
            _ => {}
        }
        let Some(before) = nonce.checked_sub(1) else { return Ok(Turn::Now(None)) };
        // No predecessor here: its nonce was the forwarder's next when it was accepted.
        let Some(previous) = self.guarded.store.nonce_holder(signer, before).await? else { return Ok(Turn::Now(None)) };
        match previous.status {
            Status::Confirmed | Status::Success => Ok(Turn::Now(None)),
            Status::Failed => Ok(self.after_failed(forward, &previous).await),
            Status::Pending => Ok(self.later(&previous, "waits to be sent")),
            Status::Submitted => self.after_submitted(row, &previous).await,
        }
    }

    /// Whether the chain has executed all of the signer's earlier transactions.
    pub async fn is_next_on_chain(&self, row: &Transaction) -> bool {
        let (Some(forward), Some(chain)) = (&row.forward, &self.chain) else { return false };
        chain.nonce(forward.signer()).await.is_ok_and(|count| count >= U256::from(forward.nonce()))
    }

    /// Why a transaction waits that no other can be sent before: the request with the nonce before its own was never
    /// accepted.
    pub async fn missing_predecessor(&self, row: &Transaction) -> Result<Option<String>, StoreError> {
        let Some(forward) = &row.forward else { return Ok(None) };
        let Some(before) = forward.nonce().checked_sub(1) else { return Ok(None) };
        let previous = self.guarded.store.nonce_holder(forward.signer(), before).await?;
        Ok(previous
            .filter(was_never_accepted)
            .map(|_| format!("it waited for its signer's nonce {before}, which no accepted transaction has")))
    }

    /// The predecessor failed here; the chain knows whether another sender had it executed.
    async fn after_failed(&self, forward: &Forward, previous: &Transaction) -> Turn {
        // Its client read that it will never happen and may send another under the same nonce.
        let never = |previous: &Transaction| match was_never_accepted(previous) {
            true => self.later(previous, "was not accepted; another with its nonce is awaited"),
            false => never(previous),
        };
        let Some(chain) = &self.chain else { return never(previous) };
        match chain.nonce(forward.signer()).await {
            Ok(count) if count >= U256::from(forward.nonce()) => Turn::Now(None),
            Ok(_) => never(previous),
            Err(error) => self.later(
                previous,
                &format!("failed, and the chain cannot be asked whether it was executed: {}", causes(&error)),
            ),
        }
    }

    /// A relayer has the predecessor: this transaction follows there once that one has a nonce.
    async fn after_submitted(&self, row: &Transaction, previous: &Transaction) -> Result<Turn, StoreError> {
        let Some(binding) = &previous.binding else { return Ok(self.later(previous, "is being sent")) };
        if let Some(client) = self.pool.ask_one(&binding.relayer) {
            if binding.nonce.is_some() && binding.forgotten_since.is_none() {
                return Ok(Turn::Now(Some(binding.relayer.clone())));
            }
            match client.transaction(&binding.tx_id, self.question_timeout).await {
                Ok(Some(report)) => {
                    let has_nonce = report.nonce.is_some();
                    self.guarded.apply(previous.id, &report, Origin::Follow).await?;
                    if has_nonce && !report.status.is_over() {
                        return Ok(Turn::Now(Some(binding.relayer.clone())));
                    }
                }
                Ok(None) => {}
                Err(failure) => {
                    debug!(
                        transactionId = %previous.id,
                        "asking its relayer for the nonce failed: {}",
                        describe(&failure)
                    )
                }
            }
        }
        if self.is_next_on_chain(row).await {
            return Ok(Turn::Now(None));
        }
        Ok(self.later(previous, "has no nonce at its relayer yet"))
    }

    /// Waits; the longer the predecessor has not moved, the longer the pause.
    fn later(&self, previous: &Transaction, why: &str) -> Turn {
        let unmoved = self.guarded.clock.now().since(previous.updated_at);
        let pause = (unmoved / 4).clamp(WAIT_MIN, WAIT_MAX);
        Turn::Later(pause, format!("transaction {}, which comes before it, {why}", previous.id))
    }
}

/// Whether its client was answered with 503.
fn was_never_accepted(row: &Transaction) -> bool {
    row.status == Status::Failed && row.failed_by == Some(FailedBy::Intake)
}

fn never(previous: &Transaction) -> Turn {
    let reason = previous.error_message.as_deref().unwrap_or("no reason given");
    Turn::Never(format!("transaction {}, which its signer sent before it, failed: {reason}", previous.id))
}
