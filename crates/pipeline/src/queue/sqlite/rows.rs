//! Reads rows into messages and dead letters, and converts times, receipts and attributes from and to columns.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::Row;

use crate::message::{Attributes, DeadLetter, MessageId, Receipt};

pub(super) struct DueRow {
    pub(super) id: i64,
    pub(super) message_id: String,
    pub(super) body: Vec<u8>,
    pub(super) attributes: Result<Attributes, serde_json::Error>,
    pub(super) receives: u32,
    pub(super) sent_at: i64,
    pub(super) expires_at: i64,
}

pub(super) fn read_due(row: &Row<'_>) -> rusqlite::Result<DueRow> {
    Ok(DueRow {
        id: row.get(0)?,
        message_id: row.get(1)?,
        body: row.get(2)?,
        attributes: read_attributes(row.get_ref(3)?.as_str_or_null()?),
        receives: row.get(4)?,
        sent_at: row.get(5)?,
        expires_at: row.get(6)?,
    })
}

pub(super) fn read_dead_letter(row: &Row<'_>) -> rusqlite::Result<DeadLetter> {
    let stored = row.get_ref(2)?.as_str_or_null()?;
    // An operator must see this letter too, so it keeps the stored text as an attribute.
    let unreadable = |_| Attributes::from([("unreadable".to_owned(), stored.unwrap_or_default().to_owned())]);
    Ok(DeadLetter {
        id: MessageId(row.get(0)?),
        body: row.get(1)?,
        attributes: read_attributes(stored).unwrap_or_else(unreadable),
        reason: row.get(3)?,
        receives: row.get(4)?,
        sent_at: time_from_ms(row.get(5)?),
        buried_at: time_from_ms(row.get(6)?),
        by_queue: row.get(7)?,
    })
}

pub(super) fn read_attributes(stored: Option<&str>) -> Result<Attributes, serde_json::Error> {
    stored.map_or_else(|| Ok(Attributes::new()), serde_json::from_str)
}

pub(super) fn write_attributes(attributes: &Attributes) -> Option<String> {
    if attributes.is_empty() {
        return None;
    }
    Some(serde_json::to_string(attributes).expect("a map of strings is always JSON"))
}

/// The row id and the lease token of a receipt.
pub(super) fn read_receipt(receipt: &Receipt) -> Option<(i64, i64)> {
    let (id, token) = receipt.0.split_once('.')?;
    Some((id.parse().ok()?, token.parse().ok()?))
}

pub(super) fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// `now` plus `delay`, rounded up to whole milliseconds: a delay may end late, not early.
pub(super) fn after(now: i64, delay: Duration) -> i64 {
    now.saturating_add(millis(delay.saturating_add(Duration::from_nanos(999_999))))
}

pub(super) fn until_ms(now: i64, then: i64) -> Duration {
    Duration::from_millis(u64::try_from(then.saturating_sub(now)).unwrap_or(0))
}

pub(super) fn time_from_ms(ms: i64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(u64::try_from(ms).unwrap_or(0))
}

pub(super) fn limit(max: usize) -> i64 {
    i64::try_from(max).unwrap_or(i64::MAX)
}

pub(super) fn count(row: &Row<'_>, column: usize) -> rusqlite::Result<u64> {
    row.get::<_, i64>(column).map(|count| u64::try_from(count).unwrap_or(0))
}
