//! `dlq … --lane users`: the lane's dead letters, those in the queue and those in quarantine, as one list.

use std::process::ExitCode;
use std::time::Duration;

use super::dlq::{DlqCommand, Which, count, progress};
use crate::config::Config;
use crate::timestamp::Timestamp;
use crate::users::lane::Lane;
use crate::users::letters::{Letter, Letters};

/// Runs one of them.
pub async fn run(config: &Config, command: DlqCommand) -> anyhow::Result<ExitCode> {
    let lane = Lane::open(config).await?;
    let letters = Letters { store: lane.store, queue: lane.queue };
    match command {
        DlqCommand::List { which } => {
            let selected = letters.select(&which.selection()).await?;
            for letter in &selected {
                println!("{}", line(letter));
            }
            println!("{}", count(selected.len()));
        }
        DlqCommand::Show { id } => {
            let which = crate::dead_letters::Selection { ids: vec![id.clone()], ..Default::default() };
            let selected = letters.select(&which).await?;
            anyhow::ensure!(
                !selected.is_empty(),
                "there is no dead letter {id}; `baton dlq list --lane users` shows them"
            );
            for letter in &selected {
                show(letter);
            }
        }
        DlqCommand::Replay { which, all, dry_run, rate } => {
            let selected = chosen(&letters, which, all).await?;
            let pause = rate.filter(|rate| *rate > 0).map(|rate| Duration::from_secs(1) / rate);
            for (position, letter) in selected.iter().enumerate() {
                if dry_run {
                    println!("would replay {}", line(letter));
                    continue;
                }
                letters.replay(letter).await?;
                progress(position + 1, selected.len());
                if let Some(pause) = pause {
                    tokio::time::sleep(pause).await;
                }
            }
            if dry_run {
                println!("{}", count(selected.len()));
            } else {
                println!("{} replayed", selected.len());
            }
        }
        DlqCommand::Drop { which, all, dry_run } => {
            let selected = chosen(&letters, which, all).await?;
            for (position, letter) in selected.iter().enumerate() {
                if dry_run {
                    println!("would drop {}", line(letter));
                    continue;
                }
                letters.drop_one(letter).await?;
                progress(position + 1, selected.len());
            }
            if dry_run {
                println!("{}", count(selected.len()));
            } else {
                println!("{} dropped", selected.len());
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn chosen(letters: &Letters, which: Which, all: bool) -> anyhow::Result<Vec<Letter>> {
    anyhow::ensure!(all || !which.is_everything(), "name ids, a --reason or --max, or say --all");
    Ok(letters.select(&which.selection()).await?)
}

fn line(letter: &Letter) -> String {
    let about = letter.user_id().map_or_else(|| "(unreadable)".to_owned(), |id| id.to_string());
    let place = if letter.quarantined { "in quarantine" } else { "in the queue" };
    format!("{}  user {about}  {place}  {}", Timestamp::from(letter.at), letter.reason)
}

fn show(letter: &Letter) {
    println!("message      {}", letter.message_id);
    if let Some(id) = letter.user_id() {
        println!("user         {id}");
    }
    println!("reason       {}", letter.reason);
    println!("{}  {}", if letter.quarantined { "quarantined" } else { "buried     " }, Timestamp::from(letter.at));
    println!("body         {}", String::from_utf8_lossy(&letter.body));
}
