//! The chain as the judge: every transaction of the relayers' accounts in every block, held against what clients were told.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write as _;
use std::time::Duration;

use alloy_primitives::Address;
use baton::timestamp::Timestamp;
use harness::chain::Chain;
use serde_json::{Value, json};

use crate::load::{Sent, data, reverts, serial_of};
use crate::ways::Ways;
use crate::weather::Storm;
use crate::world::World;

/// Findings that a failure message shows with their timelines.
const SHOWN_MAX: usize = 12;

/// A mined transaction of a relayer.
struct Mined {
    hash: String,
    from: Address,
    nonce: u64,
    block: u64,
    succeeded: bool,
}

/// What the chain shows, against what clients were shown.
#[derive(Default)]
pub struct Verdict {
    pub accepted: usize,
    pub confirmed: usize,
    pub failed: usize,
    /// Failed rows whose call reverts in any case.
    pub reverted_calls: usize,
    /// Executed more often than accepted.
    pub doubles: Vec<String>,
    /// Mined more often than accepted, though some of that reverted.
    pub mined_too_often: Vec<String>,
    pub failed_but_executed: Vec<String>,
    pub confirmed_but_not_executed: Vec<String>,
    /// The hash shown is not a transaction that made the call.
    pub wrong_hashes: Vec<String>,
    /// Calls with a row that is not final at the end.
    pub open: Vec<String>,
    /// POSTs that a relayer itself executed twice. One that reverts has no effect, however often it is sent.
    pub by_relayer: usize,
    /// Rows with a `double-send` alarm.
    pub alarms: usize,
    /// Failed rows that say that no chain was asked.
    pub unverified: usize,
    /// Reasons of failed and open rows, without numbers.
    reasons: BTreeMap<String, usize>,
    figures: Vec<(String, String)>,
    ways: Ways,
    details: String,
    failed_unmarked: Vec<String>,
}

impl Verdict {
    pub async fn read(world: World, sent: Vec<Sent>, storm: &Storm, sent_for: Duration, took: Duration) -> Self {
        let rows = rows(&world).await;
        let mined = mined(&world.chain, &world.accounts).await;
        let mut by_serial: BTreeMap<usize, Vec<&Mined>> = BTreeMap::new();
        for (call, transactions) in &mined {
            if let Some(serial) = serial_of(call).filter(|serial| *call == data(&world.run, *serial)) {
                by_serial.insert(serial, transactions.iter().collect());
            }
        }
        let mut ids: BTreeMap<usize, BTreeSet<&str>> = BTreeMap::new();
        for Sent { id, serial } in &sent {
            ids.entry(*serial).or_default().insert(id);
        }
        let mut verdict = Self { accepted: ids.values().map(BTreeSet::len).sum(), ..Self::default() };
        let twice =
            world.relay.relayers.iter().flat_map(|relayer| relayer.accepted()).filter(|post| post.broadcasts > 1);
        let takes_effect = |serial| !reverts(&world.run, serial);
        verdict.by_relayer = twice.filter(|post| serial_of(&post.field("data")).is_some_and(takes_effect)).count();
        let mut timelines = HashMap::new();
        for (serial, ids) in &ids {
            let of_serial: Vec<&Value> = ids.iter().map(|id| &rows[*id]).collect();
            verdict.judge(&world, *serial, &of_serial, by_serial.get(serial).map_or(&[], Vec::as_slice));
            for id in ids {
                let steps = timeline(&world, id).await;
                verdict.ways.add(&steps, world.run.rpc);
                if let Some(alarm) = steps.iter().find(|step| step["action"] == "double-send") {
                    verdict.alarms += 1;
                    // Where no relayer sends twice, an alarm is false, or a double's.
                    if !world.run.sent_twice {
                        verdict
                            .figures
                            .push(("double-send alarm".to_owned(), format!("{serial}: {}", alarm["detail"])));
                        let told: Vec<String> =
                            steps.iter().map(|step| format!("{} {}", step["action"], step["detail"])).collect();
                        verdict.figures.push(("  its timeline".to_owned(), told.join(" | ")));
                    }
                }
                timelines.insert((*id).to_owned(), steps);
            }
        }
        verdict.note_reasons(&rows, &timelines);
        verdict.note_submissions(&timelines);
        verdict.note_figures(&world, storm, sent_for, took);
        verdict.tell(&world, &ids, &rows, &by_serial, &timelines);
        verdict
    }

    /// One call: its rows, and the transactions that made it.
    fn judge(&mut self, world: &World, serial: usize, rows: &[&Value], mined: &[&Mined]) {
        let count = |status: &str| rows.iter().filter(|row| row["status"] == status).count();
        let (confirmed, failed) = (count("confirmed"), count("failed"));
        let executed = mined.iter().filter(|mined| mined.succeeded).count();
        let open = rows.len() - confirmed - failed;
        self.confirmed += confirmed;
        self.failed += failed;
        let told = format!(
            "{serial}: accepted {}, confirmed {confirmed}, failed {failed}, open {open}; executed {executed}, mined {}",
            rows.len(),
            mined.len()
        );
        // What a relayer does twice with one POST is counted apart.
        let own = world.relay.relayers.iter().flat_map(|relayer| relayer.accepted());
        let own = own.filter(|accepted| accepted.field("data") == data(&world.run, serial));
        let own: usize = own.map(|accepted| accepted.broadcasts.saturating_sub(1) as usize).sum();
        if executed > rows.len() + own {
            self.doubles.push(told.clone());
        } else if mined.len() > rows.len() + own {
            self.mined_too_often.push(told.clone());
        }
        if confirmed > executed {
            self.confirmed_but_not_executed.push(told.clone());
        }
        let executed = executed.min(rows.len());
        if executed > confirmed + open {
            self.failed_but_executed.push(told.clone());
            if rows.iter().any(|row| row["status"] == "failed" && row["unverified"] != json!(true)) {
                self.failed_unmarked.push(told.clone());
            }
        }
        if reverts(&world.run, serial) {
            self.reverted_calls += failed;
        }
        if open > 0 {
            self.open.push(told.clone());
        }
        let mut hashes = BTreeSet::new();
        for row in rows.iter().filter(|row| row["status"] == "confirmed") {
            let hash = row["hash"].as_str().unwrap_or_default();
            let made = mined.iter().any(|mined| mined.succeeded && mined.hash == hash);
            if world.run.rpc && (!made || !hashes.insert(hash)) {
                self.wrong_hashes.push(format!("{told}; a row shows {hash}"));
            }
        }
    }

    fn note_reasons(&mut self, rows: &HashMap<String, Value>, timelines: &HashMap<String, Vec<Value>>) {
        for (id, row) in rows {
            let Some(steps) = timelines.get(id) else { continue };
            self.unverified += usize::from(row["unverified"] == json!(true));
            let status = row["status"].as_str().unwrap_or_default();
            let reason = match status {
                "confirmed" => continue,
                "failed" => row["error_message"].as_str().unwrap_or_default().to_owned(),
                _ => steps.last().map(|step| format!("{}: {}", step["action"], step["detail"])).unwrap_or_default(),
            };
            let marks = [("outcomeUnknown", "outcome unknown"), ("unverified", "unverified")];
            let marks: Vec<&str> =
                marks.iter().filter(|(field, _)| row[field] == json!(true)).map(|(_, m)| *m).collect();
            *self.reasons.entry(format!("{status} {marks:?} {}", without_names(&reason))).or_default() += 1;
        }
    }

    /// The rate at which rows were first bound to a relayer's record.
    fn note_submissions(&mut self, timelines: &HashMap<String, Vec<Value>>) {
        let first = |steps: &Vec<Value>| {
            let bound = steps.iter().find(|step| step["action"] == "submitted")?;
            Timestamp::parse(bound["at"].as_str()?)
        };
        let times: Vec<Timestamp> = timelines.values().filter_map(first).collect();
        if let (Some(first), Some(last)) = (times.iter().min(), times.iter().max()) {
            let rate = times.len() as f64 / last.since(*first).as_secs_f64();
            self.figures.push(("submissions a second".to_owned(), format!("{rate:.0}")));
        }
    }

    fn note_figures(&mut self, world: &World, storm: &Storm, sent_for: Duration, took: Duration) {
        let calls = world.rpc.requests();
        let sum: usize = calls.values().sum();
        let mut note = |name: &str, value: String| self.figures.push((name.to_owned(), value));
        note("sent within, settled within", format!("{:.0} s, {:.0} s", sent_for.as_secs_f64(), took.as_secs_f64()));
        let kills = [&storm.relayers_killed, &storm.consumers_killed]
            .map(|kills| kills.load(std::sync::atomic::Ordering::Relaxed));
        note("relayers killed, consumers killed", format!("{}, {}", kills[0], kills[1]));
        let per_thousand = sum * 1000 / self.accepted.max(1);
        note("RPC calls, and per 1,000 transactions", format!("{sum}, {per_thousand} {calls:?}"));
        note("faults", format!("{:?}", storm.struck()));
        for (relayer, link) in world.relay.relayers.iter().zip(&world.links) {
            let refused = link.refused();
            if !refused.is_empty() {
                note("refused by the node", format!("{}: {refused:?}", relayer.id()));
            }
        }
    }

    /// Every false statement and every double.
    pub fn wrong(&self) -> Vec<&String> {
        let lists = [
            &self.doubles,
            &self.mined_too_often,
            &self.failed_but_executed,
            &self.confirmed_but_not_executed,
            &self.wrong_hashes,
        ];
        lists.into_iter().flatten().collect()
    }

    /// Failed rows that were executed and do not say that no chain was asked.
    pub fn unmarked_failures(&self) -> &[String] {
        &self.failed_unmarked
    }

    pub fn print(&self) {
        println!(
            "  accepted {}, confirmed {}, failed {} ({} of them revert)",
            self.accepted, self.confirmed, self.failed, self.reverted_calls
        );
        println!("  executed more than once                     {:>5}", self.doubles.len());
        println!("  mined more than once, but reverted          {:>5}", self.mined_too_often.len());
        println!("  shown failed but executed                   {:>5}", self.failed_but_executed.len());
        println!("  shown confirmed but not executed            {:>5}", self.confirmed_but_not_executed.len());
        println!("  shown with another hash than the chain has  {:>5}", self.wrong_hashes.len());
        println!("  not final at the end                        {:>5}", self.accepted - self.confirmed - self.failed);
        println!("  marked unverified                           {:>5}", self.unverified);
        println!("  executed twice by a relayer, alarms         {:>5} {:>5}", self.by_relayer, self.alarms);
        for (way, count) in self.ways.iter() {
            println!("    {count:>5}  {way}");
        }
        for (reason, count) in &self.reasons {
            println!("    {count:>5}  {reason}");
        }
        for (name, value) in &self.figures {
            println!("  {name}: {value}");
        }
    }

    /// What a failure message says.
    pub fn story(&self) -> &str {
        &self.details
    }

    fn tell(
        &mut self,
        world: &World,
        ids: &BTreeMap<usize, BTreeSet<&str>>,
        rows: &HashMap<String, Value>,
        mined: &BTreeMap<usize, Vec<&Mined>>,
        timelines: &HashMap<String, Vec<Value>>,
    ) {
        let found: Vec<String> = self.wrong().into_iter().chain(&self.open).cloned().collect();
        let mut told = format!("seed {}: {} findings\n", world.run.seed, found.len());
        for finding in found.iter().take(SHOWN_MAX) {
            let _ = writeln!(told, "  {finding}");
            let serial: usize = finding.split(':').next().and_then(|word| word.parse().ok()).unwrap_or(usize::MAX);
            for id in ids.get(&serial).into_iter().flatten() {
                let _ = writeln!(told, "    {}", rows[*id]);
                for step in &timelines[*id] {
                    let _ = writeln!(told, "      {} {} {}", step["at"], step["action"], step["detail"]);
                }
            }
            for Mined { hash, from, nonce, block, succeeded } in mined.get(&serial).into_iter().flatten() {
                let _ = writeln!(told, "    mined {hash} of {from}, nonce {nonce}, block {block}, {succeeded}");
            }
            for relayer in &world.relay.relayers {
                for record in
                    relayer.accepted().iter().filter(|record| serial_of(&record.field("data")) == Some(serial))
                {
                    let now = relayer.record(&record.id).map(|record| record.to_json());
                    let (url, id, at, times) = (relayer.url(), &record.id, record.received_at, record.broadcasts);
                    let now = now.map_or_else(|| "forgotten".to_owned(), |now| now.to_string());
                    let _ = writeln!(told, "    {url} {id} took it at {at}, sent it {times} times: {now}");
                    // A wrong answer may have bound another call to this record.
                    for (row, _) in rows.iter().filter(|(_, row)| row["ozRelayerTxId"] == id.as_str()) {
                        let _ = writeln!(told, "      row {row} is bound to it");
                    }
                }
            }
        }
        for process in std::iter::once(&world.relay.api).chain(&world.relay.consumers).filter(|_| !found.is_empty()) {
            let _ = writeln!(told, "{}", process.log_excerpt());
        }
        self.details = told;
    }
}

async fn rows(world: &World) -> HashMap<String, Value> {
    let (mut rows, mut cursor) = (HashMap::new(), String::new());
    loop {
        let (_, page) = world.relay.get(&format!("/api/v1/relay/transactions?limit=200{cursor}")).await;
        for row in page["transactions"].as_array().unwrap() {
            rows.insert(row["transactionId"].as_str().unwrap().to_owned(), row.clone());
        }
        match page["nextCursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => return rows,
        }
    }
}

async fn timeline(world: &World, id: &str) -> Vec<Value> {
    let (_, mut timeline) = world.relay.get(&format!("/api/v1/relay/transactions/{id}/timeline")).await;
    match timeline["steps"].take() {
        Value::Array(steps) => steps,
        other => panic!("no timeline of {id}: {other}"),
    }
}

/// Every transaction of these accounts in every block, by call data.
async fn mined(chain: &Chain, accounts: &[Address]) -> BTreeMap<String, Vec<Mined>> {
    let mut mined: BTreeMap<String, Vec<Mined>> = BTreeMap::new();
    let head: String = chain.ask("eth_blockNumber", json!([])).await.as_str().unwrap().to_owned();
    for number in 0..=hex_number(&head) {
        let block = chain.ask("eth_getBlockByNumber", json!([format!("{number:#x}"), true])).await;
        for transaction in block["transactions"].as_array().unwrap() {
            let from: Address = transaction["from"].as_str().unwrap().parse().unwrap();
            if !accounts.contains(&from) {
                continue;
            }
            let hash = transaction["hash"].as_str().unwrap().to_owned();
            let receipt = chain.ask("eth_getTransactionReceipt", json!([hash])).await;
            let succeeded = receipt["status"] == "0x1";
            let (nonce, block) = (hex_number(transaction["nonce"].as_str().unwrap()), number);
            let data = transaction["input"].as_str().unwrap().to_owned();
            mined.entry(data).or_default().push(Mined { hash, from, nonce, block, succeeded });
        }
    }
    mined
}

fn hex_number(text: &str) -> u64 {
    u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap()
}

/// A reason without ids, hashes, addresses and numbers, so that equal reasons count together.
fn without_names(reason: &str) -> String {
    let named = |word: &str| word.chars().any(|letter| letter.is_ascii_digit());
    reason.split_whitespace().map(|word| if named(word) { "…" } else { word }).collect::<Vec<_>>().join(" ")
}
