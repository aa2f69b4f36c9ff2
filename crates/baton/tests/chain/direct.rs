//! Direct transactions: one of the relayers executes them on the chain, and the status matches the receipt.

use alloy_primitives::{Address, U256};
use alloy_sol_types::{SolCall, SolError};
use harness::chain::{Chain, Contracts, Token, new_key};
use harness::wait::eventually;
use serde_json::{Value, json};

use crate::chain_fixture::{ChainSetup, RELAYERS, SOON, answer, baton};

#[tokio::test]
async fn a_token_transfer_and_a_plain_transfer_are_executed_and_confirmed() {
    let chain = Chain::shared();
    let contracts = Contracts::deploy(&chain).await;
    let relay = ChainSetup::on(&chain).start().await;
    for key in &relay.keys {
        contracts.give(key.address(), 100).await;
    }
    let friend = new_key().address();

    let transfer = Token::transferCall { to: friend, amount: U256::from(5) }.abi_encode();
    let tokens = relay.send(contracts.token, U256::ZERO, &transfer).await;
    let ether = relay.send(friend, U256::from(1_000_000_000_000_000_001_u64), &[]).await;
    for (id, to) in [(&tokens, contracts.token), (&ether, friend)] {
        let end = relay.until_status(id, "confirmed").await;
        let receipt = chain.receipt(end["hash"].as_str().unwrap()).await.expect("the chain knows the hash");
        assert!(receipt.status());
        assert_eq!(receipt.to, Some(to));
        assert!(relay.keys.iter().any(|key| key.address() == receipt.from), "{end}");
        assert_eq!(end["from"].as_str().unwrap().parse(), Ok(receipt.from));
        assert_eq!(relay.until_block(id).await["block_number"], json!(receipt.block_number));
    }
    assert_eq!(contracts.tokens(friend).await, U256::from(5));
    assert_eq!(chain.balance(friend).await, U256::from(1_000_000_000_000_000_001_u64));
    assert_eq!(relay.mined().await, 2);
}

#[tokio::test]
async fn in_confirm_mode_the_status_has_the_receipts_block() {
    let chain = Chain::shared();
    let relay = ChainSetup::on(&chain).env("RELAY_MODE", "confirm").start().await;
    let friend = new_key().address();
    let id = relay.send(friend, U256::from(7), &[]).await;
    let end = relay.until_status(&id, "success").await;
    let receipt = chain.receipt(end["hash"].as_str().unwrap()).await.expect("the chain knows the hash");
    assert_eq!(end["result"].get("block_number"), None, "the relayer does not report it: {end}");
    assert_eq!(relay.until_block(&id).await["block_number"], json!(receipt.block_number));
    assert_eq!(chain.balance(friend).await, U256::from(7));
}

#[tokio::test]
async fn a_reverting_call_fails_with_the_contracts_reason() {
    let chain = Chain::shared();
    let contracts = Contracts::deploy(&chain).await;
    // A revert counts once its block is final, and this chain makes no blocks by itself.
    let relay = ChainSetup::on(&chain).env("CHAIN_FINALITY_BLOCKS", "0").start().await;
    let text = Token::refuseWithReasonCall { reason: "not on a Monday".to_owned() }.abi_encode();
    let custom = Token::refuseWithErrorCall { code: U256::from(7) }.abi_encode();
    // The relayer has no tokens: the contract reverts with its own error.
    let poor = Token::transferCall { to: Address::repeat_byte(1), amount: U256::from(1) }.abi_encode();
    let bytes = hex::encode(Token::Refused { code: U256::from(7) }.abi_encode());
    for (data, reason) in [(text, "not on a Monday"), (custom, bytes.as_str()), (poor, "custom error 0x")] {
        let id = relay.send(contracts.token, U256::ZERO, &data).await;
        let end = relay.until_status(&id, "failed").await;
        let message = end["error_message"].as_str().unwrap();
        assert!(message.contains("reverted") && message.contains(reason), "{end}");
        let receipt = chain.receipt(end["hash"].as_str().unwrap()).await.expect("the chain knows the hash");
        assert!(!receipt.status());
        assert_eq!(relay.until_block(&id).await["block_number"], json!(receipt.block_number));
    }
}

/// A failure before the signature is the relayer's, and another relayer takes the transaction.
#[tokio::test]
async fn transactions_of_a_relayer_without_ether_go_to_the_others() {
    let chain = Chain::shared();
    let relay = ChainSetup::on(&chain).start().await;
    let poor = relay.keys[0].address();
    chain.fund(poor, U256::from(1)).await;
    let friend = new_key().address();
    let mut sent = Vec::new();
    for _ in 0..u64::from(RELAYERS) * 2 {
        sent.push(relay.send(friend, U256::from(1), &[]).await);
    }
    for id in &sent {
        relay.until_status(id, "confirmed").await;
    }
    assert_eq!(chain.balance(friend).await, U256::from(sent.len()));
    assert_eq!(chain.nonce(poor).await, 0);
    let direct = relay.post_at_relayer(0, friend, 1).await;
    let record = relay.until_record(0, &direct, "failed").await;
    assert!(record["status_reason"].as_str().unwrap().starts_with("Insufficient balance"), "{record}");
    assert_eq!((&record["nonce"], &record["hash"]), (&Value::Null, &Value::Null));
}

#[tokio::test]
async fn dev_with_a_chain_prints_a_curl_that_moves_ether() {
    let chain = Chain::shared();
    let directory = tempfile::tempdir().unwrap();
    let (port, first) = (harness::ports::free_port(), harness::ports::free_row(RELAYERS));
    let data = directory.path().join("data").display().to_string();
    let mut dev = baton()
        .args(["dev", "--port", &port.to_string(), "--data-dir", &data, "--relayer-port", &first.to_string()])
        .args(["--rpc", chain.url()])
        .start()
        .unwrap();
    let base = format!("http://127.0.0.1:{port}");
    dev.wait_ready(&format!("{base}/ready"), SOON).await.unwrap();
    let printed = dev.output();
    assert!(printed.contains("signs as 0x14dC79964da2C08b23698B3D3cc7Ca32193d9955"), "{printed}");
    let command: Vec<&str> = printed.lines().skip_while(|line| !line.contains("curl -s")).take(3).collect();
    let out = std::process::Command::new("sh").arg("-c").arg(command.join("\n")).output().unwrap();
    let accepted: Value = serde_json::from_slice(&out.stdout).unwrap();
    let id = accepted["transactionId"].as_str().unwrap();
    let http = harness::http_client();
    let end = eventually(SOON, "the transaction to be confirmed in a block", || async {
        let status = http.get(format!("{base}/api/v1/relay/status/{id}")).header("x-api-key", "dev-key");
        let (_, body) = answer(status).await;
        (body["status"] == "confirmed" && body["block_number"].is_u64()).then_some(body)
    })
    .await;
    let receipt = chain.receipt(end["hash"].as_str().unwrap()).await.expect("the chain knows the hash");
    assert!(receipt.status());
    assert_eq!(end["block_number"], json!(receipt.block_number));
    dev.sigterm().unwrap();
    assert_eq!(dev.wait_exit(SOON).await.unwrap().code(), Some(0), "{}", dev.output());
}

#[tokio::test]
async fn invalid_keys_are_rejected_at_start_and_never_printed() {
    let secret = "4bbbf85ce3377467afe5d46f804f221813b2bb87f24d81f60f1fcdbf7cbf4356";
    for (keys, problem) in [
        (secret.to_owned(), "3 keys"),
        (format!("{secret},{secret},{secret}"), "twice"),
        (format!("{secret},nonsense,{secret}"), "not a private key"),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let mut dev = baton()
            .args(["dev", "--rpc", "http://127.0.0.1:1", "--port", "0", "--data-dir"])
            .arg(directory.path())
            .env("BATON_DEV_KEYS", keys)
            .start()
            .unwrap();
        assert_eq!(dev.wait_exit(SOON).await.unwrap().code(), Some(1));
        let output = dev.output();
        assert!(output.contains(problem) && !output.contains("nonsense") && !output.contains(secret), "{output}");
    }
}
