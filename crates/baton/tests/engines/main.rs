//! What can only happen beyond one machine: row, message and cache in three systems, each of which can be away, slow,
//! or gone at the worst moment. The servers are those of `scripts/services`; the stories that every engine must stand
//! are in `scenarios`, run with `BATON_TEST_ENGINE`.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

mod accepting;
#[path = "../scenarios/clients.rs"]
#[expect(dead_code, reason = "the scenarios use the rest of it")]
mod clients;
mod long_texts;
#[path = "../it/stand.rs"]
#[expect(dead_code, reason = "the integration tests use the rest of it")]
mod stand;
mod status;
mod topology;
mod users;
#[path = "../users/fixture.rs"]
#[expect(dead_code, reason = "the scenarios use the rest of it")]
mod users_fixture;
mod users_store;
#[path = "../scenarios/watch.rs"]
mod watch;
