//! The simulated relayer itself: records, time passing for them, and what a crash leaves.
//!
//! It has no clock, no thread and no socket. A driver hands in requests ([`SimRelayer::handle`], in `api`), lets time
//! pass ([`SimRelayer::advance`]), carries out the events that come back, and reports how webhooks went
//! ([`SimRelayer::webhook_result`], in `webhook`). Equal calls give equal results.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, VecDeque},
    sync::Arc,
};

use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::{
    api::{OwnedRequest, Reply, SimResponse},
    broadcasts::Broadcast,
    faults::{Faults, Outcome, PostFault},
    on_chain::OnChain,
    options::{Memory, Mode, RelayerOptions, Timing},
    plan::{Plan, Step, millis},
    record::{NO_OP_GAS, Record, Status},
    request::{SendRequest, Speed},
    rng::Rng,
    webhook::{Outbox, OutgoingWebhook},
};

/// Chooses by a request's JSON.
pub(crate) type Rule<T> = Arc<dyn Fn(&serde_json::Value) -> Option<T> + Send + Sync>;

/// Names a request whose reply comes later, as an [`Event::Reply`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// What a driver has to carry out.
#[derive(Clone, Debug)]
pub enum Event {
    /// Send this, and report the result to [`SimRelayer::webhook_result`].
    Webhook(OutgoingWebhook),
    /// The reply to a request that was answered with [`Reply::Waiting`].
    Reply {
        /// From [`Reply::Waiting`].
        ticket: Ticket,
        /// Never [`Reply::Waiting`].
        reply: Reply,
    },
    /// The record of this number was stored; only in the modes that outlive the process.
    Stored(u64),
    /// The final webhook of the record of this number was delivered or given up; only in the modes that outlive the
    /// process.
    Notified(u64),
}

/// One accepted POST, kept for good in [`Mode::Audited`].
#[derive(Clone, Debug)]
pub struct Audit {
    /// The record's id.
    pub id: String,
    /// The request's body, byte for byte.
    pub body: Vec<u8>,
    /// On the driver's clock.
    pub received_at_ms: i64,
    /// How often the chain got it: 0 for a record that was forgotten or failed before, 2 for a double send.
    pub broadcasts: u32,
}

/// A simulated relayer. A clone continues independently from the same state.
#[derive(Clone)]
pub struct SimRelayer {
    pub(crate) options: Arc<RelayerOptions>,
    pub(crate) address: Arc<str>,
    pub(crate) id: Arc<str>,
    pub(crate) timing: Timing,
    pub(crate) faults: Faults,
    pub(crate) post_rule: Option<Rule<PostFault>>,
    pub(crate) outcome_rule: Option<Rule<Outcome>>,
    /// Oldest first; numbers ascend but may have holes.
    pub(crate) entries: VecDeque<Entry>,
    pub(crate) numbers: HashMap<Uuid, u64>,
    pub(crate) next_number: u64,
    /// Records in `pending`, `sent` or `submitted`.
    pub(crate) pending: usize,
    pub(crate) last_confirmed_ms: Option<i64>,
    pub(crate) next_nonce: u64,
    /// Nonces that were taken and never broadcast.
    pub(crate) nonce_gaps: BTreeSet<u64>,
    pub(crate) balance: String,
    /// Present if it signs on a chain.
    pub(crate) on_chain: Option<OnChain>,
    pub(crate) chain_id: Option<u64>,
    schedule: BinaryHeap<Due>,
    schedule_serial: u64,
    /// Records that a jam holds.
    pub(crate) jammed: Vec<u64>,
    pub(crate) stalled_until_ms: i64,
    pub(crate) unread: Vec<(Ticket, OwnedRequest)>,
    /// An answer that waits to be exchanged with the next one.
    pub(crate) exchanged: Option<(Ticket, SimResponse)>,
    /// Answers about transactions so far; every other one is from the second memory, if there is one.
    pub(crate) answers_given: u64,
    next_ticket: u64,
    pub(crate) outbox: Outbox,
    pub(crate) events: Vec<Event>,
    pub(crate) audit: Vec<Audit>,
    pub(crate) broadcasts: Vec<Broadcast>,
    /// The hash that used each nonce, if a driver simulates the chain.
    pub(crate) used: Option<BTreeMap<u64, String>>,
    pub(crate) forgotten: Vec<Record>,
    pub(crate) struck: BTreeMap<&'static str, usize>,
    pub(crate) ids: Rng,
    pub(crate) rng: Rng,
    pub(crate) plan_rng: Rng,
    /// Tokens left in the rate limit's bucket, and when they were counted.
    pub(crate) bucket: Option<(f64, i64)>,
    /// Latest time seen.
    pub(crate) now_ms: i64,
    /// Between a crash and the restart.
    crashed_at_ms: Option<i64>,
}

/// A record and what only the relayer knows about it.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) number: u64,
    pub(crate) record: Record,
    /// Steps to come. The first is due at `due_ms`.
    pub(crate) plan: Plan,
    pub(crate) due_ms: Option<i64>,
    /// A nonce that was set apart at acceptance.
    pub(crate) reserved_nonce: Option<u64>,
    pub(crate) broadcast: bool,
    pub(crate) audit: Option<usize>,
    /// On the driver's clock.
    pub(crate) stored_at_ms: i64,
    pub(crate) finished_at_ms: Option<i64>,
}

/// Work for a later time.
#[derive(Clone, Debug)]
pub(crate) enum Work {
    Step(u64),
    /// An attempt of this webhook.
    Webhook(u64),
    /// A POST that is stored late, and answered then if it has a ticket.
    Store(Box<SendRequest>, Vec<u8>, Option<Ticket>),
    /// The answer that waits to be exchanged leaves as it is.
    AnswerAlone(Ticket),
    /// The no-op for this nonce, if no other transaction was sent for it.
    FillGap(u64),
}

#[derive(Clone, Debug)]
struct Due {
    at_ms: i64,
    serial: u64,
    work: Work,
}

impl SimRelayer {
    /// A relayer without records. `id_seed` starts the sequence of record ids: two relayers, or two runs of a relayer
    /// that outlives its process, must not share one.
    pub fn new(options: impl Into<Arc<RelayerOptions>>, id_seed: u64) -> Self {
        let options = options.into();
        let address = match &options.address {
            Some(address) => Arc::from(address.as_str()),
            None => Arc::from(format!("0x{}", hex::encode(&Sha256::digest(options.id.as_bytes())[..20]))),
        };
        Self {
            address,
            id: Arc::from(options.id.as_str()),
            timing: options.timing,
            faults: Faults::default(),
            post_rule: None,
            outcome_rule: None,
            entries: VecDeque::new(),
            numbers: HashMap::new(),
            next_number: 0,
            pending: 0,
            last_confirmed_ms: None,
            next_nonce: 0,
            nonce_gaps: BTreeSet::new(),
            balance: "10000000000000000000000".to_owned(),
            on_chain: None,
            chain_id: options.chain_id,
            schedule: BinaryHeap::new(),
            schedule_serial: 0,
            jammed: Vec::new(),
            stalled_until_ms: i64::MIN,
            unread: Vec::new(),
            exchanged: None,
            answers_given: 0,
            next_ticket: 0,
            outbox: Outbox::new(options.webhook.clone()),
            events: Vec::new(),
            audit: Vec::new(),
            broadcasts: Vec::new(),
            used: None,
            forgotten: Vec::new(),
            struck: BTreeMap::new(),
            ids: Rng::new(id_seed),
            rng: Rng::new(options.seed),
            plan_rng: Rng::new(options.seed),
            bucket: None,
            now_ms: i64::MIN,
            crashed_at_ms: None,
            options,
        }
    }

    /// Lets time pass: carries out everything due up to `now_ms` in order, and returns what the driver has to do.
    pub fn advance(&mut self, now_ms: i64) -> Vec<Event> {
        self.now_ms = self.now_ms.max(now_ms);
        if now_ms >= self.stalled_until_ms {
            self.read_unread(now_ms);
            while self.schedule.peek().is_some_and(|due| due.at_ms <= now_ms) {
                let Some(Due { at_ms, work, .. }) = self.schedule.pop() else { break };
                match work {
                    Work::Step(number) => self.take_step(number, at_ms),
                    Work::Webhook(id) => self.emit_webhook(id),
                    Work::Store(request, body, ticket) => self.store_late(now_ms, *request, body, ticket),
                    Work::AnswerAlone(ticket) => self.answer_alone(ticket),
                    Work::FillGap(nonce) => self.fill_gap(now_ms, nonce),
                }
            }
        }
        std::mem::take(&mut self.events)
    }

    /// When [`SimRelayer::advance`] has something to do next.
    pub fn next_due_ms(&self) -> Option<i64> {
        if !self.events.is_empty() {
            return Some(self.now_ms);
        }
        let unread = (!self.unread.is_empty()).then_some(self.stalled_until_ms);
        let scheduled = self.schedule.peek().map(|due| due.at_ms.max(self.stalled_until_ms));
        unread.into_iter().chain(scheduled).min()
    }

    /// Replaces all faults; `Faults::default()` makes the relayer behave again.
    pub fn set_faults(&mut self, now_ms: i64, faults: Faults) {
        // The sequence starts again only with a new plan, so that a change of other faults does not repeat it.
        if let Some(plan) = &faults.plan
            && self.faults.plan.as_ref() != Some(plan)
        {
            self.plan_rng = Rng::new(plan.seed);
        }
        self.faults = faults;
        self.release_jammed(now_ms);
    }

    /// The present faults.
    pub fn faults(&self) -> &Faults {
        &self.faults
    }

    /// Chooses POST faults by the request's JSON, before [`Faults`] does.
    pub fn set_post_rule(&mut self, rule: impl Fn(&serde_json::Value) -> Option<PostFault> + Send + Sync + 'static) {
        self.post_rule = Some(Arc::new(rule));
    }

    /// Chooses outcomes by the request's JSON, before [`Faults`] does.
    pub fn set_outcome_rule(&mut self, rule: impl Fn(&serde_json::Value) -> Option<Outcome> + Send + Sync + 'static) {
        self.outcome_rule = Some(Arc::new(rule));
    }

    /// Sets the times of the records that are stored from now on.
    pub fn set_timing(&mut self, timing: Timing) {
        self.timing = timing;
    }

    /// The process is frozen until then: it reads no request, moves no record and sends no webhook.
    pub fn stall_until(&mut self, until_ms: i64) {
        self.stalled_until_ms = self.stalled_until_ms.max(until_ms);
    }

    /// The process dies. Requests that wait are lost, so are webhooks under way; the driver cuts its connections.
    pub fn crash(&mut self, now_ms: i64) {
        self.now_ms = self.now_ms.max(now_ms);
        self.crashed_at_ms.get_or_insert(now_ms);
        self.schedule.clear();
        self.jammed.clear();
        self.unread.clear();
        self.exchanged = None;
        self.events.clear();
        self.outbox.clear_under_way();
        for entry in &mut self.entries {
            entry.due_ms = None;
        }
        self.stalled_until_ms = i64::MIN;
    }

    /// The process starts again after [`SimRelayer::crash`], which it includes. `memory` counts from the crash.
    pub fn restart(&mut self, now_ms: i64, memory: Memory) {
        self.crash(now_ms);
        let crashed_at_ms = self.crashed_at_ms.take().unwrap_or(now_ms);
        match memory {
            Memory::Keep => {}
            Memory::Forget => self.forget(),
            Memory::ForgetLast(time) => self.forget_since(crashed_at_ms.saturating_sub(millis(time))),
            Memory::LoseJobs(time) => {
                let since_ms = crashed_at_ms.saturating_sub(millis(time));
                let young = self.entries.iter_mut().rev().take_while(|entry| entry.stored_at_ms >= since_ms);
                young.filter(|entry| entry.record.nonce.is_none()).for_each(|entry| entry.plan.clear());
            }
        }
        for place in 0..self.entries.len() {
            self.schedule_step(place, now_ms);
        }
        for nonce in self.nonce_gaps.clone() {
            self.open_gap(nonce, now_ms);
        }
    }

    /// Forgets all records while running. The audit and the chain's nonce stay.
    pub fn forget(&mut self) {
        self.forget_since(i64::MIN);
        self.last_confirmed_ms = None;
    }

    /// Signs with the key of this account from now on, from nonce 0. Records keep the account that they were made with.
    pub fn change_key(&mut self, address: &str) {
        self.address = Arc::from(address);
        self.next_nonce = 0;
    }

    fn forget_since(&mut self, since_ms: i64) {
        while self.entries.back().is_some_and(|entry| entry.stored_at_ms >= since_ms) {
            let Some(entry) = self.entries.pop_back() else { return };
            self.drop_entry(entry);
        }
    }

    /// Stores a no-op that fills a nonce gap (the lowest one, or else the next nonce) and sends its webhook. With
    /// `loses_name` the relayer later overwrites the reason that identifies it. Returns the record's id.
    pub fn add_gap_filler(&mut self, now_ms: i64, loses_name: bool) -> String {
        let nonce = self.nonce_gaps.first().copied().unwrap_or_else(|| self.take_nonce());
        self.add_gap_filler_for(now_ms, nonce, loses_name)
    }

    pub(crate) fn add_gap_filler_for(&mut self, now_ms: i64, nonce: u64, loses_name: bool) -> String {
        self.nonce_gaps.remove(&nonce);
        let request = SendRequest {
            value: "0x0".to_owned(),
            data: Some("0x".to_owned()),
            gas_limit: Some(NO_OP_GAS),
            speed: Some(Speed::Fast),
            ..SendRequest::default()
        };
        let mut record = self.new_record(now_ms, request);
        record.become_no_op();
        record.status_reason = Some(format!("Gap-filling NOOP for nonce {nonce}"));
        let id = record.id.clone();
        let end = if loses_name { Step::LoseName } else { Step::Confirm };
        let pause = millis(self.timing.confirmed.saturating_sub(self.timing.submitted));
        let number = self.insert(now_ms, record, [(pause, end)].into(), None, true);
        if let Some(place) = self.place(number) {
            self.sign_record(place, nonce, now_ms);
            self.send_last_signed(nonce);
            let made_up = (!self.is_on_chain()).then(|| self.other_hash(nonce, "filler"));
            self.entries[place].broadcast = true;
            self.change(place, now_ms, |record| {
                record.hash = made_up.or(record.hash.take());
                record.status = Status::Submitted;
            });
            self.list_no_op(place, "filler");
        }
        self.notify(number, now_ms);
        self.release_jammed(now_ms);
        id
    }

    /// Adds a record from before the simulation began: confirmed at `finished_at_ms`, not in the audit.
    pub fn add_old_record(
        &mut self,
        created_at_ms: i64,
        finished_at_ms: i64,
        to: &str,
        value: &str,
        data: &str,
    ) -> String {
        let request = SendRequest {
            to: Some(to.to_owned()),
            value: value.to_owned(),
            data: Some(data.to_owned()),
            ..SendRequest::default()
        };
        let mut record = self.new_record(created_at_ms, request);
        let nonce = self.take_nonce();
        let hash = self.hash(nonce);
        record.sign(nonce, hash, record.created_at_ms);
        record.status = Status::Confirmed;
        record.confirmed_at_ms = Some(finished_at_ms + self.faults.clock_offset_ms);
        let id = record.id.clone();
        self.insert(created_at_ms, record, Plan::new(), None, true);
        if let Some(entry) = self.entries.back_mut() {
            entry.finished_at_ms = Some(finished_at_ms);
        }
        id
    }

    /// Sets the balance that `/status` and `/balance` show, in wei.
    pub fn set_balance(&mut self, wei: impl Into<String>) {
        self.balance = wei.into();
    }

    /// The address that it signs with.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Every accepted POST, oldest first, whatever the relayer forgot since.
    pub fn audit(&self) -> &[Audit] {
        &self.audit
    }

    /// The records that it holds, oldest first, whether or not their retention is over.
    pub fn records(&self) -> impl DoubleEndedIterator<Item = &Record> {
        self.entries.iter().map(|entry| &entry.record)
    }

    /// The records that it has forgotten, as they last were; in [`Mode::Audited`] only.
    pub fn forgotten(&self) -> &[Record] {
        &self.forgotten
    }

    /// One record by its id, unless its retention is over.
    pub fn record(&self, now_ms: i64, id: &str) -> Option<&Record> {
        let number = *self.numbers.get(&Uuid::try_parse(id).ok()?)?;
        let entry = self.entry(number)?;
        self.is_retained(entry, now_ms).then_some(&entry.record)
    }

    /// Whether a call is on the chain or may still get there: not for a record that failed unsigned, nor for one that
    /// was forgotten before it was broadcast.
    pub fn may_take_effect(&self, audit: &Audit) -> bool {
        let record = || self.record(i64::MIN, &audit.id);
        audit.broadcasts > 0 || record().is_some_and(|record| !record.never_signed())
    }

    /// How often each POST fault struck, by [`PostFault::name`].
    pub fn faults_struck(&self) -> &BTreeMap<&'static str, usize> {
        &self.struck
    }

    /// The relayer's own time for the driver's time.
    pub(crate) fn clock(&self, now_ms: i64) -> i64 {
        now_ms.saturating_add(self.faults.clock_offset_ms)
    }

    pub(crate) fn is_retained(&self, entry: &Entry, now_ms: i64) -> bool {
        match (self.options.retention, entry.finished_at_ms) {
            (Some(retention), Some(finished_at_ms)) => now_ms.saturating_sub(finished_at_ms) < millis(retention),
            _ => true,
        }
    }

    pub(crate) fn entry(&self, number: u64) -> Option<&Entry> {
        self.place(number).map(|place| &self.entries[place])
    }

    pub(crate) fn place(&self, number: u64) -> Option<usize> {
        self.entries.binary_search_by_key(&number, |entry| entry.number).ok()
    }

    pub(crate) fn ticket(&mut self) -> Ticket {
        self.next_ticket += 1;
        Ticket(self.next_ticket)
    }

    pub(crate) fn schedule(&mut self, at_ms: i64, work: Work) {
        self.schedule_serial += 1;
        self.schedule.push(Due { at_ms, serial: self.schedule_serial, work });
    }

    pub(crate) fn is_audited(&self) -> bool {
        self.options.mode == Mode::Audited
    }
}

/// The earliest is the greatest, as the heap gives out the greatest first.
impl Ord for Due {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.at_ms, other.serial).cmp(&(self.at_ms, self.serial))
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Due {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Due {}
