//! Writes the events of a move inside the job that saves the move, with a delivery for each endpoint that asks for them.

use rusqlite::{Connection, params};

use crate::relay::state::event::{Event, EventMark, EventType};
use crate::relay::state::transaction::Transaction;
use crate::relay::store::notifications::{EVERY_KEY, PARKED};

/// What an endpoint asks for.
struct Subscription {
    endpoint: [u8; 16],
    /// Names of events, separated by commas.
    events: String,
    enabled: bool,
}

impl Subscription {
    fn wants(&self, kind: EventType) -> bool {
        self.events.split(',').any(|name| name == kind.name())
    }
}

/// Writes these events of a row as far as endpoints of its API key ask for them. A disabled endpoint gets no delivery, but
/// can have the event delivered once it is enabled.
pub(super) fn write(connection: &Connection, row: &Transaction, marks: &[EventMark]) -> Result<(), rusqlite::Error> {
    if marks.is_empty() {
        return Ok(());
    }
    let subscriptions = subscriptions(connection, &row.api_key)?;
    for mark in marks {
        let mut asking = subscriptions.iter().filter(|subscription| subscription.wants(mark.kind)).peekable();
        if asking.peek().is_none() {
            continue;
        }
        let event = row.event(mark);
        put_event(connection, &event)?;
        for subscription in asking.filter(|subscription| subscription.enabled) {
            put_delivery(connection, &subscription.endpoint, &event)?;
        }
    }
    Ok(())
}

fn subscriptions(connection: &Connection, api_key: &str) -> Result<Vec<Subscription>, rusqlite::Error> {
    let mut statement = connection.prepare_cached(
        "SELECT id, events, disabled_at IS NULL FROM webhook_endpoints WHERE api_key = ?1 OR api_key = ?2",
    )?;
    let found = statement.query_map([api_key, EVERY_KEY], |row| {
        Ok(Subscription { endpoint: row.get(0)?, events: row.get(1)?, enabled: row.get(2)? })
    })?;
    found.collect()
}

/// An event that is there already is the same event.
pub(super) fn put_event(connection: &Connection, event: &Event) -> Result<(), rusqlite::Error> {
    connection
        .prepare_cached(
            "INSERT INTO events (id, api_key, transaction_id, position, type, created_at, payload) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) ON CONFLICT (id) DO NOTHING",
        )?
        .execute(params![
            event.id.0,
            event.api_key,
            event.transaction.0.as_bytes(),
            event.position,
            event.kind.name(),
            event.at.0,
            event.payload
        ])?;
    Ok(())
}

/// Due at once, or parked behind an earlier event of its transaction.
pub(super) fn put_delivery(connection: &Connection, endpoint: &[u8; 16], event: &Event) -> Result<(), rusqlite::Error> {
    connection
        .prepare_cached(
            "INSERT INTO webhook_deliveries (endpoint_id, event_id, transaction_id, position, created_at, due_at, attempts) \
             VALUES (?1, ?2, ?3, ?4, ?5, CASE WHEN EXISTS (SELECT 1 \
              FROM webhook_deliveries INDEXED BY webhook_deliveries_open \
              WHERE endpoint_id = ?1 AND transaction_id = ?3 AND position < ?4 AND due_at IS NOT NULL) \
              THEN ?6 ELSE ?5 END, 0) ON CONFLICT (endpoint_id, event_id) DO NOTHING",
        )?
        .execute(params![
            endpoint,
            event.id.0,
            event.transaction.0.as_bytes(),
            event.position,
            event.at.0,
            PARKED.0
        ])?;
    Ok(())
}
