//! One simulated OpenZeppelin Relayer, for `baton dev`, for tests over sockets, and for the simulation in process.
//!
//! [`SimRelayer`] is the whole relayer without time, threads or sockets: requests, time and webhook results go in as
//! values, and answers, webhooks and what happens on a connection come out as values. Everything that it does wrong is
//! in [`Faults`]. It behaves as version 1.8.0 of the real one was measured to (`tests/facts.rs` checks that); where the
//! two differ on purpose, the code says so.
//!
//! ```
//! use relayer_sim::{Event, RelayerOptions, Reply, SimRelayer, SimRequest};
//!
//! let mut relayer = SimRelayer::new(RelayerOptions::new("a").webhook("http://hook", "key"), 7);
//! let bearer = "Bearer api-key-of-a-0123456789abcdef0123456789";
//! let headers = [("authorization", bearer), ("content-type", "application/json")];
//! let body = br#"{"to":"0x90F79bf6EB2c4f870365E785982E1f101E93b906","value":1,"speed":"fast"}"#;
//! let request =
//!     SimRequest { method: "POST", path: "/api/v1/relayers/a/transactions", query: "", headers: &headers, body };
//! let Reply::Answer { response, .. } = relayer.handle(1_000, &request) else { panic!("it behaves") };
//! assert_eq!(response.status, 200);
//! // Let time pass as far as there is something to do, and deliver each webhook.
//! while let Some(due) = relayer.next_due_ms() {
//!     for event in relayer.advance(due) {
//!         if let Event::Webhook(webhook) = event {
//!             relayer.webhook_result(due, webhook.id, Some(200));
//!         }
//!     }
//! }
//! assert_eq!(relayer.records().next().unwrap().status.as_str(), "confirmed");
//! ```
//!
//! The files: `options` and `faults` (what can be set), `api`, `reads` and `answers` (HTTP), `request` (what is accepted),
//! `record` (what is shown), `core`, `plan` and `progress` (time passing), `webhook` (deliveries), `on_chain` (real
//! transactions), `broadcasts` (a chain that the driver simulates), `server` (feature `server`: sockets and real time),
//! `dev` (feature `dev`: a journal, and a signer on a chain).

mod answers;
mod api;
mod broadcasts;
mod core;
#[cfg(feature = "dev")]
pub mod dev;
mod faults;
mod on_chain;
mod options;
mod plan;
mod progress;
mod reads;
mod record;
mod request;
mod rng;
#[cfg(feature = "server")]
pub mod server;
mod webhook;

pub use self::{
    api::{Reply, SimRequest, SimResponse},
    broadcasts::Broadcast,
    core::{Audit, Event, SimRelayer, Ticket},
    faults::{DateHeader, FaultPlan, Faults, ListFault, Outcome, PostFault, ReadFault, SecondMemory, WebhookFaults},
    on_chain::{SignedCall, UnsignedCall, Wallet},
    options::{Dialect, MEASURED_WEBHOOK_PAUSES, Memory, Mode, RelayerOptions, Timing},
    record::{Record, SignatureParts, SignedParts, Status},
    request::{Speed, hex_amount},
    webhook::{Delivery, OutgoingWebhook, sign_base64, sign_hex},
};
