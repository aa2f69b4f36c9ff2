//! Relayers whose word and the chain disagree: the chain decides. The relayers are simulated and say what the test wants;
//! the test itself makes, or does not make, their transactions on the real chain.

use alloy_primitives::{Address, Bytes, U256};
use alloy_sol_types::SolCall;
use harness::chain::{Chain, Contracts, Token, TransactionRequest};
use harness::relayer::{Outcome, PostFault};
use harness::servers::{Server, Servers};
use harness::sink::Sink;
use harness::wait::{eventually, eventually_ok};
use reqwest::Method;
use serde_json::{Value, json};

use crate::chain_fixture::ChainSetup;
use crate::misled_fixture::{Misled, serial_call};
use crate::relay_fixture::{LATER, SOON, answer, serial_body};

#[tokio::test]
async fn a_call_that_the_relayer_calls_failed_is_confirmed_if_the_chain_has_it() {
    let misled = Misled::start(true).await;
    misled.all_end(Outcome::FailedButExecuted);
    let (id, relayer) = misled.send(1).await;
    let receipt = misled.execute(relayer, 1).await;
    misled.finalise().await;
    let end = misled.relay.until_status(&id, "confirmed").await;
    assert_eq!(end["hash"], json!(receipt.transaction_hash.to_string()), "the chain's hash, not the relayer's");
    assert_eq!(end["block_number"], json!(receipt.block_number));
    assert_eq!((&end["error_message"], &end["unverified"]), (&Value::Null, &json!(false)));
    let sent: usize = misled.relay.relayers.iter().map(|relayer| relayer.records().len()).sum();
    assert_eq!(sent, 1, "never sent again");
}

#[tokio::test]
async fn a_failed_call_whose_nonce_another_call_used_is_rerouted() {
    let misled = Misled::start(true).await;
    misled.all_end(Outcome::GivenUp);
    let (id, first) = misled.send(2).await;
    misled.use_nonce(first).await;
    let second = 1 - first;
    misled.relay.relayers[second].set_outcome_rule(|_| Some(Outcome::Confirmed));
    misled.finalise().await;
    eventually(LATER, "the other relayer to get it", || async {
        (misled.relay.relayers[second].records().len() == 1).then_some(())
    })
    .await;
    let receipt = misled.execute(second, 2).await;
    misled.finalise().await;
    let end = misled.relay.until_status(&id, "confirmed").await;
    assert_eq!(end["hash"], json!(receipt.transaction_hash.to_string()));
    assert_eq!(misled.relay.relayers[first].records().len(), 1, "the first one was asked once");
}

#[tokio::test]
async fn a_failed_call_whose_nonce_is_open_stays_unknown_and_is_never_sent_again() {
    let misled = Misled::start(true).await;
    misled.all_end(Outcome::FailedButExecuted);
    let (id, relayer) = misled.send(3).await;
    let unknown = misled.until(&id, "an unknown outcome", |status| status["outcomeUnknown"] == json!(true)).await;
    assert_eq!(unknown["status"], "submitted");
    misled.finalise().await;
    assert_eq!(misled.relay.status(&id).await["status"], "submitted");
    misled.execute(relayer, 3).await;
    misled.finalise().await;
    misled.relay.until_status(&id, "confirmed").await;
    let sent: usize = misled.relay.relayers.iter().map(|relayer| relayer.records().len()).sum();
    assert_eq!(sent, 1);
}

/// Each look at the row leaves its `updatedAt` as it is, so the event must not go by that.
#[tokio::test]
async fn an_outcome_that_the_chain_does_not_tell_is_reported_to_the_client() {
    let chain = Chain::shared();
    let misled = Misled::with(Some(chain.url().to_owned()), |setup| {
        setup.env("WEBHOOK_ALLOW_PRIVATE", "true").env("RECONCILE_OPERATOR_MS", "2000")
    })
    .await;
    let sink = Sink::start().await;
    let register = misled.relay.request(Method::POST, "/api/v1/webhooks/register").json(&json!({ "url": sink.url() }));
    assert_eq!(answer(register).await.0, 201);
    misled.all_end(Outcome::FailedButExecuted);
    let (id, relayer) = misled.send(40).await;
    let event = sink.wait_for(1, LATER).await[0].json();
    assert_eq!((&event["event"], &event["transactionId"]), (&json!("transaction.unknown"), &json!(id)));
    assert_eq!((&event["status"], &event["outcomeUnknown"]), (&json!("submitted"), &json!(true)));
    misled.execute(relayer, 40).await;
    misled.finalise().await;
    let received = sink.wait_for(2, LATER).await;
    assert_eq!(received[1].json()["event"], "transaction.completed", "the event is sent once");
}

#[tokio::test]
async fn a_mined_call_that_the_relayer_leaves_submitted_is_confirmed() {
    let misled = Misled::start(true).await;
    misled.all_end(Outcome::Stuck);
    let (id, relayer) = misled.send(4).await;
    misled.execute(relayer, 4).await;
    misled.finalise().await;
    misled.relay.until_status(&id, "confirmed").await;
}

#[tokio::test]
async fn a_confirmation_that_the_chain_does_not_have_is_not_believed() {
    let misled = Misled::start(true).await;
    misled.all_end(Outcome::Confirmed);
    let (id, relayer) = misled.send(5).await;
    misled.until_said(&id, "confirmed").await;
    assert_eq!(misled.relay.status(&id).await["status"], "submitted");
    misled.execute(relayer, 5).await;
    misled.finalise().await;
    misled.relay.until_status(&id, "confirmed").await;
}

#[tokio::test]
async fn a_lost_submission_is_found_on_the_chain_although_its_relayer_forgot_it() {
    let misled = Misled::start(true).await;
    for relayer in &misled.relay.relayers {
        relayer.set_post_rule(|_| Some(PostFault::CutAfterStoring));
    }
    let id = misled.relay.send(&serial_body(6)).await;
    let taken = |index: usize| misled.relay.relayers[index].records().len();
    let relayer = eventually(SOON, "a relayer to take it", || async { (0..2).find(|index| taken(*index) == 1) }).await;
    misled.relay.relayers[relayer].forget();
    let receipt = misled.execute(relayer, 6).await;
    misled.finalise().await;
    let end = misled.relay.until_status(&id, "confirmed").await;
    assert_eq!(end["hash"], json!(receipt.transaction_hash.to_string()));
    assert_eq!(misled.relay.relayers[1 - relayer].records().len(), 0, "not sent again");
}

#[tokio::test]
async fn a_signed_failure_without_a_chain_that_decides_is_marked_unverified() {
    let chain = Chain::shared();
    for (rpc_url, cause) in [(None, "RPC_URL is not set"), (Some(chain.url().to_owned()), "CHAIN_DECIDES is false")] {
        let decides = rpc_url.is_none().to_string();
        let misled = Misled::with(rpc_url, |setup| setup.env("CHAIN_DECIDES", decides)).await;
        misled.all_end(Outcome::FailedButExecuted);
        let id = misled.relay.send(&serial_body(7)).await;
        let end = misled.relay.until_status(&id, "failed").await;
        assert_eq!(end["unverified"], json!(true), "{end}");
        let (_, timeline) = misled.relay.get(&format!("/api/v1/relay/transactions/{id}/timeline")).await;
        let timeline = timeline.to_string();
        assert!(timeline.contains("the chain was not asked") && !timeline.contains("is not set"), "{timeline}");
        assert!(misled.relay.api.output().contains(cause), "the log says why");
    }
}

/// The relayers have no tokens when the call is made, and have some when its reason is asked for.
#[tokio::test]
async fn a_call_that_reverted_fails_with_the_reason_of_its_own_block_whatever_the_relayer_says() {
    for outcome in [Outcome::FailedButExecuted, Outcome::Confirmed] {
        let misled = Misled::start(true).await;
        let contracts = Contracts::deploy(&misled.chain).await;
        misled.all_end(outcome);
        let call = Token::transferCall { to: Address::repeat_byte(1), amount: U256::from(1) };
        let data = Bytes::from(call.abi_encode());
        let body = json!({ "to": contracts.token.to_string(), "data": data.to_string(), "gas": 60000 });
        let id = misled.relay.send(&body).await;
        let relayer = misled.signed_by(&data.to_string()).await;
        let call = TransactionRequest::default().with_to(contracts.token).with_input(data).with_gas_limit(60_000);
        let receipt = misled.chain.send(&misled.keys[relayer], call).await;
        assert!(!receipt.status());
        contracts.give(misled.keys[relayer].address(), 5).await;
        misled.finalise().await;
        let end = misled.relay.until_status(&id, "failed").await;
        assert_eq!(end["hash"], json!(receipt.transaction_hash.to_string()), "{end}");
        assert_eq!((&end["block_number"], &end["unverified"]), (&json!(receipt.block_number), &json!(false)), "{end}");
        let reason = end["error_message"].as_str().unwrap();
        assert!(reason.contains("reverted on the chain") && reason.contains("custom error 0x"), "{end}");
        let (_, timeline) = misled.relay.get(&format!("/api/v1/relay/transactions/{id}/timeline")).await;
        assert!(!timeline.to_string().contains("unverified"), "{timeline}");
    }
}

#[tokio::test]
async fn a_confirmation_whose_nonce_another_call_used_raises_an_alarm_and_is_rerouted() {
    let misled = Misled::start(true).await;
    misled.all_end(Outcome::Confirmed);
    let (id, first) = misled.send(8).await;
    misled.use_nonce(first).await;
    misled.finalise().await;
    let second = 1 - first;
    eventually(LATER, "the other relayer to get it", || async {
        (misled.relay.relayers[second].records().len() == 1).then_some(())
    })
    .await;
    assert!(misled.relay.metric("baton_unfounded_confirmations_total", "").await >= 1.0);
    assert!(misled.relay.api.output().contains("unfounded_confirmation"), "the log says it");
    misled.execute(second, 8).await;
    misled.finalise().await;
    misled.relay.until_status(&id, "confirmed").await;
}

/// Each row is confirmed by its own call only: a different one, or an equal one.
#[tokio::test]
async fn the_hash_of_another_rows_call_confirms_only_that_row() {
    for serials in [[9, 10], [11, 11]] {
        let misled = Misled::start(true).await;
        misled.all_end(Outcome::Stuck);
        let [first, second] = misled.send_both(serials).await;
        let of_first = misled.execute(0, serials[0]).await;
        misled.finalise().await;
        misled.relay.until_status(&first, "confirmed").await;
        misled.tell_confirmed(&second, 0, &of_first).await;
        misled.assert_stays_open(&second).await;
        let own = misled.execute(0, serials[1]).await;
        misled.finalise().await;
        let end = misled.relay.until_status(&second, "confirmed").await;
        assert_eq!(end["hash"], json!(own.transaction_hash.to_string()), "{end}");
    }
}

#[tokio::test]
async fn the_hash_of_another_accounts_equal_call_confirms_nothing() {
    let misled = Misled::start(true).await;
    misled.all_end(Outcome::Stuck);
    let (id, relayer) = misled.send(14).await;
    let anothers = misled.execute_as(&misled.chain.funded_key().await, 14).await;
    misled.finalise().await;
    misled.tell_confirmed(&id, relayer, &anothers).await;
    misled.assert_stays_open(&id).await;
    let own = misled.execute(relayer, 14).await;
    misled.finalise().await;
    let end = misled.relay.until_status(&id, "confirmed").await;
    assert_eq!(end["hash"], json!(own.transaction_hash.to_string()), "{end}");
}

/// Neither the relayer's silence nor its `failed` ends a row whose block may still be replaced; its `confirmed`, under the
/// hash that the chain has, does.
#[tokio::test]
async fn a_block_that_is_not_final_settles_only_what_relayer_and_receipt_agree_on() {
    let misled = Misled::with_finality(true, 1_000_000).await;
    misled.all_end(Outcome::FailedButExecuted);
    let (failed, relayer) = misled.send(15).await;
    misled.execute(relayer, 15).await;
    misled.finalise().await;
    misled.assert_stays_open(&failed).await;
    misled.all_end(Outcome::Stuck);
    let (confirmed, relayer) = misled.send(16).await;
    // The nonce is the chain's next one at either relayer.
    let receipt = misled.execute(relayer, 16).await;
    misled.tell_confirmed(&confirmed, relayer, &receipt).await;
    misled.relay.until_status(&confirmed, "confirmed").await;
}

/// A call that reverts may succeed in the block that replaces its own. A relayer that says `failed` has not waited.
#[tokio::test]
async fn a_revert_in_a_block_that_is_not_final_fails_nothing_although_the_relayer_agrees() {
    let chain = Chain::shared();
    let contracts = Contracts::deploy(&chain).await;
    // These relayers sign: the hash that they name is the chain's.
    let setup = ChainSetup::on(&chain).env("CHAIN_FINALITY_BLOCKS", "1000000").env("RECONCILE_SUBMITTED_MS", "500");
    let relay = setup.start().await;
    let call = Token::transferCall { to: Address::repeat_byte(1), amount: U256::from(1) }.abi_encode();
    let body = json!({ "to": contracts.token.to_string(), "data": Bytes::from(call), "gas": 60000 });
    let (_, accepted) = relay.post("direct", &body).await;
    let id = accepted["transactionId"].as_str().unwrap();
    let status = eventually_ok(LATER, "the chain to be looked at", || async {
        let status = relay.status(id).await;
        let looks = relay.metric("baton_chain_checks_total", "open").await;
        let said = status["error_message"].as_str().is_some_and(|said| said.contains("the relayer says failed"));
        if (looks >= 2.0 && said) || status["status"] == "failed" { Ok(status) } else { Err(status) }
    })
    .await;
    assert_eq!(status["status"], "submitted", "{status}");
    let receipt = chain.receipt(status["hash"].as_str().unwrap()).await.unwrap();
    assert!(!receipt.status(), "relayer and receipt agree");
}

#[tokio::test]
async fn a_call_that_its_relayer_replaced_by_a_no_op_says_so_with_the_hash_of_that() {
    let misled = Misled::start(true).await;
    misled.all_end(Outcome::NoOp);
    let (id, relayer) = misled.send(17).await;
    let no_op = misled.use_nonce(relayer).await;
    misled.finalise().await;
    let end = misled.relay.until_status(&id, "failed").await;
    assert!(end["error_message"].as_str().unwrap().contains("replaced the call"), "{end}");
    assert_eq!(end["hash"], json!(no_op.transaction_hash.to_string()), "{end}");
    assert_eq!(misled.relay.relayers[1 - relayer].records().len(), 0, "another relayer does not get it");
}

/// The relayer answers 500, so that its empty list proves absence. It has lost the record, and not the nonce.
#[tokio::test]
async fn a_proven_absence_is_held_against_the_chain_before_a_resend() {
    let misled = Misled::start(true).await;
    for relayer in &misled.relay.relayers {
        relayer.set_post_rule(|_| Some(PostFault::ErrorAfterStoring));
        relayer.change_faults(|faults| faults.transaction_reads.status = Some(503));
    }
    let (id, relayer) = misled.send(12).await;
    let records = |index: usize| misled.relay.relayers[index].accepted().len();
    let until_logged = async |text: &str| {
        eventually_ok(LATER, format!("{text:?} in the log"), || async {
            let output = misled.relay.api.output();
            if output.contains(text) || records(1 - relayer) > 0 { Ok(()) } else { Err(output) }
        })
        .await;
    };
    misled.relay.relayers[relayer].forget();
    misled.relay.relayers[relayer].change_faults(|faults| {
        faults.transaction_reads.status = None;
        faults.chain_reads.status = Some(500);
    });
    until_logged("the relayer does not say which nonce comes next").await;
    misled.relay.relayers[relayer].change_faults(|faults| faults.chain_reads.status = None);
    until_logged("nonce 0 of the relayer is signed and not mined").await;
    let receipt = misled.execute(relayer, 12).await;
    misled.finalise().await;
    let end = misled.relay.until_status(&id, "confirmed").await;
    assert_eq!(end["hash"], json!(receipt.transaction_hash.to_string()));
    assert_eq!((records(relayer), records(1 - relayer)), (1, 0), "not sent again");
}

/// The account that made the call is not the one that the relayer lists now.
#[tokio::test]
async fn a_lost_submission_is_not_sent_again_after_its_relayer_has_changed_its_key() {
    for is_first in [false, true] {
        let misled = Misled::start(true).await;
        let (relayer, other) = (&misled.relay.relayers[0], &misled.relay.relayers[1]);
        other.change_faults(|faults| faults.paused = true);
        misled.relay.until_relayer(1, "paused").await;
        // What the relayer listed before is known from an earlier submission, or from the claim alone.
        if !is_first {
            let before = misled.relay.send(&serial_body(31)).await;
            misled.until_said(&before, "submitted").await;
        }
        let taken = if is_first { 1 } else { 2 };
        relayer.set_post_rule(|_| Some(PostFault::ErrorAfterStoring));
        let id = misled.relay.send(&serial_body(32)).await;
        eventually(SOON, "the relayer to take it", || async { (relayer.accepted().len() == taken).then_some(()) })
            .await;
        relayer.forget();
        relayer.change_key(&misled.chain.funded_key().await.address().to_string());
        other.change_faults(|faults| faults.paused = false);
        eventually_ok(LATER, "the changed key to be named", || async {
            let output = misled.relay.api.output();
            let resent = relayer.accepted().len() + other.accepted().len() > taken;
            if resent || output.contains("the relayer's key was changed") { Ok(()) } else { Err(output) }
        })
        .await;
        // Beyond the time after which an unproven absence counts.
        let looks = || misled.relay.api.output().matches("the relayer's key was changed").count();
        eventually(LATER, "more looks", || async { (looks() >= 5 || !other.accepted().is_empty()).then_some(()) })
            .await;
        assert_eq!((relayer.accepted().len(), other.accepted().len()), (taken, 0), "not sent again");
        assert_eq!(misled.relay.status(&id).await["outcomeUnknown"], json!(true));
    }
}

/// Each nonce of a key can be used once, whichever relayer takes it.
#[tokio::test]
async fn the_second_relayer_with_the_key_of_another_gets_no_work() {
    let misled = Misled::start(true).await;
    let (relayer, other) = (&misled.relay.relayers[0], &misled.relay.relayers[1]);
    other.change_key(relayer.address());
    misled.relay.until_relayer(1, "shared key").await;
    for serial in 33..36 {
        misled.send(serial).await;
    }
    assert_eq!((relayer.accepted().len(), other.accepted().len()), (3, 0));
    assert!(misled.relay.api.output().contains("relayer_shared_key"), "the log says it");
}

/// A relayer that lost its last seconds after it had signed says that it never did, and why it failed: for a reason of its
/// own, or because the call, which is done, can no longer succeed.
#[tokio::test]
async fn a_call_that_the_relayer_failed_unsigned_is_confirmed_if_the_chain_has_it() {
    for (reason, serial) in
        [("Transaction in Pending state for over 2 minutes", 18), ("execution reverted: already paid", 28)]
    {
        let misled = Misled::start(true).await;
        misled.all_end(Outcome::NeverSigned(reason.to_owned()));
        for relayer in &misled.relay.relayers {
            relayer.change_faults(|faults| faults.transaction_reads.status = Some(503));
        }
        let id = misled.relay.send(&serial_body(serial)).await;
        misled.until_said(&id, "failed").await;
        let relayer = misled.relay.relayers.iter().position(|relayer| !relayer.records().is_empty()).unwrap();
        let receipt = misled.execute(relayer, serial).await;
        misled.finalise().await;
        for relayer in &misled.relay.relayers {
            relayer.change_faults(|faults| faults.transaction_reads.status = None);
        }
        let end = misled.relay.until_status(&id, "confirmed").await;
        assert_eq!(end["hash"], json!(receipt.transaction_hash.to_string()), "{end}");
        assert_eq!(misled.relay.relayers[1 - relayer].accepted().len(), 0, "not sent again");
    }
}

/// The chain does not have it, and nothing of the relayer waits to be mined: its word counts.
#[tokio::test]
async fn a_call_that_the_relayer_failed_unsigned_for_the_calls_own_reason_fails() {
    let misled = Misled::start(true).await;
    misled.all_end(Outcome::NeverSigned("execution reverted: not allowed".to_owned()));
    let id = misled.relay.send(&serial_body(29)).await;
    let end = misled.relay.until_status(&id, "failed").await;
    assert_eq!(end["error_message"], "execution reverted: not allowed", "{end}");
    assert_eq!(end["unverified"], json!(false), "{end}");
    let accepted: usize = misled.relay.relayers.iter().map(|relayer| relayer.accepted().len()).sum();
    assert_eq!(accepted, 1, "it is not sent again");
}

/// As above, and the call is not mined yet when the relayer says that it never signed it.
#[tokio::test]
async fn a_call_that_the_relayer_failed_unsigned_is_not_sent_again_while_it_may_be_in_a_pool() {
    let servers = Servers::running(&[Server::Chain]).await;
    let chain = Chain::of(&servers);
    let misled = Misled::on(chain.clone(), Some(chain.url().to_owned()), |setup| setup).await;
    misled.all_end(Outcome::NeverSigned("Transaction in Pending state for over 2 minutes".to_owned()));
    for relayer in &misled.relay.relayers {
        relayer.change_faults(|faults| faults.transaction_reads.status = Some(503));
    }
    let id = misled.relay.send(&serial_body(21)).await;
    misled.until_said(&id, "failed").await;
    let relayer = misled.relay.relayers.iter().position(|relayer| !relayer.records().is_empty()).unwrap();
    chain.set_automine(false).await;
    let hash = chain.send_unmined(&misled.keys[relayer], serial_call(21)).await;
    for relayer in &misled.relay.relayers {
        relayer.change_faults(|faults| faults.transaction_reads.status = None);
    }
    misled.assert_stays_open(&id).await;
    misled.until_timeline(&id, "nonce 0 of the relayer is signed and not mined").await;
    assert_eq!(misled.relay.relayers[1 - relayer].accepted().len(), 0, "not sent again");
    misled.finalise().await;
    let end = misled.relay.until_status(&id, "confirmed").await;
    assert_eq!(end["hash"], json!(hash), "{end}");
    assert_eq!(misled.relay.relayers[1 - relayer].accepted().len(), 0, "not sent again");
    // Another test may get this chain.
    chain.set_automine(true).await;
}

/// Another call has used the nonce of a lost submission, in a block that may be replaced. On the shared chain other tests
/// would make that block final.
#[tokio::test]
async fn a_nonce_that_is_not_used_for_good_keeps_an_unknown_outcome_open() {
    let servers = Servers::running(&[Server::Chain]).await;
    let chain = Chain::of(&servers);
    let misled = Misled::on(chain.clone(), Some(chain.url().to_owned()), |setup| setup).await;
    for relayer in &misled.relay.relayers {
        relayer.set_post_rule(|_| Some(PostFault::ErrorAfterStoring));
        relayer.change_faults(|faults| faults.transaction_reads.status = Some(503));
    }
    let (id, relayer) = misled.send(19).await;
    let taken = || misled.relay.relayers.iter().map(|relayer| relayer.accepted().len()).sum::<usize>();
    misled.relay.relayers[relayer].forget();
    misled.use_nonce(relayer).await;
    misled.relay.relayers[relayer].change_faults(|faults| faults.transaction_reads.status = None);
    eventually_ok(LATER, "the nonce to be looked at", || async {
        let output = misled.relay.api.output();
        if output.contains("nonce 0 of the relayer is not used for good yet") || taken() > 1 {
            Ok(())
        } else {
            Err(output)
        }
    })
    .await;
    assert_eq!(taken(), 1, "not sent again");
    for relayer in &misled.relay.relayers {
        relayer.set_post_rule(|_| None);
    }
    misled.finalise().await;
    eventually_ok(LATER, "it to be sent again", || async {
        if taken() == 2 { Ok(()) } else { Err(misled.relay.status(&id).await) }
    })
    .await;
}
