//! The block of what has ended. The relayers do not tell it, so the product asks the chain: once, never in a reader's
//! way, and nobody who has seen a block sees it go.

use alloy_primitives::U256;
use harness::chain::{CHAIN_ID, Chain, new_key};
use harness::engine::{Engine, server};
use harness::proxy::{Mode, Proxy};
use harness::wait::{eventually, eventually_ok};
use serde_json::{Value, json};

use crate::chain_fixture::{Plan, SOON, Stand};
use crate::relay_fixture;
use crate::rpc_proxy::Gate;

const RECEIPT: &str = "eth_getTransactionReceipt";

/// Sends ether to nobody in particular, and waits for the end.
async fn confirmed(stand: &Stand) -> (String, Value) {
    let id = stand.send(new_key().address(), U256::from(1), &[]).await;
    let shown = stand.until_status(&id, "confirmed").await;
    (id, shown)
}

/// The block that the chain itself names.
async fn block_on(chain: &Chain, shown: &Value) -> Value {
    let receipt = chain.receipt(shown["hash"].as_str().unwrap()).await.expect("the chain knows the hash");
    json!(receipt.block_number.expect("it is in a block"))
}

async fn restart_api(stand: &mut Stand) {
    stand.api.restart().await.unwrap();
    stand.api.wait_ready(&format!("{}/ready", stand.base), SOON).await.unwrap();
}

#[tokio::test]
async fn the_chain_is_not_asked_again_for_a_block_that_it_has_said() {
    let chain = Chain::shared();
    let gate = Gate::before(&chain).await;
    let mut stand = Plan::on(&chain).env("RPC_URL", gate.url()).start().await;
    let (id, _) = confirmed(&stand).await;
    let shown = stand.until_block(&id).await;
    assert_eq!(shown["block_number"], block_on(&chain, &shown).await);
    let asked = gate.asked(RECEIPT);
    assert!(asked > 0, "the relayers have said nothing of it");
    for _ in 0..10 {
        assert_eq!(stand.status(&id).await, shown);
    }
    // Another life has no memory but the row's.
    restart_api(&mut stand).await;
    assert_eq!(stand.status(&id).await, shown);
    let (_, page) = stand.get("/api/v1/relay/transactions").await;
    assert_eq!(page["transactions"][0], shown);
    assert_eq!(gate.asked(RECEIPT), asked);
}

#[tokio::test]
async fn without_the_chain_a_status_has_no_block_until_it_is_back_and_keeps_it_from_then_on() {
    const READS: usize = 40;
    let chain = Chain::shared();
    let link = Proxy::start(harness::engine::address("BATON_TEST_RPC_URL")).await;
    let mut stand = Plan::on(&chain).env("RPC_URL", link.url()).start().await;
    for mode in [Mode::Refuse, Mode::BlackHole, Mode::SwallowAnswers] {
        link.set(mode).await;
        let (id, shown) = confirmed(&stand).await;
        assert_eq!(shown["block_number"], Value::Null, "{mode:?}");
        let before = stand.metric("baton_blocks_total", "failed").await;
        for _ in 0..READS {
            assert_eq!(stand.status(&id).await, shown, "{mode:?}");
        }
        let failed = stand.metric("baton_blocks_total", "failed").await - before;
        assert!(failed < READS as f64 / 2.0, "{mode:?}: {failed} of {READS} readers waited for a chain that is away");

        link.set(Mode::Forward).await;
        link.cut().await;
        let shown = stand.until_block(&id).await;
        assert_eq!(shown["block_number"], block_on(&chain, &shown).await, "{mode:?}");
        link.set(mode).await;
        assert_eq!(stand.status(&id).await, shown, "{mode:?}");
        restart_api(&mut stand).await;
        assert_eq!(stand.status(&id).await, shown, "{mode:?}");
    }
}

#[tokio::test]
async fn a_hash_that_the_chain_does_not_know_is_shown_without_a_block() {
    let chain = Chain::shared();
    // These relayers make their hashes up.
    let stand = relay_fixture::Plan::relayers(1).env("RPC_URL", chain.url()).start().await;
    let id = stand.send_serial(1).await;
    let shown = stand.until_status(&id, "confirmed").await;
    assert_eq!(shown["hash"].as_str().map(str::len), Some(66), "{shown}");
    eventually(SOON, "the chain to be asked in vain", || async {
        assert_eq!(stand.status(&id).await["block_number"], Value::Null);
        (stand.metric("baton_blocks_total", "unknown").await > 0.0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn another_chain_than_the_configured_one_is_not_believed() {
    let chain = Chain::shared();
    let stand = Plan::on(&chain).env("CHAIN_ID", (CHAIN_ID + 1).to_string()).start().await;
    let (id, _) = confirmed(&stand).await;
    eventually(SOON, "the chain to be asked in vain", || async {
        assert_eq!(stand.status(&id).await["block_number"], Value::Null);
        (stand.metric("baton_blocks_total", "failed").await > 0.0).then_some(())
    })
    .await;
}

/// With Redis between the processes: one that did not know the block leaves an entry without it there, and so did every
/// process before there were blocks.
#[tokio::test]
async fn an_older_cache_entry_never_hides_a_block_that_was_shown() {
    let chain = Chain::shared();
    let engine = Engine::MySqlRabbitMq.set_up();
    let link = Proxy::start(harness::engine::address("BATON_TEST_RPC_URL")).await;
    let mut plan = Plan::on(&chain).env("RPC_URL", link.url()).split();
    for (name, value) in &engine.vars {
        plan = plan.env(name, value);
    }
    let mut stand = plan.start().await;
    link.set(Mode::Refuse).await;
    let (id, shown) = confirmed(&stand).await;
    assert_eq!(shown["block_number"], Value::Null);
    let old = until_cached(&id, |entry| entry["shown"]["status"] == "confirmed").await;
    assert_eq!(old["shown"]["block_number"], Value::Null, "{old}");

    link.set(Mode::Forward).await;
    let shown = stand.until_block(&id).await;
    assert_eq!(shown["block_number"], block_on(&chain, &shown).await);
    link.set(Mode::Refuse).await;
    until_cached(&id, |entry| entry["shown"] == shown).await;

    let mut of_old = old.clone();
    of_old["shown"].as_object_mut().unwrap().remove("block_number");
    for planted in [old, of_old] {
        let mut redis = redis().await;
        redis::AsyncCommands::set::<_, _, ()>(&mut redis, format!("tx:{id}"), planted.to_string()).await.unwrap();
        restart_api(&mut stand).await;
        assert_eq!(stand.status(&id).await, shown, "after {planted}");
        until_cached(&id, |entry| entry["shown"] == shown).await;
    }
}

async fn redis() -> redis::aio::MultiplexedConnection {
    let client = redis::Client::open(server("BATON_TEST_REDIS_URL")).unwrap();
    client.get_multiplexed_async_connection().await.unwrap()
}

/// Waits until Redis has such an entry.
async fn until_cached(id: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    eventually_ok(SOON, format!("{id} in Redis"), || async {
        let text: Option<String> = redis::AsyncCommands::get(&mut redis().await, format!("tx:{id}")).await.unwrap();
        let entry = text.as_deref().map_or(Value::Null, |text| serde_json::from_str(text).unwrap());
        if wanted(&entry) { Ok(entry) } else { Err(entry.to_string()) }
    })
    .await
}
