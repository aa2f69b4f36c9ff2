//! Endpoints, deliveries and attempts: the same functions in the same order as in [`crate::relay::store::sqlite`].

use std::time::Duration;

use async_trait::async_trait;
use sqlx::mysql::MySqlRow;
use sqlx::{MySqlConnection, Row};
use time::PrimitiveDateTime;
use uuid::Uuid;

use super::MySqlStore;
use super::attempt_record::{give_back, give_up_some, lease_of, lock_transactions, park_blocked, record_attempt};
use super::columns::{datetime, id, milliseconds, parse_id};
use super::outbox::{put_deliveries, put_events};
use super::outcome::{End, is_duplicate, work};
use super::requeue::{add_missed, hurry, read_missed, release_stranded, requeue_event, requeue_given_up};
use crate::config::Secret;
use crate::relay::state::event::{Event, EventId};
use crate::relay::store::StoreError;
use crate::relay::store::notifications::{
    Attempt, AttemptRecord, COUNT_MAX, Delivery, Disabled, DueEndpoint, Endpoint, EndpointCounts, EndpointId,
    GIVE_UP_PAGES_MAX, GIVEN_UP_AT_ONCE, NotificationCounts, NotificationStore, PARKED, REQUEUE_PAGES_MAX, Recorded,
    Requeue, Requeued, event_names, parse_events,
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
        // Assignments see those before them, so the old `disabled_at` and `url` are used before they are replaced.
        const SQL: &str = "UPDATE webhook_endpoints SET \
             failing_since = CASE WHEN (disabled_at IS NOT NULL AND ? IS NULL) OR url <> ? THEN NULL ELSE failing_since END, \
             failures = CASE WHEN (disabled_at IS NOT NULL AND ? IS NULL) OR url <> ? THEN 0 ELSE failures END, \
             paused_until = CASE WHEN (disabled_at IS NOT NULL AND ? IS NULL) OR url <> ? THEN NULL ELSE paused_until END, \
             url = ?, events = ?, description = ?, secret = ?, previous_secret = ?, previous_until = ?, updated_at = ?, \
             version = version + 1, disabled_at = ?, disabled_reason = ? WHERE id = ? AND version = ?";
        self.pool
            .transact(work!(connection => {
                let disabled_at = endpoint.disabled.as_ref().map(|disabled| datetime(disabled.at));
                let changed = sqlx::query(SQL)
                    .bind(disabled_at)
                    .bind(&endpoint.url)
                    .bind(disabled_at)
                    .bind(&endpoint.url)
                    .bind(disabled_at)
                    .bind(&endpoint.url)
                    .bind(&endpoint.url)
                    .bind(event_names(&endpoint.events))
                    .bind(&endpoint.description)
                    .bind(endpoint.secret.expose())
                    .bind(endpoint.previous_secret.as_ref().map(|(secret, _)| secret.expose()))
                    .bind(endpoint.previous_secret.as_ref().map(|(_, until)| datetime(*until)))
                    .bind(datetime(endpoint.updated_at))
                    .bind(disabled_at)
                    .bind(endpoint.disabled.as_ref().map(|disabled| disabled.reason.as_str()))
                    .bind(endpoint.id.to_string())
                    .bind(endpoint.version)
                    .execute(&mut *connection)
                    .await?;
                Ok(End::Keep(changed.rows_affected() > 0))
            }))
            .await
    }

    async fn delete_endpoint(&self, endpoint: EndpointId) -> Result<bool, StoreError> {
        // Disabled first, so that it gets no new deliveries, and deleted last: if this call is cut off, the endpoint is still
        // there, and the call can be repeated.
        const DISABLE: &str = "UPDATE webhook_endpoints SET disabled_at = COALESCE(disabled_at, UTC_TIMESTAMP(3)), \
             disabled_reason = 'it is being deleted', version = version + 1 WHERE id = ?";
        const CHILDREN: [&str; 2] = [
            "DELETE FROM webhook_deliveries WHERE endpoint_id = ? LIMIT 5000",
            "DELETE FROM webhook_attempts WHERE endpoint_id = ? LIMIT 5000",
        ];
        let run = async |sql: &'static str| {
            let affected = self.pool.transact(work!(connection => {
                let done = sqlx::query(sql).bind(endpoint.to_string()).execute(connection).await?;
                Ok(End::Keep(done.rows_affected()))
            }));
            affected.await
        };
        if run(DISABLE).await? == 0 {
            return Ok(false);
        }
        for sql in CHILDREN {
            while run(sql).await? > 0 {}
        }
        let deleted = run("DELETE FROM webhook_endpoints WHERE id = ?").await? > 0;
        // A save or a recovery that had read the endpoint before; later ones are found by `forget_notifications`.
        while run(CHILDREN[0]).await? > 0 {}
        Ok(deleted)
    }

    async fn due_endpoints(&self, now: Timestamp) -> Result<Vec<DueEndpoint>, StoreError> {
        const SQL: &str = "SELECT id, url, failures, since, api_key FROM (SELECT id, url, failures, api_key, \
             (SELECT due_at FROM webhook_deliveries FORCE INDEX (webhook_deliveries_due) \
              WHERE endpoint_id = endpoint.id AND open = 1 ORDER BY due_at LIMIT 1) AS since \
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
        let leased = self.pool.transact(work!(connection => {
            let mut leased = Vec::new();
            for (endpoint, max) in places {
                leased.extend(lease_of(connection, *endpoint, *max, now, until, lease).await?);
            }
            Ok(End::Keep(leased))
        }));
        let leased = leased.await?;
        let is_empty = |endpoint: EndpointId| leased.iter().all(|delivery| delivery.endpoint != endpoint);
        for (endpoint, _) in places.iter().filter(|(endpoint, _)| is_empty(*endpoint)) {
            let parked = self.pool.transact(work!(connection => {
                Ok(End::Keep(park_blocked(connection, *endpoint, now).await?))
            }));
            if let Err(failure) = parked.await {
                // The next look tries again; what is leased is not lost for it.
                tracing::debug!(action = "store_retry", "{failure}");
            }
        }
        Ok(leased)
    }

    async fn return_deliveries(&self, deliveries: &[Delivery], now: Timestamp) -> Result<(), StoreError> {
        let transactions = deliveries.iter().map(|delivery| id(delivery.transaction)).collect();
        let transactions = &transactions;
        self.pool
            .transact(work!(connection => {
                lock_transactions(connection, transactions).await?;
                for delivery in deliveries {
                    give_back(connection, delivery, now).await?;
                }
                Ok(End::Keep(()))
            }))
            .await
    }

    async fn record_attempt(&self, record: &AttemptRecord) -> Result<Recorded, StoreError> {
        let recorded = self.pool.transact(work!(connection => match record_attempt(connection, record).await {
            Ok(recorded) => Ok(End::Keep(recorded)),
            // Another connection took the number of a step.
            Err(error) if is_duplicate(&error) => Ok(End::Again(error)),
            Err(error) => Err(error),
        }));
        let recorded = recorded.await?;
        let mut pages = if record.has_disabled(recorded) { GIVE_UP_PAGES_MAX } else { 0 };
        while pages > 0 {
            let given_up = self.pool.transact(work!(connection => {
                Ok(End::Keep(give_up_some(connection, record).await?))
            }));
            pages = if given_up.await? < u64::from(GIVEN_UP_AT_ONCE) { 0 } else { pages - 1 };
        }
        Ok(recorded)
    }

    async fn put_test(&self, endpoint: EndpointId, event: &Event, max: usize) -> Result<bool, StoreError> {
        const WAITING: &str = "SELECT COUNT(*) FROM webhook_deliveries FORCE INDEX (webhook_deliveries_open) \
             WHERE endpoint_id = ? AND transaction_id = ? AND open = 1";
        self.pool
            .transact(work!(connection => {
                let waiting = sqlx::query(WAITING).bind(endpoint.to_string()).bind(id(event.transaction));
                let waiting: i64 = waiting.fetch_one(&mut *connection).await?.try_get(0)?;
                if usize::try_from(waiting).unwrap_or(0) >= max {
                    return Ok(End::Undo(Ok(false)));
                }
                put_events(connection, &[event]).await?;
                put_deliveries(connection, &[(endpoint.to_string().as_str(), event)]).await?;
                Ok(End::Keep(true))
            }))
            .await
    }

    async fn requeue(&self, endpoint: EndpointId, what: &Requeue, now: Timestamp) -> Result<Requeued, StoreError> {
        let Some(found) = self.endpoint(endpoint).await? else { return Ok(Requeued::default()) };
        let found = &found;
        let since = match what {
            Requeue::Event(event) => {
                let queued = self.pool.transact(work!(connection => {
                    Ok(End::Keep(requeue_event(connection, found, event, now).await?))
                }));
                return Ok(Requeued { queued: queued.await?, next_since: None });
            }
            Requeue::Since(since) => *since,
        };
        let (mut queued, mut pages) = (0, 0..REQUEUE_PAGES_MAX);
        loop {
            // Two commits: the first locks the endpoint, the second the transactions, as an attempt does in another order.
            let hurried = self.pool.transact(work!(connection => {
                Ok(End::Keep(hurry(connection, endpoint, since, now).await?))
            }));
            let given_up = self.pool.transact(work!(connection => {
                Ok(End::Keep(requeue_given_up(connection, endpoint, since, now).await?))
            }));
            let again = hurried.await? + given_up.await?;
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
            let place = &place;
            let page = self.pool.read(work!(connection => read_missed(connection, found, place).await));
            let page = page.await?;
            let (missed, stranded) = (&page.missed, &page.stranded);
            if !missed.is_empty() || !stranded.is_empty() {
                let added = self.pool.transact(work!(connection => {
                    release_stranded(connection, endpoint, stranded, now).await?;
                    Ok(End::Keep(add_missed(connection, endpoint, missed, now).await?))
                }));
                queued += added.await? + stranded.len() as u64;
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
        const ENDPOINTS: &str = "SELECT id, disabled_at IS NULL, failures, \
             EXISTS (SELECT 1 FROM webhook_deliveries FORCE INDEX (webhook_deliveries_due) \
              WHERE endpoint_id = endpoint.id AND open = 1) FROM webhook_endpoints AS endpoint";
        const WAITING: &str = "SELECT COUNT(*), MIN(created_at) FROM (SELECT created_at \
              FROM webhook_deliveries FORCE INDEX (webhook_deliveries_due) \
              WHERE endpoint_id = ? AND open = 1 ORDER BY due_at LIMIT ?) AS counted";
        const PARKED_SINCE: &str = "SELECT MIN(created_at) FROM webhook_deliveries FORCE INDEX (webhook_deliveries_due) \
             WHERE endpoint_id = ? AND open = 1 AND due_at = ?";
        let mut counts = NotificationCounts::default();
        let endpoints = self.pool.read(work!(connection => {
            let rows = sqlx::query(ENDPOINTS).fetch_all(connection).await?;
            let endpoints = rows.iter().map(|row| {
                let id: String = row.try_get(0)?;
                Ok((id, row.try_get::<i64, _>(1)? != 0, row.try_get::<u32, _>(2)? > 0, row.try_get::<i64, _>(3)? != 0))
            });
            endpoints.collect::<Result<Vec<_>, sqlx::Error>>()
        }));
        for (id, enabled, failing, waits) in endpoints.await? {
            counts.enabled += u64::from(enabled);
            counts.disabled += u64::from(!enabled);
            counts.failing += u64::from(enabled && failing);
            if !(enabled && waits) {
                continue;
            }
            let id = &id;
            let read = self.pool.read(work!(connection => {
                let row = sqlx::query(WAITING).bind(id).bind(COUNT_MAX).fetch_one(&mut *connection).await?;
                let parked = sqlx::query(PARKED_SINCE).bind(id).bind(datetime(PARKED)).fetch_one(connection).await?;
                Ok((row.try_get::<i64, _>(0)?, [moment(&row, 1)?, moment(&parked, 0)?]))
            }));
            let (waiting, oldest) = read.await?;
            counts.waiting += u64::try_from(waiting).unwrap_or(0);
            counts.oldest_waiting = oldest.into_iter().chain([counts.oldest_waiting]).flatten().min();
        }
        Ok(counts)
    }

    async fn endpoint_counts(&self, endpoint: EndpointId) -> Result<EndpointCounts, StoreError> {
        const WAITING: &str = "SELECT COUNT(*) FROM (SELECT 1 FROM webhook_deliveries FORCE INDEX (webhook_deliveries_due) \
             WHERE endpoint_id = ? AND open = 1 LIMIT ?) AS counted";
        const GIVEN_UP: &str = "SELECT COUNT(*) FROM (SELECT 1 \
              FROM webhook_deliveries FORCE INDEX (webhook_deliveries_given_up) \
              WHERE endpoint_id = ? AND ended = 'given-up' LIMIT ?) AS counted";
        let read = self.pool.read(work!(connection => {
            let mut counts = [0; 2];
            for (count, sql) in counts.iter_mut().zip([WAITING, GIVEN_UP]) {
                let statement = sqlx::query(sql).bind(endpoint.to_string()).bind(COUNT_MAX);
                let row = statement.fetch_one(&mut *connection).await?;
                *count = u64::try_from(row.try_get::<i64, _>(0)?).unwrap_or(0);
            }
            let [waiting, given_up] = counts;
            Ok(EndpointCounts { waiting, given_up })
        }));
        read.await
    }

    async fn forget_notifications(&self, before: Timestamp, now: Timestamp, max: usize) -> Result<u64, StoreError> {
        Ok(self.forget_waiting(before, now, max).await?
            + self.forget_ended(before, max).await?
            + self.forget_events(before, max).await?
            + self.forget_attempts(before, max).await?)
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

pub(super) fn endpoint_id(text: &str) -> Result<EndpointId, sqlx::Error> {
    let id = parse_id(text).ok_or_else(|| sqlx::Error::Decode("not a UUID".into()))?;
    Ok(EndpointId(id.0))
}

fn moment(row: &MySqlRow, index: usize) -> Result<Option<Timestamp>, sqlx::Error> {
    let at: Option<PrimitiveDateTime> = row.try_get(index)?;
    Ok(at.map(|at| Timestamp(milliseconds(at))))
}

pub(super) fn required_moment(row: &MySqlRow, index: usize) -> Result<Timestamp, sqlx::Error> {
    moment(row, index)?.ok_or_else(|| sqlx::Error::Decode("a time is missing".into()))
}
