//! Idempotency keys: requests under one key become one transaction. The unique index decides between concurrent ones.

use std::collections::HashMap;

use sqlx::{AssertSqlSafe, MySqlConnection, Row};

use super::accept::chunks;
use super::columns::{id, parse_id};
use crate::relay::state::transaction::{Transaction, TransactionId};
use crate::relay::store::{Accepted, IdempotencyKey, NewTransaction};

/// Takes the keys that are free and reads the owner of each key, which tells duplicate requests apart. A duplicate that
/// another connection is storing is waited for: its key is locked until that commit.
pub(super) async fn take_keys(
    connection: &mut MySqlConnection,
    rows: &[NewTransaction],
) -> Result<Vec<Accepted>, sqlx::Error> {
    let mut keyed: Vec<_> =
        rows.iter().filter_map(|(row, key)| key.as_ref().map(|key| (row.api_key.as_str(), key, row.id))).collect();
    // One global order, or two batches deadlock. The sort is stable: of duplicates in one batch the first wins.
    keyed.sort_by(|one, other| (one.0, &one.1.key).cmp(&(other.0, &other.1.key)));
    let mut owners = Owners::with_capacity(keyed.len());
    for some in chunks(&keyed) {
        let values = vec!["(?, ?, ?, ?)"; some.len()].join(", ");
        let take = format!(
            "INSERT INTO idempotency_keys (api_key, idempotency_key, body_sha256, transaction_id) VALUES {values} \
             ON DUPLICATE KEY UPDATE transaction_id = transaction_id"
        );
        let mut statement = sqlx::query(AssertSqlSafe(take));
        for (api_key, key, transaction) in some {
            statement = statement.bind(*api_key).bind(&key.key).bind(key.body_sha256.as_slice()).bind(id(*transaction));
        }
        statement.execute(&mut *connection).await?;
        let conditions = vec!["(api_key = ? AND idempotency_key = ?)"; some.len()].join(" OR ");
        let look = format!(
            "SELECT api_key, idempotency_key, body_sha256, transaction_id FROM idempotency_keys WHERE {conditions}"
        );
        let mut statement = sqlx::query(AssertSqlSafe(look));
        for (api_key, key, _) in some {
            statement = statement.bind(*api_key).bind(&key.key);
        }
        for row in statement.fetch_all(&mut *connection).await? {
            let name: (Vec<u8>, Vec<u8>) = (row.try_get(0)?, row.try_get(1)?);
            let body: Vec<u8> = row.try_get(2)?;
            let owner: String = row.try_get(3)?;
            owners.insert(name, (body, owner));
        }
    }
    rows.iter().map(|(row, key)| judge(row, key.as_ref(), &owners)).collect()
}

/// From API key and idempotency key to the request's hash and its transaction.
type Owners = HashMap<(Vec<u8>, Vec<u8>), (Vec<u8>, String)>;

fn judge(row: &Transaction, key: Option<&IdempotencyKey>, owners: &Owners) -> Result<Accepted, sqlx::Error> {
    let Some(key) = key else { return Ok(Accepted::Stored) };
    let name = (row.api_key.as_bytes().to_vec(), key.key.as_bytes().to_vec());
    let (body, owner) = owners.get(&name).ok_or(sqlx::Error::RowNotFound)?;
    let owner: TransactionId = parse_id(owner).ok_or_else(|| sqlx::Error::Decode("not a transaction id".into()))?;
    Ok(if owner == row.id {
        Accepted::Stored
    } else if *body == key.body_sha256 {
        Accepted::Duplicate(owner)
    } else {
        Accepted::KeyReused
    })
}
