//! The services that the binary can run as. Each requires other variables.

/// What the process runs as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// Both lanes, API and consumer, in one process.
    Serve,
    /// The relay API only.
    RelayApi,
    /// The relay consumer only.
    QueueConsumer,
    /// The users API only.
    UsersApi,
    /// The users consumer only.
    UsersConsumer,
    /// The delivery of client notifications only.
    Notifier,
    /// An operator command that works on the databases and queues; it needs no API or webhook key.
    Command,
}

impl Service {
    /// Whether it serves an API for clients.
    pub fn has_api(self) -> bool {
        matches!(self, Self::Serve | Self::RelayApi | Self::UsersApi)
    }

    /// Whether it works on the relay lane.
    pub fn has_relay(self) -> bool {
        matches!(self, Self::Serve | Self::RelayApi | Self::QueueConsumer | Self::Notifier)
    }

    /// Whether it submits transactions or answers clients about them, so that it needs the relayers.
    pub fn needs_relayers(self) -> bool {
        self.has_relay() && self != Self::Notifier
    }

    /// Whether it delivers client notifications.
    pub fn notifies(self) -> bool {
        matches!(self, Self::Serve | Self::QueueConsumer | Self::Notifier)
    }

    /// Whether it works on the users lane.
    pub fn has_users(self) -> bool {
        matches!(self, Self::Serve | Self::UsersApi | Self::UsersConsumer)
    }

    /// Whether it consumes messages.
    pub fn consumes(self) -> bool {
        matches!(self, Self::Serve | Self::QueueConsumer | Self::UsersConsumer)
    }

    /// The subcommand that starts it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Serve => "serve",
            Self::RelayApi => "relay-api",
            Self::QueueConsumer => "queue-consumer",
            Self::UsersApi => "users-api",
            Self::UsersConsumer => "users-consumer",
            Self::Notifier => "notifier",
            Self::Command => "command",
        }
    }

    /// The default port. They differ, so that all services can run on one machine.
    pub(super) fn port(self) -> u16 {
        match self {
            Self::QueueConsumer => 3001,
            Self::UsersApi => 3002,
            Self::UsersConsumer => 3003,
            Self::Notifier => 3004,
            Self::Serve | Self::RelayApi | Self::Command => 3000,
        }
    }
}
