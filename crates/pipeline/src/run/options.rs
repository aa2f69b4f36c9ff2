//! The settings of a pipeline and of its batches, with their defaults.

use std::time::Duration;

use crate::retry::RetryPolicy;

/// How a pipeline runs. Every field has a default.
#[derive(Debug, Clone)]
pub struct PipelineOptions {
    /// How many messages are handled at once. 64 by default.
    pub concurrency: usize,
    /// How many messages one receive asks for, if as many slots are free. 64 by default, and 10 on SQS, which gives no
    /// more at once: a full answer can then be told from a queue that is running dry.
    pub receive_max: usize,
    /// How many receives run side by side while the queue has more than one can carry. 4 by default.
    pub receives_max: usize,
    /// How long a receive waits for a message. 20 seconds by default.
    pub receive_wait: Duration,
    /// How long handlers may go on after the shutdown signal. 120 seconds by default.
    pub drain_timeout: Duration,
    /// What follows a handler's panic, by the message's receive count: 3 attempts, from 5 seconds, by default.
    pub panic_retry: RetryPolicy,
    /// Pauses after failed receives. The attempts are not limited. From 0.1 to 5 seconds by default.
    pub receive_backoff: RetryPolicy,
}

impl Default for PipelineOptions {
    fn default() -> Self {
        Self {
            concurrency: 64,
            receive_max: 64,
            receives_max: 4,
            receive_wait: Duration::from_secs(20),
            drain_timeout: Duration::from_secs(120),
            panic_retry: RetryPolicy::default(),
            receive_backoff: RetryPolicy {
                attempts_max: u32::MAX,
                first_delay: Duration::from_millis(100),
                factor: 2.0,
                delay_max: Duration::from_secs(5),
            },
        }
    }
}

/// How messages are gathered for a [`BatchHandler`](crate::BatchHandler).
#[derive(Debug, Clone)]
pub struct BatchOptions {
    /// A batch of this many is handled at once. 1000 by default.
    pub size: usize,
    /// A batch is handled this long after its first message came, full or not. 1 second by default.
    pub timeout: Duration,
    /// How many batches are handled side by side. 2 by default.
    pub batchers: usize,
    /// How many messages are prepared side by side. 8 by default.
    pub processors: usize,
}

impl Default for BatchOptions {
    fn default() -> Self {
        Self { size: 1000, timeout: Duration::from_secs(1), batchers: 2, processors: 8 }
    }
}

impl BatchOptions {
    /// Enough to fill one batch while the others are being handled.
    pub(super) fn in_flight_max(&self) -> usize {
        self.size.max(1) * (self.batchers.max(1) + 1) + self.processors.max(1)
    }
}
