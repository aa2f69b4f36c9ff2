//! Three relayers that really sign and send on a real chain, and mislead in every known way; `baton relay-api` and two
//! consumers in front of them; consumers and relayers killed while it runs, and Baton's own node failing. Afterwards the chain
//! is the judge.
//!
//! `MISLED_TRANSACTIONS=2000 MISLED_SEED=7 cargo test -p baton --test misled -- --nocapture` is the large run; without the
//! two variables it is small, and its seed is always the same. `MISLED_PER_SECOND` (10) is the clients' rate, and `MISLED_RPC=0`
//! takes `RPC_URL` away: the calm run then shows what the chain costs in submissions a second. `scripts/services install` installs the chain, and each run starts one
//! of its own. The seed fixes what is sent, which fault strikes which attempt, and who is killed when; the processes' own
//! interleaving is not fixed.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

mod load;
#[path = "../it/relay_fixture.rs"]
#[expect(dead_code, reason = "the tests of the embedded engine use the rest of it")]
mod relay_fixture;
#[path = "../chain/rpc_proxy.rs"]
#[expect(dead_code, reason = "the chain tests use the rest of it")]
mod rpc_proxy;
mod verdict;
mod ways;
mod weather;
mod world;

use self::world::{Run, World};

/// Everything is on but the fault that Baton cannot prevent: a relayer that executes one POST twice.
#[tokio::test]
async fn nothing_is_done_twice_or_shown_wrongly_with_a_chain() {
    let verdict = World::start(Run::from_env("with a chain")).await.run().await;
    verdict.print();
    assert!(verdict.wrong().is_empty(), "{}", verdict.story());
    assert_eq!(verdict.open.len(), 0, "waiting at the end\n{}", verdict.story());
}

#[tokio::test]
async fn nothing_is_done_twice_without_a_chain() {
    let verdict = World::start(Run { rpc: false, ..Run::from_env("without a chain") }).await.run().await;
    verdict.print();
    assert!(verdict.doubles.is_empty(), "{}", verdict.story());
    assert!(verdict.unmarked_failures().is_empty(), "failed though executed, and not marked\n{}", verdict.story());
}

/// What the chain costs when nothing goes wrong.
#[tokio::test]
async fn a_calm_run_settles_by_webhooks() {
    let verdict = World::start(Run { calm: true, ..Run::from_env("calm") }).await.run().await;
    verdict.print();
    assert!(verdict.wrong().is_empty(), "{}", verdict.story());
    assert_eq!(verdict.open.len(), 0, "{}", verdict.story());
    assert_eq!(verdict.confirmed + verdict.reverted_calls, verdict.accepted, "{}", verdict.story());
}

/// A relayer that executes one POST twice: no client of it can prevent that. Baton raises the alarm when a webhook tells
/// of the second hash. There is none if every such webhook is lost, since Baton asks no more about a final row; nor if the
/// call reverted, because it had no effect.
#[tokio::test]
async fn a_relayer_that_sends_twice_raises_the_alarm() {
    let run = Run { calm: true, sent_twice: true, ..Run::from_env("relayers that send twice") };
    let verdict = World::start(run).await.run().await;
    verdict.print();
    assert!(verdict.by_relayer > 0, "no relayer has sent twice\n{}", verdict.story());
    assert!(verdict.wrong().is_empty(), "{}", verdict.story());
    assert_eq!(verdict.alarms, verdict.by_relayer, "an alarm for each\n{}", verdict.story());
}

/// Shared by all parts: the same numbers from the same seed, whatever the order of the questions.
fn dice(parts: &[u64]) -> rand::rngs::StdRng {
    use rand::SeedableRng;
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    for part in parts {
        seed = (seed ^ part).wrapping_mul(0xbf58_476d_1ce4_e5b9).rotate_left(29);
    }
    rand::rngs::StdRng::seed_from_u64(seed)
}
