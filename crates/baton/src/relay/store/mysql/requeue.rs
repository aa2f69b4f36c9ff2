//! Makes events due again, or for the first time, because a client or an operator asks for it.

use std::collections::BTreeSet;

use sqlx::{AssertSqlSafe, MySqlConnection, Row};

use super::accept::chunks;
use super::attempt_record::{lock_transactions, park_followers};
use super::columns::{Statement, datetime};
use super::notifications::required_moment;
use crate::relay::state::event::EventId;
use crate::relay::store::notifications::{
    EVERY_KEY, Endpoint, EndpointId, EventPlace, MissedPage, PARKED, REQUEUED_AT_ONCE,
};
use crate::timestamp::Timestamp;

pub(super) async fn requeue_event(
    connection: &mut MySqlConnection,
    endpoint: &Endpoint,
    event: &EventId,
    now: Timestamp,
) -> Result<u64, sqlx::Error> {
    const ADD: &str = "INSERT INTO webhook_deliveries \
         (endpoint_id, event_id, transaction_id, position, created_at, due_at, attempts) \
         SELECT ?, id, transaction_id, position, created_at, ?, 0 FROM events WHERE id = ? AND (api_key = ? OR ? = '') \
         ON DUPLICATE KEY UPDATE due_at = VALUES(due_at), lease = NULL, attempts = 0, ended_at = NULL, ended = NULL";
    let found = sqlx::query("SELECT 1 FROM events WHERE id = ? AND (api_key = ? OR ? = '')")
        .bind(&event.0)
        .bind(endpoint.owner.as_bytes())
        .bind(endpoint.owner.as_bytes())
        .fetch_optional(&mut *connection)
        .await?;
    if found.is_none() {
        return Ok(0);
    }
    let transactions = transactions_of(connection, std::slice::from_ref(&event.0)).await?;
    lock_transactions(connection, &transactions).await?;
    if !keeps_endpoint(connection, endpoint.id).await? {
        return Ok(0);
    }
    sqlx::query(ADD)
        .bind(endpoint.id.to_string())
        .bind(datetime(now))
        .bind(&event.0)
        .bind(endpoint.owner.as_bytes())
        .bind(endpoint.owner.as_bytes())
        .execute(&mut *connection)
        .await?;
    park_followers(connection, endpoint.id, &transactions, now).await?;
    Ok(1)
}

/// Makes some of the events due now that wait for their next attempt, and ends the endpoint's pause; 0 once there are none
/// left.
pub(super) async fn hurry(
    connection: &mut MySqlConnection,
    endpoint: EndpointId,
    since: Timestamp,
    now: Timestamp,
) -> Result<u64, sqlx::Error> {
    const SQL: &str = "UPDATE webhook_deliveries FORCE INDEX (webhook_deliveries_due) SET due_at = ? \
         WHERE endpoint_id = ? AND open = 1 AND due_at > ? AND due_at < ? AND created_at >= ? AND lease IS NULL LIMIT ?";
    sqlx::query("UPDATE webhook_endpoints SET paused_until = NULL WHERE id = ? AND paused_until IS NOT NULL")
        .bind(endpoint.to_string())
        .execute(&mut *connection)
        .await?;
    let hurried = sqlx::query(SQL)
        .bind(datetime(now))
        .bind(endpoint.to_string())
        .bind(datetime(now))
        .bind(datetime(PARKED))
        .bind(datetime(since))
        .bind(u64::try_from(REQUEUED_AT_ONCE).unwrap_or(u64::MAX))
        .execute(connection)
        .await?;
    Ok(hurried.rows_affected())
}

/// Makes some of the events due that were given up and still exist; 0 once there are none left.
pub(super) async fn requeue_given_up(
    connection: &mut MySqlConnection,
    endpoint: EndpointId,
    since: Timestamp,
    now: Timestamp,
) -> Result<u64, sqlx::Error> {
    const FIND: &str = "SELECT event_id FROM webhook_deliveries FORCE INDEX (webhook_deliveries_given_up) \
         WHERE endpoint_id = ? AND ended = 'given-up' AND created_at >= ? \
         AND EXISTS (SELECT 1 FROM events WHERE events.id = event_id) LIMIT ?";
    let rows = sqlx::query(FIND)
        .bind(endpoint.to_string())
        .bind(datetime(since))
        .bind(u64::try_from(REQUEUED_AT_ONCE).unwrap_or(u64::MAX))
        .fetch_all(&mut *connection)
        .await?;
    let found = rows.iter().map(|row| row.try_get(0)).collect::<Result<Vec<String>, _>>()?;
    let transactions = transactions_of(connection, &found).await?;
    lock_transactions(connection, &transactions).await?;
    for some in chunks(&found) {
        let sql = format!(
            "UPDATE webhook_deliveries SET due_at = ?, lease = NULL, attempts = 0, ended_at = NULL, ended = NULL \
             WHERE endpoint_id = ? AND ended = 'given-up' AND event_id IN ({})",
            vec!["?"; some.len()].join(", ")
        );
        let statement: Statement<'_> = sqlx::query(AssertSqlSafe(sql)).bind(datetime(now)).bind(endpoint.to_string());
        some.iter().fold(statement, |statement, event| statement.bind(event)).execute(&mut *connection).await?;
    }
    park_followers(connection, endpoint, &transactions, now).await?;
    Ok(found.len() as u64)
}

/// Whether the endpoint exists; until the end of the commit nothing can delete it. A deletion that has deleted its
/// deliveries would leave new ones behind.
async fn keeps_endpoint(connection: &mut MySqlConnection, endpoint: EndpointId) -> Result<bool, sqlx::Error> {
    const SQL: &str = "SELECT 1 FROM webhook_endpoints WHERE id = ? LOCK IN SHARE MODE";
    Ok(sqlx::query(SQL).bind(endpoint.to_string()).fetch_optional(connection).await?.is_some())
}

/// The transactions of these events, each once.
async fn transactions_of(connection: &mut MySqlConnection, events: &[String]) -> Result<BTreeSet<String>, sqlx::Error> {
    let mut found = BTreeSet::new();
    for some in chunks(events) {
        let places = vec!["?"; some.len()].join(", ");
        let sql = format!("SELECT DISTINCT transaction_id FROM events WHERE id IN ({places})");
        let statement: Statement<'_> = sqlx::query(AssertSqlSafe(sql));
        let statement = some.iter().fold(statement, |statement, event| statement.bind(event));
        for row in statement.fetch_all(&mut *connection).await? {
            found.insert(row.try_get(0)?);
        }
    }
    Ok(found)
}

/// What the endpoint has missed among the next events after this place.
pub(super) async fn read_missed(
    connection: &mut MySqlConnection,
    endpoint: &Endpoint,
    after: &EventPlace,
) -> Result<MissedPage, sqlx::Error> {
    // NULL: it has none; 1: one that is parked behind none.
    const DELIVERY: &str = "(SELECT later.due_at <=> ? AND NOT EXISTS (SELECT 1 \
          FROM webhook_deliveries AS earlier FORCE INDEX (webhook_deliveries_open) \
          WHERE earlier.endpoint_id = later.endpoint_id AND earlier.transaction_id = later.transaction_id \
          AND earlier.position < later.position AND earlier.open = 1) \
         FROM webhook_deliveries AS later WHERE later.endpoint_id = ? AND later.event_id = events.id)";
    let owned = match endpoint.owner.as_str() {
        EVERY_KEY => "FORCE INDEX (events_created_at) WHERE ? = ''",
        _ => "FORCE INDEX (events_api_key) WHERE api_key = ?",
    };
    let sql = format!(
        "SELECT id, created_at, type, {DELIVERY} FROM events {owned} \
         AND created_at >= ? AND (created_at > ? OR id > ?) ORDER BY created_at, id LIMIT ?"
    );
    let rows = sqlx::query(AssertSqlSafe(sql))
        .bind(datetime(PARKED))
        .bind(endpoint.id.to_string())
        .bind(endpoint.owner.as_bytes())
        .bind(datetime(after.0))
        .bind(datetime(after.0))
        .bind(&after.1)
        .bind(u64::try_from(REQUEUED_AT_ONCE).unwrap_or(u64::MAX))
        .fetch_all(connection)
        .await?;
    let mut page = MissedPage::default();
    for row in &rows {
        let kind: String = row.try_get(2)?;
        let delivery = row.try_get::<Option<i64>, _>(3)?;
        page.add(endpoint, (required_moment(row, 1)?, row.try_get(0)?), &kind, delivery.map(|parked| parked != 0));
    }
    Ok(page)
}

/// Makes these events due, unless an earlier one of their transaction waits by now.
pub(super) async fn release_stranded(
    connection: &mut MySqlConnection,
    endpoint: EndpointId,
    events: &[String],
    now: Timestamp,
) -> Result<(), sqlx::Error> {
    let transactions = transactions_of(connection, events).await?;
    lock_transactions(connection, &transactions).await?;
    park_followers(connection, endpoint, &transactions, now).await
}

/// Adds these events, unless the endpoint has them by now; returns how many.
pub(super) async fn add_missed(
    connection: &mut MySqlConnection,
    endpoint: EndpointId,
    events: &[String],
    now: Timestamp,
) -> Result<u64, sqlx::Error> {
    let transactions = transactions_of(connection, events).await?;
    lock_transactions(connection, &transactions).await?;
    if !keeps_endpoint(connection, endpoint).await? {
        return Ok(0);
    }
    let mut added = 0;
    for some in chunks(events) {
        let places = vec!["?"; some.len()].join(", ");
        let sql = format!(
            "INSERT IGNORE INTO webhook_deliveries \
             (endpoint_id, event_id, transaction_id, position, created_at, due_at, attempts) \
             SELECT ?, id, transaction_id, position, created_at, ?, 0 FROM events WHERE id IN ({places})"
        );
        let statement: Statement<'_> = sqlx::query(AssertSqlSafe(sql)).bind(endpoint.to_string()).bind(datetime(now));
        let statement = some.iter().fold(statement, |statement, event| statement.bind(event));
        added += statement.execute(&mut *connection).await?.rows_affected();
    }
    park_followers(connection, endpoint, &transactions, now).await?;
    Ok(added)
}
