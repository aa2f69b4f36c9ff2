//! Messages that were handed out again and again to somebody who never said a word about them, until SQS buried them by
//! itself. Their rows have attempts left: they are put back, and done.

use harness::engine::Engine;
use harness::wait::eventually_ok;

use crate::load_client::Client;
use crate::outage::{CROWD, consumer_metric, short_clocks};
use crate::relay_fixture::LATER;
use crate::scenario::Story;
use crate::sqs_queue::SqsQueue;

const TRANSACTIONS: usize = 200;

#[tokio::test]
async fn dead_letters_with_attempts_left() {
    let mut story = Story::begin("dead_letters_with_attempts_left");
    // Only the dead letters bring them back.
    let mut stand = short_clocks().engine(Engine::MySqlSqs).env("RECONCILE_PENDING_MS", "600000").start().await;
    stand.warm_up().await;
    story.watch(&stand);
    stand.consumers.remove(0).kill9().await.unwrap();
    stand.consumer_bases.clear();
    story.kills = 1;
    let promises = Client::of(&stand).crowd(CROWD, 0..TRANSACTIONS, story.seed).await;
    assert_eq!(promises.accepted.len(), TRANSACTIONS);
    let (live, dead) = (SqsQueue::live(&stand), SqsQueue::dead(&stand));
    eventually_ok(LATER, "SQS to bury them all", || async {
        live.receive(0).await;
        let buried = dead.count().await;
        if buried == TRANSACTIONS { Ok(()) } else { Err(buried) }
    })
    .await;
    stand.add_consumer().await;
    let ledger = story.end(&stand, &promises).await;
    let put_back = consumer_metric(&stand, 0, "baton_reconciler_total", "dead-letter-put-back").await;
    println!("  {put_back} were put back");
    assert_eq!((ledger.confirmed, ledger.failed, ledger.dead_letters), (TRANSACTIONS, 0, 0));
    assert!(put_back >= TRANSACTIONS as f64, "{put_back}");
}
