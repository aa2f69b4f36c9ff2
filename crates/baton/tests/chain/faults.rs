//! Faults between the relayers and their chain: each transaction is still executed once.

use std::collections::BTreeMap;

use alloy_primitives::{Address, U256};
use harness::chain::{Chain, ETHER, TransactionRequest, new_key};
use harness::proxy::{Mode, Proxy};
use harness::servers::{Server, Servers};
use harness::wait::{eventually, eventually_ok};

use crate::chain_fixture::{ChainSetup, LATER, SOON};
use crate::rpc_proxy::{RpcProxy, SendFault};

#[tokio::test]
async fn each_transaction_is_executed_once_while_relayers_and_consumer_are_killed_and_cut_off() {
    const ROUNDS: u64 = 10;
    const EACH: u64 = 12;
    let chain = Chain::shared();
    let link = Proxy::start(harness::engine::address("BATON_TEST_RPC_URL")).await;
    let mut relay = ChainSetup::on(&chain).rpc(link.url()).split().start().await;
    let mut sent = BTreeMap::new();
    for round in 0..ROUNDS {
        let before = relay.mined().await;
        for serial in 1..=EACH {
            let friend = new_key().address();
            sent.insert(relay.send(friend, U256::from(serial), &[]).await, (friend, serial));
        }
        // While transactions are in flight, at another point each round.
        eventually_ok(LATER, "some more to be mined", || async {
            let mined = relay.mined().await;
            if mined > before + round % 4 { Ok(()) } else { Err(format!("{mined}\n{}", relay.process_logs())) }
        })
        .await;
        link.cut().await;
        if round % 2 == 0 {
            relay.relayers.kill9().await.unwrap();
            relay.relayers.restart().await.unwrap();
            relay.relayers_ready().await;
        }
        if round % 3 == 0 {
            relay.consumer.as_mut().unwrap().restart().await.unwrap();
        }
    }
    for (id, (friend, value)) in &sent {
        let end = relay.until_status(id, "confirmed").await;
        assert!(chain.receipt(end["hash"].as_str().unwrap()).await.is_some_and(|receipt| receipt.to == Some(*friend)));
        assert_eq!(chain.balance(*friend).await, U256::from(*value));
    }
    assert_eq!(relay.mined().await, ROUNDS * EACH, "exactly as many as requested");
}

/// The relayer is killed after it has stored the signature and before the chain has the transaction: after the restart it
/// sends the same bytes.
#[tokio::test]
async fn a_transaction_signed_but_not_sent_before_a_kill_is_sent_with_the_same_signature() {
    let servers = Servers::running(&[Server::Chain]).await;
    let chain = Chain::of(&servers);
    let rpc = RpcProxy::start(&chain).await;
    let mut relay = ChainSetup::on(&chain).rpc(rpc.url()).start().await;
    relay.until_enabled(0).await;
    let friend = new_key().address();
    rpc.set(SendFault::Dropped);
    let ids = [relay.post_at_relayer(0, friend, 1).await, relay.post_at_relayer(0, friend, 2).await];
    let signed = relay.until_record(0, &ids[0], "sent").await;
    // New blocks change the fees: a second signature would differ.
    for _ in 0..5 {
        chain.mine().await;
    }
    relay.relayers.restart().await.unwrap();
    relay.relayers_ready().await;
    relay.until_enabled(0).await;
    let after = relay.record(0, &ids[0]).await;
    assert_eq!((&after["hash"], &after["nonce"]), (&signed["hash"], &signed["nonce"]));

    rpc.set(SendFault::None);
    let end = relay.until_record(0, &ids[0], "confirmed").await;
    assert_eq!(end["hash"], signed["hash"]);
    assert_eq!(relay.until_record(0, &ids[1], "confirmed").await["nonce"], 1);
    assert_eq!(chain.balance(friend).await, U256::from(3));
    assert_eq!(rpc.signed_transactions().len(), 2, "one signed transaction each, however often it was sent");
}

/// The relayer is killed after the chain has the transaction and before it has the answer: after the restart it finds the
/// transaction on the chain.
#[tokio::test]
async fn a_transaction_sent_without_an_answer_before_a_kill_is_not_signed_again() {
    let chain = Chain::shared();
    let rpc = RpcProxy::start(&chain).await;
    let mut relay = ChainSetup::on(&chain).rpc(rpc.url()).start().await;
    relay.until_enabled(0).await;
    let (relayer, friend) = (relay.keys[0].address(), new_key().address());
    rpc.set(SendFault::AnswerLost);
    let id = relay.post_at_relayer(0, friend, 1).await;
    eventually(SOON, "the chain to mine it", || async { (chain.nonce(relayer).await == 1).then_some(()) }).await;
    relay.relayers.restart().await.unwrap();
    relay.relayers_ready().await;
    let end = relay.until_record(0, &id, "confirmed").await;
    assert_eq!(end["nonce"], 0);
    rpc.set(SendFault::None);
    let next = relay.post_at_relayer(0, friend, 1).await;
    assert_eq!(relay.until_record(0, &next, "confirmed").await["nonce"], 1);
    assert_eq!(chain.balance(friend).await, U256::from(2));
    assert_eq!(rpc.signed_transactions().len(), 2);
}

#[tokio::test]
async fn transactions_accepted_during_a_chain_outage_are_sent_in_order_afterwards() {
    let chain = Chain::shared();
    let link = Proxy::start(harness::engine::address("BATON_TEST_RPC_URL")).await;
    let mut relay = ChainSetup::on(&chain).rpc(link.url()).start().await;
    relay.until_enabled(0).await;
    let friend = new_key().address();
    let first = relay.post_at_relayer(0, friend, 1).await;
    relay.until_record(0, &first, "confirmed").await;

    link.set(Mode::Refuse).await;
    let mut ids = Vec::new();
    for _ in 0..10 {
        ids.push(relay.post_at_relayer(0, friend, 1).await);
    }
    for id in &ids {
        assert_eq!(relay.record(0, id).await["status"], "pending");
    }
    // Restarted without the chain, a relayer is disabled and keeps its transactions.
    relay.relayers.kill9().await.unwrap();
    relay.relayers.restart().await.unwrap();
    relay.relayers_ready().await;
    let (_, relayers) = crate::chain_fixture::answer(
        relay
            .http
            .get(format!("{}/api/v1/relayers", relay.relayer_urls[0]))
            .bearer_auth(crate::chain_fixture::RELAYER_KEY),
    )
    .await;
    assert_eq!(relayers["data"][0]["system_disabled"], true);
    assert_eq!(relay.record(0, &ids[0]).await["status"], "pending");
    let waiting = relay.send(friend, U256::from(5), &[]).await;

    link.set(Mode::Forward).await;
    for (place, id) in ids.iter().enumerate() {
        let record = relay.until_record(0, id, "confirmed").await;
        assert_eq!(record["nonce"], place + 1, "in the order of acceptance");
    }
    relay.until_status(&waiting, "confirmed").await;
    assert_eq!(chain.balance(friend).await, U256::from(1 + 10 + 5));
    assert_eq!(relay.mined().await, 12);
}

#[tokio::test]
async fn a_nonce_used_by_another_sender_is_replaced() {
    let servers = Servers::running(&[Server::Chain]).await;
    let chain = Chain::of(&servers);
    let relay = ChainSetup::on(&chain).start().await;
    relay.until_enabled(0).await;
    let (friend, stranger) = (new_key().address(), new_key().address());
    chain.set_automine(false).await;
    let id = relay.post_at_relayer(0, friend, 1).await;
    let before = relay.until_record(0, &id, "submitted").await;
    assert_eq!(before["nonce"], 0);

    // Another transaction with the same key and nonce and a higher fee.
    let replacement = TransactionRequest::default()
        .with_to(stranger)
        .with_value(U256::from(1))
        .with_nonce(0)
        .with_gas_limit(21_000)
        .with_fees(100_000_000_000, 50_000_000_000);
    chain.send_as_is(&relay.keys[0], replacement).await;
    chain.mine().await;
    eventually(SOON, "the stranger to be paid", || async {
        (chain.balance(stranger).await == U256::from(1)).then_some(())
    })
    .await;
    chain.set_automine(true).await;

    let record = relay.until_record(0, &id, "confirmed").await;
    assert_eq!(record["nonce"], 1);
    assert_ne!(record["hash"], before["hash"]);
    assert_eq!(chain.balance(friend).await, U256::from(1));
    assert_eq!(chain.nonce(relay.keys[0].address()).await, 2);
}

#[tokio::test]
async fn a_chain_that_lost_its_state_gets_the_open_transaction_once() {
    let servers = Servers::running(&[Server::Chain]).await;
    let chain = Chain::of(&servers);
    let relay = ChainSetup::on(&chain).start().await;
    relay.until_enabled(0).await;
    let friend = new_key().address();
    for _ in 0..3 {
        let id = relay.post_at_relayer(0, friend, 1).await;
        relay.until_record(0, &id, "confirmed").await;
    }
    chain.set_automine(false).await;
    let id = relay.post_at_relayer(0, friend, 1).await;
    assert_eq!(relay.until_record(0, &id, "submitted").await["nonce"], 3);

    servers.kill(Server::Chain).await;
    servers.restart(Server::Chain).await;
    let relayer: Address = relay.keys[0].address();
    assert_eq!(chain.head().await, 0, "the chain starts from an empty state");
    chain.fund(relayer, U256::from(ETHER)).await;
    relay.until_record(0, &id, "confirmed").await;
    assert_eq!(chain.balance(friend).await, U256::from(1), "confirmed transfers are not sent again");
    assert_eq!(chain.nonce(relayer).await, 4, "three no-ops and the transfer");
    let next = relay.post_at_relayer(0, friend, 1).await;
    assert_eq!(relay.until_record(0, &next, "confirmed").await["nonce"], 4);
}
