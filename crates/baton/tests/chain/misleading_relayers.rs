//! Relayers whose word and the chain disagree: the chain decides. The relayers are simulated and say what the test wants;
//! the test itself makes, or does not make, their transactions on the real chain.

use alloy_primitives::{Bytes, U256};
use alloy_provider::network::TransactionBuilder;
use harness::chain::{Chain, PrivateKeySigner, Receipt, TransactionRequest};
use harness::relayer::{Outcome, PostFault};
use harness::wait::{eventually, eventually_ok};
use serde_json::{Value, json};

use crate::relay_fixture::{LATER, RelayFixture, RelaySetup, SOON, TO, serial_body, serial_data};

/// Blocks on top of one that make it final in these tests.
const FINALITY: u64 = 2;

struct Misled {
    relay: RelayFixture,
    chain: Chain,
    /// The relayers' keys, in their order.
    keys: Vec<PrivateKeySigner>,
}

impl Misled {
    /// Two relayers with accounts on the chain.
    async fn start(rpc: bool) -> Self {
        let chain = Chain::shared();
        let keys = vec![chain.funded_key().await, chain.funded_key().await];
        let mut setup = RelaySetup::relayers(keys.len())
            .env("CHAIN_FINALITY_BLOCKS", FINALITY.to_string())
            .env("RECONCILE_SUBMITTED_MS", "500")
            .env("RECONCILE_UNPROVEN_MS", "3000");
        if rpc {
            setup = setup.env("RPC_URL", chain.url());
        }
        for (index, key) in keys.iter().enumerate() {
            let address = key.address().to_string();
            setup = setup.relayer(index, |options| options.address = Some(address));
        }
        Self { relay: setup.start().await, chain, keys }
    }

    /// All relayers end their transactions like this.
    fn all_end(&self, outcome: Outcome) {
        for relayer in &self.relay.relayers {
            let outcome = outcome.clone();
            relayer.set_outcome_rule(move |_| Some(outcome.clone()));
        }
    }

    /// Sends one; returns its id and the position of the relayer that took it, once that has signed it.
    async fn send(&self, serial: usize) -> (String, usize) {
        let id = self.relay.send(&serial_body(serial)).await;
        (id, self.signed_by(serial).await)
    }

    /// The relayer whose newest record of this serial number has a nonce.
    async fn signed_by(&self, serial: usize) -> usize {
        let data = serial_data(serial);
        eventually(LATER, "a relayer to sign it", || async {
            self.relay.relayers.iter().position(|relayer| {
                let signed = |record: &harness::relayer::Record| record.nonce.is_some();
                relayer.records().iter().any(|record| record.data.as_deref() == Some(&data) && signed(record))
            })
        })
        .await
    }

    /// Makes the call on the chain with the key of this relayer.
    async fn execute(&self, relayer: usize, serial: usize) -> Receipt {
        let data: Bytes = serial_data(serial).parse().unwrap();
        let call = TransactionRequest::default().with_to(TO.parse().unwrap()).with_value(U256::from(1));
        self.chain.send(&self.keys[relayer], call.with_input(data).with_gas_limit(60_000)).await
    }

    /// Uses up the relayer's next nonce with another call.
    async fn use_nonce(&self, relayer: usize) {
        let address = self.keys[relayer].address();
        let no_op = TransactionRequest::default().with_to(address).with_value(U256::ZERO);
        self.chain.send(&self.keys[relayer], no_op.with_gas_limit(21_000)).await;
    }

    /// Makes everything mined so far final.
    async fn finalise(&self) {
        for _ in 0..=FINALITY {
            self.chain.mine().await;
        }
    }

    async fn until(&self, id: &str, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        eventually_ok(LATER, what.to_owned(), || async {
            let status = self.relay.status(id).await;
            if holds(&status) { Ok(status) } else { Err(status) }
        })
        .await
    }
}

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
    let timeline = format!("/api/v1/relay/transactions/{id}/timeline");
    eventually_ok(SOON, "the relayer's word to arrive", || async {
        let (_, timeline) = misled.relay.get(&timeline).await;
        if timeline.to_string().contains("the relayer says confirmed") { Ok(()) } else { Err(timeline) }
    })
    .await;
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
async fn without_a_chain_a_signed_failure_is_marked_unverified() {
    let misled = Misled::start(false).await;
    misled.all_end(Outcome::FailedButExecuted);
    let id = misled.relay.send(&serial_body(7)).await;
    let end = misled.relay.until_status(&id, "failed").await;
    assert_eq!(end["unverified"], json!(true), "{end}");
    let (_, timeline) = misled.relay.get(&format!("/api/v1/relay/transactions/{id}/timeline")).await;
    assert!(timeline.to_string().contains("unverified"), "{timeline}");
}
