//! A gasless transaction: what a user signed, checked as the forwarder will check it, and the call that carries it
//! (pure).
//!
//! The user signs an EIP-712 `ForwardRequest`; a relayer pays for `execute(ForwardRequestData)` of the forwarder, which
//! recovers the signer and makes the call in the user's name. What only the chain knows (the nonce) is asked in
//! [`crate::relay::accept::gasless`]. Next: [`crate::relay::accept::intake`] stores it.

use std::borrow::Cow;
use std::fmt::{self, Write};

use alloy_primitives::aliases::U48;
use alloy_primitives::{Address, B256, Bytes, Signature, U256};
use alloy_sol_types::{Eip712Domain, SolCall, SolStruct, sol};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::config::ForwarderConfig;
use crate::evm::{parse_address, parse_amount};
use crate::http::problem::FieldProblem;
use crate::relay::request::call::{Call, Speed, field, problem, read_data_of, read_flag, take};
use crate::timestamp::Timestamp;

sol! {
    /// What a user signs.
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

    /// What the forwarder takes: the same with the signature, and without the nonce, which it has itself.
    struct ForwardRequestData {
        address from;
        address to;
        uint256 value;
        uint256 gas;
        uint48 deadline;
        bytes data;
        bytes signature;
    }

    /// Makes the call in the signer's name.
    function execute(ForwardRequestData request) external payable;
}

/// A checked `POST /relay/gasless` body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GaslessRequest {
    /// What was signed.
    pub request: ForwardRequest,
    /// The 65-byte signature (r, s, v).
    pub signature: Bytes,
    /// Whether one automatic replay is wanted if it ends as a dead letter.
    pub retry_on_failure: bool,
}

/// A gasless transaction as it was accepted: what is sent does not change if the configuration does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forward {
    /// What the client sent.
    pub gasless: GaslessRequest,
    /// The forwarder that it was signed for.
    pub forwarder: Address,
    /// The gas limit of the whole.
    pub gas_limit: u64,
}

/// A nonce sequence: one signer at one forwarder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Signer {
    /// The forwarder.
    pub forwarder: Address,
    /// The user.
    pub address: Address,
}

impl fmt::Display for Signer {
    /// As it is stored.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}/{:x}", self.forwarder, self.address)
    }
}

const BODY_FIELDS: [&str; 3] = ["request", "signature", "retryOnFailure"];
const REQUEST_FIELDS: [&str; 7] = ["from", "to", "value", "gas", "nonce", "deadline", "data"];

impl GaslessRequest {
    /// Reads a body, or says everything that is wrong with it.
    pub fn parse(body: &Value) -> Result<Self, Vec<FieldProblem>> {
        let Some(object) = body.as_object() else { return Err(vec![problem("body", "must be a JSON object")]) };
        let mut problems = unknown(object, &BODY_FIELDS, "");
        let request = match field(object, "request").map(Value::as_object) {
            Some(Some(request)) => read_request(request, &mut problems),
            Some(None) => take(&mut problems, Err(problem("request", "must be a JSON object: what was signed"))),
            None => take(&mut problems, Err(problem("request", "is missing; it is what was signed"))),
        };
        let signature = take(&mut problems, read_signature(object));
        let retry_on_failure = take(&mut problems, read_flag(object, "retryOnFailure"));
        match (request, signature, retry_on_failure) {
            (Some(request), Some(signature), Some(retry_on_failure)) if problems.is_empty() => {
                Ok(Self { request, signature, retry_on_failure })
            }
            _ => Err(problems),
        }
    }

    /// The request as it is queued: every field present, amounts as decimal strings. None of the values can need escaping.
    pub fn to_json(&self) -> String {
        let ForwardRequest { from, to, value, gas, nonce, deadline, data } = &self.request;
        format!(
            r#"{{"request":{{"from":"{from}","to":"{to}","value":"{value}","gas":"{gas}","nonce":"{nonce}","deadline":"{deadline}","data":"{data}"}},"signature":"{}","retryOnFailure":{}}}"#,
            self.signature, self.retry_on_failure
        )
    }

    /// Who signed it for this forwarder, as the forwarder itself recovers it; the error is for the client.
    pub fn signer(&self, forwarder: &ForwarderConfig) -> Result<Address, String> {
        // OpenZeppelin's forwarder takes neither the upper half of `s` nor a `v` of 0 or 1.
        let v = self.signature[64];
        if !matches!(v, 27 | 28) {
            return Err(format!(
                "its last byte (v) is {v}, and the forwarder accepts 27 and 28 only; if your library writes 0 or 1, add 27"
            ));
        }
        let signature =
            Signature::from_raw(&self.signature).map_err(|error| format!("is not a valid signature: {error}"))?;
        if signature.normalize_s().is_some() {
            return Err(
                "it is malleable: its s is in the upper half of the curve's order, which the forwarder refuses; \
                        replace s by the order minus s and swap v between 27 and 28"
                    .to_owned(),
            );
        }
        let hash = self.signing_hash(forwarder);
        signature.recover_address_from_prehash(&hash).map_err(|_| "no signer can be recovered from it".to_owned())
    }

    /// What is signed for this forwarder.
    pub fn signing_hash(&self, forwarder: &ForwarderConfig) -> B256 {
        self.request.eip712_signing_hash(&domain(forwarder))
    }

    /// Whether the forwarder would say that it is too late.
    pub fn is_expired(&self, now: Timestamp) -> bool {
        U256::from(self.request.deadline) < U256::from(u64::try_from(now.0 / 1000).unwrap_or(0))
    }

    /// What is stored, for this forwarder. The error is the rule that `request.gas` breaks.
    pub fn forward(self, forwarder: &ForwarderConfig) -> Result<Forward, String> {
        let gas_limit =
            self.gas_limit(forwarder.gas_overhead).ok_or("exceeds any block's gas limit; sign for less gas")?;
        Ok(Forward { gasless: self, forwarder: forwarder.address, gas_limit })
    }

    /// What the whole needs, so that the forwarder can pass on the gas that was signed for: a call leaves its caller a
    /// 64th, and the forwarder burns everything if it finds that less than was asked for can have been passed on. The
    /// call data is paid for at the highest price that any chain asks for it, which covers copying it too.
    fn gas_limit(&self, overhead: u64) -> Option<u64> {
        const ZERO_BYTE_GAS: u64 = 10;
        const BYTE_GAS: u64 = 40;
        let inner = u64::try_from(self.request.gas).ok()?;
        let data: u64 = self.calldata().iter().map(|byte| if *byte == 0 { ZERO_BYTE_GAS } else { BYTE_GAS }).sum();
        inner.checked_add(inner / 63 + 1)?.checked_add(data)?.checked_add(overhead)
    }

    /// The call of the forwarder that carries it.
    pub fn calldata(&self) -> Vec<u8> {
        let ForwardRequest { from, to, value, gas, nonce: _, deadline, data } = self.request.clone();
        let request = ForwardRequestData { from, to, value, gas, deadline, data, signature: self.signature.clone() };
        executeCall { request }.abi_encode()
    }
}

impl Forward {
    /// Reads what [`Forward::to_json`] wrote; `None` if it did not.
    pub fn parse(stored: &Value) -> Option<Self> {
        let mut object = stored.as_object()?.clone();
        let forwarder = parse_address(object.remove("forwarderAddress")?.as_str()?).ok()?;
        let gas_limit = object.remove("gasLimit")?.as_str()?.parse().ok()?;
        Some(Self { gasless: GaslessRequest::parse(&Value::Object(object)).ok()?, forwarder, gas_limit })
    }

    /// As it is stored: the request with what it becomes.
    pub fn to_json(&self) -> String {
        let mut text = self.gasless.to_json();
        text.pop();
        write!(text, r#","forwarderAddress":"{}","gasLimit":"{}"}}"#, self.forwarder, self.gas_limit)
            .expect("writing to a string cannot fail");
        text
    }

    /// What a relayer is asked to do. The forwarder wants exactly the value that was signed, and passes it on.
    pub fn call(&self) -> Call {
        Call {
            to: self.forwarder,
            value: self.gasless.request.value,
            data: format!("0x{}", hex::encode(self.gasless.calldata())),
            gas_limit: Some(self.gas_limit),
            speed: Speed::Average,
        }
    }

    /// Whose nonce it takes.
    pub fn signer(&self) -> Signer {
        Signer { forwarder: self.forwarder, address: self.gasless.request.from }
    }

    /// Identifies what was signed, whatever the signature: the same request may be signed again.
    pub fn digest(&self) -> [u8; 32] {
        let ForwardRequest { from, to, value, gas, nonce, deadline, data } = &self.gasless.request;
        let signed = format!("{:x} {from:x} {to:x} {value} {gas} {nonce} {deadline} {data:x}", self.forwarder);
        Sha256::digest(signed).into()
    }

    /// The nonce. Values beyond any reachable count are rejected at accept.
    pub fn nonce(&self) -> u64 {
        u64::try_from(self.gasless.request.nonce).unwrap_or(u64::MAX)
    }
}

/// The EIP-712 domain of a signature.
fn domain(forwarder: &ForwarderConfig) -> Eip712Domain {
    Eip712Domain::new(
        Some(Cow::Owned(forwarder.name.clone())),
        Some(Cow::Borrowed(DOMAIN_VERSION)),
        Some(U256::from(forwarder.chain_id)),
        Some(forwarder.address),
        None,
    )
}

/// The version in the domain of every ERC2771Forwarder.
pub const DOMAIN_VERSION: &str = "1";

fn read_request(object: &Map<String, Value>, problems: &mut Vec<FieldProblem>) -> Option<ForwardRequest> {
    problems.extend(unknown(object, &REQUEST_FIELDS, "request."));
    let from = take(problems, read_address(object, "from"));
    let to = take(problems, read_address(object, "to"));
    let value = take(problems, read_number(object, "value", U256::MAX, "wei, from 0 to 2^256-1"));
    let gas = take(problems, read_number(object, "gas", U256::MAX, "gas, from 1 to 2^256-1").and_then(not_zero));
    let nonce = take(problems, read_number(object, "nonce", U256::MAX, "the signer's nonce at the forwarder"));
    let deadline =
        take(problems, read_number(object, "deadline", U256::from(U48::MAX), "seconds since 1970, from 0 to 2^48-1"));
    let data = take(problems, read_data_of(object, "data").map_err(|found| inside(&found.field, &found.message)));
    Some(ForwardRequest {
        from: from?,
        to: to?,
        value: value?,
        gas: gas?,
        nonce: nonce?,
        deadline: U48::from(deadline?),
        data: Bytes::from(hex::decode(data?.trim_start_matches("0x")).ok()?),
    })
}

fn unknown(object: &Map<String, Value>, known: &[&str], prefix: &str) -> Vec<FieldProblem> {
    let unknown = object.keys().filter(|name| !known.contains(&name.as_str()));
    let rule = format!("is not known; known are {}", known.join(", "));
    unknown.map(|name| problem(&format!("{prefix}{name}"), &rule)).collect()
}

fn inside(name: &str, message: &str) -> FieldProblem {
    problem(&format!("request.{name}"), message)
}

fn read_address(object: &Map<String, Value>, name: &str) -> Result<Address, FieldProblem> {
    let Some(value) = field(object, name) else { return Err(inside(name, "is missing; it must be an address")) };
    let text = value.as_str().ok_or_else(|| inside(name, "must be an address: 0x and 40 hex digits, as a string"))?;
    parse_address(text).map_err(|rule| inside(name, &rule))
}

/// A number that was signed: nothing stands in for one that is missing. Of an amount, a JSON number is refused.
fn read_number(object: &Map<String, Value>, name: &str, max: U256, what: &str) -> Result<U256, FieldProblem> {
    let rule = format!("must be {what}, as a string of decimal digits or 0x hex");
    let Some(value) = field(object, name) else { return Err(inside(name, &format!("is missing; it {rule}"))) };
    let number = match value {
        Value::String(text) => parse_amount(text),
        Value::Number(_) if name == "value" => {
            return Err(inside(name, &format!("{rule} (a JSON number is refused: clients round large ones)")));
        }
        Value::Number(number) => number.as_u64().map(U256::from),
        _ => None,
    };
    number.filter(|number| *number <= max).ok_or_else(|| inside(name, &rule))
}

fn not_zero(gas: U256) -> Result<U256, FieldProblem> {
    if gas.is_zero() {
        Err(inside("gas", "is 0, with which nothing can be done; sign for what the call needs"))
    } else {
        Ok(gas)
    }
}

fn read_signature(object: &Map<String, Value>) -> Result<Bytes, FieldProblem> {
    const LENGTH: usize = 65;
    let rule = "must be 65 bytes (r, s, v) as 0x and 130 hex digits";
    let Some(value) = field(object, "signature") else {
        return Err(problem("signature", &format!("is missing; it {rule}")));
    };
    let bytes = value.as_str().and_then(|text| hex::decode(text.strip_prefix("0x")?).ok());
    let bytes = bytes.ok_or_else(|| problem("signature", rule))?;
    match bytes.len() {
        LENGTH => Ok(Bytes::from(bytes)),
        64 => Err(problem("signature", &format!("{rule}; the forwarder takes no compact one (ERC-2098)"))),
        _ => Err(problem("signature", rule)),
    }
}

#[cfg(test)]
mod tests;
