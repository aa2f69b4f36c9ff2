//! Deletes notifications that are older than the retention, in small commits that look at little beyond what they delete: the
//! same functions in the same order as in [`crate::relay::store::sqlite`].

use std::collections::BTreeSet;

use sqlx::{AssertSqlSafe, MySqlConnection, Row};

use super::MySqlStore;
use super::accept::chunks;
use super::attempt_record::{lock_transactions, park_followers};
use super::columns::{Statement, datetime};
use super::notifications::{endpoint_id, required_moment};
use super::outcome::{End, work};
use crate::relay::store::StoreError;
use crate::relay::store::notifications::{CHANGED_AT_ONCE, EndpointId, EventPlace, FORGET_PAGES_MAX, PARKED};
use crate::timestamp::Timestamp;

/// Deliveries to delete: their events and transactions.
#[derive(Default)]
struct Waiting {
    events: Vec<String>,
    transactions: BTreeSet<String>,
}

impl MySqlStore {
    /// Deletes what has waited for a disabled endpoint since before then.
    pub(super) async fn forget_waiting(
        &self,
        before: Timestamp,
        now: Timestamp,
        max: usize,
    ) -> Result<u64, StoreError> {
        const DISABLED: &str = "SELECT id FROM webhook_endpoints WHERE disabled_at IS NOT NULL";
        let endpoints = self.pool.read(work!(connection => {
            let rows = sqlx::query(DISABLED).fetch_all(connection).await?;
            rows.iter().map(|row| endpoint_id(row.try_get(0)?)).collect::<Result<Vec<_>, sqlx::Error>>()
        }));
        let mut deleted = 0;
        for endpoint in endpoints.await? {
            let found = self.pool.read(work!(connection => read_waiting(connection, endpoint, before, max).await));
            let found = &found.await?;
            if !found.events.is_empty() {
                let some = self.pool.transact(work!(connection => {
                    Ok(End::Keep(delete_waiting(connection, endpoint, found, before, now).await?))
                }));
                deleted += some.await?;
            }
        }
        Ok(deleted)
    }

    /// Deletes deliveries that ended before then, and their events with the last one.
    pub(super) async fn forget_ended(&self, before: Timestamp, max: usize) -> Result<u64, StoreError> {
        const FIND: &str = "SELECT event_id FROM webhook_deliveries FORCE INDEX (webhook_deliveries_ended) \
             WHERE ended_at < ? ORDER BY ended_at LIMIT ? FOR UPDATE";
        const DELETE: &str = "DELETE FROM webhook_deliveries WHERE ended_at < ? ORDER BY ended_at LIMIT ?";
        let deleted = self.pool.transact(work!(connection => {
            let rows = sqlx::query(FIND).bind(datetime(before)).bind(limit(max)).fetch_all(&mut *connection).await?;
            let events = rows.iter().map(|row| row.try_get(0)).collect::<Result<BTreeSet<String>, _>>()?;
            if events.is_empty() {
                return Ok(End::Keep(0));
            }
            // They are locked, so these are the same.
            let deleted = sqlx::query(DELETE).bind(datetime(before)).bind(rows.len() as u64).execute(&mut *connection);
            let deleted = deleted.await?.rows_affected();
            let events: Vec<_> = events.into_iter().collect();
            Ok(End::Keep(deleted + delete_events(connection, &events, before).await?))
        }));
        deleted.await
    }

    /// Deletes events that have no delivery, and goes on from the last place.
    pub(super) async fn forget_events(&self, before: Timestamp, max: usize) -> Result<u64, StoreError> {
        let (mut place, is_first) = self.forgotten.begin(before);
        let mut deleted = if is_first { self.forget_endpointless(max).await? } else { 0 };
        for _ in 0..FORGET_PAGES_MAX {
            let after = &place;
            let page = self.pool.read(work!(connection => read_unwanted(connection, after, before, max).await));
            let (found, last) = page.await?;
            let found = &found;
            if !found.is_empty() {
                let some = self.pool.transact(work!(connection => {
                    Ok(End::Keep(delete_events(connection, found, before).await?))
                }));
                deleted += some.await?;
            }
            let Some(last) = last else { break };
            place = last;
            self.forgotten.go_on_from(&place);
        }
        Ok(deleted)
    }

    /// Deletes deliveries of endpoints that do not exist: something wrote them while the endpoint was being deleted.
    async fn forget_endpointless(&self, max: usize) -> Result<u64, StoreError> {
        const NEXT: &str = "SELECT endpoint_id, EXISTS (SELECT 1 FROM webhook_endpoints WHERE id = endpoint_id) \
             FROM webhook_deliveries WHERE endpoint_id > ? ORDER BY endpoint_id LIMIT 1";
        const DELETE: &str = "DELETE FROM webhook_deliveries WHERE endpoint_id = ? LIMIT ?";
        let (mut deleted, mut after) = (0, String::new());
        loop {
            let last = &after;
            let next = self.pool.read(work!(connection => {
                let row = sqlx::query(NEXT).bind(last).fetch_optional(connection).await?;
                row.map(|row| Ok((row.try_get::<String, _>(0)?, row.try_get::<i64, _>(1)? != 0))).transpose()
            }));
            let Some((id, exists)) = next.await? else { return Ok(deleted) };
            if !exists {
                let id = &id;
                let some = self.pool.transact(work!(connection => {
                    let done = sqlx::query(DELETE).bind(id).bind(limit(max)).execute(connection).await?;
                    Ok(End::Keep(done.rows_affected()))
                }));
                deleted += some.await?;
            }
            after = id;
        }
    }

    /// Deletes attempts that were made before then.
    pub(super) async fn forget_attempts(&self, before: Timestamp, max: usize) -> Result<u64, StoreError> {
        const DELETE: &str = "DELETE FROM webhook_attempts WHERE at < ? ORDER BY at LIMIT ?";
        let deleted = self.pool.transact(work!(connection => {
            let done = sqlx::query(DELETE).bind(datetime(before)).bind(limit(max)).execute(connection).await?;
            Ok(End::Keep(done.rows_affected()))
        }));
        deleted.await
    }
}

/// Deliveries that wait and are older. The parked ones first: those behind them, which may be younger, are not released.
/// A delivery is never due before its event happened, so both conditions find only what can be deleted.
async fn read_waiting(
    connection: &mut MySqlConnection,
    endpoint: EndpointId,
    before: Timestamp,
    max: usize,
) -> Result<Waiting, sqlx::Error> {
    const PARKED_FIND: &str = "SELECT event_id, transaction_id FROM webhook_deliveries \
         FORCE INDEX (webhook_deliveries_due) WHERE endpoint_id = ? AND open = 1 AND due_at = ? AND created_at < ? LIMIT ?";
    const DUE_FIND: &str = "SELECT event_id, transaction_id FROM webhook_deliveries \
         FORCE INDEX (webhook_deliveries_due) WHERE endpoint_id = ? AND open = 1 AND due_at < ? LIMIT ?";
    let parked = sqlx::query(PARKED_FIND).bind(endpoint.to_string()).bind(datetime(PARKED)).bind(datetime(before));
    let mut rows = parked.bind(limit(max)).fetch_all(&mut *connection).await?;
    if rows.is_empty() {
        let due = sqlx::query(DUE_FIND).bind(endpoint.to_string()).bind(datetime(before)).bind(limit(max));
        rows = due.fetch_all(connection).await?;
    }
    let mut found = Waiting::default();
    for row in &rows {
        found.events.push(row.try_get(0)?);
        found.transactions.insert(row.try_get(1)?);
    }
    Ok(found)
}

async fn delete_waiting(
    connection: &mut MySqlConnection,
    endpoint: EndpointId,
    found: &Waiting,
    before: Timestamp,
    now: Timestamp,
) -> Result<u64, sqlx::Error> {
    const DISABLED: &str =
        "SELECT 1 FROM webhook_endpoints WHERE id = ? AND disabled_at IS NOT NULL LOCK IN SHARE MODE";
    lock_transactions(connection, &found.transactions).await?;
    if sqlx::query(DISABLED).bind(endpoint.to_string()).fetch_optional(&mut *connection).await?.is_none() {
        return Ok(0);
    }
    let mut deleted = 0;
    for some in chunks(&found.events) {
        let sql = format!(
            "DELETE FROM webhook_deliveries WHERE endpoint_id = ? AND created_at < ? AND due_at IS NOT NULL \
             AND event_id IN ({})",
            vec!["?"; some.len()].join(", ")
        );
        let statement: Statement<'_> =
            sqlx::query(AssertSqlSafe(sql)).bind(endpoint.to_string()).bind(datetime(before));
        let statement = some.iter().fold(statement, |statement, event| statement.bind(event));
        deleted += statement.execute(&mut *connection).await?.rows_affected();
    }
    park_followers(connection, endpoint, &found.transactions, now).await?;
    Ok(deleted + delete_events(connection, &found.events, before).await?)
}

async fn delete_events(
    connection: &mut MySqlConnection,
    events: &[String],
    before: Timestamp,
) -> Result<u64, sqlx::Error> {
    let mut deleted = 0;
    for some in chunks(events) {
        let sql = format!(
            "DELETE FROM events WHERE created_at < ? AND id IN ({}) AND NOT EXISTS \
             (SELECT 1 FROM webhook_deliveries WHERE event_id = events.id)",
            vec!["?"; some.len()].join(", ")
        );
        let statement: Statement<'_> = sqlx::query(AssertSqlSafe(sql)).bind(datetime(before));
        let statement = some.iter().fold(statement, |statement, event| statement.bind(event));
        deleted += statement.execute(&mut *connection).await?.rows_affected();
    }
    Ok(deleted)
}

/// Old events without a delivery among the next ones after this place, and the last place if there may be more.
async fn read_unwanted(
    connection: &mut MySqlConnection,
    after: &EventPlace,
    before: Timestamp,
    max: usize,
) -> Result<(Vec<String>, Option<EventPlace>), sqlx::Error> {
    const SQL: &str = "SELECT id, created_at, EXISTS (SELECT 1 FROM webhook_deliveries WHERE event_id = events.id) \
         FROM events FORCE INDEX (events_created_at) \
         WHERE created_at < ? AND created_at >= ? AND (created_at > ? OR id > ?) ORDER BY created_at, id LIMIT ?";
    let rows = sqlx::query(SQL)
        .bind(datetime(before))
        .bind(datetime(after.0))
        .bind(datetime(after.0))
        .bind(&after.1)
        .bind(limit(max.min(CHANGED_AT_ONCE)))
        .fetch_all(connection)
        .await?;
    let (mut found, mut last) = (Vec::new(), None);
    for row in &rows {
        let id: String = row.try_get(0)?;
        last = Some((required_moment(row, 1)?, id.clone()));
        if row.try_get::<i64, _>(2)? == 0 {
            found.push(id);
        }
    }
    Ok((found, last))
}

fn limit(max: usize) -> u64 {
    u64::try_from(max).unwrap_or(u64::MAX)
}
