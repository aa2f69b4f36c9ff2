//! MySQL has no connections left: others have taken them all, and ours were closed. Nothing is accepted meanwhile, and
//! when there is room again the pools find their way back by themselves.

use harness::engine::Engine;
use harness::servers::Servers;
use sqlx::{AssertSqlSafe, Connection, Executor, MySqlConnection};

use crate::load_client::{Client, Promises};
use crate::outage::{load_during, stand_on, until_refused};
use crate::scenario::Story;

/// The least that the server can be told.
const CONNECTIONS_MAX: usize = 10;

#[tokio::test]
async fn mysql_full() {
    let mut story = Story::begin("mysql_full");
    let servers = Servers::of(Engine::MySqlSqs).await;
    let stand = stand_on(&servers).await;
    story.watch(&stand);
    let mut root = MySqlConnection::connect(&servers.address("BATON_TEST_MYSQL_URL")).await.unwrap();
    let full = async |client: &Client| {
        let mut others = Vec::new();
        for _ in 0..CONNECTIONS_MAX {
            others.push(MySqlConnection::connect(&stand.env["DATABASE_URL"]).await.unwrap());
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
                // It may have gone by itself.
                let _ = root.execute(AssertSqlSafe(format!("KILL {id}"))).await;
            }
        }
        until_refused(client, 100).await;
        drop(others);
        root.execute("SET GLOBAL max_connections = 200").await.unwrap();
        Promises::default()
    };
    let promises = load_during(&story, &stand, full).await;
    let ledger = story.end(&stand, &promises).await;
    assert_eq!(ledger.failed_promises, 0, "an outage is not the work's fault");
}
