//! What goes wrong, by chance: the faults of each POST and the end of each record by the call's serial number and attempt,
//! the relayers' misleading answers by time, and kills.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use harness::process::Process;
use harness::proxy::{Mode, Proxy};
use harness::relayer::{
    DateHeader, Faults, ListFault, Memory, Outcome, PostFault, ReadFault, Relayer, SecondMemory, WebhookFaults,
};
use rand::rngs::StdRng;
use rand::{RngExt, seq::IndexedRandom};
use serde_json::Value;

use crate::dice;
use crate::load::serial_of;
use crate::rpc_proxy::{NodeFault, RpcProxy};
use crate::world::Run;

/// POST faults, each with its share in a thousand.
fn post_faults() -> Vec<(u32, PostFault)> {
    let ms = Duration::from_millis;
    vec![
        (40, PostFault::ErrorAfterStoring),
        (30, PostFault::StatusAfterStoring(409)),
        (30, PostFault::TimeoutAfterStoring),
        (40, PostFault::CutAfterStoring),
        (10, PostFault::HangAfterStoring),
        (20, PostFault::BreakOffAfterStoring),
        (20, PostFault::GarbledAnswer),
        (60, PostFault::ExchangedAnswer),
        (20, PostFault::WrongId),
        (20, PostFault::IdOfAnother),
        (20, PostFault::QueueUnavailable),
        (30, PostFault::ErrorBeforeStoring),
        (30, PostFault::CutBeforeStoring),
        (10, PostFault::HangBeforeStoring),
        (20, PostFault::StoreLate(ms(400))),
        (20, PostFault::TimeoutThenStore(ms(500))),
        (20, PostFault::CutThenStore(ms(500))),
        (10, PostFault::HangThenStore(ms(1000))),
        (20, PostFault::Slow(ms(700))),
        (20, PostFault::RateLimited),
    ]
}

/// Ends of records, each with its share in a thousand.
fn outcomes(run: &Run) -> Vec<(u32, Outcome)> {
    let mut outcomes = vec![
        (90, Outcome::FailedButExecuted),
        (50, Outcome::GivenUp),
        (60, Outcome::Stuck),
        (60, Outcome::GasBumped),
        (30, Outcome::NoOp),
        (20, Outcome::Canceled),
        (30, Outcome::WithoutJob),
        (30, Outcome::NeverSigned("Insufficient balance: Relayer balance 0 is insufficient to cover 1".to_owned())),
        (30, Outcome::ConfirmedUnsent),
        (40, Outcome::GivenUpButSent),
        (40, Outcome::GivenUpButSentAgain),
    ];
    // Without a chain nothing shows that it was sent after all.
    if run.rpc {
        outcomes.push((40, Outcome::FailedUnsignedButSent));
    }
    outcomes
}

/// What Baton's own node does wrong for a while, each with its share in a thousand.
fn node_faults() -> Vec<(u32, Mode)> {
    let ms = Duration::from_millis;
    vec![
        (200, Mode::Refuse),
        (150, Mode::Cut),
        (150, Mode::BlackHole),
        (150, Mode::SwallowAnswers),
        (150, Mode::Delay(ms(200))),
        (100, Mode::Delay(ms(1500))),
    ]
}

/// A node's errors: a limit, another node of its cluster that is behind, a state that it has dropped, a fault of its own.
const NODE_ERRORS: [(i64, &str); 4] = [
    (-32_005, "limit exceeded"),
    (-32_000, "header not found"),
    (-32_000, "missing trie node"),
    (-32_603, "internal error"),
];

fn pick<T: Clone>(from: &[(u32, T)], rng: &mut StdRng) -> Option<T> {
    let mut drawn = rng.random_range(0..1000_u32);
    for (share, what) in from {
        if drawn < *share {
            return Some(what.clone());
        }
        drawn -= share;
    }
    None
}

/// Names, how often each struck.
pub type Struck = Arc<Mutex<std::collections::BTreeMap<String, usize>>>;

/// The faults and kills of one run.
pub struct Storm {
    run: Run,
    relayers: Vec<Relayer>,
    pub struck: Struck,
    pub relayers_killed: AtomicUsize,
    pub consumers_killed: AtomicUsize,
}

impl Storm {
    pub fn new(run: &Run, relayers: &[Relayer]) -> Self {
        let struck = Struck::default();
        let attempts: Arc<Mutex<HashMap<usize, u64>>> = Arc::default();
        for (index, relayer) in relayers.iter().enumerate() {
            relayer.set_faults(calm(run, index));
            let (run, seed, quiet, sent_twice) = (run.clone(), run.seed, run.calm, run.sent_twice);
            let counted = Arc::clone(&attempts);
            relayer.set_post_rule(move |request| {
                let serial = serial(request)?;
                let mut attempts = counted.lock().unwrap();
                let attempt = attempts.entry(serial).or_default();
                *attempt += 1;
                let mut rng = dice(&[seed, 4, serial as u64, *attempt]);
                if quiet { None } else { pick(&post_faults(), &mut rng) }
            });
            let (counted, struck) = (Arc::clone(&attempts), Arc::clone(&struck));
            relayer.set_outcome_rule(move |request| {
                let serial = serial(request)?;
                let attempt = counted.lock().unwrap().get(&serial).copied().unwrap_or_default();
                let mut rng = dice(&[seed, 5, serial as u64, attempt]);
                let outcome = match (quiet, sent_twice) {
                    (true, true) => rng.random_ratio(1, 10).then_some(Outcome::SentTwice),
                    (true, false) => None,
                    _ => pick(&outcomes(&run), &mut rng),
                };
                if let Some(outcome) = &outcome {
                    let name = format!("{outcome:?}").split('(').next().unwrap_or_default().to_owned();
                    *struck.lock().unwrap().entry(name).or_default() += 1;
                }
                outcome
            });
        }
        let (relayers_killed, consumers_killed) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { run: run.clone(), relayers: relayers.to_vec(), struck, relayers_killed, consumers_killed }
    }

    /// Changes what the relayers answer, and kills one of them now and then.
    pub async fn over_relayers(&self, over: &AtomicBool) {
        if self.run.calm {
            return;
        }
        let mut rng = dice(&[self.run.seed, 6]);
        while !over.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(rng.random_range(200..600))).await;
            let index = rng.random_range(0..self.relayers.len());
            let relayer = &self.relayers[index];
            relayer.set_faults(misleading(&self.run, index, &mut rng));
            if !rng.random_ratio(1, 6) {
                continue;
            }
            self.relayers_killed.fetch_add(1, Ordering::Relaxed);
            relayer.stop().await;
            tokio::time::sleep(Duration::from_millis(rng.random_range(100..2000))).await;
            let memory =
                *[Memory::Keep, Memory::ForgetLast(Duration::from_secs(3)), Memory::LoseJobs(Duration::from_secs(1))]
                    .choose(&mut rng)
                    .unwrap();
            let name = format!("killed: {memory:?}").split('(').next().unwrap_or_default().to_owned();
            *self.struck.lock().unwrap().entry(name).or_default() += 1;
            relayer.restart(memory).await;
        }
    }

    /// Kills one of the consumers every few seconds.
    pub async fn over_consumers(&self, consumers: &mut [Process], over: &AtomicBool) {
        if self.run.calm {
            return;
        }
        let mut rng = dice(&[self.run.seed, 7]);
        while !over.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(rng.random_range(1500..4500))).await;
            let consumer = rng.random_range(0..consumers.len());
            consumers[consumer].kill9().await.unwrap();
            self.consumers_killed.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(rng.random_range(0..1000))).await;
            consumers[consumer].restart().await.unwrap();
        }
    }

    /// Freezes the chain now and then: no block for some seconds.
    pub async fn over_chain(&self, frozen: &AtomicBool, over: &AtomicBool) {
        if self.run.calm {
            return;
        }
        let mut rng = dice(&[self.run.seed, 8]);
        while !over.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(rng.random_range(4000..9000))).await;
            frozen.store(true, Ordering::Relaxed);
            *self.struck.lock().unwrap().entry("chain frozen".to_owned()).or_default() += 1;
            tokio::time::sleep(Duration::from_millis(rng.random_range(500..3000))).await;
            frozen.store(false, Ordering::Relaxed);
        }
    }

    /// Baton's own node fails now and then: it refuses, is silent or slow, or answers some calls with errors.
    pub async fn over_node(&self, link: &Proxy, rpc: &RpcProxy, goes_on: impl Fn() -> bool) {
        if self.run.calm || !self.run.rpc {
            return;
        }
        let mut rng = dice(&[self.run.seed, 9]);
        while goes_on() {
            tokio::time::sleep(Duration::from_millis(rng.random_range(500..3000))).await;
            let name = match pick(&node_faults(), &mut rng) {
                Some(mode) => {
                    link.set(mode).await;
                    format!("node: {mode:?}")
                }
                None => {
                    let (code, message) = *NODE_ERRORS.choose(&mut rng).unwrap();
                    let calls = AtomicUsize::new(0);
                    rpc.set_rule(move |_, _| {
                        let fails = calls.fetch_add(1, Ordering::Relaxed).is_multiple_of(2);
                        fails.then_some(NodeFault::Error(code, message))
                    });
                    format!("node: {message}")
                }
            };
            *self.struck.lock().unwrap().entry(name).or_default() += 1;
            tokio::time::sleep(Duration::from_millis(rng.random_range(500..4000))).await;
            rpc.set_rule(|_, _| None);
            link.set(Mode::Forward).await;
            link.cut().await;
        }
    }

    /// The POSTs that relayers send twice.
    pub fn sent_twice(&self) -> usize {
        self.struck.lock().unwrap().get("SentTwice").copied().unwrap_or_default()
    }

    /// How often each fault struck, at all relayers.
    pub fn struck(&self) -> Vec<(String, usize)> {
        let mut all = self.struck.lock().unwrap().clone();
        for relayer in &self.relayers {
            for (name, count) in relayer.faults_struck() {
                *all.entry(name.to_owned()).or_default() += count;
            }
        }
        all.into_iter().collect()
    }
}

/// What a relayer is like throughout: its clock, who dates its answers, and webhooks that get lost.
pub fn calm(run: &Run, index: usize) -> Faults {
    if run.calm {
        return Faults::default();
    }
    let turned = (index + run.seed as usize) % 3;
    let (clock_offset_ms, date) =
        [(0, DateHeader::Own), (-90_000, DateHeader::Proxy), (-90_000, DateHeader::Absent)][turned];
    let webhooks = WebhookFaults {
        lose: 0.15,
        repeat: 0.1,
        reorder: 0.1,
        reorder_within: Duration::from_millis(1500),
        foreign: 0.05,
        ..WebhookFaults::default()
    };
    let gap_filled_after = Some(Duration::from_secs(4));
    Faults { clock_offset_ms, date, webhooks, gap_filled_after, ..Faults::default() }
}

/// A relayer that misleads in some ways, and is slow in others.
fn misleading(run: &Run, index: usize, rng: &mut StdRng) -> Faults {
    let mut faults = calm(run, index);
    let three_seconds = Duration::from_secs(3);
    faults.listing = match rng.random_range(0..10) {
        0 | 1 => ListFault { late_by: three_seconds, ..ListFault::default() },
        2 => ListFault { empty: true, ..ListFault::default() },
        3 => ListFault { unsorted: true, ..ListFault::default() },
        4 => ListFault { page_max: Some(5), ..ListFault::default() },
        5 => ListFault { oldest_first: true, ..ListFault::default() },
        _ => ListFault::default(),
    };
    faults.second_memory = match rng.random_range(0..10) {
        0 => Some(SecondMemory::Behind(three_seconds)),
        1 => Some(SecondMemory::Split),
        _ => None,
    };
    if rng.random_ratio(1, 4) {
        let delay = Some(Duration::from_millis(rng.random_range(750..2700)));
        faults.relayer_reads = ReadFault { delay, ..ReadFault::default() };
    }
    if rng.random_ratio(1, 15) {
        faults.transaction_reads = ReadFault { status: Some(500), ..ReadFault::default() };
    }
    if rng.random_ratio(1, 15) {
        faults.paused = true;
    }
    faults
}

fn serial(request: &Value) -> Option<usize> {
    serial_of(request["data"].as_str()?)
}
