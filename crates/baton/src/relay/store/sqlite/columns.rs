//! The columns of `transactions`: how a row is written and read back.
//!
//! `claim_doubt` and the like keep the names of the first release: renaming a column would need a migration that old
//! and new processes cannot share.

use rusqlite::{Row, ToSql};
use serde_json::Value;

use crate::relay::state::transaction::{FailedBy, Transaction};
use crate::relay::store::row::RawRow;
use crate::timestamp::Timestamp;

/// All columns, in the order that [`raw_row`] reads and [`execute_with`] binds.
pub(super) const COLUMNS: &str = "id, kind, status, version, request, imported, api_key, created_at, updated_at, confirmed_at, hash, sender, \
     claim_consumer, claim_token, claim_relayer, claim_at, claim_doubt, claim_open_until, claim_unknown, claim_absent_since, \
     relayer_url, relayer_tx_id, bound_at, relayer_progress, relayer_nonce, forgotten_since, \
     attempts, reroutes, replays, auto_replayed, avoid_relayer, failed_by, error_message, result, check_at, \
     block_number, relayer_says, cancel_requested_at, claim_unsent";

pub(super) const INSERT: &str = "INSERT INTO transactions (id, kind, status, version, request, imported, api_key, created_at, updated_at, \
     confirmed_at, hash, sender, claim_consumer, claim_token, claim_relayer, claim_at, claim_doubt, claim_open_until, \
     claim_unknown, claim_absent_since, relayer_url, relayer_tx_id, bound_at, relayer_progress, relayer_nonce, \
     forgotten_since, attempts, reroutes, replays, auto_replayed, avoid_relayer, failed_by, error_message, result, \
     check_at, block_number, relayer_says, cancel_requested_at, claim_unsent) \
     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, \
     ?19, ?20, ?21, ?22, ?23, ?24, ?25, ?26, ?27, ?28, ?29, ?30, ?31, ?32, ?33, ?34, ?35, ?36, ?37, ?38, ?39)";

/// Writes the columns that can change; kind, request, key and created_at cannot.
pub(super) const UPDATE: &str = "UPDATE transactions SET status = ?3, version = ?4, updated_at = ?9, confirmed_at = ?10, hash = ?11, sender = ?12, \
     claim_consumer = ?13, claim_token = ?14, claim_relayer = ?15, claim_at = ?16, claim_doubt = ?17, \
     claim_open_until = ?18, claim_unknown = ?19, claim_absent_since = ?20, relayer_url = ?21, \
     relayer_tx_id = ?22, bound_at = ?23, relayer_progress = ?24, relayer_nonce = ?25, \
     forgotten_since = ?26, attempts = ?27, reroutes = ?28, replays = ?29, auto_replayed = ?30, \
     avoid_relayer = ?31, failed_by = ?32, error_message = ?33, result = ?34, check_at = ?35, block_number = ?36, \
     relayer_says = ?37, cancel_requested_at = ?38, claim_unsent = ?39 \
     WHERE id = ?1 AND version = ?4 - 1";

/// Runs a statement with a row's values, in the order of the columns. Values are bound one by one, because a list of
/// boxed values costs more than the statement.
pub(super) fn execute_with(
    mut statement: rusqlite::CachedStatement<'_>,
    row: &Transaction,
) -> Result<usize, rusqlite::Error> {
    let claim = row.claim.as_ref();
    let unknown = claim.and_then(|claim| claim.unknown.as_ref());
    let binding = row.binding.as_ref();
    let at = |moment: Option<Timestamp>| moment.map(|moment| moment.0);
    let mut position = 0;
    let mut bind = |value: &dyn ToSql| {
        position += 1;
        statement.raw_bind_parameter(position, value)
    };
    bind(row.id.0.as_bytes())?;
    bind(&row.kind.name())?;
    bind(&row.status.name())?;
    bind(&row.version)?;
    bind(&&*row.request)?;
    bind(&row.imported)?;
    bind(&row.api_key)?;
    bind(&row.created_at.0)?;
    bind(&row.updated_at.0)?;
    bind(&at(row.confirmed_at))?;
    bind(&row.hash)?;
    bind(&row.from)?;
    bind(&claim.map(|claim| &claim.consumer.0))?;
    bind(&claim.map(|claim| claim.token.into_bytes()))?;
    bind(&claim.map(|claim| &claim.relayer.0))?;
    bind(&claim.map(|claim| claim.at.0))?;
    bind(&unknown.map(|unknown| &unknown.reason))?;
    bind(&unknown.map(|unknown| unknown.open_until.0))?;
    bind(&unknown.map(|unknown| unknown.kind.name()))?;
    bind(&at(unknown.and_then(|unknown| unknown.absent_since)))?;
    bind(&binding.map(|binding| &binding.relayer.0))?;
    bind(&binding.map(|binding| &binding.tx_id.0))?;
    bind(&binding.map(|binding| binding.at.0))?;
    bind(&binding.map(|binding| binding.progress.name()))?;
    bind(&binding.and_then(|binding| binding.nonce))?;
    bind(&at(binding.and_then(|binding| binding.forgotten_since)))?;
    bind(&row.attempts)?;
    bind(&row.reroutes)?;
    bind(&row.replays)?;
    bind(&row.auto_replayed)?;
    bind(&row.avoid.as_ref().map(|relayer| &relayer.0))?;
    bind(&row.failed_by.map(FailedBy::name))?;
    bind(&row.error_message)?;
    bind(&row.result.as_ref().map(Value::to_string))?;
    bind(&at(row.check_at))?;
    bind(&row.block_number)?;
    bind(&row.relayer_says.as_ref().map(Value::to_string))?;
    bind(&at(row.cancel_requested_at))?;
    bind(&claim.filter(|claim| claim.unsent).map(|claim| claim.token.into_bytes()))?;
    statement.raw_execute()
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
        claim_unsent: row.get(38)?,
    })
}
