//! Takes deliveries, and writes what follows from an attempt in one commit: the log, the delivery, the next event of its
//! transaction, the endpoint's health and the timeline.

use sqlx::{AssertSqlSafe, MySqlConnection, Row};
use uuid::Uuid;

use super::accept::chunks;
use super::add_step;
use super::columns::{Statement, datetime, id, parse_id};
use super::notifications::required_moment;
use crate::relay::state::event::{EventId, EventType};
use crate::relay::state::transaction::TransactionId;
use crate::relay::store::notifications::{
    Attempt, AttemptRecord, Delivery, DeliveryThen, EndpointId, EndpointThen, GIVEN_UP_AT_ONCE, PARKED,
};
use crate::timestamp::Timestamp;

/// Takes what is due for one endpoint. Rows that another process takes at this moment are skipped.
pub(super) async fn lease_of(
    connection: &mut MySqlConnection,
    endpoint: EndpointId,
    max: usize,
    now: Timestamp,
    until: Timestamp,
    lease: Uuid,
) -> Result<Vec<Delivery>, sqlx::Error> {
    const DUE: &str = "SELECT event_id FROM webhook_deliveries AS delivery FORCE INDEX (webhook_deliveries_due) \
         WHERE endpoint_id = ? AND open = 1 AND due_at <= ? AND NOT EXISTS (SELECT 1 \
          FROM webhook_deliveries AS earlier FORCE INDEX (webhook_deliveries_open) \
          WHERE earlier.endpoint_id = delivery.endpoint_id AND earlier.transaction_id = delivery.transaction_id \
          AND earlier.position < delivery.position AND earlier.open = 1) \
         ORDER BY due_at LIMIT ?";
    const TAKE: &str = "UPDATE webhook_deliveries SET due_at = ?, lease = ? \
         WHERE endpoint_id = ? AND event_id = ? AND due_at <= ?";
    const READ: &str = "SELECT type, delivery.transaction_id, delivery.position, events.created_at, attempts, payload \
         FROM webhook_deliveries AS delivery JOIN events ON events.id = event_id \
         WHERE endpoint_id = ? AND event_id = ?";
    let due = sqlx::query(DUE)
        .bind(endpoint.to_string())
        .bind(datetime(now))
        .bind(u64::try_from(max).unwrap_or(u64::MAX))
        .fetch_all(&mut *connection)
        .await?;
    let mut leased = Vec::new();
    for row in due {
        let event: String = row.try_get(0)?;
        let taken = sqlx::query(TAKE)
            .bind(datetime(until))
            .bind(lease.as_bytes().as_slice())
            .bind(endpoint.to_string())
            .bind(&event)
            .bind(datetime(now))
            .execute(&mut *connection)
            .await?;
        if taken.rows_affected() == 0 {
            continue;
        }
        let row = sqlx::query(READ).bind(endpoint.to_string()).bind(&event).fetch_optional(&mut *connection).await?;
        let Some(row) = row else { continue };
        let kind: String = row.try_get(0)?;
        let transaction: String = row.try_get(1)?;
        leased.push(Delivery {
            endpoint,
            event: EventId(event),
            kind: EventType::parse(&kind).unwrap_or(EventType::Test),
            transaction: parse_id(&transaction).unwrap_or(TransactionId(Uuid::nil())),
            position: row.try_get(2)?,
            created_at: required_moment(&row, 3)?,
            attempts: row.try_get(4)?,
            payload: row.try_get(5)?,
            lease,
        });
    }
    Ok(leased)
}

pub(super) async fn record_attempt(
    connection: &mut MySqlConnection,
    record: &AttemptRecord,
) -> Result<(), sqlx::Error> {
    let AttemptRecord { delivery, attempt, then, now, .. } = record;
    let step = record.step();
    if step.is_some() {
        // Steps are numbered under the row's lock, which a save takes first, too.
        sqlx::query("SELECT 1 FROM transactions WHERE id = ? FOR UPDATE")
            .bind(id(delivery.transaction))
            .fetch_all(&mut *connection)
            .await?;
    }
    add_attempt(connection, delivery.endpoint, attempt).await?;
    let (sql, at) = match then {
        DeliveryThen::Delivered => (
            "UPDATE webhook_deliveries SET due_at = NULL, attempts = attempts + 1, ended_at = ?, ended = 'delivered', \
             lease = NULL WHERE endpoint_id = ? AND event_id = ? AND (lease = ? OR ended IS NULL OR ended <> 'delivered')",
            now,
        ),
        DeliveryThen::GivenUp => (
            "UPDATE webhook_deliveries SET due_at = NULL, attempts = attempts + 1, ended_at = ?, ended = 'given-up', \
             lease = NULL WHERE endpoint_id = ? AND event_id = ? AND lease = ? AND due_at IS NOT NULL",
            now,
        ),
        DeliveryThen::RetryAt(at) => (
            "UPDATE webhook_deliveries SET due_at = ?, attempts = attempts + 1, lease = NULL \
             WHERE endpoint_id = ? AND event_id = ? AND lease = ? AND due_at IS NOT NULL",
            if has_earlier(connection, delivery).await? { &PARKED } else { at },
        ),
    };
    let moved = sqlx::query(sql)
        .bind(datetime(*at))
        .bind(delivery.endpoint.to_string())
        .bind(&delivery.event.0)
        .bind(delivery.lease.as_bytes().as_slice())
        .execute(&mut *connection)
        .await?;
    if moved.rows_affected() == 0 {
        return Ok(());
    }
    if !matches!(then, DeliveryThen::RetryAt(_)) {
        release_next(connection, delivery, *now).await?;
    }
    change_health(connection, record).await?;
    if let Some(step) = step {
        add_step(connection, delivery.transaction, &step, *now).await?;
    }
    Ok(())
}

pub(super) async fn add_attempt(
    connection: &mut MySqlConnection,
    endpoint: EndpointId,
    attempt: &Attempt,
) -> Result<(), sqlx::Error> {
    const SQL: &str = "INSERT INTO webhook_attempts \
         (endpoint_id, id, event_id, number, at, duration_ms, status, error, answer) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) \
         ON DUPLICATE KEY UPDATE id = VALUES(id)";
    sqlx::query(SQL)
        .bind(endpoint.to_string())
        .bind(attempt.id.to_string())
        .bind(&attempt.event.0)
        .bind(attempt.number)
        .bind(datetime(attempt.at))
        .bind(u64::try_from(attempt.duration.as_millis()).unwrap_or(u64::MAX))
        .bind(attempt.status)
        .bind(&attempt.error)
        .bind(&attempt.answer)
        .execute(connection)
        .await?;
    Ok(())
}

/// Makes the next event of the transaction due once this one has ended. The index is named: a planner without statistics may
/// prefer that of due times, and go through every delivery of the endpoint.
pub(super) async fn release_next(
    connection: &mut MySqlConnection,
    delivery: &Delivery,
    now: Timestamp,
) -> Result<(), sqlx::Error> {
    const NEXT: &str = "SELECT event_id FROM webhook_deliveries FORCE INDEX (webhook_deliveries_open) \
         WHERE endpoint_id = ? AND transaction_id = ? AND position > ? AND open = 1 ORDER BY position LIMIT 1";
    const RELEASE: &str =
        "UPDATE webhook_deliveries SET due_at = ? WHERE endpoint_id = ? AND event_id = ? AND due_at = ?";
    let next = sqlx::query(NEXT)
        .bind(delivery.endpoint.to_string())
        .bind(id(delivery.transaction))
        .bind(delivery.position)
        .fetch_optional(&mut *connection)
        .await?;
    let Some(next) = next else { return Ok(()) };
    sqlx::query(RELEASE)
        .bind(datetime(now))
        .bind(delivery.endpoint.to_string())
        .bind(next.try_get::<String, _>(0)?)
        .bind(datetime(PARKED))
        .execute(connection)
        .await?;
    Ok(())
}

/// Whether an earlier event of the delivery's transaction waits for the same endpoint.
async fn has_earlier(connection: &mut MySqlConnection, delivery: &Delivery) -> Result<bool, sqlx::Error> {
    const SQL: &str = "SELECT 1 FROM webhook_deliveries FORCE INDEX (webhook_deliveries_open) \
         WHERE endpoint_id = ? AND transaction_id = ? AND position < ? AND open = 1 LIMIT 1";
    let statement = sqlx::query(SQL).bind(delivery.endpoint.to_string()).bind(id(delivery.transaction));
    Ok(statement.bind(delivery.position).fetch_optional(connection).await?.is_some())
}

/// Parks what is due behind an earlier event of these transactions, and makes due what is parked behind none: after events
/// were made due by other means than the end of the one before.
pub(super) async fn park_followers(
    connection: &mut MySqlConnection,
    endpoint: EndpointId,
    transactions: &[String],
    now: Timestamp,
) -> Result<(), sqlx::Error> {
    const EARLIER: &str = "webhook_deliveries AS earlier FORCE INDEX (webhook_deliveries_open) \
         ON earlier.endpoint_id = later.endpoint_id AND earlier.transaction_id = later.transaction_id \
         AND earlier.position < later.position AND earlier.open = 1";
    const LATER: &str = "UPDATE webhook_deliveries AS later FORCE INDEX (webhook_deliveries_open)";
    let (endpoint, parked) = (endpoint.to_string(), datetime(PARKED));
    for some in chunks(transactions) {
        let places = vec!["?"; some.len()].join(", ");
        let of_these = format!("later.endpoint_id = ? AND later.transaction_id IN ({places}) AND later.open = 1");
        let park = format!(
            "{LATER} JOIN {EARLIER} SET later.due_at = ? WHERE {of_these} AND later.due_at < ? AND later.lease IS NULL"
        );
        let release = format!(
            "{LATER} LEFT JOIN {EARLIER} SET later.due_at = ? \
             WHERE {of_these} AND later.due_at = ? AND earlier.endpoint_id IS NULL"
        );
        for (sql, due_at) in [(park, parked), (release, datetime(now))] {
            let statement: Statement<'_> = sqlx::query(AssertSqlSafe(sql)).bind(due_at).bind(&endpoint);
            let statement = some.iter().fold(statement, |statement, transaction| statement.bind(transaction));
            statement.bind(parked).execute(&mut *connection).await?;
        }
    }
    Ok(())
}

async fn change_health(connection: &mut MySqlConnection, record: &AttemptRecord) -> Result<(), sqlx::Error> {
    let AttemptRecord { delivery, attempt, endpoint: then, endpoint_version: version, now, .. } = record;
    let endpoint = delivery.endpoint.to_string();
    match then {
        EndpointThen::Unchanged => {}
        EndpointThen::Works => {
            const SQL: &str = "UPDATE webhook_endpoints SET failing_since = NULL, failures = 0 \
                 WHERE id = ? AND failures > 0";
            sqlx::query(SQL).bind(endpoint).execute(connection).await?;
        }
        EndpointThen::Fails { paused_until } => {
            const SQL: &str = "UPDATE webhook_endpoints SET failing_since = COALESCE(failing_since, ?), \
                 failures = failures + 1, \
                 paused_until = GREATEST(COALESCE(paused_until, '2000-01-01'), COALESCE(?, '2000-01-01')) \
                 WHERE id = ? AND version = ?";
            let statement = sqlx::query(SQL).bind(datetime(attempt.at)).bind(paused_until.map(datetime));
            statement.bind(endpoint).bind(version).execute(connection).await?;
        }
        EndpointThen::Disable { reason } => {
            const DISABLE: &str = "UPDATE webhook_endpoints SET disabled_at = ?, disabled_reason = ?, updated_at = ?, \
                 version = version + 1 WHERE id = ? AND disabled_at IS NULL AND version = ?";
            const GIVE_UP: &str = "UPDATE webhook_deliveries SET due_at = NULL, lease = NULL, ended_at = ?, \
                 ended = 'given-up' WHERE endpoint_id = ? AND due_at IS NOT NULL LIMIT ?";
            let statement = sqlx::query(DISABLE).bind(datetime(*now)).bind(reason).bind(datetime(*now));
            let disabled = statement.bind(&endpoint).bind(version).execute(&mut *connection).await?;
            if disabled.rows_affected() > 0 {
                let statement = sqlx::query(GIVE_UP).bind(datetime(*now)).bind(endpoint);
                statement.bind(GIVEN_UP_AT_ONCE).execute(connection).await?;
            }
        }
    }
    Ok(())
}
