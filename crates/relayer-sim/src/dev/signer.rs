//! A development relayer's signer: signs in the order of acceptance, sends, and follows what it sent.
//!
//! One task does all of it, so nonces need no lock. A record is signed once, and its bytes are in the journal before they
//! are sent; from then on the same bytes are sent until the chain has them. So, whenever the process dies, the chain sees
//! at most one transaction of a record. `sent` sends and follows.

mod sent;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use alloy_primitives::{Address, U256};
use tokio::sync::Notify;

use super::{
    node::{Away, Node},
    raw_transaction::Key,
    signed::Signed,
    stored::StoredRecord,
};
use crate::{Faults, Record, server::Driver};

/// Transactions that are signed and not yet mined. Nodes keep few more of one sender.
const IN_FLIGHT_MAX: usize = 64;
/// Transactions signed in one round, before the next check of sent transactions.
const SIGN_BATCH: usize = 16;
/// Time between two rounds while transactions are under way: at first, and after many rounds without progress.
const ROUND_INTERVAL: Duration = Duration::from_millis(50);
const ROUND_INTERVAL_MAX: Duration = Duration::from_secs(1);
/// Pause after the node did not answer.
const AWAY_PAUSE: Duration = Duration::from_millis(500);
/// Ids of local development chains, on which well-known keys may sign.
const LOCAL_CHAINS: [u64; 2] = [31337, 1337];

/// The chain of a development relayer, and its key there.
pub struct ChainOptions {
    /// The node's JSON-RPC.
    pub rpc: reqwest::Url,
    /// The relayer's own key.
    pub key: Key,
    /// Whether the key is published. It then signs for local development chains only.
    pub well_known: bool,
}

pub(crate) struct Signer {
    pub(super) node: Node,
    pub(super) address: Address,
    key: Key,
    well_known: bool,
    wake: Notify,
    state: Mutex<SignerState>,
}

#[derive(Default)]
struct SignerState {
    /// Numbers of records without a nonce.
    unsigned: BTreeSet<u64>,
    /// By number, for records that are not final.
    signed: BTreeMap<u64, Signed>,
}

/// Why a round ended before its work was done.
#[derive(Debug, thiserror::Error)]
enum Stopped {
    #[error(transparent)]
    Away(#[from] Away),
    #[error("the journal cannot be written: {0}")]
    Journal(#[from] std::io::Error),
    #[error("a transaction cannot be signed: {0}")]
    Signature(#[from] k256::ecdsa::Error),
    #[error("chain {0} is not a local development chain, and these keys are published: give others with --key")]
    WrongChain(u64),
}

/// The task's view of the chain: what is under way, by nonce.
#[derive(Default)]
struct Flight {
    chain_id: Option<u64>,
    in_flight: BTreeMap<u64, InFlight>,
}

struct InFlight {
    number: u64,
    sent_at: Option<Instant>,
    refusals: u32,
    lost_checks: u32,
}

impl Signer {
    pub(super) fn new(options: ChainOptions) -> reqwest::Result<Self> {
        Ok(Self {
            node: Node::new(options.rpc)?,
            address: options.key.address(),
            key: options.key,
            well_known: options.well_known,
            wake: Notify::new(),
            state: Mutex::default(),
        })
    }

    /// A record that was just stored.
    pub(super) fn add(&self, number: u64) {
        self.state().unsigned.insert(number);
        self.wake.notify_one();
    }

    /// A record from the journal.
    pub(super) fn resume(&self, stored: &StoredRecord) {
        if stored.record.status.is_final() {
            return;
        }
        match &stored.signed {
            Some(signed) => drop(self.state().signed.insert(stored.number, signed.clone())),
            None => drop(self.state().unsigned.insert(stored.number)),
        }
    }

    fn state(&self) -> MutexGuard<'_, SignerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Driver {
    /// Signs, sends and follows until it is dropped; what is under way then continues at the next start.
    pub(super) async fn follow_chain(&self) {
        let Some(signer) = self.dev.as_ref().and_then(|dev| dev.signer.as_ref()) else { return };
        let mut flight = Flight::default();
        let mut warned = false;
        let mut pause = ROUND_INTERVAL;
        loop {
            let before = flight.in_flight.keys().next().copied();
            match self.round(signer, &mut flight).await {
                Ok(()) if std::mem::take(&mut warned) => {
                    tracing::info!(relayer = self.options.id, "the chain answers again");
                }
                Ok(()) => {}
                Err(stopped) => {
                    if !std::mem::replace(&mut warned, true) {
                        tracing::warn!(relayer = self.options.id, error = %stopped, "a development relayer waits for its chain");
                    }
                    tokio::time::sleep(AWAY_PAUSE).await;
                    continue;
                }
            }
            let oldest = flight.in_flight.keys().next().copied();
            pause = if oldest == before { (pause * 2).min(ROUND_INTERVAL_MAX) } else { ROUND_INTERVAL };
            let next_round = async {
                match oldest.is_some() || !signer.state().unsigned.is_empty() {
                    true => tokio::time::sleep(pause).await,
                    false => std::future::pending().await,
                }
            };
            tokio::select! {
                () = next_round => {}
                () = signer.wake.notified() => pause = ROUND_INTERVAL,
            }
        }
    }

    async fn round(&self, signer: &Signer, flight: &mut Flight) -> Result<(), Stopped> {
        let chain_id = match flight.chain_id {
            Some(chain_id) => chain_id,
            None => self.meet_chain(signer, flight).await?,
        };
        self.settle(signer, flight).await?;
        self.send_due(signer, flight).await?;
        self.fill_gap(signer, flight, chain_id).await?;
        for _ in 0..SIGN_BATCH {
            let next = signer.state().unsigned.first().copied();
            let Some(number) = next.filter(|_| flight.in_flight.len() < IN_FLIGHT_MAX) else { break };
            self.sign_and_send(signer, flight, chain_id, number).await?;
        }
        Ok(())
    }

    /// The first contact with the node. Takes up the transactions that were under way at the last stop.
    async fn meet_chain(&self, signer: &Signer, flight: &mut Flight) -> Result<u64, Stopped> {
        let chain_id = signer.node.chain_id().await?;
        if signer.well_known && !LOCAL_CHAINS.contains(&chain_id) {
            return Err(Stopped::WrongChain(chain_id));
        }
        let next_nonce = signer.node.nonce_pending(signer.address).await?;
        let mut foreign = 0;
        for (number, signed) in &signer.state().signed {
            // Signed for another chain or with another key, and perhaps sent there: out of reach here.
            if (signed.chain_id, signed.from) == (chain_id, signer.address) {
                flight.in_flight.insert(signed.nonce, InFlight::new(*number));
            } else {
                foreign += 1;
            }
        }
        if foreign > 0 {
            tracing::warn!(
                relayer = self.options.id,
                foreign,
                "transactions signed for another chain or by another key are left alone"
            );
        }
        flight.chain_id = Some(chain_id);
        self.change(|core, now_ms| {
            core.set_next_nonce(next_nonce);
            core.set_chain_id(chain_id);
            core.set_faults(now_ms, Faults::default());
        });
        tracing::info!(
            relayer = self.options.id, address = %signer.address, chain_id, under_way = flight.in_flight.len(),
            "a development relayer signs"
        );
        Ok(chain_id)
    }

    async fn sign_and_send(
        &self,
        signer: &Signer,
        flight: &mut Flight,
        chain_id: u64,
        number: u64,
    ) -> Result<(), Stopped> {
        let found = self.lock().core.record_of(number).cloned();
        let Some(record) = found else {
            signer.state().unsigned.remove(&number);
            return Ok(());
        };
        let reserved = {
            let state = signer.state();
            let under_way = flight.in_flight.values().filter_map(|sent| state.signed.get(&sent.number));
            under_way.fold(U256::ZERO, |sum, signed| sum.saturating_add(signed.cost()))
        };
        let offer = match signer.node.offer(signer.address, &record, reserved).await? {
            Ok(offer) => offer,
            Err(reason) => return self.fail(signer, number, reason),
        };
        // The next nonce follows our own transactions under way; without any, the chain knows it best.
        let nonce = match flight.in_flight.last_key_value() {
            Some((last, _)) => last + 1,
            None => signer.node.nonce_pending(signer.address).await?,
        };
        let signed = match signer.key.sign(&offer.with_nonce(chain_id, nonce)) {
            Ok(signed) => signed,
            Err(error) => return self.fail(signer, number, format!("Transaction could not be signed: {error}")),
        };
        self.update(signer, number, Some(&signed), |record| signed.show_in(record))?;
        {
            let mut state = signer.state();
            state.unsigned.remove(&number);
            state.signed.insert(number, signed);
        }
        flight.in_flight.insert(nonce, InFlight::new(number));
        self.change(|core, _| core.set_next_nonce(nonce + 1));
        self.send_one(signer, flight, nonce).await
    }

    fn fail(&self, signer: &Signer, number: u64, reason: String) -> Result<(), Stopped> {
        self.update(signer, number, None, |record| record.fail(reason))?;
        let mut state = signer.state();
        state.unsigned.remove(&number);
        state.signed.remove(&number);
        Ok(())
    }

    /// Changes a record: in the journal first, then for readers and webhooks.
    fn update(
        &self,
        signer: &Signer,
        number: u64,
        signed: Option<&Signed>,
        change: impl FnOnce(&mut Record),
    ) -> Result<(), Stopped> {
        let Some(dev) = &self.dev else { return Ok(()) };
        let stored = self.lock().core.export(number);
        let Some(mut stored) = stored else { return Ok(()) };
        let before = stored.record.clone();
        change(&mut stored.record);
        if stored.record == before {
            return Ok(());
        }
        stored.signed = signed.cloned().or_else(|| signer.state().signed.get(&number).cloned());
        dev.journal.write(&stored)?;
        self.change(|core, now_ms| core.replace_record(now_ms, number, stored.record));
        Ok(())
    }
}
