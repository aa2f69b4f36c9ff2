//! Makes events due again, or for the first time, because a client or an operator asks for it.

use std::collections::BTreeSet;

use rusqlite::{Connection, params};
use uuid::Uuid;

use super::attempt_record::{EARLIER, park_followers};
use crate::relay::state::event::EventId;
use crate::relay::state::transaction::TransactionId;
use crate::relay::store::notifications::{
    EVERY_KEY, Endpoint, EndpointId, EventPlace, MissedPage, PARKED, REQUEUED_AT_ONCE,
};
use crate::timestamp::Timestamp;

pub(super) fn requeue_event(
    connection: &Connection,
    endpoint: &Endpoint,
    event: &EventId,
    now: Timestamp,
) -> Result<u64, rusqlite::Error> {
    let added = connection.execute(
        "INSERT INTO webhook_deliveries (endpoint_id, event_id, transaction_id, position, created_at, due_at, attempts) \
         SELECT ?1, id, transaction_id, position, created_at, ?3, 0 FROM events \
         WHERE id = ?2 AND (api_key = ?4 OR ?4 = ?5) AND EXISTS (SELECT 1 FROM webhook_endpoints WHERE id = ?1) \
         ON CONFLICT (endpoint_id, event_id) DO NOTHING",
        params![endpoint.id.0.as_bytes(), event.0, now.0, endpoint.owner, EVERY_KEY],
    )?;
    let again = due_again(connection, endpoint.id, [event.0.as_str()], now)?;
    park_followers(connection, endpoint.id, &again, now)?;
    Ok(u64::from(added + again.len() > 0))
}

/// Makes some of the events due now that wait for their next attempt, and ends the endpoint's pause; 0 once there are none
/// left.
pub(super) fn hurry(
    connection: &Connection,
    endpoint: EndpointId,
    since: Timestamp,
    now: Timestamp,
) -> Result<u64, rusqlite::Error> {
    let mut statement = connection.prepare_cached(
        "UPDATE webhook_deliveries SET due_at = ?3 WHERE endpoint_id = ?1 AND event_id IN (SELECT event_id \
          FROM webhook_deliveries INDEXED BY webhook_deliveries_due WHERE endpoint_id = ?1 AND due_at > ?3 \
          AND due_at < ?4 AND created_at >= ?2 AND lease IS NULL LIMIT ?5)",
    )?;
    connection
        .prepare_cached("UPDATE webhook_endpoints SET paused_until = NULL WHERE id = ?1 AND paused_until IS NOT NULL")?
        .execute([endpoint.0.as_bytes()])?;
    let max = i64::try_from(REQUEUED_AT_ONCE).unwrap_or(i64::MAX);
    let hurried = statement.execute(params![endpoint.0.as_bytes(), since.0, now.0, PARKED.0, max])?;
    Ok(hurried as u64)
}

/// Makes some of the events due that were given up and still exist; 0 once there are none left.
pub(super) fn requeue_given_up(
    connection: &Connection,
    endpoint: EndpointId,
    since: Timestamp,
    now: Timestamp,
) -> Result<u64, rusqlite::Error> {
    let mut statement = connection.prepare_cached(
        "SELECT event_id FROM webhook_deliveries WHERE endpoint_id = ?1 AND ended = 'given-up' AND created_at >= ?2 \
         AND EXISTS (SELECT 1 FROM events WHERE id = event_id) LIMIT ?3",
    )?;
    let max = i64::try_from(REQUEUED_AT_ONCE).unwrap_or(i64::MAX);
    let found = statement.query_map(params![endpoint.0.as_bytes(), since.0, max], |row| row.get::<_, String>(0))?;
    let found = found.collect::<Result<Vec<_>, _>>()?;
    let again = due_again(connection, endpoint, found.iter().map(String::as_str), now)?;
    park_followers(connection, endpoint, &again, now)?;
    Ok(found.len() as u64)
}

/// Makes these deliveries due, as if none had been tried; returns their transactions.
fn due_again<'a>(
    connection: &Connection,
    endpoint: EndpointId,
    events: impl IntoIterator<Item = &'a str>,
    now: Timestamp,
) -> Result<BTreeSet<TransactionId>, rusqlite::Error> {
    let mut again = connection.prepare_cached(
        "UPDATE webhook_deliveries SET due_at = ?3, lease = NULL, attempts = 0, ended_at = NULL, ended = NULL \
         WHERE endpoint_id = ?1 AND event_id = ?2 AND EXISTS (SELECT 1 FROM events WHERE id = ?2) RETURNING transaction_id",
    )?;
    let mut transactions = BTreeSet::new();
    for event in events {
        let changed = again.query_map(params![endpoint.0.as_bytes(), event, now.0], |row| row.get::<_, [u8; 16]>(0))?;
        for transaction in changed {
            transactions.insert(TransactionId(Uuid::from_bytes(transaction?)));
        }
    }
    Ok(transactions)
}

/// What the endpoint has missed among the next events after this place.
pub(super) fn read_missed(
    connection: &Connection,
    endpoint: &Endpoint,
    after: &EventPlace,
) -> Result<MissedPage, rusqlite::Error> {
    // NULL without a delivery; true for one that is parked behind none.
    let of_owner = if endpoint.owner == EVERY_KEY { "?3 = ?3" } else { "api_key = ?3" };
    let sql = format!(
        "SELECT id, created_at, type, (SELECT due_at IS ?6 AND NOT {EARLIER} FROM webhook_deliveries \
          WHERE endpoint_id = ?5 AND event_id = events.id) FROM events \
         WHERE {of_owner} AND (created_at, id) > (?1, ?2) ORDER BY created_at, id LIMIT ?4"
    );
    let max = i64::try_from(REQUEUED_AT_ONCE).unwrap_or(i64::MAX);
    let mut statement = connection.prepare_cached(&sql)?;
    let id = endpoint.id.0.as_bytes();
    let mut rows = statement.query(params![after.0.0, after.1, endpoint.owner, max, id, PARKED.0])?;
    let mut page = MissedPage::default();
    while let Some(row) = rows.next()? {
        let kind: String = row.get(2)?;
        page.add(endpoint, (Timestamp(row.get(1)?), row.get(0)?), &kind, row.get(3)?);
    }
    Ok(page)
}

/// Makes these events due, unless an earlier one of their transaction waits by now.
pub(super) fn release_stranded(
    connection: &Connection,
    endpoint: EndpointId,
    events: &[String],
    now: Timestamp,
) -> Result<(), rusqlite::Error> {
    let mut find = connection.prepare_cached("SELECT transaction_id FROM events WHERE id = ?1")?;
    let mut transactions = BTreeSet::new();
    for event in events {
        for transaction in find.query_map([event], |row| row.get::<_, [u8; 16]>(0))? {
            transactions.insert(TransactionId(Uuid::from_bytes(transaction?)));
        }
    }
    park_followers(connection, endpoint, &transactions, now)
}

/// Adds these events, unless the endpoint has them by now; returns how many.
pub(super) fn add_missed(
    connection: &Connection,
    endpoint: EndpointId,
    events: &[String],
    now: Timestamp,
) -> Result<u64, rusqlite::Error> {
    let mut add = connection.prepare_cached(
        "INSERT INTO webhook_deliveries (endpoint_id, event_id, transaction_id, position, created_at, due_at, attempts) \
         SELECT ?1, id, transaction_id, position, created_at, ?3, 0 FROM events WHERE id = ?2 \
         AND EXISTS (SELECT 1 FROM webhook_endpoints WHERE id = ?1) \
         ON CONFLICT (endpoint_id, event_id) DO NOTHING RETURNING transaction_id",
    )?;
    let (mut added, mut transactions) = (0, BTreeSet::new());
    for event in events {
        let new = add.query_map(params![endpoint.0.as_bytes(), event, now.0], |row| row.get::<_, [u8; 16]>(0))?;
        for transaction in new {
            added += 1;
            transactions.insert(TransactionId(Uuid::from_bytes(transaction?)));
        }
    }
    park_followers(connection, endpoint, &transactions, now)?;
    Ok(added)
}
