//! The relay lane in worlds where everything goes wrong at the worst moment: a seeded simulation without time, threads
//! or input and output. The decisions are the product's own pure code; the orchestration around them is mirrored in
//! [`lane`], one scheduler step per await point.
//!
//! `SIM_RUNS=5000000 SIM_SEED=1 cargo test --release --test simulation` runs more worlds. A failure prints its seed and
//! what happened in the smallest world that fails in the same way; `SIM_MUTATION=NoFence` with `--nocapture` tells how
//! that mutation is found.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

mod lane;
mod relayer;
mod scheduler;
mod world;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use scheduler::Ended;
use world::{Counters, Fault, Fixtures, Mutation, Setup};

/// Rows are cloned a lot.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Worlds in an ordinary test run.
const RUNS: u64 = 60_000;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().map_or(otherwise, |text| text.parse().unwrap_or_else(|_| panic!("{name} is no number")))
}

fn setup(seed: u64, mutation: Mutation) -> Setup {
    // Some mistakes need a rare coincidence: those worlds are made to have it.
    let forced: &[Fault] = match mutation {
        Mutation::TakesUnproven => &[Fault::Forget, Fault::BadAnswer, Fault::Late],
        Mutation::TakesOldest => &[Fault::Late, Fault::Crash],
        Mutation::HastySecondLook => &[Fault::Late, Fault::Stall],
        Mutation::NoSecondLook => &[Fault::Late, Fault::Slow],
        _ => &[],
    };
    let forced = forced.iter().fold(0, |bits, fault| bits | 1 << *fault as u32);
    Setup { seed, mutation, forced, transactions_max: u64::MAX, faulty_steps_max: u64::MAX, trace: false }
}

/// Runs these worlds on every core; the first seed that fails, if any, and what happened in all of them.
fn explore(seeds: std::ops::Range<u64>, of: impl Fn(u64) -> Setup + Sync) -> (Option<(u64, String)>, Counters) {
    let threads = std::thread::available_parallelism().map_or(1, |count| count.get() as u64);
    let next = AtomicU64::new(seeds.start);
    let failed = std::sync::Mutex::new(None::<(u64, String)>);
    let total = std::sync::Mutex::new(Counters::default());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let fixtures = Fixtures::new();
                let mut counters = Counters::default();
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds.end || failed.lock().unwrap().as_ref().is_some_and(|(first, _)| *first < seed) {
                        break;
                    }
                    let ended = scheduler::run(&of(seed), &fixtures);
                    counters.add(&ended.counters);
                    if let Some(violation) = ended.violation {
                        let mut failed = failed.lock().unwrap();
                        if failed.as_ref().is_none_or(|(first, _)| seed < *first) {
                            *failed = Some((seed, violation));
                        }
                    }
                }
                total.lock().unwrap().add(&counters);
            });
        }
    });
    (failed.into_inner().unwrap(), total.into_inner().unwrap())
}

/// What kind of violation it is, without names and numbers.
fn kind(violation: &str) -> String {
    violation.chars().filter(|letter| !letter.is_ascii_digit()).collect()
}

/// The smallest world found that fails in the same way: fewer transactions, then fewer faults, then fewer steps.
fn smallest(seed: u64, violation: &str, mutation: Mutation) -> (Setup, Ended) {
    let fixtures = Fixtures::new();
    let wanted = kind(violation);
    let mut best: Option<(Setup, Ended)> = None;
    for transactions_max in 1..=6 {
        for tried in 0..6000 {
            let faulty_steps_max = 20 + tried % 180;
            let seed = if tried == 0 { seed } else { seed.wrapping_add(tried) };
            let mut setup = Setup { transactions_max, faulty_steps_max, ..setup(seed, mutation) };
            let ended = scheduler::run(&setup, &fixtures);
            let same = ended.violation.as_deref().is_some_and(|found| kind(found) == wanted);
            if same && best.as_ref().is_none_or(|(_, least)| ended.steps < least.steps) {
                setup.trace = true;
                best = Some((setup, ended));
            }
        }
        if best.is_some() {
            break;
        }
    }
    let found = best.map_or_else(|| setup(seed, mutation), |(setup, _)| setup);
    let traced = Setup { trace: true, ..found };
    let ended = scheduler::run(&traced, &fixtures);
    (traced, ended)
}

fn tell(seed: u64, violation: &str, mutation: Mutation) -> String {
    let fixtures = Fixtures::new();
    let whole = scheduler::run(&Setup { trace: true, ..setup(seed, mutation) }, &fixtures);
    let (small, ended) = smallest(seed, violation, mutation);
    format!(
        "SIM_SEED={seed} (mutation {mutation:?}): {violation}\n\n{}\n\nthe smallest world like it, {small:?}:\n\n{}\n",
        whole.trace.join("\n"),
        ended.trace.join("\n")
    )
}

#[test]
fn nothing_is_lost_and_nothing_happens_twice() {
    let (first, runs) = (number("SIM_SEED", 0), number("SIM_RUNS", RUNS));
    let started = Instant::now();
    let (failed, counters) = explore(first..first + runs, |seed| setup(seed, Mutation::None));
    let took = started.elapsed();
    println!("{:.0} worlds a second, {counters:#?}", counters.worlds as f64 / took.as_secs_f64());
    if let Some((seed, violation)) = failed {
        panic!("{}", tell(seed, &violation, Mutation::None));
    }
}

#[test]
fn the_same_seed_is_the_same_world() {
    let fixtures = Fixtures::new();
    for seed in 0..50 {
        let traced = Setup { trace: true, ..setup(seed, Mutation::None) };
        let (once, twice) = (scheduler::run(&traced, &fixtures), scheduler::run(&traced, &fixtures));
        assert_eq!(once.trace, twice.trace);
        let untraced = scheduler::run(&setup(seed, Mutation::None), &fixtures);
        assert_eq!(once.steps, untraced.steps, "looking changes nothing");
    }
}

#[test]
fn every_mutation_is_found() {
    const WITHIN: u64 = 100_000;
    let told = std::env::var("SIM_MUTATION").ok();
    let mut missed = Vec::new();
    for mutation in [
        Mutation::NoClaim,
        Mutation::NoFence,
        Mutation::NoSecondLook,
        Mutation::NoMemoryProof,
        Mutation::NoUniqueness,
        Mutation::NoCompareAndSwap,
        Mutation::NoForwardOnly,
        Mutation::ErrorIsRefusal,
        Mutation::HastySecondLook,
        Mutation::TakesWhileOpen,
        Mutation::TakesUnproven,
        Mutation::TakesOldest,
        Mutation::NoToken,
        Mutation::NoClaimSweep,
        Mutation::NoWaitingSweep,
        Mutation::NoSubmittedSweep,
    ] {
        let (failed, _) = explore(0..WITHIN, |seed| setup(seed, mutation));
        match failed {
            Some((seed, violation)) => {
                println!("{mutation:?} found after {} worlds: {violation}", seed + 1);
                if told.as_deref() == Some(format!("{mutation:?}").as_str()) {
                    println!("{}", tell(seed, &violation, mutation));
                }
            }
            None => missed.push(mutation),
        }
    }
    assert!(missed.is_empty(), "not found within {WITHIN} worlds each: {missed:?}");
}
