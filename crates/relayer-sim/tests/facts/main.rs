//! The simulated relayer held against what was measured at the real one, version 1.8.0: answers byte for byte where
//! they were captured, refusals, number encodings, order of lists, cadence, webhooks, and the cases in which the
//! relayer's report and the chain disagree.
//!
//! A simulator that only agrees with our own client would hide the client's mistakes; the captured texts here are from
//! the real relayer.

mod answers;
mod cadence;
mod disagreement;
mod errors;
mod misleading;
mod signing;
mod webhooks;

use relayer_sim::{Event, Faults, OutgoingWebhook, RelayerOptions, Reply, SimRelayer, SimRequest, SimResponse};
use serde_json::Value;

/// 2026-11-15T18:30:57.458Z, when the captured transaction was created.
const CREATED: i64 = 1_794_767_457_458;
const API_KEY: &str = "11111111-2222-3333-4444-555555555555";
const WEBHOOK_KEY: &str = "whsec-0123456789abcdef0123456789abcdef";
/// The captured request.
const BODY: &str = r#"{"to":"0x90F79bf6EB2c4f870365E785982E1f101E93b906","value":1000000000000000,"data":"0x","gas_limit":21000,"speed":"fast"}"#;

/// A relayer at a point in time.
struct Fixture {
    relayer: SimRelayer,
    now_ms: i64,
}

impl Fixture {
    /// With the measured times and limits.
    fn new() -> Self {
        Self::with(|_| ())
    }

    fn with(change: impl FnOnce(&mut RelayerOptions)) -> Self {
        let mut options = RelayerOptions::measured("relayer-a").webhook("http://127.0.0.1:19000/hook/a", WEBHOOK_KEY);
        options.api_key = API_KEY.to_owned();
        options.name = Some("Relayer A".to_owned());
        options.network = "devnet".to_owned();
        options.address = Some("0xf39fd6e51aad88f6f4ce6ab8827279cfffb92266".to_owned());
        change(&mut options);
        Self { relayer: SimRelayer::new(options, 42), now_ms: CREATED }
    }

    fn set_faults(&mut self, faults: Faults) {
        self.relayer.set_faults(self.now_ms, faults);
    }

    fn reply(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Reply {
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let request = SimRequest { method, path, query, headers, body: body.as_bytes() };
        self.relayer.handle(self.now_ms, &request)
    }

    fn authorized(&mut self, method: &str, path: &str, body: &str) -> Reply {
        let bearer = format!("Bearer {API_KEY}");
        let headers = [("authorization", bearer.as_str()), ("content-type", "application/json")];
        self.reply(method, path, &headers, body)
    }

    fn get(&mut self, path: &str) -> SimResponse {
        answer(self.authorized("GET", &format!("/api/v1/relayers{path}"), ""))
    }

    fn post_reply(&mut self, body: &str) -> Reply {
        self.authorized("POST", "/api/v1/relayers/relayer-a/transactions", body)
    }

    fn post(&mut self, body: &str) -> SimResponse {
        answer(self.post_reply(body))
    }

    /// Posts a transaction that is accepted, and returns its id.
    fn accept(&mut self, body: &str) -> String {
        let response = self.post(body);
        assert_eq!(response.status, 200, "{}", text(&response));
        json(&response)["data"]["id"].as_str().expect("an id").to_owned()
    }

    fn show(&mut self, id: &str) -> Value {
        json(&self.get(&format!("/relayer-a/transactions/{id}")))["data"].clone()
    }

    /// Lets time pass, delivers every webhook at once with `status`, and returns them with their times.
    fn pass(&mut self, seconds: i64, status: Option<u16>) -> Vec<(i64, OutgoingWebhook)> {
        let until_ms = self.now_ms + seconds * 1000;
        let mut webhooks = Vec::new();
        while let Some(due_ms) = self.relayer.next_due_ms().filter(|due_ms| *due_ms <= until_ms) {
            for event in self.relayer.advance(due_ms) {
                if let Event::Webhook(webhook) = event {
                    self.relayer.webhook_result(due_ms, webhook.id, status);
                    webhooks.push((due_ms, webhook));
                }
            }
        }
        self.now_ms = until_ms;
        webhooks
    }

    fn statuses(&mut self, seconds: i64) -> Vec<String> {
        let webhooks = self.pass(seconds, Some(200));
        webhooks.iter().map(|(_, webhook)| status_of(webhook)).collect()
    }
}

fn answer(reply: Reply) -> SimResponse {
    match reply {
        Reply::Answer { response, .. } => response,
        other => panic!("no answer but {other:?}"),
    }
}

fn text(response: &SimResponse) -> &str {
    std::str::from_utf8(&response.body).expect("bodies are text")
}

fn json(response: &SimResponse) -> Value {
    serde_json::from_slice(&response.body).unwrap_or_else(|_| panic!("not JSON: {}", text(response)))
}

fn payload(webhook: &OutgoingWebhook) -> Value {
    serde_json::from_str::<Value>(&webhook.body).expect("a webhook is JSON")["payload"].clone()
}

fn status_of(webhook: &OutgoingWebhook) -> String {
    payload(webhook)["status"].as_str().unwrap_or_default().to_owned()
}
