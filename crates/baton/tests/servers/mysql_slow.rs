//! The link to MySQL is slow, and finally so slow that some calls time out.

use std::time::Duration;

use harness::engine::TestEngine;
use harness::proxy::Mode;

use crate::load_client::LoadClient;
use crate::outage::{OUTAGE_SERIALS, SINGLE_TRY_LOAD, link_to, load_during, short_timings};
use crate::scenario::Scenario;

#[tokio::test]
async fn mysql_slow() {
    let mut scenario = Scenario::begin("mysql_slow");
    let link = link_to("BATON_TEST_MYSQL_URL").await;
    let relay = short_timings().engine(TestEngine::MySqlSqs).behind("DATABASE_URL", &link).start().await;
    relay.warm_up().await;
    scenario.start_watching(&relay);
    let seed = scenario.seed;
    let slow = async |client: &LoadClient| {
        let mut answers = crate::load_client::ClientAnswers::default();
        for (round, delay_ms) in [20, 80, 250].into_iter().enumerate() {
            link.set(Mode::Delay(Duration::from_millis(delay_ms))).await;
            let first = OUTAGE_SERIALS + round * 36;
            answers.extend(client.send_all(SINGLE_TRY_LOAD, first..first + 36, seed).await);
        }
        link.set(Mode::Forward).await;
        answers
    };
    let answers = load_during(&scenario, &relay, slow).await;
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!(ledger.accepted_and_failed, 0, "a slow store fails no accepted transaction");
}
