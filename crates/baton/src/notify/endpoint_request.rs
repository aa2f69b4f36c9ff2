//! What a client asks for about its endpoints: bodies and queries, read with every problem found at once (pure).
//!
//! A URL is judged here by its text only ([`super::address_guard`]); [`super::api`] has its name resolved afterwards.

use std::time::Duration;

use reqwest::Url;
use serde_json::{Map, Value};
use uuid::Uuid;

use super::address_guard::{AddressGuard, UrlRefused};
use crate::http::problem::{FieldProblem, PROBLEMS_MAX};
use crate::relay::state::event::{EventId, EventType};
use crate::timestamp::Timestamp;

/// Longest description, in characters.
const DESCRIPTION_CHARS_MAX: usize = 500;
/// Overlap of two secrets if a rotation names none: a day to install the new one.
const OVERLAP_DEFAULT: Duration = Duration::from_secs(24 * 3600);
/// Longest overlap of two secrets, in seconds: a week.
const OVERLAP_MAX_S: u64 = 7 * 24 * 3600;
/// Most attempts on one page.
const PAGE_MAX: usize = 200;
const PAGE_DEFAULT: usize = 50;
/// Characters of a client's own text in an answer.
const QUOTED_CHARS: usize = 64;

/// The events of an endpoint that names none: each end once, and what needs attention. `confirmed` and `failed` would
/// report the same end a second time.
pub const EVENTS_DEFAULT: [EventType; 2] = [EventType::Completed, EventType::Unknown];

/// A URL whose text is acceptable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointUrl {
    /// As the client wrote it.
    pub text: String,
    /// The same, parsed.
    pub parsed: Url,
}

/// Why a request is refused.
#[derive(Debug, PartialEq, Eq)]
pub enum EndpointRequestError {
    /// These fields are invalid.
    Invalid(Vec<FieldProblem>),
    /// Every field is well formed, but this service does not call the URL's address. The text follows the name `url`.
    ForbiddenUrl(String),
}

/// A checked `POST /webhooks/register` body.
#[derive(Debug, PartialEq, Eq)]
pub struct NewEndpoint {
    /// Where to deliver.
    pub url: EndpointUrl,
    /// What to deliver; not empty.
    pub events: Vec<EventType>,
    /// The owner's own words.
    pub description: Option<String>,
}

impl NewEndpoint {
    /// Reads a body, or returns every problem in it. `null` counts as not sent.
    pub fn parse(body: &Value, guard: &AddressGuard) -> Result<Self, EndpointRequestError> {
        let mut found = Problems::default();
        let Some(object) = found.object(body, &["url", "events", "description"]) else { return Err(found.refused()) };
        let field = |name| object.get(name).filter(|value: &&Value| !value.is_null());
        let url = match field("url") {
            Some(value) => found.url(value, guard),
            None => found.add("url", "is missing; it is the address that notifications are sent to"),
        };
        let events = match field("events") {
            Some(value) => found.events(value),
            None => Some(EVENTS_DEFAULT.to_vec()),
        };
        let description = match field("description") {
            Some(value) => found.description(value).map(Some),
            None => Some(None),
        };
        match (url, events, description) {
            (Some(url), Some(events), Some(description)) if found.is_empty() => Ok(Self { url, events, description }),
            _ => Err(found.refused()),
        }
    }
}

/// A checked `PATCH /webhooks/endpoints/{id}` body. `None`: stays as it is.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct EndpointChange {
    /// Where to deliver from now on.
    pub url: Option<EndpointUrl>,
    /// What to deliver from now on.
    pub events: Option<Vec<EventType>>,
    /// The new description; `Some(None)` removes it.
    pub description: Option<Option<String>>,
    /// Whether to deliver at all.
    pub enabled: Option<bool>,
}

impl EndpointChange {
    /// Reads a body, or returns every problem in it. `null` is a value: it removes the description, and nothing else can
    /// be removed.
    pub fn parse(body: &Value, guard: &AddressGuard) -> Result<Self, EndpointRequestError> {
        let mut found = Problems::default();
        let known = ["url", "events", "description", "enabled"];
        let Some(object) = found.object(body, &known) else { return Err(found.refused()) };
        let change = Self {
            url: object.get("url").and_then(|value| found.url(value, guard)),
            events: object.get("events").and_then(|value| found.events(value)),
            description: match object.get("description") {
                None => None,
                Some(Value::Null) => Some(None),
                Some(value) => found.description(value).map(Some),
            },
            enabled: object.get("enabled").and_then(|value| match value {
                Value::Bool(enabled) => Some(*enabled),
                _ => found.add("enabled", "must be true or false"),
            }),
        };
        if found.is_empty() { Ok(change) } else { Err(found.refused()) }
    }
}

/// Reads the body of `POST …/rotate`: for how long deliveries are signed with both secrets.
pub fn read_overlap(body: Option<&Value>) -> Result<Duration, EndpointRequestError> {
    let Some(body) = body else { return Ok(OVERLAP_DEFAULT) };
    let mut found = Problems::default();
    let Some(object) = found.object(body, &["overlapSeconds"]) else { return Err(found.refused()) };
    let overlap = match object.get("overlapSeconds") {
        None | Some(Value::Null) => Some(OVERLAP_DEFAULT),
        Some(value) => match value.as_u64().filter(|seconds| *seconds <= OVERLAP_MAX_S) {
            Some(seconds) => Some(Duration::from_secs(seconds)),
            None => found.add("overlapSeconds", format!("must be a whole number from 0 to {OVERLAP_MAX_S}")),
        },
    };
    overlap.filter(|_| found.is_empty()).ok_or_else(|| found.refused())
}

/// Reads the query of `POST …/recover`: since when undelivered events are delivered again.
pub fn read_since(query: &str) -> Result<Timestamp, EndpointRequestError> {
    // A plus sign in a query is a space, so the offset of a time is often lost.
    const RULE: &str = "must be an RFC 3339 time, such as 2026-11-15T22:00:00Z (write + as %2B)";
    let mut found = Problems::default();
    let mut since = None;
    for (name, value) in pairs(query) {
        match name.as_str() {
            "since" => since = Timestamp::parse(&value).or_else(|| found.add("since", RULE)),
            _ => found.unknown(&name, &["since"]),
        }
        if found.is_full() {
            break;
        }
    }
    if since.is_none() && !found.names("since") {
        found.add::<()>("since", format!("is missing; it {RULE}"));
    }
    since.filter(|_| found.is_empty()).ok_or_else(|| found.refused())
}

/// A checked query of `GET …/attempts`.
#[derive(Debug, PartialEq, Eq)]
pub struct AttemptsQuery {
    /// The last attempt of the page before.
    pub before: Option<Uuid>,
    /// Most attempts on this page.
    pub limit: usize,
}

impl AttemptsQuery {
    /// Reads a query, or returns every problem in it.
    pub fn parse(query: &str) -> Result<Self, EndpointRequestError> {
        let mut found = Problems::default();
        let mut read = Self { before: None, limit: PAGE_DEFAULT };
        for (name, value) in pairs(query) {
            match name.as_str() {
                "limit" => match value.parse().ok().filter(|limit| (1..=PAGE_MAX).contains(limit)) {
                    Some(limit) => read.limit = limit,
                    None => found.note("limit", format!("must be a number from 1 to {PAGE_MAX}")),
                },
                "cursor" => match Uuid::parse_str(&value) {
                    Ok(id) => read.before = Some(id),
                    Err(_) => found.note("cursor", "must be a nextCursor of this list"),
                },
                _ => found.unknown(&name, &["limit", "cursor"]),
            }
            if found.is_full() {
                break;
            }
        }
        if found.is_empty() { Ok(read) } else { Err(found.refused()) }
    }
}

/// The id of an event, if the text has the form of one.
pub fn read_event_id(text: &str) -> Option<EventId> {
    let rest = text.strip_prefix("evt_")?;
    let is_part = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'z' | b'_');
    ((1..=60).contains(&rest.len()) && rest.bytes().all(is_part)).then(|| EventId(text.to_owned()))
}

fn pairs(query: &str) -> Vec<(String, String)> {
    let url = Url::parse(&format!("http://query/?{query}"));
    url.iter().flat_map(Url::query_pairs).map(|(name, value)| (name.into_owned(), value.into_owned())).collect()
}

/// The problems of one request.
#[derive(Debug, Default)]
struct Problems {
    fields: Vec<FieldProblem>,
    forbidden_url: Option<String>,
}

impl Problems {
    fn is_empty(&self) -> bool {
        self.fields.is_empty() && self.forbidden_url.is_none()
    }

    /// Whether more would not be shown.
    fn is_full(&self) -> bool {
        self.fields.len() > PROBLEMS_MAX
    }

    fn names(&self, field: &str) -> bool {
        self.fields.iter().any(|problem| problem.field == field)
    }

    fn note(&mut self, field: &str, message: impl Into<String>) {
        let problem = FieldProblem { field: field.to_owned(), message: message.into() };
        if !self.fields.contains(&problem) {
            self.fields.push(problem);
        }
    }

    /// [`Problems::note`] in place of the value that could not be read.
    fn add<T>(&mut self, field: &str, message: impl Into<String>) -> Option<T> {
        self.note(field, message);
        None
    }

    fn unknown(&mut self, name: &str, known: &[&str]) {
        self.note(name, format!("is not known; known are {}", known.join(", ")));
    }

    /// A forbidden address beside other problems is one of them.
    fn refused(mut self) -> EndpointRequestError {
        match self.forbidden_url.take() {
            Some(why) if self.fields.is_empty() => EndpointRequestError::ForbiddenUrl(why),
            Some(why) => {
                self.note("url", why);
                EndpointRequestError::Invalid(self.fields)
            }
            None => EndpointRequestError::Invalid(self.fields),
        }
    }

    /// The fields of a body; unknown ones are problems.
    fn object<'a>(&mut self, body: &'a Value, known: &[&str]) -> Option<&'a Map<String, Value>> {
        let Some(object) = body.as_object() else { return self.add("body", "must be a JSON object") };
        for name in object.keys().filter(|name| !known.contains(&name.as_str())) {
            self.unknown(name, known);
        }
        Some(object)
    }

    fn url(&mut self, value: &Value, guard: &AddressGuard) -> Option<EndpointUrl> {
        let Some(text) = value.as_str() else { return self.add("url", "must be text") };
        if !text.contains("://") && Url::parse(text).is_err() {
            return self.add("url", "must be a full URL, such as https://client.example/hooks");
        }
        match guard.check_url(text) {
            Ok(parsed) => Some(EndpointUrl { text: text.to_owned(), parsed }),
            Err(UrlRefused::Malformed(rule) | UrlRefused::Unchecked(rule)) => self.add("url", rule),
            Err(UrlRefused::Forbidden(why)) => {
                self.forbidden_url = Some(why);
                None
            }
        }
    }

    fn events(&mut self, value: &Value) -> Option<Vec<EventType>> {
        let known = || EventType::SUBSCRIBABLE.map(EventType::name).join(", ");
        let Some(names) = value.as_array().filter(|names| !names.is_empty()) else {
            return self.add("events", format!("must be a list of at least one of {}", known()));
        };
        let mut events = Vec::new();
        for name in names {
            let event = name.as_str().and_then(EventType::parse).filter(|kind| EventType::SUBSCRIBABLE.contains(kind));
            match (event, name) {
                (Some(event), _) if events.contains(&event) => {
                    self.note("events", format!("names {} twice", event.name()));
                }
                (Some(event), _) => events.push(event),
                (None, Value::String(name)) if name == EventType::Test.name() => {
                    self.note("events", format!("{name:?} cannot be subscribed to; `POST …/test` sends it"));
                }
                (None, Value::String(name)) => {
                    self.note("events", format!("{:?} is no event; known are {}", quoted(name), known()));
                }
                (None, _) => self.note("events", format!("must be a list of at least one of {}", known())),
            }
            if self.is_full() {
                break;
            }
        }
        (!self.names("events")).then_some(events)
    }

    fn description(&mut self, value: &Value) -> Option<String> {
        let Some(text) = value.as_str() else { return self.add("description", "must be text") };
        if text.chars().count() > DESCRIPTION_CHARS_MAX {
            return self.add("description", format!("has more than {DESCRIPTION_CHARS_MAX} characters"));
        }
        // Operators read it on a terminal.
        if text.chars().any(char::is_control) {
            return self.add("description", "must not contain control characters");
        }
        Some(text.to_owned())
    }
}

/// The beginning of a client's text.
fn quoted(text: &str) -> String {
    match text.char_indices().nth(QUOTED_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::notify::address_guard::AddressPolicy;

    fn guard() -> AddressGuard {
        AddressGuard::new(AddressPolicy { allow_http: false, allow_private: false, ports: Vec::new() })
    }

    const URL: &str = "https://client.example/hooks?x=1";

    fn register(body: Value) -> Result<NewEndpoint, EndpointRequestError> {
        NewEndpoint::parse(&body, &guard())
    }

    fn change(body: Value) -> Result<EndpointChange, EndpointRequestError> {
        EndpointChange::parse(&body, &guard())
    }

    fn fields<T: std::fmt::Debug>(read: Result<T, EndpointRequestError>) -> Vec<String> {
        match read.unwrap_err() {
            EndpointRequestError::Invalid(problems) => problems.into_iter().map(|problem| problem.field).collect(),
            EndpointRequestError::ForbiddenUrl(why) => panic!("forbidden: {why}"),
        }
    }

    fn messages<T: std::fmt::Debug>(read: Result<T, EndpointRequestError>) -> String {
        match read.unwrap_err() {
            EndpointRequestError::Invalid(problems) => {
                problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
            }
            EndpointRequestError::ForbiddenUrl(why) => why,
        }
    }

    #[test]
    fn an_endpoint_without_events_gets_each_end_once() {
        let read = register(json!({ "url": URL, "events": null, "description": null })).unwrap();
        assert_eq!(read.events, EVENTS_DEFAULT);
        assert_eq!((read.url.text.as_str(), read.description), (URL, None));
        let all: Vec<_> = EventType::SUBSCRIBABLE.iter().map(|kind| kind.name()).collect();
        let read = register(json!({ "url": URL, "events": all, "description": "ü".repeat(500) })).unwrap();
        assert_eq!((read.events.as_slice(), read.url.parsed.as_str()), (&EventType::SUBSCRIBABLE[..], URL));
    }

    #[test]
    fn every_problem_is_named_at_once() {
        let refused =
            fields(register(json!({ "url": "nowhere", "events": ["a", "b"], "description": 5, "colour": 1 })));
        assert_eq!(refused, ["colour", "url", "events", "events", "description"]);
        assert_eq!(fields(register(json!([]))), ["body"]);
        assert_eq!(fields(register(json!({}))), ["url"]);
        let refused = fields(change(json!({ "url": null, "events": null, "enabled": "no", "secret": "x" })));
        assert_eq!(refused, ["secret", "url", "events", "enabled"]);
    }

    #[test]
    fn bad_values_are_refused_by_field() {
        for (name, bad) in [
            ("url", json!(7)),
            ("url", json!("")),
            ("url", json!("https://client.example/a b")),
            ("url", json!("https://client.example/\n")),
            ("url", json!(format!("https://client.example/{}", "x".repeat(2048)))),
            ("events", json!("transaction.failed")),
            ("events", json!([])),
            ("events", json!([1])),
            ("events", json!(["transaction.done"])),
            ("events", json!(["webhook.test"])),
            ("events", json!(["transaction.failed", "transaction.failed"])),
            ("description", json!("x".repeat(501))),
            ("description", json!("\u{1b}[2J")),
            ("description", json!(["x"])),
        ] {
            let mut body = json!({ "url": URL });
            body[name] = bad.clone();
            assert_eq!(fields(register(body)), [name], "register {name} = {bad}");
            assert_eq!(fields(change(json!({ name: bad.clone() }))), [name], "change {name} = {bad}");
        }
        let message = messages(register(json!({ "url": URL, "events": ["transaction.done"] })));
        assert!(message.starts_with("events: \"transaction.done\" is no event; known are transaction.submitted, "));
        let message = messages(register(json!({ "url": URL, "events": ["webhook.test"] })));
        assert_eq!(message, "events: \"webhook.test\" cannot be subscribed to; `POST …/test` sends it");
        for relative in ["", "nowhere", "client.example/hooks", "/hooks"] {
            let message = messages(register(json!({ "url": relative })));
            assert_eq!(message, "url: must be a full URL, such as https://client.example/hooks", "{relative}");
        }
        let long = messages(register(json!({ "url": URL, "events": vec!["x".repeat(10_000); 1] })));
        assert!(long.len() < 400, "{long}");
    }

    #[test]
    fn a_forbidden_address_is_a_refusal_of_its_own_unless_another_field_is_wrong() {
        let forbidden = "https://10.0.0.1/hooks";
        for refused in [
            register(json!({ "url": forbidden })).unwrap_err(),
            change(json!({ "url": forbidden, "enabled": true })).unwrap_err(),
        ] {
            assert!(
                matches!(&refused, EndpointRequestError::ForbiddenUrl(why) if why.contains("private")),
                "{refused:?}"
            );
        }
        assert_eq!(fields(register(json!({ "url": forbidden, "events": [] }))), ["events", "url"]);
    }

    #[test]
    fn a_change_leaves_out_what_it_does_not_name() {
        assert_eq!(change(json!({})).unwrap(), EndpointChange::default());
        let read = change(json!({ "description": null, "enabled": false })).unwrap();
        assert_eq!((read.description, read.enabled, read.url, read.events), (Some(None), Some(false), None, None));
        let read = change(json!({ "description": "billing", "events": ["transaction.unknown"] })).unwrap();
        assert_eq!(read.description, Some(Some("billing".to_owned())));
        assert_eq!(read.events, Some(vec![EventType::Unknown]));
    }

    #[test]
    fn the_overlap_is_a_day_unless_named() {
        assert_eq!(read_overlap(None).unwrap(), OVERLAP_DEFAULT);
        assert_eq!(read_overlap(Some(&json!({}))).unwrap(), OVERLAP_DEFAULT);
        assert_eq!(read_overlap(Some(&json!({ "overlapSeconds": 0 }))).unwrap(), Duration::ZERO);
        assert_eq!(read_overlap(Some(&json!({ "overlapSeconds": 604_800 }))).unwrap(), Duration::from_secs(604_800));
        for bad in [json!(-1), json!(604_801), json!("60"), json!(1.5), json!(true)] {
            assert_eq!(fields(read_overlap(Some(&json!({ "overlapSeconds": bad })))), ["overlapSeconds"]);
        }
        assert_eq!(fields(read_overlap(Some(&json!({ "overlap": 5 })))), ["overlap"]);
        assert_eq!(fields(read_overlap(Some(&json!(60)))), ["body"]);
    }

    #[test]
    fn a_recovery_needs_its_start() {
        let at = Timestamp::parse("2026-11-15T20:00:00Z").unwrap();
        assert_eq!(read_since("since=2026-11-15T20:00:00Z").unwrap(), at);
        assert_eq!(read_since("since=2026-11-15T22:00:00%2B02:00").unwrap(), at);
        for bad in ["", "since=", "since=yesterday", "since=2026-11-15T22:00:00+02:00", "since"] {
            assert_eq!(fields(read_since(bad)), ["since"], "{bad}");
        }
        assert_eq!(fields(read_since("since=2026-11-15T20:00:00Z&until=now")), ["until"]);
        assert_eq!(fields(read_since("from=now")), ["from", "since"]);
    }

    #[test]
    fn the_query_of_attempts_is_read_or_named() {
        assert_eq!(AttemptsQuery::parse("").unwrap(), AttemptsQuery { before: None, limit: PAGE_DEFAULT });
        let id = Uuid::from_u128(7);
        let read = AttemptsQuery::parse(&format!("limit=200&cursor={id}")).unwrap();
        assert_eq!(read, AttemptsQuery { before: Some(id), limit: 200 });
        assert_eq!(fields(AttemptsQuery::parse("limit=201&cursor=x&page=2")), ["limit", "cursor", "page"]);
        let many: String = (0..10_000).map(|number| format!("p{number}&")).collect();
        assert_eq!(fields(AttemptsQuery::parse(&many)).len(), PROBLEMS_MAX + 1);
    }

    #[test]
    fn an_event_id_has_one_form() {
        let id = format!("evt_{}", "0a".repeat(16));
        assert_eq!(read_event_id(&id), Some(EventId(id.clone())));
        for bad in ["evt_", "x", &id[1..], &id.to_uppercase(), &format!("{id}{id}"), "evt_a.b"] {
            assert_eq!(read_event_id(bad), None, "{bad}");
        }
    }
}
