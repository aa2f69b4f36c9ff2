//! Several transactions of one signer under way: in the order of their nonces, at one relayer, and not without the one
//! before. The relayers here touch no chain, so that they can misbehave; the forwarder is real.

use std::time::Duration;

use alloy_provider::network::TransactionBuilder;
use alloy_sol_types::SolCall;
use harness::chain::{Forwarder, TransactionRequest};
use harness::engine::Engine;
use harness::relayer::{Outcome, PostFault, Timing};
use harness::wait::eventually_ok;
use serde_json::{Value, json};

use super::{Ground, known, post};
use crate::relay_fixture::{LATER, Plan, SOON, Stand};

/// Posts the transfers of nonces 0 to `count`, in order; their ids.
async fn queue(ground: &Ground, stand: &Stand, count: u64) -> Vec<String> {
    let mut ids = Vec::new();
    for nonce in 0..count {
        let (code, said) = post(stand, &ground.signed(&ground.transfer(nonce + 1, nonce).await), None).await;
        assert_eq!(code, 202, "{said}");
        ids.push(said["transactionId"].as_str().unwrap().to_owned());
    }
    ids
}

async fn until_final(stand: &Stand, ids: &[String]) -> Vec<Value> {
    let mut last = Vec::new();
    for id in ids {
        last.push(
            eventually_ok(LATER, format!("{id} to be final"), || async {
                let body = stand.status(id).await;
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

/// Relayers that take their time to give a transaction its nonce, and longer to confirm it.
fn slow(plan: Plan, relayers: usize) -> Plan {
    let timing = Timing {
        sent: Duration::from_millis(300),
        submitted: Duration::from_millis(350),
        mined: None,
        confirmed: Duration::from_secs(3),
    };
    (0..relayers).fold(plan, |plan, index| plan.relayer(index, |options| options.timing = timing))
}

async fn go_in_order_to_one_relayer(engine: Engine) {
    let ground = Ground::new().await;
    in_order_to_one_relayer(&ground, ground.plan(3).engine(engine)).await;
}

async fn in_order_to_one_relayer(ground: &Ground, plan: Plan) {
    const COUNT: u64 = 6;
    let stand = slow(plan, 3).start().await;
    let ids = queue(ground, &stand, COUNT).await;
    let shown = until_final(&stand, &ids).await;
    assert!(shown.iter().all(|shown| shown["status"] == "confirmed"), "{shown:?}");

    let mut records: Vec<_> = stand.relayers.iter().flat_map(|relayer| relayer.accepted()).collect();
    records.sort_by_key(|accepted| accepted.received_at);
    let sent: Vec<_> = records.iter().map(|accepted| accepted.id.clone()).collect();
    let wanted: Vec<_> = shown.iter().map(|shown| shown["ozRelayerTxId"].as_str().unwrap().to_owned()).collect();
    assert_eq!(sent, wanted, "each once, and in the order of their nonces");
    let first = &records[0].relayer_id;
    assert!(records.iter().all(|accepted| accepted.relayer_id == *first), "one relayer keeps them in order");
    let relayer = stand.relayers.iter().find(|relayer| relayer.id() == first).unwrap();
    let nonces: Vec<_> = wanted.iter().map(|id| relayer.record(id).unwrap().nonce.unwrap()).collect();
    assert!(nonces.is_sorted(), "{nonces:?}");
}

#[tokio::test]
async fn queued_nonces_go_in_order_to_one_relayer() {
    go_in_order_to_one_relayer(Engine::Embedded).await;
}

#[tokio::test]
async fn queued_nonces_go_in_order_to_one_relayer_that_sends_no_webhooks() {
    let ground = Ground::new().await;
    let plan = ground.plan(3).no_webhooks().env("RECONCILE_SUBMITTED_MS", "500");
    in_order_to_one_relayer(&ground, plan).await;
}

#[tokio::test]
async fn queued_nonces_go_in_order_to_one_relayer_on_mysql_and_rabbitmq() {
    go_in_order_to_one_relayer(Engine::MySqlRabbitMq).await;
}

#[tokio::test]
async fn queued_nonces_go_in_order_to_one_relayer_on_mysql_and_sqs() {
    go_in_order_to_one_relayer(Engine::MySqlSqs).await;
}

#[tokio::test]
async fn a_failed_one_fails_its_followers_and_then_its_nonce_is_free() {
    let ground = Ground::new().await;
    let stand = slow(ground.plan(2), 2).start().await;
    for relayer in &stand.relayers {
        relayer.change_faults(|faults| faults.every_post = Some(PostFault::Refused("not today".into())));
    }
    let ids = queue(&ground, &stand, 1).await;
    let shown = until_final(&stand, &ids).await;
    assert!(shown[0]["error_message"].as_str().unwrap().contains("not today"), "{shown:?}");

    // Three while nobody can take them, so that they wait together; then the first fails.
    for relayer in &stand.relayers {
        relayer.change_faults(|faults| faults.paused = true);
    }
    for index in 0..2 {
        stand.until_relayer(index, "paused").await;
    }
    let ids = queue(&ground, &stand, 3).await;
    for relayer in &stand.relayers {
        relayer.change_faults(|faults| faults.paused = false);
    }
    let shown = until_final(&stand, &ids).await;
    assert!(shown.iter().all(|shown| shown["status"] == "failed"), "{shown:?}");
    for (index, before) in ids.iter().take(2).enumerate() {
        let reason = shown[index + 1]["error_message"].as_str().unwrap();
        assert!(reason.contains(before) && reason.contains("not today"), "{reason}");
    }
    assert!(stand.relayers.iter().all(|relayer| relayer.accepted().is_empty()), "nothing was taken by anybody");

    // Failed ones have used no nonce.
    for relayer in &stand.relayers {
        relayer.change_faults(|faults| faults.every_post = None);
    }
    let ids = queue(&ground, &stand, 2).await;
    let shown = until_final(&stand, &ids).await;
    assert!(shown.iter().all(|shown| shown["status"] == "confirmed"), "{shown:?}");
    assert_eq!(known(&stand).await, 1 + 3 + 2);
}

#[tokio::test]
async fn one_that_its_relayer_fails_before_it_has_a_place_takes_its_followers_with_it() {
    let ground = Ground::new().await;
    let stand = slow(ground.plan(1), 1).start().await;
    stand.relayers[0].change_faults(|faults| faults.next_outcomes.push_back(Outcome::NeverSigned("blocked".into())));
    let ids = queue(&ground, &stand, 3).await;
    let shown = until_final(&stand, &ids).await;
    assert!(shown.iter().all(|shown| shown["status"] == "failed"), "{shown:?}");
    assert!(shown[0]["error_message"].as_str().unwrap().contains("blocked"), "{shown:?}");
    for (index, before) in ids.iter().take(2).enumerate() {
        let reason = shown[index + 1]["error_message"].as_str().unwrap();
        assert!(reason.contains(before) && reason.contains("blocked"), "{reason}");
    }
    assert_eq!(stand.relayers[0].accepted().len(), 1, "the followers were not sent");
}

#[tokio::test]
async fn a_replayed_one_whose_nonce_went_to_another_is_not_sent() {
    let ground = Ground::new().await;
    let stand = ground.plan(1).start().await;
    stand.relayers[0].change_faults(|faults| faults.every_post = Some(PostFault::Refused("not today".into())));
    let first = queue(&ground, &stand, 1).await;
    until_final(&stand, &first).await;
    stand.relayers[0].change_faults(|faults| faults.every_post = None);
    let second = queue(&ground, &stand, 1).await;
    assert_eq!(until_final(&stand, &second).await[0]["status"], "confirmed");

    let (code, said) = stand.command(["dlq", "replay", "--all"]).await;
    assert_eq!(code, 0, "{said}");
    let shown = eventually_ok(SOON, "the replayed one to fail again", || async {
        let shown = stand.status(&first[0]).await;
        let reason = shown["error_message"].as_str().unwrap_or_default();
        if shown["status"] == "failed" && reason.contains(&second[0]) { Ok(shown) } else { Err(shown.to_string()) }
    })
    .await;
    assert!(shown["error_message"].as_str().unwrap().contains("was given to"), "{shown}");
    assert_eq!(stand.relayers[0].accepted().len(), 1);
}

#[tokio::test]
async fn once_the_chain_has_executed_one_the_next_may_go_anywhere() {
    let ground = Ground::new().await;
    let stand = slow(ground.plan(2), 2).start().await;
    for relayer in &stand.relayers {
        relayer.change_faults(|faults| faults.jammed = true);
    }
    let first = queue(&ground, &stand, 1).await.remove(0);
    let shown = stand.until_status(&first, "submitted").await;
    let holder = stand.relayers.iter().position(|relayer| relayer.url() == shown["ozRelayerUrl"]).unwrap();
    // It has its place there, and there the next one would have to go.
    stand.relayers[holder].change_faults(|faults| faults.paused = true);
    stand.until_relayer(holder, "paused").await;
    let next = queue_at(&ground, &stand, 1).await;
    eventually_ok(SOON, "it to wait", || async {
        let waits = stand.metric("baton_waits_total", "").await;
        if waits >= 2.0 { Ok(()) } else { Err(waits.to_string()) }
    })
    .await;
    assert_eq!(stand.status(&next).await["status"], "pending");

    // Whoever sends it, it is executed.
    let request = ground.transfer(1, 0).await;
    let signature = ground.contracts.sign(&request, &ground.user);
    let execute = Forwarder::executeCall { request: request.signed(signature) }.abi_encode();
    let call = TransactionRequest::default().with_to(ground.contracts.forwarder).with_input(execute);
    assert!(ground.chain.send(&ground.contracts.owner, call).await.status());
    let shown = stand.until_status(&next, "submitted").await;
    assert_eq!(shown["ozRelayerUrl"], stand.relayers[1 - holder].url());
}

async fn queue_at(ground: &Ground, stand: &Stand, nonce: u64) -> String {
    let (code, said) = post(stand, &ground.signed(&ground.transfer(1, nonce).await), None).await;
    assert_eq!(code, 202, "{said}");
    said["transactionId"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn of_many_requests_with_one_nonce_one_is_accepted() {
    for engine in [Engine::Embedded, Engine::MySqlRabbitMq] {
        let ground = Ground::new().await;
        let stand = ground.plan(1).engine(engine).start().await;
        let mut bodies = Vec::new();
        for amount in 1..=20 {
            bodies.push(ground.signed(&ground.transfer(amount, 0).await));
        }
        let answers = futures::future::join_all(bodies.iter().map(|body| post(&stand, body, None))).await;
        let (accepted, refused): (Vec<_>, Vec<_>) = answers.into_iter().partition(|(code, _)| *code == 202);
        assert_eq!((accepted.len(), refused.len()), (1, 19), "{refused:?}");
        let winner = &accepted[0].1["transactionId"];
        assert!(refused.iter().all(|(code, said)| *code == 400 && said["transactionId"] == *winner), "{refused:?}");
        assert_eq!(known(&stand).await, 1);
    }
}

#[tokio::test]
async fn twins_at_the_same_moment_under_one_key_are_one_transaction() {
    for engine in [Engine::Embedded, Engine::MySqlRabbitMq] {
        let ground = Ground::new().await;
        let stand = ground.plan(1).engine(engine).start().await;
        for nonce in 0..5 {
            let body = ground.signed(&ground.transfer(1, nonce).await);
            let key = format!("twin-{nonce}");
            let twins = (0..20).map(|_| post(&stand, &body, Some(key.as_str())));
            let answers = futures::future::join_all(twins).await;
            let first = &answers[0].1["transactionId"];
            assert!(answers.iter().all(|(code, said)| *code == 202 && said["transactionId"] == *first), "{answers:?}");
        }
        assert_eq!(known(&stand).await, 5);
    }
}

#[tokio::test]
async fn a_submission_that_nobody_knows_the_outcome_of_holds_its_followers_up() {
    let ground = Ground::new().await;
    let stand = slow(ground.plan(2), 2).start().await;
    stand.warm_up().await;
    for relayer in &stand.relayers {
        relayer.change_faults(|faults| faults.next_posts.push_back(Some(PostFault::CutAfterStoring)));
    }
    let ids = queue(&ground, &stand, 3).await;
    let shown = until_final(&stand, &ids).await;
    assert!(shown.iter().all(|shown| shown["status"] == "confirmed"), "{shown:?}");
    let at: Vec<_> = shown.iter().map(|shown| shown["ozRelayerUrl"].clone()).collect();
    assert!(at.iter().all(|url| *url == at[0]), "{at:?}");
    let forwarder = json!(ground.contracts.forwarder.to_string());
    let sent = stand.relayers.iter().flat_map(|relayer| relayer.accepted());
    assert_eq!(sent.filter(|accepted| accepted.request["to"] == forwarder).count(), 3, "each once");
}

#[tokio::test]
async fn a_repeated_look_at_a_waiting_one_does_not_use_up_its_message() {
    let ground = Ground::new().await;
    // Two rounds of looks at least, with a queue that buries a message at the third receipt.
    let stand = slow(ground.plan(1), 1).engine(Engine::MySqlRabbitMq).env("QUEUE_MAX_RECEIVES", "2").start().await;
    stand.relayers[0].change_faults(|faults| faults.jammed = true);
    stand.relayers[0]
        .change_faults(|faults| faults.next_posts.push_back(Some(PostFault::Slow(Duration::from_secs(1)))));
    let ids = queue(&ground, &stand, 3).await;
    stand.relayers[0].change_faults(|faults| faults.jammed = false);
    let shown = until_final(&stand, &ids).await;
    assert!(shown.iter().all(|shown| shown["status"] == "confirmed"), "{shown:?}");
    assert_eq!(stand.metric("baton_reconciler_total", "dead-letter-put-back").await, 0.0, "none was buried on the way");
    stand.until_all_final(SOON).await;
}
