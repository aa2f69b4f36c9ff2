//! Takes a message and gets its transaction to one relayer, once: claim → route → submit → bind.
//!
//! The claim is stored before anything is sent and the answer is stored before the message goes. Whatever dies in
//! between leaves a claim behind, and [`crate::relay::reconcile::sweeps`] finds out what it came to. A submission whose outcome
//! is unknown is never repeated here.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use metrics::{counter, histogram};
use pipeline::{Handler, Message, Outcome, RetryPolicy};
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, info, warn};
use uuid::Uuid;

use crate::relay::chain::Chain;
use crate::relay::relayer::client::{Answer, NotTaken, describe};
use crate::relay::relayer::pool::{Chosen, Pool, Unavailable};
use crate::relay::relayer::routing::Sent;
use crate::relay::state::message::TransactionMessage;
use crate::relay::state::report::{Mode, Report};
use crate::relay::state::transaction::{
    ConsumerId, NextStep, RelayerUrl, Status, Transaction, TransactionId, UnknownCause,
};
use crate::relay::store::StoreError;
use crate::relay::submit::nonce_order::{NonceOrder, Turn};
use crate::relay::submit::preflight::{Preflight, preflight};
use crate::relay::update::guarded_store::{GuardedStore, Origin, Updated};
use crate::timestamp::Timestamp;

/// Handles the messages of the relay lane.
pub struct Consumer {
    /// Store and queue.
    pub guarded: Arc<GuardedStore>,
    /// The relayers.
    pub pool: Arc<Pool>,
    /// Whose turn it is.
    pub order: NonceOrder,
    /// The chain, if each transaction is tried on it before it is submitted.
    pub preflight: Option<Arc<Chain>>,
    /// This run of this process.
    pub me: ConsumerId,
    /// What it was told.
    pub settings: ConsumerSettings,
    /// Nothing new is begun after this.
    pub shutdown: CancellationToken,
}

/// What a consumer can be told.
#[derive(Debug, Clone)]
pub struct ConsumerSettings {
    /// Failures of an item before it is a dead letter, and the pauses in between.
    pub attempts: RetryPolicy,
    /// The pause before the one automatic replay.
    pub auto_replay_delay: Duration,
    /// How long a question to a relayer may take.
    pub question_timeout: Duration,
}

/// The pause before a message is looked at again when the item is not at fault.
const WAIT: Duration = Duration::from_secs(2);
/// How long a transaction waits for room at the one relayer that it may go to.
const ROOM_PATIENCE: Duration = Duration::from_secs(1);
/// In confirm mode, the pause between two questions.
const FOLLOW_PAUSE: Duration = Duration::from_millis(1000);
/// In confirm mode, how long one delivery follows its transaction; then the reconciler goes on.
const FOLLOW_FOR: Duration = Duration::from_secs(600);

#[async_trait]
impl Handler for Consumer {
    async fn handle(&self, message: &Message) -> Outcome {
        let started = Instant::now();
        let envelope = match TransactionMessage::parse(&message.body) {
            Ok(envelope) => envelope,
            Err(reason) => {
                error!(messageId = %message.id, action = "malformed", "{reason}");
                return Outcome::Dead { reason };
            }
        };
        let id = envelope.transaction_id();
        debug!(transactionId = %id, messageId = %envelope.message_id(), action = "message_received", receives = message.receives, "received");
        let outcome = match self.process(id, message.receives).await {
            Ok(outcome) => outcome,
            Err(failure) => {
                warn!(transactionId = %id, messageId = %envelope.message_id(), action = "store_away", "{failure}");
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
            messageId = %envelope.message_id(),
            action,
            attempt = message.receives,
            duration_ms = started.elapsed().as_millis() as u64,
            "handled: {outcome:?}"
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
            warn!(transactionId = %id, action = "row_missing", "a message about no row; it is tried again");
            return Ok(Outcome::Retry { after: WAIT, reason: "there is no such transaction".to_owned() });
        };
        match row.next_step() {
            NextStep::Submit => {
                if let Some(reason) = expired(&row) {
                    return self.fail_unsent(row, &reason, false).await;
                }
                match self.order.turn(&row).await? {
                    Turn::Now(at) => self.submit(row, at, receives).await,
                    Turn::Later(after, reason) => Ok(self.put_off(&row, after, reason, receives).await),
                    Turn::Never(reason) => self.fail_unsent(row, &reason, false).await,
                }
            }
            NextStep::Follow if self.guarded.mode == Mode::Confirm => self.follow(id).await,
            NextStep::Follow | NextStep::Nothing => Ok(Outcome::Done),
            NextStep::Bury(reason) => Ok(Outcome::Dead { reason }),
            NextStep::LeaveAlone => Ok(Outcome::Retry {
                after: self.guarded.timings.claim_check,
                reason: "another consumer holds the claim".to_owned(),
            }),
        }
    }

    /// Goes from relayer to relayer, or to the one at which it must be, until one takes it, the item fails, or the outcome
    /// is unknown.
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
            let chosen = tokio::select! {
                chosen = self.pool.choose(&tried) => chosen.map_err(Some),
                // Waiting for room has had no effect yet; the next consumer can wait as well.
                () = self.shutdown.cancelled() => return Ok(handed_back()),
                // Those that must go to a certain relayer do not keep all others from theirs.
                () = tokio::time::sleep(ROOM_PATIENCE), if at.is_some() => Err(None),
            };
            let chosen = match chosen {
                Ok(chosen) => chosen,
                // The relayer that failed it last is still better than none.
                Err(_) if avoided.is_some() => {
                    tried.retain(|url| Some(url) != avoided.as_ref());
                    avoided = None;
                    continue;
                }
                // It must follow another there, unless that one has been executed meanwhile.
                Err(_) if at.is_some() && self.order.is_next_on_chain(&row).await => {
                    tried.clear();
                    at = None;
                    continue;
                }
                Err(unavailable) => match unavailable.filter(|_| at.is_none()) {
                    Some(unavailable) => return Ok(self.wait(unavailable)),
                    None => {
                        let reason = "the relayer that has the one before it takes nothing now".to_owned();
                        return Ok(self.put_off(&row, WAIT, reason, receives).await);
                    }
                },
            };
            match self.last_look(&row, &chosen).await {
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
            // Waiting for room and for the chain takes time; what is too late now costs gas for nothing.
            if let Some(reason) = expired(&row) {
                chosen.answered(Sent::NotSent);
                return self.fail_unsent(row, &reason, false).await;
            }
            // Before the claim's own time: whoever takes it over counts from there.
            let claiming = Instant::now();
            let claimed = self.claim(&row, &chosen).await;
            let Ok(Some((claimed, token))) = claimed else {
                chosen.answered(Sent::NotSent);
                claimed?;
                // Somebody else was quicker; what is left to do is for the next delivery to see.
                return Ok(Outcome::Retry { after: Duration::ZERO, reason: "the claim was lost".to_owned() });
            };
            let relayer = chosen.client.url().clone();
            let timings = &self.guarded.timings;
            let started = Instant::now();
            let answer =
                chosen.client.submit(&claimed.call, claiming + timings.send_window, timings.submit_timeout).await;
            histogram!("baton_submit_seconds", "relayer" => relayer.0.clone()).record(started.elapsed().as_secs_f64());
            counter!("baton_submissions_total", "relayer" => relayer.0.clone(), "answer" => answer.name()).increment(1);
            chosen.answered(answer.says_of_relayer());
            match answer {
                Answer::Accepted(report) => return self.bound(&claimed, token, *report).await,
                Answer::Refused(reason) => return self.refused(&claimed, token, &reason).await,
                Answer::ItemFailed(reason) => return self.item_failed(&claimed, token, &reason).await,
                Answer::Unknown { reason, answered } => {
                    let kind = if answered { UnknownCause::Answered } else { UnknownCause::Silent };
                    return self.record_unknown_outcome(&claimed, token, &reason, kind).await;
                }
                Answer::NotTaken { why, detail } => {
                    info!(transactionId = %id, action = "not_taken", relayer = %relayer, "{detail}");
                    let now = Timestamp::now();
                    let released = self
                        .guarded
                        .persist(&claimed, |row| row.release(token, &detail, now, &self.guarded.timings))
                        .await?;
                    match released {
                        Updated::Moved(released) if why != NotTaken::Fenced => row = *released,
                        _ => return Ok(Outcome::Retry { after: Duration::ZERO, reason: detail }),
                    }
                    tried.push(relayer);
                }
            }
        }
    }

    /// Tries it on the chain, if that is wanted and it is known who would send it.
    async fn last_look(&self, row: &Transaction, chosen: &Chosen) -> Preflight {
        let Some(chain) = &self.preflight else { return Preflight::Go };
        match chosen.client.address(self.settings.question_timeout).await {
            Some(relayer) => preflight(chain, row, relayer).await,
            None => Preflight::Go,
        }
    }

    /// It cannot succeed, and nobody has sent it.
    async fn fail_unsent(&self, row: Transaction, reason: &str, may_pass: bool) -> Result<Outcome, StoreError> {
        let now = Timestamp::now();
        let failed =
            self.guarded.update_from(row, |row| row.fail_unsent(reason, may_pass, now, &self.guarded.timings)).await?;
        Ok(self.after_failure(failed, reason))
    }

    /// Nothing is wrong with it, it only has to wait. Some queues count how often a message was received: a new one
    /// stands for it then.
    async fn put_off(&self, row: &Transaction, after: Duration, reason: String, receives: u32) -> Outcome {
        counter!("baton_waits_total").increment(1);
        // Once at first, for people, and then as often as the reconciler would queue it again.
        let (now, timings) = (Timestamp::now(), &self.guarded.timings);
        let soon = row.check_at.is_some_and(|at| at < now + timings.pending_check / 2);
        if (row.is_untouched() || soon)
            && let Err(failure) = self.guarded.update_from(row.clone(), |row| row.defer(&reason, now, timings)).await
        {
            return Outcome::Retry { after: WAIT, reason: failure.to_string() };
        }
        if receives > 1 {
            let message = TransactionMessage::of(row).outgoing().delayed(after);
            let sent = self.guarded.queue.send(std::slice::from_ref(&message)).await;
            if sent.iter().all(Result::is_ok) && !sent.is_empty() {
                return Outcome::Done;
            }
        }
        Outcome::Retry { after, reason }
    }

    async fn claim(&self, row: &Transaction, chosen: &Chosen) -> Result<Option<(Transaction, Uuid)>, StoreError> {
        let token = Uuid::new_v4();
        let (now, relayer) = (Timestamp::now(), chosen.client.url());
        let claimed = self
            .guarded
            .update_from(row.clone(), |row| {
                row.claim(&self.me, token, relayer, &chosen.because, now, &self.guarded.timings)
            })
            .await?;
        match claimed {
            Updated::Moved(row) => Ok(Some((*row, token))),
            Updated::Refused(..) | Updated::Missing => Ok(None),
        }
    }

    /// The relayer has it: store its id. What it said before we knew that id is applied with that.
    async fn bound(&self, claimed: &Transaction, token: Uuid, report: Report) -> Result<Outcome, StoreError> {
        let id = claimed.id;
        let now = Timestamp::now();
        let from = report.from.as_deref();
        let bind = |row: &Transaction| row.bind(token, &report.tx_id, from, "it answered", now, &self.guarded.timings);
        match self.guarded.persist(claimed, bind).await {
            Ok(Updated::Moved(row)) => {
                let waited = row.updated_at.since(row.created_at);
                histogram!("baton_accept_to_submitted_seconds").record(waited.as_secs_f64());
            }
            Ok(Updated::Refused(refused, row)) => {
                counter!("baton_late_answers_total").increment(1);
                error!(
                    transactionId = %id, action = "late_answer", ozRelayerTxId = %report.tx_id, status = row.status.name(),
                    "a relayer's answer came after the claim was lost ({refused}); whoever holds it now looks for the same record"
                );
                return Ok(Outcome::Done);
            }
            Ok(Updated::Missing) => return Ok(Outcome::Done),
            // Another row with the same content was bound to this record while it was of unknown outcome. The two are
            // interchangeable; which record is left for this one is for the search to find.
            Err(StoreError::Conflict { .. }) => {
                let reason = "its record was bound to an equal transaction";
                return self.record_unknown_outcome(claimed, token, reason, UnknownCause::Exchanged).await;
            }
            Err(failure) => return Err(failure),
        }
        match self.guarded.mode {
            Mode::FireAndForget => Ok(Outcome::Done),
            Mode::Confirm => self.follow(id).await,
        }
    }

    async fn refused(&self, claimed: &Transaction, token: Uuid, reason: &str) -> Result<Outcome, StoreError> {
        let now = Timestamp::now();
        let refused =
            self.guarded.persist(claimed, |row| row.refuse(token, reason, now, &self.guarded.timings)).await?;
        Ok(self.after_failure(refused, reason))
    }

    async fn item_failed(&self, claimed: &Transaction, token: Uuid, reason: &str) -> Result<Outcome, StoreError> {
        let (now, attempts_max) = (Timestamp::now(), self.settings.attempts.attempts_max);
        let failed = self
            .guarded
            .persist(claimed, |row| row.attempt_failed(token, reason, attempts_max, now, &self.guarded.timings))
            .await?;
        Ok(self.after_failure(failed, reason))
    }

    fn after_failure(&self, updated: Updated, reason: &str) -> Outcome {
        let row = match updated {
            Updated::Moved(row) => row,
            // Perhaps an earlier try was saved and only its answer was lost: the row knows what is left to do.
            Updated::Refused(..) | Updated::Missing => {
                return Outcome::Retry { after: Duration::ZERO, reason: "the row has moved".to_owned() };
            }
        };
        if row.status == Status::Failed {
            counter!("baton_dead_letters_total", "lane" => "relay").increment(1);
            return Outcome::Dead { reason: reason.to_owned() };
        }
        // Attempts start at none again only when the automatic replay has just begun.
        let after = match row.attempts {
            0 => self.settings.auto_replay_delay,
            attempts => self.settings.attempts.delay(attempts, rand::random::<f64>()),
        };
        Outcome::Retry { after, reason: reason.to_owned() }
    }

    /// Nobody knows. The row says so, and from here on it is the reconciler's.
    async fn record_unknown_outcome(
        &self,
        claimed: &Transaction,
        token: Uuid,
        reason: &str,
        kind: UnknownCause,
    ) -> Result<Outcome, StoreError> {
        counter!("baton_unknown_outcomes_total").increment(1);
        warn!(transactionId = %claimed.id, action = "outcome_unknown", "{reason}");
        let now = Timestamp::now();
        self.guarded.persist(claimed, |row| row.mark_unknown(token, reason, kind, now, &self.guarded.timings)).await?;
        Ok(Outcome::Done)
    }

    /// No relayer is able: the item waits, and no attempt is used up.
    fn wait(&self, unavailable: Unavailable) -> Outcome {
        counter!("baton_waits_total").increment(1);
        Outcome::Retry { after: WAIT, reason: unavailable.to_string() }
    }

    /// Confirm mode: asks the relayer until the transaction is final.
    async fn follow(&self, id: TransactionId) -> Result<Outcome, StoreError> {
        let until = Instant::now() + FOLLOW_FOR;
        loop {
            let Some(row) = self.guarded.store.get(id).await? else { return Ok(Outcome::Done) };
            let Some(binding) = row.binding.as_ref().filter(|_| !row.status.is_final()) else {
                return Ok(Outcome::Done);
            };
            if Instant::now() >= until {
                return Ok(Outcome::Done);
            }
            if let Some(client) = self.pool.ask_one(&binding.relayer) {
                match client.transaction(&binding.tx_id, self.settings.question_timeout).await {
                    Ok(Some(report)) => {
                        self.guarded.apply(id, &report, Origin::Follow).await?;
                    }
                    Ok(None) => return Ok(Outcome::Done),
                    Err(failure) => debug!(transactionId = %id, "not followed: {}", describe(&failure)),
                }
            }
            tokio::select! {
                () = self.shutdown.cancelled() => {
                    return Ok(handed_back());
                }
                () = tokio::time::sleep(FOLLOW_PAUSE) => {}
            }
        }
    }
}

/// Why a gasless transaction can no longer be executed.
fn expired(row: &Transaction) -> Option<String> {
    let forward = row.forward.as_ref().filter(|forward| forward.gasless.is_expired(Timestamp::now()))?;
    let deadline = forward.gasless.request.deadline;
    Some(format!("its deadline {deadline} (seconds since 1970) passed before it could be submitted; no gas was spent"))
}

fn handed_back() -> Outcome {
    Outcome::Retry { after: Duration::ZERO, reason: "the consumer stops".to_owned() }
}

impl Answer {
    fn name(&self) -> &'static str {
        match self {
            Self::Accepted(_) => "accepted",
            Self::Refused(_) => "refused",
            Self::ItemFailed(_) => "item-failed",
            Self::NotTaken { .. } => "not-taken",
            Self::Unknown { .. } => "unknown",
        }
    }

    fn says_of_relayer(&self) -> Sent {
        match self {
            Self::Accepted(_) => Sent::Taken,
            Self::Refused(_) | Self::ItemFailed(_) => Sent::Refused,
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
