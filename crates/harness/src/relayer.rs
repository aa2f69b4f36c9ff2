//! An OpenZeppelin Relayer on a socket that records what it accepted and misbehaves on request: the simulated relayer of
//! the crate `relayer-sim`.

pub use relayer_sim::{
    DateHeader, Delivery, Dialect, FaultPlan, Faults, ListFault, Memory, Outcome, PostFault, ReadFault, Record,
    RelayerOptions, SecondMemory, Status, Timing, WebhookFaults,
    dev::{ChainLink, ChainOptions},
    hex_amount,
    server::{Accepted, Relayer, Seen},
    sign_base64, sign_hex,
};
