//! The chain's node, and what its answers prove.
//!
//! *Refused* is the node's own statement about a transaction. Everything else (no connection, a timeout, an error of the
//! server) is *away*: nothing is known, and the same question is asked again.

use alloy_primitives::{Address, B256, Bytes, TxKind, U256};
use alloy_sol_types::{Panic, Revert, SolError};
use serde_json::{Value, json};

pub(super) use super::rpc::Away;
use super::{
    raw_transaction::Unsigned,
    rpc::{Rpc, RpcErrorAnswer, RpcFailure, number, quantity},
    signed::{Fees, Signed},
};
use crate::{Record, record::NO_OP_GAS, request::is_well_formed};

/// The real relayer sends a call whose gas cannot be estimated with one of these: a plain transfer, a token's
/// `transfer`, its `transferFrom`, others.
const GAS_DEFAULTS: (u64, u64, u64, u64) = (21_000, 65_000, 80_000, 200_000);

pub(super) struct Node {
    rpc: Rpc,
}

/// The node's answer to a transaction that was sent to it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// The node has it, now or since an earlier time.
    Yes,
    /// A transaction with this nonce was mined. It may be this one.
    NonceUsed,
    /// Not at present: the balance is too low, or another transaction with this nonce waits to be mined.
    NotNow(String),
    /// Refused, with the node's reason.
    Refused(String),
}

/// A mined transaction.
pub(super) struct Mined {
    pub(super) succeeded: bool,
    pub(super) block: Option<u64>,
}

/// A call as it goes to the chain, without gas and fees.
#[derive(Debug)]
struct ChainCall {
    from: Address,
    to: TxKind,
    value: U256,
    data: Bytes,
}

/// A transaction without its nonce.
#[derive(Debug)]
pub(super) struct Offer {
    call: ChainCall,
    gas_limit: u64,
    fees: Fees,
}

impl Node {
    pub(super) fn new(url: reqwest::Url) -> reqwest::Result<Self> {
        Ok(Self { rpc: Rpc::new(url)? })
    }

    pub(super) async fn chain_id(&self) -> Result<u64, Away> {
        number(&self.rpc.call("eth_chainId", json!([])).await?)
    }

    pub(super) async fn balance(&self, address: Address) -> Result<U256, Away> {
        quantity(&self.rpc.call("eth_getBalance", json!([address, "latest"])).await?)
    }

    /// Number of mined transactions of this sender.
    pub(super) async fn nonce_mined(&self, address: Address) -> Result<u64, Away> {
        number(&self.rpc.call("eth_getTransactionCount", json!([address, "latest"])).await?)
    }

    /// The same, with the transactions in the node's pool that can be mined.
    pub(super) async fn nonce_pending(&self, address: Address) -> Result<u64, Away> {
        number(&self.rpc.call("eth_getTransactionCount", json!([address, "pending"])).await?)
    }

    /// Gas and fees for a record; or why it cannot be signed, in the real relayer's words. `reserved` wei of the balance
    /// belong to transactions under way.
    pub(super) async fn offer(
        &self,
        from: Address,
        wanted: &Record,
        reserved: U256,
    ) -> Result<Result<Offer, String>, Away> {
        let Some(call) = ChainCall::of(from, wanted) else {
            return Ok(Err("Transaction could not be encoded: malformed `to` or `data`".to_owned()));
        };
        let gas_limit = match wanted.gas_limit {
            Some(limit) => limit,
            None => self.estimate(&call).await?,
        };
        let block = self.latest_block().await?;
        let fees = match (wanted.gas_price, wanted.max_fee_per_gas, wanted.max_priority_fee_per_gas) {
            (Some(price), _, _) => Fees::GasPrice(price),
            (_, Some(max), Some(priority)) => Fees::Eip1559 { max, priority },
            _ => self.fees(&block).await?,
        };
        let block_limit: u64 = number(&block["gasLimit"])?;
        if gas_limit > block_limit {
            let reason = format!("Transaction gas limit ({gas_limit}) exceeds block gas limit ({block_limit})");
            return Ok(Err(reason));
        }
        let cost =
            U256::from(gas_limit).checked_mul(U256::from(fees.max())).and_then(|gas| gas.checked_add(call.value));
        let balance = self.balance(from).await?.saturating_sub(reserved);
        if cost.is_none_or(|cost| cost > balance) {
            let cost = cost.map_or("more than there is".to_owned(), |cost| cost.to_string());
            let reason = format!("Insufficient balance: Relayer balance {balance} is insufficient to cover {cost}");
            return Ok(Err(reason));
        }
        Ok(Ok(Offer { call, gas_limit, fees }))
    }

    /// A transfer of nothing to the sender itself, which uses up a nonce.
    pub(super) async fn no_op(&self, from: Address) -> Result<Offer, Away> {
        let call = ChainCall { from, to: TxKind::Call(from), value: U256::ZERO, data: Bytes::new() };
        let fees = self.fees(&self.latest_block().await?).await?;
        Ok(Offer { call, gas_limit: NO_OP_GAS, fees })
    }

    async fn latest_block(&self) -> Result<Value, Away> {
        let block = self.rpc.call("eth_getBlockByNumber", json!(["latest", false])).await?;
        if block.is_object() { Ok(block) } else { Err(Away("there is no latest block".to_owned())) }
    }

    /// Enough for several full blocks: twice the base fee, and the tip that the node suggests.
    async fn fees(&self, block: &Value) -> Result<Fees, Away> {
        let base: u128 = number(&block["baseFeePerGas"])?;
        let priority: u128 = number(&self.rpc.call("eth_maxPriorityFeePerGas", json!([])).await?)?;
        Ok(Fees::Eip1559 { max: base.saturating_mul(2).saturating_add(priority), priority })
    }

    async fn estimate(&self, call: &ChainCall) -> Result<u64, Away> {
        match self.rpc.call("eth_estimateGas", json!([call.to_json()])).await {
            Ok(gas) => number::<u64>(&gas).map(|gas| gas.saturating_add(gas / 10)),
            // As the real relayer does: the call then fails on the chain.
            Err(RpcFailure::Error(_)) => Ok(gas_default(&call.data)),
            Err(RpcFailure::Away(away)) => Err(away),
        }
    }

    pub(super) async fn send(&self, raw: &Bytes) -> Result<Taken, Away> {
        match self.rpc.call("eth_sendRawTransaction", json!([raw])).await {
            Ok(_) => Ok(Taken::Yes),
            Err(RpcFailure::Error(error)) if error.is_about_the_request() => Ok(read_refusal(&statement(&error))),
            Err(failure) => Err(failure.into()),
        }
    }

    pub(super) async fn mined(&self, hash: B256) -> Result<Option<Mined>, Away> {
        let receipt = self.rpc.call("eth_getTransactionReceipt", json!([hash])).await?;
        if receipt.is_null() {
            return Ok(None);
        }
        let succeeded = number::<u64>(&receipt["status"])? == 1;
        Ok(Some(Mined { succeeded, block: number(&receipt["blockNumber"]).ok() }))
    }

    /// Why it reverted: the result of the same call on the state before that block. `None` if it succeeds there, or the
    /// node no longer has that state.
    pub(super) async fn revert_reason(
        &self,
        from: Address,
        wanted: &Record,
        signed: &Signed,
        block: u64,
    ) -> Result<Option<String>, Away> {
        let Some(call) = ChainCall::of(from, wanted) else { return Ok(None) };
        let mut call = call.to_json();
        call["gas"] = json!(format!("{:#x}", signed.gas_limit));
        let before = format!("{:#x}", block.saturating_sub(1));
        match self.rpc.call("eth_call", json!([call, before])).await {
            Ok(_) => Ok(None),
            // Also for errors of the node itself: a final status must not wait for its reason.
            Err(RpcFailure::Error(error)) => Ok(error.is_about_the_request().then(|| statement(&error))),
            Err(RpcFailure::Away(away)) => Err(away),
        }
    }
}

impl Offer {
    pub(super) fn with_nonce(self, chain_id: u64, nonce: u64) -> Unsigned {
        let Self { call: ChainCall { to, value, data, .. }, gas_limit, fees } = self;
        Unsigned { chain_id, nonce, gas_limit, fees, to, value, data }
    }
}

impl ChainCall {
    /// `None` if target or data are malformed.
    fn of(from: Address, wanted: &Record) -> Option<Self> {
        if !is_well_formed(wanted.to.as_deref(), wanted.data.as_deref()) {
            return None;
        }
        let to = match &wanted.to {
            Some(to) => TxKind::Call(to.parse().ok()?),
            None => TxKind::Create,
        };
        let data = wanted.data.as_deref().unwrap_or("0x").parse().ok()?;
        Some(Self { from, to, value: wanted.value.parse().ok()?, data })
    }

    fn to_json(&self) -> Value {
        let mut call = json!({ "from": self.from, "value": format!("{:#x}", self.value), "data": self.data });
        if let TxKind::Call(to) = self.to {
            call["to"] = json!(to);
        }
        call
    }
}

fn gas_default(data: &[u8]) -> u64 {
    let (transfer, token_transfer, token_transfer_from, other) = GAS_DEFAULTS;
    match data {
        [] => transfer,
        [0xa9, 0x05, 0x9c, 0xbb, ..] => token_transfer,
        [0x23, 0xb8, 0x72, 0xdd, ..] => token_transfer_from,
        _ => other,
    }
}

/// The node's statement about a request: the reason of a revert if there is one, else its message.
fn statement(error: &RpcErrorAnswer) -> String {
    error.revert_data().and_then(|data| read_revert(&data)).unwrap_or_else(|| error.message.clone())
}

/// The text of `revert("…")`, the meaning of a panic, or the bytes of a contract's own error.
fn read_revert(data: &[u8]) -> Option<String> {
    if data.is_empty() {
        return None;
    }
    Some(match (Revert::abi_decode(data), Panic::abi_decode(data)) {
        (Ok(revert), _) => revert.reason,
        (_, Ok(panic)) => panic.to_string(),
        _ => format!("custom error 0x{}", hex::encode(data)),
    })
}

/// Knows the messages of geth, anvil and Hardhat.
fn read_refusal(reason: &str) -> Taken {
    let lower = reason.to_ascii_lowercase();
    let says = |phrases: &[&str]| phrases.iter().any(|phrase| lower.contains(phrase));
    if says(&["already known", "known transaction", "already imported"]) {
        Taken::Yes
    } else if says(&["nonce too low", "nonce is too low", "nonce has already been used"]) {
        Taken::NonceUsed
    } else if says(&["insufficient funds", "enough funds", "underpriced", "replacement", "base fee", "pool is full"]) {
        Taken::NotNow(reason.to_owned())
    } else {
        Taken::Refused(reason.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use alloy_sol_types::PanicKind;

    use super::*;

    #[test]
    fn refusals_of_the_common_nodes_are_understood() {
        for word in ["already known", "Known transaction: 0x12", "transaction already imported"] {
            assert_eq!(read_refusal(word), Taken::Yes);
        }
        for word in ["nonce too low: next nonce 5, tx nonce 3", "Nonce too low. Expected nonce to be 1 but got 0."] {
            assert_eq!(read_refusal(word), Taken::NonceUsed);
        }
        for word in ["Insufficient funds for gas * price + value", "replacement transaction underpriced"] {
            assert_eq!(read_refusal(word), Taken::NotNow(word.to_owned()));
        }
        assert_eq!(read_refusal("invalid chain id"), Taken::Refused("invalid chain id".to_owned()));
    }

    #[test]
    fn reverts_are_shown_as_text_where_they_have_one() {
        assert_eq!(read_revert(&Revert::from("not today").abi_encode()).as_deref(), Some("not today"));
        let panic = Panic::from(PanicKind::DivisionByZero).abi_encode();
        assert!(read_revert(&panic).is_some_and(|reason| reason.contains("zero")), "{:?}", read_revert(&panic));
        // These bytes could be taken for text, which they are not.
        assert_eq!(read_revert(&[0x21, 0x22, 0x23, 0]).as_deref(), Some("custom error 0x21222300"));
        assert_eq!(read_revert(&[]), None);
    }

    #[test]
    fn gas_that_cannot_be_estimated_gets_the_real_relayers_default() {
        assert_eq!(gas_default(&[]), 21_000);
        assert_eq!(gas_default(&[0xa9, 0x05, 0x9c, 0xbb, 0]), 65_000);
        assert_eq!(gas_default(&[1]), 200_000);
    }
}
