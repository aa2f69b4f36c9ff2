//! MySQL becomes read-only under load, as an old primary does after a failover: the API accepts nothing and still answers
//! reads. When MySQL accepts writes again, open transactions continue without having used up an attempt.

use harness::engine::TestEngine;
use harness::servers::Servers;
use sqlx::{Connection, Executor, MySqlConnection};

use crate::load_client::{ClientAnswers, LoadClient};
use crate::outage::{load_during, start_on, until_refused};
use crate::scenario::Scenario;

#[tokio::test]
async fn mysql_read_only() {
    let mut scenario = Scenario::begin("mysql_read_only");
    let servers = Servers::of(TestEngine::MySqlSqs).await;
    let relay = start_on(&servers).await;
    let known = relay.send_serial(crate::relay_fixture::WARM_UP + 1000).await;
    scenario.start_watching(&relay);
    let mut root = MySqlConnection::connect(&servers.address("BATON_TEST_MYSQL_URL")).await.unwrap();
    let read_only = async |client: &LoadClient| {
        until_submitted(client).await;
        for _ in 0..2 {
            root.execute("SET GLOBAL read_only = 1").await.unwrap();
            until_refused(client, 60).await;
            relay.status(&known).await;
            assert!(client.page(None).await.is_some(), "the list can be read");
            root.execute("SET GLOBAL read_only = 0").await.unwrap();
            until_submitted(client).await;
        }
        ClientAnswers::default()
    };
    let answers = load_during(&scenario, &relay, read_only).await;
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!(ledger.accepted_and_failed, 0, "an outage fails no accepted transaction");
}

/// Waits until a transaction is submitted: the load gets through.
async fn until_submitted(client: &LoadClient) {
    harness::wait::eventually(crate::relay_fixture::SOON, "submitted rows", || async {
        let (_, page) = client.get("/api/v1/relay/transactions?status=submitted").await?;
        page["transactions"].as_array().is_some_and(|rows| !rows.is_empty()).then_some(())
    })
    .await;
}
