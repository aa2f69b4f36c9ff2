//! What a client asks for: the call to be made, read from JSON with every problem found at once (pure).
//!
//! Amounts are kept as 256-bit integers and travel as decimal strings; nothing here is ever a float.
//! Next: [`crate::relay::accept::intake`] stores it.

use std::fmt::Write;

use alloy_primitives::{Address, U256};
use serde_json::{Map, Value};

use crate::evm::{ADDRESS_RULE, parse_address, parse_amount};
use crate::http::problem::FieldProblem;

/// The gas price class asked of the relayer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Speed {
    /// Cheapest.
    SafeLow,
    /// The default.
    Average,
    /// Higher price, earlier block.
    Fast,
    /// Highest price, next block if possible.
    Fastest,
}

impl Speed {
    /// The name used by clients and relayers alike.
    pub fn name(self) -> &'static str {
        match self {
            Self::SafeLow => "safeLow",
            Self::Average => "average",
            Self::Fast => "fast",
            Self::Fastest => "fastest",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        [Self::SafeLow, Self::Average, Self::Fast, Self::Fastest].into_iter().find(|speed| speed.name() == text)
    }
}

/// One call on the chain, as a relayer is asked to make it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// Contract or recipient.
    pub to: Address,
    /// Amount in wei.
    pub value: U256,
    /// Call data: lower-case 0x hex of even length.
    pub data: String,
    /// The gas limit; without one the relayer estimates.
    pub gas_limit: Option<u64>,
    /// The price class.
    pub speed: Speed,
}

/// A checked `POST /relay/direct` body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectRequest {
    /// The call to make.
    pub call: Call,
    /// Whether the client wants one automatic replay from the dead-letter queue.
    pub retry_on_failure: bool,
}

const DIRECT_FIELDS: [&str; 7] = ["to", "data", "value", "gas", "gasLimit", "speed", "retryOnFailure"];

impl DirectRequest {
    /// Reads a body, or returns every problem in it.
    pub fn parse(body: &Value) -> Result<Self, Vec<FieldProblem>> {
        let Some(object) = body.as_object() else {
            return Err(vec![problem("body", "must be a JSON object")]);
        };
        let mut problems = Vec::new();
        for name in object.keys().filter(|name| !DIRECT_FIELDS.contains(&name.as_str())) {
            problems.push(problem(name, &format!("is not a known field; known are {}", DIRECT_FIELDS.join(", "))));
        }
        let to = take(&mut problems, read_to(object));
        let data = take(&mut problems, read_data_of(object, "data"));
        let value = take(&mut problems, read_value(object));
        let gas_limit = take(&mut problems, read_gas(object));
        let speed = take(&mut problems, read_speed(object));
        let retry_on_failure = take(&mut problems, read_flag(object, "retryOnFailure"));
        match (to, data, value, gas_limit, speed, retry_on_failure) {
            (Some(to), Some(data), Some(value), Some(gas_limit), Some(speed), Some(retry_on_failure))
                if problems.is_empty() =>
            {
                Ok(Self { call: Call { to, value, data, gas_limit, speed }, retry_on_failure })
            }
            _ => Err(problems),
        }
    }

    /// The request as it is stored and queued: every field present, amounts as decimal strings. None of the values can
    /// need escaping.
    pub fn to_json(&self) -> String {
        let Call { to, value, data, gas_limit, speed } = &self.call;
        let mut text = format!(r#"{{"to":"{to}","data":"{data}","value":"{value}","speed":"{}""#, speed.name());
        if let Some(gas) = gas_limit {
            write!(text, r#","gas":"{gas}""#).expect("writing to a string cannot fail");
        }
        write!(text, r#","retryOnFailure":{}}}"#, self.retry_on_failure).expect("writing to a string cannot fail");
        text
    }
}

pub(super) fn problem(field: &str, message: &str) -> FieldProblem {
    FieldProblem { field: field.to_owned(), message: message.to_owned() }
}

pub(super) fn take<T>(problems: &mut Vec<FieldProblem>, read: Result<T, FieldProblem>) -> Option<T> {
    read.map_err(|found| problems.push(found)).ok()
}

/// A field that is there and not null.
pub(super) fn field<'a>(object: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    object.get(name).filter(|value| !value.is_null())
}

fn read_to(object: &Map<String, Value>) -> Result<Address, FieldProblem> {
    let value = field(object, "to").ok_or_else(|| problem("to", &format!("is missing; it {ADDRESS_RULE}")))?;
    let text = value.as_str().ok_or_else(|| problem("to", ADDRESS_RULE))?;
    parse_address(text).map_err(|rule| problem("to", &rule))
}

pub(super) fn read_data_of(object: &Map<String, Value>, name: &str) -> Result<String, FieldProblem> {
    let rule = "must be 0x and an even number of hex digits";
    let Some(value) = field(object, name) else { return Ok("0x".to_owned()) };
    let digits = value.as_str().and_then(|text| text.strip_prefix("0x")).ok_or_else(|| problem(name, rule))?;
    if digits.len() % 2 != 0 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(problem(name, rule));
    }
    Ok(format!("0x{}", digits.to_ascii_lowercase()))
}

fn read_value(object: &Map<String, Value>) -> Result<U256, FieldProblem> {
    let rule = "must be a whole number of wei from 0 to 2^256-1, as a string of decimal digits or 0x hex";
    let Some(value) = field(object, "value") else { return Ok(U256::ZERO) };
    let text = value
        .as_str()
        .ok_or_else(|| problem("value", &format!("{rule} (a JSON number is refused: clients round large ones)")))?;
    parse_amount(text).ok_or_else(|| problem("value", rule))
}

fn read_gas(object: &Map<String, Value>) -> Result<Option<u64>, FieldProblem> {
    let rule = "must be a whole number from 1 to 18446744073709551615";
    let read = |name: &str| -> Result<Option<u64>, FieldProblem> {
        let Some(value) = field(object, name) else { return Ok(None) };
        let number = match value {
            Value::Number(number) => number.as_u64(),
            Value::String(text) => parse_amount(text).and_then(|amount| u64::try_from(amount).ok()),
            _ => None,
        };
        number.filter(|&gas| gas > 0).map(Some).ok_or_else(|| problem(name, rule))
    };
    match (read("gas")?, read("gasLimit")?) {
        (Some(gas), Some(limit)) if gas != limit => Err(problem("gasLimit", "differs from gas; send one of them")),
        (gas, limit) => Ok(gas.or(limit)),
    }
}

fn read_speed(object: &Map<String, Value>) -> Result<Speed, FieldProblem> {
    let Some(value) = field(object, "speed") else { return Ok(Speed::Average) };
    value
        .as_str()
        .and_then(Speed::parse)
        .ok_or_else(|| problem("speed", "must be one of safeLow, average, fast, fastest"))
}

pub(super) fn read_flag(object: &Map<String, Value>, name: &str) -> Result<bool, FieldProblem> {
    match field(object, name) {
        None => Ok(false),
        Some(value) => value.as_bool().ok_or_else(|| problem(name, "must be true or false")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const TO: &str = "0x5FbDB2315678afecb367f032d93F642f64180aa3";
    const MAX: &str = "115792089237316195423570985008687907853269984665640564039457584007913129639935";

    fn fields_refused(body: Value) -> Vec<String> {
        DirectRequest::parse(&body).unwrap_err().into_iter().map(|found| found.field).collect()
    }

    #[test]
    fn reads_every_field() {
        let request = DirectRequest::parse(&json!({
            "to": TO, "data": "0xAB", "value": MAX, "gasLimit": "0x5208", "speed": "fast", "retryOnFailure": true,
        }))
        .unwrap();
        assert_eq!(request.call.value, U256::MAX);
        assert_eq!(request.call.gas_limit, Some(21000));
        assert_eq!(request.call.data, "0xab");
        assert!(request.retry_on_failure);
        let stored: Value = serde_json::from_str(&request.to_json()).unwrap();
        assert_eq!(DirectRequest::parse(&stored).unwrap(), request);
        assert_eq!((&stored["value"], &stored["to"]), (&json!(MAX), &json!(TO)));
    }

    #[test]
    fn the_least_body_is_a_target() {
        let request = DirectRequest::parse(&json!({ "to": TO.to_lowercase() })).unwrap();
        assert_eq!((request.call.value, request.call.data.as_str()), (U256::ZERO, "0x"));
        assert_eq!((request.call.gas_limit, request.call.speed), (None, Speed::Average));
    }

    #[test]
    fn one_wei_over_1e18_keeps_its_last_digit() {
        let request = DirectRequest::parse(&json!({ "to": TO, "value": "1000000000000000001" })).unwrap();
        assert!(request.to_json().contains(r#""value":"1000000000000000001""#));
    }

    #[test]
    fn every_problem_is_named_at_once() {
        let refused = fields_refused(json!({
            "data": "0x123", "value": "-1", "gas": "many", "speed": "slow", "nonce": 1, "retryOnFailure": "yes",
        }));
        assert_eq!(refused, ["nonce", "to", "data", "value", "gas", "speed", "retryOnFailure"]);
    }

    #[test]
    fn bad_values_are_refused_by_field() {
        let too_much = "115792089237316195423570985008687907853269984665640564039457584007913129639936";
        for (name, bad) in [
            ("to", json!("0x1234")),
            ("to", json!("0x5FbDB2315678afecb367f032d93F642f64180aag")),
            ("to", json!("0x5fbDB2315678afecb367f032d93F642f64180aa3")),
            ("to", json!(7)),
            ("to", Value::Null),
            ("data", json!("abcd")),
            ("data", json!("0xzz")),
            ("data", json!(5)),
            ("value", json!("-1")),
            ("value", json!("1.5")),
            ("value", json!("1e18")),
            ("value", json!("+1")),
            ("value", json!(" 1")),
            ("value", json!("")),
            ("value", json!("0x")),
            ("value", json!(too_much)),
            ("value", json!(1)),
            ("gas", json!("text")),
            ("gas", json!(0)),
            ("gas", json!(-5)),
            ("gas", json!(1.5)),
            ("gas", json!("18446744073709551616")),
            ("gasLimit", json!("0")),
            ("speed", json!("FAST")),
            ("speed", json!(1)),
        ] {
            let mut body = json!({ "to": TO });
            body[name] = bad.clone();
            assert_eq!(fields_refused(body), [name], "{name} = {bad}");
        }
    }

    #[test]
    fn gas_and_gas_limit_must_agree() {
        assert!(DirectRequest::parse(&json!({ "to": TO, "gas": 21000, "gasLimit": "21000" })).is_ok());
        assert_eq!(fields_refused(json!({ "to": TO, "gas": 21000, "gasLimit": 21001 })), ["gasLimit"]);
    }

    #[test]
    fn a_body_that_is_no_object_is_refused() {
        for body in [json!(null), json!([]), json!("x"), json!(1)] {
            assert_eq!(fields_refused(body), ["body"]);
        }
        assert_eq!(fields_refused(json!({})), ["to"]);
    }
}
