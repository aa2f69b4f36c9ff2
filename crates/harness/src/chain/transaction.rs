//! A key, a transaction that it signs (EIP-1559), and the receipt that the chain gives for it.
//!
//! Encoded here, these few shapes spare every build the fifty crates of an Ethereum client; the node checks each byte and
//! signature. It is written apart from the development relayers' own signing, on purpose.

use alloy_primitives::{Address, B256, Bytes, Signature, TxKind, U256, keccak256};
use alloy_rlp::{EMPTY_LIST_CODE, Encodable, Header};
use k256::ecdsa::SigningKey;
use serde_json::{Value, json};

use super::CHAIN_ID;

/// Type byte of an EIP-1559 transaction.
const EIP1559: u8 = 2;

/// A private key.
#[derive(Clone)]
pub struct PrivateKeySigner(SigningKey);

impl PrivateKeySigner {
    /// The key with these bytes; `None` if no key has them.
    pub fn from_bytes(bytes: &[u8; 32]) -> Option<Self> {
        SigningKey::from_slice(bytes).ok().map(Self)
    }

    /// Its bytes.
    pub fn to_bytes(&self) -> B256 {
        B256::from_slice(&self.0.to_bytes())
    }

    /// The address that it signs for.
    pub fn address(&self) -> Address {
        Address::from_private_key(&self.0)
    }

    /// Signs a hash.
    ///
    /// # Panics
    /// Never in practice: any hash can be signed.
    pub fn sign(&self, hash: B256) -> Signature {
        Signature::from(self.0.sign_prehash_recoverable(hash.as_slice()).expect("any hash can be signed"))
    }
}

/// What a test wants to send. Nonce, gas limit and fees have defaults that [`Chain::send`](super::Chain::send) asks for.
#[derive(Clone, Debug, Default)]
pub struct TransactionRequest {
    pub(super) to: Option<Address>,
    pub(super) value: U256,
    pub(super) input: Bytes,
    pub(super) gas: Option<u64>,
    pub(super) nonce: Option<u64>,
    pub(super) fees: Option<Fees>,
}

/// Wei per gas.
#[derive(Clone, Copy, Debug)]
pub struct Fees {
    /// At most, in all.
    pub max: u128,
    /// At most, for the block's producer.
    pub priority: u128,
}

impl TransactionRequest {
    /// Calls this contract, or pays this account.
    pub fn with_to(self, to: Address) -> Self {
        Self { to: Some(to), ..self }
    }

    /// Sends this many wei.
    pub fn with_value(self, value: U256) -> Self {
        Self { value, ..self }
    }

    /// The call data.
    pub fn with_input(self, input: impl Into<Bytes>) -> Self {
        Self { input: input.into(), ..self }
    }

    /// Creates a contract with this code.
    pub fn with_deploy_code(self, code: impl Into<Bytes>) -> Self {
        Self { to: None, input: code.into(), ..self }
    }

    /// Maximum gas.
    pub fn with_gas_limit(self, gas: u64) -> Self {
        Self { gas: Some(gas), ..self }
    }

    /// The sender's nonce.
    pub fn with_nonce(self, nonce: u64) -> Self {
        Self { nonce: Some(nonce), ..self }
    }

    /// What it pays for gas.
    pub fn with_fees(self, max: u128, priority: u128) -> Self {
        Self { fees: Some(Fees { max, priority }), ..self }
    }

    /// As the parameter of `eth_call` and `eth_estimateGas`.
    pub(super) fn to_json(&self, from: Option<Address>) -> Value {
        json!({ "from": from, "to": self.to, "value": self.value, "data": self.input })
    }

    /// The signed bytes.
    ///
    /// # Panics
    /// If nonce, gas limit or fees are missing.
    pub(super) fn sign(&self, key: &PrivateKeySigner) -> Bytes {
        let signature = key.sign(keccak256(self.encode(None)));
        self.encode(Some(&signature)).into()
    }

    fn encode(&self, signature: Option<&Signature>) -> Vec<u8> {
        let fees = self.fees.expect("it has fees");
        let (nonce, gas) = (self.nonce.expect("it has a nonce"), self.gas.expect("it has a gas limit"));
        let to = self.to.map_or(TxKind::Create, TxKind::Call);
        let mut fields = Vec::new();
        let before: [&dyn Encodable; 8] =
            [&CHAIN_ID, &nonce, &fees.priority, &fees.max, &gas, &to, &self.value, &self.input];
        before.into_iter().for_each(|field| field.encode(&mut fields));
        // The access list.
        fields.push(EMPTY_LIST_CODE);
        if let Some(signature) = signature {
            let after: [&dyn Encodable; 3] = [&signature.v(), &signature.r(), &signature.s()];
            after.into_iter().for_each(|field| field.encode(&mut fields));
        }
        let mut encoded = vec![EIP1559];
        Header { list: true, payload_length: fields.len() }.encode(&mut encoded);
        encoded.extend(fields);
        encoded
    }
}

/// The receipt of a mined transaction.
#[derive(Clone, Debug)]
pub struct Receipt {
    /// Its hash.
    pub transaction_hash: B256,
    /// The block that it is in.
    pub block_number: Option<u64>,
    /// Its position in that block.
    pub transaction_index: Option<u64>,
    /// Its sender.
    pub from: Address,
    /// Its target; none for a contract creation.
    pub to: Option<Address>,
    /// The contract that it created.
    pub contract_address: Option<Address>,
    succeeded: bool,
}

impl Receipt {
    /// Whether it succeeded; if not, it reverted.
    pub fn status(&self) -> bool {
        self.succeeded
    }

    /// Reads a node's answer; `None` if the transaction is not mined.
    pub(super) fn read(answer: &Value) -> Option<Self> {
        let text = |name: &str| answer[name].as_str();
        Some(Self {
            transaction_hash: text("transactionHash")?.parse().expect("a hash"),
            block_number: text("blockNumber").map(number),
            transaction_index: text("transactionIndex").map(number),
            from: text("from")?.parse().expect("an address"),
            to: text("to").map(|to| to.parse().expect("an address")),
            contract_address: text("contractAddress").map(|address| address.parse().expect("an address")),
            succeeded: text("status")? == "0x1",
        })
    }
}

/// A number in a node's answer.
pub(super) fn number(text: &str) -> u64 {
    u64::from_str_radix(text.trim_start_matches("0x"), 16).expect("a hexadecimal number")
}
