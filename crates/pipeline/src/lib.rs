//! Queue, handler, settle: a small library for at-least-once work.
//!
//! ```text
//!              send                    receive                 outcome
//!   producer ───────▶ ┌─────────────┐ ────────▶ ┌───────────┐ ────────▶ ┌──────────┐
//!                     │    Queue    │           │  Handler  │           │  settle  │
//!                     │  (leases)   │ ◀─────────│ Done      │           │ in       │
//!                     └──────┬──────┘  extend   │ Retry     │           │ batches  │
//!                            │                  │ Dead      │           └────┬─────┘
//!                     ┌──────▼──────┐           └───────────┘                │
//!                     │ dead letters│ ◀─────────── ack, retry_after, bury ───┘
//!                     └─────────────┘
//! ```
//!
//! A [`Queue`] stores messages and leases them to receivers; backends are in [`queue`]. You write a [`Handler`] (one
//! message per call, many calls at the same time) or a [`BatchHandler`] (many messages per call), which returns an
//! [`Outcome`]. A [`Pipeline`] connects the two: it receives only into free slots, renews leases while handlers work,
//! survives panics and queue outages, and drains in order on shutdown. Delivery is at least once; a handler whose effect
//! must happen once guards it itself.
//!
//! ```
//! use std::sync::Arc;
//! use pipeline::queue::memory::MemoryQueue;
//! use pipeline::{CancellationToken, Handler, Message, Outcome, Outgoing};
//! use pipeline::{Pipeline, PipelineOptions, Queue, QueueOptions};
//!
//! struct Greeter(CancellationToken);
//!
//! #[async_trait::async_trait]
//! impl Handler for Greeter {
//!     async fn handle(&self, message: &Message) -> Outcome {
//!         println!("hello, {}", String::from_utf8_lossy(&message.body));
//!         self.0.cancel(); // The example stops after one message.
//!         Outcome::Done
//!     }
//! }
//!
//! #[tokio::main]
//! async fn main() {
//!     let queue = Arc::new(MemoryQueue::new("greetings", QueueOptions::default()));
//!     queue.send(&[Outgoing::new("world")]).await;
//!
//!     let shutdown = CancellationToken::new();
//!     let handler = Arc::new(Greeter(shutdown.clone()));
//!     let summary = Pipeline::new(queue, PipelineOptions::default()).run(handler, shutdown).await;
//!     assert_eq!(summary.done, 1);
//! }
//! ```
//!
//! # Features
//!
//! `sqlite` (default) adds an embedded, durable queue and the group-committing database that it uses ([`sqlite`]). `sqs`
//! and `rabbitmq` add queues on these servers. `testing` adds the conformance suite that every backend passes
//! ([`testing`]).
//!
//! # Imports
//!
//! Imports point one way. A module imports only those to its right:
//!
//! ```text
//! testing → run → handler → queue::{memory, sqlite, sqs, rabbitmq} → queue (the contract) → message, retry
//!                                          └→ sqlite
//! ```
//!
//! `error_chain`, `lock` and `panic_text` are leaves that any module may use.

mod error_chain;
mod handler;
mod lock;
mod message;
mod panic_text;
pub mod queue;
mod retry;
mod run;
#[cfg(feature = "sqlite")]
pub mod sqlite;
#[cfg(feature = "testing")]
pub mod testing;

pub use handler::{BatchHandler, Handler, Outcome};
pub use message::{Attributes, DeadLetter, Message, MessageId, Outgoing, Receipt};
pub use queue::{BoxError, Capabilities, Depth, Queue, QueueError, QueueOptions};
pub use retry::RetryPolicy;
pub use run::{BatchOptions, Pipeline, PipelineOptions, Summary};
/// Stops a pipeline when cancelled. Re-exported from `tokio-util`.
pub use tokio_util::sync::CancellationToken;
