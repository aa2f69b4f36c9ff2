//! What one row that the database refuses adds to the time of its batch: the product's own store, batches with and
//! without such a row in alternation.

use std::time::Instant;

use baton::users::store::{InsertOutcome, UserStore};
use baton::users::user::TEXT_CHARS_MAX;

use super::{BATCH, new_users};
use crate::report::{Report, median};
use crate::scratch::Round;

/// Batches of each kind in a round.
const BATCHES: usize = 25;
/// Target: time of a batch with a refused row, as a multiple of a clean one.
const COST_MAX: f64 = 2.0;

/// Index of the refused row in its batch; the first kind is the reference.
const KINDS: [(&str, Option<usize>); 4] =
    [("none", None), ("first", Some(0)), ("middle", Some(BATCH / 2)), ("last", Some(BATCH - 1))];

pub async fn run(store: &dyn UserStore, rounds: usize) -> anyhow::Result<Report> {
    let mut times_ms: [Vec<f64>; 4] = Default::default();
    for round in Round::all(rounds) {
        round.progress("batches with one refused row and without");
        for batch in 0..BATCHES {
            for turn in 0..KINDS.len() {
                // Rotate the order, so that no kind always follows the same other one.
                let kind = (turn + batch) % KINDS.len();
                times_ms[kind].push(insert_ms(store, KINDS[kind].1).await?);
            }
        }
    }
    let note = format!("{BATCH} rows, median of {}", times_ms[0].len());
    let medians = times_ms.map(median);
    let mut report = Report::default();
    for ((name, _), time_ms) in KINDS.iter().zip(medians) {
        report.figure(format!("batch, refused row: {name}"), time_ms, "ms", &note);
    }
    for ((name, _), time_ms) in KINDS.iter().zip(medians).skip(1) {
        report.at_most(format!("refused row: {name}, of a clean batch"), time_ms / medians[0], COST_MAX, "×");
    }
    Ok(report)
}

/// Milliseconds to insert one batch; fails if the store refuses other rows than the one at `refused`.
async fn insert_ms(store: &dyn UserStore, refused: Option<usize>) -> anyhow::Result<f64> {
    let mut users = new_users(BATCH);
    if let Some(index) = refused {
        // Longer than the column's constraint allows.
        users[index].name = "n".repeat(TEXT_CHARS_MAX + 1);
    }
    let started = Instant::now();
    let inserted = store.insert(&users).await?;
    let elapsed = started.elapsed();
    let found: Vec<_> = (0..BATCH).filter(|index| inserted.outcomes[*index] != InsertOutcome::Stored).collect();
    anyhow::ensure!(found == Vec::from_iter(refused), "the store refused the rows {found:?} instead of {refused:?}");
    Ok(elapsed.as_secs_f64() * 1000.0)
}
