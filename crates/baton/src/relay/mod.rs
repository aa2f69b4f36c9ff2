//! The relay lane, its files in the order a transaction meets them:
//!
//! [`api`] → [`call`] or [`forward_request`] (with [`gasless`]) → [`intake`] (with [`coalescer`]) → ([`message`]) → [`consumer`] (with [`order`] and [`preflight`]) → [`routing`] → [`relayer`] → [`webhook`] →
//! [`report`] → [`status`], with [`reconciler`] for whatever got stuck and [`doubt`] for what nobody knows. [`transaction`] holds the states and their
//! only legal moves; [`book`] saves them in a [`store`]; [`chain`] is asked by whoever must know.

pub mod api;
pub mod book;
pub mod call;
pub mod chain;
pub mod coalescer;
pub mod consumer;
pub mod doubt;
pub mod engine;
pub mod forward_request;
pub mod gasless;
pub mod health;
pub mod intake;
pub mod lane;
pub mod message;
pub mod order;
pub mod preflight;
pub mod reconciler;
pub mod relayer;
pub mod report;
pub mod routing;
pub mod search;
pub mod status;
pub mod store;
pub mod transaction;
pub mod webhook;
