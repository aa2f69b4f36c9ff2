//! Writes the events of a group of moves inside the commit that saves the moves, with a delivery for each endpoint that asks
//! for them.

use std::collections::{BTreeSet, HashMap, HashSet};

use sqlx::{AssertSqlSafe, MySqlConnection, Row};

use super::accept::chunks;
use super::columns::{datetime, id};
use crate::relay::state::event::{Event, EventMark, EventType};
use crate::relay::state::transaction::Transaction;
use crate::relay::store::notifications::{EVERY_KEY, PARKED};

/// What an endpoint asks for.
struct Subscription {
    endpoint: String,
    /// Names of events, separated by commas.
    events: String,
    enabled: bool,
}

impl Subscription {
    fn wants(&self, kind: EventType) -> bool {
        self.events.split(',').any(|name| name == kind.name())
    }
}

/// Who asks for events of the API keys of a group's rows.
pub(super) struct Subscriptions(HashMap<Vec<u8>, Vec<Subscription>>);

impl Subscriptions {
    /// Those of the keys of these rows.
    pub async fn read(
        connection: &mut MySqlConnection,
        marks: &[(&Transaction, &EventMark)],
    ) -> Result<Self, sqlx::Error> {
        Ok(Self(if marks.is_empty() { HashMap::new() } else { subscriptions(connection, marks).await? }))
    }

    fn asking(&self, row: &Transaction, mark: &EventMark) -> Vec<&Subscription> {
        let own = self.0.get(row.api_key.as_bytes());
        let asking = own.into_iter().chain(self.0.get(EVERY_KEY.as_bytes())).flatten();
        asking.filter(|subscription| subscription.wants(mark.kind)).collect()
    }

    /// How many deliveries these events have.
    pub fn deliveries(&self, marks: &[(&Transaction, &EventMark)]) -> usize {
        marks.iter().map(|(row, mark)| self.asking(row, mark).len()).sum()
    }
}

/// Writes the events of these rows as far as endpoints of their API keys ask for them. A disabled endpoint gets no delivery,
/// but can have the event delivered once it is enabled.
pub(super) async fn write(
    connection: &mut MySqlConnection,
    marks: &[(&Transaction, &EventMark)],
    subscriptions: &Subscriptions,
) -> Result<(), sqlx::Error> {
    if marks.is_empty() {
        return Ok(());
    }
    let wanted: Vec<(Event, Vec<&Subscription>)> = marks
        .iter()
        .map(|(row, mark)| (row, mark, subscriptions.asking(row, mark)))
        .filter(|(_, _, asking)| !asking.is_empty())
        .map(|(row, mark, asking)| (row.event(mark), asking))
        .collect();
    let deliveries = wanted.iter().flat_map(|(event, asking)| {
        let enabled = asking.iter().filter(|subscription| subscription.enabled);
        enabled.map(move |subscription| (subscription.endpoint.as_str(), event))
    });
    let mut deliveries: Vec<_> = deliveries.collect();
    // In the order of a transaction's events, so that each is parked behind the one before.
    deliveries.sort_by_key(|(endpoint, event)| (*endpoint, event.transaction, event.position));
    let events: Vec<_> = wanted.iter().map(|(event, _)| event).collect();
    put_events(connection, &events).await?;
    put_deliveries(connection, &deliveries).await
}

async fn subscriptions(
    connection: &mut MySqlConnection,
    marks: &[(&Transaction, &EventMark)],
) -> Result<HashMap<Vec<u8>, Vec<Subscription>>, sqlx::Error> {
    let mut keys: BTreeSet<&[u8]> = marks.iter().map(|(row, _)| row.api_key.as_bytes()).collect();
    keys.insert(EVERY_KEY.as_bytes());
    let places = vec!["?"; keys.len().next_power_of_two()].join(", ");
    let sql =
        format!("SELECT api_key, id, events, disabled_at IS NULL FROM webhook_endpoints WHERE api_key IN ({places})");
    let padded = keys.iter().copied().chain(std::iter::repeat(EVERY_KEY.as_bytes()));
    let statement = padded
        .take(keys.len().next_power_of_two())
        .fold(sqlx::query(AssertSqlSafe(sql)), |statement, key| statement.bind(key));
    let mut found: HashMap<Vec<u8>, Vec<Subscription>> = HashMap::new();
    for row in statement.fetch_all(connection).await? {
        let subscription = Subscription {
            endpoint: row.try_get(1)?,
            events: row.try_get(2)?,
            enabled: row.try_get::<i64, _>(3)? != 0,
        };
        found.entry(row.try_get(0)?).or_default().push(subscription);
    }
    Ok(found)
}

/// An event that is there already is the same event.
pub(super) async fn put_events(connection: &mut MySqlConnection, events: &[&Event]) -> Result<(), sqlx::Error> {
    for some in chunks(events) {
        let values = vec!["(?, ?, ?, ?, ?, ?, ?)"; some.len()].join(", ");
        let sql = format!(
            "INSERT INTO events (id, api_key, transaction_id, position, type, created_at, payload) VALUES {values} \
             ON DUPLICATE KEY UPDATE id = VALUES(id)"
        );
        let mut statement = sqlx::query(AssertSqlSafe(sql));
        for event in some {
            statement = statement
                .bind(&event.id.0)
                .bind(event.api_key.as_bytes())
                .bind(id(event.transaction))
                .bind(event.position)
                .bind(event.kind.name())
                .bind(datetime(event.at))
                .bind(&event.payload);
        }
        statement.execute(&mut *connection).await?;
    }
    Ok(())
}

/// Due at once, or parked behind an earlier event of its transaction: one that waits already, or the one before in this
/// list. The row locks of the transactions keep the end of an earlier delivery from happening at the same time.
pub(super) async fn put_deliveries(
    connection: &mut MySqlConnection,
    deliveries: &[(&str, &Event)],
) -> Result<(), sqlx::Error> {
    let waiting = waiting(connection, deliveries).await?;
    let mut due = Vec::with_capacity(deliveries.len());
    for (place, (endpoint, event)) in deliveries.iter().enumerate() {
        let before = place.checked_sub(1).map(|before| deliveries[before]);
        let follows = before.is_some_and(|(other, earlier)| {
            other == *endpoint && earlier.transaction == event.transaction && earlier.position < event.position
        });
        let is_parked = follows || waiting.contains(&((*endpoint).to_owned(), id(event.transaction)));
        due.push(if is_parked && !event.transaction.0.is_nil() { PARKED } else { event.at });
    }
    let deliveries: Vec<_> = deliveries.iter().copied().zip(due).collect();
    for some in chunks(&deliveries) {
        let values = vec!["(?, ?, ?, ?, ?, ?, 0)"; some.len()].join(", ");
        let sql = format!(
            "INSERT INTO webhook_deliveries \
             (endpoint_id, event_id, transaction_id, position, created_at, due_at, attempts) VALUES {values} \
             ON DUPLICATE KEY UPDATE event_id = VALUES(event_id)"
        );
        let mut statement = sqlx::query(AssertSqlSafe(sql));
        for ((endpoint, event), due) in some {
            statement = statement
                .bind(endpoint)
                .bind(&event.id.0)
                .bind(id(event.transaction))
                .bind(event.position)
                .bind(datetime(event.at))
                .bind(datetime(*due));
        }
        statement.execute(&mut *connection).await?;
    }
    Ok(())
}

/// The endpoints and transactions of these deliveries for which an earlier event waits.
async fn waiting(
    connection: &mut MySqlConnection,
    deliveries: &[(&str, &Event)],
) -> Result<HashSet<(String, String)>, sqlx::Error> {
    let pairs: BTreeSet<(&str, String)> =
        deliveries.iter().map(|(endpoint, event)| (*endpoint, id(event.transaction))).collect();
    let pairs: Vec<_> = pairs.into_iter().collect();
    let mut waiting = HashSet::new();
    for some in chunks(&pairs) {
        let places = vec!["(?, ?)"; some.len()].join(", ");
        let sql = format!(
            "SELECT DISTINCT endpoint_id, transaction_id FROM webhook_deliveries FORCE INDEX (webhook_deliveries_open) \
             WHERE (endpoint_id, transaction_id) IN ({places}) AND open = 1"
        );
        let statement = some.iter().fold(sqlx::query(AssertSqlSafe(sql)), |statement, (endpoint, transaction)| {
            statement.bind(*endpoint).bind(transaction)
        });
        for row in statement.fetch_all(&mut *connection).await? {
            waiting.insert((row.try_get(0)?, row.try_get(1)?));
        }
    }
    Ok(waiting)
}
