//! Fault scenarios of the servers: MySQL, SQS, RabbitMQ and Redis are killed, frozen, slowed down, exhausted or made to
//! deliver duplicates while clients send; the ledger of `scenarios` is checked at the end. A scenario that kills or freezes
//! a server starts its own (`harness::servers`); the others use the servers of `scripts/services`, and the webhook tests its
//! libraries or nothing.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

mod databases_tls;
mod dead_letters;
mod duplicates;
mod frozen;
mod frozen_with_locks;
mod killed;
#[path = "../scenarios/ledger.rs"]
mod ledger;
#[path = "../scenarios/load_client.rs"]
mod load_client;
mod mysql_clock;
mod mysql_full;
mod mysql_locks;
mod mysql_read_only;
mod mysql_slow;
mod outage;
mod own_authority;
mod queue_at_accept;
mod redis_gone;
mod redis_tls;
#[path = "../it/relay_fixture.rs"]
#[expect(dead_code, reason = "the integration tests use the rest of it")]
mod relay_fixture;
#[path = "../scenarios/scenario.rs"]
#[expect(dead_code, reason = "the other scenarios use the rest of it")]
mod scenario;
mod slow_submit;
mod sqs_queue;
#[path = "../scenarios/status_watcher.rs"]
mod status_watcher;
mod task_role;
mod webhook_receivers;
mod webhook_tls;
mod webhook_verifiers;
