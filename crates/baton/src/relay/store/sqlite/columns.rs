//! The columns of `transactions`: how a row is written and read back.
//!
//! `claim_doubt` and the like keep the names of the first release: renaming a column would need a migration that old
//! and new processes cannot share.

use std::sync::LazyLock;

use rusqlite::types::{ToSqlOutput, ValueRef};
use rusqlite::{Connection, OptionalExtension, Row, ToSql, params};
use serde_json::Value;

use crate::relay::state::transaction::{FailedBy, Transaction};
use crate::relay::store::row::{RawRow, claimed_account};
use crate::timestamp::Timestamp;

/// All columns, in the order that [`raw_row`] reads and [`for_each_value`] visits.
pub(super) const COLUMNS: &str = "id, kind, status, version, request, imported, api_key, created_at, updated_at, confirmed_at, hash, sender, \
     claim_consumer, claim_token, claim_relayer, claim_at, claim_doubt, claim_open_until, claim_unknown, claim_absent_since, \
     relayer_url, relayer_tx_id, bound_at, relayer_progress, relayer_nonce, forgotten_since, \
     attempts, reroutes, replays, auto_replayed, avoid_relayer, failed_by, error_message, result, check_at, \
     block_number, relayer_says, cancel_requested_at, claim_account";

/// The columns that never change, by their position in [`COLUMNS`]: id, kind, request, imported, api_key, created_at.
const FIXED: [usize; 6] = [0, 1, 4, 5, 6, 7];

/// Stores a new row.
pub(super) fn insert(connection: &Connection, row: &Transaction) -> Result<(), rusqlite::Error> {
    static INSERT: LazyLock<String> = LazyLock::new(|| {
        let values = vec!["?"; COLUMNS.split(", ").count()].join(", ");
        format!("INSERT INTO transactions ({COLUMNS}) VALUES ({values})")
    });
    let mut statement = connection.prepare_cached(&INSERT)?;
    for_each_value(row, |column, value| statement.raw_bind_parameter(column + 1, value))?;
    statement.raw_execute()?;
    Ok(())
}

/// The columns of a stored row that a move changes: a bit for each.
#[derive(Clone, Copy)]
pub(super) struct Changes(u64);

/// What a move changes of the stored row; `None` if the row is missing or has not the version before the move.
pub(super) fn changes(connection: &Connection, row: &Transaction) -> Result<Option<Changes>, rusqlite::Error> {
    static STORED: LazyLock<String> = LazyLock::new(|| {
        let names = COLUMNS.split(", ").enumerate().filter(|(column, _)| !FIXED.contains(column));
        let names: Vec<_> = names.map(|(_, name)| name).collect();
        format!("SELECT {} FROM transactions WHERE id = ?1 AND version = ?2 - 1", names.join(", "))
    });
    let mut statement = connection.prepare_cached(&STORED)?;
    let found = statement.query_row(params![row.id.0.as_bytes(), row.version], |stored| {
        let (mut changed, mut position) = (0, 0);
        for_each_value(row, |column, value| {
            if FIXED.contains(&column) {
                return Ok(());
            }
            let value = value.to_sql()?;
            let same = match &value {
                ToSqlOutput::Borrowed(value) => stored.get_ref(position)? == *value,
                ToSqlOutput::Owned(value) => stored.get_ref(position)? == ValueRef::from(value),
                _ => false,
            };
            position += 1;
            if !same {
                changed |= 1 << column;
            }
            Ok(())
        })?;
        Ok(Changes(changed))
    });
    found.optional()
}

/// Writes the columns that a move changes, and names no other column in the statement: SQLite rewrites the entry in each
/// index on a column that is named, whether its value changes or not.
pub(super) fn update(connection: &Connection, row: &Transaction, changes: Changes) -> Result<(), rusqlite::Error> {
    let is_changed = |column: usize| changes.0 & (1 << column) != 0;
    let assignments: Vec<String> = COLUMNS
        .split(", ")
        .enumerate()
        .filter(|(column, _)| is_changed(*column))
        .map(|(_, name)| format!("{name} = ?"))
        .collect();
    // Never empty: a move changes the version.
    let sql = format!("UPDATE transactions SET {} WHERE id = ?", assignments.join(", "));
    let mut statement = connection.prepare_cached(&sql)?;
    let mut bound = 0;
    for_each_value(row, |column, value| {
        if is_changed(column) {
            bound += 1;
            statement.raw_bind_parameter(bound, value)?;
        }
        Ok(())
    })?;
    statement.raw_bind_parameter(bound + 1, row.id.0.as_bytes())?;
    statement.raw_execute()?;
    Ok(())
}

/// Visits a row's values with the positions of their columns. Values are visited one by one, because a list of boxed
/// values costs more than the statement.
fn for_each_value(
    row: &Transaction,
    mut visit: impl FnMut(usize, &dyn ToSql) -> Result<(), rusqlite::Error>,
) -> Result<(), rusqlite::Error> {
    let claim = row.claim.as_ref();
    let unknown = claim.and_then(|claim| claim.unknown.as_ref());
    let binding = row.binding.as_ref();
    let at = |moment: Option<Timestamp>| moment.map(|moment| moment.0);
    let mut column = 0;
    let mut next = |value: &dyn ToSql| {
        column += 1;
        visit(column - 1, value)
    };
    next(row.id.0.as_bytes())?;
    next(&row.kind.name())?;
    next(&row.status.name())?;
    next(&row.version)?;
    next(&&*row.request)?;
    next(&row.imported)?;
    next(&row.api_key)?;
    next(&row.created_at.0)?;
    next(&row.updated_at.0)?;
    next(&at(row.confirmed_at))?;
    next(&row.hash)?;
    next(&row.from)?;
    next(&claim.map(|claim| &claim.consumer.0))?;
    next(&claim.map(|claim| claim.token.into_bytes()))?;
    next(&claim.map(|claim| &claim.relayer.0))?;
    next(&claim.map(|claim| claim.at.0))?;
    next(&unknown.map(|unknown| &unknown.reason))?;
    next(&unknown.map(|unknown| unknown.open_until.0))?;
    next(&unknown.map(|unknown| unknown.kind.name()))?;
    next(&at(unknown.and_then(|unknown| unknown.absent_since)))?;
    next(&binding.map(|binding| &binding.relayer.0))?;
    next(&binding.map(|binding| &binding.tx_id.0))?;
    next(&binding.map(|binding| binding.at.0))?;
    next(&binding.map(|binding| binding.progress.name()))?;
    next(&binding.and_then(|binding| binding.nonce))?;
    next(&at(binding.and_then(|binding| binding.forgotten_since)))?;
    next(&row.attempts)?;
    next(&row.reroutes)?;
    next(&row.replays)?;
    next(&row.auto_replayed)?;
    next(&row.avoid.as_ref().map(|relayer| &relayer.0))?;
    next(&row.failed_by.map(FailedBy::name))?;
    next(&row.error_message)?;
    next(&row.result.as_ref().map(Value::to_string))?;
    next(&at(row.check_at))?;
    next(&row.block_number)?;
    next(&row.relayer_says.as_ref().map(Value::to_string))?;
    next(&at(row.cancel_requested_at))?;
    next(&claim.and_then(claimed_account))
}

/// Reads a row selected with [`COLUMNS`].
pub(super) fn raw_row(row: &Row<'_>) -> Result<RawRow, rusqlite::Error> {
    Ok(RawRow {
        id: row.get(0)?,
        kind: row.get(1)?,
        status: row.get(2)?,
        version: row.get(3)?,
        request: row.get(4)?,
        imported: row.get(5)?,
        api_key: row.get(6)?,
        created_at: row.get(7)?,
        updated_at: row.get(8)?,
        confirmed_at: row.get(9)?,
        hash: row.get(10)?,
        sender: row.get(11)?,
        claim: (row.get(12)?, row.get(13)?, row.get(14)?, row.get(15)?),
        unknown: (row.get(16)?, row.get(17)?, row.get(18)?, row.get(19)?),
        binding: (row.get(20)?, row.get(21)?, row.get(22)?, row.get(23)?, row.get(24)?, row.get(25)?),
        attempts: row.get(26)?,
        reroutes: row.get(27)?,
        replays: row.get(28)?,
        auto_replayed: row.get(29)?,
        avoid: row.get(30)?,
        failed_by: row.get(31)?,
        error_message: row.get(32)?,
        result: row.get(33)?,
        check_at: row.get(34)?,
        block_number: row.get(35)?,
        relayer_says: row.get(36)?,
        cancel_requested_at: row.get(37)?,
        claim_account: row.get(38)?,
    })
}
