//! Faults that need separate servers: row, message and cache are in three systems, each of which can be unavailable, slow
//! or lost. The servers are those of `scripts/services`. The scenarios for every engine are in `scenarios`, run with
//! `BATON_TEST_ENGINE`.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

mod accept_with_link_cut;
#[path = "../scenarios/load_client.rs"]
#[expect(dead_code, reason = "the scenarios use the rest of it")]
mod load_client;
mod oversized_values;
#[path = "../servers/own_authority.rs"]
#[expect(dead_code, reason = "the tests on private servers use the rest of it")]
mod own_authority;
mod reading_commands;
#[path = "../it/relay_fixture.rs"]
#[expect(dead_code, reason = "the integration tests use the rest of it")]
mod relay_fixture;
mod server_away;
#[path = "../it/started.rs"]
mod started;
mod status;
#[path = "../scenarios/status_watcher.rs"]
mod status_watcher;
mod topology;
mod users;
#[path = "../users/fixture.rs"]
#[expect(dead_code, reason = "the scenarios use the rest of it")]
mod users_fixture;
mod users_store;
