//! What fails before anybody has paid for it: too late, or tried in vain.

use alloy_primitives::U256;
use alloy_sol_types::SolCall;
use harness::chain::{ForwardRequest, Token};
use harness::proxy::{Mode, Proxy};
use harness::wait::eventually;
use serde_json::{Value, json};

use super::{Ground, post};
use crate::relay_fixture::{SOON, Stand};

async fn accepted(stand: &Stand, body: &Value) -> String {
    let (code, said) = post(stand, body, None).await;
    assert_eq!(code, 202, "{said}");
    said["transactionId"].as_str().unwrap().to_owned()
}

fn nothing_was_sent(stand: &Stand) {
    assert!(stand.relayers.iter().all(|relayer| relayer.accepted().is_empty()));
}

#[tokio::test]
async fn one_that_expires_in_the_queue_fails_and_is_not_sent() {
    let ground = Ground::new().await;
    let stand = ground.plan(1).start().await;
    stand.relayers[0].change_faults(|faults| faults.paused = true);
    stand.until_relayer(0, "paused").await;
    let now = u64::try_from(time::OffsetDateTime::now_utc().unix_timestamp()).unwrap();
    let soon = ForwardRequest { deadline: (now + 3).try_into().unwrap(), ..ground.transfer(1, 0).await };
    let mut body = ground.signed(&soon);
    body["retryOnFailure"] = json!(true);
    let id = accepted(&stand, &body).await;
    eventually(SOON, "its deadline to pass", || async {
        (time::OffsetDateTime::now_utc().unix_timestamp() > i64::try_from(now + 4).unwrap()).then_some(())
    })
    .await;
    stand.relayers[0].change_faults(|faults| faults.paused = false);
    let shown = stand.until_status(&id, "failed").await;
    assert!(shown["error_message"].as_str().unwrap().contains("deadline"), "{shown}");
    nothing_was_sent(&stand);
    let (_, letters) = stand.command(["dlq", "list"]).await;
    assert!(letters.contains(&id), "{letters}");
}

#[tokio::test]
async fn the_preflight_fails_what_would_revert_with_the_reason() {
    let ground = Ground::new().await;
    let stand = ground.plan(1).env("RELAY_PREFLIGHT", "true").start().await;
    let user = ground.user.address();
    let token = ground.contracts.token;

    // Gasless: the forwarder keeps the target's reason to itself; it is told all the same.
    for (call, reason) in [
        (Token::refuseWithReasonCall { reason: "shop is closed".into() }.abi_encode(), "shop is closed"),
        (Token::refuseWithErrorCall { code: U256::from(7) }.abi_encode(), "custom error 0x"),
    ] {
        let id = accepted(&stand, &ground.signed(&ground.contracts.request(user, call).await)).await;
        let shown = stand.until_status(&id, "failed").await;
        assert!(shown["error_message"].as_str().unwrap().contains(reason), "{shown}");
    }
    // A target that does not trust the forwarder, by the forwarder's own error.
    let stranger = ForwardRequest { to: ground.friend, ..ground.transfer(1, 0).await };
    let id = accepted(&stand, &ground.signed(&stranger)).await;
    let shown = stand.until_status(&id, "failed").await;
    assert!(shown["error_message"].as_str().unwrap().contains("ERC2771UntrustfulTarget"), "{shown}");

    // Direct, the same way.
    let call = Token::refuseWithReasonCall { reason: "no entry".into() }.abi_encode();
    let data = format!("0x{}", alloy_primitives::hex::encode(call));
    let id = stand.send(&json!({ "to": token.to_string(), "data": data, "gas": 100000 })).await;
    let shown = stand.until_status(&id, "failed").await;
    assert!(shown["error_message"].as_str().unwrap().contains("no entry"), "{shown}");
    nothing_was_sent(&stand);

    // What works is sent.
    let id = accepted(&stand, &ground.signed(&ground.transfer(1, 0).await)).await;
    stand.until_status(&id, "confirmed").await;
    let call = Token::touchCall {}.abi_encode();
    let data = format!("0x{}", alloy_primitives::hex::encode(call));
    let id = stand.send(&json!({ "to": token.to_string(), "data": data, "gas": 100000 })).await;
    stand.until_status(&id, "confirmed").await;
}

#[tokio::test]
async fn without_the_chain_the_preflight_puts_off_and_fails_nothing() {
    let ground = Ground::new().await;
    let address = ground.chain.url().trim_start_matches("http://").trim_end_matches('/').to_owned();
    let link = Proxy::start(address).await;
    let stand = ground
        .plan(1)
        .behind("RPC_URL", &link)
        .env("RELAY_PREFLIGHT", "true")
        .env("RPC_TIMEOUT_MS", "300")
        .start()
        .await;
    link.set(Mode::Refuse).await;
    let id = stand.send(&json!({ "to": ground.friend.to_string(), "value": "0", "gas": 21000 })).await;
    eventually(SOON, "it to be put off", || async {
        (stand.metric("baton_waits_total", "").await >= 1.0).then_some(())
    })
    .await;
    assert_eq!(stand.status(&id).await["status"], "pending");
    nothing_was_sent(&stand);
    link.set(Mode::Forward).await;
    stand.until_status(&id, "confirmed").await;
}
