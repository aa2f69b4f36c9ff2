//! The product over HTTP: the real binary on the embedded engine, with simulated relayers that can misbehave.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

mod absence;
mod attacks;
mod bad_input;
mod chain_decides;
mod commands;
mod data_directory;
mod dev;
mod docs;
mod endpoint_health;
mod full_disk;
mod journey;
mod layers;
mod legacy_bugs;
mod load;
mod notifications;
mod observability;
mod reconcile;
#[expect(dead_code, reason = "the tests of the engines use the rest of it")]
mod relay_fixture;
mod routing;
mod rpc_urls;
mod server_away;
mod start;
mod started;
mod store;
mod users;
#[path = "../users/fixture.rs"]
#[expect(dead_code, reason = "the tests on the servers use the rest of it")]
mod users_fixture;
mod webhook_endpoints;
mod webhooks;
