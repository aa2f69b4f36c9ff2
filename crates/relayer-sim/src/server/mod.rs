//! The simulated relayer on a socket, in real time, with a handle for tests.
//!
//! A test holds a [`Relayer`]: it starts and stops it, sets [`Faults`] at run time, and afterwards reads what was
//! [accepted](Relayer::accepted). That audit is the truth about effects: it outlives everything that the relayer itself
//! may forget. `drive` connects the core with clock, sockets and webhooks; `connections` are sockets that can be cut.

pub mod connections;
mod drive;
pub mod ports;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

use axum::Router;
use serde::Deserialize;
use serde_json::{Value, value::RawValue};
use time::OffsetDateTime;

use self::{connections::CuttableServer, drive::serve, ports::free_port};
use crate::{Audit, Delivery, Faults, Memory, Outcome, PostFault, Record, RelayerOptions, SimRelayer, record::date};

pub(crate) use self::drive::{Driver, now_ms};

/// One accepted POST, with what a test wants to know about it.
#[derive(Clone, Debug)]
pub struct Accepted {
    /// The relayer that accepted it.
    pub relayer_id: String,
    /// The record's id there.
    pub id: String,
    /// The request's body, byte for byte.
    pub body: String,
    /// The same, parsed.
    pub request: Value,
    /// The amount exactly as written in the body, quotes included; empty when it was absent.
    pub value_text: String,
    /// When the record was stored.
    pub received_at: OffsetDateTime,
    /// How often the chain got it: 0 for a record that was forgotten or failed before, 2 for a double send.
    pub broadcasts: u32,
}

impl Accepted {
    /// A text field of the request, or an empty text.
    pub fn field(&self, name: &str) -> String {
        self.request.get(name).and_then(Value::as_str).unwrap_or_default().to_owned()
    }

    fn new(relayer_id: &str, audit: &Audit) -> Self {
        #[derive(Deserialize)]
        struct Amount<'a> {
            #[serde(borrow)]
            value: Option<&'a RawValue>,
        }
        let amount = serde_json::from_slice::<Amount>(&audit.body).ok().and_then(|body| body.value);
        Self {
            relayer_id: relayer_id.to_owned(),
            id: audit.id.clone(),
            value_text: amount.map(|raw| raw.get().to_owned()).unwrap_or_default(),
            request: serde_json::from_slice(&audit.body).unwrap_or_default(),
            body: String::from_utf8_lossy(&audit.body).into_owned(),
            received_at: date(audit.received_at_ms),
            broadcasts: audit.broadcasts,
        }
    }
}

/// A request that reached the relayer, whatever the answer was.
#[derive(Clone, Debug)]
pub struct Seen {
    /// `GET`, `POST` …
    pub method: String,
    /// Without the query.
    pub path: String,
    /// The part behind `?`, or empty.
    pub query: String,
    /// When its head was read.
    pub at: Instant,
}

/// A handle to a running or stopped relayer. Clones share it; the relayer stops when the last one is dropped.
#[derive(Clone)]
pub struct Relayer(Arc<Running>);

struct Running {
    driver: Arc<Driver>,
    port: u16,
    server: Mutex<Option<CuttableServer>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.driver.end_tasks();
    }
}

impl Relayer {
    /// Starts a relayer.
    ///
    /// # Panics
    /// When its port is taken.
    pub async fn start(options: RelayerOptions) -> Self {
        let port = options.port.unwrap_or_else(free_port);
        let relayer = Self::with_driver(Arc::new(Driver::new(options)), port);
        relayer.listen_again().await;
        relayer
    }

    pub(crate) fn with_driver(driver: Arc<Driver>, port: u16) -> Self {
        driver.begin_tasks();
        Self(Arc::new(Running { driver, port, server: Mutex::new(None) }))
    }

    /// `http://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.0.port)
    }

    /// The same over restarts.
    pub fn port(&self) -> u16 {
        self.0.port
    }

    /// Id in paths and records.
    pub fn id(&self) -> &str {
        &self.0.driver.options.id
    }

    /// Bearer token that callers must present.
    pub fn api_key(&self) -> &str {
        &self.0.driver.options.api_key
    }

    /// The address that it signs with.
    pub fn address(&self) -> &str {
        &self.0.driver.address
    }

    /// Everything it ever accepted, oldest first. Outlives stops and forgetting.
    pub fn accepted(&self) -> Vec<Accepted> {
        self.look(|core| core.audit().iter().map(|audit| Accepted::new(self.id(), audit)).collect())
    }

    /// The accepted calls that are on the chain or may still get there: all but the ones that failed unsigned.
    pub fn effects(&self) -> Vec<Accepted> {
        self.look(|core| {
            let effects = core.audit().iter().filter(|audit| core.may_take_effect(audit));
            effects.map(|audit| Accepted::new(self.id(), audit)).collect()
        })
    }

    /// How often each key was accepted.
    pub fn count_by(&self, key: impl Fn(&Accepted) -> String) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for accepted in self.accepted() {
            *counts.entry(key(&accepted)).or_default() += 1;
        }
        counts
    }

    /// The records it knows now, oldest first.
    pub fn records(&self) -> Vec<Record> {
        self.look(|core| core.records().cloned().collect())
    }

    /// One record, if it knows it.
    pub fn record(&self, id: &str) -> Option<Record> {
        self.look(|core| core.record(now_ms(), id).cloned())
    }

    /// Every request so far.
    pub fn requests(&self) -> Vec<Seen> {
        self.0.driver.seen().clone()
    }

    /// The number of requests with this method and a path that ends with `path_end`.
    pub fn count_requests(&self, method: &str, path_end: &str) -> usize {
        let seen = self.0.driver.seen();
        seen.iter().filter(|seen| seen.method == method && seen.path.ends_with(path_end)).count()
    }

    /// How often each POST fault struck, by [`PostFault::name`].
    pub fn faults_struck(&self) -> BTreeMap<&'static str, usize> {
        self.look(|core| core.faults_struck().clone())
    }

    /// Every webhook so far with the result of its attempts.
    pub fn deliveries(&self) -> Vec<Delivery> {
        self.look(|core| core.deliveries().cloned().collect())
    }

    /// Replaces all faults; `Faults::default()` makes the relayer behave again.
    pub fn set_faults(&self, faults: Faults) {
        self.change(|core, now_ms| core.set_faults(now_ms, faults));
    }

    /// Changes some faults and keeps the others.
    pub fn change_faults(&self, change: impl FnOnce(&mut Faults)) {
        self.change(|core, now_ms| {
            let mut faults = core.faults().clone();
            change(&mut faults);
            core.set_faults(now_ms, faults);
        });
    }

    /// Chooses POST faults by the request's JSON, before [`Faults`] does.
    pub fn set_post_rule(&self, rule: impl Fn(&Value) -> Option<PostFault> + Send + Sync + 'static) {
        self.change(|core, _| core.set_post_rule(rule));
    }

    /// Chooses outcomes by the request's JSON, before [`Faults`] does.
    pub fn set_outcome_rule(&self, rule: impl Fn(&Value) -> Option<Outcome> + Send + Sync + 'static) {
        self.change(|core, _| core.set_outcome_rule(rule));
    }

    /// Sets the balance that `/status` shows, in wei.
    pub fn set_balance(&self, wei: impl Into<String>) {
        self.change(|core, _| core.set_balance(wei));
    }

    /// Directs webhooks to this URL from now on, signed with this key.
    pub fn set_webhook(&self, url: impl AsRef<str>, key: impl Into<String>) {
        self.change(|core, _| core.set_webhook(url.as_ref(), key));
    }

    /// Stores a no-op that fills a nonce gap and sends its webhook, for an id that no client ever saw.
    pub fn send_gap_filler(&self) {
        self.change(|core, now_ms| drop(core.add_gap_filler(now_ms, false)));
    }

    /// Sends any body as a webhook, signed as usual.
    pub fn send_webhook(&self, body: impl AsRef<str>) {
        self.change(|core, now_ms| core.send_webhook(now_ms, body.as_ref()));
    }

    /// Sets the `system_disabled` flag and sends the webhook of that change.
    pub fn set_system_disabled(&self, disabled: bool) {
        self.change(|core, now_ms| core.set_system_disabled(now_ms, disabled));
    }

    /// Forgets all records while running. The audit and the chain's nonce stay.
    pub fn forget(&self) {
        self.change(|core, _| core.forget());
    }

    /// Signs with the key of this account from now on, from nonce 0.
    pub fn change_key(&self, address: &str) {
        self.change(|core, _| core.change_key(address));
    }

    /// The process dies: connections are cut, nothing listens, records stand still, webhooks under way are lost.
    pub async fn stop(&self) {
        self.stop_listening().await;
        let tasks = self.0.driver.end_tasks();
        if let Some(tasks) = tasks {
            tasks.wait().await;
        }
    }

    /// Starts it again on the same port, after [`Relayer::stop`] or instead of it.
    ///
    /// # Panics
    /// When its port is taken.
    pub async fn restart(&self, memory: Memory) {
        self.stop().await;
        self.change(|core, now_ms| core.restart(now_ms, memory));
        self.0.driver.begin_tasks();
        self.listen_again().await;
    }

    /// Refuses connections and cuts the open ones, but the process lives: records move and webhooks are sent.
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
        self.listen().await.expect("the relayer's port is free");
    }

    pub(crate) async fn listen(&self) -> std::io::Result<()> {
        let router = Router::new().fallback(serve).with_state(Arc::clone(&self.0.driver));
        let server = CuttableServer::start(self.0.port, router).await?;
        *self.0.server.lock().unwrap_or_else(PoisonError::into_inner) = Some(server);
        Ok(())
    }

    #[cfg(feature = "dev")]
    pub(crate) fn driver(&self) -> &Arc<Driver> {
        &self.0.driver
    }

    /// Fills every known nonce gap with a no-op; returns their number.
    pub fn fill_gaps(&self) -> usize {
        let mut filled = 0;
        self.change(|core, now_ms| filled = core.fill_gaps(now_ms));
        filled
    }

    fn look<T>(&self, look: impl FnOnce(&SimRelayer) -> T) -> T {
        look(&self.0.driver.lock().core)
    }

    fn change(&self, change: impl FnOnce(&mut SimRelayer, i64)) {
        self.0.driver.change(change);
    }
}

/// For a client of this simulator: plain, with the one TLS provider of this workspace installed.
pub(crate) fn http_client() -> reqwest::Client {
    // A second installation is refused, which is fine: the first one stays.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let builder = reqwest::Client::builder().no_proxy().tcp_nodelay(true);
    builder.build().expect("a client with plain settings can be built")
}
