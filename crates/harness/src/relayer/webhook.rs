//! Telling about records: signed webhooks, tried five times, and all the ways in which they go wrong.

use std::{sync::Arc, time::Duration};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use hmac::{Hmac, KeyInit, Mac};
use rand::RngExt;
use serde_json::{Value, json};
use sha2::Sha256;
use time::OffsetDateTime;
use tokio::sync::oneshot;

use super::{
    Dialect,
    progress::{Shared, State},
    record::{Status, timestamp},
};

/// How far a reordered webhook is held back when the test does not say.
const REORDER_WITHIN: Duration = Duration::from_millis(300);

/// One webhook and what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// The record it tells about; empty for other events.
    pub record_id: String,
    /// The status it tells.
    pub status: Option<Status>,
    /// The exact body.
    pub body: String,
    /// How often it was tried.
    pub attempts: u32,
    /// Whether a 2xx came back.
    pub delivered: bool,
    /// The last HTTP status, if there was an answer at all.
    pub last_status: Option<u16>,
    /// Whether a fault made it vanish.
    pub lost: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Hook {
    pub(super) url: String,
    pub(super) key: String,
}

/// HMAC-SHA256 of the body in base64, as in the real relayer's `X-Signature`.
pub fn sign_base64(key: &str, body: &[u8]) -> String {
    STANDARD.encode(mac(key, body))
}

/// HMAC-SHA256 of the body in hex, as in the older dialect's `X-OZ-Signature`.
pub fn sign_hex(key: &str, body: &[u8]) -> String {
    hex::encode(mac(key, body))
}

fn mac(key: &str, body: &[u8]) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key.as_bytes()).expect("HMAC takes a key of any length");
    mac.update(body);
    mac.finalize().into_bytes().to_vec()
}

/// How one webhook is to be sent.
#[derive(Default)]
struct Manner {
    /// Wait for this one's first attempt.
    after: Option<oneshot::Receiver<()>>,
    delay: Duration,
    repeat: bool,
    forged: bool,
}

impl Shared {
    /// The webhook for a record's present status. Returns what ends when it was tried once.
    pub(super) fn tell(self: &Arc<Self>, state: &mut State, index: usize) -> Option<oneshot::Receiver<()>> {
        state.hook.as_ref()?;
        let faults = state.faults.webhooks.clone();
        let record = &state.entries[index].record;
        let (id, status) = (record.id.clone(), record.status);
        let body = match self.options.dialect {
            Dialect::Spec => record.to_flat_json().to_string(),
            Dialect::Real => {
                let mut payload = json!({"payload_type": "transaction"});
                if let (Some(payload), Value::Object(fields)) = (payload.as_object_mut(), record.to_json()) {
                    payload.extend(fields);
                }
                envelope("transaction_update", payload)
            }
        };
        if faults.late && !status.is_final() && !state.entries[index].held_enough() {
            state.entries[index].held.push((status, body));
            return None;
        }
        if faults.lose > 0.0 && state.dice.random_bool(faults.lose) {
            state.deliveries.push(Delivery { lost: true, ..Delivery::new(&id, Some(status), &body) });
            return None;
        }
        let reordered = faults.reorder > 0.0 && state.dice.random_bool(faults.reorder);
        let repeat = faults.repeat > 0.0 && state.dice.random_bool(faults.repeat);
        let mut manner = Manner { after: None, delay: faults.delay, repeat, forged: faults.forged };
        if reordered {
            let within = if faults.reorder_within.is_zero() { REORDER_WITHIN } else { faults.reorder_within };
            manner.delay += within.mul_f64(state.dice.random::<f64>());
        } else {
            manner.after = state.entries[index].last_webhook.take();
        }
        let (tried, first) = oneshot::channel();
        let (chain, next) = oneshot::channel();
        if !reordered {
            state.entries[index].last_webhook = Some(next);
        }
        self.send(state, Delivery::new(&id, Some(status), &body), manner, [Some(tried), Some(chain)]);
        for (status, body) in std::mem::take(&mut state.entries[index].held) {
            let after = state.entries[index].last_webhook.take();
            let (chain, next) = oneshot::channel();
            state.entries[index].last_webhook = Some(next);
            let manner = Manner { after, delay: faults.delay, ..Manner::default() };
            self.send(state, Delivery::new(&id, Some(status), &body), manner, [None, Some(chain)]);
        }
        Some(first)
    }

    pub(super) fn send_webhook(self: &Arc<Self>, body: String) {
        let mut state = self.lock();
        self.send(&mut state, Delivery::new("", None, &body), Manner::default(), [None, None]);
    }

    pub(super) fn send_gap_filler(self: &Arc<Self>) {
        let nonce = {
            let mut state = self.lock();
            state.next_nonce += 1;
            state.next_nonce - 1
        };
        let hash = format!("0x{}", hex::encode(rand::random::<[u8; 32]>()));
        let now = timestamp(OffsetDateTime::now_utc());
        let payload = json!({
            "payload_type": "transaction", "id": uuid::Uuid::new_v4().to_string(), "hash": hash, "status": "submitted",
            "status_reason": format!("Gap-filling NOOP for nonce {nonce}"), "created_at": now, "sent_at": now,
            "confirmed_at": null, "gas_price": null, "gas_limit": 21000, "nonce": nonce, "value": "0x0",
            "from": self.address, "to": self.address, "relayer_id": self.options.id, "data": "0x",
            "max_fee_per_gas": null, "max_priority_fee_per_gas": null, "signature": null, "speed": "fast",
            "is_canceled": false,
        });
        self.send_webhook(envelope("transaction_update", payload));
    }

    pub(super) fn send_state_webhook(self: &Arc<Self>, disabled: bool) {
        let relayer = self.to_json(&self.lock().faults);
        let payload = if disabled {
            let reason = json!({"type": "RpcValidationFailed", "details": "made up by the test"});
            json!({"payload_type": "relayer_disabled", "relayer": relayer, "disable_reason": reason})
        } else {
            json!({"payload_type": "relayer_enabled", "relayer": relayer, "retry_count": 0})
        };
        self.send_webhook(envelope("relayer_state_update", payload));
    }

    fn send(
        self: &Arc<Self>,
        state: &mut State,
        delivery: Delivery,
        manner: Manner,
        tried: [Option<oneshot::Sender<()>>; 2],
    ) {
        let Some(hook) = state.hook.clone() else { return };
        let place = state.deliveries.len();
        let body = delivery.body.clone();
        state.deliveries.push(delivery);
        let shared = Arc::clone(self);
        state.spawn(async move {
            if let Some(after) = manner.after {
                // An error means that the one before is gone, and so not in the way.
                let _ = after.await;
            }
            tokio::time::sleep(manner.delay).await;
            let mut delivered = shared.attempt(&hook, &body, manner.forged, place).await;
            for tried in tried.into_iter().flatten() {
                // Nobody has to wait for it.
                let _ = tried.send(());
            }
            for pause in &shared.options.webhook_pauses {
                if delivered {
                    break;
                }
                tokio::time::sleep(*pause).await;
                delivered = shared.attempt(&hook, &body, manner.forged, place).await;
            }
            if manner.repeat {
                shared.attempt(&hook, &body, manner.forged, place).await;
            }
        });
    }

    /// Like the real one without a timeout: a slow receiver is waited for.
    async fn attempt(&self, hook: &Hook, body: &str, forged: bool, place: usize) -> bool {
        let key = if forged { format!("not-{}", hook.key) } else { hook.key.clone() };
        let (name, signature) = match self.options.dialect {
            Dialect::Real => ("x-signature", sign_base64(&key, body.as_bytes())),
            Dialect::Spec => ("x-oz-signature", sign_hex(&key, body.as_bytes())),
        };
        let request = self.client.post(&hook.url).header(name, signature).header("content-type", "application/json");
        let answer = request.body(body.to_owned()).send().await;
        let status = answer.ok().map(|answer| answer.status().as_u16());
        let delivered = status.is_some_and(|status| (200..300).contains(&status));
        let mut state = self.lock();
        let delivery = &mut state.deliveries[place];
        delivery.attempts += 1;
        delivery.delivered |= delivered;
        delivery.last_status = status;
        delivered
    }
}

impl super::progress::Entry {
    /// Held webhooks come after the first end; what follows it (a double send) needs no holding back.
    fn held_enough(&self) -> bool {
        self.record.confirmed_at.is_some()
    }
}

impl Delivery {
    fn new(record_id: &str, status: Option<Status>, body: &str) -> Self {
        Self {
            record_id: record_id.to_owned(),
            status,
            body: body.to_owned(),
            attempts: 0,
            delivered: false,
            last_status: None,
            lost: false,
        }
    }
}

fn envelope(event: &str, payload: Value) -> String {
    let id = uuid::Uuid::new_v4().to_string();
    let now = timestamp(OffsetDateTime::now_utc());
    json!({"id": id, "event": event, "payload": payload, "timestamp": now}).to_string()
}
