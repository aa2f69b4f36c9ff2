//! A real Ethereum chain (`scripts/services start chain`, id 31337), and what tests do on it.
//!
//! All tests share one chain and do not meet on it: each has keys of its own, funded out of nothing, and deploys
//! contracts of its own. One that must kill, freeze or reset its chain starts another with
//! [`Server::Chain`](crate::servers::Server::Chain); one that must lose the way to it puts a
//! [`Proxy`](crate::proxy::Proxy) in between.

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

/// The chain's own id.
pub const CHAIN_ID: u64 = 31337;
/// One ether.
pub const ETHER: u128 = 1_000_000_000_000_000_000;
/// For one question. A chain that is down or frozen does not hold a test up for longer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// For a transaction to be mined, on a busy machine.
const MINE_TIMEOUT: Duration = Duration::from_secs(30);

/// The Ethereum network's types.
pub type Ethereum = alloy_provider::network::Ethereum;
/// What a mined transaction leaves.
pub type Receipt = <Ethereum as Network>::ReceiptResponse;
/// A transaction as the node is asked about it.
pub type TransactionRequest = <Ethereum as Network>::TransactionRequest;

/// A chain that can be asked.
#[derive(Clone)]
pub struct Chain {
    url: String,
    provider: RootProvider,
}

impl Chain {
    /// The one that all tests share.
    ///
    /// # Panics
    /// If nobody has said where it is.
    pub fn shared() -> Self {
        Self::at(server("BATON_TEST_RPC_URL"))
    }

    /// The one of a private set of servers.
    ///
    /// # Panics
    /// If there is none among them.
    pub fn of(servers: &Servers) -> Self {
        Self::at(servers.address("BATON_TEST_RPC_URL"))
    }

    /// The one at that address.
    ///
    /// # Panics
    /// If it is no URL.
    pub fn at(url: impl Into<String>) -> Self {
        let url = url.into();
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder().timeout(ANSWER_TIMEOUT).no_proxy().build().expect("a plain client");
        let parsed = url.parse().expect("the chain's address is a URL");
        let provider = ProviderBuilder::<_, _, Ethereum>::default().connect_reqwest(client, parsed);
        Self { url, provider }
    }

    /// Where it is.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// For questions that have no function here.
    pub fn provider(&self) -> &RootProvider {
        &self.provider
    }

    /// A key with 100 ether.
    pub async fn funded_key(&self) -> PrivateKeySigner {
        let key = new_key();
        self.fund(key.address(), U256::from(100 * ETHER)).await;
        key
    }

    /// Sets a balance.
    pub async fn fund(&self, address: Address, wei: U256) {
        self.ask::<_, serde_json::Value>("anvil_setBalance", (address, wei)).await;
    }

    /// Wei.
    pub async fn balance(&self, address: Address) -> U256 {
        self.provider.get_balance(address).await.expect("the chain answers")
    }

    /// How many transactions of that sender were mined.
    pub async fn nonce(&self, address: Address) -> u64 {
        self.provider.get_transaction_count(address).await.expect("the chain answers")
    }

    /// The receipt of a transaction, once it is mined.
    pub async fn receipt(&self, hash: &str) -> Option<Receipt> {
        let hash: B256 = hash.parse().expect("a hash");
        self.provider.get_transaction_receipt(hash).await.expect("the chain answers")
    }

    /// Whether each transaction is mined as it comes (it is, at the start). Of a private chain only.
    pub async fn set_automine(&self, on: bool) {
        self.ask::<_, serde_json::Value>("evm_setAutomine", (on,)).await;
    }

    /// Mines one block.
    pub async fn mine(&self) {
        self.ask::<_, serde_json::Value>("evm_mine", ()).await;
    }

    /// Signs with that key, sends, and waits until it is mined, well or not.
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

    /// Signs with that key a request that lacks nothing, and sends it; gives its hash.
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

/// A key that the chain has never heard of, without a wei.
///
/// # Panics
/// Never in practice: all but one in 2^128 numbers are keys.
pub fn new_key() -> PrivateKeySigner {
    PrivateKeySigner::from_bytes(&B256::from(rand::random::<[u8; 32]>())).expect("a key")
}

/// `0x` and 64 digits, as programs take a key.
pub fn key_text(key: &PrivateKeySigner) -> String {
    hex::encode_prefixed(key.to_bytes())
}
