//! Gasless transactions by relayers that sign and send: what the product reports is what the chain did.

use std::time::Duration;

use alloy_primitives::U256;
use alloy_sol_types::SolCall;
use harness::chain::{CHAIN_ID, FORWARDER_NAME, ForwardRequest, Token};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::Ground;
use crate::chain_fixture::{LATER, Plan, Stand};

/// The product and its relayers, set up for this ground.
fn plan(ground: &Ground) -> Plan {
    Plan::on(&ground.chain)
        .env("CHAIN_ID", CHAIN_ID.to_string())
        .env("FORWARDER_ADDRESS", ground.contracts.forwarder.to_string())
        .env("FORWARDER_NAME", FORWARDER_NAME)
}

async fn accepted(stand: &Stand, body: &Value) -> String {
    let (code, said) = stand.post("gasless", body).await;
    assert_eq!(code, 202, "{said}");
    said["transactionId"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_user_without_ether_moves_tokens_and_the_chain_knows_the_hash() {
    let ground = Ground::new().await;
    let stand = plan(&ground).start().await;
    let user = ground.user.address();
    let (code, said) = stand.get(&format!("/api/v1/relay/gasless/nonce/{user}")).await;
    assert_eq!((code, said["nonce"].as_str()), (200, Some("0")));

    let id = accepted(&stand, &ground.signed(&ground.transfer(3, 0).await)).await;
    let shown = stand.until_status(&id, "confirmed").await;
    assert_eq!(shown["type"], "gasless");
    let receipt = ground.chain.receipt(shown["hash"].as_str().unwrap()).await.unwrap();
    assert!(receipt.status() && receipt.block_number.is_some());
    assert_eq!(stand.until_block(&id).await["block_number"], json!(receipt.block_number));
    assert_eq!(receipt.to, Some(ground.contracts.forwarder));
    assert!(stand.keys.iter().any(|key| key.address() == receipt.from), "a relayer paid");
    assert_eq!(shown["from"].as_str().unwrap().to_lowercase(), receipt.from.to_string().to_lowercase());
    assert_eq!(ground.contracts.tokens(ground.friend).await, U256::from(3));
    assert_eq!(ground.contracts.tokens(user).await, U256::from(997));
    assert_eq!(ground.chain.balance(user).await, U256::ZERO);
    let (_, said) = stand.get(&format!("/api/v1/relay/gasless/nonce/{user}")).await;
    assert_eq!(said["nonce"], "1", "the user's nonce went up");

    // Its nonce is used now.
    let (code, said) = stand.post("gasless", &ground.signed(&ground.transfer(4, 0).await)).await;
    assert_eq!(code, 400, "{said}");
    assert_eq!(said["errors"][0]["field"], "request.nonce");
}

#[tokio::test]
async fn value_goes_along_and_the_target_sees_the_user() {
    let ground = Ground::new().await;
    let stand = plan(&ground).start().await;
    let user = ground.user.address();
    let touch = ground.contracts.request(user, Token::touchCall {}.abi_encode()).await;
    let id = accepted(&stand, &ground.signed(&ForwardRequest { value: U256::from(12), ..touch })).await;
    stand.until_status(&id, "confirmed").await;
    assert_eq!(ground.contracts.last_caller().await, user);
    assert_eq!(ground.chain.balance(ground.contracts.token).await, U256::from(12));
}

#[tokio::test]
async fn the_gas_that_was_signed_for_reaches_the_target() {
    let ground = Ground::new().await;
    let stand = plan(&ground).start().await;
    let transfer = ground.transfer(1, 0).await;
    // With what it needs it works, for a little and for much.
    let mut nonce = 0;
    for gas in [60_000_u64, 5_000_000] {
        let request = ForwardRequest { gas: U256::from(gas), nonce: U256::from(nonce), ..transfer.clone() };
        let id = accepted(&stand, &ground.signed(&request)).await;
        stand.until_status(&id, "confirmed").await;
        nonce += 1;
    }
    // With less it is the target that runs out, and nothing is used up but gas.
    let request = ForwardRequest { gas: U256::from(2_000), nonce: U256::from(nonce), ..transfer };
    let id = accepted(&stand, &ground.signed(&request)).await;
    let shown = stand.until_status(&id, "failed").await;
    assert!(shown["error_message"].as_str().is_some_and(|reason| !reason.is_empty()), "{shown}");
    assert_eq!(ground.contracts.forwarder_nonce(ground.user.address()).await, U256::from(nonce));
}

#[tokio::test]
async fn ten_queued_nonces_are_executed_in_order_while_the_consumer_is_killed_every_second() {
    const COUNT: u64 = 10;
    let ground = Ground::new().await;
    let mut stand = plan(&ground).split().start().await;
    let mut consumer = stand.consumer.take().unwrap();
    // All of them wait before the first can go.
    stand.relayers.kill9().await.unwrap();
    let mut ids = Vec::new();
    for nonce in 0..COUNT {
        ids.push(accepted(&stand, &ground.signed(&ground.transfer(nonce + 1, nonce).await)).await);
    }
    stand.relayers.restart().await.unwrap();
    stand.relayers_ready().await;
    let user = ground.user.address();
    let until = Instant::now() + LATER;
    let (mut executed, mut kills) = (U256::ZERO, 0);
    while executed < U256::from(COUNT) {
        assert!(Instant::now() < until, "{executed} of {COUNT}\n{}", consumer.story());
        consumer.kill9().await.unwrap();
        kills += 1;
        consumer.restart().await.unwrap();
        // A life lasts a second, or until another one is executed: then the most is under way.
        let end = Instant::now() + Duration::from_secs(1);
        let before = executed;
        while executed == before && Instant::now() < end {
            executed = ground.contracts.forwarder_nonce(user).await;
        }
    }
    println!("{kills} kills");

    let mut places = Vec::new();
    for id in &ids {
        let shown = stand.until_status(id, "confirmed").await;
        let receipt = ground.chain.receipt(shown["hash"].as_str().unwrap()).await.unwrap();
        assert!(receipt.status(), "{shown}");
        places.push((receipt.block_number.unwrap(), receipt.transaction_index.unwrap()));
    }
    assert!(places.is_sorted(), "{places:?}");
    assert_eq!(ground.contracts.tokens(ground.friend).await, U256::from(COUNT * (COUNT + 1) / 2));
    assert_eq!(stand.mined().await, COUNT, "each was sent once");
    assert!(kills >= 3, "it was over before it could hurt: {kills} kills");
}
