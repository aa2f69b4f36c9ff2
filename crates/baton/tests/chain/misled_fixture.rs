//! Relayers that are simulated and say what the test wants, with accounts on a real chain: the test itself makes, or does
//! not make, their transactions there.

use alloy_primitives::{Bytes, U256};
use harness::chain::{Chain, PrivateKeySigner, Receipt, TransactionRequest};
use harness::relayer::Outcome;
use harness::wait::{eventually, eventually_ok};
use serde_json::{Value, json};

use crate::relay_fixture::{LATER, RelayFixture, RelaySetup, SOON, TO, serial_body, serial_data};

/// Blocks on top of one that make it final in these tests.
pub const FINALITY: u64 = 2;

pub struct Misled {
    pub relay: RelayFixture,
    pub chain: Chain,
    /// The relayers' keys, in their order.
    pub keys: Vec<PrivateKeySigner>,
}

impl Misled {
    /// Two relayers with accounts on the chain.
    pub async fn start(rpc: bool) -> Self {
        Self::with_finality(rpc, FINALITY).await
    }

    pub async fn with_finality(rpc: bool, blocks: u64) -> Self {
        let chain = Chain::shared();
        let rpc_url = rpc.then(|| chain.url().to_owned());
        Self::with(rpc_url, |setup| setup.env("CHAIN_FINALITY_BLOCKS", blocks.to_string())).await
    }

    /// Asks the chain at this URL, if there is one, with these settings.
    pub async fn with(rpc_url: Option<String>, change: impl FnOnce(RelaySetup) -> RelaySetup) -> Self {
        Self::on(Chain::shared(), rpc_url, change).await
    }

    /// As [`Self::with`], with the relayers' accounts on this chain.
    pub async fn on(chain: Chain, rpc_url: Option<String>, change: impl FnOnce(RelaySetup) -> RelaySetup) -> Self {
        let keys = vec![chain.funded_key().await, chain.funded_key().await];
        let mut setup = RelaySetup::relayers(keys.len())
            .env("CHAIN_FINALITY_BLOCKS", FINALITY.to_string())
            .env("RECONCILE_SUBMITTED_MS", "500")
            .env("RECONCILE_UNPROVEN_MS", "3000");
        if let Some(url) = rpc_url {
            setup = setup.env("RPC_URL", url);
        }
        for (index, key) in keys.iter().enumerate() {
            let address = key.address().to_string();
            setup = setup.relayer(index, |options| options.address = Some(address));
        }
        Self { relay: change(setup).start().await, chain, keys }
    }

    /// All relayers end their transactions like this.
    pub fn all_end(&self, outcome: Outcome) {
        for relayer in &self.relay.relayers {
            let outcome = outcome.clone();
            relayer.set_outcome_rule(move |_| Some(outcome.clone()));
        }
    }

    /// Sends one; returns its id and the position of the relayer that took it, once that has signed it.
    pub async fn send(&self, serial: usize) -> (String, usize) {
        let id = self.relay.send(&serial_body(serial)).await;
        (id, self.signed_by(&serial_data(serial)).await)
    }

    /// The relayer that has signed a record with this call data.
    pub async fn signed_by(&self, data: &str) -> usize {
        eventually(LATER, "a relayer to sign it", || async {
            self.relay.relayers.iter().position(|relayer| {
                let signed = |record: &harness::relayer::Record| record.nonce.is_some();
                relayer.records().iter().any(|record| record.data.as_deref() == Some(data) && signed(record))
            })
        })
        .await
    }

    /// Makes the call on the chain with the key of this relayer.
    pub async fn execute(&self, relayer: usize, serial: usize) -> Receipt {
        self.execute_as(&self.keys[relayer], serial).await
    }

    /// Makes the call on the chain with this key.
    pub async fn execute_as(&self, key: &PrivateKeySigner, serial: usize) -> Receipt {
        self.chain.send(key, serial_call(serial)).await
    }

    /// Uses up the relayer's next nonce with another call.
    pub async fn use_nonce(&self, relayer: usize) -> Receipt {
        let address = self.keys[relayer].address();
        let no_op = TransactionRequest::default().with_to(address).with_value(U256::ZERO);
        self.chain.send(&self.keys[relayer], no_op.with_gas_limit(21_000)).await
    }

    /// Sends these two through the first relayer; returns their ids, once that has signed both, in this order.
    pub async fn send_both(&self, serials: [usize; 2]) -> [String; 2] {
        self.relay.relayers[1].change_faults(|faults| faults.paused = true);
        self.relay.until_relayer(1, "paused").await;
        let mut ids = [const { String::new() }; 2];
        for (position, serial) in serials.into_iter().enumerate() {
            ids[position] = self.relay.send(&serial_body(serial)).await;
            eventually(LATER, "it to be signed", || async {
                let records = self.relay.relayers[0].records();
                (records.iter().filter(|record| record.nonce.is_some()).count() == position + 1).then_some(())
            })
            .await;
        }
        ids
    }

    /// The relayer's webhook says that this row is confirmed, under this transaction's hash; asked, the relayer says nothing.
    pub async fn tell_confirmed(&self, id: &str, relayer: usize, under: &Receipt) {
        let relayer = &self.relay.relayers[relayer];
        self.until_said(id, "submitted").await;
        relayer.change_faults(|faults| faults.transaction_reads.status = Some(503));
        let record = self.relay.status(id).await["ozRelayerTxId"].as_str().unwrap().to_owned();
        let mut payload = relayer.record(&record).unwrap().to_json();
        payload["payload_type"] = json!("transaction");
        payload["status"] = json!("confirmed");
        payload["hash"] = json!(under.transaction_hash.to_string());
        let body = json!({ "id": "n", "event": "transaction_update", "payload": payload });
        relayer.send_webhook(body.to_string());
        self.until_said(id, "confirmed").await;
    }

    /// Waits until the relayer has said this of the row.
    pub async fn until_said(&self, id: &str, word: &str) {
        self.until_timeline(id, &format!("the relayer says {word}")).await;
    }

    /// Waits until the row's timeline contains this.
    pub async fn until_timeline(&self, id: &str, text: &str) {
        let timeline = format!("/api/v1/relay/transactions/{id}/timeline");
        eventually_ok(SOON, format!("{text:?} in the timeline"), || async {
            let (_, timeline) = self.relay.get(&timeline).await;
            if timeline.to_string().contains(text) { Ok(()) } else { Err(timeline) }
        })
        .await;
    }

    /// Looks at the chain decide nothing about this row.
    pub async fn assert_stays_open(&self, id: &str) {
        // One look may be under way.
        let looks = self.looks_open().await + 2.0;
        let status = eventually_ok(LATER, "the chain to be looked at", || async {
            let status = self.relay.status(id).await;
            let looked = status["status"] != "submitted" || self.looks_open().await >= looks;
            if looked { Ok(status) } else { Err(status) }
        })
        .await;
        assert_eq!(status["status"], "submitted", "{status}");
    }

    /// The number of looks at the chain that decided nothing.
    pub async fn looks_open(&self) -> f64 {
        self.relay.metric("baton_chain_checks_total", "open").await
    }

    /// Makes everything mined so far final.
    pub async fn finalise(&self) {
        for _ in 0..=FINALITY {
            self.chain.mine().await;
        }
    }

    pub async fn until(&self, id: &str, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        eventually_ok(LATER, what.to_owned(), || async {
            let status = self.relay.status(id).await;
            if holds(&status) { Ok(status) } else { Err(status) }
        })
        .await
    }
}

/// The call that a row with this serial number makes.
pub fn serial_call(serial: usize) -> TransactionRequest {
    let data: Bytes = serial_data(serial).parse().unwrap();
    let call = TransactionRequest::default().with_to(TO.parse().unwrap()).with_value(U256::from(1));
    call.with_input(data).with_gas_limit(60_000)
}
