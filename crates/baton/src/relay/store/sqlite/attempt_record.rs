//! What follows from an attempt, inside one write job: the log, the delivery, the next event of its transaction, the
//! endpoint's health and the timeline.

use std::collections::BTreeSet;

use rusqlite::{Connection, params};
use uuid::Uuid;

use super::statements::add_step;
use crate::relay::state::transaction::TransactionId;
use crate::relay::store::notifications::{
    AttemptRecord, CHANGED_AT_ONCE, Delivery, DeliveryThen, EndpointId, EndpointThen, GIVEN_UP_AT_ONCE, PARKED,
    Recorded,
};
use crate::timestamp::Timestamp;

/// Parks what is due for the endpoint and follows an earlier event of its transaction: it was leased when that one was made
/// due again.
pub(super) fn park_blocked(
    connection: &Connection,
    endpoint: EndpointId,
    now: Timestamp,
) -> Result<usize, rusqlite::Error> {
    let max = i64::try_from(CHANGED_AT_ONCE).unwrap_or(i64::MAX);
    connection
        .prepare_cached(&format!(
            "UPDATE webhook_deliveries SET due_at = ?3, lease = NULL WHERE endpoint_id = ?1 AND event_id IN \
             (SELECT event_id FROM webhook_deliveries INDEXED BY webhook_deliveries_due \
              WHERE endpoint_id = ?1 AND due_at <= ?2 AND {EARLIER} LIMIT ?4)"
        ))?
        .execute(params![endpoint.0.as_bytes(), now.0, PARKED.0, max])
}

/// Ends a lease without an attempt: the delivery is due now, or after an earlier event of its transaction.
pub(super) fn give_back(connection: &Connection, delivery: &Delivery, now: Timestamp) -> Result<(), rusqlite::Error> {
    connection
        .prepare_cached(&format!(
            "UPDATE webhook_deliveries SET due_at = CASE WHEN {EARLIER} THEN ?5 ELSE ?3 END, lease = NULL \
             WHERE endpoint_id = ?1 AND event_id = ?2 AND lease = ?4 AND due_at IS NOT NULL"
        ))?
        .execute(params![
            delivery.endpoint.0.as_bytes(),
            delivery.event.0,
            now.0,
            delivery.lease.as_bytes(),
            PARKED.0
        ])?;
    Ok(())
}

/// Records the attempt; returns what became of the decision.
pub(super) fn record_attempt(connection: &Connection, record: &AttemptRecord) -> Result<Recorded, rusqlite::Error> {
    let (decided, refused) = (record, !may_disable(connection, record)?);
    let record = &if refused { record.try_again() } else { record.clone() };
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
        // Stored before, and the answer, or what followed that commit, was lost.
        let before = has_disabled_before(connection, decided)?;
        return Ok(if before { Recorded::AsDecided } else { Recorded::Late });
    }
    if !matches!(then, DeliveryThen::RetryAt(_)) {
        release_next(connection, delivery, *now)?;
    }
    change_health(connection, record)?;
    if let Some(step) = record.step() {
        add_step(connection, delivery.transaction, &step, *now)?;
    }
    Ok(if refused { Recorded::NotDisabled } else { Recorded::AsDecided })
}

/// Whether the endpoint is still as it was when the attempt was decided to disable it.
fn may_disable(connection: &Connection, record: &AttemptRecord) -> Result<bool, rusqlite::Error> {
    let EndpointThen::Disable { failing_since, .. } = &record.endpoint else { return Ok(true) };
    connection
        .prepare_cached(
            "SELECT 1 FROM webhook_endpoints WHERE id = ?1 AND disabled_at IS NULL AND version = ?2 \
             AND (?3 IS NULL OR failing_since <= ?3)",
        )?
        .exists(params![record.delivery.endpoint.0.as_bytes(), record.endpoint_version, failing_since.map(|at| at.0)])
}

/// Whether the endpoint is disabled by this very record, and unchanged since.
fn has_disabled_before(connection: &Connection, record: &AttemptRecord) -> Result<bool, rusqlite::Error> {
    let Some(reason) = record.disabling_reason() else { return Ok(false) };
    connection
        .prepare_cached(
            "SELECT 1 FROM webhook_endpoints WHERE id = ?1 AND version = ?2 AND disabled_at = ?3 AND disabled_reason = ?4",
        )?
        .exists(params![record.delivery.endpoint.0.as_bytes(), record.endpoint_version + 1, record.now.0, reason])
}

/// Gives up some of what waits for an endpoint, the longest due first, if it is still disabled by this record. Returns
/// how many: fewer than [`GIVEN_UP_AT_ONCE`] once none are left.
pub(super) fn give_up_some(connection: &Connection, record: &AttemptRecord) -> Result<u32, rusqlite::Error> {
    if !has_disabled_before(connection, record)? {
        return Ok(0);
    }
    let (endpoint, now) = (record.delivery.endpoint, record.now);
    let id = endpoint.0.as_bytes();
    let mut give_up = connection.prepare_cached(
        "UPDATE webhook_deliveries SET due_at = NULL, lease = NULL, ended_at = ?2, ended = 'given-up' \
         WHERE endpoint_id = ?1 AND event_id IN (SELECT event_id FROM webhook_deliveries \
          INDEXED BY webhook_deliveries_due WHERE endpoint_id = ?1 AND due_at IS NOT NULL ORDER BY due_at LIMIT ?3) \
         RETURNING transaction_id",
    )?;
    let key = params![id, now.0, GIVEN_UP_AT_ONCE];
    let (mut given_up, mut transactions) = (0, BTreeSet::new());
    for transaction in give_up.query_map(key, |row| row.get::<_, [u8; 16]>(0))? {
        given_up += 1;
        transactions.insert(TransactionId(Uuid::from_bytes(transaction?)));
    }
    park_followers(connection, endpoint, &transactions, now)?;
    Ok(given_up)
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
/// were made due, or given up, by other means than an attempt. A delivery in flight is left alone until its lease has ended.
pub(super) fn park_followers(
    connection: &Connection,
    endpoint: EndpointId,
    transactions: &BTreeSet<TransactionId>,
    now: Timestamp,
) -> Result<(), rusqlite::Error> {
    const OF_TRANSACTION: &str = "endpoint_id = ?1 AND transaction_id = ?2 AND due_at IS NOT NULL";
    let mut park = connection.prepare_cached(&format!(
        "UPDATE webhook_deliveries INDEXED BY webhook_deliveries_open SET due_at = ?3, lease = NULL \
         WHERE {OF_TRANSACTION} AND due_at < ?3 AND (lease IS NULL OR due_at <= ?4) AND {EARLIER}"
    ))?;
    let mut release = connection.prepare_cached(&format!(
        "UPDATE webhook_deliveries INDEXED BY webhook_deliveries_open SET due_at = ?4 \
         WHERE {OF_TRANSACTION} AND due_at = ?3 AND NOT {EARLIER}"
    ))?;
    for transaction in transactions {
        let (endpoint, transaction) = (endpoint.0.as_bytes(), transaction.0.as_bytes());
        park.execute(params![endpoint, transaction, PARKED.0, now.0])?;
        release.execute(params![endpoint, transaction, PARKED.0, now.0])?;
    }
    Ok(())
}

/// Stores what the attempt means for its endpoint.
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
        EndpointThen::Fails { paused_until, anew } => {
            connection
                .prepare_cached(
                    "UPDATE webhook_endpoints SET failures = failures + 1, \
                     failing_since = CASE WHEN ?5 THEN ?2 ELSE COALESCE(failing_since, ?2) END, \
                     paused_until = CASE WHEN ?3 IS NULL THEN paused_until ELSE MAX(COALESCE(paused_until, ?3), ?3) END \
                     WHERE id = ?1 AND version = ?4",
                )?
                .execute(params![id, attempt.at.0, paused_until.map(|until| until.0), version, anew])?;
        }
        EndpointThen::Disable { reason, .. } => {
            connection
                .prepare_cached(
                    "UPDATE webhook_endpoints SET disabled_at = ?2, disabled_reason = ?3, updated_at = ?2, \
                     version = version + 1 WHERE id = ?1 AND disabled_at IS NULL AND version = ?4",
                )?
                .execute(params![id, now.0, reason, version])?;
        }
    }
    Ok(())
}
