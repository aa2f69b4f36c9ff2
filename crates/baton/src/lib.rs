//! Baton takes work over HTTP, answers at once, and gets it done once.
//!
//! The map, in the order a request meets it: [`http`] (the server and what all APIs share) → [`relay`] (lane 1:
//! blockchain transactions) or [`users`] (lane 2: raffle enrolment) → the `pipeline` crate (queue, handler, settle).
//! Both lanes share [`dead_letters`] (the operators' view), [`queues`] (opening a queue on SQS) and `store_pool` (database
//! connections); [`cache`] serves the first lane. [`config`] is the only reader of the environment, [`cli`] puts a process
//! together, and [`dev`] brings the development relayers.

pub mod cache;
pub mod cli;
pub mod config;
pub mod dead_letters;
pub mod dev;
pub mod errors;
pub mod http;
pub mod queues;
pub mod relay;
pub mod relay_dead_letters;
mod store_pool;
pub mod telemetry;
pub mod timestamp;
pub mod users;
