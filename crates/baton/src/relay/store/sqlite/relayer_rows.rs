//! What one relayer holds. Each query names its index: the planner has no statistics to prefer it by.

use rusqlite::{Connection, OptionalExtension, params};

use crate::relay::store::{RecentSince, RelayerRows};
use crate::timestamp::Timestamp;

pub(super) fn of(
    connection: &Connection,
    relayer: &str,
    recent_since: RecentSince,
) -> Result<RelayerRows, rusqlite::Error> {
    // Claims first: a row that is bound in between is then counted twice, not missed.
    let (claimed, claimed_lately): (u64, u64) = connection
        .prepare_cached(
            "SELECT COUNT(*), COUNT(CASE WHEN claim_at >= ?2 THEN 1 END) \
             FROM transactions INDEXED BY transactions_due_claimed \
             WHERE claim_consumer IS NOT NULL AND claim_relayer = ?1",
        )?
        .query_row(params![relayer, recent_since.open_since.0], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let (bound, signed, nonce_min, nonce_max, bound_lately, oldest_unsigned, unsigned_lately) = connection
        .prepare_cached(
            "SELECT COUNT(*), COUNT(relayer_nonce), MIN(relayer_nonce), MAX(relayer_nonce), \
             COUNT(CASE WHEN bound_at >= ?2 THEN 1 END), \
             MIN(CASE WHEN relayer_nonce IS NULL AND bound_at >= ?2 THEN bound_at END), \
             COUNT(CASE WHEN relayer_nonce IS NULL AND bound_at >= ?2 THEN 1 END) \
             FROM transactions INDEXED BY transactions_open_at_relayer \
             WHERE relayer_url = ?1 AND check_at IS NOT NULL",
        )?
        .query_row(params![relayer, recent_since.open_since.0], |row| {
            Ok((
                row.get::<_, u64>(0)?,
                row.get::<_, u64>(1)?,
                row.get::<_, Option<u64>>(2)?,
                row.get::<_, Option<u64>>(3)?,
                row.get::<_, u64>(4)?,
                row.get::<_, Option<i64>>(5)?,
                row.get::<_, u64>(6)?,
            ))
        })?;
    let oldest_signed: Option<(u64, i64)> = connection
        .prepare_cached(
            "SELECT relayer_nonce, bound_at FROM transactions INDEXED BY transactions_open_at_relayer \
             WHERE relayer_url = ?1 AND relayer_nonce = ?2 AND check_at IS NOT NULL \
             ORDER BY bound_at LIMIT 1",
        )?
        .query_row(params![relayer, nonce_min], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()?;
    let last_ended: Option<i64> = connection
        .prepare_cached(
            "SELECT updated_at FROM transactions INDEXED BY transactions_ended_at_relayer \
             WHERE relayer_url = ?1 AND check_at IS NULL ORDER BY updated_at DESC LIMIT 1",
        )?
        .query_row([relayer], |row| row.get(0))
        .optional()?;
    let ended = connection
        .prepare_cached(
            "SELECT COUNT(*) FROM (SELECT 1 FROM transactions INDEXED BY transactions_ended_at_relayer \
             WHERE relayer_url = ?1 AND updated_at >= ?2 AND check_at IS NULL LIMIT ?3)",
        )?
        .query_row(params![relayer, recent_since.ended_since.0, recent_since.ended_max], |row| row.get(0))?;
    Ok(RelayerRows {
        bound,
        claimed,
        recent: bound_lately + claimed_lately,
        recent_unsigned: unsigned_lately + claimed_lately,
        unsigned: bound - signed,
        oldest_unsigned: oldest_unsigned.map(Timestamp),
        oldest_signed: oldest_signed.map(|(nonce, at)| (nonce, Timestamp(at))),
        nonce_max,
        ended,
        last_ended: last_ended.map(Timestamp),
    })
}
