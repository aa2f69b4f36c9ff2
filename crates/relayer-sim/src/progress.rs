//! A record's way: stored with a plan, moved step by step, changed by a cancellation, dropped in the end.

use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::{
    api::Reply,
    core::{Audit, Entry, Event, SimRelayer, Ticket, Work},
    faults::{Outcome, PostFault},
    on_chain::Broadcast,
    options::{Dialect, Mode},
    plan::{self, Plan, Step, millis},
    record::{Record, Status},
    request::{SendRequest, is_well_formed},
};

impl SimRelayer {
    /// Stores an accepted request; returns the record's number.
    pub(crate) fn store(&mut self, now_ms: i64, request: SendRequest, body: &[u8], fault: Option<&PostFault>) -> u64 {
        let plan = self.choose_plan(&request, body);
        let mut record = self.new_record(now_ms, request);
        let mut plan = plan;
        if fault == Some(&PostFault::QueueUnavailable) {
            record.status = Status::Failed;
            record.status_reason = Some("Queue unavailable".to_owned());
            plan.clear();
        }
        let audit = self.is_audited().then(|| {
            self.audit.push(Audit {
                id: record.id.clone(),
                body: body.to_vec(),
                received_at_ms: now_ms,
                broadcasts: 0,
            });
            self.audit.len() - 1
        });
        let number = self.insert(now_ms, record, plan, audit, false);
        if !self.is_audited() {
            self.events.push(Event::Stored(number));
            self.prune();
        }
        number
    }

    pub(crate) fn store_late(&mut self, now_ms: i64, request: SendRequest, body: Vec<u8>, ticket: Option<Ticket>) {
        let number = self.store(now_ms, request, &body, None);
        if let (Some(ticket), Some(entry)) = (ticket, self.entry(number)) {
            let reply = Reply::now(self.accepted_response(now_ms, &entry.record));
            self.events.push(Event::Reply { ticket, reply });
        }
    }

    fn choose_plan(&mut self, request: &SendRequest, body: &[u8]) -> Plan {
        if self.options.mode == Mode::OnChain {
            return Plan::new();
        }
        let ruled = self.outcome_rule.as_ref().and_then(|rule| rule(&serde_json::from_slice(body).unwrap_or_default()));
        let named = ruled.or_else(|| self.faults.next_outcomes.pop_front());
        let (to, data) = (request.to.as_deref(), request.data.as_deref());
        let timing = &self.timing;
        if named.is_none() && self.options.dialect == Dialect::Real && !is_well_formed(to, data) {
            return plan::malformed(timing);
        }
        let reverts = |prefix: &String| data.is_some_and(|data| data.to_ascii_lowercase().starts_with(prefix));
        let outcome = match named {
            Some(outcome) => outcome,
            None if self.faults.out_of_funds => Outcome::NeverSigned(plan::OUT_OF_FUNDS.to_owned()),
            None if self.options.reverting_data.as_ref().is_some_and(reverts) => Outcome::Reverted,
            None => self.faults.outcome.clone(),
        };
        plan::plan(&outcome, timing, &mut self.rng)
    }

    pub(crate) fn new_record(&mut self, now_ms: i64, request: SendRequest) -> Record {
        let id = self.ids.uuid().to_string();
        Record::new(id, request, self.clock(now_ms), &self.address, &self.id)
    }

    pub(crate) fn insert(
        &mut self,
        now_ms: i64,
        record: Record,
        plan: Plan,
        audit: Option<usize>,
        broadcast: bool,
    ) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        if let Ok(id) = Uuid::try_parse(&record.id) {
            self.numbers.insert(id, number);
        }
        self.pending += usize::from(record.status.is_pending());
        let signs = plan.front().is_some_and(|(_, step)| *step == Step::Sign);
        let reserved_nonce = (self.options.mode == Mode::Journaled && signs).then(|| self.take_nonce());
        let finished_at_ms = record.status.is_final().then_some(now_ms);
        self.entries.push_back(Entry {
            number,
            record,
            plan,
            due_ms: None,
            reserved_nonce,
            broadcast,
            audit,
            stored_at_ms: now_ms,
            finished_at_ms,
        });
        self.schedule_step(self.entries.len() - 1, now_ms);
        number
    }

    pub(crate) fn schedule_step(&mut self, place: usize, from_ms: i64) {
        let Some((pause, _)) = self.entries[place].plan.front() else { return };
        let (at_ms, number) = (from_ms.saturating_add(*pause), self.entries[place].number);
        self.entries[place].due_ms = Some(at_ms);
        self.schedule(at_ms, Work::Step(number));
    }

    /// Takes the next step of a record, unless a jam holds it.
    pub(crate) fn take_step(&mut self, number: u64, at_ms: i64) {
        let Some(place) = self.place(number) else { return };
        // A step that was replaced since (by a cancellation) is still in the schedule.
        if self.entries[place].due_ms != Some(at_ms) {
            return;
        }
        if self.is_jammed(place) {
            self.jammed.push(number);
            return;
        }
        self.entries[place].due_ms = None;
        if let Some((_, step)) = self.entries[place].plan.pop_front() {
            let step = self.as_mined(place, step);
            self.apply_and_notify(place, step, at_ms);
            self.schedule_step(place, at_ms);
        }
    }

    fn is_jammed(&self, place: usize) -> bool {
        let entry = &self.entries[place];
        let mining = entry.plan.front().is_some_and(|(_, step)| !step.precedes_mining());
        let behind_gap = || match (self.nonce_gaps.first(), entry.record.nonce) {
            (Some(gap), Some(nonce)) => self.faults.gaps_jam && *gap < nonce,
            _ => false,
        };
        let unmined = || self.awaits_chain(entry.record.nonce) || self.is_unmined(place);
        mining && (self.faults.jammed || behind_gap() || unmined())
    }

    pub(crate) fn release_jammed(&mut self, now_ms: i64) {
        for number in std::mem::take(&mut self.jammed) {
            if let Some(place) = self.place(number) {
                self.entries[place].due_ms = Some(now_ms);
                self.schedule(now_ms, Work::Step(number));
            }
        }
    }

    /// Runs one record up to a status (or its end) at once. Returns its webhooks.
    pub(crate) fn run_ahead(&mut self, number: u64, until: Status, now_ms: i64) -> Vec<u64> {
        let mut webhooks = Vec::new();
        while let Some(place) = self.place(number) {
            if self.entries[place].record.status >= until {
                break;
            }
            let Some((_, step)) = self.entries[place].plan.pop_front() else { break };
            webhooks.extend(self.apply_and_notify(place, step, now_ms));
        }
        if let Some(place) = self.place(number) {
            self.schedule_step(place, now_ms);
        }
        webhooks
    }

    /// Applies one step and sends its webhook, whose id it returns.
    fn apply_and_notify(&mut self, place: usize, step: Step, now_ms: i64) -> Option<u64> {
        let number = self.entries[place].number;
        let silent = matches!(step, Step::BroadcastUnstored | Step::BroadcastAgain | Step::Bump);
        let step = self.by_receipt(place, step);
        self.apply(place, step, now_ms);
        if silent { None } else { self.notify(number, now_ms) }
    }

    /// Applies one step.
    pub(crate) fn apply(&mut self, place: usize, step: Step, now_ms: i64) {
        let clock = self.clock(now_ms);
        match step {
            Step::Sign => {
                let nonce = match self.entries[place].reserved_nonce.take() {
                    Some(nonce) => nonce,
                    None => self.take_nonce(),
                };
                self.sign_record(place, nonce, now_ms);
            }
            Step::Broadcast | Step::BroadcastUnstored => {
                match self.broadcast(place, &step) {
                    Broadcast::Sent => self.count_broadcast(place),
                    Broadcast::NoOpSent => self.entries[place].broadcast = true,
                    Broadcast::Lost => {}
                }
                self.list_call(place, step == Step::Broadcast);
                if step == Step::Broadcast {
                    self.change(place, now_ms, |record| record.status = Status::Submitted);
                }
            }
            Step::BroadcastAgain => self.broadcast_again(place),
            Step::ConfirmUnsent => {
                self.leave_gap(place, now_ms);
                self.change(place, now_ms, |record| {
                    record.status = Status::Confirmed;
                    record.confirmed_at_ms = Some(clock);
                });
            }
            Step::GiveUp => {
                self.leave_gap(place, now_ms);
                self.change(place, now_ms, |record| {
                    record.sent_at_ms = None;
                    record.fail(plan::GIVEN_UP.to_owned());
                });
            }
            Step::Mine => self.change(place, now_ms, |record| record.status = Status::Mined),
            Step::Confirm | Step::ConfirmAsNoOp => {
                let replaced = step == Step::ConfirmAsNoOp;
                let mined = self.mined_hash(self.entries[place].record.nonce).or_else(|| self.no_op_hash(place));
                self.change(place, now_ms, |record| {
                    if replaced {
                        record.become_no_op();
                        record.hash = mined.or(record.hash.take());
                    }
                    record.status = Status::Confirmed;
                    record.confirmed_at_ms = Some(clock);
                });
            }
            Step::Bump => self.bump(place, now_ms),
            Step::Fail(reason) => {
                if let (false, Some(nonce)) = (self.entries[place].broadcast, self.entries[place].record.nonce) {
                    self.open_gap(nonce, now_ms);
                }
                self.change(place, now_ms, |record| record.fail(reason));
            }
            Step::Revert => self.change(place, now_ms, |record| record.fail(plan::REVERTED.to_owned())),
            Step::FailExecuted | Step::LoseName => self.change(place, now_ms, |record| {
                let nonce = record.nonce.unwrap_or_default();
                record.sent_at_ms = None;
                let reason = format!(
                    "Nonce {nonce} consumed externally by another transaction. No matching transaction hash found on-chain"
                );
                record.fail(reason);
            }),
            Step::Cancel => {
                let replaced = self.no_op_hash(place);
                self.change(place, now_ms, |record| {
                    record.become_no_op();
                    record.hash = replaced.or(record.hash.take());
                    record.status = Status::Canceled;
                    record.is_canceled = true;
                });
            }
        }
    }

    /// Changes a record and keeps the counts that depend on its status.
    pub(crate) fn change(&mut self, place: usize, now_ms: i64, change: impl FnOnce(&mut Record)) {
        let entry = &mut self.entries[place];
        self.pending -= usize::from(entry.record.status.is_pending());
        change(&mut entry.record);
        let status = entry.record.status;
        self.pending += usize::from(status.is_pending());
        entry.finished_at_ms = status.is_final().then_some(now_ms);
        if status == Status::Confirmed {
            self.last_confirmed_ms = self.last_confirmed_ms.max(entry.record.confirmed_at_ms);
        }
    }

    /// Cancels a record that is not final: at once while it is `pending`, else by a no-op with its nonce.
    pub(crate) fn cancel(&mut self, number: u64, now_ms: i64) {
        let Some(place) = self.place(number) else { return };
        self.entries[place].plan.clear();
        self.entries[place].due_ms = None;
        if self.entries[place].record.status == Status::Pending {
            self.apply_and_notify(place, Step::Cancel, now_ms);
            return;
        }
        self.broadcast_cancellation(place);
        self.change(place, now_ms, |record| {
            record.is_canceled = true;
            record.become_no_op();
        });
        self.list_no_op(place, "no-op");
        self.entries[place].broadcast = true;
        let pause = millis(self.timing.confirmed.saturating_sub(self.timing.submitted));
        self.entries[place].plan.push_back((pause, Step::Cancel));
        self.schedule_step(place, now_ms);
        self.notify(number, now_ms);
    }

    pub(crate) fn take_nonce(&mut self) -> u64 {
        self.next_nonce += 1;
        self.next_nonce - 1
    }

    /// A made-up hash, which depends on seed, relayer and nonce alone.
    pub(crate) fn hash(&self, nonce: u64) -> String {
        self.made_up_hash(nonce, "nonce")
    }

    pub(crate) fn made_up_hash(&self, nonce: u64, of: &str) -> String {
        let digest = Sha256::digest(format!("{} {} {of} {nonce}", self.options.seed, self.id));
        format!("0x{}", hex::encode(digest))
    }

    pub(crate) fn drop_entry(&mut self, entry: Entry) {
        self.pending -= usize::from(entry.record.status.is_pending());
        if let Ok(id) = Uuid::try_parse(&entry.record.id) {
            self.numbers.remove(&id);
        }
        if let (false, false, Some(nonce)) = (entry.record.status.is_final(), entry.broadcast, entry.record.nonce) {
            self.open_gap(nonce, self.now_ms);
        }
        if self.is_audited() {
            self.forgotten.push(entry.record);
        }
    }

    /// Drops the oldest final records beyond the limit.
    fn prune(&mut self) {
        while self.entries.len().saturating_sub(self.pending) > self.options.records_max {
            match self.entries.front() {
                Some(oldest) if oldest.record.status.is_final() => {}
                _ => return,
            }
            if let Some(oldest) = self.entries.pop_front() {
                self.drop_entry(oldest);
            }
        }
    }
}
