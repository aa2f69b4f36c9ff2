//! One row of the table of environment variables: name, type, default, readers and description.

use super::Service;

/// One environment variable.
#[derive(Debug, Clone, Copy)]
pub struct Variable {
    /// As it is set in the environment.
    pub name: &'static str,
    /// The text that it takes.
    pub kind: Kind,
    /// The default as text; empty if there is none.
    pub default: &'static str,
    /// The services that it affects.
    pub read_by: Readers,
    /// Whether those services refuse to start without it.
    pub required: bool,
    /// Whether it holds, or may hold, a key or password.
    pub secret: bool,
    /// Set by tests to run faster; not supported in production and left out of the documentation.
    pub hidden: bool,
    /// One line for operators, without a full stop.
    pub about: &'static str,
}

/// The text that a variable takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Any text.
    Text,
    /// Texts separated by commas.
    List,
    /// A directory.
    Path,
    /// A URL of one of these schemes.
    Url(&'static [&'static str]),
    /// An IPv4 or IPv6 address.
    IpAddress,
    /// A TCP port.
    Port,
    /// A whole number of at least 1.
    Count,
    /// A whole number of at least 0.
    Number,
    /// A duration in milliseconds, at least 1.
    Millis,
    /// `true` or `false`.
    Flag,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// An amount in wei.
    Wei,
    /// An Ethereum address.
    Address,
}

impl Kind {
    /// The rule that a refused value breaks, worded to follow the variable's name.
    pub fn rule(self) -> String {
        match self {
            Self::Text | Self::List | Self::Path => "must be text".to_owned(),
            Self::Url(schemes) => format!("must be a URL that begins with {}://", schemes.join(":// or ")),
            Self::IpAddress => "must be an IP address, or a name that this machine resolves to one".to_owned(),
            Self::Port => "must be a port number from 0 to 65535".to_owned(),
            Self::Count => "must be a whole number of at least 1".to_owned(),
            Self::Number => "must be a whole number of at least 0".to_owned(),
            Self::Millis => "must be a whole number of milliseconds, at least 1".to_owned(),
            Self::Flag => "must be true or false".to_owned(),
            Self::Choice(words) => format!("must be {}", any_of(words)),
            Self::Wei => "must be a whole number of wei".to_owned(),
            Self::Address => crate::evm::ADDRESS_RULE.to_owned(),
        }
    }

    /// The name of the type or unit in the documentation.
    pub fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::List => "list",
            Self::Path => "path",
            Self::Url(_) => "URL",
            Self::IpAddress => "IP address or name",
            Self::Port => "port",
            Self::Count | Self::Number => "number",
            Self::Millis => "ms",
            Self::Flag => "true, false",
            Self::Choice(_) => "choice",
            Self::Wei => "wei",
            Self::Address => "address",
        }
    }
}

fn any_of(words: &[&str]) -> String {
    match words {
        [others @ .., last] if !others.is_empty() => format!("{} or {last}", others.join(", ")),
        _ => words.concat(),
    }
}

/// The services that a variable affects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readers {
    /// Every service.
    All,
    /// Every service with an API for clients.
    Apis,
    /// Every service that consumes messages.
    Consumers,
    /// `serve`, `relay-api`, `queue-consumer` and `notifier`.
    Relay,
    /// `serve`, `relay-api` and `queue-consumer`: those that call relayers.
    RelayerCallers,
    /// `serve` and `relay-api`.
    RelayApi,
    /// `serve` and `queue-consumer`.
    RelayConsumer,
    /// Every service that delivers notifications.
    Notifiers,
    /// `serve`, `users-api` and `users-consumer`.
    Users,
    /// `serve` and `users-consumer`.
    UsersConsumer,
}

impl Readers {
    /// Whether this service is one of them.
    pub fn include(self, service: Service) -> bool {
        match self {
            Self::All => true,
            Self::Apis => service.has_api(),
            Self::Consumers => service.consumes(),
            Self::Relay => service.has_relay(),
            Self::RelayerCallers => service.needs_relayers(),
            Self::RelayApi => service.has_relay() && service.has_api(),
            Self::RelayConsumer => service.has_relay() && service.consumes(),
            Self::Notifiers => service.notifies(),
            Self::Users => service.has_users(),
            Self::UsersConsumer => service.has_users() && service.consumes(),
        }
    }

    /// Their name in the documentation.
    pub fn name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Apis => "APIs",
            Self::Consumers => "consumers",
            Self::Relay => "relay",
            Self::RelayerCallers => "relay API, relay consumer",
            Self::RelayApi => "relay API",
            Self::RelayConsumer => "relay consumer",
            Self::Notifiers => "notifiers",
            Self::Users => "users",
            Self::UsersConsumer => "users consumer",
        }
    }
}

/// A table row: optional, not secret, shown to operators.
pub(super) const fn var(
    name: &'static str,
    kind: Kind,
    default: &'static str,
    read_by: Readers,
    about: &'static str,
) -> Variable {
    Variable { name, kind, default, read_by, required: false, secret: false, hidden: false, about }
}

impl Variable {
    /// The services that read it refuse to start without it.
    pub(super) const fn required(mut self) -> Self {
        self.required = true;
        self
    }

    /// Holds, or may hold, a key or password.
    pub(super) const fn secret(mut self) -> Self {
        self.secret = true;
        self
    }

    /// For tests only.
    pub(super) const fn hidden(mut self) -> Self {
        self.hidden = true;
        self
    }
}
