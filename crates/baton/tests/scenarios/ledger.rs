//! The ledger that every story must balance: what clients were told, what rows say, and what the relayers really did.
//!
//! * accepted: its row is final; confirmed means one effect, failed at most one
//! * refused: no effect, ever; a row that was taken back is a refusal, and may have been sent again under its key
//! * not answered: either listed, and then as if accepted, or no effect
//! * an effect is a record that was broadcast or still may be; one that failed unsigned is none
//! * no dead letter without a reason

use std::collections::BTreeMap;

use serde_json::Value;

use crate::load_client::{Client, Promises, serial_of_data, serial_of_row};
use crate::relay_fixture::{Stand, WARM_UP};

/// How many findings are shown in full.
const SHOWN: usize = 10;

/// The sums and what is wrong with them.
#[derive(Debug, Default)]
pub struct Ledger {
    pub confirmed: usize,
    pub failed: usize,
    /// Of those that were accepted. What nobody was promised may have been taken back.
    pub failed_promises: usize,
    pub duplicates: usize,
    pub lost: usize,
    pub unknown: usize,
    pub dead_letters: usize,
    pub findings: Vec<String>,
    /// The rows by serial number.
    pub rows: BTreeMap<usize, Value>,
}

impl Ledger {
    pub async fn read(stand: &Stand, promises: &Promises) -> Self {
        let mut ledger = Self::default();
        let client = Client::of(stand);
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
            // One whose key was free again: the first try was taken back, and the client tried again.
            match ledger.rows.get(&serial) {
                Some(_) if was_taken_back(&row) => continue,
                Some(twin) if !was_taken_back(twin) => {
                    ledger.findings.push(format!("{serial} is there twice: {twin}"));
                }
                _ => {}
            }
            ledger.rows.insert(serial, row);
        }
        let mut effects: BTreeMap<usize, usize> = BTreeMap::new();
        for effect in stand.relayers.iter().flat_map(|relayer| relayer.effects()) {
            *effects.entry(serial_of_data(&effect.field("data")).unwrap()).or_default() += 1;
        }
        for (id, serial) in &promises.accepted {
            match ledger.rows.get(serial) {
                Some(row) if row["transactionId"] == id.as_str() => {
                    ledger.failed_promises += usize::from(row["status"] == "failed");
                    ledger.settle(*serial, effects.remove(serial));
                }
                other => {
                    ledger.lost += 1;
                    ledger.findings.push(format!("{serial} was accepted as {id}, and the list has {other:?}"));
                    effects.remove(serial);
                }
            }
        }
        for serial in &promises.refused {
            let row = ledger.rows.get(serial).map(|row| row["status"].clone());
            if let Some(times) = effects.remove(serial) {
                ledger.duplicates += 1;
                ledger.findings.push(format!("{serial} was refused and yet happened {times} times; its row: {row:?}"));
            } else if row.as_ref().is_some_and(|status| status != "failed") {
                ledger.findings.push(format!("{serial} was refused and its row is {row:?}"));
            }
        }
        for serial in &promises.unanswered {
            let times = effects.remove(serial);
            if ledger.rows.contains_key(serial) {
                ledger.settle(*serial, times);
            } else if let Some(times) = times {
                ledger.findings.push(format!("{serial} is not listed and yet happened {times} times"));
            }
        }
        for (serial, times) in effects.into_iter().filter(|(serial, _)| *serial < WARM_UP) {
            ledger.findings.push(format!("{serial} happened {times} times and nobody asked for it"));
        }
        ledger.read_dead_letters(stand).await;
        ledger.unknown = stand.relayers.iter().map(|relayer| unknowns(&relayer.faults_struck())).sum();
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
            self.findings.push(format!("{serial} happened {times} times: {row}"));
        } else if times == 0 && matches!(status, "confirmed" | "success") {
            self.lost += 1;
            self.findings.push(format!("{serial} is {status} and never happened: {row}"));
        } else if status == "failed" && row["error_message"].as_str().is_none_or(str::is_empty) {
            self.findings.push(format!("{serial} failed without a reason: {row}"));
        }
    }

    async fn read_dead_letters(&mut self, stand: &Stand) {
        let (code, list) = stand.command(["dlq", "list"]).await;
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
    /// With the findings, the timelines of the transactions they are about, and what the processes said last.
    pub async fn assert_balanced(&self, stand: &Stand) {
        if self.findings.is_empty() {
            return;
        }
        let mut story = format!("{} findings:\n", self.findings.len());
        for finding in self.findings.iter().take(SHOWN) {
            story.push_str(&format!("  {finding}\n"));
            let serial = finding.split(' ').next().and_then(|word| word.parse::<usize>().ok());
            let Some(row) = serial.and_then(|serial| self.rows.get(&serial)) else { continue };
            let id = row["transactionId"].as_str().unwrap();
            let (_, timeline) = stand.get(&format!("/api/v1/relay/transactions/{id}/timeline")).await;
            for step in timeline["steps"].as_array().into_iter().flatten() {
                story.push_str(&format!("      {} {} {}\n", step["at"], step["action"], step["detail"]));
            }
            for relayer in &stand.relayers {
                for record in relayer.accepted().iter().filter(|record| serial_of_data(&record.field("data")) == serial)
                {
                    let (by, at, sent) = (relayer.id(), record.received_at, record.broadcasts);
                    story.push_str(&format!("      at {by}: {} taken {at}, broadcast {sent} times\n", record.id));
                }
            }
        }
        for process in std::iter::once(&stand.api).chain(&stand.consumers) {
            story.push_str(&format!("{}\n", process.story()));
        }
        panic!("{story}");
    }
}

/// Whether the queue did not take its message, so that it will never happen.
fn was_taken_back(row: &Value) -> bool {
    row["status"] == "failed" && row["error_message"] == "queue unavailable"
}

/// How many submissions ended so that nobody knew what came of them.
fn unknowns(struck: &BTreeMap<&'static str, usize>) -> usize {
    let known = ["unauthorized", "paused", "disabled", "rate limited", "refused", "status", "slow"];
    struck.iter().filter(|(name, _)| !known.contains(name)).map(|(_, count)| count).sum()
}
