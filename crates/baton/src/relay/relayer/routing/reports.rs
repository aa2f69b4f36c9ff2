//! What the router learns of its relayers: from their lists and statuses, from the store's counts and from the chain (pure).
//!
//! Sends that a report or a reading cannot have counted yet are counted beside it, and those that it may have counted too:
//! a load that is too high for a moment only moves work elsewhere, one that is too low overloads a relayer.

use std::time::{Duration, Instant};

use alloy_primitives::{Address, U256};

use super::jam::{ChainCounts, NonceWatch, PendingWatch};
use super::network::{ChainId, Network, fits};
use super::relayer_state::{CountedRows, Figures, Health, Relayer};
use super::selection::{Reason, Router};
use crate::relay::relayer::wire::ListedState;
use crate::relay::store::RelayerRows;
use crate::timestamp::Timestamp;

/// What a relayer's list of relayers says of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListReport {
    /// Whether it takes work.
    pub state: ListedState,
    /// Its network's name, if listed.
    pub network: Option<String>,
    /// Its id and address. Another one than before is another relayer, whose network is not known.
    pub identity: String,
    /// The account that it signs with, if listed.
    pub account: Option<Address>,
}

/// What a relayer's status says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatusReport {
    /// Whether it takes work.
    pub state: ListedState,
    /// Its pending count, if reported.
    pub pending: Option<u64>,
    /// Its balance in wei, if reported.
    pub balance: Option<U256>,
    /// The time of its last confirmation, if reported.
    pub last_confirmed: Option<String>,
    /// The nonce that it takes next, if reported.
    pub nonce_next: Option<u64>,
}

/// The figures of a status, and the store's counts, count for at least this long: a status may take half of it.
const FIGURES_LIFETIME_MIN: Duration = Duration::from_secs(30);

impl Router {
    /// Marks the start of a request for the relayer's status; pass the mark to [`Router::reported`]. A submission whose answer
    /// is open may not be in the relayer's count yet.
    pub fn asking(&self, index: usize) -> i64 {
        let relayer = &self.relayers[index];
        relayer.sent - i64::from(relayer.open_requests)
    }

    /// Learns from the list of relayers, which answers quickly.
    pub fn listed(&mut self, index: usize, report: &ListReport, now: Instant) {
        let relayer = &mut self.relayers[index];
        relayer.health = match report.state {
            ListedState::Paused => Health::Down(Reason::Paused),
            ListedState::Disabled => Health::Down(Reason::Disabled),
            ListedState::Active => Health::Up(now),
        };
        relayer.trouble = None;
        relayer.forget_sent();
        let name = report.network.clone();
        let other = relayer.identity.as_ref().is_some_and(|known| *known != report.identity)
            || relayer.network.name.as_ref().is_some_and(|known| Some(known) != name.as_ref());
        relayer.identity = Some(report.identity.clone());
        relayer.account = report.account;
        let chain_id = if other { ChainId::Unasked } else { relayer.network.chain_id };
        self.learn_network(index, Network { name, chain_id });
    }

    /// Learns that the list of relayers was not read, and why, for people. After a timeout the health is unknown, not down.
    /// Returns whether the health or the reason is news.
    pub fn not_listed(&mut self, index: usize, only_slow: bool, why: &str) -> bool {
        let relayer = &mut self.relayers[index];
        let before = (relayer.health, relayer.trouble.take());
        relayer.health = if only_slow { Health::Unknown } else { Health::Down(Reason::Unreachable) };
        relayer.trouble = Some(why.to_owned());
        relayer.forget_sent();
        (relayer.health, &relayer.trouble) != (before.0, &before.1)
    }

    /// Learns from a status, which may have taken long.
    pub fn reported(&mut self, index: usize, mark: i64, report: &StatusReport, now: Instant) {
        let (balance_min, jam_after) = (self.settings.balance_min, self.settings.jam_after);
        let relayer = &mut self.relayers[index];
        // The list decides again at the next look.
        match report.state {
            ListedState::Paused => relayer.health = Health::Down(Reason::Paused),
            ListedState::Disabled => relayer.health = Health::Down(Reason::Disabled),
            ListedState::Active => {}
        }
        relayer.figures_fail = false;
        relayer.figures = Some(Figures {
            at: now,
            pending: report.pending,
            sent_before: mark,
            out_of_funds: report.balance.is_some_and(|balance| balance < balance_min),
            nonce_next: report.nonce_next,
        });
        relayer.forget_sent();
        if let Some(pending) = report.pending {
            relayer.pending_watch.learn(pending, report.last_confirmed.as_deref(), jam_after, now);
        }
    }

    /// Learns that the status was not read. One that is only slow says nothing about the relayer. Returns whether it is news
    /// that the status fails.
    pub fn not_reported(&mut self, index: usize, only_slow: bool) -> bool {
        let failed_before = std::mem::replace(&mut self.relayers[index].figures_fail, !only_slow);
        !only_slow && !failed_before
    }

    /// Whether the relayer has been listed.
    pub fn is_listed(&self, index: usize) -> bool {
        self.relayers[index].identity.is_some()
    }

    /// Whether a relayer that takes work has not been asked for its chain's id.
    pub fn network_is_open(&self) -> bool {
        let open =
            |relayer: &Relayer| matches!(relayer.health, Health::Up(_)) && relayer.network.chain_id == ChainId::Unasked;
        self.relayers.iter().any(open)
    }

    /// Marks the start of a reading of the store; pass the mark to [`Router::counted`]. A claim that is being stored may not
    /// be in the store's count yet.
    pub fn counting(&self, index: usize) -> i64 {
        let relayer = &self.relayers[index];
        relayer.sent - i64::from(relayer.unclaimed)
    }

    /// Learns what the store counts for a relayer, at `at` by the store's clock.
    pub fn counted(&mut self, index: usize, mark: i64, rows: RelayerRows, at: Timestamp, now: Instant) {
        let relayer = &mut self.relayers[index];
        relayer.cap = relayer.cap.after(&rows, at);
        if !self.with_chain {
            relayer.nonce_watch.without_chain(&rows, self.settings.jam_after, at);
        } else if rows.oldest_signed.is_none() {
            relayer.nonce_watch = NonceWatch::default();
        }
        relayer.rows = Some(CountedRows { at: now, rows, sent_before: mark });
    }

    /// Whether a relayer has open rows that are signed, so that the chain's counts tell whether it makes progress.
    pub fn has_signed(&self, index: usize) -> bool {
        self.relayers[index].rows.as_ref().is_some_and(|counted| counted.rows.oldest_signed.is_some())
    }

    /// From now on the chain's counts decide about jams.
    pub fn use_chain(&mut self) {
        self.with_chain = true;
    }

    /// Learns the chain's counts of a relayer's account, at `at` by the store's clock.
    pub fn counted_on_chain(&mut self, index: usize, counts: ChainCounts, at: Timestamp, now: Instant) {
        let relayer = &mut self.relayers[index];
        let Some(CountedRows { rows, .. }) = &relayer.rows else { return };
        let nonce_next = relayer.figures.as_ref().and_then(|figures| figures.nonce_next);
        relayer.nonce_watch.with_chain(rows, nonce_next, counts, self.settings.jam_after, (at, now));
    }

    /// Expects every relayer on the chain of this id.
    pub fn expect_chain_id(&mut self, id: u64) {
        self.expected_chain_id = Some(id);
        self.judge_networks();
    }

    /// Learns a relayer's chain id, or that it does not tell.
    pub fn learn_chain_id(&mut self, index: usize, chain_id: ChainId) {
        let network = Network { chain_id, ..self.relayers[index].network.clone() };
        self.learn_network(index, network);
    }

    /// What is known of a relayer's chain id.
    pub fn chain_id(&self, index: usize) -> ChainId {
        self.relayers[index].network.chain_id
    }

    fn learn_network(&mut self, index: usize, network: Network) {
        if self.relayers[index].network != network {
            self.relayers[index].network = network;
            self.judge_networks();
        }
    }

    fn judge_networks(&mut self) {
        let networks: Vec<Network> = self.relayers.iter().map(|relayer| relayer.network.clone()).collect();
        for (relayer, fit) in self.relayers.iter_mut().zip(fits(&networks, self.expected_chain_id)) {
            relayer.fit = fit;
        }
    }

    /// Drops expired reports and readings.
    pub fn age(&mut self, now: Instant) {
        let lifetime = self.settings.report_lifetime;
        let is_old = |at: Instant, lifetime: Duration| now.saturating_duration_since(at) > lifetime;
        for relayer in &mut self.relayers {
            if let Health::Up(at) = relayer.health
                && is_old(at, lifetime)
            {
                relayer.health = Health::Unknown;
            }
            // A status may take long.
            let figures_lifetime = lifetime.max(FIGURES_LIFETIME_MIN);
            if relayer.figures.as_ref().is_some_and(|figures| is_old(figures.at, figures_lifetime)) {
                relayer.figures = None;
                relayer.pending_watch = PendingWatch::default();
                relayer.forget_sent();
            }
            if relayer.rows.as_ref().is_some_and(|counted| is_old(counted.at, figures_lifetime)) {
                relayer.rows = None;
                relayer.forget_sent();
            }
        }
    }
}
