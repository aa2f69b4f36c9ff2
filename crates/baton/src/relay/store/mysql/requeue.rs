//! Makes events due again, or for the first time, because a client or an operator asks for it.

use sqlx::{AssertSqlSafe, MySqlConnection, Row};

use super::accept::chunks;
use super::columns::{Statement, datetime};
use super::notifications::required_moment;
use crate::relay::state::event::EventId;
use crate::relay::store::notifications::{EVERY_KEY, Endpoint, EndpointId, REQUEUED_AT_ONCE};
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
    sqlx::query(ADD)
        .bind(endpoint.id.to_string())
        .bind(datetime(now))
        .bind(&event.0)
        .bind(endpoint.owner.as_bytes())
        .bind(endpoint.owner.as_bytes())
        .execute(connection)
        .await?;
    Ok(1)
}

/// Makes some of the events due that were given up; 0 once there are none left.
pub(super) async fn requeue_given_up(
    connection: &mut MySqlConnection,
    endpoint: EndpointId,
    since: Timestamp,
    now: Timestamp,
) -> Result<u64, sqlx::Error> {
    const AGAIN: &str = "UPDATE webhook_deliveries SET due_at = ?, lease = NULL, attempts = 0, ended_at = NULL, \
         ended = NULL WHERE endpoint_id = ? AND ended = 'given-up' AND created_at >= ? LIMIT ?";
    let again = sqlx::query(AGAIN)
        .bind(datetime(now))
        .bind(endpoint.to_string())
        .bind(datetime(since))
        .bind(u64::try_from(REQUEUED_AT_ONCE).unwrap_or(u64::MAX))
        .execute(connection)
        .await?;
    Ok(again.rows_affected())
}

/// A place among the events of a key: time and id.
pub(super) type EventPlace = (Timestamp, String);

/// Adds what the endpoint has missed among the next events after this place; returns how many, and the place to go on from.
pub(super) async fn add_missed(
    connection: &mut MySqlConnection,
    endpoint: &Endpoint,
    after: &EventPlace,
    now: Timestamp,
) -> Result<(u64, Option<EventPlace>), sqlx::Error> {
    const OWN: &str = "SELECT id, created_at, type FROM events FORCE INDEX (events_api_key) \
         WHERE api_key = ? AND created_at >= ? AND (created_at > ? OR id > ?) ORDER BY created_at, id LIMIT ?";
    const ALL: &str = "SELECT id, created_at, type FROM events FORCE INDEX (events_created_at) \
         WHERE ? = '' AND created_at >= ? AND (created_at > ? OR id > ?) ORDER BY created_at, id LIMIT ?";
    let rows = sqlx::query(if endpoint.owner == EVERY_KEY { ALL } else { OWN })
        .bind(endpoint.owner.as_bytes())
        .bind(datetime(after.0))
        .bind(datetime(after.0))
        .bind(&after.1)
        .bind(u64::try_from(REQUEUED_AT_ONCE).unwrap_or(u64::MAX))
        .fetch_all(&mut *connection)
        .await?;
    let mut wanted: Vec<String> = Vec::new();
    for row in &rows {
        let kind: String = row.try_get(2)?;
        if endpoint.events.iter().any(|wanted| wanted.name() == kind) {
            wanted.push(row.try_get(0)?);
        }
    }
    let mut added = 0;
    for some in chunks(&wanted) {
        let places = vec!["?"; some.len()].join(", ");
        let sql = format!(
            "INSERT IGNORE INTO webhook_deliveries \
             (endpoint_id, event_id, transaction_id, position, created_at, due_at, attempts) \
             SELECT ?, id, transaction_id, position, created_at, ?, 0 FROM events WHERE id IN ({places})"
        );
        let statement: Statement<'_> =
            sqlx::query(AssertSqlSafe(sql)).bind(endpoint.id.to_string()).bind(datetime(now));
        let statement = some.iter().fold(statement, |statement, event| statement.bind(event));
        added += statement.execute(&mut *connection).await?.rows_affected();
    }
    let next = match rows.last().filter(|_| rows.len() == REQUEUED_AT_ONCE) {
        Some(last) => Some((required_moment(last, 1)?, last.try_get(0)?)),
        None => None,
    };
    Ok((added, next))
}
