//! Takes a message and gets its transaction to one relayer, once: claim → route → submit → bind.
//!
//! The claim is stored before anything is sent, and the answer is stored before the message is deleted. A crash in between
//! leaves a claim behind, which [`crate::relay::reconcile`] settles. A submission whose outcome is unknown is never
//! repeated here.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use metrics::{counter, histogram};
use pipeline::{Handler, Message, Outcome, RetryPolicy};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};
use uuid::Uuid;

use crate::config::RelayMode;
use crate::mutations::Mutation;
use crate::relay::chain::Chain;
use crate::relay::relayer::client::{NotTaken, SubmissionAnswer, describe};
use crate::relay::relayer::pool::{Chosen, Pool, Unavailable};
use crate::relay::relayer::routing::Sent;
use crate::relay::state::apply_report::Report;
use crate::relay::state::message::TransactionMessage;
use crate::relay::state::transaction::{
    ConsumerId, MoveRefused, NextStep, RelayerUrl, Status, Transaction, TransactionId, UnknownCause,
};
use crate::relay::store::StoreError;
use crate::relay::submit::nonce_order::{NonceOrder, Turn};
use crate::relay::submit::preflight::{Preflight, preflight};
use crate::relay::update::guarded_store::{GuardedStore, Origin, Updated};

/// Handles the messages of the relay lane.
pub struct Consumer {
    /// Store, queue and clock.
    pub guarded: Arc<GuardedStore>,
    /// The relayers.
    pub pool: Arc<Pool>,
    /// The order of one signer's gasless transactions.
    pub order: NonceOrder,
    /// The chain, if the pre-flight of direct transactions is on.
    pub preflight: Option<Arc<Chain>>,
    /// The chain, if the pre-flight of gasless transactions is on.
    pub gasless_preflight: Option<Arc<Chain>>,
    /// Names the owner of claims: this run of this process.
    pub me: ConsumerId,
    /// Attempts and pauses.
    pub settings: ConsumerSettings,
    /// Once cancelled, messages that wait for a relayer are handed back.
    pub shutdown: CancellationToken,
}

/// Settings of a consumer.
#[derive(Debug, Clone)]
pub struct ConsumerSettings {
    /// Failures of an item before it becomes a dead letter, and the pauses in between.
    pub attempts: RetryPolicy,
    /// The pause before the one automatic replay.
    pub auto_replay_delay: Duration,
    /// Time limit of a question to a relayer.
    pub question_timeout: Duration,
}

/// Pause before the next delivery when the item is not at fault.
const WAIT: Duration = Duration::from_secs(2);
/// Confirm mode: pause between two questions to the relayer.
const FOLLOW_PAUSE: Duration = Duration::from_millis(1000);
/// Confirm mode: longest time one delivery follows its transaction; the reconciler goes on from there.
const FOLLOW_FOR: Duration = Duration::from_secs(600);

#[async_trait]
impl Handler for Consumer {
    async fn handle(&self, message: &Message) -> Outcome {
        let started = self.guarded.clock.instant();
        let received = match TransactionMessage::parse(&message.body) {
            Ok(received) => received,
            Err(reason) => {
                error!(messageId = %message.id, action = "malformed", "{reason}");
                return Outcome::Dead { reason };
            }
        };
        let id = received.transaction_id();
        debug!(transactionId = %id, messageId = %message.id, action = "message_received", receives = message.receives, "received");
        let outcome = match self.process(id, message.receives).await {
            Ok(outcome) => outcome,
            Err(failure) => {
                warn!(
                    transactionId = %id, messageId = %message.id, action = "store_unavailable",
                    "cannot process the message; retrying: {failure}"
                );
                Outcome::Retry { after: WAIT, reason: failure.to_string() }
            }
        };
        let action = match &outcome {
            Outcome::Done => "success",
            Outcome::Retry { .. } => "retry",
            Outcome::Dead { .. } => "failure",
        };
        info!(
            transactionId = %id,
            messageId = %message.id,
            action,
            attempt = message.receives,
            duration_ms = self.guarded.clock.elapsed(started).as_millis() as u64,
            "{}", describe_outcome(&outcome)
        );
        outcome
    }

    async fn ready(&self) {
        self.pool.able().await;
    }
}

impl Consumer {
    async fn process(&self, id: TransactionId, receives: u32) -> Result<Outcome, StoreError> {
        let Some(row) = self.guarded.store.get(id).await? else {
            warn!(transactionId = %id, action = "row_missing", "the message points to no row; it is tried again");
            return Ok(Outcome::Retry { after: WAIT, reason: "there is no such transaction".to_owned() });
        };
        match row.next_step() {
            NextStep::Submit => {
                if row.attempts >= self.settings.attempts.attempts_max {
                    return self.exhausted(row).await;
                }
                if let Some(mut reason) = self.expired(&row) {
                    if let Some(waited) = self.order.missing_predecessor(&row).await? {
                        reason = format!("{reason}: {waited}");
                    }
                    return self.fail_unsent(row, &reason, false).await;
                }
                match self.order.turn(&row).await? {
                    Turn::Now(at) => self.submit(row, at, receives).await,
                    Turn::Later(after, reason) => Ok(self.put_off(&row, after, reason, receives).await),
                    Turn::Never(reason) => self.fail_unsent(row, &reason, false).await,
                }
            }
            NextStep::Follow if self.guarded.mode == RelayMode::Confirm => self.follow(id).await,
            NextStep::Follow | NextStep::Nothing => Ok(Outcome::Done),
            NextStep::Bury(reason) => Ok(Outcome::Dead { reason }),
            NextStep::LeaveAlone => Ok(Outcome::Retry {
                after: self.guarded.timings.claim_check,
                reason: "another consumer holds the claim".to_owned(),
            }),
        }
    }

    /// Tries one relayer after the other (or only `at`, if it is set) until one takes the transaction, the item fails, or
    /// the outcome is unknown.
    async fn submit(
        &self,
        mut row: Transaction,
        mut at: Option<RelayerUrl>,
        receives: u32,
    ) -> Result<Outcome, StoreError> {
        let id = row.id;
        let mut avoided = row.avoid.clone().filter(|_| at.is_none());
        let mut tried: Vec<RelayerUrl> = avoided.iter().cloned().collect();
        if let Some(at) = &at {
            let urls = self.pool.clients().iter().map(|client| client.url());
            tried.extend(urls.filter(|url| *url != at).cloned());
        }
        loop {
            let chosen = match &at {
                // A transaction that must go to one relayer does not wait here: if that relayer is full, its followers
                // would occupy every handler, while other relayers have room.
                Some(_) => self.pool.try_choose(&tried).map_err(|_| None),
                None => tokio::select! {
                    biased;
                    chosen = self.pool.choose(&tried) => chosen.map_err(Some),
                    // Waiting for room has no effect yet; another consumer can wait as well.
                    () = self.shutdown.cancelled() => return Ok(handed_back()),
                },
            };
            let mut chosen = match chosen {
                Ok(chosen) => chosen,
                // The relayer that failed it last is better than none.
                Err(_) if avoided.is_some() => {
                    tried.retain(|url| Some(url) != avoided.as_ref());
                    avoided = None;
                    continue;
                }
                // It must follow its predecessor there, unless the chain has executed that one meanwhile.
                Err(_) if at.is_some() && self.order.is_next_on_chain(&row).await => {
                    tried.clear();
                    at = None;
                    continue;
                }
                Err(unavailable) => match unavailable {
                    Some(unavailable) => return Ok(self.wait(unavailable)),
                    None => {
                        let reason =
                            "the relayer that holds the signer's previous transaction takes no work now".to_owned();
                        return Ok(self.put_off(&row, WAIT, reason, receives).await);
                    }
                },
            };
            match self.try_on_chain(&row, &chosen).await {
                Preflight::Go => {}
                Preflight::Reverts(reason) => {
                    chosen.answered(Sent::NotSent);
                    return self.fail_unsent(row, &reason, true).await;
                }
                Preflight::Later(reason) => {
                    chosen.answered(Sent::NotSent);
                    return Ok(self.put_off(&row, WAIT, reason, receives).await);
                }
            }
            // Waiting for room and for the chain takes time; an expired transaction would only cost gas.
            if let Some(reason) = self.expired(&row) {
                chosen.answered(Sent::NotSent);
                return self.fail_unsent(row, &reason, false).await;
            }
            let timings = &self.guarded.timings;
            // Begins before the claim's own time, from which a takeover counts: the fence ends no later than the claim.
            let fence = self.guarded.clock.send_fence(timings.send_window);
            let token = self.guarded.random.uuid_v4();
            let claimed = self.claim(&row, &chosen, token).await;
            let Ok(Some(claimed)) = claimed else {
                chosen.answered(Sent::NotSent);
                if let Err(StoreError::OutcomeUnknown(_)) = &claimed {
                    self.release_unanswered(id, token).await?;
                }
                claimed?;
                // Another consumer was quicker; the next delivery sees what is left to do.
                return Ok(Outcome::Retry { after: Duration::ZERO, reason: "the claim was lost".to_owned() });
            };
            chosen.claimed();
            let relayer = chosen.client.url().clone();
            let started = self.guarded.clock.instant();
            let answer = chosen.client.submit(&claimed.call, fence, timings.submit_timeout).await;
            histogram!("baton_submit_seconds", "relayer" => relayer.0.clone())
                .record(self.guarded.clock.elapsed(started).as_secs_f64());
            counter!("baton_submissions_total", "relayer" => relayer.0.clone(), "answer" => answer.name()).increment(1);
            chosen.answered(answer.relayer_health());
            match answer {
                SubmissionAnswer::Accepted(report) => return self.bound(&claimed, token, *report).await,
                SubmissionAnswer::Refused(reason) => return self.refused(&claimed, token, &reason).await,
                SubmissionAnswer::ClientError(reason) => {
                    return self.record_unknown_outcome(&claimed, token, &reason, UnknownCause::ClientError).await;
                }
                SubmissionAnswer::Unknown { reason, answered } => {
                    let kind = if answered { UnknownCause::Answered } else { UnknownCause::Silent };
                    return self.record_unknown_outcome(&claimed, token, &reason, kind).await;
                }
                SubmissionAnswer::NotTaken { why, detail } => {
                    info!(transactionId = %id, action = "not_taken", relayer = %relayer, "{detail}");
                    let now = self.guarded.clock.now();
                    let released = self
                        .guarded
                        .persist(&claimed, |row| row.release(token, &detail, now, &self.guarded.timings))
                        .await?;
                    match released {
                        Updated::Moved(released) if why != NotTaken::Fenced => row = *released,
                        // Not at once: a machine whose clocks disagree would claim and release without end.
                        _ => return Ok(Outcome::Retry { after: WAIT, reason: detail }),
                    }
                    tried.push(relayer);
                }
            }
        }
    }

    /// The pre-flight, if it is on and the relayer's address is known.
    async fn try_on_chain(&self, row: &Transaction, chosen: &Chosen) -> Preflight {
        let chain = if row.forward.is_some() { &self.gasless_preflight } else { &self.preflight };
        let Some(chain) = chain else { return Preflight::Go };
        match chosen.client.address(self.settings.question_timeout).await {
            Some(relayer) => preflight(chain, row, relayer).await,
            None => Preflight::Go,
        }
    }

    /// Fails a transaction that cannot succeed and was never sent.
    async fn fail_unsent(&self, row: Transaction, reason: &str, may_pass: bool) -> Result<Outcome, StoreError> {
        let now = self.guarded.clock.now();
        let failed =
            self.guarded.update_from(row, |row| row.fail_unsent(reason, may_pass, now, &self.guarded.timings)).await?;
        Ok(self.after_failure(failed, reason))
    }

    /// Makes a transaction wait through no fault of its own. A message received before is replaced by a new one, so that
    /// the queue's receive count does not bury it.
    async fn put_off(&self, row: &Transaction, after: Duration, reason: String, receives: u32) -> Outcome {
        counter!("baton_waits_total").increment(1);
        // Noted in the timeline once at first, and then as often as the reconciler would queue it again.
        let (now, timings) = (self.guarded.clock.now(), &self.guarded.timings);
        let soon = row.check_at.is_some_and(|at| at < now + timings.pending_check / 2);
        if (row.is_untouched() || soon)
            && let Err(failure) = self.guarded.update_from(row.clone(), |row| row.defer(&reason, now, timings)).await
        {
            return Outcome::Retry { after: WAIT, reason: failure.to_string() };
        }
        if receives > 1 {
            let message = self.guarded.message(row).delayed(after);
            let sent = self.guarded.queue.send(std::slice::from_ref(&message)).await;
            if sent.iter().all(Result::is_ok) && !sent.is_empty() {
                return Outcome::Done;
            }
        }
        Outcome::Retry { after, reason }
    }

    async fn claim(&self, row: &Transaction, chosen: &Chosen, token: Uuid) -> Result<Option<Transaction>, StoreError> {
        let (now, relayer) = (self.guarded.clock.now(), chosen.client.url());
        let claimed = self
            .guarded
            .update_from(row.clone(), |row| {
                let mut moved = row.claim(&self.me, token, relayer, &chosen.because, now, &self.guarded.timings)?;
                if let Some(claim) = &mut moved.transaction.claim {
                    claim.account = chosen.client.known_address();
                }
                Ok(moved)
            })
            .await?;
        match claimed {
            Updated::Moved(row) => Ok(Some(*row)),
            Updated::Refused(..) | Updated::Missing => Ok(None),
        }
    }

    /// Releases a claim that may be stored although the store gave no answer: only this consumer knows that nothing was sent
    /// under it. To the reconciler it would be a submission of unknown outcome.
    async fn release_unanswered(&self, id: TransactionId, token: Uuid) -> Result<(), StoreError> {
        let now = self.guarded.clock.now();
        let reason = "nothing was sent: the store gave no answer to the claim";
        let timings = &self.guarded.timings;
        let released = self.guarded.persist_current(id, |row| match &row.claim {
            // The commit may still be under way. This save waits for it or moves the row's version before it.
            None => row.check_later(row.check_at.unwrap_or(now + timings.pending_check), now),
            Some(_) => row.release(token, reason, now, timings),
        });
        released.await.map(drop)
    }

    /// The relayer has it: stores its id. Early webhooks about that id are applied with the save.
    async fn bound(&self, claimed: &Transaction, token: Uuid, report: Report) -> Result<Outcome, StoreError> {
        let id = claimed.id;
        let now = self.guarded.clock.now();
        // A proxy may have exchanged answers: whatever the relayer has stored, this is not its record.
        if !claimed.call.may_be(&report) && !Mutation::AcceptsOtherCall.is_on() {
            let reason = format!("the relayer answered with another transaction ({})", report.tx_id);
            return self.record_unknown_outcome(claimed, token, &reason, UnknownCause::Answered).await;
        }
        let from = report.from.as_deref();
        let bind = |row: &Transaction| row.bind(token, &report.tx_id, from, "it answered", now, &self.guarded.timings);
        match self.guarded.persist(claimed, bind).await {
            Ok(Updated::Moved(row)) => {
                let waited = row.updated_at.since(row.created_at);
                histogram!("baton_accept_to_submitted_seconds").record(waited.as_secs_f64());
            }
            Ok(Updated::Refused(refused, row)) => {
                counter!("baton_late_answers_total").increment(1);
                if self.bind_late(claimed, &row, &report).await? {
                    return Ok(Outcome::Done);
                }
                error!(
                    transactionId = %id, action = "late_answer", ozRelayerTxId = %report.tx_id, status = row.status.name(),
                    "the relayer's answer came after the claim was lost ({refused}); the claim's new owner looks for the same record"
                );
                return Ok(Outcome::Done);
            }
            Ok(Updated::Missing) => return Ok(Outcome::Done),
            // An equal transaction of unknown outcome was bound to this record. The two are interchangeable; the
            // reconciler finds the record that is left for this one.
            Err(StoreError::Conflict { .. }) => {
                let reason = "its record was bound to an equal transaction";
                return self.record_unknown_outcome(claimed, token, reason, UnknownCause::Exchanged).await;
            }
            Err(failure) => return Err(failure),
        }
        match self.guarded.mode {
            RelayMode::FireAndForget => Ok(Outcome::Done),
            RelayMode::Confirm => self.follow(id).await,
        }
    }

    /// An answer that comes after its claim was taken over still proves where the transaction is: if the outcome at that
    /// relayer is unknown, the row, as it is `now`, is bound to it.
    async fn bind_late(&self, claimed: &Transaction, now: &Transaction, report: &Report) -> Result<bool, StoreError> {
        let Some(relayer) = claimed.claim.as_ref().map(|claim| &claim.relayer) else { return Ok(false) };
        let (at, timings, from) = (self.guarded.clock.now(), &self.guarded.timings, report.from.as_deref());
        let bind = |row: &Transaction| match &row.claim {
            Some(claim) if claim.relayer == *relayer && claim.unknown.is_some() => {
                row.bind(claim.token, &report.tx_id, from, "its answer came late", at, timings)
            }
            _ => Err(MoveRefused::NotOurClaim),
        };
        match self.guarded.persist(now, bind).await {
            Ok(Updated::Moved(_)) => Ok(true),
            Ok(_) | Err(StoreError::Conflict { .. }) => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    async fn refused(&self, claimed: &Transaction, token: Uuid, reason: &str) -> Result<Outcome, StoreError> {
        let now = self.guarded.clock.now();
        let refused =
            self.guarded.persist(claimed, |row| row.refuse(token, reason, now, &self.guarded.timings)).await?;
        Ok(self.after_failure(refused, reason))
    }

    /// Every attempt has failed.
    async fn exhausted(&self, row: Transaction) -> Result<Outcome, StoreError> {
        let (now, attempts_max) = (self.guarded.clock.now(), self.settings.attempts.attempts_max);
        let reason = row.error_message.clone().unwrap_or_default();
        let given_up =
            self.guarded.update_from(row, |row| row.exhausted(attempts_max, now, &self.guarded.timings)).await?;
        Ok(self.after_failure(given_up, &reason))
    }

    fn after_failure(&self, updated: Updated, reason: &str) -> Outcome {
        let row = match updated {
            Updated::Moved(row) => row,
            // An earlier save may have succeeded without an answer: the next delivery reads what is left to do.
            Updated::Refused(..) | Updated::Missing => {
                return Outcome::Retry { after: Duration::ZERO, reason: "the row has moved".to_owned() };
            }
        };
        if row.status == Status::Failed {
            counter!("baton_dead_letters_total", "lane" => "relay").increment(1);
            return Outcome::Dead { reason: reason.to_owned() };
        }
        // Zero attempts after a failure: the automatic replay has just begun.
        let after = match row.attempts {
            0 => self.settings.auto_replay_delay,
            attempts => self.settings.attempts.delay(attempts, self.guarded.random.fraction()),
        };
        Outcome::Retry { after, reason: reason.to_owned() }
    }

    /// Records an unknown outcome in the row; the reconciler settles it.
    async fn record_unknown_outcome(
        &self,
        claimed: &Transaction,
        token: Uuid,
        reason: &str,
        kind: UnknownCause,
    ) -> Result<Outcome, StoreError> {
        counter!("baton_unknown_outcomes_total").increment(1);
        warn!(transactionId = %claimed.id, action = "outcome_unknown", "{reason}");
        let now = self.guarded.clock.now();
        self.guarded.persist(claimed, |row| row.mark_unknown(token, reason, kind, now, &self.guarded.timings)).await?;
        Ok(Outcome::Done)
    }

    /// No relayer takes work: the item waits, and no attempt is used up.
    fn wait(&self, unavailable: Unavailable) -> Outcome {
        counter!("baton_waits_total").increment(1);
        Outcome::Retry { after: WAIT, reason: unavailable.to_string() }
    }

    /// Confirm mode: asks the relayer until the transaction is final.
    async fn follow(&self, id: TransactionId) -> Result<Outcome, StoreError> {
        let until = self.guarded.clock.instant() + FOLLOW_FOR;
        loop {
            let Some(row) = self.guarded.store.get(id).await? else { return Ok(Outcome::Done) };
            let Some(binding) = row.binding.as_ref().filter(|_| !row.status.is_final()) else {
                return Ok(Outcome::Done);
            };
            if self.guarded.clock.instant() >= until {
                return Ok(Outcome::Done);
            }
            if let Some(client) = self.pool.ask_one(&binding.relayer) {
                match client.transaction(&binding.tx_id, self.settings.question_timeout).await {
                    Ok(Some(report)) => {
                        self.guarded.apply(id, &report, Origin::Follow).await?;
                    }
                    Ok(None) => return Ok(Outcome::Done),
                    Err(failure) => debug!(transactionId = %id, "asking the relayer failed: {}", describe(&failure)),
                }
            }
            tokio::select! {
                biased;
                () = self.shutdown.cancelled() => return Ok(handed_back()),
                () = self.guarded.clock.sleep(FOLLOW_PAUSE) => {}
            }
        }
    }

    /// Why a gasless transaction can no longer be executed; `None` if it can.
    fn expired(&self, row: &Transaction) -> Option<String> {
        let now = self.guarded.clock.now();
        let forward = row.forward.as_ref().filter(|forward| forward.gasless.is_expired(now))?;
        let deadline = forward.gasless.request.deadline;
        Some(format!(
            "its deadline {deadline} (seconds since 1970) passed before it could be submitted; no gas was spent"
        ))
    }
}

fn describe_outcome(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Done => "handled; the message is deleted".to_owned(),
        Outcome::Retry { after, reason } => format!("handled; delivered again in {} ms: {reason}", after.as_millis()),
        Outcome::Dead { reason } => format!("handled; a dead letter: {reason}"),
    }
}

fn handed_back() -> Outcome {
    Outcome::Retry { after: Duration::ZERO, reason: "the consumer is stopping".to_owned() }
}

impl SubmissionAnswer {
    fn name(&self) -> &'static str {
        match self {
            Self::Accepted(_) => "accepted",
            Self::Refused(_) => "refused",
            Self::ClientError(_) => "client-error",
            Self::NotTaken { .. } => "not-taken",
            Self::Unknown { .. } => "unknown",
        }
    }

    fn relayer_health(&self) -> Sent {
        match self {
            Self::Accepted(_) => Sent::Taken,
            Self::Refused(_) | Self::ClientError(_) => Sent::Refused,
            Self::Unknown { .. } => Sent::Unknown,
            Self::NotTaken { why, .. } => match why {
                NotTaken::Fault => Sent::Failed,
                NotTaken::Closed => Sent::Closed,
                NotTaken::Busy(wait) => Sent::Busy(*wait),
                NotTaken::Fenced => Sent::NotSent,
            },
        }
    }
}
