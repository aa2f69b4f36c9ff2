//! What all APIs share: the server with its limits, who may call, how an error looks, and whether we are well. And how we
//! call others.

pub mod auth;
pub mod body;
pub mod health;
pub mod idempotency;
pub mod outgoing;
pub mod problem;
pub mod server;
pub mod transport;
