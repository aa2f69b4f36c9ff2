//! A real Ethereum chain (`scripts/services start chain`, id 31337), and what tests do on it.
//!
//! All tests share one chain. Each has its own keys, funded on demand, and its own contracts, so tests do not affect each
//! other. A test that kills, freezes or resets its chain starts a private one with
//! [`Server::Chain`](crate::servers::Server::Chain); a test that cuts the connection to it uses a
//! [`Proxy`](crate::proxy::Proxy).

mod contracts;
mod transaction;

use std::time::Duration;

use alloy_primitives::{Address, Bytes, U256, hex};
use serde_json::{Value, json};

use self::transaction::number;
pub use self::{
    contracts::{Contracts, FORWARDER_NAME, ForwardRequest, Forwarder, Token, domain, sign_digest},
    transaction::{Fees, PrivateKeySigner, Receipt, TransactionRequest},
};
use crate::{engine::server, servers::Servers, wait::eventually};

/// Chain id of all test chains.
pub const CHAIN_ID: u64 = 31337;
/// One ether in wei.
pub const ETHER: u128 = 1_000_000_000_000_000_000;
/// For one request: the longest wait for a chain that is down or frozen.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// For a transaction to be mined, on a busy machine.
const MINE_TIMEOUT: Duration = Duration::from_secs(30);

/// Wei per gas that tests pay to a block's producer.
const PRIORITY_FEE: u128 = 1_000_000_000;

/// A client of a chain.
#[derive(Clone)]
pub struct Chain {
    url: String,
    http: reqwest::Client,
}

impl Chain {
    /// The chain that all tests share.
    ///
    /// # Panics
    /// If `BATON_TEST_RPC_URL` is not set.
    pub fn shared() -> Self {
        Self::at(server("BATON_TEST_RPC_URL"))
    }

    /// The chain of a private set of servers.
    ///
    /// # Panics
    /// If there is none among them.
    pub fn of(servers: &Servers) -> Self {
        Self::at(servers.address("BATON_TEST_RPC_URL"))
    }

    /// The chain at this URL.
    pub fn at(url: impl Into<String>) -> Self {
        let url = url.into();
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder().timeout(ANSWER_TIMEOUT).no_proxy().build().expect("a plain client");
        Self { url, http }
    }

    /// URL of its JSON-RPC.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// A new key with 100 ether.
    pub async fn funded_key(&self) -> PrivateKeySigner {
        let key = new_key();
        self.fund(key.address(), U256::from(100 * ETHER)).await;
        key
    }

    /// Sets a balance, in wei.
    pub async fn fund(&self, address: Address, wei: U256) {
        self.ask("anvil_setBalance", json!([address, wei])).await;
    }

    /// Balance in wei.
    pub async fn balance(&self, address: Address) -> U256 {
        let answer = self.ask("eth_getBalance", json!([address, "latest"])).await;
        answer.as_str().and_then(|wei| wei.parse().ok()).expect("a balance")
    }

    /// Number of mined transactions of this sender.
    pub async fn nonce(&self, address: Address) -> u64 {
        self.ask_number("eth_getTransactionCount", json!([address, "latest"])).await
    }

    /// Number of the newest block.
    pub async fn head(&self) -> u64 {
        self.ask_number("eth_blockNumber", json!([])).await
    }

    /// The receipt of a transaction, once it is mined.
    pub async fn receipt(&self, hash: &str) -> Option<Receipt> {
        Receipt::read(&self.ask("eth_getTransactionReceipt", json!([hash])).await)
    }

    /// Whether each transaction is mined at once, which is the default. For private chains only.
    pub async fn set_automine(&self, on: bool) {
        self.ask("evm_setAutomine", json!([on])).await;
    }

    /// Mines one block.
    pub async fn mine(&self) {
        self.ask("evm_mine", json!([])).await;
    }

    /// Fees with which a transaction is mined, also if the base fee doubles.
    pub async fn fees(&self) -> Fees {
        let newest = self.ask("eth_getBlockByNumber", json!(["latest", false])).await;
        let base = newest["baseFeePerGas"].as_str().map_or(0, number);
        Fees { max: u128::from(base) * 2 + PRIORITY_FEE, priority: PRIORITY_FEE }
    }

    /// What a contract answers to this call.
    pub async fn call(&self, request: &TransactionRequest) -> Bytes {
        let answer = self.ask("eth_call", json!([request.to_json(None), "latest"])).await;
        answer.as_str().and_then(|bytes| bytes.parse().ok()).expect("bytes")
    }

    /// Signs with this key, sends, and waits until it is mined, successful or reverted.
    pub async fn send(&self, key: &PrivateKeySigner, request: TransactionRequest) -> Receipt {
        let hash = self.send_unmined(key, request).await;
        eventually(MINE_TIMEOUT, format!("{hash} to be mined"), || self.receipt(&hash)).await
    }

    /// Signs with this key and the account's next nonce, and sends; returns the hash.
    pub async fn send_unmined(&self, key: &PrivateKeySigner, request: TransactionRequest) -> String {
        let (nonce, fees) = (self.nonce(key.address()).await, self.fees().await);
        let gas = match request.gas {
            Some(gas) => gas,
            None => self.ask_number("eth_estimateGas", json!([request.to_json(Some(key.address()))])).await,
        };
        self.send_as_is(key, request.with_nonce(nonce).with_fees(fees.max, fees.priority).with_gas_limit(gas)).await
    }

    /// Signs a complete request with this key and sends it; returns its hash.
    pub async fn send_as_is(&self, key: &PrivateKeySigner, request: TransactionRequest) -> String {
        let hash = self.ask("eth_sendRawTransaction", json!([request.sign(key)])).await;
        hash.as_str().expect("a hash").to_owned()
    }

    /// Asks the node, for requests that have no function here.
    ///
    /// # Panics
    /// If it does not answer, or answers with an error.
    pub async fn ask(&self, method: &str, parameters: Value) -> Value {
        let body = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": parameters });
        let answered = async { self.http.post(&self.url).json(&body).send().await?.json::<Value>().await };
        let mut answer = answered.await.unwrap_or_else(|error| panic!("{method} at {}: {error}", self.url));
        assert!(answer.get("error").is_none(), "{method} at {}: {}", self.url, answer["error"]);
        answer["result"].take()
    }

    async fn ask_number(&self, method: &str, parameters: Value) -> u64 {
        self.ask(method, parameters).await.as_str().map(number).expect("a number")
    }
}

/// A new random key without balance.
///
/// # Panics
/// Never in practice: all but one in 2^128 numbers are keys.
pub fn new_key() -> PrivateKeySigner {
    PrivateKeySigner::from_bytes(&rand::random()).expect("a key")
}

/// A private key as `0x` and 64 digits.
pub fn key_text(key: &PrivateKeySigner) -> String {
    hex::encode_prefixed(key.to_bytes())
}
