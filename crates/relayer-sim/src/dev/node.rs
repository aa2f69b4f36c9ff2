//! The chain's node over JSON-RPC, and what its answers prove.
//!
//! *Refused* is the node's own statement about a transaction. Everything else (no connection, a timeout, an error of the
//! server) is *away*: nothing is known, and the same question is asked again.

use std::time::Duration;

use alloy_primitives::{Address, B256, Bytes, TxKind, U256};
use alloy_provider::{
    Provider, ProviderBuilder, RootProvider,
    network::{
        Ethereum, EthereumWallet, Network, NetworkTransactionBuilder, TransactionBuilder, eip2718::Encodable2718,
    },
    transport::{RpcError, TransportErrorKind},
};
use alloy_sol_types::{Panic, Revert, SolError};

use super::signed::{Fees, Signed};
use crate::{Record, record::NO_OP_GAS, request::is_well_formed, server::now_ms};

/// Shorter than the real relayer's 10 s: a laptop's chain answers at once or not at all.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// The real relayer sends a call whose gas cannot be estimated with one of these: a plain transfer, a token's
/// `transfer`, its `transferFrom`, others.
const GAS_DEFAULTS: (u64, u64, u64, u64) = (21_000, 65_000, 80_000, 200_000);
/// JSON-RPC's "internal error" and "limit exceeded": statements about the node, not about the request.
const NODE_ERRORS: [i64; 2] = [-32603, -32005];

type TransactionRequest = <Ethereum as Network>::TransactionRequest;

pub(super) struct Node {
    provider: RootProvider,
}

/// The node did not answer, with the reason. Nothing is known.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Away(String);

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

/// A transaction without its nonce.
#[derive(Debug)]
pub(super) struct Offer {
    request: TransactionRequest,
    gas_limit: u64,
    fees: Fees,
}

impl Node {
    pub(super) fn new(url: reqwest::Url) -> reqwest::Result<Self> {
        let builder = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).no_proxy();
        let client = builder.connect_timeout(CONNECT_TIMEOUT).timeout(ANSWER_TIMEOUT).tcp_nodelay(true).build()?;
        Ok(Self { provider: ProviderBuilder::<_, _, Ethereum>::default().connect_reqwest(client, url) })
    }

    pub(super) async fn chain_id(&self) -> Result<u64, Away> {
        self.provider.get_chain_id().await.map_err(away)
    }

    pub(super) async fn balance(&self, address: Address) -> Result<U256, Away> {
        self.provider.get_balance(address).await.map_err(away)
    }

    /// Number of mined transactions of this sender.
    pub(super) async fn nonce_mined(&self, address: Address) -> Result<u64, Away> {
        self.provider.get_transaction_count(address).latest().await.map_err(away)
    }

    /// The same, with the transactions in the node's pool that can be mined.
    pub(super) async fn nonce_pending(&self, address: Address) -> Result<u64, Away> {
        self.provider.get_transaction_count(address).pending().await.map_err(away)
    }

    /// Gas and fees for a record; or why it cannot be signed, in the real relayer's words. `reserved` wei of the balance
    /// belong to transactions under way.
    pub(super) async fn offer(
        &self,
        from: Address,
        wanted: &Record,
        reserved: U256,
    ) -> Result<Result<Offer, String>, Away> {
        let Some(request) = to_chain(from, wanted) else {
            return Ok(Err("Transaction could not be encoded: malformed `to` or `data`".to_owned()));
        };
        let gas_limit = match wanted.gas_limit {
            Some(limit) => limit,
            None => self.estimate(&request).await?,
        };
        let fees = match (wanted.gas_price, wanted.max_fee_per_gas, wanted.max_priority_fee_per_gas) {
            (Some(price), _, _) => Fees::GasPrice(price),
            (_, Some(max), Some(priority)) => Fees::Eip1559 { max, priority },
            _ => {
                let fees = self.provider.estimate_eip1559_fees().await.map_err(away)?;
                Fees::Eip1559 { max: fees.max_fee_per_gas, priority: fees.max_priority_fee_per_gas }
            }
        };
        let block = self.provider.get_block_by_number(Default::default()).await.map_err(away)?;
        let block_limit = block.ok_or_else(|| Away("there is no latest block".to_owned()))?.header.gas_limit;
        if gas_limit > block_limit {
            let reason = format!("Transaction gas limit ({gas_limit}) exceeds block gas limit ({block_limit})");
            return Ok(Err(reason));
        }
        let cost = U256::from(gas_limit)
            .checked_mul(U256::from(fees.max()))
            .and_then(|gas| gas.checked_add(request.value.unwrap_or_default()));
        let balance = self.balance(from).await?.saturating_sub(reserved);
        if cost.is_none_or(|cost| cost > balance) {
            let cost = cost.map_or("more than there is".to_owned(), |cost| cost.to_string());
            let reason = format!("Insufficient balance: Relayer balance {balance} is insufficient to cover {cost}");
            return Ok(Err(reason));
        }
        Ok(Ok(Offer { request, gas_limit, fees }))
    }

    async fn estimate(&self, request: &TransactionRequest) -> Result<u64, Away> {
        match self.provider.estimate_gas(request.clone()).await {
            Ok(gas) => Ok(gas + gas / 10),
            // As the real relayer does: the call then fails on the chain.
            Err(error) if error.as_error_resp().is_some() => {
                Ok(gas_default(request.input.input().map(AsRef::as_ref).unwrap_or_default()))
            }
            Err(error) => Err(away(error)),
        }
    }

    pub(super) async fn send(&self, raw: &[u8]) -> Result<Taken, Away> {
        match self.provider.send_raw_transaction(raw).await {
            Ok(_) => Ok(Taken::Yes),
            Err(error) => statement(&error).map(|reason| read_refusal(&reason)).ok_or_else(|| away(error)),
        }
    }

    pub(super) async fn mined(&self, hash: B256) -> Result<Option<Mined>, Away> {
        let receipt = self.provider.get_transaction_receipt(hash).await.map_err(away)?;
        Ok(receipt.map(|receipt| Mined { succeeded: receipt.status(), block: receipt.block_number }))
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
        let Some(request) = to_chain(from, wanted) else { return Ok(None) };
        let call = self.provider.call(request.with_gas_limit(signed.gas_limit)).block(block.saturating_sub(1).into());
        match call.await {
            Ok(_) => Ok(None),
            // Also for errors of the node itself: a final status must not wait for its reason.
            Err(error) if error.as_error_resp().is_some() => Ok(statement(&error)),
            Err(error) => Err(away(error)),
        }
    }
}

/// Signs with this nonce.
pub(super) async fn sign(wallet: &EthereumWallet, chain_id: u64, nonce: u64, offer: Offer) -> anyhow::Result<Signed> {
    let Offer { request, gas_limit, fees } = offer;
    let request = request.with_chain_id(chain_id).with_nonce(nonce).with_gas_limit(gas_limit);
    let request = match fees {
        Fees::GasPrice(price) => request.with_gas_price(price),
        Fees::Eip1559 { max, priority } => request.with_max_fee_per_gas(max).with_max_priority_fee_per_gas(priority),
    };
    let (from, value) = (request.from.unwrap_or_default(), request.value.unwrap_or_default());
    let envelope = request.build(wallet).await?;
    let signature = envelope.signature();
    Ok(Signed {
        chain_id,
        from,
        nonce,
        hash: *envelope.tx_hash(),
        raw: envelope.encoded_2718().into(),
        gas_limit,
        fees,
        value,
        r: signature.r().into(),
        s: signature.s().into(),
        v: u8::from(signature.v()),
        at_ms: now_ms(),
    })
}

impl Offer {
    /// A transfer of nothing to the sender itself, which uses up a nonce.
    pub(super) async fn no_op(node: &Node, from: Address) -> Result<Self, Away> {
        let fees = node.provider.estimate_eip1559_fees().await.map_err(away)?;
        let request = TransactionRequest::default().with_from(from).with_to(from).with_value(U256::ZERO);
        let fees = Fees::Eip1559 { max: fees.max_fee_per_gas, priority: fees.max_priority_fee_per_gas };
        Ok(Self { request, gas_limit: NO_OP_GAS, fees })
    }
}

/// `None` if target or data are malformed.
fn to_chain(from: Address, wanted: &Record) -> Option<TransactionRequest> {
    if !is_well_formed(wanted.to.as_deref(), wanted.data.as_deref()) {
        return None;
    }
    let to = match &wanted.to {
        Some(to) => TxKind::Call(to.parse().ok()?),
        None => TxKind::Create,
    };
    let data: Bytes = wanted.data.as_deref().unwrap_or("0x").parse().ok()?;
    let value: U256 = wanted.value.parse().ok()?;
    Some(TransactionRequest::default().with_from(from).with_kind(to).with_input(data).with_value(value))
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

/// Leaves out the node's address, which contains a key at some providers.
fn away(error: RpcError<TransportErrorKind>) -> Away {
    let reason = match &error {
        RpcError::ErrorResp(payload) => format!("the node says {}", payload.message),
        RpcError::Transport(TransportErrorKind::HttpError(answer)) => format!("the node answers {}", answer.status),
        RpcError::Transport(TransportErrorKind::Custom(cause)) => match cause.downcast_ref::<reqwest::Error>() {
            Some(cause) if cause.is_connect() => "the node cannot be reached".to_owned(),
            Some(cause) if cause.is_timeout() => "the node does not answer".to_owned(),
            _ => "the connection to the node failed".to_owned(),
        },
        _ => "the node's answer cannot be read".to_owned(),
    };
    Away(reason)
}

/// The node's own statement about the request: the reason of a revert if there is one, else its message. `None` if it
/// made none, or reports an error of its own.
fn statement(error: &RpcError<TransportErrorKind>) -> Option<String> {
    let payload = error.as_error_resp()?;
    // Hardhat calls a revert an internal error.
    if NODE_ERRORS.contains(&payload.code) && !payload.message.contains("revert") {
        return None;
    }
    let data = payload.as_revert_data();
    Some(data.and_then(|data| read_revert(&data)).unwrap_or_else(|| payload.message.clone().into_owned()))
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
