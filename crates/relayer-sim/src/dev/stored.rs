//! A record in its stored form, and its way between core and journal.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::signed::Signed;
use crate::{
    Record, SimRelayer, Status,
    core::{Entry, Work},
    plan::Plan,
};

/// A record in the journal. Without a chain it is written once: its plan gives its state at any later time.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct StoredRecord {
    pub(crate) number: u64,
    pub(crate) record: Record,
    #[serde(default)]
    plan: Plan,
    reserved_nonce: Option<u64>,
    stored_at_ms: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) signed: Option<Signed>,
}

impl SimRelayer {
    pub(crate) fn export(&self, number: u64) -> Option<StoredRecord> {
        let Entry { record, plan, reserved_nonce, stored_at_ms, .. } = self.entry(number)?;
        let (record, plan) = (record.clone(), plan.clone());
        Some(StoredRecord {
            number,
            record,
            plan,
            reserved_nonce: *reserved_nonce,
            stored_at_ms: *stored_at_ms,
            signed: None,
        })
    }

    /// Takes up a record from the journal at the step that its plan has reached by now. `notified`: its final webhook is
    /// done.
    pub(crate) fn import(&mut self, now_ms: i64, stored: StoredRecord, notified: bool) {
        let StoredRecord { number, mut record, plan, reserved_nonce, stored_at_ms, .. } = stored;
        record.from = Arc::clone(&self.address);
        record.relayer_id = Arc::clone(&self.id);
        if let Ok(id) = Uuid::try_parse(&record.id) {
            self.numbers.insert(id, number);
        }
        self.next_number = number + 1;
        self.next_nonce = self.next_nonce.max(reserved_nonce.map_or(0, |nonce| nonce + 1));
        self.pending += usize::from(record.status.is_pending());
        let finished_at_ms = record.status.is_final().then_some(stored_at_ms);
        let (due_ms, broadcast, audit) = (None, false, None);
        let entry =
            Entry { number, record, plan, due_ms, reserved_nonce, broadcast, audit, stored_at_ms, finished_at_ms };
        self.entries.push_back(entry);
        let place = self.entries.len() - 1;
        let mut at_ms = stored_at_ms;
        while let Some((pause, _)) = self.entries[place].plan.front() {
            at_ms = at_ms.saturating_add(*pause);
            if at_ms > now_ms && !notified {
                self.entries[place].due_ms = Some(at_ms);
                self.schedule(at_ms, Work::Step(number));
                break;
            }
            if let Some((_, step)) = self.entries[place].plan.pop_front() {
                self.apply(place, step, at_ms);
            }
        }
        // The webhook may have been delivered before the stop. A repeated one does no harm, a missing one does.
        if !notified && self.entries[place].record.status > Status::Pending {
            self.notify(number, now_ms);
        }
    }

    pub(crate) fn record_of(&self, number: u64) -> Option<&Record> {
        self.entry(number).map(|entry| &entry.record)
    }

    /// Puts a record that a signer changed into the place of the old one, and sends its webhook.
    pub(crate) fn replace_record(&mut self, now_ms: i64, number: u64, changed: Record) {
        if let Some(place) = self.place(number) {
            self.change(place, now_ms, |record| *record = changed);
            self.notify(number, now_ms);
        }
    }

    /// As `/rpc` tells it.
    pub(crate) fn set_chain_id(&mut self, id: u64) {
        self.chain_id = Some(id);
    }

    /// As `/status` shows it.
    pub(crate) fn set_next_nonce(&mut self, nonce: u64) {
        self.next_nonce = nonce;
    }
}
