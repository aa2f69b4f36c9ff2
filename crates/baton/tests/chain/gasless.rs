//! Gasless transactions on a real chain, with OpenZeppelin's own forwarder.

mod failed_before_submission;
mod nonce_order;
mod onchain;
mod refused;

use alloy_primitives::{Address, Bytes, U256};
use alloy_sol_types::SolCall;
use harness::chain::{CHAIN_ID, Chain, Contracts, FORWARDER_NAME, ForwardRequest, PrivateKeySigner, Token, new_key};
use serde_json::{Value, json};

use crate::relay_fixture::{API_KEY, Plan, Stand};

/// A chain with contracts of this test's own, and a user who has tokens and not a wei.
pub struct Ground {
    pub chain: Chain,
    pub contracts: Contracts,
    pub user: PrivateKeySigner,
    pub friend: Address,
}

impl Ground {
    pub async fn new() -> Self {
        Self::on(Chain::shared()).await
    }

    pub async fn on(chain: Chain) -> Self {
        let contracts = Contracts::deploy(&chain).await;
        let (user, friend) = (new_key(), new_key().address());
        contracts.give(user.address(), 1000).await;
        Self { chain, contracts, user, friend }
    }

    /// The product set up for this ground.
    pub fn plan(&self, relayers: usize) -> Plan {
        Plan::relayers(relayers)
            .env("RPC_URL", self.chain.url())
            .env("CHAIN_ID", CHAIN_ID.to_string())
            .env("FORWARDER_ADDRESS", self.contracts.forwarder.to_string())
            .env("FORWARDER_NAME", FORWARDER_NAME)
    }

    /// What the user signs to give the friend so many tokens.
    pub async fn transfer(&self, amount: u64, nonce: u64) -> ForwardRequest {
        let call = Token::transferCall { to: self.friend, amount: U256::from(amount) }.abi_encode();
        let request = self.contracts.request(self.user.address(), call).await;
        ForwardRequest { nonce: U256::from(nonce), ..request }
    }

    /// The body of a request that the user signed.
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

/// Posts to `/relay/gasless` and gives status and body.
pub async fn post(stand: &Stand, body: &Value, key: Option<&str>) -> (u16, Value) {
    let mut request = stand.http.post(format!("{}/api/v1/relay/gasless", stand.base)).header("x-api-key", API_KEY);
    if let Some(key) = key {
        request = request.header("idempotency-key", key);
    }
    let response = request.json(body).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

/// How many transactions the product knows.
pub async fn known(stand: &Stand) -> usize {
    let (_, page) = stand.get("/api/v1/relay/transactions").await;
    page["transactions"].as_array().unwrap().len()
}
