//! The API's link to SQS is cut, silent or one-way while clients send: a request with 503 has no effect, a request with 202
//! has one.

use harness::engine::TestEngine;
use harness::proxy::Mode;

use crate::load_client::{ClientAnswers, LoadClient};
use crate::outage::{OUTAGE_SERIALS, SINGLE_TRY_LOAD, link_to, load_during, short_timings};
use crate::scenario::Scenario;

#[tokio::test]
async fn queue_at_accept() {
    let mut scenario = Scenario::begin("queue_at_accept");
    let link = link_to("BATON_TEST_SQS_URL").await;
    let relay = short_timings().engine(TestEngine::MySqlSqs).api_behind("SQS_ENDPOINT_URL", &link).start().await;
    relay.warm_up().await;
    scenario.start_watching(&relay);
    let seed = scenario.seed;
    let down = async |client: &LoadClient| {
        let mut answers = ClientAnswers::default();
        for (round, mode) in [Mode::Refuse, Mode::BlackHole, Mode::Cut, Mode::SwallowAnswers].into_iter().enumerate() {
            link.set(mode).await;
            let first = OUTAGE_SERIALS + round * 36;
            let round_answers = client.send_all(SINGLE_TRY_LOAD, first..first + 36, seed).await;
            println!("  {mode:?}: {} accepted, {} refused", round_answers.accepted.len(), round_answers.refused.len());
            // With lost answers, the queue has the message and a consumer may take it, so 202 is correct.
            assert!(mode == Mode::SwallowAnswers || !round_answers.refused.is_empty());
            answers.extend(round_answers);
            // Closes the open connections, which would stay silent.
            link.set(Mode::Cut).await;
        }
        link.set(Mode::Forward).await;
        answers
    };
    let answers = load_during(&scenario, &relay, down).await;
    assert!(!answers.refused.is_empty());
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!(ledger.accepted_and_failed, 0, "no accepted transaction fails");
}
