//! Lane 2: raffle enrolment, into the users' database in batches. The files in the order a user meets them: [`api`] and
//! [`bulk`] (the HTTP calls), [`user`] (the record), [`intake`] (accepts a user: the 200), [`consumer`] (batches into the
//! [`store`]), [`dead_letter_consumer`] (retries what the consumer gave up) with its [`quarantined_message`]s, and
//! [`dead_letters`] (the operators' view). [`engine`] opens store and queue, [`lane`] puts all together, [`health`]
//! reports on them.

pub mod api;
pub mod bulk;
pub mod consumer;
pub mod dead_letter_consumer;
pub mod dead_letters;
pub mod engine;
pub mod health;
pub mod intake;
pub mod lane;
pub mod quarantined_message;
pub mod store;
pub mod user;
