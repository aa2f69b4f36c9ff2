//! Redis is killed for good: the relay continues, and no reader sees an error or a status that moves back.

use harness::engine::TestEngine;
use harness::servers::{Server, Servers};

use crate::load_client::{ClientAnswers, LoadClient};
use crate::outage::{load_during, start_on};
use crate::relay_fixture::RelayFixture;
use crate::scenario::Scenario;

#[tokio::test]
async fn redis_gone() {
    let mut scenario = Scenario::begin("redis_gone");
    let servers = Servers::of(TestEngine::MySqlSqs).await;
    let relay = start_on(&servers).await;
    scenario.start_watching(&relay);
    // Some of these are cached, and some are not final yet.
    let sent = relay.send_many(crate::relay_fixture::WARM_UP + 1000..crate::relay_fixture::WARM_UP + 1040).await;
    let gone = async |_: &LoadClient| {
        read_all(&relay, &sent).await;
        servers.kill(Server::Redis).await;
        for _ in 0..5 {
            read_all(&relay, &sent).await;
        }
        ClientAnswers::default()
    };
    let answers = load_during(&scenario, &relay, gone).await;
    scenario.kills = 1;
    assert_eq!((answers.refused.len(), answers.unanswered.len()), (0, 0), "Redis is only a cache");
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!(ledger.accepted_and_failed, 0);
    read_all(&relay, &sent).await;
}

/// Panics unless each is answered with its status.
async fn read_all(relay: &RelayFixture, sent: &[(String, String)]) {
    for (id, _) in sent {
        relay.status(id).await;
    }
}
