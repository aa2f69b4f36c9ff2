//! `config env-example|docs`: writes the files that list the environment variables. For developers, hence hidden.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Subcommand;

use super::output;
use crate::config::render;

/// The files that the table of variables feeds.
#[derive(Subcommand)]
pub enum ConfigCommand {
    /// Print the text of .env.example
    EnvExample,
    /// Rewrite the tables of the documentation page in place
    Docs {
        /// The page
        #[arg(default_value = "docs/operations/configuration.md")]
        page: PathBuf,
    },
}

/// Writes one of them.
pub fn run(command: ConfigCommand) -> anyhow::Result<ExitCode> {
    match command {
        ConfigCommand::EnvExample => output::print(format_args!("{}", render::env_example()))?,
        ConfigCommand::Docs { page } => {
            let shown = page.display();
            let current = std::fs::read_to_string(&page).with_context(|| format!("cannot read {shown}"))?;
            let new = render::page(&current).map_err(|why| anyhow::anyhow!("{shown}: {why}"))?;
            std::fs::write(&page, new).with_context(|| format!("cannot write {shown}"))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
