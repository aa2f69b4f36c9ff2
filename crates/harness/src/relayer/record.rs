//! One transaction as the relayer keeps and shows it, what it accepts, and how it says no.

use std::collections::VecDeque;

use alloy_primitives::U256;
use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};
use time::{OffsetDateTime, format_description::well_known::Rfc3339, macros::format_description};

use super::faults::Outcome;

/// The relayer's own statuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the relayer's own words")]
pub enum Status {
    Pending,
    Sent,
    Submitted,
    Mined,
    Confirmed,
    Failed,
    Canceled,
    Expired,
}

impl Status {
    const ALL: [Self; 8] = [
        Self::Pending,
        Self::Sent,
        Self::Submitted,
        Self::Mined,
        Self::Confirmed,
        Self::Failed,
        Self::Canceled,
        Self::Expired,
    ];

    /// As in JSON.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Sent => "sent",
            Self::Submitted => "submitted",
            Self::Mined => "mined",
            Self::Confirmed => "confirmed",
            Self::Failed => "failed",
            Self::Canceled => "canceled",
            Self::Expired => "expired",
        }
    }

    /// In any case of letters, as the list's filter takes it.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str().eq_ignore_ascii_case(text))
    }

    /// Whether nothing more is expected.
    pub fn is_final(self) -> bool {
        self >= Self::Confirmed
    }

    /// Whether it counts into `pending_transactions_count`.
    pub fn is_pending(self) -> bool {
        self <= Self::Submitted
    }
}

/// What happens to a record next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Sign,
    Broadcast,
    Mine,
    Confirm,
    ConfirmAsNoOp,
    FailUnsigned(String),
    Revert,
    Cancel,
}

/// A record in the relayer's memory.
#[derive(Clone, Debug)]
pub struct Record {
    /// The relayer's id for it.
    pub id: String,
    /// Where it stands.
    pub status: Status,
    /// Why it failed.
    pub status_reason: Option<String>,
    /// From `sent` on.
    pub nonce: Option<u64>,
    /// From `sent` on.
    pub hash: Option<String>,
    /// As sent; the relayer's own address after a no-op.
    pub to: Option<String>,
    /// 0x-hex without loss.
    pub value: String,
    /// As sent.
    pub data: Option<String>,
    /// As sent.
    pub gas_limit: Option<u64>,
    /// As sent.
    pub speed: Option<String>,
    /// Whether a cancellation replaced it.
    pub is_canceled: bool,
    pub(super) from: String,
    pub(super) relayer_id: String,
    pub(super) created_at: OffsetDateTime,
    pub(super) sent_at: Option<OffsetDateTime>,
    pub(super) confirmed_at: Option<OffsetDateTime>,
    pub(super) gas_price: Option<u128>,
    pub(super) max_fee_per_gas: Option<u128>,
    pub(super) max_priority_fee_per_gas: Option<u128>,
}

impl Record {
    /// The object of GET, list and POST answers.
    pub fn to_json(&self) -> Value {
        let signature = self.hash.as_ref().map(|hash| {
            let r = hash.trim_start_matches("0x");
            json!({"r": r, "s": r, "v": 1, "sig": format!("{r}{r}01")})
        });
        json!({
            "id": self.id,
            "hash": self.hash,
            "status": self.status.as_str(),
            "status_reason": self.status_reason,
            "created_at": timestamp(self.created_at),
            "sent_at": self.sent_at.map(timestamp),
            "confirmed_at": self.confirmed_at.map(timestamp),
            "gas_price": self.gas_price.map(|price| price.to_string()),
            "gas_limit": self.gas_limit,
            "nonce": self.nonce,
            "value": self.value,
            "from": self.from,
            "to": self.to,
            "relayer_id": self.relayer_id,
            "data": self.data,
            "max_fee_per_gas": self.max_fee_per_gas.map(|fee| fee.to_string()),
            "max_priority_fee_per_gas": self.max_priority_fee_per_gas.map(|fee| fee.to_string()),
            "signature": signature,
            "speed": self.speed,
            "is_canceled": self.is_canceled,
        })
    }

    /// The flat object of the older dialect's webhooks and reads.
    pub(super) fn to_flat_json(&self) -> Value {
        json!({
            "transactionId": self.id,
            "hash": self.hash,
            "status": self.status.as_str(),
            "from": self.from,
            "to": self.to,
            "createdAt": self.created_at.format(&Rfc3339).unwrap_or_default(),
            "confirmedAt": self.confirmed_at.and_then(|at| at.format(&Rfc3339).ok()),
        })
    }

    pub(super) fn becomes_noop(&mut self) {
        self.to = Some(self.from.clone());
        self.value = "0x0".to_owned();
        self.data = Some("0x".to_owned());
        self.gas_limit = Some(21_000);
    }
}

/// The steps from acceptance to an outcome.
pub(super) fn steps(outcome: &Outcome, mined: bool) -> VecDeque<Step> {
    let mut steps = VecDeque::from([Step::Sign, Step::Broadcast]);
    if mined && matches!(outcome, Outcome::Confirmed | Outcome::SentTwice) {
        steps.push_back(Step::Mine);
    }
    match outcome {
        Outcome::Confirmed => steps.push_back(Step::Confirm),
        Outcome::NoOp => steps.push_back(Step::ConfirmAsNoOp),
        Outcome::NeverSigned(reason) => return VecDeque::from([Step::FailUnsigned(reason.clone())]),
        Outcome::Reverted => steps.push_back(Step::Revert),
        Outcome::Canceled => steps.push_back(Step::Cancel),
        Outcome::SentTwice => steps.extend([Step::Confirm, Step::Sign, Step::Broadcast]),
        Outcome::Stuck => {}
    }
    steps
}

/// A POST's body, as far as it is understood. Other fields are dropped in silence, as the real one does.
#[derive(Deserialize)]
pub(super) struct Request {
    pub(super) value: Box<RawValue>,
    #[serde(default)]
    pub(super) to: Option<String>,
    #[serde(default)]
    pub(super) data: Option<String>,
    #[serde(default)]
    pub(super) gas_limit: Option<u64>,
    #[serde(default)]
    pub(super) gas_price: Option<u128>,
    #[serde(default)]
    pub(super) max_fee_per_gas: Option<u128>,
    #[serde(default)]
    pub(super) max_priority_fee_per_gas: Option<u128>,
    #[serde(default)]
    pub(super) speed: Option<Speed>,
    #[serde(default)]
    pub(super) valid_until: Option<String>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) enum Speed {
    Fastest,
    Fast,
    Average,
    SafeLow,
}

impl Speed {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Fastest => "fastest",
            Self::Fast => "fast",
            Self::Average => "average",
            Self::SafeLow => "safeLow",
        }
    }
}

impl Request {
    /// Reads a body that is known to be JSON; the error is the relayer's message.
    pub(super) fn parse(body: &[u8]) -> Result<Self, String> {
        let request: Self = serde_json::from_slice(body).map_err(|error| without_position(&error))?;
        request.validate()?;
        Ok(request)
    }

    /// The amount as 0x-hex.
    pub(super) fn value_hex(&self) -> Result<String, String> {
        hex_amount(self.value.get())
    }

    fn validate(&self) -> Result<(), String> {
        self.value_hex()?;
        if self.to.is_none() && self.data.is_none() {
            return Err("Both txs `to` and `data` fields are missing. At least one of them has to be set.".to_owned());
        }
        if let Some(until) = &self.valid_until {
            let until = OffsetDateTime::parse(until, &Rfc3339).map_err(|_| "Invalid validUntil datetime format")?;
            if until < OffsetDateTime::now_utc() {
                return Err("The validUntil time cannot be in the past".to_owned());
            }
        }
        self.validate_price()?;
        if let Some(gas_limit) = self.gas_limit {
            let intrinsic = self.intrinsic_gas();
            if gas_limit < intrinsic {
                return Err(format!("gas_limit is too low, intrinsic gas is {intrinsic} and gas_limit is {gas_limit}"));
            }
        }
        Ok(())
    }

    fn validate_price(&self) -> Result<(), String> {
        let eip1559 = self.max_fee_per_gas.is_some() || self.max_priority_fee_per_gas.is_some();
        let kinds = [eip1559, self.gas_price.is_some(), self.speed.is_some()].into_iter().filter(|kind| *kind).count();
        match kinds {
            0 => Err("Transaction must specify either gasPrice, speed, or EIP1559 parameters".to_owned()),
            1 => match (eip1559, self.max_fee_per_gas, self.max_priority_fee_per_gas) {
                (true, Some(fee), Some(tip)) if fee < tip => {
                    Err("maxFeePerGas must be greater than or equal to maxPriorityFeePerGas".to_owned())
                }
                (true, None, _) | (true, _, None) => {
                    Err("EIP1559 transactions require both maxFeePerGas and maxPriorityFeePerGas".to_owned())
                }
                _ => Ok(()),
            },
            _ => {
                Err("Cannot mix different transaction types. Use either gasPrice, speed, or EIP1559 parameters"
                    .to_owned())
            }
        }
    }

    /// 21,000, the price of the call data, and 32,000 more for a contract creation.
    fn intrinsic_gas(&self) -> u64 {
        let data = self.data.as_deref().unwrap_or("0x").trim_start_matches("0x");
        // Data that is not hex gets no price: the real one accepts it here and stumbles later.
        let calldata: u64 =
            hex::decode(data).unwrap_or_default().iter().map(|byte| if *byte == 0 { 4 } else { 16 }).sum();
        21_000 + calldata + if self.to.is_none() { 32_000 } else { 0 }
    }
}

/// The amount in a JSON text (integer, decimal string or 0x-hex string) as 0x-hex, all 256 bits of it.
pub fn hex_amount(json: &str) -> Result<String, String> {
    let text = json.trim().trim_matches('"');
    let parsed = match text.strip_prefix("0x") {
        Some(digits) if json.starts_with('"') => U256::from_str_radix(digits, 16),
        _ => U256::from_str_radix(text, 10),
    };
    match parsed {
        Ok(amount) if !text.is_empty() && text != "0x" && !text.contains('_') => Ok(format!("{amount:#x}")),
        _ => Err(format!("invalid value: {json}, expected an unsigned 256-bit integer")),
    }
}

/// `2026-11-15T18:30:57.458707822+00:00`.
pub(super) fn timestamp(at: OffsetDateTime) -> String {
    let format = format_description!("[year]-[month]-[day]T[hour]:[minute]:[second].[subsecond digits:9]+00:00");
    at.format(&format).expect("every part of the format exists in a date with time")
}

/// The real one reads from a parsed value, so its messages carry no position.
fn without_position(error: &serde_json::Error) -> String {
    let text = error.to_string();
    match text.rfind(" at line ") {
        Some(end) => text[..end].to_owned(),
        None => text,
    }
}
