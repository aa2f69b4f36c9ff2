//! Messages that were received repeatedly and never settled, until SQS moved them to the dead letter queue. Their rows have
//! attempts left, so the reconciler puts the messages back.

use harness::engine::TestEngine;
use harness::wait::eventually_ok;

use crate::load_client::LoadClient;
use crate::outage::{RETRYING_LOAD, short_timings};
use crate::relay_fixture::LATER;
use crate::scenario::Scenario;
use crate::sqs_queue::SqsQueue;

const TRANSACTIONS: usize = 100;

#[tokio::test]
async fn dead_letters_with_attempts_left() {
    let mut scenario = Scenario::begin("dead_letters_with_attempts_left");
    // The sweep of unclaimed rows is off: only the dead letters can bring the messages back.
    let mut relay = short_timings().engine(TestEngine::MySqlSqs).env("RECONCILE_PENDING_MS", "600000").start().await;
    relay.warm_up().await;
    scenario.start_watching(&relay);
    relay.consumers.remove(0).kill9().await.unwrap();
    relay.consumer_bases.clear();
    scenario.kills = 1;
    let answers = LoadClient::of(&relay).send_all(RETRYING_LOAD, 0..TRANSACTIONS, scenario.seed).await;
    assert_eq!(answers.accepted.len(), TRANSACTIONS);
    let (live, dead) = (SqsQueue::live(&relay), SqsQueue::dead(&relay));
    eventually_ok(LATER, "SQS to bury all messages", || async {
        live.receive(0).await;
        let buried = dead.count().await;
        if buried == TRANSACTIONS { Ok(()) } else { Err(buried) }
    })
    .await;
    relay.add_consumer().await;
    let ledger = scenario.end(&relay, &answers).await;
    let put_back = relay.consumer_metric(0, "baton_reconciler_total", "dead-letter-put-back").await;
    println!("  {put_back} messages were put back");
    assert_eq!((ledger.confirmed, ledger.failed, ledger.dead_letters), (TRANSACTIONS, 0, 0));
    assert!(put_back >= TRANSACTIONS as f64, "{put_back}");
}
