//! What all APIs share: the server with its limits, API keys, request bodies, problems (errors as responses) and health. And
//! the client for outgoing calls.

pub mod auth;
pub mod body;
pub mod connections;
pub mod descriptors;
pub mod health;
pub mod host;
pub mod idempotency_header;
pub mod open_connections;
pub mod outgoing;
pub mod problem;
pub mod server;
pub mod strict_json;
pub mod timed_stream;
pub mod transport;
