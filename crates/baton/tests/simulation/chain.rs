//! The simulated chain: blocks by the world's clock, a pool that is mined in the order of nonces, receipts, replaced blocks,
//! and two nodes that answer the JSON-RPC calls that the product makes.
//!
//! Its blocks are the truth about what was executed. Only blocks with transactions are kept; all others are empty.

use std::collections::BTreeMap;

use alloy_primitives::{Address, B256, U256};
use async_trait::async_trait;
use baton::http::transport::{HttpRequest, Response, Transport, TransportError, TransportFailure};
use relayer_sim::Broadcast;
use reqwest::StatusCode;
use reqwest::header::HeaderMap;
use serde_json::{Value, json};

use super::network::failure;
use super::relayers::Node;
use super::setup::{Fault, Mutation};
use super::world::{BASE, Effect, Rng, SIGNERS, Sim, World, note, signer};

/// Newest blocks that may be replaced; relayers wait for as many confirmations.
pub const REPLACED_MAX: u64 = 2;
/// `CHAIN_FINALITY_BLOCKS` of the processes.
pub const FINALITY: u64 = 4;
pub const CHAIN_ID: u64 = 31_337;
/// Both nodes, as `RPC_URL` has them.
pub const RPC_URL: &str = "http://node0,http://node1";
/// The chain is older than anything in the world.
const GENESIS: i64 = BASE - 1_200_000;

/// A transaction that the chain got.
#[derive(Debug, Clone)]
pub struct ChainTransaction {
    pub nonce: u64,
    pub hash: B256,
    pub to: Option<String>,
    pub value: U256,
    pub data: String,
    pub reverts: bool,
    /// The relayer's record that it was made for.
    pub record: String,
    pub effect: Effect,
    /// The block that it is in.
    pub block: Option<u64>,
}

/// An account: one for each relayer.
struct Account {
    address: Address,
    /// In the order in which the chain got them.
    transactions: Vec<ChainTransaction>,
    /// How many of the relayer's broadcasts are among them.
    known: usize,
}

impl Account {
    /// The number of nonces used up to and including this block.
    fn count(&self, block: u64) -> u64 {
        self.transactions.iter().filter(|known| known.block.is_some_and(|at| at <= block)).count() as u64
    }

    /// Whether a transaction with this nonce is in the pool of a node with this head.
    fn waits(&self, nonce: u64, head: u64) -> bool {
        self.transactions.iter().any(|known| known.nonce == nonce && known.block.is_none_or(|block| block > head))
    }

    fn used(&self, nonce: u64) -> Option<&ChainTransaction> {
        self.transactions.iter().find(|known| known.nonce == nonce && known.block.is_some())
    }

    /// The count with the transactions of the pool; a gap ends it.
    fn count_pending(&self, head: u64) -> u64 {
        (self.count(head)..).find(|nonce| !self.waits(*nonce, head)).unwrap_or(u64::MAX)
    }
}

/// The chain and its nodes.
pub struct EvmChain {
    interval: i64,
    head: u64,
    accounts: Vec<Account>,
    /// The second node is this many blocks behind.
    behind: u64,
    /// The nodes keep the state of this many blocks.
    states: u64,
    /// The last block that was kept, of each time that the blocks after it were replaced.
    replaced_after: Vec<u64>,
    /// Which node does not answer.
    pub away: [bool; 2],
    /// Blocks have no room for the relayers' transactions until then.
    pub full_until: i64,
}

impl EvmChain {
    pub fn new(rng: &mut Rng, shape: Mutation) -> Self {
        let (behind, states) = (rng.pick(&[0, 1, 3]), rng.pick(&[u64::MAX, u64::MAX, 128, 8, 1]));
        // Where nodes keep little state every block is read: fewer of them save steps.
        let slow = states < u64::MAX || shape == Mutation::UsedIsSettled;
        let interval = if slow { 4000 } else { rng.pick(&[1000, 2000, 4000]) };
        let head = ((BASE - GENESIS) / interval) as u64;
        let (accounts, replaced_after) = (Vec::new(), Vec::new());
        Self { interval, head, accounts, behind, states, replaced_after, away: [false; 2], full_until: 0 }
    }

    pub fn add_account(&mut self, address: &str) {
        self.accounts.push(Account { address: address.parse().unwrap(), transactions: Vec::new(), known: 0 });
    }

    fn at(&self, block: u64) -> i64 {
        GENESIS + block as i64 * self.interval
    }

    /// A made-up hash, another one each time that the block is replaced.
    fn block_hash(&self, block: u64) -> B256 {
        let replaced = self.replaced_after.iter().filter(|kept| **kept < block).count();
        B256::from(U256::from(block * 1_000_000 + replaced as u64))
    }

    /// The time of the next block, if it matters to a relayer.
    pub fn next_due(&self) -> Option<i64> {
        let young = |known: &ChainTransaction| known.block.is_some_and(|block| block + REPLACED_MAX > self.head);
        let matters = self.mines() || self.accounts.iter().any(|account| account.transactions.iter().any(young));
        matters.then(|| self.at(self.head + 1))
    }

    /// Whether the next block may have a transaction.
    fn mines(&self) -> bool {
        self.accounts.iter().any(|account| account.waits(account.count(self.head), self.head))
    }

    /// Lets the time pass: makes the blocks that are due.
    fn advance(&mut self, now: i64, rng: &mut Rng) {
        let due = ((now - GENESIS) / self.interval) as u64;
        while self.head < due {
            if !self.mines() {
                self.head = due;
                return;
            }
            self.head += 1;
            if !rng.one_in(4) && self.at(self.head) >= self.full_until {
                self.mine(rng);
            }
        }
    }

    /// Mines what can be mined into the newest block. Of two transactions with the same nonce mostly the later one wins:
    /// it pays more.
    fn mine(&mut self, rng: &mut Rng) {
        let head = self.head;
        for account in &mut self.accounts {
            loop {
                let nonce = account.count(head);
                let waiting = |known: &ChainTransaction| known.nonce == nonce && known.block.is_none();
                let first = account.transactions.iter().position(waiting);
                let last = account.transactions.iter().rposition(waiting);
                let Some(place) = (if rng.one_in(4) { first } else { last }) else { break };
                account.transactions[place].block = Some(head);
            }
        }
    }

    /// Replaces the newest blocks by others, in which the same transactions may be in another order, later, lose their
    /// nonce to another one, or succeed although they reverted before.
    pub fn replace_newest(&mut self, rng: &mut Rng) -> u64 {
        let depth = 1 + rng.below(REPLACED_MAX);
        let kept = self.head - depth;
        self.replaced_after.push(kept);
        let mut put_back = 0;
        for known in self.accounts.iter_mut().flat_map(|account| &mut account.transactions) {
            if known.block.is_some_and(|block| block > kept) {
                known.block = None;
                known.reverts = known.reverts && rng.one_in(2);
                put_back += 1;
            }
        }
        if rng.one_in(2) && self.at(self.head) >= self.full_until {
            self.mine(rng);
        }
        put_back
    }

    /// The hash that used each nonce of an account, as far as no replaced block can change it. Relayers do not wait for a
    /// revert to be settled.
    fn settled(&self, account: usize) -> BTreeMap<u64, String> {
        let settled = self.accounts[account].transactions.iter();
        let is_settled = |known: &ChainTransaction, block| known.reverts || block + REPLACED_MAX <= self.head;
        let settled = settled.filter(|known| known.block.is_some_and(|block| is_settled(known, block)));
        settled.map(|known| (known.nonce, format!("{:#x}", known.hash))).collect()
    }

    pub fn transactions(&self) -> impl Iterator<Item = &ChainTransaction> {
        self.accounts.iter().flat_map(|account| &account.transactions)
    }

    /// The mined transactions that make this call.
    pub fn mined<'a>(&'a self, effect: &'a Effect) -> impl Iterator<Item = &'a ChainTransaction> {
        self.transactions().filter(move |known| known.block.is_some() && known.effect == *effect)
    }

    /// The mined transactions of one account that make this call.
    pub fn mined_by<'a>(&'a self, account: usize, effect: &'a Effect) -> impl Iterator<Item = &'a ChainTransaction> {
        let transactions = self.accounts[account].transactions.iter();
        transactions.filter(move |known| known.block.is_some() && known.effect == *effect)
    }

    /// Whether a record's call was executed, or may yet be as far as the chain is concerned.
    pub fn takes_place(&self, effect: &Effect, record: &str) -> bool {
        self.accounts.iter().any(|account| {
            let own = |known: &&ChainTransaction| known.record == record && known.effect == *effect;
            account.transactions.iter().filter(own).any(|known| match account.used(known.nonce) {
                // Lost to another call, unless that one's block is replaced.
                Some(used) if used.hash != known.hash => {
                    used.block.is_none_or(|block| block + REPLACED_MAX > self.head)
                }
                _ => true,
            })
        })
    }
}

fn read(call: Broadcast) -> ChainTransaction {
    let value: U256 = call.value.parse().unwrap();
    let data = call.data.to_ascii_lowercase();
    let to = call.to.map(|to| to.to_ascii_lowercase());
    ChainTransaction {
        nonce: call.nonce,
        hash: call.hash.parse().unwrap(),
        effect: Effect { to: to.clone().unwrap_or_default(), value: value.to_string(), data: data.clone() },
        to,
        value,
        data,
        reverts: call.reverts,
        record: call.id,
        block: None,
    }
}

impl World {
    /// Hands the relayers' new transactions to the chain, makes the blocks that are due, and tells the relayers.
    pub fn advance_chain(&mut self) {
        let Some(mut chain) = self.evm.take() else { return };
        for node in 0..self.nodes.len() {
            let sent = &self.nodes[node].relayer.broadcasts()[chain.accounts[node].known..];
            let sent: Vec<ChainTransaction> = sent.iter().cloned().map(read).collect();
            for transaction in sent {
                note!(self, "chain: gets nonce {} of r{node}, {:#x}", transaction.nonce, transaction.hash);
                chain.accounts[node].known += 1;
                chain.accounts[node].transactions.push(transaction);
            }
        }
        let before = chain.head;
        chain.advance(self.now, &mut self.rng);
        self.evm = Some(chain);
        if self.evm.as_ref().is_some_and(|chain| chain.head != before) {
            self.tell_relayers();
        }
    }

    /// Opens the account of a relayer, with its transaction from before the world began.
    pub fn open_account(&mut self, node: &Node) {
        let Some(chain) = &mut self.evm else { return };
        chain.add_account(node.relayer.address());
        let account = chain.accounts.len() - 1;
        for record in node.relayer.records() {
            let (Some(nonce), Some(hash)) = (record.nonce, record.hash.clone()) else { continue };
            let (to, data) = (record.to.clone(), record.data.clone().unwrap_or_default());
            let (id, value) = (record.id.clone(), record.value.clone());
            let mut old = read(Broadcast { id, nonce, hash, to, value, data, reverts: false });
            old.block = Some(((BASE - 999_500 - GENESIS) / chain.interval) as u64);
            chain.accounts[account].transactions.push(old);
        }
    }

    /// In the calm every gap is filled.
    pub fn fill_gaps(&mut self) {
        for node in 0..self.nodes.len() {
            while self.evm.is_some() && self.nodes[node].relayer.nonce_gaps().next().is_some() {
                self.fill_gap(node);
            }
        }
    }

    /// Tells the relayers what the chain has used for good.
    pub fn tell_relayers(&mut self) {
        let (now, Some(chain)) = (self.now, &self.evm) else { return };
        for (account, node) in self.nodes.iter_mut().enumerate() {
            let settled = chain.settled(account);
            if node.settled != settled.len() {
                node.settled = settled.len();
                node.relayer.follow_chain(now, settled);
            }
        }
    }

    /// Whether a nonce of a relayer is used.
    pub fn is_used(&self, node: usize, nonce: u64) -> bool {
        self.evm.as_ref().is_some_and(|chain| chain.accounts[node].used(nonce).is_some())
    }

    /// Blocks are replaced.
    pub fn replace_blocks(&mut self) {
        let Some(mut chain) = self.evm.take() else { return };
        let put_back = chain.replace_newest(&mut self.rng);
        if put_back > 0 {
            self.counters.replaced_blocks += 1;
            note!(self, "chain: blocks with {put_back} transactions are replaced");
        }
        self.evm = Some(chain);
    }

    /// What a node answers.
    fn rpc(&self, node: usize, method: &str, params: &Value) -> Value {
        let Some(chain) = &self.evm else { return refused("no such method") };
        let head = chain.head - if node == 1 { chain.behind } else { 0 };
        let number = |text: &str| match text {
            "latest" | "pending" => Some(head),
            text => u64::from_str_radix(text.trim_start_matches("0x"), 16).ok(),
        };
        let param = |place: usize| params[place].as_str().unwrap_or_default();
        let by_hash = || {
            let hash = param(0).parse::<B256>().unwrap();
            let mut found = chain
                .accounts
                .iter()
                .flat_map(|account| account.transactions.iter().map(move |known| (account, known)));
            found.find(|(_, known)| known.hash == hash)
        };
        let result = match method {
            "eth_chainId" => json!(format!("{CHAIN_ID:#x}")),
            "eth_blockNumber" => json!(format!("{head:#x}")),
            "eth_getBlockByNumber" => match number(param(0)).filter(|block| *block <= head) {
                Some(block) => {
                    let whole = params[1] == true;
                    let accounts = chain.accounts.iter().filter(|_| whole);
                    let transactions: Vec<Value> = accounts
                        .flat_map(|account| account.transactions.iter().map(move |known| (account, known)))
                        .filter(|(_, known)| known.block == Some(block))
                        .map(|(account, known)| shown(account, known, head))
                        .collect();
                    let at = chain.at(block) / 1000;
                    let (number, at, hash) = (format!("{block:#x}"), format!("{at:#x}"), chain.block_hash(block));
                    json!({ "number": number, "hash": hash, "timestamp": at, "transactions": transactions })
                }
                None => Value::Null,
            },
            "eth_getTransactionCount" => {
                let address = param(0).parse::<Address>().unwrap();
                let Some(account) = chain.accounts.iter().find(|account| account.address == address) else {
                    return json!({ "result": "0x0" });
                };
                let Some(block) = number(param(1)).filter(|block| *block <= head) else {
                    return refused("header not found");
                };
                if head - block >= chain.states {
                    return refused("missing trie node: the state is not available");
                }
                let count = if param(1) == "pending" { account.count_pending(head) } else { account.count(block) };
                json!(format!("{count:#x}"))
            }
            "eth_getTransactionByHash" => by_hash().map_or(Value::Null, |(account, known)| shown(account, known, head)),
            "eth_getTransactionReceipt" => match by_hash().map(|(_, known)| (known, known.block)) {
                Some((known, Some(block))) if block <= head => {
                    let status = if known.reverts { "0x0" } else { "0x1" };
                    json!({ "blockNumber": format!("{block:#x}"), "status": status })
                }
                _ => Value::Null,
            },
            _ => return refused("no such method"),
        };
        json!({ "result": result })
    }

    /// A contract is asked: the forwarder for a signer's nonce, or any for a trial of a call.
    fn rpc_call(&mut self, call: &Value) -> Value {
        let data = call["data"].as_str().unwrap_or_default();
        let asked = (0..SIGNERS).find(|index| {
            let address = format!("{:x}", signer(*index).address);
            call.get("from").is_none() && data.ends_with(&address)
        });
        match asked {
            Some(signer) => json!({ "result": format!("0x{:064x}", self.executed(signer)) }),
            None if self.has(Fault::Item) && self.rng.one_in(6) => {
                let effect = self.truth.iter().map(|truth| truth.effect.clone()).find(|effect| {
                    call["to"].as_str().is_some_and(|to| to.eq_ignore_ascii_case(&effect.to)) && effect.data == data
                });
                self.item_failures.extend(effect);
                json!({ "error": { "code": 3, "message": "execution reverted", "data": "0x" } })
            }
            None => json!({ "result": "0x" }),
        }
    }
}

fn refused(message: &str) -> Value {
    json!({ "error": { "code": -32_000, "message": message } })
}

/// A transaction as a node with this head shows it.
fn shown(account: &Account, known: &ChainTransaction, head: u64) -> Value {
    json!({
        "hash": format!("{:#x}", known.hash), "nonce": format!("{:#x}", known.nonce),
        "blockNumber": known.block.filter(|block| *block <= head).map(|block| format!("{block:#x}")),
        "from": account.address.to_string(), "to": known.to, "value": format!("{:#x}", known.value), "input": known.data,
    })
}

/// The way to the chain's nodes.
pub struct SimChain {
    pub sim: Sim,
}

#[async_trait]
impl Transport for SimChain {
    async fn send(&self, request: HttpRequest) -> Result<Response, TransportError> {
        self.sim.turn().await;
        let mut world = self.sim.w();
        let node = usize::from(request.url.contains("node1"));
        let away = world.evm.as_ref().is_some_and(|chain| chain.away[node]);
        if (world.chain_away || away) && !world.calm {
            return Err(failure(TransportFailure::NoConnection));
        }
        let body: Value = serde_json::from_slice(&request.body.unwrap_or_default()).unwrap();
        world.counters.rpc_calls += 1;
        let answer = match body["method"].as_str().unwrap_or_default() {
            "eth_call" => world.rpc_call(&body["params"][0]),
            method => world.rpc(node, method, &body["params"]),
        };
        Ok(Response { status: StatusCode::OK, headers: HeaderMap::new(), body: answer.to_string().into() })
    }
}
