//! API keys: named, sent as `X-API-Key`, stored as hashes and compared in constant time.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use metrics::counter;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use super::problem::Problem;
use crate::config::ApiKey;

/// The name of the API key of a request.
#[derive(Debug, Clone)]
pub struct Caller(pub String);

/// Middleware that lets a request through if it carries a known key. A refusal does not say what is wrong with the key.
pub async fn require_key(
    State(keys): State<Arc<Vec<ApiKey>>>,
    mut request: Request,
    next: Next,
) -> Result<Response, Problem> {
    let given = request.headers().get("x-api-key").map(|value| value.as_bytes()).unwrap_or_default();
    match caller(&keys, given) {
        Some(name) => {
            request.extensions_mut().insert(Caller(name));
            Ok(next.run(request).await)
        }
        None => {
            counter!("baton_unauthorized_total").increment(1);
            Err(Problem::unauthorized("send a valid API key as X-API-Key"))
        }
    }
}

/// The name of the matching key. Compares with every key even after a match, so that the time taken reveals nothing.
fn caller(keys: &[ApiKey], given: &[u8]) -> Option<String> {
    let hash: [u8; 32] = Sha256::digest(given).into();
    let mut found = None;
    for key in keys {
        if bool::from(key.sha256.ct_eq(&hash)) {
            found = Some(key.name.clone());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_text_behind_a_hash_matches_its_key() {
        let key = |name: &str, text: &str| ApiKey { name: name.into(), sha256: Sha256::digest(text).into() };
        let keys = [key("a", "one"), key("b", "two")];
        assert_eq!(caller(&keys, b"two").as_deref(), Some("b"));
        assert_eq!(caller(&keys, b"three"), None);
        assert_eq!(caller(&keys, b""), None);
        assert_eq!(caller(&[], b""), None);
    }
}
