//! What a queue on RabbitMQ is opened with.

use std::fmt;
use std::time::Duration;

use super::topology::Topology;
use crate::queue::QueueOptions;

/// How to reach the broker, and what the queue is like.
#[derive(Clone)]
pub struct RabbitMqOptions {
    /// `amqp://user:password@host:port/vhost`, or `amqps://`.
    pub url: String,
    /// The names on the broker.
    pub topology: Topology,
    /// Leases, retention and limits.
    pub queue: QueueOptions,
    /// How long any call may take, waits of a receive apart. 10 s by default.
    pub timeout: Duration,
    /// How often the two sides show that they are alive; twice this without a sign ends the connection. 10 s by default.
    pub heartbeat: Duration,
    /// How many messages this process may hold unsettled; a receive waits beyond it. 10 000 by default.
    pub held_max: usize,
    /// Attributes that travel as numbers, because other programs on the broker read them as such. None by default.
    pub numbers: Vec<String>,
}

impl RabbitMqOptions {
    /// The usual settings.
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
