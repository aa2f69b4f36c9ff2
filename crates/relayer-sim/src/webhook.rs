//! Webhooks as values: what is said, how it is signed, which attempt follows which, and how all of that goes wrong.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use hmac::{Hmac, KeyInit, Mac};
use serde::Serialize;
use serde_json::json;
use sha2::Sha256;

use crate::{
    api::Reply,
    core::{Event, SimRelayer, Ticket, Work},
    options::Dialect,
    plan::millis,
    record::{Status, timestamp},
};

/// Longest delay of a reordered webhook when the fault does not name one.
const REORDER_WITHIN: Duration = Duration::from_millis(300);
/// Webhooks under way above which new ones are dropped, outside tests: the receiver is hopelessly behind.
const UNDER_WAY_MAX: usize = 100_000;

/// One attempt of one webhook.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutgoingWebhook {
    /// For [`SimRelayer::webhook_result`].
    pub id: u64,
    /// Target of the POST.
    pub url: Arc<str>,
    /// Content type and signature.
    pub headers: Vec<(&'static str, String)>,
    /// The same bytes in every attempt.
    pub body: Arc<str>,
    /// Counts from 1.
    pub attempt: u32,
}

/// One webhook and the result of its attempts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivery {
    /// The record it reports; empty for other events.
    pub record_id: String,
    /// The status it reports.
    pub status: Option<Status>,
    /// The exact body.
    pub body: Arc<str>,
    /// Attempts finished.
    pub attempts: u32,
    /// Whether an attempt was answered with 2xx.
    pub delivered: bool,
    /// The last HTTP status, if there was an answer.
    pub last_status: Option<u16>,
    /// Whether a fault suppressed it.
    pub lost: bool,
}

/// Webhooks that wait, are under way, or (for tests) are over.
#[derive(Clone, Debug)]
pub(crate) struct Outbox {
    hook: Option<(Arc<str>, String)>,
    webhooks: BTreeMap<u64, Webhook>,
    next_id: u64,
    under_way: usize,
    /// By record: webhooks that leave one after the other, each after the first attempt of the one before. The first
    /// is under way.
    lines: HashMap<u64, VecDeque<u64>>,
    /// By record: webhooks held back until the final one was tried.
    held: HashMap<u64, Vec<(Status, Arc<str>)>>,
    /// Replies that wait for the first attempt of these webhooks.
    replies: Vec<(Ticket, Reply, Vec<u64>)>,
}

#[derive(Clone, Debug)]
struct Webhook {
    delivery: Delivery,
    number: Option<u64>,
    delay_ms: i64,
    in_line: bool,
    repeat: bool,
    forged: bool,
    /// Where `repeat` was used, or a crash ended it: no attempt follows.
    over: bool,
}

/// HMAC-SHA256 of the body in base64, as in the real relayer's `X-Signature`. The key is the text as it is.
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

#[derive(Serialize)]
struct Notification<P: Serialize> {
    id: uuid::Uuid,
    event: &'static str,
    payload: P,
    timestamp: String,
}

impl SimRelayer {
    /// Directs webhooks to this URL from now on, signed with this key.
    pub fn set_webhook(&mut self, url: &str, key: impl Into<String>) {
        self.outbox.hook = Some((Arc::from(url), key.into()));
    }

    /// Every webhook so far; outside [`Mode::Audited`](crate::Mode::Audited) only those under way.
    pub fn deliveries(&self) -> impl Iterator<Item = &Delivery> {
        self.outbox.webhooks.values().map(|webhook| &webhook.delivery)
    }

    /// Reports the result of an attempt: the HTTP status, or `None` without an answer.
    pub fn webhook_result(&mut self, now_ms: i64, id: u64, status: Option<u16>) {
        self.now_ms = self.now_ms.max(now_ms);
        let Some(webhook) = self.outbox.webhooks.get_mut(&id) else { return };
        let delivery = &mut webhook.delivery;
        delivery.attempts += 1;
        delivery.delivered |= status.is_some_and(|status| (200..300).contains(&status));
        delivery.last_status = status;
        if webhook.over {
            return;
        }
        let attempts = usize::try_from(delivery.attempts).unwrap_or(usize::MAX);
        let pause = self.options.webhook_pauses.get(attempts - 1).filter(|_| !delivery.delivered).copied();
        let again = match pause {
            Some(pause) => Some(now_ms + millis(pause)),
            None => std::mem::take(&mut webhook.repeat).then_some(now_ms),
        };
        let first_in_line = webhook.number.filter(|_| webhook.in_line && attempts == 1);
        if let Some(at_ms) = again {
            self.schedule(at_ms, Work::Webhook(id));
        } else {
            self.finish_webhook(id);
        }
        if attempts == 1 {
            self.release_replies(id);
        }
        if let Some(number) = first_in_line {
            self.move_line(number, now_ms);
        }
    }

    /// Sends any body as a webhook, signed as usual.
    pub fn send_webhook(&mut self, now_ms: i64, body: &str) {
        let delivery = Delivery::new(String::new(), None, Arc::from(body));
        if let Some(id) = self.push_webhook(delivery, None) {
            self.schedule(now_ms, Work::Webhook(id));
        }
    }

    /// Sets the `system_disabled` flag and sends the webhook of that change.
    pub fn set_system_disabled(&mut self, now_ms: i64, disabled: bool) {
        self.faults.system_disabled = disabled;
        let relayer = self.relayer_view();
        let payload = if disabled {
            let reason = json!({"type": "RpcValidationFailed", "details": crate::api::DISABLED_DETAILS});
            json!({"payload_type": "relayer_disabled", "relayer": relayer, "disable_reason": reason})
        } else {
            json!({"payload_type": "relayer_enabled", "relayer": relayer, "retry_count": 0})
        };
        let body = self.notification(now_ms, "relayer_state_update", payload);
        self.send_webhook(now_ms, &body);
    }

    /// Queues the webhook for a record's present status. Returns its id unless it is lost or held back.
    pub(crate) fn notify(&mut self, number: u64, now_ms: i64) -> Option<u64> {
        let final_status = self.entry(number)?.record.status.is_final();
        let dropped = !self.is_audited() && self.outbox.under_way >= UNDER_WAY_MAX;
        if self.outbox.hook.is_none() || dropped {
            self.notified(number, final_status);
            return None;
        }
        let body = self.record_webhook(number, now_ms)?;
        let record = &self.entry(number)?.record;
        let (record_id, status, ended) = (record.id.clone(), record.status, record.confirmed_at_ms.is_some());
        let faults = &self.faults.webhooks;
        // Webhooks after the first end (a double send) need no holding back.
        if faults.late && !final_status && !ended {
            self.outbox.held.entry(number).or_default().push((status, body));
            return None;
        }
        let (lose, reorder, repeat) = (faults.lose, faults.reorder, faults.repeat);
        let (delay, within, forged, foreign) = (faults.delay, faults.reorder_within, faults.forged, faults.foreign);
        let mut delivery = Delivery::new(record_id.clone(), Some(status), body);
        if self.rng.chance(lose) {
            delivery.lost = true;
            if self.is_audited() {
                self.outbox.next_id += 1;
                let webhook = Webhook { over: true, ..Webhook::new(delivery, None) };
                self.outbox.webhooks.insert(self.outbox.next_id, webhook);
            }
            self.notified(number, final_status);
            return None;
        }
        let reordered = self.rng.chance(reorder);
        let repeat = self.rng.chance(repeat);
        let id = self.push_webhook(delivery, Some(number))?;
        let mut delay_ms = millis(delay);
        if reordered {
            let within = if within.is_zero() { REORDER_WITHIN } else { within };
            delay_ms += (millis(within) as f64 * self.rng.unit()) as i64;
        }
        if let Some(webhook) = self.outbox.webhooks.get_mut(&id) {
            webhook.forged = forged;
            webhook.repeat = repeat;
            webhook.delay_ms = delay_ms;
            webhook.in_line = !reordered;
        }
        if reordered {
            self.schedule(now_ms + delay_ms, Work::Webhook(id));
        } else {
            self.enter_line(number, id, now_ms);
        }
        if self.rng.chance(foreign) {
            let body = self.foreign_webhook(number, now_ms)?;
            self.send_webhook(now_ms, &body);
        }
        for (status, body) in self.outbox.held.remove(&number).unwrap_or_default() {
            let delivery = Delivery::new(record_id.clone(), Some(status), body);
            if let Some(id) = self.push_webhook(delivery, Some(number)) {
                self.enter_line(number, id, now_ms);
            }
        }
        Some(id)
    }

    /// Gives the webhook to the driver.
    pub(crate) fn emit_webhook(&mut self, id: u64) {
        let Some((url, key)) = &self.outbox.hook else { return };
        let Some(webhook) = self.outbox.webhooks.get(&id) else { return };
        let body = &webhook.delivery.body;
        let forged = webhook.forged.then(|| format!("not-{key}"));
        let key = forged.as_ref().unwrap_or(key);
        let signature = match self.options.dialect {
            Dialect::Real => ("x-signature", sign_base64(key, body.as_bytes())),
            Dialect::Spec => ("x-oz-signature", sign_hex(key, body.as_bytes())),
        };
        let headers = vec![signature, ("content-type", "application/json".to_owned())];
        let attempt = webhook.delivery.attempts + 1;
        let (url, body) = (Arc::clone(url), Arc::clone(body));
        self.events.push(Event::Webhook(OutgoingWebhook { id, url, headers, body, attempt }));
    }

    /// The reply leaves when each of these webhooks was tried once.
    pub(crate) fn reply_after(&mut self, ticket: Ticket, reply: Reply, webhooks: Vec<u64>) {
        self.outbox.replies.push((ticket, reply, webhooks));
    }

    fn record_webhook(&mut self, number: u64, now_ms: i64) -> Option<Arc<str>> {
        let id = self.ids.uuid();
        let timestamp = timestamp(self.clock(now_ms));
        let record = &self.entry(number)?.record;
        let body = match self.options.dialect {
            Dialect::Spec => serde_json::to_string(&record.flat_view()),
            Dialect::Real => {
                let mut payload = record.view();
                payload.payload_type = Some("transaction");
                serde_json::to_string(&Notification { id, event: "transaction_update", payload, timestamp })
            }
        };
        Some(Arc::from(body.expect("a view has text keys only")))
    }

    /// What another relayer would say if the record were its own and its balance too low.
    fn foreign_webhook(&mut self, number: u64, now_ms: i64) -> Option<String> {
        let mut record = self.entry(number)?.record.clone();
        record.relayer_id = Arc::from("another-relayer");
        record.from = Arc::from("0x00000000000000000000000000000000000000aa");
        (record.nonce, record.hash, record.signed) = (None, None, None);
        (record.sent_at_ms, record.confirmed_at_ms) = (None, None);
        record.fail(crate::plan::OUT_OF_FUNDS.to_owned());
        let mut payload = serde_json::to_value(record.view()).expect("a view has text keys only");
        payload["payload_type"] = json!("transaction");
        Some(self.notification(now_ms, "transaction_update", payload))
    }

    fn notification(&mut self, now_ms: i64, event: &'static str, payload: serde_json::Value) -> String {
        let (id, timestamp) = (self.ids.uuid(), timestamp(self.clock(now_ms)));
        let notification = Notification { id, event, payload, timestamp };
        serde_json::to_string(&notification).expect("a notification has text keys only")
    }

    fn push_webhook(&mut self, delivery: Delivery, number: Option<u64>) -> Option<u64> {
        self.outbox.hook.as_ref()?;
        self.outbox.next_id += 1;
        self.outbox.under_way += 1;
        let id = self.outbox.next_id;
        self.outbox.webhooks.insert(id, Webhook::new(delivery, number));
        Some(id)
    }

    fn enter_line(&mut self, number: u64, id: u64, now_ms: i64) {
        let line = self.outbox.lines.entry(number).or_default();
        line.push_back(id);
        if line.len() == 1 {
            self.leave_first(number, now_ms);
        }
    }

    fn leave_first(&mut self, number: u64, now_ms: i64) {
        let first = self.outbox.lines.get(&number).and_then(|line| line.front().copied());
        let Some(id) = first else { return };
        let delay_ms = self.outbox.webhooks.get(&id).map_or(0, |webhook| webhook.delay_ms);
        self.schedule(now_ms + delay_ms, Work::Webhook(id));
    }

    fn move_line(&mut self, number: u64, now_ms: i64) {
        let Some(line) = self.outbox.lines.get_mut(&number) else { return };
        line.pop_front();
        if line.is_empty() {
            self.outbox.lines.remove(&number);
        } else {
            self.leave_first(number, now_ms);
        }
    }

    fn finish_webhook(&mut self, id: u64) {
        self.outbox.under_way -= 1;
        let Some(webhook) = self.outbox.webhooks.get_mut(&id) else { return };
        webhook.over = true;
        let (number, status) = (webhook.number, webhook.delivery.status);
        if !self.is_audited() {
            self.outbox.webhooks.remove(&id);
        }
        if let Some(number) = number {
            self.notified(number, status.is_some_and(Status::is_final));
        }
    }

    fn notified(&mut self, number: u64, final_status: bool) {
        if final_status && !self.is_audited() {
            self.events.push(Event::Notified(number));
        }
    }

    fn release_replies(&mut self, id: u64) {
        for (_, _, webhooks) in &mut self.outbox.replies {
            webhooks.retain(|other| *other != id);
        }
        let ready = self.outbox.replies.extract_if(.., |(_, _, webhooks)| webhooks.is_empty());
        self.events.extend(ready.map(|(ticket, reply, _)| Event::Reply { ticket, reply }));
    }
}

impl Outbox {
    pub(crate) fn new(hook: Option<(String, String)>) -> Self {
        Self {
            hook: hook.map(|(url, key)| (Arc::from(url), key)),
            webhooks: BTreeMap::new(),
            next_id: 0,
            under_way: 0,
            lines: HashMap::new(),
            held: HashMap::new(),
            replies: Vec::new(),
        }
    }

    /// A crash loses everything under way.
    pub(crate) fn clear_under_way(&mut self) {
        self.under_way = 0;
        self.lines.clear();
        self.held.clear();
        self.replies.clear();
        for webhook in self.webhooks.values_mut() {
            webhook.over = true;
        }
    }
}

impl Webhook {
    fn new(delivery: Delivery, number: Option<u64>) -> Self {
        Self { delivery, number, delay_ms: 0, in_line: number.is_some(), repeat: false, forged: false, over: false }
    }
}

impl Delivery {
    fn new(record_id: String, status: Option<Status>, body: Arc<str>) -> Self {
        Self { record_id, status, body, attempts: 0, delivered: false, last_status: None, lost: false }
    }
}
