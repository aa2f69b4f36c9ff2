//! Converts messages to and from SQS's format. Pure.
//!
//! SQS accepts a non-empty body of XML characters and at most ten attributes with restricted names, and counts all of it
//! against one limit. So any other body travels as a binary attribute, which SQS counts byte for byte; the caller's
//! attributes travel as one JSON attribute; and the W3C trace context keeps its own names for other readers of the queue.
//! Messages that other programs sent without these attributes are read too.

use std::collections::HashMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aws_sdk_sqs::primitives::Blob;
use aws_sdk_sqs::types::{Message as SqsMessage, MessageAttributeValue, MessageSystemAttributeName as System};

use crate::message::{Attributes, MessageId};
use crate::queue::{NO_REASON, QueueError};

/// SQS's limit for one message and for one batch, bodies and attributes together. SQS has raised it since, but compatible
/// servers have not all followed.
pub(super) const BYTES_MAX: usize = 256 * 1024;
/// Upper bound for names, types and values of this backend's own attributes.
const OWN_BYTES: usize = 512;
/// A longer reason is truncated.
const REASON_BYTES_MAX: usize = 4096;
/// Bytes of the caller's attributes that do not count against the body's limit.
const ATTRIBUTE_BYTES_FREE: usize = 3584;
/// The longest body. The rest is reserved for attributes, so that even the largest message can be buried with a reason.
pub(super) const BODY_BYTES_MAX: usize = BYTES_MAX - OWN_BYTES - REASON_BYTES_MAX - ATTRIBUTE_BYTES_FREE;
/// The longest `DelaySeconds` that SQS accepts.
pub(super) const DELAY_MAX: Duration = Duration::from_secs(900);

const ID: &str = "pipeline.id";
const ATTRIBUTES: &str = "pipeline.attributes";
const BODY: &str = "pipeline.body";
const SENT_AT: &str = "pipeline.sent-at";
const NOT_BEFORE: &str = "pipeline.not-before";
const REASON: &str = "pipeline.reason";
const BURIED_AT: &str = "pipeline.buried-at";
const RECEIVES: &str = "pipeline.receives";
const OWN_PREFIX: &str = "pipeline.";
/// Attributes that keep their own names.
const TRACE: [&str; 2] = ["traceparent", "tracestate"];
/// The text body of a message whose body is in the attribute.
const BODY_ELSEWHERE: &str = "(see the attribute pipeline.body)";

/// The parts of a message that retries, burial and replay keep.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MessageContent {
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

/// One entry of a send request.
#[derive(Debug, Clone)]
pub(super) struct SendEntry {
    pub(super) body: String,
    pub(super) attributes: HashMap<String, MessageAttributeValue>,
    pub(super) delay_s: i32,
    /// Size of the body and attributes, as SQS counts it.
    pub(super) bytes: usize,
}

/// One received message, from the queue or the dead-letter queue.
#[derive(Debug)]
pub(super) struct SqsDelivery {
    pub(super) content: MessageContent,
    pub(super) handle: String,
    /// SQS's own id; every copy of a message has another one.
    pub(super) sqs_id: String,
    pub(super) receives: u32,
    pub(super) sent_at: SystemTime,
    pub(super) first_received_at: Option<SystemTime>,
    pub(super) not_before: Option<SystemTime>,
    pub(super) burial: Option<Burial>,
}

/// Checks that a message fits into SQS. Attributes beyond [`ATTRIBUTE_BYTES_FREE`] count as body.
pub(super) fn check_size(body: &[u8], attributes: &Attributes, configured_max: usize) -> Result<(), QueueError> {
    let text: usize = attributes_json(attributes).map_or(0, |json| json.len())
        + trace_context(attributes).map(|(_, value)| value.len()).sum::<usize>();
    let size = body.len() + text.saturating_sub(ATTRIBUTE_BYTES_FREE);
    let max = BODY_BYTES_MAX.min(configured_max);
    if size > max { Err(QueueError::TooLarge { size, max }) } else { Ok(()) }
}

/// An entry for the queue, due after `delay`. SQS delays it by at most `step`; a longer delay is also written into the
/// message, and a receiver that gets it earlier forwards it. `sent_at` is the original time of a copy.
pub(super) fn live(
    content: &MessageContent,
    sent_at: Option<SystemTime>,
    delay: Duration,
    step: Duration,
    now: SystemTime,
) -> SendEntry {
    let mut entry = base_entry(content);
    if let Some(at) = sent_at {
        entry.number(SENT_AT, millis(at));
    }
    if delay > step {
        entry.number(NOT_BEFORE, millis(now + delay));
    }
    entry.delay_s = whole_seconds(delay.min(step));
    entry
}

/// An entry for the dead-letter queue.
pub(super) fn dead(content: &MessageContent, sent_at: SystemTime, burial: &Burial) -> SendEntry {
    let mut entry = base_entry(content);
    entry.number(SENT_AT, millis(sent_at));
    entry.number(BURIED_AT, millis(burial.at));
    entry.number(RECEIVES, u64::from(burial.receives));
    entry.text(REASON, reason_text(&burial.reason));
    entry
}

fn base_entry(content: &MessageContent) -> SendEntry {
    let mut entry = SendEntry { body: String::new(), attributes: HashMap::new(), delay_s: 0, bytes: 0 };
    entry.text(ID, content.id.0.clone());
    if let Some(json) = attributes_json(&content.attributes) {
        entry.text(ATTRIBUTES, json);
    }
    for (name, value) in trace_context(&content.attributes) {
        entry.text(name, value.clone());
    }
    match std::str::from_utf8(&content.body) {
        Ok("") => {
            entry.text(BODY, "empty".into());
            entry.body = BODY_ELSEWHERE.into();
        }
        Ok(text) if is_sqs_text(text) => entry.body = text.into(),
        _ => {
            entry.binary(BODY, content.body.clone());
            entry.body = BODY_ELSEWHERE.into();
        }
    }
    entry.bytes += entry.body.len();
    entry
}

impl SendEntry {
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

/// Reads a received message. One that another program sent gets SQS's id. `None` without a receipt handle, because the
/// message could not be settled.
pub(super) fn read(message: SqsMessage, now: SystemTime) -> Option<SqsDelivery> {
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
    let mut attributes: Attributes = text.into_iter().filter(|(name, _)| !name.starts_with(OWN_PREFIX)).collect();
    if let Some(json) = json {
        match serde_json::from_str::<Attributes>(&json) {
            Ok(ours) => attributes.extend(ours),
            Err(error) => {
                tracing::error!(messageId = %id, %error, "cannot read the message's attributes; delivering it without them")
            }
        }
    }
    Some(SqsDelivery {
        content: MessageContent { id, body, attributes },
        handle,
        sqs_id,
        receives: receives.max(1),
        sent_at: sent_at.or(number(System::SentTimestamp).map(time_from)).unwrap_or(now),
        first_received_at: number(System::ApproximateFirstReceiveTimestamp).map(time_from),
        not_before,
        burial,
    })
}

/// Rounds up to whole seconds: a delay or lease may end late, not early.
pub(super) fn whole_seconds(duration: Duration) -> i32 {
    let seconds = duration.as_secs() + u64::from(duration.subsec_nanos() > 0);
    i32::try_from(seconds).unwrap_or(i32::MAX)
}

/// Whether SQS stores the text unchanged: it accepts the characters of XML 1.0.
fn is_sqs_text(text: &str) -> bool {
    text.chars().all(is_sqs_char)
}

fn is_sqs_char(c: char) -> bool {
    matches!(c, '\t' | '\n' | '\r' | '\u{20}'..='\u{fffd}' | '\u{10000}'..)
}

/// The trace context, if SQS stores it unchanged.
fn trace_context(attributes: &Attributes) -> impl Iterator<Item = (&'static str, &String)> {
    TRACE.iter().filter_map(|name| {
        attributes.get(*name).filter(|value| !value.is_empty() && is_sqs_text(value)).map(|value| (*name, value))
    })
}

/// All other attributes as JSON. JSON escapes control characters, but not U+FFFE and U+FFFF, which SQS rejects.
fn attributes_json(attributes: &Attributes) -> Option<String> {
    let apart: Vec<&str> = trace_context(attributes).map(|(name, _)| name).collect();
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

/// Makes a reason acceptable to SQS: not empty, not too long, no forbidden characters.
fn reason_text(reason: &str) -> String {
    if reason.is_empty() {
        return NO_REASON.into();
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

    fn content(body: &[u8], attributes: &[(&str, &str)]) -> MessageContent {
        let attributes = attributes.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        MessageContent { id: MessageId("id-1".into()), body: body.into(), attributes }
    }

    /// Receives an entry as SQS would return it.
    fn delivered(entry: SendEntry) -> SqsDelivery {
        assert!(!entry.body.is_empty() && is_sqs_text(&entry.body), "SQS would refuse {:?}", entry.body);
        assert!(entry.attributes.len() <= 10);
        for (name, value) in &entry.attributes {
            assert!(name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)));
            assert!(value.string_value().is_none_or(|text| !text.is_empty() && is_sqs_text(text)), "{name}");
            assert!(value.binary_value().is_none_or(|bytes| !bytes.as_ref().is_empty()), "{name}");
        }
        let message = SqsMessage::builder()
            .message_id("sqs-1")
            .receipt_handle("handle")
            .body(entry.body)
            .set_message_attributes(Some(entry.attributes))
            .attributes(System::ApproximateReceiveCount, "2")
            .attributes(System::SentTimestamp, (NOW_MS - 5000).to_string())
            .build();
        read(message, now()).unwrap()
    }

    #[test]
    fn every_body_is_read_back_unchanged() {
        let bodies: [&[u8]; 7] =
            [b"text", "grüß <&>\r\n\t😀".as_bytes(), b"", b"\0", b"\xff\xfe", "\u{ffff}".as_bytes(), b"\x1b[0m"];
        for body in bodies {
            assert_eq!(delivered(live(&content(body, &[]), None, Duration::ZERO, DELAY_MAX, now())).content.body, body);
        }
    }

    #[test]
    fn every_attribute_is_read_back_unchanged() {
        let traced =
            [("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"), ("tracestate", "a=1")];
        let odd = [("", "empty name"), ("AWS.x", "\u{ffff}\0\""), ("späte reason", ""), ("pipeline.id", "mine")];
        for set in [&traced[..], &odd[..], &[("traceparent", ""), ("tracestate", "\u{1}")][..], &[][..]] {
            let sent = content(b"x", set);
            assert_eq!(delivered(live(&sent, None, Duration::ZERO, DELAY_MAX, now())).content, sent);
        }
        let entry = live(&content(b"x", &traced), None, Duration::ZERO, DELAY_MAX, now());
        assert_eq!(entry.attributes["traceparent"].string_value(), Some(traced[0].1), "other readers must find it");
    }

    #[test]
    fn a_delivery_has_a_receive_count_and_the_original_time() {
        let first = delivered(live(&content(b"x", &[]), None, Duration::ZERO, DELAY_MAX, now()));
        assert_eq!((first.receives, first.sent_at), (2, time_from(NOW_MS - 5000)));
        let copy = delivered(live(&content(b"x", &[]), Some(time_from(7)), Duration::ZERO, DELAY_MAX, now()));
        assert_eq!(copy.sent_at, time_from(7));
        assert_eq!((copy.not_before, copy.burial), (None, None));
    }

    #[test]
    fn a_message_of_another_program_is_read() {
        let value = MessageAttributeValue::builder().data_type("String").string_value("v").build().unwrap();
        let message = SqsMessage::builder()
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
    fn a_long_delay_takes_several_steps() {
        let delayed = |delay| live(&content(b"x", &[]), None, delay, DELAY_MAX, now());
        for (delay_ms, delay_s) in [(0, 0), (1, 1), (1000, 1), (1001, 2), (900_000, 900)] {
            let entry = delayed(Duration::from_millis(delay_ms));
            assert_eq!(entry.delay_s, delay_s);
            assert_eq!(delivered(entry).not_before, None);
        }
        let entry = delayed(Duration::from_millis(900_001));
        assert_eq!(entry.delay_s, 900);
        assert_eq!(delivered(entry).not_before, Some(time_from(NOW_MS + 900_001)));
    }

    #[test]
    fn a_burial_is_read_back_unchanged() {
        let burial = Burial { reason: "malformed: \"ü\"".into(), at: now(), receives: 3 };
        let got = delivered(dead(&content(b"x", &[("k", "v")]), time_from(5), &burial));
        assert_eq!((got.burial, got.sent_at), (Some(burial), time_from(5)));
        assert_eq!(got.content, content(b"x", &[("k", "v")]));
    }

    #[test]
    fn a_reason_is_cleaned_and_truncated() {
        assert_eq!(reason_text(""), NO_REASON);
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
            let entry = dead(&largest, now(), &burial);
            assert!(entry.bytes <= BYTES_MAX, "{} bytes", entry.bytes);
        }
    }

    #[test]
    fn a_message_that_does_not_fit_is_rejected_with_its_size() {
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
