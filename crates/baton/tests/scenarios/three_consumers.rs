//! Three consumers share one queue and die in turn: each one's work is taken over by the others.

use std::time::Duration;

use crate::load_client::{Client, Manners};
use crate::scenario::{Story, a_tenth_unknown, mortal};

const ROUNDS: usize = 7;

#[tokio::test]
async fn three_consumers() {
    let mut story = Story::begin("three_consumers");
    let mut stand = mortal(3).start().await;
    stand.add_consumer().await;
    stand.add_consumer().await;
    stand.warm_up().await;
    a_tenth_unknown(&stand, story.seed);
    story.watch(&stand);
    let manners = Manners { clients: 16, pause_max: Duration::from_millis(120), insistent: false };
    let client = Client::of(&stand);
    let seed = story.seed;
    let kill = async {
        for _ in 0..ROUNDS {
            for consumer in &mut stand.consumers {
                story.kill_again_and_again(consumer, 1, Duration::from_millis(600)).await;
            }
        }
    };
    let (promises, ()) = tokio::join!(client.crowd(manners, 0..1500, seed), kill);
    assert_eq!(promises.accepted.len(), 1500, "the API was there all the time");
    let ledger = story.end(&stand, &promises).await;
    assert_eq!((ledger.confirmed, ledger.failed), (1500, 0));
}
