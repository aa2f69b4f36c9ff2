//! What has come of a record on a chain (pure). Without a chain a record is a function of the time; here it moves when
//! the chain does, and each of its states is in the journal before anybody hears of it.

use alloy_primitives::{Address, B256, Bytes, U256};
use serde::{Deserialize, Serialize};

use super::record::Status;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct OnChain {
    pub(super) status: Status,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<String>,
    /// Once it has a nonce. What is sent is always these bytes, however often.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) signed: Option<Signed>,
    /// Nanoseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) confirmed_at: Option<i64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Signed {
    pub(super) chain_id: u64,
    pub(super) from: Address,
    pub(super) nonce: u64,
    pub(super) hash: B256,
    /// As it goes to the node.
    pub(super) raw: Bytes,
    pub(super) gas_limit: u64,
    pub(super) fees: Fees,
    /// Wei that goes with it.
    pub(super) value: U256,
    /// 32 bytes each, and 0 or 1.
    pub(super) r: B256,
    pub(super) s: B256,
    pub(super) v: u8,
    /// Nanoseconds since 1970.
    pub(super) at: i64,
}

/// What it pays at most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Fees {
    GasPrice(u128),
    Eip1559 { max: u128, priority: u128 },
}

impl Fees {
    /// A unit of gas costs no more.
    pub(super) fn max(self) -> u128 {
        match self {
            Self::GasPrice(price) => price,
            Self::Eip1559 { max, .. } => max,
        }
    }
}

impl Signed {
    /// Wei that it takes from its sender at most.
    pub(super) fn cost(&self) -> U256 {
        U256::from(self.gas_limit).saturating_mul(U256::from(self.fees.max())).saturating_add(self.value)
    }
}

impl OnChain {
    pub(super) fn accepted() -> Self {
        Self { status: Status::Pending, reason: None, signed: None, confirmed_at: None }
    }

    /// With a nonce and a signature. One that lost its nonce to a stranger keeps its status and gets another.
    pub(super) fn signed(&self, signed: Signed) -> Self {
        Self { status: self.status.max(Status::Sent), signed: Some(signed), ..self.clone() }
    }

    /// The node has it.
    pub(super) fn submitted(&self) -> Self {
        Self { status: self.status.max(Status::Submitted), ..self.clone() }
    }

    pub(super) fn confirmed(&self, now: i64) -> Self {
        Self { status: Status::Confirmed, confirmed_at: Some(now), ..self.clone() }
    }

    pub(super) fn failed(&self, reason: String) -> Self {
        Self { status: Status::Failed, reason: Some(reason), ..self.clone() }
    }
}
