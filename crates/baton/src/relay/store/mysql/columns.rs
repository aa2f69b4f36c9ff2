//! A transaction as columns and back. Column names follow the specification; columns it does not name have the embedded
//! store's names.

use sqlx::mysql::{MySqlArguments, MySqlRow};
use sqlx::query::Query;
use sqlx::{MySql, Row};
use time::{OffsetDateTime, PrimitiveDateTime};
use uuid::Uuid;

use crate::relay::request::call::DirectRequest;
use crate::relay::state::transaction::{FailedBy, Status, Transaction, TransactionId};
use crate::relay::store::StoreError;
use crate::relay::store::row::{RawRow, claimed_account};
use crate::timestamp::Timestamp;

/// A statement with its values so far.
pub(super) type Statement<'q> = Query<'q, MySql, MySqlArguments>;

/// Every column, as [`read_row`] wants them: what never changes, then what a move may change.
macro_rules! columns {
    () => {
        "id, type, request, imported, api_key, createdAt, status, version, updatedAt, confirmedAt, hash, sender, \
         claim_consumer, claim_token, claim_relayer, claim_at, claim_doubt, claim_open_until, claim_unknown, \
         claim_absent_since, oz_relayer_url, ozRelayerTxId, bound_at, relayer_progress, relayer_nonce, forgotten_since, \
         attempts, reroutes, replays, auto_replayed, avoid_relayer, failed_by, error_message, result, check_at, \
         block_number, relayer_says, cancel_requested_at, claim_account"
    };
}
pub(super) use columns;

/// Updates existing, locked rows in one statement, written as an insert that finds each of them. Takes the id and
/// [`bind_state`] of each. The columns that never change get placeholder values, which the statement ignores.
pub(super) fn update_many(rows: usize) -> String {
    let names: Vec<&str> = columns!().split(", ").collect();
    let state = &names[UNCHANGING..];
    let row = format!("(?, '', '{{}}', 0, '', '2000-01-01', {})", vec!["?"; state.len()].join(", "));
    let values = vec![row.as_str(); rows].join(", ");
    let updates: Vec<String> = state.iter().map(|name| format!("{name} = VALUES({name})")).collect();
    let updates = updates.join(", ");
    format!(
        concat!("INSERT INTO transactions (", columns!(), ") VALUES {} ON DUPLICATE KEY UPDATE {}"),
        values, updates
    )
}

/// How many of [`columns`] no move changes; they come first.
const UNCHANGING: usize = 6;

/// An insert of `rows` rows; takes [`bind_row`] of each.
pub(super) fn insert(rows: usize) -> String {
    let row = format!("({})", vec!["?"; columns!().split(", ").count()].join(", "));
    let values = vec![row.as_str(); rows].join(", ");
    format!(concat!("INSERT INTO transactions (", columns!(), ") VALUES {}"), values)
}

/// The same for rows that are as they were accepted; takes [`bind_accepted`] of each. A third of the values is two
/// thirds of the work saved on both sides.
pub(super) fn insert_accepted(rows: usize) -> String {
    let values = vec!["(?, ?, ?, 0, ?, ?, 'pending', 1, ?, 0, 0, 0, 0, ?)"; rows].join(", ");
    format!(
        "INSERT INTO transactions (id, type, request, imported, api_key, createdAt, status, version, updatedAt, \
         attempts, reroutes, replays, auto_replayed, check_at) VALUES {values}"
    )
}

/// Whether nothing has happened to the row yet, so that [`insert_accepted`] will do.
pub(super) fn is_as_accepted(row: &Transaction) -> bool {
    let Transaction {
        id: _,
        kind: _,
        status,
        version,
        request: _,
        imported,
        call: _,
        forward: _,
        retry_on_failure: _,
        api_key: _,
        created_at: _,
        updated_at: _,
        confirmed_at,
        hash,
        block_number,
        from,
        claim,
        binding,
        attempts,
        reroutes,
        replays,
        auto_replayed,
        avoid,
        failed_by,
        error_message,
        result,
        check_at: _,
        relayer_says,
        cancel_requested_at,
    } = row;
    let untouched = (*status, *version) == (Status::Pending, 1) && !imported && !auto_replayed;
    untouched
        && (*attempts, *reroutes, *replays) == (0, 0, 0)
        && (confirmed_at.is_none() && hash.is_none() && block_number.is_none() && from.is_none())
        && (claim.is_none() && binding.is_none())
        && (avoid.is_none() && failed_by.is_none() && error_message.is_none() && result.is_none())
        && (relayer_says.is_none() && cancel_requested_at.is_none())
}

/// The values of a row that is as it was accepted.
pub(super) fn bind_accepted<'q>(statement: Statement<'q>, row: &Transaction) -> Statement<'q> {
    statement
        .bind(id(row.id))
        .bind(row.kind.name())
        .bind(&*row.request)
        .bind(&row.api_key)
        .bind(datetime(row.created_at))
        .bind(datetime(row.updated_at))
        .bind(row.check_at.map(datetime))
}

/// Every value of a row, in the order of the columns.
pub(super) fn bind_row<'q>(statement: Statement<'q>, row: &Transaction) -> Statement<'q> {
    let statement = statement
        .bind(id(row.id))
        .bind(row.kind.name())
        .bind(&*row.request)
        .bind(row.imported)
        .bind(&row.api_key)
        .bind(datetime(row.created_at));
    bind_state(statement, row)
}

/// The values that a move may change, in the order of the columns.
pub(super) fn bind_state<'q>(statement: Statement<'q>, row: &Transaction) -> Statement<'q> {
    let claim = row.claim.as_ref();
    let unknown = claim.and_then(|claim| claim.unknown.as_ref());
    let binding = row.binding.as_ref();
    let at = |moment: Option<Timestamp>| moment.map(datetime);
    statement
        .bind(row.status.name())
        .bind(row.version)
        .bind(datetime(row.updated_at))
        .bind(at(row.confirmed_at))
        .bind(&row.hash)
        .bind(&row.from)
        .bind(claim.map(|claim| &claim.consumer.0))
        .bind(claim.map(|claim| claim.token.as_bytes().as_slice()))
        .bind(claim.map(|claim| &claim.relayer.0))
        .bind(claim.map(|claim| datetime(claim.at)))
        .bind(unknown.map(|unknown| &unknown.reason))
        .bind(unknown.map(|unknown| datetime(unknown.open_until)))
        .bind(unknown.map(|unknown| unknown.kind.name()))
        .bind(at(unknown.and_then(|unknown| unknown.absent_since)))
        .bind(binding.map(|binding| &binding.relayer.0))
        .bind(binding.map(|binding| &binding.tx_id.0))
        .bind(binding.map(|binding| datetime(binding.at)))
        .bind(binding.map(|binding| binding.progress.name()))
        .bind(binding.and_then(|binding| binding.nonce))
        .bind(at(binding.and_then(|binding| binding.forgotten_since)))
        .bind(row.attempts)
        .bind(row.reroutes)
        .bind(row.replays)
        .bind(row.auto_replayed)
        .bind(row.avoid.as_ref().map(|relayer| &relayer.0))
        .bind(row.failed_by.map(FailedBy::name))
        .bind(&row.error_message)
        .bind(row.result.as_ref().map(ToString::to_string))
        .bind(at(row.check_at))
        .bind(row.block_number)
        .bind(row.relayer_says.as_ref().map(ToString::to_string))
        .bind(at(row.cancel_requested_at))
        .bind(claim.and_then(claimed_account))
}

/// Reads a row back. The outer error is the driver's: the columns are not what this program expects.
pub(super) fn read_row(row: &MySqlRow) -> Result<Result<Transaction, StoreError>, sqlx::Error> {
    let text_id: String = row.try_get(0)?;
    let Some(id) = parse_id(&text_id) else {
        return Ok(Err(StoreError::Corrupt { table: "transactions", column: "id", id: text_id }));
    };
    let at = |index: usize| row.try_get::<Option<PrimitiveDateTime>, _>(index).map(|at| at.map(milliseconds));
    let must = |index: usize| row.try_get::<PrimitiveDateTime, _>(index).map(milliseconds);
    let token: Option<Vec<u8>> = row.try_get(13)?;
    let token = token.and_then(|token| <[u8; 16]>::try_from(token).ok());
    let raw = RawRow {
        id: id.0.into_bytes(),
        kind: row.try_get(1)?,
        // JSON has a type of its own on MySQL and is text on MariaDB. Both send it as text.
        request: row.try_get_unchecked(2)?,
        imported: row.try_get(3)?,
        api_key: row.try_get(4)?,
        created_at: must(5)?,
        status: row.try_get(6)?,
        version: row.try_get(7)?,
        updated_at: must(8)?,
        confirmed_at: at(9)?,
        hash: row.try_get(10)?,
        sender: row.try_get(11)?,
        claim: (row.try_get(12)?, token, row.try_get(14)?, at(15)?),
        unknown: (row.try_get(16)?, at(17)?, row.try_get(18)?, at(19)?),
        binding: (row.try_get(20)?, row.try_get(21)?, at(22)?, row.try_get(23)?, row.try_get(24)?, at(25)?),
        attempts: row.try_get(26)?,
        reroutes: row.try_get(27)?,
        replays: row.try_get(28)?,
        auto_replayed: row.try_get(29)?,
        avoid: row.try_get(30)?,
        failed_by: row.try_get(31)?,
        error_message: row.try_get(32)?,
        result: row.try_get_unchecked(33)?,
        check_at: at(34)?,
        block_number: row.try_get(35)?,
        relayer_says: row.try_get_unchecked(36)?,
        cancel_requested_at: at(37)?,
        claim_account: row.try_get(38)?,
    };
    Ok(raw.read().map(as_queued))
}

/// Size of what may be large: the request, the error, the result, and the relayer's record.
pub(super) fn size_bytes(row: &MySqlRow) -> Result<usize, sqlx::Error> {
    let size = |index: usize| row.try_get_unchecked::<Option<&str>, _>(index).map(|text| text.map_or(0, str::len));
    Ok(size(2)? + size(32)? + size(33)? + size(36)?)
}

/// MySQL keeps JSON in its own order and spacing; the message is to be the same each time it is made.
fn as_queued(mut row: Transaction) -> Transaction {
    row.request = match &row.forward {
        Some(forward) => forward.to_json().into(),
        None => DirectRequest { call: row.call.clone(), retry_on_failure: row.retry_on_failure }.to_json().into(),
    };
    row
}

/// An id as it is stored.
pub(super) fn id(id: TransactionId) -> String {
    id.0.as_hyphenated().to_string()
}

/// A stored id.
pub(super) fn parse_id(text: &str) -> Option<TransactionId> {
    Uuid::try_parse(text).ok().map(TransactionId)
}

/// A moment as it is stored: to the millisecond, in UTC. What no DATETIME can hold becomes the nearest that it can.
pub(super) fn datetime(at: Timestamp) -> PrimitiveDateTime {
    // The years 1000 and 9999.
    const MIN_MS: i64 = -30_610_224_000_000;
    const MAX_MS: i64 = 253_402_300_799_999;
    let nanoseconds = i128::from(at.0.clamp(MIN_MS, MAX_MS)) * 1_000_000;
    let moment = OffsetDateTime::from_unix_timestamp_nanos(nanoseconds).expect("it is within four-digit years");
    PrimitiveDateTime::new(moment.date(), moment.time())
}

/// The milliseconds of a stored moment.
pub(super) fn milliseconds(at: PrimitiveDateTime) -> i64 {
    let nanoseconds = at.assume_utc().unix_timestamp_nanos();
    i64::try_from(nanoseconds.div_euclid(1_000_000)).expect("the milliseconds of four-digit years fit")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_kept_to_the_millisecond_and_within_what_a_datetime_holds() {
        for at in [0, 1, 999, -1, 1_700_000_000_123] {
            assert_eq!(milliseconds(datetime(Timestamp(at))), at);
        }
        assert_eq!(datetime(Timestamp(i64::MAX)).to_string(), "9999-12-31 23:59:59.999");
        assert_eq!(datetime(Timestamp(i64::MIN)).to_string(), "1000-01-01 0:00:00.0");
    }

    #[test]
    fn an_insert_has_as_many_places_as_columns() {
        let columns = columns!().split(',').count();
        assert_eq!(insert(3).matches('?').count(), 3 * columns);
        assert_eq!(update_many(2).matches('?').count(), 2 * (columns - UNCHANGING + 1));
        assert_eq!(insert_accepted(3).matches('?').count(), 3 * 7);
    }
}
