//! The settings of a pipeline and of its batches, with their defaults.

use std::time::Duration;

use crate::retry::RetryPolicy;

/// Limits and time limits of a pipeline. Every field has a default.
#[derive(Debug, Clone)]
pub struct PipelineOptions {
    /// Messages handled at the same time. 64 by default.
    pub concurrency: usize,
    /// Messages that one receive asks for, if as many slots are free. 64 by default. On SQS at most 10, its own limit, so
    /// that a full answer means that the queue probably holds more.
    pub receive_max: usize,
    /// Receives in flight at the same time while each comes back full. 4 by default.
    pub concurrent_receives_max: usize,
    /// How long a receive waits for a message. 20 seconds by default.
    pub receive_wait: Duration,
    /// How long handlers may continue after the shutdown signal. 120 seconds by default.
    pub drain_timeout: Duration,
    /// Retries after a handler's panic, counted by the message's receives. 3 attempts, first delay 5 seconds, by default.
    pub panic_retry: RetryPolicy,
    /// Pauses after failed receives, without a limit of attempts. 0.1 to 5 seconds by default.
    pub receive_backoff: RetryPolicy,
}

impl Default for PipelineOptions {
    fn default() -> Self {
        Self {
            concurrency: 64,
            receive_max: 64,
            concurrent_receives_max: 4,
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

/// How messages are collected for a [`BatchHandler`](crate::BatchHandler).
#[derive(Debug, Clone)]
pub struct BatchOptions {
    /// Messages in a full batch, which is handled immediately. 1000 by default.
    pub size: usize,
    /// A batch that is not full is handled this long after its first message arrived. 1 second by default.
    pub timeout: Duration,
    /// Batches handled at the same time. 2 by default.
    pub batchers: usize,
    /// Messages prepared at the same time. 8 by default.
    pub processors: usize,
}

impl Default for BatchOptions {
    fn default() -> Self {
        Self { size: 1000, timeout: Duration::from_secs(1), batchers: 2, processors: 8 }
    }
}

impl BatchOptions {
    /// Enough messages to fill one batch while `batchers` others are being handled.
    pub(super) fn in_flight_max(&self) -> usize {
        self.size.max(1) * (self.batchers.max(1) + 1) + self.processors.max(1)
    }
}
