//! Refused gasless requests: each answer names the field, the reason and the fix, and nothing is stored.

use alloy_primitives::{Bytes, Signature, U256, hex};
use alloy_sol_types::{SolStruct, eip712_domain};
use harness::chain::{CHAIN_ID, FORWARDER_NAME, ForwardRequest, new_key, sign_digest};
use harness::proxy::Mode;
use harness::wait::eventually;
use serde_json::{Value, json};

use super::{GaslessFixture, body, post, stored};
use crate::relay_fixture::{RelayFixture, RelaySetup, SOON};

/// Posts a request that must be refused with `status` and a detail that contains all `words`.
async fn refused(relay: &RelayFixture, body: &Value, status: u16, words: &[&str]) -> Value {
    let (code, answer) = post(relay, body, None).await;
    let detail = answer["detail"].as_str().unwrap_or_default().to_owned();
    assert_eq!(code, status, "{answer}");
    for word in words {
        assert!(detail.contains(word), "{word} in {detail}");
    }
    assert_eq!(stored(relay).await, 0, "nothing is stored");
    answer
}

#[tokio::test]
async fn requests_that_the_forwarder_would_refuse_are_refused_before_queueing() {
    let gasless = GaslessFixture::new().await;
    let relay = gasless.setup(1).start().await;
    let user = gasless.user.address().to_string();
    let good = gasless.transfer(1, 0).await;

    // Wrong signer.
    let stranger = gasless.contracts.sign(&good, &new_key());
    refused(&relay, &body(&good, &stranger), 401, &["signature", &user, FORWARDER_NAME, "31337"]).await;

    // Changed after it was signed.
    let signature = gasless.contracts.sign(&good, &gasless.user);
    let changed = ForwardRequest { to: gasless.friend, ..good.clone() };
    refused(&relay, &body(&changed, &signature), 401, &["signature", "exactly these fields"]).await;

    // Signed for another domain, which recovers another signer. The answer names the domain used for the check.
    let forwarder = gasless.contracts.forwarder;
    for domain in [
        eip712_domain! { name: "Other", version: "1", chain_id: CHAIN_ID, verifying_contract: forwarder, },
        eip712_domain! { name: FORWARDER_NAME, version: "2", chain_id: CHAIN_ID, verifying_contract: forwarder, },
        eip712_domain! { name: FORWARDER_NAME, version: "1", chain_id: 1, verifying_contract: forwarder, },
        eip712_domain! { name: FORWARDER_NAME, version: "1", chain_id: CHAIN_ID, verifying_contract: gasless.friend, },
    ] {
        let signature = sign_digest(good.eip712_signing_hash(&domain), &gasless.user);
        assert!(!gasless.contracts.verify(&good, &signature).await, "the forwarder refuses it too");
        refused(&relay, &body(&good, &signature), 401, &["domain", FORWARDER_NAME, &forwarder.to_string()]).await;
    }

    // Deadline passed.
    let late = ForwardRequest { deadline: 1_700_000_000_u64.try_into().unwrap(), ..good.clone() };
    assert!(!gasless.contracts.verify(&late, &gasless.contracts.sign(&late, &gasless.user)).await);
    let answer = refused(&relay, &gasless.signed(&late), 400, &["1700000000", "sign again"]).await;
    assert_eq!(answer["errors"][0]["field"], "request.deadline");

    // What the relayers would have to pay for.
    let paid = ForwardRequest { value: U256::from(1), ..good.clone() };
    let answer = refused(&relay, &gasless.signed(&paid), 400, &["must be 0", "GASLESS_ALLOW_VALUE"]).await;
    assert_eq!(answer["errors"][0]["field"], "request.value");
    let greedy = ForwardRequest { gas: U256::from(2_000_001), ..good.clone() };
    let answer = refused(&relay, &gasless.signed(&greedy), 400, &["2000000", "GASLESS_GAS_MAX"]).await;
    assert_eq!(answer["errors"][0]["field"], "request.gas");

    // A nonce ahead of the forwarder's.
    let ahead = ForwardRequest { nonce: U256::from(7), ..good.clone() };
    let answer = refused(&relay, &gasless.signed(&ahead), 400, &["is 7", "is 0"]).await;
    assert_eq!(answer["errors"][0]["field"], "request.nonce");

    // The malleated signature (s replaced by n - s) that anyone can derive from a valid one.
    let valid = Signature::from_raw(&signature).unwrap();
    let order = U256::from_be_bytes(hex!("fffffffffffffffffffffffffffffffebaaedce6af48a03bbfd25e8cd0364141"));
    let malleated = Signature::new(valid.r(), order - valid.s(), !valid.v());
    let malleated = Bytes::from(malleated.as_bytes());
    assert!(!gasless.contracts.verify(&good, &malleated).await, "the forwarder refuses it too");
    refused(&relay, &body(&good, &malleated), 401, &["malleable"]).await;

    // `v` of 0 or 1, as some libraries write it; this forwarder does not accept it.
    let mut low_v = signature.to_vec();
    low_v[64] -= 27;
    assert!(!gasless.contracts.verify(&good, &Bytes::from(low_v.clone())).await, "the forwarder refuses it too");
    refused(&relay, &body(&good, &Bytes::from(low_v)), 401, &["27"]).await;

    // A contract cannot sign with a key.
    let contract = ForwardRequest { from: gasless.contracts.token, ..good.clone() };
    refused(&relay, &gasless.signed(&contract), 401, &["request.from", "is a contract"]).await;

    // Malformed fields are named.
    let mut malformed = gasless.signed(&good);
    malformed["request"]["gas"] = json!("0");
    malformed["request"]["from"] = json!("me");
    let answer = refused(&relay, &malformed, 400, &[]).await;
    let fields: Vec<_> = answer["errors"].as_array().unwrap().iter().map(|error| error["field"].clone()).collect();
    assert_eq!(fields, ["request.from", "request.gas"]);

    // Finally the valid request, twice under one idempotency key.
    let (code, first) = post(&relay, &gasless.signed(&good), Some("one")).await;
    assert_eq!((code, &first["status"]), (202, &json!("pending")), "{first}");
    let (code, again) = post(&relay, &gasless.signed(&good), Some("one")).await;
    assert_eq!(
        (code, &again["transactionId"]),
        (202, &first["transactionId"]),
        "the duplicate gets the same transaction, not a nonce error"
    );
    let (code, answer) = post(&relay, &gasless.signed(&gasless.transfer(2, 1).await), Some("one")).await;
    assert_eq!((code, &answer["code"]), (422, &json!("idempotency-key-reused")));
    // Its nonce is taken now: a second request is refused, and `pending=true` shows the next nonce.
    let (code, answer) = post(&relay, &gasless.signed(&good), None).await;
    assert_eq!((code, &answer["transactionId"]), (400, &first["transactionId"]), "{answer}");
    assert!(answer["detail"].as_str().unwrap().contains(first["transactionId"].as_str().unwrap()));
    let nonce = format!("/api/v1/relay/gasless/nonce/{user}");
    assert_eq!(relay.get(&nonce).await, (200, json!({ "nonce": "0" })), "the forwarder's nonce");
    assert_eq!(relay.get(&format!("{nonce}?pending=true")).await, (200, json!({ "nonce": "1" })));
    assert_eq!(stored(&relay).await, 1);
}

#[tokio::test]
async fn without_the_chain_a_request_gets_503_and_nothing_is_stored() {
    let gasless = GaslessFixture::new().await;
    let link = gasless.link_to_chain().await;
    // The process starts without the chain.
    link.set(Mode::BlackHole).await;
    let relay = gasless.setup(1).behind("RPC_URL", &link).env("RPC_TIMEOUT_MS", "500").start().await;
    let request = gasless.signed(&gasless.transfer(1, 0).await);
    let nonce = format!("/api/v1/relay/gasless/nonce/{}", gasless.user.address());
    for mode in [Mode::BlackHole, Mode::Refuse] {
        link.set(mode).await;
        let (code, answer) = post(&relay, &request, None).await;
        assert_eq!((code, &answer["code"]), (503, &json!("unavailable")), "{answer}");
        assert!(answer["detail"].as_str().unwrap().contains("RPC_URL"), "{answer}");
        assert_eq!(relay.get(&nonce).await.0, 503);
        assert_eq!(stored(&relay).await, 0);
    }
    link.set(Mode::Forward).await;
    let (code, answer) = post(&relay, &request, None).await;
    assert_eq!(code, 202, "{answer}");
    eventually(SOON, "the request to reach a relayer", || async { relay.relayers[0].accepted().pop() }).await;
}

#[tokio::test]
async fn a_chain_or_forwarder_other_than_configured_is_named_in_the_answer() {
    let gasless = GaslessFixture::new().await;
    let request = gasless.signed(&gasless.transfer(1, 0).await);
    for (name, value, words) in [
        ("FORWARDER_NAME", "Other".to_owned(), ["FORWARDER_NAME", "Other", FORWARDER_NAME]),
        ("CHAIN_ID", "1".to_owned(), ["CHAIN_ID", "1", "31337"]),
        ("FORWARDER_ADDRESS", gasless.contracts.token.to_string(), ["FORWARDER_ADDRESS", "no ERC2771Forwarder", "0x"]),
        ("FORWARDER_ADDRESS", gasless.friend.to_string(), ["FORWARDER_ADDRESS", "no ERC2771Forwarder", "0x"]),
    ] {
        let relay = gasless.setup(1).env(name, value).start().await;
        let (code, answer) = relay.get(&format!("/api/v1/relay/gasless/nonce/{}", gasless.user.address())).await;
        assert_eq!(code, 503, "{answer}");
        for word in words {
            assert!(answer["detail"].as_str().unwrap().contains(word), "{word} in {answer}");
        }
        // A request is not accepted either, whichever domain it was signed for.
        let (code, answer) = post(&relay, &request, None).await;
        assert!(matches!(code, 401 | 503), "{answer}");
        assert_eq!(stored(&relay).await, 0);
    }
}

#[tokio::test]
async fn without_a_forwarder_the_answer_names_the_variables_to_set() {
    let relay = RelaySetup::relayers(1).start().await;
    let (code, answer) = post(&relay, &json!({}), None).await;
    assert_eq!((code, &answer["code"]), (404, &json!("gasless-off")));
    for name in ["FORWARDER_ADDRESS", "RPC_URL", "CHAIN_ID"] {
        assert!(answer["detail"].as_str().unwrap().contains(name), "{answer}");
    }
    assert_eq!(relay.get("/api/v1/relay/gasless/nonce/0x5FbDB2315678afecb367f032d93F642f64180aa3").await.0, 404);
}
