//! What all APIs share: the server with its limits, who may call, how an error looks, and whether we are well.

pub mod auth;
pub mod body;
pub mod health;
pub mod idempotency;
pub mod problem;
pub mod server;
