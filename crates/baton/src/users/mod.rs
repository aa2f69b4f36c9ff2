//! Lane 2: raffle enrolment, into the users' database in batches. The files in the order a user meets them: [`api`] and
//! [`bulk`] (the HTTP calls), [`user`] (what a user is), [`intake`] (where the 200 is earned), [`consumer`] (batches into
//! the [`store`]), [`dead_letters`] (what the consumer gave up) and [`letters`] (the same for operators). [`engine`] opens what
//! they run on, and [`lane`] puts them together.

pub mod api;
pub mod bulk;
pub mod consumer;
pub mod dead_letters;
pub mod engine;
pub mod health;
pub mod intake;
pub mod lane;
pub mod letters;
pub mod quarantine;
pub mod store;
pub mod user;
