//! The message that points to a row: what it looks like in the queue (pure).

use pipeline::Outgoing;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::relay::state::transaction::{Transaction, TransactionId};
use crate::timestamp::Timestamp;

/// The body of a message. The row is authoritative; the request is included for people and other consumers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TransactionMessage {
    message_id: Uuid,
    transaction_id: Uuid,
    r#type: String,
    request: Box<RawValue>,
    timestamp: String,
    /// Present on gasless transactions only.
    #[serde(skip_serializing_if = "Option::is_none")]
    forwarder_address: Option<String>,
}

impl TransactionMessage {
    /// A new message about a row.
    pub fn of(row: &Transaction, message_id: Uuid, now: Timestamp) -> Self {
        let request = row.forward.as_ref().map_or_else(|| row.request.to_string(), |forward| forward.gasless.to_json());
        Self {
            message_id,
            transaction_id: row.id.0,
            r#type: row.kind.name().to_owned(),
            request: RawValue::from_string(request).expect("a row's request is JSON"),
            timestamp: now.to_string(),
            forwarder_address: row.forward.as_ref().map(|forward| forward.forwarder.to_checksum(None)),
        }
    }

    /// Reads a message's body.
    pub fn parse(body: &[u8]) -> Result<Self, String> {
        serde_json::from_slice(body).map_err(|error| format!("malformed message: {error}"))
    }

    /// The row that it points to.
    pub fn transaction_id(&self) -> TransactionId {
        TransactionId(self.transaction_id)
    }

    /// Its own id, for the logs.
    pub fn message_id(&self) -> Uuid {
        self.message_id
    }

    /// The message as handed to the queue.
    pub fn outgoing(&self) -> Outgoing {
        Outgoing::new(serde_json::to_vec(self).expect("plain data becomes JSON"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_body_has_exactly_the_documented_fields() {
        let text = r#"{"messageId":"550e8400-e29b-41d4-a716-446655440000","transactionId":"550e8400-e29b-41d4-a716-446655440001","type":"direct","request":{"to":"0x1"},"timestamp":"2026-01-06T12:34:56.789Z"}"#;
        let envelope = TransactionMessage::parse(text.as_bytes()).unwrap();
        assert_eq!(String::from_utf8(envelope.outgoing().body).unwrap(), text);
    }

    #[test]
    fn a_gasless_message_names_the_forwarder() {
        let text = r#"{"messageId":"550e8400-e29b-41d4-a716-446655440000","transactionId":"550e8400-e29b-41d4-a716-446655440001","type":"gasless","request":{"request":{}},"timestamp":"2026-01-06T12:34:56.789Z","forwarderAddress":"0x5FbDB2315678afecb367f032d93F642f64180aa3"}"#;
        let envelope = TransactionMessage::parse(text.as_bytes()).unwrap();
        assert_eq!(String::from_utf8(envelope.outgoing().body).unwrap(), text);
    }

    #[test]
    fn anything_else_is_malformed() {
        for body in ["", "{}", "null", r#"{"messageId":"x","transactionId":"y"}"#] {
            assert!(TransactionMessage::parse(body.as_bytes()).unwrap_err().starts_with("malformed message"), "{body}");
        }
    }
}
