//! The relayers: they store records, answer well, badly, late or never, lose their memory, and send webhooks.

use std::rc::Rc;

use alloy_primitives::U256;
use baton::relay::relayer::client::{Answer, NotTaken};
use baton::relay::state::report::{Report, ReportedStatus};
use baton::relay::state::transaction::{Progress, RelayerTxId};
use baton::timestamp::Timestamp;

use super::lane;
use super::world::{CLOCKS, Fault, Job, Owner, RETENTION, Request, Rng, Sim, Slot, World, is_of, note};

/// One relayer.
pub struct Relayer {
    pub records: Vec<Record>,
    /// How often it has lost its memory.
    pub epoch: u32,
    /// When it last did.
    pub forgot_at: i64,
    pub paused: bool,
    pub down: bool,
    /// It stands still until then, and reads nothing.
    pub stalled_until: i64,
    /// How far its clock is from ours.
    pub offset: i64,
    /// Whether its answers carry a date.
    pub dated: bool,
}

/// One of its records; kept here even when the relayer has forgotten it.
pub struct Record {
    pub content: usize,
    pub epoch: u32,
    pub report: Rc<Report>,
    pub no_op: bool,
    /// When it became final.
    pub finished_at: Option<i64>,
}

impl Record {
    /// Everything that was stored, unless it was given up before it was signed, or a no-op took its nonce.
    pub fn is_effect(&self) -> bool {
        let unsigned = self.report.status == ReportedStatus::Failed && self.report.never_signed();
        let replaced = self.no_op && self.finished_at.is_some();
        !(unsigned || replaced)
    }

    pub fn done_well(&self) -> bool {
        self.report.status == ReportedStatus::Confirmed && !self.no_op
    }
}

impl Relayer {
    pub fn new(rng: &mut Rng, skewed: bool) -> Self {
        let dated = rng.one_in(2);
        // Without a date only the configured skew is allowed for.
        let offset = match (skewed, dated) {
            (false, _) => 0,
            (true, false) => rng.pick(&[-29_000, -10_000, 500, 29_000]),
            (true, true) => rng.pick(&[-120_000, -29_000, 31_000, 120_000]),
        };
        Self {
            records: Vec::new(),
            epoch: 0,
            forgot_at: 0,
            paused: false,
            down: false,
            stalled_until: 0,
            offset,
            dated,
        }
    }

    pub fn effects(&self, family: usize) -> usize {
        self.records.iter().filter(|record| is_of(record.content, family) && record.is_effect()).count()
    }

    fn knows(&self, record: &Record, now: i64) -> bool {
        let kept = record.finished_at.is_none_or(|at| now - at < RETENTION.as_millis() as i64);
        record.epoch == self.epoch && kept
    }

    pub fn find(&self, tx_id: &RelayerTxId, now: i64) -> Option<&Rc<Report>> {
        let found = self.records.iter().find(|record| record.report.tx_id == *tx_id);
        found.filter(|record| self.knows(record, now)).map(|record| &record.report)
    }

    /// Its list, oldest first.
    pub fn list(&self, now: i64) -> impl Iterator<Item = &Rc<Report>> {
        self.records.iter().filter(move |record| self.knows(record, now)).map(|record| &record.report)
    }
}

const FROM: &str = "0x00000000000000000000000000000000000000ff";

impl World {
    fn new_report(&mut self, relayer: usize, content: usize) -> Report {
        let id = self.new_id();
        let call = &self.fixtures.requests[content].call;
        Report {
            tx_id: RelayerTxId(format!("oz{id}")),
            status: ReportedStatus::Open(Progress::Pending),
            reason: None,
            hash: None,
            nonce: None,
            from: Some(FROM.to_owned()),
            to: Some(format!("{:#x}", call.to)),
            value: Some(call.value),
            data: Some(call.data.clone()),
            gas_limit: Some(call.gas_limit.unwrap_or(50_000)),
            created_at: Some(Timestamp(self.now + self.relayers[relayer].offset)),
            confirmed_at: None,
            block_number: None,
            raw: self.fixtures.never_signed.clone(),
        }
    }

    /// A confirmed record from before the world began.
    pub fn add_old_record(&mut self, relayer: usize, content: usize, made: i64) -> (RelayerTxId, Rc<Report>) {
        let mut report = self.new_report(relayer, content);
        report.created_at = Some(Timestamp(made + self.relayers[relayer].offset));
        report.status = ReportedStatus::Confirmed;
        (report.nonce, report.raw) = (Some(0), serde_json::Value::Null);
        report.hash = Some("0xold".to_owned());
        let report = Rc::new(report);
        let record =
            Record { content, epoch: 0, report: Rc::clone(&report), no_op: false, finished_at: Some(made + 1000) };
        self.relayers[relayer].records.push(record);
        (report.tx_id.clone(), report)
    }

    /// A POST leaves our process.
    pub fn post(&mut self, sim: &Sim, relayer: usize, content: usize) -> usize {
        let request = self.requests.len();
        let epoch = self.relayers[relayer].epoch;
        let until = self.now + CLOCKS.relayer_timeout.as_millis() as i64;
        self.requests.push(Request { content, relayer, epoch, until, over: false });
        self.check_effects(content);
        let slot = self.slots.len();
        let task = self.task;
        self.slots.push(Slot { answer: None, task });
        self.spawn(Owner::Outside, Job::Other, serve(sim.clone(), request, slot));
        slot
    }

    fn store(&mut self, sim: &Sim, request: usize) -> Rc<Report> {
        let Request { content, relayer, .. } = self.requests[request];
        self.requests[request].over = true;
        let report = Rc::new(self.new_report(relayer, content));
        let epoch = self.relayers[relayer].epoch;
        note!(self, "r{relayer}: stores {} (content {content})", report.tx_id);
        let place = self.relayers[relayer].records.len();
        let record = Record { content, epoch, report: Rc::clone(&report), no_op: false, finished_at: None };
        self.relayers[relayer].records.push(record);
        self.check_effects(content);
        self.spawn(Owner::Outside, Job::Other, live(sim.clone(), relayer, place));
        report
    }

    fn answer(&mut self, slot: usize, answer: Answer) {
        let task = self.slots[slot].task;
        self.slots[slot].answer = Some(answer);
        self.woken.push(task);
    }

    /// A relayer is killed and had everything in memory.
    pub fn forget_all(&mut self, relayer: usize) {
        note!(self, "r{relayer}: loses its memory");
        let now = self.now;
        self.relayers[relayer].epoch += 1;
        self.relayers[relayer].forgot_at = now;
    }

    /// The relayer tells the world about a record, as often as it likes.
    fn tell(&mut self, sim: &Sim, report: &Rc<Report>) {
        let copies = match (self.has(Fault::Webhook), self.rng.below(8)) {
            (true, 0..=2) => 0,
            (true, 3..=4) => 2,
            _ => 1,
        };
        for _ in 0..copies {
            let delay = match (self.has(Fault::Webhook), self.rng.below(4)) {
                (true, 0) => self.rng.below(60_000),
                (true, 1) => self.rng.below(2000),
                _ => self.rng.below(4),
            };
            let at = self.now + delay as i64;
            self.spawn(Owner::Api, Job::Webhook, lane::webhook(sim.clone(), Rc::clone(report), at));
        }
    }
}

fn unknown(answered: bool) -> Answer {
    Answer::Unknown { reason: String::new(), answered }
}

fn not_taken(why: NotTaken) -> Answer {
    Answer::NotTaken { why, detail: String::new() }
}

/// How a relayer treats one request.
#[derive(Debug, Clone, Copy)]
enum Treatment {
    Good,
    /// Stored at some time, then answered.
    Slow,
    /// Stored at some time, never answered.
    Silent,
    /// The connection is lost before anything arrives.
    Lost,
    /// The connection is lost at once, and the work goes on.
    LostGoesOn,
    /// A proxy gives up, and the work goes on.
    TimedOutGoesOn,
    ErrorBefore,
    ErrorAfter,
    /// The answer breaks off after its status.
    BrokenOff,
    /// Nothing is ever stored or answered.
    Swallowed,
    Refused,
    ItemFailed,
    Busy,
    Closed,
}

impl World {
    fn treatment(&mut self, relayer: usize) -> Treatment {
        use Treatment::*;
        if self.relayers[relayer].paused {
            return Closed;
        }
        if self.has(Fault::Late) && self.rng.one_in(3) {
            return self.rng.pick(&[Slow, Silent, LostGoesOn, TimedOutGoesOn]);
        }
        if self.has(Fault::BadAnswer) && self.rng.one_in(2) {
            return self.rng.pick(&[ErrorBefore, ErrorAfter, BrokenOff, Lost, Swallowed, Silent, Busy]);
        }
        if self.has(Fault::Item) && self.rng.one_in(4) {
            return self.rng.pick(&[Refused, ItemFailed]);
        }
        Good
    }
}

/// A relayer works on one request.
async fn serve(sim: Sim, request: usize, slot: usize) {
    let (relayer, epoch, until, sent) = {
        let world = sim.w();
        let Request { relayer, epoch, until, .. } = world.requests[request];
        (relayer, epoch, until, world.now)
    };
    let arrives = sent + sim.w().latency().min(until - sent);
    sim.sleep_until(arrives).await;
    let until = loop {
        let goes_on_at = {
            let mut world = sim.w();
            let goes_on_at = world.relayers[relayer].stalled_until;
            if goes_on_at <= world.now {
                break world.requests[request].until;
            }
            // The time that it may take begins when it is read.
            world.requests[request].until = goes_on_at + CLOCKS.relayer_timeout.as_millis() as i64;
            goes_on_at
        };
        sim.sleep_until(goes_on_at).await;
    };
    let treatment = sim.w().treatment(relayer);
    note!(sim.w(), "r{relayer}: request {request} is treated as {treatment:?}");
    let died = || sim.w().relayers[relayer].epoch != epoch;
    // Mostly at the end of what is possible: that is where the mistakes are.
    let late = {
        let mut world = sim.w();
        let span = (until - world.now).max(0);
        let span = if world.rng.one_in(3) { span } else { world.rng.below(span as u64 + 1) as i64 };
        world.now + span
    };
    let early_word = match treatment {
        Treatment::Lost | Treatment::LostGoesOn | Treatment::TimedOutGoesOn => Some(unknown(false)),
        _ => None,
    };
    if let Some(answer) = early_word {
        let told = {
            let mut world = sim.w();
            late.min(world.now + world.latency())
        };
        sim.sleep_until(told).await;
        sim.w().answer(slot, answer);
    }
    match treatment {
        Treatment::Slow | Treatment::Silent | Treatment::LostGoesOn | Treatment::TimedOutGoesOn => {
            sim.sleep_until(late).await;
        }
        // What never arrived may, for all anybody knows, still be on its way: it is not over before its time.
        Treatment::Lost | Treatment::Swallowed => return,
        _ => {}
    }
    if died() {
        return sim.w().answer(slot, unknown(false));
    }
    let answer = match treatment {
        Treatment::Refused => Answer::Refused("bad".to_owned()),
        Treatment::ItemFailed => Answer::ItemFailed("bad".to_owned()),
        Treatment::Busy => not_taken(NotTaken::Busy(std::time::Duration::from_secs(1))),
        Treatment::Closed => not_taken(NotTaken::Closed),
        Treatment::ErrorBefore => unknown(true),
        _ => {
            let report = sim.w().store(&sim, request);
            match treatment {
                Treatment::Good | Treatment::Slow => Answer::Accepted(Box::new((*report).clone())),
                Treatment::ErrorAfter => unknown(true),
                Treatment::BrokenOff => unknown(false),
                _ => return,
            }
        }
    };
    sim.w().requests[request].over = true;
    // The answer travels; a webhook may overtake it.
    let slow = {
        let mut world = sim.w();
        world.has(Fault::Webhook) && world.rng.one_in(3)
    };
    if slow {
        let at = sim.w().now + 3000;
        sim.sleep_until(at).await;
    } else {
        sim.turn().await;
    }
    let answer = if died() { unknown(false) } else { answer };
    sim.w().answer(slot, answer);
}

/// How a record ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Confirmed,
    /// Given up before it was signed, for a reason of the relayer's own.
    Unsigned,
    /// Given up before it was signed, because of the item.
    UnsignedItem,
    Reverted,
    Canceled,
    NoOp,
}

/// The life of a record.
async fn live(sim: Sim, relayer: usize, place: usize) {
    let (end, epoch) = {
        let mut world = sim.w();
        let end = match world.rng.below(16) {
            0..=5 if world.has(Fault::Unsigned) => End::Unsigned,
            6 if world.has(Fault::Item) => End::UnsignedItem,
            7 if world.has(Fault::Item) => End::Reverted,
            8 if world.has(Fault::Item) => End::Canceled,
            9..=10 if world.has(Fault::NoOp) => End::NoOp,
            _ => End::Confirmed,
        };
        (end, world.relayers[relayer].epoch)
    };
    let calm = sim.w().calm;
    let stages: &[ReportedStatus] = match end {
        End::Confirmed if calm => &[ReportedStatus::Confirmed],
        End::Confirmed | End::NoOp => &[
            ReportedStatus::Open(Progress::Sent),
            ReportedStatus::Open(Progress::Submitted),
            ReportedStatus::Confirmed,
        ],
        End::Unsigned | End::UnsignedItem => &[ReportedStatus::Failed],
        End::Reverted => &[ReportedStatus::Open(Progress::Submitted), ReportedStatus::Failed],
        End::Canceled => &[ReportedStatus::Open(Progress::Sent), ReportedStatus::Canceled],
    };
    for status in stages {
        let at = {
            let mut world = sim.w();
            let pause = match world.rng.below(8) {
                0..=3 => world.rng.below(20),
                4..=6 => world.rng.below(5000),
                _ => world.rng.below(100_000),
            };
            world.now + pause as i64
        };
        sim.sleep_until(at).await;
        let mut world = sim.w();
        if world.relayers[relayer].epoch != epoch {
            return;
        }
        let now = world.now;
        let record = &mut world.relayers[relayer].records[place];
        let mut report = (*record.report).clone();
        report.status = *status;
        match end {
            End::Unsigned => report.reason = Some("Transaction in Pending state for over 2 minutes".to_owned()),
            End::UnsignedItem => report.reason = Some("exceeds block gas limit".to_owned()),
            _ => {
                (report.nonce, report.raw) = (Some(7), serde_json::Value::Null);
                report.hash = Some(format!("0x{}", report.tx_id));
            }
        }
        if end == End::NoOp && *status != ReportedStatus::Open(Progress::Sent) {
            report.to.clone_from(&report.from);
            (report.value, report.data, report.gas_limit) = (Some(U256::ZERO), Some("0x".to_owned()), Some(21_000));
            record.no_op = true;
        }
        if !matches!(status, ReportedStatus::Open(_)) {
            record.finished_at = Some(now);
        }
        record.report = Rc::new(report);
        let report = Rc::clone(&record.report);
        note!(world, "r{relayer}: {} is {:?}{}", report.tx_id, status, if end == End::NoOp { " (no-op)" } else { "" });
        world.tell(&sim, &report);
    }
}
