//! A relayer of a test that really signs and sends on a chain, with all of its faults.
//!
//! Its core decides what is signed and what is reported ([`crate::on_chain`](crate::Wallet)). The task here sends what
//! the core gives out and tells it what the chain has mined. It is the network and the node, not the relayer: it goes on
//! while the relayer's process is dead, because what was sent was sent.

use std::{
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use alloy_primitives::{Address, B256, Bytes, TxKind, U256};
use anyhow::Context;

use super::{
    node::{Away, Node, Taken},
    raw_transaction::{Key, Unsigned},
    signed::Fees,
    signer::ChainOptions,
};
use crate::{
    SignatureParts, SignedCall, UnsignedCall, Wallet,
    server::{Driver, Relayer},
};

/// Pause between two looks at what is to be sent, and at what was mined.
const PAUSE: Duration = Duration::from_millis(25);

/// The connection of a relayer to its chain.
#[derive(Debug)]
pub struct ChainLink {
    refused: Mutex<Vec<String>>,
}

impl ChainLink {
    /// What the node refused, other than for a used nonce: nonce and reason.
    pub fn refused(&self) -> Vec<String> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Relayer {
    /// Signs with this key and sends on this chain from now on. Its options must show the key's address.
    ///
    /// # Errors
    /// When the node does not answer, or the address is another one.
    pub async fn join_chain(&self, chain: ChainOptions) -> anyhow::Result<Arc<ChainLink>> {
        let node = Node::new(chain.rpc).context("build the chain's client")?;
        let address = chain.key.address();
        anyhow::ensure!(self.address().parse() == Ok(address), "it shows {} and signs as {address}", self.address());
        let chain_id = node.chain_id().await?;
        let next_nonce = node.nonce_pending(address).await?;
        let wallet = Arc::new(KeyWallet { key: chain.key, chain_id });
        self.driver().change(|core, _| core.join_chain(wallet, next_nonce));
        let link = Arc::new(ChainLink { refused: Mutex::default() });
        let followed = Followed { node, address, link: Arc::clone(&link), driver: Arc::downgrade(self.driver()) };
        tokio::spawn(followed.follow());
        Ok(link)
    }
}

struct KeyWallet {
    key: Key,
    chain_id: u64,
}

impl Wallet for KeyWallet {
    fn sign(&self, call: &UnsignedCall) -> Option<SignedCall> {
        let to = match &call.to {
            Some(to) => TxKind::Call(to.parse().ok()?),
            None => TxKind::Create,
        };
        let signed = self.key.sign(&Unsigned {
            chain_id: self.chain_id,
            nonce: call.nonce,
            gas_limit: call.gas_limit,
            fees: Fees::Eip1559 { max: call.max_fee, priority: call.priority_fee },
            to,
            value: call.value.parse::<U256>().ok()?,
            data: call.data.as_deref().unwrap_or("0x").parse().ok()?,
        });
        let signed = signed.ok()?;
        let (r, s) = (hex::encode(signed.r), hex::encode(signed.s));
        let signature = SignatureParts { r, s, v: signed.v };
        Some(SignedCall { nonce: call.nonce, hash: signed.hash.to_string(), raw: signed.raw.to_vec(), signature })
    }
}

struct Followed {
    node: Node,
    address: Address,
    link: Arc<ChainLink>,
    /// The relayer lives as long as its handles; this task only follows it.
    driver: Weak<Driver>,
}

impl Followed {
    async fn follow(self) {
        let mut outgoing: Vec<SignedCall> = Vec::new();
        loop {
            {
                let Some(driver) = self.driver.upgrade() else { return };
                outgoing.extend(driver.lock().core.take_broadcasts());
            }
            // A node that does not answer is asked again: the bytes are on their way.
            let _ = self.send(&mut outgoing).await;
            let _ = self.report().await;
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn send(&self, outgoing: &mut Vec<SignedCall>) -> Result<(), Away> {
        while let Some(next) = outgoing.first() {
            match self.node.send(&Bytes::from(next.raw.clone())).await? {
                Taken::Yes | Taken::NonceUsed => {}
                Taken::NotNow(reason) | Taken::Refused(reason) => {
                    let refused = format!("nonce {}: {reason}", next.nonce);
                    self.link.refused.lock().unwrap_or_else(PoisonError::into_inner).push(refused);
                }
            }
            outgoing.remove(0);
        }
        Ok(())
    }

    /// Tells the core which of its nonces the chain has used, and for which transaction.
    async fn report(&self) -> Result<(), Away> {
        let Some(driver) = self.driver.upgrade() else { return Ok(()) };
        let unmined = driver.lock().core.unmined();
        if unmined.is_empty() {
            return Ok(());
        }
        let used = self.node.nonce_mined(self.address).await?;
        for (nonce, hashes) in unmined.into_iter().filter(|(nonce, _)| *nonce < used) {
            for hash in hashes {
                let Ok(parsed) = hash.parse::<B256>() else { continue };
                if let Some(mined) = self.node.mined(parsed).await? {
                    driver.change(|core, now_ms| core.report_mined(now_ms, nonce, &hash, mined.succeeded));
                }
            }
        }
        Ok(())
    }
}
