//! Each server is frozen with `SIGSTOP` under load: its connections stay open and nothing answers. Every call is answered
//! while it is still frozen; when it goes on, what it does late is harmless.

use std::time::Duration;

use harness::engine::Engine;
use harness::servers::{Server, Servers};

use crate::load_client::{Client, Promises};
use crate::outage::{ONCE, OWN_SERIALS, load_during, stand_on};
use crate::relay_fixture::Stand;
use crate::scenario::Story;

async fn frozen(name: &'static str, engine: Engine, server: Server) {
    let mut story = Story::begin(name);
    let servers = Servers::of(engine).await;
    let stand = stand_on(&servers).await;
    story.watch(&stand);
    let known = stand.send_serial(crate::relay_fixture::WARM_UP + 1000).await;
    let (pause, seed) = (story.moment(Duration::from_millis(1000)), story.seed);
    let freeze = async |client: &Client| {
        tokio::time::sleep(pause).await;
        servers.freeze(server);
        // Whoever still waits for an answer after its own patience, long after the limit of a request, was left hanging.
        let (promises, (), ()) = tokio::join!(
            client.crowd(ONCE, OWN_SERIALS..OWN_SERIALS + 60, seed),
            questions(&stand, &stand.base, &known),
            questions(&stand, &stand.consumer_bases[0], &known),
        );
        servers.thaw(server);
        promises
    };
    let promises: Promises = load_during(&story, &stand, freeze).await;
    let ledger = story.end(&stand, &promises).await;
    assert_eq!(ledger.failed_promises, 0, "an outage is not the work's fault");
}

/// Every question that a process answers.
async fn questions(stand: &Stand, base: &str, known: &str) {
    let unknown = uuid::Uuid::new_v4();
    let asked = [
        "/live".to_owned(),
        "/ready".to_owned(),
        "/health".to_owned(),
        "/metrics".to_owned(),
        "/api/v1/relay/transactions".to_owned(),
        format!("/api/v1/relay/status/{known}"),
        format!("/api/v1/relay/status/{unknown}"),
        format!("/api/v1/relay/transactions/{known}/timeline"),
    ];
    let asked = asked.iter().map(|path| async move {
        let request = stand.http.get(format!("{base}{path}")).header("x-api-key", crate::relay_fixture::API_KEY);
        let answer = request.timeout(crate::relay_fixture::SOON).send().await;
        let status = answer.map(|answer| answer.status().as_u16());
        assert!(matches!(status, Ok(200 | 404 | 503 | 504)), "{base}{path}: {status:?}");
    });
    futures::future::join_all(asked).await;
}

#[tokio::test]
async fn mariadb_frozen() {
    frozen("mariadb_frozen", Engine::MySqlSqs, Server::MariaDb).await;
}

#[tokio::test]
async fn sqs_frozen() {
    frozen("sqs_frozen", Engine::MySqlSqs, Server::Sqs).await;
}

#[tokio::test]
async fn redis_frozen() {
    frozen("redis_frozen", Engine::MySqlSqs, Server::Redis).await;
}

#[tokio::test]
async fn rabbitmq_frozen() {
    frozen("rabbitmq_frozen", Engine::MySqlRabbitMq, Server::RabbitMq).await;
}
