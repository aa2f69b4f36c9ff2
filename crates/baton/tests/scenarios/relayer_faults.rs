//! Relayers that mishandle a transaction: replace it with a no-op, fail it unsigned, send it twice, never confirm it, or
//! lose it. Baton detects each fault, and none causes a second effect.

use std::time::Duration;

use harness::relayer::{FaultPlan, Faults, Memory, Outcome, PostFault};
use harness::wait::{eventually, eventually_ok};

use crate::load_client::{LoadClient, LoadProfile, serial_of_data};
use crate::relay_fixture::{LATER, SOON};
use crate::scenario::{Scenario, crash_setup};

const NEVER_SIGNED: &str = "Transaction in Pending state for over 2 minutes. Replacing with NOOP.";
const PROFILE: LoadProfile =
    LoadProfile { clients: 8, pause_max: Duration::from_millis(40), retry_until_accepted: false };

#[tokio::test]
async fn relayer_wrongdoing() {
    let mut scenario = Scenario::begin("relayer_wrongdoing");
    let relay = crash_setup(3).start().await;
    relay.warm_up().await;
    for (number, relayer) in relay.relayers.iter().enumerate() {
        relayer.set_outcome_rule(move |request| match serial_of_data(request["data"].as_str()?)? % 10 {
            0 => Some(Outcome::NoOp),
            1 => Some(Outcome::SentTwice),
            // Only the first relayer fails these: another one takes them.
            2..6 if number == 0 => Some(Outcome::NeverSigned(NEVER_SIGNED.into())),
            _ => None,
        });
    }
    scenario.start_watching(&relay);
    let answers = LoadClient::of(&relay).send_all(PROFILE, 0..300, scenario.seed).await;
    eventually_ok(LATER, "an alarm for every double send", || async {
        let alarms = relay.metric("baton_double_sends_total", "").await;
        if alarms >= 30.0 { Ok(()) } else { Err(alarms) }
    })
    .await;
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!((ledger.confirmed, ledger.failed), (270, 30));
    for (serial, row) in &ledger.rows {
        let (_, timeline) =
            relay.get(&format!("/api/v1/relay/transactions/{}/timeline", text(&row["transactionId"]))).await;
        let timeline = timeline.to_string();
        match serial % 10 {
            0 => assert!(text(&row["error_message"]).contains("no-op"), "{row}"),
            1 => assert!(timeline.contains("double-send") && row["status"] == "confirmed", "{row} {timeline}"),
            _ => assert_eq!(row["status"], "confirmed", "{row}"),
        }
    }
    let unsigned: usize = relay.relayers.iter().map(|relayer| relayer.accepted().len() - relayer.effects().len()).sum();
    assert!(unsigned > 10, "only {unsigned} were failed unsigned");
}

#[tokio::test]
async fn relayer_jammed() {
    let mut scenario = Scenario::begin("relayer_jammed");
    let relay = crash_setup(3).env("RELAYER_JAM_AFTER_MS", "1000").start().await;
    relay.warm_up().await;
    scenario.start_watching(&relay);
    let client = LoadClient::of(&relay);
    relay.relayers[0].change_faults(|faults| faults.jammed = true);
    let mut answers = client.send_all(PROFILE, 0..300, scenario.seed).await;
    // A jam shows only when more submissions follow.
    let mut serial = 300;
    while relay.relayer_state(0).await != "jammed" {
        answers.extend(client.send_all(PROFILE, serial..serial + 8, scenario.seed).await);
        serial += 8;
        assert!(serial < 3000, "the jam was never detected");
    }
    eventually(SOON, "the transactions of the other relayers to be confirmed", || async {
        let stuck = relay.relayers[0].records().iter().filter(|record| !record.status.is_final()).count();
        let (_, health) = relay.get("/health").await;
        let open = &health["parts"]["store"]["open"];
        (open["pending"] == 0 && open["submitted"] == stuck).then_some(())
    })
    .await;
    let taken = relay.relayers[0].accepted().len();
    answers.extend(client.send_all(PROFILE, serial..serial + 100, scenario.seed).await);
    serial += 100;
    assert_eq!(relay.relayers[0].accepted().len(), taken, "an ejected relayer gets nothing");

    relay.relayers[0].change_faults(|faults| faults.jammed = false);
    relay.until_relayer(0, "ok").await;
    answers.extend(client.send_all(PROFILE, serial..serial + 100, scenario.seed).await);
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!((ledger.confirmed, ledger.failed), (answers.accepted.len(), 0));
    assert!(relay.relayers[0].accepted().len() > taken, "the relayer was readmitted");
}

#[tokio::test]
async fn relayer_forgot() {
    let mut scenario = Scenario::begin("relayer_forgot");
    let relay = crash_setup(2).env("RECONCILE_SUBMITTED_MS", "300").env("BREAKER_FAILURES", "1000").start().await;
    relay.warm_up().await;
    scenario.start_watching(&relay);
    // Some are stored and lose their answer, some never arrive, some are bound and stay open.
    let plan = FaultPlan::new(scenario.seed)
        .with(PostFault::HangAfterStoring, 0.2)
        .with(PostFault::CutAfterStoring, 0.2)
        .with(PostFault::CutBeforeStoring, 0.2);
    relay.relayers[0].set_faults(Faults { jammed: true, ..Faults::planned(plan) });
    let client = LoadClient::of(&relay);
    let answers = client.send_all(LoadProfile { pause_max: Duration::ZERO, ..PROFILE }, 0..120, scenario.seed).await;
    eventually(SOON, "ten injected faults and ten stored transactions", || async {
        let bound = relay.relayers[0].accepted().len();
        (relay.relayers[0].faults_struck().values().sum::<usize>() >= 10 && bound >= 10).then_some(())
    })
    .await;
    relay.relayers[0].restart(Memory::Forget).await;
    relay.relayers[0].set_faults(Faults::default());

    // None of them is resent: they wait and are listed.
    let unknown = eventually_ok(LATER, "every open transaction to have an unknown outcome", || async {
        // The rows themselves: the counts in /health are up to a second older.
        let (_, page) = relay.get("/api/v1/relay/transactions?limit=200").await;
        let rows = page["transactions"].as_array().unwrap();
        let open = rows.iter().filter(|row| !matches!(text(&row["status"]), "confirmed" | "failed"));
        let (unknown, decided): (Vec<_>, Vec<_>) = open.partition(|row| row["outcomeUnknown"] == true);
        match decided.first() {
            None if !unknown.is_empty() => {
                Ok(unknown.iter().map(|row| text(&row["transactionId"]).to_owned()).collect())
            }
            None => Err("none is open".to_owned()),
            Some(row) => Err(format!("{} others, as {row}", decided.len())),
        }
    })
    .await;
    let unknown: Vec<String> = unknown;
    let (_, listed) = relay.command(["tx", "unknown"]).await;
    assert!(listed.contains(&format!("{} transactions with unknown outcome", unknown.len())), "{listed}");

    // The operator checks the chain: fails the transactions that are there, and resends the others.
    let on_chain = |serial: usize| {
        let effects = relay.relayers.iter().flat_map(|relayer| relayer.effects());
        effects.into_iter().any(|effect| serial_of_data(&effect.field("data")) == Some(serial))
    };
    let mut given_up = 0;
    for id in &unknown {
        let (_, serial) = answers.accepted.iter().find(|(accepted, _)| accepted == id).unwrap();
        let decision = if on_chain(*serial) { "--fail" } else { "--resend" };
        given_up += usize::from(decision == "--fail");
        relay.resolve(id, decision).await;
    }
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!((ledger.confirmed, ledger.failed), (120 - given_up, given_up));
}

fn text(value: &serde_json::Value) -> &str {
    value.as_str().unwrap_or_default()
}
