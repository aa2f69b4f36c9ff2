//! Integration tests without servers. `conformance` runs the contract on the memory and SQLite queues; the others test the
//! database, several processes on one file, and the pipeline itself.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

mod conformance;
mod database;
mod processes;
mod run;
