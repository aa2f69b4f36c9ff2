//! Takes deliveries, and writes what follows from an attempt in one commit: the log, the delivery, the next event of its
//! transaction, the endpoint's health and the timeline.

use std::collections::BTreeSet;

use sqlx::{AssertSqlSafe, MySqlConnection, Row};
use time::PrimitiveDateTime;
use uuid::Uuid;

use super::accept::chunks;
use super::add_step;
use super::columns::{Statement, datetime, id, parse_id};
use super::notifications::required_moment;
use crate::relay::state::event::{EventId, EventType};
use crate::relay::state::transaction::TransactionId;
use crate::relay::store::notifications::{
    Attempt, AttemptRecord, CHANGED_AT_ONCE, Delivery, DeliveryThen, EndpointId, EndpointThen, GIVEN_UP_AT_ONCE,
    PARKED, Recorded,
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
    const READ: &str = "SELECT type, delivery.transaction_id, delivery.position, delivery.created_at, attempts, payload \
         FROM webhook_deliveries AS delivery LEFT JOIN events ON events.id = event_id \
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
        // Its endpoint is being deleted.
        let Some(row) = row else { continue };
        let event = EventId(event);
        let kind: Option<String> = row.try_get(0)?;
        let transaction: String = row.try_get(1)?;
        leased.push(Delivery {
            endpoint,
            kind: kind.and_then(|kind| EventType::parse(&kind)).unwrap_or_else(|| event.kind()),
            event,
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

/// Parks what is due for the endpoint and follows an earlier event of its transaction: it was leased, or written, when that
/// one was made due again. Returns how many transactions have such a delivery.
pub(super) async fn park_blocked(
    connection: &mut MySqlConnection,
    endpoint: EndpointId,
    now: Timestamp,
) -> Result<usize, sqlx::Error> {
    const FIND: &str = "SELECT DISTINCT transaction_id FROM webhook_deliveries AS delivery \
         FORCE INDEX (webhook_deliveries_due) WHERE endpoint_id = ? AND open = 1 AND due_at <= ? AND EXISTS (SELECT 1 \
          FROM webhook_deliveries AS earlier FORCE INDEX (webhook_deliveries_open) \
          WHERE earlier.endpoint_id = delivery.endpoint_id AND earlier.transaction_id = delivery.transaction_id \
          AND earlier.position < delivery.position AND earlier.open = 1) LIMIT ?";
    let statement = sqlx::query(FIND).bind(endpoint.to_string()).bind(datetime(now));
    let rows = statement.bind(u64::try_from(CHANGED_AT_ONCE).unwrap_or(u64::MAX)).fetch_all(&mut *connection).await?;
    let found = rows.iter().map(|row| row.try_get(0)).collect::<Result<BTreeSet<String>, _>>()?;
    lock_transactions(connection, &found).await?;
    park_followers(connection, endpoint, &found, now).await?;
    Ok(found.len())
}

/// Ends a lease without an attempt: the delivery is due now, or after an earlier event of its transaction.
pub(super) async fn give_back(
    connection: &mut MySqlConnection,
    delivery: &Delivery,
    now: Timestamp,
) -> Result<(), sqlx::Error> {
    const SQL: &str = "UPDATE webhook_deliveries SET due_at = ?, lease = NULL \
         WHERE endpoint_id = ? AND event_id = ? AND lease = ? AND due_at IS NOT NULL";
    let due_at = if has_earlier(connection, delivery).await? { PARKED } else { now };
    sqlx::query(SQL)
        .bind(datetime(due_at))
        .bind(delivery.endpoint.to_string())
        .bind(&delivery.event.0)
        .bind(delivery.lease.as_bytes().as_slice())
        .execute(connection)
        .await?;
    Ok(())
}

/// Locks these transactions in the order in which a save locks them. Every commit that parks a delivery, or ends one that
/// others may be parked behind, does so first: otherwise one could be parked behind another that ends at the same time, and
/// nothing would make it due again.
pub(super) async fn lock_transactions(
    connection: &mut MySqlConnection,
    transactions: &BTreeSet<String>,
) -> Result<(), sqlx::Error> {
    let transactions: Vec<_> = transactions.iter().collect();
    for some in chunks(&transactions) {
        let places = vec!["?"; some.len()].join(", ");
        let sql = format!("SELECT id FROM transactions WHERE id IN ({places}) ORDER BY id FOR UPDATE");
        let statement: Statement<'_> = sqlx::query(AssertSqlSafe(sql));
        some.iter().fold(statement, |statement, id| statement.bind(*id)).fetch_all(&mut *connection).await?;
    }
    Ok(())
}

/// Records the attempt; returns what became of the decision.
pub(super) async fn record_attempt(
    connection: &mut MySqlConnection,
    record: &AttemptRecord,
) -> Result<Recorded, sqlx::Error> {
    // Steps of the timeline are numbered under this lock, too.
    lock_transactions(connection, &BTreeSet::from([id(record.delivery.transaction)])).await?;
    let (decided, refused) = (record, !may_disable(connection, record).await?);
    let record = &if refused { record.try_again() } else { record.clone() };
    let AttemptRecord { delivery, attempt, then, now, .. } = record;
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
        // Stored before, and the answer, or what followed that commit, was lost.
        let before = has_disabled_before(connection, decided).await?;
        return Ok(if before { Recorded::AsDecided } else { Recorded::Late });
    }
    if !matches!(then, DeliveryThen::RetryAt(_)) {
        release_next(connection, delivery, *now).await?;
    }
    change_health(connection, record).await?;
    if let Some(step) = record.step() {
        add_step(connection, delivery.transaction, &step, *now).await?;
    }
    Ok(if refused { Recorded::NotDisabled } else { Recorded::AsDecided })
}

/// Whether the endpoint is still as it was when the attempt was decided to disable it. It stays so until the commit.
async fn may_disable(connection: &mut MySqlConnection, record: &AttemptRecord) -> Result<bool, sqlx::Error> {
    const SQL: &str = "SELECT 1 FROM webhook_endpoints WHERE id = ? AND disabled_at IS NULL AND version = ? \
         AND (? IS NULL OR failing_since <= ?) FOR UPDATE";
    let EndpointThen::Disable { failing_since, .. } = &record.endpoint else { return Ok(true) };
    let since = failing_since.map(datetime);
    let statement = sqlx::query(SQL).bind(record.delivery.endpoint.to_string()).bind(record.endpoint_version);
    Ok(statement.bind(since).bind(since).fetch_optional(connection).await?.is_some())
}

/// Whether the endpoint is disabled by this very record, and unchanged since. It stays so until the commit.
async fn has_disabled_before(connection: &mut MySqlConnection, record: &AttemptRecord) -> Result<bool, sqlx::Error> {
    const SQL: &str = "SELECT 1 FROM webhook_endpoints WHERE id = ? AND version = ? AND disabled_at = ? \
         AND disabled_reason = ? LOCK IN SHARE MODE";
    let Some(reason) = record.disabling_reason() else { return Ok(false) };
    let statement = sqlx::query(SQL).bind(record.delivery.endpoint.to_string()).bind(record.endpoint_version + 1);
    Ok(statement.bind(datetime(record.now)).bind(reason).fetch_optional(connection).await?.is_some())
}

/// Gives up some of what waits for an endpoint, the longest due first, if it is still disabled by this record. Returns
/// how many: fewer than [`GIVEN_UP_AT_ONCE`] once none are left.
pub(super) async fn give_up_some(connection: &mut MySqlConnection, record: &AttemptRecord) -> Result<u64, sqlx::Error> {
    const FIND: &str = "SELECT event_id, transaction_id FROM webhook_deliveries FORCE INDEX (webhook_deliveries_due) \
         WHERE endpoint_id = ? AND open = 1 ORDER BY due_at LIMIT ?";
    let (endpoint, now) = (record.delivery.endpoint, record.now);
    let rows = sqlx::query(FIND).bind(endpoint.to_string()).bind(GIVEN_UP_AT_ONCE).fetch_all(&mut *connection).await?;
    let (mut events, mut transactions) = (Vec::new(), BTreeSet::new());
    for row in &rows {
        events.push(row.try_get::<String, _>(0)?);
        transactions.insert(row.try_get(1)?);
    }
    lock_transactions(connection, &transactions).await?;
    if !has_disabled_before(connection, record).await? {
        return Ok(0);
    }
    for some in chunks(&events) {
        let sql = format!(
            "UPDATE webhook_deliveries SET due_at = NULL, lease = NULL, ended_at = ?, ended = 'given-up' \
             WHERE endpoint_id = ? AND event_id IN ({}) AND due_at IS NOT NULL",
            vec!["?"; some.len()].join(", ")
        );
        let statement: Statement<'_> = sqlx::query(AssertSqlSafe(sql)).bind(datetime(now)).bind(endpoint.to_string());
        some.iter().fold(statement, |statement, event| statement.bind(event)).execute(&mut *connection).await?;
    }
    park_followers(connection, endpoint, &transactions, now).await?;
    Ok(events.len() as u64)
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
/// were made due, or given up, by other means than an attempt. A delivery in flight is left alone until its lease has ended.
pub(super) async fn park_followers(
    connection: &mut MySqlConnection,
    endpoint: EndpointId,
    transactions: &BTreeSet<String>,
    now: Timestamp,
) -> Result<(), sqlx::Error> {
    const EARLIER: &str = "webhook_deliveries AS earlier FORCE INDEX (webhook_deliveries_open) \
         ON earlier.endpoint_id = later.endpoint_id AND earlier.transaction_id = later.transaction_id \
         AND earlier.position < later.position AND earlier.open = 1";
    const LATER: &str = "UPDATE webhook_deliveries AS later FORCE INDEX (webhook_deliveries_open)";
    let (endpoint, parked, now) = (endpoint.to_string(), datetime(PARKED), datetime(now));
    let transactions: Vec<_> = transactions.iter().collect();
    for some in chunks(&transactions) {
        let places = vec!["?"; some.len()].join(", ");
        let of_these = format!("later.endpoint_id = ? AND later.transaction_id IN ({places}) AND later.open = 1");
        let park = format!(
            "{LATER} JOIN {EARLIER} SET later.due_at = ?, later.lease = NULL \
             WHERE {of_these} AND later.due_at < ? AND (later.lease IS NULL OR later.due_at <= ?)"
        );
        let release = format!(
            "{LATER} LEFT JOIN {EARLIER} SET later.due_at = ? \
             WHERE {of_these} AND later.due_at = ? AND earlier.endpoint_id IS NULL"
        );
        let bound = |sql: String, due_at: PrimitiveDateTime| {
            let statement: Statement<'_> = sqlx::query(AssertSqlSafe(sql)).bind(due_at).bind(endpoint.clone());
            some.iter().fold(statement, |statement, transaction| statement.bind((*transaction).clone())).bind(parked)
        };
        bound(park, parked).bind(now).execute(&mut *connection).await?;
        bound(release, now).execute(&mut *connection).await?;
    }
    Ok(())
}

/// Stores what the attempt means for its endpoint.
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
        EndpointThen::Fails { paused_until, anew } => {
            const SQL: &str = "UPDATE webhook_endpoints SET \
                 failing_since = CASE WHEN ? THEN ? ELSE COALESCE(failing_since, ?) END, failures = failures + 1, \
                 paused_until = CASE WHEN ? THEN GREATEST(COALESCE(paused_until, ?), ?) ELSE paused_until END \
                 WHERE id = ? AND version = ?";
            let at = datetime(attempt.at);
            let statement = sqlx::query(SQL).bind(anew).bind(at).bind(at);
            let (pauses, until) = (paused_until.is_some(), paused_until.map_or(at, datetime));
            let statement = statement.bind(pauses).bind(until).bind(until).bind(endpoint);
            statement.bind(version).execute(connection).await?;
        }
        EndpointThen::Disable { reason, .. } => {
            const DISABLE: &str = "UPDATE webhook_endpoints SET disabled_at = ?, disabled_reason = ?, updated_at = ?, \
                 version = version + 1 WHERE id = ? AND disabled_at IS NULL AND version = ?";
            let statement = sqlx::query(DISABLE).bind(datetime(*now)).bind(reason).bind(datetime(*now));
            statement.bind(endpoint).bind(version).execute(connection).await?;
        }
    }
    Ok(())
}
