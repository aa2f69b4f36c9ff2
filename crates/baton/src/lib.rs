//! Baton takes work over HTTP, answers at once, and gets it done once.
//!
//! The map, in the order a request meets it: [`http`] (the server and what all APIs share) → [`relay`] (lane 1:
//! blockchain transactions) or [`users`] (lane 2: raffle enrolment) → the `pipeline` crate (queue, handler, settle).
//! [`cache`] and [`dead_letters`] serve the first lane, [`engine`] opens what both may run on, [`config`] is the only
//! reader of the environment, and [`cli`] puts a process together (the development relayers are the crate `relayer-sim`).

pub mod cli;
pub mod clock;
pub mod config;
pub mod dead_letters;
pub mod engine;
pub mod http;
pub mod mutations;
pub mod randomness;
pub mod relay;
pub mod telemetry;
pub mod timestamp;
pub mod users;
