//! The contracts that tests deploy: OpenZeppelin's forwarder, and our token that trusts it (`contracts/Token.sol`).
//!
//! The forwarder's request is defined here again, independently of the product's own types, on purpose.

use std::path::PathBuf;

use alloy_primitives::{Address, B256, Bytes, U256};
use alloy_sol_types::{Eip712Domain, SolCall, SolConstructor, SolStruct, eip712_domain, sol};

use super::{CHAIN_ID, Chain, PrivateKeySigner, TransactionRequest};
use crate::engine::server;

sol! {
    /// The typed data that a user signs.
    #[derive(Debug, PartialEq, Eq)]
    struct ForwardRequest {
        address from;
        address to;
        uint256 value;
        uint256 gas;
        uint256 nonce;
        uint48 deadline;
        bytes data;
    }

    /// OpenZeppelin's ERC2771Forwarder.
    #[derive(Debug, PartialEq, Eq)]
    contract Forwarder {
        /// The argument of `execute`: without a nonce, which the contract keeps itself.
        struct ForwardRequestData {
            address from;
            address to;
            uint256 value;
            uint256 gas;
            uint48 deadline;
            bytes data;
            bytes signature;
        }

        constructor(string name);
        function nonces(address owner) external view returns (uint256);
        function verify(ForwardRequestData request) external view returns (bool);
        function execute(ForwardRequestData request) external payable;
    }

    /// `contracts/Token.sol`.
    #[derive(Debug, PartialEq, Eq)]
    contract Token {
        error Refused(uint256 code);

        constructor(address forwarder, address owner, uint256 supply);
        function transfer(address to, uint256 amount) external returns (bool);
        function balanceOf(address owner) external view returns (uint256);
        function lastCaller() external view returns (address);
        function touch() external payable;
        function refuseWithReason(string reason) external;
        function refuseWithError(uint256 code) external;
    }
}

/// The name in the forwarder's domain.
pub const FORWARDER_NAME: &str = "Test Forwarder";
/// The total supply, owned by the owner at first.
const SUPPLY: u128 = 1_000_000 * super::ETHER;

/// A test's own forwarder and token.
pub struct Contracts {
    chain: Chain,
    /// Address of the forwarder.
    pub forwarder: Address,
    /// Address of the token.
    pub token: Address,
    /// Owns all tokens at first, and some ether.
    pub owner: PrivateKeySigner,
}

impl Contracts {
    /// Deploys both contracts.
    ///
    /// # Panics
    /// When the deployment fails, or `BATON_TEST_CONTRACTS` is not set.
    pub async fn deploy(chain: &Chain) -> Self {
        let owner = chain.funded_key().await;
        let name = Forwarder::constructorCall { name: FORWARDER_NAME.to_owned() };
        let forwarder = deploy(chain, &owner, "ERC2771Forwarder", name).await;
        let supply = Token::constructorCall { forwarder, owner: owner.address(), supply: U256::from(SUPPLY) };
        let token = deploy(chain, &owner, "Token", supply).await;
        Self { chain: chain.clone(), forwarder, token, owner }
    }

    /// Transfers tokens from the owner.
    ///
    /// # Panics
    /// When the chain does not answer.
    pub async fn give(&self, to: Address, amount: u64) {
        let call = Token::transferCall { to, amount: U256::from(amount) }.abi_encode();
        let request = TransactionRequest::default().with_to(self.token).with_input(call);
        assert!(self.chain.send(&self.owner, request).await.status(), "the owner has tokens");
    }

    /// Token balance.
    pub async fn tokens(&self, owner: Address) -> U256 {
        self.ask(self.token, Token::balanceOfCall { owner }).await
    }

    /// The last caller of the token's `touch`, as the token sees it.
    pub async fn last_caller(&self) -> Address {
        self.ask(self.token, Token::lastCallerCall {}).await
    }

    /// A signer's next nonce at the forwarder.
    pub async fn forwarder_nonce(&self, owner: Address) -> U256 {
        self.ask(self.forwarder, Forwarder::noncesCall { owner }).await
    }

    /// Whether the forwarder itself would accept this request with this signature.
    pub async fn verify(&self, request: &ForwardRequest, signature: &Bytes) -> bool {
        self.ask(self.forwarder, Forwarder::verifyCall { request: request.clone().signed(signature.clone()) }).await
    }

    /// A request of this signer to call the token, valid for an hour, with the next nonce.
    pub async fn request(&self, from: Address, data: Vec<u8>) -> ForwardRequest {
        let hour = u64::try_from(time::OffsetDateTime::now_utc().unix_timestamp()).expect("after 1970") + 3600;
        ForwardRequest {
            from,
            to: self.token,
            value: U256::ZERO,
            gas: U256::from(100_000),
            nonce: self.forwarder_nonce(from).await,
            deadline: hour.try_into().expect("48 bits"),
            data: data.into(),
        }
    }

    /// Signs a request for this forwarder.
    pub fn sign(&self, request: &ForwardRequest, key: &PrivateKeySigner) -> Bytes {
        sign_digest(request.eip712_signing_hash(&domain(self.forwarder)), key)
    }

    async fn ask<C: SolCall>(&self, to: Address, call: C) -> C::Return {
        let request = TransactionRequest::default().with_to(to).with_input(call.abi_encode());
        let answer = self.chain.call(&request).await;
        C::abi_decode_returns(&answer).expect("the contract answers as declared")
    }
}

impl ForwardRequest {
    /// The argument of `execute`.
    pub fn signed(self, signature: Bytes) -> Forwarder::ForwardRequestData {
        let Self { from, to, value, gas, deadline, data, .. } = self;
        Forwarder::ForwardRequestData { from, to, value, gas, deadline, data, signature }
    }
}

/// The domain of a forwarder on the test chain.
pub fn domain(forwarder: Address) -> Eip712Domain {
    eip712_domain! { name: FORWARDER_NAME, version: "1", chain_id: CHAIN_ID, verifying_contract: forwarder, }
}

/// 65 bytes: r, s and 27 or 28.
pub fn sign_digest(hash: B256, key: &PrivateKeySigner) -> Bytes {
    key.sign(hash).as_bytes().into()
}

async fn deploy(chain: &Chain, owner: &PrivateKeySigner, name: &str, arguments: impl SolConstructor) -> Address {
    let path = PathBuf::from(server("BATON_TEST_CONTRACTS")).join(format!("{name}.json"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let compiled: serde_json::Value = serde_json::from_str(&text).expect("compiled contracts are JSON");
    let code: Bytes = compiled["bytecode"].as_str().and_then(|code| code.parse().ok()).expect("there is bytecode");
    let code = [code.as_ref(), &arguments.abi_encode()].concat();
    let receipt = chain.send(owner, TransactionRequest::default().with_deploy_code(code)).await;
    assert!(receipt.status(), "{name} was not deployed: {receipt:?}");
    receipt.contract_address.expect("a deployment has an address")
}
