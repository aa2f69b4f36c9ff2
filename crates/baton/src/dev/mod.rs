//! Development relayers: `baton dev` needs somebody to hand transactions to, and a laptop has no OpenZeppelin Relayer,
//! no chain and no funds.
//!
//! Each is a small HTTP server that speaks the real relayer's API (version 1.8.0) and its signed webhooks, so Baton
//! cannot tell the difference. **They touch no chain** unless they are told where one is: hashes are made up, nothing is
//! signed, and their names say so. They remember their records over a restart. The files, in the order a transaction
//! meets them: `api` (HTTP), `request` (what is accepted), `record` (what is shown), `journal` (what survives), `relayer`
//! (time passing), `webhook` (telling about it).
//!
//! Without a chain, call data that starts with `0xdeadbeef` reverts, so that failures can be seen too. With one each has
//! its own key and really signs: `signer` (nonces, sending, following), `node` (JSON-RPC), `signed` (what came of it).

mod api;
mod journal;
mod node;
mod record;
mod relayer;
mod request;
mod signed;
mod signer;
mod webhook;

pub use relayer::{DevRelayer, DevRelayerOptions};
pub use signer::ChainOptions;
