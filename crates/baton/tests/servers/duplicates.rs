//! SQS delivers at least once: every message is there three times, first before anybody has seen it and then while
//! two consumers are at work on it. It acts once.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::time::Duration;

use harness::engine::Engine;
use harness::relayer::{FaultPlan, Faults, PostFault};

use crate::load_client::Client;
use crate::outage::{CROWD, short_clocks, until_queue_empty};
use crate::relay_fixture::LATER;
use crate::scenario::{Story, until_final};
use crate::sqs_queue::SqsQueue;

const EACH: usize = 240;
const COPIES: usize = 2;

#[tokio::test]
async fn duplicates() {
    let mut story = Story::begin("duplicates");
    let mut stand = short_clocks().engine(Engine::MySqlSqs).env("REQUEST_TIMEOUT_MS", "30000").start().await;
    stand.warm_up().await;
    for (number, relayer) in stand.relayers.iter().enumerate() {
        // Some are slow, so that the copy comes while the original is under way.
        let plan = FaultPlan::new(story.seed.wrapping_add(number as u64))
            .with(PostFault::Slow(Duration::from_millis(300)), 0.5)
            .with(PostFault::ErrorAfterStoring, 0.05);
        relayer.set_faults(Faults::planned(plan));
    }
    story.watch(&stand);
    stand.consumers.remove(0).kill9().await.unwrap();
    stand.consumer_bases.clear();
    story.kills = 1;
    let client = Client::of(&stand);
    let queue = SqsQueue::live(&stand);
    let mut promises = client.crowd(CROWD, 0..EACH, story.seed).await;
    let mut seen = HashSet::new();
    let copied = Cell::new(0);
    while seen.len() < EACH {
        for message in queue.receive(5).await {
            if seen.insert(message["MessageId"].as_str().unwrap().to_owned()) && seen.len() <= EACH {
                for _ in 0..COPIES {
                    queue.copy(&message).await;
                    copied.set(copied.get() + 1);
                }
            }
        }
    }
    stand.add_consumer().await;
    stand.add_consumer().await;
    let over = Cell::new(false);
    let sent = async {
        let sent = client.crowd(CROWD, EACH..2 * EACH, story.seed).await;
        over.set(true);
        sent
    };
    // As quick as the consumers: a part of the messages is copied and put back at once.
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
    promises.extend(sent);
    assert_eq!(promises.accepted.len(), 2 * EACH, "nothing stood in the way");
    assert_eq!(until_final(&stand, LATER).await, None);
    until_queue_empty(&stand).await;
    println!("  {} messages were there once more", copied.get());
    let ledger = story.end(&stand, &promises).await;
    assert_eq!((ledger.confirmed, ledger.failed), (2 * EACH, 0));
}
