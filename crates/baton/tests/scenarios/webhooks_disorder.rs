//! Webhooks arrive twice, in any order, before the answer to their submission, and long after the final status: readers of
//! the status and of the list never see a status move back.

use std::time::Duration;

use harness::relayer::{Status, WebhookFaults};
use harness::wait::eventually_ok;

use crate::load_client::{LoadClient, LoadProfile};
use crate::relay_fixture::LATER;
use crate::scenario::{Scenario, crash_setup, until_final};

const TRANSACTIONS: usize = 300;

#[tokio::test]
async fn webhooks_disorder() {
    let mut scenario = Scenario::begin("webhooks_disorder");
    // The reconciler polls for the webhooks that the last relayer loses, but not before the late webhooks arrive.
    let mut setup = crash_setup(4).env("RECONCILE_SUBMITTED_MS", "5000");
    for index in 0..4 {
        setup = setup.relayer(index, |options| options.seed = scenario.seed.wrapping_add(index as u64));
    }
    let relay = setup.start().await;
    relay.warm_up().await;
    let within = Duration::from_secs(1);
    let faults = [
        WebhookFaults { repeat: 1.0, reorder: 0.7, reorder_within: within, ..WebhookFaults::default() },
        WebhookFaults { late: true, repeat: 0.5, ..WebhookFaults::default() },
        WebhookFaults { before_answer: Some(Status::Confirmed), repeat: 0.5, ..WebhookFaults::default() },
        WebhookFaults { delay: within, lose: 0.2, reorder: 0.5, reorder_within: within, ..WebhookFaults::default() },
    ];
    for (relayer, webhooks) in relay.relayers.iter().zip(faults) {
        relayer.change_faults(|faults| faults.webhooks = webhooks);
    }
    scenario.start_watching(&relay);
    let profile = LoadProfile { clients: 16, pause_max: Duration::from_millis(100), retry_until_accepted: false };
    let answers = LoadClient::of(&relay).send_all(profile, 0..TRANSACTIONS, scenario.seed).await;
    assert_eq!(until_final(&relay, LATER).await, None);
    eventually_ok(LATER, "every webhook to be attempted, including late ones", || async {
        let open: usize = relay.relayers.iter().map(unattempted).sum();
        if open == 0 { Ok(()) } else { Err(format!("{open} not attempted")) }
    })
    .await;
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!((ledger.confirmed, ledger.failed), (TRANSACTIONS, 0));
}

fn unattempted(relayer: &harness::relayer::Relayer) -> usize {
    relayer.deliveries().iter().filter(|webhook| webhook.attempts == 0 && !webhook.lost).count()
}
