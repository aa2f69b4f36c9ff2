//! What a relayer's report means for a row (pure). Webhooks, the reconciler and confirm mode all use
//! [`Transaction::report`], so they cannot disagree. Only this file sets `hash` and the successful final states.
//! A verdict is saved only if the row has not moved since it was read, so no process can move it back.

use std::time::Duration;

use alloy_primitives::{Address, U256};
use serde_json::Value;

use super::moves::{failed, moved};
use crate::config::{RelayMode, Timings};
use crate::mutations::Mutation;
use crate::relay::request::call::Call;
use crate::relay::state::transaction::{
    Binding, FailedBy, MoveRefused, Moved, Progress, RelayerTxId, Status, Step, Transaction,
};
use crate::timestamp::Timestamp;

/// A relayer's view of one of its transactions, independent of the dialect.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The relayer's id.
    pub tx_id: RelayerTxId,
    /// Status at the relayer.
    pub status: ReportedStatus,
    /// Why, if it failed.
    pub reason: Option<String>,
    /// The chain's hash, once signed.
    pub hash: Option<String>,
    /// The nonce, once taken.
    pub nonce: Option<u64>,
    /// The relayer's own address.
    pub from: Option<String>,
    /// The target it now has.
    pub to: Option<String>,
    /// The value it now has.
    pub value: Option<U256>,
    /// The call data it now has.
    pub data: Option<String>,
    /// The gas limit it now has.
    pub gas_limit: Option<u64>,
    /// When the relayer stored it.
    pub created_at: Option<Timestamp>,
    /// When the chain confirmed it.
    pub confirmed_at: Option<Timestamp>,
    /// The block that the hash is in, where the dialect carries it.
    pub block_number: Option<u64>,
    /// The whole record as received.
    pub raw: Value,
}

/// A relayer's status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReportedStatus {
    /// Not final.
    Open(Progress),
    /// On the chain.
    Confirmed,
    /// Failed.
    Failed,
    /// Canceled at the relayer.
    Canceled,
    /// Expired at the relayer.
    Expired,
    /// A status that Baton does not know: not final, and ignored.
    Unknown,
}

impl ReportedStatus {
    /// The relayer's own name of it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Open(progress) => progress.name(),
            Self::Confirmed => "confirmed",
            Self::Failed => "failed",
            Self::Canceled => "canceled",
            Self::Expired => "expired",
            Self::Unknown => "an unknown status",
        }
    }

    /// Whether it is final at the relayer.
    pub fn is_over(self) -> bool {
        matches!(self, Self::Confirmed | Self::Failed | Self::Canceled | Self::Expired)
    }
}

/// How a report came, which says how old it may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The relayer sent it, possibly late and out of order.
    Webhook,
    /// Baton just asked for it.
    Asked,
}

/// What to do about a report.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// Save this.
    Move(Box<Moved>),
    /// Save this, and queue the transaction again after the pause: another relayer should take it.
    Reroute(Box<Moved>, Duration),
    /// The relayer sent it twice: keep the second hash in the timeline and raise the alarm.
    DoubleSend(Step),
    /// The row is shown as failed, and the relayer says that it was executed: save this and raise the alarm.
    Contradicted(Box<Moved>),
    /// Nothing new, for this reason.
    Ignore(&'static str),
}

impl Transaction {
    /// Judges a report about the transaction that this row is bound to.
    pub fn report(
        &self,
        report: &Report,
        source: Source,
        mode: RelayMode,
        now: Timestamp,
        timings: &Timings,
    ) -> Verdict {
        let Some(binding) = self.binding.as_ref().filter(|binding| binding.tx_id == report.tx_id) else {
            // The row has left that relayer: it failed the record unsigned, or the chain proved that it was not made.
            let mined = matches!(report.status, ReportedStatus::Confirmed | ReportedStatus::Open(Progress::Mined));
            return match &report.hash {
                Some(hash) if mined && self.hash.as_ref() != Some(hash) && self.call.is_still(report) => {
                    Verdict::DoubleSend(Step::new(
                        "double-send",
                        format!("{}, which was given up, is on the chain after all, with hash {hash}", report.tx_id),
                    ))
                }
                _ => Verdict::Ignore("the transaction is no longer with that relayer"),
            };
        };
        if self.is_of_another_account(report) {
            return Verdict::Ignore("it is about a transaction of another account");
        }
        if !self.status.is_final() && self.call.is_replaced_in(report) {
            return Verdict::Ignore("the record is about another call");
        }
        if self.status.is_final() {
            return self.report_after_final(report, now);
        }
        match report.status {
            ReportedStatus::Unknown => Verdict::Ignore("an unknown status"),
            ReportedStatus::Open(progress) => match self.second_send_before_end(report) {
                Some(step) => Verdict::DoubleSend(step),
                None => self.progressed(report, progress, source, now, timings),
            },
            ReportedStatus::Confirmed if !self.call.is_still(report) => {
                let reason = "the relayer replaced the call (a no-op was confirmed in its place)";
                Verdict::Move(Box::new(self.failed_at_relayer(report, reason, mode, now)))
            }
            ReportedStatus::Confirmed => {
                let mut next = self.with_report(report, now);
                next.status = match mode {
                    RelayMode::FireAndForget => Status::Confirmed,
                    RelayMode::Confirm => Status::Success,
                };
                next.result = (mode == RelayMode::Confirm).then(|| report.raw.clone());
                next.confirmed_at = Some(report.confirmed_at.unwrap_or(now));
                next.block_number = report.block_number;
                next.error_message = None;
                next.check_at = None;
                let detail = format!("hash {}", next.hash.as_deref().unwrap_or("unknown"));
                Verdict::Move(Box::new(moved(next, "confirmed", detail)))
            }
            // The relayer may have been signing it while it canceled it.
            ReportedStatus::Canceled if self.may_reroute(report) && !self.is_cancel_certain(report, now, timings) => {
                Verdict::Ignore("canceled at Baton's request a moment ago")
            }
            // A webhook may be another relayer's, or older than what the relayer would say now: it is asked first.
            ReportedStatus::Failed | ReportedStatus::Canceled
                if self.may_reroute(report) && source == Source::Webhook =>
            {
                let mut next = self.next(now);
                next.check_at = Some(now);
                let detail = format!("{} unsigned; the relayer is asked", report.status.name());
                Verdict::Move(Box::new(moved(next, "relayer-says", detail)))
            }
            ReportedStatus::Failed | ReportedStatus::Canceled if self.may_reroute(report) => {
                let (ended, reason) = (report.status.name(), report.reason.as_deref().unwrap_or("no reason given"));
                let detail = format!("{} {ended} it unsigned ({reason}); another relayer takes it", binding.relayer);
                let (moved, pause) = self.rerouted(detail, now, timings);
                Verdict::Reroute(Box::new(moved), pause)
            }
            ReportedStatus::Failed => {
                let reason = report.reason.clone().unwrap_or_else(|| "the relayer reported failure".to_owned());
                Verdict::Move(Box::new(self.failed_at_relayer(report, &reason, mode, now)))
            }
            ReportedStatus::Canceled => {
                Verdict::Move(Box::new(self.failed_at_relayer(report, "canceled at the relayer", mode, now)))
            }
            ReportedStatus::Expired => {
                Verdict::Move(Box::new(self.failed_at_relayer(report, "expired at the relayer", mode, now)))
            }
        }
    }

    /// Whether the report is about another account's transaction than the relayer answered with when it took this one:
    /// another relayer's webhook, or an exchanged answer.
    pub fn is_of_another_account(&self, report: &Report) -> bool {
        let address = |text: &Option<String>| text.as_deref().and_then(|text| text.parse::<Address>().ok());
        address(&self.from).zip(address(&report.from)).is_some_and(|(known, said)| known != said)
    }

    /// Whether the chain must confirm this report before it counts. A relayer is wrong about signed transactions more
    /// often than about anything else: it broadcasts, fails to store that, and later finds its nonce used. One that has
    /// lost its last seconds calls a transaction unsigned that it signed in them.
    pub fn needs_chain(&self, report: &Report, now: Timestamp, timings: &Timings) -> bool {
        let bound = self.binding.as_ref().is_some_and(|binding| binding.tx_id == report.tx_id);
        let ended = match report.status {
            ReportedStatus::Confirmed => true,
            ReportedStatus::Canceled if self.is_cancel_certain(report, now, timings) => true,
            // It waits until the cancellation is certain.
            ReportedStatus::Canceled if self.may_reroute(report) => false,
            ReportedStatus::Failed | ReportedStatus::Canceled | ReportedStatus::Expired => {
                self.was_signed(report) || (report.never_signed() && !Mutation::BelievesUnsigned.is_on())
            }
            ReportedStatus::Open(_) | ReportedStatus::Unknown => false,
        };
        let ours = !self.is_of_another_account(report) && !self.call.is_replaced_in(report);
        bound && ended && !self.status.is_final() && ours
    }

    /// Whether the relayer has ever signed it, as far as it has said.
    fn was_signed(&self, report: &Report) -> bool {
        report.nonce.is_some() || report.hash.is_some() || report.hash_is_malformed() || self.shows_signature()
    }

    /// Whether the row itself shows that its relayer signed it.
    pub(super) fn shows_signature(&self) -> bool {
        let signed = |binding: &Binding| binding.nonce.is_some() || binding.progress > Progress::Pending;
        self.hash.is_some() || self.binding.as_ref().is_some_and(signed)
    }

    /// Records a final report that waits for the chain, and has the row looked at now.
    pub fn ask_chain(&self, report: &Report, now: Timestamp) -> Result<Moved, MoveRefused> {
        self.not_final()?;
        let reason = report.reason.as_deref().map(|reason| format!(" ({reason})")).unwrap_or_default();
        let said = format!("the relayer says {}{reason}; the chain has not confirmed that yet", report.status.name());
        if self.error_message.as_ref() == Some(&said) {
            return Err(MoveRefused::NotPossible("the chain is being asked"));
        }
        let forgotten = self.binding.as_ref().and_then(|binding| binding.forgotten_since);
        let forgotten = forgotten.filter(|_| !self.is_only_silent());
        let mut next = self.with_report(report, now);
        if let Some(binding) = &mut next.binding {
            binding.forgotten_since = forgotten;
        }
        next.error_message = Some(said.clone());
        next.relayer_says = Some(report.without_call_data());
        next.check_at = Some(now);
        Ok(moved(next, "relayer-says", said))
    }

    /// Records that Baton asks the relayer to cancel its record, before it asks: the relayer does not work on it. Each
    /// request counts anew: an earlier one may not have reached the relayer.
    pub fn request_cancel(&self, at: Timestamp, now: Timestamp) -> Result<Moved, MoveRefused> {
        self.not_final()?;
        let binding = self.binding.as_ref().ok_or(MoveRefused::NotPossible("no relayer has it"))?;
        let detail = format!("{} has not signed it and does not work on it; it is asked to cancel it", binding.relayer);
        let first = self.cancel_requested_at.is_none();
        let mut next = self.next(now);
        next.cancel_requested_at = Some(now);
        next.check_at = Some(at);
        let steps = if first { vec![Step::new("cancel-requested", detail)] } else { Vec::new() };
        Ok(Moved::new(next, steps))
    }

    /// The chain proves that the relayer did not make the call and no longer can: another relayer takes it, without using
    /// up an attempt.
    pub fn not_executed(&self, why: &str, now: Timestamp, timings: &Timings) -> Result<Moved, MoveRefused> {
        self.not_final()?;
        let binding = self.binding.as_ref().ok_or(MoveRefused::NotPossible("no relayer has it"))?;
        if self.imported {
            return Err(MoveRefused::NotPossible("a status lookup imported it; Baton never sends it"));
        }
        let detail = format!("{why}: {} certainly did not execute it; another relayer takes it", binding.relayer);
        let (mut moved, _) = self.rerouted(detail, now, timings);
        moved.transaction.hash = None;
        moved.transaction.error_message = None;
        Ok(moved)
    }

    /// Binds it to the mined transaction that made its call under a nonce that its relayer did not name. The record that
    /// it leaves stays its own.
    pub fn found_on_chain(&self, tx_id: &RelayerTxId, nonce: u64, now: Timestamp) -> Result<Moved, MoveRefused> {
        self.not_final()?;
        let mut next = self.next(now);
        let binding = next.binding.as_mut().ok_or(MoveRefused::NotPossible("no relayer has it"))?;
        (binding.tx_id, binding.nonce) = (tx_id.clone(), Some(nonce));
        Ok(moved(next, "found-on-chain", format!("nonce {nonce} of the relayer's account made the call")))
    }

    /// The chain does not tell yet what became of it. Looked at again at `at`; never sent again.
    pub fn unresolved(&self, why: &str, at: Timestamp, now: Timestamp) -> Result<Moved, MoveRefused> {
        self.not_final()?;
        let binding = self.binding.as_ref().ok_or(MoveRefused::NotPossible("no relayer has it"))?;
        let first = binding.forgotten_since.is_none();
        let mut next = self.next(now);
        next.updated_at = self.updated_at;
        if let Some(binding) = &mut next.binding {
            binding.forgotten_since = binding.forgotten_since.or(Some(now));
        }
        next.check_at = Some(at);
        let steps = if first { vec![Step::new("outcome-unknown", why)] } else { Vec::new() };
        Ok(Moved::new(next, steps))
    }

    /// Leaves its relayer for another one, after a pause that grows, so that a pool whose every wallet is empty is not
    /// hammered.
    fn rerouted(&self, detail: String, now: Timestamp, timings: &Timings) -> (Moved, Duration) {
        let mut next = self.next(now);
        next.avoid = self.binding.as_ref().map(|binding| binding.relayer.clone());
        next.binding = None;
        next.relayer_says = None;
        next.cancel_requested_at = None;
        next.reroutes += 1;
        let pause = next.reroute_pause();
        next.check_at = Some(now + pause + timings.message_check());
        (moved(next, "rerouted", detail), pause)
    }

    /// The pause before it is sent to another relayer, after its last re-route.
    pub fn reroute_pause(&self) -> Duration {
        let before = self.reroutes.saturating_sub(1);
        Duration::from_secs(1) * 2u32.saturating_pow(before).min(REROUTE_PAUSE_MAX_S)
    }

    /// The relayer never signed it, the reason is the relayer's own or our own cancellation, and Baton may send the row.
    fn may_reroute(&self, report: &Report) -> bool {
        let ours = match report.status {
            ReportedStatus::Canceled => self.cancel_requested_at.is_some(),
            _ => report.relayers_own_fault(),
        };
        self.is_unsigned() && report.never_signed() && ours && !self.imported
    }

    /// Whether the relayer canceled it unsigned at Baton's request, long enough ago that a signature made meanwhile would
    /// show in the report.
    pub fn is_cancel_certain(&self, report: &Report, now: Timestamp, timings: &Timings) -> bool {
        let settled = self.cancel_requested_at.is_some_and(|asked| now.since(asked) >= timings.cancel_settles());
        report.status == ReportedStatus::Canceled && self.may_reroute(report) && settled
    }

    /// Whether the relayer failed it for a reason of its own before it signed it, as far as its records still show: one
    /// that has lost its last seconds may have signed it in them.
    pub fn failed_unsigned(&self, report: &Report) -> bool {
        report.status == ReportedStatus::Failed && self.may_reroute(report)
    }

    /// Whether its relayer ended it for a reason of the item's own before it signed it, as far as its records still show.
    pub fn ended_unsigned(&self, report: &Report) -> bool {
        let ended =
            matches!(report.status, ReportedStatus::Failed | ReportedStatus::Canceled | ReportedStatus::Expired);
        ended && self.is_unsigned() && report.never_signed() && !self.may_reroute(report)
    }

    /// Whether its relayer has never said that it signed it.
    pub fn is_unsigned(&self) -> bool {
        self.binding.is_some() && !self.shows_signature()
    }

    fn progressed(
        &self,
        report: &Report,
        progress: Progress,
        source: Source,
        now: Timestamp,
        timings: &Timings,
    ) -> Verdict {
        let Some(binding) = &self.binding else { return Verdict::Ignore("no relayer has it") };
        if progress < binding.progress {
            return Verdict::Ignore("older than what is known");
        }
        // A gas bump changes the hash without a webhook. Of two hashes at the same stage, a webhook's may be the older
        // one; the answer to our own request is not.
        let other_hash = report.hash.is_some() && report.hash != self.hash;
        let news = progress > binding.progress
            || (other_hash && (source == Source::Asked || self.hash.is_none()))
            || (source == Source::Asked && binding.forgotten_since.is_some());
        if !news {
            return Verdict::Ignore("already known");
        }
        let mut next = self.with_report(report, now);
        if let Some(binding) = &mut next.binding {
            binding.progress = progress;
        }
        next.check_at = Some(now + timings.submitted_check);
        Verdict::Move(Box::new(moved(next, "progress", format!("the relayer says {progress}"))))
    }

    fn report_after_final(&self, report: &Report, now: Timestamp) -> Verdict {
        if let Some(moved) = self.contradicted(report, now) {
            return Verdict::Contradicted(Box::new(moved));
        }
        match self.second_send(report) {
            Some(step) if self.status != Status::Failed => Verdict::DoubleSend(step),
            _ => Verdict::Ignore("the transaction is final"),
        }
    }

    /// The alarm, if a report about a transaction that its relayer called confirmed has a second hash.
    fn second_send(&self, report: &Report) -> Option<Step> {
        let known = self.hash.as_deref()?;
        let another = report.hash.as_deref().filter(|hash| *hash != known)?;
        // A late report with the hash from before a gas bump has the same nonce; a second send has another one.
        let known_nonce = self.binding.as_ref().and_then(|binding| binding.nonce);
        let sent_again = match (known_nonce, report.nonce) {
            (Some(known), Some(said)) => known != said,
            _ => report.status == ReportedStatus::Confirmed,
        };
        let detail = format!("the relayer reports a second hash {another} after {known}");
        sent_again.then(|| Step::new("double-send", detail))
    }

    /// The same while the chain is being asked whether the first one is confirmed.
    pub fn second_send_before_end(&self, report: &Report) -> Option<Step> {
        let says_confirmed =
            self.relayer_says.as_ref().is_some_and(|says| says["status"] == ReportedStatus::Confirmed.name());
        self.second_send(report).filter(|_| says_confirmed && !self.status.is_final())
    }

    fn failed_at_relayer(&self, report: &Report, reason: &str, mode: RelayMode, now: Timestamp) -> Moved {
        let mut next = self.with_report(report, now);
        next.result = (mode == RelayMode::Confirm).then(|| report.raw.clone());
        next.block_number = report.block_number;
        let mut moved = failed(next, FailedBy::Relayer, reason);
        if moved.transaction.is_unverified() {
            let detail = "the relayer signed it and says that it failed; the chain was not asked (see RPC_URL)";
            moved.steps.push(Step::new("unverified", detail));
        }
        moved
    }

    /// The next version with what any report may add.
    pub(super) fn with_report(&self, report: &Report, now: Timestamp) -> Self {
        let mut next = self.next(now);
        next.hash = report.hash.clone().or(next.hash);
        next.from = report.from.clone().or(next.from);
        next.relayer_says = None;
        if let Some(binding) = &mut next.binding {
            binding.forgotten_since = None;
            binding.nonce = report.nonce.or(binding.nonce);
        }
        next
    }
}

/// The longest pause before a transaction that a relayer failed unsigned is sent to another.
const REROUTE_PAUSE_MAX_S: u32 = 300;

impl Call {
    /// Whether the relayer's record is still this call. A field that the dialect does not carry is not compared.
    pub fn is_still(&self, report: &Report) -> bool {
        report.value.is_none_or(|value| value == self.value)
            && report.data.as_deref().is_none_or(|data| data_eq(data, &self.data))
            && report.to.as_deref().is_none_or(|to| to.parse::<Address>().is_ok_and(|to| to == self.to))
    }

    /// Whether the relayer's record is another call, and not the no-op by which a relayer replaces a call. An operator
    /// replaced it there, or the relayer's answer named the wrong record: the record says nothing about this call.
    pub fn is_replaced_in(&self, report: &Report) -> bool {
        !self.is_still(report) && !report.is_no_op()
    }

    /// Whether a relayer's answer can be about this call: no field that it carries differs.
    pub fn may_be(&self, report: &Report) -> bool {
        let other_gas = matches!((self.gas_limit, report.gas_limit), (Some(sent), Some(had)) if sent != had);
        self.is_still(report) && !other_gas
    }

    /// Whether a relayer's record can be the submission of this call: every field that was sent is present and equal.
    pub fn matches(&self, report: &Report) -> bool {
        report.to.is_some()
            && report.value.is_some()
            && self.is_still(report)
            && data_eq(report.data.as_deref().unwrap_or("0x"), &self.data)
            && self.gas_limit.is_none_or(|gas| report.gas_limit == Some(gas))
    }
}

fn data_eq(a: &str, b: &str) -> bool {
    let digits = |text| str::strip_prefix(text, "0x").unwrap_or(text);
    digits(a).eq_ignore_ascii_case(digits(b))
}

impl Report {
    /// The record without what the row has anyway or no reader needs, so that it stays short.
    fn without_call_data(&self) -> Value {
        let mut raw = self.raw.clone();
        if let Some(fields) = raw.as_object_mut() {
            fields.retain(|name, _| !matches!(name.as_str(), "data" | "signature"));
        }
        raw
    }

    /// Whether the record states that it has neither nonce nor hash. A dialect without nonces states nothing.
    pub fn never_signed(&self) -> bool {
        self.raw.get("nonce").is_some_and(Value::is_null) && self.hash.is_none() && !self.hash_is_malformed()
    }

    /// Whether the record has a hash that is none. It is not stored, but the relayer says that it signed something.
    pub fn hash_is_malformed(&self) -> bool {
        self.hash.is_none() && self.raw.get("hash").is_some_and(|hash| !hash.is_null() && hash != "")
    }

    /// Whether the relayer failed it before signing, so that it cannot reach the chain.
    pub fn failed_unsigned(&self) -> bool {
        self.status == ReportedStatus::Failed && self.never_signed()
    }

    /// Whether this record is a no-op that replaced a call: an empty transfer of 0 to the relayer's own address.
    pub fn is_no_op(&self) -> bool {
        let to_itself = matches!((&self.to, &self.from), (Some(to), Some(from)) if to.eq_ignore_ascii_case(from));
        to_itself && self.value == Some(U256::ZERO) && self.data.as_deref().is_none_or(|data| data_eq(data, "0x"))
    }

    /// Whether the reason is the relayer's own, so that another relayer may succeed. The texts are those of the OZ
    /// Relayer 1.8; any other reason counts as the item's.
    fn relayers_own_fault(&self) -> bool {
        const OWN: [&str; 3] = ["pending state for over", "insufficient balance", "queue unavailable"];
        let reason = self.reason.as_deref().unwrap_or_default().to_ascii_lowercase();
        OWN.iter().any(|own| reason.contains(own))
    }
}

#[cfg(test)]
mod tests;
