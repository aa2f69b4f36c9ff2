//! Queue, handler, settle: a small library for work that must not be lost.
//!
//! ```text
//!              send                    receive                 verdict
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
//! A [`Queue`] keeps messages and leases them out; backends are in [`queue`]. You write a [`Handler`] (one message at
//! a time, many at once) or a [`BatchHandler`] (many together), which answers with an [`Outcome`]. A [`Pipeline`] runs
//! the two: it takes no more than it has room for, keeps leases while handlers work, survives their panics and the
//! queue's outages, and drains in order on shutdown. Delivery is at least once; what must happen once is the handler's
//! to guard.
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
//!         self.0.cancel(); // One is enough for an example.
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
//! With the feature `sqlite` (on by default) there is an embedded, durable queue and the group-committing database
//! under it ([`sqlite`]); with `sqs` and `rabbitmq`, queues on those; with `testing`, the suite that every backend
//! passes ([`testing`]).

mod handler;
mod message;
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
/// What stops a pipeline; from `tokio-util`.
pub use tokio_util::sync::CancellationToken;
