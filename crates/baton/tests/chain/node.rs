//! The node behind `RPC_URL`: what is needed of it, how often it is asked, and who never asks it.

use std::time::{Duration, Instant};

use harness::chain::{CHAIN_ID, Chain};
use harness::ports::free_port;
use harness::relayer::Outcome;
use harness::servers::{Server, Servers};
use harness::wait::{eventually, eventually_ok};
use serde_json::Value;

use crate::misled_fixture::Misled;
use crate::relay_fixture::{API_KEY, LATER, RelaySetup, SOON, answer, baton, serial_body};
use crate::rpc_proxy::{NodeFault, RpcProxy};

const COUNT: &str = "eth_getTransactionCount";

async fn until_logged(misled: &Misled, action: &str, text: &str) {
    eventually_ok(SOON, format!("{action} in the log"), || async {
        let output = misled.relay.api.output();
        let logged = output.lines().any(|line| line.contains(&format!("\"{action}\"")) && line.contains(text));
        if logged { Ok(()) } else { Err(output) }
    })
    .await;
}

#[tokio::test]
async fn a_node_that_lacks_a_method_is_reported_until_it_has_it() {
    let rpc = RpcProxy::start(&Chain::shared()).await;
    rpc.set_rule(|method, _| (method == COUNT).then_some(NodeFault::Error(-32_601, "no such method")));
    let misled = Misled::with(Some(rpc.url().to_owned()), |setup| setup).await;
    until_logged(&misled, "chain_incompatible", "no such method").await;
    assert!(!misled.relay.api.output().contains("chain_ready"));
    rpc.set_rule(|_, _| None);
    until_logged(&misled, "chain_ready", "supports everything Baton needs").await;
}

/// As geth answers for blocks whose state it has dropped.
#[tokio::test]
async fn a_node_without_history_says_so_in_the_log_and_settles_what_the_relayer_calls_failed() {
    let servers = Servers::running(&[Server::Chain]).await;
    let chain = Chain::of(&servers);
    let rpc = RpcProxy::start(&chain).await;
    let of_a_block = |params: &Value| params[1].as_str().is_some_and(|block| block.starts_with("0x"));
    rpc.set_rule(move |method, params| {
        (method == COUNT && of_a_block(params)).then_some(NodeFault::Error(-32_000, "missing trie node"))
    });
    let misled = Misled::on(chain, Some(rpc.url().to_owned()), |setup| setup).await;
    until_logged(&misled, "chain_ready", "keeps no history").await;
    misled.all_end(Outcome::FailedButExecuted);
    let (id, relayer) = misled.send(22).await;
    let receipt = misled.execute(relayer, 22).await;
    misled.finalise().await;
    let end = misled.relay.until_status(&id, "confirmed").await;
    assert_eq!(end["hash"], receipt.transaction_hash.to_string());
}

/// A consumer asks about rows, and about the relayers' nonces: all of it counts. A slow machine only makes fewer calls.
#[tokio::test]
async fn a_consumer_makes_no_more_calls_than_its_rate_allows() {
    const RATE: usize = 2;
    const CALLS: usize = 16;
    let rpc = RpcProxy::start(&Chain::shared()).await;
    let started = Instant::now();
    let misled =
        Misled::with(Some(rpc.url().to_owned()), |setup| setup.env("RPC_RATE_PER_SECOND", RATE.to_string())).await;
    misled.all_end(Outcome::Stuck);
    for serial in 23..27 {
        misled.send(serial).await;
    }
    // Who asks for the chain's id asks once.
    let calls = || rpc.requests().values().sum::<usize>() - rpc.request_count("eth_chainId");
    eventually(LATER, "calls", || async { (calls() >= CALLS).then_some(()) }).await;
    let (made, took) = (calls(), started.elapsed());
    // Two seconds of calls may be made at once.
    let least = Duration::from_secs_f64(made as f64 / RATE as f64 - 2.0);
    assert!(took >= least, "{made} calls within {took:?}");
}

/// Not a matter of time: an accept that asked, however short it waited, would show at the node.
#[tokio::test]
async fn an_accept_asks_the_chain_nothing() {
    let rpc = RpcProxy::start(&Chain::shared()).await;
    rpc.set_rule(|_, _| Some(NodeFault::Silent));
    // Only this API has the chain. Its id is configured, or the API would ask for it by itself.
    let relay = RelaySetup::relayers(1).split().start().await;
    let port = free_port();
    let base = format!("http://127.0.0.1:{port}");
    let mut api = baton(["relay-api"], &relay.env)
        .env("PORT", port.to_string())
        .env("RPC_URL", rpc.url())
        .env("CHAIN_ID", CHAIN_ID.to_string())
        .start()
        .unwrap();
    api.wait_ready(&format!("{base}/ready"), SOON).await.unwrap();
    let request = |method, path: &str| {
        let request = relay.http.request(method, format!("{base}/api/v1/relay/{path}"));
        request.header("x-api-key", API_KEY).timeout(SOON)
    };
    let mut ids = Vec::new();
    for serial in 0..50 {
        let (status, body) = answer(request(reqwest::Method::POST, "direct").json(&serial_body(serial))).await;
        assert_eq!(status, 202, "{body}");
        ids.push(body["transactionId"].as_str().unwrap().to_owned());
    }
    for id in &ids {
        relay.until_status(id, "confirmed").await;
    }
    assert!(rpc.requests().is_empty(), "{:?}", rpc.requests());

    // It would have shown: the status of a final row asks.
    answer(request(reqwest::Method::GET, &format!("status/{}", ids[0]))).await;
    eventually(SOON, "the chain to be asked", || async { (!rpc.requests().is_empty()).then_some(()) }).await;
}
