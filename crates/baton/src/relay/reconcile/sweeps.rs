//! The sweeps: every row that is not final has a time at which the reconciler looks at it. Unclaimed rows are queued again,
//! and relayers are asked about submitted rows without news. Claims of unknown outcome are settled in
//! [`crate::relay::reconcile::unknown_outcomes`], and dead letters swept in [`crate::relay::reconcile::dead_letter_sweep`].
//!
//! Each sweep has a task of its own, and so have the claims at each relayer, so that a relayer that does not answer holds up
//! only its own questions. A sweep that
//! is stopped half-way leaves nothing behind: each row is moved by one guarded save. Each finding is counted; a healthy
//! system has none.

use std::collections::HashSet;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::FutureExt;
use metrics::counter;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use crate::config::RelayMode;
use crate::relay::reconcile::chain_check::{ChainCheck, ChainCheckResult, RelayerStatement};
use crate::relay::reconcile::unknown_outcomes::UnknownOutcomes;
use crate::relay::relayer::client::{RelayerClient, describe};
use crate::relay::relayer::pool::Pool;
use crate::relay::relayer::wire;
use crate::relay::state::apply_report::{Report, ReportedStatus};
use crate::relay::state::transaction::{ConsumerId, MoveRefused, Progress, RecordLost, RelayerUrl, Transaction};
use crate::relay::store::{Due, EARLY_WEBHOOK_LIFETIME, StoreError};
use crate::relay::update::guarded_store::{Applied, GuardedStore, Origin, Updated};
use crate::timestamp::Timestamp;

/// Runs the sweeps.
pub struct Reconciler {
    pub(super) guarded: Arc<GuardedStore>,
    pool: Arc<Pool>,
    me: ConsumerId,
    pub(super) settings: ReconcilerSettings,
    unknown_outcomes: UnknownOutcomes,
    /// Compares relayers' reports with the chain, if there is one.
    chain: Option<Arc<ChainCheck>>,
    /// The number of dead letters when this consumer last read them, and when that was.
    pub(super) dead_letters_read: Mutex<Option<(u64, Instant)>>,
}

/// Settings of the reconciler.
#[derive(Debug, Clone)]
pub struct ReconcilerSettings {
    /// Pause between two sweeps of a kind.
    pub interval: Duration,
    /// Pause between two sweeps of the dead letters.
    pub dead_letters_every: Duration,
    /// Dead letters whose number has not changed are read again after this time; `None`: by every sweep.
    pub dead_letters_reread_after: Option<Duration>,
    /// Claims of a consumer without a heartbeat for this long are taken over.
    pub consumer_dead_after: Duration,
    /// Largest difference between a relayer's clock and ours.
    pub clock_skew: Duration,
    /// Relayers keep a finished transaction for this long.
    pub relayer_retention: Duration,
    /// Time limit of a question to a relayer.
    pub question_timeout: Duration,
}

/// One of the reconciler's loops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sweep {
    /// Records that this consumer is alive.
    Heartbeat,
    /// Settles claims of unknown outcome and of consumers that are gone.
    Claims,
    /// Asks relayers about submitted rows without news.
    Submitted,
    /// Queues unclaimed rows again.
    Waiting,
    /// Puts back what the queue buried too early.
    DeadLetters,
    /// Deletes early webhooks and consumers that are too old to matter.
    CleanUp,
}

impl Sweep {
    /// Every sweep.
    pub const ALL: [Self; 6] =
        [Self::Heartbeat, Self::Claims, Self::Submitted, Self::Waiting, Self::DeadLetters, Self::CleanUp];

    /// Name in logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Heartbeat => "heartbeat",
            Self::Claims => "claims",
            Self::Submitted => "submitted",
            Self::Waiting => "waiting",
            Self::DeadLetters => "dead letters",
            Self::CleanUp => "clean-up",
        }
    }
}

/// The rows that a sweep looks at.
#[derive(Debug, Clone, Copy)]
enum Part {
    /// All that are due.
    All,
    /// Those at the relayer in this place of the configuration.
    Relayer(usize),
    /// Those at relayers that are not configured.
    Others,
}

/// Maximum number of rows in one sweep.
const SWEEP_MAX: usize = 500;
/// Maximum number of concurrent questions to relayers.
const QUESTIONS_MAX: usize = 16;
/// Other consumers leave a row alone for this long while one asks its relayer and the chain about it. If that consumer
/// dies meanwhile, the row is looked at this much later.
const LOOK_LEASE: Duration = Duration::from_secs(15);
/// Longest pause between two looks at a row that its relayer has forgotten, with a chain.
const FORGOTTEN_CHECK_MAX: Duration = Duration::from_secs(60);
/// Pause between two clean-ups.
const FORGET_EVERY: Duration = Duration::from_secs(60);

/// Rows of silent relayers that one sweep looks up on the chain, beside those whose relayer was asked: a look takes several
/// calls, and the rows of other relayers wait for it.
const SILENT_LOOKS_MAX: usize = 16;

/// Whom a sweep asks about a submitted row.
#[derive(Debug, Clone, Copy)]
enum Ask {
    /// Its relayer, and the chain as far as the answer needs it.
    Relayer,
    /// Only the chain: its relayer was silent in this sweep.
    Chain,
    /// None of them, in this sweep.
    Later,
}

impl Reconciler {
    /// A reconciler whose heartbeat and claims bear this consumer's id.
    pub fn new(
        guarded: Arc<GuardedStore>,
        pool: Arc<Pool>,
        me: ConsumerId,
        settings: ReconcilerSettings,
        chain: Option<Arc<ChainCheck>>,
    ) -> Self {
        let unknown_outcomes =
            UnknownOutcomes::new(Arc::clone(&guarded), Arc::clone(&pool), me.clone(), settings.clone(), chain.clone());
        Self { guarded, pool, me, settings, unknown_outcomes, chain, dead_letters_read: Mutex::default() }
    }

    /// Runs all sweeps until shutdown, each in a task of its own: one that waits for a slow relayer, or computes for long,
    /// must not delay the heartbeat, which would look like the death of this consumer.
    pub async fn run(self: Arc<Self>, shutdown: CancellationToken) {
        let mut sweeps = JoinSet::new();
        for sweep in Sweep::ALL {
            // A relayer that is slow must not delay the claims at the others.
            let relayers = (0..self.pool.clients().len()).map(Part::Relayer).chain([Part::Others]);
            let parts = if sweep == Sweep::Claims { relayers.collect() } else { vec![Part::All] };
            for part in parts {
                let this = Arc::clone(&self);
                sweeps.spawn(async move { this.repeat(sweep, part).await });
            }
        }
        shutdown.cancelled().await;
        sweeps.shutdown().await;
    }

    /// Runs one sweep once.
    pub async fn sweep(&self, sweep: Sweep) -> Result<(), StoreError> {
        self.sweep_part(sweep, Part::All).await
    }

    async fn sweep_part(&self, sweep: Sweep, part: Part) -> Result<(), StoreError> {
        match sweep {
            Sweep::Heartbeat => self.guarded.store.heartbeat(&self.me, self.guarded.clock.now()).await,
            Sweep::Claims => self.sweep_claims(part).await,
            Sweep::Submitted => self.sweep_submitted().await,
            Sweep::Waiting => self.sweep_waiting().await,
            Sweep::DeadLetters => self.share_dead_letter_sweep().await,
            Sweep::CleanUp => {
                let before = self.guarded.clock.now() - EARLY_WEBHOOK_LIFETIME;
                self.guarded.store.forget(before).await.map(|_| ())
            }
        }
    }

    /// Pause between two runs of a sweep.
    pub fn pause(&self, sweep: Sweep) -> Duration {
        match sweep {
            Sweep::Heartbeat => self.settings.consumer_dead_after / 4,
            Sweep::Claims | Sweep::Submitted | Sweep::Waiting => self.settings.interval,
            Sweep::DeadLetters => self.settings.dead_letters_every,
            Sweep::CleanUp => FORGET_EVERY,
        }
    }

    /// Repeats one sweep forever. A failure is logged once per outage.
    async fn repeat(&self, sweep: Sweep, part: Part) {
        let clock = &self.guarded.clock;
        let mut away = false;
        loop {
            let started = clock.instant();
            // A panic ends one run of the sweep, not the sweep.
            let swept = AssertUnwindSafe(self.sweep_part(sweep, part)).catch_unwind().await.unwrap_or_else(|_| {
                error!(action = "sweep_panicked", sweep = sweep.name(), "a sweep panicked; it is run again");
                Ok(())
            });
            match swept {
                Ok(()) => away = false,
                Err(failure) if !away => {
                    warn!(
                        action = "sweep_failed",
                        sweep = sweep.name(),
                        "the reconciler waits for the store: {failure}"
                    );
                    away = true;
                }
                Err(_) => {}
            }
            // A sweep that takes long runs less often: it never takes more than half of the time.
            clock.sleep(self.pause(sweep).max(clock.elapsed(started))).await;
        }
    }

    async fn sweep_claims(&self, part: Part) -> Result<(), StoreError> {
        let mut rows = self.guarded.store.due(Due::Claimed, self.guarded.clock.now(), SWEEP_MAX).await?;
        let clients = self.pool.clients();
        rows.retain(|row| {
            let at =
                |client: &Arc<RelayerClient>| row.claim.as_ref().is_some_and(|claim| claim.relayer == *client.url());
            match part {
                Part::All => true,
                Part::Relayer(index) => at(&clients[index]),
                Part::Others => !clients.iter().any(at),
            }
        });
        self.unknown_outcomes.settle(rows).await
    }

    /// Rows without a claim for long: never queued, or their message was lost. A backlog in the queue explains it too, and
    /// then a second message would only add to it.
    async fn sweep_waiting(&self) -> Result<(), StoreError> {
        let rows = self.guarded.store.due(Due::Waiting, self.guarded.clock.now(), SWEEP_MAX).await?;
        if rows.is_empty() {
            return Ok(());
        }
        let depth = self.guarded.queue.depth().await.ok();
        let backlog = depth.and_then(|depth| depth.oldest_age).unwrap_or_default();
        let behind = backlog >= self.guarded.timings.pending_check / 2;
        let looks = rows.iter().map(|row| self.queue_again(row, behind));
        futures::future::join_all(looks).await.into_iter().collect()
    }

    async fn queue_again(&self, row: &Transaction, behind: bool) -> Result<(), StoreError> {
        let (now, timings) = (self.guarded.clock.now(), &self.guarded.timings);
        let later = now + timings.pending_check;
        // Soon, until the queue has the message: this process may die before that.
        let again_at = if behind { later } else { now + timings.message_check() };
        let Some(row) = self.look_again_if_due(row, again_at).await? else { return Ok(()) };
        if behind {
            return Ok(());
        }
        counter!("baton_reconciler_total", "finding" => "unclaimed").increment(1);
        info!(transactionId = %row.id, action = "queued_again", "no consumer has claimed it; queued again");
        if self.guarded.publish_again(&row, Duration::ZERO).await {
            self.look_again_if_due(&row, later).await?;
        }
        Ok(())
    }

    /// Submitted rows without news: asks their relayers. Consumers share the rows: each takes some at a time. A relayer that
    /// does not answer is not asked again in this sweep.
    async fn sweep_submitted(&self) -> Result<(), StoreError> {
        let mut silent: HashSet<RelayerUrl> = HashSet::new();
        let (mut left, mut silent_looks) = (SWEEP_MAX, 0);
        while left > 0 {
            let now = self.guarded.clock.now();
            let rows = self.guarded.store.lease_due(Due::Bound, now, now + LOOK_LEASE, QUESTIONS_MAX.min(left)).await?;
            let asked = rows.iter().map(|row| {
                if !row.binding.as_ref().is_some_and(|binding| silent.contains(&binding.relayer)) {
                    return self.ask(row, Ask::Relayer);
                }
                silent_looks += 1;
                self.ask(row, if silent_looks <= SILENT_LOOKS_MAX { Ask::Chain } else { Ask::Later })
            });
            for asked in futures::future::join_all(asked).await {
                silent.extend(asked?);
            }
            left = if rows.len() < QUESTIONS_MAX { 0 } else { left - rows.len() };
        }
        Ok(())
    }

    /// Asks about one row; returns its relayer if that did not answer.
    async fn ask(&self, row: &Transaction, whom: Ask) -> Result<Option<RelayerUrl>, StoreError> {
        let Some(binding) = &row.binding else { return Ok(None) };
        let now = self.guarded.clock.now();
        let pause =
            now.since(binding.at).clamp(self.guarded.timings.submitted_check, self.guarded.timings.submitted_check_max);
        // What a relayer has forgotten, the chain may settle at any time.
        let forgotten = binding.forgotten_since.is_some() && self.chain.is_some();
        let pause = if forgotten { pause.min(FORGOTTEN_CHECK_MAX) } else { pause };
        if self.confirmed_by_chain(row).await? {
            return Ok(None);
        }
        let Some(client) = self.pool.ask_one(&binding.relayer) else {
            if self.settled_by_chain(row, RelayerStatement::Silent).await? {
                return Ok(None);
            }
            // No relayer is left to ask: shown like one that has forgotten the transaction, for an operator to settle.
            counter!("baton_reconciler_total", "finding" => "relayer-gone").increment(1);
            self.forgotten(row, RecordLost::NotKnown, now + pause).await?;
            return Ok(None);
        };
        match whom {
            Ask::Relayer => {}
            Ask::Chain => {
                self.unanswered(row, now + pause).await?;
                return Ok(None);
            }
            Ask::Later => {
                self.look_again_if_due(row, now + pause).await?;
                return Ok(None);
            }
        }
        match client.transaction(&binding.tx_id, self.settings.question_timeout).await {
            Ok(Some(report)) if row.call.is_replaced_in(&report) => {
                counter!("baton_reconciler_total", "finding" => "another-call").increment(1);
                if !self.settled_by_chain(row, RelayerStatement::Forgotten).await? {
                    self.forgotten(row, RecordLost::AnotherCall, now + pause).await?;
                }
                Ok(None)
            }
            Ok(Some(report)) => {
                let answered = self.answered(row).await?;
                let row = answered.as_ref().unwrap_or(row);
                if self.guarded.apply(row.id, &report, Origin::Reconciler).await? == Applied::Moved {
                    counter!("baton_reconciler_total", "finding" => "news-missed").increment(1);
                }
                if self.is_idle(row, &report) {
                    self.cancel(row, &client, now + pause.min(self.guarded.timings.cancel_settles())).await?;
                } else if !self.settled_by_chain(row, RelayerStatement::Says(&report)).await? {
                    self.look_again_if_due(row, now + pause).await?;
                }
                Ok(None)
            }
            Ok(None) => {
                counter!("baton_reconciler_total", "finding" => "forgotten").increment(1);
                if self.settled_by_chain(row, RelayerStatement::Forgotten).await? {
                    return Ok(None);
                }
                self.forgotten(row, RecordLost::NotKnown, now + pause).await?;
                Ok(None)
            }
            Err(failure) => {
                info!(transactionId = %row.id, action = "no_news", relayer = %binding.relayer, "{}", describe(&failure));
                self.unanswered(row, now + pause).await?;
                Ok(Some(binding.relayer.clone()))
            }
        }
    }

    /// A row whose relayer gives no usable answer: it is down, refuses the key, or answers with something else. The chain is
    /// asked, and after a while an operator.
    async fn unanswered(&self, row: &Transaction, again_at: Timestamp) -> Result<(), StoreError> {
        if self.settled_by_chain(row, RelayerStatement::Silent).await? {
            return Ok(());
        }
        let Some(asked) = &row.binding else { return Ok(()) };
        let (clock, now) = (&self.guarded.clock, self.guarded.clock.now());
        let decide = |now_row: &Transaction| match &now_row.binding {
            Some(binding) if binding.tx_id == asked.tx_id => {
                let silent_for = now_row.silent_since().map(|since| clock.passed_since(since)).unwrap_or_default();
                // The look at the chain has set the time of the next one.
                let set = now_row.check_at.filter(|_| now_row.version != row.version);
                now_row.unanswered(silent_for, set.unwrap_or(again_at), now, &self.guarded.timings)
            }
            _ => Err(MOVED),
        };
        if let Updated::Moved(moved) = self.guarded.update(row.id, decide).await?
            && moved.is_only_silent()
        {
            counter!("baton_reconciler_total", "finding" => "relayer-silent").increment(1);
            if !row.outcome_unknown() {
                warn!(transactionId = %row.id, action = "outcome_unknown", relayer = %asked.relayer, "the relayer has long given no usable answer about it");
            }
        }
        Ok(())
    }

    /// The row, if its relayer was silent about it and answers again.
    async fn answered(&self, row: &Transaction) -> Result<Option<Transaction>, StoreError> {
        if row.silent_since().is_none() {
            return Ok(None);
        }
        let now = self.guarded.clock.now();
        match self.guarded.update(row.id, |row| row.answered(now)).await? {
            Updated::Moved(row) => Ok(Some(*row)),
            Updated::Refused(..) | Updated::Missing => Ok(None),
        }
    }

    /// Confirms a row whose relayer has just called it confirmed, without asking the relayer again.
    async fn confirmed_by_chain(&self, row: &Transaction) -> Result<bool, StoreError> {
        // In confirm mode the relayer's whole record is the result, so the relayer is asked for it.
        let (Some(chain), RelayMode::FireAndForget) = (&self.chain, self.guarded.mode) else { return Ok(false) };
        match row.relayer_says.as_ref().and_then(wire::read_record) {
            Some(said) => chain.confirm(row, &said).await,
            None => Ok(false),
        }
    }

    /// Whether the relayer has had it for long and has not signed it: it was killed between storing the record and
    /// queueing its job, and would keep it for good. A relayer that works gives such a record up after two minutes.
    fn is_idle(&self, row: &Transaction, report: &Report) -> bool {
        let age = row.binding.as_ref().map(|binding| self.guarded.clock.passed_since(binding.at)).unwrap_or_default();
        let pending = report.status == ReportedStatus::Open(Progress::Pending) && report.never_signed();
        pending && row.is_unsigned() && !row.imported && age >= self.guarded.timings.unproven_wait
    }

    /// Asks the relayer to cancel a record that it does not work on. A cancellation that is certain re-routes the row.
    async fn cancel(&self, row: &Transaction, client: &RelayerClient, again_at: Timestamp) -> Result<(), StoreError> {
        let Some(asked) = &row.binding else { return Ok(()) };
        let now = self.guarded.clock.now();
        let decide = |row: &Transaction| match &row.binding {
            Some(binding) if binding.tx_id == asked.tx_id => row.request_cancel(again_at, now),
            _ => Err(MOVED),
        };
        // Stored first: what the relayer reports afterwards is then known to be our cancellation.
        if !matches!(self.guarded.update(row.id, decide).await?, Updated::Moved(_)) {
            return Ok(());
        }
        counter!("baton_reconciler_total", "finding" => "idle-record").increment(1);
        match client.cancel(&asked.tx_id, self.settings.question_timeout).await {
            Ok(Some(report)) => self.guarded.apply(row.id, &report, Origin::Reconciler).await.map(|_| ()),
            Ok(None) => Ok(()),
            Err(failure) => {
                info!(transactionId = %row.id, action = "not_canceled", relayer = %asked.relayer, "{}", describe(&failure));
                Ok(())
            }
        }
    }

    /// Looks a row up on the chain if its relayer's statement needs that, or it has been silent for long. Returns
    /// whether the row was settled or its next look was set.
    async fn settled_by_chain(&self, row: &Transaction, statement: RelayerStatement<'_>) -> Result<bool, StoreError> {
        let Some(chain) = &self.chain else { return Ok(false) };
        let said = if let RelayerStatement::Says(said) = statement { Some(said) } else { None };
        let forgotten = matches!(statement, RelayerStatement::Forgotten);
        let now = self.guarded.clock.now();
        let ended = said.is_some_and(|said| row.needs_chain(said, now, &self.guarded.timings));
        let silent = matches!(statement, RelayerStatement::Silent) && chain.is_old(row);
        let wanted = ended || forgotten || silent || chain.is_overdue(row);
        if !wanted {
            return Ok(false);
        }
        // The report, or another consumer, may have moved it: what was said of one record decides nothing about another.
        let asked = row.binding.as_ref().map(|binding| &binding.tx_id);
        let Some(row) = self.guarded.store.get(row.id).await? else { return Ok(true) };
        if row.status.is_final() || row.binding.as_ref().map(|binding| &binding.tx_id) != asked {
            return Ok(true);
        }
        Ok(match chain.settle(&row, statement).await? {
            ChainCheckResult::Settled => true,
            ChainCheckResult::Open(_) | ChainCheckResult::Absent(_) => said.is_some_and(|said| said.status.is_over()),
        })
    }

    async fn forgotten(&self, row: &Transaction, how: RecordLost, again_at: Timestamp) -> Result<(), StoreError> {
        let Some(asked) = &row.binding else { return Ok(()) };
        if asked.forgotten_since.is_none() {
            let (relayer, tx_id) = (&asked.relayer, &asked.tx_id);
            error!(transactionId = %row.id, action = "forgotten", relayer = %relayer, "the relayer {} {tx_id}", how.describe());
        }
        let now = self.guarded.clock.now();
        let decide = |row: &Transaction| match &row.binding {
            Some(binding) if binding.tx_id == asked.tx_id => row.forgotten(how, again_at, now),
            _ => Err(MOVED),
        };
        self.guarded.update(row.id, decide).await.map(|_| ())
    }

    /// Sets the time of the next look, unless the row has moved since it was found to be due.
    async fn look_again_if_due(&self, row: &Transaction, at: Timestamp) -> Result<Option<Transaction>, StoreError> {
        let now = self.guarded.clock.now();
        let decide = |now_row: &Transaction| {
            if now_row.version == row.version { now_row.check_later(at, now) } else { Err(MOVED) }
        };
        match self.guarded.update(row.id, decide).await? {
            Updated::Moved(row) => Ok(Some(*row)),
            Updated::Refused(..) | Updated::Missing => Ok(None),
        }
    }
}

const MOVED: MoveRefused = MoveRefused::NotPossible("it has moved meanwhile");
