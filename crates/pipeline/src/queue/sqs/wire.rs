//! How a message looks inside SQS, both ways. Pure.
//!
//! SQS takes a non-empty text of XML characters and at most ten attributes with restricted names, and counts all of it
//! against one limit. So a body that is not such text travels as a binary attribute, which SQS counts byte for byte;
//! our free-form attributes travel as one JSON attribute; and the W3C trace context keeps its own names, for whoever
//! else reads the queue. What others put into the queue without our attributes is read as well.

use std::collections::HashMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_sdk_sqs::primitives::Blob;
use aws_sdk_sqs::types::{Message as Received, MessageAttributeValue, MessageSystemAttributeName as System};

use crate::message::{Attributes, MessageId};
use crate::queue::QueueError;

/// What SQS takes in one message and in one batch: bodies and attributes together. It has been raised since, but not
/// everywhere.
pub(super) const BYTES_MAX: usize = 256 * 1024;
/// Names, types and values of our own attributes; no set of them comes near it.
const OWN_BYTES: usize = 512;
/// A longer reason is cut.
const REASON_BYTES_MAX: usize = 4096;
/// The caller's attributes may have so much before they take from the body's room.
const ATTRIBUTE_BYTES_FREE: usize = 3584;
/// The longest body. What is left over holds the attributes, so that the largest message can still be buried.
pub(super) const BODY_BYTES_MAX: usize = BYTES_MAX - OWN_BYTES - REASON_BYTES_MAX - ATTRIBUTE_BYTES_FREE;
/// The longest `DelaySeconds` that SQS takes.
pub(super) const DELAY_MAX: Duration = Duration::from_secs(900);

const ID: &str = "pipeline.id";
const ATTRIBUTES: &str = "pipeline.attributes";
const BODY: &str = "pipeline.body";
const SENT_AT: &str = "pipeline.sent-at";
const NOT_BEFORE: &str = "pipeline.not-before";
const REASON: &str = "pipeline.reason";
const BURIED_AT: &str = "pipeline.buried-at";
const RECEIVES: &str = "pipeline.receives";
const OURS: &str = "pipeline.";
/// Kept under their own names.
const TRACE: [&str; 2] = ["traceparent", "tracestate"];
/// Stands where SQS wants a text.
const BODY_ELSEWHERE: &str = "(see the attribute pipeline.body)";

/// What stays the same wherever a message goes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Content {
    pub(super) id: MessageId,
    pub(super) body: Vec<u8>,
    pub(super) attributes: Attributes,
}

/// Why, when and after how many deliveries a message was buried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Burial {
    pub(super) reason: String,
    pub(super) at: SystemTime,
    pub(super) receives: u32,
}

/// One entry of a batch to send.
#[derive(Debug, Clone)]
pub(super) struct Parcel {
    pub(super) body: String,
    pub(super) attributes: HashMap<String, MessageAttributeValue>,
    pub(super) delay_s: i32,
    /// As SQS counts them.
    pub(super) bytes: usize,
}

/// One delivery, from the queue or from the dead letters.
#[derive(Debug)]
pub(super) struct Delivery {
    pub(super) content: Content,
    pub(super) handle: String,
    /// SQS's own id, which a copy does not share.
    pub(super) sqs_id: String,
    pub(super) receives: u32,
    pub(super) sent_at: SystemTime,
    pub(super) first_received_at: Option<SystemTime>,
    pub(super) not_before: Option<SystemTime>,
    pub(super) burial: Option<Burial>,
}

/// Whether it fits into SQS. The caller's attributes beyond their free room count as body.
pub(super) fn check_size(body: &[u8], attributes: &Attributes, configured_max: usize) -> Result<(), QueueError> {
    let text: usize = attributes_json(attributes).map_or(0, |json| json.len())
        + readable(attributes).map(|(_, value)| value.len()).sum::<usize>();
    let size = body.len() + text.saturating_sub(ATTRIBUTE_BYTES_FREE);
    let max = BODY_BYTES_MAX.min(configured_max);
    if size > max { Err(QueueError::TooLarge { size, max }) } else { Ok(()) }
}

/// A message for the queue, due after `delay`. SQS delays by at most `step`: beyond that the message says itself until
/// when it is to be kept back, and whoever receives it earlier passes it on. `sent_at` is given for a copy.
pub(super) fn live(
    content: &Content,
    sent_at: Option<SystemTime>,
    delay: Duration,
    step: Duration,
    now: SystemTime,
) -> Parcel {
    let mut parcel = parcel(content);
    if let Some(at) = sent_at {
        parcel.number(SENT_AT, millis(at));
    }
    if delay > step {
        parcel.number(NOT_BEFORE, millis(now + delay));
    }
    parcel.delay_s = whole_seconds(delay.min(step));
    parcel
}

/// A message for the dead-letter queue.
pub(super) fn dead(content: &Content, sent_at: SystemTime, burial: &Burial) -> Parcel {
    let mut parcel = parcel(content);
    parcel.number(SENT_AT, millis(sent_at));
    parcel.number(BURIED_AT, millis(burial.at));
    parcel.number(RECEIVES, u64::from(burial.receives));
    parcel.text(REASON, reason_text(&burial.reason));
    parcel
}

fn parcel(content: &Content) -> Parcel {
    let mut parcel = Parcel { body: String::new(), attributes: HashMap::new(), delay_s: 0, bytes: 0 };
    parcel.text(ID, content.id.0.clone());
    if let Some(json) = attributes_json(&content.attributes) {
        parcel.text(ATTRIBUTES, json);
    }
    for (name, value) in readable(&content.attributes) {
        parcel.text(name, value.clone());
    }
    match std::str::from_utf8(&content.body) {
        Ok("") => {
            parcel.text(BODY, "empty".into());
            parcel.body = BODY_ELSEWHERE.into();
        }
        Ok(text) if is_sqs_text(text) => parcel.body = text.into(),
        _ => {
            parcel.binary(BODY, content.body.clone());
            parcel.body = BODY_ELSEWHERE.into();
        }
    }
    parcel.bytes += parcel.body.len();
    parcel
}

impl Parcel {
    fn text(&mut self, name: &str, value: String) {
        self.bytes += name.len() + "String".len() + value.len();
        let value = MessageAttributeValue::builder().data_type("String").string_value(value).build();
        self.attributes.extend(value.ok().map(|value| (name.to_owned(), value)));
    }

    fn number(&mut self, name: &str, value: u64) {
        let value = value.to_string();
        self.bytes += name.len() + "Number".len() + value.len();
        let value = MessageAttributeValue::builder().data_type("Number").string_value(value).build();
        self.attributes.extend(value.ok().map(|value| (name.to_owned(), value)));
    }

    fn binary(&mut self, name: &str, value: Vec<u8>) {
        self.bytes += name.len() + "Binary".len() + value.len();
        let value = MessageAttributeValue::builder().data_type("Binary").binary_value(Blob::new(value)).build();
        self.attributes.extend(value.ok().map(|value| (name.to_owned(), value)));
    }
}

/// Reads a delivery; a message of somebody else's gets SQS's id. Answers `None` without a receipt handle, since there
/// would be nothing to settle it with.
pub(super) fn read(message: Received, now: SystemTime) -> Option<Delivery> {
    let handle = message.receipt_handle?;
    let sqs_id = message.message_id.unwrap_or_default();
    let system = message.attributes.unwrap_or_default();
    let number = |name: System| system.get(&name).and_then(|value| value.parse::<u64>().ok());
    let mut given = message.message_attributes.unwrap_or_default();
    let body = match given.remove(BODY) {
        Some(value) => value.binary_value.map(Blob::into_inner).unwrap_or_default(),
        None => message.body.unwrap_or_default().into_bytes(),
    };
    let mut text: HashMap<String, String> =
        given.into_iter().filter_map(|(name, value)| Some((name, value.string_value?))).collect();
    let mut time = |name: &str| text.remove(name).and_then(|value| value.parse().ok()).map(time_from);
    let (sent_at, not_before, buried_at) = (time(SENT_AT), time(NOT_BEFORE), time(BURIED_AT));
    let receives = number(System::ApproximateReceiveCount).and_then(|count| u32::try_from(count).ok()).unwrap_or(1);
    let burial = text.remove(REASON).map(|reason| Burial {
        reason,
        at: buried_at.unwrap_or(now),
        receives: text.remove(RECEIVES).and_then(|value| value.parse().ok()).unwrap_or(0),
    });
    let id = MessageId(text.remove(ID).unwrap_or_else(|| sqs_id.clone()));
    let json = text.remove(ATTRIBUTES);
    let mut attributes: Attributes = text.into_iter().filter(|(name, _)| !name.starts_with(OURS)).collect();
    if let Some(json) = json {
        match serde_json::from_str::<Attributes>(&json) {
            Ok(ours) => attributes.extend(ours),
            Err(error) => tracing::error!(messageId = %id, %error, "the attributes of a message cannot be read"),
        }
    }
    Some(Delivery {
        content: Content { id, body, attributes },
        handle,
        sqs_id,
        receives: receives.max(1),
        sent_at: sent_at.or(number(System::SentTimestamp).map(time_from)).unwrap_or(now),
        first_received_at: number(System::ApproximateFirstReceiveTimestamp).map(time_from),
        not_before,
        burial,
    })
}

/// Rounded up: a delay or lease may end late, not early.
pub(super) fn whole_seconds(duration: Duration) -> i32 {
    let seconds = duration.as_secs() + u64::from(duration.subsec_nanos() > 0);
    i32::try_from(seconds).unwrap_or(i32::MAX)
}

/// What SQS stores as it is: the characters of XML 1.0.
fn is_sqs_text(text: &str) -> bool {
    text.chars().all(is_sqs_char)
}

fn is_sqs_char(c: char) -> bool {
    matches!(c, '\t' | '\n' | '\r' | '\u{20}'..='\u{fffd}' | '\u{10000}'..)
}

/// The trace context, where SQS takes it as it is.
fn readable(attributes: &Attributes) -> impl Iterator<Item = (&'static str, &String)> {
    TRACE.iter().filter_map(|name| {
        attributes.get(*name).filter(|value| !value.is_empty() && is_sqs_text(value)).map(|value| (*name, value))
    })
}

/// All other attributes. JSON escapes the control characters itself, but not the two last of the first plane.
fn attributes_json(attributes: &Attributes) -> Option<String> {
    let apart: Vec<&str> = readable(attributes).map(|(name, _)| name).collect();
    let rest: serde_json::Map<String, serde_json::Value> = attributes
        .iter()
        .filter(|(name, _)| !apart.contains(&name.as_str()))
        .map(|(name, value)| (name.clone(), value.as_str().into()))
        .collect();
    if rest.is_empty() {
        return None;
    }
    let json = serde_json::Value::Object(rest).to_string();
    Some(json.replace('\u{fffe}', "\\ufffe").replace('\u{ffff}', "\\uffff"))
}

/// A reason as SQS takes it: never empty, never too long, no forbidden characters.
fn reason_text(reason: &str) -> String {
    if reason.is_empty() {
        return "no reason given".into();
    }
    let mut text: String = reason.chars().map(|c| if is_sqs_char(c) { c } else { '\u{fffd}' }).collect();
    if text.len() > REASON_BYTES_MAX {
        let mut end = REASON_BYTES_MAX - '…'.len_utf8();
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
        text.push('…');
    }
    text
}

fn millis(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

fn time_from(ms: u64) -> SystemTime {
    UNIX_EPOCH.checked_add(Duration::from_millis(ms)).unwrap_or(UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_MS: u64 = 1_800_000_000_000;

    fn now() -> SystemTime {
        time_from(NOW_MS)
    }

    fn content(body: &[u8], attributes: &[(&str, &str)]) -> Content {
        let attributes = attributes.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        Content { id: MessageId("id-1".into()), body: body.into(), attributes }
    }

    /// As SQS would hand it out.
    fn delivered(parcel: Parcel) -> Delivery {
        assert!(!parcel.body.is_empty() && is_sqs_text(&parcel.body), "SQS would refuse {:?}", parcel.body);
        assert!(parcel.attributes.len() <= 10);
        for (name, value) in &parcel.attributes {
            assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)));
            assert!(value.string_value().is_none_or(|text| !text.is_empty() && is_sqs_text(text)), "{name}");
            assert!(value.binary_value().is_none_or(|bytes| !bytes.as_ref().is_empty()), "{name}");
        }
        let message = Received::builder()
            .message_id("sqs-1")
            .receipt_handle("handle")
            .body(parcel.body)
            .set_message_attributes(Some(parcel.attributes))
            .attributes(System::ApproximateReceiveCount, "2")
            .attributes(System::SentTimestamp, (NOW_MS - 5000).to_string())
            .build();
        read(message, now()).unwrap()
    }

    #[test]
    fn every_body_comes_back() {
        let bodies: [&[u8]; 7] =
            [b"text", "grüß <&>\r\n\t😀".as_bytes(), b"", b"\0", b"\xff\xfe", "\u{ffff}".as_bytes(), b"\x1b[0m"];
        for body in bodies {
            assert_eq!(delivered(live(&content(body, &[]), None, Duration::ZERO, DELAY_MAX, now())).content.body, body);
        }
    }

    #[test]
    fn every_attribute_comes_back() {
        let traced =
            [("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"), ("tracestate", "a=1")];
        let odd = [("", "empty name"), ("AWS.x", "\u{ffff}\0\""), ("späte reason", ""), ("pipeline.id", "mine")];
        for set in [&traced[..], &odd[..], &[("traceparent", ""), ("tracestate", "\u{1}")][..], &[][..]] {
            let sent = content(b"x", set);
            assert_eq!(delivered(live(&sent, None, Duration::ZERO, DELAY_MAX, now())).content, sent);
        }
        let parcel = live(&content(b"x", &traced), None, Duration::ZERO, DELAY_MAX, now());
        assert_eq!(parcel.attributes["traceparent"].string_value(), Some(traced[0].1), "it must stay readable");
    }

    #[test]
    fn a_delivery_counts_and_dates_itself() {
        let first = delivered(live(&content(b"x", &[]), None, Duration::ZERO, DELAY_MAX, now()));
        assert_eq!((first.receives, first.sent_at), (2, time_from(NOW_MS - 5000)));
        let copy = delivered(live(&content(b"x", &[]), Some(time_from(7)), Duration::ZERO, DELAY_MAX, now()));
        assert_eq!(copy.sent_at, time_from(7));
        assert_eq!((copy.not_before, copy.burial), (None, None));
    }

    #[test]
    fn somebody_elses_message_is_read() {
        let value = MessageAttributeValue::builder().data_type("String").string_value("v").build().unwrap();
        let message = Received::builder()
            .message_id("sqs-1")
            .receipt_handle("handle")
            .body("{}")
            .message_attributes("k", value)
            .build();
        let got = read(message, now()).unwrap();
        assert_eq!((got.content.id.0.as_str(), got.receives, got.sent_at), ("sqs-1", 1, now()));
        assert_eq!(got.content.attributes.get("k").map(String::as_str), Some("v"));
    }

    #[test]
    fn a_long_delay_goes_in_steps() {
        let delayed = |delay| live(&content(b"x", &[]), None, delay, DELAY_MAX, now());
        for (delay_ms, delay_s) in [(0, 0), (1, 1), (1000, 1), (1001, 2), (900_000, 900)] {
            let parcel = delayed(Duration::from_millis(delay_ms));
            assert_eq!(parcel.delay_s, delay_s);
            assert_eq!(delivered(parcel).not_before, None);
        }
        let parcel = delayed(Duration::from_millis(900_001));
        assert_eq!(parcel.delay_s, 900);
        assert_eq!(delivered(parcel).not_before, Some(time_from(NOW_MS + 900_001)));
    }

    #[test]
    fn a_burial_comes_back() {
        let burial = Burial { reason: "malformed: \"ü\"".into(), at: now(), receives: 3 };
        let got = delivered(dead(&content(b"x", &[("k", "v")]), time_from(5), &burial));
        assert_eq!((got.burial, got.sent_at), (Some(burial), time_from(5)));
        assert_eq!(got.content, content(b"x", &[("k", "v")]));
    }

    #[test]
    fn a_reason_is_made_to_fit() {
        assert_eq!(reason_text(""), "no reason given");
        assert_eq!(reason_text("a\0b"), "a\u{fffd}b");
        let long = reason_text(&"ü".repeat(REASON_BYTES_MAX));
        assert!(long.len() <= REASON_BYTES_MAX && long.ends_with("ü…"));
    }

    #[test]
    fn the_largest_message_can_still_be_buried() {
        let attributes = [("traceparent", "t".repeat(55)), ("tracestate", "s".repeat(512)), ("k", "v".repeat(3000))];
        let attributes: Vec<_> = attributes.iter().map(|(name, value)| (*name, value.as_str())).collect();
        let burial = Burial { reason: "r".repeat(2 * REASON_BYTES_MAX), at: now(), receives: u32::MAX };
        for byte in [b'y', 0] {
            let largest = content(&vec![byte; BODY_BYTES_MAX], &attributes);
            check_size(&largest.body, &largest.attributes, usize::MAX).unwrap();
            let parcel = dead(&largest, now(), &burial);
            assert!(parcel.bytes <= BYTES_MAX, "{} bytes", parcel.bytes);
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_its_size() {
        let refused = |body: usize, attribute: usize, max| {
            let sent = content(&vec![b'x'; body], &[("k", "v".repeat(attribute).as_str())]);
            match check_size(&sent.body, &sent.attributes, max) {
                Err(QueueError::TooLarge { size, max }) => Some((size, max)),
                other => {
                    other.unwrap();
                    None
                }
            }
        };
        assert_eq!(refused(BODY_BYTES_MAX, 100, usize::MAX), None);
        assert_eq!(refused(BODY_BYTES_MAX + 1, 0, usize::MAX), Some((BODY_BYTES_MAX + 1, BODY_BYTES_MAX)));
        assert_eq!(refused(11, 0, 10), Some((11, 10)));
        assert!(refused(BODY_BYTES_MAX, ATTRIBUTE_BYTES_FREE, usize::MAX).is_some(), "attributes count");
        assert!(refused(0, BYTES_MAX, usize::MAX).is_some());
    }
}
