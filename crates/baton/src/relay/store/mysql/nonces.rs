//! The nonces of gasless transactions, taken in the commit that stores the rows. A nonce that is already taken rejects
//! its own request only.

use std::collections::HashMap;

use sqlx::{AssertSqlSafe, MySqlConnection, Row};

use super::accept::chunks;
use super::columns::{datetime, id, parse_id};
use super::outcome::{End, work};
use super::pool::Pool;
use crate::relay::state::transaction::TransactionId;
use crate::relay::store::{Accepted, NewTransaction, StoreError};
use crate::timestamp::Timestamp;

/// The signer as it is stored, and the nonce.
type Place = (String, u64);

/// Takes the nonces of the gasless rows that are about to be stored. A row whose nonce belongs to a transaction that has
/// not failed is answered `NonceTaken`, and its idempotency key is released.
pub(super) async fn take_nonces(
    connection: &mut MySqlConnection,
    rows: &[NewTransaction],
    accepted: &mut [Accepted],
) -> Result<(), sqlx::Error> {
    let mut wanted: Vec<(Place, usize)> = Vec::new();
    for (index, (row, _)) in rows.iter().enumerate() {
        if let (Some(forward), Accepted::Stored) = (&row.forward, accepted[index]) {
            wanted.push(((forward.signer().to_string(), forward.nonce()), index));
        }
    }
    if wanted.is_empty() {
        return Ok(());
    }
    // One global order, or two groups deadlock. The sort is stable: of two rows in one group the first wins.
    wanted.sort_by(|(one, _), (other, _)| one.cmp(other));
    let mut holders = insert(connection, rows, &wanted).await?;
    for (place, index) in &wanted {
        let (row, key) = &rows[*index];
        let holder = holders.get_mut(place).ok_or(sqlx::Error::RowNotFound)?;
        if holder.id == row.id {
            continue;
        }
        if holder.failed {
            *holder = Holder { id: row.id, failed: false };
            sqlx::query("UPDATE gasless_nonces SET transaction_id = ? WHERE signer = ? AND nonce = ?")
                .bind(id(row.id))
                .bind(&place.0)
                .bind(place.1)
                .execute(&mut *connection)
                .await?;
            continue;
        }
        let taken = Accepted::NonceTaken(holder.id);
        for answer in accepted.iter_mut().filter(|answer| **answer == Accepted::Duplicate(row.id)) {
            *answer = taken;
        }
        accepted[*index] = taken;
        if let Some(key) = key {
            sqlx::query(
                "DELETE FROM idempotency_keys WHERE api_key = ? AND idempotency_key = ? AND transaction_id = ?",
            )
            .bind(row.api_key.as_bytes())
            .bind(key.key.as_bytes())
            .bind(id(row.id))
            .execute(&mut *connection)
            .await?;
        }
    }
    Ok(())
}

struct Holder {
    id: TransactionId,
    failed: bool,
}

/// Takes the free nonces, locks all of them until the commit, and returns the holder of each. The holder's row is locked
/// too, so that it cannot be replayed while its nonce changes hands.
async fn insert(
    connection: &mut MySqlConnection,
    rows: &[NewTransaction],
    wanted: &[(Place, usize)],
) -> Result<HashMap<Place, Holder>, sqlx::Error> {
    let mut holders = HashMap::with_capacity(wanted.len());
    for some in chunks(wanted) {
        let values = vec!["(?, ?, ?)"; some.len()].join(", ");
        let take = format!(
            "INSERT INTO gasless_nonces (signer, nonce, transaction_id) VALUES {values} \
             ON DUPLICATE KEY UPDATE transaction_id = transaction_id"
        );
        let mut statement = sqlx::query(AssertSqlSafe(take));
        for ((signer, nonce), index) in some {
            statement = statement.bind(signer).bind(nonce).bind(id(rows[*index].0.id));
        }
        statement.execute(&mut *connection).await?;
        let conditions = vec!["(signer = ? AND nonce = ?)"; some.len()].join(" OR ");
        let look = format!(
            "SELECT signer, nonce, transaction_id, status FROM gasless_nonces FORCE INDEX (PRIMARY) \
             LEFT JOIN transactions ON id = transaction_id WHERE {conditions} LOCK IN SHARE MODE"
        );
        let mut statement = sqlx::query(AssertSqlSafe(look));
        for ((signer, nonce), _) in some {
            statement = statement.bind(signer).bind(nonce);
        }
        for row in statement.fetch_all(&mut *connection).await? {
            let owner: String = row.try_get(2)?;
            let owner = parse_id(&owner).ok_or_else(|| sqlx::Error::Decode("not a transaction id".into()))?;
            let status: Option<String> = row.try_get(3)?;
            let holder = Holder { id: owner, failed: status.as_deref() == Some("failed") };
            holders.insert((row.try_get(0)?, row.try_get(1)?), holder);
        }
    }
    Ok(holders)
}

/// Records a request that failed on the chain; again, if it is recorded.
pub(super) async fn record_failed_forward(pool: &Pool, digest: [u8; 32], now: Timestamp) -> Result<(), StoreError> {
    const SQL: &str = "INSERT INTO failed_forwards (digest, at) VALUES (?, ?) ON DUPLICATE KEY UPDATE at = at";
    let digest = digest.to_vec();
    let digest = &digest;
    pool.transact(work!(connection => {
        sqlx::query(SQL).bind(digest.as_slice()).bind(datetime(now)).execute(connection).await?;
        Ok(End::Keep(()))
    }))
    .await
}

/// Whether a request is recorded.
pub(super) async fn is_failed_forward(pool: &Pool, digest: [u8; 32]) -> Result<bool, StoreError> {
    const SQL: &str = "SELECT 1 FROM failed_forwards WHERE digest = ?";
    let digest = digest.to_vec();
    let digest = &digest;
    pool.read(work!(connection => {
        Ok(sqlx::query(SQL).bind(digest.as_slice()).fetch_optional(connection).await?.is_some())
    }))
    .await
}
