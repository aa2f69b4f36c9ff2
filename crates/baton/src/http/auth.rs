//! API keys: named, sent as `X-API-Key`, stored as hashes and compared in constant time.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use metrics::counter;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;
use tracing::warn;

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
    // Without the header there is nothing to compare: the hash of an empty text is a hash too.
    let given = request.headers().get("x-api-key").map(|value| value.as_bytes());
    match given.and_then(|given| caller(&keys, given)) {
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
            found = Some(key);
        }
    }
    let key = found?;
    if given.len() < key.length_min {
        let ApiKey { name, length_min, .. } = key;
        warn!(
            action = "key_too_short",
            key = name,
            "the API key {name} has fewer than {length_min} characters; refused"
        );
        return None;
    }
    Some(key.name.clone())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::{HeaderValue, StatusCode};
    use axum::{Router, middleware, routing};
    use tower_service::Service as _;

    use super::*;

    #[test]
    fn only_the_text_behind_a_hash_matches_its_key() {
        let key =
            |name: &str, text: &str| ApiKey { name: name.into(), sha256: Sha256::digest(text).into(), length_min: 1 };
        let keys = [key("a", "one"), key("b", "two")];
        assert_eq!(caller(&keys, b"two").as_deref(), Some("b"));
        assert_eq!(caller(&keys, b"three"), None);
        assert_eq!(caller(&keys, b""), None);
        assert_eq!(caller(&[], b""), None);
        assert_eq!(caller(&[key("empty", "")], b""), None, "an empty header is no key");
    }

    /// The configuration has only the hash of a key, so its length shows when it is sent.
    #[test]
    fn a_key_that_is_too_short_is_refused_although_its_hash_is_known() {
        let of = |text: &str| {
            let keys = [ApiKey { name: "a".into(), sha256: Sha256::digest(text).into(), length_min: 32 }];
            caller(&keys, text.as_bytes())
        };
        assert_eq!(of("0123456789abcdef0123456789abcde"), None);
        assert_eq!(of("0123456789abcdef0123456789abcdef").as_deref(), Some("a"));
    }

    /// The start refuses the hash of nothing, and a key has a minimum length: without both, the header is still required.
    #[tokio::test]
    async fn a_request_without_the_header_has_no_key() {
        let nothing = ApiKey { name: "nothing".into(), sha256: Sha256::digest("").into(), length_min: 0 };
        let routes = Router::new().route("/", routing::get(|| async {}));
        let mut routes = routes.layer(middleware::from_fn_with_state(Arc::new(vec![nothing]), require_key));
        let answer = routes.call(Request::new(Body::empty())).await.unwrap();
        assert_eq!(answer.status(), StatusCode::UNAUTHORIZED);
        let mut request = Request::new(Body::empty());
        request.headers_mut().insert("x-api-key", HeaderValue::from_static(""));
        assert_eq!(routes.call(request).await.unwrap().status(), StatusCode::OK, "no other check refuses this key");
    }
}
