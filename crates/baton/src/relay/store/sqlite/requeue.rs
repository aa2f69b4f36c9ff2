//! Makes events due again, or for the first time, because a client or an operator asks for it.

use rusqlite::{Connection, params};

use super::attempt_record::park_followers;
use crate::relay::state::event::EventId;
use crate::relay::store::notifications::{EVERY_KEY, Endpoint, EndpointId, REQUEUED_AT_ONCE};
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
         WHERE id = ?2 AND (api_key = ?4 OR ?4 = ?5) ON CONFLICT (endpoint_id, event_id) DO NOTHING",
        params![endpoint.id.0.as_bytes(), event.0, now.0, endpoint.owner, EVERY_KEY],
    )?;
    let again = connection.execute(
        "UPDATE webhook_deliveries SET due_at = ?3, lease = NULL, attempts = 0, ended_at = NULL, ended = NULL \
         WHERE endpoint_id = ?1 AND event_id = ?2 AND EXISTS (SELECT 1 FROM events WHERE id = ?2)",
        params![endpoint.id.0.as_bytes(), event.0, now.0],
    )?;
    park_followers(connection, endpoint.id, now)?;
    Ok(u64::from(added + again > 0))
}

/// Makes some of the events due that were given up; 0 once there are none left.
pub(super) fn requeue_given_up(
    connection: &Connection,
    endpoint: EndpointId,
    since: Timestamp,
    now: Timestamp,
) -> Result<u64, rusqlite::Error> {
    let max = i64::try_from(REQUEUED_AT_ONCE).unwrap_or(i64::MAX);
    let again = connection.execute(
        "UPDATE webhook_deliveries SET due_at = ?3, lease = NULL, attempts = 0, ended_at = NULL, ended = NULL \
         WHERE endpoint_id = ?1 AND event_id IN (SELECT event_id FROM webhook_deliveries \
          WHERE endpoint_id = ?1 AND ended = 'given-up' AND created_at >= ?2 LIMIT ?4)",
        params![endpoint.0.as_bytes(), since.0, now.0, max],
    )?;
    Ok(again as u64)
}

/// A place among the events of a key: time and id.
pub(super) type EventPlace = (Timestamp, String);

/// Adds what the endpoint has missed among the next events after this place; returns how many, and the place to go on from.
pub(super) fn add_missed(
    connection: &Connection,
    endpoint: &Endpoint,
    after: &EventPlace,
    now: Timestamp,
) -> Result<(u64, Option<EventPlace>), rusqlite::Error> {
    let of_owner = if endpoint.owner == EVERY_KEY { "?3 = ?3" } else { "api_key = ?3" };
    let sql = format!(
        "SELECT id, created_at, type FROM events WHERE {of_owner} AND (created_at, id) > (?1, ?2) \
         ORDER BY created_at, id LIMIT ?4"
    );
    let max = i64::try_from(REQUEUED_AT_ONCE).unwrap_or(i64::MAX);
    let mut statement = connection.prepare_cached(&sql)?;
    let found = statement.query_map(params![after.0.0, after.1, endpoint.owner, max], |row| {
        Ok((row.get::<_, String>(0)?, Timestamp(row.get(1)?), row.get::<_, String>(2)?))
    })?;
    let found = found.collect::<Result<Vec<_>, _>>()?;
    let mut add = connection.prepare_cached(
        "INSERT INTO webhook_deliveries (endpoint_id, event_id, transaction_id, position, created_at, due_at, attempts) \
         SELECT ?1, id, transaction_id, position, created_at, ?3, 0 FROM events WHERE id = ?2 \
         ON CONFLICT (endpoint_id, event_id) DO NOTHING",
    )?;
    let mut added = 0;
    for (id, _, kind) in &found {
        if endpoint.events.iter().any(|wanted| wanted.name() == kind) {
            added += add.execute(params![endpoint.id.0.as_bytes(), id, now.0])?;
        }
    }
    let next = (found.len() == REQUEUED_AT_ONCE).then(|| found.last().map(|(id, at, _)| (*at, id.clone()))).flatten();
    Ok((added as u64, next))
}
