//! The API's way to SQS is cut, silent or one-way while clients send. Whoever is told 503 was told the truth; whoever is
//! told 202, too.

use harness::engine::{Engine, server};
use harness::proxy::{Mode, Proxy};

use crate::load_client::{Client, Promises};
use crate::outage::{ONCE, OWN_SERIALS, load_during, short_clocks};
use crate::scenario::Story;

#[tokio::test]
async fn queue_at_accept() {
    let mut story = Story::begin("queue_at_accept");
    let url = reqwest::Url::parse(&server("BATON_TEST_SQS_URL")).unwrap();
    let link = Proxy::start(format!("127.0.0.1:{}", url.port().unwrap())).await;
    let stand = short_clocks().engine(Engine::MySqlSqs).api_behind("SQS_ENDPOINT_URL", &link).start().await;
    stand.warm_up().await;
    story.watch(&stand);
    let seed = story.seed;
    let down = async |client: &Client| {
        let mut promises = Promises::default();
        for (round, mode) in [Mode::Refuse, Mode::BlackHole, Mode::Cut, Mode::SwallowAnswers].into_iter().enumerate() {
            link.set(mode).await;
            let first = OWN_SERIALS + round * 36;
            let told = client.crowd(ONCE, first..first + 36, seed).await;
            println!("  {mode:?}: {} accepted, {} refused", told.accepted.len(), told.refused.len());
            // Not while the answers are lost: then the message is there, and a consumer has it.
            assert!(mode == Mode::SwallowAnswers || !told.refused.is_empty());
            promises.extend(told);
            // What is under way ends here: it would stay silent.
            link.set(Mode::Cut).await;
        }
        link.set(Mode::Forward).await;
        promises
    };
    let promises = load_during(&story, &stand, down).await;
    assert!(!promises.refused.is_empty());
    let ledger = story.end(&stand, &promises).await;
    assert_eq!(ledger.failed_promises, 0, "what was accepted is done");
}
