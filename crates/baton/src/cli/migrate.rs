//! `migrate`: brings the schema up to date. Services do the same at start; this is for doing it before.

use std::process::ExitCode;

use super::service::open_database;
use crate::config::Config;
use crate::relay::lane::{Lane, database_path};

/// Migrates and says what is there now.
pub async fn run(config: &Config) -> anyhow::Result<ExitCode> {
    let database = open_database(config)?;
    Lane::open(config, &database).await?;
    println!("{} is up to date", database_path(config).display());
    Ok(ExitCode::SUCCESS)
}
