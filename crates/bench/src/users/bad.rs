//! What one row that the database refuses costs its batch: the product's own store, batches with and without it, turn
//! and turn about.

use std::time::Instant;

use crate::progress;
use crate::table::{Report, median};
use baton::users::store::{Fate, UserStore};
use baton::users::user::TEXT_CHARS_MAX;

const ROWS: usize = 1000;
/// Batches of each kind in a round.
const BATCHES: usize = 25;
/// The bar: how many times a clean batch.
const BAR: f64 = 2.0;

/// Where the bad row is.
const KINDS: [(&str, Option<usize>); 4] =
    [("no bad row", None), ("the first", Some(0)), ("in the middle", Some(ROWS / 2)), ("the last", Some(ROWS - 1))];

pub async fn run(store: &dyn UserStore, rounds: usize) -> anyhow::Result<Report> {
    let mut times: [Vec<f64>; 4] = Default::default();
    for round in 1..=rounds.max(1) {
        progress(format_args!("round {round} of {rounds}: batches with one bad row and without"));
        for batch in 0..BATCHES {
            for turn in 0..KINDS.len() {
                // Nobody is always first after somebody.
                let kind = (turn + batch) % KINDS.len();
                times[kind].push(one(store, KINDS[kind].1).await?);
            }
        }
    }
    let medians = times.map(median);
    let mut report = Report::default();
    for (kind, (name, _)) in KINDS.iter().enumerate() {
        let note =
            if kind == 0 { format!("{ROWS} rows, median of {}", BATCHES * rounds.max(1)) } else { String::new() };
        report.figure(format!("batch, bad row: {name}"), medians[kind], "ms", note);
    }
    for (kind, (name, _)) in KINDS.iter().enumerate().skip(1) {
        report.at_most(format!("bad row: {name}, of a clean batch"), medians[kind] / medians[0], BAR, "×");
    }
    Ok(report)
}

/// Milliseconds for a batch.
async fn one(store: &dyn UserStore, bad: Option<usize>) -> anyhow::Result<f64> {
    let mut users = super::users(ROWS);
    if let Some(place) = bad {
        // Longer than the column's constraint allows.
        users[place].name = "n".repeat(TEXT_CHARS_MAX + 1);
    }
    let started = Instant::now();
    let inserted = store.insert(&users).await?;
    let took = started.elapsed();
    let refused: Vec<_> = (0..ROWS).filter(|place| inserted.fates[*place] != Fate::Stored).collect();
    anyhow::ensure!(refused == Vec::from_iter(bad), "refused were {refused:?} instead of {bad:?}");
    Ok(took.as_secs_f64() * 1000.0)
}
