//! `tx show|watch|unknown|resolve`: transactions, for operators. The commands open the store and queue of the
//! configuration themselves, so no service needs to run.

use std::process::ExitCode;
use std::time::Duration;

use clap::Subcommand;
use uuid::Uuid;

use super::output::{complain, say};
use crate::config::Config;
use crate::relay::lane::RelayLane;
use crate::relay::state::transaction::{Transaction, TransactionId};
use crate::relay::store::{Filter, StoreError};
use crate::relay::update::guarded_store::{GuardedStore, Updated};
use crate::relay::update::view;

/// A command on transactions.
#[derive(Subcommand)]
pub enum TxCommand {
    /// Show a transaction and its timeline
    Show {
        /// Id of the transaction
        #[arg(value_parser = parse_id)]
        id: Uuid,
        /// Print the status as JSON, as the API returns it
        #[arg(long)]
        json: bool,
    },
    /// Print each step of a transaction until it is final; the exit code says how it ended
    ///
    /// Exit code 0: it succeeded. 1: it failed, or it cannot be read. 124: it was not final after --timeout and may still end
    /// either way.
    Watch {
        /// Id of the transaction
        #[arg(value_parser = parse_id)]
        id: Uuid,
        /// Maximum time to wait
        #[arg(long, value_name = "SECONDS", default_value_t = 600)]
        timeout: u64,
    },
    /// List transactions whose outcome is unknown or whose relayer has forgotten them
    Unknown,
    /// Resolve an unknown outcome by hand, after checking the relayer and the chain
    #[command(group = clap::ArgGroup::new("how").required(true))]
    Resolve {
        /// Id of the transaction
        #[arg(value_parser = parse_id)]
        id: Uuid,
        /// The submission did not take effect: send it again. If it did take effect, this pays twice
        #[arg(long, group = "how")]
        resend: bool,
        /// Give the transaction up: mark it failed
        #[arg(long, group = "how")]
        fail: bool,
    },
}

/// Runs a command.
pub async fn run(config: &Config, command: TxCommand) -> anyhow::Result<ExitCode> {
    let lane = RelayLane::open_existing(config).await?;
    let done = run_on(&lane.guarded, command).await;
    lane.close().await;
    done
}

async fn run_on(guarded: &GuardedStore, command: TxCommand) -> anyhow::Result<ExitCode> {
    match command {
        TxCommand::Show { id, json } => {
            let row = find(guarded, id).await?;
            if json {
                say!("{:#}", view::show(&row));
            } else {
                show(guarded, &row).await?;
            }
            Ok(ExitCode::SUCCESS)
        }
        TxCommand::Watch { id, timeout } => watch(guarded, id, Duration::from_secs(timeout)).await,
        TxCommand::Unknown => {
            let filter = Filter { outcome_unknown: true, ..Filter::default() };
            let mut before = None;
            let mut count = 0;
            loop {
                let rows = guarded.store.list(&filter, before, 200).await?;
                for row in &rows {
                    say!("{}  {}  {}", row.id, row.status, describe_unknown_outcome(row));
                }
                count += rows.len();
                match rows.last() {
                    Some(last) => before = Some(last.id),
                    None => break,
                }
            }
            say!("{count} transactions with unknown outcome");
            Ok(ExitCode::SUCCESS)
        }
        TxCommand::Resolve { id, resend, .. } => resolve(guarded, id, resend).await,
    }
}

fn parse_id(text: &str) -> Result<Uuid, String> {
    Uuid::parse_str(text).map_err(|_| "must be a UUID, as it was given in the 202".to_owned())
}

async fn find(guarded: &GuardedStore, id: Uuid) -> anyhow::Result<Transaction> {
    let row = guarded.store.get(TransactionId(id)).await?;
    row.ok_or_else(|| anyhow::anyhow!("there is no transaction {id} in this store (BATON_DATA_DIR or DATABASE_URL)"))
}

async fn show(guarded: &GuardedStore, row: &Transaction) -> anyhow::Result<()> {
    say!("transaction  {}", row.id);
    say!("status       {}{}", row.status, if row.outcome_unknown() { " (outcome unknown)" } else { "" });
    say!("to           {}", row.call.to.to_checksum(None));
    say!("value        {} wei", row.call.value);
    if let Some(forward) = &row.forward {
        let request = &forward.gasless.request;
        say!("signer       {}, nonce {}, deadline {}", request.from, request.nonce, request.deadline);
        say!("calls        {} by the forwarder above", request.to);
    }
    say!("key          {}", row.api_key);
    if let Some(hash) = &row.hash {
        say!("hash         {hash}");
    }
    if let Some(binding) = &row.binding {
        say!("relayer      {} as {}", binding.relayer, binding.tx_id);
    }
    if let Some(claim) = &row.claim {
        say!("claim        {} since {} by {}", claim.relayer, claim.at, claim.consumer);
    }
    if let Some(error) = &row.error_message {
        say!("error        {error}");
    }
    say!("timeline");
    say!("  {}  accepted  stored and queued", row.created_at);
    for entry in guarded.store.timeline(row.id).await? {
        say!("  {}  {}  {}", entry.at, entry.action, entry.detail);
    }
    Ok(())
}

fn describe_unknown_outcome(row: &Transaction) -> String {
    if let Some(claim) = &row.claim {
        let reason = claim.unknown.as_ref().map_or("", |unknown| unknown.reason.as_str());
        return format!("at {} since {}: {reason}", claim.relayer, claim.at);
    }
    match &row.binding {
        // It may still execute it.
        Some(binding) if row.is_only_silent() => {
            let since = row.silent_since().map(|since| format!(" since {since}")).unwrap_or_default();
            format!("{} gives no usable answer about {}{since}", binding.relayer, binding.tx_id)
        }
        // The relayer has reported an end, and the chain does not decide it.
        Some(binding) if row.relayer_says.as_ref().is_some_and(|says| says.get("status").is_some()) => {
            let said = row.error_message.as_deref().unwrap_or("the chain has not confirmed what the relayer says");
            format!("at {} as {}: {said}", binding.relayer, binding.tx_id)
        }
        Some(binding) => format!("{} no longer knows {}", binding.relayer, binding.tx_id),
        None => String::new(),
    }
}

/// Exit code of a `watch` whose time is over, as of the command `timeout`: the transaction may still end either way.
const TIMED_OUT: u8 = 124;

/// Prints each new step until the transaction is final.
async fn watch(guarded: &GuardedStore, id: Uuid, timeout: Duration) -> anyhow::Result<ExitCode> {
    let deadline = tokio::time::Instant::now() + timeout;
    let mut seen = 0;
    let mut row = find(guarded, id).await?;
    say!("{}  accepted", row.created_at);
    loop {
        // A store that is away for a moment says nothing about the transaction.
        let read = async {
            let found = guarded.store.get(row.id).await?;
            Ok::<_, StoreError>((found, guarded.store.timeline(row.id).await?))
        };
        let steps = match read.await {
            Ok((found, steps)) => {
                row = found.unwrap_or(row);
                steps
            }
            Err(failure) if failure.is_transient() => Vec::new(),
            Err(failure) => return Err(failure.into()),
        };
        for entry in steps {
            if entry.seq > seen {
                say!("{}  {}  {}", entry.at, entry.action, entry.detail);
                seen = entry.seq;
            }
        }
        if row.status.is_final() {
            let hash = row.hash.as_deref().unwrap_or("no hash");
            say!("final: {} ({hash})", row.status);
            let failed = row.status == crate::relay::state::transaction::Status::Failed;
            return Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS });
        }
        if tokio::time::Instant::now() >= deadline {
            complain(format_args!("baton: {id} is still {} after {} s", row.status, timeout.as_secs()));
            return Ok(ExitCode::from(TIMED_OUT));
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn resolve(guarded: &GuardedStore, id: Uuid, resend: bool) -> anyhow::Result<ExitCode> {
    let now = guarded.clock.now();
    let decide = |row: &Transaction| {
        if resend { row.resolve_resend(now, &guarded.timings) } else { row.resolve_fail(now) }
    };
    match guarded.update(TransactionId(id), decide).await? {
        Updated::Missing => {
            anyhow::bail!("there is no transaction {id} in this store (BATON_DATA_DIR or DATABASE_URL)")
        }
        Updated::Refused(refused, row) => anyhow::bail!("{id} is {} and cannot be resolved: {refused}", row.status),
        Updated::Moved(row) => {
            if resend {
                guarded.publish_again(&row, Duration::ZERO).await;
                say!("{id} is queued again");
            } else {
                say!("{id} is marked failed");
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}
