//! The syntax of the `Idempotency-Key` header. What a key means is each lane's own: requests under one key become one
//! transaction in `relay/store/*/idempotency_keys.rs`, one user in `users/intake.rs`.

use axum::http::HeaderMap;

use super::problem::{FieldProblem, Problem};

/// The key of a request; `None` without the header. A quoted key, as in the IETF draft, and the bare one are the same.
pub fn read_idempotency_key(headers: &HeaderMap) -> Result<Option<&str>, Problem> {
    const LENGTH_MAX: usize = 255;
    let Some(value) = headers.get("idempotency-key") else { return Ok(None) };
    let key = value.to_str().unwrap_or_default().trim().trim_matches('"');
    if key.is_empty() || key.len() > LENGTH_MAX {
        return Err(Problem::invalid(vec![FieldProblem {
            field: "Idempotency-Key".to_owned(),
            message: format!("must be 1 to {LENGTH_MAX} visible ASCII characters"),
        }]));
    }
    Ok(Some(key))
}
