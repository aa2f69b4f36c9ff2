//! `migrate`: brings the schema up to date. Services do the same at start; this is for doing it before.

use std::process::ExitCode;

use crate::config::Config;
use crate::relay::engine::Engine;

/// Migrates and says what is there now.
pub async fn run(config: &Config) -> anyhow::Result<ExitCode> {
    let what = Engine::open(config).await?.describe_store();
    println!("{what} is up to date");
    Ok(ExitCode::SUCCESS)
}
