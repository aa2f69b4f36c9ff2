//! MySQL has no connections left: other clients hold them all, and Baton's are closed. The API accepts nothing meanwhile;
//! afterwards the pools reconnect without a restart.

use harness::engine::TestEngine;
use harness::servers::Servers;
use sqlx::{AssertSqlSafe, Connection, Executor, MySqlConnection};

use crate::load_client::{ClientAnswers, LoadClient};
use crate::outage::{load_during, start_on, until_refused};
use crate::scenario::Scenario;

/// The minimum that the server allows.
const CONNECTIONS_MAX: usize = 10;

#[tokio::test]
async fn mysql_full() {
    let mut scenario = Scenario::begin("mysql_full");
    let servers = Servers::of(TestEngine::MySqlSqs).await;
    let relay = start_on(&servers).await;
    scenario.start_watching(&relay);
    let mut root = MySqlConnection::connect(&servers.address("BATON_TEST_MYSQL_URL")).await.unwrap();
    let full = async |client: &LoadClient| {
        let mut others = Vec::new();
        for _ in 0..CONNECTIONS_MAX {
            others.push(MySqlConnection::connect(&relay.env["DATABASE_URL"]).await.unwrap());
        }
        let mut theirs = Vec::new();
        for connection in &mut others {
            theirs.push(sqlx::query_scalar::<_, u64>("SELECT CONNECTION_ID()").fetch_one(connection).await.unwrap());
        }
        let limit = format!("SET GLOBAL max_connections = {CONNECTIONS_MAX}");
        root.execute(AssertSqlSafe(limit)).await.unwrap();
        let all = sqlx::query_scalar::<_, i64>("SELECT id FROM information_schema.processlist WHERE user = 'baton'");
        for id in all.fetch_all(&mut root).await.unwrap() {
            if !theirs.contains(&u64::try_from(id).unwrap()) {
                // It may have closed already.
                let _ = root.execute(AssertSqlSafe(format!("KILL {id}"))).await;
            }
        }
        until_refused(client, 100).await;
        drop(others);
        root.execute("SET GLOBAL max_connections = 200").await.unwrap();
        ClientAnswers::default()
    };
    let answers = load_during(&scenario, &relay, full).await;
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!(ledger.accepted_and_failed, 0, "an outage fails no accepted transaction");
}
