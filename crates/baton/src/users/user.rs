//! A user, as a client sends it, as a message carries it, and as it is stored (pure).
//!
//! The message format is the existing service's, so that each reads the other's messages. Requests are checked more
//! strictly than messages: a message that the existing service accepted is refused only if it cannot be stored.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use uuid::{Builder, Uuid};

use crate::http::problem::FieldProblem;

/// Longest name and e-mail address, in characters.
pub const TEXT_CHARS_MAX: usize = 255;

/// The id of a user, assigned when it is accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(transparent)]
pub struct UserId(pub Uuid);

impl UserId {
    /// A new id. Ids grow with time, so that new rows are adjacent in the index.
    pub fn generate() -> Self {
        Self(Uuid::now_v7())
    }

    /// The id of the user enrolled under this `Idempotency-Key`. The same key of the same caller always gives the same
    /// id, so that a repeated request enrols once.
    pub fn of_key(caller: &str, key: &str) -> Self {
        let mut hash = Sha256::new();
        // Without the length, `ab` + `c` and `a` + `bc` would give the same id.
        hash.update((caller.len() as u64).to_be_bytes());
        hash.update(caller);
        hash.update(key);
        let digest: [u8; 32] = hash.finalize().into();
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&digest[..16]);
        Self(Builder::from_custom_bytes(bytes).into_uuid())
    }
}

impl fmt::Display for UserId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A user to be enrolled, or enrolled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct User {
    /// Assigned by us, or derived from the client's idempotency key.
    pub id: UserId,
    /// Not empty, at most [`TEXT_CHARS_MAX`] characters.
    pub name: String,
    /// The e-mail address, with the limits of the name. Only requests are checked for the form of an address.
    pub email: String,
}

/// Why a message is not a valid user, without repeating its contents.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid user: {0}")]
pub struct InvalidUser(pub String);

#[derive(Deserialize)]
struct UserMessage {
    id: Uuid,
    name: String,
    email: String,
}

impl User {
    /// Reads a message. Additional fields are ignored.
    pub fn from_message(body: &[u8]) -> Result<Self, InvalidUser> {
        let Ok(UserMessage { id, name, email }) = serde_json::from_slice(body) else { return Err(diagnose(body)) };
        let problems: Vec<_> = [("name", &name), ("email", &email)]
            .into_iter()
            .filter_map(|(field, text)| storable(text).err().map(|rule| format!("{field} {rule}")))
            .collect();
        if problems.is_empty() {
            Ok(Self { id: UserId(id), name, email })
        } else {
            Err(InvalidUser(problems.join("; ")))
        }
    }

    /// The message body.
    pub fn to_message(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("text and an id are always JSON")
    }

    /// Reads a request body. An error lists every invalid field.
    pub fn from_request(body: &Value, id: UserId) -> Result<Self, Vec<FieldProblem>> {
        let problem = |field: &str, message: String| FieldProblem { field: field.to_owned(), message };
        let Some(fields) = body.as_object() else {
            return Err(vec![problem("body", "must be a JSON object with name and email".to_owned())]);
        };
        let mut problems = Vec::new();
        let mut text = |field: &str| match fields.get(field) {
            Some(Value::String(text)) => {
                let rule = storable(text).and_then(|()| if field == "email" { is_address(text) } else { Ok(()) });
                if let Err(rule) = rule {
                    problems.push(problem(field, rule));
                }
                text.clone()
            }
            Some(_) => {
                problems.push(problem(field, "must be text".to_owned()));
                String::new()
            }
            None => {
                problems.push(problem(field, "is missing".to_owned()));
                String::new()
            }
        };
        let (name, email) = (text("name"), text("email"));
        for field in fields.keys().filter(|field| !matches!(field.as_str(), "name" | "email")) {
            problems.push(problem(field, "is unknown; the fields are name and email".to_owned()));
        }
        if problems.is_empty() { Ok(Self { id, name, email }) } else { Err(problems) }
    }
}

/// Whether every database can store this text; an error is the rule that it breaks.
fn storable(text: &str) -> Result<(), String> {
    if text.trim().is_empty() {
        return Err("must not be empty".to_owned());
    }
    if text.contains('\0') {
        return Err("must not contain a NUL character".to_owned());
    }
    if text.chars().count() > TEXT_CHARS_MAX {
        return Err(format!("has more than {TEXT_CHARS_MAX} characters"));
    }
    Ok(())
}

/// Refuses only text that cannot be an address; whether mail reaches it, only mail can show.
fn is_address(text: &str) -> Result<(), String> {
    let shaped = text.rsplit_once('@').is_some_and(|(local, domain)| !local.is_empty() && !domain.is_empty());
    if shaped && !text.chars().any(|char| char.is_whitespace() || char.is_control()) {
        return Ok(());
    }
    Err("must be an e-mail address".to_owned())
}

/// What is wrong with an unreadable message, without repeating its contents.
fn diagnose(body: &[u8]) -> InvalidUser {
    let value: Value = match serde_json::from_slice(body) {
        Ok(value) => value,
        Err(error) => return InvalidUser(format!("not JSON (line {}, column {})", error.line(), error.column())),
    };
    let Some(fields) = value.as_object() else { return InvalidUser("not a JSON object".to_owned()) };
    let wrong = ["id", "name", "email"].into_iter().filter_map(|field| match fields.get(field) {
        None => Some(format!("{field} is missing")),
        Some(Value::String(text)) if field == "id" => Uuid::parse_str(text).err().map(|_| "id is no UUID".to_owned()),
        Some(Value::String(_)) => None,
        Some(_) => Some(format!("{field} is not text")),
    });
    let wrong: Vec<_> = wrong.collect();
    // A duplicate field is the one fault that the typed parser reports and a `Value` accepts.
    InvalidUser(if wrong.is_empty() { "a field is there twice".to_owned() } else { wrong.join("; ") })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const ID: &str = "7f8b1f9e-3b5e-4a6f-9c1d-2e3f4a5b6c7d";

    fn invalid(body: impl AsRef<[u8]>) -> String {
        User::from_message(body.as_ref()).unwrap_err().0
    }

    #[test]
    fn messages_have_the_format_of_the_existing_service() {
        let theirs = format!(r#"{{"id":"{ID}","name":"John Silva","email":"john@email.com"}}"#);
        let user = User::from_message(theirs.as_bytes()).unwrap();
        assert_eq!((user.name.as_str(), user.email.as_str()), ("John Silva", "john@email.com"));
        assert_eq!(user.to_message(), theirs.as_bytes());
        let more = theirs.replace('}', r#","source":"web"}"#);
        assert_eq!(User::from_message(more.as_bytes()).unwrap(), user);
    }

    #[test]
    fn a_malformed_message_is_diagnosed_without_its_contents() {
        assert_eq!(invalid("{\"id\""), "not JSON (line 1, column 5)");
        assert_eq!(invalid("[1]"), "not a JSON object");
        assert_eq!(invalid(b"\xff\xfe"), "not JSON (line 1, column 1)");
        assert_eq!(invalid(r#"{"id":"secret","name":5}"#), "id is no UUID; name is not text; email is missing");
        let twice = format!(r#"{{"id":"{ID}","name":"a","name":"b","email":"e"}}"#);
        assert_eq!(invalid(twice), "a field is there twice");
    }

    #[test]
    fn text_that_cannot_be_stored_is_invalid() {
        let with = |name: String| invalid(json!({ "id": ID, "name": name, "email": "e@x" }).to_string());
        assert_eq!(with("a\0b".into()), "name must not contain a NUL character");
        assert_eq!(with(" ".into()), "name must not be empty");
        assert_eq!(with("ü".repeat(256)), "name has more than 255 characters");
        let longest = json!({ "id": ID, "name": "ü".repeat(255), "email": "no address" }).to_string();
        assert!(User::from_message(longest.as_bytes()).is_ok(), "the existing service accepted it");
    }

    #[test]
    fn every_problem_of_a_request_is_reported() {
        let problems = User::from_request(&json!({ "name": 1, "mail": "x" }), UserId::generate()).unwrap_err();
        let fields: Vec<_> = problems.iter().map(|found| found.field.as_str()).collect();
        assert_eq!(fields, ["name", "email", "mail"]);
        for email in ["", "x", "@x", "x@", "a b@x", "a@x\n"] {
            assert!(
                User::from_request(&json!({ "name": "n", "email": email }), UserId::generate()).is_err(),
                "{email:?}"
            );
        }
        assert!(User::from_request(&json!({ "name": "n", "email": "a@b@c" }), UserId::generate()).is_ok());
    }

    #[test]
    fn an_idempotency_key_identifies_one_user_of_its_caller() {
        let id = UserId::of_key("team-a", "order-1");
        assert_eq!(id, UserId::of_key("team-a", "order-1"));
        assert_ne!(id, UserId::of_key("team-b", "order-1"));
        assert_ne!(id, UserId::of_key("team-", "aorder-1"));
        assert_eq!(id.0.get_version_num(), 8);
    }
}
