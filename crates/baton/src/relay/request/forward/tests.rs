use alloy_primitives::b256;
use serde_json::json;

use super::*;

const FORWARDER: &str = "0x5FbDB2315678afecb367f032d93F642f64180aa3";
const FROM: &str = "0x70997970C51812dc3A010C7d01b50e0d17dc79C8";

/// What ethers makes of the request below.
const HASH: B256 = b256!("c0f4c61c7c3d109f2080ae83449dbd497e6d58cf5da62ff48dc76b6191391172");
const SIGNATURE: &str = "0x0dcedf428adfcf7fc98471575687a3ca899033a5e4f44a08951a22518cf7c9aa5bf87d603626a90a575a343e71af8c68f09dd0d1dcefcb869ebfeab71b27b4811c";
const CALLDATA: &str = "0xdf905caf000000000000000000000000000000000000000000000000000000000000002000000000000000000000000070997970c51812dc3a010c7d01b50e0d17dc79c8000000000000000000000000e7f1725e7734ce288f8367e1bb143e90bb3f0512000000000000000000000000000000000000000000000000000000000000000700000000000000000000000000000000000000000000000000000000000186a0000000000000000000000000000000000000000000000000000000006b49d20000000000000000000000000000000000000000000000000000000000000000e000000000000000000000000000000000000000000000000000000000000001200000000000000000000000000000000000000000000000000000000000000004a9059cbb0000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000410dcedf428adfcf7fc98471575687a3ca899033a5e4f44a08951a22518cf7c9aa5bf87d603626a90a575a343e71af8c68f09dd0d1dcefcb869ebfeab71b27b4811c00000000000000000000000000000000000000000000000000000000000000";

fn forwarder() -> ForwarderConfig {
    ForwarderConfig {
        address: FORWARDER.parse().unwrap(),
        name: "ERC2771Forwarder".into(),
        chain_id: 31337,
        gas_overhead: 120_000,
    }
}

fn body() -> Value {
    json!({
        "request": {
            "from": FROM, "to": "0xe7f1725E7734CE288F8367e1Bb143E90bb3F0512", "value": "7", "gas": "100000",
            "nonce": "3", "deadline": "1800000000", "data": "0xa9059cbb",
        },
        "signature": SIGNATURE,
    })
}

fn parsed(body: &Value) -> GaslessRequest {
    GaslessRequest::parse(body).unwrap()
}

fn with(name: &str, value: Value) -> Value {
    let mut body = body();
    body["request"][name] = value;
    body
}

fn refused(body: &Value) -> Vec<String> {
    GaslessRequest::parse(body).unwrap_err().into_iter().map(|found| found.field).collect()
}

#[test]
fn hash_signer_and_call_data_are_those_of_ethers() {
    let request = parsed(&body());
    assert_eq!(request.signing_hash(&forwarder()), HASH);
    assert_eq!(request.signer(&forwarder()).unwrap().to_checksum(None), FROM);
    let call = request.forward(&forwarder()).unwrap().call();
    assert_eq!(call.data, CALLDATA);
    assert_eq!((call.to.to_checksum(None).as_str(), call.value), (FORWARDER, U256::from(7)));
}

#[test]
fn a_changed_field_or_another_domain_is_another_signer() {
    for (name, other) in [
        ("to", json!(FROM)),
        ("value", json!("8")),
        ("gas", json!("100001")),
        ("nonce", json!("4")),
        ("deadline", json!("1800000001")),
        ("data", json!("0xa9059cbc")),
    ] {
        assert_ne!(parsed(&with(name, other)).signer(&forwarder()).unwrap().to_checksum(None), FROM, "{name}");
    }
    for other in [
        ForwarderConfig { name: "Other".into(), ..forwarder() },
        ForwarderConfig { chain_id: 1, ..forwarder() },
        ForwarderConfig { address: FROM.parse().unwrap(), ..forwarder() },
    ] {
        assert_ne!(parsed(&body()).signer(&other).unwrap().to_checksum(None), FROM, "{other:?}");
    }
}

#[test]
fn a_signature_that_the_forwarder_refuses_is_refused_with_the_fix() {
    let signature = Signature::from_raw(&hex::decode(&SIGNATURE[2..]).unwrap()).unwrap();
    let order = U256::from_str_radix("fffffffffffffffffffffffffffffffebaaedce6af48a03bbfd25e8cd0364141", 16).unwrap();
    let malleable = Signature::new(signature.r(), order - signature.s(), !signature.v());
    let mut twin = body();
    twin["signature"] = json!(format!("0x{}", hex::encode(malleable.as_bytes())));
    assert!(parsed(&twin).signer(&forwarder()).unwrap_err().contains("malleable"));
    for v in ["00", "01", "1d", "ff"] {
        let mut other = body();
        other["signature"] = json!(format!("{}{v}", &SIGNATURE[..130]));
        assert!(parsed(&other).signer(&forwarder()).unwrap_err().contains("27 and 28"), "v {v}");
    }
    let mut none = body();
    none["signature"] = json!(format!("0x{}1b", "00".repeat(64)));
    assert!(parsed(&none).signer(&forwarder()).unwrap_err().contains("no signer"));
}

#[test]
fn every_bad_field_is_named() {
    for (name, bad) in [
        ("from", json!("0x1234")),
        ("from", Value::Null),
        ("to", json!("0xE7f1725E7734CE288F8367e1Bb143E90bb3F0512")),
        ("value", json!(7)),
        ("value", json!("1.5")),
        ("gas", json!("0")),
        ("gas", json!(-1)),
        ("nonce", json!("x")),
        ("nonce", json!(1.5)),
        ("deadline", json!("281474976710656")),
        ("deadline", json!("tomorrow")),
        ("data", json!("0x123")),
        ("speed", json!("fast")),
    ] {
        assert_eq!(refused(&with(name, bad.clone())), [format!("request.{name}")], "{name} = {bad}");
    }
    for bad in [json!("0x12"), json!(SIGNATURE[..130]), json!(5), json!(format!("0x{}", "zz".repeat(65))), Value::Null]
    {
        let mut body = body();
        body["signature"] = bad.clone();
        assert_eq!(refused(&body), ["signature"], "{bad}");
    }
    assert_eq!(refused(&json!({ "nonce": "1" })), ["nonce", "request", "signature"]);
    assert_eq!(refused(&json!({ "request": 1, "signature": SIGNATURE })), ["request"]);
    assert_eq!(refused(&json!([])), ["body"]);
}

#[test]
fn what_is_stored_is_read_back_and_what_is_queued_is_the_request_alone() {
    let mut said = body();
    said["retryOnFailure"] = json!(true);
    said["request"]["nonce"] = json!(3);
    said["request"]["data"] = json!("0xA9059CBB");
    let forward = parsed(&said).forward(&forwarder()).unwrap();
    let stored: Value = serde_json::from_str(&forward.to_json()).unwrap();
    assert_eq!(Forward::parse(&stored).unwrap(), forward);
    let queued: Value = serde_json::from_str(&forward.gasless.to_json()).unwrap();
    let mut same = body();
    same["retryOnFailure"] = json!(true);
    assert_eq!(queued, same, "numbers as decimal strings, addresses with their checksum");
    assert!(Forward::parse(&queued).is_none());
}

#[test]
fn the_gas_limit_leaves_what_was_signed_for() {
    let limit = |gas: &str| parsed(&with("gas", json!(gas))).forward(&forwarder()).map(|forward| forward.gas_limit);
    for gas in [1_u64, 100_000, 30_000_000] {
        let limit = limit(&gas.to_string()).unwrap();
        let before_the_call = limit - forwarder().gas_overhead;
        // What a call can pass on at most is all but a 64th.
        assert!(before_the_call - before_the_call / 64 >= gas, "{gas}");
    }
    assert!(limit("18446744073709551615").is_err());
    assert!(limit("18446744073709551616").is_err());
    assert!(limit(&U256::MAX.to_string()).is_err());
}

#[test]
fn the_last_second_of_the_deadline_counts() {
    let request = parsed(&with("deadline", json!("1000")));
    assert!(!request.is_expired(Timestamp(1_000_999)));
    assert!(request.is_expired(Timestamp(1_001_000)));
    let never = parsed(&with("deadline", json!("281474976710655")));
    assert!(!never.is_expired(Timestamp(253_402_300_799_999)), "the year 9999");
}
