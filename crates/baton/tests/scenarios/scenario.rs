//! One run of one story: its seed, its dice, what was done to it, and the line that says how it ended.

use std::time::{Duration, Instant};

use harness::process::Process;
use harness::relayer::{FaultPlan, Faults, PostFault};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::ledger::Ledger;
use crate::load_client::{Client, Promises};
use crate::relay_fixture::{Plan, Stand};
use crate::status_watcher::{Seen, Watch};

/// What a killed process held is free again after seconds, and each unknown outcome is settled within a few more.
const PATIENCE: Duration = Duration::from_secs(180);
/// The seed of every run that is not told another one.
const SEED: u64 = 20_260_731;

/// A run.
pub struct Story {
    pub seed: u64,
    pub dice: StdRng,
    /// Processes killed with `kill -9`.
    pub kills: usize,
    name: &'static str,
    started: Instant,
    watch: Option<Watch>,
    seen: Seen,
}

impl Story {
    /// Prints the seed, so that a run that never ends can be repeated too.
    pub fn begin(name: &'static str) -> Self {
        let seed = match std::env::var("SCENARIO_SEED") {
            Ok(text) => text.parse().expect("SCENARIO_SEED is a whole number"),
            Err(_) => SEED,
        };
        println!(
            "scenario {name} seed {seed} (repeat: SCENARIO_SEED={seed} cargo test -p baton --test {} {name})",
            env!("CARGO_CRATE_NAME")
        );
        let (dice, started) = (StdRng::seed_from_u64(seed), Instant::now());
        Self { seed, dice, kills: 0, name, started, watch: None, seen: Seen::default() }
    }

    /// Somebody reads all the time from now on.
    pub fn watch(&mut self, stand: &Stand) {
        self.watch = Some(Watch::begin(Client::of(stand)));
    }

    /// Nobody reads any more: an operator is about to do what puts states back.
    pub async fn look_away(&mut self) {
        if let Some(watch) = self.watch.take() {
            let seen = watch.end().await;
            self.seen.reads += seen.reads;
            self.seen.steps_back.extend(seen.steps_back);
        }
    }

    /// A random time up to that long.
    pub fn moment(&mut self, max: Duration) -> Duration {
        max.mul_f64(self.dice.random::<f64>())
    }

    /// `kill -9` and a new life, again and again, each after a random time: before it is ready, at work, or idle.
    pub async fn kill_again_and_again(&mut self, process: &mut Process, times: usize, life_max: Duration) {
        for _ in 0..times {
            tokio::time::sleep(self.moment(life_max)).await;
            process.restart().await.unwrap();
            self.kills += 1;
        }
    }

    /// Waits until everything is final, then balances the ledger.
    ///
    /// # Panics
    /// With everything that is wrong, after the summary line was printed.
    pub async fn end(mut self, stand: &Stand, promises: &Promises) -> Ledger {
        let open = until_final(stand, PATIENCE).await;
        self.look_away().await;
        let mut ledger = Ledger::read(stand, promises).await;
        ledger.findings.append(&mut self.seen.steps_back);
        ledger.findings.extend(open);
        println!(
            "SUMMARY scenario={} seed={} transactions={} kills={} unknown={} duplicates={} lost={} confirmed={} failed={} \
             refused={} unanswered={} reads={} findings={} seconds={:.1}",
            self.name,
            self.seed,
            promises.total(),
            self.kills,
            ledger.unknown,
            ledger.duplicates,
            ledger.lost,
            ledger.confirmed,
            ledger.failed,
            promises.refused.len(),
            promises.unanswered.len(),
            self.seen.reads,
            ledger.findings.len(),
            self.started.elapsed().as_secs_f64(),
        );
        ledger.assert_balanced(stand).await;
        ledger
    }
}

/// Waits until no transaction is open; says what still is when that takes too long.
pub async fn until_final(stand: &Stand, deadline: Duration) -> Option<String> {
    let client = Client::of(stand);
    let started = Instant::now();
    let mut health = None;
    while started.elapsed() < deadline {
        health = client.get("/health").await.map(|(_, health)| health);
        let open = health.as_ref().map(|health| &health["parts"]["store"]["open"]);
        if open.is_some_and(|open| open["pending"] == 0 && open["submitted"] == 0) {
            return None;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Some(format!("not everything is final after {deadline:?}: {health:?}"))
}

/// Relayers, clocks and leases for stories in which processes die: what they held is free again within seconds.
pub fn mortal(relayers: usize) -> Plan {
    Plan::relayers(relayers)
        .env("QUEUE_LEASE_MS", "1000")
        .env("RECONCILE_SUBMITTED_MS", "3000")
        .env("LOG_LEVEL", "warn")
        .split()
}

/// A tenth of all submissions end so that nobody knows what came of them.
pub fn a_tenth_unknown(stand: &Stand, seed: u64) {
    for (number, relayer) in stand.relayers.iter().enumerate() {
        let plan = FaultPlan::new(seed.wrapping_add(number as u64))
            .with(PostFault::ErrorBeforeStoring, 0.02)
            .with(PostFault::ErrorAfterStoring, 0.02)
            .with(PostFault::CutBeforeStoring, 0.01)
            .with(PostFault::CutAfterStoring, 0.015)
            .with(PostFault::TimeoutAfterStoring, 0.015)
            .with(PostFault::GarbledAnswer, 0.005)
            .with(PostFault::QueueUnavailable, 0.005)
            .with(PostFault::HangAfterStoring, 0.002)
            // It lands when everybody has given up on it, or died.
            .with(PostFault::HangThenStore(Duration::from_millis(1500)), 0.008);
        relayer.set_faults(Faults::planned(plan));
    }
}
