//! The settings of a queue on RabbitMQ.

use std::fmt;
use std::time::Duration;

use super::topology::Topology;
use crate::queue::QueueOptions;

/// The broker, the names on it, and the limits of the queue.
#[derive(Clone)]
pub struct RabbitMqOptions {
    /// `amqp://user:password@host:port/vhost`, or `amqps://`.
    pub url: String,
    /// The exchanges and queues on the broker.
    pub topology: Topology,
    /// Lease, retention and limits.
    pub queue: QueueOptions,
    /// Time limit of a call, not counting the wait of a receive. 10 s by default.
    pub timeout: Duration,
    /// AMQP heartbeat interval; the connection ends after two missed heartbeats. 10 s by default.
    pub heartbeat: Duration,
    /// Unsettled messages that this process may hold; at the limit receives wait. 10 000 by default.
    pub held_max: usize,
    /// Attributes that are sent as AMQP integers, because other programs on the broker read them so. None by default.
    pub numbers: Vec<String>,
}

impl RabbitMqOptions {
    /// Options with the default time limits.
    pub fn new(url: impl Into<String>, topology: Topology, queue: QueueOptions) -> Self {
        Self {
            url: url.into(),
            topology,
            queue,
            timeout: Duration::from_secs(10),
            heartbeat: Duration::from_secs(10),
            held_max: 10_000,
            numbers: Vec::new(),
        }
    }
}

impl fmt::Debug for RabbitMqOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL holds a password.
        let mut show = f.debug_struct("RabbitMqOptions");
        show.field("topology", &self.topology).field("queue", &self.queue).field("timeout", &self.timeout);
        show.field("heartbeat", &self.heartbeat).field("held_max", &self.held_max).finish_non_exhaustive()
    }
}
