//! Compares a relayer's report about a transaction with the chain: reads the account's transactions, and acts on what
//! they prove ([`super::chain_proof`]). Executed → `confirmed`, or `failed` by its receipt, whatever the relayer says.
//! Nonce lost to another call for good → another relayer takes it. Neither → unknown outcome, looked at again,
//! never sent again.
//!
//! [`super::chain_owners`] tells equal calls apart and looks for claims of unknown outcome.
//!
//! Only the reconciler asks the chain: accepting, submitting and webhooks never wait for it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use alloy_primitives::{Address, B256};
use metrics::counter;
use serde_json::json;
use tracing::{error, info, warn};

use crate::mutations::Mutation;
use crate::relay::chain::ChainError;
use crate::relay::chain::account::{AccountReader, AccountTransaction, Receipt};
use crate::relay::reconcile::chain_owners::Nonces;
use crate::relay::reconcile::chain_proof::{ChainFinding, judge};
use crate::relay::relayer::pool::Pool;
use crate::relay::relayer::routing::ChainId;
use crate::relay::state::apply_report::{Report, ReportedStatus, Source, Verdict};
use crate::relay::state::transaction::{MoveRefused, RelayerTxId, RelayerUrl, Step, Transaction, TransactionId};
use crate::relay::store::{Saved, StoreError};
use crate::relay::update::guarded_store::{GuardedStore, Origin, Updated};
use crate::timestamp::Timestamp;

/// Looks transactions up on the chain.
pub struct ChainCheck {
    pub(super) reader: Arc<AccountReader>,
    pub(super) guarded: Arc<GuardedStore>,
    pub(super) pool: Arc<Pool>,
    pub(super) question_timeout: Duration,
    /// When a row was claimed or bound, and the nonce above all that its submission can have: see
    /// [`ChainCheck::ownerless_nonce`].
    pub(super) ceilings: Mutex<HashMap<(TransactionId, Nonces), (Timestamp, u64)>>,
}

/// What a look at the chain led to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ChainCheckResult {
    /// The row has moved.
    Settled,
    /// The chain does not decide it yet, for this reason.
    Open(String),
    /// The chain answered and does not have the call in any block; why that decides nothing yet.
    Absent(String),
}

/// What a row's relayer says of it now.
#[derive(Debug, Clone, Copy)]
pub enum RelayerStatement<'a> {
    /// It reports this record.
    Says(&'a Report),
    /// It knows no such transaction.
    Forgotten,
    /// It did not answer.
    Silent,
}

impl<'a> RelayerStatement<'a> {
    fn report(self) -> Option<&'a Report> {
        if let Self::Says(report) = self { Some(report) } else { None }
    }
}

/// The clocks of block producers, relayers and our own may differ by this much.
pub(super) const CLOCK_MARGIN: Duration = Duration::from_secs(120);
/// A node may be this far behind the relayer's before its silence about a confirmed transaction is an alarm.
const NODE_BEHIND: Duration = Duration::from_secs(60);
/// Shortest and longest pause between two looks at one row.
const PAUSE_MIN: Duration = Duration::from_secs(2);
const PAUSE_MAX: Duration = Duration::from_secs(60);

impl ChainCheck {
    /// Looks up with this reader.
    pub fn new(
        reader: Arc<AccountReader>,
        guarded: Arc<GuardedStore>,
        pool: Arc<Pool>,
        question_timeout: Duration,
    ) -> Self {
        Self { reader, guarded, pool, question_timeout, ceilings: Mutex::default() }
    }

    /// Whether a row without a final report is old enough, and far enough along, to be on the chain unnoticed.
    pub fn is_overdue(&self, row: &Transaction) -> bool {
        let now = self.guarded.clock.now();
        row.binding.as_ref().is_some_and(|binding| {
            // A row bound to the chain's own transaction whose process died before it stored the end.
            let found_on_chain = binding.tx_id.0.starts_with("chain:");
            let signed = binding.nonce.is_some() || row.hash.is_some() || found_on_chain;
            signed && now.since(binding.at) >= self.guarded.timings.submitted_check * 2
        })
    }

    /// Whether a relayer has had the row for so long that, if it gives no answer, every webhook about a signature may have been
    /// lost.
    pub fn is_old(&self, row: &Transaction) -> bool {
        let clock = &self.guarded.clock;
        let bound_at = row.binding.as_ref().map(|binding| binding.at);
        bound_at.is_some_and(|at| clock.passed_since(at) >= self.guarded.timings.operator_after)
    }

    /// Settles a bound row as far as the chain allows.
    pub async fn settle(
        &self,
        row: &Transaction,
        statement: RelayerStatement<'_>,
    ) -> Result<ChainCheckResult, StoreError> {
        let Some(binding) = &row.binding else { return Ok(ChainCheckResult::Settled) };
        let said = statement.report();
        let looked = match self.look(row, statement).await {
            Ok(looked) => looked,
            Err(ChainCheckError::Store(failure)) => return Err(failure),
            Err(ChainCheckError::Chain(failure)) => {
                ChainCheckResult::Open(format!("the chain gives no answer: {failure}"))
            }
        };
        let (ChainCheckResult::Open(why) | ChainCheckResult::Absent(why)) = &looked else { return Ok(looked) };
        counter!("baton_chain_checks_total", "finding" => "open").increment(1);
        let now = self.guarded.clock.now();
        let pause = (now.since(row.updated_at) / 4).clamp(PAUSE_MIN, PAUSE_MAX);
        let said_over = said.is_some_and(|said| said.status.is_over());
        let confirmed = said.is_some_and(|said| said.status == ReportedStatus::Confirmed);
        let unknown = said_over && (!confirmed || now.since(row.updated_at) >= NODE_BEHIND);
        if unknown && binding.forgotten_since.is_none() {
            warn!(transactionId = %row.id, action = "outcome_unknown", "the chain does not tell what became of it: {why}");
        }
        // Without an answer of the chain, or while the call is in a block, the relayer may be right.
        if unknown && confirmed && matches!(looked, ChainCheckResult::Absent(_)) {
            self.unfounded_confirmation(row).await?;
        }
        let decide = |now_row: &Transaction| match (&now_row.binding, unknown) {
            (Some(held), _) if held.tx_id != binding.tx_id => Err(MOVED),
            (None, _) => Err(MOVED),
            (Some(_), true) => now_row.unresolved(why, now + pause, now),
            (Some(_), false) => now_row.check_later(now + pause, now),
        };
        self.guarded.update(row.id, decide).await?;
        Ok(looked)
    }

    /// Confirms a row that its relayer has called confirmed, by the hash that the relayer gave. Returns whether the row
    /// is settled; if not, the relayer must be asked.
    pub async fn confirm(&self, row: &Transaction, said: &Report) -> Result<bool, StoreError> {
        if said.status != ReportedStatus::Confirmed {
            return Ok(false);
        }
        match self.by_hash(row, Some(said)).await {
            Ok(looked) => Ok(looked == Some(ChainCheckResult::Settled)),
            Err(ChainCheckError::Store(failure)) => Err(failure),
            Err(ChainCheckError::Chain(_)) => Ok(false),
        }
    }

    /// Looks a row up by its hash; `None` if the chain has no transaction of this row under it.
    async fn by_hash(
        &self,
        row: &Transaction,
        said: Option<&Report>,
    ) -> Result<Option<ChainCheckResult>, ChainCheckError> {
        let Some(binding) = &row.binding else { return Ok(None) };
        let hash = said.and_then(|said| said.hash.as_deref()).or(row.hash.as_deref());
        let Some(hash) = hash.and_then(|hash| hash.parse::<B256>().ok()) else { return Ok(None) };
        let Some((mined, from, receipt)) = self.reader.mined(hash).await? else { return Ok(None) };
        // A relayer may show another transaction's hash: the call, its account and its owner must fit.
        let foreign = self.address(row, &binding.relayer).await.is_some_and(|address| address != from);
        if foreign || !mined.makes(&row.call) || self.is_taken(row, &binding.relayer, &mined).await? {
            return Ok(None);
        }
        let says = said.map(|said| said.status);
        let agreed = says == Some(if receipt.succeeded { ReportedStatus::Confirmed } else { ReportedStatus::Failed });
        // A relayer that calls it confirmed has waited for its confirmations. One that calls it failed has not, and in
        // another block the call may succeed.
        let believed = receipt.succeeded || Mutation::RevertsAtOnce.is_on();
        if (agreed && believed) || self.reader.is_final(receipt.block, self.reader.head().await?) {
            return self.executed(row, &mined, from, receipt, said.filter(|_| agreed)).await.map(Some);
        }
        Ok(Some(ChainCheckResult::Open("it is in a block that is not final yet".to_owned())))
    }

    async fn look(
        &self,
        row: &Transaction,
        statement: RelayerStatement<'_>,
    ) -> Result<ChainCheckResult, ChainCheckError> {
        let Some(binding) = &row.binding else { return Ok(ChainCheckResult::Settled) };
        let said = statement.report().filter(|said| said.tx_id == binding.tx_id);
        if let Some(looked) = self.by_hash(row, said).await? {
            return Ok(looked);
        }
        let confirmed = said.is_some_and(|said| said.status == ReportedStatus::Confirmed);
        let Some(address) = self.address(row, &binding.relayer).await else {
            return Ok(ChainCheckResult::Open("the relayer's address is not known".to_owned()));
        };
        let history = self.reader.history(address, since(row, said)).await?;
        let nonce = said.and_then(|said| said.nonce).or(binding.nonce);
        let equal = self.equal_rows(row, &binding.relayer, &history).await?;
        if let Some(why) = self.is_elsewhere(&binding.relayer).await? {
            return Ok(ChainCheckResult::Open(why));
        }
        let finding = judge(&row.call, nonce, &history, &equal);
        if !matches!(finding, ChainFinding::Executed(_)) && self.is_unasked(&binding.relayer) {
            return Ok(ChainCheckResult::Open(UNASKED.to_owned()));
        }
        match finding {
            ChainFinding::Executed(mined) => {
                if !self.reader.is_final(mined.block, history.head) {
                    return Ok(ChainCheckResult::Open("it is in a block that is not final yet".to_owned()));
                }
                let Some(receipt) = self.reader.receipt(mined.hash).await? else {
                    return Ok(ChainCheckResult::Open("its receipt is missing".to_owned()));
                };
                self.executed(row, mined, address, receipt, None).await
            }
            ChainFinding::NonceLost(other) => {
                let why = format!("another call ({}) used its nonce {}", other.hash, other.nonce);
                // A relayer may have signed the call under a second nonce that waits to be mined.
                let gives_up = async || match self.ownerless_nonce(row, &binding.relayer, &history, None).await? {
                    Ok(()) => self.not_executed(row, &why).await,
                    Err(open) => Ok(ChainCheckResult::Open(open)),
                };
                match statement {
                    // The relayer's word that a no-op, or another call, took its place is now proven. So is its word that an
                    // imported transaction failed, which Baton does not send again.
                    RelayerStatement::Says(said)
                        if (confirmed && !row.call.is_still(said))
                            || (row.imported && said.status.is_over() && !confirmed) =>
                    {
                        if let Err(open) = self.ownerless_nonce(row, &binding.relayer, &history, None).await? {
                            return Ok(ChainCheckResult::Open(open));
                        }
                        let mut proven = said.clone();
                        (proven.hash, proven.block_number) = (Some(other.hash.to_string()), Some(other.block));
                        self.ended_as(row, &proven).await
                    }
                    RelayerStatement::Says(said) if said.status.is_over() => {
                        if confirmed {
                            self.unfounded_confirmation(row).await?;
                        }
                        gives_up().await
                    }
                    RelayerStatement::Forgotten if self.is_long_forgotten(row) => gives_up().await,
                    _ => Ok(ChainCheckResult::Open(
                        "another call used its nonce, but the relayer has not given it up".to_owned(),
                    )),
                }
            }
            ChainFinding::Contested => Ok(ChainCheckResult::Open(CONTESTED.to_owned())),
            ChainFinding::Open => Ok(ChainCheckResult::Absent("its nonce is not used for good yet".to_owned())),
            // A record that the relayer lost, or canceled, before it signed it. Nothing that waits to be mined may be this
            // call.
            ChainFinding::Unproven(why) => {
                let (now, timings) = (self.guarded.clock.now(), &self.guarded.timings);
                let gone = match statement {
                    RelayerStatement::Forgotten if self.is_long_forgotten(row) => "the relayer has lost it",
                    RelayerStatement::Says(said) if row.is_cancel_certain(said, now, timings) => {
                        "the relayer has canceled it unsigned"
                    }
                    // Its statement is believed unless the chain has the call, or may have it in a pool. Rows behind a
                    // nonce gap must not wait for it.
                    RelayerStatement::Says(said) if row.failed_unsigned(said) || row.ended_unsigned(said) => {
                        if let Err(open) = self.ownerless_in_pool(row, &binding.relayer, &history).await? {
                            return Ok(ChainCheckResult::Open(open));
                        }
                        if row.ended_unsigned(said) {
                            return self.ended_as(row, said).await;
                        }
                        let reason = said.reason.as_deref().unwrap_or("no reason given");
                        let why = format!("the relayer failed it unsigned ({reason}) and the chain does not have it");
                        return self.not_executed(row, &why).await;
                    }
                    _ => return Ok(ChainCheckResult::Absent(why.to_owned())),
                };
                if nonce.is_some() || !row.is_unsigned() {
                    return Ok(ChainCheckResult::Open(why.to_owned()));
                }
                match self.ownerless_nonce(row, &binding.relayer, &history, None).await? {
                    Ok(()) => self.not_executed(row, &format!("{gone} and the chain does not have it")).await,
                    Err(why) => Ok(ChainCheckResult::Open(why)),
                }
            }
        }
    }

    /// Whether the relayer has not known it for longer than a record can stay unsigned: a relayer gives an unsigned record up
    /// after two minutes. One that gives no answer may know it.
    pub(super) fn is_long_forgotten(&self, row: &Transaction) -> bool {
        let since = row.binding.as_ref().and_then(|binding| binding.forgotten_since);
        let since = since.filter(|_| !row.is_only_silent());
        let clock = &self.guarded.clock;
        since.is_some_and(|since| clock.passed_since(since) >= self.guarded.timings.unproven_wait)
    }

    /// Why the chain proves nothing about this relayer's transactions: relayer and chain say which chain they are on, and
    /// differ. The same account has another history there.
    pub(super) async fn is_elsewhere(&self, relayer: &RelayerUrl) -> Result<Option<String>, ChainError> {
        let Some(ChainId::Known(told)) = self.pool.chain_id_of(relayer) else { return Ok(None) };
        let asked = self.reader.chain_id().await?;
        Ok((told != asked)
            .then(|| format!("the relayer is on the chain with id {told}, and RPC_URL on that with {asked}")))
    }

    /// Whether this relayer has yet to say which chain it is on, as after each start. Until then the chain may show that
    /// something was executed, and nothing else: it may be another one.
    pub(super) fn is_unasked(&self, relayer: &RelayerUrl) -> bool {
        self.pool.chain_id_of(relayer) == Some(ChainId::Unasked)
    }

    pub(super) async fn address(&self, row: &Transaction, relayer: &RelayerUrl) -> Option<Address> {
        if let Some(known) = bound_account(row) {
            return Some(known);
        }
        self.pool.ask_one(relayer)?.address(self.question_timeout).await
    }

    async fn executed(
        &self,
        row: &Transaction,
        mined: &AccountTransaction,
        from: Address,
        receipt: Receipt,
        agrees: Option<&Report>,
    ) -> Result<ChainCheckResult, ChainCheckError> {
        let Some(binding) = &row.binding else { return Ok(ChainCheckResult::Settled) };
        let named = match binding.nonce {
            Some(nonce) => nonce == mined.nonce,
            None => row.hash == Some(mined.hash.to_string()),
        };
        let on_chain = mined.tx_id();
        let tx_id = if named { binding.tx_id.clone() } else { on_chain.clone() };
        // Equal rows may find the same transaction, at relayers whose URLs differ too: the store lets only one of them
        // have it.
        let owned = match named {
            true => self.guarded.store.take_record(&on_chain, row.id).await?,
            false => self.own(row, &on_chain, mined).await?,
        };
        if !owned {
            return Ok(ChainCheckResult::Open(CONTESTED.to_owned()));
        }
        let mut report = self.report(row, &tx_id, mined, from, receipt).await;
        // The record of a relayer that is right is the result in confirm mode.
        if let Some(said) = agrees {
            (report.raw, report.confirmed_at) = (said.raw.clone(), said.confirmed_at);
        }
        let finding = if receipt.succeeded { "executed" } else { "reverted" };
        counter!("baton_chain_checks_total", "finding" => finding).increment(1);
        info!(transactionId = %row.id, action = "chain_decided", hash = %mined.hash, block = receipt.block, "the chain says {finding}");
        self.guarded.apply(row.id, &report, Origin::Chain).await?;
        Ok(ChainCheckResult::Settled)
    }

    /// Binds the row to a transaction whose nonce its relayer did not name, and makes it the only owner.
    async fn own(
        &self,
        row: &Transaction,
        tx_id: &RelayerTxId,
        mined: &AccountTransaction,
    ) -> Result<bool, StoreError> {
        let Some(binding) = &row.binding else { return Ok(false) };
        let now = self.guarded.clock.now();
        let decide = |now_row: &Transaction| match &now_row.binding {
            Some(held) if held.tx_id == binding.tx_id => now_row.found_on_chain(tx_id, mined.nonce, now),
            _ => Err(MOVED),
        };
        match self.guarded.update(row.id, decide).await {
            Ok(Updated::Moved(_)) => Ok(true),
            Ok(Updated::Refused(..) | Updated::Missing) | Err(StoreError::Conflict { .. }) => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    /// A mined transaction as a report, so that it takes the same way as every other.
    pub async fn report(
        &self,
        row: &Transaction,
        tx_id: &RelayerTxId,
        mined: &AccountTransaction,
        from: Address,
        receipt: Receipt,
    ) -> Report {
        let reason = if receipt.succeeded {
            None
        } else {
            let reason = self.reader.revert_reason(from, &row.call, receipt.block).await;
            let reason = reason.as_deref().unwrap_or("the node does not tell why");
            Some(format!("reverted on the chain: {}", reason.strip_prefix("it reverts: ").unwrap_or(reason)))
        };
        let status = if receipt.succeeded { ReportedStatus::Confirmed } else { ReportedStatus::Failed };
        Report {
            tx_id: tx_id.clone(),
            status,
            reason: reason.clone(),
            hash: Some(mined.hash.to_string()),
            nonce: Some(mined.nonce),
            from: Some(from.to_checksum(None)),
            to: mined.to.map(|to| to.to_checksum(None)),
            value: Some(mined.value),
            data: Some(mined.data.clone()),
            gas_limit: None,
            created_at: None,
            confirmed_at: None,
            block_number: Some(receipt.block),
            raw: json!({
                "id": tx_id.0, "status": status.name(), "status_reason": reason, "hash": mined.hash.to_string(),
                "nonce": mined.nonce, "from": from.to_checksum(None), "block_number": receipt.block, "source": "chain",
            }),
        }
    }

    /// The receipt of a transaction that was found in a block.
    pub async fn receipt(&self, mined: &AccountTransaction) -> Option<Receipt> {
        self.reader.receipt(mined.hash).await.ok().flatten()
    }

    /// Raises the alarm about a row that its relayer calls confirmed and the chain does not have, once. The timeline
    /// remembers it, and has room for it however full it is.
    async fn unfounded_confirmation(&self, row: &Transaction) -> Result<(), StoreError> {
        let step = Step::new("unfounded-confirmation", "the relayer says confirmed, and the chain does not have it");
        let judged = row.binding.as_ref().map(|binding| &binding.tx_id);
        loop {
            // Saved with the version from before the timeline was read: of two that look at once, one starts over and finds it.
            let Some(row) = self.guarded.store.get(row.id).await? else { return Ok(()) };
            let timeline = self.guarded.store.timeline(row.id).await?;
            let moved_on = row.status.is_final() || row.binding.as_ref().map(|binding| &binding.tx_id) != judged;
            if moved_on || timeline.iter().any(|entry| entry.action == step.action) {
                return Ok(());
            }
            let noted = row.noted(step.clone(), self.guarded.clock.now());
            if self.guarded.save(&row, &noted).await? != Saved::Stale {
                counter!("baton_unfounded_confirmations_total").increment(1);
                error!(transactionId = %row.id, action = "unfounded_confirmation", "{}", step.detail);
                return Ok(());
            }
        }
    }

    /// Ends the row as its relayer says: the chain does not speak against it.
    async fn ended_as(&self, row: &Transaction, said: &Report) -> Result<ChainCheckResult, ChainCheckError> {
        let (now, mode, timings) = (self.guarded.clock.now(), self.guarded.mode, &self.guarded.timings);
        let decide = |now_row: &Transaction| {
            unmoved(row, now_row)?;
            match now_row.report(said, Source::Asked, mode, now, timings) {
                Verdict::Move(moved) => Ok(*moved),
                Verdict::Reroute(..) | Verdict::DoubleSend(_) | Verdict::Contradicted(_) | Verdict::Ignore(_) => {
                    Err(MOVED)
                }
            }
        };
        self.guarded.update(row.id, decide).await?;
        Ok(ChainCheckResult::Settled)
    }

    async fn not_executed(&self, row: &Transaction, why: &str) -> Result<ChainCheckResult, ChainCheckError> {
        let (now, timings) = (self.guarded.clock.now(), &self.guarded.timings);
        let decide = |now_row: &Transaction| {
            unmoved(row, now_row)?;
            now_row.not_executed(why, now, timings)
        };
        match self.guarded.update(row.id, decide).await? {
            Updated::Moved(moved) => {
                counter!("baton_chain_checks_total", "finding" => "nonce-lost").increment(1);
                counter!("baton_reroutes_total").increment(1);
                info!(transactionId = %row.id, action = "chain_decided", "{why}; re-routed");
                self.guarded.publish_again(&moved, moved.reroute_pause()).await;
                Ok(ChainCheckResult::Settled)
            }
            Updated::Refused(MOVED, _) | Updated::Missing => Ok(ChainCheckResult::Settled),
            Updated::Refused(refused, _) => Ok(ChainCheckResult::Open(refused.to_string())),
        }
    }
}

/// Refuses a row about which more is known than when it was judged. The chain is asked for seconds, and meanwhile a webhook
/// may show that the relayer has signed it after all: what was judged says nothing about that.
fn unmoved(judged: &Transaction, now_row: &Transaction) -> Result<(), MoveRefused> {
    let known = |row: &Transaction| (row.binding.clone(), row.hash.clone(), row.relayer_says.clone());
    if known(judged) == known(now_row) { Ok(()) } else { Err(MOVED) }
}

/// The account that the relayer answered with when it took the row. It may sign with another key since. A row without a
/// binding may still show the account of a relayer that it has left.
fn bound_account(row: &Transaction) -> Option<Address> {
    row.binding.as_ref().and(row.from.as_deref()).and_then(|from| from.parse().ok())
}

/// The earliest time at which a transaction of this row can be in a block.
fn since(row: &Transaction, said: Option<&Report>) -> Timestamp {
    let bound = row.binding.as_ref().map_or(row.created_at, |binding| binding.at);
    let stored = said.and_then(|said| said.created_at).unwrap_or(row.created_at);
    bound.min(stored).max(row.created_at) - CLOCK_MARGIN
}

/// Why a call that was made settles nothing yet.
pub(super) const UNASKED: &str = "the relayer has not told yet which chain it is on";
pub(super) const CONTESTED: &str = "the call was made, by an equal transaction or by this one";

const MOVED: MoveRefused = MoveRefused::NotPossible("it has moved meanwhile");

/// Why a look has no result.
pub(super) enum ChainCheckError {
    Chain(ChainError),
    Store(StoreError),
}

impl From<ChainError> for ChainCheckError {
    fn from(error: ChainError) -> Self {
        Self::Chain(error)
    }
}

impl From<StoreError> for ChainCheckError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use uuid::Uuid;

    use super::*;
    use crate::config::Timings;
    use crate::relay::request::call::DirectRequest;
    use crate::relay::state::transaction::{ConsumerId, TransactionId};

    const FIRST: &str = "0x70997970C51812dc3A010C7d01b50e0d17dc79C8";

    #[test]
    fn a_row_that_has_left_a_relayer_is_not_looked_for_in_that_relayers_account() {
        let (now, timings, token) = (Timestamp(0), Timings::DEFAULT, Uuid::from_u128(1));
        let to = "0x5fbdb2315678afecb367f032d93f642f64180aa3";
        let request = DirectRequest::parse(&json!({ "to": to, "value": "1", "data": "0xab" })).unwrap();
        let row = Transaction::accepted(TransactionId(Uuid::from_u128(1)), &request, String::new(), now, &timings);
        let consumer = ConsumerId("c1".into());
        let claim = |row: &Transaction, relayer: &str| {
            row.claim(&consumer, token, &RelayerUrl(relayer.into()), "idle", now, &timings).unwrap().transaction
        };
        let first = claim(&row, "http://r1");
        let id = RelayerTxId("oz-1".into());
        let bound = first.bind(token, &id, Some(FIRST), "it answered", now, &timings).unwrap().transaction;
        assert_eq!(bound_account(&bound), Some(FIRST.parse().unwrap()));
        let left = bound.not_executed("another call used its nonce", now, &timings).unwrap().transaction;
        assert_eq!(bound_account(&claim(&left, "http://r2")), None);
    }
}
