//! Development relayers: `baton dev` needs relayers to hand transactions to, and a laptop has no OpenZeppelin Relayer, no
//! chain and no funds.
//!
//! Each is the simulated relayer on a socket, with a `journal` of its records that survives a restart. **They touch no
//! chain** unless they get one: hashes are made up, nothing is signed, and their names say so. Call data that starts
//! with `0xdeadbeef` then reverts, so that failures can be seen too. With a chain each has its own key and really signs:
//! `signer` (nonces, sending, following), `node` (what the chain's node says, over `rpc`), `raw_transaction` (encoding and
//! signature), `signed` (a transaction's signed form). `on_chain` lets the relayers of tests sign too. `stored` is a record's way between core and journal.
//! `hosts` refuses requests of foreign web pages.

mod hosts;
mod journal;
mod node;
mod on_chain;
mod raw_transaction;
mod rpc;
mod signed;
mod signer;
mod stored;
#[cfg(test)]
mod tests;

use std::{path::PathBuf, sync::Arc, time::Duration};

use self::{journal::Journal, signer::Signer};
pub use self::{on_chain::ChainLink, raw_transaction::Key, signer::ChainOptions};
use crate::{
    Faults, Mode, RelayerOptions, SimRelayer, SimResponse, Timing,
    answers::failure,
    options::MEASURED_WEBHOOK_PAUSES,
    server::{Driver, Relayer, now_ms, ports::free_port},
};
use alloy_primitives::Address;
use anyhow::Context;
use axum::http::request::Parts;

/// Final records that are kept; older ones are 404, as they are at the real relayer after some hours.
const FINAL_RECORDS_MAX: usize = 100_000;

/// The set-up of a development relayer.
pub struct DevRelayerOptions {
    /// Number of the relayer, from 1. Gives its id, its name and its address.
    pub index: usize,
    /// Port on 127.0.0.1; a free one when absent.
    pub port: Option<u16>,
    /// Host names that requests may be for, in lower case; any when empty.
    pub hosts: Vec<String>,
    /// Bearer token that callers must present.
    pub api_key: String,
    /// Target of its webhooks.
    pub webhook_url: String,
    /// The key that signs them.
    pub webhook_key: String,
    /// File for its records.
    pub journal: PathBuf,
    /// Start of its made-up hashes.
    pub seed: u64,
    /// Average time between two statuses without a chain.
    pub step: Duration,
    /// The chain for which it signs; without one it makes everything up.
    pub chain: Option<ChainOptions>,
}

/// A running development relayer.
pub struct DevRelayer {
    relayer: Relayer,
    address: Option<Address>,
}

/// What a development relayer has beside the simulated one.
pub(crate) struct DevParts {
    pub(crate) journal: Journal,
    pub(crate) signer: Option<Signer>,
    hosts: Vec<String>,
}

impl DevRelayer {
    /// Loads the journal, listens, and continues with the records that were under way at the last stop.
    ///
    /// # Errors
    /// When the journal cannot be read or the port is taken.
    pub async fn start(options: DevRelayerOptions) -> anyhow::Result<Self> {
        let DevRelayerOptions { index, port, hosts, api_key, webhook_url, webhook_key, journal, seed, step, chain } =
            options;
        let signer = chain.map(Signer::new).transpose().context("build the chain's client")?;
        let address = signer.as_ref().map(|signer| signer.address);
        let id = format!("dev-relayer-{index}");
        let on_chain = signer.is_some();
        let simulated = RelayerOptions {
            name: Some(format!("Development relayer {index}{}", if on_chain { "" } else { " (no chain)" })),
            network: if on_chain { "dev-chain" } else { "dev-none" }.to_owned(),
            // Known once the chain has answered.
            chain_id: None,
            address: address.map(|address| address.to_string().to_lowercase()),
            api_key,
            timing: Timing::every(step),
            webhook_pauses: MEASURED_WEBHOOK_PAUSES.to_vec(),
            seed,
            records_max: FINAL_RECORDS_MAX,
            reverting_data: Some("0xdeadbeef".to_owned()),
            mode: if on_chain { Mode::OnChain } else { Mode::Journaled },
            ..RelayerOptions::new(&id).webhook(webhook_url, webhook_key)
        };
        let mut driver = Driver::new(simulated);
        let (journal, loaded) =
            Journal::open(&journal, FINAL_RECORDS_MAX).with_context(|| format!("open {}", journal.display()))?;
        let (records, under_way) = {
            let core = &mut driver.lock().core;
            if on_chain {
                // As the real relayer is until its chain has answered once.
                core.set_faults(now_ms(), Faults { system_disabled: true, ..Faults::default() });
            }
            for (stored, notified) in loaded.into_values() {
                if let Some(signer) = &signer {
                    signer.resume(&stored);
                }
                core.import(now_ms(), stored, notified);
            }
            (core.records().count(), core.records().filter(|record| !record.status.is_final()).count())
        };
        driver.dev = Some(DevParts { journal, signer, hosts });
        let driver = Arc::new(driver);
        let relayer = Relayer::with_driver(Arc::clone(&driver), port.unwrap_or_else(free_port));
        relayer.listen().await.with_context(|| format!("listen on 127.0.0.1:{}", relayer.port()))?;
        if on_chain {
            let followed = Arc::clone(&driver);
            driver.spawn(async move { followed.follow_chain().await });
        }
        tracing::info!(
            relayer = id,
            port = relayer.port(),
            records,
            under_way,
            on_chain,
            "development relayer listening: it speaks the OpenZeppelin Relayer's API"
        );
        Ok(Self { relayer, address })
    }

    /// `http://127.0.0.1:PORT`.
    pub fn url(&self) -> String {
        self.relayer.url()
    }

    /// Id in paths and records, `dev-relayer-N`.
    pub fn id(&self) -> &str {
        self.relayer.id()
    }

    /// The address that signs, if it is on a chain.
    pub fn address(&self) -> Option<Address> {
        self.address
    }

    /// Stops listening and ends all tasks. Records under way continue at the next start.
    pub async fn stop(self) {
        self.relayer.stop().await;
    }
}

impl DevParts {
    /// Writes a record that was just stored, and hands it to the signer. A record that a restart would lose is not signed.
    pub(crate) fn stored(&self, core: &SimRelayer, number: u64) {
        let written = core.export(number).map_or(Ok(()), |stored| self.journal.write(&stored));
        let lost = written.is_err();
        log_failure(written);
        if let Some(signer) = self.signer.as_ref().filter(|_| !lost) {
            signer.add(number);
        }
    }

    pub(crate) fn notified(&self, number: u64) {
        log_failure(self.journal.mark_notified(number));
    }

    /// Before anything else: the refusal of a request for another host.
    pub(crate) fn refuse(&self, head: &Parts) -> Option<SimResponse> {
        let refusal = "this development relayer answers for localhost only; `baton dev --host NAME` adds a name";
        (!hosts::is_for_one_of(&self.hosts, head)).then(|| failure(421, refusal))
    }

    /// Before `/status` and `/balance` on a chain: the real relayer asks its node each time, and fails without it.
    pub(crate) async fn ask_balance(&self, driver: &Driver, path: &str) -> Option<SimResponse> {
        let signer = self.signer.as_ref().filter(|_| path.ends_with("/status") || path.ends_with("/balance"))?;
        match signer.node.balance(signer.address).await {
            Ok(balance) => {
                driver.lock().core.set_balance(balance.to_string());
                None
            }
            Err(error) => Some(failure(500, &format!("Provider error: {error}"))),
        }
    }
}

fn log_failure(written: std::io::Result<()>) {
    if let Err(error) = written {
        tracing::error!(%error, "a development relayer's journal cannot be written: a restart loses records");
    }
}
