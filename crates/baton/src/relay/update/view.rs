//! A transaction as clients see it, in the status, the list and the cache.

use serde_json::{Value, json};

use super::cache::{Cache, Entry};
use crate::relay::state::transaction::Transaction;

/// A transaction for the cache, if it may be kept.
pub fn entry(row: &Transaction) -> Option<Entry> {
    Cache::keeps(row.status).then(|| Entry { id: row.id, version: row.version, shown: show(row) })
}

/// A transaction as clients see it.
pub fn show(row: &Transaction) -> Value {
    let binding = row.binding.as_ref();
    let claim = row.claim.as_ref();
    json!({
        "transactionId": row.id.to_string(),
        "status": row.status.name(),
        "hash": row.hash,
        "transactionHash": row.hash,
        "block_number": row.block_number,
        "createdAt": row.created_at,
        "updatedAt": row.updated_at,
        "confirmedAt": row.confirmed_at,
        "from": row.from,
        "to": row.call.to.to_checksum(None),
        "value": row.call.value.to_string(),
        "type": row.kind.name(),
        "ozRelayerTxId": binding.map(|binding| binding.tx_id.0.as_str()),
        "ozRelayerUrl": binding.map(|binding| &binding.relayer).or(claim.map(|claim| &claim.relayer)).map(|url| url.0.as_str()),
        "outcomeUnknown": row.outcome_unknown(),
        "unverified": row.is_unverified(),
        "result": row.result,
        "error_message": row.error_message,
    })
}
