//! Relayers that do the wrong thing with what they took: a no-op in its place, failing it unsigned, sending it twice,
//! sitting on it, forgetting it. Each is seen for what it is, and none makes a second effect of ours.

use std::time::Duration;

use harness::relayer::{FaultPlan, Faults, Memory, Outcome, PostFault};
use harness::wait::{eventually, eventually_ok};

use crate::load_client::{Client, Manners, serial_of_data};
use crate::relay_fixture::{LATER, SOON, Stand};
use crate::scenario::{Story, mortal};

const NEVER_SIGNED: &str = "Transaction in Pending state for over 2 minutes. Replacing with NOOP.";
const MANNERS: Manners = Manners { clients: 8, pause_max: Duration::from_millis(40), insistent: false };

#[tokio::test]
async fn relayer_wrongdoing() {
    let mut story = Story::begin("relayer_wrongdoing");
    let stand = mortal(3).start().await;
    stand.warm_up().await;
    for (number, relayer) in stand.relayers.iter().enumerate() {
        relayer.set_outcome_rule(move |request| match serial_of_data(request["data"].as_str()?)? % 10 {
            0 => Some(Outcome::NoOp),
            1 => Some(Outcome::SentTwice),
            // Only one relayer's own trouble: another one does it.
            2..6 if number == 0 => Some(Outcome::NeverSigned(NEVER_SIGNED.into())),
            _ => None,
        });
    }
    story.watch(&stand);
    let promises = Client::of(&stand).crowd(MANNERS, 0..300, story.seed).await;
    eventually_ok(LATER, "an alarm for every double send", || async {
        let alarms = stand.metric("baton_double_sends_total", "").await;
        if alarms >= 30.0 { Ok(()) } else { Err(alarms) }
    })
    .await;
    let ledger = story.end(&stand, &promises).await;
    assert_eq!((ledger.confirmed, ledger.failed), (270, 30));
    for (serial, row) in &ledger.rows {
        let (_, timeline) =
            stand.get(&format!("/api/v1/relay/transactions/{}/timeline", text(&row["transactionId"]))).await;
        let timeline = timeline.to_string();
        match serial % 10 {
            0 => assert!(text(&row["error_message"]).contains("no-op"), "{row}"),
            1 => assert!(timeline.contains("double-send") && row["status"] == "confirmed", "{row} {timeline}"),
            _ => assert_eq!(row["status"], "confirmed", "{row}"),
        }
    }
    let unsigned: usize = stand.relayers.iter().map(|relayer| relayer.accepted().len() - relayer.effects().len()).sum();
    assert!(unsigned > 10, "only {unsigned} were failed unsigned");
}

#[tokio::test]
async fn relayer_jammed() {
    let mut story = Story::begin("relayer_jammed");
    let stand = mortal(3).env("RELAYER_JAM_AFTER_MS", "1000").start().await;
    stand.warm_up().await;
    story.watch(&stand);
    let client = Client::of(&stand);
    stand.relayers[0].change_faults(|faults| faults.jammed = true);
    let mut promises = client.crowd(MANNERS, 0..300, story.seed).await;
    // Something has to come after it for a jam to show.
    let mut serial = 300;
    while stand.relayer_state(0).await != "jammed" {
        promises.extend(client.crowd(MANNERS, serial..serial + 8, story.seed).await);
        serial += 8;
        assert!(serial < 3000, "the jam was never seen");
    }
    eventually(SOON, "everything elsewhere to be confirmed", || async {
        let stuck = stand.relayers[0].records().iter().filter(|record| !record.status.is_final()).count();
        let (_, health) = stand.get("/health").await;
        let open = &health["parts"]["store"]["open"];
        (open["pending"] == 0 && open["submitted"] == stuck).then_some(())
    })
    .await;
    let taken = stand.relayers[0].accepted().len();
    promises.extend(client.crowd(MANNERS, serial..serial + 100, story.seed).await);
    serial += 100;
    assert_eq!(stand.relayers[0].accepted().len(), taken, "an ejected relayer gets nothing");

    stand.relayers[0].change_faults(|faults| faults.jammed = false);
    stand.until_relayer(0, "ok").await;
    promises.extend(client.crowd(MANNERS, serial..serial + 100, story.seed).await);
    let ledger = story.end(&stand, &promises).await;
    assert_eq!((ledger.confirmed, ledger.failed), (promises.accepted.len(), 0));
    assert!(stand.relayers[0].accepted().len() > taken, "it was readmitted");
}

#[tokio::test]
async fn relayer_forgot() {
    let mut story = Story::begin("relayer_forgot");
    let stand = mortal(2).env("RECONCILE_SUBMITTED_MS", "300").env("BREAKER_FAILURES", "1000").start().await;
    stand.warm_up().await;
    story.watch(&stand);
    // Some are stored there and the answer is lost, some never arrive, some are bound and stay open.
    let plan = FaultPlan::new(story.seed)
        .with(PostFault::HangAfterStoring, 0.2)
        .with(PostFault::CutAfterStoring, 0.2)
        .with(PostFault::CutBeforeStoring, 0.2);
    stand.relayers[0].set_faults(Faults { jammed: true, ..Faults::planned(plan) });
    let client = Client::of(&stand);
    let promises = client.crowd(Manners { pause_max: Duration::ZERO, ..MANNERS }, 0..120, story.seed).await;
    eventually(SOON, "it to have met its faults and taken some", || async {
        let bound = stand.relayers[0].accepted().len();
        (stand.relayers[0].faults_struck().values().sum::<usize>() >= 10 && bound >= 10).then_some(())
    })
    .await;
    stand.relayers[0].restart(Memory::Forget).await;
    stand.relayers[0].set_faults(Faults::default());

    // Nothing of it is sent again: it waits, and is shown.
    let unknown = eventually_ok(LATER, "all that is left to be in doubt, and seen so more than once", || async {
        let (_, health) = stand.get("/health").await;
        let store = &health["parts"]["store"];
        // Missing while the store takes its time to count.
        let open = store["open"]["pending"].as_u64().zip(store["open"]["submitted"].as_u64());
        let open = open.map_or(0, |(pending, submitted)| pending + submitted);
        let unknown = unknown(&stand).await;
        let settled = open > 0 && unknown.len() as u64 == open;
        if settled { Ok(unknown) } else { Err(health.to_string()) }
    })
    .await;
    let (_, listed) = stand.command(["tx", "unknown"]).await;
    assert!(listed.contains(&format!("{} with unknown outcome", unknown.len())), "{listed}");

    // The operator looks at the chain: what is there is given up here, the rest is sent again.
    let on_chain = |serial: usize| {
        let effects = stand.relayers.iter().flat_map(|relayer| relayer.effects());
        effects.into_iter().any(|effect| serial_of_data(&effect.field("data")) == Some(serial))
    };
    let mut given_up = 0;
    for id in &unknown {
        let (_, serial) = promises.accepted.iter().find(|(accepted, _)| accepted == id).unwrap();
        let decision = if on_chain(*serial) { "--fail" } else { "--resend" };
        given_up += usize::from(decision == "--fail");
        stand.resolve(id, decision).await;
    }
    let ledger = story.end(&stand, &promises).await;
    assert_eq!((ledger.confirmed, ledger.failed), (120 - given_up, given_up));
}

async fn unknown(stand: &Stand) -> Vec<String> {
    let (_, page) = stand.get("/api/v1/relay/transactions?outcomeUnknown=true&limit=200").await;
    page["transactions"].as_array().unwrap().iter().map(|row| text(&row["transactionId"]).to_owned()).collect()
}

fn text(value: &serde_json::Value) -> &str {
    value.as_str().unwrap_or_default()
}
