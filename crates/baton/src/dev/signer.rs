//! A development relayer's hand on a chain: signs in the order of acceptance, sends, and follows what it sent.
//!
//! One task does all of it, so nonces need no lock. A record is signed once and its bytes are in the journal before they
//! are sent; from then on the same bytes are sent until the chain has them. So whenever the process dies, the chain sees
//! one transaction of a record at most. `sent` sends and follows.

mod sent;

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use alloy_primitives::{Address, U256};
use alloy_provider::network::EthereumWallet;
use alloy_signer_local::PrivateKeySigner;
use pipeline::sqlite::DatabaseError;
use tokio::sync::Notify;

use super::{
    node::{Away, Node, sign},
    record::{Record, now},
    relayer::Relayer,
    signed::{OnChain, Signed},
};

/// Signed and not yet mined. Nodes keep little more of one sender.
const IN_FLIGHT_MAX: usize = 64;
/// How many are signed before a look at what was sent.
const SIGN_BATCH: usize = 16;
/// Between two looks while something is under way: at first, and when nothing has happened for long.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
const LOOK_INTERVAL_MAX: Duration = Duration::from_secs(1);
/// After the node did not answer.
const AWAY_PAUSE: Duration = Duration::from_millis(500);
/// The ids of chains where everybody has the keys that everybody knows.
const PLAYGROUNDS: [u64; 2] = [31337, 1337];

/// Where a development relayer signs, and with what.
pub struct ChainOptions {
    /// The node's JSON-RPC.
    pub rpc: reqwest::Url,
    /// Its own key.
    pub key: PrivateKeySigner,
    /// Whether everybody knows this key. It then signs for local development chains only.
    pub well_known: bool,
}

pub(super) struct Signer {
    pub(super) node: Node,
    pub(super) address: Address,
    wallet: EthereumWallet,
    well_known: bool,
    /// There is something to sign.
    pub(super) wake: Notify,
    /// Whether the node has answered since the start. Until then the relayer is disabled, as the real one is.
    pub(super) ready: AtomicBool,
    /// As `/status` shows it.
    pub(super) next_nonce: AtomicU64,
}

/// Why a round ended before its work was done.
#[derive(Debug, thiserror::Error)]
enum Stopped {
    #[error(transparent)]
    Away(#[from] Away),
    #[error("the journal cannot be written: {0}")]
    Journal(#[from] DatabaseError),
    #[error("a transaction cannot be signed: {0}")]
    Signature(#[from] anyhow::Error),
    #[error("chain {0} is no local development chain, and these keys are known to everybody: give others with --key")]
    WrongChain(u64),
}

/// What the task knows of what it sent, by nonce.
#[derive(Default)]
struct Desk {
    chain_id: Option<u64>,
    in_flight: BTreeMap<u64, InFlight>,
}

struct InFlight {
    number: u64,
    sent_at: Option<Instant>,
    refusals: u32,
    lost_looks: u32,
}

impl Signer {
    pub(super) fn new(options: ChainOptions) -> reqwest::Result<Self> {
        Ok(Self {
            node: Node::new(options.rpc)?,
            address: options.key.address(),
            wallet: EthereumWallet::from(options.key),
            well_known: options.well_known,
            wake: Notify::new(),
            ready: AtomicBool::new(false),
            next_nonce: AtomicU64::new(0),
        })
    }
}

impl Relayer {
    /// Runs until it is dropped. Whatever it is at then goes on at the next start.
    pub(super) async fn follow_the_chain(&self, signer: &Signer) {
        let mut desk = Desk::default();
        let mut complained = false;
        let mut pause = LOOK_INTERVAL;
        loop {
            let before = desk.in_flight.keys().next().copied();
            match self.round(signer, &mut desk).await {
                Ok(()) if std::mem::take(&mut complained) => {
                    tracing::info!(relayer = self.identity.id, "the chain answers again");
                }
                Ok(()) => {}
                Err(stopped) => {
                    if !std::mem::replace(&mut complained, true) {
                        tracing::warn!(relayer = self.identity.id, error = %stopped, "a development relayer waits for its chain");
                    }
                    tokio::time::sleep(AWAY_PAUSE).await;
                    continue;
                }
            }
            let oldest = desk.in_flight.keys().next().copied();
            let moves = oldest != before;
            pause = if moves { LOOK_INTERVAL } else { (pause * 2).min(LOOK_INTERVAL_MAX) };
            let look = async {
                match oldest.is_some() || self.has_unsigned() {
                    true => tokio::time::sleep(pause).await,
                    false => std::future::pending().await,
                }
            };
            tokio::select! {
                () = look => {}
                () = signer.wake.notified() => pause = LOOK_INTERVAL,
            }
        }
    }

    async fn round(&self, signer: &Signer, desk: &mut Desk) -> Result<(), Stopped> {
        let chain_id = match desk.chain_id {
            Some(chain_id) => chain_id,
            None => self.meet(signer, desk).await?,
        };
        self.settle(signer, desk).await?;
        self.send_due(signer, desk).await?;
        self.fill_gap(signer, desk, chain_id).await?;
        for _ in 0..SIGN_BATCH {
            let next = self.book().unsigned.first().copied();
            let Some(number) = next.filter(|_| desk.in_flight.len() < IN_FLIGHT_MAX) else { break };
            self.sign_and_send(signer, desk, chain_id, number).await?;
        }
        Ok(())
    }

    /// The first answer of the node, and what was under way at the last stop.
    async fn meet(&self, signer: &Signer, desk: &mut Desk) -> Result<u64, Stopped> {
        let chain_id = signer.node.chain_id().await?;
        if signer.well_known && !PLAYGROUNDS.contains(&chain_id) {
            return Err(Stopped::WrongChain(chain_id));
        }
        signer.next_nonce.store(signer.node.nonce_pending(signer.address).await?, Ordering::Relaxed);
        let mut strangers = 0;
        for record in self.book().records.values() {
            let Some(OnChain { status, signed: Some(signed), .. }) = &record.chain else { continue };
            if status.is_final() {
                continue;
            }
            // Signed for another chain or with another key, and perhaps sent there: nothing to be done about it here.
            if (signed.chain_id, signed.from) == (chain_id, signer.address) {
                desk.in_flight.insert(signed.nonce, InFlight::new(record.number));
            } else {
                strangers += 1;
            }
        }
        if strangers > 0 {
            tracing::warn!(
                relayer = self.identity.id,
                strangers,
                "transactions signed for another chain or by another key are left alone"
            );
        }
        desk.chain_id = Some(chain_id);
        signer.ready.store(true, Ordering::Relaxed);
        tracing::info!(
            relayer = self.identity.id, address = %signer.address, chain_id, under_way = desk.in_flight.len(),
            "a development relayer signs"
        );
        Ok(chain_id)
    }

    async fn sign_and_send(&self, signer: &Signer, desk: &mut Desk, chain_id: u64, number: u64) -> Result<(), Stopped> {
        let found = self.book().records.get(&number).cloned();
        let Some(record) = found else {
            self.book().unsigned.remove(&number);
            return Ok(());
        };
        let under_way = desk.in_flight.values().filter_map(|sent| self.signed(sent.number));
        let spoken_for = under_way.fold(U256::ZERO, |sum, (_, signed)| sum.saturating_add(signed.cost()));
        let offer = match signer.node.offer(signer.address, &record.request, spoken_for).await? {
            Ok(offer) => offer,
            Err(reason) => {
                self.advance(&record, |chain| chain.failed(reason)).await?;
                self.book().unsigned.remove(&number);
                return Ok(());
            }
        };
        // Ours that are under way come first; else the chain knows, whatever became of it since we last looked.
        let nonce = match desk.in_flight.last_key_value() {
            Some((last, _)) => last + 1,
            None => signer.node.nonce_pending(signer.address).await?,
        };
        let signed = match sign(&signer.wallet, chain_id, nonce, offer).await {
            Ok(signed) => signed,
            Err(error) => {
                let reason = format!("Transaction could not be signed: {error}");
                self.advance(&record, |chain| chain.failed(reason)).await?;
                self.book().unsigned.remove(&number);
                return Ok(());
            }
        };
        self.advance(&record, |chain| chain.signed(signed)).await?;
        self.book().unsigned.remove(&number);
        desk.in_flight.insert(nonce, InFlight::new(number));
        signer.next_nonce.store(nonce + 1, Ordering::Relaxed);
        self.send_one(signer, desk, nonce).await
    }

    /// The journal first, then everybody else.
    async fn advance(&self, record: &Record, change: impl FnOnce(&OnChain) -> OnChain) -> Result<(), Stopped> {
        let Some(chain) = &record.chain else { return Ok(()) };
        let changed = change(chain);
        if changed == *chain {
            return Ok(());
        }
        let mut record = record.clone();
        record.chain = Some(changed);
        self.journal.update(&record).await?;
        self.book().advance(record, now());
        self.wake.notify_one();
        Ok(())
    }

    fn has_unsigned(&self) -> bool {
        !self.book().unsigned.is_empty()
    }

    fn signed(&self, number: u64) -> Option<(Arc<Record>, Signed)> {
        let record = self.book().records.get(&number).cloned()?;
        let signed = record.chain.as_ref()?.signed.clone()?;
        Some((record, signed))
    }
}
