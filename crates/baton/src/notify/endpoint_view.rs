//! Endpoints and attempts as their owner sees them (pure). Nothing here shows a secret.

use serde_json::{Value, json};

use crate::relay::store::notifications::{Attempt, Endpoint};
use crate::timestamp::Timestamp;

/// An endpoint in lists and answers.
pub fn show_endpoint(endpoint: &Endpoint, now: Timestamp) -> Value {
    let previous = endpoint.previous_secret.as_ref().map(|(_, until)| *until).filter(|until| *until > now);
    let mut shown = json!({
        "id": endpoint.id.to_string(),
        "url": endpoint.url,
        "events": endpoint.events.iter().map(|kind| kind.name()).collect::<Vec<_>>(),
        "description": endpoint.description,
        "createdAt": endpoint.created_at,
        "updatedAt": endpoint.updated_at,
        "previousSecretValidUntil": previous,
        "status": if endpoint.disabled.is_some() { "disabled" } else { "enabled" },
    });
    match &endpoint.disabled {
        Some(disabled) => {
            shown["disabledReason"] = json!(disabled.reason);
            shown["disabledAt"] = json!(disabled.at);
        }
        None => {
            shown["failingSince"] = json!(endpoint.failing_since);
            shown["failures"] = json!(endpoint.failures);
            shown["pausedUntil"] = json!(endpoint.paused_until.filter(|until| *until > now));
        }
    }
    shown
}

/// One attempt of an endpoint's log.
pub fn show_attempt(attempt: &Attempt) -> Value {
    json!({
        "id": attempt.id.to_string(),
        "eventId": attempt.event.0,
        "number": attempt.number,
        "at": attempt.at,
        "durationMs": u64::try_from(attempt.duration.as_millis()).unwrap_or(u64::MAX),
        "status": attempt.status,
        "error": attempt.error,
        "answer": attempt.answer,
        "succeeded": attempt.error.is_none(),
    })
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::config::Secret;
    use crate::relay::state::event::EventType;
    use crate::relay::store::notifications::{Disabled, EndpointId};

    fn endpoint() -> Endpoint {
        Endpoint {
            id: EndpointId(Uuid::from_u128(7)),
            owner: "default".to_owned(),
            url: "https://client.example/hooks".to_owned(),
            events: vec![EventType::Completed],
            description: None,
            secret: Secret::new("whsec_new"),
            previous_secret: Some((Secret::new("whsec_old"), Timestamp(2000))),
            version: 1,
            created_at: Timestamp(0),
            updated_at: Timestamp(0),
            disabled: None,
            failing_since: Some(Timestamp(500)),
            failures: 3,
            paused_until: Some(Timestamp(900)),
        }
    }

    #[test]
    fn an_endpoint_is_shown_without_its_secrets() {
        let shown = show_endpoint(&endpoint(), Timestamp(1000));
        assert!(!shown.to_string().contains("whsec"), "{shown}");
        assert_eq!((&shown["status"], &shown["failures"]), (&json!("enabled"), &json!(3)));
        assert_eq!(shown["previousSecretValidUntil"], "1970-01-01T00:00:02.000Z");
        assert_eq!(shown["pausedUntil"], Value::Null, "a pause that is over");
        let later = show_endpoint(&endpoint(), Timestamp(2000));
        assert_eq!(later["previousSecretValidUntil"], Value::Null, "the overlap is over");
    }

    #[test]
    fn a_disabled_endpoint_is_shown_with_its_reason_instead_of_its_failures() {
        let disabled = Some(Disabled { at: Timestamp(800), reason: "it answered 410".to_owned() });
        let shown = show_endpoint(&Endpoint { disabled, ..endpoint() }, Timestamp(1000));
        assert_eq!((&shown["status"], &shown["disabledReason"]), (&json!("disabled"), &json!("it answered 410")));
        assert!(shown.get("failures").is_none() && shown.get("disabledAt").is_some(), "{shown}");
    }
}
