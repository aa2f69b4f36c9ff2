//! Endpoints, deliveries and attempts: the same functions in the same order as in [`crate::relay::store::sqlite`].

use std::time::Duration;

use async_trait::async_trait;
use sqlx::mysql::MySqlRow;
use sqlx::{AssertSqlSafe, MySqlConnection, Row};
use time::PrimitiveDateTime;
use uuid::Uuid;

use super::columns::{Statement, datetime, id, milliseconds, parse_id};
use super::outbox::{put_deliveries, put_events};
use super::outcome::{End, is_duplicate, work};
use super::{MySqlStore, add_step};
use crate::config::Secret;
use crate::relay::state::event::{Event, EventId, EventType};
use crate::relay::state::transaction::TransactionId;
use crate::relay::store::StoreError;
use crate::relay::store::notifications::{
    Attempt, AttemptRecord, Delivery, DeliveryThen, Disabled, DueEndpoint, EVERY_KEY, Endpoint, EndpointCounts,
    EndpointId, EndpointThen, GIVEN_UP_AT_ONCE, NotificationCounts, NotificationStore, REQUEUED_AT_ONCE, Requeue,
    event_names, parse_events,
};
use crate::timestamp::Timestamp;

macro_rules! endpoint_columns {
    () => {
        "id, api_key, url, events, description, secret, previous_secret, previous_until, version, created_at, \
         updated_at, disabled_at, disabled_reason, failing_since, failures, paused_until"
    };
}

#[async_trait]
impl NotificationStore for MySqlStore {
    async fn put_endpoint(&self, endpoint: &Endpoint, max: usize) -> Result<bool, StoreError> {
        self.pool
            .transact(work!(connection => {
                lock_registrations(connection).await?;
                let others = sqlx::query("SELECT id FROM webhook_endpoints WHERE api_key = ?")
                    .bind(endpoint.owner.as_bytes())
                    .fetch_all(&mut *connection)
                    .await?;
                let own = endpoint.id.to_string();
                let mut count = 0;
                for row in &others {
                    count += usize::from(row.try_get::<String, _>(0)? != own);
                }
                if count >= max {
                    return Ok(End::Undo(Ok(false)));
                }
                put_endpoint(connection, endpoint).await?;
                Ok(End::Keep(true))
            }))
            .await
    }

    async fn endpoint(&self, endpoint: EndpointId) -> Result<Option<Endpoint>, StoreError> {
        const SQL: &str = concat!("SELECT ", endpoint_columns!(), " FROM webhook_endpoints WHERE id = ?");
        let read = self.pool.read(work!(connection => {
            let row = sqlx::query(SQL).bind(endpoint.to_string()).fetch_optional(connection).await?;
            row.as_ref().map(read_endpoint).transpose()
        }));
        read.await
    }

    async fn endpoints(&self, owner: Option<&str>) -> Result<Vec<Endpoint>, StoreError> {
        const ALL: &str = concat!("SELECT ", endpoint_columns!(), " FROM webhook_endpoints ORDER BY created_at, id");
        const OWN: &str = concat!(
            "SELECT ",
            endpoint_columns!(),
            " FROM webhook_endpoints WHERE api_key = ? ORDER BY created_at, id"
        );
        let read = self.pool.read(work!(connection => {
            let statement = owner.map_or_else(|| sqlx::query(ALL), |owner| sqlx::query(OWN).bind(owner.as_bytes()));
            statement.fetch_all(connection).await?.iter().map(read_endpoint).collect::<Result<Vec<_>, _>>()
        }));
        read.await
    }

    async fn change_endpoint(&self, endpoint: &Endpoint) -> Result<bool, StoreError> {
        // Assignments see those before them, so the old `disabled_at` is used before it is replaced.
        const SQL: &str = "UPDATE webhook_endpoints SET url = ?, events = ?, description = ?, secret = ?, \
             previous_secret = ?, previous_until = ?, updated_at = ?, version = version + 1, \
             failing_since = CASE WHEN disabled_at IS NOT NULL AND ? IS NULL THEN NULL ELSE failing_since END, \
             failures = CASE WHEN disabled_at IS NOT NULL AND ? IS NULL THEN 0 ELSE failures END, \
             paused_until = CASE WHEN disabled_at IS NOT NULL AND ? IS NULL THEN NULL ELSE paused_until END, \
             disabled_at = ?, disabled_reason = ? WHERE id = ? AND version = ?";
        self.pool
            .transact(work!(connection => {
                let disabled_at = endpoint.disabled.as_ref().map(|disabled| datetime(disabled.at));
                let changed = sqlx::query(SQL)
                    .bind(&endpoint.url)
                    .bind(event_names(&endpoint.events))
                    .bind(&endpoint.description)
                    .bind(endpoint.secret.expose())
                    .bind(endpoint.previous_secret.as_ref().map(|(secret, _)| secret.expose()))
                    .bind(endpoint.previous_secret.as_ref().map(|(_, until)| datetime(*until)))
                    .bind(datetime(endpoint.updated_at))
                    .bind(disabled_at)
                    .bind(disabled_at)
                    .bind(disabled_at)
                    .bind(disabled_at)
                    .bind(endpoint.disabled.as_ref().map(|disabled| disabled.reason.as_str()))
                    .bind(endpoint.id.to_string())
                    .bind(endpoint.version)
                    .execute(connection)
                    .await?;
                Ok(End::Keep(changed.rows_affected() > 0))
            }))
            .await
    }

    async fn delete_endpoint(&self, endpoint: EndpointId) -> Result<bool, StoreError> {
        let deleted = self.pool.transact(work!(connection => {
            let deleted = sqlx::query("DELETE FROM webhook_endpoints WHERE id = ?")
                .bind(endpoint.to_string())
                .execute(connection)
                .await?;
            Ok(End::Keep(deleted.rows_affected() > 0))
        }));
        let deleted = deleted.await?;
        // What is left of it is deleted in small commits; without its endpoint no delivery is made.
        for sql in [
            "DELETE FROM webhook_deliveries WHERE endpoint_id = ? LIMIT 5000",
            "DELETE FROM webhook_attempts WHERE endpoint_id = ? LIMIT 5000",
        ] {
            loop {
                let some = self.pool.transact(work!(connection => {
                    let some = sqlx::query(sql).bind(endpoint.to_string()).execute(connection).await?;
                    Ok(End::Keep(some.rows_affected()))
                }));
                if some.await? == 0 {
                    break;
                }
            }
        }
        Ok(deleted)
    }

    async fn due_endpoints(&self, now: Timestamp) -> Result<Vec<DueEndpoint>, StoreError> {
        const SQL: &str = "SELECT id, url, failures, since, api_key FROM (SELECT id, url, failures, api_key, \
             (SELECT due_at FROM webhook_deliveries WHERE endpoint_id = endpoint.id AND due_at IS NOT NULL \
              ORDER BY due_at LIMIT 1) AS since \
             FROM webhook_endpoints AS endpoint \
             WHERE disabled_at IS NULL AND (paused_until IS NULL OR paused_until <= ?)) AS found \
             WHERE since <= ? ORDER BY since";
        let read = self.pool.read(work!(connection => {
            let rows =
                sqlx::query(SQL).bind(datetime(now)).bind(datetime(now)).fetch_all(connection).await?;
            let due = rows.iter().map(|row| {
                Ok(DueEndpoint {
                    id: endpoint_id(row.try_get(0)?)?,
                    url: row.try_get(1)?,
                    failures: row.try_get(2)?,
                    since: required_moment(row, 3)?,
                    owner: String::from_utf8_lossy(row.try_get(4)?).into_owned(),
                })
            });
            due.collect::<Result<Vec<_>, sqlx::Error>>()
        }));
        read.await
    }

    async fn lease_deliveries(
        &self,
        places: &[(EndpointId, usize)],
        now: Timestamp,
        until: Timestamp,
        lease: Uuid,
    ) -> Result<Vec<Delivery>, StoreError> {
        self.pool
            .transact(work!(connection => {
                let mut leased = Vec::new();
                for (endpoint, max) in places {
                    leased.extend(lease_of(connection, *endpoint, *max, now, until, lease).await?);
                }
                Ok(End::Keep(leased))
            }))
            .await
    }

    async fn return_deliveries(&self, deliveries: &[Delivery], now: Timestamp) -> Result<(), StoreError> {
        const SQL: &str = "UPDATE webhook_deliveries SET due_at = ?, lease = NULL \
             WHERE endpoint_id = ? AND event_id = ? AND lease = ? AND due_at IS NOT NULL";
        self.pool
            .transact(work!(connection => {
                for delivery in deliveries {
                    sqlx::query(SQL)
                        .bind(datetime(now))
                        .bind(delivery.endpoint.to_string())
                        .bind(&delivery.event.0)
                        .bind(delivery.lease.as_bytes().as_slice())
                        .execute(&mut *connection)
                        .await?;
                }
                Ok(End::Keep(()))
            }))
            .await
    }

    async fn record_attempt(&self, record: &AttemptRecord) -> Result<(), StoreError> {
        self.pool
            .transact(work!(connection => match record_attempt(connection, record).await {
                Ok(()) => Ok(End::Keep(())),
                // Another connection took the number of a step.
                Err(error) if is_duplicate(&error) => Ok(End::Again(error)),
                Err(error) => Err(error),
            }))
            .await
    }

    async fn put_test(&self, endpoint: EndpointId, event: &Event) -> Result<(), StoreError> {
        self.pool
            .transact(work!(connection => {
                put_events(connection, &[event]).await?;
                put_deliveries(connection, &[(endpoint.to_string().as_str(), event)]).await?;
                Ok(End::Keep(()))
            }))
            .await
    }

    async fn requeue(&self, endpoint: EndpointId, what: &Requeue, now: Timestamp) -> Result<u64, StoreError> {
        let Some(found) = self.endpoint(endpoint).await? else { return Ok(0) };
        let found = &found;
        let mut all = 0;
        loop {
            let some = self.pool.transact(work!(connection => {
                let some = match what {
                    Requeue::Event(event) => requeue_event(connection, found, event, now).await?,
                    Requeue::Since(since) => requeue_since(connection, found, *since, now).await?,
                };
                Ok(End::Keep(some))
            }));
            let some = some.await?;
            all += some;
            if some == 0 || matches!(what, Requeue::Event(_)) {
                return Ok(all);
            }
        }
    }

    async fn attempts(
        &self,
        endpoint: EndpointId,
        before: Option<Uuid>,
        max: usize,
    ) -> Result<Vec<Attempt>, StoreError> {
        const SQL: &str = "SELECT id, event_id, number, at, duration_ms, status, error, answer FROM webhook_attempts \
             WHERE endpoint_id = ? AND id < ? ORDER BY id DESC LIMIT ?";
        let before = before.unwrap_or(Uuid::max()).to_string();
        let before = &before;
        let read = self.pool.read(work!(connection => {
            let statement = sqlx::query(SQL).bind(endpoint.to_string()).bind(before);
            let rows = statement.bind(u64::try_from(max).unwrap_or(u64::MAX)).fetch_all(connection).await?;
            let attempts = rows.iter().map(|row| {
                Ok(Attempt {
                    id: endpoint_id(row.try_get(0)?)?.0,
                    event: EventId(row.try_get(1)?),
                    number: row.try_get(2)?,
                    at: required_moment(row, 3)?,
                    duration: Duration::from_millis(row.try_get(4)?),
                    status: row.try_get(5)?,
                    error: row.try_get(6)?,
                    answer: row.try_get(7)?,
                })
            });
            attempts.collect::<Result<Vec<_>, sqlx::Error>>()
        }));
        read.await
    }

    async fn notification_counts(&self, _: Timestamp) -> Result<NotificationCounts, StoreError> {
        // Endpoint by endpoint, because the index has ended deliveries too.
        const SQL: &str = "SELECT disabled_at IS NULL, failures, \
             (SELECT COUNT(*) FROM webhook_deliveries WHERE endpoint_id = endpoint.id AND due_at IS NOT NULL), \
             (SELECT MIN(created_at) FROM webhook_deliveries WHERE endpoint_id = endpoint.id AND due_at IS NOT NULL) \
             FROM webhook_endpoints AS endpoint";
        let read = self.pool.read(work!(connection => {
            let mut counts = NotificationCounts::default();
            for row in sqlx::query(SQL).fetch_all(connection).await? {
                let enabled = row.try_get::<i64, _>(0)? != 0;
                let failing = row.try_get::<u32, _>(1)? > 0;
                counts.enabled += u64::from(enabled);
                counts.disabled += u64::from(!enabled);
                counts.failing += u64::from(enabled && failing);
                counts.waiting += u64::try_from(row.try_get::<i64, _>(2)?).unwrap_or(0);
                let oldest = moment(&row, 3)?;
                counts.oldest_waiting = [counts.oldest_waiting, oldest].into_iter().flatten().min();
            }
            Ok(counts)
        }));
        read.await
    }

    async fn endpoint_counts(&self, endpoint: EndpointId) -> Result<EndpointCounts, StoreError> {
        const WAITING: &str = "SELECT COUNT(*) FROM webhook_deliveries WHERE endpoint_id = ? AND due_at IS NOT NULL";
        const GIVEN_UP: &str = "SELECT COUNT(*) FROM webhook_deliveries WHERE endpoint_id = ? AND ended = 'given-up'";
        let read = self.pool.read(work!(connection => {
            let mut counts = [0; 2];
            for (count, sql) in counts.iter_mut().zip([WAITING, GIVEN_UP]) {
                let row = sqlx::query(sql).bind(endpoint.to_string()).fetch_one(&mut *connection).await?;
                *count = u64::try_from(row.try_get::<i64, _>(0)?).unwrap_or(0);
            }
            let [waiting, given_up] = counts;
            Ok(EndpointCounts { waiting, given_up })
        }));
        read.await
    }

    async fn forget_notifications(&self, before: Timestamp, max: usize) -> Result<u64, StoreError> {
        const DELETES: [&str; 3] = [
            "DELETE FROM webhook_deliveries WHERE ended_at < ? ORDER BY ended_at LIMIT ?",
            "DELETE FROM webhook_attempts WHERE at < ? ORDER BY at LIMIT ?",
            "DELETE FROM events WHERE created_at < ? AND NOT EXISTS \
             (SELECT 1 FROM webhook_deliveries WHERE event_id = events.id) ORDER BY created_at LIMIT ?",
        ];
        let max = u64::try_from(max).unwrap_or(u64::MAX);
        let mut deleted = 0;
        for sql in DELETES {
            let some = self.pool.transact(work!(connection => {
                let some = sqlx::query(sql).bind(datetime(before)).bind(max).execute(connection).await?;
                Ok(End::Keep(some.rows_affected()))
            }));
            deleted += some.await?;
        }
        Ok(deleted)
    }
}

/// Lets one registration in at a time, or several could count the same endpoints: no lock on rows keeps others from being
/// added.
async fn lock_registrations(connection: &mut MySqlConnection) -> Result<(), sqlx::Error> {
    const LOCK: &str = "SELECT 1 FROM sweep_leases WHERE sweep = 'webhook-endpoints' FOR UPDATE";
    const ADD: &str = "INSERT IGNORE INTO sweep_leases (sweep, until) VALUES ('webhook-endpoints', '2000-01-01')";
    if sqlx::query(LOCK).fetch_optional(&mut *connection).await?.is_none() {
        sqlx::query(ADD).execute(&mut *connection).await?;
        sqlx::query(LOCK).fetch_optional(connection).await?;
    }
    Ok(())
}

async fn put_endpoint(connection: &mut MySqlConnection, endpoint: &Endpoint) -> Result<(), sqlx::Error> {
    const SQL: &str = concat!(
        "REPLACE INTO webhook_endpoints (",
        endpoint_columns!(),
        ") VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    );
    sqlx::query(SQL)
        .bind(endpoint.id.to_string())
        .bind(endpoint.owner.as_bytes())
        .bind(&endpoint.url)
        .bind(event_names(&endpoint.events))
        .bind(&endpoint.description)
        .bind(endpoint.secret.expose())
        .bind(endpoint.previous_secret.as_ref().map(|(secret, _)| secret.expose()))
        .bind(endpoint.previous_secret.as_ref().map(|(_, until)| datetime(*until)))
        .bind(endpoint.version)
        .bind(datetime(endpoint.created_at))
        .bind(datetime(endpoint.updated_at))
        .bind(endpoint.disabled.as_ref().map(|disabled| datetime(disabled.at)))
        .bind(endpoint.disabled.as_ref().map(|disabled| disabled.reason.as_str()))
        .bind(endpoint.failing_since.map(datetime))
        .bind(endpoint.failures)
        .bind(endpoint.paused_until.map(datetime))
        .execute(connection)
        .await?;
    Ok(())
}

fn read_endpoint(row: &MySqlRow) -> Result<Endpoint, sqlx::Error> {
    let previous: Option<String> = row.try_get(6)?;
    let reason: Option<String> = row.try_get(12)?;
    let owner: Vec<u8> = row.try_get(1)?;
    Ok(Endpoint {
        id: endpoint_id(row.try_get(0)?)?,
        owner: String::from_utf8_lossy(&owner).into_owned(),
        url: row.try_get(2)?,
        events: parse_events(row.try_get(3)?),
        description: row.try_get(4)?,
        secret: Secret::new(row.try_get::<String, _>(5)?),
        previous_secret: previous.zip(moment(row, 7)?).map(|(secret, until)| (Secret::new(secret), until)),
        version: row.try_get(8)?,
        created_at: required_moment(row, 9)?,
        updated_at: required_moment(row, 10)?,
        disabled: moment(row, 11)?.map(|at| Disabled { at, reason: reason.unwrap_or_default() }),
        failing_since: moment(row, 13)?,
        failures: row.try_get(14)?,
        paused_until: moment(row, 15)?,
    })
}

fn endpoint_id(text: &str) -> Result<EndpointId, sqlx::Error> {
    let id = parse_id(text).ok_or_else(|| sqlx::Error::Decode("not a UUID".into()))?;
    Ok(EndpointId(id.0))
}

fn moment(row: &MySqlRow, index: usize) -> Result<Option<Timestamp>, sqlx::Error> {
    let at: Option<PrimitiveDateTime> = row.try_get(index)?;
    Ok(at.map(|at| Timestamp(milliseconds(at))))
}

fn required_moment(row: &MySqlRow, index: usize) -> Result<Timestamp, sqlx::Error> {
    moment(row, index)?.ok_or_else(|| sqlx::Error::Decode("a time is missing".into()))
}

/// Takes what is due for one endpoint. Rows that another process takes at this moment are skipped.
async fn lease_of(
    connection: &mut MySqlConnection,
    endpoint: EndpointId,
    max: usize,
    now: Timestamp,
    until: Timestamp,
    lease: Uuid,
) -> Result<Vec<Delivery>, sqlx::Error> {
    const DUE: &str = "SELECT event_id FROM webhook_deliveries AS delivery FORCE INDEX (webhook_deliveries_due) \
         WHERE endpoint_id = ? AND due_at <= ? AND NOT EXISTS (SELECT 1 \
          FROM webhook_deliveries AS earlier FORCE INDEX (webhook_deliveries_open) WHERE earlier.endpoint_id = delivery.endpoint_id AND earlier.transaction_id = delivery.transaction_id \
          AND earlier.position < delivery.position AND earlier.due_at IS NOT NULL) \
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

async fn record_attempt(connection: &mut MySqlConnection, record: &AttemptRecord) -> Result<(), sqlx::Error> {
    let AttemptRecord { delivery, attempt, then, endpoint: endpoint_then, now } = record;
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
            at,
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
    move_later_events(connection, delivery, *then, *now).await?;
    change_health(connection, delivery.endpoint, endpoint_then, attempt.at, *now).await?;
    if let Some(step) = step {
        add_step(connection, delivery.transaction, &step, *now).await?;
    }
    Ok(())
}

async fn add_attempt(
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

/// Later events of the transaction wait with a failed one, and follow an ended one at once. The index is named: a planner
/// without statistics may prefer that of due times, and go through every delivery of the endpoint.
async fn move_later_events(
    connection: &mut MySqlConnection,
    delivery: &Delivery,
    then: DeliveryThen,
    now: Timestamp,
) -> Result<(), sqlx::Error> {
    const EARLIER: &str = "UPDATE webhook_deliveries FORCE INDEX (webhook_deliveries_open) SET due_at = ? \
         WHERE endpoint_id = ? AND transaction_id = ? AND position > ? AND lease IS NULL AND due_at > ?";
    const LATER: &str = "UPDATE webhook_deliveries FORCE INDEX (webhook_deliveries_open) SET due_at = ? \
         WHERE endpoint_id = ? AND transaction_id = ? AND position > ? AND lease IS NULL AND due_at < ?";
    let (sql, due) = match then {
        DeliveryThen::RetryAt(at) => (LATER, at),
        DeliveryThen::Delivered | DeliveryThen::GivenUp => (EARLIER, now),
    };
    sqlx::query(sql)
        .bind(datetime(due))
        .bind(delivery.endpoint.to_string())
        .bind(id(delivery.transaction))
        .bind(delivery.position)
        .bind(datetime(due))
        .execute(connection)
        .await?;
    Ok(())
}

async fn change_health(
    connection: &mut MySqlConnection,
    endpoint: EndpointId,
    then: &EndpointThen,
    at: Timestamp,
    now: Timestamp,
) -> Result<(), sqlx::Error> {
    match then {
        EndpointThen::Works => {
            const SQL: &str = "UPDATE webhook_endpoints SET failing_since = NULL, failures = 0, paused_until = NULL \
                 WHERE id = ? AND (failures > 0 OR paused_until IS NOT NULL)";
            sqlx::query(SQL).bind(endpoint.to_string()).execute(connection).await?;
        }
        EndpointThen::Fails { paused_until } => {
            const SQL: &str = "UPDATE webhook_endpoints SET failing_since = COALESCE(failing_since, ?), \
                 failures = failures + 1, paused_until = ? WHERE id = ?";
            let statement = sqlx::query(SQL).bind(datetime(at)).bind(paused_until.map(datetime));
            statement.bind(endpoint.to_string()).execute(connection).await?;
        }
        EndpointThen::Disable { reason } => {
            const DISABLE: &str = "UPDATE webhook_endpoints SET disabled_at = ?, disabled_reason = ?, updated_at = ?, \
                 version = version + 1 WHERE id = ? AND disabled_at IS NULL";
            const GIVE_UP: &str = "UPDATE webhook_deliveries SET due_at = NULL, lease = NULL, ended_at = ?, \
                 ended = 'given-up' WHERE endpoint_id = ? AND due_at IS NOT NULL LIMIT ?";
            let statement = sqlx::query(DISABLE).bind(datetime(now)).bind(reason).bind(datetime(now));
            statement.bind(endpoint.to_string()).execute(&mut *connection).await?;
            let statement = sqlx::query(GIVE_UP).bind(datetime(now)).bind(endpoint.to_string());
            statement.bind(GIVEN_UP_AT_ONCE).execute(connection).await?;
        }
    }
    Ok(())
}

async fn requeue_event(
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

/// Some of the events that the endpoint has missed; 0 once there are none left.
async fn requeue_since(
    connection: &mut MySqlConnection,
    endpoint: &Endpoint,
    since: Timestamp,
    now: Timestamp,
) -> Result<u64, sqlx::Error> {
    const AGAIN: &str = "UPDATE webhook_deliveries SET due_at = ?, lease = NULL, attempts = 0, ended_at = NULL, \
         ended = NULL WHERE endpoint_id = ? AND ended = 'given-up' AND created_at >= ? LIMIT ?";
    let max = u64::try_from(REQUEUED_AT_ONCE).unwrap_or(u64::MAX);
    let again = sqlx::query(AGAIN)
        .bind(datetime(now))
        .bind(endpoint.id.to_string())
        .bind(datetime(since))
        .bind(max)
        .execute(&mut *connection)
        .await?
        .rows_affected();
    let own = if endpoint.owner == EVERY_KEY { "" } else { "api_key = ? AND " };
    let kinds = vec!["?"; endpoint.events.len().max(1)].join(", ");
    let sql = format!(
        "INSERT INTO webhook_deliveries (endpoint_id, event_id, transaction_id, position, created_at, due_at, attempts) \
         SELECT ?, id, transaction_id, position, created_at, ?, 0 FROM events \
         WHERE {own}created_at >= ? AND type IN ({kinds}) \
         AND NOT EXISTS (SELECT 1 FROM webhook_deliveries WHERE endpoint_id = ? AND event_id = events.id) LIMIT ?"
    );
    let mut statement: Statement<'_> =
        sqlx::query(AssertSqlSafe(sql)).bind(endpoint.id.to_string()).bind(datetime(now));
    if endpoint.owner != EVERY_KEY {
        statement = statement.bind(endpoint.owner.as_bytes());
    }
    statement = statement.bind(datetime(since));
    for kind in endpoint.events.iter().copied().chain(endpoint.events.is_empty().then_some(EventType::Test)) {
        statement = statement.bind(kind.name());
    }
    let added = statement.bind(endpoint.id.to_string()).bind(max).execute(connection).await?.rows_affected();
    Ok(again + added)
}
