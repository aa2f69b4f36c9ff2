//! Redis goes and never comes back: everything goes on, and no reader sees an error or a step back.

use harness::engine::Engine;
use harness::servers::{Server, Servers};

use crate::load_client::{Client, Promises};
use crate::outage::{load_during, stand_on};
use crate::relay_fixture::Stand;
use crate::scenario::Story;

#[tokio::test]
async fn redis_gone() {
    let mut story = Story::begin("redis_gone");
    let servers = Servers::of(Engine::MySqlSqs).await;
    let stand = stand_on(&servers).await;
    story.watch(&stand);
    // Some that are in the cache, and some that are not final yet.
    let sent = stand.send_many(crate::relay_fixture::WARM_UP + 1000..crate::relay_fixture::WARM_UP + 1040).await;
    let gone = async |_: &Client| {
        read_all(&stand, &sent).await;
        servers.kill(Server::Redis).await;
        for _ in 0..5 {
            read_all(&stand, &sent).await;
        }
        Promises::default()
    };
    let promises = load_during(&story, &stand, gone).await;
    story.kills = 1;
    assert_eq!((promises.refused.len(), promises.unanswered.len()), (0, 0), "it is a cache, and only that");
    let ledger = story.end(&stand, &promises).await;
    assert_eq!(ledger.failed_promises, 0);
    read_all(&stand, &sent).await;
}

/// Panics unless each is answered with its status.
async fn read_all(stand: &Stand, sent: &[(String, String)]) {
    for (id, _) in sent {
        stand.status(id).await;
    }
}
