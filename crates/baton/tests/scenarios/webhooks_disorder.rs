//! Webhooks come twice, in any order, before the answer they belong to, and long after the end: readers of the status
//! and of the list never see a state go back.

use std::time::Duration;

use harness::relayer::{Status, WebhookFaults};
use harness::wait::eventually_ok;

use crate::load_client::{Client, Manners};
use crate::relay_fixture::LATER;
use crate::scenario::{Story, mortal, until_final};

const TRANSACTIONS: usize = 600;

#[tokio::test]
async fn webhooks_disorder() {
    let mut story = Story::begin("webhooks_disorder");
    // What the last one loses is asked for, but not before the late ones are in.
    let mut plan = mortal(4).env("RECONCILE_SUBMITTED_MS", "5000");
    for index in 0..4 {
        plan = plan.relayer(index, |options| options.seed = story.seed.wrapping_add(index as u64));
    }
    let stand = plan.start().await;
    stand.warm_up().await;
    let within = Duration::from_secs(1);
    let faults = [
        WebhookFaults { repeat: 1.0, reorder: 0.7, reorder_within: within, ..WebhookFaults::default() },
        WebhookFaults { late: true, repeat: 0.5, ..WebhookFaults::default() },
        WebhookFaults { before_answer: Some(Status::Confirmed), repeat: 0.5, ..WebhookFaults::default() },
        WebhookFaults { delay: within, lose: 0.2, reorder: 0.5, reorder_within: within, ..WebhookFaults::default() },
    ];
    for (relayer, webhooks) in stand.relayers.iter().zip(faults) {
        relayer.change_faults(|faults| faults.webhooks = webhooks);
    }
    story.watch(&stand);
    let manners = Manners { clients: 16, pause_max: Duration::from_millis(100), insistent: false };
    let promises = Client::of(&stand).crowd(manners, 0..TRANSACTIONS, story.seed).await;
    assert_eq!(until_final(&stand, LATER).await, None);
    eventually_ok(LATER, "every webhook to be tried, the late ones too", || async {
        let open: usize = stand.relayers.iter().map(untried).sum();
        if open == 0 { Ok(()) } else { Err(format!("{open} to come")) }
    })
    .await;
    let ledger = story.end(&stand, &promises).await;
    assert_eq!((ledger.confirmed, ledger.failed), (TRANSACTIONS, 0));
}

fn untried(relayer: &harness::relayer::Relayer) -> usize {
    relayer.deliveries().iter().filter(|webhook| webhook.attempts == 0 && !webhook.lost).count()
}
