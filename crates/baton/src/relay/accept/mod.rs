//! From the HTTP request to the 202: parse, check, store the row and its message.

pub mod api;
pub mod gasless;
pub mod intake;
