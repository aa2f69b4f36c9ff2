//! Trouble between the relayers and their chain: each transaction is executed once all the same.

use std::collections::BTreeMap;

use alloy_primitives::{Address, U256};
use alloy_provider::Provider;
use alloy_provider::network::TransactionBuilder;
use harness::chain::{Chain, ETHER, TransactionRequest, new_key};
use harness::proxy::{Mode, Proxy};
use harness::servers::{Server, Servers};
use harness::wait::{eventually, eventually_ok};

use crate::chain_fixture::{LATER, Plan, SOON};
use crate::rpc_proxy::{Gate, Sends};

#[tokio::test]
async fn relayers_and_consumer_killed_and_cut_off_under_load_execute_each_transaction_once() {
    const LIVES: u64 = 10;
    const EACH: u64 = 12;
    let chain = Chain::shared();
    let link = Proxy::start(harness::engine::address("BATON_TEST_RPC_URL")).await;
    let mut stand = Plan::on(&chain).rpc(link.url()).split().start().await;
    let mut sent = BTreeMap::new();
    for life in 0..LIVES {
        let before = stand.mined().await;
        for serial in 1..=EACH {
            let friend = new_key().address();
            sent.insert(stand.send(friend, U256::from(serial), &[]).await, (friend, serial));
        }
        // In the middle of it, each time at another place.
        eventually_ok(LATER, "some more to be mined", || async {
            let mined = stand.mined().await;
            if mined > before + life % 4 { Ok(()) } else { Err(format!("{mined}\n{}", stand.story())) }
        })
        .await;
        link.cut().await;
        if life % 2 == 0 {
            stand.relayers.kill9().await.unwrap();
            stand.relayers.restart().await.unwrap();
            stand.relayers_ready().await;
        }
        if life % 3 == 0 {
            stand.consumer.as_mut().unwrap().restart().await.unwrap();
        }
    }
    for (id, (friend, value)) in &sent {
        let end = stand.until_status(id, "confirmed").await;
        assert!(chain.receipt(end["hash"].as_str().unwrap()).await.is_some_and(|receipt| receipt.to == Some(*friend)));
        assert_eq!(chain.balance(*friend).await, U256::from(*value));
    }
    assert_eq!(stand.mined().await, LIVES * EACH, "not one more than was asked for");
}

/// Killed after the signature is on disk and before the chain has it: the same bytes go out in the next life.
#[tokio::test]
async fn what_was_signed_and_not_sent_before_a_kill_is_sent_as_it_was_signed() {
    let servers = Servers::running(&[Server::Chain]).await;
    let chain = Chain::of(&servers);
    let gate = Gate::before(&chain).await;
    let mut stand = Plan::on(&chain).rpc(gate.url()).start().await;
    stand.until_enabled(0).await;
    let friend = new_key().address();
    gate.set(Sends::HeldBack);
    let ids = [stand.post_at_relayer(0, friend, 1).await, stand.post_at_relayer(0, friend, 2).await];
    let signed = stand.until_record(0, &ids[0], "sent").await;
    // Fees are others now: who signed again would not sign the same.
    for _ in 0..5 {
        chain.mine().await;
    }
    stand.relayers.restart().await.unwrap();
    stand.relayers_ready().await;
    stand.until_enabled(0).await;
    let after = stand.record(0, &ids[0]).await;
    assert_eq!((&after["hash"], &after["nonce"]), (&signed["hash"], &signed["nonce"]));

    gate.set(Sends::Pass);
    let end = stand.until_record(0, &ids[0], "confirmed").await;
    assert_eq!(end["hash"], signed["hash"]);
    assert_eq!(stand.until_record(0, &ids[1], "confirmed").await["nonce"], 1);
    assert_eq!(chain.balance(friend).await, U256::from(3));
    assert_eq!(gate.transactions().len(), 2, "one for each, however often it was sent");
}

/// Killed after the chain has it and before the relayer knows: it is found on the chain in the next life.
#[tokio::test]
async fn what_was_sent_without_an_answer_before_a_kill_is_not_signed_again() {
    let chain = Chain::shared();
    let gate = Gate::before(&chain).await;
    let mut stand = Plan::on(&chain).rpc(gate.url()).start().await;
    stand.until_enabled(0).await;
    let (relayer, friend) = (stand.keys[0].address(), new_key().address());
    gate.set(Sends::Unanswered);
    let id = stand.post_at_relayer(0, friend, 1).await;
    eventually(SOON, "the chain to have it", || async { (chain.nonce(relayer).await == 1).then_some(()) }).await;
    stand.relayers.restart().await.unwrap();
    stand.relayers_ready().await;
    let end = stand.until_record(0, &id, "confirmed").await;
    assert_eq!(end["nonce"], 0);
    gate.set(Sends::Pass);
    let next = stand.post_at_relayer(0, friend, 1).await;
    assert_eq!(stand.until_record(0, &next, "confirmed").await["nonce"], 1);
    assert_eq!(chain.balance(friend).await, U256::from(2));
    assert_eq!(gate.transactions().len(), 2);
}

#[tokio::test]
async fn what_is_accepted_while_the_chain_is_away_is_sent_in_order_when_it_is_back() {
    let chain = Chain::shared();
    let link = Proxy::start(harness::engine::address("BATON_TEST_RPC_URL")).await;
    let mut stand = Plan::on(&chain).rpc(link.url()).start().await;
    stand.until_enabled(0).await;
    let friend = new_key().address();
    let first = stand.post_at_relayer(0, friend, 1).await;
    stand.until_record(0, &first, "confirmed").await;

    link.set(Mode::Refuse).await;
    let mut ids = Vec::new();
    for _ in 0..10 {
        ids.push(stand.post_at_relayer(0, friend, 1).await);
    }
    for id in &ids {
        assert_eq!(stand.record(0, id).await["status"], "pending");
    }
    // A life without the chain: it takes no work, and what it has stays.
    stand.relayers.kill9().await.unwrap();
    stand.relayers.restart().await.unwrap();
    stand.relayers_ready().await;
    let (_, relayers) = crate::chain_fixture::answer(
        stand
            .http
            .get(format!("{}/api/v1/relayers", stand.relayer_urls[0]))
            .bearer_auth(crate::chain_fixture::RELAYER_KEY),
    )
    .await;
    assert_eq!(relayers["data"][0]["system_disabled"], true);
    assert_eq!(stand.record(0, &ids[0]).await["status"], "pending");
    let waiting = stand.send(friend, U256::from(5), &[]).await;

    link.set(Mode::Forward).await;
    for (place, id) in ids.iter().enumerate() {
        let record = stand.until_record(0, id, "confirmed").await;
        assert_eq!(record["nonce"], place + 1, "in the order of acceptance");
    }
    stand.until_status(&waiting, "confirmed").await;
    assert_eq!(chain.balance(friend).await, U256::from(1 + 10 + 5));
    assert_eq!(stand.mined().await, 12);
}

#[tokio::test]
async fn a_nonce_that_somebody_else_used_is_given_up_for_another() {
    let servers = Servers::running(&[Server::Chain]).await;
    let chain = Chain::of(&servers);
    let stand = Plan::on(&chain).start().await;
    stand.until_enabled(0).await;
    let (friend, stranger) = (new_key().address(), new_key().address());
    chain.set_automine(false).await;
    let id = stand.post_at_relayer(0, friend, 1).await;
    let before = stand.until_record(0, &id, "submitted").await;
    assert_eq!(before["nonce"], 0);

    // The same key, the same nonce, and more to earn for the miner.
    let dear = TransactionRequest::default()
        .with_to(stranger)
        .with_value(U256::from(1))
        .with_nonce(0)
        .with_gas_limit(21_000)
        .with_chain_id(harness::chain::CHAIN_ID)
        .with_max_fee_per_gas(100_000_000_000)
        .with_max_priority_fee_per_gas(50_000_000_000);
    chain.send_as_is(&stand.keys[0], dear).await;
    chain.mine().await;
    eventually(SOON, "the stranger to be paid", || async {
        (chain.balance(stranger).await == U256::from(1)).then_some(())
    })
    .await;
    chain.set_automine(true).await;

    let record = stand.until_record(0, &id, "confirmed").await;
    assert_eq!(record["nonce"], 1);
    assert_ne!(record["hash"], before["hash"]);
    assert_eq!(chain.balance(friend).await, U256::from(1));
    assert_eq!(chain.nonce(stand.keys[0].address()).await, 2);
}

#[tokio::test]
async fn a_chain_that_lost_its_memory_gets_what_was_under_way_once() {
    let servers = Servers::running(&[Server::Chain]).await;
    let chain = Chain::of(&servers);
    let stand = Plan::on(&chain).start().await;
    stand.until_enabled(0).await;
    let friend = new_key().address();
    for _ in 0..3 {
        let id = stand.post_at_relayer(0, friend, 1).await;
        stand.until_record(0, &id, "confirmed").await;
    }
    chain.set_automine(false).await;
    let id = stand.post_at_relayer(0, friend, 1).await;
    assert_eq!(stand.until_record(0, &id, "submitted").await["nonce"], 3);

    servers.kill(Server::Chain).await;
    servers.restart(Server::Chain).await;
    let relayer: Address = stand.keys[0].address();
    assert_eq!(chain.provider().get_block_number().await.unwrap(), 0, "it begins anew");
    chain.fund(relayer, U256::from(ETHER)).await;
    stand.until_record(0, &id, "confirmed").await;
    assert_eq!(chain.balance(friend).await, U256::from(1), "what was confirmed before is not sent again");
    assert_eq!(chain.nonce(relayer).await, 4, "three no-ops and the transfer");
    let next = stand.post_at_relayer(0, friend, 1).await;
    assert_eq!(stand.until_record(0, &next, "confirmed").await["nonce"], 4);
}
