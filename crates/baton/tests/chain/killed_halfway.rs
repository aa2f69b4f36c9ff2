//! A process is killed between two steps of which the first is stored: the row goes on from there after the restart. Each
//! test holds the process at that point, by an answer that it waits for or a write that the database refuses.

use std::path::Path;

use alloy_primitives::{Address, Bytes, U256};
use alloy_sol_types::SolCall;
use harness::chain::{Chain, Contracts, Token, TransactionRequest};
use harness::engine::TestEngine;
use harness::relayer::{Outcome, PostFault};
use harness::wait::{eventually, eventually_ok};
use serde_json::json;

use crate::misled_fixture::Misled;
use crate::relay_fixture::{LATER, SOON, serial_body};
use crate::rpc_proxy::RpcProxy;

impl Misled {
    async fn start_again(&mut self) {
        self.relay.api.restart().await.unwrap();
        self.relay.api_ready().await;
    }

    /// The submissions that each relayer has accepted.
    fn accepted(&self) -> [usize; 2] {
        [0, 1].map(|index| self.relay.relayers[index].accepted().len())
    }

    /// The position of the relayer that takes the only submission.
    async fn taken_by(&self) -> usize {
        eventually(SOON, "a relayer to take it", || async { self.accepted().iter().position(|taken| *taken == 1) })
            .await
    }

    /// The transactions on the chain of all relayers' accounts.
    async fn mined(&self) -> u64 {
        self.chain.nonce(self.keys[0].address()).await + self.chain.nonce(self.keys[1].address()).await
    }
}

/// The relayer has lost the record, and the chain has the call, which reverted. The row is bound to the chain's transaction;
/// the reason of the revert, which is asked for next, does not come.
#[tokio::test]
async fn killed_between_the_binding_to_the_chains_transaction_and_the_end() {
    let chain = Chain::shared();
    let rpc = RpcProxy::start(&chain).await;
    let mut misled = Misled::with(Some(rpc.url().to_owned()), |setup| setup).await;
    let contracts = Contracts::deploy(&chain).await;
    for relayer in &misled.relay.relayers {
        relayer.set_post_rule(|_| Some(PostFault::CutAfterStoring));
    }
    rpc.hold(Some("eth_call"));
    let call = Token::transferCall { to: Address::repeat_byte(1), amount: U256::from(1) };
    let data = Bytes::from(call.abi_encode());
    let body = json!({ "to": contracts.token.to_string(), "data": data.to_string(), "gas": 60000 });
    let id = misled.relay.send(&body).await;
    let relayer = misled.taken_by().await;
    misled.relay.relayers[relayer].forget();
    let call = TransactionRequest::default().with_to(contracts.token).with_input(data).with_gas_limit(60_000);
    let receipt = chain.send(&misled.keys[relayer], call).await;
    assert!(!receipt.status());
    misled.finalise().await;
    eventually(LATER, "the reason to be asked for", || async { (rpc.request_count("eth_call") > 0).then_some(()) })
        .await;
    let bound = misled.relay.status(&id).await;
    assert_eq!(bound["status"], "submitted", "{bound}");
    assert_eq!(bound["ozRelayerTxId"], json!(format!("chain:{}", receipt.transaction_hash)), "{bound}");
    misled.relay.api.kill9().await.unwrap();
    rpc.hold(None);
    misled.start_again().await;
    let end = misled.relay.until_status(&id, "failed").await;
    assert_eq!(end["hash"], json!(receipt.transaction_hash.to_string()), "{end}");
    assert_eq!((&end["block_number"], &end["unverified"]), (&json!(receipt.block_number), &json!(false)), "{end}");
    assert!(end["error_message"].as_str().unwrap().contains("reverted on the chain"), "{end}");
    assert_eq!((misled.mined().await, misled.accepted().iter().sum::<usize>()), (1, 1), "made once, sent once");
}

/// The relayer does not work on its record. That it is asked to cancel it is stored, and the relayer does not get the
/// request.
#[tokio::test]
async fn killed_between_the_stored_cancellation_and_the_request_for_it() {
    let chain = Chain::shared();
    let mut misled = Misled::with(Some(chain.url().to_owned()), |setup| setup).await;
    misled.all_end(Outcome::WithoutJob);
    for relayer in &misled.relay.relayers {
        relayer.change_faults(|faults| faults.cancels_hang = true);
    }
    let id = misled.relay.send(&serial_body(31)).await;
    let first = misled.taken_by().await;
    let record = misled.relay.relayers[first].records()[0].id.clone();
    let asked = || misled.relay.relayers[first].count_requests("DELETE", &record);
    eventually(LATER, "the cancellation to be asked for", || async { (asked() > 0).then_some(()) }).await;
    misled.relay.api.kill9().await.unwrap();
    assert!(!misled.relay.relayers[first].records()[0].is_canceled, "the relayer has not got it");
    for relayer in &misled.relay.relayers {
        relayer.change_faults(|faults| faults.cancels_hang = false);
    }
    let second = 1 - first;
    misled.relay.relayers[second].set_outcome_rule(|_| Some(Outcome::Confirmed));
    misled.start_again().await;
    misled.until_timeline(&id, "cancel-requested").await;
    eventually_ok(LATER, "the other relayer to get it", || async {
        if misled.accepted() == [1, 1] { Ok(()) } else { Err(misled.relay.status(&id).await) }
    })
    .await;
    let receipt = misled.execute(second, 31).await;
    misled.finalise().await;
    let end = misled.relay.until_status(&id, "confirmed").await;
    assert_eq!(end["hash"], json!(receipt.transaction_hash.to_string()), "{end}");
    assert!(misled.relay.relayers[first].records()[0].is_canceled);
    assert_eq!((misled.mined().await, misled.accepted()), (1, [1, 1]), "made once");
}

/// The database refuses the claim. The relayers' lists prove nothing, so that only the row can say that nothing was sent.
#[tokio::test]
async fn killed_before_the_claim_is_stored() {
    let chain = Chain::shared();
    let mut misled = Misled::with(Some(chain.url().to_owned()), |setup| setup.engine(TestEngine::Embedded)).await;
    for relayer in &misled.relay.relayers {
        relayer.change_faults(|faults| faults.transaction_reads.status = Some(503));
    }
    let database = Path::new(&misled.relay.env["BATON_DATA_DIR"]).join("baton.db");
    let database = rusqlite::Connection::open(database).unwrap();
    database.busy_timeout(SOON).unwrap();
    database
        .execute_batch(
            "CREATE TRIGGER held BEFORE UPDATE ON transactions
             WHEN OLD.claim_token IS NULL AND NEW.claim_token IS NOT NULL
             BEGIN SELECT RAISE(ABORT, 'held'); END",
        )
        .unwrap();
    let id = misled.relay.send(&serial_body(32)).await;
    eventually(SOON, "the write to be refused", || async {
        misled.relay.api.output().contains("store_unavailable").then_some(())
    })
    .await;
    misled.relay.api.kill9().await.unwrap();
    assert_eq!(misled.accepted(), [0, 0]);
    database.execute_batch("DROP TRIGGER held").unwrap();
    misled.start_again().await;
    let relayer = misled.taken_by().await;
    for relayer in &misled.relay.relayers {
        relayer.change_faults(|faults| faults.transaction_reads.status = None);
    }
    let receipt = misled.execute(relayer, 32).await;
    misled.finalise().await;
    let end = misled.relay.until_status(&id, "confirmed").await;
    assert_eq!(end["hash"], json!(receipt.transaction_hash.to_string()), "{end}");
    assert_eq!((misled.mined().await, misled.accepted().iter().sum::<usize>()), (1, 1), "made once, sent once");
}
