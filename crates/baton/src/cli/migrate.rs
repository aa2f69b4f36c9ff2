//! `migrate`: brings the schemas up to date. Services do the same at start; this command allows doing it before.

use std::process::ExitCode;

use crate::config::Config;
use crate::{relay, users};

/// Migrates both lanes' stores and prints where they are.
pub async fn run(config: &Config) -> anyhow::Result<ExitCode> {
    let relay = relay::engine::RelayEngine::open(config).await?.describe_store();
    println!("{relay} is up to date");
    let users = users::engine::UsersEngine::open(config).await?.described;
    println!("{users} is up to date");
    Ok(ExitCode::SUCCESS)
}
