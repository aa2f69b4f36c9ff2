//! What is not accepted: each with the field, the reason and the fix, and nothing queued.

use alloy_primitives::{Bytes, Signature, U256, hex};
use alloy_sol_types::{SolStruct, eip712_domain};
use harness::chain::{CHAIN_ID, FORWARDER_NAME, ForwardRequest, new_key, sign_digest};
use harness::proxy::{Mode, Proxy};
use harness::wait::eventually;
use serde_json::{Value, json};

use super::{Ground, body, known, post};
use crate::relay_fixture::{Plan, SOON, Stand};

async fn refused(stand: &Stand, body: &Value, status: u16, words: &[&str]) -> Value {
    let (code, said) = post(stand, body, None).await;
    let detail = said["detail"].as_str().unwrap_or_default().to_owned();
    assert_eq!(code, status, "{said}");
    for word in words {
        assert!(detail.contains(word), "{word} in {detail}");
    }
    assert_eq!(known(stand).await, 0, "nothing is stored");
    said
}

#[tokio::test]
async fn what_the_forwarder_would_refuse_is_refused_before_it_is_queued() {
    let ground = Ground::new().await;
    let stand = ground.plan(1).start().await;
    let user = ground.user.address().to_string();
    let good = ground.transfer(1, 0).await;

    // Wrong signer.
    let stranger = ground.contracts.sign(&good, &new_key());
    refused(&stand, &body(&good, &stranger), 401, &["signature", &user, FORWARDER_NAME, "31337"]).await;

    // Changed after it was signed.
    let signature = ground.contracts.sign(&good, &ground.user);
    let changed = ForwardRequest { to: ground.friend, ..good.clone() };
    refused(&stand, &body(&changed, &signature), 401, &["signature", "exactly these fields"]).await;

    // Signed for another domain: it looks like another signer, and the answer says for which domain it was checked.
    let forwarder = ground.contracts.forwarder;
    for domain in [
        eip712_domain! { name: "Other", version: "1", chain_id: CHAIN_ID, verifying_contract: forwarder, },
        eip712_domain! { name: FORWARDER_NAME, version: "2", chain_id: CHAIN_ID, verifying_contract: forwarder, },
        eip712_domain! { name: FORWARDER_NAME, version: "1", chain_id: 1, verifying_contract: forwarder, },
        eip712_domain! { name: FORWARDER_NAME, version: "1", chain_id: CHAIN_ID, verifying_contract: ground.friend, },
    ] {
        let signature = sign_digest(good.eip712_signing_hash(&domain), &ground.user);
        assert!(!ground.contracts.verify(&good, &signature).await, "the forwarder agrees");
        refused(&stand, &body(&good, &signature), 401, &["domain", FORWARDER_NAME, &forwarder.to_string()]).await;
    }

    // Too late.
    let late = ForwardRequest { deadline: 1_700_000_000_u64.try_into().unwrap(), ..good.clone() };
    assert!(!ground.contracts.verify(&late, &ground.contracts.sign(&late, &ground.user)).await);
    let said = refused(&stand, &ground.signed(&late), 400, &["1700000000", "sign again"]).await;
    assert_eq!(said["errors"][0]["field"], "request.deadline");

    // Another nonce than the forwarder's.
    let ahead = ForwardRequest { nonce: U256::from(7), ..good.clone() };
    let said = refused(&stand, &ground.signed(&ahead), 400, &["is 7", "is 0"]).await;
    assert_eq!(said["errors"][0]["field"], "request.nonce");

    // The other signature that the same key's owner, or anybody, can make from a valid one.
    let valid = Signature::from_raw(&signature).unwrap();
    let order = U256::from_be_bytes(hex!("fffffffffffffffffffffffffffffffebaaedce6af48a03bbfd25e8cd0364141"));
    let twin = Signature::new(valid.r(), order - valid.s(), !valid.v());
    let twin = Bytes::from(twin.as_bytes());
    assert!(!ground.contracts.verify(&good, &twin).await, "the forwarder agrees");
    refused(&stand, &body(&good, &twin), 401, &["malleable"]).await;

    // A `v` that some libraries write, and this forwarder does not take.
    let mut low_v = signature.to_vec();
    low_v[64] -= 27;
    assert!(!ground.contracts.verify(&good, &Bytes::from(low_v.clone())).await, "the forwarder agrees");
    refused(&stand, &body(&good, &Bytes::from(low_v)), 401, &["27"]).await;

    // A contract cannot sign like that.
    let contract = ForwardRequest { from: ground.contracts.token, ..good.clone() };
    refused(&stand, &ground.signed(&contract), 401, &["request.from", "is a contract"]).await;

    // A malformed one names its fields.
    let mut malformed = ground.signed(&good);
    malformed["request"]["gas"] = json!("0");
    malformed["request"]["from"] = json!("me");
    let said = refused(&stand, &malformed, 400, &[]).await;
    let fields: Vec<_> = said["errors"].as_array().unwrap().iter().map(|error| error["field"].clone()).collect();
    assert_eq!(fields, ["request.from", "request.gas"]);

    // And then the good one, under a key, twice.
    let (code, first) = post(&stand, &ground.signed(&good), Some("one")).await;
    assert_eq!((code, &first["status"]), (202, &json!("pending")), "{first}");
    let (code, again) = post(&stand, &ground.signed(&good), Some("one")).await;
    assert_eq!((code, &again["transactionId"]), (202, &first["transactionId"]), "the same, and not a used nonce");
    let (code, said) = post(&stand, &ground.signed(&ground.transfer(2, 1).await), Some("one")).await;
    assert_eq!((code, &said["code"]), (422, &json!("idempotency-key-reused")));
    // Its nonce is taken now, as whoever asks is told, and as the next to sign knows.
    let (code, said) = post(&stand, &ground.signed(&good), None).await;
    assert_eq!((code, &said["transactionId"]), (400, &first["transactionId"]), "{said}");
    assert!(said["detail"].as_str().unwrap().contains(first["transactionId"].as_str().unwrap()));
    let nonce = format!("/api/v1/relay/gasless/nonce/{user}");
    assert_eq!(stand.get(&nonce).await, (200, json!({ "nonce": "0" })), "the forwarder's own");
    assert_eq!(stand.get(&format!("{nonce}?pending=true")).await, (200, json!({ "nonce": "1" })));
    assert_eq!(known(&stand).await, 1);
}

#[tokio::test]
async fn a_chain_that_does_not_answer_is_503_and_nothing_is_stored() {
    let ground = Ground::new().await;
    let address = ground.chain.url().trim_start_matches("http://").trim_end_matches('/').to_owned();
    let link = Proxy::start(address).await;
    // Nobody waits for the chain at the start.
    link.set(Mode::BlackHole).await;
    let stand = ground.plan(1).behind("RPC_URL", &link).env("RPC_TIMEOUT_MS", "500").start().await;
    let request = ground.signed(&ground.transfer(1, 0).await);
    let nonce = format!("/api/v1/relay/gasless/nonce/{}", ground.user.address());
    for mode in [Mode::BlackHole, Mode::Refuse] {
        link.set(mode).await;
        let (code, said) = post(&stand, &request, None).await;
        assert_eq!((code, &said["code"]), (503, &json!("unavailable")), "{said}");
        assert!(said["detail"].as_str().unwrap().contains("RPC_URL"), "{said}");
        assert_eq!(stand.get(&nonce).await.0, 503);
        assert_eq!(known(&stand).await, 0);
    }
    link.set(Mode::Forward).await;
    let (code, said) = post(&stand, &request, None).await;
    assert_eq!(code, 202, "{said}");
    eventually(SOON, "it to reach a relayer", || async { stand.relayers[0].accepted().pop() }).await;
}

#[tokio::test]
async fn a_chain_or_a_forwarder_other_than_configured_is_named() {
    let ground = Ground::new().await;
    let request = ground.signed(&ground.transfer(1, 0).await);
    for (name, value, words) in [
        ("FORWARDER_NAME", "Other".to_owned(), ["FORWARDER_NAME", "Other", FORWARDER_NAME]),
        ("CHAIN_ID", "1".to_owned(), ["CHAIN_ID", "1", "31337"]),
        ("FORWARDER_ADDRESS", ground.contracts.token.to_string(), ["FORWARDER_ADDRESS", "no ERC2771Forwarder", "0x"]),
        ("FORWARDER_ADDRESS", ground.friend.to_string(), ["FORWARDER_ADDRESS", "no ERC2771Forwarder", "0x"]),
    ] {
        let stand = ground.plan(1).env(name, value).start().await;
        let (code, said) = stand.get(&format!("/api/v1/relay/gasless/nonce/{}", ground.user.address())).await;
        assert_eq!(code, 503, "{said}");
        for word in words {
            assert!(said["detail"].as_str().unwrap().contains(word), "{word} in {said}");
        }
        // A request is not taken either, whatever domain it was signed for.
        let (code, said) = post(&stand, &request, None).await;
        assert!(matches!(code, 401 | 503), "{said}");
        assert_eq!(known(&stand).await, 0);
    }
}

#[tokio::test]
async fn without_a_forwarder_the_calls_say_what_to_set() {
    let stand = Plan::relayers(1).start().await;
    let (code, said) = post(&stand, &json!({}), None).await;
    assert_eq!((code, &said["code"]), (503, &json!("gasless-off")));
    for name in ["FORWARDER_ADDRESS", "RPC_URL", "CHAIN_ID"] {
        assert!(said["detail"].as_str().unwrap().contains(name), "{said}");
    }
    assert_eq!(stand.get("/api/v1/relay/gasless/nonce/0x5FbDB2315678afecb367f032d93F642f64180aa3").await.0, 503);
}
