//! Learns in the background what the pool chooses by. Each question has its own pace, so that a slow answer delays no other:
//!
//! - the list of relayers, every health interval, with the short limit of a health check: paused, disabled, network;
//! - each relayer's status, which asks its chain and may take long: pending count, balance, nonce;
//! - the store: what each relayer holds and has ended;
//! - each relayer's chain id, until it is known;
//! - in consumers with a chain, its counts of the relayers' accounts, for those that have signed transactions open.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures::future::{join_all, select};
use metrics::{counter, gauge};
use tokio_util::sync::CancellationToken;
use tracing::{error, info, warn};

use super::client::{RelayerError, describe, public_reason};
use super::pool::Pool;
use super::routing::cap::{ENDED_COUNT_MAX, ENDED_WITHIN, OPEN_WITHIN};
use super::routing::{ChainCounts, ChainId, ListReport, Reason, RelayerView, StatusReport};
use super::wire::{Dialect, Listed};
use crate::relay::chain::Chain;
use crate::relay::chain::account::AccountReader;
use crate::relay::store::RecentSince;

/// Time limit of a status, and of a question for the chain's id: the relayer asks its chain.
const STATUS_TIMEOUT: Duration = Duration::from_secs(15);
/// Longest pause between two readings of the store.
const ROWS_EVERY_MAX: Duration = Duration::from_secs(2);
/// Shortest pause between two readings of the store, while every relayer is full.
const ROWS_EVERY_MIN: Duration = Duration::from_millis(100);
/// Time limit of one reading of the store.
const ROWS_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait for the relayers' chain ids before the first submission. One that has not told by then waits on.
const NETWORKS_WAIT: Duration = Duration::from_secs(2);
/// Longest wait for a relayer's first list before it is asked other questions.
const LISTED_WAIT: Duration = Duration::from_secs(1);
/// Pause between two looks whether a relayer has been listed.
const LISTED_CHECK: Duration = Duration::from_millis(20);
/// Pause before a relayer that does not tell its chain's id is asked again.
const CHAIN_ID_AGAIN: Duration = Duration::from_secs(600);

impl Pool {
    /// Watches every relayer until shutdown. The id that `chain` has is expected of all relayers, unless one is configured.
    pub async fn watch(&self, chain: Option<Arc<Chain>>, shutdown: CancellationToken) {
        let expecting = AtomicBool::new(self.settings.chain_id.is_none() && chain.is_some());
        let lists = async {
            tokio::join!(self.check(), self.count_rows());
            let started = self.clock.instant();
            while expecting.load(Ordering::Acquire) {
                self.clock.sleep(LISTED_CHECK).await;
            }
            while self.router().network_is_open() && self.clock.elapsed(started) < NETWORKS_WAIT {
                self.clock.sleep(LISTED_CHECK).await;
            }
            self.looked.store(true, Ordering::Release);
            loop {
                self.measure();
                self.clock.sleep(self.settings.health_interval).await;
                self.check().await;
            }
        };
        let statuses = join_all((0..self.clients.len()).map(|index| self.watch_status(index)));
        let networks = join_all((0..self.clients.len()).map(|index| self.watch_network(index)));
        let watching = async {
            tokio::join!(lists, statuses, networks, self.watch_rows(), self.learn_expected(chain, &expecting));
        };
        tokio::select! {
            biased;
            () = shutdown.cancelled() => {}
            () = watching => {}
        }
    }

    /// Reads the list of relayers at each of them, once.
    pub async fn check(&self) {
        join_all((0..self.clients.len()).map(|index| self.list(index))).await;
        self.router().age(self.clock.instant());
    }

    async fn list(&self, index: usize) {
        let client = &self.clients[index];
        let mark = self.router().asking(index);
        match client.look(self.settings.health_timeout).await {
            Ok(listed) => {
                let now = self.clock.instant();
                let Listed { id, address, .. } = &listed;
                let identity = format!("{id} {}", address.map(|address| address.to_string()).unwrap_or_default());
                let report = ListReport {
                    state: listed.state,
                    network: listed.network.clone(),
                    identity,
                    account: listed.address,
                };
                self.router().listed(index, &report, now);
                if listed.dialect == Dialect::Flat {
                    let (state, pending) = (listed.state, listed.pending);
                    let status = StatusReport { state, pending, balance: None, last_confirmed: None, nonce_next: None };
                    self.router().reported(index, mark, &status, now);
                }
            }
            Err(error) => {
                self.count_failure(index);
                let why = public_reason(&error);
                if self.router().not_listed(index, error.is_only_slow(), &why) {
                    warn!(
                        action = "relayer_health_failed", relayer = %client.url(), reason = why,
                        "the relayer's health check failed: {why}. In full: {}",
                        describe(&error)
                    );
                }
            }
        }
    }

    async fn watch_status(&self, index: usize) {
        self.until_listed(index).await;
        loop {
            self.ask_status(index).await;
            self.clock.sleep(self.settings.health_interval).await;
        }
    }

    /// Reads one relayer's status, however long that takes up to its own limit.
    async fn ask_status(&self, index: usize) {
        let client = &self.clients[index];
        let mark = self.router().asking(index);
        match client.status(STATUS_TIMEOUT).await {
            Ok(Some(status)) => {
                let report = StatusReport {
                    state: status.state,
                    pending: status.pending,
                    balance: status.balance,
                    last_confirmed: status.last_confirmed,
                    nonce_next: status.nonce,
                };
                self.router().reported(index, mark, &report, self.clock.instant());
            }
            Ok(None) => {}
            Err(error) => {
                self.count_failure(index);
                if self.router().not_reported(index, error.is_only_slow()) {
                    let why = public_reason(&error);
                    warn!(
                        action = "relayer_health_failed", relayer = %client.url(), reason = why,
                        "reading the relayer's status failed: {why}. In full: {}",
                        describe(&error)
                    );
                }
            }
        }
    }

    async fn watch_rows(&self) {
        let every = self.settings.health_interval.min(ROWS_EVERY_MAX);
        loop {
            self.count_rows().await;
            self.clock.sleep(every.min(ROWS_EVERY_MIN)).await;
            let (rest, full) = (self.clock.sleep(every.saturating_sub(ROWS_EVERY_MIN)), self.full.notified());
            select(std::pin::pin!(rest), std::pin::pin!(full)).await;
        }
    }

    /// Reads from the store what each relayer holds, once.
    pub async fn count_rows(&self) {
        let marks: Vec<i64> = (0..self.clients.len()).map(|index| self.router().counting(index)).collect();
        let urls: Vec<_> = self.clients.iter().map(|client| client.url().clone()).collect();
        let at = self.clock.now();
        // Only a cap that adapts goes by the number of ended rows.
        let ended_max = if self.settings.routing.in_flight_max.is_some() { 0 } else { ENDED_COUNT_MAX };
        let recent_since = RecentSince { open_since: at - OPEN_WITHIN, ended_since: at - ENDED_WITHIN, ended_max };
        let counted = self.clock.timeout(ROWS_TIMEOUT, self.store.relayer_rows(&urls, recent_since)).await;
        // Without an answer the last counts stay until they are too old.
        let Ok(Ok(counted)) = counted else { return };
        let now = self.clock.instant();
        for (index, (mark, rows)) in marks.into_iter().zip(counted).enumerate() {
            self.router().counted(index, mark, rows, at, now);
        }
    }

    /// Asks a relayer for its chain's id until it tells, again if it becomes another relayer, and rarely if it does not tell.
    async fn watch_network(&self, index: usize) {
        self.until_listed(index).await;
        let mut told_at = self.clock.instant();
        loop {
            let known = self.router().chain_id(index);
            let ask = match known {
                ChainId::Unasked => true,
                ChainId::NotTold => self.clock.elapsed(told_at) >= CHAIN_ID_AGAIN,
                ChainId::Known(_) => false,
            };
            if ask && let Ok(chain_id) = self.ask_chain_id(index).await {
                self.router().learn_chain_id(index, chain_id);
                told_at = self.clock.instant();
            }
            self.clock.sleep(self.settings.health_interval).await;
        }
    }

    async fn ask_chain_id(&self, index: usize) -> Result<ChainId, RelayerError> {
        self.clients[index].chain_id(STATUS_TIMEOUT).await
    }

    /// Learns the chain's id, if no other is expected.
    async fn learn_expected(&self, chain: Option<Arc<Chain>>, expecting: &AtomicBool) {
        let Some(chain) = chain.filter(|_| self.settings.chain_id.is_none()) else { return };
        loop {
            let id = chain.id().await;
            if let Ok(id) = id {
                self.router().expect_chain_id(id);
            }
            // Without an answer work goes on, to relayers that agree with each other.
            expecting.store(false, Ordering::Release);
            if id.is_ok() {
                return;
            }
            self.clock.sleep(self.settings.health_interval).await;
        }
    }

    /// Compares the nonces of open transactions with the chain's counts until shutdown. For consumers: one process that asks
    /// the chain is enough to keep work away from a jammed relayer.
    pub async fn watch_nonces(&self, reader: &AccountReader, shutdown: CancellationToken) {
        let watching = async {
            loop {
                join_all((0..self.clients.len()).map(|index| self.count_on_chain(reader, index))).await;
                self.clock.sleep(self.settings.health_interval).await;
            }
        };
        tokio::select! {
            biased;
            () = shutdown.cancelled() => {}
            () = watching => {}
        }
    }

    async fn count_on_chain(&self, reader: &AccountReader, index: usize) {
        if !self.router().has_signed(index) {
            return;
        }
        let Some(address) = self.clients[index].address(self.settings.health_timeout).await else { return };
        // Without an answer, what is known of it stays.
        if let Ok((latest, pending)) = reader.counts(address).await {
            let (at, now) = (self.clock.now(), self.clock.instant());
            self.router().counted_on_chain(index, ChainCounts { latest, pending }, at, now);
        }
    }

    /// Waits for the first list, which the other questions need; not for long, since they can read it themselves.
    async fn until_listed(&self, index: usize) {
        let started = self.clock.instant();
        while !self.router().is_listed(index) && self.clock.elapsed(started) < LISTED_WAIT {
            self.clock.sleep(LISTED_CHECK).await;
        }
    }

    fn count_failure(&self, index: usize) {
        let relayer = self.clients[index].url().0.clone();
        counter!("baton_relayer_health_failures_total", "relayer" => relayer).increment(1);
    }

    fn measure(&self) {
        for (index, view) in self.view().into_iter().enumerate() {
            self.announce(index, &view);
            let relayer = view.url.0;
            let flag = |holds: bool| if holds { 1.0 } else { 0.0 };
            gauge!("baton_relayer_load", "relayer" => relayer.clone()).set(view.load as f64);
            gauge!("baton_relayer_cap", "relayer" => relayer.clone()).set(view.cap as f64);
            gauge!("baton_relayer_able", "relayer" => relayer.clone()).set(flag(view.skipped.is_none()));
            for state in ["closed", "open", "half-open"] {
                gauge!("baton_relayer_breaker", "relayer" => relayer.clone(), "state" => state)
                    .set(flag(view.breaker == state));
            }
            gauge!("baton_relayer_jammed", "relayer" => relayer.clone()).set(flag(view.jam.is_some()));
            gauge!("baton_relayer_wrong_network", "relayer" => relayer).set(flag(view.wrong_network.is_some()));
        }
    }

    /// Logs when a relayer becomes jammed, is no longer, or turns out to be on another network or to share its key.
    fn announce(&self, index: usize, view: &RelayerView) {
        let relayer = &view.url;
        let mut announced = self.announced.lock().unwrap_or_else(PoisonError::into_inner);
        let before = &mut announced[index];
        let missing = view.jam.and_then(|cause| cause.missing_nonce());
        // A gauge cannot be taken back: it has no number while no nonce is missing.
        if missing.is_some() || before.jammed {
            gauge!("baton_relayer_missing_nonce", "relayer" => relayer.0.clone())
                .set(missing.map_or(f64::NAN, |nonce| nonce as f64));
        }
        match view.jam {
            Some(cause) if !before.jammed => {
                warn!(
                    action = "relayer_jammed", relayer = %relayer, missing_nonce = missing,
                    "relayer {relayer} gets no new work: {cause}"
                );
            }
            None if before.jammed => {
                info!(action = "relayer_unjammed", relayer = %relayer, "relayer {relayer} makes progress again");
            }
            _ => {}
        }
        before.jammed = view.jam.is_some();
        if let Some(wrong) = &view.wrong_network
            && !before.wrong_network
        {
            error!(action = "relayer_wrong_network", relayer = %relayer, "relayer {relayer} gets no work: {wrong}");
        }
        before.wrong_network = view.skipped == Some(Reason::WrongNetwork);
        if let Some(other) = &view.shares_key_with
            && !before.shared_key
        {
            error!(
                action = "relayer_shared_key", relayer = %relayer,
                "relayer {relayer} gets no work: it signs with the same key as {other}"
            );
        }
        before.shared_key = view.shares_key_with.is_some();
    }
}
