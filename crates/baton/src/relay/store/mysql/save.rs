//! Saves moves in groups, one commit for each group: waiting for the disk is most of what a save costs. Each move has its
//! own answer; a stale or conflicting move changes nothing and does not affect the rest of its group.
//!
//! A group locks its rows in the order of their ids, so two groups never deadlock on rows.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use sqlx::{AssertSqlSafe, MySqlConnection, Row};

use super::accept::{ROWS_MAX, chunks, statement_size};
use super::columns::{bind_state, datetime, id, update_many};
use super::outbox::{self, Subscriptions};
use super::outcome::{End, is_duplicate, is_invalid_value, work};
use super::pool::{Pool, unavailable};
use crate::relay::state::event::EventMark;
use crate::relay::state::transaction::{Moved, Transaction, TransactionId};
use crate::relay::store::coalescer::{Grouping, same_failure};
use crate::relay::store::row::timeline_max;
use crate::relay::store::{RELAYER_TX_ID_UNIQUE, Saved, StoreError};

/// Maximum size of a group; the moves of a larger one are saved one at a time. A server accepts statements of 16 MiB.
const BYTES_MAX: usize = 4 << 20;

/// Maximum deliveries that a group writes for endpoints; a larger one is saved in halves. Each costs as much as a move, and
/// one API key with many endpoints would make the moves of all keys miss the time limit of a commit.
const DELIVERIES_MAX: usize = 1000;

/// A commit takes several round trips and some milliseconds, whatever its size. From 24 waiting moves on, a second
/// concurrent commit increases throughput; a group with fewer than half of the last group's moves waits up to 5 ms for more.
pub(super) const GROUPING: Grouping =
    Grouping { items_max: 256, enough: 24, patience: Duration::from_millis(20), gather: Duration::from_millis(5) };

/// Saves moves, in one commit if possible.
pub(super) async fn save_many(pool: &Pool, moves: &[Moved]) -> Vec<Result<Saved, StoreError>> {
    if moves.len() > 1 && moves.iter().map(size_bytes).sum::<usize>() > BYTES_MAX {
        return save_each(pool, moves).await;
    }
    match save(pool, moves).await {
        Ok(Group::Saved(answers)) => answers.into_iter().map(MoveResult::into_result).collect(),
        Ok(Group::InvalidValue(_)) if moves.len() > 1 => save_each(pool, moves).await,
        Ok(Group::InvalidValue(error)) => vec![Err(unavailable(error))],
        Ok(Group::TooManyDeliveries) => {
            let (some, others) = moves.split_at(moves.len() / 2);
            let mut answers = Box::pin(save_many(pool, some)).await;
            answers.extend(Box::pin(save_many(pool, others)).await);
            answers
        }
        Err(failure) => {
            let failure = Arc::new(failure);
            moves.iter().map(|_| Err(same_failure(&failure))).collect()
        }
    }
}

/// Saves each move in a group of its own.
async fn save_each(pool: &Pool, moves: &[Moved]) -> Vec<Result<Saved, StoreError>> {
    let mut answers = Vec::with_capacity(moves.len());
    for moved in moves {
        answers.extend(Box::pin(save_many(pool, std::slice::from_ref(moved))).await);
    }
    answers
}

enum Group {
    Saved(Vec<MoveResult>),
    /// The server rejects a value of one of the moves; nothing was saved.
    InvalidValue(sqlx::Error),
    /// It would write more than [`DELIVERIES_MAX`]; nothing was saved.
    TooManyDeliveries,
}

/// The result of one move of a group.
#[derive(Clone, Copy)]
enum MoveResult {
    Saved(Saved),
    /// The relayer transaction already belongs to another row.
    Conflict,
}

impl MoveResult {
    fn into_result(self) -> Result<Saved, StoreError> {
        match self {
            Self::Saved(saved) => Ok(saved),
            Self::Conflict => Err(StoreError::Conflict { constraint: RELAYER_TX_ID_UNIQUE }),
        }
    }
}

async fn save(pool: &Pool, moves: &[Moved]) -> Result<Group, StoreError> {
    pool.transact(work!(connection => match store(connection, moves).await {
        Ok(Some(answers)) => Ok(End::Keep(Group::Saved(answers))),
        Ok(None) => Ok(End::Undo(Ok(Group::TooManyDeliveries))),
        // Another connection took a record since it was looked up, and has committed.
        Err(error) if is_duplicate(&error) => Ok(End::Again(error)),
        Err(error) if is_invalid_value(&error) => Ok(End::Undo(Ok(Group::InvalidValue(error)))),
        Err(error) => Err(error),
    }))
    .await
}

/// `None` if the moves would write too many deliveries for one commit.
async fn store(connection: &mut MySqlConnection, moves: &[Moved]) -> Result<Option<Vec<MoveResult>>, sqlx::Error> {
    let marks = marks_of(moves.iter());
    if moves.len() > 1 && Subscriptions::read(connection, &marks).await?.deliveries(&marks) > DELIVERIES_MAX {
        return Ok(None);
    }
    let versions = lock(connection, moves).await?;
    // Again after the wait for the rows: an endpoint that was enabled and recovered meanwhile would miss these events.
    let subscriptions = Subscriptions::read(connection, &marks).await?;
    let mut answers = vec![MoveResult::Saved(Saved::Stale); moves.len()];
    let (mut due, mut taken) = (Vec::new(), HashSet::new());
    for (place, moved) in moves.iter().enumerate() {
        let row = &moved.transaction;
        // Of two moves of one row in a group, the first makes the second stale.
        if versions.get(&row.id) == Some(&(row.version - 1)) && taken.insert(row.id) {
            due.push(place);
        }
    }
    let rows: Vec<_> = due.iter().map(|place| (*place, &moves[*place].transaction)).collect();
    let records = take_records(connection, &rows).await?;
    due.retain(|place| match records.get(place) {
        Some(RecordOwner::OtherRow) => {
            answers[*place] = MoveResult::Conflict;
            false
        }
        record => {
            let early = matches!(record, Some(RecordOwner::New { early: true }));
            answers[*place] = MoveResult::Saved(Saved::Yes { early });
            true
        }
    });
    for some in due.chunks(ROWS_MAX) {
        // The last row is repeated for the remaining placeholders, which changes nothing.
        let rows = statement_size(some.len());
        let mut statement = sqlx::query(AssertSqlSafe(update_many(rows)));
        for place in some.iter().chain(some.last().into_iter().cycle()).take(rows) {
            let row = &moves[*place].transaction;
            statement = bind_state(statement.bind(id(row.id)), row);
        }
        statement.execute(&mut *connection).await?;
    }
    add_steps(connection, moves, &due).await?;
    outbox::write(connection, &marks_of(due.iter().map(|place| &moves[*place])), &subscriptions).await?;
    Ok(Some(answers))
}

fn marks_of<'m>(moves: impl Iterator<Item = &'m Moved>) -> Vec<(&'m Transaction, &'m EventMark)> {
    moves.flat_map(|moved| moved.events.iter().map(|event| (&moved.transaction, event))).collect()
}

/// Locks the rows and returns their versions.
async fn lock(connection: &mut MySqlConnection, moves: &[Moved]) -> Result<HashMap<TransactionId, u64>, sqlx::Error> {
    let ids: Vec<String> = moves.iter().map(|moved| id(moved.transaction.id)).collect();
    let places = places(ids.len());
    let sql = format!("SELECT id, version FROM transactions WHERE id IN ({places}) ORDER BY id FOR UPDATE");
    let rows = bind_padded(&sql, &ids).fetch_all(connection).await?;
    let version = |row: &sqlx::mysql::MySqlRow| -> Result<_, sqlx::Error> {
        let text: String = row.try_get(0)?;
        let id = super::columns::parse_id(&text).ok_or_else(|| sqlx::Error::Decode("not a transaction id".into()))?;
        Ok((id, row.try_get(1)?))
    };
    rows.iter().map(version).collect()
}

/// The owner of the relayer transaction that a row is bound to.
pub(super) enum RecordOwner {
    /// The row itself, since this statement. `early`: webhooks about it arrived before.
    New { early: bool },
    /// The row itself, since an earlier move.
    Known,
    /// Another row.
    OtherRow,
}

/// Makes each bound row the owner of its relayer transaction unless another row owns it. Keyed by the given index.
pub(super) async fn take_records(
    connection: &mut MySqlConnection,
    rows: &[(usize, &Transaction)],
) -> Result<HashMap<usize, RecordOwner>, sqlx::Error> {
    let bound: Vec<(usize, &Transaction, &String)> =
        rows.iter().filter_map(|(place, row)| Some((*place, *row, &row.binding.as_ref()?.tx_id.0))).collect();
    let mut records = HashMap::new();
    if bound.is_empty() {
        return Ok(records);
    }
    let names: Vec<String> = bound.iter().map(|(_, _, tx_id)| (*tx_id).clone()).collect();
    let places_asked = places(names.len());
    let sql = format!(
        "SELECT relayer_tx_id, transaction_id FROM relayer_transactions WHERE relayer_tx_id IN ({places_asked})"
    );
    let mut owners: HashMap<Vec<u8>, String> = HashMap::new();
    for row in bind_padded(&sql, &names).fetch_all(&mut *connection).await? {
        owners.insert(row.try_get(0)?, row.try_get(1)?);
    }
    let mut new = Vec::new();
    for (place, row, tx_id) in &bound {
        let record = match owners.get(tx_id.as_bytes()) {
            Some(owner) if super::columns::parse_id(owner) == Some(row.id) => RecordOwner::Known,
            Some(_) => RecordOwner::OtherRow,
            None => {
                owners.insert(tx_id.as_bytes().to_vec(), id(row.id));
                new.push((id(row.id), (*tx_id).clone()));
                RecordOwner::New { early: false }
            }
        };
        records.insert(*place, record);
    }
    for some in chunks(&new) {
        let values = vec!["(?, ?)"; some.len()].join(", ");
        let sql = format!("INSERT INTO relayer_transactions (transaction_id, relayer_tx_id) VALUES {values}");
        let mut statement = sqlx::query(AssertSqlSafe(sql));
        for (row, tx_id) in some {
            statement = statement.bind(row).bind(tx_id);
        }
        statement.execute(&mut *connection).await?;
    }
    // The records are locked now, and a webhook that arrives for one of them waits for this commit.
    let names: Vec<String> = new.into_iter().map(|(_, tx_id)| tx_id).collect();
    if !names.is_empty() {
        let places_asked = places(names.len());
        let sql = format!("SELECT DISTINCT relayer_tx_id FROM early_webhooks WHERE relayer_tx_id IN ({places_asked})");
        let rows = bind_padded(&sql, &names).fetch_all(connection).await?;
        let early = rows.iter().map(|row| row.try_get(0)).collect::<Result<HashSet<Vec<u8>>, _>>()?;
        for (place, _, tx_id) in &bound {
            if let Some(RecordOwner::New { early: seen }) = records.get_mut(place) {
                *seen = early.contains(tx_id.as_bytes());
            }
        }
    }
    Ok(records)
}

/// Appends the steps of these moves to their timelines; the row locks make the numbers unique.
async fn add_steps(connection: &mut MySqlConnection, moves: &[Moved], due: &[usize]) -> Result<(), sqlx::Error> {
    let ids: Vec<String> = due
        .iter()
        .filter(|place| !moves[**place].steps.is_empty())
        .map(|place| id(moves[*place].transaction.id))
        .collect();
    if ids.is_empty() {
        return Ok(());
    }
    let places = places(ids.len());
    let sql = format!(
        "SELECT transaction_id, MAX(seq) FROM timeline WHERE transaction_id IN ({places}) GROUP BY transaction_id"
    );
    let mut last: HashMap<String, u32> = HashMap::new();
    for row in bind_padded(&sql, &ids).fetch_all(&mut *connection).await? {
        last.insert(row.try_get(0)?, row.try_get(1)?);
    }
    let mut lines = Vec::new();
    for place in due {
        let Moved { transaction, steps, .. } = &moves[*place];
        let row = id(transaction.id);
        let seq = last.entry(row.clone()).or_insert(0);
        for step in steps.iter() {
            if *seq < timeline_max(step) {
                *seq += 1;
                lines.push((row.clone(), *seq, transaction.updated_at, step));
            }
        }
    }
    for some in chunks(&lines) {
        let values = vec!["(?, ?, ?, ?, ?)"; some.len()].join(", ");
        let sql = format!("INSERT INTO timeline (transaction_id, seq, at, action, detail) VALUES {values}");
        let mut statement = sqlx::query(AssertSqlSafe(sql));
        for (row, seq, at, step) in some {
            statement = statement.bind(row).bind(seq).bind(datetime(*at)).bind(step.action).bind(&step.detail);
        }
        statement.execute(&mut *connection).await?;
    }
    Ok(())
}

/// Placeholders for `count` values, rounded up to a power of two so that few statements are prepared.
pub(super) fn places(count: usize) -> String {
    vec!["?"; count.next_power_of_two()].join(", ")
}

/// Binds the values and repeats the last one for the remaining placeholders.
pub(super) fn bind_padded<'q>(sql: &'q str, values: &'q [String]) -> super::columns::Statement<'q> {
    let padded = values.iter().chain(std::iter::repeat(values.last().expect("there is at least one")));
    let count = values.len().next_power_of_two();
    padded.take(count).fold(sqlx::query(AssertSqlSafe(sql)), |statement, value| statement.bind(value))
}

/// Approximate size of a move within a statement.
fn size_bytes(moved: &Moved) -> usize {
    let Moved { transaction, steps, .. } = moved;
    let result = transaction.result.as_ref().map_or(0, |result| result.to_string().len());
    let error = transaction.error_message.as_ref().map_or(0, String::len);
    let says = transaction.relayer_says.as_ref().map_or(0, |says| says.to_string().len());
    let details: usize = steps.iter().map(|step| step.detail.len()).sum();
    1024 + result + error + says + details
}
