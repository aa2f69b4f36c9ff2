//! One run of one scenario: its seed, the clients that enrol users meanwhile, and the final comparison of answers and rows.

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

use crate::fixture::{API_KEY, LATER, UsersFixture, user};

/// The seed, unless `SCENARIO_SEED` sets another.
const SEED: u64 = 20_260_731;
/// Users in a scenario, unless `SCENARIO_USERS` sets another number.
const USERS: usize = 5_000;
const CLIENTS: usize = 32;
/// Pause between two requests of a client that repeats until it gets 200.
const REPEAT_AFTER: Duration = Duration::from_millis(50);

/// One run of a scenario.
pub struct Scenario {
    name: &'static str,
    pub seed: u64,
    pub rng: StdRng,
    /// Processes and servers killed with `kill -9`.
    pub kills: usize,
    started: Instant,
}

/// The last answer for each user, by user number.
#[derive(Default, Debug)]
pub struct ClientAnswers {
    pub accepted: BTreeSet<usize>,
    /// 503, not repeated: must not be enrolled.
    pub refused: BTreeSet<usize>,
    /// 504 or no answer, not repeated: may be enrolled, once.
    pub unknown: BTreeSet<usize>,
}

/// Users in a scenario.
pub fn users() -> usize {
    std::env::var("SCENARIO_USERS").map_or(USERS, |text| text.parse().expect("SCENARIO_USERS is a whole number"))
}

impl Scenario {
    /// Prints the seed at once, so that even a run that hangs can be repeated.
    pub fn begin(name: &'static str) -> Self {
        let seed = std::env::var("SCENARIO_SEED").map_or(SEED, |text| text.parse().expect("SCENARIO_SEED is a number"));
        println!("scenario {name} seed {seed} (repeat: SCENARIO_SEED={seed} cargo test -p baton --test users {name})");
        Self { name, seed, rng: StdRng::seed_from_u64(seed), kills: 0, started: Instant::now() }
    }

    /// A random time up to `max`.
    pub fn random_pause(&mut self, max: Duration) -> Duration {
        max.mul_f64(self.rng.random::<f64>())
    }

    /// Kills the process with `kill -9` and restarts it, `times` times, each after a random time: before it is ready, at
    /// work, or idle.
    pub async fn kill_repeatedly(&mut self, process: &mut Process, times: usize, life_max: Duration) {
        for _ in 0..times {
            tokio::time::sleep(self.random_pause(life_max)).await;
            process.restart().await.unwrap();
            self.kills += 1;
        }
    }

    /// Waits until every accepted user is a row and the queue is empty, then compares answers and rows.
    pub async fn end(self, fixture: &UsersFixture, answers: &ClientAnswers) {
        let expected: BTreeSet<Uuid> = answers.accepted.iter().map(|number| id(*number)).collect();
        let rows = eventually(LATER, "every accepted user to be a row", || async {
            let rows = ids(fixture).await;
            if !expected.is_subset(&rows) {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
            expected.is_subset(&rows).then_some(())
        });
        rows.await;
        fixture.until_quiet(LATER).await;
        let rows = ids(fixture).await;
        let (count, distinct, quarantined) = fixture.count().await;
        let (lost, refused) = (expected.difference(&rows).count(), ids_of(&answers.refused));
        let broken = refused.intersection(&rows).count();
        let known: BTreeSet<Uuid> = expected.iter().copied().chain(ids_of(&answers.unknown)).collect();
        let unasked = rows.difference(&known).count();
        println!(
            "SUMMARY scenario={} seed={} accepted={} rows={count} quarantined={quarantined} duplicates={} lost={lost} \
             refused={} refused_but_enrolled={broken} unknown={} unasked={unasked} kills={} seconds={:.1}",
            self.name,
            self.seed,
            answers.accepted.len(),
            count - distinct,
            refused.len(),
            answers.unknown.len(),
            self.kills,
            self.started.elapsed().as_secs_f64(),
        );
        assert_eq!((lost, broken, unasked, quarantined), (0, 0, 0, 0));
        assert_eq!((count, duplicates(fixture).await), (distinct, 0));
    }
}

/// Enrols the users `0..count`, each under its own key. Requests for even numbers are repeated until the answer is 200; those
/// for odd numbers are sent once.
pub async fn enrol_users(fixture: &UsersFixture, count: usize) -> ClientAnswers {
    enrol_users_at(&fixture.base, &fixture.http, count).await
}

pub async fn enrol_users_at(base: &str, http: &reqwest::Client, count: usize) -> ClientAnswers {
    let (next, answers) = (AtomicUsize::new(0), Mutex::new(ClientAnswers::default()));
    let client = || async {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return;
            }
            let status = enrol(base, http, number).await;
            let mut answers = answers.lock().unwrap();
            match status {
                200 => answers.accepted.insert(number),
                503 => answers.refused.insert(number),
                _ => answers.unknown.insert(number),
            };
        }
    };
    futures::future::join_all((0..CLIENTS).map(|_| client())).await;
    answers.into_inner().unwrap()
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
        tokio::time::sleep(REPEAT_AFTER).await;
    }
}

fn key(number: usize) -> String {
    format!("user-{number}")
}

/// The id of a user, which follows from its key.
pub fn id(number: usize) -> Uuid {
    UserId::of_key("default", &key(number)).0
}

fn ids_of(set: &BTreeSet<usize>) -> BTreeSet<Uuid> {
    set.iter().map(|number| id(*number)).collect()
}

/// The ids of all rows.
pub async fn ids(fixture: &UsersFixture) -> BTreeSet<Uuid> {
    let rows: Vec<Uuid> =
        sqlx::query_scalar("SELECT id FROM users").fetch_all(&mut fixture.rows().await).await.unwrap();
    rows.into_iter().collect()
}

/// Rows whose address another row has too; each user has its own address.
async fn duplicates(fixture: &UsersFixture) -> i64 {
    let sql = "SELECT COUNT(*) - COUNT(DISTINCT email) FROM users";
    sqlx::query_scalar(sql).fetch_one(&mut fixture.rows().await).await.unwrap()
}

/// Messages that a consumer's metrics count under this result.
pub async fn settled(fixture: &UsersFixture, consumer: usize, result: &str) -> f64 {
    let base = fixture.consumers[consumer].1.clone();
    fixture.metric(&base, "baton_users_total", &format!("result=\"{result}\"")).await
}

/// The queue as the first consumer's `/health` shows it.
pub async fn queue(fixture: &UsersFixture) -> Value {
    let base = fixture.consumers[0].1.clone();
    fixture.health(&base).await["queue"].clone()
}
