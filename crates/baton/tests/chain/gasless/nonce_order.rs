//! Several open transactions of one signer: sent in nonce order, to one relayer, and none without its predecessor. The
//! relayers are simulated, so that they can misbehave; the forwarder is real.

use std::time::Duration;

use alloy_primitives::U256;
use alloy_sol_types::SolCall;
use harness::chain::{Forwarder, TransactionRequest};
use harness::engine::TestEngine;
use harness::relayer::{Outcome, PostFault, Timing};
use harness::wait::eventually_ok;
use serde_json::{Value, json};

use super::{GaslessFixture, post, stored};
use crate::relay_fixture::{LATER, RelayFixture, RelaySetup, SOON};

/// Posts transfers with the nonces `0..count`, in order; returns their ids.
async fn queue(gasless: &GaslessFixture, relay: &RelayFixture, count: u64) -> Vec<String> {
    let mut ids = Vec::new();
    for nonce in 0..count {
        ids.push(send(gasless, relay, nonce + 1, nonce).await);
    }
    ids
}

async fn send(gasless: &GaslessFixture, relay: &RelayFixture, amount: u64, nonce: u64) -> String {
    let (code, answer) = post(relay, &gasless.signed(&gasless.transfer(amount, nonce).await), None).await;
    assert_eq!(code, 202, "{answer}");
    answer["transactionId"].as_str().unwrap().to_owned()
}

async fn until_final(relay: &RelayFixture, ids: &[String]) -> Vec<Value> {
    let mut last = Vec::new();
    for id in ids {
        last.push(
            eventually_ok(LATER, format!("{id} to be final"), || async {
                let body = relay.status(id).await;
                if matches!(body["status"].as_str(), Some("confirmed" | "failed")) {
                    Ok(body)
                } else {
                    Err(body.to_string())
                }
            })
            .await,
        );
    }
    last
}

/// Makes the relayers assign a nonce after 300 ms and confirm after 3 s.
fn slow(setup: RelaySetup, relayers: usize) -> RelaySetup {
    let timing = Timing {
        sent: Duration::from_millis(300),
        submitted: Duration::from_millis(350),
        confirmed: Duration::from_secs(3),
        ..Timing::default()
    };
    (0..relayers).fold(setup, |setup, index| setup.relayer(index, |options| options.timing = timing))
}

async fn in_order_to_one_relayer_on(engine: TestEngine) {
    let gasless = GaslessFixture::new().await;
    in_order_to_one_relayer(&gasless, gasless.setup(3).engine(engine)).await;
}

async fn in_order_to_one_relayer(gasless: &GaslessFixture, setup: RelaySetup) {
    const COUNT: u64 = 6;
    let relay = slow(setup, 3).start().await;
    let ids = queue(gasless, &relay, COUNT).await;
    let shown = until_final(&relay, &ids).await;
    assert!(shown.iter().all(|shown| shown["status"] == "confirmed"), "{shown:?}");

    let mut records: Vec<_> = relay.relayers.iter().flat_map(|relayer| relayer.accepted()).collect();
    records.sort_by_key(|accepted| accepted.received_at);
    let sent: Vec<_> = records.iter().map(|accepted| accepted.id.clone()).collect();
    let wanted: Vec<_> = shown.iter().map(|shown| shown["ozRelayerTxId"].as_str().unwrap().to_owned()).collect();
    assert_eq!(sent, wanted, "each once, in nonce order");
    let first = &records[0].relayer_id;
    assert!(records.iter().all(|accepted| accepted.relayer_id == *first), "all went to one relayer");
    let relayer = relay.relayers.iter().find(|relayer| relayer.id() == first).unwrap();
    let nonces: Vec<_> = wanted.iter().map(|id| relayer.record(id).unwrap().nonce.unwrap()).collect();
    assert!(nonces.is_sorted(), "{nonces:?}");
}

#[tokio::test]
async fn queued_nonces_go_in_order_to_one_relayer() {
    in_order_to_one_relayer_on(TestEngine::Embedded).await;
}

#[tokio::test]
async fn queued_nonces_go_in_order_to_one_relayer_that_sends_no_webhooks() {
    let gasless = GaslessFixture::new().await;
    let setup = gasless.setup(3).no_webhooks().env("RECONCILE_SUBMITTED_MS", "500");
    in_order_to_one_relayer(&gasless, setup).await;
}

#[tokio::test]
async fn queued_nonces_go_in_order_to_one_relayer_on_mysql_and_rabbitmq() {
    in_order_to_one_relayer_on(TestEngine::MySqlRabbitMq).await;
}

#[tokio::test]
async fn queued_nonces_go_in_order_to_one_relayer_on_mysql_and_sqs() {
    in_order_to_one_relayer_on(TestEngine::MySqlSqs).await;
}

#[tokio::test]
async fn a_failed_transaction_fails_its_successors_and_frees_its_nonce() {
    let gasless = GaslessFixture::new().await;
    let relay = slow(gasless.setup(2), 2).start().await;
    for relayer in &relay.relayers {
        relayer.change_faults(|faults| faults.every_post = Some(PostFault::Refused("not today".into())));
    }
    let ids = queue(&gasless, &relay, 1).await;
    let shown = until_final(&relay, &ids).await;
    assert!(shown[0]["error_message"].as_str().unwrap().contains("not today"), "{shown:?}");

    // Three queued while the relayers are paused, so that they wait together; then the first fails.
    for relayer in &relay.relayers {
        relayer.change_faults(|faults| faults.paused = true);
    }
    for index in 0..2 {
        relay.until_relayer(index, "paused").await;
    }
    let ids = queue(&gasless, &relay, 3).await;
    for relayer in &relay.relayers {
        relayer.change_faults(|faults| faults.paused = false);
    }
    let shown = until_final(&relay, &ids).await;
    assert!(shown.iter().all(|shown| shown["status"] == "failed"), "{shown:?}");
    for (index, before) in ids.iter().take(2).enumerate() {
        let reason = shown[index + 1]["error_message"].as_str().unwrap();
        assert!(reason.contains(before) && reason.contains("not today"), "{reason}");
    }
    assert!(relay.relayers.iter().all(|relayer| relayer.accepted().is_empty()), "no relayer took any of them");

    // Failed transactions use no nonce.
    for relayer in &relay.relayers {
        relayer.change_faults(|faults| faults.every_post = None);
    }
    let ids = queue(&gasless, &relay, 2).await;
    let shown = until_final(&relay, &ids).await;
    assert!(shown.iter().all(|shown| shown["status"] == "confirmed"), "{shown:?}");
    assert_eq!(stored(&relay).await, 1 + 3 + 2);
}

#[tokio::test]
async fn a_transaction_that_its_relayer_fails_unsigned_fails_its_successors() {
    let gasless = GaslessFixture::new().await;
    let relay = slow(gasless.setup(1), 1).start().await;
    relay.relayers[0].change_faults(|faults| faults.next_outcomes.push_back(Outcome::NeverSigned("blocked".into())));
    let ids = queue(&gasless, &relay, 3).await;
    let shown = until_final(&relay, &ids).await;
    assert!(shown.iter().all(|shown| shown["status"] == "failed"), "{shown:?}");
    assert!(shown[0]["error_message"].as_str().unwrap().contains("blocked"), "{shown:?}");
    for (index, before) in ids.iter().take(2).enumerate() {
        let reason = shown[index + 1]["error_message"].as_str().unwrap();
        assert!(reason.contains(before) && reason.contains("blocked"), "{reason}");
    }
    assert_eq!(relay.relayers[0].accepted().len(), 1, "the successors were not sent");
}

#[tokio::test]
async fn a_replayed_transaction_whose_nonce_was_reassigned_is_not_sent() {
    let gasless = GaslessFixture::new().await;
    let relay = gasless.setup(1).start().await;
    relay.relayers[0].change_faults(|faults| faults.every_post = Some(PostFault::Refused("not today".into())));
    let first = queue(&gasless, &relay, 1).await;
    until_final(&relay, &first).await;
    relay.relayers[0].change_faults(|faults| faults.every_post = None);
    let second = queue(&gasless, &relay, 1).await;
    assert_eq!(until_final(&relay, &second).await[0]["status"], "confirmed");

    let (code, answer) = relay.command(["dlq", "replay", "--all"]).await;
    assert_eq!(code, 0, "{answer}");
    let shown = eventually_ok(SOON, "the replayed transaction to fail again", || async {
        let shown = relay.status(&first[0]).await;
        let reason = shown["error_message"].as_str().unwrap_or_default();
        if shown["status"] == "failed" && reason.contains(&second[0]) { Ok(shown) } else { Err(shown.to_string()) }
    })
    .await;
    assert!(shown["error_message"].as_str().unwrap().contains("was given to"), "{shown}");
    assert_eq!(relay.relayers[0].accepted().len(), 1);
}

#[tokio::test]
async fn after_execution_on_chain_the_successor_may_go_to_another_relayer() {
    let gasless = GaslessFixture::new().await;
    let relay = slow(gasless.setup(2), 2).start().await;
    for relayer in &relay.relayers {
        relayer.change_faults(|faults| faults.jammed = true);
    }
    let first = queue(&gasless, &relay, 1).await.remove(0);
    let shown = relay.until_status(&first, "submitted").await;
    let holder = relay.relayers.iter().position(|relayer| relayer.url() == shown["ozRelayerUrl"]).unwrap();
    // That relayer has assigned a nonce, so the successor has to go there too, and waits while it is paused.
    relay.relayers[holder].change_faults(|faults| faults.paused = true);
    relay.until_relayer(holder, "paused").await;
    let next = send(&gasless, &relay, 1, 1).await;
    eventually_ok(SOON, "the successor to wait", || async {
        let waits = relay.metric("baton_waits_total", "").await;
        if waits >= 2.0 { Ok(()) } else { Err(waits.to_string()) }
    })
    .await;
    assert_eq!(relay.status(&next).await["status"], "pending");

    // Another account executes the first request on the chain.
    let request = gasless.transfer(1, 0).await;
    let signature = gasless.contracts.sign(&request, &gasless.user);
    let execute = Forwarder::executeCall { request: request.signed(signature) }.abi_encode();
    let call = TransactionRequest::default().with_to(gasless.contracts.forwarder).with_input(execute);
    assert!(gasless.chain.send(&gasless.contracts.owner, call).await.status());
    let shown = relay.until_status(&next, "submitted").await;
    assert_eq!(shown["ozRelayerUrl"], relay.relayers[1 - holder].url());
}

#[tokio::test]
async fn one_of_many_requests_with_the_same_nonce_is_accepted() {
    for engine in [TestEngine::Embedded, TestEngine::MySqlRabbitMq] {
        let gasless = GaslessFixture::new().await;
        let relay = gasless.setup(1).engine(engine).start().await;
        let mut bodies = Vec::new();
        for amount in 1..=20 {
            bodies.push(gasless.signed(&gasless.transfer(amount, 0).await));
        }
        let answers = futures::future::join_all(bodies.iter().map(|body| post(&relay, body, None))).await;
        let (accepted, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(|(code, _)| *code == 202);
        assert_eq!((accepted.len(), refused.len()), (1, 19), "{refused:?}");
        let winner = &accepted[0].1["transactionId"];
        assert!(refused.iter().all(|(code, answer)| *code == 400 && answer["transactionId"] == *winner), "{refused:?}");
        assert_eq!(stored(&relay).await, 1);
    }
}

#[tokio::test]
async fn concurrent_duplicate_requests_under_one_key_are_one_transaction() {
    for engine in [TestEngine::Embedded, TestEngine::MySqlRabbitMq] {
        let gasless = GaslessFixture::new().await;
        let relay = gasless.setup(1).engine(engine).start().await;
        for nonce in 0..5 {
            let body = gasless.signed(&gasless.transfer(1, nonce).await);
            let key = format!("duplicate-{nonce}");
            let duplicates = (0..20).map(|_| post(&relay, &body, Some(key.as_str())));
            let answers = futures::future::join_all(duplicates).await;
            let first = &answers[0].1["transactionId"];
            assert!(
                answers.iter().all(|(code, answer)| *code == 202 && answer["transactionId"] == *first),
                "{answers:?}"
            );
        }
        assert_eq!(stored(&relay).await, 5);
    }
}

#[tokio::test]
async fn a_submission_with_unknown_outcome_holds_its_successors_back() {
    let gasless = GaslessFixture::new().await;
    let relay = slow(gasless.setup(2), 2).start().await;
    relay.warm_up().await;
    for relayer in &relay.relayers {
        relayer.change_faults(|faults| faults.next_posts.push_back(Some(PostFault::CutAfterStoring)));
    }
    let ids = queue(&gasless, &relay, 3).await;
    let shown = until_final(&relay, &ids).await;
    assert!(shown.iter().all(|shown| shown["status"] == "confirmed"), "{shown:?}");
    let at: Vec<_> = shown.iter().map(|shown| shown["ozRelayerUrl"].clone()).collect();
    assert!(at.iter().all(|url| *url == at[0]), "{at:?}");
    let forwarder = json!(gasless.contracts.forwarder.to_string());
    let sent = relay.relayers.iter().flat_map(|relayer| relayer.accepted());
    assert_eq!(sent.filter(|accepted| accepted.request["to"] == forwarder).count(), 3, "each once");
}

#[tokio::test]
async fn deferring_a_waiting_transaction_does_not_use_up_its_message() {
    let gasless = GaslessFixture::new().await;
    // At least two deferrals, with a queue that buries a message at the third receipt.
    let relay =
        slow(gasless.setup(1), 1).engine(TestEngine::MySqlRabbitMq).env("QUEUE_MAX_RECEIVES", "2").start().await;
    relay.relayers[0].change_faults(|faults| faults.jammed = true);
    relay.relayers[0]
        .change_faults(|faults| faults.next_posts.push_back(Some(PostFault::Slow(Duration::from_secs(1)))));
    let ids = queue(&gasless, &relay, 3).await;
    relay.relayers[0].change_faults(|faults| faults.jammed = false);
    let shown = until_final(&relay, &ids).await;
    assert!(shown.iter().all(|shown| shown["status"] == "confirmed"), "{shown:?}");
    assert_eq!(relay.metric("baton_reconciler_total", "dead-letter-put-back").await, 0.0, "no message was buried");
    relay.until_all_final(SOON).await;
}

/// Makes the row as if its message had not been queued and its client had read 503.
fn withdraw(relay: &RelayFixture, id: &str) {
    let file = std::path::Path::new(&relay.env["BATON_DATA_DIR"]).join("baton.db");
    let database = rusqlite::Connection::open(file).unwrap();
    database.busy_timeout(SOON).unwrap();
    let id = uuid::Uuid::parse_str(id).unwrap();
    let changed = database.execute(
        "UPDATE transactions SET status = 'failed', failed_by = 'intake', error_message = 'queue unavailable', \
         check_at = NULL, version = version + 1 WHERE id = ?1",
        [id.as_bytes().as_slice()],
    );
    assert_eq!(changed.unwrap(), 1);
}

async fn pending_nonce(gasless: &GaslessFixture, relay: &RelayFixture) -> Value {
    let path = format!("/api/v1/relay/gasless/nonce/{}?pending=true", gasless.user.address());
    relay.get(&path).await.1["nonce"].clone()
}

/// Nonces 0 and 1 are queued while no relayer takes work; then the request with nonce 0 turns out never to have been
/// accepted.
async fn behind_a_withdrawn_request(gasless: &GaslessFixture, relay: &RelayFixture, deadline: Option<u64>) -> String {
    relay.relayers[0].change_faults(|faults| faults.paused = true);
    relay.until_relayer(0, "paused").await;
    let first = send(gasless, relay, 1, 0).await;
    let mut request = gasless.transfer(2, 1).await;
    if let Some(deadline) = deadline {
        request.deadline = alloy_primitives::Uint::from(deadline);
    }
    let (code, answer) = post(relay, &gasless.signed(&request), None).await;
    assert_eq!(code, 202, "{answer}");
    withdraw(relay, &first);
    relay.relayers[0].change_faults(|faults| faults.paused = false);
    answer["transactionId"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_request_that_was_never_accepted_does_not_fail_its_successor() {
    let gasless = GaslessFixture::new().await;
    let relay = slow(gasless.setup(1), 1).engine(TestEngine::Embedded).start().await;
    let second = behind_a_withdrawn_request(&gasless, &relay, None).await;
    eventually_ok(SOON, "the successor to wait", || async {
        let (_, timeline) = relay.get(&format!("/api/v1/relay/transactions/{second}/timeline")).await;
        if timeline.to_string().contains("was not accepted") { Ok(()) } else { Err(timeline.to_string()) }
    })
    .await;
    assert_eq!(pending_nonce(&gasless, &relay).await, "0", "the nonce that is missing");
    let first = send(&gasless, &relay, 1, 0).await;
    assert_eq!(pending_nonce(&gasless, &relay).await, "2");
    let shown = until_final(&relay, &[first, second]).await;
    assert!(shown.iter().all(|shown| shown["status"] == "confirmed"), "{shown:?}");
}

#[tokio::test]
async fn a_successor_of_a_request_that_was_never_accepted_fails_at_its_deadline() {
    let gasless = GaslessFixture::new().await;
    let relay = slow(gasless.setup(1), 1).engine(TestEngine::Embedded).start().await;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let second = behind_a_withdrawn_request(&gasless, &relay, Some(now + 6)).await;
    let shown = until_final(&relay, &[second]).await;
    let reason = shown[0]["error_message"].as_str().unwrap();
    assert!(reason.contains("deadline") && reason.contains("nonce 0"), "{reason}");
    assert!(relay.relayers[0].accepted().is_empty());
}

/// The first transactions of many users are at one relayer, which is full with them; their second ones can go nowhere else.
#[tokio::test]
async fn followers_of_a_full_relayer_do_not_hold_up_other_transactions() {
    const USERS: usize = 35;
    let gasless = GaslessFixture::new().await;
    let timing = Timing { sent: Duration::from_millis(10), confirmed: Duration::from_secs(3600), ..Timing::default() };
    let relay = gasless
        .setup(2)
        .engine(TestEngine::Embedded)
        .env("RELAYER_MAX_IN_FLIGHT", USERS.to_string())
        // One handler: a follower that waits in it for a second stops everything for that time.
        .env("CONSUMER_CONCURRENCY", "1")
        .relayer(0, |options| options.timing = timing)
        .start()
        .await;
    relay.relayers[1].change_faults(|faults| faults.paused = true);
    relay.until_relayer(1, "paused").await;
    let users: Vec<_> = (0..USERS).map(|_| harness::chain::new_key()).collect();
    let post_all = async |nonce: u64| {
        let mut ids = Vec::new();
        for user in &users {
            // A call without an effect, which needs no tokens.
            let request =
                gasless.contracts.request(user.address(), harness::chain::Token::touchCall {}.abi_encode()).await;
            let request = harness::chain::ForwardRequest { nonce: U256::from(nonce), ..request };
            let (code, answer) =
                post(&relay, &super::body(&request, &gasless.contracts.sign(&request, user)), None).await;
            assert_eq!(code, 202, "{answer}");
            ids.push(answer["transactionId"].as_str().unwrap().to_owned());
        }
        ids
    };
    for id in post_all(0).await {
        relay.until_status(&id, "submitted").await;
    }
    relay.relayers[1].change_faults(|faults| faults.paused = false);
    relay.until_relayer(1, "ok").await;
    post_all(1).await;
    let id = relay.send_serial(1).await;
    // Many times what it takes, and a third of a second for each follower: when each occupied the handler for a second, the
    // transaction waited for all of them.
    eventually_ok(Duration::from_secs(12), "the transaction behind the followers to be confirmed", || async {
        let shown = relay.status(&id).await;
        if shown["status"] == "confirmed" { Ok(()) } else { Err(shown.to_string()) }
    })
    .await;
}
