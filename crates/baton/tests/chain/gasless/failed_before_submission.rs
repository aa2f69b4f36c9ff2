//! Gasless and direct transactions that fail before they are sent: deadline passed, or the pre-flight check reverts.

use alloy_primitives::U256;
use alloy_sol_types::SolCall;
use harness::chain::{ForwardRequest, Token};
use harness::proxy::Mode;
use harness::wait::eventually;
use serde_json::{Value, json};

use super::{GaslessFixture, post};
use crate::relay_fixture::{RelayFixture, SOON};

async fn send(relay: &RelayFixture, body: &Value) -> String {
    let (code, answer) = post(relay, body, None).await;
    assert_eq!(code, 202, "{answer}");
    answer["transactionId"].as_str().unwrap().to_owned()
}

fn assert_nothing_sent(relay: &RelayFixture) {
    assert!(relay.relayers.iter().all(|relayer| relayer.accepted().is_empty()));
}

#[tokio::test]
async fn a_request_whose_deadline_passes_in_the_queue_fails_unsent() {
    let gasless = GaslessFixture::new().await;
    let relay = gasless.setup(1).start().await;
    relay.relayers[0].change_faults(|faults| faults.paused = true);
    relay.until_relayer(0, "paused").await;
    let now = u64::try_from(time::OffsetDateTime::now_utc().unix_timestamp()).unwrap();
    let soon = ForwardRequest { deadline: (now + 3).try_into().unwrap(), ..gasless.transfer(1, 0).await };
    let mut body = gasless.signed(&soon);
    body["retryOnFailure"] = json!(true);
    let id = send(&relay, &body).await;
    eventually(SOON, "its deadline to pass", || async {
        (time::OffsetDateTime::now_utc().unix_timestamp() > i64::try_from(now + 4).unwrap()).then_some(())
    })
    .await;
    relay.relayers[0].change_faults(|faults| faults.paused = false);
    let shown = relay.until_status(&id, "failed").await;
    assert!(shown["error_message"].as_str().unwrap().contains("deadline"), "{shown}");
    assert_nothing_sent(&relay);
    let (_, dead_letters) = relay.command(["dlq", "list"]).await;
    assert!(dead_letters.contains(&id), "{dead_letters}");
}

#[tokio::test]
async fn the_preflight_fails_reverting_calls_with_their_reason() {
    let gasless = GaslessFixture::new().await;
    let relay = gasless.setup(1).env("RELAY_PREFLIGHT", "true").start().await;
    let user = gasless.user.address();
    let token = gasless.contracts.token;

    // Gasless: the forwarder hides the target's revert reason; the pre-flight finds it.
    for (call, reason) in [
        (Token::refuseWithReasonCall { reason: "shop is closed".into() }.abi_encode(), "shop is closed"),
        (Token::refuseWithErrorCall { code: U256::from(7) }.abi_encode(), "custom error 0x"),
    ] {
        let id = send(&relay, &gasless.signed(&gasless.contracts.request(user, call).await)).await;
        let shown = relay.until_status(&id, "failed").await;
        assert!(shown["error_message"].as_str().unwrap().contains(reason), "{shown}");
    }
    // A target that does not trust the forwarder: the forwarder reverts with its own error.
    let stranger = ForwardRequest { to: gasless.friend, ..gasless.transfer(1, 0).await };
    let id = send(&relay, &gasless.signed(&stranger)).await;
    let shown = relay.until_status(&id, "failed").await;
    assert!(shown["error_message"].as_str().unwrap().contains("ERC2771UntrustfulTarget"), "{shown}");

    // Direct.
    let call = Token::refuseWithReasonCall { reason: "no entry".into() }.abi_encode();
    let data = format!("0x{}", alloy_primitives::hex::encode(call));
    let id = relay.send(&json!({ "to": token.to_string(), "data": data, "gas": 100000 })).await;
    let shown = relay.until_status(&id, "failed").await;
    assert!(shown["error_message"].as_str().unwrap().contains("no entry"), "{shown}");
    assert_nothing_sent(&relay);

    // Calls that succeed are sent.
    let id = send(&relay, &gasless.signed(&gasless.transfer(1, 0).await)).await;
    relay.until_status(&id, "confirmed").await;
    let call = Token::touchCall {}.abi_encode();
    let data = format!("0x{}", alloy_primitives::hex::encode(call));
    let id = relay.send(&json!({ "to": token.to_string(), "data": data, "gas": 100000 })).await;
    relay.until_status(&id, "confirmed").await;
}

#[tokio::test]
async fn gasless_requests_are_tried_before_they_are_sent_unless_that_is_switched_off() {
    let gasless = GaslessFixture::new().await;
    let relay = gasless.setup(1).start().await;
    let call = Token::refuseWithReasonCall { reason: "shop is closed".into() }.abi_encode();
    let request = gasless.contracts.request(gasless.user.address(), call).await;
    let id = send(&relay, &gasless.signed(&request)).await;
    let shown = relay.until_status(&id, "failed").await;
    assert!(shown["error_message"].as_str().unwrap().contains("shop is closed"), "{shown}");
    assert_nothing_sent(&relay);
    // It cost nothing, so it may be tried again.
    send(&relay, &gasless.signed(&request)).await;
}

#[tokio::test]
async fn without_the_chain_the_preflight_defers_and_fails_nothing() {
    let gasless = GaslessFixture::new().await;
    let link = gasless.link_to_chain().await;
    let relay = gasless
        .setup(1)
        .behind("RPC_URL", &link)
        .env("RELAY_PREFLIGHT", "true")
        .env("RPC_TIMEOUT_MS", "300")
        .start()
        .await;
    link.set(Mode::Refuse).await;
    let id = relay.send(&json!({ "to": gasless.friend.to_string(), "value": "0", "gas": 21000 })).await;
    eventually(SOON, "the submission to be deferred", || async {
        (relay.metric("baton_waits_total", "").await >= 1.0).then_some(())
    })
    .await;
    assert_eq!(relay.status(&id).await["status"], "pending");
    assert_nothing_sent(&relay);
    link.set(Mode::Forward).await;
    relay.until_status(&id, "confirmed").await;
}
