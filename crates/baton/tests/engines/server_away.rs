//! A queue's server that is away when a process starts: as in `it/server_away.rs`, where the databases are.

use harness::engine::{TestEngine, address, server};
use harness::ports::free_port;
use harness::process::Program;
use harness::proxy::{Mode, Proxy};
use harness::wait::{eventually, eventually_ok};
use tokio::net::TcpStream;

use crate::own_authority::OwnAuthority;
use crate::relay_fixture::{RelaySetup, SOON, baton, serial_body};
use crate::started::Started;
use crate::users_fixture::user;

/// `variable` names the queue's server for Baton, and `address_of` for the tests.
async fn a_process_waits_for_its_queue(engine: TestEngine, variable: &str, address_of: &str) {
    let relay = RelaySetup::relayers(1).engine(TestEngine::Embedded).no_webhooks().start().await;
    let engine = engine.set_up();
    let mut env = relay.env.clone();
    env.extend(engine.vars.clone());
    env.insert("RECONCILE_SUBMITTED_MS".to_owned(), "200".to_owned());
    let link = Proxy::start(address(address_of)).await;
    link.set(Mode::Refuse).await;
    let mut url = reqwest::Url::parse(&env[variable]).unwrap();
    url.set_port(Some(link.port())).unwrap();

    let started = Started::serve(&env, variable, url.as_str()).await;
    let awaited = format!("{variable} ({}://127.0.0.1:{})", url.scheme(), link.port());
    started.until_waiting(&awaited).await;
    assert_waits(&started, &awaited).await;
    let (status, problem) = started.post("/api/v1/relay/direct", &serial_body(1)).await;
    assert_eq!((status, &problem["code"]), (503, &"unavailable".into()), "{problem}");
    started.until_open("users").await;
    assert_eq!(started.post("/api/v1/users", &user(1)).await.0, 200, "the other lane works");

    // A proxy in front of a server that is away takes connections, and drops them.
    link.set(Mode::Cut).await;
    let before = link.connections();
    eventually_ok(SOON, "several attempts", || async {
        let attempts = link.connections() - before;
        // Each attempt also looks whether the server takes connections.
        if attempts >= 6 { Ok(()) } else { Err(format!("{attempts}\n{}", started.process.output())) }
    })
    .await;
    assert_waits(&started, &awaited).await;

    link.set(Mode::Forward).await;
    started.until_ready().await;
    let (status, accepted) = started.post("/api/v1/relay/direct", &serial_body(1)).await;
    assert_eq!(status, 202, "{accepted}");
    started.until_confirmed(accepted["transactionId"].as_str().unwrap()).await;
}

/// The process lives, is not ready, and names the server that it waits for.
async fn assert_waits(started: &Started, server: &str) {
    assert_eq!(started.get("/live").await.0, 200);
    assert_eq!(started.get("/ready").await.0, 503);
    let (status, health) = started.get("/health").await;
    let relay = &health["parts"]["relay"];
    assert_eq!((status, &relay["status"], &relay["waitsFor"]), (503, &"starting".into(), &server.into()), "{health}");
}

#[tokio::test]
async fn a_process_waits_for_rabbitmq_that_is_away_at_its_start() {
    a_process_waits_for_its_queue(TestEngine::MySqlRabbitMq, "RABBITMQ_URL", "BATON_TEST_AMQP_URL").await;
}

#[tokio::test]
async fn a_process_waits_for_sqs_that_is_away_at_its_start() {
    a_process_waits_for_its_queue(TestEngine::MySqlSqs, "SQS_ENDPOINT_URL", "BATON_TEST_SQS_URL").await;
}

/// Starts both lanes with these variables beside those of the engine; they must end the process.
async fn assert_refused(engine: TestEngine, vars: &[(&str, String)], reason: &str) {
    let relay = RelaySetup::relayers(1).engine(TestEngine::Embedded).no_webhooks().start().await;
    let engine = engine.set_up();
    let mut env = relay.env.clone();
    env.extend(engine.vars.clone());
    env.extend(vars.iter().map(|(name, value)| ((*name).to_owned(), value.clone())));
    let mut process = baton(["serve"], &env).env("PORT", free_port().to_string()).start().unwrap();
    let code = process.wait_exit(SOON).await.unwrap().code();
    let output = process.output();
    assert!(code == Some(1) && output.contains(reason) && !output.contains("waiting_for_server"), "{output}");
}

#[tokio::test]
async fn a_broker_that_refuses_the_password_is_an_error_and_not_an_outage() {
    let mut url = reqwest::Url::parse(&server("BATON_TEST_AMQP_URL")).unwrap();
    url.set_password(Some("wrong")).unwrap();
    assert_refused(TestEngine::MySqlRabbitMq, &[("RABBITMQ_URL", url.to_string())], "RABBITMQ_URL").await;
}

#[tokio::test]
async fn a_queue_with_a_certificate_that_is_refused_is_an_error_and_not_an_outage() {
    let (authority, port) = (OwnAuthority::new("IP:127.0.0.1"), free_port());
    let tls =
        Program::new("openssl").args(["s_server", "-www", "-cert", "server.pem", "-key", "server.key", "-accept"]);
    let _tls = tls.arg(port.to_string()).folder(authority.files()).start().unwrap();
    eventually(SOON, "the server to listen", || async { TcpStream::connect(("127.0.0.1", port)).await.ok() }).await;
    let amqps = format!("amqps://guest:guest@127.0.0.1:{port}/%2f");
    let refused = "invalid peer certificate";
    assert_refused(TestEngine::MySqlRabbitMq, &[("RABBITMQ_URL", amqps)], refused).await;
    let https = format!("https://127.0.0.1:{port}");
    let [queue, dead] = ["queue", "queue-dlq"].map(|name| format!("{https}/000000000000/{name}"));
    let sqs = [("SQS_ENDPOINT_URL", https), ("SQS_QUEUE_URL", queue), ("SQS_DLQ_URL", dead)];
    assert_refused(TestEngine::MySqlSqs, &sqs, refused).await;
}
