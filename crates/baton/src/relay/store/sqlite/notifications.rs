//! Endpoints, deliveries and attempts on the embedded engine: the same functions in the same order as in
//! [`crate::relay::store::mysql`].

use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Connection, OptionalExtension, Row, params};
use uuid::Uuid;

use super::SqliteStore;
use super::attempt_record::{give_back, give_up_some, park_blocked, record_attempt};
use super::outbox::{put_delivery, put_event};
use super::requeue::{add_missed, hurry, read_missed, release_stranded, requeue_event, requeue_given_up};
use crate::config::Secret;
use crate::relay::state::event::{Event, EventId, EventType};
use crate::relay::state::transaction::TransactionId;
use crate::relay::store::StoreError;
use crate::relay::store::notifications::{
    Attempt, AttemptRecord, CHANGED_AT_ONCE, COUNT_MAX, Delivery, Disabled, DueEndpoint, Endpoint, EndpointCounts,
    EndpointId, GIVE_UP_PAGES_MAX, GIVEN_UP_AT_ONCE, NotificationCounts, NotificationStore, PARKED, REQUEUE_PAGES_MAX,
    Recorded, Requeue, Requeued, event_names, parse_events,
};
use crate::timestamp::Timestamp;

const ENDPOINT: &str = "id, api_key, url, events, description, secret, previous_secret, previous_until, version, \
     created_at, updated_at, disabled_at, disabled_reason, failing_since, failures, paused_until";

#[async_trait]
impl NotificationStore for SqliteStore {
    async fn put_endpoint(&self, endpoint: &Endpoint, max: usize) -> Result<bool, StoreError> {
        let endpoint = endpoint.clone();
        self.write(move |connection| {
            let others: usize = connection
                .prepare_cached("SELECT COUNT(*) FROM webhook_endpoints WHERE api_key = ?1 AND id <> ?2")?
                .query_row(params![endpoint.owner, endpoint.id.0.as_bytes()], |row| row.get(0))?;
            if others >= max {
                return Ok(false);
            }
            put_endpoint(connection, &endpoint)?;
            Ok(true)
        })
        .await
    }

    async fn endpoint(&self, id: EndpointId) -> Result<Option<Endpoint>, StoreError> {
        self.read(move |connection| {
            connection
                .prepare_cached(&format!("SELECT {ENDPOINT} FROM webhook_endpoints WHERE id = ?1"))?
                .query_row([id.0.as_bytes()], read_endpoint)
                .optional()
        })
        .await
    }

    async fn endpoints(&self, owner: Option<&str>) -> Result<Vec<Endpoint>, StoreError> {
        let owner = owner.map(str::to_owned);
        self.read(move |connection| {
            let sql = format!(
                "SELECT {ENDPOINT} FROM webhook_endpoints WHERE ?1 IS NULL OR api_key = ?1 ORDER BY created_at, id"
            );
            let mut statement = connection.prepare_cached(&sql)?;
            statement.query_map([owner], read_endpoint)?.collect()
        })
        .await
    }

    async fn change_endpoint(&self, endpoint: &Endpoint) -> Result<bool, StoreError> {
        let endpoint = endpoint.clone();
        self.write(move |connection| {
            let (previous, until) = previous(&endpoint);
            let (disabled_at, reason) = disabled(&endpoint);
            // The expressions see the row as it was.
            let changed = connection
                .prepare_cached(
                    "UPDATE webhook_endpoints SET url = ?3, events = ?4, description = ?5, secret = ?6, \
                     previous_secret = ?7, previous_until = ?8, updated_at = ?9, version = ?2 + 1, \
                     failing_since = CASE WHEN (disabled_at IS NOT NULL AND ?10 IS NULL) OR url <> ?3 \
                      THEN NULL ELSE failing_since END, \
                     failures = CASE WHEN (disabled_at IS NOT NULL AND ?10 IS NULL) OR url <> ?3 THEN 0 ELSE failures END, \
                     paused_until = CASE WHEN (disabled_at IS NOT NULL AND ?10 IS NULL) OR url <> ?3 \
                      THEN NULL ELSE paused_until END, \
                     disabled_at = ?10, disabled_reason = ?11 WHERE id = ?1 AND version = ?2",
                )?
                .execute(params![
                    endpoint.id.0.as_bytes(),
                    endpoint.version,
                    endpoint.url,
                    event_names(&endpoint.events),
                    endpoint.description,
                    endpoint.secret.expose(),
                    previous,
                    until,
                    endpoint.updated_at.0,
                    disabled_at,
                    reason
                ])?;
            Ok(changed > 0)
        })
        .await
    }

    async fn delete_endpoint(&self, endpoint: EndpointId) -> Result<bool, StoreError> {
        // Disabled first, so that it gets no new deliveries, and deleted last: if this call is cut off, the endpoint is still
        // there, and the call can be repeated.
        const DISABLE: &str = "UPDATE webhook_endpoints SET disabled_at = COALESCE(disabled_at, updated_at), \
             disabled_reason = 'it is being deleted', version = version + 1 WHERE id = ?1 AND ?2 > 0";
        const CHILDREN: [&str; 2] = [
            "DELETE FROM webhook_deliveries WHERE endpoint_id = ?1 AND event_id IN \
             (SELECT event_id FROM webhook_deliveries WHERE endpoint_id = ?1 LIMIT ?2)",
            "DELETE FROM webhook_attempts WHERE endpoint_id = ?1 AND id IN \
             (SELECT id FROM webhook_attempts WHERE endpoint_id = ?1 LIMIT ?2)",
        ];
        let run = async |sql: &'static str| {
            let max = i64::try_from(CHANGED_AT_ONCE).unwrap_or(i64::MAX);
            self.write(move |connection| connection.execute(sql, params![endpoint.0.as_bytes(), max])).await
        };
        if run(DISABLE).await? == 0 {
            return Ok(false);
        }
        for sql in CHILDREN {
            while run(sql).await? > 0 {}
        }
        let deleted = run("DELETE FROM webhook_endpoints WHERE id = ?1 AND ?2 > 0").await? > 0;
        // A recovery that had read the endpoint before.
        while run(CHILDREN[0]).await? > 0 {}
        Ok(deleted)
    }

    async fn due_endpoints(&self, now: Timestamp) -> Result<Vec<DueEndpoint>, StoreError> {
        self.read(move |connection| {
            let mut statement = connection.prepare_cached(
                "SELECT id, url, failures, since, api_key FROM (SELECT id, url, failures, api_key, \
                 (SELECT due_at FROM webhook_deliveries WHERE endpoint_id = endpoint.id AND due_at IS NOT NULL \
                  ORDER BY due_at LIMIT 1) AS since \
                 FROM webhook_endpoints AS endpoint \
                 WHERE disabled_at IS NULL AND (paused_until IS NULL OR paused_until <= ?1)) \
                 WHERE since <= ?1 ORDER BY since",
            )?;
            let due = statement.query_map([now.0], |row| {
                Ok(DueEndpoint {
                    id: endpoint_id(row.get(0)?),
                    url: row.get(1)?,
                    failures: row.get(2)?,
                    since: Timestamp(row.get(3)?),
                    owner: row.get(4)?,
                })
            })?;
            due.collect()
        })
        .await
    }

    async fn lease_deliveries(
        &self,
        places: &[(EndpointId, usize)],
        now: Timestamp,
        until: Timestamp,
        lease: Uuid,
    ) -> Result<Vec<Delivery>, StoreError> {
        let places = places.to_vec();
        self.write(move |connection| {
            let mut leased = Vec::new();
            let mut due = connection.prepare_cached(
                "SELECT event_id, type, delivery.transaction_id, delivery.position, delivery.created_at, attempts, payload \
                 FROM webhook_deliveries AS delivery INDEXED BY webhook_deliveries_due \
                 LEFT JOIN events ON events.id = event_id \
                 WHERE endpoint_id = ?1 AND due_at <= ?2 AND NOT EXISTS (SELECT 1 \
                  FROM webhook_deliveries AS earlier INDEXED BY webhook_deliveries_open WHERE earlier.endpoint_id = ?1 AND earlier.transaction_id = delivery.transaction_id \
                  AND earlier.position < delivery.position AND earlier.due_at IS NOT NULL) \
                 ORDER BY due_at LIMIT ?3",
            )?;
            let mut take = connection.prepare_cached(
                "UPDATE webhook_deliveries SET due_at = ?3, lease = ?4 WHERE endpoint_id = ?1 AND event_id = ?2",
            )?;
            for (endpoint, max) in places {
                let max = i64::try_from(max).unwrap_or(i64::MAX);
                let found = due.query_map(params![endpoint.0.as_bytes(), now.0, max], |row| {
                    let (event, kind) = (EventId(row.get(0)?), row.get::<_, Option<String>>(1)?);
                    Ok(Delivery {
                        endpoint,
                        kind: kind.and_then(|kind| EventType::parse(&kind)).unwrap_or_else(|| event.kind()),
                        event,
                        transaction: TransactionId(Uuid::from_bytes(row.get(2)?)),
                        position: row.get(3)?,
                        created_at: Timestamp(row.get(4)?),
                        attempts: row.get(5)?,
                        payload: row.get(6)?,
                        lease,
                    })
                })?;
                let found = found.collect::<Result<Vec<_>, _>>()?;
                if found.is_empty() {
                    park_blocked(connection, endpoint, now)?;
                }
                for delivery in found {
                    take.execute(params![endpoint.0.as_bytes(), delivery.event.0, until.0, lease.as_bytes()])?;
                    leased.push(delivery);
                }
            }
            Ok(leased)
        })
        .await
    }

    async fn return_deliveries(&self, deliveries: &[Delivery], now: Timestamp) -> Result<(), StoreError> {
        let deliveries = deliveries.to_vec();
        self.write(move |connection| deliveries.iter().try_for_each(|delivery| give_back(connection, delivery, now)))
            .await
    }

    async fn record_attempt(&self, record: &AttemptRecord) -> Result<Recorded, StoreError> {
        let decided = record.clone();
        let recorded = self.write(move |connection| record_attempt(connection, &decided)).await?;
        let mut pages = if record.has_disabled(recorded) { GIVE_UP_PAGES_MAX } else { 0 };
        while pages > 0 {
            let record = record.clone();
            let given_up = self.write(move |connection| give_up_some(connection, &record)).await?;
            pages = if given_up < GIVEN_UP_AT_ONCE { 0 } else { pages - 1 };
        }
        Ok(recorded)
    }

    async fn put_test(&self, endpoint: EndpointId, event: &Event, max: usize) -> Result<bool, StoreError> {
        let event = event.clone();
        self.write(move |connection| {
            let waiting: usize = connection
                .prepare_cached(
                    "SELECT COUNT(*) FROM webhook_deliveries INDEXED BY webhook_deliveries_open \
                     WHERE endpoint_id = ?1 AND transaction_id = ?2 AND due_at IS NOT NULL",
                )?
                .query_row(params![endpoint.0.as_bytes(), event.transaction.0.as_bytes()], |row| row.get(0))?;
            if waiting >= max {
                return Ok(false);
            }
            put_event(connection, &event)?;
            put_delivery(connection, endpoint.0.as_bytes(), &event)?;
            Ok(true)
        })
        .await
    }

    async fn requeue(&self, endpoint: EndpointId, what: &Requeue, now: Timestamp) -> Result<Requeued, StoreError> {
        let Some(found) = self.endpoint(endpoint).await? else { return Ok(Requeued::default()) };
        let since = match what {
            Requeue::Event(event) => {
                let event = event.clone();
                let queued = self.write(move |connection| requeue_event(connection, &found, &event, now)).await?;
                return Ok(Requeued { queued, next_since: None });
            }
            Requeue::Since(since) => *since,
        };
        let (mut queued, mut pages) = (0, 0..REQUEUE_PAGES_MAX);
        loop {
            let again = self.write(move |connection| {
                Ok(hurry(connection, endpoint, since, now)? + requeue_given_up(connection, endpoint, since, now)?)
            });
            let again = again.await?;
            queued += again;
            if again == 0 {
                break;
            }
            if pages.next().is_none() {
                return Ok(Requeued { queued, next_since: Some(since) });
            }
        }
        let mut after = Some((since, String::new()));
        while let Some(place) = after.take() {
            if pages.next().is_none() {
                return Ok(Requeued { queued, next_since: Some(place.0) });
            }
            let reader = found.clone();
            let mut page = self.read(move |connection| read_missed(connection, &reader, &place)).await?;
            let (missed, stranded) = (std::mem::take(&mut page.missed), std::mem::take(&mut page.stranded));
            if !missed.is_empty() || !stranded.is_empty() {
                let added = self.write(move |connection| {
                    release_stranded(connection, endpoint, &stranded, now)?;
                    Ok(add_missed(connection, endpoint, &missed, now)? + stranded.len() as u64)
                });
                queued += added.await?;
            }
            after = page.next();
        }
        Ok(Requeued { queued, next_since: None })
    }

    async fn attempts(
        &self,
        endpoint: EndpointId,
        before: Option<Uuid>,
        max: usize,
    ) -> Result<Vec<Attempt>, StoreError> {
        let before = before.unwrap_or(Uuid::max());
        self.read(move |connection| {
            let mut statement = connection.prepare_cached(
                "SELECT id, event_id, number, at, duration_ms, status, error, answer FROM webhook_attempts \
                 WHERE endpoint_id = ?1 AND id < ?2 ORDER BY id DESC LIMIT ?3",
            )?;
            let max = i64::try_from(max).unwrap_or(i64::MAX);
            let found = statement.query_map(params![endpoint.0.as_bytes(), before.as_bytes(), max], |row| {
                Ok(Attempt {
                    id: Uuid::from_bytes(row.get(0)?),
                    event: EventId(row.get(1)?),
                    number: row.get(2)?,
                    at: Timestamp(row.get(3)?),
                    duration: Duration::from_millis(row.get(4)?),
                    status: row.get(5)?,
                    error: row.get(6)?,
                    answer: row.get(7)?,
                })
            })?;
            found.collect()
        })
        .await
    }

    async fn notification_counts(&self, _: Timestamp) -> Result<NotificationCounts, StoreError> {
        self.read(|connection| {
            let mut endpoints =
                connection.prepare_cached("SELECT id, disabled_at IS NULL, failures > 0 FROM webhook_endpoints")?;
            let mut waiting = connection.prepare_cached(
                "SELECT COUNT(*), MIN(created_at) FROM (SELECT created_at \
                  FROM webhook_deliveries INDEXED BY webhook_deliveries_due \
                  WHERE endpoint_id = ?1 AND due_at IS NOT NULL ORDER BY due_at LIMIT ?2)",
            )?;
            let mut parked_since = connection.prepare_cached(
                "SELECT MIN(created_at) FROM webhook_deliveries INDEXED BY webhook_deliveries_due \
                 WHERE endpoint_id = ?1 AND due_at = ?2",
            )?;
            let mut counts = NotificationCounts::default();
            let mut rows = endpoints.query([])?;
            while let Some(row) = rows.next()? {
                let (id, enabled, failing): ([u8; 16], bool, bool) = (row.get(0)?, row.get(1)?, row.get(2)?);
                counts.enabled += u64::from(enabled);
                counts.disabled += u64::from(!enabled);
                counts.failing += u64::from(enabled && failing);
                if !enabled {
                    continue;
                }
                let (count, oldest): (u64, Option<i64>) =
                    waiting.query_row(params![id, COUNT_MAX], |row| Ok((row.get(0)?, row.get(1)?)))?;
                let parked: Option<i64> = parked_since.query_row(params![id, PARKED.0], |row| row.get(0))?;
                counts.waiting += count;
                let oldest = [oldest, parked].into_iter().flatten().map(Timestamp);
                counts.oldest_waiting = oldest.chain(counts.oldest_waiting).min();
            }
            Ok(counts)
        })
        .await
    }

    async fn endpoint_counts(&self, endpoint: EndpointId) -> Result<EndpointCounts, StoreError> {
        self.read(move |connection| {
            let count = |sql: &str| {
                let mut statement = connection.prepare_cached(sql)?;
                statement.query_row(params![endpoint.0.as_bytes(), COUNT_MAX], |row| row.get::<_, u64>(0))
            };
            Ok(EndpointCounts {
                waiting: count(
                    "SELECT COUNT(*) FROM (SELECT 1 FROM webhook_deliveries INDEXED BY webhook_deliveries_due \
                     WHERE endpoint_id = ?1 AND due_at IS NOT NULL LIMIT ?2)",
                )?,
                given_up: count(
                    "SELECT COUNT(*) FROM (SELECT 1 FROM webhook_deliveries INDEXED BY webhook_deliveries_given_up \
                     WHERE endpoint_id = ?1 AND ended = 'given-up' LIMIT ?2)",
                )?,
            })
        })
        .await
    }

    async fn forget_notifications(&self, before: Timestamp, now: Timestamp, max: usize) -> Result<u64, StoreError> {
        Ok(self.forget_waiting(before, now, max).await?
            + self.forget_ended(before, max).await?
            + self.forget_events(before, max).await?
            + self.forget_attempts(before, max).await?)
    }
}

fn put_endpoint(connection: &Connection, endpoint: &Endpoint) -> Result<(), rusqlite::Error> {
    let (previous, until) = previous(endpoint);
    let (disabled_at, reason) = disabled(endpoint);
    connection
        .prepare_cached(&format!(
            "INSERT OR REPLACE INTO webhook_endpoints ({ENDPOINT}) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16)"
        ))?
        .execute(params![
            endpoint.id.0.as_bytes(),
            endpoint.owner,
            endpoint.url,
            event_names(&endpoint.events),
            endpoint.description,
            endpoint.secret.expose(),
            previous,
            until,
            endpoint.version,
            endpoint.created_at.0,
            endpoint.updated_at.0,
            disabled_at,
            reason,
            endpoint.failing_since.map(|at| at.0),
            endpoint.failures,
            endpoint.paused_until.map(|at| at.0)
        ])?;
    Ok(())
}

fn previous(endpoint: &Endpoint) -> (Option<&str>, Option<i64>) {
    endpoint.previous_secret.as_ref().map(|(secret, until)| (secret.expose(), until.0)).unzip()
}

fn disabled(endpoint: &Endpoint) -> (Option<i64>, Option<&str>) {
    endpoint.disabled.as_ref().map(|disabled| (disabled.at.0, disabled.reason.as_str())).unzip()
}

fn read_endpoint(row: &Row<'_>) -> Result<Endpoint, rusqlite::Error> {
    let previous: Option<String> = row.get(6)?;
    let until: Option<i64> = row.get(7)?;
    let disabled_at: Option<i64> = row.get(11)?;
    let reason: Option<String> = row.get(12)?;
    Ok(Endpoint {
        id: endpoint_id(row.get(0)?),
        owner: row.get(1)?,
        url: row.get(2)?,
        events: parse_events(&row.get::<_, String>(3)?),
        description: row.get(4)?,
        secret: Secret::new(row.get::<_, String>(5)?),
        previous_secret: previous.zip(until).map(|(secret, until)| (Secret::new(secret), Timestamp(until))),
        version: row.get(8)?,
        created_at: Timestamp(row.get(9)?),
        updated_at: Timestamp(row.get(10)?),
        disabled: disabled_at.map(|at| Disabled { at: Timestamp(at), reason: reason.unwrap_or_default() }),
        failing_since: row.get::<_, Option<i64>>(13)?.map(Timestamp),
        failures: row.get(14)?,
        paused_until: row.get::<_, Option<i64>>(15)?.map(Timestamp),
    })
}

fn endpoint_id(bytes: [u8; 16]) -> EndpointId {
    EndpointId(Uuid::from_bytes(bytes))
}
