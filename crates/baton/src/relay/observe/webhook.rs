//! Reports from relayers: `POST /api/v1/webhooks/oz-relayer`, HMAC-signed over the raw body.
//!
//! Looked up by the relayer's id only, never by ours. A webhook may overtake the answer to its own submission: then
//! it is kept and applied with the bind.

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::{Json, Router, routing};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use metrics::{counter, histogram};
use serde_json::{Value, json};
use sha2::Sha256;
use tracing::{info, warn};

use crate::config::Secret;
use crate::http::body::RawBody;
use crate::http::problem::Problem;
use crate::relay::relayer::wire::{self, Webhook};
use crate::relay::state::apply_report::Report;
use crate::relay::state::transaction::TransactionId;
use crate::relay::store::StoreError;
use crate::relay::update::guarded_store::{Applied, GuardedStore, Origin};

/// State of the route.
#[derive(Clone)]
pub struct WebhookState {
    /// The transactions.
    pub guarded: Arc<GuardedStore>,
    /// The key relayers sign with.
    pub key: Arc<Secret>,
}

/// The route.
pub fn routes(state: WebhookState) -> Router {
    Router::new().route("/api/v1/webhooks/oz-relayer", routing::post(receive)).with_state(state)
}

/// The real relayer's header, and the one of the older documents.
const SIGNATURE_HEADERS: [&str; 2] = ["x-signature", "x-oz-signature"];

async fn receive(
    State(state): State<WebhookState>,
    headers: HeaderMap,
    RawBody(body): RawBody,
) -> Result<Json<Value>, Problem> {
    let clock = state.guarded.clock.clone();
    let started = clock.instant();
    let answer = accept(&state, &headers, &body).await;
    let result = match &answer {
        Ok((_, result)) => result,
        Err(problem) if problem.status == 401 => "unauthorized",
        Err(problem) if problem.status == 404 => "unknown",
        Err(problem) if problem.status == 400 => "malformed",
        Err(_) => "error",
    };
    counter!("baton_webhooks_total", "result" => result).increment(1);
    histogram!("baton_webhook_seconds").record(clock.elapsed(started).as_secs_f64());
    answer.map(|(body, _)| body)
}

async fn accept(
    state: &WebhookState,
    headers: &HeaderMap,
    body: &[u8],
) -> Result<(Json<Value>, &'static str), Problem> {
    let signature = SIGNATURE_HEADERS.iter().find_map(|name| headers.get(*name)?.to_str().ok());
    if !signature.is_some_and(|signature| is_signed(state.key.expose(), body, signature)) {
        return Err(Problem::unauthorized("the webhook's signature is missing or wrong"));
    }
    let parsed: Value =
        serde_json::from_slice(body).map_err(|error| Problem::bad_request(format!("the body is not JSON: {error}")))?;
    match wire::read_webhook(&parsed) {
        Some(Webhook::Transaction(report)) => {
            let Received { id, result } = receive_report(&state.guarded, &report)
                .await
                .map_err(|failure| Problem::unavailable("the store is unavailable; send it again", &failure))?;
            let Some(id) = id else {
                return Err(Problem::not_found("no transaction of ours has this relayer id"));
            };
            Ok((Json(json!({ "received": true, "transactionId": id.to_string() })), result))
        }
        Some(Webhook::Other(kind)) => {
            info!(action = "relayer_event", kind, "a relayer reports on itself");
            Ok((Json(json!({ "received": true })), "other"))
        }
        None => Err(Problem::bad_request("the body is neither a transaction update nor a relayer event")),
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

/// Checks a signature: HMAC-SHA256 of the raw body, base64 or hex, compared in constant time.
fn is_signed(key: &str, body: &[u8], signature: &str) -> bool {
    let signature = signature.trim();
    let given = match hex::decode(signature) {
        Ok(bytes) if bytes.len() == 32 => bytes,
        _ => match STANDARD.decode(signature) {
            Ok(bytes) => bytes,
            Err(_) => return false,
        },
    };
    let Ok(mut mac) = Hmac::<Sha256>::new_from_slice(key.as_bytes()) else {
        warn!(action = "webhook_key", "the webhook key cannot be used");
        return false;
    };
    mac.update(body);
    mac.verify_slice(&given).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "whsec-0123456789abcdef0123456789abcdef";
    const BODY: &str = r#"{"id":"159deef3-e25f-4eed-90a4-d62ed85a1336","event":"relayer_state_update","payload":{"payload_type":"relayer_enabled","relayer":{"id":"relayer-c","name":"Relayer C","network":"devnet","network_type":"evm","paused":false,"policies":{"min_balance":0,"gas_limit_estimation":true,"include_revert_data":false},"signer_id":"signer-c","notification_id":"hook-c","address":"0x3c44cdddb6a900fa2b585dd299e03d12fa4293bc","system_disabled":false},"retry_count":0},"timestamp":"2026-11-15T18:35:05.047327432+00:00"}"#;
    const SIGNATURE: &str = "9p4FdzOnppTgiWQu2howvfmqAqw+5zy52Hk0LdJrxg8=";

    #[test]
    fn the_real_relayers_signature_is_accepted_in_both_encodings() {
        assert!(is_signed(KEY, BODY.as_bytes(), SIGNATURE));
        assert!(is_signed(KEY, BODY.as_bytes(), &hex::encode(STANDARD.decode(SIGNATURE).unwrap())));
    }

    #[test]
    fn anything_else_is_not() {
        assert!(!is_signed(KEY, &BODY.as_bytes()[1..], SIGNATURE), "truncated body");
        assert!(!is_signed("another-key-another-key-another-key", BODY.as_bytes(), SIGNATURE));
        assert!(!is_signed(KEY, BODY.as_bytes(), ""));
        assert!(!is_signed(KEY, BODY.as_bytes(), "9p4FdzOnppTg"));
        assert!(!is_signed(KEY, BODY.as_bytes(), "not base64!"));
    }
}
