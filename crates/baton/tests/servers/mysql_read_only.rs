//! MySQL becomes read-only under load, as the old primary does after a failover: nothing is accepted, everything can be
//! read, and when it takes writes again what was under way goes on without a used-up attempt.

use harness::engine::Engine;
use harness::servers::Servers;
use sqlx::{Connection, Executor, MySqlConnection};

use crate::load_client::{Client, Promises};
use crate::outage::{load_during, stand_on, until_refused};
use crate::scenario::Story;

#[tokio::test]
async fn mysql_read_only() {
    let mut story = Story::begin("mysql_read_only");
    let servers = Servers::of(Engine::MySqlSqs).await;
    let stand = stand_on(&servers).await;
    let known = stand.send_serial(crate::relay_fixture::WARM_UP + 1000).await;
    story.watch(&stand);
    let mut root = MySqlConnection::connect(&servers.address("BATON_TEST_MYSQL_URL")).await.unwrap();
    let read_only = async |client: &Client| {
        until_some_are_sent(client).await;
        for _ in 0..2 {
            root.execute("SET GLOBAL read_only = 1").await.unwrap();
            until_refused(client, 60).await;
            stand.status(&known).await;
            assert!(client.page(None).await.is_some(), "the list can be read");
            root.execute("SET GLOBAL read_only = 0").await.unwrap();
            until_some_are_sent(client).await;
        }
        Promises::default()
    };
    let promises = load_during(&story, &stand, read_only).await;
    let ledger = story.end(&stand, &promises).await;
    assert_eq!(ledger.failed_promises, 0, "an outage is not the work's fault");
}

/// A request that is accepted: there is load, and it gets through.
async fn until_some_are_sent(client: &Client) {
    harness::wait::eventually(crate::relay_fixture::SOON, "submitted rows", || async {
        let (_, page) = client.get("/api/v1/relay/transactions?status=submitted").await?;
        page["transactions"].as_array().is_some_and(|rows| !rows.is_empty()).then_some(())
    })
    .await;
}
