//! What the relayer accepts: the real one's rules, and its words when it refuses.
//!
//! As measured, a malformed `to` or `data` is no reason to refuse, and unknown fields are dropped in silence.

use alloy_primitives::U256;
use serde::{Deserialize, Serialize};
use serde_json::{Value, error::Category, value::RawValue};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

/// The understood part of a POST's body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SendRequest {
    pub(crate) to: Option<String>,
    /// 0x-hex, all 256 bits of it.
    pub(crate) value: String,
    pub(crate) data: Option<String>,
    pub(crate) gas_limit: Option<u64>,
    pub(crate) gas_price: Option<u128>,
    pub(crate) max_fee_per_gas: Option<u128>,
    pub(crate) max_priority_fee_per_gas: Option<u128>,
    pub(crate) speed: Option<Speed>,
}

/// The relayer's four price levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[expect(missing_docs, reason = "the relayer's own names")]
pub enum Speed {
    Fastest,
    Fast,
    Average,
    SafeLow,
}

/// Why a body is refused. Both are answered with 400.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Answered in plain text.
    NotJson(String),
    /// Answered in the usual envelope.
    Invalid(String),
}

#[derive(Deserialize)]
struct Body<'a> {
    /// Raw, because a JSON number would pass through a float and lose digits.
    #[serde(borrow)]
    value: &'a RawValue,
    #[serde(default)]
    to: Option<String>,
    #[serde(default)]
    data: Option<String>,
    #[serde(default)]
    gas_limit: Option<u64>,
    #[serde(default)]
    gas_price: Option<u128>,
    #[serde(default)]
    max_fee_per_gas: Option<u128>,
    #[serde(default)]
    max_priority_fee_per_gas: Option<u128>,
    #[serde(default)]
    speed: Option<Speed>,
    #[serde(default)]
    valid_until: Option<String>,
}

/// A body of the older dialect, which takes everything as it is but the amount's form.
#[derive(Deserialize)]
struct FlatBody<'a> {
    to: Option<String>,
    data: Option<String>,
    #[serde(borrow)]
    value: Option<&'a RawValue>,
    #[serde(rename = "gasLimit")]
    gas_limit: Option<Value>,
}

impl SendRequest {
    /// Reads and checks a POST's body.
    pub(crate) fn parse(body: &[u8], now: OffsetDateTime) -> Result<Self, Refusal> {
        let body: Body = serde_json::from_slice(body).map_err(|error| refusal(&error))?;
        let valid_until = body.valid_until.clone();
        let request = Self {
            value: hex_amount(body.value.get()).map_err(Refusal::Invalid)?,
            to: body.to,
            data: body.data,
            gas_limit: body.gas_limit,
            gas_price: body.gas_price,
            max_fee_per_gas: body.max_fee_per_gas,
            max_priority_fee_per_gas: body.max_priority_fee_per_gas,
            speed: body.speed,
        };
        request.check(valid_until.as_deref(), now).map_err(Refusal::Invalid)?;
        Ok(request)
    }

    /// Reads a body of the older dialect.
    pub(crate) fn parse_flat(body: &[u8]) -> Result<Self, Refusal> {
        let body: FlatBody = serde_json::from_slice(body).map_err(|error| refusal(&error))?;
        let value = body.value.map_or(Ok("0x0".to_owned()), |raw| hex_amount(raw.get()));
        let gas_limit = match body.gas_limit {
            Some(Value::String(text)) => text.parse().ok(),
            Some(number) => number.as_u64(),
            None => None,
        };
        Ok(Self { to: body.to, value: value.map_err(Refusal::Invalid)?, data: body.data, gas_limit, ..Self::default() })
    }

    fn check(&self, valid_until: Option<&str>, now: OffsetDateTime) -> Result<(), String> {
        if self.to.is_none() && self.data.is_none() {
            return Err("Both txs `to` and `data` fields are missing. At least one of them has to be set.".to_owned());
        }
        if let Some(until) = valid_until {
            let until = OffsetDateTime::parse(until, &Rfc3339).map_err(|_| "Invalid validUntil datetime format")?;
            if until < now {
                return Err("The validUntil time cannot be in the past".to_owned());
            }
        }
        self.check_price()?;
        let intrinsic = self.intrinsic_gas();
        match self.gas_limit {
            Some(limit) if limit < intrinsic => {
                Err(format!("gas_limit is too low, intrinsic gas is {intrinsic} and gas_limit is {limit}"))
            }
            _ => Ok(()),
        }
    }

    /// Exactly one of: a speed, a gas price, or both EIP-1559 fees.
    fn check_price(&self) -> Result<(), String> {
        let fees = (self.max_fee_per_gas, self.max_priority_fee_per_gas);
        let has_fees = fees != (None, None);
        let kinds = [has_fees, self.gas_price.is_some(), self.speed.is_some()];
        let refusal = match (kinds.into_iter().filter(|given| *given).count(), fees) {
            (0, _) => "Transaction must specify either gasPrice, speed, or EIP1559 parameters",
            (2.., _) => "Cannot mix different transaction types. Use either gasPrice, speed, or EIP1559 parameters",
            (1, (Some(fee), Some(tip))) if fee < tip => {
                "maxFeePerGas must be greater than or equal to maxPriorityFeePerGas"
            }
            (1, (Some(_), None) | (None, Some(_))) => {
                "EIP1559 transactions require both maxFeePerGas and maxPriorityFeePerGas"
            }
            _ => return Ok(()),
        };
        Err(refusal.to_owned())
    }

    fn intrinsic_gas(&self) -> u64 {
        let digits = self.data.as_deref().and_then(|data| data.strip_prefix("0x")).unwrap_or_default();
        // Two hex digits are a byte. Data that is not hex costs like other data here and fails after signing, as measured.
        let calldata: u64 = digits.as_bytes().chunks(2).map(|byte| if byte == b"00" { 4 } else { 16 }).sum();
        21_000 + calldata + if self.to.is_none() { 32_000 } else { 0 }
    }
}

/// Whether a chain could make sense of target and call data.
pub(crate) fn is_well_formed(to: Option<&str>, data: Option<&str>) -> bool {
    let digits = |text: &str| {
        text.strip_prefix("0x").filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit())).map(str::len)
    };
    to.is_none_or(|to| digits(to) == Some(40))
        && data.is_none_or(|data| digits(data).is_some_and(|length| length % 2 == 0))
}

fn refusal(error: &serde_json::Error) -> Refusal {
    match error.classify() {
        Category::Data => Refusal::Invalid(without_position(error)),
        _ => Refusal::NotJson(format!("Json deserialize error: {error}")),
    }
}

/// The amount in a JSON text (an integer, or a string of decimal or 0x-hex digits) as 0x-hex.
///
/// # Errors
/// With the relayer's message when the text is no unsigned integer of at most 256 bits.
pub fn hex_amount(json: &str) -> Result<String, String> {
    let quoted = json.strip_prefix('"').and_then(|rest| rest.strip_suffix('"'));
    let (digits, radix) = match quoted.and_then(|text| text.strip_prefix("0x")) {
        Some(digits) => (digits, 16),
        None => (quoted.unwrap_or(json), 10),
    };
    // The parser below allows separators and an empty text; the real relayer does not.
    let all_digits = !digits.is_empty() && digits.bytes().all(|digit| (digit as char).is_digit(radix));
    all_digits
        .then(|| U256::from_str_radix(digits, u64::from(radix)).ok())
        .flatten()
        .map(|amount| format!("{amount:#x}"))
        .ok_or_else(|| format!("invalid value: {json}, expected an unsigned integer of at most 256 bits"))
}

/// The real one reads from a parsed value, so its messages carry no position.
fn without_position(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.rfind(" at line ").map_or(text.clone(), |end| text[..end].to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_keep_all_256_bits() {
        let most = "115792089237316195423570985008687907853269984665640564039457584007913129639935";
        let ones = format!("0x{}", "f".repeat(64));
        assert_eq!(hex_amount(most).unwrap(), ones);
        assert_eq!(hex_amount(&format!("\"{most}\"")).unwrap(), ones);
        assert_eq!(hex_amount("\"0x00FF\"").unwrap(), "0xff");
        assert_eq!(hex_amount("0").unwrap(), "0x0");
        for wrong in ["-1", "1.5", "1e18", "\"\"", "\"0x\"", "0x10", "null", "\"1_0\"", "\"+1\"", &format!("{most}0")] {
            assert!(hex_amount(wrong).is_err(), "{wrong}");
        }
    }
}
