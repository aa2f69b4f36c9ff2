//! Faults of single transactions: refused permanently, failing three times, or reverted on-chain. Each fails with its
//! reason. After the cause is fixed, a replay of the dead letters completes them, even if earlier replays were killed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use harness::engine::TestEngine;
use harness::relayer::{Outcome, PostFault};
use harness::wait::eventually_ok;

use crate::load_client::{LoadClient, LoadProfile, serial_of_data};
use crate::relay_fixture::{LATER, RelayFixture, SOON, baton};
use crate::scenario::{Scenario, crash_setup};

const TRANSACTIONS: usize = 250;

/// The fault of a transaction, by serial number.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ItemFault {
    None,
    /// The relayer's simulation reverts: no second attempt.
    WouldRevert,
    /// The relayer rejects the request as invalid: no second attempt.
    BadRequest,
    /// A transient error of this transaction: three attempts.
    Transient,
    /// Reverted on-chain: final, and no dead letter.
    Reverts,
}

fn fault_of(serial: usize) -> ItemFault {
    [ItemFault::None, ItemFault::WouldRevert, ItemFault::BadRequest, ItemFault::Transient, ItemFault::Reverts]
        [serial % 5]
}

#[tokio::test]
async fn item_faults() {
    let mut scenario = Scenario::begin("item_faults");
    let relay = crash_setup(2).start().await;
    relay.warm_up().await;
    let attempts: Arc<Mutex<BTreeMap<usize, usize>>> = Arc::default();
    for relayer in &relay.relayers {
        let attempts = Arc::clone(&attempts);
        relayer.set_post_rule(move |request| {
            let serial = serial_of_data(request["data"].as_str()?)?;
            *attempts.lock().unwrap().entry(serial).or_default() += 1;
            match fault_of(serial) {
                ItemFault::None | ItemFault::Reverts => None,
                ItemFault::WouldRevert => Some(PostFault::Refused("execution reverted: not the owner".into())),
                ItemFault::BadRequest => Some(PostFault::Refused("gas_limit is too low".into())),
                ItemFault::Transient => Some(PostFault::Status(409)),
            }
        });
        relayer.set_outcome_rule(|request| {
            let serial = serial_of_data(request["data"].as_str()?)?;
            (fault_of(serial) == ItemFault::Reverts).then_some(Outcome::Reverted)
        });
    }
    scenario.start_watching(&relay);
    let profile = LoadProfile { clients: 8, pause_max: Duration::from_millis(40), retry_until_accepted: false };
    let answers = LoadClient::of(&relay).send_all(profile, 0..TRANSACTIONS, scenario.seed).await;
    relay.until_all_final(LATER).await;

    for (id, serial) in &answers.accepted {
        let row = relay.status(id).await;
        let message = row["error_message"].as_str().unwrap_or_default();
        let tried = attempts.lock().unwrap()[serial];
        let (status, reason, times) = match fault_of(*serial) {
            ItemFault::None => ("confirmed", "", 1),
            ItemFault::WouldRevert => ("failed", "not the owner", 1),
            ItemFault::BadRequest => ("failed", "gas_limit is too low", 1),
            ItemFault::Transient => ("failed", "409", 3),
            ItemFault::Reverts => ("failed", "reverted on-chain", 1),
        };
        assert!(row["status"] == status && message.contains(reason) && tried == times, "tried {tried} times: {row}");
    }
    let dead = (TRANSACTIONS / 5 * 3) as u64;
    until_dead_letters(&relay, dead).await;
    let (_, list) = relay.command(["dlq", "list"]).await;
    for (id, _) in answers.accepted.iter().filter(|(_, serial)| is_dead_letter(*serial)) {
        let line = list.lines().find(|line| line.contains(id)).unwrap();
        assert!(["not the owner", "gas_limit", "409"].iter().any(|reason| line.contains(reason)), "{line}");
    }

    // The cause is fixed. The operator's replay is killed twice and then repeated.
    scenario.stop_watching().await;
    for relayer in &relay.relayers {
        relayer.set_post_rule(|_| None);
    }
    for share in [4, 2] {
        let mut replay = replay(&relay, "100");
        until_dead_letters_at_most(&relay, dead - dead / share).await;
        let pause = scenario.random_pause(Duration::from_millis(30));
        tokio::time::sleep(pause).await;
        replay.kill9().await.unwrap();
        scenario.kills += 1;
    }
    let mut replays = 0;
    eventually_ok(LATER, "all dead letters to be replayed", || {
        let mut replay = replay(&relay, "1000");
        replays += 1;
        let relay = &relay;
        async move {
            let exit = replay.wait_exit(LATER).await.unwrap();
            assert_eq!(exit.code(), Some(0), "{}", replay.output());
            if dead_letters(relay).await == 0 { Ok(()) } else { Err(replay.output()) }
        }
    })
    .await;
    // On SQS, the messages that a killed replay had received stay invisible until their visibility timeout.
    assert!(replays == 1 || relay.engine == TestEngine::MySqlSqs, "one replay takes all dead letters, not {replays}");
    scenario.start_watching(&relay);

    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!((ledger.confirmed, ledger.failed), (TRANSACTIONS / 5 * 4, TRANSACTIONS / 5));
    until_dead_letters(&relay, 0).await;
}

fn is_dead_letter(serial: usize) -> bool {
    matches!(fault_of(serial), ItemFault::WouldRevert | ItemFault::BadRequest | ItemFault::Transient)
}

fn replay(relay: &RelayFixture, rate: &str) -> harness::process::Process {
    baton(["dlq", "replay", "--all", "--rate", rate], &relay.env).start().unwrap()
}

/// SQS delivers at least once: a message whose visibility timeout ends while it is being buried is buried twice.
async fn until_dead_letters(relay: &RelayFixture, count: u64) {
    let copies_max = if relay.engine == TestEngine::MySqlSqs { count / 20 } else { 0 };
    eventually_ok(SOON, format!("{count} dead letters"), || async {
        let dead = dead_letters(relay).await;
        if (count..=count + copies_max).contains(&dead) { Ok(()) } else { Err(dead) }
    })
    .await;
}

async fn until_dead_letters_at_most(relay: &RelayFixture, count: u64) {
    eventually_ok(SOON, format!("at most {count} dead letters"), || async {
        let dead = dead_letters(relay).await;
        if dead <= count { Ok(()) } else { Err(dead) }
    })
    .await;
}

async fn dead_letters(relay: &RelayFixture) -> u64 {
    eventually_ok(SOON, "the queue to count its dead letters", || async {
        let (_, health) = relay.get("/health").await;
        health["parts"]["queue"]["dead"].as_u64().ok_or_else(|| health.to_string())
    })
    .await
}
