//! One run of one scenario: its seed, the faults it injects, and the `SUMMARY` line at its end.

use std::time::{Duration, Instant};

use harness::process::Process;
use harness::relayer::{FaultPlan, Faults, PostFault};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use crate::ledger::Ledger;
use crate::load_client::{ClientAnswers, LoadClient};
use crate::relay_fixture::{RelayFixture, RelaySetup};
use crate::status_watcher::{StatusWatcher, WatchReport};

/// Deadline for all transactions to be final. Leases and claims of a killed process expire within seconds, and each unknown
/// outcome is settled a few seconds later.
const FINAL_TIMEOUT: Duration = Duration::from_secs(180);
/// The seed, unless `SCENARIO_SEED` sets another.
const SEED: u64 = 20_260_731;

/// One run of a scenario.
pub struct Scenario {
    pub seed: u64,
    pub rng: StdRng,
    /// Processes killed with `kill -9`.
    pub kills: usize,
    name: &'static str,
    started: Instant,
    watcher: Option<StatusWatcher>,
    watched: WatchReport,
}

impl Scenario {
    /// Prints the seed at once, so that even a run that hangs can be repeated.
    pub fn begin(name: &'static str) -> Self {
        let seed = match std::env::var("SCENARIO_SEED") {
            Ok(text) => text.parse().expect("SCENARIO_SEED is a whole number"),
            Err(_) => SEED,
        };
        println!(
            "scenario {name} seed {seed} (repeat: SCENARIO_SEED={seed} cargo test -p baton --test {} {name})",
            env!("CARGO_CRATE_NAME")
        );
        let (rng, started) = (StdRng::seed_from_u64(seed), Instant::now());
        Self { seed, rng, kills: 0, name, started, watcher: None, watched: WatchReport::default() }
    }

    /// Starts a reader that checks every status until the scenario ends.
    pub fn start_watching(&mut self, relay: &RelayFixture) {
        self.watcher = Some(StatusWatcher::start(LoadClient::of(relay)));
    }

    /// Stops the reader, before an operator's command that legitimately moves a status back.
    pub async fn stop_watching(&mut self) {
        if let Some(watcher) = self.watcher.take() {
            let watched = watcher.stop().await;
            self.watched.reads += watched.reads;
            self.watched.regressions.extend(watched.regressions);
        }
    }

    /// A random time up to `max`.
    pub fn random_pause(&mut self, max: Duration) -> Duration {
        max.mul_f64(self.rng.random::<f64>())
    }

    /// Kills the process with `kill -9` and restarts it, `times` times, each after a random time: before it is ready, at
    /// work, or idle.
    pub async fn kill_repeatedly(&mut self, process: &mut Process, times: usize, life_max: Duration) {
        for _ in 0..times {
            tokio::time::sleep(self.random_pause(life_max)).await;
            process.restart().await.unwrap();
            self.kills += 1;
        }
    }

    /// Waits until every transaction is final, then checks the ledger.
    ///
    /// # Panics
    /// With all findings of the ledger, after it has printed the summary line.
    pub async fn end(mut self, relay: &RelayFixture, answers: &ClientAnswers) -> Ledger {
        let open = until_final(relay, FINAL_TIMEOUT).await;
        self.stop_watching().await;
        let mut ledger = Ledger::read(relay, answers).await;
        ledger.findings.append(&mut self.watched.regressions);
        ledger.findings.extend(open);
        println!(
            "SUMMARY scenario={} seed={} transactions={} kills={} unknown={} duplicates={} lost={} confirmed={} failed={} \
             refused={} unanswered={} reads={} findings={} seconds={:.1}",
            self.name,
            self.seed,
            answers.total(),
            self.kills,
            ledger.unknown,
            ledger.duplicates,
            ledger.lost,
            ledger.confirmed,
            ledger.failed,
            answers.refused.len(),
            answers.unanswered.len(),
            self.watched.reads,
            ledger.findings.len(),
            self.started.elapsed().as_secs_f64(),
        );
        ledger.assert_balanced(relay).await;
        ledger
    }
}

/// Waits until no transaction is open; after the deadline, returns a description of what is still open.
pub async fn until_final(relay: &RelayFixture, deadline: Duration) -> Option<String> {
    let client = LoadClient::of(relay);
    let started = Instant::now();
    let mut health = None;
    while started.elapsed() < deadline {
        health = client.get("/health").await.map(|(_, health)| health);
        let open = health.as_ref().map(|health| &health["parts"]["store"]["open"]);
        if open.is_some_and(|open| open["pending"] == 0 && open["submitted"] == 0) {
            return None;
        }
        tokio::time::sleep(Duration::from_millis(150)).await;
    }
    Some(format!("transactions are still open after {deadline:?}: {health:?}"))
}

/// A setup for scenarios that kill processes: leases and claims of a killed process expire within seconds.
pub fn crash_setup(relayers: usize) -> RelaySetup {
    RelaySetup::relayers(relayers)
        .env("QUEUE_LEASE_MS", "1000")
        .env("RECONCILE_SUBMITTED_MS", "3000")
        .env("LOG_LEVEL", "warn")
        .split()
}

/// Gives every relayer a fault plan, each with its own seed.
pub fn inject_faults(relay: &RelayFixture, seed: u64, faults: impl Fn(FaultPlan) -> FaultPlan) {
    for (number, relayer) in relay.relayers.iter().enumerate() {
        let plan = FaultPlan::new(seed.wrapping_add(number as u64));
        relayer.set_faults(Faults::planned(faults(plan)));
    }
}

/// Gives a tenth of all submissions an unknown outcome.
pub fn inject_unknown_outcomes(relay: &RelayFixture, seed: u64) {
    inject_faults(relay, seed, |plan| {
        plan.with(PostFault::ErrorBeforeStoring, 0.02)
            .with(PostFault::ErrorAfterStoring, 0.02)
            .with(PostFault::CutBeforeStoring, 0.01)
            .with(PostFault::CutAfterStoring, 0.015)
            .with(PostFault::TimeoutAfterStoring, 0.015)
            .with(PostFault::GarbledAnswer, 0.005)
            .with(PostFault::QueueUnavailable, 0.005)
            .with(PostFault::HangAfterStoring, 0.002)
            // Stored after the consumer has given up on the request, or has been killed.
            .with(PostFault::HangThenStore(Duration::from_millis(1500)), 0.008)
    });
}
