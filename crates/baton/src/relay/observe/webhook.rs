//! Reports from relayers: `POST /api/v1/webhooks/oz-relayer`, HMAC-signed over the raw body.
//!
//! Looked up by the relayer's id only, never by ours. A webhook may overtake the answer to its own submission: then
//! it is kept and applied with the bind.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::{Json, Router, routing};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use metrics::{counter, histogram};
use serde_json::{Value, json};
use sha2::Sha256;
use tracing::{info, warn};

use crate::config::WebhookKey;
use crate::http::body::{BodyLimits, RawBody};
use crate::http::problem::Problem;
use crate::http::strict_json;
use crate::relay::relayer::wire::{self, Webhook};
use crate::relay::state::apply_report::Report;
use crate::relay::state::transaction::{RelayerUrl, TransactionId};
use crate::relay::store::StoreError;
use crate::relay::update::guarded_store::{Applied, GuardedStore, Origin};

/// State of the route.
#[derive(Clone)]
pub struct WebhookState {
    /// The transactions.
    pub guarded: Arc<GuardedStore>,
    /// The keys relayers sign with.
    pub keys: Arc<[WebhookKey]>,
}

/// The route.
pub fn routes(state: WebhookState) -> Router {
    Router::new().route("/api/v1/webhooks/oz-relayer", routing::post(receive)).with_state(state)
}

/// The real relayer's header, and the one of the older documents.
const SIGNATURE_HEADERS: [&str; 2] = ["x-signature", "x-oz-signature"];

async fn receive(State(state): State<WebhookState>, request: Request) -> Result<Json<Value>, Problem> {
    let clock = state.guarded.clock.clone();
    let started = clock.instant();
    let answer = accept(&state, request).await;
    let result = match &answer {
        Ok((_, result)) => result,
        Err(problem) if problem.status == 401 => "unauthorized",
        Err(problem) if problem.status == 404 => "unknown",
        Err(problem) if matches!(problem.status, 400 | 413) => "malformed",
        Err(problem) if problem.code == Problem::OVERLOADED => "overloaded",
        Err(_) => "error",
    };
    counter!("baton_webhooks_total", "result" => result).increment(1);
    histogram!("baton_webhook_seconds").record(clock.elapsed(started).as_secs_f64());
    answer.map(|(body, _)| body)
}

async fn accept(state: &WebhookState, request: Request) -> Result<(Json<Value>, &'static str), Problem> {
    let unsigned = || Problem::unauthorized("the webhook's signature is missing or wrong");
    // Before the body: a sender without a signature gets no memory.
    let signature = read_signature(request.headers()).ok_or_else(unsigned)?;
    let RawBody(body, _memory) = BodyLimits::of(&request).webhook(request).await?;
    let key = signing_key(&state.keys, &body, &signature).ok_or_else(unsigned)?;
    let parsed = strict_json::parse(&body).map_err(|rule| Problem::bad_request(format!("the body {rule}")))?;
    drop(body);
    match wire::read_webhook(&parsed) {
        Some(Webhook::Transaction(report)) => {
            if report.hash_is_malformed() {
                warn!(action = "hash_malformed", ozRelayerTxId = %report.tx_id, "the hash is not 32 bytes of hex and is not stored");
            }
            check_relayer(&state.guarded, key, &report).await?;
            let Received { id, result } =
                receive_report(&state.guarded, &report).await.map_err(|failure| store_problem(&failure))?;
            let Some(id) = id else {
                return Err(Problem::not_found("no transaction has this relayer id"));
            };
            Ok((Json(json!({ "received": true, "transactionId": id.to_string() })), result))
        }
        Some(Webhook::Other(kind)) => {
            info!(action = "relayer_event", kind, "received a relayer event that is not about a transaction");
            Ok((Json(json!({ "received": true })), "other"))
        }
        None => Err(Problem::bad_request("the body is neither a transaction update nor a relayer event")),
    }
}

fn store_problem(failure: &StoreError) -> Problem {
    Problem::unavailable("the store is unavailable; send it again", failure)
}

/// A relayer with a key of its own must not report on the transactions of another.
async fn check_relayer(guarded: &GuardedStore, key: &WebhookKey, report: &Report) -> Result<(), Problem> {
    let Some(url) = &key.relayer else { return Ok(()) };
    let bound = guarded.store.find_bound(&report.tx_id).await.map_err(|failure| store_problem(&failure))?;
    match bound.and_then(|row| row.binding) {
        Some(binding) if binding.relayer != RelayerUrl::of(url) => {
            let relayer = RelayerUrl::of(url);
            warn!(action = "webhook_of_another", ozRelayerTxId = %report.tx_id, "signed with the key of {relayer}, but {} has the transaction", binding.relayer);
            Err(Problem::unauthorized("the webhook is signed with another relayer's key"))
        }
        _ => Ok(()),
    }
}

/// Result of a webhook about a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// The row that the relayer's transaction is bound to; `None` if there is none yet, and the webhook was kept.
    pub id: Option<TransactionId>,
    /// Label of the metric.
    pub result: &'static str,
}

/// Applies a webhook about a transaction, or keeps it until the transaction is bound.
pub async fn receive_report(guarded: &GuardedStore, report: &Report) -> Result<Received, StoreError> {
    let mut bound = guarded.store.find_bound(&report.tx_id).await?;
    if bound.is_none() {
        // Kept first, looked up again after: if the bind comes in between, one of the two sees the other.
        guarded.store.keep_early_webhook(&report.tx_id, &report.raw.to_string(), guarded.clock.now()).await?;
        bound = guarded.store.find_bound(&report.tx_id).await?;
        if let Some(row) = &bound {
            guarded.apply_early(row.id, &report.tx_id).await?;
        }
    }
    let Some(row) = bound else {
        info!(action = "webhook_unknown", ozRelayerTxId = %report.tx_id, "a webhook about an unknown transaction; kept for an hour");
        return Ok(Received { id: None, result: "unknown" });
    };
    let result = match guarded.apply(row.id, report, Origin::Webhook).await? {
        Applied::Moved => "applied",
        Applied::Ignored => "ignored",
    };
    Ok(Received { id: Some(row.id), result })
}

/// The signature of a request, base64 or hex; `None` if there is none that could be one.
fn read_signature(headers: &HeaderMap) -> Option<[u8; 32]> {
    let text = SIGNATURE_HEADERS.iter().find_map(|name| headers.get(*name)?.to_str().ok())?.trim();
    let bytes = hex::decode(text).ok().filter(|bytes| bytes.len() == 32).or_else(|| STANDARD.decode(text).ok())?;
    bytes.try_into().ok()
}

/// The key that the body is signed with. All keys are tried even after a match, so that the time taken reveals nothing.
fn signing_key<'a>(keys: &'a [WebhookKey], body: &[u8], signature: &[u8; 32]) -> Option<&'a WebhookKey> {
    let signed = keys.iter().filter(|key| is_signed(key.secret.expose(), body, signature));
    signed.fold(None, |found, key| found.or(Some(key)))
}

/// Checks a signature: HMAC-SHA256 of the raw body, compared in constant time.
fn is_signed(key: &str, body: &[u8], signature: &[u8; 32]) -> bool {
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(key.as_bytes()) else {
        warn!(action = "webhook_key", "the webhook key cannot be used");
        return false;
    };
    mac.update(body);
    mac.verify_slice(signature).is_ok()
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderName;

    use super::*;
    use crate::config::Secret;

    const KEY: &str = "whsec-0123456789abcdef0123456789abcdef";
    const BODY: &str = r#"{"id":"159deef3-e25f-4eed-90a4-d62ed85a1336","event":"relayer_state_update","payload":{"payload_type":"relayer_enabled","relayer":{"id":"relayer-c","name":"Relayer C","network":"devnet","network_type":"evm","paused":false,"policies":{"min_balance":0,"gas_limit_estimation":true,"include_revert_data":false},"signer_id":"signer-c","notification_id":"hook-c","address":"0x3c44cdddb6a900fa2b585dd299e03d12fa4293bc","system_disabled":false},"retry_count":0},"timestamp":"2026-11-15T18:35:05.047327432+00:00"}"#;
    const SIGNATURE: &str = "9p4FdzOnppTgiWQu2howvfmqAqw+5zy52Hk0LdJrxg8=";

    /// Whether a webhook with this body and signature is accepted by a service with these keys.
    fn is_accepted(keys: &[&str], body: &[u8], signature: &str) -> bool {
        let keys: Vec<_> = keys.iter().map(|key| WebhookKey { relayer: None, secret: Secret::new(*key) }).collect();
        let headers = HeaderMap::from_iter([(HeaderName::from_static("x-signature"), signature.parse().unwrap())]);
        read_signature(&headers).is_some_and(|signature| signing_key(&keys, body, &signature).is_some())
    }

    #[test]
    fn the_real_relayers_signature_is_accepted_in_both_encodings() {
        assert!(is_accepted(&[KEY], BODY.as_bytes(), SIGNATURE));
        assert!(is_accepted(&[KEY], BODY.as_bytes(), &hex::encode(STANDARD.decode(SIGNATURE).unwrap())));
    }

    #[test]
    fn anything_else_is_not() {
        assert!(!is_accepted(&[KEY], &BODY.as_bytes()[1..], SIGNATURE), "truncated body");
        assert!(!is_accepted(&["another-key-another-key-another-key"], BODY.as_bytes(), SIGNATURE));
        assert!(!is_accepted(&[KEY], BODY.as_bytes(), ""));
        assert!(!is_accepted(&[KEY], BODY.as_bytes(), "9p4FdzOnppTg"));
        assert!(!is_accepted(&[KEY], BODY.as_bytes(), "not base64!"));
        assert_eq!(read_signature(&HeaderMap::new()), None);
    }

    #[test]
    fn during_a_rotation_either_key_is_accepted() {
        let new = "another-key-another-key-another-key";
        assert!(is_accepted(&[new, KEY], BODY.as_bytes(), SIGNATURE));
        assert!(is_accepted(&[KEY, new], BODY.as_bytes(), SIGNATURE));
        assert!(!is_accepted(&[new], BODY.as_bytes(), SIGNATURE), "the old key is gone after it");
    }
}
