//! The orchestration of the lane, line by line as in `guarded.rs`, `consumer.rs`, `unknown.rs`, `reconciler.rs`,
//! `webhook.rs` and `dead_letters.rs`, with the world in place of database, queue and relayers. Every decision is the
//! product's own pure code. If one of those files changes, change its mirror here.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use baton::config::RelayMode;
use baton::relay::reconcile::absence_proof::{self, EqualClaims, Finding, LostSubmission, Memory, RelayerListing};
use baton::relay::relayer::client::{Answer, NotTaken};
use baton::relay::request::call::Call;
use baton::relay::state::report::{Report, Source, Verdict};
use baton::relay::state::transaction::{
    Claim, ConsumerId, Moved, NextStep, Refused, RelayerTxId, RelayerUrl, Status, Transaction, UnknownCause,
    UnknownOutcome,
};
use baton::relay::store::Due;
use baton::timestamp::Timestamp;
use futures::future::join_all;
use uuid::Uuid;

use super::world::{
    CLOCK_SKEW, CLOCKS, CONSUMER_DEAD_AFTER, Fate, Fault, Mutation, Outcome, RETENTION, Receipt, Request, Sim, Stored,
    World, family, is_of, note, relayer_index,
};

/// A process at work.
#[derive(Clone)]
pub struct Lane {
    pub sim: Sim,
    pub me: ConsumerId,
}

/// What a store says instead of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// It did not do it, or did it and did not say so.
    Away,
    Conflict,
}

enum Updated {
    Moved(Rc<Transaction>),
    Refused,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Webhook,
    Asked,
}

const WAIT: i64 = 2000;
const FOLLOW_PAUSE: i64 = 1000;
const FOLLOW_FOR: i64 = 600_000;
const PERSIST_FOR: i64 = 60_000;
const ATTEMPTS_MAX: u32 = 3;
const AUTO_REPLAY_DELAY: i64 = 60_000;
const QUESTION_TIMEOUT: i64 = 5000;
const SLOW_CHECK: Duration = Duration::from_secs(30);
const MOVED: Refused = Refused::NotPossible("it has moved meanwhile");

fn ms(span: Duration) -> i64 {
    span.as_millis() as i64
}

// ---- guarded.rs, and the store's own calls ----

impl Lane {
    fn now(&self) -> Timestamp {
        self.sim.w().at()
    }

    async fn get(&self, index: usize) -> Result<Rc<Transaction>, Failure> {
        self.sim.turn().await;
        let mut world = self.sim.w();
        if world.fate() == Fate::Done { Ok(Rc::clone(&world.rows[index])) } else { Err(Failure::Away) }
    }

    /// `by` is the claim that this acts on.
    async fn save(&self, moved: Moved, by: Option<Uuid>) -> Result<Option<Rc<Transaction>>, Failure> {
        self.sim.turn().await;
        let stored = {
            let mut world = self.sim.w();
            let fate = world.fate();
            if fate == Fate::Away {
                note!(world, "  the store is away");
                return Err(Failure::Away);
            }
            let by = by.filter(|_| world.mutation != Mutation::NoClaim);
            let stored = world.save(moved, by);
            if fate == Fate::Unanswered {
                note!(world, "  the store does not answer");
                return Err(Failure::Away);
            }
            stored
        };
        match stored {
            Stored::Yes { row, early } => {
                if let (true, Some(binding)) = (early, &row.binding) {
                    Box::pin(self.apply_early(World::index_of(row.id), &binding.tx_id)).await?;
                }
                Ok(Some(row))
            }
            Stored::Stale => Ok(None),
            Stored::Conflict => Err(Failure::Conflict),
        }
    }

    async fn update(
        &self,
        index: usize,
        by: Option<Uuid>,
        decide: impl Fn(&Transaction) -> Result<Moved, Refused>,
    ) -> Result<Updated, Failure> {
        let row = self.get(index).await?;
        self.update_from(row, by, decide).await
    }

    async fn update_from(
        &self,
        mut row: Rc<Transaction>,
        by: Option<Uuid>,
        decide: impl Fn(&Transaction) -> Result<Moved, Refused>,
    ) -> Result<Updated, Failure> {
        loop {
            match decide(&row) {
                Err(_) => return Ok(Updated::Refused),
                Ok(moved) => {
                    if let Some(row) = self.save(moved, by).await? {
                        return Ok(Updated::Moved(row));
                    }
                }
            }
            row = self.get(World::index_of(row.id)).await?;
        }
    }

    async fn persist(
        &self,
        row: &Rc<Transaction>,
        by: Option<Uuid>,
        decide: impl Fn(&Transaction) -> Result<Moved, Refused>,
    ) -> Result<Updated, Failure> {
        let deadline = self.now().0 + PERSIST_FOR;
        let mut pause = 50;
        loop {
            match self.update_from(Rc::clone(row), by, &decide).await {
                Err(Failure::Away) if self.now().0 < deadline => {
                    let until = self.now().0 + pause;
                    self.sim.sleep_until(until).await;
                    pause = (pause * 2).min(2000);
                }
                other => return other,
            }
        }
    }

    /// Answers whether it moved the row.
    async fn apply(&self, index: usize, report: &Report, origin: Origin) -> Result<bool, Failure> {
        let source = if origin == Origin::Webhook { Source::Webhook } else { Source::Asked };
        loop {
            let row = self.get(index).await?;
            let verdict = {
                let world = self.sim.w();
                let row = unfinished(&world, &row);
                row.report(report, source, world.mode, world.at(), &CLOCKS)
            };
            let (moved, reroute) = match verdict {
                Verdict::Ignore(_) => return Ok(false),
                Verdict::DoubleSend(step) => {
                    self.sim.w().fail(format!("t{index}: a relayer seems to have sent twice: {}", step.detail));
                    return Ok(false);
                }
                Verdict::Move(moved) => (moved, None),
                Verdict::Reroute(moved, pause) => (moved, Some(pause)),
            };
            let Some(row) = self.save(*moved, None).await? else { continue };
            if let Some(pause) = reroute {
                self.sim.w().counters.reroutes += 1;
                self.publish_again(&row, pause).await;
            }
            return Ok(true);
        }
    }

    async fn apply_early(&self, index: usize, tx_id: &RelayerTxId) -> Result<(), Failure> {
        self.sim.turn().await;
        let early: Vec<Rc<Report>> = {
            let mut world = self.sim.w();
            if world.early.is_empty() {
                return Ok(());
            }
            if world.fate() != Fate::Done {
                return Err(Failure::Away);
            }
            let (taken, kept) = std::mem::take(&mut world.early).into_iter().partition(|(id, _)| id == tx_id);
            world.early = kept;
            let taken: Vec<(RelayerTxId, Rc<Report>)> = taken;
            world.counters.early += taken.len() as u64;
            taken.into_iter().map(|(_, report)| report).collect()
        };
        for report in early {
            self.apply(index, &report, Origin::Webhook).await?;
        }
        Ok(())
    }

    async fn publish_again(&self, row: &Transaction, delay: Duration) {
        self.sim.turn().await;
        let mut world = self.sim.w();
        if world.has(Fault::LoseMessage) && world.rng.one_in(6) {
            note!(world, "  the queue is away");
            return;
        }
        world.publish(World::index_of(row.id), ms(delay));
    }

    async fn due(&self, kind: Due) -> Result<Vec<Rc<Transaction>>, Failure> {
        self.sim.turn().await;
        let mut world = self.sim.w();
        if world.fate() != Fate::Done {
            return Err(Failure::Away);
        }
        let now = world.at();
        let mut rows: Vec<_> = world.rows.iter().filter(|row| is_due(row, kind, now)).cloned().collect();
        rows.sort_by_key(|row| row.check_at);
        Ok(rows)
    }
}

/// The condition of the store's query.
pub fn is_due(row: &Transaction, kind: Due, now: Timestamp) -> bool {
    let fits = match kind {
        Due::Claimed => row.claim.is_some(),
        Due::Bound => row.claim.is_none() && row.binding.is_some(),
        Due::Waiting => row.claim.is_none() && row.binding.is_none(),
    };
    fits && row.check_at.is_some_and(|at| at <= now)
}

/// The row; under [`Mutation::NoForwardOnly`] one that has forgotten that it is final.
fn unfinished(world: &World, row: &Rc<Transaction>) -> Rc<Transaction> {
    if world.mutation != Mutation::NoForwardOnly || !row.status.is_final() || row.binding.is_none() {
        return Rc::clone(row);
    }
    let mut row = (**row).clone();
    row.status = Status::Submitted;
    if let Some(binding) = &mut row.binding {
        binding.progress = baton::relay::state::transaction::Progress::Pending;
    }
    Rc::new(row)
}

// ---- consumer.rs ----

impl Lane {
    pub async fn handle(self, receipt: Receipt) {
        let outcome = self.process(receipt.row).await.unwrap_or(Outcome::Retry(WAIT));
        self.sim.turn().await;
        let mut world = self.sim.w();
        let word = match &outcome {
            Outcome::Done => "done",
            Outcome::Retry(_) => "again later",
            Outcome::Dead => "dead",
        };
        note!(world, "{}: m{} about t{}: {word}", self.me, receipt.message, receipt.row);
        world.settle(receipt, &outcome);
    }

    async fn process(&self, index: usize) -> Result<Outcome, Failure> {
        let row = self.get(index).await?;
        let mode = self.sim.w().mode;
        match row.next_step() {
            NextStep::Submit => self.submit(row).await,
            NextStep::Follow if mode == RelayMode::Confirm => self.follow(index).await,
            NextStep::Follow | NextStep::Nothing => Ok(Outcome::Done),
            NextStep::Bury(_) => Ok(Outcome::Dead),
            NextStep::LeaveAlone => Ok(Outcome::Retry(ms(CLOCKS.claim_check))),
        }
    }

    async fn submit(&self, mut row: Rc<Transaction>) -> Result<Outcome, Failure> {
        let index = World::index_of(row.id);
        let mut avoided = row.avoid.clone();
        let mut tried: Vec<RelayerUrl> = avoided.iter().cloned().collect();
        loop {
            let Some(relayer) = self.choose(&tried).await else {
                if avoided.is_some() {
                    tried.retain(|url| Some(url) != avoided.as_ref());
                    avoided = None;
                    continue;
                }
                return Ok(Outcome::Retry(WAIT));
            };
            let claiming = self.now().0;
            let Some((claimed, token)) = self.claim(&row, &relayer).await? else {
                return Ok(Outcome::Retry(0));
            };
            let answer = self.post(index, &relayer, claiming + ms(CLOCKS.send_window)).await;
            note!(self.sim.w(), "{}: t{index} answer {}", self.me, name(&answer));
            let claimed_as = Claimed { row: claimed, token };
            match answer {
                Answer::Accepted(report) => return self.bound(index, &claimed_as, *report).await,
                Answer::Refused(reason) => {
                    self.sim.w().truth[index].item_failures += 1;
                    let now = self.now();
                    let decide =
                        |row: &Transaction| self.as_claimed(row, &claimed_as).refuse(token, &reason, now, &CLOCKS);
                    return Ok(self.after_failure(self.persist(&claimed_as.row, Some(token), decide).await?));
                }
                Answer::ItemFailed(reason) => {
                    self.sim.w().truth[index].item_failures += 1;
                    let now = self.now();
                    let decide = |row: &Transaction| {
                        self.as_claimed(row, &claimed_as).attempt_failed(token, &reason, ATTEMPTS_MAX, now, &CLOCKS)
                    };
                    return Ok(self.after_failure(self.persist(&claimed_as.row, Some(token), decide).await?));
                }
                Answer::Unknown { answered, .. } if !self.sim.w().is_refusal(answered) => {
                    let kind = if answered { UnknownCause::Answered } else { UnknownCause::Silent };
                    return self.record_unknown_outcome(&claimed_as, kind).await;
                }
                Answer::NotTaken { .. } | Answer::Unknown { .. } => {
                    let fenced = matches!(answer, Answer::NotTaken { why: NotTaken::Fenced, .. });
                    let now = self.now();
                    let decide = |row: &Transaction| self.as_claimed(row, &claimed_as).release(token, "", now, &CLOCKS);
                    let released = self.persist(&claimed_as.row, Some(token), decide).await?;
                    match released {
                        Updated::Moved(released) if !fenced => row = released,
                        _ => return Ok(Outcome::Retry(0)),
                    }
                    tried.push(relayer);
                }
            }
        }
    }

    /// Routing may pick any relayer that was not tried; it does not always know how they are.
    async fn choose(&self, tried: &[RelayerUrl]) -> Option<RelayerUrl> {
        let waits = self.sim.w().rng.one_in(4);
        if waits {
            self.sim.turn().await;
        }
        let mut world = self.sim.w();
        let first = world.rng.below(2) as usize;
        for relayer in [first, 1 - first] {
            let seems_able = !(world.relayers[relayer].paused || world.relayers[relayer].down) || world.rng.one_in(2);
            let url = &world.fixtures.urls[relayer];
            if seems_able && !tried.contains(url) {
                return Some(url.clone());
            }
        }
        None
    }

    async fn claim(
        &self,
        row: &Rc<Transaction>,
        relayer: &RelayerUrl,
    ) -> Result<Option<(Rc<Transaction>, Uuid)>, Failure> {
        let (token, now) = {
            let mut world = self.sim.w();
            (world.new_token(), world.at())
        };
        let decide = |row: &Transaction| row.claim(&self.me, token, relayer, "", now, &CLOCKS);
        if self.sim.w().mutation == Mutation::NoClaim {
            return Ok(decide(row).ok().map(|moved| (Rc::new(moved.transaction), token)));
        }
        match self.update_from(Rc::clone(row), None, decide).await? {
            Updated::Moved(row) => Ok(Some((row, token))),
            Updated::Refused => Ok(None),
        }
    }

    /// `RelayerClient::submit`.
    async fn post(&self, index: usize, relayer: &RelayerUrl, not_after: i64) -> Answer {
        let deadline = self.now().0 + ms(CLOCKS.submit_timeout);
        // The connection is made, and the process may be stopped at any moment.
        self.sim.turn().await;
        let slot = {
            let mut world = self.sim.w();
            let to = relayer_index(relayer);
            if world.relayers[to].down {
                return Answer::NotTaken { why: NotTaken::Fault, detail: String::new() };
            }
            if world.now >= not_after && world.mutation != Mutation::NoFence {
                world.counters.fenced += 1;
                return Answer::NotTaken { why: NotTaken::Fenced, detail: String::new() };
            }
            let content = world.truth[index].content;
            note!(world, "{}: t{index} sent to {relayer}, request {}", self.me, world.requests.len());
            world.post(&self.sim, to, content)
        };
        Reply { sim: &self.sim, slot, deadline }.await
    }

    async fn bound(&self, index: usize, claimed: &Claimed, report: Report) -> Result<Outcome, Failure> {
        let now = self.now();
        let from = report.from.as_deref();
        let bind = |row: &Transaction| {
            self.as_claimed(row, claimed).bind(claimed.token, &report.tx_id, from, "", now, &CLOCKS)
        };
        match self.persist(&claimed.row, Some(claimed.token), bind).await {
            Ok(Updated::Moved(_)) => {}
            Ok(Updated::Refused) => {
                self.sim.w().counters.late_answers += 1;
                return Ok(Outcome::Done);
            }
            Err(Failure::Conflict) => {
                self.sim.w().counters.exchanged += 1;
                return self.record_unknown_outcome(claimed, UnknownCause::Exchanged).await;
            }
            Err(failure) => return Err(failure),
        }
        let mode = self.sim.w().mode;
        match mode {
            RelayMode::FireAndForget => Ok(Outcome::Done),
            RelayMode::Confirm => self.follow(index).await,
        }
    }

    fn after_failure(&self, updated: Updated) -> Outcome {
        let Updated::Moved(row) = updated else { return Outcome::Retry(0) };
        if row.status == Status::Failed {
            return Outcome::Dead;
        }
        Outcome::Retry(match row.attempts {
            0 => AUTO_REPLAY_DELAY,
            attempts => 1000 << attempts,
        })
    }

    async fn record_unknown_outcome(&self, claimed: &Claimed, kind: UnknownCause) -> Result<Outcome, Failure> {
        self.sim.w().counters.doubts += 1;
        let now = self.now();
        let decide = |row: &Transaction| {
            self.as_claimed(row, claimed).mark_unknown(claimed.token, "unknown", kind, now, &CLOCKS)
        };
        self.persist(&claimed.row, Some(claimed.token), decide).await?;
        Ok(Outcome::Done)
    }

    async fn follow(&self, index: usize) -> Result<Outcome, Failure> {
        let until = self.now().0 + FOLLOW_FOR;
        loop {
            let row = self.get(index).await?;
            let Some(binding) = row.binding.as_ref().filter(|_| !row.status.is_final()) else {
                return Ok(Outcome::Done);
            };
            if self.now().0 >= until {
                return Ok(Outcome::Done);
            }
            match self.transaction(&binding.relayer, &binding.tx_id).await {
                Ok(Some(report)) => drop(self.apply(index, &report, Origin::Asked).await?),
                Ok(None) => return Ok(Outcome::Done),
                Err(Silence) => {}
            }
            // A timer may be late.
            let pause = FOLLOW_PAUSE + self.sim.w().rng.below(30_000) as i64;
            let until = self.now().0 + pause;
            self.sim.sleep_until(until).await;
        }
    }

    /// The row as it is; under [`Mutation::NoClaim`] as if the claim had been stored, and under
    /// [`Mutation::NoToken`] as if it were still ours.
    fn as_claimed<'a>(&self, row: &'a Transaction, claimed: &Claimed) -> Cow<'a, Transaction> {
        let mut row = Cow::Borrowed(row);
        match self.sim.w().mutation {
            Mutation::NoClaim if row.claim.is_none() => row.to_mut().claim.clone_from(&claimed.row.claim),
            Mutation::NoToken => {
                if let Some(claim) = &mut row.to_mut().claim {
                    claim.token = claimed.token;
                }
            }
            _ => {}
        }
        row
    }
}

/// A claim, and the row as it was then.
struct Claimed {
    row: Rc<Transaction>,
    token: Uuid,
}

fn name(answer: &Answer) -> &'static str {
    match answer {
        Answer::Accepted(_) => "accepted",
        Answer::Refused(_) => "refused",
        Answer::ItemFailed(_) => "item failed",
        Answer::NotTaken { why: NotTaken::Fenced, .. } => "not sent: too late",
        Answer::NotTaken { .. } => "not taken",
        Answer::Unknown { answered: true, .. } => "unknown (it answered)",
        Answer::Unknown { .. } => "unknown (silence)",
    }
}

impl World {
    fn is_refusal(&self, answered: bool) -> bool {
        answered && self.mutation == Mutation::ErrorIsRefusal
    }
}

/// Waits for an answer, or until time is up.
struct Reply<'a> {
    sim: &'a Sim,
    slot: usize,
    deadline: i64,
}

impl Future for Reply<'_> {
    type Output = Answer;

    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Answer> {
        let mut world = self.sim.w();
        let in_time = world.now < self.deadline;
        // Both at once, after a standstill: either may be seen first.
        if (in_time || world.rng.one_in(2))
            && let Some(answer) = world.slots[self.slot].answer.take()
        {
            return Poll::Ready(answer);
        }
        if !in_time {
            return Poll::Ready(Answer::Unknown { reason: String::new(), answered: false });
        }
        world.wake = world.wake.min(self.deadline);
        Poll::Pending
    }
}

/// A relayer does not answer a question.
struct Silence;

impl Lane {
    /// `RelayerClient::transaction`: what it knew at some moment.
    async fn transaction(&self, relayer: &RelayerUrl, tx_id: &RelayerTxId) -> Result<Option<Rc<Report>>, Silence> {
        self.sim.turn().await;
        self.reach(relayer).await?;
        let known = {
            let world = self.sim.w();
            let relayer = &world.relayers[relayer_index(relayer)];
            if relayer.down { Err(Silence) } else { Ok(relayer.find(tx_id, world.now).cloned()) }
        };
        self.travel_back().await;
        known
    }

    /// A relayer that stands still answers when it goes on, if anybody still listens.
    async fn reach(&self, relayer: &RelayerUrl) -> Result<(), Silence> {
        let (now, goes_on_at) = {
            let world = self.sim.w();
            (world.now, world.relayers[relayer_index(relayer)].stalled_until)
        };
        if goes_on_at > now {
            self.sim.sleep_until(goes_on_at.min(now + QUESTION_TIMEOUT)).await;
        }
        if goes_on_at > now + QUESTION_TIMEOUT { Err(Silence) } else { Ok(()) }
    }

    /// An answer takes its time too, sometimes: what it says may be old by then.
    async fn travel_back(&self) {
        let slow = {
            let mut world = self.sim.w();
            match world.has(Fault::Slow) && world.rng.one_in(4) {
                true => Some(world.now + world.rng.pick(&[1000, 6000, 36_000])),
                false => None,
            }
        };
        if let Some(until) = slow {
            self.sim.sleep_until(until).await;
        }
    }
}

// ---- unknown.rs ----

struct UnresolvedClaim {
    row: Rc<Transaction>,
    claim: Claim,
    unknown: UnknownOutcome,
}

impl UnresolvedClaim {
    fn case(&self, search: &RelayerListing) -> LostSubmission<'_> {
        let Self { row, claim, unknown } = self;
        let over = unknown.is_over(search.read_at, &CLOCKS);
        LostSubmission { call: &row.call, claim, unknown, slip: Duration::ZERO, over }
    }

    fn index(&self) -> usize {
        World::index_of(self.row.id)
    }
}

impl Lane {
    async fn sweep_claims(&self) -> Result<(), Failure> {
        let rows = self.due(Due::Claimed).await?;
        let mut by_relayer: BTreeMap<RelayerUrl, Vec<UnresolvedClaim>> = BTreeMap::new();
        for case in join_all(rows.into_iter().map(|row| self.take_over(row))).await {
            if let Some(case) = case? {
                by_relayer.entry(case.claim.relayer.clone()).or_default().push(case);
            }
        }
        let settled = by_relayer.into_iter().map(|(relayer, cases)| self.settle_at(relayer, cases));
        join_all(settled).await.into_iter().collect()
    }

    async fn take_over(&self, row: Rc<Transaction>) -> Result<Option<UnresolvedClaim>, Failure> {
        let Some(claim) = &row.claim else { return Ok(None) };
        let (now, token) = {
            let mut world = self.sim.w();
            (world.at(), world.new_token())
        };
        self.sim.turn().await;
        let owner_gone = {
            let mut world = self.sim.w();
            if world.fate() != Fate::Done {
                return Err(Failure::Away);
            }
            match world.last_heartbeat(&claim.consumer) {
                Some(seen) => now.since(seen) > CONSUMER_DEAD_AFTER,
                None => true,
            }
        };
        let Ok(moved) = row.take_over(&self.me, token, owner_gone, now, &CLOCKS) else {
            if let Ok(later) = row.check_later(now + CLOCKS.claim_check, now) {
                self.save(later, None).await?;
            }
            return Ok(None);
        };
        let Some(row) = self.save(moved, None).await? else { return Ok(None) };
        self.sim.w().counters.take_overs += 1;
        let parts = row.claim.clone().and_then(|claim| claim.unknown.clone().map(|unknown| (claim, unknown)));
        Ok(parts.map(|(claim, unknown)| UnresolvedClaim { row, claim, unknown }))
    }

    async fn settle_at(&self, relayer: RelayerUrl, cases: Vec<UnresolvedClaim>) -> Result<(), Failure> {
        let now = self.now();
        let (cases, too_old): (Vec<_>, Vec<_>) =
            cases.into_iter().partition(|case| now.since(case.claim.at) + CLOCK_SKEW < RETENTION);
        for case in &too_old {
            let mut world = self.sim.w();
            let changes = world.changes;
            world.is_stuck(case, changes);
        }
        self.postpone(&too_old).await?;
        if cases.is_empty() {
            return Ok(());
        }
        match self.read_list(&relayer, &cases).await {
            Err(Silence) => self.postpone(&cases).await,
            Ok(search) => {
                let claims = self.claimed().await?;
                let mut memories = BTreeMap::new();
                for case in &cases {
                    self.settle_one(case, &search, &claims, &mut memories).await?;
                }
                Ok(())
            }
        }
    }

    async fn settle_one(
        &self,
        unresolved: &UnresolvedClaim,
        search: &RelayerListing,
        claims: &[Rc<Transaction>],
        memories: &mut BTreeMap<RelayerTxId, Memory>,
    ) -> Result<(), Failure> {
        let rivals = absence_proof::rivals(&unresolved.row, claims.iter().map(Rc::as_ref));
        let mut memory = None;
        let changes = self.sim.w().changes;
        let judgement = loop {
            let bound = self.bound_among(search).await?;
            match self.judge(unresolved, search, &bound, &rivals, memory) {
                Finding::Bind(record) => {
                    if self.bind_found(unresolved, record).await? {
                        return Ok(());
                    }
                }
                Finding::AskMemory => {
                    let found = self.memory(unresolved, memories).await?;
                    self.sim.w().excuse_known_gap(unresolved, found);
                    let blind = self.sim.w().mutation == Mutation::NoMemoryProof;
                    memory = Some(if blind { Memory::Kept } else { found });
                }
                other => break other,
            }
        };
        if let Finding::Unproven(why) = judgement {
            note!(self.sim.w(), "{}: t{} stays unknown: {why}", self.me, unresolved.index());
            if search.read_at >= unresolved.unknown.open_until {
                self.sim.w().is_stuck(unresolved, changes);
            }
            return self.postpone(std::slice::from_ref(unresolved)).await;
        }
        let (now, token) = (self.now(), unresolved.claim.token);
        let decide = |row: &Transaction| self.absent(row, token, search.read_at, now);
        if let Updated::Moved(row) = self.update(unresolved.index(), Some(token), decide).await?
            && row.claim.is_none()
        {
            self.sim.w().counters.resent += 1;
            self.publish_again(&row, Duration::ZERO).await;
        }
        Ok(())
    }

    /// `RelayerListing::judge`, or what is left of it under a mutation.
    fn judge<'a>(
        &self,
        unresolved: &UnresolvedClaim,
        search: &'a RelayerListing,
        bound: &HashSet<RelayerTxId>,
        rivals: &[Call],
        memory: Option<Memory>,
    ) -> Finding<'a> {
        let mut case = unresolved.case(search);
        let over = case.over;
        let mutation = self.sim.w().mutation;
        case.over |= mutation == Mutation::TakesWhileOpen;
        let judged = |rivals| search.judge(case, bound, EqualClaims::Calls(rivals), memory);
        let judgement = judged(rivals);
        match (mutation, judgement) {
            (Mutation::TakesUnproven, Finding::Unproven(_)) if search.read_at >= unresolved.unknown.open_until => {
                judged(&[])
            }
            (Mutation::TakesOldest, Finding::Bind(_)) if over => judged(&[]),
            _ => judgement,
        }
    }

    /// The rows with a claim.
    async fn claimed(&self) -> Result<Vec<Rc<Transaction>>, Failure> {
        self.sim.turn().await;
        let mut world = self.sim.w();
        if world.fate() != Fate::Done {
            return Err(Failure::Away);
        }
        Ok(world.rows.iter().filter(|row| row.claim.is_some()).cloned().collect())
    }

    /// `Transaction::absent`, or what is left of it under a mutation.
    fn absent(&self, row: &Transaction, token: Uuid, asked_at: Timestamp, now: Timestamp) -> Result<Moved, Refused> {
        let mutation = self.sim.w().mutation;
        if !matches!(mutation, Mutation::NoSecondLook | Mutation::HastySecondLook) {
            return row.absent(token, asked_at, now, &CLOCKS);
        }
        let mut row = row.clone();
        if let Some(unknown) = row.claim.as_mut().and_then(|claim| claim.unknown.as_mut()) {
            match mutation {
                Mutation::HastySecondLook => unknown.kind = UnknownCause::Answered,
                _ => unknown.absent_since = Some(Timestamp(0)),
            }
        }
        row.absent(token, asked_at, now, &CLOCKS)
    }

    async fn bound_among(&self, search: &RelayerListing) -> Result<HashSet<RelayerTxId>, Failure> {
        self.sim.turn().await;
        let mut world = self.sim.w();
        if world.fate() != Fate::Done {
            return Err(Failure::Away);
        }
        if world.mutation == Mutation::NoUniqueness {
            return Ok(HashSet::new());
        }
        let bound = |record: &&Report| world.owners.iter().any(|(tx_id, _)| *tx_id == record.tx_id);
        Ok(search.records.iter().filter(bound).map(|record| record.tx_id.clone()).collect())
    }

    /// Answers `false` if another row was quicker.
    async fn bind_found(&self, case: &UnresolvedClaim, record: &Report) -> Result<bool, Failure> {
        let now = self.now();
        let from = record.from.as_deref();
        let token = case.claim.token;
        let bind = |row: &Transaction| row.bind(token, &record.tx_id, from, "", now, &CLOCKS);
        match self.update(case.index(), Some(token), bind).await {
            Ok(Updated::Moved(_)) => {
                self.sim.w().counters.found += 1;
                self.apply(case.index(), record, Origin::Asked).await?;
                Ok(true)
            }
            Ok(Updated::Refused) => Ok(true),
            Err(Failure::Conflict) => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    async fn memory(
        &self,
        unresolved: &UnresolvedClaim,
        memories: &mut BTreeMap<RelayerTxId, Memory>,
    ) -> Result<Memory, Failure> {
        let now = self.now();
        self.sim.turn().await;
        let witness = {
            let mut world = self.sim.w();
            if world.fate() != Fate::Done {
                return Err(Failure::Away);
            }
            world.bound_before(&unresolved.claim.relayer, unresolved.claim.at)
        };
        let witness = witness
            .and_then(|witness| witness.binding.clone())
            .filter(|binding| now.since(binding.at) + CLOCK_SKEW < RETENTION);
        let Some(binding) = witness else { return Ok(Memory::Untestable) };
        if let Some(known) = memories.get(&binding.tx_id) {
            return Ok(*known);
        }
        let memory = match self.transaction(&binding.relayer, &binding.tx_id).await {
            Ok(Some(_)) => Memory::Kept,
            Ok(None) => Memory::Lost,
            Err(Silence) => Memory::Unasked,
        };
        memories.insert(binding.tx_id, memory);
        Ok(memory)
    }

    async fn postpone(&self, cases: &[UnresolvedClaim]) -> Result<(), Failure> {
        for unresolved in cases {
            let now = self.now();
            let quick = CLOCKS.unknown_check;
            let pause = (now.since(unresolved.claim.at) / 4).clamp(quick, SLOW_CHECK.max(quick));
            let decide = |row: &Transaction| match &row.claim {
                Some(held) if held.token == unresolved.claim.token => row.check_later(now + pause, now),
                _ => Err(Refused::NotOurClaim),
            };
            self.update(unresolved.index(), None, decide).await?;
        }
        Ok(())
    }

    async fn read_list(&self, relayer: &RelayerUrl, doubts: &[UnresolvedClaim]) -> Result<RelayerListing, Silence> {
        let read_at = self.now();
        let mut search =
            RelayerListing { records: Vec::new(), oldest: None, complete: true, skew: CLOCK_SKEW, read_at };
        self.sim.turn().await;
        self.reach(relayer).await?;
        let clock = {
            let world = self.sim.w();
            let relayer = &world.relayers[relayer_index(relayer)];
            if relayer.down {
                return Err(Silence);
            }
            for record in relayer.list(world.now) {
                search.oldest = record.created_at.into_iter().chain(search.oldest).min();
                if RelayerListing::matters(record, doubts.iter().map(|unresolved| &unresolved.row.call)) {
                    search.records.push((**record).clone());
                }
            }
            relayer.dated.then(|| Timestamp((world.now + relayer.offset) / 1000 * 1000))
        };
        self.travel_back().await;
        if let Some(clock) = clock {
            let now = self.now();
            search.skew = search.skew.max(CLOCK_SKEW + clock.since(now).max(now.since(clock)));
        }
        Ok(search)
    }
}

impl World {
    /// Nothing can be learned about a claim, unless it is somebody else's by now.
    fn is_stuck(&mut self, unresolved: &UnresolvedClaim, changes: u64) {
        let held = self.rows[unresolved.index()].claim.as_ref().map(|claim| claim.token);
        if held == Some(unresolved.claim.token) {
            self.truth[unresolved.index()].stuck = Some(changes);
        }
    }

    pub fn bound_before(&self, relayer: &RelayerUrl, before: Timestamp) -> Option<Rc<Transaction>> {
        let made_before = |row: &Transaction| ((row.id.0.as_u128() >> 80) as i64) < before.0;
        let bound_before = |row: &Transaction| {
            row.binding.as_ref().is_some_and(|binding| binding.relayer == *relayer && binding.at < before)
        };
        self.rows.iter().filter(|row| made_before(row) && bound_before(row)).max_by_key(|row| row.id).cloned()
    }

    /// ADR 4: without a witness, a relayer that answered is believed, and may have lost its memory all the same.
    fn excuse_known_gap(&mut self, unresolved: &UnresolvedClaim, memory: Memory) {
        let relayer = &self.relayers[relayer_index(&unresolved.claim.relayer)];
        let forgot = relayer.epoch > 0 && relayer.forgot_at >= unresolved.claim.at.0;
        let excusable = self.mutation != Mutation::NoMemoryProof;
        if memory == Memory::Untestable && !unresolved.unknown.kind.is_silence() && forgot && excusable {
            self.counters.known_gap += 1;
            let content = self.truth[unresolved.index()].content;
            self.excused[family(content)] = true;
        }
    }
}

// ---- reconciler.rs ----

/// The kinds of sweep, in the order of [`super::world::Process::sweeping`].
pub const SWEEPS: [&str; 4] = ["claims", "submitted", "waiting", "dead letters"];

impl Lane {
    pub async fn sweep(self, kind: usize) {
        let swept = match kind {
            0 => self.sweep_claims().await,
            1 => self.sweep_submitted().await,
            2 => self.sweep_waiting().await,
            _ => self.sweep_dead_letters().await,
        };
        // A sweep that finds the store away is repeated.
        let _away = swept;
    }

    async fn sweep_waiting(&self) -> Result<(), Failure> {
        let rows = self.due(Due::Waiting).await?;
        if rows.is_empty() {
            return Ok(());
        }
        self.sim.turn().await;
        let behind = {
            let world = self.sim.w();
            let now = world.now;
            let due = world.queue.iter().filter(|message| message.visible_at <= now);
            let backlog = due.map(|message| now - message.sent_at).max().unwrap_or(0);
            backlog >= ms(CLOCKS.pending_check) / 2
        };
        join_all(rows.iter().map(|row| self.queue_again(row, behind))).await.into_iter().collect()
    }

    async fn queue_again(&self, row: &Transaction, behind: bool) -> Result<(), Failure> {
        let again_at = self.now() + CLOCKS.pending_check;
        let Some(row) = self.look_again_if_due(row, again_at).await? else { return Ok(()) };
        if !behind {
            self.publish_again(&row, Duration::ZERO).await;
        }
        Ok(())
    }

    async fn sweep_submitted(&self) -> Result<(), Failure> {
        let rows = self.due(Due::Bound).await?;
        join_all(rows.iter().map(|row| self.ask(row))).await.into_iter().collect()
    }

    async fn ask(&self, row: &Transaction) -> Result<(), Failure> {
        let Some(binding) = &row.binding else { return Ok(()) };
        let index = World::index_of(row.id);
        let now = self.now();
        let pause = now.since(binding.at).clamp(CLOCKS.submitted_check, CLOCKS.submitted_check_max);
        match self.transaction(&binding.relayer, &binding.tx_id).await {
            Ok(Some(report)) => {
                self.apply(index, &report, Origin::Asked).await?;
                self.look_again_if_due(row, now + pause).await?;
            }
            Ok(None) => self.forgotten(row, now + pause).await?,
            Err(Silence) => drop(self.look_again_if_due(row, now + pause).await?),
        }
        Ok(())
    }

    async fn forgotten(&self, row: &Transaction, again_at: Timestamp) -> Result<(), Failure> {
        let Some(asked) = &row.binding else { return Ok(()) };
        let index = World::index_of(row.id);
        let now = self.now();
        let decide = |row: &Transaction| match &row.binding {
            Some(binding) if binding.tx_id == asked.tx_id => row.forgotten(again_at, now),
            _ => Err(MOVED),
        };
        if let Updated::Moved(_) = self.update(index, None, decide).await? {
            let mut world = self.sim.w();
            world.truth[index].stuck = Some(world.changes);
        }
        Ok(())
    }

    async fn look_again_if_due(&self, row: &Transaction, at: Timestamp) -> Result<Option<Rc<Transaction>>, Failure> {
        let now = self.now();
        let decide = |now_row: &Transaction| {
            if now_row.version == row.version { now_row.check_later(at, now) } else { Err(MOVED) }
        };
        match self.update(World::index_of(row.id), None, decide).await? {
            Updated::Moved(row) => Ok(Some(row)),
            Updated::Refused => Ok(None),
        }
    }

    async fn sweep_dead_letters(&self) -> Result<(), Failure> {
        self.sim.turn().await;
        let letters: Vec<(u32, usize, bool, i64)> = {
            let world = self.sim.w();
            world.dead.iter().map(|letter| (letter.id, letter.row, letter.by_queue, letter.buried_at)).collect()
        };
        let (mut back, mut over) = (Vec::new(), Vec::new());
        for (id, index, by_queue, buried_at) in letters {
            let row = self.get(index).await?;
            if row.status == Status::Failed {
                continue;
            }
            if row.binding.is_some() || row.status.is_final() {
                over.push(id);
                continue;
            }
            if by_queue || row.claim.is_some() || row.updated_at > Timestamp(buried_at) {
                back.push(id);
            } else {
                let now = self.now();
                self.update(index, None, |row| row.abandon("a handler gave it up", now)).await?;
            }
        }
        self.sim.turn().await;
        let mut world = self.sim.w();
        note!(world, "{}: puts back {back:?}, drops {over:?}", self.me);
        world.counters.put_back += back.len() as u64;
        world.replay(&back);
        world.dead.retain(|letter| !over.contains(&letter.id));
        Ok(())
    }
}

// ---- webhook.rs ----

/// A webhook arrives.
pub async fn webhook(sim: Sim, report: Rc<Report>, at: i64) {
    sim.sleep_until(at).await;
    let lane = Lane { sim, me: ConsumerId(String::new()) };
    note!(lane.sim.w(), "webhook: {} is {:?}", report.tx_id, report.status);
    // A relayer that gets no 200 may send it again; here it does not.
    let _away = lane.hear(&report).await;
}

impl Lane {
    async fn hear(&self, report: &Rc<Report>) -> Result<(), Failure> {
        let mut bound = self.find_bound(&report.tx_id).await?;
        if bound.is_none() {
            self.keep_early_webhook(report).await?;
            bound = self.find_bound(&report.tx_id).await?;
            if let Some(index) = bound {
                self.apply_early(index, &report.tx_id).await?;
            }
        }
        let Some(index) = bound else { return Ok(()) };
        self.apply(index, report, Origin::Webhook).await.map(drop)
    }

    async fn find_bound(&self, tx_id: &RelayerTxId) -> Result<Option<usize>, Failure> {
        self.sim.turn().await;
        let mut world = self.sim.w();
        if world.fate() != Fate::Done {
            return Err(Failure::Away);
        }
        Ok(world.owners.iter().find(|(owned, _)| owned == tx_id).map(|(_, index)| *index))
    }

    async fn keep_early_webhook(&self, report: &Rc<Report>) -> Result<(), Failure> {
        self.sim.turn().await;
        let mut world = self.sim.w();
        if world.fate() != Fate::Done {
            return Err(Failure::Away);
        }
        world.early.push((report.tx_id.clone(), Rc::clone(report)));
        Ok(())
    }
}

// ---- dead_letters.rs and cli/tx.rs: an operator who looks before deciding ----

impl Lane {
    /// Starts a dead letter over.
    pub async fn operator_replays(self, letter: u32, index: usize) {
        let now = self.now();
        let replayed = self.update(index, None, |row| row.replay(now, &CLOCKS)).await;
        let may_move = match replayed {
            Ok(Updated::Moved(_)) => true,
            Ok(Updated::Refused) => self.sim.w().rows[index].status == Status::Pending,
            Err(_) => false,
        };
        if may_move {
            self.sim.turn().await;
            self.sim.w().replay(&[letter]);
        }
    }

    /// Settles what is in unknown: sends it again only if no relayer has it or may yet have it, and nobody else looks for
    /// a record of the same content.
    pub async fn operator_resolves(self, index: usize) {
        let seen = {
            let world = self.sim.w();
            let content = family(world.truth[index].content);
            let stored = world.relayers.iter().flat_map(|relayer| &relayer.records).any(|record| {
                let owner = world.bound_ever.iter().find(|(tx_id, _)| *tx_id == record.report.tx_id);
                is_of(record.content, content)
                    && (record.is_effect() || owner.is_none())
                    && owner.is_none_or(|(_, owner)| *owner == index)
            });
            let open = |request: &Request| is_of(request.content, content) && world.is_open(request);
            let open = world.requests.iter().any(open);
            let alone = world.rows.iter().enumerate().all(|(other, row)| {
                other == index || !is_of(world.truth[other].content, content) || row.claim.is_none()
            });
            (!stored && !open && alone, world.rows[index].version)
        };
        let (resend, version) = seen;
        let now = self.now();
        note!(self.sim.w(), "operator: t{index} is to be {}", if resend { "sent again" } else { "given up" });
        let decide = |row: &Transaction| match (row.version == version, resend) {
            (false, _) => Err(MOVED),
            (true, true) => row.resolve_resend(now, &CLOCKS),
            (true, false) => row.resolve_fail(now),
        };
        if let Ok(Updated::Moved(row)) = self.update(index, None, decide).await
            && resend
        {
            self.publish_again(&row, Duration::ZERO).await;
        }
    }
}
