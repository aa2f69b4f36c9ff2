//! Faults of the items themselves: refused for good, failing three times, reverted on the chain. Each ends with its
//! reason; and when the cause is mended, one replay of the dead letters completes them, also if it is killed half-way.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use harness::engine::Engine;
use harness::relayer::{Outcome, PostFault};
use harness::wait::eventually_ok;

use crate::load_client::{Client, Manners, serial_of_data};
use crate::relay_fixture::{LATER, SOON, Stand, baton};
use crate::scenario::{Story, mortal};

const TRANSACTIONS: usize = 400;

/// What is wrong with a transaction, by its serial number.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Trouble {
    None,
    /// Its call would revert, says the relayer: no second attempt.
    WouldRevert,
    /// The relayer cannot read it: no second attempt.
    BadRequest,
    /// Something of its own that may pass: three attempts.
    Transient,
    /// The chain says no: final, and no dead letter.
    Reverts,
}

fn trouble(serial: usize) -> Trouble {
    [Trouble::None, Trouble::WouldRevert, Trouble::BadRequest, Trouble::Transient, Trouble::Reverts][serial % 5]
}

#[tokio::test]
async fn item_faults() {
    let mut story = Story::begin("item_faults");
    let stand = mortal(2).start().await;
    stand.warm_up().await;
    let attempts: Arc<Mutex<BTreeMap<usize, usize>>> = Arc::default();
    for relayer in &stand.relayers {
        let attempts = Arc::clone(&attempts);
        relayer.set_post_rule(move |request| {
            let serial = serial_of_data(request["data"].as_str()?)?;
            *attempts.lock().unwrap().entry(serial).or_default() += 1;
            match trouble(serial) {
                Trouble::None | Trouble::Reverts => None,
                Trouble::WouldRevert => Some(PostFault::Refused("execution reverted: not the owner".into())),
                Trouble::BadRequest => Some(PostFault::Refused("gas_limit is too low".into())),
                Trouble::Transient => Some(PostFault::Status(409)),
            }
        });
        relayer.set_outcome_rule(|request| {
            let serial = serial_of_data(request["data"].as_str()?)?;
            (trouble(serial) == Trouble::Reverts).then_some(Outcome::Reverted)
        });
    }
    story.watch(&stand);
    let manners = Manners { clients: 8, pause_max: Duration::from_millis(40), insistent: false };
    let promises = Client::of(&stand).crowd(manners, 0..TRANSACTIONS, story.seed).await;
    stand.until_all_final(LATER).await;

    for (id, serial) in &promises.accepted {
        let row = stand.status(id).await;
        let said = row["error_message"].as_str().unwrap_or_default();
        let tried = attempts.lock().unwrap()[serial];
        let (status, reason, times) = match trouble(*serial) {
            Trouble::None => ("confirmed", "", 1),
            Trouble::WouldRevert => ("failed", "not the owner", 1),
            Trouble::BadRequest => ("failed", "gas_limit is too low", 1),
            Trouble::Transient => ("failed", "409", 3),
            Trouble::Reverts => ("failed", "reverted on-chain", 1),
        };
        assert!(row["status"] == status && said.contains(reason) && tried == times, "tried {tried} times: {row}");
    }
    let dead = (TRANSACTIONS / 5 * 3) as u64;
    until_dead(&stand, dead).await;
    let (_, list) = stand.command(["dlq", "list"]).await;
    for (id, _) in promises.accepted.iter().filter(|(_, serial)| is_dead(*serial)) {
        let line = list.lines().find(|line| line.contains(id)).unwrap();
        assert!(["not the owner", "gas_limit", "409"].iter().any(|reason| line.contains(reason)), "{line}");
    }

    // Mended. The operator's replay is killed three times in the middle, and repeated.
    story.look_away().await;
    for relayer in &stand.relayers {
        relayer.set_post_rule(|_| None);
    }
    for share in [4, 2] {
        let mut replay = replay(&stand, "100");
        until_at_most_dead(&stand, dead - dead / share).await;
        let moment = story.moment(Duration::from_millis(30));
        tokio::time::sleep(moment).await;
        replay.kill9().await.unwrap();
        story.kills += 1;
    }
    let mut replays = 0;
    eventually_ok(LATER, "no dead letter to be left", || {
        let mut replay = replay(&stand, "1000");
        replays += 1;
        let stand = &stand;
        async move {
            let exit = replay.wait_exit(LATER).await.unwrap();
            assert_eq!(exit.code(), Some(0), "{}", replay.output());
            if dead_letters(stand).await == 0 { Ok(()) } else { Err(replay.output()) }
        }
    })
    .await;
    // A killed reader hides what it has read from the others for a while, on a queue that cannot be read otherwise.
    assert!(replays == 1 || stand.engine == Engine::MySqlSqs, "one replay takes all of them, not {replays}");
    story.watch(&stand);

    let ledger = story.end(&stand, &promises).await;
    assert_eq!((ledger.confirmed, ledger.failed), (TRANSACTIONS / 5 * 4, TRANSACTIONS / 5));
    until_dead(&stand, 0).await;
}

fn is_dead(serial: usize) -> bool {
    matches!(trouble(serial), Trouble::WouldRevert | Trouble::BadRequest | Trouble::Transient)
}

fn replay(stand: &Stand, rate: &str) -> harness::process::Process {
    baton(["dlq", "replay", "--all", "--rate", rate], &stand.env).start().unwrap()
}

async fn until_dead(stand: &Stand, count: u64) {
    eventually_ok(SOON, format!("{count} dead letters"), || async {
        let dead = dead_letters(stand).await;
        if dead == count { Ok(()) } else { Err(dead) }
    })
    .await;
}

async fn until_at_most_dead(stand: &Stand, count: u64) {
    eventually_ok(SOON, format!("at most {count} dead letters"), || async {
        let dead = dead_letters(stand).await;
        if dead <= count { Ok(()) } else { Err(dead) }
    })
    .await;
}

async fn dead_letters(stand: &Stand) -> u64 {
    eventually_ok(SOON, "the queue to count its dead letters", || async {
        let (_, health) = stand.get("/health").await;
        health["parts"]["queue"]["dead"].as_u64().ok_or_else(|| health.to_string())
    })
    .await
}
