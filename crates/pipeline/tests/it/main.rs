//! The pipeline against real queues. `conformance` runs the contract on every backend here; the rest is what the
//! contract does not say: the database under the embedded queue, several processes, and the pipeline itself.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

mod conformance;
mod database;
mod processes;
mod run;
