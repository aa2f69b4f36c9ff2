//! What follows from an attempt, inside one write job: the log, the delivery, the next event of its transaction, the
//! endpoint's health and the timeline.

use std::collections::BTreeSet;

use rusqlite::{Connection, params};

use super::statements::add_step;
use crate::relay::state::transaction::TransactionId;
use crate::relay::store::notifications::{
    AttemptRecord, Delivery, DeliveryThen, EndpointId, EndpointThen, GIVEN_UP_AT_ONCE, PARKED,
};
use crate::timestamp::Timestamp;

pub(super) fn record_attempt(connection: &Connection, record: &AttemptRecord) -> Result<(), rusqlite::Error> {
    let AttemptRecord { delivery, attempt, then, now, .. } = record;
    let endpoint = delivery.endpoint.0.as_bytes();
    connection
        .prepare_cached(
            "INSERT INTO webhook_attempts (endpoint_id, id, event_id, number, at, duration_ms, status, error, answer) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9) ON CONFLICT (endpoint_id, id) DO NOTHING",
        )?
        .execute(params![
            endpoint,
            attempt.id.as_bytes(),
            attempt.event.0,
            attempt.number,
            attempt.at.0,
            u64::try_from(attempt.duration.as_millis()).unwrap_or(u64::MAX >> 1),
            attempt.status,
            attempt.error,
            attempt.answer
        ])?;
    let key = params![endpoint, delivery.event.0, delivery.lease.as_bytes(), now.0];
    let moved = match then {
        DeliveryThen::Delivered => connection
            .prepare_cached(
                "UPDATE webhook_deliveries SET due_at = NULL, lease = NULL, attempts = attempts + 1, ended_at = ?4, \
                 ended = 'delivered' WHERE endpoint_id = ?1 AND event_id = ?2 AND (lease = ?3 OR ended IS NULL \
                 OR ended <> 'delivered')",
            )?
            .execute(key)?,
        DeliveryThen::GivenUp => connection
            .prepare_cached(
                "UPDATE webhook_deliveries SET due_at = NULL, lease = NULL, attempts = attempts + 1, ended_at = ?4, \
                 ended = 'given-up' WHERE endpoint_id = ?1 AND event_id = ?2 AND lease = ?3 AND due_at IS NOT NULL",
            )?
            .execute(key)?,
        DeliveryThen::RetryAt(at) => connection
            .prepare_cached(&format!(
                "UPDATE webhook_deliveries SET due_at = CASE WHEN {EARLIER} THEN ?5 ELSE ?4 END, lease = NULL, \
                 attempts = attempts + 1 WHERE endpoint_id = ?1 AND event_id = ?2 AND lease = ?3 AND due_at IS NOT NULL",
            ))?
            .execute(params![endpoint, delivery.event.0, delivery.lease.as_bytes(), at.0, PARKED.0])?,
    };
    if moved == 0 {
        return Ok(());
    }
    if !matches!(then, DeliveryThen::RetryAt(_)) {
        release_next(connection, delivery, *now)?;
    }
    change_health(connection, record)?;
    if let Some(step) = record.step() {
        add_step(connection, delivery.transaction, &step, *now)?;
    }
    Ok(())
}

/// Makes the next event of the transaction due once this one has ended. The index is named: a planner without statistics may
/// prefer that of due times, and go through every delivery of the endpoint.
pub(super) fn release_next(
    connection: &Connection,
    delivery: &Delivery,
    now: Timestamp,
) -> Result<(), rusqlite::Error> {
    connection
        .prepare_cached(
            "UPDATE webhook_deliveries SET due_at = ?4 WHERE (endpoint_id, event_id) IN (SELECT endpoint_id, event_id \
              FROM webhook_deliveries INDEXED BY webhook_deliveries_open \
              WHERE endpoint_id = ?1 AND transaction_id = ?2 AND position > ?3 AND due_at IS NOT NULL \
              ORDER BY position LIMIT 1) AND due_at = ?5",
        )?
        .execute(params![
            delivery.endpoint.0.as_bytes(),
            delivery.transaction.0.as_bytes(),
            delivery.position,
            now.0,
            PARKED.0
        ])?;
    Ok(())
}

/// Whether an earlier event of the delivery's transaction waits for the same endpoint.
pub(super) const EARLIER: &str = "EXISTS (SELECT 1 FROM webhook_deliveries AS earlier INDEXED BY webhook_deliveries_open \
      WHERE earlier.endpoint_id = webhook_deliveries.endpoint_id \
      AND earlier.transaction_id = webhook_deliveries.transaction_id \
      AND earlier.position < webhook_deliveries.position AND earlier.due_at IS NOT NULL)";

/// Parks what is due behind an earlier event of these transactions, and makes due what is parked behind none: after events
/// were made due by other means than the end of the one before.
pub(super) fn park_followers(
    connection: &Connection,
    endpoint: EndpointId,
    transactions: &BTreeSet<TransactionId>,
    now: Timestamp,
) -> Result<(), rusqlite::Error> {
    const OF_TRANSACTION: &str = "endpoint_id = ?1 AND transaction_id = ?2 AND due_at IS NOT NULL";
    let mut park = connection.prepare_cached(&format!(
        "UPDATE webhook_deliveries INDEXED BY webhook_deliveries_open SET due_at = ?3 \
         WHERE {OF_TRANSACTION} AND due_at < ?3 AND lease IS NULL AND {EARLIER}"
    ))?;
    let mut release = connection.prepare_cached(&format!(
        "UPDATE webhook_deliveries INDEXED BY webhook_deliveries_open SET due_at = ?4 \
         WHERE {OF_TRANSACTION} AND due_at = ?3 AND NOT {EARLIER}"
    ))?;
    for transaction in transactions {
        let (endpoint, transaction) = (endpoint.0.as_bytes(), transaction.0.as_bytes());
        park.execute(params![endpoint, transaction, PARKED.0])?;
        release.execute(params![endpoint, transaction, PARKED.0, now.0])?;
    }
    Ok(())
}

fn change_health(connection: &Connection, record: &AttemptRecord) -> Result<(), rusqlite::Error> {
    let AttemptRecord { delivery, attempt, endpoint: then, endpoint_version: version, now, .. } = record;
    let id = delivery.endpoint.0.as_bytes();
    match then {
        EndpointThen::Unchanged => {}
        EndpointThen::Works => {
            connection
                .prepare_cached(
                    "UPDATE webhook_endpoints SET failing_since = NULL, failures = 0 WHERE id = ?1 AND failures > 0",
                )?
                .execute([id])?;
        }
        EndpointThen::Fails { paused_until } => {
            connection
                .prepare_cached(
                    "UPDATE webhook_endpoints SET failing_since = COALESCE(failing_since, ?2), failures = failures + 1, \
                     paused_until = MAX(COALESCE(paused_until, 0), COALESCE(?3, 0)) WHERE id = ?1 AND version = ?4",
                )?
                .execute(params![id, attempt.at.0, paused_until.map(|until| until.0), version])?;
        }
        EndpointThen::Disable { reason } => {
            let disabled = connection
                .prepare_cached(
                    "UPDATE webhook_endpoints SET disabled_at = ?2, disabled_reason = ?3, updated_at = ?2, \
                     version = version + 1 WHERE id = ?1 AND disabled_at IS NULL AND version = ?4",
                )?
                .execute(params![id, now.0, reason, version])?;
            if disabled > 0 {
                connection
                    .prepare_cached(
                        "UPDATE webhook_deliveries SET due_at = NULL, lease = NULL, ended_at = ?2, ended = 'given-up' \
                         WHERE endpoint_id = ?1 AND event_id IN (SELECT event_id FROM webhook_deliveries \
                          WHERE endpoint_id = ?1 AND due_at IS NOT NULL LIMIT ?3)",
                    )?
                    .execute(params![id, now.0, GIVEN_UP_AT_ONCE])?;
            }
        }
    }
    Ok(())
}
