//! The syntax of the `Idempotency-Key` header. What a key means is each lane's own: requests under one key become one
//! transaction in `relay/store/*/idempotency_keys.rs`, one user in `users/intake.rs`.

use axum::http::HeaderMap;

use super::problem::{FieldProblem, Problem};

/// The key of a request; `None` without the header. A quoted key, as in the IETF draft, and the bare one are the same. Two
/// different keys are refused: a proxy in front may look at the other one.
pub fn read_idempotency_key(headers: &HeaderMap) -> Result<Option<&str>, Problem> {
    const LENGTH_MAX: usize = 255;
    let invalid =
        |message: String| Problem::invalid(vec![FieldProblem { field: "Idempotency-Key".to_owned(), message }]);
    let mut keys = headers
        .get_all("idempotency-key")
        .iter()
        .map(|value| value.to_str().unwrap_or_default().trim().trim_matches('"'));
    let Some(key) = keys.next() else { return Ok(None) };
    if keys.any(|other| other != key) {
        return Err(invalid("is there twice, with different keys; send one".to_owned()));
    }
    if key.is_empty() || key.len() > LENGTH_MAX {
        return Err(invalid(format!("must be 1 to {LENGTH_MAX} visible ASCII characters")));
    }
    Ok(Some(key))
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn two_different_keys_are_refused_and_one_repeated_is_read() {
        let read = |keys: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for key in keys {
                headers.append("idempotency-key", HeaderValue::from_static(key));
            }
            read_idempotency_key(&headers).map(|key| key.map(str::to_owned)).map_err(|problem| problem.detail)
        };
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&["a", "\"a\""]), Ok(Some("a".to_owned())));
        assert!(read(&["a", "b"]).unwrap_err().contains("twice"));
        assert!(read(&["a", "a", "A"]).is_err() && read(&[""]).is_err());
    }
}
