//! How Baton learns what became of a transaction, and how clients read it.

pub mod api;
pub mod block;
pub mod recent_misses;
pub mod status;
pub mod webhook;
