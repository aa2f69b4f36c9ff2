//! Fault scenarios: the real binary with short timings, one kind of fault per file, and one ledger that is checked at the
//! end (`ledger.rs`). Each scenario prints its seed and a `SUMMARY` line. `SCENARIO_SEED` repeats a run; `scripts/torture`
//! runs the scenarios mixed for a given time.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

mod api_killed;
mod clock_jumps;
mod consumer_killed;
mod frozen_process;
mod item_faults;
mod killed_before_queueing;
mod ledger;
mod load_client;
mod network_cut;
mod notifications_killed;
#[path = "../it/relay_fixture.rs"]
#[expect(dead_code, reason = "the integration tests use the rest of it")]
mod relay_fixture;
mod relayer_faults;
mod relayers_away;
mod scenario;
mod sigterm_under_load;
mod status_watcher;
mod three_consumers;
mod webhooks_disorder;
mod webhooks_lost;
