//! How a row changes: read, decide, save if its version is unchanged; then refresh the cache and wake what waits.

pub mod cache;
pub mod guarded_store;
pub mod view;
