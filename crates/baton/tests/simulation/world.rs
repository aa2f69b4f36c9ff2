//! The world around the lane, without time, threads or input and output: a store, a queue, processes and relayers that
//! can fail, and the truth about them, against which every step is checked.
//!
//! Tasks are futures ([`super::lane`], [`super::relayer`]) that hand control back at each await point of the code they
//! mirror; [`super::scheduler`] says who goes on next. All randomness is one seeded stream.

use std::cell::{RefCell, RefMut};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use baton::config::{RelayMode, Timings};
use baton::relay::relayer::client::Answer;
use baton::relay::request::call::DirectRequest;
use baton::relay::state::report::Report;
use baton::relay::state::transaction::{
    Binding, ConsumerId, FailedBy, Moved, Progress, RelayerTxId, RelayerUrl, Status, Transaction, TransactionId,
};
use baton::timestamp::Timestamp;
use serde_json::json;
use uuid::Uuid;

use super::relayer::Relayer;

/// When a world begins.
pub const BASE: i64 = 1_000_000_000;
/// The defaults of the configuration.
pub const CLOCKS: Timings = Timings {
    pending_check: Duration::from_secs(600),
    claim_check: Duration::from_secs(10),
    submit_timeout: Duration::from_secs(30),
    send_window: Duration::from_secs(5),
    relayer_timeout: Duration::from_secs(30),
    unknown_check: Duration::from_secs(1),
    absence_confirm: Duration::from_secs(5),
    submitted_check: Duration::from_secs(30),
    submitted_check_max: Duration::from_secs(300),
};
pub const CONSUMER_DEAD_AFTER: Duration = Duration::from_secs(10);
pub const CLOCK_SKEW: Duration = Duration::from_secs(30);
/// Shorter than the default, so that a world can outlive it.
pub const RETENTION: Duration = Duration::from_secs(3600);
const LEASE: i64 = 20_000;
const RECEIVES_MAX: u32 = 3;
/// Different calls in a world; one more is the relayers' history.
pub const CONTENTS: usize = 5;
const HISTORY: usize = CONTENTS;

/// What is switched off, to prove that the simulation notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutation {
    /// Nothing: the code as it is.
    None,
    /// Submits without storing a claim first.
    NoClaim,
    /// Sends however old the claim is.
    NoFence,
    /// Believes in absence at first sight.
    NoSecondLook,
    /// Believes a relayer that has lost its memory.
    NoMemoryProof,
    /// Lets a record belong to two rows.
    NoUniqueness,
    /// Saves over whatever somebody else saved.
    NoCompareAndSwap,
    /// Lets late reports move a row back.
    NoForwardOnly,
    /// Takes a 5xx for a refusal.
    ErrorIsRefusal,
    /// Looks a second time before a relayer that stood still is done with what it has just read.
    HastySecondLook,
    /// Takes the record of an equal transaction although its own may still come.
    TakesWhileOpen,
    /// Takes the record of an equal transaction although its own may be there and forgotten.
    TakesUnproven,
    /// Takes the record of an equal transaction that could use no other.
    TakesOldest,
    /// Lets whoever lost a claim act on it.
    NoToken,
    /// Never looks at claims.
    NoClaimSweep,
    /// Never looks at rows that wait.
    NoWaitingSweep,
    /// Never asks for submitted rows.
    NoSubmittedSweep,
}

/// What can go wrong in a world; each world has its own selection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Fault {
    Crash,
    Freeze,
    Slow,
    Starve,
    Duplicate,
    LoseMessage,
    Pause,
    Down,
    Forget,
    Webhook,
    Store,
    Panic,
    Operator,
    BadAnswer,
    Late,
    Item,
    Unsigned,
    NoOp,
    Outage,
    Skew,
    Stall,
}

impl Fault {
    pub const COUNT: u32 = Self::Stall as u32 + 1;
}

/// How a world is set up.
#[derive(Debug, Clone, Copy)]
pub struct Setup {
    pub seed: u64,
    pub mutation: Mutation,
    /// Faults that this world has in any case, as bits.
    pub forced: u32,
    /// At most so many transactions.
    pub transactions_max: u64,
    /// At most so many steps with faults.
    pub faulty_steps_max: u64,
    /// Whether to write down what happens.
    pub trace: bool,
}

/// The last two contents differ only in that one names a gas limit: what they do is the same.
pub fn family(content: usize) -> usize {
    if content == CONTENTS - 1 { CONTENTS - 2 } else { content }
}

/// What every world of a thread shares.
pub struct Fixtures {
    pub requests: Vec<DirectRequest>,
    pub urls: [RelayerUrl; 2],
    pub never_signed: serde_json::Value,
    /// Each content as a row accepted at [`BASE`].
    rows: Vec<Transaction>,
}

impl Fixtures {
    pub fn new() -> Rc<Self> {
        let request = |content: usize| {
            let retry = content.is_multiple_of(3);
            let gas = if content.is_multiple_of(2) { json!(60_000) } else { json!(null) };
            let family = family(content);
            let to = format!("0x{:040x}", 0xabc0 + family);
            let body =
                json!({ "to": to, "value": family.to_string(), "data": "0xab", "gas": gas, "retryOnFailure": retry });
            DirectRequest::parse(&body).unwrap()
        };
        let urls = ["r0", "r1"].map(|url| RelayerUrl(url.to_owned()));
        let requests: Vec<DirectRequest> = (0..=CONTENTS).map(request).collect();
        let rows = requests.iter().map(|request| accepted(0, request, BASE)).collect();
        let fixtures = Self { requests, urls, never_signed: json!({ "nonce": null }), rows };
        for content in 0..=CONTENTS {
            let expected = accepted(3, &fixtures.requests[content], BASE + 5);
            assert_eq!(fixtures.accepted(3, content, BASE + 5), expected);
        }
        Rc::new(fixtures)
    }

    /// [`Transaction::accepted`] without writing the same JSON in every world.
    fn accepted(&self, index: usize, content: usize, now: i64) -> Transaction {
        let mut row = self.rows[content].clone();
        row.id = id_of(index, now);
        (row.created_at, row.updated_at) = (Timestamp(now), Timestamp(now));
        row.check_at = row.check_at.map(|at| Timestamp(at.0 - BASE + now));
        row
    }
}

fn accepted(index: usize, request: &DirectRequest, now: i64) -> Transaction {
    Transaction::accepted(id_of(index, now), request, String::new(), Timestamp(now), &CLOCKS)
}

/// Like a UUIDv7, it begins with the time.
fn id_of(index: usize, now: i64) -> TransactionId {
    TransactionId(Uuid::from_u128((now as u128) << 80 | index as u128))
}

/// A small, fast, seeded stream.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Less than `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        ((self.next() >> 32) * n) >> 32
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

/// A message in the queue.
pub struct Queued {
    pub id: u32,
    pub row: usize,
    pub receives: u32,
    pub visible_at: i64,
    pub sent_at: i64,
    /// The lease, and the run of the process that holds it.
    pub lease: Option<(u32, u32)>,
}

/// A message in the dead-letter queue.
pub struct Letter {
    pub id: u32,
    pub row: usize,
    pub by_queue: bool,
    pub buried_at: i64,
}

/// The right to settle one delivery.
#[derive(Debug, Clone, Copy)]
pub struct Receipt {
    pub message: u32,
    pub lease: u32,
    pub receives: u32,
    pub row: usize,
}

/// What becomes of a delivery.
pub enum Outcome {
    Done,
    Retry(i64),
    Dead,
}

/// A consumer process.
pub struct Process {
    pub id: ConsumerId,
    /// Which run of which process: a restarted one has another.
    pub run: u32,
    pub alive: bool,
    /// When a dead one comes back.
    pub restart_at: i64,
    pub frozen_since: i64,
    pub frozen_until: i64,
    /// Since when its heartbeat is not stored although it works.
    pub starved_since: Option<i64>,
    pub handling: u32,
    pub sweeping: [bool; 4],
}

/// A POST on its way, as far as the truth goes.
pub struct Request {
    pub content: usize,
    pub relayer: usize,
    pub epoch: u32,
    /// Until when it may still be stored.
    pub until: i64,
    pub over: bool,
}

/// Where a caller waits for an answer.
pub struct Slot {
    pub answer: Option<Answer>,
    pub task: u32,
}

/// What is known of a row beside the row.
#[derive(Default)]
pub struct Truth {
    pub content: usize,
    /// Replays and rank, as last observed by a reader.
    pub seen: (u32, u8),
    /// A reader's cache: rows that ended well.
    pub cached: Option<Status>,
    /// Answers that blame the item.
    pub item_failures: u32,
    pub panics: u32,
    /// How many changes there had been when it was found that nothing can be learned about it any more.
    pub stuck: Option<u64>,
}

/// Who runs a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// A consumer, by its place; its tasks die with it.
    Process(usize),
    /// The API: it does not die here, but what it does may be cut short.
    Api,
    /// A relayer, or the network.
    Outside,
}

/// What a task is for, so that it can be ended properly.
#[derive(Debug, Clone, Copy)]
pub enum Job {
    Handle(Receipt),
    Sweep(usize),
    Webhook,
    Other,
}

pub type Work = Pin<Box<dyn Future<Output = ()>>>;

/// A task that is to be started.
pub struct Spawn {
    pub owner: Owner,
    pub job: Job,
    pub work: Work,
}

/// Whether the store does what it is asked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Done,
    /// Not done.
    Away,
    /// Done, but nobody hears of it.
    Unanswered,
}

/// What became of a save.
pub enum Stored {
    /// `early`: newly bound, and webhooks have spoken of the record already.
    Yes {
        row: Rc<Transaction>,
        early: bool,
    },
    Stale,
    Conflict,
}

pub struct World {
    pub fixtures: Rc<Fixtures>,
    pub mutation: Mutation,
    pub mode: RelayMode,
    pub faults: u32,
    pub now: i64,
    pub rng: Rng,
    pub rows: Vec<Rc<Transaction>>,
    pub truth: Vec<Truth>,
    /// The store's table of which record belongs to which row.
    pub owners: Vec<(RelayerTxId, usize)>,
    /// The same, kept by the judge.
    pub bound_ever: Vec<(RelayerTxId, usize)>,
    pub early: Vec<(RelayerTxId, Rc<Report>)>,
    pub queue: Vec<Queued>,
    pub dead: Vec<Letter>,
    pub processes: Vec<Process>,
    /// Runs that ended, and when.
    pub ended: Vec<(ConsumerId, i64)>,
    pub relayers: [Relayer; 2],
    pub requests: Vec<Request>,
    pub slots: Vec<Slot>,
    pub spawns: Vec<Spawn>,
    /// The earliest time at which the task that is being polled can go on.
    pub wake: i64,
    /// The task that is being polled.
    pub task: u32,
    /// Tasks to be woken.
    pub woken: Vec<u32>,
    pub store_away: bool,
    /// No more faults.
    pub calm: bool,
    /// How often something was really learned.
    pub changes: u64,
    pub excused: [bool; CONTENTS + 1],
    pub counters: Counters,
    pub violation: Option<String>,
    pub trace: Option<Vec<String>>,
    last_id: u32,
}

/// What happened, to see that the worlds are worth something.
#[derive(Debug, Clone, Copy, Default)]
pub struct Counters {
    pub worlds: u64,
    pub steps: u64,
    pub rows: u64,
    pub confirmed: u64,
    pub failed: u64,
    pub in_doubt: u64,
    pub doubts: u64,
    pub take_overs: u64,
    pub found: u64,
    pub resent: u64,
    pub exchanged: u64,
    pub fenced: u64,
    pub reroutes: u64,
    pub early: u64,
    pub put_back: u64,
    pub late_answers: u64,
    pub known_gap: u64,
    pub untestable: u64,
    pub witness_expired: u64,
}

impl Counters {
    pub fn add(&mut self, other: &Self) {
        self.worlds += other.worlds;
        self.steps += other.steps;
        self.rows += other.rows;
        self.confirmed += other.confirmed;
        self.failed += other.failed;
        self.in_doubt += other.in_doubt;
        self.doubts += other.doubts;
        self.take_overs += other.take_overs;
        self.found += other.found;
        self.resent += other.resent;
        self.exchanged += other.exchanged;
        self.fenced += other.fenced;
        self.reroutes += other.reroutes;
        self.early += other.early;
        self.put_back += other.put_back;
        self.late_answers += other.late_answers;
        self.known_gap += other.known_gap;
        self.untestable += other.untestable;
        self.witness_expired += other.witness_expired;
    }
}

/// Writes down what happens, if anybody wants to know.
macro_rules! note {
    ($world:expr, $($words:tt)+) => {
        if $world.trace.is_some() {
            let line = format!($($words)+);
            $world.write_down(line);
        }
    };
}
pub(crate) use note;

impl World {
    pub fn new(setup: &Setup, fixtures: &Rc<Fixtures>) -> Self {
        let mut rng = Rng::new(setup.seed);
        // Each world has some kinds of faults and not others: everything at once hides more than it shows.
        let mut faults = (rng.next() & rng.next()) as u32 | (rng.next() & rng.next() & rng.next()) as u32;
        faults |= setup.forced;
        let mode = if rng.one_in(8) { RelayMode::Confirm } else { RelayMode::FireAndForget };
        let skewed = faults & (1 << Fault::Skew as u32) != 0;
        let relayers = [0, 1].map(|_| Relayer::new(&mut rng, skewed));
        let consumers = 2 + rng.below(2);
        let mut world = Self {
            fixtures: Rc::clone(fixtures),
            mutation: setup.mutation,
            mode,
            faults,
            now: BASE,
            rng,
            rows: Vec::new(),
            truth: Vec::new(),
            owners: Vec::new(),
            bound_ever: Vec::new(),
            early: Vec::new(),
            queue: Vec::new(),
            dead: Vec::new(),
            processes: Vec::new(),
            ended: Vec::new(),
            relayers,
            requests: Vec::new(),
            slots: Vec::new(),
            spawns: Vec::new(),
            wake: i64::MAX,
            task: 0,
            woken: Vec::new(),
            store_away: false,
            calm: false,
            changes: 0,
            excused: [false; CONTENTS + 1],
            counters: Counters::default(),
            violation: None,
            trace: setup.trace.then(Vec::new),
            last_id: 0,
        };
        for _ in 0..consumers {
            let run = world.new_id();
            world.processes.push(Process {
                id: ConsumerId(format!("c{run}")),
                run,
                alive: true,
                restart_at: 0,
                frozen_since: 0,
                frozen_until: 0,
                starved_since: None,
                handling: 0,
                sweeping: [false; 4],
            });
        }
        for relayer in 0..2 {
            if !world.rng.one_in(3) {
                world.add_history(relayer);
            }
        }
        world
    }

    pub fn has(&self, fault: Fault) -> bool {
        !self.calm && self.faults & (1 << fault as u32) != 0
    }

    pub fn at(&self) -> Timestamp {
        Timestamp(self.now)
    }

    pub fn new_id(&mut self) -> u32 {
        self.last_id += 1;
        self.last_id
    }

    pub fn new_token(&mut self) -> Uuid {
        Uuid::from_u128(u128::from(self.new_id()))
    }

    pub fn write_down(&mut self, line: String) {
        let at = self.now - BASE;
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:>6}.{:03} s  {line}", at / 1000, at.rem_euclid(1000)));
        }
    }

    pub fn fail(&mut self, what: String) {
        note!(self, "VIOLATION: {what}");
        if self.violation.is_none() {
            self.violation = Some(what);
        }
    }

    /// How long the next thing takes.
    pub fn latency(&mut self) -> i64 {
        if self.has(Fault::Slow) && self.rng.one_in(24) {
            return self.rng.pick(&[900, 1100, 4990, 5000, 6000, 11_000, 29_000, 31_000, 36_000, 41_000]);
        }
        (self.rng.next() & 3) as i64
    }

    pub fn fate(&mut self) -> Fate {
        if !self.store_away || self.calm {
            return Fate::Done;
        }
        match self.rng.below(4) {
            0 => Fate::Unanswered,
            1 => Fate::Away,
            _ => Fate::Done,
        }
    }

    pub fn spawn(&mut self, owner: Owner, job: Job, work: impl Future<Output = ()> + 'static) {
        self.spawns.push(Spawn { owner, job, work: Box::pin(work) });
    }

    // ---- rows ----

    /// A client is told 202.
    pub fn accept(&mut self, content: usize) {
        let index = self.rows.len();
        let row = self.fixtures.accepted(index, content, self.now);
        self.rows.push(Rc::new(row));
        self.truth.push(Truth { content, ..Truth::default() });
        // Over two systems a crash may come between the row and its message.
        let published = !(self.has(Fault::LoseMessage) && self.rng.one_in(4));
        note!(self, "client: t{index} accepted, content {content}{}", if published { "" } else { ", not published" });
        if published {
            self.publish(index, 0);
        }
    }

    /// A transaction from long ago that the relayer still lists.
    fn add_history(&mut self, relayer: usize) {
        let index = self.rows.len();
        let made = self.now - 1_000_000 - index as i64 * 1000;
        let (tx_id, report) = self.add_old_record(relayer, HISTORY, made);
        let mut row = self.fixtures.accepted(index, HISTORY, made);
        row.status = if self.mode == RelayMode::Confirm { Status::Success } else { Status::Confirmed };
        row.hash.clone_from(&report.hash);
        row.check_at = None;
        row.binding = Some(Binding {
            relayer: self.fixtures.urls[relayer].clone(),
            tx_id: tx_id.clone(),
            at: Timestamp(made),
            progress: Progress::Submitted,
            nonce: report.nonce,
            forgotten_since: None,
        });
        self.rows.push(Rc::new(row));
        self.truth.push(Truth { content: HISTORY, ..Truth::default() });
        self.owners.push((tx_id.clone(), index));
        self.bound_ever.push((tx_id, index));
    }

    pub fn index_of(id: TransactionId) -> usize {
        (id.0.as_u128() & 0xffff_ffff) as usize
    }

    /// Saves a move if nobody else was quicker. `by` is the claim that it acts on.
    pub fn save(&mut self, moved: Moved, by: Option<Uuid>) -> Stored {
        let next = moved.transaction;
        let index = Self::index_of(next.id);
        let before = Rc::clone(&self.rows[index]);
        if before.version + 1 != next.version && self.mutation != Mutation::NoCompareAndSwap {
            note!(self, "  t{index}: somebody was quicker");
            return Stored::Stale;
        }
        let mut early = false;
        if let Some(binding) = &next.binding {
            let owner = self.owners.iter().find(|(tx_id, _)| *tx_id == binding.tx_id).map(|(_, owner)| *owner);
            match owner {
                None => {
                    self.owners.push((binding.tx_id.clone(), index));
                    early = self.early.iter().any(|(tx_id, _)| *tx_id == binding.tx_id);
                }
                Some(owner) if owner != index && self.mutation != Mutation::NoUniqueness => {
                    note!(self, "  t{index}: {} belongs to t{owner}", binding.tx_id);
                    return Stored::Conflict;
                }
                Some(_) => {}
            }
        }
        self.check_save(index, &before, &next, by);
        if self.trace.is_some() {
            let steps: Vec<&str> = moved.steps.iter().map(|step| step.action).collect();
            let claim = next.claim.as_ref().map(|claim| {
                let unknown =
                    claim.unknown.as_ref().map(|unknown| (unknown.open_until.0 - BASE, unknown.absent_since.is_some()));
                format!(
                    " claim {} of {} at {}, unknown {unknown:?}",
                    claim.token.as_u128(),
                    claim.consumer,
                    claim.relayer
                )
            });
            let binding = next.binding.as_ref().map(|binding| format!(" bound to {}", binding.tx_id));
            let line = format!(
                "  t{index} v{} {}: {}{}{}",
                next.version,
                next.status,
                steps.join(", "),
                claim.unwrap_or_default(),
                binding.unwrap_or_default()
            );
            self.write_down(line);
        }
        let learned = before.status != next.status
            || before.claim.is_some() != next.claim.is_some()
            || before.binding.is_some() != next.binding.is_some();
        if learned {
            self.changes += 1;
        }
        let next = Rc::new(next);
        self.rows[index] = Rc::clone(&next);
        Stored::Yes { row: next, early }
    }

    fn check_save(&mut self, index: usize, before: &Transaction, next: &Transaction, by: Option<Uuid>) {
        if let Some(token) = by
            && before.claim.as_ref().map(|claim| claim.token) != Some(token)
        {
            self.fail(format!("t{index}: a claim that was lost ({}) changed the row", token.as_u128()));
        }
        let (was, is) = ((before.replays, before.status.rank()), (next.replays, next.status.rank()));
        if is < was || (was == is && before.status.is_final() && before.status != next.status) {
            self.fail(format!("t{index}: went back from {} to {}", before.status, next.status));
        }
        if let Some(binding) = &next.binding {
            let known = self.bound_ever.iter().find(|(tx_id, _)| *tx_id == binding.tx_id).map(|(_, owner)| *owner);
            match known {
                None => self.bound_ever.push((binding.tx_id.clone(), index)),
                Some(owner) if owner != index => {
                    self.fail(format!("{} is bound to t{owner} and t{index}", binding.tx_id));
                }
                Some(_) => {}
            }
        }
    }

    /// A reader asks for a status: from its cache if the row ended well, else from the store.
    pub fn read(&mut self, index: usize) {
        let row = &self.rows[index];
        let truth = &mut self.truth[index];
        let status = truth.cached.unwrap_or(row.status);
        if matches!(status, Status::Confirmed | Status::Success) {
            truth.cached = Some(status);
        }
        let sees = (row.replays, status.rank());
        if sees < truth.seen || status != row.status {
            let before = truth.seen;
            self.fail(format!("a reader saw t{index} go back: {before:?}, then {sees:?}"));
        } else {
            truth.seen = sees;
        }
    }

    pub fn last_heartbeat(&self, consumer: &ConsumerId) -> Option<Timestamp> {
        if let Some(process) = self.processes.iter().find(|process| process.alive && process.id == *consumer) {
            let seen = if process.frozen_until > self.now { process.frozen_since } else { self.now };
            return Some(Timestamp(process.starved_since.unwrap_or(seen).min(seen)));
        }
        self.ended.iter().find(|(id, _)| id == consumer).map(|(_, at)| Timestamp(*at))
    }

    // ---- queue ----

    pub fn publish(&mut self, row: usize, delay: i64) {
        let id = self.new_id();
        let message = Queued { id, row, receives: 0, visible_at: self.now + delay, sent_at: self.now, lease: None };
        self.queue.push(message);
    }

    /// Whether a process keeps this lease.
    fn is_kept(&self, message: &Queued) -> bool {
        message.lease.is_some_and(|(_, run)| {
            self.processes.iter().any(|process| process.run == run && process.alive && process.frozen_until <= self.now)
        })
    }

    /// When the next message can be received; `None`: there is none.
    pub fn next_message_at(&self) -> Option<i64> {
        self.queue.iter().filter(|message| !self.is_kept(message)).map(|message| message.visible_at).min()
    }

    /// Takes a message that is due.
    pub fn receive(&mut self, run: u32) -> Option<Receipt> {
        let now = self.now;
        let mut position = 0;
        while position < self.queue.len() {
            let message = &self.queue[position];
            if message.visible_at > now {
                position += 1;
                continue;
            }
            if self.is_kept(message) {
                self.queue[position].visible_at = now + LEASE;
                continue;
            }
            if message.receives >= RECEIVES_MAX {
                let Queued { id, row, .. } = self.queue.remove(position);
                note!(self, "queue: m{id} about t{row} buried: received too often");
                self.dead.push(Letter { id, row, by_queue: true, buried_at: now });
                continue;
            }
            let lease = self.new_id();
            // An at-least-once queue may hand a message out twice.
            let twice = self.has(Fault::Duplicate) && self.rng.one_in(12);
            let message = &mut self.queue[position];
            message.receives += 1;
            message.lease = Some((lease, run));
            message.visible_at = if twice { now } else { now + LEASE };
            if twice {
                message.lease = Some((lease, 0));
            }
            return Some(Receipt { message: message.id, lease, receives: message.receives, row: message.row });
        }
        None
    }

    pub fn settle(&mut self, receipt: Receipt, outcome: &Outcome) {
        let held = |message: &Queued| {
            message.id == receipt.message && message.lease.is_some_and(|(lease, _)| lease == receipt.lease)
        };
        let Some(position) = self.queue.iter().position(held) else {
            note!(self, "  m{}: the lease was lost", receipt.message);
            return;
        };
        match outcome {
            Outcome::Done => drop(self.queue.remove(position)),
            Outcome::Retry(after) => {
                self.queue[position].visible_at = self.now + after;
                self.queue[position].lease = None;
            }
            Outcome::Dead => {
                let Queued { id, row, .. } = self.queue.remove(position);
                self.dead.push(Letter { id, row, by_queue: false, buried_at: self.now });
            }
        }
    }

    /// Moves dead letters back.
    pub fn replay(&mut self, ids: &[u32]) {
        let now = self.now;
        for id in ids {
            if let Some(position) = self.dead.iter().position(|letter| letter.id == *id) {
                let Letter { id, row, .. } = self.dead.remove(position);
                self.queue.push(Queued { id, row, receives: 0, visible_at: now, sent_at: now, lease: None });
            }
        }
    }

    // ---- the judge ----

    /// The effects that a content has had or may still have, against the transactions accepted.
    pub fn check_effects(&mut self, content: usize) {
        let family = family(content);
        if self.excused[family] {
            return;
        }
        let stored: usize = self.relayers.iter().map(|relayer| relayer.effects(family)).sum();
        let open = self.requests.iter().filter(|request| is_of(request.content, family) && self.is_open(request));
        let open = open.count();
        let accepted = self.truth.iter().filter(|truth| is_of(truth.content, family)).count();
        if stored + open > accepted {
            self.fail(format!(
                "content {content}: {stored} stored and {open} under way for {accepted} accepted transactions"
            ));
        }
    }

    pub fn is_open(&self, request: &Request) -> bool {
        !request.over && self.now <= request.until && self.relayers[request.relayer].epoch == request.epoch
    }

    /// Whether nothing can be learned about a row that is in unknown, given what really happened.
    pub fn is_rightly_in_doubt(&mut self, index: usize) -> Result<(), String> {
        let row = Rc::clone(&self.rows[index]);
        let now = self.now;
        if !row.outcome_unknown() {
            return Err(format!("t{index} is {} and nobody works on it", row.status));
        }
        if let Some(binding) = &row.binding {
            let relayer = &self.relayers[relayer_index(&binding.relayer)];
            if relayer.find(&binding.tx_id, now).is_none() {
                return Ok(());
            }
            return Err(format!("t{index} counts as forgotten, and its relayer knows it"));
        }
        let Some(claim) = &row.claim else { return Err(format!("t{index} is in doubt without a claim")) };
        let relayer = &self.relayers[relayer_index(&claim.relayer)];
        let free_no_op = relayer
            .records
            .iter()
            .any(|record| record.no_op && !self.bound_ever.iter().any(|(tx_id, _)| *tx_id == record.report.tx_id));
        if relayer.epoch > 0 || free_no_op || now - claim.at.0 >= RETENTION.as_millis() as i64 - 30_000 {
            return Ok(());
        }
        let witness = self.bound_before(&claim.relayer, claim.at).and_then(|witness| witness.binding.clone());
        let believed = |at: Timestamp| now - at.0 < RETENTION.as_millis() as i64 - 30_000;
        let silent = claim.unknown.as_ref().is_some_and(|unknown| unknown.kind.is_silence());
        match witness.filter(|binding| believed(binding.at)) {
            None if silent => {
                self.counters.untestable += 1;
                return Ok(());
            }
            // Bound long after the relayer was done with it: its retention is over before ours.
            Some(binding) if relayer.find(&binding.tx_id, now).is_none() => {
                self.counters.witness_expired += 1;
                return Ok(());
            }
            _ => {}
        }
        Err(format!("t{index} stays in unknown, and its relayer remembers everything"))
    }

    /// What must hold once everything has come to rest.
    pub fn check_end(&mut self) {
        for index in 0..self.rows.len() {
            let row = Rc::clone(&self.rows[index]);
            self.read(index);
            if !row.status.is_final() {
                self.counters.in_doubt += 1;
                if let Err(why) = self.is_rightly_in_doubt(index) {
                    self.fail(format!("lost: {why}"));
                }
                continue;
            }
            self.check_final(index, &row);
        }
        for content in 0..CONTENTS {
            let orphans = self.relayers.iter().flat_map(|relayer| &relayer.records).filter(|record| {
                is_of(record.content, content)
                    && record.is_effect()
                    && !self.bound_ever.iter().any(|(tx_id, _)| *tx_id == record.report.tx_id)
            });
            let orphans = orphans.count();
            let may_own = |index: &usize| {
                let row = &self.rows[*index];
                is_of(self.truth[*index].content, content)
                    && (!row.status.is_final() && row.claim.is_some() || row.failed_by == Some(FailedBy::Operator))
            };
            let owners = (0..self.rows.len()).filter(may_own).count();
            if orphans > owners && !self.excused[content] {
                self.fail(format!("content {content}: {orphans} effects belong to no row, {owners} rows may own them"));
            }
        }
    }

    fn check_final(&mut self, index: usize, row: &Transaction) {
        let record = row.binding.as_ref().and_then(|binding| {
            let relayer = &self.relayers[relayer_index(&binding.relayer)];
            relayer.records.iter().find(|record| record.report.tx_id == binding.tx_id)
        });
        let done_well = record.map(|record| record.done_well());
        match (row.status, row.failed_by) {
            (Status::Confirmed | Status::Success, _) => {
                self.counters.confirmed += 1;
                if done_well != Some(true) {
                    self.fail(format!("t{index} is {}, and its relayer did not do it", row.status));
                }
            }
            (_, Some(FailedBy::Relayer)) => {
                self.counters.failed += 1;
                if done_well != Some(false) {
                    self.fail(format!("t{index} failed, and its relayer did it"));
                }
            }
            (_, Some(FailedBy::Consumer)) => {
                self.counters.failed += 1;
                let truth = &self.truth[index];
                if truth.item_failures == 0 && truth.panics == 0 {
                    self.fail(format!("t{index} failed through no fault of its own"));
                }
                let effect = self.bound_ever.iter().filter(|(_, owner)| *owner == index).any(|(tx_id, _)| {
                    let records = self.relayers.iter().flat_map(|relayer| &relayer.records);
                    records.filter(|record| record.report.tx_id == *tx_id).any(|record| record.is_effect())
                });
                if effect {
                    self.fail(format!("t{index} failed before a relayer took it, and a relayer has it"));
                }
            }
            _ => self.counters.failed += 1,
        }
    }
}

/// Whether a content is of that family.
pub fn is_of(content: usize, wanted: usize) -> bool {
    family(content) == wanted
}

pub fn relayer_index(url: &RelayerUrl) -> usize {
    usize::from(url.0.ends_with('1'))
}

/// A handle on the world.
#[derive(Clone)]
pub struct Sim(pub Rc<RefCell<World>>);

impl Sim {
    pub fn w(&self) -> RefMut<'_, World> {
        self.0.borrow_mut()
    }

    /// Hands control back for as long as the next thing takes.
    pub fn turn(&self) -> Wait<'_> {
        let mut world = self.w();
        let until = world.now + world.latency();
        Wait { sim: self, until, waited: false }
    }

    pub fn sleep_until(&self, until: i64) -> Wait<'_> {
        Wait { sim: self, until, waited: false }
    }
}

/// An await point: others run before it goes on.
pub struct Wait<'a> {
    sim: &'a Sim,
    until: i64,
    waited: bool,
}

impl Future for Wait<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<()> {
        let mut world = self.sim.w();
        let until = self.until;
        if self.waited && world.now >= until {
            return Poll::Ready(());
        }
        world.wake = world.wake.min(until);
        drop(world);
        self.waited = true;
        Poll::Pending
    }
}
