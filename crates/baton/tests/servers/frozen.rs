//! Each server is frozen with `SIGSTOP` under load: its connections stay open without answers. The API answers every request
//! during the freeze; the server's late answers afterwards do no harm.

use std::time::Duration;

use harness::engine::TestEngine;
use harness::servers::{Server, Servers};

use crate::load_client::{ClientAnswers, LoadClient};
use crate::outage::{OUTAGE_SERIALS, SINGLE_TRY_LOAD, load_during, start_on};
use crate::relay_fixture::RelayFixture;
use crate::scenario::Scenario;

async fn frozen(name: &'static str, engine: TestEngine, server: Server) {
    let mut scenario = Scenario::begin(name);
    let servers = Servers::of(engine).await;
    let relay = start_on(&servers).await;
    scenario.start_watching(&relay);
    let known = relay.send_serial(crate::relay_fixture::WARM_UP + 1000).await;
    let (pause, seed) = (scenario.random_pause(Duration::from_millis(1000)), scenario.seed);
    let freeze = async |client: &LoadClient| {
        tokio::time::sleep(pause).await;
        servers.freeze(server);
        // The clients' timeout is far longer than the API's request timeout: a client that runs into it was left hanging.
        let (answers, (), ()) = tokio::join!(
            client.send_all(SINGLE_TRY_LOAD, OUTAGE_SERIALS..OUTAGE_SERIALS + 60, seed),
            read_all(&relay, &relay.base, &known),
            read_all(&relay, &relay.consumer_bases[0], &known),
        );
        servers.thaw(server);
        answers
    };
    let answers: ClientAnswers = load_during(&scenario, &relay, freeze).await;
    let ledger = scenario.end(&relay, &answers).await;
    assert_eq!(ledger.accepted_and_failed, 0, "an outage fails no accepted transaction");
}

/// Requests every readable path of a process; each must be answered in time.
async fn read_all(relay: &RelayFixture, base: &str, known: &str) {
    let unknown = uuid::Uuid::new_v4();
    let paths = [
        "/live".to_owned(),
        "/ready".to_owned(),
        "/health".to_owned(),
        "/api/v1/relay/transactions".to_owned(),
        format!("/api/v1/relay/status/{known}"),
        format!("/api/v1/relay/status/{unknown}"),
        format!("/api/v1/relay/transactions/{known}/timeline"),
    ];
    let reads = paths.iter().map(|path| async move {
        let request = relay.http.get(format!("{base}{path}")).header("x-api-key", crate::relay_fixture::API_KEY);
        let response = request.timeout(crate::relay_fixture::SOON).send().await;
        let status = response.map(|response| response.status().as_u16());
        assert!(matches!(status, Ok(200 | 404 | 503 | 504)), "{base}{path}: {status:?}");
    });
    futures::future::join_all(reads).await;
    let metrics = relay.http.get(format!("{}/metrics", harness::admin_url(base))).timeout(crate::relay_fixture::SOON);
    assert_eq!(metrics.send().await.unwrap().status(), 200);
}

#[tokio::test]
async fn mariadb_frozen() {
    frozen("mariadb_frozen", TestEngine::MySqlSqs, Server::MariaDb).await;
}

#[tokio::test]
async fn sqs_frozen() {
    frozen("sqs_frozen", TestEngine::MySqlSqs, Server::Sqs).await;
}

#[tokio::test]
async fn redis_frozen() {
    frozen("redis_frozen", TestEngine::MySqlSqs, Server::Redis).await;
}

#[tokio::test]
async fn rabbitmq_frozen() {
    frozen("rabbitmq_frozen", TestEngine::MySqlRabbitMq, Server::RabbitMq).await;
}
