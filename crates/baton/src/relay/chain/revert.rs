//! What a node's error says about a call that was tried (pure). Nodes agree on little: the data of a revert stands in
//! `data`, somewhere inside it, or nowhere.

use alloy_primitives::Bytes;
use alloy_sol_types::{Panic, Revert, SolError, SolInterface, sol};
use serde_json::Value;

use super::{TEXT_LENGTH_MAX, Trial};

sol! {
    #[derive(Debug)]
    interface Forwarder {
        error ERC2771ForwarderInvalidSigner(address signer, address from);
        error ERC2771ForwarderMismatchedValue(uint256 requestedValue, uint256 msgValue);
        error ERC2771ForwarderExpiredRequest(uint48 deadline);
        error ERC2771UntrustfulTarget(address target, address forwarder);
        error FailedCall();
    }
}

/// Whether an error means that the call would fail, or something else went wrong.
pub(super) fn judge(message: String, data: &Value) -> Trial {
    const WORDS: [&str; 6] = ["revert", "out of gas", "outofgas", "invalid opcode", "invalidfeopcode", "invalid jump"];
    // Without bytes it may be any error.
    let found = revert_data(data).filter(|bytes| !bytes.is_empty());
    let said = message.to_ascii_lowercase();
    if found.is_some() || WORDS.iter().any(|word| said.contains(word)) {
        return Trial::Reverts { data: found.unwrap_or_default(), message };
    }
    Trial::Unclear(message)
}

/// The first bytes in an error's data, however deep.
fn revert_data(data: &Value) -> Option<Bytes> {
    match data {
        Value::String(text) => {
            let digits = text.split_whitespace().last()?.strip_prefix("0x")?;
            hex::decode(digits).ok().map(Bytes::from)
        }
        // By name, since there may be a hash beside it.
        Value::Object(fields) => {
            ["data", "result", "originalError"].iter().find_map(|name| revert_data(fields.get(*name)?))
        }
        _ => None,
    }
}

/// Whether the forwarder hides what the target said.
pub fn is_failed_call(data: &[u8]) -> bool {
    data == Forwarder::FailedCall {}.abi_encode()
}

/// Why a call reverts, for people.
pub fn reason(data: &[u8], message: &str) -> String {
    let text = match selector(data) {
        None if message.is_empty() => "it reverts without a reason".to_owned(),
        None => format!("it reverts without a reason ({message})"),
        Some(Revert::SELECTOR) => match Revert::abi_decode(data) {
            Ok(revert) => format!("it reverts: {}", revert.reason),
            Err(_) => "it reverts with a reason that cannot be read".to_owned(),
        },
        Some(Panic::SELECTOR) => match Panic::abi_decode(data) {
            Ok(panic) => format!("it reverts: {panic}"),
            Err(_) => "it reverts with a panic that cannot be read".to_owned(),
        },
        Some(_) => match Forwarder::ForwarderErrors::abi_decode(data) {
            Ok(error) => format!("it reverts: {}", explain(&error)),
            Err(_) => format!("it reverts with the custom error 0x{}", hex::encode(data)),
        },
    };
    text.chars().take(TEXT_LENGTH_MAX).collect()
}

fn selector(data: &[u8]) -> Option<[u8; 4]> {
    data.get(..4)?.try_into().ok()
}

fn explain(error: &Forwarder::ForwarderErrors) -> String {
    use Forwarder::ForwarderErrors as Error;
    match error {
        Error::ERC2771ForwarderInvalidSigner(error) => format!(
            "ERC2771ForwarderInvalidSigner (signed by {}, not by {}, or for another nonce)",
            error.signer, error.from
        ),
        Error::ERC2771ForwarderMismatchedValue(error) => format!(
            "ERC2771ForwarderMismatchedValue (signed for {} wei, sent with {})",
            error.requestedValue, error.msgValue
        ),
        Error::ERC2771ForwarderExpiredRequest(error) => {
            format!("ERC2771ForwarderExpiredRequest (its deadline was {})", error.deadline)
        }
        Error::ERC2771UntrustfulTarget(error) => {
            format!("ERC2771UntrustfulTarget ({} does not trust the forwarder {})", error.target, error.forwarder)
        }
        Error::FailedCall(_) => "FailedCall (the target refused the call)".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use alloy_primitives::{Address, U256};
    use serde_json::json;

    use super::*;

    fn judged(message: &str, data: Value) -> Option<String> {
        match judge(message.to_owned(), &data) {
            Trial::Reverts { data, message } => Some(reason(&data, &message)),
            _ => None,
        }
    }

    fn hex_of(data: Vec<u8>) -> String {
        format!("0x{}", hex::encode(data))
    }

    #[test]
    fn a_revert_is_found_wherever_the_node_puts_it() {
        let data = hex_of(Revert::from("not enough").abi_encode());
        for place in [
            json!(data),
            json!(format!("Reverted {data}")),
            json!({ "data": data }),
            json!({ "originalError": { "data": data } }),
            json!({ "message": "x", "txHash": "0x12", "data": { "data": data } }),
        ] {
            assert_eq!(judged("execution reverted", place.clone()).unwrap(), "it reverts: not enough", "{place}");
        }
        assert!(judged("execution reverted", Value::Null).unwrap().contains("without a reason"));
        assert!(judged("EVM error OutOfGas", Value::Null).unwrap().contains("OutOfGas"));
    }

    #[test]
    fn other_errors_are_no_verdict() {
        for message in ["insufficient funds for gas * price + value", "limit exceeded", "header not found", ""] {
            assert_eq!(judged(message, Value::Null), None, "{message}");
            assert_eq!(judged(message, Value::from("0x")), None, "{message}");
        }
    }

    #[test]
    fn reasons_are_named() {
        let said = |data: Vec<u8>| reason(&data, "execution reverted");
        let (one, two) = (Address::repeat_byte(1), Address::repeat_byte(2));
        assert!(said(Panic::from(0x11).abi_encode()).contains("0x11"), "{}", said(Panic::from(0x11).abi_encode()));
        let signer = Forwarder::ERC2771ForwarderInvalidSigner { signer: one, from: two };
        assert!(said(signer.abi_encode()).contains("ERC2771ForwarderInvalidSigner (signed by 0x01010101"));
        let value = Forwarder::ERC2771ForwarderMismatchedValue { requestedValue: U256::from(1), msgValue: U256::ZERO };
        assert!(said(value.abi_encode()).contains("signed for 1 wei, sent with 0"));
        let target = Forwarder::ERC2771UntrustfulTarget { target: one, forwarder: two };
        assert!(said(target.abi_encode()).contains("ERC2771UntrustfulTarget"));
        assert!(is_failed_call(&Forwarder::FailedCall {}.abi_encode()));
        assert_eq!(said(vec![0xde, 0xad, 0xbe, 0xef, 0x01]), "it reverts with the custom error 0xdeadbeef01");
        assert_eq!(said(Revert::from("x".repeat(10_000)).abi_encode()).len(), TEXT_LENGTH_MAX);
        assert!(said(vec![0x08, 0xc3, 0x79, 0xa0]).contains("cannot be read"));
    }
}
