//! A real Ethereum chain (`scripts/services start chain`, id 31337), and what tests do on it.
//!
//! All tests share one chain. Each has its own keys, funded on demand, and its own contracts, so tests do not affect each
//! other. A test that kills, freezes or resets its chain starts a private one with
//! [`Server::Chain`](crate::servers::Server::Chain); a test that cuts the connection to it uses a
//! [`Proxy`](crate::proxy::Proxy).

mod contracts;

use std::{borrow::Cow, time::Duration};

use alloy_primitives::{Address, B256, U256, hex};
use alloy_provider::{
    Provider, ProviderBuilder, RootProvider,
    network::{EthereumWallet, Network, NetworkTransactionBuilder, TransactionBuilder, eip2718::Encodable2718},
};
pub use alloy_signer_local::PrivateKeySigner;
use serde::{Serialize, de::DeserializeOwned};

pub use self::contracts::{Contracts, FORWARDER_NAME, ForwardRequest, Forwarder, Token, domain, sign_digest};
use crate::{engine::server, servers::Servers, wait::eventually};

/// Chain id of all test chains.
pub const CHAIN_ID: u64 = 31337;
/// One ether in wei.
pub const ETHER: u128 = 1_000_000_000_000_000_000;
/// For one request: the longest wait for a chain that is down or frozen.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// For a transaction to be mined, on a busy machine.
const MINE_TIMEOUT: Duration = Duration::from_secs(30);

/// The Ethereum network's types.
pub type Ethereum = alloy_provider::network::Ethereum;
/// The receipt of a mined transaction.
pub type Receipt = <Ethereum as Network>::ReceiptResponse;
/// A transaction as sent to the node's JSON-RPC.
pub type TransactionRequest = <Ethereum as Network>::TransactionRequest;

/// A client of a chain.
#[derive(Clone)]
pub struct Chain {
    url: String,
    provider: RootProvider,
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
    ///
    /// # Panics
    /// If it is not a URL.
    pub fn at(url: impl Into<String>) -> Self {
        let url = url.into();
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder().timeout(ANSWER_TIMEOUT).no_proxy().build().expect("a plain client");
        let parsed = url.parse().expect("the chain's address is a URL");
        let provider = ProviderBuilder::<_, _, Ethereum>::default().connect_reqwest(client, parsed);
        Self { url, provider }
    }

    /// URL of its JSON-RPC.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// For requests that have no function here.
    pub fn provider(&self) -> &RootProvider {
        &self.provider
    }

    /// A new key with 100 ether.
    pub async fn funded_key(&self) -> PrivateKeySigner {
        let key = new_key();
        self.fund(key.address(), U256::from(100 * ETHER)).await;
        key
    }

    /// Sets a balance, in wei.
    pub async fn fund(&self, address: Address, wei: U256) {
        self.ask::<_, serde_json::Value>("anvil_setBalance", (address, wei)).await;
    }

    /// Balance in wei.
    pub async fn balance(&self, address: Address) -> U256 {
        self.provider.get_balance(address).await.expect("the chain answers")
    }

    /// Number of mined transactions of this sender.
    pub async fn nonce(&self, address: Address) -> u64 {
        self.provider.get_transaction_count(address).await.expect("the chain answers")
    }

    /// The receipt of a transaction, once it is mined.
    pub async fn receipt(&self, hash: &str) -> Option<Receipt> {
        let hash: B256 = hash.parse().expect("a hash");
        self.provider.get_transaction_receipt(hash).await.expect("the chain answers")
    }

    /// Whether each transaction is mined at once, which is the default. For private chains only.
    pub async fn set_automine(&self, on: bool) {
        self.ask::<_, serde_json::Value>("evm_setAutomine", (on,)).await;
    }

    /// Mines one block.
    pub async fn mine(&self) {
        self.ask::<_, serde_json::Value>("evm_mine", ()).await;
    }

    /// Signs with this key, sends, and waits until it is mined, successful or reverted.
    pub async fn send(&self, key: &PrivateKeySigner, request: TransactionRequest) -> Receipt {
        let fees = self.provider.estimate_eip1559_fees().await.expect("the chain answers");
        let request = request
            .with_from(key.address())
            .with_chain_id(CHAIN_ID)
            .with_nonce(self.nonce(key.address()).await)
            .with_max_fee_per_gas(fees.max_fee_per_gas)
            .with_max_priority_fee_per_gas(fees.max_priority_fee_per_gas);
        let gas = match request.gas {
            Some(gas) => gas,
            None => self.provider.estimate_gas(request.clone()).await.expect("the call works"),
        };
        let hash = self.send_as_is(key, request.with_gas_limit(gas)).await;
        eventually(MINE_TIMEOUT, format!("{hash} to be mined"), || self.receipt(&hash)).await
    }

    /// Signs a complete request with this key and sends it; returns its hash.
    pub async fn send_as_is(&self, key: &PrivateKeySigner, request: TransactionRequest) -> String {
        let wallet = EthereumWallet::from(key.clone());
        let signed = request.build(&wallet).await.expect("it can be signed");
        let sent = self.provider.send_raw_transaction(&signed.encoded_2718()).await.expect("the chain takes it");
        hex::encode_prefixed(sent.tx_hash())
    }

    async fn ask<P, R>(&self, method: &'static str, parameters: P) -> R
    where
        P: Serialize + Clone + std::fmt::Debug + Send + Sync + Unpin + 'static,
        R: DeserializeOwned + std::fmt::Debug + Send + Sync + Unpin + 'static,
    {
        let answer = self.provider.raw_request(Cow::Borrowed(method), parameters).await;
        answer.unwrap_or_else(|error| panic!("{method} at {}: {error}", self.url))
    }
}

/// A new random key without balance.
///
/// # Panics
/// Never in practice: all but one in 2^128 numbers are keys.
pub fn new_key() -> PrivateKeySigner {
    PrivateKeySigner::from_bytes(&B256::from(rand::random::<[u8; 32]>())).expect("a key")
}

/// A private key as `0x` and 64 digits.
pub fn key_text(key: &PrivateKeySigner) -> String {
    hex::encode_prefixed(key.to_bytes())
}
