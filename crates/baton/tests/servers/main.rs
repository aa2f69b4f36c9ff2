//! Failure stories of the servers themselves: MySQL, SQS, RabbitMQ and Redis are killed, frozen, slowed down, filled up
//! or made to repeat themselves while clients send, and the ledger of the other stories (`scenarios`) must add up. What a
//! story may kill is its own (`harness::servers`); the others use what `scripts/services` has started.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

#[path = "../scenarios/clients.rs"]
mod clients;
mod dead_letters;
mod duplicates;
mod emulator;
mod frozen;
mod frozen_with_locks;
mod killed;
#[path = "../scenarios/ledger.rs"]
mod ledger;
mod mysql_full;
mod mysql_locks;
mod mysql_read_only;
mod mysql_slow;
mod queue_at_accept;
mod redis_gone;
mod slow_submit;
#[path = "../it/stand.rs"]
#[expect(dead_code, reason = "the integration tests use the rest of it")]
mod stand;
#[path = "../scenarios/story.rs"]
#[expect(dead_code, reason = "the other stories use the rest of it")]
mod story;
mod trouble;
#[path = "../scenarios/watch.rs"]
mod watch;
