//! Gasless transactions with relayers that sign and send: the reported status matches the chain.

use std::time::Duration;

use alloy_primitives::U256;
use alloy_sol_types::SolCall;
use harness::chain::{CHAIN_ID, FORWARDER_NAME, ForwardRequest, Token};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::GaslessFixture;
use crate::chain_fixture::{ChainFixture, ChainSetup, LATER};

/// A setup for these contracts, with relayers that sign.
fn signing_setup(gasless: &GaslessFixture) -> ChainSetup {
    ChainSetup::on(&gasless.chain)
        .env("CHAIN_ID", CHAIN_ID.to_string())
        .env("FORWARDER_ADDRESS", gasless.contracts.forwarder.to_string())
        .env("FORWARDER_NAME", FORWARDER_NAME)
}

async fn send(relay: &ChainFixture, body: &Value) -> String {
    let (code, answer) = relay.post("gasless", body).await;
    assert_eq!(code, 202, "{answer}");
    answer["transactionId"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_user_without_ether_moves_tokens_and_the_chain_knows_the_hash() {
    let gasless = GaslessFixture::new().await;
    let relay = signing_setup(&gasless).start().await;
    let user = gasless.user.address();
    let (code, answer) = relay.get(&format!("/api/v1/relay/gasless/nonce/{user}")).await;
    assert_eq!((code, answer["nonce"].as_str()), (200, Some("0")));

    let id = send(&relay, &gasless.signed(&gasless.transfer(3, 0).await)).await;
    let shown = relay.until_status(&id, "confirmed").await;
    assert_eq!(shown["type"], "gasless");
    let receipt = gasless.chain.receipt(shown["hash"].as_str().unwrap()).await.unwrap();
    assert!(receipt.status() && receipt.block_number.is_some());
    assert_eq!(relay.until_block(&id).await["block_number"], json!(receipt.block_number));
    assert_eq!(receipt.to, Some(gasless.contracts.forwarder));
    assert!(relay.keys.iter().any(|key| key.address() == receipt.from), "a relayer paid the gas");
    assert_eq!(shown["from"].as_str().unwrap().to_lowercase(), receipt.from.to_string().to_lowercase());
    assert_eq!(gasless.contracts.tokens(gasless.friend).await, U256::from(3));
    assert_eq!(gasless.contracts.tokens(user).await, U256::from(997));
    assert_eq!(gasless.chain.balance(user).await, U256::ZERO);
    let (_, answer) = relay.get(&format!("/api/v1/relay/gasless/nonce/{user}")).await;
    assert_eq!(answer["nonce"], "1", "the user's nonce increased");

    // Its nonce is used now.
    let (code, answer) = relay.post("gasless", &gasless.signed(&gasless.transfer(4, 0).await)).await;
    assert_eq!(code, 400, "{answer}");
    assert_eq!(answer["errors"][0]["field"], "request.nonce");
}

#[tokio::test]
async fn the_target_receives_the_value_and_sees_the_user_as_sender() {
    let gasless = GaslessFixture::new().await;
    let relay = signing_setup(&gasless).env("GASLESS_ALLOW_VALUE", "true").start().await;
    let user = gasless.user.address();
    let touch = gasless.contracts.request(user, Token::touchCall {}.abi_encode()).await;
    let id = send(&relay, &gasless.signed(&ForwardRequest { value: U256::from(12), ..touch })).await;
    relay.until_status(&id, "confirmed").await;
    assert_eq!(gasless.contracts.last_caller().await, user);
    assert_eq!(gasless.chain.balance(gasless.contracts.token).await, U256::from(12));
}

#[tokio::test]
async fn the_target_receives_the_signed_gas() {
    let gasless = GaslessFixture::new().await;
    let relay = signing_setup(&gasless).env("GASLESS_GAS_MAX", "5000000").start().await;
    let transfer = gasless.transfer(1, 0).await;
    // With enough gas it works, whether just enough or plenty.
    let mut nonce = 0;
    for gas in [60_000_u64, 5_000_000] {
        let request = ForwardRequest { gas: U256::from(gas), nonce: U256::from(nonce), ..transfer.clone() };
        let id = send(&relay, &gasless.signed(&request)).await;
        relay.until_status(&id, "confirmed").await;
        nonce += 1;
    }
    // With too little, the target runs out of gas and the nonce is not used.
    let request = ForwardRequest { gas: U256::from(2_000), nonce: U256::from(nonce), ..transfer };
    let id = send(&relay, &gasless.signed(&request)).await;
    let shown = relay.until_status(&id, "failed").await;
    assert!(shown["error_message"].as_str().is_some_and(|reason| !reason.is_empty()), "{shown}");
    assert_eq!(gasless.contracts.forwarder_nonce(gasless.user.address()).await, U256::from(nonce));
}

#[tokio::test]
async fn a_request_that_failed_on_the_chain_is_not_taken_again() {
    let gasless = GaslessFixture::new().await;
    // A failure counts once its block is final, and this chain makes no blocks by itself.
    let setup = signing_setup(&gasless).env("GASLESS_PREFLIGHT", "false").env("CHAIN_FINALITY_BLOCKS", "0");
    let relay = setup.start().await;
    let user = gasless.user.address();
    let mut failed = Vec::new();
    for code in [1, 2] {
        let call = Token::refuseWithErrorCall { code: U256::from(code) }.abi_encode();
        let request = gasless.contracts.request(user, call).await;
        let id = send(&relay, &gasless.signed(&request)).await;
        let shown = relay.until_status(&id, "failed").await;
        assert!(shown["hash"].is_string(), "it was executed: {shown}");
        failed.push((id, request));
    }
    let mined = relay.mined().await;
    // The first one too, although the second has taken its nonce over.
    for (id, request) in &failed {
        let (code, answer) = relay.post("gasless", &gasless.signed(request)).await;
        assert_eq!((code, &answer["errors"][0]["field"]), (400, &json!("request")), "{answer}");
        assert!(answer["detail"].as_str().unwrap().contains("failed on the chain"), "{id}: {answer}");
    }
    assert_eq!(relay.mined().await, mined, "no gas was spent again");
    let id = send(&relay, &gasless.signed(&gasless.transfer(1, 0).await)).await;
    relay.until_status(&id, "confirmed").await;
}

#[tokio::test]
async fn ten_queued_nonces_are_executed_in_order_while_the_consumer_is_killed_repeatedly() {
    const COUNT: u64 = 10;
    let gasless = GaslessFixture::new().await;
    let mut relay = signing_setup(&gasless).split().start().await;
    let mut consumer = relay.consumer.take().unwrap();
    // Without relayers, all ten wait before the first is sent.
    relay.relayers.kill9().await.unwrap();
    let mut ids = Vec::new();
    for nonce in 0..COUNT {
        ids.push(send(&relay, &gasless.signed(&gasless.transfer(nonce + 1, nonce).await)).await);
    }
    relay.relayers.restart().await.unwrap();
    relay.relayers_ready().await;
    let user = gasless.user.address();
    let until = Instant::now() + LATER;
    let (mut executed, mut kills) = (U256::ZERO, 0);
    while executed < U256::from(COUNT) {
        assert!(Instant::now() < until, "{executed} of {COUNT}\n{}", consumer.log_excerpt());
        consumer.kill9().await.unwrap();
        kills += 1;
        consumer.restart().await.unwrap();
        // The consumer lives for one second, or until another transaction is executed, when most is in flight.
        let end = Instant::now() + Duration::from_secs(1);
        let before = executed;
        while executed == before && Instant::now() < end {
            executed = gasless.contracts.forwarder_nonce(user).await;
        }
    }
    println!("{kills} kills");

    let mut positions = Vec::new();
    for id in &ids {
        let shown = relay.until_status(id, "confirmed").await;
        let receipt = gasless.chain.receipt(shown["hash"].as_str().unwrap()).await.unwrap();
        assert!(receipt.status(), "{shown}");
        positions.push((receipt.block_number.unwrap(), receipt.transaction_index.unwrap()));
    }
    assert!(positions.is_sorted(), "{positions:?}");
    assert_eq!(gasless.contracts.tokens(gasless.friend).await, U256::from(COUNT * (COUNT + 1) / 2));
    assert_eq!(relay.mined().await, COUNT, "each was sent once");
    assert!(kills >= 3, "too few kills before the end: {kills}");
}
