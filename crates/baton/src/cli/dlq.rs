//! `dlq list|show|replay|drop`: the dead letters of a lane. The lanes differ only in their
//! [`DeadLetterLane`](crate::dead_letters::DeadLetterLane).

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};

use super::output::{OutputError, complain, say};
use crate::config::Config;
use crate::dead_letters::{self, DeadLetterEntry, DeadLetterLane, DeadLetterPlace, Replayed, Selection};
use crate::relay::lane::RelayLane;
use crate::relay::reconcile::dead_letters::RelayDeadLetters;
use crate::timestamp::Timestamp;
use crate::users::dead_letters::UsersDeadLetters;
use crate::users::lane::UsersLane;

/// Maximum number of dead letters moved at once.
const CHUNK_MAX: usize = 100;
/// The same for a queue that reads all of its dead letters for each move: a few readings, and each move is still far from the
/// queue's time limit.
const CHUNK_MAX_PER_READING: usize = 1000;

/// Whose dead letters.
#[derive(Clone, Copy, ValueEnum)]
pub enum LaneName {
    /// Transactions
    Relay,
    /// Users
    Users,
}

/// What to do with dead letters.
#[derive(Subcommand)]
pub enum DlqCommand {
    /// List dead letters, oldest first
    List {
        #[command(flatten)]
        which: Which,
    },
    /// Show one dead letter in full, with its body
    Show {
        /// Message id, transaction id or user id
        id: String,
    },
    /// Queue the selected dead letters again
    Replay {
        #[command(flatten)]
        which: Which,
        /// Take every dead letter (required when no id, --reason or --max is given)
        #[arg(long)]
        all: bool,
        /// Only print what would be replayed
        #[arg(long)]
        dry_run: bool,
        /// Maximum per second
        #[arg(long, value_name = "N")]
        rate: Option<u32>,
    },
    /// Delete the selected dead letters; their transactions stay failed
    Drop {
        #[command(flatten)]
        which: Which,
        /// Take every dead letter (required when no id, --reason or --max is given)
        #[arg(long)]
        all: bool,
        /// Only print what would be dropped
        #[arg(long)]
        dry_run: bool,
    },
}

/// Which dead letters.
#[derive(Args)]
pub struct Which {
    /// Message ids, transaction ids or user ids
    ids: Vec<String>,
    /// Only dead letters whose reason contains TEXT
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// Maximum number of dead letters
    #[arg(long, value_name = "N")]
    max: Option<usize>,
}

impl Which {
    fn selection(self) -> Selection {
        Selection { ids: self.ids, reason: self.reason, max: self.max }
    }

    /// An effect on every dead letter needs `--all`: without any condition it is more likely a slip.
    fn limited_or(self, all: bool) -> anyhow::Result<Selection> {
        let limited = !self.ids.is_empty() || self.reason.is_some() || self.max.is_some();
        anyhow::ensure!(
            all || limited,
            "nothing selected: give ids, --reason or --max, or --all for every dead letter"
        );
        Ok(self.selection())
    }
}

/// Runs one command on one lane.
pub async fn run(config: &Config, lane: LaneName, command: DlqCommand) -> anyhow::Result<ExitCode> {
    match lane {
        LaneName::Relay => {
            let lane = RelayLane::open_existing(config).await?;
            let done = run_on(&RelayDeadLetters { guarded: Arc::clone(&lane.guarded) }, command).await;
            lane.close().await;
            done
        }
        LaneName::Users => {
            let lane = UsersLane::open_existing(config).await?;
            let (store, queue) = (Arc::clone(&lane.store), Arc::clone(&lane.queue));
            let done = run_on(&UsersDeadLetters { store, queue }, command).await;
            lane.close().await;
            done
        }
    }
}

async fn run_on(lane: &dyn DeadLetterLane, command: DlqCommand) -> anyhow::Result<ExitCode> {
    match command {
        DlqCommand::List { which } => list(lane, &which.selection()).await,
        DlqCommand::Show { id } => show(lane, id).await,
        DlqCommand::Replay { which, all, dry_run, rate } => {
            let selection = which.limited_or(all)?;
            let entries = dead_letters::select(lane, &selection).await?;
            let code = if dry_run { would(lane, "replay", &entries)? } else { replay(lane, &entries, rate).await? };
            all_found(lane, &selection, &entries).map(|()| code)
        }
        DlqCommand::Drop { which, all, dry_run } => {
            let selection = which.limited_or(all)?;
            let entries = dead_letters::select(lane, &selection).await?;
            let code = if dry_run { would(lane, "drop", &entries)? } else { discard(lane, &entries).await? };
            all_found(lane, &selection, &entries).map(|()| code)
        }
    }
}

async fn list(lane: &dyn DeadLetterLane, selection: &Selection) -> anyhow::Result<ExitCode> {
    let entries = dead_letters::select(lane, selection).await?;
    for entry in &entries {
        say!("{}", line(lane, entry));
    }
    say!("{}", count(entries.len()));
    Ok(ExitCode::SUCCESS)
}

async fn show(lane: &dyn DeadLetterLane, id: String) -> anyhow::Result<ExitCode> {
    let selection = Selection { ids: vec![id.clone()], ..Selection::default() };
    let entries = dead_letters::select(lane, &selection).await?;
    anyhow::ensure!(!entries.is_empty(), "there is no dead letter {id}; `baton dlq list` shows them (see --lane)");
    for entry in &entries {
        print_whole(lane, entry)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// An error that names the ids without a dead letter; the others have been dealt with. A limit leaves the rest open.
fn all_found(lane: &dyn DeadLetterLane, selection: &Selection, entries: &[DeadLetterEntry]) -> anyhow::Result<()> {
    if selection.max.is_some_and(|max| entries.len() >= max) {
        return Ok(());
    }
    let is_of = |id: &String, entry: &DeadLetterEntry| {
        *id == entry.message_id.0 || Some(id) == lane.subject_id(&entry.body).as_ref()
    };
    let missing: Vec<_> =
        selection.ids.iter().filter(|id| !entries.iter().any(|entry| is_of(id, entry))).map(String::as_str).collect();
    let with_reason = if selection.reason.is_some() { " with this reason" } else { "" };
    anyhow::ensure!(
        missing.is_empty(),
        "there is no dead letter {}{with_reason}; `baton dlq list` shows them (see --lane)",
        missing.join(", ")
    );
    Ok(())
}

/// Replays in chunks, with a pause after each if there is a rate.
async fn replay(lane: &dyn DeadLetterLane, entries: &[DeadLetterEntry], rate: Option<u32>) -> anyhow::Result<ExitCode> {
    let rate = rate.filter(|rate| *rate > 0);
    let (mut queued, mut leftover, mut refused) = (0, 0, 0);
    for chunk in entries.chunks(chunk_size(dead_letters_per_read(lane), rate)) {
        for (entry, replayed) in chunk.iter().zip(dead_letters::replay(lane, chunk).await?) {
            match replayed {
                Replayed::Queued => queued += 1,
                Replayed::Leftover => leftover += 1,
                Replayed::Refused(why) => {
                    refused += 1;
                    complain(format_args!("not replayed: {}: {why}", entry.message_id));
                }
            }
        }
        let done = queued + leftover + refused;
        progress(done, entries.len());
        if let Some(rate) = rate.filter(|_| done < entries.len()) {
            tokio::time::sleep(pause(chunk.len(), rate)).await;
        }
    }
    if leftover > 0 {
        say!("{leftover} were replayed before; removed their leftover copies");
    }
    say!("{queued} replayed, {refused} refused");
    Ok(if refused == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn discard(lane: &dyn DeadLetterLane, entries: &[DeadLetterEntry]) -> anyhow::Result<ExitCode> {
    let mut done = 0;
    for chunk in entries.chunks(chunk_size(dead_letters_per_read(lane), None)) {
        dead_letters::discard(lane, chunk).await?;
        done += chunk.len();
        progress(done, entries.len());
    }
    say!("{} dropped", entries.len());
    Ok(ExitCode::SUCCESS)
}

fn dead_letters_per_read(lane: &dyn DeadLetterLane) -> usize {
    lane.queue().capabilities().dead_letters_per_read
}

/// A quarter of a second's worth, so that a rate is kept smoothly, and the maximum without a rate.
fn chunk_size(dead_letters_per_read: usize, rate: Option<u32>) -> usize {
    let max = if dead_letters_per_read > CHUNK_MAX { CHUNK_MAX_PER_READING } else { CHUNK_MAX };
    rate.map_or(max, |rate| (rate as usize / 4).clamp(1, max))
}

/// The time that a chunk takes at this rate.
fn pause(chunk: usize, rate: u32) -> Duration {
    Duration::from_secs(chunk as u64) / rate
}

fn would(lane: &dyn DeadLetterLane, what: &str, entries: &[DeadLetterEntry]) -> Result<ExitCode, OutputError> {
    for entry in entries {
        say!("would {what} {}", line(lane, entry));
    }
    say!("{}", count(entries.len()));
    Ok(ExitCode::SUCCESS)
}

fn count(entries: usize) -> String {
    if entries == 1 { "1 dead letter".to_owned() } else { format!("{entries} dead letters") }
}

/// One line of the list. The place is printed only where there is more than one.
fn line(lane: &dyn DeadLetterLane, entry: &DeadLetterEntry) -> String {
    let id = lane.subject_id(&entry.body).unwrap_or_else(|| "(unreadable)".to_owned());
    let place = match entry.place {
        _ if lane.places().len() == 1 => "",
        DeadLetterPlace::Queue => "  in the queue",
        DeadLetterPlace::Quarantine => "  in quarantine",
    };
    format!("{}  {} {id}{place}  {}", Timestamp::from(entry.since), lane.subject(), entry.reason)
}

fn print_whole(lane: &dyn DeadLetterLane, entry: &DeadLetterEntry) -> Result<(), OutputError> {
    say!("message      {}", entry.message_id);
    if let Some(id) = lane.subject_id(&entry.body) {
        say!("{:<11}  {id}", lane.subject());
    }
    say!("reason       {}", entry.reason);
    if let Some(delivery) = &entry.delivery {
        say!("sent         {}", Timestamp::from(delivery.sent_at));
    }
    let moved = if entry.place == DeadLetterPlace::Queue { "buried" } else { "quarantined" };
    say!("{moved:<11}  {}", Timestamp::from(entry.since));
    if let Some(delivery) = &entry.delivery {
        say!("receives     {}", delivery.receives);
        for (name, value) in &delivery.attributes {
            say!("attribute    {name}={value}");
        }
    }
    say!("body         {}", String::from_utf8_lossy(&entry.body));
    Ok(())
}

/// A line that counts up in place, on a terminal only.
fn progress(done: usize, of: usize) {
    let mut stderr = std::io::stderr();
    if stderr.is_terminal() {
        let end = if done == of { "\n" } else { "" };
        write!(stderr, "\r{done} of {of}{end}").ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_and_pauses_never_exceed_the_rate() {
        for (per_read, max) in [(1, 100), (10_000, 1000)] {
            for rate in [1, 3, 4, 10, 399, 400, 401, 5000] {
                let chunk = chunk_size(per_read, Some(rate));
                let per_second = chunk as f64 / pause(chunk, rate).as_secs_f64();
                assert!(per_second <= f64::from(rate) * 1.000_001, "{per_second} at rate {rate}");
            }
            assert_eq!(chunk_size(per_read, None), max);
        }
    }

    /// RabbitMQ and SQS read all dead letters for each chunk: 10,000 of them were read a hundred times.
    #[test]
    fn moving_every_dead_letter_takes_few_readings() {
        for per_read in [pipeline::queue::rabbitmq::DEAD_LETTERS_READ_MAX, 10_000] {
            assert!(per_read.div_ceil(chunk_size(per_read, None)) <= 10);
        }
    }
}
