//! Failure stories of the users lane: the real binary, private RabbitMQ and PostgreSQL that can be killed, one kind of
//! trouble a file, and one ledger that must add up in the end. Each prints its seed and a `SUMMARY` line.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

mod api_killed;
mod consumer_killed;
mod database_away;
mod link_cut;
mod malformed;
mod servers_killed;
mod sigterm;
#[expect(dead_code, reason = "the integration tests use the rest of it")]
mod stand;
mod story;
