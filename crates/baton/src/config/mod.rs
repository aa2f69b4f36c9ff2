//! The configuration, read once from the environment. No other module reads environment variables.
//!
//! [`variables`] lists every variable; [`Config::from_vars`] reads them through a lookup function, so tests pass a map, and
//! reports every problem at once. [`render`] writes the table as `.env.example`, help and documentation. Without
//! any URL, databases and queues are embedded, under `BATON_DATA_DIR`.

mod chain;
mod definition;
mod http;
mod log;
mod notify;
mod placeholder;
mod queue;
mod reader;
mod relay;
pub mod render;
mod routing;
mod secret;
mod service;
#[cfg(test)]
mod tests;
mod timings;
mod users;
pub mod variables;

use std::path::PathBuf;

pub use chain::{ChainConfig, ForwarderConfig, GaslessPolicy};
pub use definition::{Kind, Readers, Variable};
pub use http::{ApiKey, ConnectionLimits, HttpConfig};
pub use log::LogConfig;
pub use notify::{NotifyConfig, secret_bytes};
pub use queue::{EngineConfig, QueueEngine, SqsConfig, SqsEndpoint};
use reader::Vars;
pub use relay::{RelayConfig, RelayMode, WebhookKey};
pub use routing::RoutingSettings;
pub use secret::Secret;
pub use service::Service;
pub use timings::Timings;
pub use users::UsersConfig;

/// The settings of one process.
#[derive(Debug, Clone)]
pub struct Config {
    /// `BATON_DATA_DIR`: directory of the embedded engine's files.
    pub data_dir: PathBuf,
    /// The HTTP server and its API keys.
    pub http: HttpConfig,
    /// The relay lane's database, queue and cache.
    pub engine: EngineConfig,
    /// The relay lane.
    pub relay: RelayConfig,
    /// Client notifications.
    pub notify: NotifyConfig,
    /// The users lane, with its database and queue.
    pub users: UsersConfig,
    /// Format and level of the logs.
    pub log: LogConfig,
    /// Variables that are set but no longer read, each with what applies instead; logged at start.
    pub warnings: Vec<String>,
}

/// Every problem of the environment, one line each, beginning with the variable's name.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.iter().map(|problem| format!("{problem}\n")).collect::<String>())]
pub struct ConfigError(pub Vec<String>);

impl Config {
    /// Reads the process environment.
    pub fn from_env(service: Service) -> Result<Self, ConfigError> {
        Self::from_vars(service, |name| std::env::var(name).ok())
    }

    /// Reads the process environment for `dev`. A value in `fixed` overrides it; one in `defaults` replaces the table's
    /// default. API keys may be short, since `dev` prints its own.
    pub fn from_env_between(
        service: Service,
        fixed: &[(&str, String)],
        defaults: &[(&str, &str)],
    ) -> Result<Self, ConfigError> {
        let lookup = |name: &str| {
            let set = fixed.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone());
            set.or_else(|| std::env::var(name).ok().filter(|value| !value.trim().is_empty()))
                .or_else(|| defaults.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned()))
        };
        let mut vars = Vars::new(&lookup);
        vars.short_keys = true;
        Self::read(service, vars)
    }

    /// Reads the variables through `lookup` and reports every problem at once.
    pub fn from_vars(service: Service, lookup: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        Self::read(service, Vars::new(&lookup))
    }

    fn read(service: Service, mut vars: Vars<'_>) -> Result<Self, ConfigError> {
        let engine = vars.engine();
        let config = Self {
            data_dir: vars.text_or_default("BATON_DATA_DIR").into(),
            http: vars.http(service),
            relay: vars.relay(service, &engine.relay_queue),
            engine,
            notify: vars.notify(service),
            users: vars.users(),
            log: vars.log(),
            warnings: vars.removed(),
        };
        let problems = vars.into_problems();
        if problems.is_empty() { Ok(config) } else { Err(ConfigError(problems)) }
    }
}
