//! Load that holds, and networks: what a relayer has is counted in the store, a slow status hides nothing, the cap follows
//! what a relayer finishes, a relayer without progress gets no work, and one on another network never does.

use std::time::Duration;

use harness::relayer::{Faults, Outcome, Timing};
use harness::wait::{eventually, eventually_ok};
use serde_json::{Value, json};

use crate::relay_fixture::{LATER, RelayFixture, RelaySetup, SOON, baton};

/// The entry of one relayer in `/health`.
async fn entry(relay: &RelayFixture, index: usize) -> Value {
    let (_, health) = relay.get("/health").await;
    let url = relay.relayers[index].url();
    let each = health["parts"]["relayers"]["each"].as_array().unwrap();
    each.iter().find(|relayer| relayer["url"] == url.as_str()).unwrap().clone()
}

async fn until_entry(relay: &RelayFixture, index: usize, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
    eventually_ok(SOON, format!("relayer {index}: {what}"), || async {
        let entry = entry(relay, index).await;
        if holds(&entry) { Ok(entry) } else { Err(entry) }
    })
    .await
}

fn submissions(relay: &RelayFixture, index: usize) -> usize {
    relay.relayers[index].count_requests("POST", "/transactions")
}

#[tokio::test]
async fn rows_open_at_a_relayer_whose_status_hangs_are_its_load_after_a_restart() {
    let mut relay = RelaySetup::relayers(2).env("RELAYER_JAM_AFTER_MS", "600000").start().await;
    relay.relayers[1].change_faults(|faults| faults.paused = true);
    relay.until_relayer(1, "paused").await;
    relay.relayers[0].change_faults(|faults| faults.jammed = true);
    relay.send_many(0..184).await;
    eventually(LATER, "all to be at the first relayer", || async {
        (relay.relayers[0].accepted().len() == 184).then_some(())
    })
    .await;
    relay.relayers[0].change_faults(|faults| faults.chain_reads.hang = true);
    relay.relayers[1].change_faults(|faults| faults.paused = false);

    // A new process has sent nothing, and the relayer does not tell what it has.
    let port = relay.base.rsplit(':').next().unwrap().to_owned();
    relay.api.kill9().await.unwrap();
    relay.api = baton(["serve"], &relay.env).env("PORT", port).start().unwrap();
    relay.api_ready().await;
    let entry = until_entry(&relay, 0, "all its rows to be counted", |entry| entry["inFlight"] == 184).await;
    assert_eq!((&entry["status"], &entry["healthKnown"]), (&json!("ok"), &json!(true)), "{entry}");
    relay.until_relayer(1, "ok").await;
    relay.send_many(1000..1100).await;
    eventually(LATER, "new work to go elsewhere", || async {
        (relay.relayers[1].accepted().len() == 100).then_some(())
    })
    .await;
    assert_eq!(relay.relayers[0].accepted().len(), 184);
}

#[tokio::test]
async fn a_pause_is_seen_although_the_status_takes_twenty_seconds() {
    let relay = RelaySetup::relayers(2).start().await;
    for relayer in &relay.relayers {
        relayer.change_faults(|faults| faults.chain_reads.delay = Some(Duration::from_secs(20)));
    }
    until_entry(&relay, 0, "to be known", |entry| entry["healthKnown"] == true && entry["status"] == "ok").await;
    let statuses = || relay.relayers[0].count_requests("GET", "/status");
    let asked = statuses();
    relay.relayers[0].change_faults(|faults| faults.paused = true);
    relay.until_relayer(0, "paused").await;
    assert!(statuses() <= asked + 1, "no status had to be waited for");
    let sent = relay.send_many(0..50).await;
    relay.until_all_final(LATER).await;
    relay.books(sent).assert_exactly_once();
    assert_eq!(submissions(&relay, 0), 0, "it was never even asked");
}

#[tokio::test]
async fn without_a_fixed_cap_relayers_that_finish_at_once_are_not_held_back() {
    let relay = RelaySetup::relayers(2).env("RELAYER_MAX_IN_FLIGHT", "").start().await;
    assert_eq!(entry(&relay, 0).await["inFlightMax"], 64);
    let sent = relay.send_many(0..2000).await;
    relay.until_all_final(LATER).await;
    relay.books(sent).assert_exactly_once();
    until_entry(&relay, 0, "its cap to have risen", |entry| entry["inFlightMax"].as_u64().unwrap() > 500).await;
}

#[tokio::test]
async fn without_a_fixed_cap_a_relayer_that_signs_nothing_gets_no_more_than_it_can_hold() {
    let never = Timing { sent: Duration::from_secs(3600), ..Timing::default() };
    let relay = RelaySetup::relayers(2)
        .env("RELAYER_MAX_IN_FLIGHT", "")
        .relayer(0, |options| options.timing = Timing { confirmed: never.sent, ..never })
        .start()
        .await;
    relay.send_many(0..600).await;
    eventually(LATER, "the other relayer to take the rest", || async {
        let taken: usize = relay.relayers.iter().map(|relayer| relayer.accepted().len()).sum();
        (taken == 600).then_some(())
    })
    .await;
    let held = relay.relayers[0].accepted().len();
    assert!(held <= 64, "{held}");
    assert_eq!(entry(&relay, 0).await["inFlight"], held);
}

#[tokio::test]
async fn a_relayer_whose_signed_transactions_do_not_end_is_jammed_until_they_do() {
    let relay = RelaySetup::relayers(2).env("RELAYER_JAM_AFTER_MS", "1500").start().await;
    relay.warm_up().await;
    relay.relayers[0].change_faults(|faults| faults.jammed = true);
    let before = relay.relayers[0].accepted().len();
    let mut serial = 0;
    while relay.relayers[0].accepted().len() == before {
        let id = relay.send_serial(serial).await;
        relay.until_status(&id, "submitted").await;
        serial += 1;
    }
    let entry = until_entry(&relay, 0, "to be jammed", |entry| entry["status"] == "jammed").await;
    assert!(entry["reason"].as_str().unwrap().contains("none of its transactions ends"), "{entry}");
    eventually(SOON, "the metric to show it", || async {
        (relay.metric("baton_relayer_jammed", &relay.relayers[0].url()).await == 1.0).then_some(())
    })
    .await;
    let held = relay.relayers[0].accepted().len();
    let sent = relay.send_many(1000..1040).await;
    eventually(LATER, "the other relayer to take all of it", || async {
        let taken = relay.relayers[1].accepted();
        sent.iter().all(|(_, data)| taken.iter().any(|accepted| accepted.field("data") == *data)).then_some(())
    })
    .await;
    assert_eq!(relay.relayers[0].accepted().len(), held, "no new work while it is jammed");
    relay.relayers[0].set_faults(Faults::default());
    relay.until_relayer(0, "ok").await;
    relay.until_all_final(LATER).await;
    assert_eq!(relay.count("failed").await, 0);
}

#[tokio::test]
async fn a_relayer_with_another_chain_id_gets_nothing() {
    // The second relayer is slow to tell: it gets nothing before it has told either.
    let relay = RelaySetup::relayers(3)
        .env("CHAIN_ID", "31337")
        .relayer(1, |options| (options.chain_id, options.network) = (Some(1), "mainnet".to_owned()))
        .relayer(2, |options| options.chain_id = None)
        .faults(1, |faults| faults.chain_reads.delay = Some(Duration::from_secs(4)))
        .start()
        .await;
    let sent = relay.send_many(0..150).await;
    let entry = until_entry(&relay, 1, "to be on the wrong network", |entry| entry["status"] == "wrong network").await;
    assert_eq!((&entry["chainId"], &entry["expectedChainId"]), (&json!(1), &json!(31337)), "{entry}");
    assert_eq!(entry["network"], "mainnet");
    let more = relay.send_many(150..300).await;
    relay.until_all_final(LATER).await;
    relay.books(sent.into_iter().chain(more)).assert_exactly_once();
    assert_eq!(submissions(&relay, 1), 0);
    assert!(submissions(&relay, 0) > 0 && submissions(&relay, 2) > 0, "one that does not tell its id is used");
    assert!(relay.api.output().contains("relayer_wrong_network"), "the log says it");
}

#[tokio::test]
async fn a_relayer_that_names_another_network_than_the_first_gets_nothing() {
    // The others list themselves a little later.
    let late = |faults: &mut Faults| faults.relayer_reads.delay = Some(Duration::from_millis(150));
    let mut relay = RelaySetup::relayers(3)
        .faults(0, late)
        .faults(1, late)
        .relayer(0, |options| options.chain_id = None)
        .relayer(1, |options| options.chain_id = None)
        .relayer(2, |options| (options.chain_id, options.network) = (None, "mainnet".to_owned()))
        .split()
        .start()
        .await;
    // A consumer that starts with a backlog does not begin before it has seen every list.
    relay.consumers[0].kill9().await.unwrap();
    let sent = relay.send_many(0..150).await;
    relay.add_consumer().await;
    relay.until_all_final(LATER).await;
    relay.books(sent).assert_exactly_once();
    assert_eq!(submissions(&relay, 2), 0);
    let entry = until_entry(&relay, 2, "to be on the wrong network", |entry| entry["status"] == "wrong network").await;
    assert_eq!((&entry["network"], &entry["expectedNetwork"]), (&json!("mainnet"), &json!("testnet")), "{entry}");
}

/// Records that a relayer never finishes do not hold back one that ends its own.
#[tokio::test]
async fn a_record_that_never_moves_does_not_stop_its_relayer() {
    let relay = RelaySetup::relayers(1).env("RELAYER_MAX_IN_FLIGHT", "").start().await;
    relay.relayers[0].set_faults(Faults { next_outcomes: [Outcome::WithoutJob].into(), ..Faults::default() });
    let stuck = relay.send_serial(0).await;
    relay.until_status(&stuck, "submitted").await;
    for (id, _) in relay.send_many(1..400).await {
        relay.until_status(&id, "confirmed").await;
    }
}
