//! The product on a real chain: the real binary, development relayers that sign, and contracts compiled from source.
//! `scripts/services start chain` starts the chain.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

mod alarms;
mod blocks;
mod chain_fixture;
mod contracts;
mod direct;
mod ethers;
mod faults;
mod gasless;
mod jams;
mod killed_halfway;
mod misleading_relayers;
mod misled_fixture;
mod node;
#[path = "../it/relay_fixture.rs"]
#[expect(dead_code, reason = "the tests of the embedded engine use the rest of it")]
mod relay_fixture;
mod rpc_proxy;
mod unsigned_records;
