//! The relayer's reads: what it shows of itself and of its records.

use serde::Serialize;
use serde_json::{Value, json, value::RawValue};
use uuid::Uuid;

use crate::{
    answers::{Page, failure, find, json_body, success, text},
    api::{DISABLED_DETAILS, SimResponse},
    core::{Entry, SimRelayer},
    faults::SecondMemory,
    options::Dialect,
    plan::millis,
    record::{Record, Status, timestamp},
};

impl SimRelayer {
    pub(crate) fn list_relayers(&self, query: &str) -> SimResponse {
        if self.options.dialect == Dialect::Spec {
            let (id, pending) = (&self.options.id, self.pending);
            let status = if self.faults.paused || self.faults.system_disabled { "paused" } else { "active" };
            let relayer = json!({"relayerId": id, "id": id, "pending_transactions": pending, "status": status});
            return json_body(200, &json!({"data": [relayer]}));
        }
        let decoy = |n: usize| self.describe(&format!("decoy-{n}"), &format!("0x{n:040x}"), true, false);
        match Page::parse(query) {
            Ok(page) => {
                let total = self.options.decoys + 1;
                let shown: Vec<Value> = page
                    .range(total)
                    .map(|n| if n < self.options.decoys { decoy(n) } else { self.relayer_view() })
                    .collect();
                page.answer(&shown, total)
            }
            Err(message) => text(400, message),
        }
    }

    pub(crate) fn show_relayer(&self) -> SimResponse {
        if self.options.dialect == Dialect::Real {
            return success(self.relayer_view());
        }
        let (id, pending, paused) = (&self.options.id, self.pending, self.faults.paused);
        let relayer = json!({"relayerId": id, "numberOfPendingTransactions": pending, "paused": paused});
        json_body(200, &relayer)
    }

    /// The relayer object of reads and state webhooks.
    pub(crate) fn relayer_view(&self) -> Value {
        let disabled = self.faults.system_disabled;
        let mut relayer = self.describe(&self.options.id, &self.address, self.faults.paused, disabled);
        if let Some(name) = &self.options.name {
            relayer["name"] = json!(name);
        }
        if disabled {
            relayer["disabled_reason"] = json!({"type": "RpcValidationFailed", "details": DISABLED_DETAILS});
        }
        relayer
    }

    fn describe(&self, id: &str, address: &str, paused: bool, system_disabled: bool) -> Value {
        json!({
            "id": id, "name": format!("Relayer {id}"), "network": self.options.network, "network_type": "evm",
            "paused": paused,
            "policies": {"min_balance": 0, "gas_limit_estimation": true, "include_revert_data": false},
            "signer_id": format!("signer-{id}"), "notification_id": format!("hook-{id}"), "address": address,
            "system_disabled": system_disabled,
        })
    }

    fn shown_balance(&self) -> &str {
        if self.faults.out_of_funds { "0" } else { &self.balance }
    }

    pub(crate) fn show_status(&self) -> SimResponse {
        success(json!({
            "network_type": "evm",
            "balance": self.shown_balance(),
            "pending_transactions_count": self.pending,
            "last_confirmed_transaction_timestamp": self.last_confirmed_ms.map(timestamp),
            "system_disabled": self.faults.system_disabled,
            "paused": self.faults.paused,
            "nonce": self.next_nonce.to_string(),
        }))
    }

    /// The balance is a bare integer here, larger than 64 bits.
    pub(crate) fn show_balance(&self) -> SimResponse {
        #[derive(Serialize)]
        struct Balance {
            balance: Option<Box<RawValue>>,
            unit: &'static str,
        }
        success(Balance { balance: RawValue::from_string(self.shown_balance().to_owned()).ok(), unit: "wei" })
    }

    /// A JSON-RPC request for its node, answered by the relayer itself; `None` if it offers no such call.
    pub(crate) fn pass_on(&self, body: &[u8]) -> Option<SimResponse> {
        let chain_id = self.chain_id?;
        if self.faults.paused || self.faults.system_disabled {
            let why = if self.faults.paused { "Relayer paused" } else { "Relayer disabled" };
            return Some(failure(403, why));
        }
        let request: Value = serde_json::from_slice(body).unwrap_or_default();
        let id = &request["id"];
        let answer = match request["method"].as_str() {
            Some("eth_chainId") => {
                json!({"jsonrpc": "2.0", "result": format!("{chain_id:#x}"), "error": null, "id": id})
            }
            _ => {
                let error = json!({"code": -32601, "message": "Method not found"});
                json!({"jsonrpc": "2.0", "result": null, "error": error, "id": id})
            }
        };
        Some(json_body(200, &answer))
    }

    pub(crate) fn show_by_nonce(&self, now_ms: i64, nonce: &str) -> SimResponse {
        let found = nonce.parse::<u64>().ok().and_then(|nonce| {
            let mut newest_first = self.entries.iter().rev();
            newest_first.find(|entry| entry.record.nonce == Some(nonce) && self.is_retained(entry, now_ms))
        });
        match found {
            Some(entry) => success(entry.record.view()),
            None => failure(404, &format!("Transaction with nonce {nonce} not found")),
        }
    }

    /// One record as this answer's memory has it.
    pub(crate) fn shown_record(&self, now_ms: i64, id: &str) -> Option<&Record> {
        let record = self.record(now_ms, id)?;
        let entry = self.entry(*self.numbers.get(&Uuid::try_parse(id).ok()?)?)?;
        self.is_in_memory(entry, now_ms).then_some(record)
    }

    /// Whether the memory that gives the present answer has this record.
    fn is_in_memory(&self, entry: &Entry, now_ms: i64) -> bool {
        let second = self.answers_given.is_multiple_of(2);
        match self.faults.second_memory {
            Some(SecondMemory::Behind(by)) if second => entry.stored_at_ms <= now_ms.saturating_sub(millis(by)),
            Some(SecondMemory::Split) => entry.number.is_multiple_of(2) == second,
            _ => true,
        }
    }

    pub(crate) fn list_transactions(&self, now_ms: i64, query: &str) -> SimResponse {
        let status = match find(query, "status").map(|text| Status::parse(text).ok_or(text)) {
            None => None,
            Some(Ok(status)) => Some(status),
            Some(Err(other)) => return text(400, format!("Query deserialize error: unknown variant `{other}`")),
        };
        let page = match Page::parse(query) {
            Ok(page) => page,
            Err(message) => return text(400, message),
        };
        let faults = &self.faults.listing;
        let listed_until_ms = now_ms.saturating_sub(millis(faults.late_by));
        let is_listed = |entry: &&Entry| {
            status.is_none_or(|status| entry.record.status == status && !hides_cancellation(&entry.record))
                && self.is_retained(entry, now_ms)
                && (faults.late_by.is_zero() || entry.stored_at_ms <= listed_until_ms)
                && (faults.omitted.is_empty() || !faults.omitted.contains(&entry.record.id))
                && !faults.empty
                && self.is_in_memory(entry, now_ms)
        };
        // Everything is listed in the common case, where counting would cost more than the page.
        let unfiltered = status.is_none()
            && self.options.retention.is_none()
            && *faults == Default::default()
            && self.faults.second_memory.is_none();
        let total = if unfiltered { self.entries.len() } else { self.entries.iter().filter(is_listed).count() };
        let range = page.range(total);
        let entries = self.entries.iter();
        let (skip, take) = (range.start, range.len().min(faults.page_max.unwrap_or(usize::MAX)));
        let views: Vec<_> = if faults.unsorted {
            let mut listed: Vec<&Entry> = entries.filter(is_listed).collect();
            // The last digits of an id are random, and stay the same from page to page.
            listed.sort_by(|one, other| one.record.id[24..].cmp(&other.record.id[24..]));
            listed.into_iter().skip(skip).take(take).map(|entry| entry.record.view()).collect()
        } else if faults.oldest_first {
            entries.filter(is_listed).skip(skip).take(take).map(|entry| entry.record.view()).collect()
        } else {
            entries.rev().filter(is_listed).skip(skip).take(take).map(|entry| entry.record.view()).collect()
        };
        page.answer(&views, total)
    }
}

/// A cancellation in progress is hidden from filters by a status that is not final.
fn hides_cancellation(record: &Record) -> bool {
    record.is_canceled && !record.status.is_final()
}
