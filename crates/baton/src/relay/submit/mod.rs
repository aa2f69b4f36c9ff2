//! From the message to the relayer: nonce order, routing, pre-flight, claim, submission, bind.

pub mod consumer;
pub mod large_messages;
pub mod nonce_order;
pub mod preflight;
