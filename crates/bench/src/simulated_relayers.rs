//! Simulated relayers in a process of their own: the only file of the benchmark that knows where they come from.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use relayer_sim::dev::{DevRelayer, DevRelayerOptions};

/// Number of relayers, on consecutive ports.
pub const RELAYERS: u16 = 3;
/// API key that the relayers expect.
pub const RELAYER_KEY: &str = "bench-relayers-need-no-secret-at-all";
/// Key that the relayers sign webhooks with.
pub const WEBHOOK_KEY: &str = "bench-webhooks-need-no-secret-at-all";
/// Pause between two states of a transaction: longer than any benchmark, so that no webhook competes with it.
const STEP: Duration = Duration::from_secs(3600);

/// The arguments of the hidden command `relayers`.
#[derive(Args)]
pub struct RelayerArgs {
    /// First of the consecutive ports
    #[arg(long)]
    port: u16,
    /// URL that receives webhooks
    #[arg(long, value_name = "URL")]
    webhook_url: String,
    /// Directory of the relayers' records
    #[arg(long, value_name = "DIR")]
    data_dir: PathBuf,
}

/// Serves until the process is killed.
pub async fn serve(args: RelayerArgs) -> anyhow::Result<()> {
    let shutdown = baton::cli::shutdown_on_signal()?;
    let mut relayers = Vec::new();
    for index in 0..RELAYERS {
        let options = DevRelayerOptions {
            index: usize::from(index) + 1,
            port: Some(args.port + index),
            hosts: Vec::new(),
            api_key: RELAYER_KEY.to_owned(),
            webhook_url: args.webhook_url.clone(),
            webhook_key: WEBHOOK_KEY.to_owned(),
            journal: args.data_dir.join(format!("relayer-{index}.jsonl")),
            seed: 0,
            step: STEP,
            chain: None,
        };
        relayers.push(DevRelayer::start(options).await?);
    }
    shutdown.cancelled().await;
    for relayer in relayers {
        relayer.stop().await;
    }
    Ok(())
}

/// Path of a relayer's transactions, by its number from 1.
pub fn transactions_path(number: usize) -> String {
    format!("/api/v1/relayers/dev-relayer-{number}/transactions")
}
