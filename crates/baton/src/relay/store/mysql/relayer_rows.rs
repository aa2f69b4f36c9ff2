//! What one relayer holds. The index is forced: MariaDB reads the whole table while its statistics are old.

use sqlx::{MySqlConnection, Row};
use time::PrimitiveDateTime;

use super::columns::{datetime, milliseconds};
use crate::relay::store::{RecentSince, RelayerRows};
use crate::timestamp::Timestamp;

pub(super) async fn of(
    connection: &mut MySqlConnection,
    relayer: &str,
    recent_since: RecentSince,
) -> Result<RelayerRows, sqlx::Error> {
    // Claims first: a row that is bound in between is then counted twice, not missed.
    let row = sqlx::query(
        "SELECT COUNT(*), COUNT(CASE WHEN claim_at >= ? THEN 1 END) \
         FROM transactions FORCE INDEX (transactions_at_relayer) WHERE relayer = ? AND waits_for = 'claimed'",
    )
    .bind(datetime(recent_since.open_since))
    .bind(relayer)
    .fetch_one(&mut *connection)
    .await?;
    let (claimed, claimed_lately) = (number(row.try_get(0)?), number(row.try_get(1)?));
    let row = sqlx::query(
        "SELECT COUNT(*), COUNT(relayer_nonce), MIN(relayer_nonce), MAX(relayer_nonce), \
         COUNT(CASE WHEN bound_at >= ? THEN 1 END), \
         MIN(CASE WHEN relayer_nonce IS NULL AND bound_at >= ? THEN bound_at END), \
         COUNT(CASE WHEN relayer_nonce IS NULL AND bound_at >= ? THEN 1 END) \
         FROM transactions FORCE INDEX (transactions_at_relayer) WHERE relayer = ? AND waits_for = 'bound'",
    )
    .bind(datetime(recent_since.open_since))
    .bind(datetime(recent_since.open_since))
    .bind(datetime(recent_since.open_since))
    .bind(relayer)
    .fetch_one(&mut *connection)
    .await?;
    let (bound, signed) = (number(row.try_get(0)?), number(row.try_get(1)?));
    let (nonce_min, nonce_max): (Option<u64>, Option<u64>) = (row.try_get(2)?, row.try_get(3)?);
    let (bound_lately, oldest_unsigned) = (number(row.try_get(4)?), moment(row.try_get(5)?));
    let unsigned_lately = number(row.try_get(6)?);
    let oldest_signed = match nonce_min {
        None => None,
        Some(nonce) => {
            let row = sqlx::query(
                "SELECT bound_at FROM transactions FORCE INDEX (transactions_relayer_nonce) \
                 WHERE oz_relayer_url = ? AND relayer_nonce = ? AND waits_for = 'bound' ORDER BY bound_at LIMIT 1",
            )
            .bind(relayer)
            .bind(nonce)
            .fetch_optional(&mut *connection)
            .await?;
            match row {
                Some(row) => moment(row.try_get(0)?).map(|at| (nonce, at)),
                None => None,
            }
        }
    };
    let row = sqlx::query(
        "SELECT updatedAt FROM transactions FORCE INDEX (transactions_at_relayer) \
         WHERE relayer = ? AND waits_for IS NULL ORDER BY updatedAt DESC LIMIT 1",
    )
    .bind(relayer)
    .fetch_optional(&mut *connection)
    .await?;
    let last_ended = match row {
        Some(row) => moment(row.try_get(0)?),
        None => None,
    };
    let row = sqlx::query(
        "SELECT COUNT(*) FROM (SELECT 1 FROM transactions FORCE INDEX (transactions_at_relayer) \
         WHERE relayer = ? AND waits_for IS NULL AND updatedAt >= ? LIMIT ?) AS ended",
    )
    .bind(relayer)
    .bind(datetime(recent_since.ended_since))
    .bind(recent_since.ended_max)
    .fetch_one(connection)
    .await?;
    Ok(RelayerRows {
        bound,
        claimed,
        recent: bound_lately + claimed_lately,
        recent_unsigned: unsigned_lately + claimed_lately,
        unsigned: bound.saturating_sub(signed),
        oldest_unsigned,
        oldest_signed,
        nonce_max,
        ended: number(row.try_get(0)?),
        last_ended,
    })
}

fn number(counted: i64) -> u64 {
    u64::try_from(counted).unwrap_or(0)
}

fn moment(at: Option<PrimitiveDateTime>) -> Option<Timestamp> {
    at.map(|at| Timestamp(milliseconds(at)))
}
