//! A transaction in its signed form, as it is in the journal before the chain gets it.

use alloy_primitives::{Address, B256, Bytes, U256};
use serde::{Deserialize, Serialize};

use crate::{Record, SignatureParts, SignedParts, Status};

/// A signed transaction. What is sent is always these bytes, however often.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Signed {
    pub(super) chain_id: u64,
    pub(super) from: Address,
    pub(super) nonce: u64,
    pub(super) hash: B256,
    pub(super) raw: Bytes,
    pub(super) gas_limit: u64,
    pub(super) fees: Fees,
    /// Wei that goes with it.
    pub(super) value: U256,
    pub(super) r: B256,
    pub(super) s: B256,
    /// 0 or 1.
    pub(super) v: u8,
    pub(super) at_ms: i64,
}

/// Most wei paid per gas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Fees {
    GasPrice(u128),
    Eip1559 { max: u128, priority: u128 },
}

impl Fees {
    pub(super) fn max(self) -> u128 {
        match self {
            Self::GasPrice(price) => price,
            Self::Eip1559 { max, .. } => max,
        }
    }
}

impl Signed {
    /// Most wei that it takes from its sender.
    pub(super) fn cost(&self) -> U256 {
        U256::from(self.gas_limit).saturating_mul(U256::from(self.fees.max())).saturating_add(self.value)
    }

    /// Shows nonce, hash and signature in a record. A record that lost its nonce to another sender keeps its status.
    pub(super) fn show_in(&self, record: &mut Record) {
        record.status = record.status.max(Status::Sent);
        record.nonce = Some(self.nonce);
        record.hash = Some(self.hash.to_string());
        record.sent_at_ms = Some(self.at_ms);
        record.gas_limit = record.gas_limit.or(Some(self.gas_limit));
        let fees = match self.fees {
            Fees::Eip1559 { max, priority } => Some((max, priority)),
            Fees::GasPrice(_) => None,
        };
        let (r, s) = (hex::encode(self.r), hex::encode(self.s));
        record.signed = Some(SignedParts { fees, signature: Some(SignatureParts { r, s, v: self.v }) });
    }
}
