//! An OpenZeppelin Relayer for tests: it speaks the real one's API, counts what it accepted, and misbehaves on request.
//!
//! A test holds a [`Relayer`]: it starts and stops it, sets [`Faults`] at run time, and afterwards asks what was
//! [accepted](Relayer::accepted). That audit is the truth about effects: it outlives everything that the relayer
//! itself may forget. Behaviour follows what was measured at the real one, version 1.8.0.
//!
//! `api` is the HTTP side, `progress` moves records to their end, `webhook` tells about it.

mod api;
mod faults;
mod progress;
mod record;
mod webhook;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use serde_json::Value;
use time::OffsetDateTime;

pub use self::{
    faults::{FaultPlan, Faults, Outcome, PostFault, ReadFault, WebhookFaults},
    record::{Record, Status, hex_amount},
    webhook::{Delivery, sign_base64, sign_hex},
};
use self::{progress::Shared, webhook::Hook};
use crate::{ports::free_port, server::Server};

/// Which API it speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    /// The open-source relayer, as measured.
    #[default]
    Real,
    /// The older API of the documents: `POST /transactions`, camelCase, flat webhooks, `X-OZ-Signature` in hex.
    Spec,
}

/// How a relayer is set up. What changes at run time is in [`Faults`].
#[derive(Clone, Debug)]
pub struct RelayerOptions {
    /// Its id in paths and records.
    pub id: String,
    /// The key that callers must present.
    pub api_key: String,
    /// Where to send webhooks, if anywhere, and the key that signs them.
    pub webhook: Option<(String, String)>,
    /// Which API it speaks.
    pub dialect: Dialect,
    /// When a record reaches its statuses.
    pub timing: Timing,
    /// The pauses between two attempts of one webhook; one attempt more than there are pauses.
    pub webhook_pauses: Vec<Duration>,
    /// A fixed port; a free one when absent.
    pub port: Option<u16>,
    /// Where its dice start (hashes, webhook faults).
    pub seed: u64,
    /// How many other relayers are listed before it, to force paging. They take nothing.
    pub decoys: usize,
    /// Requests a second and burst, answered with 429 beyond. The real one's default is 100 and 300.
    pub rate_limit: Option<(f64, f64)>,
}

impl RelayerOptions {
    /// A relayer of this id, on a free port, without webhooks and without a rate limit.
    pub fn new(id: impl Into<String>) -> Self {
        let id = id.into();
        Self {
            api_key: format!("api-key-of-{id}-0123456789abcdef0123456789"),
            id,
            webhook: None,
            dialect: Dialect::Real,
            timing: Timing::default(),
            webhook_pauses: [100, 200, 400, 800].map(Duration::from_millis).to_vec(),
            port: None,
            seed: 1,
            decoys: 0,
            rate_limit: None,
        }
    }

    /// With webhooks to this URL, signed with this key.
    #[must_use]
    pub fn webhook(mut self, url: impl Into<String>, key: impl Into<String>) -> Self {
        self.webhook = Some((url.into(), key.into()));
        self
    }
}

/// When a record reaches its statuses, counted from its acceptance.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Nonce taken and signed.
    pub sent: Duration,
    /// Given to the chain.
    pub submitted: Duration,
    /// In a block; skipped when absent, as the real one mostly does.
    pub mined: Option<Duration>,
    /// The final status, whatever it is.
    pub confirmed: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        let [sent, submitted, confirmed] = [50, 100, 200].map(Duration::from_millis);
        Self { sent, submitted, mined: None, confirmed }
    }
}

/// What a stopped relayer still knows when it starts again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Everything, as with Redis storage: records under way go on.
    Keep,
    /// Nothing, as with the default in-memory storage: known ids are 404. Only the chain's nonce is still what it was.
    Forget,
}

/// One accepted record, as the audit keeps it for good.
#[derive(Clone, Debug)]
pub struct Accepted {
    /// The relayer that took it.
    pub relayer_id: String,
    /// The record's id there.
    pub id: String,
    /// The request's body, byte for byte.
    pub body: String,
    /// The same, parsed.
    pub request: Value,
    /// The amount exactly as it was written in the body, quotes included; empty when it was absent.
    pub value_text: String,
    /// When it was taken.
    pub received_at: OffsetDateTime,
    /// How often it was given to the chain: 0 for a record that was forgotten or failed before, 2 for a double send.
    pub broadcasts: u32,
}

impl Accepted {
    /// A text field of the request, or an empty text.
    pub fn field(&self, name: &str) -> String {
        self.request.get(name).and_then(Value::as_str).unwrap_or_default().to_owned()
    }
}

/// A request that reached the relayer, whatever the answer was.
#[derive(Clone, Debug)]
pub struct Seen {
    /// GET, POST …
    pub method: String,
    /// Without the query.
    pub path: String,
    /// What stood behind the `?`.
    pub query: String,
    /// When its head was read.
    pub at: Instant,
}

/// A handle to a running (or stopped) relayer. Clones share it; the last one that goes takes it down.
#[derive(Clone)]
pub struct Relayer(Arc<Guard>);

struct Guard {
    shared: Arc<Shared>,
    server: Mutex<Option<Server>>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.shared.end_life();
    }
}

impl Relayer {
    /// Starts it.
    ///
    /// # Panics
    /// When its port is taken.
    pub async fn start(options: RelayerOptions) -> Self {
        let port = options.port.unwrap_or_else(free_port);
        let shared = Arc::new(Shared::new(options, port));
        let relayer = Self(Arc::new(Guard { shared, server: Mutex::new(None) }));
        relayer.0.shared.begin_life();
        relayer.listen_again().await;
        relayer
    }

    /// `http://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.0.shared.port)
    }

    /// Its port, the same over restarts.
    pub fn port(&self) -> u16 {
        self.0.shared.port
    }

    /// Its id in paths and records.
    pub fn id(&self) -> &str {
        &self.0.shared.options.id
    }

    /// The key that callers must present.
    pub fn api_key(&self) -> &str {
        &self.0.shared.options.api_key
    }

    /// The address it signs with.
    pub fn address(&self) -> &str {
        &self.0.shared.address
    }

    /// Everything it ever accepted, oldest first. Outlives stops and forgetting.
    pub fn accepted(&self) -> Vec<Accepted> {
        self.0.shared.lock().audit.clone()
    }

    /// Everything accepted that is on the chain or may still get there: all but what certainly failed unsigned.
    pub fn effects(&self) -> Vec<Accepted> {
        let state = self.0.shared.lock();
        let dead = |id: &str| {
            state.entry(id).is_none_or(|entry| entry.record.status == Status::Failed && entry.record.hash.is_none())
        };
        state.audit.iter().filter(|accepted| accepted.broadcasts > 0 || !dead(&accepted.id)).cloned().collect()
    }

    /// How often each key was accepted.
    pub fn count_by(&self, key: impl Fn(&Accepted) -> String) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for accepted in &self.0.shared.lock().audit {
            *counts.entry(key(accepted)).or_default() += 1;
        }
        counts
    }

    /// The records it knows now, oldest first.
    pub fn records(&self) -> Vec<Record> {
        self.0.shared.lock().entries.iter().map(|entry| entry.record.clone()).collect()
    }

    /// One record, if it knows it.
    pub fn record(&self, id: &str) -> Option<Record> {
        self.0.shared.lock().entry(id).map(|entry| entry.record.clone())
    }

    /// Every request so far.
    pub fn requests(&self) -> Vec<Seen> {
        self.0.shared.lock().seen.clone()
    }

    /// How many requests had this method and a path that ends so.
    pub fn count_requests(&self, method: &str, path_end: &str) -> usize {
        let state = self.0.shared.lock();
        state.seen.iter().filter(|seen| seen.method == method && seen.path.ends_with(path_end)).count()
    }

    /// How often each POST fault struck, by [`PostFault::name`].
    pub fn faults_struck(&self) -> BTreeMap<&'static str, usize> {
        self.0.shared.lock().struck.clone()
    }

    /// Every webhook so far with what became of it.
    pub fn deliveries(&self) -> Vec<Delivery> {
        self.0.shared.lock().deliveries.clone()
    }

    /// Replaces all faults; `Faults::default()` makes it behave again.
    pub fn set_faults(&self, faults: Faults) {
        self.0.shared.lock().set_faults(faults);
        self.0.shared.wake.notify_one();
    }

    /// Changes some faults and keeps the others.
    pub fn change_faults(&self, change: impl FnOnce(&mut Faults)) {
        let mut faults = self.0.shared.lock().faults.clone();
        change(&mut faults);
        self.set_faults(faults);
    }

    /// Decides POST faults by the request's JSON; asked before [`Faults`].
    pub fn set_post_rule(&self, rule: impl Fn(&Value) -> Option<PostFault> + Send + Sync + 'static) {
        self.0.shared.lock().post_rule = Some(Arc::new(rule));
    }

    /// Decides a record's end by the request's JSON; asked before [`Faults`].
    pub fn set_outcome_rule(&self, rule: impl Fn(&Value) -> Option<Outcome> + Send + Sync + 'static) {
        self.0.shared.lock().outcome_rule = Some(Arc::new(rule));
    }

    /// The balance that `/status` shows, in wei.
    pub fn set_balance(&self, wei: impl Into<String>) {
        self.0.shared.lock().balance = wei.into();
    }

    /// From now on webhooks go there.
    pub fn set_webhook(&self, url: impl Into<String>, key: impl Into<String>) {
        self.0.shared.lock().hook = Some(Hook { url: url.into(), key: key.into() });
    }

    /// Sends a webhook for an id that nobody was told: the no-op with which the real one fills a nonce gap.
    pub fn send_gap_filler(&self) {
        self.0.shared.send_gap_filler();
    }

    /// Sends any body as a webhook, signed as usual.
    pub fn send_webhook(&self, body: impl Into<String>) {
        self.0.shared.send_webhook(body.into());
    }

    /// Sets the flag and sends the state webhook that goes with it.
    pub fn set_system_disabled(&self, disabled: bool) {
        self.change_faults(|faults| faults.system_disabled = disabled);
        self.0.shared.send_state_webhook(disabled);
    }

    /// Forgets all records while running. The audit and the chain's nonce stay.
    pub fn forget(&self) {
        self.0.shared.lock().forget();
    }

    /// The process dies: connections are cut, nothing listens, records stand still, webhooks on their way are lost.
    pub async fn stop(&self) {
        self.stop_listening().await;
        let tasks = self.0.shared.end_life();
        if let Some(tasks) = tasks {
            tasks.wait().await;
        }
    }

    /// Starts it again on the same port, after [`Relayer::stop`] or in its stead.
    ///
    /// # Panics
    /// When its port is taken.
    pub async fn restart(&self, memory: Memory) {
        self.stop().await;
        if memory == Memory::Forget {
            self.forget();
        }
        self.0.shared.begin_life();
        self.listen_again().await;
    }

    /// Refuses connections (and cuts the open ones), but the process lives: records go on and webhooks are sent.
    pub async fn stop_listening(&self) {
        let server = self.0.server.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(server) = server {
            server.stop().await;
        }
    }

    /// Listens again after [`Relayer::stop_listening`].
    ///
    /// # Panics
    /// When its port is taken.
    pub async fn listen_again(&self) {
        let shared = &self.0.shared;
        let server = Server::start(shared.port, api::router(shared)).await.expect("the relayer's port is free");
        *self.0.server.lock().unwrap_or_else(PoisonError::into_inner) = Some(server);
    }
}
