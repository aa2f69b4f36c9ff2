//! Converts messages to and from AMQP: the id is in `message_id`, attributes are plain headers, and headers with the prefix
//! `pipeline-` hold what RabbitMQ does not store (receives, times, reason). Pure.
//!
//! Messages of other programs are read too. Without a `message_id` the id is a hash of the body, and the broker's `x-death`
//! header becomes the reason of a dead letter.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lapin::BasicProperties;
use lapin::types::{AMQPValue, FieldTable, ShortString};
use uuid::Uuid;

use crate::message::{Attributes, DeadLetter, MessageId};
use crate::queue::NO_REASON;

/// Prefix of this backend's own headers.
const OWN_PREFIX: &str = "pipeline-";
const RECEIVES: &str = "pipeline-receives";
const SENT_AT: &str = "pipeline-sent-at-ms";
const EXPIRES_AT: &str = "pipeline-expires-at-ms";
const HOPS: &str = "pipeline-hops";
const REASON: &str = "pipeline-reason";
const BY_QUEUE: &str = "pipeline-by-queue";
/// In microseconds, because dead letters are ordered by it.
const BURIED_AT: &str = "pipeline-buried-at-us";
/// One JSON object with the attributes whose names cannot be header names.
const ATTRIBUTES: &str = "pipeline-attributes";
const DELIVERY_COUNT: &str = "x-delivery-count";
/// Headers that the broker writes.
const BROKER_HEADERS: [&str; 2] = ["x-delivery-count", "x-death"];
const BROKER_PREFIXES: [&str; 2] = ["x-first-death-", "x-last-death-"];

/// AMQP's limit for a header name.
const NAME_BYTES_MAX: usize = 255;
/// All headers must fit into one frame of 128 KiB; a larger one would end the connection.
pub(super) const ATTRIBUTES_BYTES_MAX: usize = 64 * 1024;
const REASON_BYTES_MAX: usize = 8 * 1024;

/// A message without the properties of a single delivery (tag, redelivery flag).
#[derive(Debug, Clone)]
pub(super) struct WireMessage {
    pub(super) id: MessageId,
    pub(super) body: Arc<Vec<u8>>,
    pub(super) attributes: Attributes,
    /// Receives before it was last published.
    pub(super) receives: u32,
    pub(super) sent_at: SystemTime,
    pub(super) expires_at: Option<SystemTime>,
    /// Further steps of the longest delay before it is due.
    pub(super) hops: u32,
    /// Set for a dead letter.
    pub(super) burial: Option<Burial>,
    /// Kept from a message that another program published.
    pub(super) content_type: Option<ShortString>,
}

/// Why and when a message was buried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Burial {
    pub(super) reason: String,
    pub(super) by_queue: bool,
    pub(super) at: SystemTime,
}

impl WireMessage {
    /// The properties to publish. Attributes named in `numbers` are sent as integers, if their values are.
    pub(super) fn properties(&self, numbers: &[String]) -> BasicProperties {
        let mut headers = BTreeMap::new();
        let mut unnamed = serde_json::Map::new();
        for (name, value) in &self.attributes {
            if name.len() > NAME_BYTES_MAX || name.is_empty() || is_reserved(name) {
                unnamed.insert(name.clone(), value.clone().into());
            } else {
                let number = if numbers.contains(name) { value.parse().ok() } else { None };
                headers.insert(
                    ShortString::from(name.as_str()),
                    number.map_or_else(|| text(value), AMQPValue::LongLongInt),
                );
            }
        }
        let mut own = |name: &str, value| drop(headers.insert(ShortString::from(name), value));
        if !unnamed.is_empty() {
            own(ATTRIBUTES, text(&serde_json::Value::Object(unnamed).to_string()));
        }
        own(SENT_AT, millis(self.sent_at));
        if self.receives > 0 {
            own(RECEIVES, AMQPValue::LongLongInt(self.receives.into()));
        }
        if let Some(at) = self.expires_at {
            own(EXPIRES_AT, millis(at));
        }
        if self.hops > 0 {
            own(HOPS, AMQPValue::LongLongInt(self.hops.into()));
        }
        if let Some(burial) = &self.burial {
            own(REASON, text(stored_reason(&burial.reason)));
            own(BY_QUEUE, AMQPValue::Boolean(burial.by_queue));
            own(BURIED_AT, micros(burial.at));
        }
        let properties = BasicProperties::default()
            .with_message_id(self.id.0.as_str().into())
            .with_delivery_mode(2) // Persistent.
            .with_timestamp(since_epoch(self.sent_at).as_secs())
            .with_headers(FieldTable::from(headers));
        match &self.content_type {
            Some(content_type) => properties.with_content_type(content_type.clone()),
            None => properties,
        }
    }

    /// Reads a delivery.
    pub(super) fn read(properties: &BasicProperties, body: Vec<u8>, now: SystemTime) -> Self {
        let headers = properties.headers().as_ref().map(FieldTable::inner);
        let header = |name: &str| headers.and_then(|headers| headers.get(name));
        let stamped = properties.timestamp().map(|secs| UNIX_EPOCH + Duration::from_secs(secs));
        let id = match properties.message_id() {
            Some(id) if !id.as_str().is_empty() => id.as_str().to_owned(),
            _ => id_from_body(&body),
        };
        Self {
            id: MessageId(id),
            attributes: headers.map(attributes_in).unwrap_or_default(),
            receives: header(RECEIVES).and_then(count).unwrap_or(0),
            sent_at: header(SENT_AT).and_then(time_from_millis).or(stamped).unwrap_or(now),
            expires_at: header(EXPIRES_AT).and_then(time_from_millis),
            hops: header(HOPS).and_then(count).unwrap_or(0),
            burial: header(REASON).map(|reason| Burial {
                reason: string(reason).unwrap_or_else(|| NO_REASON.into()),
                by_queue: matches!(header(BY_QUEUE), Some(AMQPValue::Boolean(true))),
                at: header(BURIED_AT).and_then(time_from_micros).unwrap_or(now),
            }),
            content_type: properties.content_type().clone(),
            body: Arc::new(body),
        }
    }

    /// Gives a message that came without an id one of its own before it is stored again: another message may have the same
    /// body.
    pub(super) fn ensure_own_id(&mut self) {
        if self.id.0 == id_from_body(&self.body) {
            self.id = MessageId(format!("{}-{}", self.id, Uuid::now_v7()));
        }
    }

    /// Its burial. For a message that the broker or another program dead-lettered, it is built from the broker's headers.
    pub(super) fn burial_or(&self, properties: &BasicProperties, now: SystemTime) -> Burial {
        self.burial.clone().unwrap_or_else(|| broker_burial(properties, now))
    }

    /// Converts to a dead letter.
    pub(super) fn letter(self, burial: Burial) -> DeadLetter {
        DeadLetter {
            id: self.id,
            body: Arc::unwrap_or_clone(self.body),
            attributes: self.attributes,
            reason: burial.reason,
            by_queue: burial.by_queue,
            receives: self.receives,
            sent_at: self.sent_at,
            buried_at: burial.at,
        }
    }
}

/// Upper bound for the attributes' size in the header frame, in bytes.
pub(super) fn attributes_size(attributes: &Attributes) -> usize {
    // JSON escaping may double the size, and each header has up to 8 bytes of framing.
    attributes.iter().map(|(name, value)| 2 * (name.len() + value.len()) + 8).sum()
}

/// Earlier deliveries of this stored copy, as far as the broker knows. A quorum queue counts them; a classic queue only
/// reports that there was one.
pub(super) fn earlier_deliveries(properties: &BasicProperties, redelivered: bool) -> u32 {
    let counted = properties.headers().as_ref().and_then(|headers| headers.inner().get(DELIVERY_COUNT)).and_then(count);
    counted.unwrap_or(u32::from(redelivered))
}

fn is_reserved(name: &str) -> bool {
    name.starts_with(OWN_PREFIX)
        || BROKER_HEADERS.contains(&name)
        || BROKER_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

fn attributes_in(headers: &BTreeMap<ShortString, AMQPValue>) -> Attributes {
    let mut attributes = Attributes::new();
    for (name, value) in headers {
        if !is_reserved(name.as_str()) {
            attributes.extend(string(value).map(|value| (name.to_string(), value)));
        }
    }
    let unnamed = headers.get(ATTRIBUTES).and_then(string);
    if let Some(rest) = unnamed.and_then(|json| serde_json::from_str::<Attributes>(&json).ok()) {
        attributes.extend(rest);
    }
    attributes
}

fn broker_burial(properties: &BasicProperties, now: SystemTime) -> Burial {
    let headers = properties.headers().as_ref().map(FieldTable::inner);
    let death = headers.and_then(|headers| match headers.get("x-death") {
        Some(AMQPValue::FieldArray(deaths)) => deaths.as_slice().first(),
        _ => None,
    });
    let death = match death {
        Some(AMQPValue::FieldTable(death)) => Some(death.inner()),
        _ => None,
    };
    let cause = death.and_then(|death| death.get("reason")).and_then(string);
    let at = death.and_then(|death| match death.get("time") {
        Some(AMQPValue::Timestamp(secs)) => Some(UNIX_EPOCH + Duration::from_secs(*secs)),
        _ => None,
    });
    let reason = match cause {
        Some(cause) => format!("dead-lettered by the broker: {cause}"),
        None => "put into the dead-letter queue without a reason".into(),
    };
    Burial { reason, by_queue: true, at: at.unwrap_or(now) }
}

/// An id for a message without one. The same body gives the same id, so redeliveries keep it.
fn id_from_body(body: &[u8]) -> String {
    // FNV-1a with 128 bits.
    let hash = body.iter().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128, |hash, byte| {
        (hash ^ u128::from(*byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    });
    format!("unnamed-{hash:032x}")
}

fn text(value: &str) -> AMQPValue {
    AMQPValue::LongString(value.into())
}

fn stored_reason(reason: &str) -> &str {
    let mut end = reason.len().min(REASON_BYTES_MAX);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    if reason.is_empty() { NO_REASON } else { &reason[..end] }
}

fn millis(at: SystemTime) -> AMQPValue {
    AMQPValue::LongLongInt(i64::try_from(since_epoch(at).as_millis()).unwrap_or(i64::MAX))
}

fn micros(at: SystemTime) -> AMQPValue {
    AMQPValue::LongLongInt(i64::try_from(since_epoch(at).as_micros()).unwrap_or(i64::MAX))
}

fn since_epoch(at: SystemTime) -> Duration {
    at.duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn integer(value: &AMQPValue) -> Option<i64> {
    Some(match value {
        AMQPValue::ShortShortInt(number) => (*number).into(),
        AMQPValue::ShortShortUInt(number) => (*number).into(),
        AMQPValue::ShortInt(number) => (*number).into(),
        AMQPValue::ShortUInt(number) => (*number).into(),
        AMQPValue::LongInt(number) => (*number).into(),
        AMQPValue::LongUInt(number) => (*number).into(),
        AMQPValue::LongLongInt(number) => *number,
        _ => return None,
    })
}

fn count(value: &AMQPValue) -> Option<u32> {
    integer(value).map(|number| u32::try_from(number.max(0)).unwrap_or(u32::MAX))
}

fn time_from_millis(value: &AMQPValue) -> Option<SystemTime> {
    UNIX_EPOCH.checked_add(Duration::from_millis(u64::try_from(integer(value)?).ok()?))
}

fn time_from_micros(value: &AMQPValue) -> Option<SystemTime> {
    UNIX_EPOCH.checked_add(Duration::from_micros(u64::try_from(integer(value)?).ok()?))
}

fn string(value: &AMQPValue) -> Option<String> {
    match value {
        AMQPValue::LongString(text) => Some(String::from_utf8_lossy(text.as_bytes()).into_owned()),
        AMQPValue::ShortString(text) => Some(text.to_string()),
        AMQPValue::Boolean(truth) => Some(truth.to_string()),
        number => integer(number).map(|number| number.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_millis(ms)
    }

    fn message() -> WireMessage {
        let attributes = [("trace", "ü\n\""), ("x-death", "mine"), ("pipeline-receives", "9"), ("", "nameless")];
        WireMessage {
            id: MessageId("id-1".into()),
            body: Arc::new(b"body".to_vec()),
            attributes: attributes.map(|(name, value)| (name.into(), value.into())).into(),
            receives: 3,
            sent_at: at(1_700_000_000_123),
            expires_at: Some(at(1_700_000_999_000)),
            hops: 2,
            burial: Some(Burial { reason: "bad \"ü\"".into(), by_queue: true, at: at(1_700_000_001_456) }),
            content_type: Some("text/plain".into()),
        }
    }

    #[test]
    fn a_message_is_read_back_unchanged() {
        let mut written = message();
        written.attributes.insert("n".repeat(300), "a long name".into());
        let read = WireMessage::read(&written.properties(&[]), b"body".to_vec(), at(0));
        assert_eq!(format!("{read:?}"), format!("{written:?}"));
    }

    #[test]
    fn an_attribute_is_a_plain_header_that_other_programs_can_read() {
        let properties = message().properties(&[]);
        let headers = properties.headers().as_ref().unwrap().inner();
        assert_eq!(headers.get("trace").and_then(string).as_deref(), Some("ü\n\""));
    }

    #[test]
    fn an_attribute_listed_as_a_number_is_sent_as_one() {
        let mut written = message();
        written.attributes.insert("x-retries".into(), "2".into());
        written.attributes.insert("x-other".into(), "many".into());
        let properties = written.properties(&["x-retries".into(), "x-other".into()]);
        let headers = properties.headers().as_ref().unwrap().inner();
        assert_eq!(headers.get("x-retries"), Some(&AMQPValue::LongLongInt(2)));
        assert_eq!(headers.get("x-other"), Some(&text("many")));
        let read = WireMessage::read(&properties, Vec::new(), at(0));
        assert_eq!(read.attributes, written.attributes);
    }

    #[test]
    fn the_brokers_headers_are_not_attributes() {
        let mut headers = FieldTable::default();
        headers.insert("x-delivery-count".into(), AMQPValue::LongLongInt(2));
        headers.insert("x-first-death-queue".into(), text("q"));
        headers.insert("x-retries".into(), AMQPValue::LongInt(1));
        let properties = BasicProperties::default().with_headers(headers);
        let read = WireMessage::read(&properties, b"{}".to_vec(), at(5));
        assert_eq!(read.attributes, Attributes::from([("x-retries".into(), "1".into())]));
        assert_eq!((read.receives, read.sent_at), (0, at(5)));
        assert_eq!(earlier_deliveries(&properties, true), 2);
    }

    #[test]
    fn a_classic_queue_only_reports_that_there_was_an_earlier_delivery() {
        assert_eq!(earlier_deliveries(&BasicProperties::default(), true), 1);
        assert_eq!(earlier_deliveries(&BasicProperties::default(), false), 0);
    }

    #[test]
    fn a_message_without_an_id_gets_the_same_id_each_time() {
        let id = |body: &[u8]| WireMessage::read(&BasicProperties::default(), body.to_vec(), at(0)).id;
        assert_eq!(id(b"a"), id(b"a"));
        assert_ne!(id(b"a"), id(b"b"));
    }

    #[test]
    fn the_brokers_own_dead_letters_have_a_reason() {
        let mut death = FieldTable::default();
        death.insert("reason".into(), text("rejected"));
        death.insert("time".into(), AMQPValue::Timestamp(7));
        let mut headers = FieldTable::default();
        headers.insert("x-death".into(), AMQPValue::FieldArray(vec![AMQPValue::FieldTable(death)].into()));
        let properties = BasicProperties::default().with_headers(headers);
        let read = WireMessage::read(&properties, b"{}".to_vec(), at(9));
        let burial = read.burial_or(&properties, at(9));
        let letter = read.letter(burial);
        assert_eq!(letter.reason, "dead-lettered by the broker: rejected");
        assert_eq!((letter.by_queue, letter.buried_at), (true, at(7000)));
    }

    #[test]
    fn equal_messages_without_an_id_get_different_ones_when_they_are_moved() {
        let read = || WireMessage::read(&BasicProperties::default(), b"{not json".to_vec(), at(0));
        let (mut one, mut two) = (read(), read());
        assert_eq!(one.id, two.id, "the same delivery again has the same id");
        one.ensure_own_id();
        two.ensure_own_id();
        assert_ne!(one.id, two.id);
        let before = one.id.clone();
        one.ensure_own_id();
        assert_eq!(one.id, before, "it keeps the id that it has");
    }

    #[test]
    fn a_long_reason_is_truncated_between_characters() {
        let mut long = message();
        long.burial = Some(Burial { reason: "ü".repeat(REASON_BYTES_MAX), by_queue: false, at: at(0) });
        let read = WireMessage::read(&long.properties(&[]), Vec::new(), at(0));
        assert_eq!(read.burial.unwrap().reason, "ü".repeat(REASON_BYTES_MAX / 2));
    }
}
