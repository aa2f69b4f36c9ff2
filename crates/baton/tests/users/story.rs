//! One run of one story: its seed, the crowd that enrols users meanwhile, and the ledger that must add up in the end.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use baton::users::user::UserId;
use harness::process::Process;
use harness::wait::eventually;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::Value;
use uuid::Uuid;

use crate::stand::{API_KEY, LATER, Stand, user};

/// The seed of every run that is not told another one.
const SEED: u64 = 20_260_731;
/// How many users a story has, unless `SCENARIO_USERS` says otherwise.
const USERS: usize = 5_000;
const CLIENTS: usize = 32;
/// Between two tries of a client that insists.
const AGAIN_AFTER: Duration = Duration::from_millis(50);

/// A run.
pub struct Story {
    name: &'static str,
    pub seed: u64,
    pub dice: StdRng,
    /// Processes and servers killed with `kill -9`.
    pub kills: usize,
    started: Instant,
}

/// What the clients were told, by the numbers of their users.
#[derive(Default, Debug)]
pub struct Promises {
    pub accepted: BTreeSet<usize>,
    /// 503, and not sent again.
    pub refused: BTreeSet<usize>,
    /// 504 or no answer, and not sent again.
    pub unknown: BTreeSet<usize>,
}

/// How many users a story has.
pub fn users() -> usize {
    std::env::var("SCENARIO_USERS").map_or(USERS, |text| text.parse().expect("SCENARIO_USERS is a whole number"))
}

impl Story {
    /// Prints the seed, so that a run that never ends can be repeated too.
    pub fn begin(name: &'static str) -> Self {
        let seed = std::env::var("SCENARIO_SEED").map_or(SEED, |text| text.parse().expect("SCENARIO_SEED is a number"));
        println!("scenario {name} seed {seed} (repeat: SCENARIO_SEED={seed} cargo test -p baton --test users {name})");
        Self { name, seed, dice: StdRng::seed_from_u64(seed), kills: 0, started: Instant::now() }
    }

    /// A random time up to that long.
    pub fn moment(&mut self, max: Duration) -> Duration {
        max.mul_f64(self.dice.random::<f64>())
    }

    /// `kill -9` and a new life, again and again, each after a random time: before it is ready, at work, or idle.
    pub async fn kill_again_and_again(&mut self, process: &mut Process, times: usize, life_max: Duration) {
        for _ in 0..times {
            tokio::time::sleep(self.moment(life_max)).await;
            process.restart().await.unwrap();
            self.kills += 1;
        }
    }

    /// Waits until everything that was accepted is a row and nothing waits any more, then balances the ledger.
    pub async fn end(self, stand: &Stand, promises: &Promises) {
        let expected: BTreeSet<Uuid> = promises.accepted.iter().map(|number| id(*number)).collect();
        let rows = eventually(LATER, "every accepted user to be a row", || async {
            let rows = ids(stand).await;
            if !expected.is_subset(&rows) {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
            expected.is_subset(&rows).then_some(())
        });
        rows.await;
        stand.until_quiet(LATER).await;
        let rows = ids(stand).await;
        let (count, distinct, quarantined) = stand.count().await;
        let (lost, refused) = (expected.difference(&rows).count(), numbers(&promises.refused));
        let broken = refused.intersection(&rows).count();
        let known: BTreeSet<Uuid> = expected.iter().copied().chain(numbers(&promises.unknown)).collect();
        let unasked = rows.difference(&known).count();
        println!(
            "SUMMARY scenario={} seed={} accepted={} rows={count} quarantined={quarantined} duplicates={} lost={lost} refused={} \
             refused_but_enrolled={broken} unknown={} unasked={unasked} kills={} seconds={:.1}",
            self.name,
            self.seed,
            promises.accepted.len(),
            count - distinct,
            refused.len(),
            promises.unknown.len(),
            self.kills,
            self.started.elapsed().as_secs_f64(),
        );
        assert_eq!((lost, broken, unasked, quarantined), (0, 0, 0, 0));
        assert_eq!((count, twins(stand).await), (distinct, 0));
    }
}

/// Clients that enrol the users `0..count`, each under a key of its own. Those with an even number insist until they are
/// told 200; the others take the first answer for what it says.
pub async fn crowd(stand: &Stand, count: usize) -> Promises {
    crowd_at(&stand.base, &stand.http, count).await
}

pub async fn crowd_at(base: &str, http: &reqwest::Client, count: usize) -> Promises {
    let (next, promises) = (AtomicUsize::new(0), Mutex::new(Promises::default()));
    let client = || async {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return;
            }
            let told = enrol(base, http, number).await;
            let mut promises = promises.lock().unwrap();
            match told {
                200 => promises.accepted.insert(number),
                503 => promises.refused.insert(number),
                _ => promises.unknown.insert(number),
            };
        }
    };
    futures::future::join_all((0..CLIENTS).map(|_| client())).await;
    promises.into_inner().unwrap()
}

async fn enrol(base: &str, http: &reqwest::Client, number: usize) -> u16 {
    let deadline = Instant::now() + LATER;
    loop {
        let request = http.post(format!("{base}/api/v1/users")).header("x-api-key", API_KEY).json(&user(number));
        let answer = request.header("idempotency-key", key(number)).send().await;
        let status = answer.map_or(0, |answer| answer.status().as_u16());
        assert!(matches!(status, 0 | 200 | 503 | 504), "{status} for user {number}");
        if status == 200 || number % 2 == 1 {
            return status;
        }
        assert!(Instant::now() < deadline, "user {number} was not accepted in time");
        tokio::time::sleep(AGAIN_AFTER).await;
    }
}

fn key(number: usize) -> String {
    format!("user-{number}")
}

/// The id of that user: its key decides it.
pub fn id(number: usize) -> Uuid {
    UserId::of_key("default", &key(number)).0
}

fn numbers(set: &BTreeSet<usize>) -> BTreeSet<Uuid> {
    set.iter().map(|number| id(*number)).collect()
}

/// The ids of all rows.
pub async fn ids(stand: &Stand) -> BTreeSet<Uuid> {
    let rows: Vec<Uuid> = sqlx::query_scalar("SELECT id FROM users").fetch_all(&mut stand.rows().await).await.unwrap();
    rows.into_iter().collect()
}

/// How many rows have an address that another has too: each user has one of its own.
async fn twins(stand: &Stand) -> i64 {
    let sql = "SELECT COUNT(*) - COUNT(DISTINCT email) FROM users";
    sqlx::query_scalar(sql).fetch_one(&mut stand.rows().await).await.unwrap()
}

/// The messages that a service says to have settled so.
pub async fn settled(stand: &Stand, consumer: usize, result: &str) -> f64 {
    let base = stand.consumers[consumer].1.clone();
    stand.metric(&base, "baton_users_total", &format!("result=\"{result}\"")).await
}

/// What waits, by the consumer's own account.
pub async fn queue(stand: &Stand) -> Value {
    let base = stand.consumers[0].1.clone();
    stand.health(&base).await["queue"].clone()
}
