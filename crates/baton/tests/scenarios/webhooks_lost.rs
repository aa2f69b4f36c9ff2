//! Not one webhook arrives: the reconciler asks, and every row still gets to its end, with its hash.

use std::time::Duration;

use harness::relayer::Relayer;

use crate::load_client::{Client, Manners};
use crate::scenario::{Story, a_tenth_unknown, mortal};

const TRANSACTIONS: usize = 600;

#[tokio::test]
async fn webhooks_lost() {
    let mut story = Story::begin("webhooks_lost");
    let stand = mortal(3).env("RECONCILE_SUBMITTED_MS", "500").start().await;
    stand.warm_up().await;
    a_tenth_unknown(&stand, story.seed);
    for relayer in &stand.relayers {
        relayer.change_faults(|faults| faults.webhooks.lose = 1.0);
    }
    story.watch(&stand);
    let manners = Manners { clients: 16, pause_max: Duration::from_millis(50), insistent: false };
    let promises = Client::of(&stand).crowd(manners, 0..TRANSACTIONS, story.seed).await;
    let ledger = story.end(&stand, &promises).await;
    assert_eq!((ledger.confirmed, ledger.failed), (TRANSACTIONS, 0));
    for row in ledger.rows.values() {
        let relayer = stand.relayers.iter().find(|relayer| row["ozRelayerUrl"] == relayer.url().as_str()).unwrap();
        let record = relayer.record(row["ozRelayerTxId"].as_str().unwrap()).unwrap();
        assert_eq!(row["hash"].as_str(), record.hash.as_deref(), "{row}");
    }
    let lost: usize = stand.relayers.iter().map(lost).sum();
    assert!(lost >= 3 * TRANSACTIONS, "only {lost} webhooks were lost");
}

fn lost(relayer: &Relayer) -> usize {
    relayer.deliveries().iter().filter(|webhook| webhook.lost).count()
}
