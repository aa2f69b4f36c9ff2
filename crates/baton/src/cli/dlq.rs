//! `dlq list|show|replay|drop`: the dead letters of a lane; those of the users lane are `dlq_users`.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use pipeline::DeadLetter;

use crate::config::Config;
use crate::dead_letters::{self, Replayed, Selection};
use crate::relay;
use crate::timestamp::Timestamp;

/// The most dead letters that are moved at once.
const TOGETHER_MAX: usize = 100;

/// Whose dead letters.
#[derive(Clone, Copy, ValueEnum)]
pub enum Lane {
    /// Transactions
    Relay,
    /// Users
    Users,
}

/// What to do with dead letters.
#[derive(Subcommand)]
pub enum DlqCommand {
    /// List them, oldest first
    List {
        #[command(flatten)]
        which: Which,
    },
    /// Show one whole, with its body
    Show {
        /// The message's or the transaction's id
        id: String,
    },
    /// Start them over: the only way to another attempt
    Replay {
        #[command(flatten)]
        which: Which,
        /// Take every dead letter (needed when no id and no reason is given)
        #[arg(long)]
        all: bool,
        /// Only say what would be done
        #[arg(long)]
        dry_run: bool,
        /// At most so many a second
        #[arg(long, value_name = "N")]
        rate: Option<u32>,
    },
    /// Drop them for good; their transactions stay failed
    Drop {
        #[command(flatten)]
        which: Which,
        /// Take every dead letter (needed when no id and no reason is given)
        #[arg(long)]
        all: bool,
        /// Only say what would be done
        #[arg(long)]
        dry_run: bool,
    },
}

/// Which dead letters.
#[derive(Args)]
pub struct Which {
    /// Message ids or transaction ids
    ids: Vec<String>,
    /// Only those whose reason contains this text
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// At most so many
    #[arg(long, value_name = "N")]
    max: Option<usize>,
}

impl Which {
    pub(super) fn selection(self) -> Selection {
        Selection { ids: self.ids, reason: self.reason, max: self.max }
    }

    pub(super) fn is_everything(&self) -> bool {
        self.ids.is_empty() && self.reason.is_none() && self.max.is_none()
    }
}

/// Runs one of them.
pub async fn run(config: &Config, command: DlqCommand) -> anyhow::Result<ExitCode> {
    let guarded = relay::lane::RelayLane::open(config).await?.guarded;
    match command {
        DlqCommand::List { which } => {
            let letters = dead_letters::select(&guarded, &which.selection()).await?;
            for letter in &letters {
                println!("{}", line(letter));
            }
            println!("{}", count(letters.len()));
            Ok(ExitCode::SUCCESS)
        }
        DlqCommand::Show { id } => {
            let selection = Selection { ids: vec![id.clone()], ..Selection::default() };
            let letters = dead_letters::select(&guarded, &selection).await?;
            anyhow::ensure!(!letters.is_empty(), "there is no dead letter {id}; `baton dlq list` shows them");
            for letter in &letters {
                show(letter);
            }
            Ok(ExitCode::SUCCESS)
        }
        DlqCommand::Replay { which, all, dry_run, rate } => {
            anyhow::ensure!(all || !which.is_everything(), "name ids, a --reason or --max, or say --all");
            let letters = dead_letters::select(&guarded, &which.selection()).await?;
            if dry_run {
                return Ok(would("replay", &letters));
            }
            let rate = rate.filter(|rate| *rate > 0);
            let (mut done, mut over, mut refused) = (0, 0, 0);
            for some in letters.chunks(together(rate)) {
                let pause = rate.map(|rate| Duration::from_secs(some.len() as u64) / rate);
                for (letter, replayed) in some.iter().zip(dead_letters::replay(&guarded, some).await?) {
                    match replayed {
                        Replayed::Yes => done += 1,
                        Replayed::Over => over += 1,
                        Replayed::No(why) => {
                            refused += 1;
                            eprintln!("not replayed: {}: {why}", letter.id);
                        }
                    }
                }
                let so_far = done + over + refused;
                progress(so_far, letters.len());
                if let Some(pause) = pause.filter(|_| so_far < letters.len()) {
                    tokio::time::sleep(pause).await;
                }
            }
            if over > 0 {
                println!("{over} had been replayed before, and were only left over");
            }
            println!("{done} replayed, {refused} not");
            Ok(if refused == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        DlqCommand::Drop { which, all, dry_run } => {
            anyhow::ensure!(all || !which.is_everything(), "name ids, a --reason or --max, or say --all");
            let letters = dead_letters::select(&guarded, &which.selection()).await?;
            if dry_run {
                return Ok(would("drop", &letters));
            }
            let mut done = 0;
            for some in letters.chunks(TOGETHER_MAX) {
                dead_letters::discard(&guarded, some).await?;
                done += some.len();
                progress(done, letters.len());
            }
            println!("{} dropped", letters.len());
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// How many are moved at once: a quarter of a second's worth where there is a rate.
fn together(rate: Option<u32>) -> usize {
    rate.map_or(TOGETHER_MAX, |rate| (rate as usize / 4).clamp(1, TOGETHER_MAX))
}

fn would(what: &str, letters: &[DeadLetter]) -> ExitCode {
    for letter in letters {
        println!("would {what} {}", line(letter));
    }
    println!("{}", count(letters.len()));
    ExitCode::SUCCESS
}

pub(super) fn count(letters: usize) -> String {
    if letters == 1 { "1 dead letter".to_owned() } else { format!("{letters} dead letters") }
}

fn line(letter: &DeadLetter) -> String {
    let about = dead_letters::transaction_id(letter).map_or_else(|| "(unreadable)".to_owned(), |id| id.to_string());
    format!("{}  transaction {about}  {}", Timestamp::from(letter.buried_at), letter.reason)
}

fn show(letter: &DeadLetter) {
    println!("message      {}", letter.id);
    if let Some(id) = dead_letters::transaction_id(letter) {
        println!("transaction  {id}");
    }
    println!("reason       {}", letter.reason);
    println!("sent         {}", Timestamp::from(letter.sent_at));
    println!("buried       {}", Timestamp::from(letter.buried_at));
    println!("receives     {}", letter.receives);
    for (name, value) in &letter.attributes {
        println!("attribute    {name}={value}");
    }
    println!("body         {}", String::from_utf8_lossy(&letter.body));
}

/// One line that counts up, on a terminal only.
pub(super) fn progress(done: usize, of: usize) {
    let mut stderr = std::io::stderr();
    if stderr.is_terminal() {
        let end = if done == of { "\n" } else { "" };
        write!(stderr, "\r{done} of {of}{end}").ok();
    }
}
