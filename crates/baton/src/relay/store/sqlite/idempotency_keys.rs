//! Idempotency keys: requests under one key become one transaction. There is one writer, so none comes in between.

use rusqlite::{Connection, OptionalExtension, params};
use uuid::Uuid;

use crate::relay::state::transaction::{Transaction, TransactionId};
use crate::relay::store::{Accepted, IdempotencyKey, KeyOwner};

/// The answer to a request whose key an earlier one has: its transaction, or that the key belongs to another request.
pub(super) fn earlier_request(
    connection: &Connection,
    row: &Transaction,
    key: &IdempotencyKey,
) -> Result<Option<Accepted>, rusqlite::Error> {
    let owner = key_owner(connection, &row.api_key, &key.key)?;
    Ok(owner.map(|owner| {
        if owner.body_sha256 == key.body_sha256 { Accepted::Duplicate(owner.id) } else { Accepted::KeyReused }
    }))
}

pub(super) fn take_key(
    connection: &Connection,
    row: &Transaction,
    key: &IdempotencyKey,
) -> Result<(), rusqlite::Error> {
    connection
        .prepare_cached(
            "INSERT INTO idempotency_keys (api_key, key, body_sha256, transaction_id) VALUES (?1, ?2, ?3, ?4)",
        )?
        .execute(params![row.api_key, key.key, key.body_sha256, row.id.0.as_bytes()])?;
    Ok(())
}

pub(super) fn key_owner(
    connection: &Connection,
    api_key: &str,
    key: &str,
) -> Result<Option<KeyOwner>, rusqlite::Error> {
    connection
        .prepare_cached("SELECT body_sha256, transaction_id FROM idempotency_keys WHERE api_key = ?1 AND key = ?2")?
        .query_row([api_key, key], |row| {
            Ok(KeyOwner { id: TransactionId(Uuid::from_bytes(row.get(1)?)), body_sha256: row.get(0)? })
        })
        .optional()
}
