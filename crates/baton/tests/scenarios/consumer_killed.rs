//! The consumer dies again and again while sixteen clients send and a tenth of the submissions get no clear answer.

use std::time::Duration;

use crate::load_client::{Client, Manners};
use crate::scenario::{Story, a_tenth_unknown, mortal};

const KILLS: usize = 25;

#[tokio::test]
async fn consumer_killed() {
    let mut story = Story::begin("consumer_killed");
    let mut stand = mortal(3).start().await;
    stand.warm_up().await;
    a_tenth_unknown(&stand, story.seed);
    story.watch(&stand);
    let mut consumer = stand.consumers.remove(0);
    let manners = Manners { clients: 16, pause_max: Duration::from_millis(100), insistent: false };
    let client = Client::of(&stand);
    let seed = story.seed;
    let (promises, ()) = tokio::join!(
        client.crowd(manners, 0..2000, seed),
        story.kill_again_and_again(&mut consumer, KILLS, Duration::from_millis(700)),
    );
    assert_eq!(promises.accepted.len(), 2000, "the API was there all the time: {:?}", promises.silences);
    stand.consumers.push(consumer);
    let ledger = story.end(&stand, &promises).await;
    assert_eq!((ledger.confirmed, ledger.failed), (2000, 0));
    assert!(ledger.unknown > 100, "a tenth was to be unknown, {} were", ledger.unknown);
}
