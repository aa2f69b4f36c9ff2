//! A relayer whose transactions are real: it signs with a key and its driver sends them to a chain's node.
//!
//! The core stays without sockets. It signs through a [`Wallet`], hands out what is to be sent
//! ([`SimRelayer::take_broadcasts`]), and learns from its driver what was mined ([`SimRelayer::report_mined`]). A record
//! passes `submitted` only when the chain has used its nonce, so a nonce gap jams what is behind it without any further
//! fault. What the relayer reports may still differ from what it sent: that is what [`Outcome`](crate::Outcome) chooses.

use std::{collections::BTreeMap, sync::Arc};

use crate::{
    core::{SimRelayer, Work},
    plan::{Step, millis},
    record::{NO_OP_GAS, SignatureParts, SignedParts, Status},
};

/// Gas limit of a call whose request names none.
const GAS_DEFAULT: u64 = 100_000;
/// Maximum and priority fee of a first signature, in wei per gas. Every further signature of a nonce multiplies them.
const FEES: (u128, u128) = (20_000_000_000, 1_000_000_000);

/// Signs for one account on one chain.
pub trait Wallet: Send + Sync {
    /// The signed transaction; `None` if target, amount or data cannot be encoded.
    fn sign(&self, call: &UnsignedCall) -> Option<SignedCall>;
}

/// Everything that is signed beside the chain's id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnsignedCall {
    /// The account's next nonce, or one that is signed again.
    pub nonce: u64,
    /// Target; none for a contract creation.
    pub to: Option<String>,
    /// Wei in 0x-hex.
    pub value: String,
    /// 0x-hex.
    pub data: Option<String>,
    /// Most gas that it may use.
    pub gas_limit: u64,
    /// Most wei per gas.
    pub max_fee: u128,
    /// Wei per gas for the block's producer.
    pub priority_fee: u128,
}

/// A signed transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedCall {
    /// The nonce that it uses.
    pub nonce: u64,
    /// 0x-hex.
    pub hash: String,
    /// The bytes for `eth_sendRawTransaction`.
    pub raw: Vec<u8>,
    /// As records show it.
    pub signature: SignatureParts,
}

/// What a relayer on a chain has signed, and what it knows to be mined.
#[derive(Clone)]
pub(crate) struct OnChain {
    wallet: Arc<dyn Wallet>,
    /// By nonce.
    signed: BTreeMap<u64, Vec<SignedCall>>,
    /// Nonces of which a transaction was sent and none is known to be mined.
    waiting: BTreeMap<u64, ()>,
    /// By nonce.
    mined: BTreeMap<u64, Mined>,
    outgoing: Vec<SignedCall>,
}

#[derive(Clone)]
struct Mined {
    hash: String,
    succeeded: bool,
}

/// What is signed under a record's nonce.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Signs {
    TheCall,
    ANoOp,
}

impl SimRelayer {
    /// Signs with this wallet from now on; the account's next nonce is `next_nonce`.
    pub fn join_chain(&mut self, wallet: Arc<dyn Wallet>, next_nonce: u64) {
        self.next_nonce = next_nonce;
        let (signed, waiting, mined) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        self.on_chain = Some(OnChain { wallet, signed, waiting, mined, outgoing: Vec::new() });
    }

    /// The transactions to send to the node now, in this order. They were sent even if the relayer crashes meanwhile.
    pub fn take_broadcasts(&mut self) -> Vec<SignedCall> {
        self.on_chain.as_mut().map(|chain| std::mem::take(&mut chain.outgoing)).unwrap_or_default()
    }

    /// The nonces that were sent and are not known to be mined, with the hashes of all transactions signed for each.
    pub fn unmined(&self) -> Vec<(u64, Vec<String>)> {
        let Some(chain) = &self.on_chain else { return Vec::new() };
        let hashes = |nonce| chain.signed.get(nonce).into_iter().flatten().map(|signed| signed.hash.clone()).collect();
        chain.waiting.keys().map(|nonce| (*nonce, hashes(nonce))).collect()
    }

    /// The chain has used this nonce, for the transaction with this hash.
    pub fn report_mined(&mut self, now_ms: i64, nonce: u64, hash: &str, succeeded: bool) {
        let Some(chain) = &mut self.on_chain else { return };
        chain.waiting.remove(&nonce);
        chain.mined.insert(nonce, Mined { hash: hash.to_owned(), succeeded });
        self.release_jammed(now_ms);
    }

    /// Fills every known nonce gap with a no-op, each under a record of its own; returns their number.
    pub fn fill_gaps(&mut self, now_ms: i64) -> usize {
        let gaps = self.nonce_gaps.len();
        for _ in 0..gaps {
            let loses_name = self.rng.chance(0.5);
            self.add_gap_filler(now_ms, loses_name);
        }
        gaps
    }

    /// A nonce was taken and will not be broadcast. With
    /// [`gap_filled_after`](crate::Faults::gap_filled_after) a no-op comes late.
    pub(crate) fn open_gap(&mut self, nonce: u64, now_ms: i64) {
        self.nonce_gaps.insert(nonce);
        if let Some(pause) = self.faults.gap_filled_after {
            self.schedule(now_ms.saturating_add(millis(pause)), Work::FillGap(nonce));
        }
    }

    pub(crate) fn fill_gap(&mut self, now_ms: i64, nonce: u64) {
        if self.nonce_gaps.contains(&nonce) {
            let loses_name = self.rng.chance(0.5);
            self.add_gap_filler_for(now_ms, nonce, loses_name);
        }
    }

    /// Signs what a record's nonce is used for, unless there is no chain.
    pub(crate) fn sign_on_chain(&mut self, place: usize, nonce: u64, what: Signs) -> Option<SignedCall> {
        let chain = self.on_chain.as_mut()?;
        let record = &self.entries[place].record;
        let before = chain.signed.entry(nonce).or_default();
        // A node takes a second transaction of a nonce only for a higher price.
        let factor = 1 + before.len() as u128;
        let no_op = what == Signs::ANoOp;
        let call = UnsignedCall {
            nonce,
            to: if no_op { Some(self.address.to_string()) } else { record.to.clone() },
            value: if no_op { "0x0".to_owned() } else { record.value.clone() },
            data: if no_op { None } else { record.data.clone() },
            gas_limit: if no_op { NO_OP_GAS } else { record.gas_limit.unwrap_or(GAS_DEFAULT) },
            max_fee: FEES.0 * factor,
            priority_fee: FEES.1 * factor,
        };
        let signed = chain.wallet.sign(&call)?;
        before.push(signed.clone());
        Some(signed)
    }

    /// Sends the transaction of a record's nonce. Returns whether the node got the record's own call; without a chain it
    /// always does.
    pub(crate) fn broadcast(&mut self, place: usize, step: &Step) -> Broadcast {
        let Some(nonce) = self.entries[place].record.nonce.filter(|_| self.on_chain.is_some()) else {
            return Broadcast::Sent;
        };
        let plan = &self.entries[place].plan;
        let replaced = plan.iter().any(|(_, step)| matches!(step, Step::ConfirmAsNoOp | Step::Cancel));
        let bumped = plan.iter().any(|(_, step)| *step == Step::Bump);
        if bumped && self.rng.chance(0.5) {
            return Broadcast::Lost;
        }
        let what = if replaced { Signs::ANoOp } else { Signs::TheCall };
        // Signed again in three cases: for the no-op, for a raised price, and for a hash that the relayer fails to store.
        if replaced || *step != Step::Broadcast {
            self.sign_on_chain(place, nonce, what);
        }
        self.send_last_signed(nonce);
        if replaced { Broadcast::NoOpSent } else { Broadcast::Sent }
    }

    pub(crate) fn send_last_signed(&mut self, nonce: u64) {
        let Some(chain) = &mut self.on_chain else { return };
        if let Some(signed) = chain.signed.get(&nonce).and_then(|signed| signed.last()) {
            chain.outgoing.push(signed.clone());
            chain.waiting.insert(nonce, ());
        }
    }

    /// Whether a record's next step waits until the chain has used its nonce.
    pub(crate) fn awaits_chain(&self, nonce: Option<u64>) -> bool {
        let mined = |chain: &OnChain| nonce.is_some_and(|nonce| chain.mined.contains_key(&nonce));
        self.on_chain.as_ref().is_some_and(|chain| !mined(chain))
    }

    /// A final step as the receipt has it: a call that reverted is not confirmed, one that succeeded is not reverted, and
    /// one that was mined before its cancellation is not canceled.
    pub(crate) fn by_receipt(&self, place: usize, step: Step) -> Step {
        let record = &self.entries[place].record;
        let mined = self.on_chain.as_ref().and_then(|chain| chain.mined.get(&record.nonce?));
        let Some(mined) = mined else { return step };
        let is_no_op = self.is_no_op_hash(record.nonce, &mined.hash);
        match step {
            Step::Confirm | Step::Revert if mined.succeeded => Step::Confirm,
            Step::Confirm | Step::Revert => Step::Revert,
            Step::Cancel if !is_no_op && mined.succeeded => Step::Confirm,
            Step::Cancel if !is_no_op => Step::Revert,
            other => other,
        }
    }

    /// The hash under which a record's nonce was mined, for records whose relayer knows it.
    pub(crate) fn mined_hash(&self, nonce: Option<u64>) -> Option<String> {
        self.on_chain.as_ref()?.mined.get(&nonce?).map(|mined| mined.hash.clone())
    }

    /// No-ops are signed last: a call is never signed after them.
    fn is_no_op_hash(&self, nonce: Option<u64>, hash: &str) -> bool {
        let signed = self.on_chain.as_ref().and_then(|chain| chain.signed.get(&nonce?));
        signed.and_then(|signed| signed.last()).is_some_and(|last| last.hash == hash)
    }

    /// Replaces a record's transaction by a no-op with the same nonce, for a cancellation.
    pub(crate) fn broadcast_cancellation(&mut self, place: usize) {
        let Some(nonce) = self.entries[place].record.nonce else { return };
        if self.sign_on_chain(place, nonce, Signs::ANoOp).is_some() {
            self.send_last_signed(nonce);
            self.entries[place].broadcast = true;
        }
    }

    /// A raised price: another hash, of which no webhook tells.
    pub(crate) fn bump(&mut self, place: usize, now_ms: i64) {
        let Some(nonce) = self.entries[place].record.nonce else { return };
        let hash = match self.sign_on_chain(place, nonce, Signs::TheCall) {
            Some(signed) => {
                self.send_last_signed(nonce);
                signed.hash
            }
            None => self.made_up_hash(nonce, "bumped"),
        };
        self.count_broadcast(place);
        self.list_broadcast(place, nonce, hash.clone());
        self.change(place, now_ms, |record| record.hash = Some(hash));
    }

    /// Notes that the node has the record's call, once per nonce.
    pub(crate) fn count_broadcast(&mut self, place: usize) {
        let entry = &mut self.entries[place];
        if !std::mem::replace(&mut entry.broadcast, true)
            && let Some(audit) = entry.audit
        {
            self.audit[audit].broadcasts += 1;
        }
    }

    /// Whether it signs on a chain.
    pub fn is_on_chain(&self) -> bool {
        self.on_chain.is_some()
    }

    /// The nonces that it took and never sent.
    pub fn nonce_gaps(&self) -> impl Iterator<Item = u64> {
        self.nonce_gaps.iter().copied()
    }
}

/// What became of a broadcast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broadcast {
    Sent,
    /// A no-op went out in place of the call.
    NoOpSent,
    /// The node lost it, and the relayer does not know.
    Lost,
}

impl SignedCall {
    /// What a record shows of it.
    pub(crate) fn parts(&self, fees_chosen: bool) -> SignedParts {
        SignedParts { fees: fees_chosen.then_some(FEES), signature: Some(self.signature.clone()) }
    }
}

impl SimRelayer {
    /// Puts a nonce, and a hash and signature, real or made up, into a record.
    pub(crate) fn sign_record(&mut self, place: usize, nonce: u64, now_ms: i64) {
        let clock = self.clock(now_ms);
        let signed = self.sign_on_chain(place, nonce, Signs::TheCall);
        let hash = signed.as_ref().map_or_else(|| self.hash(nonce), |signed| signed.hash.clone());
        self.change(place, now_ms, |record| {
            record.sign(nonce, hash, clock);
            if let Some(signed) = signed {
                record.signed = Some(signed.parts(record.speed.is_some()));
            }
        });
        self.entries[place].broadcast = false;
        debug_assert_eq!(self.entries[place].record.status, Status::Sent);
    }
}
