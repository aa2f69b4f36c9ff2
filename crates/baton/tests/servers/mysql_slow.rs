//! The way to MySQL is slow, and then so slow that some calls run into their limits.

use std::time::Duration;

use harness::engine::{Engine, server};
use harness::proxy::{Mode, Proxy};

use crate::load_client::Client;
use crate::outage::{ONCE, OWN_SERIALS, load_during, short_clocks};
use crate::scenario::Story;

#[tokio::test]
async fn mysql_slow() {
    let mut story = Story::begin("mysql_slow");
    let url = reqwest::Url::parse(&server("BATON_TEST_MYSQL_URL")).unwrap();
    let link = Proxy::start(format!("127.0.0.1:{}", url.port().unwrap())).await;
    let stand = short_clocks().engine(Engine::MySqlSqs).behind("DATABASE_URL", &link).start().await;
    stand.warm_up().await;
    story.watch(&stand);
    let seed = story.seed;
    let slow = async |client: &Client| {
        let mut promises = crate::load_client::Promises::default();
        for (round, delay_ms) in [20, 80, 250].into_iter().enumerate() {
            link.set(Mode::Delay(Duration::from_millis(delay_ms))).await;
            let first = OWN_SERIALS + round * 36;
            promises.extend(client.crowd(ONCE, first..first + 36, seed).await);
        }
        link.set(Mode::Forward).await;
        promises
    };
    let promises = load_during(&story, &stand, slow).await;
    let ledger = story.end(&stand, &promises).await;
    assert_eq!(ledger.failed_promises, 0, "slowness is not the work's fault");
}
