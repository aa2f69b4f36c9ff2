//! Deletes notifications that are older than the retention, in small commits that look at little beyond what they delete: the
//! same functions in the same order as in [`crate::relay::store::mysql`].

use std::collections::BTreeSet;

use rusqlite::{Connection, OptionalExtension, params};
use uuid::Uuid;

use super::SqliteStore;
use super::attempt_record::park_followers;
use crate::relay::state::transaction::TransactionId;
use crate::relay::store::StoreError;
use crate::relay::store::notifications::{CHANGED_AT_ONCE, EndpointId, EventPlace, FORGET_PAGES_MAX, PARKED};
use crate::timestamp::Timestamp;

impl SqliteStore {
    /// Deletes what has waited for a disabled endpoint since before then.
    pub(super) async fn forget_waiting(
        &self,
        before: Timestamp,
        now: Timestamp,
        max: usize,
    ) -> Result<u64, StoreError> {
        let endpoints = self
            .read(|connection| {
                let mut disabled =
                    connection.prepare_cached("SELECT id FROM webhook_endpoints WHERE disabled_at IS NOT NULL")?;
                let ids = disabled.query_map([], |row| row.get::<_, [u8; 16]>(0))?;
                ids.collect::<Result<Vec<_>, _>>()
            })
            .await?;
        let mut deleted = 0;
        for id in endpoints {
            let endpoint = EndpointId(Uuid::from_bytes(id));
            let found = self.read(move |connection| read_waiting(connection, endpoint, before, max)).await?;
            if !found.is_empty() {
                deleted +=
                    self.write(move |connection| delete_waiting(connection, endpoint, &found, before, now)).await?;
            }
        }
        Ok(deleted)
    }

    /// Deletes deliveries that ended before then, and their events with the last one.
    pub(super) async fn forget_ended(&self, before: Timestamp, max: usize) -> Result<u64, StoreError> {
        self.write(move |connection| {
            let mut delete = connection.prepare_cached(
                "DELETE FROM webhook_deliveries WHERE (endpoint_id, event_id) IN (SELECT endpoint_id, event_id \
                  FROM webhook_deliveries INDEXED BY webhook_deliveries_ended WHERE ended_at < ?1 \
                  ORDER BY ended_at LIMIT ?2) RETURNING event_id",
            )?;
            let events = delete.query_map(params![before.0, limit(max)], |row| row.get::<_, String>(0))?;
            let events = events.collect::<Result<Vec<_>, _>>()?;
            Ok(events.len() as u64 + delete_events(connection, &events, before)?)
        })
        .await
    }

    /// Deletes events that have no delivery, and goes on from the last place.
    pub(super) async fn forget_events(&self, before: Timestamp, max: usize) -> Result<u64, StoreError> {
        let (mut place, is_first) = self.forgotten.begin(before);
        let mut deleted = if is_first { self.forget_endpointless(max).await? } else { 0 };
        for _ in 0..FORGET_PAGES_MAX {
            let after = place.clone();
            let (found, last) = self.read(move |connection| read_unwanted(connection, &after, before, max)).await?;
            if !found.is_empty() {
                deleted += self.write(move |connection| delete_events(connection, &found, before)).await?;
            }
            let Some(last) = last else { break };
            place = last;
            self.forgotten.go_on_from(&place);
        }
        Ok(deleted)
    }

    /// Deletes deliveries of endpoints that do not exist: something wrote them while the endpoint was being deleted.
    async fn forget_endpointless(&self, max: usize) -> Result<u64, StoreError> {
        let gone = self
            .read(|connection| {
                let mut next = connection.prepare_cached(
                    "SELECT endpoint_id, EXISTS (SELECT 1 FROM webhook_endpoints WHERE id = endpoint_id) \
                     FROM webhook_deliveries WHERE endpoint_id > ?1 ORDER BY endpoint_id LIMIT 1",
                )?;
                let (mut gone, mut after) = (Vec::new(), Vec::new());
                while let Some((id, exists)) = next
                    .query_row([&after], |row| Ok((row.get::<_, Vec<u8>>(0)?, row.get::<_, bool>(1)?)))
                    .optional()?
                {
                    if !exists {
                        gone.push(id.clone());
                    }
                    after = id;
                }
                Ok(gone)
            })
            .await?;
        let mut deleted = 0;
        for id in gone {
            let some = self.write(move |connection| {
                connection.execute(
                    "DELETE FROM webhook_deliveries WHERE endpoint_id = ?1 AND event_id IN \
                     (SELECT event_id FROM webhook_deliveries WHERE endpoint_id = ?1 LIMIT ?2)",
                    params![id, limit(max)],
                )
            });
            deleted += some.await? as u64;
        }
        Ok(deleted)
    }

    /// Deletes attempts that were made before then.
    pub(super) async fn forget_attempts(&self, before: Timestamp, max: usize) -> Result<u64, StoreError> {
        const DELETE: &str = "DELETE FROM webhook_attempts WHERE (endpoint_id, id) IN \
             (SELECT endpoint_id, id FROM webhook_attempts WHERE at < ?1 ORDER BY at LIMIT ?2)";
        let deleted =
            self.write(move |connection| connection.prepare_cached(DELETE)?.execute(params![before.0, limit(max)]));
        Ok(deleted.await? as u64)
    }
}

/// Deliveries that wait and are older. The parked ones first: those behind them, which may be younger, are not released.
/// A delivery is never due before its event happened, so both conditions find only what can be deleted.
fn read_waiting(
    connection: &Connection,
    endpoint: EndpointId,
    before: Timestamp,
    max: usize,
) -> Result<Vec<String>, rusqlite::Error> {
    let mut parked = connection.prepare_cached(
        "SELECT event_id FROM webhook_deliveries INDEXED BY webhook_deliveries_due \
         WHERE endpoint_id = ?1 AND due_at = ?3 AND created_at < ?2 LIMIT ?4",
    )?;
    let mut due = connection.prepare_cached(
        "SELECT event_id FROM webhook_deliveries INDEXED BY webhook_deliveries_due \
         WHERE endpoint_id = ?1 AND due_at < ?2 LIMIT ?3",
    )?;
    let key = params![endpoint.0.as_bytes(), before.0, PARKED.0, limit(max)];
    let found = parked.query_map(key, |row| row.get(0))?.collect::<Result<Vec<_>, _>>()?;
    if !found.is_empty() {
        return Ok(found);
    }
    due.query_map(params![endpoint.0.as_bytes(), before.0, limit(max)], |row| row.get(0))?.collect()
}

fn delete_waiting(
    connection: &Connection,
    endpoint: EndpointId,
    events: &[String],
    before: Timestamp,
    now: Timestamp,
) -> Result<u64, rusqlite::Error> {
    let mut delete = connection.prepare_cached(
        "DELETE FROM webhook_deliveries WHERE endpoint_id = ?1 AND event_id = ?2 AND due_at IS NOT NULL \
         AND created_at < ?3 AND EXISTS (SELECT 1 FROM webhook_endpoints WHERE id = ?1 AND disabled_at IS NOT NULL) \
         RETURNING transaction_id",
    )?;
    let (mut deleted, mut transactions) = (0, BTreeSet::new());
    for event in events {
        for id in delete.query_map(params![endpoint.0.as_bytes(), event, before.0], |row| row.get::<_, [u8; 16]>(0))? {
            deleted += 1;
            transactions.insert(TransactionId(Uuid::from_bytes(id?)));
        }
    }
    park_followers(connection, endpoint, &transactions, now)?;
    Ok(deleted + delete_events(connection, events, before)?)
}

fn delete_events(connection: &Connection, events: &[String], before: Timestamp) -> Result<u64, rusqlite::Error> {
    let mut delete = connection.prepare_cached(
        "DELETE FROM events WHERE id = ?1 AND created_at < ?2 \
         AND NOT EXISTS (SELECT 1 FROM webhook_deliveries WHERE event_id = ?1)",
    )?;
    let mut deleted = 0;
    for event in events {
        deleted += delete.execute(params![event, before.0])? as u64;
    }
    Ok(deleted)
}

/// Old events without a delivery among the next ones after this place, and the last place if there may be more.
fn read_unwanted(
    connection: &Connection,
    after: &EventPlace,
    before: Timestamp,
    max: usize,
) -> Result<(Vec<String>, Option<EventPlace>), rusqlite::Error> {
    let mut statement = connection.prepare_cached(
        "SELECT id, created_at, EXISTS (SELECT 1 FROM webhook_deliveries WHERE event_id = events.id) \
         FROM events INDEXED BY events_created_at WHERE created_at < ?1 AND (created_at, id) > (?2, ?3) \
         ORDER BY created_at, id LIMIT ?4",
    )?;
    let mut rows = statement.query(params![before.0, after.0.0, after.1, limit(max.min(CHANGED_AT_ONCE))])?;
    let (mut found, mut last) = (Vec::new(), None);
    while let Some(row) = rows.next()? {
        let id: String = row.get(0)?;
        last = Some((Timestamp(row.get(1)?), id.clone()));
        if !row.get::<_, bool>(2)? {
            found.push(id);
        }
    }
    Ok((found, last))
}

fn limit(max: usize) -> i64 {
    i64::try_from(max).unwrap_or(i64::MAX)
}
