//! The block number of a final transaction. Relayers do not report it, so the product asks the chain, without
//! delaying readers. A block number that was shown never disappears.

use alloy_primitives::U256;
use harness::chain::{CHAIN_ID, Chain, new_key};
use harness::engine::{TestEngine, server};
use harness::proxy::{Mode, Proxy};
use harness::wait::{eventually, eventually_ok};
use serde_json::{Value, json};

use crate::chain_fixture::{ChainFixture, ChainSetup, SOON};
use crate::relay_fixture::RelaySetup;
use crate::rpc_proxy::RpcProxy;

const RECEIPT: &str = "eth_getTransactionReceipt";

/// Sends ether to a new address and waits for the confirmation; returns id and status.
async fn confirmed(relay: &ChainFixture) -> (String, Value) {
    let id = relay.send(new_key().address(), U256::from(1), &[]).await;
    let shown = relay.until_status(&id, "confirmed").await;
    (id, shown)
}

/// The block number in the chain's receipt.
async fn block_on(chain: &Chain, shown: &Value) -> Value {
    let receipt = chain.receipt(shown["hash"].as_str().unwrap()).await.expect("the chain knows the hash");
    json!(receipt.block_number.expect("it is in a block"))
}

async fn restart_api(relay: &mut ChainFixture) {
    relay.api.restart().await.unwrap();
    relay.api.wait_ready(&format!("{}/ready", relay.base), SOON).await.unwrap();
}

#[tokio::test]
async fn the_chain_is_not_asked_again_for_a_known_block() {
    let chain = Chain::shared();
    let rpc = RpcProxy::start(&chain).await;
    let mut relay = ChainSetup::on(&chain).env("RPC_URL", rpc.url()).start().await;
    let (id, _) = confirmed(&relay).await;
    let shown = relay.until_block(&id).await;
    assert_eq!(shown["block_number"], block_on(&chain, &shown).await);
    let requests = rpc.request_count(RECEIPT);
    assert!(requests > 0, "the block number comes from the chain");
    assert_eq!(relay.metric("baton_rpc_calls_total", RECEIPT).await, requests as f64);
    for _ in 0..10 {
        assert_eq!(relay.status(&id).await, shown);
    }
    // A restarted process knows the block only from the row.
    restart_api(&mut relay).await;
    assert_eq!(relay.status(&id).await, shown);
    let (_, page) = relay.get("/api/v1/relay/transactions").await;
    assert_eq!(page["transactions"][0], shown);
    assert_eq!(rpc.request_count(RECEIPT), requests);
}

/// Waits until the relayer's word about a transaction has arrived, while its status stays `submitted`.
async fn only_claimed(relay: &ChainFixture, id: &str) {
    eventually_ok(SOON, "the relayer's word", || async {
        let (_, timeline) = relay.get(&format!("/api/v1/relay/transactions/{id}/timeline")).await;
        if timeline.to_string().contains("the relayer says confirmed") { Ok(()) } else { Err(timeline) }
    })
    .await;
    assert_eq!(relay.status(id).await["status"], "submitted");
}

#[tokio::test]
async fn during_a_chain_outage_nothing_is_confirmed_and_a_block_that_was_shown_stays() {
    const READS: usize = 40;
    let chain = Chain::shared();
    let link = Proxy::start(harness::engine::address("BATON_TEST_RPC_URL")).await;
    let mut relay = ChainSetup::on(&chain).env("RPC_URL", link.url()).start().await;
    for mode in [Mode::Refuse, Mode::BlackHole, Mode::SwallowAnswers] {
        link.set(mode).await;
        let failures = relay.metric("baton_rpc_failures_total", "").await;
        let id = relay.send(new_key().address(), U256::from(1), &[]).await;
        only_claimed(&relay, &id).await;
        eventually(SOON, "calls without an answer to be counted", || async {
            (relay.metric("baton_rpc_failures_total", "").await > failures).then_some(())
        })
        .await;
        for _ in 0..READS {
            let shown = relay.status(&id).await;
            assert_eq!((&shown["status"], &shown["block_number"]), (&json!("submitted"), &Value::Null), "{mode:?}");
        }

        link.set(Mode::Forward).await;
        link.cut().await;
        relay.until_status(&id, "confirmed").await;
        let shown = relay.until_block(&id).await;
        assert_eq!(shown["block_number"], block_on(&chain, &shown).await, "{mode:?}");
        link.set(mode).await;
        assert_eq!(relay.status(&id).await, shown, "{mode:?}");
        restart_api(&mut relay).await;
        assert_eq!(relay.status(&id).await, shown, "{mode:?}");
    }
}

#[tokio::test]
async fn a_chain_with_another_id_than_configured_is_not_trusted() {
    let chain = Chain::shared();
    // The relayer is on the configured chain; only RPC_URL leads to another one.
    let relay = RelaySetup::relayers(1)
        .env("RPC_URL", chain.url())
        .env("CHAIN_ID", (CHAIN_ID + 1).to_string())
        .env("RECONCILE_SUBMITTED_MS", "500")
        .relayer(0, |options| options.chain_id = Some(CHAIN_ID + 1))
        .start()
        .await;
    let id = relay.send_serial(1).await;
    eventually_ok(SOON, "the relayer's word", || async {
        let (_, timeline) = relay.get(&format!("/api/v1/relay/transactions/{id}/timeline")).await;
        if timeline.to_string().contains("the relayer says confirmed") { Ok(()) } else { Err(timeline) }
    })
    .await;
    eventually(SOON, "a look at the chain without a result", || async {
        assert_eq!(relay.status(&id).await["status"], "submitted");
        (relay.metric("baton_chain_checks_total", "open").await > 0.0).then_some(())
    })
    .await;
}

#[tokio::test]
async fn relayers_on_another_chain_than_configured_get_nothing() {
    let chain = Chain::shared();
    let relay = ChainSetup::on(&chain).env("CHAIN_ID", (CHAIN_ID + 1).to_string()).start().await;
    let id = relay.send(new_key().address(), U256::from(1), &[]).await;
    eventually_ok(SOON, "every relayer to be on the wrong network", || async {
        let (_, health) = relay.get("/health").await;
        let each = health["parts"]["relayers"]["each"].as_array().unwrap().clone();
        let wrong = each.iter().all(|relayer| {
            relayer["status"] == "wrong network"
                && (&relayer["chainId"], &relayer["expectedChainId"]) == (&json!(CHAIN_ID), &json!(CHAIN_ID + 1))
        });
        if wrong { Ok(()) } else { Err(health) }
    })
    .await;
    assert_eq!(relay.status(&id).await["status"], "pending");
    assert_eq!(relay.mined().await, 0);
}

/// The wrong relayer is the first one: by the relayers alone, the other one would be wrong.
#[tokio::test]
async fn without_a_chain_id_relayers_on_another_chain_than_that_of_rpc_url_get_nothing() {
    let relay = RelaySetup::relayers(2)
        .env("RPC_URL", Chain::shared().url())
        .relayer(0, |options| (options.chain_id, options.network) = (Some(1), "mainnet".to_owned()))
        .start()
        .await;
    relay.send_many(0..50).await;
    eventually(SOON, "the right relayer to take all", || async {
        (relay.relayers[1].accepted().len() == 50).then_some(())
    })
    .await;
    relay.until_relayer(0, "wrong network").await;
    let (_, health) = relay.get("/health").await;
    let each = health["parts"]["relayers"]["each"].as_array().unwrap();
    let url = relay.relayers[0].url();
    let wrong = each.iter().find(|relayer| relayer["url"] == url.as_str()).unwrap();
    assert_eq!((&wrong["chainId"], &wrong["expectedChainId"]), (&json!(1), &json!(CHAIN_ID)), "{wrong}");
    assert_eq!(wrong["network"], "mainnet", "{wrong}");
    assert_eq!(relay.relayers[0].count_requests("POST", "/transactions"), 0);
}

/// Redis may hold an entry without the block number: from a process that did not know it yet, or from a version without
/// block numbers.
#[tokio::test]
async fn an_older_cache_entry_never_hides_a_block_that_was_shown() {
    let chain = Chain::shared();
    let engine = TestEngine::MySqlRabbitMq.set_up();
    let link = Proxy::start(harness::engine::address("BATON_TEST_RPC_URL")).await;
    let mut setup = ChainSetup::on(&chain).env("RPC_URL", link.url()).split();
    for (name, value) in &engine.vars {
        setup = setup.env(name, value);
    }
    let mut relay = setup.start().await;
    let (id, _) = confirmed(&relay).await;
    let shown = relay.until_block(&id).await;
    assert_eq!(shown["block_number"], block_on(&chain, &shown).await);
    let mut old = until_cached(&id, |entry| entry["shown"] == shown).await;
    old["shown"]["block_number"] = Value::Null;
    old["version"] = json!(old["version"].as_u64().unwrap() - 1);
    link.set(Mode::Refuse).await;

    let mut without_field = old.clone();
    without_field["shown"].as_object_mut().unwrap().remove("block_number");
    for planted in [old, without_field] {
        let mut redis = redis().await;
        redis::AsyncCommands::set::<_, _, ()>(&mut redis, format!("tx:{id}"), planted.to_string()).await.unwrap();
        restart_api(&mut relay).await;
        assert_eq!(relay.status(&id).await, shown, "after {planted}");
        until_cached(&id, |entry| entry["shown"] == shown).await;
    }
}

async fn redis() -> redis::aio::MultiplexedConnection {
    let client = redis::Client::open(server("BATON_TEST_REDIS_URL")).unwrap();
    client.get_multiplexed_async_connection().await.unwrap()
}

/// Waits until Redis has an entry that `wanted` accepts.
async fn until_cached(id: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    eventually_ok(SOON, format!("{id} in Redis"), || async {
        let text: Option<String> = redis::AsyncCommands::get(&mut redis().await, format!("tx:{id}")).await.unwrap();
        let entry = text.as_deref().map_or(Value::Null, |text| serde_json::from_str(text).unwrap());
        if wanted(&entry) { Ok(entry) } else { Err(entry.to_string()) }
    })
    .await
}
