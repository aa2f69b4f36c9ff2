//! `migrate`: brings the schema up to date. Services do the same at start; this is for doing it before.

use std::process::ExitCode;

use crate::config::Config;
use crate::{relay, users};

/// Migrates and says what is there now.
pub async fn run(config: &Config) -> anyhow::Result<ExitCode> {
    let relay = relay::engine::Engine::open(config).await?.describe_store();
    println!("{relay} is up to date");
    let users = users::engine::UsersEngine::open(config).await?.described;
    println!("{users} is up to date");
    Ok(ExitCode::SUCCESS)
}
