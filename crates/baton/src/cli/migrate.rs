//! `migrate`: brings the schemas up to date. Services do the same at start; this command allows doing it before.

use std::process::ExitCode;

use super::output::say;
use crate::config::Config;
use crate::{relay, users};

/// Migrates both lanes' stores and prints where they are.
pub async fn run(config: &Config) -> anyhow::Result<ExitCode> {
    let relay = relay::engine::RelayEngine::open(config).await?;
    relay.close().await;
    say!("{} is up to date", relay.describe_store());
    let users = users::engine::UsersEngine::open(config).await?;
    users.close().await;
    say!("{} is up to date", users.described);
    Ok(ExitCode::SUCCESS)
}
