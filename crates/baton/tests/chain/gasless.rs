//! Gasless transactions on a real chain, with OpenZeppelin's own forwarder.

mod failed_before_submission;
mod nonce_order;
mod onchain;
mod refused;

use alloy_primitives::{Address, Bytes, U256};
use alloy_sol_types::SolCall;
use harness::chain::{CHAIN_ID, Chain, Contracts, FORWARDER_NAME, ForwardRequest, PrivateKeySigner, Token, new_key};
use harness::proxy::Proxy;
use serde_json::{Value, json};

use crate::relay_fixture::{API_KEY, RelayFixture, RelaySetup};

/// Contracts deployed for one test, and a user who has tokens and no ether.
pub struct GaslessFixture {
    pub chain: Chain,
    pub contracts: Contracts,
    pub user: PrivateKeySigner,
    pub friend: Address,
}

impl GaslessFixture {
    pub async fn new() -> Self {
        Self::on(Chain::shared()).await
    }

    pub async fn on(chain: Chain) -> Self {
        let contracts = Contracts::deploy(&chain).await;
        let (user, friend) = (new_key(), new_key().address());
        contracts.give(user.address(), 1000).await;
        Self { chain, contracts, user, friend }
    }

    /// A relay setup for these contracts, with simulated relayers: they touch no chain, so it cannot confirm what they say.
    pub fn setup(&self, relayers: usize) -> RelaySetup {
        RelaySetup::relayers(relayers)
            .env("RPC_URL", self.chain.url())
            .env("CHAIN_DECIDES", "false")
            .env("CHAIN_ID", CHAIN_ID.to_string())
            .env("FORWARDER_ADDRESS", self.contracts.forwarder.to_string())
            .env("FORWARDER_NAME", FORWARDER_NAME)
    }

    /// A link to the chain's JSON-RPC.
    pub async fn link_to_chain(&self) -> Proxy {
        let address = self.chain.url().trim_start_matches("http://").trim_end_matches('/').to_owned();
        Proxy::start(address).await
    }

    /// The user's transfer of `amount` tokens to the friend, to be signed.
    pub async fn transfer(&self, amount: u64, nonce: u64) -> ForwardRequest {
        let call = Token::transferCall { to: self.friend, amount: U256::from(amount) }.abi_encode();
        let request = self.contracts.request(self.user.address(), call).await;
        ForwardRequest { nonce: U256::from(nonce), ..request }
    }

    /// The body of this request, signed by the user.
    pub fn signed(&self, request: &ForwardRequest) -> Value {
        body(request, &self.contracts.sign(request, &self.user))
    }
}

/// A body of `POST /relay/gasless`.
pub fn body(request: &ForwardRequest, signature: &Bytes) -> Value {
    let ForwardRequest { from, to, value, gas, nonce, deadline, data } = request;
    json!({
        "request": {
            "from": from.to_string(), "to": to.to_string(), "value": value.to_string(), "gas": gas.to_string(),
            "nonce": nonce.to_string(), "deadline": deadline.to_string(), "data": data.to_string(),
        },
        "signature": signature.to_string(),
    })
}

/// Posts to `/relay/gasless`; returns status and body.
pub async fn post(relay: &RelayFixture, body: &Value, key: Option<&str>) -> (u16, Value) {
    let mut request = relay.http.post(format!("{}/api/v1/relay/gasless", relay.base)).header("x-api-key", API_KEY);
    if let Some(key) = key {
        request = request.header("idempotency-key", key);
    }
    let response = request.json(body).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

/// The number of stored transactions.
pub async fn stored(relay: &RelayFixture) -> usize {
    let (_, page) = relay.get("/api/v1/relay/transactions").await;
    page["transactions"].as_array().unwrap().len()
}
