//! A relayer behind a nonce gap: the chain shows which nonce is missing, and the relayer gets no new work until it is filled.

use alloy_primitives::{Bytes, U256};
use harness::chain::{Chain, PrivateKeySigner, TransactionRequest};
use harness::relayer::Outcome;
use harness::wait::{eventually, eventually_ok};
use serde_json::{Value, json};

use crate::relay_fixture::{LATER, RelayFixture, RelaySetup, TO, serial_body, serial_data};

/// The call of a serial number with this nonce, ready to be signed.
async fn call(chain: &Chain, serial: usize, nonce: u64) -> TransactionRequest {
    let fees = chain.fees().await;
    let data: Bytes = serial_data(serial).parse().unwrap();
    TransactionRequest::default()
        .with_to(TO.parse().unwrap())
        .with_value(U256::from(1))
        .with_input(data)
        .with_gas_limit(60_000)
        .with_nonce(nonce)
        .with_fees(fees.max * 2, fees.priority)
}

/// Sends one, and waits until the first relayer has signed it with this nonce.
async fn signed_with(relay: &RelayFixture, serial: usize, nonce: u64) -> String {
    let id = relay.send(&serial_body(serial)).await;
    let data = serial_data(serial);
    eventually(LATER, format!("{serial} to be signed"), || async {
        let records = relay.relayers[0].records();
        let signed = records.iter().any(|record| record.data.as_deref() == Some(&data) && record.nonce == Some(nonce));
        signed.then_some(())
    })
    .await;
    id
}

async fn until_entry(relay: &RelayFixture, index: usize, status: &str) -> Value {
    eventually_ok(LATER, format!("relayer {index} to be {status}"), || async {
        let (_, health) = relay.get("/health").await;
        let url = relay.relayers[index].url();
        let each = health["parts"]["relayers"]["each"].as_array().unwrap();
        let entry = each.iter().find(|relayer| relayer["url"] == url.as_str()).unwrap().clone();
        if entry["status"] == status { Ok(entry) } else { Err(entry) }
    })
    .await
}

/// Two relayers with these keys; the second one is paused.
async fn jammable(chain: &Chain, keys: &[PrivateKeySigner; 2]) -> RelayFixture {
    let [first, second] = [&keys[0], &keys[1]].map(|key| key.address().to_string());
    let relay = RelaySetup::relayers(2)
        .env("RPC_URL", chain.url())
        .env("CHAIN_FINALITY_BLOCKS", "2")
        .env("RECONCILE_SUBMITTED_MS", "500")
        .env("RELAYER_JAM_AFTER_MS", "4000")
        .relayer(0, |options| options.address = Some(first))
        .relayer(1, |options| options.address = Some(second))
        .faults(1, |faults| faults.paused = true)
        .start()
        .await;
    until_entry(&relay, 1, "paused").await;
    relay
}

#[tokio::test]
async fn a_nonce_gap_jams_its_relayer_until_it_is_filled() {
    let chain = Chain::shared();
    let keys = [chain.funded_key().await, chain.funded_key().await];
    let relay = jammable(&chain, &keys).await;
    for relayer in &relay.relayers {
        relayer.set_outcome_rule(|_| Some(Outcome::Stuck));
    }
    // Nonce 0 is mined. Nonce 1 never reaches the node. Nonce 2 waits in the node's pool behind it.
    let mined = signed_with(&relay, 10, 0).await;
    chain.send_as_is(&keys[0], call(&chain, 10, 0).await).await;
    let missing = signed_with(&relay, 11, 1).await;
    let behind = signed_with(&relay, 12, 2).await;
    chain.send_as_is(&keys[0], call(&chain, 12, 2).await).await;

    let entry = until_entry(&relay, 0, "jammed").await;
    assert_eq!(entry["missingNonce"], json!(1), "{entry}");
    assert!(entry["reason"].as_str().unwrap().contains("nonce 1 is missing on the chain"), "{entry}");
    eventually(LATER, "the metric to name the nonce", || async {
        let missing = relay.metric("baton_relayer_missing_nonce", &relay.relayers[0].url()).await;
        (missing == 1.0).then_some(())
    })
    .await;
    assert!(relay.api.output().contains("relayer_jammed"), "the log says it");

    relay.relayers[1].change_faults(|faults| faults.paused = false);
    until_entry(&relay, 1, "ok").await;
    // At once: what they sign does not reach the chain either, and soon jams the other relayer too.
    relay.send_many(20..30).await;
    eventually(LATER, "the other relayer to take new work", || async {
        (relay.relayers[1].records().len() == 10).then_some(())
    })
    .await;
    assert_eq!(relay.relayers[0].records().len(), 3, "no new work while it is jammed");

    chain.send_as_is(&keys[0], call(&chain, 11, 1).await).await;
    for id in [mined, missing, behind] {
        eventually_ok(LATER, format!("{id} to be confirmed"), || async {
            chain.mine().await;
            let status = relay.status(&id).await;
            if status["status"] == "confirmed" { Ok(()) } else { Err(status) }
        })
        .await;
    }
    let entry = until_entry(&relay, 0, "ok").await;
    assert_eq!(entry["missingNonce"], Value::Null);
    relay.send(&serial_body(30)).await;
    eventually(LATER, "the relayer to be used again", || async {
        (relay.relayers[0].records().len() == 4).then_some(())
    })
    .await;
}

/// Another client of the relayer has taken nonces 0 and 1, and nonce 1 never reaches the node. No row accounts for it, so
/// the gap stays open. The node's pool ends there: what the relayer failed unsigned does not wait for the gap.
#[tokio::test]
async fn a_row_that_fails_unsigned_leaves_a_relayer_that_is_jammed_by_a_nonce_without_an_owner() {
    let chain = Chain::shared();
    let keys = [chain.funded_key().await, chain.funded_key().await];
    let relay = jammable(&chain, &keys).await;
    let unsigned = serial_data(41);
    relay.relayers[0].set_outcome_rule(move |request| {
        let fails = request["data"] == unsigned.as_str();
        Some(if fails {
            Outcome::NeverSigned("in Pending state for over 2 minutes".to_owned())
        } else {
            Outcome::Stuck
        })
    });
    for nonce in 0..2 {
        let foreign = relay.post_at_relayer(0, "0xbeef").await;
        eventually(LATER, "it to be signed", || async {
            (relay.relayers[0].record(&foreign)?.nonce == Some(nonce)).then_some(())
        })
        .await;
    }
    chain.send_as_is(&keys[0], call(&chain, 39, 0).await).await;
    // A webhook says that it failed, and asked, the relayer says nothing until it is jammed.
    relay.relayers[0].change_faults(|faults| faults.transaction_reads.status = Some(503));
    let leaves = relay.send(&serial_body(41)).await;
    eventually(LATER, "the relayer to take it", || async { (relay.relayers[0].records().len() == 3).then_some(()) })
        .await;
    signed_with(&relay, 40, 2).await;
    chain.send_as_is(&keys[0], call(&chain, 40, 2).await).await;
    let entry = until_entry(&relay, 0, "jammed").await;
    assert_eq!(entry["missingNonce"], json!(1), "{entry}");

    relay.relayers[1].change_faults(|faults| faults.paused = false);
    until_entry(&relay, 1, "ok").await;
    relay.relayers[0].change_faults(|faults| faults.transaction_reads.status = None);
    eventually_ok(LATER, "the other relayer to take it", || async {
        let taken = relay.relayers[1].accepted();
        if taken.iter().any(|taken| taken.field("data") == serial_data(41)) {
            return Ok(());
        }
        Err(relay.get(&format!("/api/v1/relay/transactions/{leaves}/timeline")).await.1)
    })
    .await;
    let entry = until_entry(&relay, 0, "jammed").await;
    assert_eq!(entry["missingNonce"], json!(1), "the gap is still there: {entry}");
}
