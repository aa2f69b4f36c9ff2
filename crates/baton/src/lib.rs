//! Baton takes work over HTTP, answers at once, and gets it done once.
//!
//! The map, in the order a request meets it: [`http`] (the server and what all APIs share) → [`relay`] (lane 1:
//! blockchain transactions) or [`users`] (lane 2: raffle enrolment) → the `pipeline` crate (queue, handler, settle).
//! Both lanes share [`dead_letters`] (the operators' view), [`queues`] (opening a queue on SQS), [`servers`] (which server a start waits for), `store_pool` (database
//! connections), [`clock`] and [`randomness`] (as values). [`config`] is the only reader of the environment, [`evm`]
//! parses addresses and amounts, and [`cli`] puts a process together. The lanes never import each other.

pub mod cli;
pub mod clock;
pub mod config;
pub mod dead_letters;
pub mod errors;
pub mod evm;
pub mod http;
pub mod mutations;
pub mod notify;
pub mod queues;
pub mod randomness;
pub mod relay;
pub mod servers;
mod store_pool;
pub mod telemetry;
pub mod timestamp;
pub mod users;
