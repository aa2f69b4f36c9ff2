//! SQS delivers at least once: each message is copied, first before a consumer runs and then while two consumers handle it.
//! It has one effect.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::time::Duration;

use harness::engine::TestEngine;
use harness::relayer::PostFault;

use crate::load_client::LoadClient;
use crate::outage::{RETRYING_LOAD, short_timings, until_queue_empty};
use crate::relay_fixture::LATER;
use crate::scenario::{Scenario, inject_faults, until_final};
use crate::sqs_queue::SqsQueue;

const EACH: usize = 120;
const COPIES: usize = 2;

#[tokio::test]
async fn duplicates() {
    let mut scenario = Scenario::begin("duplicates");
    let mut relay = short_timings().engine(TestEngine::MySqlSqs).env("REQUEST_TIMEOUT_MS", "30000").start().await;
    relay.warm_up().await;
    // Slow answers: the copy arrives while the original is being handled.
    inject_faults(&relay, scenario.seed, |plan| {
        plan.with(PostFault::Slow(Duration::from_millis(300)), 0.5).with(PostFault::ErrorAfterStoring, 0.05)
    });
    scenario.start_watching(&relay);
    relay.consumers.remove(0).kill9().await.unwrap();
    relay.consumer_bases.clear();
    scenario.kills = 1;
    let client = LoadClient::of(&relay);
    let queue = SqsQueue::live(&relay);
    let mut answers = client.send_all(RETRYING_LOAD, 0..EACH, scenario.seed).await;
    let mut received = HashSet::new();
    let copied = Cell::new(0);
    while received.len() < EACH {
        for message in queue.receive(5).await {
            if received.insert(message["MessageId"].as_str().unwrap().to_owned()) && received.len() <= EACH {
                for _ in 0..COPIES {
                    queue.copy(&message).await;
                    copied.set(copied.get() + 1);
                }
            }
        }
    }
    relay.add_consumer().await;
    relay.add_consumer().await;
    let over = Cell::new(false);
    let sent = async {
        let sent = client.send_all(RETRYING_LOAD, EACH..2 * EACH, scenario.seed).await;
        over.set(true);
        sent
    };
    // Competes with the consumers: some messages are copied and returned immediately.
    let known = RefCell::new(HashSet::new());
    let copying = async {
        while !over.get() {
            for message in queue.receive(0).await {
                if known.borrow_mut().insert(message["Body"].as_str().unwrap().to_owned()) {
                    queue.copy(&message).await;
                    copied.set(copied.get() + 1);
                }
            }
        }
    };
    let (sent, ()) = tokio::join!(sent, copying);
    answers.extend(sent);
    assert_eq!(answers.accepted.len(), 2 * EACH, "nothing disturbs the API here");
    assert_eq!(until_final(&relay, LATER).await, None);
    until_queue_empty(&relay).await;
    println!("  {} messages were copied", copied.get());
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!((ledger.confirmed, ledger.failed), (2 * EACH, 0));
}
