//! The statements of one write job. They run inside the caller's transaction; an error undoes the whole job.

use rusqlite::{Connection, OptionalExtension, params};
use uuid::Uuid;

use super::columns::insert;
use super::idempotency_keys::{earlier_request, take_key};
use crate::relay::state::transaction::{RelayerTxId, Step, Transaction, TransactionId};
use crate::relay::store::row::timeline_max;
use crate::relay::store::{Accepted, IdempotencyKey};
use crate::timestamp::Timestamp;

const ADD_STEP: &str = "INSERT INTO timeline (transaction_id, seq, at, action, detail) \
     SELECT ?1, COALESCE(MAX(seq), 0) + 1, ?2, ?3, ?4 FROM timeline WHERE transaction_id = ?1 \
     HAVING COALESCE(MAX(seq), 0) < ?5";

/// Stores a new row with its key and its nonce, unless one of them is taken; then nothing is written.
pub(super) fn accept(
    connection: &Connection,
    row: &Transaction,
    key: Option<&IdempotencyKey>,
) -> Result<Accepted, rusqlite::Error> {
    if let Some(key) = key
        && let Some(earlier) = earlier_request(connection, row, key)?
    {
        return Ok(earlier);
    }
    if let Some(holder) = nonce_taken_by(connection, row)? {
        return Ok(Accepted::NonceTaken(holder));
    }
    if let Some(key) = key {
        take_key(connection, row, key)?;
    }
    if let Some(forward) = &row.forward {
        connection
            .prepare_cached(
                "INSERT OR REPLACE INTO gasless_nonces (signer, nonce, transaction_id) VALUES (?1, ?2, ?3)",
            )?
            .execute(params![forward.signer().to_string(), forward.nonce(), row.id.0.as_bytes()])?;
    }
    insert(connection, row)?;
    Ok(Accepted::Stored)
}

/// The transaction, not failed, that holds the nonce of a gasless row.
fn nonce_taken_by(connection: &Connection, row: &Transaction) -> Result<Option<TransactionId>, rusqlite::Error> {
    let Some(forward) = &row.forward else { return Ok(None) };
    connection
        .prepare_cached(
            "SELECT id FROM gasless_nonces AS taken JOIN transactions ON id = taken.transaction_id \
             WHERE taken.signer = ?1 AND taken.nonce = ?2 AND status <> 'failed'",
        )?
        .query_row(params![forward.signer().to_string(), forward.nonce()], |row| {
            Ok(TransactionId(Uuid::from_bytes(row.get(0)?)))
        })
        .optional()
}

/// The owner of the relayer transaction that a row is bound to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum RecordOwner {
    /// The row is not bound.
    None,
    /// The row itself, since this statement.
    New,
    /// The row itself, since an earlier move.
    Known,
    /// Another row.
    OtherRow,
}

/// Makes a bound row the owner of its relayer transaction unless another row owns it.
pub(super) fn take_record(connection: &Connection, row: &Transaction) -> Result<RecordOwner, rusqlite::Error> {
    match &row.binding {
        Some(binding) => own_record(connection, &binding.tx_id, row.id),
        None => Ok(RecordOwner::None),
    }
}

/// Makes a row the owner of a relayer transaction unless another row owns it.
pub(super) fn own_record(
    connection: &Connection,
    tx_id: &RelayerTxId,
    id: TransactionId,
) -> Result<RecordOwner, rusqlite::Error> {
    let id = id.0.as_bytes();
    let owner: Option<[u8; 16]> = connection
        .prepare_cached("SELECT transaction_id FROM relayer_transactions WHERE relayer_tx_id = ?1")?
        .query_row([&tx_id.0], |row| row.get(0))
        .optional()?;
    match owner {
        Some(owner) if owner == *id => Ok(RecordOwner::Known),
        Some(_) => Ok(RecordOwner::OtherRow),
        None => {
            connection
                .prepare_cached("INSERT INTO relayer_transactions (relayer_tx_id, transaction_id) VALUES (?1, ?2)")?
                .execute(params![tx_id.0, id])?;
            Ok(RecordOwner::New)
        }
    }
}

/// Whether webhooks about the row's relayer transaction arrived before the bind.
pub(super) fn has_early(connection: &Connection, row: &Transaction) -> Result<bool, rusqlite::Error> {
    let Some(binding) = &row.binding else { return Ok(false) };
    connection.prepare_cached("SELECT 1 FROM early_webhooks WHERE relayer_tx_id = ?1")?.exists([&binding.tx_id.0])
}

pub(super) fn add_step(
    connection: &Connection,
    id: TransactionId,
    step: &Step,
    at: Timestamp,
) -> Result<(), rusqlite::Error> {
    let max = timeline_max(step);
    connection.prepare_cached(ADD_STEP)?.execute(params![id.0.as_bytes(), at.0, step.action, step.detail, max])?;
    Ok(())
}

/// Whether no other row, stored or in this slice, owns a relayer transaction that one of the rows is bound to.
pub(super) fn records_are_free(connection: &Connection, rows: &[Transaction]) -> Result<bool, rusqlite::Error> {
    let mut seen = std::collections::HashSet::new();
    let mut owner = connection.prepare_cached("SELECT 1 FROM relayer_transactions WHERE relayer_tx_id = ?1")?;
    for binding in rows.iter().filter_map(|row| row.binding.as_ref()) {
        if !seen.insert(&binding.tx_id) || owner.exists([&binding.tx_id.0])? {
            return Ok(false);
        }
    }
    Ok(true)
}
