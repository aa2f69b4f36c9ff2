//! No webhook arrives: the reconciler polls, and every transaction still becomes final, with its hash.

use std::time::Duration;

use harness::relayer::Relayer;

use crate::load_client::{LoadClient, LoadProfile};
use crate::scenario::{Scenario, crash_setup, inject_unknown_outcomes};

const TRANSACTIONS: usize = 300;

#[tokio::test]
async fn webhooks_lost() {
    let mut scenario = Scenario::begin("webhooks_lost");
    let relay = crash_setup(3).env("RECONCILE_SUBMITTED_MS", "500").start().await;
    relay.warm_up().await;
    inject_unknown_outcomes(&relay, scenario.seed);
    for relayer in &relay.relayers {
        relayer.change_faults(|faults| faults.webhooks.lose = 1.0);
    }
    scenario.start_watching(&relay);
    let profile = LoadProfile { clients: 16, pause_max: Duration::from_millis(50), retry_until_accepted: false };
    let answers = LoadClient::of(&relay).send_all(profile, 0..TRANSACTIONS, scenario.seed).await;
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!((ledger.confirmed, ledger.failed), (TRANSACTIONS, 0));
    for row in ledger.rows.values() {
        let relayer = relay.relayers.iter().find(|relayer| row["ozRelayerUrl"] == relayer.url().as_str()).unwrap();
        let record = relayer.record(row["ozRelayerTxId"].as_str().unwrap()).unwrap();
        assert_eq!(row["hash"].as_str(), record.hash.as_deref(), "{row}");
    }
    let lost: usize = relay.relayers.iter().map(lost_webhooks).sum();
    assert!(lost >= 3 * TRANSACTIONS, "only {lost} webhooks were lost");
}

fn lost_webhooks(relayer: &Relayer) -> usize {
    relayer.deliveries().iter().filter(|webhook| webhook.lost).count()
}
