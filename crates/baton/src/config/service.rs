//! The services that the binary can run as, which differ in what they need from the environment.

/// Which service is starting: they need different things.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Service {
    /// Both lanes, API and consumer, in one process.
    Serve,
    /// The relay API alone.
    RelayApi,
    /// The relay consumer alone.
    QueueConsumer,
    /// The users API alone.
    UsersApi,
    /// The users consumer alone.
    UsersConsumer,
    /// An operator's command on the data: needs no keys.
    Command,
}

impl Service {
    /// Whether clients call it.
    pub fn has_api(self) -> bool {
        matches!(self, Self::Serve | Self::RelayApi | Self::UsersApi)
    }

    /// Whether it works on the relay lane.
    pub fn has_relay(self) -> bool {
        matches!(self, Self::Serve | Self::RelayApi | Self::QueueConsumer)
    }

    /// Whether it works on the users lane.
    pub fn has_users(self) -> bool {
        matches!(self, Self::Serve | Self::UsersApi | Self::UsersConsumer)
    }

    /// Whether it takes messages.
    pub fn consumes(self) -> bool {
        matches!(self, Self::Serve | Self::QueueConsumer | Self::UsersConsumer)
    }

    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Serve => "serve",
            Self::RelayApi => "relay-api",
            Self::QueueConsumer => "queue-consumer",
            Self::UsersApi => "users-api",
            Self::UsersConsumer => "users-consumer",
            Self::Command => "command",
        }
    }

    /// Where it listens unless told otherwise: all of them fit on one machine.
    pub(super) fn port(self) -> u16 {
        match self {
            Self::QueueConsumer => 3001,
            Self::UsersApi => 3002,
            Self::UsersConsumer => 3003,
            Self::Serve | Self::RelayApi | Self::Command => 3000,
        }
    }
}
