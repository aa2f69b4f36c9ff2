//! Failure scenarios of the users lane: the real binary, private RabbitMQ and PostgreSQL that can be killed, one kind of
//! failure per file, and a comparison of answers and rows at the end. Each prints its seed and a `SUMMARY` line.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

mod api_killed;
mod consumer_killed;
mod database_away;
#[expect(dead_code, reason = "the integration tests use the rest of it")]
mod fixture;
mod link_cut;
mod malformed;
mod scenario;
mod servers_killed;
mod sigterm;
