//! The relay lane: blockchain transactions, from `POST` to their end on the chain.
//!
//! The folders, in the order a transaction meets them: [`accept`] (HTTP calls, checks, intake) → [`submit`] (consumer,
//! nonce order, pre-flight) → [`relayer`] (client, pool, routing) → [`observe`] (webhooks, status, block) →
//! [`reconcile`] (sweeps, unknown outcomes, proof of absence). They share [`request`] (what a client asks for),
//! [`state`] (a transaction and its legal moves, pure), [`store`] (the databases), [`chain`] (the node behind
//! `RPC_URL`) and [`update`] (the guarded change of a row, with its cache and its view).
//!
//! Imports point one way: `request` ← `state` ← `store` ← `chain` ← `relayer` ← `update` ← `observe` ← `submit` ←
//! `reconcile` ← `accept` ← [`engine`] ← [`lane`]. The test `layers` fails on an import against the arrows.

pub mod accept;
pub mod chain;
pub mod engine;
pub mod health;
pub mod lane;
pub mod observe;
pub mod reconcile;
pub mod relayer;
pub mod request;
pub mod state;
pub mod store;
pub mod submit;
pub mod update;
