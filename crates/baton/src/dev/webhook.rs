//! Telling about records: signed as the real relayer signs, tried as often as it tries.

use std::time::Duration;

use base64::{Engine as _, engine::general_purpose::STANDARD};
use hmac::{Hmac, KeyInit, Mac};
use serde::Serialize;
use sha2::Sha256;
use uuid::Uuid;

use super::record::{Identity, Record, Status, View, timestamp};

/// The pauses before the second to the fifth attempt: at about 0, 2, 6, 15 and 23 s, and then no more.
pub(super) const PAUSES: [Duration; 4] =
    [Duration::from_secs(2), Duration::from_secs(4), Duration::from_secs(9), Duration::from_secs(8)];

/// How many are on their way at once, at one relayer. The real one has 30 workers.
pub(super) const WORKERS: usize = 30;

/// One attempt. The real one waits for ever; we are in a hurry to shut down.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(30);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// One webhook. Small on purpose: the body is made when it is sent, the same each time.
#[derive(Clone, Debug)]
pub(super) struct Notice {
    pub(super) record: std::sync::Arc<Record>,
    pub(super) status: Status,
    pub(super) id: Uuid,
    /// When the status was reached, as far as the relayer is concerned.
    pub(super) at: i64,
    /// Attempts made.
    pub(super) attempts: usize,
}

pub(super) struct Sender {
    client: reqwest::Client,
    url: String,
    key: String,
}

#[derive(Serialize)]
struct Envelope<'a> {
    id: Uuid,
    event: &'static str,
    payload: View<'a>,
    timestamp: String,
}

impl Sender {
    pub(super) fn new(url: String, key: String) -> reqwest::Result<Self> {
        let client = reqwest::Client::builder()
            .timeout(ATTEMPT_TIMEOUT)
            .connect_timeout(CONNECT_TIMEOUT)
            .pool_max_idle_per_host(WORKERS)
            .tcp_nodelay(true)
            // Both ends are ours: no proxy of the environment has a say.
            .no_proxy()
            .build()?;
        Ok(Self { client, url, key })
    }

    /// Whether it was taken with a 2xx.
    pub(super) async fn attempt(&self, identity: &Identity, notice: &Notice) -> bool {
        let body = body(identity, notice);
        let answer = self
            .client
            .post(&self.url)
            .header("x-signature", sign(&self.key, &body))
            .header("content-type", "application/json")
            .body(body)
            .send()
            .await;
        match answer {
            Ok(answer) => {
                let taken = answer.status().is_success();
                // Read to the end, or the connection cannot be used again.
                let _ = answer.bytes().await;
                taken
            }
            Err(_) => false,
        }
    }
}

fn body(identity: &Identity, notice: &Notice) -> Vec<u8> {
    let mut payload = notice.record.view(identity, notice.status);
    payload.payload_type = Some("transaction");
    let envelope = Envelope { id: notice.id, event: "transaction_update", payload, timestamp: timestamp(notice.at) };
    serde_json::to_vec(&envelope).unwrap_or_default()
}

/// HMAC-SHA256 over the exact body, in base64; the key is the text as it is.
fn sign(key: &str, body: &[u8]) -> String {
    let mut mac = Hmac::<Sha256>::new_from_slice(key.as_bytes()).expect("HMAC takes a key of any length");
    mac.update(body);
    STANDARD.encode(mac.finalize().into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_signature_is_the_one_measured_at_the_real_relayer() {
        let body = r#"{"id":"159deef3-e25f-4eed-90a4-d62ed85a1336","event":"relayer_state_update","payload":{"payload_type":"relayer_enabled","relayer":{"id":"relayer-c","name":"Relayer C","network":"devnet","network_type":"evm","paused":false,"policies":{"min_balance":0,"gas_limit_estimation":true,"include_revert_data":false},"signer_id":"signer-c","notification_id":"hook-c","address":"0x3c44cdddb6a900fa2b585dd299e03d12fa4293bc","system_disabled":false},"retry_count":0},"timestamp":"2026-11-15T18:35:05.047327432+00:00"}"#;
        let signature = sign("whsec-0123456789abcdef0123456789abcdef", body.as_bytes());
        assert_eq!(signature, "9p4FdzOnppTgiWQu2howvfmqAqw+5zy52Hk0LdJrxg8=");
    }

    #[test]
    fn attempts_are_spread_as_at_the_real_relayer() {
        let times: Vec<u64> = PAUSES
            .iter()
            .scan(0, |at, pause| {
                *at += pause.as_secs();
                Some(*at)
            })
            .collect();
        assert_eq!(times, [2, 6, 15, 23]);
    }
}
