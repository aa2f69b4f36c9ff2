//! The ledger that every scenario checks at its end. It compares the answers to clients, the rows, and the relayers'
//! records:
//!
//! * An accepted request has a final row: confirmed with exactly one effect, or failed with at most one.
//! * A refused request has no effect. Its row, if any, is withdrawn, and the client may have repeated it under its key.
//! * An unanswered request is listed and then counts as accepted, or it has no effect.
//! * An effect is a relayer's record that was or still may be broadcast; a record that failed unsigned is none.
//! * Every dead letter has a reason.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::load_client::{ClientAnswers, LoadClient, serial_of_data, serial_of_row};
use crate::relay_fixture::{RelayFixture, WARM_UP};

/// Findings that a failure message shows in full.
const SHOWN_MAX: usize = 10;

/// Counts over a whole scenario, and the violations found.
#[derive(Debug, Default)]
pub struct Ledger {
    pub confirmed: usize,
    pub failed: usize,
    /// Accepted requests whose row failed. A row without a 202 may have been withdrawn, and does not count here.
    pub accepted_and_failed: usize,
    pub duplicates: usize,
    pub lost: usize,
    /// Injected faults that left a submission's outcome unknown.
    pub unknown: usize,
    pub dead_letters: usize,
    pub findings: Vec<String>,
    /// By serial number.
    pub rows: BTreeMap<usize, Value>,
}

impl Ledger {
    pub async fn read(relay: &RelayFixture, answers: &ClientAnswers) -> Self {
        let mut ledger = Self::default();
        let client = LoadClient::of(relay);
        let (mut rows, mut cursor) = (Vec::new(), None);
        loop {
            let (page, next) = client.page(cursor.as_deref()).await.expect("the list can be read");
            rows.extend(page);
            cursor = next;
            if cursor.is_none() {
                break;
            }
        }
        for row in rows {
            let Some(serial) = serial_of_row(&row) else { continue };
            // A withdrawn row frees its key: the client repeated the request, and the second row counts.
            match ledger.rows.get(&serial) {
                Some(_) if was_withdrawn(&row) => continue,
                Some(other) if !was_withdrawn(other) => {
                    ledger.findings.push(format!("{serial} has a second row: {other}"));
                }
                _ => {}
            }
            ledger.rows.insert(serial, row);
        }
        let mut effects: BTreeMap<usize, usize> = BTreeMap::new();
        for effect in relay.relayers.iter().flat_map(|relayer| relayer.effects()) {
            *effects.entry(serial_of_data(&effect.field("data")).unwrap()).or_default() += 1;
        }
        for (id, serial) in &answers.accepted {
            match ledger.rows.get(serial) {
                Some(row) if row["transactionId"] == id.as_str() => {
                    ledger.accepted_and_failed += usize::from(row["status"] == "failed");
                    ledger.settle(*serial, effects.remove(serial));
                }
                other => {
                    ledger.lost += 1;
                    ledger.findings.push(format!("{serial} was accepted as {id}, and the list has {other:?}"));
                    effects.remove(serial);
                }
            }
        }
        for serial in &answers.refused {
            let row = ledger.rows.get(serial).map(|row| row["status"].clone());
            if let Some(times) = effects.remove(serial) {
                ledger.duplicates += 1;
                ledger.findings.push(format!("{serial} was refused and has {times} effects; its row: {row:?}"));
            } else if row.as_ref().is_some_and(|status| status != "failed") {
                ledger.findings.push(format!("{serial} was refused and its row is {row:?}"));
            }
        }
        for serial in &answers.unanswered {
            let times = effects.remove(serial);
            if ledger.rows.contains_key(serial) {
                ledger.settle(*serial, times);
            } else if let Some(times) = times {
                ledger.findings.push(format!("{serial} is not listed and has {times} effects"));
            }
        }
        for (serial, times) in effects.into_iter().filter(|(serial, _)| *serial < WARM_UP) {
            ledger.findings.push(format!("{serial} has {times} effects and was never requested"));
        }
        ledger.read_dead_letters(relay).await;
        ledger.unknown = relay.relayers.iter().map(|relayer| unknown_outcomes(&relayer.faults_struck())).sum();
        ledger
    }

    fn settle(&mut self, serial: usize, times: Option<usize>) {
        let (row, times) = (&self.rows[&serial], times.unwrap_or(0));
        let status = row["status"].as_str().unwrap();
        match status {
            "confirmed" | "success" => self.confirmed += 1,
            "failed" => self.failed += 1,
            _ => {
                self.lost += 1;
                self.findings.push(format!("{serial} is not final: {row}"));
            }
        }
        if times > 1 {
            self.duplicates += 1;
            self.findings.push(format!("{serial} has {times} effects: {row}"));
        } else if times == 0 && matches!(status, "confirmed" | "success") {
            self.lost += 1;
            self.findings.push(format!("{serial} is {status} and has no effect: {row}"));
        } else if status == "failed" && row["error_message"].as_str().is_none_or(str::is_empty) {
            self.findings.push(format!("{serial} failed without a reason: {row}"));
        }
    }

    async fn read_dead_letters(&mut self, relay: &RelayFixture) {
        let (code, list) = relay.command(["dlq", "list"]).await;
        assert_eq!(code, 0, "{list}");
        for line in list.lines().filter(|line| line.contains("  transaction ")) {
            self.dead_letters += 1;
            let reason = line.split("  ").nth(2).unwrap_or_default();
            if reason.trim().is_empty() {
                self.findings.push(format!("a dead letter without a reason: {line}"));
            }
        }
    }

    /// # Panics
    /// With the findings, the timelines and relayer records of their transactions, and the ends of the processes' logs.
    pub async fn assert_balanced(&self, relay: &RelayFixture) {
        if self.findings.is_empty() {
            return;
        }
        let mut message = format!("{} findings:\n", self.findings.len());
        for finding in self.findings.iter().take(SHOWN_MAX) {
            message.push_str(&format!("  {finding}\n"));
            let serial = finding.split(' ').next().and_then(|word| word.parse::<usize>().ok());
            let Some(row) = serial.and_then(|serial| self.rows.get(&serial)) else { continue };
            let id = row["transactionId"].as_str().unwrap();
            let (_, timeline) = relay.get(&format!("/api/v1/relay/transactions/{id}/timeline")).await;
            for step in timeline["steps"].as_array().into_iter().flatten() {
                message.push_str(&format!("      {} {} {}\n", step["at"], step["action"], step["detail"]));
            }
            for relayer in &relay.relayers {
                for record in relayer.accepted().iter().filter(|record| serial_of_data(&record.field("data")) == serial)
                {
                    let (by, at, sent) = (relayer.id(), record.received_at, record.broadcasts);
                    message.push_str(&format!("      at {by}: {} taken {at}, broadcast {sent} times\n", record.id));
                }
            }
        }
        for process in std::iter::once(&relay.api).chain(&relay.consumers) {
            message.push_str(&format!("{}\n", process.log_excerpt()));
        }
        panic!("{message}");
    }
}

/// Whether the API withdrew the row because the queue did not take its message.
fn was_withdrawn(row: &Value) -> bool {
    row["status"] == "failed" && row["error_message"] == "queue unavailable"
}

/// Faults after which the consumer could not know whether the relayer had stored the submission.
fn unknown_outcomes(struck: &BTreeMap<&'static str, usize>) -> usize {
    let known = ["unauthorized", "paused", "disabled", "rate limited", "refused", "status", "slow"];
    struck.iter().filter(|(name, _)| !known.contains(name)).map(|(_, count)| count).sum()
}
